"""Where a mask holds: the only places at which what is computed depends on numbers, and so the seam of a dry run.

How many neurons are unstable decides how many rows are pushed and how many alphas there are. A run can record these
counts; the same code on tensors without data (torch's meta device) then replays them, or assumes a share of the
neurons where nothing was recorded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from contextvars import ContextVar

import torch
from torch import Tensor

from parverify.errors import ParverifyError


class Counts:
    """How many places each mask of a run had, in order; read by a dry run.

    Args:
        share: of the entries of a mask, assumed by a dry run of which nothing was recorded.
    """

    def __init__(self, share: float | None = None) -> None:
        self._share = share
        self._counts: list[int] = []
        self._most: dict[Hashable, int] = {}
        self._next = 0

    def record(self, count: int) -> None:
        """Note the places of one mask."""
        self._counts.append(count)

    def replay(self, entries: int) -> int:
        """The places of the next mask, which has so many entries.

        Raises:
            ParverifyError: the dry run meets a mask that the run did not.
        """
        if self._share is not None:
            return min(entries, max(1, round(self._share * entries))) if entries else 0
        if self._next >= len(self._counts) or self._counts[self._next] > entries:
            raise ParverifyError("the dry run left the path of the run that was recorded")
        self._next += 1
        return self._counts[self._next - 1]

    def record_most(self, key: Hashable, count: int) -> None:
        """Note the places of a mask that a run meets again and again, in rounds that a dry run goes through once."""
        self._most[key] = max(count, self._most.get(key, 0))

    def replay_most(self, key: Hashable, entries: int, usual: int) -> int:
        """The most places that such a mask of so many entries had; `usual` where nothing was recorded."""
        return min(entries, self._most.get(key, usual))


_CURRENT: ContextVar[Counts | None] = ContextVar("counts", default=None)


@contextlib.contextmanager
def counting(counts: Counts) -> Iterator[Counts]:
    """Record into `counts` within this context, or replay from it where tensors have no data."""
    token = _CURRENT.set(counts)
    try:
        yield counts
    finally:
        _CURRENT.reset(token)


def places(mask: Tensor) -> tuple[Tensor, ...]:
    """Where a mask holds: an index tensor for each of its dims, as `torch.nonzero(mask, as_tuple=True)`."""
    counts = _CURRENT.get()
    if mask.is_meta:
        if counts is None:
            raise ParverifyError("a dry run needs counts to replay, or an assumed share")
        some = counts.replay(mask.numel())
        return tuple(mask.new_empty(some, dtype=torch.long) for _ in range(mask.dim()))
    found = torch.nonzero(mask, as_tuple=True)
    if counts is not None:
        counts.record(len(found[0]))
    return found


def places_in_rounds(mask: Tensor, key: Hashable, usual: int) -> Tensor:
    """Where a mask (N,) holds, for one that comes up in every round of row tiles.

    Args:
        mask: what it is.
        key: the same in every round.
        usual: how many places a dry run assumes of which nothing was recorded.
    """
    counts = _CURRENT.get()
    if mask.is_meta:
        some = mask.numel() if counts is None else counts.replay_most(key, mask.numel(), usual)
        return mask.new_empty(some, dtype=torch.long)
    found = torch.nonzero(mask).flatten()
    if counts is not None:
        counts.record_most(key, len(found))
    return found
