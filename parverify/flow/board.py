"""What ranks that work on a list know of each other: counters that any rank may add to, without anyone serving them.

The counters are in a `torch.distributed` store (a file for the ranks of one machine, torchrun's own under torchrun), or
in memory for a single rank. Adding is atomic, so the next instance of the list is whatever `add` returns.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from parverify.errors import ParverifyError
from parverify.flow.allot import Rates

_MICRO = 1e6


class Counters(Protocol):
    """Whole numbers by name, 0 at first."""

    def add(self, key: str, amount: int) -> int:
        """Add, and give the sum."""


class OwnCounters:
    """Those of a single rank."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, key: str, amount: int) -> int:
        """Add, and give the sum."""
        self._counts[key] += amount
        return self._counts[key]


def shared_counters(folder: str) -> Counters:
    """Counters of all ranks; each rank calls this once.

    Args:
        folder: that all ranks of this machine see; not used under torchrun.
    """
    import torch.distributed as dist

    size = dist.get_world_size()
    if folder:
        store: dist.Store = dist.FileStore(str(Path(folder, "board")), size)
    elif "MASTER_PORT" in os.environ:
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, False)
    else:
        raise ParverifyError("ranks have no store in common", "start them by --nproc, or by torchrun")
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # ranks that were restarted count anew
    return dist.PrefixStore(f"flow-{again}", store)


@dataclass(frozen=True)
class Board:
    """The state of the whole list.

    Args:
        counters: shared by all ranks.
        length: of the list.
        ranks: how many work on it.
    """

    counters: Counters
    length: int
    ranks: int

    def take(self) -> int | None:
        """The next instance that nobody has begun; None where there is none left."""
        if self.left() == 0:
            return None  # without it the counter would grow with every look
        taken = self.counters.add("taken", 1) - 1
        return taken if taken < self.length else None

    def left(self) -> int:
        """Instances that nobody has begun."""
        return max(0, self.length - self.counters.add("taken", 0))

    def note_bounded(self, seconds: float, *, undecided: bool) -> None:
        """An instance went through everything before the search."""
        self._note("bounding", seconds)
        self.counters.add("undecided", int(undecided))

    def note_searched(self, seconds: float) -> None:
        """A search has ended."""
        self._note("searching", seconds)

    def rates(self) -> Rates:
        """What has been measured so far."""
        bounded, bounding = self._mean("bounding")
        _, searching = self._mean("searching")
        share = self.counters.add("undecided", 0) / bounded if bounded else 0.0
        return Rates(bounding, searching, share)

    def enter_search(self, change: int) -> int:
        """One rank more (1), or less (-1), searches; how many do now."""
        return self.counters.add("searchers", change)

    def searchers(self) -> int:
        """How many ranks search."""
        return self.counters.add("searchers", 0)

    def call_all(self) -> None:
        """Ask all ranks to meet, as this one has nothing left of its own."""
        self.counters.add("called", 1)

    def called(self) -> bool:
        """Whether all ranks are to meet."""
        return self.ranks > 1 and self.counters.add("called", 0) > 0

    def _note(self, stage: str, seconds: float) -> None:
        self.counters.add(f"{stage}/count", 1)
        self.counters.add(f"{stage}/seconds", round(seconds * _MICRO))

    def _mean(self, stage: str) -> tuple[int, float]:
        """How many passed a stage, and the mean of their seconds; (0, 0.0) where none did."""
        count = self.counters.add(f"{stage}/count", 0)
        return count, self.counters.add(f"{stage}/seconds", 0) / _MICRO / count if count else 0.0
