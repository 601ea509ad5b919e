"""From the report of a run to what is simulated: how long its batches took, and a tree that behaves like its own.

A batch takes `base + each * domains` seconds times a factor, fitted to every batch that the run recorded. The tree is
fitted by simulating the run itself: its size so that as many domains are bounded, its skew so that as many are open at
once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from parverify.budget import BATCH_MOST
from parverify.errors import UsageError
from parverify.report.schema import IDLE, RankReport, check
from parverify.simulate.events import simulate
from parverify.simulate.model import Batches, Machine, Scenario
from parverify.simulate.tree import Shape

START = {"input": 64, "activation": 16}  # domains of the first batch, as in the verifier
FACTORS = 512  # kept
FITTED = 50_000  # nodes of the tree to which the skew is fitted; larger ones are as skewed
SKEWS = (0.01, 0.5)
STEPS = 7  # of bisection


@dataclass(frozen=True)
class Measured:
    """A search that was run.

    Args:
        bounded: domains.
        largest: most domains that were open at once.
        ranks: how many searched.
        batches: their times.
        before: seconds of the run outside of the search.
        domain_bytes: of a domain on its way between ranks; 0 where none was sent.
        decided: whether the search came to its end.
    """

    bounded: int
    largest: int
    ranks: int
    batches: Batches
    before: float
    domain_bytes: float = 0.0
    decided: bool = True


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
        largest=_largest(searching),
        ranks=len(run.ranks),
        batches=batches,
        before=max(0.0, first) + max(0.0, run.seconds - last),
        domain_bytes=size / sent if sent else 0.0,
        decided=decided,
    )


def fit_times(ranks: list[RankReport]) -> tuple[float, float, tuple[float, ...]]:
    """Seconds of a batch, of each domain in it, and the factors of single batches."""
    pairs = np.array([pair for rank in ranks for pair in _pairs(rank)]).reshape(-1, 2)
    if len(pairs) < 2:
        return 0.0, _mean_time(ranks), (1.0,)
    sizes, seconds = pairs.T
    return fit_line(sizes, seconds)


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
    batches = [sample for sample in rank.samples if sample.phase != IDLE]
    if len(batches) != len(rank.batch_sizes):
        return []  # thinned
    sizes = iter(rank.batch_sizes)
    found = []
    next(sizes)
    for before, after in itertools.pairwise(rank.samples):
        if after.phase == IDLE:
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


def _largest(ranks: list[RankReport]) -> int:
    """Most domains that were open on all ranks together."""
    events = sorted((sample.t, number, sample.open) for number, rank in enumerate(ranks) for sample in rank.samples)
    now = [0] * len(ranks)
    found = 1
    for _, number, count in events:
        now[number] = count
        found = max(found, sum(now))
    return found


def fit(measured: Measured, *, domains: int | None = None, wide: bool = True, seed: int = 0) -> Scenario:
    """A scenario whose simulation on the measured ranks bounds as many domains, with as many open at once.

    Args:
        measured: the run.
        domains: bounded in all instead of the measured number; the tree keeps its skew.
        wide: see `Shape`.
        seed: of the tree.
    """
    scale = min(1.0, FITTED / measured.bounded)
    nodes, largest = max(2, round(scale * measured.bounded)), scale * measured.largest
    machine = Machine(measured.ranks)
    size = measured.domain_bytes or Scenario.domain_bytes

    def scenario(nodes: int, skew: float) -> Scenario:
        return Scenario(Shape(nodes, skew, wide, seed), measured.batches, measured.before, size)

    low, high = SKEWS
    for _ in range(STEPS):
        middle = math.sqrt(low * high)
        if simulate(scenario(nodes, middle), machine).largest < largest:
            low = middle
        else:
            high = middle
    skew = math.sqrt(low * high)
    ratio = 1.0
    for _ in range(3):  # domains that are bounded in vain, or never on their own, change the count
        ratio *= nodes / max(1, simulate(scenario(max(2, round(ratio * nodes)), skew), machine).bounded)
    wanted = measured.bounded if domains is None else domains
    found = scenario(max(2, round(ratio * wanted)), skew)
    return replace(found, tree=replace(found.tree, nodes=found.tree.root))
