"""What ranks that search together must see alike: the time, and what only rank 0 can tell.

Whatever decides which collectives come next (how long an attack goes on, the size of a batch, a witness) must not
differ between ranks; each is taken from rank 0.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from parverify.clock import Clock
from parverify.parallel.comm import Alone, Comm

T = TypeVar("T")
_SECONDS = struct.Struct("!d")


@dataclass(frozen=True)
class SharedClock(Clock):
    """A clock whose `now` and `left` are those of rank 0; every rank must read them at the same points.

    `check` goes by this rank's own time: it ends the run of all ranks, whoever notices first.

    Args:
        comm: the ranks.
    """

    comm: Comm = field(default_factory=Alone)

    def now(self) -> float:
        """Seconds since the start, on rank 0."""
        mine = _SECONDS.pack(self.elapsed) if self.comm.rank == 0 else None
        return float(_SECONDS.unpack(self.comm.broadcast_bytes(mine, 0))[0])


def shared_clock(clock: Clock, comm: Comm) -> Clock:
    """The clock itself for one rank, else one that all ranks read alike."""
    return clock if comm.size == 1 else SharedClock(clock.timeout, clock.started, comm)


def from_first(comm: Comm, make: Callable[[], T]) -> T:
    """What `make` gives on rank 0, on every rank; it is not called on the others."""
    if comm.size == 1:
        return make()
    sent = pickle.dumps(make()) if comm.rank == 0 else None
    found: T = pickle.loads(comm.broadcast_bytes(sent, 0))  # from our own rank 0
    return found


def from_rank(comm: Comm, rank: int, value: T) -> T:
    """The value of one rank, on every rank."""
    if comm.size == 1:
        return value
    sent = pickle.dumps(value) if comm.rank == rank else None
    found: T = pickle.loads(comm.broadcast_bytes(sent, rank))  # from one of our own ranks
    return found
