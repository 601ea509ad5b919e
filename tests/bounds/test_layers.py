"""Bounds of random networks: soundness by sampling, and what must not change them."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from fractions import Fraction

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

from parverify.bounds.alpha import AlphaOptions, optimize
from parverify.bounds.layers import BoundOptions, bound_layers
from parverify.bounds.region import BallRegion, BoxRegion, select
from parverify.graph.ir import BoundGraph, Const
from parverify.graph.trace import trace
from parverify.ops.kernel import Box
from parverify.program.executor import Executor
from parverify.program.rows import both_signs
from tests.bounds.zoo import METHODS, NETWORKS, bounded, check_sound, made, random_box

FEW = AlphaOptions(iterations=3)
WIDTHS = (0.0, 1e-6, 1e-2, 0.3, 3.0, 100.0, 1e6)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_with_every_method(name: str, method: str) -> None:
    graph = made(name)
    for width in (0.0, 0.2, 2.0):
        region = random_box(graph, 2, width, 3, torch.float64)
        check_sound(graph, region, BoundOptions(method, FEW), torch.float64, 600)
        region = random_box(graph, 2, width, 3, torch.float32)
        check_sound(graph, region, BoundOptions(method, FEW), torch.float32, 600)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(NETWORKS)), st.integers(0, 10**6), st.sampled_from(WIDTHS), st.integers(1, 3),
       st.sampled_from([torch.float32, torch.float64]),
       st.builds(BoundOptions, method=st.sampled_from(METHODS), alpha=st.just(FEW), tile=st.sampled_from([1, 3, 512]),
                 intersect=st.booleans()))  # fmt: skip
def test_sound_everywhere(
    name: str, seed: int, width: float, domains: int, dtype: torch.dtype, options: BoundOptions
) -> None:
    graph = made(name, seed)
    check_sound(graph, random_box(graph, domains, width, seed + 1, dtype), options, dtype)


def close(one: Box, other: Box, tolerance: float = 1e-9) -> None:
    """Equal up to `tolerance` of the largest finite bound; infinities alike."""
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a.isinf(), b.isinf())
        a, b = a.nan_to_num(posinf=0, neginf=0), b.nan_to_num(posinf=0, neginf=0)
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * max(1.0, float(b.abs().max())))


def everything(graph: BoundGraph, region: BoxRegion, options: BoundOptions) -> dict[str, Box]:
    found, output = bounded(Executor(graph, dtype=torch.float64), region, options)
    return found.boxes | {"output bounds": output}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", NETWORKS)
def test_neither_tiles_nor_batches_change_bounds(name: str, method: str) -> None:
    """After one step of alpha for ReLU, none for smooth activations: Adam's first step is the sign of the gradient,
    which rounding decides where tangents start at their best point.
    """
    graph = made(name, 1)
    region = random_box(graph, 3, 0.3, 4, torch.float64)
    options = BoundOptions(method, AlphaOptions(iterations=int(graph.piecewise_linear)))
    whole = everything(graph, region, options)
    for tile in (1, 3):
        for key, box in everything(graph, region, replace(options, tile=tile)).items():
            close(box, whole[key], 1e-7)
    for domain in range(3):
        alone = everything(graph, select(region, torch.tensor([domain])), options)
        for key, box in alone.items():
            close(box, (whole[key][0][domain : domain + 1], whole[key][1][domain : domain + 1]), 1e-7)


def looseness(boxes: dict[str, Box], name: str) -> Tensor:
    low, high = boxes[name]
    return (high - low).flatten()


@pytest.mark.parametrize("name", NETWORKS)
def test_methods_are_ordered_by_tightness(name: str) -> None:
    """Boxes that are intersected with intervals are never wider than those; wider means by more than rounding."""
    graph = made(name, 2)
    region = random_box(graph, 1, 0.5, 5, torch.float64)
    ibp, crown, alpha = (everything(graph, region, BoundOptions(m, FEW)) for m in ("ibp", "crown", "alpha-crown"))
    for key in graph.bounded:
        for box in (crown[key], alpha[key]):
            assert (box[0] >= ibp[key][0] - 1e-9 * (1 + ibp[key][0].abs())).all()
            assert (box[1] <= ibp[key][1] + 1e-9 * (1 + ibp[key][1].abs())).all()
    first = next((key for key in graph.bounded if not torch.equal(crown[key][0], ibp[key][0])), None)
    if first is not None:
        assert (looseness(alpha, first) <= looseness(crown, first) + 1e-9).all()


@pytest.mark.parametrize("name", NETWORKS)
def test_optimizing_and_intersecting_help(name: str) -> None:
    """Neither is a theorem for outputs, as tighter boxes may choose another default line; so by a few per cent."""
    graph = made(name, 2)
    region = random_box(graph, 1, 0.5, 5, torch.float64)
    plain = everything(graph, region, BoundOptions("crown", intersect=False))
    met = everything(graph, region, BoundOptions("crown"))
    alpha = everything(graph, region, BoundOptions("alpha-crown"))
    worst, usual, best = (looseness(boxes, "output bounds").sum() for boxes in (plain, met, alpha))
    assert usual <= 1.05 * worst
    assert best <= usual * (1 + 1e-9)
    if name not in ("linear", "sort_of_step", "root"):
        assert best.isfinite()


@pytest.mark.parametrize("name", NETWORKS)
def test_optimizing_rows_never_loosens_them(name: str) -> None:
    graph = made(name, 5)
    region = random_box(graph, 2, 0.5, 6, torch.float64)
    executor = Executor(graph, dtype=torch.float64)
    with torch.no_grad():
        found = bound_layers(executor, region, BoundOptions("crown"))
    size = graph[graph.output].numel
    rows = both_signs(torch.arange(size).repeat(2), torch.arange(2).repeat_interleave(size), torch.float64)
    bounds = [
        optimize(executor, graph.output, rows, found.relaxed, region, options=AlphaOptions(n)) for n in (0, 1, 4, 12)
    ]
    for fewer, more in itertools.pairwise(bounds):
        assert (more >= fewer).all()


def test_known_boxes_are_used() -> None:
    graph = made("mlp", 4)
    region = random_box(graph, 1, 0.5, 7, torch.float64)
    executor = Executor(graph, dtype=torch.float64)
    name = graph.bounded[1]
    with torch.no_grad():
        free = bound_layers(executor, region, BoundOptions())
        low, high = free.boxes[name]
        middle = (low + high) / 2
        known = bound_layers(executor, region, BoundOptions(), known={name: (middle, high)})
    assert torch.equal(known.boxes[name][0], torch.maximum(middle, known.boxes[name][0]))
    assert (known.boxes[name][0] >= middle).all()
    assert (known.boxes[name][1] <= high + 1e-12).all()


SQUASHED = ("tanh", "softmax", "upward")


@pytest.mark.parametrize("intersect", [True, False])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["mlp", "convolutional", "residual", "product", "exp", *SQUASHED])
@pytest.mark.parametrize("bad", [math.nan, math.inf, 3e38])
def test_bad_weights_prove_nothing(name: str, method: str, bad: float, intersect: bool) -> None:
    """Whichever weight is no number, there is no finite bound of what depends on it."""
    graph = made(name)
    options = BoundOptions(method, FEW, intersect=intersect)
    region = random_box(graph, 2, 0.3, 3, torch.float32)
    for key, const in graph.constants.items():
        broken = replace(graph, constants={**graph.constants, key: Const(torch.full_like(const.value, bad))})
        _, (low, high) = bounded(Executor(broken), region, options)
        assert not low.isnan().any()
        assert not high.isnan().any()
        assert not (low == math.inf).any(), key
        assert not (high == -math.inf).any(), key
        squashed = method == "ibp" and name in SQUASHED  # the range of tanh is known whatever its input is
        if bad != 3e38 and not squashed:
            inside = Executor(broken, dtype=torch.float64).evaluate(region.lower.double())
            assert ((low == -math.inf) | inside.isfinite()).all(), key
            assert ((high == math.inf) | inside.isfinite()).all(), key


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("width", [math.inf, 3e38])
def test_unbounded_inputs_prove_nothing_wrong(method: str, width: float) -> None:
    for name in ("mlp", "residual", "sigmoid", "product", "square", "softmax", "division", "sin"):
        graph = made(name)
        high = torch.full((1, graph.input.numel), width)
        low = torch.full((1, graph.input.numel), -1.0)
        _, (lower, upper) = bounded(Executor(graph), BoxRegion(low, high), BoundOptions(method, FEW))
        points = torch.tensor([-1.0, 0.0, 1.0, 10.0, 100.0]).double()[:, None].expand(-1, graph.input.numel)
        inside = Executor(graph, dtype=torch.float64).evaluate(points)
        assert not lower.isnan().any()
        assert not upper.isnan().any()
        assert ((lower <= inside) | ~inside.isfinite()).all(), name
        assert ((upper >= inside) | ~inside.isfinite()).all(), name


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_coefficients_that_cancel(seed: int, bias: bool) -> None:
    """Two affine layers whose product cancels up to its last digits: rounding decides about the swept coefficient.

    The exact coefficient is known in rational arithmetic. The twin has the cancellation in the bias.
    """
    generator = torch.Generator().manual_seed(seed)
    first = 100 * torch.randn(64, 1, generator=generator)
    second = 100 * torch.randn(1, 64, generator=generator)

    def exact() -> Fraction:
        return sum((Fraction(float(second[0, i])) * Fraction(float(first[i, 0])) for i in range(64)), Fraction(0))

    second[0, 63], first[63, 0] = 1.0, 0.0
    first[63, 0] = float(-exact())
    one, two = nn.Linear(1, 64, bias=bias), nn.Linear(64, 1, bias=False)
    with torch.no_grad():
        one.weight.copy_(torch.zeros_like(first) if bias else first)
        if bias:
            one.bias.copy_(first[:, 0])
        two.weight.copy_(second)
    graph = trace(nn.Sequential(one, two), (1, 1))
    region = BoxRegion(torch.ones(1, 1), torch.ones(1, 1))
    for method in ("crown", "alpha-crown"):
        _, (low, high) = bounded(Executor(graph), region, BoundOptions(method, intersect=False))
        assert Fraction(float(low)) <= exact() <= Fraction(float(high))


@pytest.mark.parametrize("p", [1.0, 2.0])
def test_the_first_product_of_a_ball_is_bounded_by_its_dual_norm(p: float) -> None:
    """Interval arithmetic on the box around the ball would take the sum of the weight's magnitudes instead."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    graph = trace(module, (1, 5))
    center, eps = torch.randn(2, 5, dtype=torch.float64), torch.tensor([0.3, 0.5], dtype=torch.float64)
    with torch.no_grad():
        found = bound_layers(Executor(graph, dtype=torch.float64), BallRegion(center, eps, p), BoundOptions("ibp"))
        weight, bias = module[0].weight, module[0].bias
        spread = eps[:, None] * torch.linalg.vector_norm(weight, ord=torch.inf if p == 1 else 2, dim=1)
        middle = center @ weight.T + bias
    (name,) = graph.bounded
    low, high = (side.flatten(1) for side in found.boxes[name])
    torch.testing.assert_close(low, middle - spread)
    torch.testing.assert_close(high, middle + spread)
