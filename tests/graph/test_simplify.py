"""Passes keep values and do what they are for; the checker names what is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from parverify.errors import ModelError
from parverify.graph.builder import Builder, Var
from parverify.graph.ir import BoundGraph, Const, Node, check, derive, prune
from parverify.graph.simplify import fold_scales, merge_reshapes, simplify
from parverify.graph.trace import trace
from parverify.program.executor import Executor
from tests.graph.functions import FUNCTIONS, MODULES
from tests.graph.test_trace import Wrapped, points


def operators(graph: BoundGraph) -> list[str]:
    return [node.op for node in graph]


def evaluate(graph: BoundGraph, x: Tensor) -> Tensor:
    return Executor(graph, dtype=torch.float64).evaluate(x)


@pytest.mark.parametrize(
    "name", ["conv_bn", "conv_bn_no_bias", "convT_bn", "convT_groups_bn", "conv1d_bn", "conv3d_bn"]
)
def test_batch_norm_is_folded(name: str) -> None:
    shape, module = MODULES[name]
    assert [op for op in operators(trace(module, shape)) if op != "reshape"] == (
        ["input", "conv", "act"] if name == "conv_bn" else ["input", "conv"]
    )


def test_two_batch_norms_are_folded_into_a_linear_layer() -> None:
    shape, module = MODULES["linear_bn"]
    assert operators(trace(module, shape)) == ["input", "linear"]


@pytest.mark.parametrize("name", [*MODULES, *FUNCTIONS])
def test_no_pass_changes_a_finished_graph(name: str) -> None:
    shape, module = MODULES[name] if name in MODULES else FUNCTIONS[name]
    module = module if name in MODULES else Wrapped(module)
    graph = trace(module, shape, dtype=torch.float64)
    assert operators(simplify(graph)) == operators(graph)
    assert evaluate(simplify(graph), points(shape)).equal(evaluate(graph, points(shape)))


def built(*, read_twice: bool, factor: Tensor) -> BoundGraph:
    b = Builder((2, 3))
    weight = Const(torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    y = b.linear(b.input, weight, None)
    z = b.scale(y, Const(factor), 0.5)
    out = b.add(z, y) if read_twice else z
    assert isinstance(out, Var)
    return b.finish(out)


def test_a_scale_is_not_folded_into_a_value_that_others_read() -> None:
    graph = built(read_twice=True, factor=torch.full((4,), 3.0, dtype=torch.float64))
    folded = fold_scales(graph)
    assert "scale" in operators(folded)
    torch.testing.assert_close(evaluate(folded, points((2, 3))), evaluate(graph, points((2, 3))))


@pytest.mark.parametrize(
    ("shape", "folds"), [((4,), True), ((1, 4), True), ((1,), True), ((2, 1), False), ((2, 4), False)]
)
def test_a_scale_is_folded_where_it_is_per_channel(shape: tuple[int, ...], folds: bool) -> None:
    factor = torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
    graph = built(read_twice=False, factor=factor)
    folded = simplify(graph)
    assert ("scale" not in operators(folded)) == folds
    torch.testing.assert_close(evaluate(folded, points((2, 3))), evaluate(graph, points((2, 3))))


def test_scales_merge_in_every_combination() -> None:
    roles: list[dict[str, float]] = [{"factor": 2.0}, {"shift": -1.0}, {"factor": 3.0, "shift": 0.25}]
    for first in roles:
        for second in roles:
            b = Builder((2, 3))
            graph = b.finish(b.scale(b.scale(b.relu(b.input), **first), **second))  # type: ignore[arg-type]
            merged = simplify(graph)
            assert operators(merged) == ["input", "act", "scale"]
            torch.testing.assert_close(evaluate(merged, points((2, 3))), evaluate(graph, points((2, 3))))


def test_reshapes_merge_and_vanish() -> None:
    b = Builder((2, 3))
    graph = b.finish(b.reshape(b.reshape(b.relu(b.input), (6,)), (2, 3)))  # type: ignore[arg-type]
    assert operators(prune(merge_reshapes(graph))) == ["input", "act"]


def test_prune_drops_what_nobody_reads() -> None:
    b = Builder((2,))
    b.scale(b.input, 3.0)
    graph = prune(b.finish(b.scale(b.input, 2.0)))
    assert operators(graph) == ["input", "scale"]
    assert len(graph.constants) == 1


def test_the_checker_names_the_node() -> None:
    b = Builder((2,))
    graph = b.finish(b.scale(b.input, 2.0))
    broken = replace(graph.nodes[1], inputs=("nowhere",))
    with pytest.raises(ModelError, match=r"n1 \(scale.*nowhere"):
        check(BoundGraph((graph.nodes[0], broken), graph.output, graph.constants))
    with pytest.raises(ModelError, match="constant"):
        check(BoundGraph(graph.nodes, graph.output, {}))
    with pytest.raises(ModelError, match="twice"):
        check(BoundGraph((*graph.nodes, graph.nodes[1]), graph.output, graph.constants))
    with pytest.raises(ModelError, match="first node"):
        check(BoundGraph((Node("n", "scale", (), (2,)),), "n", {}))
    with pytest.raises(ModelError, match="output"):
        check(BoundGraph(graph.nodes, "missing", graph.constants))


def test_constants_keep_a_recipe_only_for_parameters() -> None:
    leaf = Const(torch.ones(2))
    parameter = Const(torch.nn.Parameter(torch.ones(2)))
    assert derive(torch.neg, leaf).fn is None
    made = derive(lambda a, b, factor: (a + b) * factor, leaf, parameter, 3.0)
    assert made.trainable
    assert not made.value.requires_grad
    assert made.live({}).requires_grad
    assert torch.equal(made.value, torch.full((2,), 6.0))


def test_index_of_everything_in_order_is_a_reshape() -> None:
    b = Builder((2, 3))
    graph = b.finish(b.index(b.input, torch.arange(6).reshape(3, 2)))
    assert operators(graph) == ["input", "reshape"]
