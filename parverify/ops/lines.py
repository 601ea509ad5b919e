"""Lines that enclose an elementwise function on a box, one lower and one upper line per neuron.

A family is a set of lines `slope * x + intercept` with at most one free parameter alpha in [0, 1] per neuron. The
invariant: every alpha gives a sound line on the box the family was made for, so that an optimizer can move alpha
anywhere (Xu et al., "Fast and Complete", ICLR 2021). "Nothing known" is slope 0 and an infinite intercept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Family(Protocol):
    """One line per neuron, with at most one free parameter; all tensors are (D, *shape)."""

    @property
    def free(self) -> Tensor | None:
        """Bool, True where alpha changes the line; None where it never does."""

    def select(self, owner: Tensor) -> Family:
        """The same lines for rows: row i gets the line of domain `owner[i]`; owner is (N,) int64."""

    def default(self) -> Tensor:
        """Alpha of the default line, inside [0, 1]; arbitrary where alpha is not free."""

    def line(self, alpha: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Slope and intercept at alpha (the default where None); an intercept of None is zero everywhere."""


@dataclass(frozen=True)
class Lines:
    """`lower.line(a)(x) <= f(x) <= upper.line(a)(x)` for every x in the box and every alpha in [0, 1]."""

    lower: Family
    upper: Family

    def select(self, owner: Tensor) -> Lines:
        """Both families for rows, see `Family.select`."""
        return Lines(self.lower.select(owner), self.upper.select(owner))


@dataclass(frozen=True)
class FixedLine:
    """A line without a parameter.

    Args:
        slope: (D, *shape).
        intercept: (D, *shape), or None for zero everywhere.
    """

    slope: Tensor
    intercept: Tensor | None

    @property
    def free(self) -> Tensor | None:
        return None

    def select(self, owner: Tensor) -> FixedLine:
        intercept = None if self.intercept is None else self.intercept.index_select(0, owner)
        return FixedLine(self.slope.index_select(0, owner), intercept)

    def default(self) -> Tensor:
        return torch.zeros_like(self.slope)

    def line(self, alpha: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return self.slope, self.intercept


@dataclass(frozen=True)
class SlopeLine:
    """A line through the origin whose slope is alpha where free: the lower lines of ReLU.

    Args:
        free: (D, *shape) bool.
        slope: (D, *shape), the slope where not free and the default alpha where free.
    """

    free: Tensor
    slope: Tensor

    def select(self, owner: Tensor) -> SlopeLine:
        return SlopeLine(self.free.index_select(0, owner), self.slope.index_select(0, owner))

    def default(self) -> Tensor:
        return self.slope

    def line(self, alpha: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return (self.slope if alpha is None else torch.where(self.free, alpha, self.slope)), None
