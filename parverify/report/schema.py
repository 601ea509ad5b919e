"""What a run says of its ranks: `stats.ranks` in the JSON of `parverify run`, how it is recorded and checked.

    ranks: [{rank, bounded, received, sent, idle_seconds, batch_sizes: [..], bytes,
             samples: [{t, open, closed, worst, depth, memory, phase}, ..],
             stages: {stage: {domains, seconds}, ..}}, ..]

Times are seconds since the start of the run, memory and bytes are bytes. The same dataclasses write and read; the names
of their fields are the keys. Importing this module loads nothing but the standard library.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from parverify.errors import UsageError

IDLE = "idle"  # the phase of a rank that waits for domains
SEARCH = "search"  # of one that splits and bounds a batch
_HINT = "give files that `parverify run --json` wrote"


@dataclass(frozen=True)
class Sample:
    """A rank after a batch, or after it waited.

    Args:
        t: seconds since the start.
        open: domains that are open here.
        closed: domains closed here so far.
        worst: the lowest bound of the open ones; infinite where there is none.
        depth: halvings of the deepest domain in the batch.
        memory: resident bytes of the process, or of the device.
        phase: what the rank did since the sample before: a stage, or `idle` where it waited.
    """

    t: float
    open: int
    closed: int
    worst: float
    depth: int
    memory: int
    phase: str


@dataclass(frozen=True)
class Work:
    """What one stage of a search did on one rank.

    Args:
        domains: it worked on.
        seconds: that it took.
    """

    domains: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class RankReport:
    """One rank of a run.

    Args:
        rank: its number.
        bounded, received, sent: domains.
        idle_seconds: time in which it waited for domains.
        batch_sizes: domains in each batch, or in a thinned choice of them.
        bytes: what it sent to other ranks.
        samples: in the order of time.
        stages: of its searches (`search`, `leaf`, `attack`), and what each did.
    """

    rank: int
    bounded: int
    received: int
    sent: int
    idle_seconds: float
    batch_sizes: tuple[int, ...]
    bytes: int
    samples: tuple[Sample, ...]
    stages: Mapping[str, Work] = field(default_factory=dict)

    def encode(self) -> dict[str, Any]:
        """As the JSON file holds it."""
        return asdict(self) | {
            "batch_sizes": list(self.batch_sizes),
            "samples": [asdict(sample) for sample in self.samples],
        }


@dataclass(frozen=True)
class RunReport:
    """One run.

    Args:
        name: what the page calls it.
        verdict, reason, seconds, model, spec: of the run.
        phases: phase -> seconds.
        ranks: empty where the run recorded none.
    """

    name: str
    verdict: str
    reason: str
    seconds: float
    model: str
    spec: str
    phases: Mapping[str, float]
    ranks: tuple[RankReport, ...]

    @property
    def sampled(self) -> bool:
        """Whether there is anything to draw."""
        return any(rank.samples for rank in self.ranks)

    @property
    def end(self) -> float:
        """Seconds that a time axis spans."""
        last = [rank.samples[-1].t for rank in self.ranks if rank.samples]
        return max([self.seconds, *last])


class Samples:
    """A recorder of bounded length: when it is full it drops every second sample, and from then on takes every second.

    The last sample is always kept, so that the record ends where the run ended.

    Args:
        most: samples kept, at least 2.
    """

    def __init__(self, most: int = 1000) -> None:
        if most < 2:
            raise ValueError(f"a recorder keeps at least 2 samples, not {most}")
        self._most = most
        self._kept: list[Sample] = []
        self._last: Sample | None = None
        self._stride = 1
        self._count = 0

    def add(self, sample: Sample) -> None:
        """Record a sample; its time is not before that of the last one."""
        if self._count % self._stride == 0:
            if len(self._kept) == self._most - 1:
                self._kept = self._kept[::2]
                self._stride *= 2
            if self._count % self._stride == 0:
                self._kept.append(sample)
        self._count += 1
        self._last = sample

    def __len__(self) -> int:
        return len(self.list())

    def list(self) -> tuple[Sample, ...]:
        """What is kept, at most `most` samples."""
        if self._last is None or (self._kept and self._kept[-1] is self._last):
            return tuple(self._kept)
        return (*self._kept, self._last)


# --- checking ---------------------------------------------------------------------------------------------------------


def check(content: Any, name: str) -> RunReport:
    """The run that a JSON file tells of.

    Args:
        content: of the file, decoded.
        name: the file, for messages and for the page.

    Raises:
        UsageError: names the place that is not as it should be.
    """
    node = _Node(content, name)
    if "verdict" not in node.mapping():
        raise UsageError(f"{name}: no verdict in it", _HINT)
    stats = node.maybe("stats")
    phases = None if stats is None else stats.maybe("phases")
    ranks = None if stats is None else stats.maybe("ranks")
    return RunReport(
        name=name,
        verdict=node.get("verdict").text(),
        reason=node.get("reason").text() if node.maybe("reason") else "",
        seconds=node.get("seconds").number(),
        model=node.get("model").text() if node.maybe("model") else "",
        spec=node.get("spec").text() if node.maybe("spec") else "",
        phases={key: phases.get(key).number() for key in phases.mapping()} if phases else {},
        ranks=tuple(_rank(item) for item in ranks.items()) if ranks else (),
    )


def _rank(node: _Node) -> RankReport:
    samples = tuple(_sample(item) for item in node.get("samples").items())
    for place, (before, after) in enumerate(itertools.pairwise(samples), start=1):
        if after.t < before.t:
            raise UsageError(f"{node.where}.samples[{place}].t: {after.t} is before {before.t}", _HINT)
    stages = node.maybe("stages")
    return RankReport(
        rank=node.get("rank").count(),
        bounded=node.get("bounded").count(),
        received=node.get("received").count(),
        sent=node.get("sent").count(),
        idle_seconds=node.get("idle_seconds").number(),
        batch_sizes=tuple(item.count() for item in node.get("batch_sizes").items()),
        bytes=node.get("bytes").count(),
        samples=samples,
        stages={} if stages is None else {name: _work(stages.get(name)) for name in stages.mapping()},
    )


def _work(node: _Node) -> Work:
    return Work(node.get("domains").count(), node.get("seconds").number())


def _sample(node: _Node) -> Sample:
    return Sample(
        t=node.get("t").number(),
        open=node.get("open").count(),
        closed=node.get("closed").count(),
        worst=node.get("worst").number(finite=False, least=-math.inf),
        depth=node.get("depth").count(),
        memory=node.get("memory").count(),
        phase=node.get("phase").text(),
    )


@dataclass(frozen=True)
class _Node:
    """A value in a JSON file, and where it stands."""

    value: Any
    where: str

    def _fail(self, wanted: str) -> UsageError:
        return UsageError(f"{self.where}: {str(self.value)[:60]!r} is not {wanted}", _HINT)

    def mapping(self) -> dict[str, Any]:
        if not isinstance(self.value, dict):
            raise self._fail("an object")
        return self.value

    def get(self, key: str) -> _Node:
        if key not in self.mapping():
            raise UsageError(f"{self.where}: {key} is missing", _HINT)
        return _Node(self.value[key], f"{self.where}{': ' if ': ' not in self.where else '.'}{key}")

    def maybe(self, key: str) -> _Node | None:
        return self.get(key) if self.mapping().get(key) is not None else None

    def items(self) -> list[_Node]:
        if not isinstance(self.value, list):
            raise self._fail("a list")
        return [_Node(item, f"{self.where}[{place}]") for place, item in enumerate(self.value)]

    def text(self) -> str:
        if not isinstance(self.value, str):
            raise self._fail("a text")
        return self.value

    def number(self, *, finite: bool = True, least: float = 0.0) -> float:
        value = self.value
        if isinstance(value, str) and value in ("inf", "-inf", "nan"):
            value = float(value)
        fine = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not fine or (finite and not math.isfinite(value)) or value < least:
            raise self._fail(f"a finite number >= {least:g}" if finite else "a number")
        return float(value)

    def count(self) -> int:
        if not isinstance(self.value, int) or isinstance(self.value, bool) or self.value < 0:
            raise self._fail("a whole number >= 0")
        return self.value
