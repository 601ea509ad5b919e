"""ReLU, the hot path: closed-form lines, equal to those of auto_LiRPA's default (adaptive lower slope).

Zhang et al., "Efficient Neural Network Robustness Certification with General Activation Functions" (CROWN), 2018.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from parverify.ops.elementwise import Activation
from parverify.ops.lines import FixedLine, Lines, SlopeLine

MIN_WIDTH = 1e-8  # an unstable box is widened to this, so that the chord's slope and its gradient stay finite


class Relu(Activation):
    """max(x, 0)."""

    def interval(self, l: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        lower, upper = l.clamp(min=0), u.clamp(min=0)
        if l.is_meta or not l.numel() or not (lower.amin().isnan() or upper.amin().isnan()):
            return lower, upper
        bad = l.isnan() | u.isnan()
        return torch.where(bad, 0.0, lower), torch.where(bad, torch.inf, upper)

    def relax(self, l: Tensor, u: Tensor) -> Lines:
        unstable, active, upper = _chord(l, u)
        default = _one_where(torch.gt, u, -l).mul_(unstable).add_(active)
        return Lines(SlopeLine(unstable, default), upper)

    def split_point(self, l: Tensor, u: Tensor) -> Tensor:
        return torch.zeros_like(l)

    def gap(self, l: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        unstable, _, upper = _chord(l, u)
        lower = (torch.minimum(u, -l) * unstable).nan_to_num(nan=0.0, posinf=torch.inf)
        return upper.intercept, lower if upper.known else torch.where(upper.intercept.isfinite(), lower, torch.inf)


def _one_where(compare: Callable[..., Tensor], a: Tensor, b: Tensor | float) -> Tensor:
    """1 where a comparison holds, else 0.

    On millions of neurons choices by booleans (`where`, `masked_fill`) take twenty times as long as factors.
    """
    b = b.detach() if isinstance(b, Tensor) else b
    return compare(a.detach(), b, out=torch.empty_like(a, requires_grad=False))


def _chord(l: Tensor, u: Tensor) -> tuple[Tensor, Tensor, FixedLine]:
    """Where boxes are unstable and where they are active (1, else 0), and the line above.

    The line is `u / (u - l) * (x - l)` where unstable, exact where stable, and says nothing where a box is empty, of no
    finite width, or no number. A dry run takes all boxes to be boxes.
    """
    ordered = _one_where(torch.ge, u, l)
    unstable = _one_where(torch.lt, l, 0).mul_(_one_where(torch.gt, u, 0))
    active = _one_where(torch.ge, l, 0).mul_(ordered)
    sloped = _one_where(torch.lt, u - l, torch.inf).mul_(unstable)
    known = ordered.mul_(_one_where(torch.le, u, 0)).add_(active).add_(sloped)
    low, high = (side.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) for side in (l, u))
    low, high = torch.addcmul(sloped - 1, low, sloped), torch.addcmul(1 - sloped, high, sloped)
    high = torch.maximum(high, low + MIN_WIDTH)
    chord = high / (high - low)
    # The rounded chord may pass below (u, u) by an ulp of u.
    lifted = 2 * torch.finfo(l.dtype).eps * high - chord * low
    looked_at = not l.is_meta and l.numel() > 0
    if looked_at and chord.amin() < torch.finfo(l.dtype).tiny:
        # A chord that underflows carries no digits: the constant line at the top takes its place.
        flat = chord < torch.finfo(l.dtype).tiny
        chord, lifted = torch.where(flat, 0.0, chord), torch.where(flat, high, lifted)
    intercept, all_known = lifted * sloped, not looked_at or bool(known.amin() > 0)
    if not all_known:
        intercept = intercept.masked_fill(known == 0, torch.inf)
    return unstable, active, FixedLine(torch.addcmul(active, chord, sloped), intercept, all_known)
