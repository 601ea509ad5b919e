"""Tensor parallelism on gloo ranks against one process: bounds, gradients, values, and the alphas that once drifted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from parverify.bounds.alpha import AlphaOptions, optimize
from parverify.bounds.joint import joint_bounds
from parverify.bounds.layers import BoundOptions, LayerBounds, bound_layers
from parverify.bounds.region import BoxRegion
from parverify.errors import DisagreementError
from parverify.graph.ir import BoundGraph
from parverify.graph.trace import trace
from parverify.ops.relaxation import Alpha
from parverify.parallel.world import World
from parverify.program.executor import Executor
from parverify.program.rows import Dense, OneHot, Rows, both_signs
from parverify.program.steps import Placement, Product
from parverify.program.sweep import Splits
from tests.bounds.zoo import METHODS, bounded, random_box
from tests.distributed.ranks import on_ranks
from tests.tp.networks import NETWORKS, executor, made, placement

SIZES = (2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow))
DOMAINS = 2
WIDTH = 0.5
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
# Adam divides by the magnitude of a gradient: where terms cancel, how they were rounded decides about a whole step.
# ReLU's slopes don't cancel in these networks; tanh's tangent points do, in one process with rounded sums as well.
LOOSE = {"tanh": 0.05, "twice_nonlinear": 0.05, "upward": 0.05}


def close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Equal up to a tolerance relative to the largest entry."""
    assert torch.equal(found.isfinite(), expected.isfinite())
    scale = float(expected[expected.isfinite()].abs().max()) if expected.isfinite().any() else 0.0
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * scale)


# --- bounds -----------------------------------------------------------------------------------------------------------


def all_bounds(runner: Executor, method: str) -> dict[str, Tensor]:
    """Boxes of all nodes and of the output, by name."""
    region = random_box(runner.graph, DOMAINS, WIDTH, 1, runner.dtype)
    found, output = bounded(runner, region, BoundOptions(method, AlphaOptions(3), tile=24))
    boxes = {**found.intervals, **{f"{name} by rows": box for name, box in found.boxes.items()}, "output": output}
    return {f"{name} {side}": box[side] for name, box in boxes.items() for side in (0, 1)}


def bounds_of_a_rank(world: World, name: str) -> dict[tuple[str, torch.dtype], dict[str, Tensor]]:
    """Method and dtype -> bounds."""
    graph = made(name)
    return {
        (method, dtype): all_bounds(executor(graph, world.comm, dtype), method)
        for method in METHODS
        for dtype in TOLERANCE
    }


@pytest.mark.parametrize("size", SIZES[1:2])
@pytest.mark.parametrize("name", NETWORKS)
def test_bounds_are_those_of_one_process(name: str, size: int) -> None:
    graph = made(name)
    ranks = on_ranks(size, bounds_of_a_rank, name)
    for (method, dtype), found in ranks[0].items():
        tolerance = TOLERANCE[dtype]
        if method == "alpha-crown":
            tolerance = max(tolerance, LOOSE.get(name, 0.0))
        expected = all_bounds(Executor(graph, dtype=dtype), method)
        assert found.keys() == expected.keys()
        for key, box in found.items():
            close(box, expected[key], tolerance)
            for other in ranks[1:]:
                assert torch.equal(other[method, dtype][key], box), f"ranks differ in {key}"


def test_ranks_may_have_no_alpha_of_their_own() -> None:
    """A network where only the last rank has alphas, in two zones with nothing to optimize between them."""
    runner = Executor(made("one_sided"), dtype=torch.float64)
    free = layers(runner, random_box(runner.graph, DOMAINS, WIDTH, 1, runner.dtype)).relaxed
    first, between, last = (list(free[node.name].free.get("lower", [])) for node in runner.graph.nonlinear)
    assert first and min(first) >= 4
    assert not between
    assert last and min(last) >= 6


def joint_of_a_rank(world: World, name: str) -> tuple[Tensor, Tensor]:
    """Output bounds with all alphas optimized together."""
    return jointly(executor(made(name), world.comm, torch.float64))


def jointly(runner: Executor, iterations: int = 4) -> tuple[Tensor, Tensor]:
    """Gradients flow through the bounds of neurons, in zones and outside, into their rows' alphas."""
    region = random_box(runner.graph, 1, WIDTH, 1, runner.dtype)
    return joint_bounds(runner, region, BoundOptions("alpha-crown", AlphaOptions(iterations), tile=24))[1]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["mlp5", "residual", "conv", "one_sided"])
def test_joint_alphas_are_those_of_one_process(name: str, size: int) -> None:
    expected = jointly(Executor(made(name), dtype=torch.float64))
    start = jointly(Executor(made(name), dtype=torch.float64), iterations=0)
    assert (expected[0] - start[0]).max() > 1e-3  # something is optimized
    for found in on_ranks(size, joint_of_a_rank, name):
        for side in (0, 1):
            close(found[side], expected[side], 1e-12)


def bounds_by_intervals(world: World, name: str) -> dict[str, Tensor]:
    """CROWN with intervals for neurons in zones."""
    return all_bounds(executor(made(name), world.comm, torch.float64, "ibp"), "crown")


def test_intervals_in_zones_are_sound_and_looser() -> None:
    name = "mlp4"
    found = on_ranks(2, bounds_by_intervals, name)[0]
    exact = all_bounds(Executor(made(name), dtype=torch.float64), "crown")
    for key, box in found.items():
        gap = (exact[key] - box) * (1 if key.endswith("0") else -1)
        assert (gap >= -1e-12 * exact[key].abs().max()).all()
    assert ((exact["output 0"] - found["output 0"]) / exact["output 0"].abs()).max() > 0.01


# --- one sweep and its gradients --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sweep:
    """What one sweep gives.

    Args:
        lower, A: of the rows.
        taps: node name -> rows.
        alphas: (node, role) -> flat index of each alpha's neuron, and its gradient (N, F).
        betas: node -> gradient of its multipliers.
    """

    lower: Tensor
    A: Tensor
    taps: Mapping[str, Tensor]
    alphas: Mapping[tuple[str, str], tuple[Tensor, Tensor]]
    betas: Mapping[str, Tensor]


def drawn(*shape: int, seed: int) -> Tensor:
    """Numbers in [0, 1)."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def some_splits(graph: BoundGraph, rows: int) -> dict[str, Splits]:
    """Three constraints a row, one of them unused, on every bounded node."""
    found = {}
    for seed, name in enumerate(graph.bounded):
        index = (drawn(rows, 3, seed=seed) * graph[name].numel).long()
        sign = (drawn(rows, 3, seed=seed + 50) - 0.5).sign()
        sign[:, 2] = 0
        point, beta = drawn(rows, 3, seed=seed + 100) - 0.5, drawn(rows, 3, seed=seed + 150)
        found[name] = Splits(index, sign, point, beta.requires_grad_())
    return found


def layers(runner: Executor, region: BoxRegion) -> LayerBounds:
    """CROWN bounds."""
    with torch.no_grad():
        return bound_layers(runner, region, BoundOptions("crown"))


def swept(runner: Executor, start: str, *, dense: bool, split: bool) -> Sweep:
    """A sweep with alphas that depend on the neuron only by its place in the network, not in the rank."""
    graph = runner.graph
    region = random_box(graph, DOMAINS, WIDTH, 1, torch.float64)
    relaxed = layers(runner, region).relaxed
    size = graph[start].numel
    owner = torch.arange(DOMAINS).repeat_interleave(size)
    rows: Rows = both_signs(torch.arange(size).repeat(DOMAINS), owner, torch.float64)
    if dense and isinstance(rows, OneHot):
        rows = Dense(rows.dense(graph[start].shape) + drawn(len(rows), *graph[start].shape, seed=9), None, rows.owner)
    alphas: dict[str, Alpha] = {}
    places: dict[tuple[str, str], Tensor] = {}
    for seed, name in enumerate(runner.program(start).relaxed):
        first = (runner.channels(name) or (0, 0))[0]
        for role, free in relaxed[name].free.items():
            everywhere = drawn(len(rows), graph[name].numel, seed=200 + seed)
            places[name, role] = free + first
            alphas.setdefault(name, {})[role] = everywhere[:, free + first].requires_grad_()
    splits = some_splits(graph, len(rows)) if split else {}
    splits = {name: item for name, item in splits.items() if graph[name] in graph.ancestors(start)}
    if not dense:
        splits.pop(start, None)
    result = runner.sweep(start, rows, relaxed, region, alphas=alphas, splits=splits, taps=True)
    leaves = [alphas[name][role] for name, role in places] + [item.beta for item in splits.values()]
    gradients = torch.autograd.grad((result.lower * (0.5 + drawn(len(rows), seed=8))).sum(), leaves) if leaves else ()
    of_alphas, of_betas = gradients[: len(places)], gradients[len(places) :]
    return Sweep(
        result.lower.detach(),
        result.A.detach(),
        {name: tap.detach() for name, tap in result.taps.items()},
        {key: (places[key], gradient) for key, gradient in zip(places, of_alphas, strict=True)},
        dict(zip(splits, of_betas, strict=True)),
    )


def all_sweeps(runner: Executor) -> dict[tuple[str, bool, bool], Sweep]:
    """From every node that rows start on, with one-hot and dense rows, with and without constraints."""
    starts = dict.fromkeys((*runner.graph.bounded, runner.graph.output))
    return {
        (start, dense, split): swept(runner, start, dense=dense, split=split)
        for start in starts
        for dense in (False, True)
        for split in (False, True)
    }


def sweeps_of_a_rank(world: World, name: str) -> dict[tuple[str, bool, bool], Sweep]:
    """All sweeps on one rank."""
    return all_sweeps(executor(made(name), world.comm, torch.float64))


@pytest.mark.parametrize("size", SIZES[2:])
@pytest.mark.parametrize("name", NETWORKS)
def test_sweeps_and_their_gradients_are_those_of_one_process(name: str, size: int) -> None:
    graph = made(name)
    expected = all_sweeps(Executor(graph, dtype=torch.float64))
    placed = placement(graph, 0, size)
    for rank, sweeps in enumerate(on_ranks(size, sweeps_of_a_rank, name)):
        for key, found in sweeps.items():
            one = expected[key]
            close(found.lower, one.lower, 1e-11)
            close(found.A, one.A, 1e-11)
            assert found.taps.keys() == one.taps.keys()
            for tap in one.taps:
                close(found.taps[tap], one.taps[tap], 1e-11)
            assert found.alphas.keys() == one.alphas.keys()
            for node, role in one.alphas:
                index, gradient = one.alphas[node, role]
                if node in placed.channels:
                    first, last = placement(graph, rank, size).channels[node].mine
                    inner = graph[node].numel // graph[node].shape[placed.channels[node].dim]
                    here = (index >= first * inner) & (index < last * inner)
                    index, gradient = index[here], gradient[:, here]
                assert torch.equal(found.alphas[node, role][0], index)
                scale = float(one.alphas[node, role][1].abs().max())
                torch.testing.assert_close(found.alphas[node, role][1], gradient, rtol=0, atol=1e-11 * scale)
            assert found.betas.keys() == one.betas.keys()
            for node, gradient in one.betas.items():
                close(found.betas[node], gradient, 1e-11)


# --- values -----------------------------------------------------------------------------------------------------------


def values_and_gradient(runner: Executor) -> dict[str, Tensor]:
    """Values of all nodes at some points, and the gradient of the output."""
    graph = runner.graph
    x = (drawn(3, graph.input.numel, seed=4) - 0.5).requires_grad_()
    found = runner.values(x)
    weights = drawn(*found[graph.output].shape, seed=5)
    (gradient,) = torch.autograd.grad((found[graph.output] * weights).sum(), x)
    return {name: value.detach() for name, value in found.items()} | {"gradient": gradient}


def values_of_a_rank(world: World, name: str) -> dict[str, Tensor]:
    """Values and gradient on one rank."""
    return values_and_gradient(executor(made(name), world.comm, torch.float64))


@pytest.mark.parametrize("size", SIZES[:1])
@pytest.mark.parametrize("name", NETWORKS)
def test_values_and_their_gradient_are_whole_on_every_rank(name: str, size: int) -> None:
    expected = values_and_gradient(Executor(made(name), dtype=torch.float64))
    ranks = on_ranks(size, values_of_a_rank, name)
    for found in ranks:
        for key, value in expected.items():
            close(found[key], value, 1e-13)
            assert torch.equal(found[key], ranks[0][key])


# --- replicated alphas ------------------------------------------------------------------------------------------------


class Difference(nn.Module):
    """relu(h1 + h2) - h1 with h = x: at least -1 on [-1, 1]^2.

    Where h is divided and the ReLU's alpha is not, each rank's partial gradient asks for another alpha: 1 makes the
    coefficient of h1 zero, 0 that of h2. An all-reduce of coefficients made with different alphas bounds nothing
    (arXiv:2606.09377 claims 0).
    """

    def __init__(self) -> None:
        super().__init__()
        self.h, self.sum, self.first = (nn.Linear(2, size, bias=False) for size in (2, 1, 1))
        with torch.no_grad():
            self.h.weight.copy_(torch.eye(2))
            self.sum.weight.copy_(torch.tensor([[1.0, 1.0]]))
            self.first.weight.copy_(torch.tensor([[1.0, 0.0]]))

    def forward(self, x: Tensor) -> Tensor:
        h = self.h(x)
        return torch.relu(self.sum(h)) - self.first(h)


@dataclass(frozen=True)
class Caught:
    """Ranks disagreed about a tensor."""

    tensor: str


SQUARE = BoxRegion(-torch.ones(1, 2, dtype=torch.float64), torch.ones(1, 2, dtype=torch.float64))


def without_reduce(placed: Placement) -> Placement:
    """Identity in place of the all-reduce in the gradients of rows that pass a row node: the pair is broken."""
    lowerings = {
        name: replace(lowering, pull=tuple(step for step in lowering.pull if isinstance(step, Product)))
        for name, lowering in placed.lowerings.items()
    }
    return replace(placed, lowerings=lowerings)


def claimed(world: World, how: str, *, broken: bool) -> float | Caught:
    """The lower bound that is claimed, or what ranks disagree about."""
    graph = trace(Difference(), (1, 2))
    placed = placement(graph, world.rank, world.size)
    runner = executor(graph, world.comm, torch.float64, placed=without_reduce(placed) if broken else placed)
    alpha = AlphaOptions(20)
    try:
        if how == "joint":
            _, (low, _) = joint_bounds(runner, SQUARE, BoundOptions("alpha-crown", alpha))
            return float(low)
        with torch.no_grad():
            relaxed = bound_layers(runner, SQUARE, BoundOptions("crown")).relaxed
        row = OneHot(torch.tensor([0]), torch.ones(1, dtype=torch.float64))
        checked = how == "checked"
        return float(optimize(runner, graph.output, row, relaxed, SQUARE, options=alpha, replicated=checked))
    except DisagreementError as error:
        return Caught(error.tensor)


def true_minimum() -> float:
    """On a grid with the corners."""
    side = torch.linspace(-1, 1, 41)
    with torch.no_grad():
        return float(Difference()(torch.cartesian_prod(side, side)).min())


def test_the_counterexample_is_divided_as_it_should_be() -> None:
    graph = trace(Difference(), (1, 2))
    placed = placement(graph, 0, 2)
    (act,) = graph.nonlinear
    assert len(placed.channels) == 1 and act.name not in placed.channels
    assert without_reduce(placed) != placed


@pytest.mark.parametrize("how", ["checked", "unchecked", "joint"])
def test_replicated_alphas_stay_equal_and_bounds_true(how: str) -> None:
    assert true_minimum() == -1
    for bound in on_ranks(2, claimed_rightly, how):
        assert bound == pytest.approx(-1, abs=1e-9) and bound <= -1


def test_an_identity_backward_makes_alphas_drift_and_is_caught() -> None:
    for how in ("checked", "joint"):
        assert all(isinstance(found, Caught) for found in on_ranks(2, claimed_wrongly, how))
    unsound = on_ranks(2, claimed_wrongly, "unchecked")
    assert all(isinstance(bound, float) and bound > true_minimum() + 0.9 for bound in unsound)


def claimed_rightly(world: World, how: str) -> float | Caught:
    """With conjugate collectives."""
    return claimed(world, how, broken=False)


def claimed_wrongly(world: World, how: str) -> float | Caught:
    """With the identity in place of one."""
    return claimed(world, how, broken=True)
