"""What is known about a smooth function: value, slope, where it is convex or concave, where it turns, where it lives.

Facts are data; `smooth.py` derives ranges and lines from them and from nothing else. The invariant that everything
rests on: the curvature is of one sign on each piece between neighboring inflections, so that the slope is monotone
there. A downward jump of the slope (a kink) belongs to a concave piece, an upward jump to a convex one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

Function = Callable[[Tensor], Tensor]
Piece = tuple[Tensor, Tensor]


class Curvature(Protocol):
    """Where a function is convex and where it is concave."""

    def count(self, *, convex: bool) -> int:
        """How many pieces of that kind a box can meet at most, as far as relaxations care (2 stands for more)."""

    def pieces(self, l: Tensor, u: Tensor, *, convex: bool) -> list[Piece]:
        """Parts of [l, u] of that kind, each (start, end), empty where start >= end; all but inner ones if periodic."""

    def nearest(self, x: Tensor) -> Tensor:
        """The inflection nearest to x; NaN where there is none."""


@dataclass(frozen=True)
class Inflections:
    """Finitely many inflections.

    Args:
        points: the inflections, ascending.
        convex_first: True if the function is convex left of the first one.
    """

    points: tuple[float, ...] = ()
    convex_first: bool = True

    def _ends(self, convex: bool) -> list[tuple[float, float]]:
        ends = (-math.inf, *self.points, math.inf)
        first = 0 if convex == self.convex_first else 1
        return list(itertools.pairwise(ends))[first::2]

    def count(self, *, convex: bool) -> int:
        return len(self._ends(convex))

    def pieces(self, l: Tensor, u: Tensor, *, convex: bool) -> list[Piece]:
        return [(l.clamp(min=start), u.clamp(max=end)) for start, end in self._ends(convex)]

    def nearest(self, x: Tensor) -> Tensor:
        if not self.points:
            return torch.full_like(x, torch.nan)
        points = torch.tensor(self.points, dtype=x.dtype, device=x.device)
        return points[(x.unsqueeze(-1) - points).abs().argmin(-1)]


@dataclass(frozen=True)
class Waves:
    """Convex on [start, start + period / 2], concave on the other half, and so on in both directions."""

    start: float
    period: float

    def count(self, *, convex: bool) -> int:
        return 2

    def pieces(self, l: Tensor, u: Tensor, *, convex: bool) -> list[Piece]:
        # The stationary points of f(x) - k x repeat with a constant step in value, so the extreme one lies in one of
        # the outermost two pieces at either end; the third from below tells "two" from "one and a gap".
        start = self.start if convex else self.start + self.period / 2
        first = ((l.detach() - start) / self.period).floor()
        last = ((u.detach() - start) / self.period).floor()
        found = []
        for index in (first, first + 1, first + 2, torch.maximum(last - 1, first + 3), torch.maximum(last, first + 4)):
            low = start + index * self.period
            found.append((torch.maximum(l, low), torch.minimum(u, low + self.period / 2)))
        return found

    def nearest(self, x: Tensor) -> Tensor:
        half = self.period / 2
        return self.start + ((x - self.start) / half).round() * half


@dataclass(frozen=True)
class Domain:
    """Where the function is defined: an interval without its poles.

    Args:
        low: the left end.
        closed: True if the left end belongs to the domain.
        pole: one point that does not belong to it, and with it, where `period` is given, all that repeat it.
        reach: magnitude of arguments beyond which pieces can't be told apart in float64.
    """

    low: float = -math.inf
    closed: bool = False
    pole: float | None = None
    period: float | None = None
    reach: float = math.inf

    def holds(self, l: Tensor, u: Tensor) -> Tensor:
        """Bool (D, *shape): every point of [l, u] has a value; also False where a bound is NaN."""
        inside = (l >= self.low) if self.closed or self.low == -math.inf else (l > self.low)
        inside = inside & (l <= u)
        if self.pole is not None and self.period is None:
            inside = inside & ((l > self.pole) | (u < self.pole))
        if self.pole is not None and self.period is not None:
            turns = ((l - self.pole) / self.period).floor(), ((u - self.pole) / self.period).floor()
            inside = inside & (turns[0] == turns[1]) & ((l - self.pole) / self.period != turns[0])
        return inside

    def known(self, l: Tensor, u: Tensor) -> Tensor:
        """Bool (D, *shape): [l, u] is a finite box inside the domain and within reach."""
        size = torch.maximum(l.abs(), u.abs())
        return self.holds(l, u) & size.isfinite() & (u - l).isfinite() & (size <= self.reach)


@dataclass(frozen=True)
class Facts:
    """One smooth function.

    Args:
        f: the function, accurate to a few ulp, in any floating dtype.
        slope: its derivative; at a kink the derivative taken from inside the convex piece.
        curvature: its convex and concave pieces.
        critical: points where the slope changes sign, repeated with `critical_period` if that is given.
        domain: where it is defined.
        range: its global infimum and supremum.
        slope_concave: the derivative taken from inside the concave pieces, where kinks make a difference.
        cancellation: size of the terms that cancel in `slope`: its absolute error is a few ulp of that. Zero where it
            is accurate to a few ulp of itself.
    """

    f: Function
    slope: Function
    curvature: Curvature = field(default_factory=Inflections)
    critical: tuple[float, ...] = ()
    critical_period: float | None = None
    domain: Domain = field(default_factory=Domain)
    range: tuple[float, float] = (-math.inf, math.inf)
    slope_concave: Function | None = None
    cancellation: float = 0.0

    def critical_points(self, l: Tensor, u: Tensor) -> list[Tensor]:
        """Critical points in [l, u], one tensor each; where one lies outside, l stands in for it."""
        found = []
        for point in self.critical:
            if self.critical_period is None:
                x = torch.full_like(l, point)
            else:
                x = point + ((l.detach() - point) / self.critical_period).ceil() * self.critical_period
            found.append(torch.where((l <= x) & (x <= u), x, l))
        return found


@dataclass(frozen=True)
class Side:
    """The function as seen from below: f itself for lower lines, -f for upper lines, so that one derivation does both.

    Args:
        facts: of f.
        up: True for the lines above f.
    """

    facts: Facts
    up: bool

    def f(self, x: Tensor) -> Tensor:
        return -self.facts.f(x) if self.up else self.facts.f(x)

    def slope(self, x: Tensor) -> Tensor:
        if not self.up:
            return self.facts.slope(x)
        return -(self.facts.slope_concave or self.facts.slope)(x)

    def count(self) -> int:
        """How many convex pieces a box can meet."""
        return self.facts.curvature.count(convex=not self.up)

    @property
    def kinked(self) -> bool:
        """True if the slope jumps up at an end of a convex piece."""
        return self.up and self.facts.slope_concave is not None

    @property
    def convex_everywhere(self) -> bool:
        """True if there is no concave piece."""
        return self.facts.curvature.count(convex=self.up) == 0

    def pieces(self, l: Tensor, u: Tensor) -> list[Piece]:
        """The convex pieces."""
        return self.facts.curvature.pieces(l, u, convex=not self.up)
