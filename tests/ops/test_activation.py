"""Every activation: soundness of ranges and lines by sampling, tightness, unknown on bad input, gradients, facts."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.nn import functional as F

from parverify.errors import UsageError
from parverify.ops.activation import ACTIVATIONS, Activation, celu, elu, power, softplus
from parverify.ops.lines import Family, FixedLine
from parverify.ops.relu import MIN_WIDTH
from parverify.ops.smooth import Smooth

INF, NAN = math.inf, math.nan
ALPHAS = (None, 0.0, 0.3, 1.0)
EXTRA = [power(p) for p in (3, 4, 5, -1, -2, -3, 0.5, 1.5, -0.5, 2.7)]
EXTRA += [elu(0.5), elu(3.0), celu(2.0), softplus(3.0)]
ALL = [*ACTIVATIONS.values(), *EXTRA]
SMOOTH = [activation for activation in ALL if isinstance(activation, Smooth)]
STEPS = [ACTIVATIONS[name] for name in ("sign", "floor", "ceil", "round")]
SPECIAL = [0.0, 0.5, 1.0, 1.4142135623730951, 0.7518, 1.2785, 1.1924, 3.0, 2.39936, 1.5, math.pi / 2, math.pi]


def named(activations: list[Activation]) -> dict[str, object]:
    return {"argvalues": activations, "ids": [f"{i}-{a.name}" for i, a in enumerate(activations)]}


def true(activation: Activation, x: Tensor) -> Tensor:
    """The function in float64, by the definition that does not cancel."""
    return activation.known.f(x) if isinstance(activation, Smooth) else activation.fn(x)


def points(activation: Activation, l: Tensor, u: Tensor, *, count: int = 300) -> Tensor:
    """(points, D) float64 inside the boxes: the ends, dense near them, special points, a global and a local grid."""
    l, u = l.double(), u.double()
    t = torch.linspace(0, 1, count, dtype=torch.float64)
    t = torch.cat([t, t**8, 1 - t**8])[:, None]
    grid = [*SPECIAL, *(-x for x in SPECIAL), *torch.linspace(-9, 9, count).tolist()]
    if isinstance(activation, Smooth):
        grid += [*activation.known.critical, *getattr(activation.known.curvature, "points", ())]
    fixed = torch.tensor(grid, dtype=torch.float64)[:, None].expand(-1, l.shape[-1])
    return torch.cat([l + t * (u - l), fixed]).clamp(l, u)


def evaluated(family: Family, alpha: float | None) -> tuple[Tensor, Tensor]:
    start = family.default()
    assert ((start >= 0) & (start <= 1)).all()
    slope, intercept = family.line(None if alpha is None else torch.full_like(start, alpha))
    intercept = torch.zeros_like(slope) if intercept is None else intercept
    assert slope.isfinite().all()
    assert not intercept.isnan().any()
    return slope[0].double(), intercept[0].double()


def check(activation: Activation, l: Tensor, u: Tensor) -> None:
    """Lines and ranges of boxes (D,) hold at every sampled point, up to the rounding of this very check in float64."""
    x = points(activation, l, u)
    y = true(activation, x)
    defined = y.isfinite().all(0)
    lower, upper = activation.interval(l[None], u[None])
    assert (lower[0] <= y)[:, defined].all()
    assert (upper[0] >= y)[:, defined].all()
    lines = activation.relax(l[None], u[None])
    for alpha in ALPHAS:
        for family, sign in ((lines.lower, 1), (lines.upper, -1)):
            slope, intercept = evaluated(family, alpha)
            slope, intercept, xs, ys = slope[defined], intercept[defined], x[:, defined], y[:, defined]
            rounding = 4e-16 * ((slope * xs).abs() + ys.abs()) + 1e-300
            rounding = rounding + 4e-16 * torch.where(intercept.isinf(), 0, intercept.abs())
            excess = sign * (slope * xs + intercept - ys) - rounding
            assert not excess.isnan().any()
            worst = excess.max(0) if excess.numel() else None
            if worst is not None and worst.values.max() > 0:
                i = int(worst.values.argmax())
                box = l[defined][i].item(), u[defined][i].item()
                pytest.fail(f"{activation.name} alpha {alpha}: line off by {worst.values[i]:g} on {box}, sign {sign}")


def random_boxes(dtype: torch.dtype, n: int, seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)

    def pick(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=dtype)[torch.randint(len(values), (n,), generator=g)]

    center = torch.randn(n, generator=g, dtype=dtype) * pick([0.1, 1, 1, 5, 30, 1e3, 1e4])
    left, right = (torch.rand(n, generator=g, dtype=dtype) for _ in range(2))
    width = pick([0, 1e-7, 1e-3, 0.5, 3, 10, 100, 1e4, 1e30])
    l, u = center - left * width, center + right * width
    kind = torch.randint(5, (n,), generator=g)
    l, u = torch.where(kind == 0, l.abs(), l), torch.where(kind == 1, torch.minimum(u, -u), u)
    l, u = torch.where(kind == 2, torch.zeros_like(l), l), torch.where(kind == 3, torch.zeros_like(u), u)
    return torch.minimum(l, u), torch.maximum(l, u)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("activation", **named(ALL))
def test_lines_and_ranges_are_sound_on_random_boxes(activation: Activation, dtype: torch.dtype) -> None:
    check(activation, *random_boxes(dtype, 250, seed=1))


bounds = st.one_of(
    st.sampled_from([0.0, 1.0, -1.0, 0.5, 1.5, 2.5, 18.0, 20.0, -88.0, 89.0, 1e4, -1e4, 1e30, -1e30, 1e-30, 1e-40]),
    st.floats(-10, 10, width=32),
    st.floats(-1e6, 1e6, width=32),
)


@pytest.mark.parametrize("activation", **named(ALL))
@settings(max_examples=12, deadline=None, derandomize=True)
@given(pairs=st.lists(st.tuples(bounds, bounds), min_size=8, max_size=24), double=st.booleans())
def test_lines_and_ranges_are_sound(activation: Activation, pairs: list[tuple[float, float]], double: bool) -> None:
    box = torch.tensor(pairs, dtype=torch.float64 if double else torch.float32)
    check(activation, box.amin(-1), box.amax(-1))


@pytest.mark.parametrize("activation", **named(ALL))
def test_the_fast_function_is_the_function_of_the_facts(activation: Activation) -> None:
    x = torch.linspace(-8, 8, 401, dtype=torch.float64)
    expected = true(activation, x)
    torch.testing.assert_close(activation.fn(x), expected, atol=1e-14, rtol=1e-12, equal_nan=True)


@pytest.mark.parametrize("activation", **named(ALL))
def test_bad_bounds_give_nothing_or_the_global_range(activation: Activation) -> None:
    l = torch.tensor([[NAN, 0.5, NAN, -INF, 0.5, -INF]])
    u = torch.tensor([[1.0, NAN, NAN, 1.0, INF, INF]])
    lower, upper = activation.interval(l, u)
    assert not (lower.isnan() | upper.isnan()).any()
    x = torch.cat([torch.linspace(-60, 60, 2001), torch.tensor([-1e4, 1e4])]).double()
    y = true(activation, x)
    y = y[y.isfinite()]
    assert (lower[0, :3] <= y.min()).all()
    assert (upper[0, :3] >= y.max()).all()
    lines = activation.relax(l, u)
    for family, sign in ((lines.lower, 1), (lines.upper, -1)):
        for alpha in ALPHAS:
            slope, intercept = evaluated(family, alpha)
            assert (slope[:3] == 0).all()
            assert (sign * (intercept[:3] - y[:, None]) <= 0).all()
            if activation.name != "relu":
                assert (slope == 0).all()


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        *((name, low, 1.0) for name in ("log", "rsqrt", "reciprocal") for low in (-1.0, 0.0)),
        *(("sqrt", -1.0, 1.0), ("reciprocal", -1.0, 0.0), ("tan", 1.0, 2.0)),
    ],
)
def test_outside_of_the_domain_nothing_is_known(name: str, low: float, high: float) -> None:
    box = torch.tensor([[low]]), torch.tensor([[high]])
    lower, upper = ACTIVATIONS[name].interval(*box)
    assert lower.item() == -INF
    assert upper.item() == INF
    lines = ACTIVATIONS[name].relax(*box)
    assert [part.item() for part in lines.lower.line()] == [0, -INF]
    assert [part.item() for part in lines.upper.line()] == [0, INF]


def relu_by_choices(l: Tensor, u: Tensor) -> list[Tensor]:
    """Free, default slope, slope and intercept of the chord, and gap below, each chosen case by case."""
    unstable, active = (l < 0) & (u > 0), (l >= 0) & (u >= l)
    default = ((unstable & (u > -l)) | active).to(l.dtype)
    sloped = unstable & (u - l < INF)
    low, high = torch.where(sloped, l, -1.0), torch.where(sloped, u, 1.0)
    high = torch.maximum(high, low + MIN_WIDTH)
    slope = high / (high - low)
    intercept = 2 * torch.finfo(l.dtype).eps * high - slope * low
    flat = slope < torch.finfo(l.dtype).tiny
    slope, intercept = torch.where(flat, 0.0, slope), torch.where(flat, high, intercept)
    stable = active | ((u <= 0) & (l <= u))
    slope = torch.where(sloped, slope, active.to(l.dtype))
    intercept = torch.where(sloped, intercept, torch.where(stable, 0.0, INF))
    below = torch.where(unstable, torch.minimum(u, -l), 0.0)
    return [unstable.to(l.dtype), default, slope, intercept, torch.where(intercept.isfinite(), below, INF)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_relu_in_factors_is_relu_in_choices(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    relu = ACTIVATIONS["relu"]
    scales = 10.0 ** torch.arange(-12, 5, dtype=dtype)
    center, radius = (draw(40, 17, generator=generator, dtype=dtype) * scales for draw in (torch.randn, torch.rand))
    usual = center - radius.flip(-1), center + radius.flip(-1)
    special = torch.tensor([NAN, INF, 3e38, 1e30, 1.0, 1e-9, 1e-40, 0.0], dtype=dtype)
    pairs = torch.cartesian_prod(torch.cat([special, -special]), torch.cat([special, -special]))
    for l, u, known in ((*usual, True), (pairs[:, :1], pairs[:, 1:], False)):
        lines = relu.relax(l, u)
        assert isinstance(lines.upper, FixedLine)
        assert lines.upper.known == known
        found = [lines.lower.free, lines.lower.default(), *lines.upper.line(), relu.gap(l, u)[1]]
        for mine, expected in zip(found, relu_by_choices(l, u), strict=True):
            assert mine is not None
            assert torch.equal(mine, expected)


def test_gradients_of_relu_in_factors_are_those_in_choices() -> None:
    generator = torch.Generator().manual_seed(2)
    l = torch.randn(5, 30, generator=generator, dtype=torch.float64) - 0.3
    u = l + 2 * torch.rand(5, 30, generator=generator, dtype=torch.float64)
    with torch.enable_grad():
        l, u = l.requires_grad_(), u.requires_grad_()
        slope, intercept = ACTIVATIONS["relu"].relax(l, u).upper.line()
        assert intercept is not None
        mine = torch.autograd.grad((3 * slope + intercept).sum(), (l, u))
        slope, intercept = relu_by_choices(l, u)[2:4]
        expected = torch.autograd.grad((3 * slope + intercept).sum(), (l, u))
    torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)


def test_a_chord_that_underflows_is_the_constant_line() -> None:
    l, u = torch.tensor([[-1e30, -1.0]]), torch.tensor([[1e-30, 1.0]])
    slope, intercept = ACTIVATIONS["relu"].relax(l, u).upper.line()
    assert slope.tolist() == [[0.0, 0.5]]
    assert intercept is not None
    assert intercept[0, 0] == u[0, 0]


def test_relu_equals_the_closed_form() -> None:
    l = torch.tensor([[-1.0, -2.0, 1.0, -3.0, 0.0, -1.0]], dtype=torch.float64)
    u = torch.tensor([[2.0, 1.0, 2.0, -1.0, 3.0, 0.0]], dtype=torch.float64)
    lines = ACTIVATIONS["relu"].relax(l, u)
    slope, intercept = lines.upper.line()
    torch.testing.assert_close(slope, torch.tensor([[2 / 3, 1 / 3, 1, 0, 1, 0]], dtype=torch.float64))
    torch.testing.assert_close(intercept, torch.tensor([[2 / 3, 2 / 3, 0, 0, 0, 0]], dtype=torch.float64))
    slope, nothing = lines.lower.line()
    assert nothing is None
    assert slope.tolist() == [[1, 0, 1, 0, 1, 0]]
    slope, _ = lines.lower.line(torch.full_like(l, 0.25))
    assert slope.tolist() == [[0.25, 0.25, 1, 0, 1, 0]]
    assert lines.upper.free is None
    above, below = ACTIVATIONS["relu"].gap(l, u)
    torch.testing.assert_close(above, torch.tensor([[2 / 3, 2 / 3, 0, 0, 0, 0]], dtype=torch.float64))
    assert below.tolist() == [[1, 1, 0, 0, 0, 0]]


@pytest.mark.parametrize("activation", **named(SMOOTH))
def test_facts_agree_with_the_function(activation: Smooth) -> None:
    """Slopes against autograd, curvature against differences of slopes, critical points against their sign."""
    facts = activation.known
    x = torch.linspace(-7.03, 7.07, 3001, dtype=torch.float64)
    x = x[facts.domain.holds(x, x) & (x != 0)]
    for convex, slope in ((True, facts.slope), (False, facts.slope_concave or facts.slope)):
        for left, right in facts.curvature.pieces(x[:-1], x[1:], convex=convex):
            inside = (left == x[:-1]) & (right == x[1:]) & facts.domain.holds(left, right)
            left, right = left[inside].requires_grad_(), right[inside]
            (expected,) = torch.autograd.grad(facts.f(left).sum(), left)
            torch.testing.assert_close(slope(left), expected, atol=1e-9, rtol=1e-9)
            growth = (slope(right) - slope(left)) * (1 if convex else -1)
            assert (growth >= -1e-12 * slope(left).abs()).all()
    near = torch.tensor([-1e-3, 1e-3], dtype=torch.float64)
    for point in facts.critical:
        if isinstance(activation, Smooth) and facts.slope_concave is None:
            assert facts.slope(point + near).prod() < 0


def hull_height(y: Tensor) -> Tensor:
    """Height at the middle of the lower convex hull of (101, D) samples: no sound line is higher there."""
    best = y[50]
    for i in range(50):
        steep = (y[51:] - y[i]) / (torch.arange(51, 101)[:, None] - i)
        best = torch.minimum(best, (y[i] + steep * (50 - i)).min(0).values)
    return best


@pytest.mark.parametrize("activation", **named(SMOOTH))
def test_default_lines_are_near_the_best_ones(activation: Smooth) -> None:
    """At the middle, the default lines miss the convex hull by little of the range of the function."""
    g = torch.Generator().manual_seed(3)
    l = torch.rand(200, generator=g, dtype=torch.float64) * 8 - 4
    u = l + torch.rand(200, generator=g, dtype=torch.float64) * 6 + 0.01
    holds = activation.known.domain.holds(l, u)
    l, u = l[holds], u[holds]
    lower, upper = activation.interval(l[None], u[None])
    samples = true(activation, l + torch.linspace(0, 1, 101, dtype=torch.float64)[:, None] * (u - l))
    lines = activation.relax(l[None], u[None])
    for family, sign in ((lines.lower, 1), (lines.upper, -1)):
        slope, intercept = evaluated(family, None)
        height = sign * (slope * (l + u) / 2 + intercept)
        missing = (hull_height(sign * samples) - height) / (upper - lower)[0]
        assert missing.min() > -1e-3
        # Tangents at the middle are the hull where they are sound, and the nearest sound one else.
        assert missing.max() < 0.08


@pytest.mark.parametrize("name", ["sigmoid", "tanh", "erf", "atan", "softsign", "exp", "square", "log"])
def test_tangents_touch_and_chords_meet_both_ends(name: str) -> None:
    activation = ACTIVATIONS[name]
    l, u = torch.tensor([[0.5]], dtype=torch.float64), torch.tensor([[3.0]], dtype=torch.float64)
    lines = activation.relax(l, u)
    convex = name in ("exp", "square")
    tangent, chord = (lines.lower, lines.upper) if convex else (lines.upper, lines.lower)
    for alpha in (0.0, 0.5, 1.0):
        slope, intercept = tangent.line(torch.full_like(l, alpha))
        x = l + alpha * (u - l)
        torch.testing.assert_close(slope * x + intercept, activation.fn(x), atol=1e-13, rtol=1e-13)
    slope, intercept = chord.line()
    for x in (l, u):
        torch.testing.assert_close(slope * x + intercept, activation.fn(x), atol=1e-13, rtol=1e-13)
    assert chord.free is None or not chord.free.any()
    assert tangent.free is not None
    assert tangent.free.all()


def test_the_last_tangent_of_an_s_shape_passes_through_the_far_end() -> None:
    l, u = torch.tensor([[-3.0]], dtype=torch.float64), torch.tensor([[2.0]], dtype=torch.float64)
    lower = ACTIVATIONS["sigmoid"].relax(l, u).lower
    slope, intercept = lower.line(torch.ones_like(l))
    torch.testing.assert_close(slope * u + intercept, torch.sigmoid(u), atol=1e-12, rtol=0)
    slope, intercept = lower.line(torch.zeros_like(l))
    torch.testing.assert_close(slope * l + intercept, torch.sigmoid(l), atol=1e-14, rtol=0)


@pytest.mark.parametrize("activation", **named(ALL))
def test_split_points_lie_inside(activation: Activation) -> None:
    l = torch.tensor([[-1.0, -8.0, 0.3, -1e30, -INF, 2.0, -INF, -5.0, NAN]])
    u = torch.tensor([[1.0, 1.0, 0.7, 1e30, 4.0, INF, INF, -4.0, NAN]])
    cut = activation.split_point(l, u)
    assert cut.isfinite().all()
    if activation.name == "relu":
        assert (cut == 0).all()
    else:
        assert ((cut > l) & (cut < u))[0, :8].all()


@pytest.mark.parametrize("activation", **named(ALL))
def test_gaps_are_the_distance_of_the_default_lines(activation: Activation) -> None:
    l, u = torch.tensor([[0.4, 0.4, NAN]]), torch.tensor([[0.4, 1.3, 1.0]])
    above, below = activation.gap(l, u)
    size = activation.fn(l)[0, 1].abs() + 1
    assert (above[0, 0] < 1e-5 * size) & (below[0, 0] < 1e-5 * size)
    lines = activation.relax(l, u)
    x = torch.linspace(0.4, 1.3, 4001, dtype=torch.float64)
    y = true(activation, x)
    for family, found, sign in ((lines.lower, below, -1), (lines.upper, above, 1)):
        slope, intercept = evaluated(family, None)
        densest = (sign * (slope[1] * x + intercept[1] - y)).max()
        assert 0.9 * densest - 1e-5 * size <= found[0, 1] <= densest + 1e-5 * size


@pytest.mark.parametrize("activation", **named(ALL))
def test_rows_get_the_lines_of_their_domain(activation: Activation) -> None:
    l, u = torch.tensor([[0.3, 1.0], [0.5, 0.2]]), torch.tensor([[0.9, 1.2], [0.8, 7.0]])
    owner = torch.tensor([1, 0, 1])
    for family in (activation.relax(l, u).lower, activation.relax(l, u).upper):
        rows = family.select(owner)
        for alpha in (None, 0.25):
            full = None if alpha is None else torch.full((2, 2), alpha)
            for whole, part in zip(family.line(full), rows.line(None if full is None else full[owner]), strict=True):
                assert (whole is None) == (part is None)
                assert whole is None or torch.equal(whole[owner], part)
        assert (family.free is None) == (rows.free is None)


@pytest.mark.parametrize("activation", **named([a for a in ALL if a not in STEPS]))
def test_gradients_are_finite_and_right(activation: Activation) -> None:
    l = torch.tensor([[0.3, 0.2, 0.5, 0.1, NAN, 0.4]], dtype=torch.float64, requires_grad=True)
    u = torch.tensor([[1.1, 0.9, 0.5, 1.4, 1.0, INF]], dtype=torch.float64, requires_grad=True)

    def total(l: Tensor, u: Tensor) -> Tensor:
        parts = [torch.zeros(())]
        for family in (activation.relax(l, u).lower, activation.relax(l, u).upper):
            slope, intercept = family.line(torch.full_like(l, 0.4))
            parts += [slope[0, :4].sum(), torch.zeros(()) if intercept is None else intercept[0, :4].sum()]
        parts += [end[0, :4].sum() for end in activation.interval(l, u)]
        return torch.stack([part.double() for part in parts]).sum()

    total(l, u).backward()
    assert l.grad is not None
    assert l.grad.isfinite().all()
    step = 1e-6
    for index in (0, 1, 3):
        moved = torch.zeros_like(l)
        moved[0, index] = step
        with torch.no_grad():
            difference = (total(l + moved, u) - total(l - moved, u)) / (2 * step)
        torch.testing.assert_close(l.grad[0, index], difference, atol=1e-5, rtol=1e-5)


def test_alpha_has_a_gradient() -> None:
    l, u = torch.tensor([[-2.0, -3.0]]), torch.tensor([[1.0, -1.0]])
    alpha = torch.full_like(l, 0.5, requires_grad=True)
    slope, intercept = ACTIVATIONS["tanh"].relax(l, u).lower.line(alpha)
    assert intercept is not None
    (grad,) = torch.autograd.grad(slope.sum() + intercept.sum(), alpha)
    assert (grad != 0).all()


def test_step_values_at_jumps() -> None:
    x = torch.tensor([[-0.5, 0.5, 1.5, 2.5, 0.0]])
    assert ACTIVATIONS["round"].interval(x, x)[0].tolist() == [[0, 0, 2, 2, 0]]
    assert ACTIVATIONS["sign"].interval(x, x)[0].tolist() == [[-1, 1, 1, 1, 0]]
    lower, _ = ACTIVATIONS["floor"].interval(torch.tensor([[1.0]]), torch.tensor([[2.0]]))
    assert lower.item() == 1


def test_a_single_step_gets_the_sides_of_its_hull() -> None:
    l, u = torch.tensor([[-1.0]], dtype=torch.float64), torch.tensor([[2.0]], dtype=torch.float64)
    lines = ACTIVATIONS["sign"].relax(l, u)
    slope, intercept = lines.lower.line(torch.ones_like(l))
    assert (slope.item(), intercept.item()) == pytest.approx((1.0, -1.0))
    slope, intercept = lines.upper.line(torch.ones_like(l))
    assert (slope.item(), intercept.item()) == pytest.approx((2.0, 1.0))


@pytest.mark.parametrize(
    "make", [lambda: power(0), lambda: power(1), lambda: power(INF), lambda: softplus(-1.0), lambda: elu(-1.0)]
)
def test_parameters_that_are_not_allowed_are_refused(make: object) -> None:
    with pytest.raises(UsageError, match="allowed"):
        make()  # type: ignore[operator]


def test_torch_agrees_where_it_has_the_function() -> None:
    x = torch.linspace(-6, 6, 301, dtype=torch.float64)
    torch.testing.assert_close(ACTIVATIONS["softplus"].fn(x), F.softplus(x))
    torch.testing.assert_close(ACTIVATIONS["elu"].fn(x), F.elu(x))
    torch.testing.assert_close(celu(2.0).fn(x), F.celu(x, 2.0))
    torch.testing.assert_close(ACTIVATIONS["selu"].fn(x), F.selu(x))
