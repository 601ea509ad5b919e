"""What a simulation starts from, the search's tree and batch times and the machine's messages, and what comes of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from parverify.errors import UsageError
from parverify.simulate.tree import Shape


@dataclass(frozen=True)
class Batches:
    """How long batches take, and how large they are.

    Args:
        base, each: seconds of a batch, and of each domain in it.
        factors: what single batches took, as multiples of that; drawn at random.
        start: domains of the first batch.
        most: of the largest.
        fixed: whether the size never changes.
    """

    base: float
    each: float
    factors: tuple[float, ...] = (1.0,)
    start: int = 16
    most: int = 4096
    fixed: bool = False

    def __post_init__(self) -> None:
        if not (self.base >= 0 and self.each >= 0 and 0 < self.base + self.each < math.inf):
            raise UsageError(f"batches of {self.base} s and {self.each} s a domain take no time", "measure a search")


@dataclass(frozen=True)
class Machine:
    """Ranks and the way between them.

    Args:
        ranks: each a group of its own.
        nodes: machines, over which ranks are spread in blocks.
        cores: of each machine, which batches that run at once share evenly; None is one for each rank.
        latency: seconds of a message between machines.
        local: seconds of a message within a machine.
        handling: seconds that a rank spends on each message it sends.
        bandwidth: bytes a second.
    """

    ranks: int
    nodes: int = 1
    cores: int | None = None
    latency: float = 2e-4
    local: float = 1e-4
    handling: float = 5e-5
    bandwidth: float = 1e9

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= self.ranks:
            raise UsageError(f"{self.ranks} ranks can't be spread over {self.nodes} nodes", "give fewer nodes")
        if self.cores is not None and self.cores < 1:
            raise UsageError(f"a machine has no {self.cores} cores", "give at least one")

    def node(self, rank: int) -> int:
        """On which machine a rank is."""
        return rank * self.nodes // self.ranks


@dataclass(frozen=True)
class Scenario:
    """What is simulated.

    Args:
        tree: of subproblems.
        batches: their times.
        before: seconds before the search begins, on any number of ranks.
        domain_bytes: of an open domain on its way.
        grant_bytes: about how much one grant may be.
    """

    tree: Shape
    batches: Batches
    before: float = 0.0
    domain_bytes: float = 1000.0
    grant_bytes: int = 64 << 20


@dataclass(frozen=True)
class Forecast:
    """What a simulation came to.

    Args:
        ranks: how many.
        seconds: from the start to the verdict.
        search: seconds of the search alone.
        idle: share of all ranks' time within the search in which they had no domain.
        overhead: share of it that was neither in batches nor idle.
        bounded: domains.
        batches: how many.
        largest: most domains that were open at once.
        messages: sent in all, bytes in all.
        moved: domains that changed ranks.
    """

    ranks: int
    seconds: float
    search: float
    idle: float
    overhead: float
    bounded: int
    batches: int
    largest: int
    messages: int
    message_bytes: float
    moved: int
