"""Meters: peak bytes of live tensors of this rank.

`torch.distributed._tools.mem_tracker.MemTracker` counts the storage of every tensor that is alive, on CPU and GPU alike,
so that figures are deterministic and do not depend on an allocator. Constants that were there before count too.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from parverify.program.executor import Executor


class MemoryMeter:
    """A context in which the peak of live tensor bytes is measured.

    Args:
        executor: its constants are counted as resident from the start.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._tracker: Any = None
        self.peak_bytes = 0

    def __enter__(self) -> MemoryMeter:
        from torch.distributed._tools.mem_tracker import MemTracker

        self._tracker = MemTracker()
        self._tracker.track_external(*self._executor.resident())
        self._tracker.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
                 ) -> None:
        self._tracker.__exit__(kind, error, trace)
        snapshot = self._tracker.get_tracker_snapshot("peak")
        self.peak_bytes = sum(int(values["Total"]) for values in snapshot.values())
