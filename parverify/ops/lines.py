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

from parverify.ops.facts import Side


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
        slope, intercept: (D, *shape).
        known: all of them are finite, and nobody has to look.
    """

    slope: Tensor
    intercept: Tensor
    known: bool = False

    @property
    def free(self) -> Tensor | None:
        return None

    def select(self, owner: Tensor) -> FixedLine:
        return FixedLine(self.slope.index_select(0, owner), self.intercept.index_select(0, owner))

    def default(self) -> Tensor:
        return torch.zeros_like(self.slope)

    def line(self, alpha: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return self.slope, self.intercept


@dataclass(frozen=True)
class SlopeLine:
    """A line through the origin whose slope is alpha where free: the lower lines of ReLU.

    Args:
        free: (D, *shape), 1 where free, else 0.
        slope: (D, *shape), the slope where not free and the default alpha where free.
    """

    free: Tensor
    slope: Tensor

    def select(self, owner: Tensor) -> SlopeLine:
        return SlopeLine(self.free.index_select(0, owner), self.slope.index_select(0, owner))

    def default(self) -> Tensor:
        return self.slope

    def line(self, alpha: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return (self.slope if alpha is None else torch.where(self.free > 0, alpha, self.slope)), None


@dataclass(frozen=True)
class PivotLine:
    """A line through a fixed point whose slope is `alpha * steepest`: the lines of step functions.

    Args:
        x, y: (D, *shape), the fixed point.
        steepest: (D, *shape), the slope at alpha = 1; zero where the line is constant.
        start: (D, *shape), the default alpha.
        slack: (D, *shape), subtracted from the intercept; covers rounding at any alpha.
    """

    x: Tensor
    y: Tensor
    steepest: Tensor
    start: Tensor
    slack: Tensor

    @property
    def free(self) -> Tensor | None:
        return self.steepest != 0

    def select(self, owner: Tensor) -> PivotLine:
        picked = [part.index_select(0, owner) for part in (self.x, self.y, self.steepest, self.start, self.slack)]
        return PivotLine(*picked)

    def default(self) -> Tensor:
        return self.start

    def line(self, alpha: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        slope = self.steepest * (self.start if alpha is None else alpha)
        return slope, self.y - slope * self.x - self.slack


@dataclass(frozen=True)
class Anchor:
    """A point of the graph that a line must not pass above.

    Args:
        x: (D, *shape).
        y: (D, *shape), a value no larger than the function's there; inf where the anchor does not matter.
    """

    x: Tensor
    y: Tensor

    def select(self, owner: Tensor) -> Anchor:
        return Anchor(self.x.index_select(0, owner), self.y.index_select(0, owner))


@dataclass(frozen=True)
class TangentLine:
    """Lower lines of a function that is convex around their tangent points and concave elsewhere on the box.

    With slope k taken at t, the tightest intercept is the least of `g(x) - k x` over t and the ends of the concave
    pieces (the anchors), whatever t is; so a badly chosen t costs tightness, never soundness.

    Args:
        side: the function and its slope.
        tangent: (D, *shape) bool, where tangents serve; elsewhere `fixed` does.
        low, high: (D, *shape), the range of tangent points; alpha moves from one to the other.
        start: (D, *shape), the default alpha.
        fixed: the line where tangents don't serve.
        size: (D, *shape), |l| + |u|, which rounding errors of the slope are multiplied with.
        anchors: none where the function is convex altogether.
    """

    side: Side
    tangent: Tensor
    low: Tensor
    high: Tensor
    start: Tensor
    fixed: FixedLine
    size: Tensor
    anchors: tuple[Anchor, ...]

    @property
    def free(self) -> Tensor | None:
        return self.tangent & (self.low < self.high)

    def select(self, owner: Tensor) -> TangentLine:
        tangent, low, high, start, size = (
            part.index_select(0, owner) for part in (self.tangent, self.low, self.high, self.start, self.size)
        )
        anchors = tuple(anchor.select(owner) for anchor in self.anchors)
        return TangentLine(self.side, tangent, low, high, start, self.fixed.select(owner), size, anchors)

    def default(self) -> Tensor:
        return self.start

    def line(self, alpha: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        point = self.low + (self.start if alpha is None else alpha) * (self.high - self.low)
        slope, intercept = self.touch(torch.minimum(point, self.high))
        fixed_slope, fixed_intercept = self.fixed.slope, self.fixed.intercept
        return torch.where(self.tangent, slope, fixed_slope), torch.where(self.tangent, intercept, fixed_intercept)

    def touch(self, point: Tensor) -> tuple[Tensor, Tensor]:
        """The tightest line with the slope at `point`, rounding errors included."""
        ulp = 6 * torch.finfo(point.dtype).eps
        value, slope = self.side.f(point), self.side.slope(point)
        intercept = value - slope * point - ulp * value.abs()
        for anchor in self.anchors:
            intercept = torch.minimum(intercept, anchor.y - slope * anchor.x)
        # A slope may also underflow, which matters on a box as wide as 1e30.
        tiny = 8 * torch.finfo(point.dtype).tiny
        wobble = ulp * (slope.abs() + self.side.facts.cancellation) + tiny
        return slope, intercept - wobble * self.size - tiny


@dataclass(frozen=True)
class Mirrored:
    """Upper lines of f from the lower lines of -f."""

    inner: Family

    @property
    def free(self) -> Tensor | None:
        return self.inner.free

    def select(self, owner: Tensor) -> Mirrored:
        return Mirrored(self.inner.select(owner))

    def default(self) -> Tensor:
        return self.inner.default()

    def line(self, alpha: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        slope, intercept = self.inner.line(alpha)
        return -slope, None if intercept is None else -intercept
