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
    """max(x, 0).

    On millions of neurons comparisons and choices (`where`, `masked_fill`) take twenty times as long as arithmetic, so
    what holds where is a factor of 0 or 1.
    """

    def interval(self, l: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        lower, upper = l.clamp(min=0), u.clamp(min=0)
        if l.is_meta or not l.numel() or not (lower.amin().isnan() or upper.amin().isnan()):
            return lower, upper
        bad = l.isnan() | u.isnan()
        return torch.where(bad, 0.0, lower), torch.where(bad, torch.inf, upper)

    def relax(self, l: Tensor, u: Tensor) -> Lines:
        if _proper(l, u):
            unstable, active = _signs(l, u)
            chord = _proper_chord(l, u, unstable, active)
            if chord is not None:
                default = torch.maximum(torch.gt(u, -l, out=torch.empty_like(u)), active)
                return Lines(SlopeLine(unstable, default), chord)
        crossing = (l < 0) & (u > 0)
        rising = (l >= 0) & (u >= l)
        default = (((u > -l) & crossing) | rising).to(l.dtype)
        return Lines(SlopeLine(crossing.to(l.dtype), default), _chord(l, u, crossing, rising))

    def split_point(self, l: Tensor, u: Tensor) -> Tensor:
        return torch.zeros_like(l)

    def gap(self, l: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        if _proper(l, u):
            unstable, active = _signs(l, u)
            chord = _proper_chord(l, u, unstable, active)
            if chord is not None:
                return chord.intercept, torch.minimum(u, -l).mul_(unstable)
        crossing = (l < 0) & (u > 0)
        intercept = _chord(l, u, crossing, (l >= 0) & (u >= l)).intercept
        lower = torch.where(crossing, torch.minimum(u, -l), torch.zeros_like(l))
        known = intercept.isfinite()
        return intercept, torch.where(known, lower, torch.inf)


def _proper(l: Tensor, u: Tensor) -> bool:
    """Whether all boxes are finite, none is empty, and no gradient flows into them; taken to be so in a dry run."""
    if l.requires_grad or u.requires_grad:
        return False
    if l.is_meta or not l.numel():
        return True
    least, most = torch.aminmax(u - l)
    return bool(least >= 0) and bool(most < torch.inf)  # neither, if it is no number


def _signs(l: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """1 where proper boxes are unstable, 1 where they are active; else 0."""
    below = torch.lt(l, 0, out=torch.empty_like(l))
    return torch.gt(u, 0, out=torch.empty_like(u)).mul_(below), below.neg_().add_(1)


def _proper_chord(l: Tensor, u: Tensor, unstable: Tensor, active: Tensor) -> FixedLine | None:
    """`_chord` of proper boxes, equal bit for bit; None where a chord underflows."""
    stable = 1 - unstable
    low, high = torch.addcmul(-stable, l, unstable), torch.addcmul(stable, u, unstable)
    high = torch.maximum(high, low + MIN_WIDTH)
    chord = high - low
    torch.div(high, chord, out=chord)
    if not l.is_meta and l.numel() and chord.amin() < torch.finfo(l.dtype).tiny:
        return None
    lifted = high.mul_(2 * torch.finfo(l.dtype).eps).sub_(low.mul_(chord)).mul_(unstable)
    return FixedLine(chord.mul_(unstable).add_(active), lifted, known=True)


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
