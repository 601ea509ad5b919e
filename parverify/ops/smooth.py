"""Ranges and lines of smooth functions, derived from their facts.

For any slope k the tightest sound intercept is the minimum of `f(x) - k x` on the box, attained at an end or where the
slope equals k inside a convex piece. So the slope decides tightness only. Where at most one convex piece meets the box,
the supporting lines are the tangents in a part of that piece (a family with a free parameter) or else the chord; this
covers convex, concave and s-shaped functions (Zhang et al., CROWN, 2018; Shi et al., GenBaB, 2024) and gelu-like ones.
Where more pieces meet it, one slope is read off a sampled hull and its exact intercept found by bisection.

Everything is prepared in float64 and rounded outward to the dtype of the box.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from parverify.ops.elementwise import Activation
from parverify.ops.facts import Facts, Side
from parverify.ops.lines import Anchor, Family, FixedLine, Lines, Mirrored, TangentLine
from parverify.ops.places import places
from parverify.ops.roots import EPS, least, tangent_limit

LARGEST = torch.finfo(torch.float64).max
HUGE = 1e290  # beyond it, comparisons of tangents with chords may overflow in float64
SAMPLES = 17  # points for slopes over several pieces and for gaps; odd, so that the middle is one


@dataclass(frozen=True)
class Smooth(Activation):
    """An activation that is nothing but its facts; `facts` is always given."""

    facts: Facts | None = None

    @property
    def known(self) -> Facts:
        """The facts."""
        if self.facts is None:
            raise ValueError(f"activation {self.name} has no facts")
        return self.facts

    def interval(self, l: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        facts, wide = self.known, (l.double(), u.double())
        holds = facts.domain.holds(*wide)
        inside = holds & (torch.maximum(wide[0].abs(), wide[1].abs()) <= facts.domain.reach)
        safe = [torch.where(inside, end, torch.ones_like(end)) for end in wide]
        values = [facts.f(x) for x in (*safe, *facts.critical_points(*safe))]
        lower, upper = values[0], values[0]
        for value in values[1:]:
            lower, upper = torch.minimum(lower, value), torch.maximum(upper, value)
        numbers = ~(lower.isnan() | upper.isnan()) & inside
        unbounded = ~holds & ~(l.isnan() | u.isnan())
        least_value = torch.where(unbounded, -torch.inf, facts.range[0])
        most_value = torch.where(unbounded, torch.inf, facts.range[1])
        # A value that overflows is beyond the largest number, which is what can be said of it from this side.
        lower, upper = lower.clamp(max=LARGEST), upper.clamp(min=-LARGEST)
        lower = torch.where(numbers, lower - 4 * EPS * lower.abs(), least_value)
        upper = torch.where(numbers, upper + 4 * EPS * upper.abs(), most_value)
        lower, upper = _round_down(lower, l.dtype), -_round_down(-upper, l.dtype)
        floor, ceiling = lower.clamp(min=facts.range[0]), upper.clamp(max=facts.range[1])
        return torch.where(unbounded, lower, floor), torch.where(unbounded, upper, ceiling)

    def relax(self, l: Tensor, u: Tensor) -> Lines:
        lower, upper = self.interval(l, u)
        facts = self.known
        return Lines(
            _below(Side(facts, up=False), l, u, lower),
            Mirrored(_below(Side(facts, up=True), l, u, -upper)),
        )

    def split_point(self, l: Tensor, u: Tensor) -> Tensor:
        return inner_point(l, u, self.known.curvature.nearest)

    def gap(self, l: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        return sampled_gap(self, l, u)


def inner_point(l: Tensor, u: Tensor, nearest: Callable[[Tensor], Tensor]) -> Tensor:
    """The special point nearest to the middle if it lies well inside [l, u], else the middle."""
    middle = l / 2 + u / 2
    special = nearest(middle)
    margin = (u / 2 - l / 2) / 5
    inside = (special > l + margin) & (special < u - margin)
    middle = torch.where(inside, special, middle)
    # A box without a finite middle is cut near its finite end, or at 0.
    step_down, step_up = u - u.abs().clamp(min=1), l + l.abs().clamp(min=1)
    fallback = torch.where(u.isfinite(), step_down, torch.where(l.isfinite(), step_up, torch.zeros_like(l)))
    return torch.where(middle.isfinite(), middle, fallback)


def sampled_gap(activation: Activation, l: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Largest distance of the default lines from f at equally spaced points; inf where nothing is known."""
    with torch.no_grad():
        lines = activation.relax(l, u)
        (lower, low), (upper, high) = lines.lower.line(), lines.upper.line()
        above, below = torch.zeros_like(l), torch.zeros_like(l)
        for index in range(SAMPLES):
            x = l + (u - l) * (index / (SAMPLES - 1))
            value = activation.fn(x)
            above = torch.maximum(above, upper * x + (0 if high is None else high) - value)
            below = torch.maximum(below, value - lower * x - (0 if low is None else low))
        return above.nan_to_num(nan=torch.inf), below.nan_to_num(nan=torch.inf)


def _round_down(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A number of that dtype that is no larger, an ulp or two away."""
    info = torch.finfo(dtype)
    rounded = value.to(dtype)
    # Conversion to nearest may give +inf for a large finite number; the largest finite one is still no larger.
    rounded = torch.where(rounded == torch.inf, torch.where(value == torch.inf, rounded, info.max), rounded)
    pushed = rounded - info.eps * rounded.abs() - info.tiny
    return torch.where(rounded.isinf(), rounded, pushed)


def _masked(mask: Tensor, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """`function` of the masked elements only, zero elsewhere."""
    result = torch.zeros_like(tensors[0])
    (index,) = places(mask.flatten())
    if not len(index):
        return result
    found = function(*(tensor.flatten().index_select(0, index) for tensor in tensors))
    return result.flatten().index_copy(0, index, found).reshape(result.shape)


def _below(side: Side, l: Tensor, u: Tensor, floor: Tensor) -> Family:
    """Lower lines of `side` on [l, u]; `floor` is its lower bound there, the line of last resort."""
    wide_l, wide_u = l.double(), u.double()
    usable = side.facts.domain.known(wide_l, wide_u)
    wide_l = torch.where(usable, wide_l, torch.ones_like(wide_l))
    wide_u = torch.where(usable, wide_u, torch.ones_like(wide_u))
    constant = FixedLine(torch.zeros_like(floor), floor)
    if side.convex_everywhere:
        return _tangents(side, (l, u), (wide_l, wide_u), usable, (constant, constant))
    if side.count() == 0:
        return _checked(*_chord(side, wide_l, wide_u, l.dtype), usable, floor)
    for end in (wide_l, wide_u):
        usable = usable & (side.f(end).abs() < HUGE) & (end.abs() < HUGE)
    single, several = _meets(side, wide_l, wide_u)
    single, several = usable & single, usable & several
    slope, intercept = _chord(side, wide_l, wide_u, l.dtype)
    if side.count() > 1 or side.kinked:
        hull = _masked(several, lambda a, b: _hull_slope(side, a, b), wide_l, wide_u).to(l.dtype)
        slope = torch.where(several, hull, slope)
        steps = _steps(l.dtype)
        exact = _masked(several, lambda a, b, k: _exact(side, k, a, b, steps), wide_l, wide_u, slope.double())
        intercept = torch.where(several, _round_down(exact, l.dtype), intercept)
    fixed = _checked(slope, intercept, usable, floor)
    return _tangents(side, (l, u), (wide_l, wide_u), single, (fixed, constant))


def _meets(side: Side, l: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Bool: tangents in one convex piece will do; the hull must be sampled.

    The latter is so where several pieces meet the box, and where one does but an end of it is a kink, at which slopes
    that no tangent has may be the best ones.
    """
    count, crossing = torch.zeros_like(l), torch.zeros_like(l, dtype=torch.bool)
    for start, stop in side.pieces(l, u):
        present = (start < stop) | ((start == stop) & (l == u))
        count = count + present.to(count.dtype)
        crossing = crossing | (present & ((start > l) | (stop < u)))
    several = (count > 1) | (crossing if side.kinked else torch.zeros_like(crossing))
    return (count == 1) & ~several, several


def _steps(dtype: torch.dtype) -> int:
    """How often to halve, so that what is lost is small beside the dtype's own rounding."""
    return 48 if dtype == torch.float64 else 32


def _checked(slope: Tensor, intercept: Tensor, usable: Tensor, floor: Tensor) -> FixedLine:
    """The line where it is usable and finite, else the constant `floor`."""
    good = usable & slope.isfinite() & intercept.isfinite()
    return FixedLine(torch.where(good, slope, torch.zeros_like(slope)), torch.where(good, intercept, floor))


def _chord(side: Side, l: Tensor, u: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Slope of the chord in `dtype`, and the intercept that keeps the line below both ends.

    Sound where the chord is below the function: the slope's rounding error times the width is taken off, as inside a
    convex piece the minimum may move by that much.
    """
    low, high = side.f(l), side.f(u)
    width = u - l
    steep = (high - low) / torch.where(width > 0, width, torch.ones_like(width))
    exact = torch.where(width > 0, steep, side.slope(l).detach())
    slope = exact.to(dtype)
    k = slope.double()
    noise = 8 * EPS * (k.abs() + side.facts.cancellation) * (l.abs() + u.abs())
    ends = torch.minimum(low - k * l - 8 * EPS * low.abs(), high - k * u - 8 * EPS * high.abs())
    return slope, _round_down(ends - (k - exact).abs() * width - noise, dtype)


def _hull_slope(side: Side, l: Tensor, u: Tensor) -> Tensor:
    """Slope of the line that supports the sampled convex hull of the function at the middle of the box."""
    half = SAMPLES // 2
    xs = [l + (u - l) * (index / (SAMPLES - 1)) for index in range(SAMPLES)]
    ys = [side.f(x) for x in xs]
    best, slope = ys[half], side.slope(xs[half])
    for left in range(half):
        for right in range(half + 1, SAMPLES):
            steep = (ys[right] - ys[left]) / (xs[right] - xs[left])
            value = ys[left] + steep * (xs[half] - xs[left])
            better = value < best
            best, slope = torch.where(better, value, best), torch.where(better, steep, slope)
    return slope


def _exact(side: Side, slope: Tensor, l: Tensor, u: Tensor, steps: int) -> Tensor:
    """The tightest intercept for a slope; differentiable, the minimizer being held fixed."""
    with torch.no_grad():
        where, bound = least(side, slope, l, u, steps)
    value = side.f(where)
    plain = value - slope * where
    noise = 8 * EPS * (value.abs() + (slope.abs() + side.facts.cancellation) * (l.abs() + u.abs()))
    return plain - (plain - bound).detach() - noise


def _tangents(
    side: Side,
    box: tuple[Tensor, Tensor],
    wide: tuple[Tensor, Tensor],
    single: Tensor,
    others: tuple[FixedLine, FixedLine],
) -> TangentLine:
    """Tangents where one convex piece meets the box and some of them are sound.

    Args:
        side: the function.
        box, wide: l and u, and the same in float64 with a harmless box where bounds are of no use.
        single: (D, *shape) bool, where exactly one convex piece meets the box.
        others: the line where no tangent is sound, and the one where tangents would be but are no finite numbers.
    """
    (l, u), (wide_l, wide_u) = box, wide
    low, high = wide_l, wide_u
    anchors: tuple[Anchor, ...] = ()
    if not side.convex_everywhere:
        for left, right in side.pieces(wide_l, wide_u):
            present = single & (left < right)
            low, high = torch.where(present, left, low), torch.where(present, right, high)
        low, high, anchors = _limits(side, wide, (low, high), single, l.dtype)
    tangent = single & (low <= high)
    # Tangent points that are not used must not bring NaN into the gradients.
    low, high = (torch.where(tangent, point, torch.ones_like(point)).to(l.dtype) for point in (low, high))
    size = torch.where(tangent, l.abs() + u.abs(), torch.zeros_like(l))
    family = TangentLine(side, tangent, low, high, torch.full_like(l, 0.5), others[0], size, anchors)
    return _finite(family, (wide_l + wide_u) / 2, others[1])


def _limits(
    side: Side, wide: tuple[Tensor, Tensor], piece: tuple[Tensor, Tensor], single: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, tuple[Anchor, ...]]:
    """Which tangent points of the convex piece are sound at the far ends of the concave pieces beside it."""
    (l, u), (start, end) = wide, piece
    steps = _steps(dtype)
    left, right = single & (start > l), single & (end < u)
    with torch.no_grad():

        def limit(anchor: Tensor, good: Tensor, bad: Tensor) -> Tensor:
            return tangent_limit(side, anchor, good, bad, steps)

        from_left = _masked(left, limit, l, end, start)
        from_right = _masked(right, limit, u, start, end)
    low, high = torch.where(left, from_left, start), torch.where(right, from_right, end)
    anchors: list[Anchor] = []
    for concave, x in ((left, l), (right, u)):
        value = side.f(x)
        y = _round_down(value - 8 * EPS * value.abs(), dtype)
        anchors.append(Anchor(x.to(dtype), torch.where(concave, y, torch.inf)))
    return low, high, tuple(anchors)


def _finite(family: TangentLine, center: Tensor, constant: FixedLine) -> TangentLine:
    """Shrink the range of tangent points to where lines are finite numbers; `constant` serves where none is.

    The default tangent point is the middle of the box, or the sound point nearest to it.
    """
    low, high, tangent = family.low, family.high, family.tangent
    middle = low / 2 + high / 2
    with torch.no_grad():
        fine = []
        for point in (low, middle, high):
            slope, intercept = family.touch(point)
            fine.append(slope.isfinite() & intercept.isfinite())
    from_low = torch.where(fine[0], low, torch.where(fine[1], middle, high))
    from_high = torch.where(fine[2], high, torch.where(fine[1], middle, low))
    some = tangent & (fine[0] | fine[1] | fine[2])
    low, high = torch.where(some, from_low, torch.ones_like(low)), torch.where(some, from_high, torch.ones_like(low))
    span = high - low
    start = (center.to(low.dtype) - low) / torch.where(span > 0, span, torch.ones_like(span))
    start = torch.where(span > 0, start, torch.full_like(span, 0.5)).clamp(0, 1).detach()
    # A chord is no lower line where tangents are: what lost its tangents falls back to the constant.
    lost = tangent & ~some
    fixed = FixedLine(
        torch.where(lost, constant.slope, family.fixed.slope),
        torch.where(lost, constant.intercept, family.fixed.intercept),
    )
    return replace(family, tangent=some, low=low, high=high, start=start, fixed=fixed)
