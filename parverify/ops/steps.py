"""Step functions: sign, floor, ceil, round. Ranges by monotonicity, lines through the corners of the staircase.

With a = f(l) and b = f(u), the lower lines pass through the corner below the first jump, (x, a): slope 0 always is
sound, and so is every slope up to the one where the line meets the next corner or the point (u, b). Upper lines mirror
that at the last jump. With one jump in the box the steepest ones are the sides of the convex hull.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from parverify.ops.elementwise import Activation
from parverify.ops.lines import Lines, Mirrored, PivotLine
from parverify.ops.smooth import inner_point, sampled_gap

MIN_RUN = 1e-3  # a jump nearer to an end than this gets a slope as if it were that far away, which is still sound


@dataclass(frozen=True)
class Step(Activation):
    """A nondecreasing staircase, of unit height and width except for the single jump of sign.

    Args:
        after: from the value at l to the first jump at or right of l; None if the only jump is at 0.
        before: from the value at u to the last jump at or left of u.
        bound: the largest magnitude of a value.
    """

    after: float | None = None
    before: float = 0.0
    bound: float = torch.inf

    def interval(self, l: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        bad = l.isnan() | u.isnan()
        return torch.where(bad, -self.bound, self.fn(l)), torch.where(bad, self.bound, self.fn(u))

    def relax(self, l: Tensor, u: Tensor) -> Lines:
        a, b = self.interval(l, u)
        zero = torch.zeros_like(l)
        first = zero if self.after is None else a + self.after
        last = zero if self.after is None else b + self.before
        # Halves must be numbers of the dtype, or corners can't be told apart.
        exact = torch.maximum(l.abs(), u.abs()) < 0.25 / torch.finfo(l.dtype).eps
        sloped = exact & (a < b) & (l <= u)
        first, last = torch.where(sloped, first, zero), torch.where(sloped, last, zero)
        rise = torch.where(sloped, b - a, zero)
        eps = torch.finfo(l.dtype).eps
        families = []
        for up, pivot, value, run in ((False, first, a, u - first), (True, last, -b, last - l)):
            run = torch.where(sloped, run, zero + 1).clamp(min=MIN_RUN)
            steepest = rise * torch.where(first == last, 1 / run, 1 / rise.clamp(min=1))
            slack = torch.where(sloped, 4 * eps * (rise + steepest * (l.abs() + u.abs())), zero)
            beyond = (l / 2 + u / 2 < pivot) if up else (l / 2 + u / 2 > pivot)
            start = (sloped & beyond).to(l.dtype)
            families.append(PivotLine(pivot, value, -steepest if up else steepest, start, slack))
        return Lines(families[0], Mirrored(families[1]))

    def split_point(self, l: Tensor, u: Tensor) -> Tensor:
        return inner_point(l, u, self._nearest_jump)

    def _nearest_jump(self, x: Tensor) -> Tensor:
        if self.after is None:
            return torch.zeros_like(x)
        offset = self.after % 1.0
        return (x - offset).round() + offset

    def gap(self, l: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        return sampled_gap(self, l, u)
