"""From the report of a run to what is simulated: how long its batches took, and a tree that behaves like its own.

A batch takes `base + each * domains` seconds times a factor, fitted to every batch that the run recorded. The tree is
fitted by simulating the run itself: its size so that as many domains are bounded, its skew so that as many are open all
the time.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from parverify.budget import BATCH_MOST
from parverify.errors import UsageError
from parverify.report.schema import IDLE, SEARCH, RankReport, check
from parverify.simulate.events import Simulation, simulate
from parverify.simulate.model import Batches, Forecast, Machine, Scenario
from parverify.simulate.tree import Shape

START = {"input": 64, "activation": 16}  # domains of the first batch, as in the verifier
FACTORS = 512  # kept
FITTED = 20_000  # nodes of the trees that are tried; larger ones are of the same shape
SKEWS = (0.02, 0.04, 0.07, 0.1, 0.14, 0.2, 0.25, 0.3, 0.4, 0.5)
SEEDS, TRIES = 3, 3
MEMBERS = 7  # scenarios that are simulated where they are small
DOMAINS_IN_ALL = 200_000  # over all of them
POINTS = 50
BOUNDED_WEIGHT = 5.0


@dataclass(frozen=True)
class Measured:
    """A search that was run.

    Args:
        bounded: domains.
        curve: domains that were open over the share that was closed, see `curve`.
        ranks: how many searched.
        batches: their times.
        before: seconds of the run outside of the search.
        domain_bytes: of a domain on its way between ranks; 0 where none was sent.
        decided: whether the search came to its end.
    """

    bounded: int
    curve: tuple[float, ...]
    ranks: int
    batches: Batches
    before: float
    domain_bytes: float = 0.0
    decided: bool = True

    @property
    def largest(self) -> float:
        """About the most domains that were open at once."""
        return max(self.curve, default=0.0)


def read_measured(content: Mapping[str, Any], name: str) -> Measured:
    """What the report of a run (`parverify run --json`) says.

    Args:
        content: of the file.
        name: for messages.

    Raises:
        UsageError: it is no such report, or there was no search in that run.
    """
    run = check(content, name)
    stats, settings = content["stats"] or {}, content.get("settings") or {}
    searching = [rank for rank in run.ranks if rank.batch_sizes and rank.samples]
    if not searching:
        raise UsageError(f"{name}: there was no branch and bound in that run", "measure a run that had to search")
    fixed = int((settings.get("branching") or {}).get("batch") or 0)
    sizes = list(itertools.chain.from_iterable(rank.batch_sizes for rank in searching))
    start = fixed or START.get(str(stats.get("branching")), min(START.values()))
    base, each, factors = fit_times(searching)
    largest_batch = min(BATCH_MOST, max(start, *sizes))
    batches = Batches(base, each, factors, start, largest_batch, fixed=bool(fixed))
    first = min(rank.samples[0].t - (base + each * rank.batch_sizes[0]) for rank in searching)
    last = max(rank.samples[-1].t for rank in run.ranks if rank.samples)
    sent, size = sum(rank.sent for rank in run.ranks), sum(rank.bytes for rank in run.ranks)
    left = sum(rank.samples[-1].open for rank in searching)
    decided = run.verdict == "unsat"
    return Measured(
        bounded=sum(rank.bounded for rank in run.ranks) + (0 if decided else left),
        curve=curve(_trace(searching)),
        ranks=len(run.ranks),
        batches=batches,
        before=max(0.0, first) + max(0.0, run.seconds - last),
        domain_bytes=size / sent if sent else 0.0,
        decided=decided,
    )


def fit_times(ranks: list[RankReport]) -> tuple[float, float, tuple[float, ...]]:
    """Seconds of a batch, of each domain in it, and the factors of single batches; with what other stages took."""
    pairs = np.array([pair for rank in ranks for pair in _pairs(rank)]).reshape(-1, 2)
    if len(pairs) < 2:
        return 0.0, _mean_time(ranks), (1.0,)
    sizes, seconds = pairs.T
    base, each, factors = fit_line(sizes, seconds)
    stages = [(name, work.seconds) for rank in ranks for name, work in rank.stages.items()]
    search = sum(spent for name, spent in stages if name == SEARCH)
    more = sum(spent for _, spent in stages) / search if search > 0 else 1.0
    return more * base, more * each, factors


def fit_line(sizes: np.ndarray, seconds: np.ndarray) -> tuple[float, float, tuple[float, ...]]:
    """The same from sizes and seconds of batches, (N,) each; neither part is negative."""
    rows = np.stack([np.ones(len(sizes)), sizes], axis=1)
    base, each = np.linalg.lstsq(rows, seconds, rcond=None)[0]
    if base < 0 or len(set(sizes.tolist())) == 1:
        base, each = 0.0, seconds.sum() / sizes.sum()
    elif each < 0:
        base, each = seconds.mean(), 0.0
    factors = seconds / (base + each * sizes)
    factors = factors[:: max(1, len(factors) // FACTORS)]
    factors = factors * (seconds.mean() / np.mean(base + each * sizes)) / factors.mean()
    return float(base), float(each), tuple(float(factor) for factor in factors)


def _pairs(rank: RankReport) -> list[tuple[float, float]]:
    """(domains, seconds) of the batches that followed another one, where the record holds every batch."""
    batches = [sample for sample in rank.samples if sample.phase == SEARCH]
    if len(batches) != len(rank.batch_sizes):
        return []  # thinned
    sizes = iter(rank.batch_sizes)
    found = []
    next(sizes)
    for before, after in itertools.pairwise(rank.samples):
        if after.phase != SEARCH:
            continue
        if after is batches[0]:
            continue
        size = next(sizes)
        if before.phase != IDLE and after.t > before.t:
            found.append((float(size), after.t - before.t))
    return found


def _mean_time(ranks: list[RankReport]) -> float:
    """Seconds of a domain, on the average."""
    busy = sum(max(0.0, rank.samples[-1].t - rank.samples[0].t - rank.idle_seconds) for rank in ranks)
    return busy / max(1, sum(rank.bounded for rank in ranks))


def _trace(ranks: list[RankReport]) -> list[tuple[int, int]]:
    """(closed, open) on all ranks together after each sample."""
    samples = sorted(((sample.t, number, sample) for number, rank in enumerate(ranks) for sample in rank.samples),
                     key=lambda one: one[:2])  # fmt: skip
    now = [(0, 0)] * len(ranks)
    found = []
    for _, number, sample in samples:
        now[number] = sample.closed, sample.open
        found.append((sum(one[0] for one in now), sum(one[1] for one in now)))
    return found


def fit(measured: Measured, *, domains: int | None = None, wide: bool = True) -> list[Scenario]:
    """Scenarios whose simulation on the measured ranks bounds as many domains, with as many open at each time.

    Args:
        measured: the run.
        domains: bounded in all instead of the measured number; the trees keep their shape.
        wide: see `Shape`.

    Returns:
        The best ones, fewer where the tree is large: where chance matters little, and a simulation takes long.
    """
    scale = min(1.0, FITTED / measured.bounded)
    aim = Aim(max(2, round(scale * measured.bounded)), tuple(scale * count for count in measured.curve))
    size = measured.domain_bytes or Scenario.domain_bytes
    machine = Machine(measured.ranks)
    wanted = measured.bounded if domains is None else domains

    def scenario(shape: Shape) -> Scenario:
        return Scenario(shape, measured.batches, measured.before, size)

    found: list[tuple[float, Shape]] = []
    for skew, heaviest, seed in itertools.product(SKEWS, (True, False), range(SEEDS)):
        ratio, tries = 1.0, []
        for _ in range(TRIES):  # domains that are bounded in vain, or never on their own, change the count
            shape = Shape(max(2, round(ratio * aim.bounded)), skew, wide, heaviest, seed)
            simulation = Simulation(scenario(shape), machine)
            bounded = simulation.run().bounded
            tries.append((aim.miss(bounded, curve(simulation.trace)), shape))
            ratio *= aim.bounded / max(1, bounded)
        found.append(min(tries, key=lambda one: one[0]))
    found.sort(key=lambda one: one[0])
    members = max(1, min(MEMBERS, DOMAINS_IN_ALL // wanted))
    grown = wanted / aim.bounded
    return [scenario(replace(shape, nodes=round(grown * shape.nodes))) for _, shape in found[:members]]


def forecast(scenarios: Sequence[Scenario], machine: Machine) -> Forecast:
    """The simulation that takes the median time; of two in the middle the shorter one."""
    found = sorted((simulate(scenario, machine) for scenario in scenarios), key=lambda one: one.search)
    return found[(len(found) - 1) // 2]


@dataclass(frozen=True)
class Aim:
    """What a simulation should come to.

    Args:
        bounded: domains.
        curve: see `curve`.
    """

    bounded: int
    curve: tuple[float, ...]

    def miss(self, bounded: int, curve: Sequence[float]) -> float:
        """How far a simulation is from it; the number of domains counts most, as it is what takes time."""
        off = float(np.abs(np.array(curve) - np.array(self.curve)).mean()) / max(1.0, *self.curve)
        return off + BOUNDED_WEIGHT * abs(bounded / self.bounded - 1)


def curve(trace: Sequence[tuple[int, int]]) -> tuple[float, ...]:
    """How many domains were open when certain shares of all had been closed, from (closed, open) in time's order."""
    closed, count = np.array(trace, dtype=np.float64).reshape(-1, 2).T
    if not len(closed):
        return (0.0,) * POINTS
    shares = (np.arange(POINTS) + 0.5) / POINTS * max(1.0, closed[-1])
    return tuple(float(value) for value in np.interp(shares, closed, count))
