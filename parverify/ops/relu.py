"""ReLU, the hot path: closed-form lines, equal to those of auto_LiRPA's default (adaptive lower slope).

Zhang et al., "Efficient Neural Network Robustness Certification with General Activation Functions" (CROWN), 2018.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parverify.ops.elementwise import Activation
from parverify.ops.lines import FixedLine, Lines, SlopeLine

MIN_WIDTH = 1e-8  # an unstable box is widened to this, so that the chord's slope and its gradient stay finite


class Relu(Activation):
    """max(x, 0)."""

    def interval(self, l: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        lower, upper = l.clamp(min=0), u.clamp(min=0)
        bad = l.isnan() | u.isnan()
        return torch.where(bad, 0.0, lower), torch.where(bad, torch.inf, upper)

    def relax(self, l: Tensor, u: Tensor) -> Lines:
        unstable = (l < 0) & (u > 0)
        active = (l >= 0) & (u >= l)
        default = (((u > -l) & unstable) | active).to(l.dtype)
        return Lines(SlopeLine(unstable, default), _chord(l, u, unstable, active))

    def split_point(self, l: Tensor, u: Tensor) -> Tensor:
        return torch.zeros_like(l)

    def gap(self, l: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        unstable = (l < 0) & (u > 0)
        intercept = _chord(l, u, unstable, (l >= 0) & (u >= l)).intercept
        lower = torch.where(unstable, torch.minimum(u, -l), torch.zeros_like(l))
        known = intercept.isfinite()
        return intercept, torch.where(known, lower, torch.inf)


def _chord(l: Tensor, u: Tensor, unstable: Tensor, active: Tensor) -> FixedLine:
    """`u / (u - l) * (x - l)` where unstable, exact where stable, nothing known where the bounds are no numbers."""
    known = unstable & (u - l < torch.inf)
    low = torch.where(known, l, -1.0)
    high = torch.where(known, u, 1.0)
    high = torch.maximum(high, low + MIN_WIDTH)
    chord = high / (high - low)
    # The rounded chord may pass below (u, u) by an ulp of u.
    lifted = 2 * torch.finfo(l.dtype).eps * high - chord * low
    # A chord that underflows carries no digits: the constant line at the top takes its place.
    flat = chord < torch.finfo(l.dtype).tiny
    chord, lifted = torch.where(flat, 0.0, chord), torch.where(flat, high, lifted)
    slope = torch.where(known, chord, active.to(l.dtype))
    stable = active | ((u <= 0) & (l <= u))
    return FixedLine(slope, torch.where(known, lifted, torch.zeros_like(l).masked_fill_(~stable, torch.inf)))
