"""Input regions, and the minimum of a linear functional over them (dual norms).

A region holds D domains. `lower_bound` minimizes rows over it in closed form: over a box `A c - |A| r`, over an Lp ball
of radius eps around x0 `A x0 - eps ||A||_q` with 1/p + 1/q = 1 (Zhang et al., CROWN, 2018, section 3.1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from parverify.errors import UsageError
from parverify.ops.kernel import Box, inflate
from parverify.ops.rounding import slack

BLOCK = 32  # rows whose magnitudes exist at once


class Region(Protocol):
    """D input domains of flat size n."""

    @property
    def domains(self) -> int:
        """D."""

    def box(self) -> Box:
        """The smallest boxes around the domains, (D, n) each."""

    def lower_bound(self, A: Tensor, owner: Tensor | None) -> Tensor:
        """(N,) minimum of each row A (N, n) over its domain, with an allowance for rounding."""

    def magnitude(self, A: Tensor, owner: Tensor | None) -> Tensor:
        """(N,) the largest sum of magnitudes of terms that a row takes on the domain, for allowances for rounding."""

    def minimizer(self, A: Tensor, owner: Tensor | None) -> Tensor:
        """(N, n) a point of the domain where the row is smallest."""

    @property
    def exact_intervals(self) -> bool:
        """Whether an interval through one affine operator is exact (boxes), so that rows would not improve it."""


def _own(table: Tensor, owner: Tensor | None) -> Tensor:
    return table if owner is None else table.index_select(0, owner)


def _largest(box: Box) -> Tensor:
    return torch.maximum(box[0].abs(), box[1].abs())


def _weighed_rows(A: Tensor, weights: Tensor) -> Tensor:
    """(N,) sums of magnitudes of rows (N, n) times weights (n,), without a copy of all magnitudes at once."""
    if A.requires_grad and torch.is_grad_enabled():
        return A.abs() @ weights
    return torch.cat([some.abs() @ weights for some in A.split(BLOCK)])


@dataclass(frozen=True)
class BoxRegion:
    """Boxes.

    Args:
        lower, upper: (D, n).
    """

    lower: Tensor
    upper: Tensor

    exact_intervals = True

    @property
    def domains(self) -> int:
        return self.lower.shape[0]

    @property
    def _one(self) -> bool:
        """Whether all domains are the same box, in the same memory."""
        return self.lower.shape[0] == 1 or self.lower.stride(0) == self.upper.stride(0) == 0

    def box(self) -> Box:
        return self.lower, self.upper

    def lower_bound(self, A: Tensor, owner: Tensor | None) -> Tensor:
        if self._one:
            center, radius = inflate(self.lower[0], self.upper[0])
            return A @ center - _weighed_rows(A, radius)
        center, radius = inflate(self.lower, self.upper)
        center, radius = _own(center, owner), _own(radius, owner)
        return (A * center).sum(1) - (A.abs() * radius).sum(1)

    def magnitude(self, A: Tensor, owner: Tensor | None) -> Tensor:
        if self._one:
            return _weighed_rows(A, _largest((self.lower[0], self.upper[0])))
        return (A.abs() * _own(_largest(self.box()), owner)).sum(1)

    def minimizer(self, A: Tensor, owner: Tensor | None) -> Tensor:
        return torch.where(A >= 0, _own(self.lower, owner), _own(self.upper, owner))

    def to(self, dtype: torch.dtype, device: torch.device) -> BoxRegion:
        """In another dtype, rounded outward."""
        return outward_box(self.lower, self.upper, dtype, device)


@dataclass(frozen=True)
class BallRegion:
    """Lp balls, p = 1 or 2.

    Args:
        center: (D, n).
        eps: (D,) radii.
        p: 1 or 2.
    """

    center: Tensor
    eps: Tensor
    p: float

    exact_intervals = False

    def __post_init__(self) -> None:
        if self.p not in (1, 2):
            raise UsageError(f"norm {self.p!r} is not supported; allowed: 1, 2, inf")

    @property
    def domains(self) -> int:
        return self.center.shape[0]

    def box(self) -> Box:
        low, high = self.center - self.eps[:, None], self.center + self.eps[:, None]
        outward = torch.full_like(low, math.inf)
        return torch.nextafter(low, -outward), torch.nextafter(high, outward)

    def lower_bound(self, A: Tensor, owner: Tensor | None) -> Tensor:
        center, eps = _own(self.center, owner), _own(self.eps, owner)
        dual = A.abs().amax(1) if self.p == 1 else (A * A).sum(1).clamp(min=0).sqrt()
        value = (A * center).sum(1)
        return value - dual * eps - slack(A.dtype) * ((A.abs() * center.abs()).sum(1) + dual * eps)

    def magnitude(self, A: Tensor, owner: Tensor | None) -> Tensor:
        return (A.abs() * _own(_largest(self.box()), owner)).sum(1)

    def minimizer(self, A: Tensor, owner: Tensor | None) -> Tensor:
        center, eps = _own(self.center, owner), _own(self.eps, owner)
        if self.p == 2:
            norm = (A * A).sum(1, keepdim=True).sqrt().clamp(min=torch.finfo(A.dtype).tiny)
            return center - eps[:, None] * A / norm
        best = A.abs().argmax(1, keepdim=True)
        step = torch.zeros_like(A).scatter(1, best, torch.sign(A.gather(1, best)))
        return center - eps[:, None] * step


def outward_box(lower: Tensor, upper: Tensor, dtype: torch.dtype, device: torch.device | str = "cpu") -> BoxRegion:
    """A box in `dtype` that contains the float64 box [lower, upper]; (n,) or (D, n)."""
    low, high = lower.to(dtype), upper.to(dtype)
    low = torch.where(low.double() > lower, torch.nextafter(low, torch.full_like(low, -math.inf)), low)
    high = torch.where(high.double() < upper, torch.nextafter(high, torch.full_like(high, math.inf)), high)
    return BoxRegion(torch.atleast_2d(low).to(device), torch.atleast_2d(high).to(device))


def select(region: Region, index: Tensor) -> Region:
    """The domains `index` of a region.

    Raises:
        IndexError: it has no such domain.
    """
    if isinstance(region, BoxRegion) and region.domains == 1:
        if len(index) and bool((index != 0).any()):
            raise IndexError("a region of one domain has no other")
        return BoxRegion(region.lower.expand(len(index), -1), region.upper.expand(len(index), -1))
    if isinstance(region, BoxRegion):
        return BoxRegion(region.lower.index_select(0, index), region.upper.index_select(0, index))
    if isinstance(region, BallRegion):
        return replace(region, center=region.center.index_select(0, index), eps=region.eps.index_select(0, index))
    raise UsageError(f"region {type(region).__name__} can't be divided")
