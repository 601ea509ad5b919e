"""Programs as lines: every step once, bytes that agree with what a dry run counts, columns that line up."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from parverify.ops.weighted import piece_of
from parverify.parallel.comm import DryComm
from parverify.program.executor import Executor
from parverify.program.printer import Line, gradient_lines, held_lines, size_text, sweep_lines, written
from parverify.program.steps import Affine, Product, Relax, compile_sweep, single
from parverify.strategy.compile import compile_placement, starts
from parverify.strategy.directives import load_strategy, presets
from tests.bounds.zoo import made
from tests.strategy.graphs import wide

NETWORKS = ("mlp", "residual", "convolutional", "upward")
COMMUNICATION = {"gather": "all_gather", "broadcast": "broadcast", "shift": "shift", "collect": "all_gather",
                 "reduce": "all_reduce", "total": "all_reduce"}  # fmt: skip


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("name", presets())
def test_every_step_is_a_line(network: str, name: str) -> None:
    graph = made(network)
    for size in (1, 2, 3):
        for rank in range(size):
            placement = compile_placement(graph, load_strategy(name), rank, size)
            for start in starts(graph):
                program = compile_sweep(graph, start, placement)
                lines = sweep_lines(graph, placement, program, 4)
                wanted = [len(step.inner) + 1 if isinstance(step, Affine) else 1 for step in program.steps]
                assert len(lines) == sum(wanted)
                outer = [line.step for line in lines if not line.step.startswith(" ")]
                assert outer == [type(step).__name__.lower() for step in program.steps]


@pytest.mark.parametrize("name", presets())
def test_held_bytes_are_resident_bytes(name: str) -> None:
    graph = made("convolutional")
    for rank in range(2):
        placement = compile_placement(graph, load_strategy(name), rank, 2)
        lines = held_lines(graph, placement, 8)
        expected = sum(
            8 * math.prod(piece.shape(tuple(graph.constants[graph[node].consts["weight"]].value.shape)))
            for node, lowering in placement.lowerings.items()
            for piece in lowering.held
        )
        assert sum(line.bytes or 0 for line in lines) == expected > 0


def test_one_process() -> None:
    graph = made("mlp")
    placement = single(graph)
    program = compile_sweep(graph, graph.output, placement)
    text = written(sweep_lines(graph, placement, program, 4))
    last, relu, third = graph.output, program.relaxed[0], [n.name for n in graph if n.op == "linear"][2]
    assert [line.split() for line in text[:5]] == [
        ["seed", last, "[rows,", "1,", "3]", "12", "B", "a", "row"],
        ["affine", last, "[rows,", "1,", "3]", "12", "B", "a", "row"],
        ["push", last, "[0:3,", "0:6]", "[3,", "6]", "72", "B"],
        ["relax", relu, "[rows,", "1,", "6]", "24", "B", "a", "row"],
        ["affine", third, "[rows,", "1,", "6]", "24", "B", "a", "row"],
    ]
    assert text[2].startswith("  push")
    assert text[-1].split() == ["concretize", graph.input.name, "[rows,", "3]", "12", "B", "a", "row"]


def test_the_gradient_is_what_lies_before_a_slope() -> None:
    """Of four products the last, which is the first of the sweep, meets no slope before it."""
    graph = made("mlp")
    placement = compile_placement(graph, load_strategy("fold"), 0, 2)
    program = compile_sweep(graph, graph.output, placement)
    lines = gradient_lines(graph, placement, program, 4)
    steps = [step for step in program.steps if isinstance(step, (Affine, Relax))][1:]
    outer = [line for line in lines if not line.step.startswith(" ")]
    assert [line.node for line in outer] == [step.node for step in reversed(steps)]
    pulls = [line for line in lines if line.step == "  pull"]
    assert [line.node for line in pulls] == [
        inner.node
        for step in reversed(steps)
        if isinstance(step, Affine)
        for inner in step.adjoint
        if isinstance(inner, Product)
    ]
    nothing = made("linear")
    placement = single(nothing)
    assert not gradient_lines(nothing, placement, compile_sweep(nothing, nothing.output, placement), 4)


def test_a_gather_ahead_is_counted_once() -> None:
    graph = made("mlp")
    placement = compile_placement(graph, load_strategy("fsdp"), 0, 2)
    program = compile_sweep(graph, graph.output, placement)
    gathers = [line for line in sweep_lines(graph, placement, program, 4) if line.step == "  gather"]
    per_node = Counter(line.node for line in gathers)
    assert max(per_node.values()) == 2  # once ahead, once where it is used
    assert all(sum(bool(line.bytes) for line in gathers if line.node == node) == 1 for node in per_node)
    assert all((line.part == "on its way") == (line.bytes == 0) for line in gathers)


@pytest.mark.parametrize("network", [*NETWORKS, "wide"])
@pytest.mark.parametrize("name", presets())
@pytest.mark.parametrize("size", [2, 3])
def test_communication_is_what_a_dry_run_counts(network: str, name: str, size: int) -> None:
    """Push rows of ones through every product of a sweep on tensors without data, and compare call for call."""
    graph, rows = wide() if network == "wide" else made(network), 3
    for rank in range(size):
        placement = compile_placement(graph, load_strategy(name), rank, size)
        executor = _dry(graph, placement)
        program = compile_sweep(graph, graph.output, placement)
        lines = sweep_lines(graph, placement, program, 4)
        executor.comm.meter.clear()
        for step in program.steps:
            if isinstance(step, Affine) and step.inner:
                node = graph[step.node]
                place = placement.channels.get(node.name)
                shape = list(node.shape)
                if place is not None:
                    shape[place.dim] = place.sizes[rank]
                executor.weights.run(node, step.inner, [torch.empty(rows, *shape, device="meta")])
        expected: dict[str, list[int]] = {}
        for line in lines:
            kind = COMMUNICATION.get(line.step.strip())
            if kind is None or line.step == "total" or line.part == "on its way":
                continue
            figure = expected.setdefault(kind, [0, 0])
            figure[0] += 1
            # an all-reduce of several rows is rounded down once, not row by row
            figure[1] += _bytes(line, rows, size)
        found = {key: [figure["calls"], figure["bytes"]] for key, figure in executor.comm.meter.figures().items()}
        assert found == expected


def _bytes(line: Line, rows: int, size: int) -> int:
    if line.step == "  reduce":
        whole = 4 * math.prod(int(text) for text in line.shape[7:-1].split(","))
        assert line.bytes == 2 * (size - 1) * whole // size
        return 2 * (size - 1) * rows * whole // size
    return (line.bytes or 0) * (rows if line.each else 1)


def _dry(graph, placement) -> Executor:  # type: ignore[no-untyped-def]
    held = {
        (graph[node].consts["weight"], piece): torch.empty(
            piece.shape(tuple(graph.constants[graph[node].consts["weight"]].value.shape)), device="meta"
        )
        for node, lowering in placement.lowerings.items()
        for piece in lowering.held
    }
    comm = DryComm(placement.rank, placement.size)
    return Executor(graph, device="meta", placement=placement, held=held, comm=comm)


def test_pieces_of_products() -> None:
    graph = made("upward")
    placement = single(graph)
    program = compile_sweep(graph, graph.output, placement)
    shapes = {line.node: line.shape for line in sweep_lines(graph, placement, program, 4) if line.step == "  push"}
    for node, lowering in placement.lowerings.items():
        (step,) = [step for step in lowering.push if isinstance(step, Product)]
        weight = graph.constants[graph[node].consts["weight"]].value
        assert shapes[node] == str(list(piece_of(graph[node], step.part).of(weight).shape))


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536 * 1024, "1.5 MiB"), (1 << 40, "1.0 TiB")],
)
def test_sizes(count: int, text: str) -> None:
    assert size_text(count) == text


def test_columns() -> None:
    lines = [Line("push", "n1", "", "[3]", 12), Line("  broadcast", "n10", "[0:3]", "[3, 4]", 4096, each=True)]
    first, second = written(lines)
    assert first.index("n1") == second.index("n10") and first.index("[3]") == second.index("[3, 4]")
    assert (first.split()[-1], second[-len("4.0 KiB a row") :]) == ("B", "4.0 KiB a row") and not written([])
