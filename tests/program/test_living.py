"""Neurons that are off on all domains are left out of rows and products: the same bounds up to rounding, and only
where nothing waits for the whole row."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from parverify.bounds.layers import BoundOptions, LayerBounds, bound_layers
from parverify.bounds.region import BoxRegion
from parverify.graph.ir import BoundGraph
from parverify.graph.trace import trace
from parverify.ops.lines import FixedLine, Lines, SlopeLine
from parverify.ops.relaxation import RelaxedActivation, relax
from parverify.ops.rounding import allowance
from parverify.ops.weighted import Part
from parverify.program import sweep, weights
from parverify.program.executor import Executor
from parverify.program.rows import both_signs
from parverify.program.steps import Placement, resident, weighted_nodes
from parverify.program.sweep import Splits
from parverify.program.weights import Weights
from tests.bounds.zoo import NETWORKS, made, random_box

DOUBLE = torch.float64


@pytest.fixture(autouse=True, params=[weights.COPIED, 64], ids=["at once", "in blocks"])
def any_size(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Small networks leave neurons out, too, and copy entries of weights at once or in blocks."""
    monkeypatch.setattr(sweep, "COPY", 0)
    monkeypatch.setattr(weights, "COPIED", request.param)


@pytest.fixture
def pushed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """(channels that were pushed, channels that there are) of every product that left some out."""
    found: list[tuple[int, int]] = []
    push_some = Weights.push_some

    def spy(self: Weights, node: object, steps: object, A: Tensor, index: Tensor) -> Tensor:
        found.append((len(index), node.numel))  # type: ignore[attr-defined]
        return push_some(self, node, steps, A, index)  # type: ignore[arg-type]

    monkeypatch.setattr(Weights, "push_some", spy)
    yield found


def off(*, residual: bool = False) -> BoundGraph:
    """A network half of whose neurons are off."""
    torch.manual_seed(1)
    first, second, last = nn.Linear(3, 8), nn.Linear(8, 6), nn.Linear(6, 2)
    with torch.no_grad():
        first.bias[::2] -= 5
        second.bias[1:3] -= 50

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.last = first, second, last

        def forward(self, x: Tensor) -> Tensor:
            x = self.second(torch.relu(self.first(x)))
            return self.last(torch.relu(x) + x if residual else torch.relu(x))

    return trace(Network().double().eval(), (1, 3))


def bounds(graph: BoundGraph, region: BoxRegion, *, skips: bool, placement: Placement | None = None) -> list[Tensor]:
    """Of all layers, and of the outputs."""
    executor = Executor(graph, dtype=DOUBLE, placement=placement)
    executor.skips = skips
    with torch.no_grad():
        found = bound_layers(executor, region, BoundOptions("crown"))
        last = executor.sweep(graph.output, rows(graph, region), found.relaxed, region).lower
    return [*(side for box in found.boxes.values() for side in box), last]


def rows(graph: BoundGraph, region: BoxRegion):  # type: ignore[no-untyped-def]
    size = graph[graph.output].numel
    owner = torch.arange(region.domains).repeat_interleave(size)
    return both_signs(torch.arange(size).repeat(region.domains), owner, DOUBLE)


@pytest.mark.parametrize("name", [*NETWORKS, "off"])
@pytest.mark.parametrize("domains", [1, 3])
@pytest.mark.parametrize("ulps", [0.0, 2.0])
def test_the_bounds_are_the_same(name: str, domains: int, ulps: float, pushed: list[tuple[int, int]]) -> None:
    graph = off() if name == "off" else made(name)
    region = random_box(graph, domains, 0.3, 1, DOUBLE)
    with allowance(ulps):
        for some, every in zip(*(bounds(graph, region, skips=skips) for skips in (True, False)), strict=True):
            assert torch.equal(some.isfinite(), every.isfinite())
            torch.testing.assert_close(some, every, rtol=1e-9, atol=1e-9)
    assert name != "off" or any(some < every for some, every in pushed)


def test_a_neuron_that_lives_on_one_domain_lives() -> None:
    low, high = torch.tensor([[-2.0, -2.0, -2.0, 1.0]]), torch.tensor([[-1.0, 1.0, -1.0, 2.0]])
    node = off().nonlinear[0]
    boxes = torch.cat([low, low.roll(1, 1)]), torch.cat([high, high.roll(1, 1)])
    for box, index, free in ((low, high), [1, 3], [0]), (boxes, [0, 1, 2, 3], [1, 2]):
        relaxed = relax(node, [box])
        assert isinstance(relaxed, RelaxedActivation) and relaxed.living is not None
        assert relaxed.living.index.tolist() == index
        assert relaxed.living.relaxed.free["lower"].tolist() == free
        A = torch.randn(2, 4)
        (whole,), constant = relaxed.push(A, None, None)
        (some,), same = relaxed.living.relaxed.push(A[:, index], None, None)
        assert torch.equal(whole[:, index], some)
        torch.testing.assert_close(constant, same)
        rest = [place for place in range(4) if place not in index]
        assert not whole[:, rest].any()


def test_a_line_that_is_no_number_lives() -> None:
    zero, bad = torch.zeros(1, 2), torch.tensor([[0.0, torch.nan]])
    for tables in (bad, zero, zero, zero), (zero, bad, zero, zero), (zero, zero, bad, zero), (zero, zero, zero, bad):
        free, slope, chord, intercept = tables
        made = RelaxedActivation(Lines(SlopeLine(free, slope), FixedLine(chord, intercept)), (2,), {}, lean=True)
        assert made.living is not None and made.living.index.tolist() == [1]


def _layers(executor: Executor, region: BoxRegion) -> LayerBounds:
    executor.skips = True
    with torch.no_grad():
        return bound_layers(executor, region, BoundOptions("crown"))


def test_rows_with_a_split_or_a_gradient_or_another_reader_stay_whole(pushed: list[tuple[int, int]]) -> None:
    graph = off()
    region = random_box(graph, 1, 0.3, 1, DOUBLE)
    executor = Executor(graph, dtype=DOUBLE)
    found = _layers(executor, region)
    output = both_signs(torch.arange(2), None, DOUBLE)
    pushed.clear()
    with torch.no_grad():
        executor.sweep(graph.output, output, found.relaxed, region)
    assert [some for some, _ in pushed] == [2, 4]
    # a constraint on a neuron that is off puts a coefficient there
    sides = [torch.ones(4, 1, dtype=dtype) for dtype in (torch.int64, DOUBLE, DOUBLE, DOUBLE)]
    split = Splits(sides[0], -sides[1], 0 * sides[2], sides[3])
    for name, whole in zip([act.inputs[0] for act in graph.nonlinear], [[2], [4]], strict=True):
        swept = []
        for skips in (True, False):
            executor.skips = skips
            pushed.clear()
            with torch.no_grad():
                swept.append(executor.sweep(graph.output, output, found.relaxed, region, splits={name: split}).lower)
            assert [some for some, _ in pushed] == (whole if skips else [])
        torch.testing.assert_close(*swept, rtol=1e-12, atol=1e-12)
    executor.skips = True
    alphas = {name: relaxed.start(None, 4) for name, relaxed in found.relaxed.items()}
    pushed.clear()
    for given in (False, True):
        for alpha in alphas.values():
            for tensor in alpha.values():
                tensor.requires_grad_(given)
        swept.append(executor.sweep(graph.output, output, found.relaxed, region, alphas=alphas).lower)
    assert [some for some, _ in pushed] == [2, 4, 2]  # the first layer has an alpha with a gradient, the second none
    torch.testing.assert_close(swept[-2], swept[-1].detach(), rtol=1e-12, atol=1e-12)
    pushed.clear()
    bounds(off(residual=True), region, skips=True)
    assert {every for _, every in pushed} == {8}


@pytest.mark.parametrize("cut", [[0, 8], [0, 3, 8], [0, 1, 2, 7, 8]])
def test_parts_of_a_weight_are_pushed_with_their_share(cut: list[int], pushed: list[tuple[int, int]]) -> None:
    graph = off()
    region = random_box(graph, 2, 0.3, 1, DOUBLE)
    lowerings = {}
    for node in weighted_nodes(graph):
        out, into = graph.constants[node.consts["weight"]].value.shape
        edges = sorted({min(edge, out) for edge in cut})
        some = tuple(Part((a, b), (0, into)) for a, b in itertools.pairwise(edges))
        lowerings[node.name] = resident(node, some)
    placement = Placement("single", 0, 1, lowerings)
    for one, other in zip(
        bounds(graph, region, skips=True, placement=placement), bounds(graph, region, skips=False), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert any(some < every for some, every in pushed)


def test_a_layer_of_which_nothing_lives_passes_nothing_on(pushed: list[tuple[int, int]]) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)).double().eval()
    with torch.no_grad():
        module[2].bias -= 50
    graph = trace(module, (1, 3))
    region = random_box(graph, 1, 0.3, 1, DOUBLE)
    last = bounds(graph, region, skips=True)[-1]
    assert (0, 5) in pushed
    torch.testing.assert_close(last[:2], module[4].bias.detach(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(last[2:], -module[4].bias.detach(), rtol=1e-9, atol=1e-9)
