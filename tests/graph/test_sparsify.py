"""Nearly empty weights become picks of their entries: same values, same bounds, and back again."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from parverify.bounding import digest
from parverify.bounds.region import BoxRegion
from parverify.graph.ir import BoundGraph
from parverify.graph.sparsify import densify, sparsify
from parverify.graph.trace import trace
from parverify.ops.sparse import dense
from parverify.parallel.world import World
from parverify.program.executor import Executor
from tests.distributed.ranks import on_ranks
from tests.distributed.test_divided import bounded, divided


def lattice(width: int = 256, *, seed: int = 0, trainable: bool = False) -> nn.Sequential:
    """Layers that choose and subtract pairs, between two dense ones."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [3, width, 2 * width, width, 2]
    layers: list[nn.Module] = []
    for n, m in itertools.pairwise(sizes):
        layer = nn.Linear(n, m)
        table = torch.randn(m, n, generator=generator)
        if n * m > 4 * width:
            taken = torch.arange(m)[:, None] * n // m == torch.arange(n)[None]
            taken |= (torch.arange(m)[:, None] * n // m + 1) % n == torch.arange(n)[None]
            table = table * taken
        layer.weight.data = table / max(1.0, float((table != 0).sum(1).max())) ** 0.5
        layer.bias.data = 0.1 * torch.randn(m, generator=generator)
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1]).requires_grad_(trainable)


def operators(module: nn.Module) -> list[str]:
    return [node.op for node in trace(module, (1, 3)) if node.op != "reshape"]


def test_only_large_and_nearly_empty_weights_that_do_not_change() -> None:
    assert operators(lattice()) == ["input", "linear", "act", "sparse", "act", "sparse", "act", "linear"]
    assert "sparse" not in operators(lattice(trainable=True))
    assert "sparse" not in operators(lattice(64))


def test_values_rows_and_the_way_back() -> None:
    module = lattice().double()
    graph = trace(module, (1, 3), dtype=torch.float64)
    back = densify(graph)
    assert [node.op for node in back] == [node.op.replace("sparse", "linear") for node in graph]
    for node, other in zip(graph, back, strict=True):
        if node.op == "sparse":
            consts = {role: graph.constants[name].value for role, name in node.consts.items()}
            weight = back.constants[other.consts["weight"]].value
            assert dense(node, consts).equal(weight)
            assert int((weight != 0).sum(1).max()) == 2
    assert [node.op for node in sparsify(back)] == [node.op for node in graph]
    x = torch.randn(64, 1, 3, dtype=torch.float64)
    values = Executor(graph, dtype=torch.float64).evaluate(x)
    torch.testing.assert_close(values, module(x.reshape(64, 3)).reshape(64, 1, 2))


def report(
    world: World, graph: BoundGraph, method: str, strategy: str = "single"
) -> tuple[str, list[tuple[Tensor, Tensor]]]:
    region = BoxRegion(torch.full((1, 3), -0.3, dtype=torch.float64), torch.full((1, 3), 0.2, dtype=torch.float64))
    network = divided(world, graph, strategy)
    boxes = bounded(network.executor(dtype=torch.float64), region, method, 32)
    return digest(boxes), boxes


@pytest.mark.parametrize("method", ["ibp", "crown", "alpha-crown"])
def test_bounds_are_those_of_the_dense_network_and_contain_samples(method: str) -> None:
    graph = trace(lattice().double(), (1, 3), dtype=torch.float64)
    found, dense_found = (report(World(), some, method)[1] for some in (graph, densify(graph)))
    for box, other in zip(found, dense_found, strict=True):
        for side, wanted in zip(box, other, strict=True):
            torch.testing.assert_close(side.flatten(), wanted.flatten(), rtol=1e-6, atol=1e-9)
    x = torch.rand(4000, 1, 3, dtype=torch.float64) * 0.5 - 0.3
    y = Executor(graph, dtype=torch.float64).evaluate(x).reshape(4000, -1)
    low, high = (side.reshape(1, -1) for side in found[-1])
    assert bool(((low <= y) & (y <= high)).all())


@pytest.mark.parametrize("strategy", ["fold", "fsdp"])
def test_bounds_divided_over_ranks_are_the_same_bit_for_bit(strategy: str) -> None:
    graph = trace(lattice().double(), (1, 3), dtype=torch.float64)
    alone = report(World(), graph, "alpha-crown")[0]
    assert {found[0] for found in on_ranks(2, report, graph, "alpha-crown", strategy)} == {alone}
