"""What a rank's communication amounts to: calls, bytes and seconds of each collective.

Bytes are those that the rank receives by the ring algorithm (Patarasuk & Yuan, Bandwidth optimal all-reduce algorithms
for clusters of workstations, 2009), whatever a backend really does. One function counts for real and for dry runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass
class _Figure:
    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0


class CommMeter:
    """Counts calls, bytes received and seconds blocked, by the collective's name."""

    def __init__(self) -> None:
        self._figures: dict[str, _Figure] = {}
        self.factor = 1  # how often what is recorded counts

    def record(self, name: str, nbytes: int) -> None:
        """Count one call that receives `nbytes`."""
        figure = self._figures.setdefault(name, _Figure())
        figure.calls += self.factor
        figure.bytes += self.factor * nbytes

    def spend(self, name: str, seconds: float) -> None:
        """Count time for which the rank was blocked in a call, or in the wait for it."""
        self._figures.setdefault(name, _Figure()).seconds += seconds

    @contextlib.contextmanager
    def times(self, factor: int) -> Iterator[None]:
        """Count everything recorded inside `factor` times; for a dry run of a loop whose rounds are all alike."""
        previous, self.factor = self.factor, self.factor * factor
        try:
            yield
        finally:
            self.factor = previous

    def figures(self) -> dict[str, dict[str, float]]:
        """name -> `calls`, `bytes`, `seconds`, sorted by name."""
        return {
            name: {"calls": figure.calls, "bytes": figure.bytes, "seconds": figure.seconds}
            for name, figure in sorted(self._figures.items())
        }

    def clear(self) -> None:
        """Start again from nothing."""
        self._figures.clear()


def received(name: str, nbytes: int, size: int, *, source: bool = False) -> int:
    """Bytes that one rank of `size` receives.

    Args:
        name: of the collective.
        nbytes: of the shard for all_gather, of `out` for reduce_scatter, of the tensor (or data) for all others.
        size: ranks in the group.
        source: whether this rank is the source of a broadcast.
    """
    if size == 1 or source or name in ("send", "barrier"):
        return 0
    if name in ("all_gather", "reduce_scatter"):
        return (size - 1) * nbytes
    if name in ("all_reduce", "all_max"):
        return 2 * (size - 1) * nbytes // size
    return nbytes
