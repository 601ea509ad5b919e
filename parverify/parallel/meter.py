"""Meters: peak bytes of live tensors of this rank.

Every tensor storage that an operator returns is counted from then until nobody holds it, constants that were there
before included: figures are deterministic, alike on CPU and GPU, and do not depend on an allocator. This is what
`torch.distributed._tools.mem_tracker.MemTracker` reports as the total, which the tests compare it with; that one also
sorts storages by module and step, and its bookkeeping takes longer than the work on small tiles.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from torch import Tensor

from parverify.dispatch import DispatchMode


class MemoryMeter(DispatchMode):
    """A context in which the peak of live tensor bytes is measured.

    Args:
        resident: tensors that are counted from the start.
        elsewhere: tensors whose memory is never counted here, and views of them: it is another rank's.

    Tensors without data take no memory and are not counted, except in a dry run, where all are without.
    """

    counts_meta = False

    def __init__(self, resident: Iterable[Tensor], elsewhere: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self._live = 0
        self._resident = list(resident)
        self._elsewhere = list(elsewhere)
        self._skipped = {tensor.untyped_storage()._cdata for tensor in self._elsewhere}
        self.peak_bytes = 0

    def __enter__(self) -> MemoryMeter:
        self._count(self._resident)
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._count(out if isinstance(out, (list, tuple)) else (out,))
        return out

    def _count(self, values: Iterable[Any]) -> None:
        for value in values:
            if not isinstance(value, Tensor) or value.is_meta != self.counts_meta:
                continue
            storage = value.untyped_storage()
            key = storage._cdata
            if key in self._skipped:
                continue
            size = storage.nbytes()
            known = self._sizes.get(key)
            if known is None:
                weakref.finalize(storage, self._drop, key).atexit = False
            self._sizes[key] = size
            self._live += size - (known or 0)
        self.peak_bytes = max(self.peak_bytes, self._live)

    def _drop(self, key: int) -> None:
        self._live -= self._sizes.pop(key, 0)
