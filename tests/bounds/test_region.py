"""Regions: minima of rows in closed form against samples, minimizers, hulls, rounding outward."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from parverify.bounds.layers import BoundOptions
from parverify.bounds.region import BallRegion, BoxRegion, Region, outward_box, select
from parverify.errors import UsageError
from parverify.program.executor import Executor
from tests.bounds.zoo import METHODS, bounded, contains, made, rounded, values

DTYPES = (torch.float32, torch.float64)


def regions(dtype: torch.dtype, seed: int = 0) -> dict[str, Region]:
    """Two domains of four inputs of every kind."""
    generator = torch.Generator().manual_seed(seed)
    center = torch.randn(2, 4, generator=generator).to(dtype)
    eps = torch.tensor([0.4, 1.7]).to(dtype)
    return {
        "box": BoxRegion(center - eps[:, None], center + 2 * eps[:, None]),
        "point": BoxRegion(center, center),
        "l1": BallRegion(center, eps, 1),
        "l2": BallRegion(center, eps, 2),
        "l2 point": BallRegion(center, torch.zeros_like(eps), 2),
    }


def inner(region: Region, count: int) -> Tensor:
    """(2, count, n) points of a region in float64: half of them on its boundary."""
    generator = torch.Generator().manual_seed(5)
    if isinstance(region, BoxRegion):
        low, high = region.lower.double()[:, None], region.upper.double()[:, None]
        t = torch.rand(2, count, low.shape[-1], generator=generator, dtype=torch.float64)
        t[:, ::2] = t[:, ::2].round()
        return torch.minimum(torch.maximum(low + t * (high - low), low), high)
    assert isinstance(region, BallRegion)
    step = torch.randn(2, count, region.center.shape[1], generator=generator, dtype=torch.float64)
    step[:, ::3] *= torch.nn.functional.one_hot(torch.randint(step.shape[2], step[:, ::3].shape[:2]), step.shape[2])
    step = step / step.norm(dim=2, p=region.p, keepdim=True)
    step[:, 1::2] *= torch.rand(2, step[:, 1::2].shape[1], 1, generator=generator, dtype=torch.float64)
    return region.center.double()[:, None] + region.eps.double()[:, None, None] * step


KINDS = list(regions(torch.float64))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_lower_bound_is_the_minimum(kind: str, dtype: torch.dtype) -> None:
    region = regions(dtype)[kind]
    A = torch.randn(12, 4, generator=torch.Generator().manual_seed(1)).to(dtype)
    owner = torch.arange(12) % 2
    bound = region.lower_bound(A, owner)
    x = inner(region, 3000)
    reached = torch.einsum("nk,nck->nc", A.double(), x[owner]).amin(1)
    assert (bound.double() <= reached + 1e-14).all()
    point = region.minimizer(A, owner)
    attained = (A.double() * point.double()).sum(1)
    tolerance = 32 * torch.finfo(dtype).eps * (1 + A.abs().sum(1).double() * x.abs().max())
    assert (attained - bound.double()).abs().le(tolerance).all()
    low, high = (side.double() for side in region.box())
    assert (point.double() >= low[owner] - 1e-6).all()
    assert (point.double() <= high[owner] + 1e-6).all()


@pytest.mark.parametrize("kind", KINDS)
def test_without_owner_row_i_belongs_to_domain_i(kind: str) -> None:
    region = regions(torch.float64)[kind]
    A = torch.randn(2, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    owned = region.lower_bound(A, torch.arange(2))
    torch.testing.assert_close(region.lower_bound(A, None), owned, rtol=1e-12, atol=1e-12)
    for i in range(2):
        one = select(region, torch.tensor([i]))
        assert one.domains == 1
        torch.testing.assert_close(one.lower_bound(A[i : i + 1], None), owned[i : i + 1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_box_contains_the_region(kind: str, dtype: torch.dtype) -> None:
    for seed in range(20):
        region = regions(dtype, seed)[kind]
        low, high = region.box()
        x = inner(region, 400)
        assert (low.double()[:, None] <= x + 1e-15).all()
        assert (high.double()[:, None] >= x - 1e-15).all()
        if isinstance(region, BallRegion):
            assert (low.double() <= region.center.double() - region.eps.double()[:, None]).all()
            assert (high.double() >= region.center.double() + region.eps.double()[:, None]).all()


@pytest.mark.parametrize("p", [1, 2])
def test_a_ball_is_never_looser_than_its_box(p: int) -> None:
    ball = regions(torch.float64)[f"l{p}"]
    A = torch.randn(40, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    owner = torch.arange(40) % 2
    assert (ball.lower_bound(A, owner) >= BoxRegion(*ball.box()).lower_bound(A, owner) - 1e-12).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("name", ["mlp", "residual", "tanh", "product", "softmax"])
def test_bounds_over_balls_contain_samples(name: str, p: int, method: str) -> None:
    graph = made(name)
    for dtype in DTYPES:
        center = torch.randn(2, 3, generator=torch.Generator().manual_seed(4)).to(dtype)
        region = BallRegion(center, torch.tensor([0.3, 0.7]).to(dtype), p)
        found, output = bounded(Executor(graph, dtype=dtype), region, BoundOptions(method))
        inside = values(graph, inner(region, 1500))
        for key, box in [*found.intervals.items(), (graph.output, output)]:
            assert contains(box, inside[key]), key


@pytest.mark.parametrize("p", [1, 2])
def test_linear_networks_over_balls_are_exact(p: int) -> None:
    from parverify.graph.trace import trace

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    graph = rounded(trace(module, (1, 3)))
    center, eps = torch.randn(1, 3, dtype=torch.float64), torch.tensor([0.6], dtype=torch.float64)
    executor = Executor(graph, dtype=torch.float64)
    _, (low, high) = bounded(executor, BallRegion(center, eps, p), BoundOptions("crown"))
    J = torch.func.jacrev(lambda x: executor.evaluate(x)[0, 0])(center)[:, 0]
    radius = eps * J.norm(p=math.inf if p == 1 else 2, dim=1)
    value = executor.evaluate(center)
    torch.testing.assert_close(low, value - radius, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(high, value + radius, rtol=1e-12, atol=1e-12)


def test_other_norms_are_refused() -> None:
    with pytest.raises(UsageError, match="norm 3"):
        BallRegion(torch.zeros(1, 2), torch.ones(1), 3)


def test_rounding_goes_outward() -> None:
    low = torch.linspace(-3, 3, 1001, dtype=torch.float64)
    box = outward_box(low, low + 1e-12, torch.float32)
    assert (box.lower.double() <= low).all()
    assert (box.upper.double() >= low + 1e-12).all()
    assert (box.upper - box.lower).max() < 1e-6
    exact = torch.tensor([0.5, -0.25], dtype=torch.float64)
    assert torch.equal(outward_box(exact, exact, torch.float32).lower[0].double(), exact)


def test_an_unbounded_region_proves_nothing() -> None:
    region = BoxRegion(torch.tensor([[-math.inf, 0.0]]), torch.tensor([[math.inf, 1.0]]))
    bound = region.lower_bound(torch.tensor([[1.0, 1.0], [-1.0, 2.0]]), torch.tensor([0, 0]))
    assert not bound.isfinite().any()
    assert not (bound == math.inf).any()


def test_domains_in_one_box_are_bounded_like_boxes_of_their_own() -> None:
    generator = torch.Generator().manual_seed(2)
    low = torch.randn(1, 5, generator=generator, dtype=torch.float64)
    one = select(BoxRegion(low, low + 0.3), torch.zeros(150, dtype=torch.int64))
    assert isinstance(one, BoxRegion)
    assert one.domains == 150
    for region in (BoxRegion(low, low), BoxRegion(low.expand(2, -1).clone(), low.expand(2, -1).clone())):
        with pytest.raises(IndexError):
            select(region, torch.tensor([0, 2]))
    own = BoxRegion(one.lower.clone(), one.upper.clone())
    rows = torch.randn(300, 5, generator=generator, dtype=torch.float64)
    owner = torch.arange(150).repeat(2)
    for A, whose in ((rows[:150], None), (rows, owner)):
        for mine, other in (
            (one.lower_bound(A, whose), own.lower_bound(A, whose)),
            (one.magnitude(A, whose), own.magnitude(A, whose)),
            (one.minimizer(A, whose), own.minimizer(A, whose)),
        ):
            torch.testing.assert_close(mine, other, rtol=1e-13, atol=1e-13)
    with torch.enable_grad():
        leaf = rows[:150].clone().requires_grad_()
        gradients = [torch.autograd.grad(box.lower_bound(leaf, None).sum(), leaf)[0] for box in (one, own)]
    torch.testing.assert_close(*gradients, rtol=1e-13, atol=1e-13)
