"""Placements: every entry of every weight is somewhere, ranks meet in all collectives, what can't be is refused."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from parverify.errors import ParverifyError, UsageError
from parverify.graph.ir import BoundGraph, Const, Node
from parverify.graph.trace import trace
from parverify.ops.weighted import Piece, parts, piece_of
from parverify.program.steps import (
    COLLECTIVES,
    Broadcast,
    Gather,
    Lowering,
    Placement,
    Shift,
    check_matching,
    compile_sweep,
    single,
    weighted_nodes,
)
from parverify.strategy.compile import check_all, compile_all, compile_placement, matches, place_nodes, starts
from parverify.strategy.directives import Interm, Order, Place, Strategy, load_strategy, presets
from tests.bounds.zoo import NETWORKS, made
from tests.strategy.graphs import shared, wide

SIZES = (1, 2, 3, 4, 5)


GRAPHS: dict[str, Callable[[], BoundGraph]] = {
    **{name: (lambda name=name: made(name)) for name in NETWORKS},  # type: ignore[misc]
    "wide": wide,
    "shared": shared,
}


def inner(lowering: Lowering) -> tuple[object, ...]:
    return (*lowering.push, *lowering.pull, *lowering.pick, *lowering.forward, *lowering.back)


def weight(graph: BoundGraph, node: Node) -> Tensor:
    return graph.constants[node.consts["weight"]].value


# --- all networks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", presets())
@pytest.mark.parametrize("network", GRAPHS)
def test_ranks_meet_and_hold_every_weight(network: str, name: str) -> None:
    graph, strategy = GRAPHS[network](), load_strategy(name)
    for size in SIZES:
        placements = compile_all(graph, strategy, size)
        assert [placement.rank for placement in placements] == list(range(size))
        assert {placement.size for placement in placements} == {size}
        assert {placement.strategy for placement in placements} == {name}
        assert all(p.splits_rows == (size > 1 and name in ("fold", "ring")) for p in placements)
        for node in weighted_nodes(graph):
            held = [placement.lowerings[node.name].held for placement in placements]
            if size == 1 or name == "single":
                shape = weight(graph, node).shape
                assert held == [(Piece((0, shape[0]), (0, shape[1])),)] * size
            elif name in ("fold", "ring"):
                check_parts_once(graph, node, held)
            elif name == "fsdp":
                rows = [row for (piece,) in held for row in range(*piece.rows)]
                assert rows == list(range(weight(graph, node).shape[0]))
                assert all(piece.columns == (0, weight(graph, node).shape[1]) for (piece,) in held)
            else:
                assert entries(graph, node, held) >= weight(graph, node).numel()


def check_parts_once(graph: BoundGraph, node: Node, held: list[tuple[Piece, ...]]) -> None:
    """Every part lies on exactly one rank, and the ranks hold nothing else."""
    pieces = [piece for some in held for piece in some]
    for part in parts(node, weight(graph, node).shape):
        assert sum(piece.covers(piece_of(node, part)) for piece in pieces) == 1
    assert entries(graph, node, held) == weight(graph, node).numel()


def entries(graph: BoundGraph, node: Node, held: list[tuple[Piece, ...]]) -> int:
    shape = tuple(weight(graph, node).shape)
    return sum(math.prod(piece.shape(shape)) for some in held for piece in some)


@pytest.mark.parametrize("name", presets())
def test_one_rank_communicates_nothing(name: str) -> None:
    graph = made("convolutional")
    placement = compile_placement(graph, load_strategy(name), 0, 1)
    assert placement == replace(single(graph), strategy=name)
    assert not any(isinstance(step, COLLECTIVES) for one in placement.lowerings.values() for step in inner(one))


@pytest.mark.parametrize("name", presets())
def test_only_shapes_are_read(name: str) -> None:
    graph = wide()
    bare = replace(graph, constants={key: Const(const.value.to("meta")) for key, const in graph.constants.items()})
    for rank in range(3):
        assert compile_placement(bare, load_strategy(name), rank, 3) == compile_placement(
            graph, load_strategy(name), rank, 3
        )


@pytest.mark.parametrize("name", ["fold", "ring", "fsdp"])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_hold_about_the_same(name: str, size: int) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(600, 600) for _ in range(5)]
    graph = trace(nn.Sequential(*[part for layer in layers for part in (layer, nn.ReLU())]), (1, 600))
    held = [
        sum(entries(graph, graph[node], [lowering.held]) for node, lowering in placement.lowerings.items())
        for placement in compile_all(graph, load_strategy(name), size)
    ]
    assert max(held) <= 1.05 * sum(held) / size


# --- what the strategies make of a node -------------------------------------------------------------------------------


def test_the_ring_streams_what_has_fewer_parts_than_ranks() -> None:
    graph = wide()
    kinds = Counter()
    for node in weighted_nodes(graph):
        steps = inner(compile_placement(graph, load_strategy("ring"), 0, 4).lowerings[node.name])
        few = len(parts(node, weight(graph, node).shape)) < 4
        assert any(isinstance(step, Broadcast) for step in steps) == few
        assert any(isinstance(step, Shift) for step in steps) != few
        kinds[few] += 1
    assert len(kinds) == 2


def test_prefetch_comes_from_the_strategy() -> None:
    graph = wide()
    for name, default in (("fsdp", True), ("fold", False)):
        for prefetch in (True, False):
            changed = Strategy(name, (*load_strategy(name).directives, Order(prefetch, override=True)))
            assert compile_placement(graph, changed, 0, 2).ahead is prefetch
        assert compile_placement(graph, load_strategy(name), 0, 2).ahead is default
    # the same broadcasts, each started before the product with the part before
    node = next(node.name for node in weighted_nodes(graph) if len(parts(node, weight(graph, node).shape)) > 1)
    plain, ahead = (
        compile_placement(graph, Strategy("s", (Place("*", "stream"), Order(on))), 0, 2).lowerings[node].push
        for on in (False, True)
    )
    assert plain != ahead and Counter(plain) == Counter(ahead)


def test_constants_that_are_read_elsewhere_stay_whole() -> None:
    graph = made("mlp")
    first, second = weighted_nodes(graph)[:2]
    changed = replace(second, consts={**second.consts, "bias": first.consts["weight"]})
    graph = replace(graph, nodes=tuple(changed if node is second else node for node in graph.nodes))
    places = place_nodes(graph, load_strategy("fold"))
    assert [places[node.name].how for node in weighted_nodes(graph)] == ["replicate", "stream", "stream", "stream"]


def test_nodes_that_share_a_weight() -> None:
    graph = shared()
    one, other, _ = (node.name for node in weighted_nodes(graph))
    assert graph[one].consts["weight"] == graph[other].consts["weight"]
    for name in ("fold", "ring", "fsdp"):
        placement = compile_placement(graph, load_strategy(name), 1, 3)
        assert placement.lowerings[one].held == placement.lowerings[other].held
    assert {place_nodes(graph, load_strategy("tp"))[name].how for name in (one, other)} == {"replicate"}
    with pytest.raises(UsageError, match=rf"place the weight that {one} and {other} share differently"):
        compile_placement(graph, Strategy("mine", (Place("*", "gather"), Place(other, "ring"))), 0, 2)


def test_later_directives_override_for_the_nodes_they_match() -> None:
    graph = wide()
    nodes = weighted_nodes(graph)
    strategy = Strategy("mine", (Place("*", "gather"), Place("linear", "stream"), Place(nodes[-1].name, "replicate")))
    found = place_nodes(graph, strategy)
    assert [found[node.name].how for node in nodes] == ["gather", "gather", "stream", "replicate"]
    reversed_found = place_nodes(graph, replace(strategy, directives=strategy.directives[::-1]))
    assert {place.how for place in reversed_found.values()} == {"gather"}
    for placement in compile_all(graph, strategy, 3):
        kinds = [{type(step) for step in inner(placement.lowerings[node.name])} for node in nodes]
        assert Gather in kinds[0] and Broadcast in kinds[2] and not kinds[3] & set(COLLECTIVES)


def test_matching() -> None:
    node = replace(made("mlp").nodes[1], name="n1", source="layer_0 Linear")
    for pattern in ("*", "n1", "n?", "linear", "layer_0", "Linear", "layer_* Lin*", "layer_[01]"):
        assert matches(pattern, node)
    for pattern in ("n2", "conv", "layer", "LINEAR", ""):
        assert not matches(pattern, node)


# --- channels ---------------------------------------------------------------------------------------------------------


def test_columns_and_rows_are_placed_one_by_one() -> None:
    graph = made("mlp")
    names = [node.name for node in weighted_nodes(graph)]
    asked = Strategy("mine", (Place(names[1], "column"), Place(names[2], "row")))
    for placement in compile_all(graph, asked, 2):
        assert set(placement.channels) == {names[1], *(node.name for node in graph if node.inputs == (names[1],))}
        assert set(held_shares(graph, placement)) == {names[1], names[2]}
    alone = Strategy("mine", (Place("linear", "column"),))
    for placement in compile_all(graph, alone, 2):
        assert not placement.channels and set(held_shares(graph, placement)) == set(names)
    paired = compile_all(graph, load_strategy("tp"), 2)
    assert names[0] in paired[0].channels and names[1] not in paired[0].channels


def held_shares(graph: BoundGraph, placement: Placement) -> list[str]:
    """Nodes of whose weight the rank does not hold everything."""
    return [
        name
        for name, lowering in placement.lowerings.items()
        if entries(graph, graph[name], [lowering.held]) < weight(graph, graph[name]).numel()
    ]


def test_interm_decides_which_neurons_get_rows() -> None:
    graph = made("mlp")
    assert not compile_placement(graph, load_strategy("tp"), 0, 2).interval_only
    tp = load_strategy("tp")
    loose = Strategy("tp", (*tp.directives, Interm("ibp", override=True)))
    placement = compile_placement(graph, loose, 0, 2)
    assert placement.interval_only and placement.interval_only <= set(placement.channels)


@pytest.mark.parametrize("how", ["column", "row"])
def test_what_can_not_be_divided_by_channels_is_refused(how: str) -> None:
    graph = made("upward")
    grouped = next(node.name for node in graph if node.op == "conv" and node.attrs["groups"] > 1)
    with pytest.raises(UsageError) as caught:
        compile_placement(graph, Strategy("mine", (Place(grouped, how),)), 0, 2)
    assert f'place {{ match = "{grouped}", how = "{how}" }}' in caught.value.message and grouped in caught.value.message
    if how == "column":
        assert "groups" in caught.value.message
    assert grouped in compile_placement(graph, load_strategy("tp"), 0, 2).lowerings


def test_more_ranks_than_channels_are_refused_for_a_column_only() -> None:
    graph = made("mlp")
    last = weighted_nodes(graph)[-1].name  # 3 outputs
    with pytest.raises(UsageError, match="3 output channels for 5 ranks"):
        compile_placement(graph, Strategy("mine", (Place(last, "column"),)), 0, 5)
    compile_all(graph, load_strategy("tp"), 5)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
def test_a_match_must_match_a_node(size: int) -> None:
    graph = made("mlp")
    with pytest.raises(UsageError) as caught:
        compile_placement(graph, Strategy("mine", (Place("conv", "gather"),)), 0, size)
    assert 'strategy mine: place { match = "conv", how = "gather" } matches no node' in caught.value.message
    assert weighted_nodes(graph)[0].name in caught.value.message


def test_a_graph_without_weights_takes_any_preset() -> None:
    graph = trace(nn.Sequential(nn.ReLU()), (1, 3))
    for name in presets():
        assert not compile_all(graph, load_strategy(name), 2)[1].lowerings


# --- negative controls ------------------------------------------------------------------------------------------------


def tampered(graph: BoundGraph, placement: Placement, change: Callable[[Lowering], Lowering]) -> Placement:
    name = next(name for name, one in placement.lowerings.items() if any(isinstance(s, COLLECTIVES) for s in one.push))
    return replace(placement, lowerings={**placement.lowerings, name: change(placement.lowerings[name])})


@pytest.mark.parametrize("name", ["fold", "ring", "fsdp"])
@pytest.mark.parametrize("where", ["push", "pull", "pick", "forward", "back"])
def test_a_step_that_is_missing_on_one_rank_is_found(name: str, where: str) -> None:
    graph = wide()
    placements = list(compile_all(graph, load_strategy(name), 3))

    def drop(lowering: Lowering) -> Lowering:
        steps = list(getattr(lowering, where))
        steps.remove(next(step for step in steps if isinstance(step, COLLECTIVES)))
        return replace(lowering, **{where: tuple(steps)})

    placements[1] = tampered(graph, placements[1], drop)
    with pytest.raises(ParverifyError, match="collectives; they must agree"):
        check_all(graph, placements)


def test_steps_in_another_order_are_found() -> None:
    graph = wide()
    placements = list(compile_all(graph, load_strategy("fold"), 2))
    node = next(node.name for node in weighted_nodes(graph) if len(parts(node, weight(graph, node).shape)) > 1)
    lowering = placements[1].lowerings[node]
    swapped = replace(
        placements[1], lowerings={**placements[1].lowerings, node: replace(lowering, push=lowering.push[::-1])}
    )
    programs = [compile_sweep(graph, graph.output, placement) for placement in (placements[0], swapped)]
    with pytest.raises(ParverifyError, match=r"collective \d+ of the program from"):
        check_matching(programs)


def test_a_ring_in_another_order_is_found() -> None:
    graph = wide()
    placements = list(compile_all(graph, load_strategy("ring"), 2))
    placements[1] = tampered(
        graph,
        placements[1],
        lambda one: replace(
            one, push=tuple(Shift(s.node, s.take, s.send) if isinstance(s, Shift) else s for s in one.push)
        ),
    )
    with pytest.raises(ParverifyError, match="has Shift"):
        check_all(graph, placements)


def test_a_sender_that_has_nothing_is_found() -> None:
    graph = wide()
    placements = list(compile_all(graph, load_strategy("fold"), 2))
    name = next(name for name, one in placements[0].lowerings.items() if one.held)
    emptied = replace(placements[0].lowerings[name], held=())
    placements[0] = replace(placements[0], lowerings={**placements[0].lowerings, name: emptied})
    with pytest.raises(ParverifyError, match=r"rank 0 is to broadcast .* but does not hold it"):
        check_all(graph, placements)


def test_starts_are_what_rows_are_pushed_from() -> None:
    graph = made("residual")
    assert starts(graph) == (*graph.bounded, graph.output)
    relu_last = trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), (1, 2))
    assert starts(relu_last) == (*relu_last.bounded, relu_last.output)
