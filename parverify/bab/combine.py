"""Conjunctions: the best convex combination of a disjunct's rows, where every row alone has points below what it needs.

On a domain, row r is bounded below by an affine function `A_r x + k_r`. If for some weights `w >= 0` that sum to 1 the
function `sum_r w_r (A_r x + k_r - need_r)` is positive on the whole box, no point has all rows at or below what they
need, and the domain is closed although no row closes it (Lagrangian duality). The weights come from exponentiated
supergradients (Kivinen and Warmuth, 1997), for all domains at once; any weights are sound, so no trust is put in them.
Everything here is in float64, whatever the rows were computed in.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from parverify.bounds.region import BoxRegion, Region

STEPS = 24
RATE = 3.0


@dataclass(frozen=True)
class Combined:
    """Of D domains.

    Args:
        excess: (D,) float64, a proved lower bound of the rows' largest excess over what they need; positive closes,
            -inf where nothing is known.
        x: (D, n) float64, the point of the box that comes closest to having all affine rows below what they need.
    """

    excess: Tensor
    x: Tensor

    def bound(self, dtype: torch.dtype) -> Tensor:
        """The excess in another dtype, rounded down."""
        near = self.excess.to(dtype)
        return torch.where(near.double() > self.excess, torch.nextafter(near, torch.full_like(near, -torch.inf)), near)


@torch.no_grad()
def combine(lower: Tensor, A: Tensor, need: Tensor, region: Region) -> Combined:
    """Combine the rows of each domain.

    Args:
        lower: (D, R) sound bounds of the rows over their boxes, as a sweep returned them together with `A`.
        A: (D, R, n) the rows on the input.
        need: (D, R).
        region: D boxes.

    Raises:
        TypeError: the region is not made of boxes.
    """
    if not isinstance(region, BoxRegion):
        raise TypeError(f"rows are combined on boxes, not on {type(region).__name__}")
    low, high, A = region.lower.double(), region.upper.double(), A.double()
    offset = lower.double() - _least(A, low, high) - need.double()
    valid = offset.isfinite() & A.isfinite().all(2)
    A, offset = torch.where(valid[..., None], A, 0.0), torch.where(valid, offset, 0.0)
    # What the sums below may be off by, and those by which a row's constant was recovered from its bound.
    largest = torch.maximum(low.abs(), high.abs())
    size = (A.abs() * largest[:, None]).sum(2) + offset.abs() + lower.double().abs().nan_to_num(posinf=0.0) + need.abs()
    allowance = (8 * (A.shape[1] + A.shape[2]) + 32) * torch.finfo(torch.float64).eps * size.amax(1)

    weight = valid.double() / valid.sum(1, keepdim=True).clamp(min=1)
    best = torch.full_like(allowance, -torch.inf)
    nearest, nearest_x = torch.full_like(allowance, torch.inf), (low + high) / 2
    centre = torch.zeros_like(nearest_x)
    widest = torch.zeros_like(best)
    for step in range(STEPS):
        # Closed, or a point that no combination can exclude. What is decided changes no more, whatever batch it is in.
        going = ~((best > 0) | (nearest <= 0))
        if not bool(going.any()):
            break
        x = torch.where((weight[..., None] * A).sum(1) >= 0, low, high)
        value = (A * x[:, None]).sum(2) + offset  # supergradient
        best = torch.where(going, torch.maximum(best, (weight * value).sum(1) - allowance), best)
        centre = centre + (x - centre) / (step + 1)
        for point in (x, centre):
            excess = ((A * point[:, None]).sum(2) + offset).masked_fill(~valid, -torch.inf).amax(1)
            closer = going & (excess < nearest)
            nearest, nearest_x = torch.where(closer, excess, nearest), torch.where(closer[:, None], point, nearest_x)
        top = value.masked_fill(~valid, -torch.inf).amax(1).nan_to_num()
        spread = top - value.masked_fill(~valid, torch.inf).amin(1)
        widest = torch.maximum(widest, spread.nan_to_num(posinf=0.0, neginf=0.0)).clamp(min=1e-300)
        rate = RATE / (step + 1) ** 0.5
        weight = weight * torch.exp((rate * (value - top[:, None]) / widest[:, None]).clamp(max=0.0))
        weight = weight / weight.sum(1, keepdim=True).clamp(min=1e-300)
    known = valid.any(1) & ~best.isnan()
    return Combined(torch.where(known, best, -torch.inf), nearest_x)


def _least(A: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """(D, R) the minimum of rows over boxes."""
    return torch.where(A >= 0, A * low[:, None], A * high[:, None]).sum(2)
