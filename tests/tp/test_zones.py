"""Which weights pair up, which stand alone, which stay whole and why; and that all ranks meet in the same steps."""

from __future__ import annotations

import pytest

from parverify.errors import UsageError
from parverify.graph.ir import BoundGraph
from parverify.ops.weighted import WEIGHTED, parts
from parverify.program.steps import check_matching, compile_sweep, resident
from parverify.tp.lower import tp_lowerings
from parverify.tp.zones import Zones, find_zones
from tests.tp.networks import NETWORKS, made, names, placement

EXPECTED = {
    "mlp2": "cr",
    "mlp3": "cra",
    "mlp4": "crcr",
    "mlp5": "crcra",
    "one_output": "crw",
    "adjacent": "cr",
    "two_readers": "crra",
    "twice_nonlinear": "cr",
    "residual": "acra",  # the addition also reads what the first activation gives
    "tanh": "cra",
    "conv": "crcr",
    "two_images": "aaa",
    "tokens": "aaa",
    "upward": "awa",
    "one_sided": "crcr",
}


def letters(graph: BoundGraph, zones: Zones) -> str:
    """A letter for each weighted node: columns, rows, those alone, those that stay whole."""
    found = {zone.column: "c" for zone in zones.pairs} | {row: "r" for zone in zones.pairs for row in zone.rows}
    found |= dict.fromkeys(zones.alone, "a") | dict.fromkeys(zones.whole, "w")
    return "".join(found[name] for name in names(graph))


@pytest.mark.parametrize("name", NETWORKS)
def test_pairs_are_found_from_the_input_on(name: str) -> None:
    graph = made(name)
    assert letters(graph, find_zones(graph, names(graph), 2)) == EXPECTED[name]


def test_what_may_not_be_divided_ends_no_zone() -> None:
    graph = made("mlp4")
    first, second, third, last = names(graph)
    zones = find_zones(graph, [first, third, last], 2)
    assert [(zone.column, zone.rows) for zone in zones.pairs] == [(third, (last,))]
    assert zones.alone == (first,) and second not in zones.whole


def test_the_reason_is_said() -> None:
    graph = made("one_output")
    assert list(find_zones(graph, names(graph), 2).whole.values()) == ["1 output channels for 2 ranks"]
    assert list(find_zones(made("upward"), names(made("upward")), 2).whole.values()) == ["a convolution in 2 groups"]


def test_too_few_channels_begin_no_zone() -> None:
    graph = made("mlp3")  # widths 7, 5, 4
    assert letters(graph, find_zones(graph, names(graph), 5)) == "crw"
    assert letters(graph, find_zones(graph, names(graph), 6)) == "crw"
    assert letters(graph, find_zones(graph, names(graph), 8)) == "www"


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", NETWORKS)
def test_every_entry_of_a_divided_weight_is_on_one_rank(name: str, size: int) -> None:
    graph = made(name)
    placed = [placement(graph, rank, size) for rank in range(size)]
    for node in (node for node in graph if node.op in WEIGHTED):
        whole = graph.constants[node.consts["weight"]].value
        count = whole.new_zeros(whole.shape)
        for rank in range(size):
            (piece,) = placed[rank].lowerings[node.name].held
            piece.of(count).add_(1)
        divided = placed[0].lowerings[node.name] != resident(node, parts(node, whole.shape))
        assert (count == (1 if divided else size)).all()


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", NETWORKS)
def test_ranks_meet_in_the_same_steps(name: str, size: int) -> None:
    graph = made(name)
    placed = [placement(graph, rank, size) for rank in range(size)]
    for start in (graph.output, *graph.bounded):
        for one_hot in (False, True):
            programs = [compile_sweep(graph, start, place, one_hot=one_hot) for place in placed]
            check_matching(programs)


def test_a_pair_communicates_once_each_way() -> None:
    """One all-reduce behind the column for rows, one behind the row for the gradient; and that of the constants."""
    graph = made("mlp2")
    program = compile_sweep(graph, graph.output, placement(graph, 0, 2))
    assert [type(step).__name__ for step in program.collectives()] == ["Reduce", "Total", "Reduce"]


def test_neurons_in_a_zone_get_rows_unless_they_are_left_to_intervals() -> None:
    graph = made("mlp3")
    first = names(graph)[0]
    assert placement(graph, 0, 2).interval_only == frozenset()
    assert placement(graph, 0, 2, "ibp").interval_only == {first}
    graph = made("twice_nonlinear")
    assert placement(graph, 0, 2, "ibp").interval_only == set(graph.bounded)
    with pytest.raises(UsageError, match="choose one of rows, ibp"):
        tp_lowerings(graph, names(graph), 0, 2, "crown")
