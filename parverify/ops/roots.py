"""Bisection on many intervals at once, and what is found with it: tangent points and exact least values.

Nothing here needs gradients: roots are detached, and the envelope theorem keeps the gradients of what is built on them.
All tensors are float64.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from parverify.ops.facts import Side

EPS = torch.finfo(torch.float64).eps


def bisect(holds: Callable[[Tensor], Tensor], good: Tensor, bad: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Narrow each interval around the point where `holds` changes from True (at `good`) to False (at `bad`).

    Halves in asinh(x), so that 1e30 takes as many steps as 100 does.

    Returns:
        The last points found good and bad.
    """
    for _ in range(steps):
        middle = torch.sinh((torch.asinh(good) + torch.asinh(bad)) / 2)
        middle = torch.minimum(torch.maximum(middle, torch.minimum(good, bad)), torch.maximum(good, bad))
        fine = holds(middle)
        good, bad = torch.where(fine, middle, good), torch.where(fine, bad, middle)
    return good, bad


def tangent_limit(side: Side, anchor: Tensor, good: Tensor, bad: Tensor, steps: int) -> Tensor:
    """The tangent point between `good` and `bad` whose tangent passes through the graph at `anchor`.

    Between the two the function is convex, between `bad` and `anchor` concave, so the set of tangents that pass below
    the graph at `anchor` ends somewhere between.

    Returns:
        The point, `good` where the whole way up to `bad` is sound, or NaN where not even the tangent at `good` is.
    """
    value = side.f(anchor)

    def below(point: Tensor) -> Tensor:
        return side.f(point) + side.slope(point) * (anchor - point) <= value

    found, _ = bisect(below, good, bad, steps)
    return torch.where(below(good), found, torch.nan)


def least(side: Side, slope: Tensor, l: Tensor, u: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """The minimum of `g(x) - slope x` over [l, u], exact up to rounding.

    It lies at an end or in a convex piece; there, a bracket of the stationary point and the tangents at its two ends
    bound it from below, so that the number of steps costs tightness only.

    Returns:
        Where (about), and a lower bound on the minimum.
    """

    def tilted(x: Tensor) -> Tensor:
        return side.f(x) - slope * x

    where, value = l, tilted(l)
    candidates = [(u, tilted(u))]
    for start, end in side.pieces(l, u):
        present = start < end
        start, end = torch.where(present, start, l), torch.where(present, end, l)
        left, right = bisect(lambda x: side.slope(x) <= slope, start, end, steps)
        at_start, at_end = side.slope(start) > slope, side.slope(end) <= slope
        left, right = torch.where(at_end, end, left), torch.where(at_start, start, right)
        left, right = torch.where(at_start, start, left), torch.where(at_end, end, right)
        fall, rise = side.slope(left) - slope, side.slope(right) - slope
        bound = torch.maximum(tilted(left) + fall * (right - left), tilted(right) - rise * (right - left))
        bound = torch.where(left == right, tilted(left), bound)
        candidates.append((left, torch.where(present, bound, torch.inf)))
    for x, bound in candidates:
        better = bound < value
        where, value = torch.where(better, x, where), torch.where(better, bound, value)
    return where, value
