"""Programs: every node once, from back to front, joins where several readers meet."""

from __future__ import annotations

import torch

from parverify.program.rows import Dense, OneHot, both_signs, tiles
from parverify.program.steps import Affine, Concretize, Join, Relax, Seed, compile_sweep, single
from tests.bounds.zoo import made


def test_a_sweep_visits_every_node_between_start_and_input_once() -> None:
    graph = made("block")
    for start in (graph.output, *graph.bounded):
        program = compile_sweep(graph, start, single(graph))
        visited = [step.node for step in program.steps if isinstance(step, (Affine, Relax))]
        expected = [node.name for node in reversed(graph.ancestors(start)) if node.op != "input"]
        assert visited == expected
        assert program.steps[0] == Seed(start)
        assert program.steps[-1] == Concretize(graph.input.name)
        assert list(program.relaxed) == [step.node for step in program.steps if isinstance(step, Relax)]


def test_joins_come_before_the_node_and_count_its_readers() -> None:
    graph = made("residual")
    program = compile_sweep(graph, graph.output, single(graph))
    for position, step in enumerate(program.steps):
        if isinstance(step, Join):
            assert step.readers == sum(node.inputs.count(step.node) for node in graph)
            assert step.readers > 1
            later = [s.node for s in program.steps[position + 1 :] if isinstance(s, (Affine, Relax, Concretize))]
            assert step.node in later
    assert any(isinstance(step, Join) for step in program.steps)


def test_only_the_start_is_picked() -> None:
    graph = made("mlp")
    for start in graph.bounded:
        steps = compile_sweep(graph, start, single(graph)).steps
        picked = [step.node for step in steps if isinstance(step, Affine) and step.picked]
        assert picked == [start]


def test_rows() -> None:
    rows = both_signs(torch.tensor([4, 1]), torch.tensor([0, 1]), torch.float64)
    assert len(rows) == 4
    assert rows.dense((2, 3)).flatten(1).tolist() == [
        [0, 0, 0, 0, 1, 0], [0, 1, 0, 0, 0, 0], [0, 0, 0, 0, -1, 0], [0, -1, 0, 0, 0, 0],
    ]  # fmt: skip
    assert rows.owner is not None
    assert rows.owner.tolist() == [0, 1, 0, 1]
    part = rows.take(slice(1, 3))
    assert isinstance(part, OneHot)
    assert part.sign.tolist() == [1, -1]
    dense = Dense(torch.ones(3, 2), torch.arange(3.0), torch.tensor([0, 0, 1])).take(slice(1, 3))
    assert dense.constant is not None
    assert dense.constant.tolist() == [1, 2]
    assert both_signs(torch.tensor([0]), None, torch.float32).owner is None


def test_tiles_cover_everything_once() -> None:
    for count in (0, 1, 5, 6, 7):
        for size in (1, 3, 10):
            parts = [list(range(count))[part] for part in tiles(count, size)]
            assert [i for part in parts for i in part] == list(range(count))
            assert all(0 < len(part) <= size for part in parts)
