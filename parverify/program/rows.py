"""Rows: the unit of work. A row is a linear functional of a node's value that is bounded from below.

An upper bound is a row with the opposite sign. Rows of intermediate layers are one-hot and never built as vectors: the
first product of a tile is a slice of the weight. Rows of several domains lie flat behind each other; `owner` says whose
each is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class OneHot:
    """Rows `sign[i] * value.flatten()[index[i]]`.

    Args:
        index: (N,) int64, flat position in the node's value.
        sign: (N,) +1 or -1, in the dtype of the bounds.
        owner: (N,) int64 domain of each row, or None if there is one domain.
    """

    index: Tensor
    sign: Tensor
    owner: Tensor | None = None

    def __len__(self) -> int:
        return len(self.index)

    def dense(self, shape: tuple[int, ...]) -> Tensor:
        """The rows as vectors, (N, *shape)."""
        out = self.sign.new_zeros(len(self), int(torch.Size(shape).numel()))
        return out.scatter(1, self.index[:, None], self.sign[:, None]).reshape(len(self), *shape)

    def take(self, part: slice) -> OneHot:
        """A slice of the rows."""
        owner = None if self.owner is None else self.owner[part]
        return OneHot(self.index[part], self.sign[part], owner)


@dataclass(frozen=True)
class Dense:
    """Rows `A[i] . value + constant[i]`.

    Args:
        A: (N, *shape of the node).
        constant: (N,), or None for zero.
        owner: (N,) int64 domain of each row; None if there is one domain, or row i belongs to domain i.
    """

    A: Tensor
    constant: Tensor | None = None
    owner: Tensor | None = None

    def __len__(self) -> int:
        return self.A.shape[0]

    def take(self, part: slice) -> Dense:
        """A slice of the rows."""
        owner = None if self.owner is None else self.owner[part]
        return Dense(self.A[part], None if self.constant is None else self.constant[part], owner)


@dataclass(frozen=True)
class Picked:
    """One-hot rows on a weighted node after their first product: rows `A[i] . input + constant[i]`.

    What a tile's sweeps start from, so that its slices of the weight are picked (and moved between ranks) only once.

    Args:
        A: (N, *shape of the node's input).
        constant: (N,), or None for zero.
        owner: as in `OneHot`.
    """

    A: Tensor
    constant: Tensor | None
    owner: Tensor | None

    def __len__(self) -> int:
        return self.A.shape[0]


Rows = OneHot | Dense | Picked
Tiled = OneHot | Dense


def both_signs(index: Tensor, owner: Tensor | None, dtype: torch.dtype) -> OneHot:
    """Rows for the lower bounds of neurons, then for the negated upper bounds of the same neurons."""
    ones = torch.ones(len(index), dtype=dtype, device=index.device)
    doubled = None if owner is None else torch.cat([owner, owner])
    return OneHot(torch.cat([index, index]), torch.cat([ones, -ones]), doubled)


def tiles(count: int, size: int) -> Iterator[slice]:
    """Consecutive slices of at most `size` out of `count`."""
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))
