"""Fold: weights stay in pieces and pass by the rows, which are divided over the same ranks.

With `stream` the owner of each part broadcasts it in turn, so that every rank adds up the same products in the same
order as one process: bounds are equal bit for bit at any number of ranks. With `ring` the ranks' shards go around while
they are multiplied; each rank starts with its own, so that sums are rounded in another order. Either way a rank
receives (P - 1)/P of the weights per sweep, however many rows it has, and no row ever leaves its rank (TSP,
arXiv:2604.26294, for tokens instead of rows).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from parverify.graph.ir import Node
from parverify.ops.weighted import Part, Piece, channels, parts, piece_of
from parverify.program.steps import Broadcast, Free, Inner, Lowering, Product, Shift, Wait, even

Owners = Mapping[Part, int]

AHEAD = 2  # broadcasts on their way beside the part in use: one from each side where two ranks take turns


def deal_parts(nodes: Sequence[tuple[Node, Sequence[int]]], size: int) -> dict[str, dict[Part, int]]:
    """Who holds which part: largest first, each to the rank that holds least so far.

    Args:
        nodes: weighted nodes with the shapes of their weights; those that share a weight share its parts' owners.
        size: ranks.

    Returns:
        weight constant -> part -> rank.
    """
    sizes: dict[tuple[str, Part], int] = {}
    for node, shape in nodes:
        for part in parts(node, shape):
            sizes[node.consts["weight"], part] = math.prod(piece_of(node, part).shape(tuple(shape)))
    load = [0] * size
    owners: dict[str, dict[Part, int]] = {}
    for (name, part), entries in sorted(sizes.items(), key=lambda item: -item[1]):
        rank = load.index(min(load))
        load[rank] += entries
        owners.setdefault(name, {})[part] = rank
    return owners


def streamed(node: Node, weight_shape: Sequence[int], owners: Owners, rank: int, *, ahead: bool = False) -> Lowering:
    """The lowering of a weight whose parts are broadcast one after the other.

    Args:
        node: a weighted node.
        weight_shape: of the whole weight.
        owners: part -> rank.
        rank: this one.
        ahead: start broadcasts while the two parts before are multiplied; takes more buffers.
    """
    some = parts(node, weight_shape)

    def steps(kind: str) -> tuple[Inner, ...]:
        sends = [Broadcast(node.name, piece_of(node, part), owners[part]) for part in some]
        early = AHEAD if ahead else 0
        out: list[Inner] = list(sends[:early])
        for position, part in enumerate(some):
            out += sends[position + early : position + early + 1]
            out.append(Wait(node.name, sends[position].piece))
            out += [Product(node.name, kind, part), Free(node.name, sends[position].piece)]
        return tuple(out)

    held = tuple(piece_of(node, part) for part in some if owners[part] == rank)
    push, pull = steps("push"), steps("pull")
    return Lowering(held, push, pull, steps("pick"), pull, push)


def ringed(node: Node, weight_shape: Sequence[int], rank: int, size: int, first: int = 0) -> Lowering:
    """The lowering of a weight whose shards go around the ring.

    Args:
        node: a weighted node.
        weight_shape: of the whole weight.
        rank, size: which of how many ranks.
        first: the rank that holds the first shard; shards differ in size, so that layers should differ in this.
    """
    some = parts(node, weight_shape)
    counts = even(len(some), size)
    starts = [sum(counts[:i]) for i in range(size)]
    groups = [some[start : start + count] for start, count in zip(starts, counts, strict=True)]
    shards = [groups[(place - first) % size] for place in range(size)]  # by rank

    def piece(owner: int) -> Piece | None:
        group = shards[owner % size]
        if not group:
            return None
        whole = channels(node, group[0].out[0], group[-1].out[1])
        return piece_of(node, whole)

    empty = Piece((0, 0), (0, 0))

    def steps(kind: str) -> tuple[Inner, ...]:
        out: list[Inner] = []
        for turn in range(size):
            owner, behind = (rank + turn) % size, (rank + turn + 1) % size
            now, then = piece(owner), piece(behind)
            moves = turn + 1 < size and (now is not None or then is not None)
            if moves:
                out.append(Shift(node.name, now or empty, then or empty))
            out += [Product(node.name, kind, part) for part in shards[owner]]
            if moves:
                out.append(Wait(node.name))
            if turn and now is not None:
                out.append(Free(node.name, now))
        return tuple(out)

    mine = piece(rank)
    push, pull = steps("push"), steps("pull")
    return Lowering(() if mine is None else (mine,), push, pull, steps("pick"), pull, push)
