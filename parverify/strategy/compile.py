"""A strategy applied to a graph: the placement of every weight on every rank, and the check that ranks' programs meet.

Only shapes of constants are used, so a graph whose constants have no data (torch's meta device) will do, and every rank
finds the same placement by itself. With one rank nothing is divided and nothing communicated, whatever the strategy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from parverify.errors import ParverifyError, UsageError
from parverify.fold.lower import deal_parts, ringed, streamed
from parverify.fsdp.lower import gathered
from parverify.graph.ir import BoundGraph, Node
from parverify.ops.weighted import WEIGHTED, parts
from parverify.program.steps import (
    Affine,
    Broadcast,
    Channels,
    Lowering,
    Placement,
    Program,
    check_matching,
    compile_sweep,
    even,
    resident,
    single,
    weighted_nodes,
)
from parverify.strategy.directives import CHANNEL_PLACES, Place, Strategy
from parverify.tp.lower import tp_lowerings
from parverify.tp.zones import find_zones

_DEFAULT = Place("*", "replicate")


def compile_placement(graph: BoundGraph, strategy: Strategy, rank: int, size: int) -> Placement:
    """What one rank holds of every weight and what it does for a product with it.

    Args:
        graph: the network; only the shapes of its constants are used.
        strategy: see `parverify.strategy.directives`.
        rank, size: which of how many ranks.

    Raises:
        UsageError: a directive matches no node, or asks of a node what can't be done.
    """
    places = place_nodes(graph, strategy)
    if size == 1:
        return replace(single(graph), strategy=strategy.name, tile=strategy.tile(0))
    by: dict[str, list[Node]] = {}
    for name, place in places.items():
        by.setdefault(place.how, []).append(graph[name])
    lowerings = {node.name: resident(node, parts(node, _shape(graph, node))) for node in by.get("replicate", [])}
    lowerings |= {node.name: gathered(node, _shape(graph, node), rank, size) for node in by.get("gather", [])}
    # The ring needs a shard for every rank; smaller weights are streamed.
    ring: list[Node] = []
    small: list[Node] = []
    for node in by.get("ring", []):
        (ring if len(parts(node, _shape(graph, node))) >= size else small).append(node)
    lowerings |= _streams(graph, [*by.get("stream", []), *small], rank, size, ahead=strategy.prefetch)
    lowerings |= _rings(graph, ring, rank, size)
    channels: dict[str, Channels] = {}
    interval_only: frozenset[str] = frozenset()
    for names in _channel_groups(graph, places, size):
        some, ranges, only = tp_lowerings(graph, names, rank, size, strategy.interm)
        lowerings, channels, interval_only = {**lowerings, **some}, {**channels, **ranges}, interval_only | only
    return Placement(
        strategy.name,
        rank,
        size,
        {node.name: lowerings[node.name] for node in weighted_nodes(graph)},
        channels,
        splits_rows=strategy.splits_rows,
        ahead=strategy.prefetch,
        interval_only=interval_only,
        tile=strategy.tile(0),
    )


def _shape(graph: BoundGraph, node: Node) -> tuple[int, ...]:
    return tuple(graph.constants[node.consts["weight"]].value.shape)


# --- which directive places which node --------------------------------------------------------------------------------


def place_nodes(graph: BoundGraph, strategy: Strategy) -> dict[str, Place]:
    """The directive that places each weighted node, the last one that matches it.

    Weights that are read elsewhere than in products too, or by products that cut them differently, stay on all ranks;
    so do weights of several nodes where channels would be divided.

    Raises:
        UsageError: a directive matches no node; nodes that share a weight are placed differently.
    """
    nodes = weighted_nodes(graph)
    found = dict.fromkeys((node.name for node in nodes), _DEFAULT)
    for place in strategy.places:
        matched = [node.name for node in nodes if matches(place.match, node)]
        if not matched and place.match != "*":
            known = ", ".join(node.name for node in nodes[:8]) or "none"
            raise UsageError(
                f"strategy {strategy.name}: {place} matches no node with a weight; there are: {known}",
                "a match is a pattern for a node's name, its operator (linear, conv) or its name in the network",
            )
        found |= dict.fromkeys(matched, place)
    for readers in _readers(graph).values():
        _place_shared(graph, strategy, readers, found)
    return found


def matches(pattern: str, node: Node) -> bool:
    """Whether a pattern stands for a node: for its name, its operator, or what the user calls it, or a word of that."""
    return any(fnmatchcase(text, pattern) for text in (node.name, node.op, node.source, *node.source.split()))


def _readers(graph: BoundGraph) -> dict[str, list[tuple[Node, str]]]:
    """Constant -> the nodes that read it, each with the role it has there."""
    found: dict[str, list[tuple[Node, str]]] = {}
    for node in graph:
        for role, name in node.consts.items():
            found.setdefault(name, []).append((node, role))
    return found


def _place_shared(
    graph: BoundGraph, strategy: Strategy, readers: Sequence[tuple[Node, str]], found: dict[str, Place]
) -> None:
    """Place the nodes that read one weight alike."""
    weighted = [node for node, role in readers if node.op in WEIGHTED and role == "weight"]
    if len(readers) < 2 or not weighted:
        return
    places = [found[node.name] for node in weighted]
    if len({place.how for place in places}) > 1:
        other = next(i for i, place in enumerate(places) if place.how != places[0].how)
        raise UsageError(
            f"strategy {strategy.name}: {places[0]} and {places[other]} place the weight that {weighted[0].name} and "
            f"{weighted[other].name} share differently",
            "place both nodes alike",
        )
    cuts = {parts(node, _shape(graph, node)) for node in weighted}
    if len(weighted) < len(readers) or len(cuts) > 1 or places[0].how in CHANNEL_PLACES:
        found |= dict.fromkeys((node.name for node in weighted), _DEFAULT)


# --- stream and ring --------------------------------------------------------------------------------------------------


def _streams(graph: BoundGraph, nodes: Sequence[Node], rank: int, size: int, *, ahead: bool) -> dict[str, Lowering]:
    owners = deal_parts([(node, _shape(graph, node)) for node in nodes], size)
    return {
        node.name: streamed(node, _shape(graph, node), owners[node.consts["weight"]], rank, ahead=ahead)
        for node in nodes
    }


def _rings(graph: BoundGraph, nodes: Sequence[Node], rank: int, size: int) -> dict[str, Lowering]:
    first = _first_ranks(graph, nodes, size)
    return {node.name: ringed(node, _shape(graph, node), rank, size, first[node.consts["weight"]]) for node in nodes}


def _first_ranks(graph: BoundGraph, nodes: Sequence[Node], size: int) -> dict[str, int]:
    """The rank that holds each weight's first shard: largest weights first, each where the fullest rank stays least."""
    shards: dict[str, list[int]] = {}
    for node in nodes:
        shape = _shape(graph, node)
        channels = [part.out[1] - part.out[0] for part in parts(node, shape)]
        entries = _numel(shape) // sum(channels)
        ends = [sum(even(len(channels), size)[: place + 1]) for place in range(size)]
        starts = [0, *ends[:-1]]
        shards[node.consts["weight"]] = [entries * sum(channels[a:b]) for a, b in zip(starts, ends, strict=True)]
    load, found = [0] * size, {}
    for name, sizes in sorted(shards.items(), key=lambda item: -sum(item[1])):
        options = [[held + sizes[(rank - first) % size] for rank, held in enumerate(load)] for first in range(size)]
        best = min(range(size), key=lambda first: (sorted(options[first], reverse=True), first))
        load, found[name] = options[best], best
    return found


def _numel(shape: Sequence[int]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count


# --- channels ---------------------------------------------------------------------------------------------------------


def _channel_groups(graph: BoundGraph, places: Mapping[str, Place], size: int) -> list[list[str]]:
    """Nodes whose channels are divided together: each `column` with the `row`s that it ends in, and all of `pair`.

    Raises:
        UsageError: a node can't be a column, or a row has no column.
    """
    order = [node.name for node in weighted_nodes(graph)]
    rows = [name for name in order if places[name].how == "row"]
    groups, ended = [], set()
    for name in (name for name in order if places[name].how == "column"):
        behind = [row for row in rows if order.index(row) > order.index(name)]
        zones = find_zones(graph, [name, *behind], size)
        if name in zones.whole:
            raise UsageError(f"{places[name]}: node {name} can't be divided: {zones.whole[name]}", "replicate it")
        mine = [row for zone in zones.pairs if zone.column == name for row in zone.rows]
        ended.update(mine)
        groups.append([name, *mine])
    for name in rows:
        if name not in ended:
            raise UsageError(
                f"{places[name]}: node {name} ends no pair: what it reads has to be, up to activations, a node placed "
                "as column with the same channels, all of whose readers are rows",
                "place it as pair, or replicate it",
            )
    return [*groups, [name for name in order if places[name].how == "pair"]]


# --- all ranks --------------------------------------------------------------------------------------------------------


def compile_all(graph: BoundGraph, strategy: Strategy, size: int) -> tuple[Placement, ...]:
    """Every rank's placement, after checking that the ranks meet in every sweep, its gradient, and all values.

    Raises:
        UsageError: as `compile_placement`.
        ParverifyError: the ranks' programs don't fit, which is a fault of parverify.
    """
    placements = tuple(compile_placement(graph, strategy, rank, size) for rank in range(size))
    check_all(graph, placements)
    return placements


def check_all(graph: BoundGraph, placements: Sequence[Placement]) -> None:
    """Check that ranks with these placements meet in the same collectives, and that what is sent is there.

    Raises:
        ParverifyError: naming the first step that has no partner, or whose sender has nothing to send.
    """
    for node, lowering in placements[0].lowerings.items():
        for step in (*lowering.push, *lowering.pull, *lowering.pick, *lowering.forward, *lowering.back):
            if isinstance(step, Broadcast) and step.piece not in placements[step.source].lowerings[node].held:
                raise ParverifyError(
                    f"node {node}: rank {step.source} is to broadcast {step.piece} but does not hold it"
                )
    check_matching([forward_program(graph, placement) for placement in placements])
    for start in starts(graph):
        for one_hot in (True, False):
            check_matching([compile_sweep(graph, start, placement, one_hot=one_hot) for placement in placements])


def starts(graph: BoundGraph) -> tuple[str, ...]:
    """The nodes that sweeps start from: those whose bounds relaxations need, and the output."""
    return tuple(dict.fromkeys((*graph.bounded, graph.output)))


def forward_program(graph: BoundGraph, placement: Placement) -> Program:
    """The steps that all values of the network take, from front to back, and those of their gradients."""
    steps = [
        Affine(node.name, False, placement.lowerings[node.name].forward, placement.lowerings[node.name].back)
        for node in weighted_nodes(graph)
    ]
    return Program(graph.input.name, tuple(steps), ())
