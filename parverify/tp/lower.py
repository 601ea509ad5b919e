"""Tensor parallelism as lowerings (arXiv:2606.09377, section 3; the pairs are those of Megatron-LM, arXiv:1909.08053).

Within a zone a sweep's rows have this rank's channels only. They get there through a row node without communication,
and leave through a column node with an all-reduce; gradients go the other way with the collectives' adjoints. Push and
pull of one node are each other's adjoints as maps between replicated and divided tensors, so the conjugate pair comes
by itself: where one sums over ranks the other copies, and replicated alphas get whole gradients. Values and intervals
are replicated on all ranks.

Rows that start within a zone start on all channels, whose slices of the weight the ranks have in turn, and are made
replicated by an all-reduce: bounds of neurons in a zone are then as exact as any (`interm="rows"`). The paper leaves
those neurons to intervals (`interm="ibp"`).
"""

from __future__ import annotations

from collections.abc import Iterable

from parverify.errors import UsageError
from parverify.graph.ir import BoundGraph, Node
from parverify.ops.weighted import Part, channel_dim, in_channels, out_channels, parts, piece_of
from parverify.program.steps import Channels, Collect, Lowering, Product, Reduce, Slice, even, resident
from parverify.tp.zones import Zone, find_zones

INTERM = ("rows", "ibp")


def tp_lowerings(
    graph: BoundGraph, names: Iterable[str], rank: int, size: int, interm: str = "rows"
) -> tuple[dict[str, Lowering], dict[str, Channels], frozenset[str]]:
    """Divide weights by channels.

    Args:
        graph: the network.
        names: the weighted nodes to divide; `find_zones` says which of them stay whole, and why.
        rank, size: which of how many ranks.
        interm: neurons within a zone are bounded by "rows", or by intervals only ("ibp").

    Returns:
        Lowerings by node; the channels that rows have within zones; nodes whose neurons get no rows.

    Raises:
        UsageError: for another `interm`.
    """
    if interm not in INTERM:
        raise UsageError(f"interm is {interm!r}; choose one of {', '.join(INTERM)}")
    zones = find_zones(graph, names, size)
    lowerings = {name: resident(graph[name], parts(graph[name], _weight_shape(graph, name))) for name in zones.whole}
    lowerings |= {name: alone(graph[name], rank, size) for name in zones.alone}
    channels: dict[str, Channels] = {}
    for zone in zones.pairs:
        here = Channels(channel_dim(graph[zone.column]), even(out_channels(graph[zone.column]), size), rank)
        channels |= dict.fromkeys((zone.column, *zone.inside), here)
        lowerings[zone.column] = column(graph[zone.column], rank, size)
        lowerings |= {name: row(graph[name], rank, size) for name in zone.rows}
    by_intervals = {name for zone in zones.pairs for name in _bounded(graph, zone)} if interm == "ibp" else ()
    return lowerings, channels, frozenset(by_intervals)


def _weight_shape(graph: BoundGraph, name: str) -> tuple[int, ...]:
    return tuple(graph.constants[graph[name].consts["weight"]].value.shape)


def _bounded(graph: BoundGraph, zone: Zone) -> set[str]:
    """The nodes of a zone whose bounds a relaxation needs."""
    return {name for inside in zone.inside for name in graph[inside].inputs}


def column(node: Node, rank: int, size: int) -> Lowering:
    """A node that begins a zone: it gives this rank's output channels."""
    place = Channels(channel_dim(node), even(out_channels(node), size), rank)
    part = Part(place.mine, (0, in_channels(node)))
    push, pull, pick = (Product(node.name, kind, part) for kind in ("push", "pull", "pick"))
    keep, join, add = Slice(node.name, *place.mine), Collect(node.name, place.sizes), Reduce(node.name)
    return Lowering(
        (piece_of(node, part),),
        push=(push, add),
        pull=(pull,),
        pick=(pick, add),
        forward=(pull, join),
        back=(keep, push, add),
    )


def row(node: Node, rank: int, size: int) -> Lowering:
    """A node that ends a zone: it takes this rank's input channels; what ranks give adds up."""
    place = Channels(channel_dim(node), even(in_channels(node), size), rank)
    part = Part((0, out_channels(node)), place.mine)
    push, pull, pick = (Product(node.name, kind, part) for kind in ("push", "pull", "pick"))
    keep, join, add = Slice(node.name, *place.mine), Collect(node.name, place.sizes), Reduce(node.name)
    return Lowering(
        (piece_of(node, part),),
        push=(push,),
        pull=(pull, add),
        pick=(pick,),
        forward=(keep, pull, add),
        back=(push, join),
    )


def alone(node: Node, rank: int, size: int) -> Lowering:
    """A node divided by output channels between replicated neighbours."""
    inside = column(node, rank, size)
    return Lowering(inside.held, push=inside.back, pull=inside.forward, pick=inside.pick, forward=inside.forward,
                    back=inside.back)  # fmt: skip
