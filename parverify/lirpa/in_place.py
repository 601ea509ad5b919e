"""The engine's share of a module's weights, as far as possible the very tensors that the module holds on this rank.

Every rank has a `BoundedModule`, and with it all weights, or its shards of them (`apply_fsdp`). A weight that lies
whole on every rank is multiplied where it lies: to divide a second copy would take memory and communication and save
nothing. So is one that the ranks of a machine hold together. Of other weights in shards every rank broadcasts the parts
in its own, so that shards are not held twice either; products with parts are rounded otherwise.
Only what lies elsewhere (weights that were transposed on the way, shards that cut through a part) is copied, piece by
piece.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from parverify.fold.lower import streamed
from parverify.graph.ir import BoundGraph, Const, Node
from parverify.lirpa.operators import Layout
from parverify.ops.weighted import Part, Piece, parts, piece_of, whole
from parverify.parallel.comm import Comm, agree
from parverify.program.division import Division, Held, bare
from parverify.program.steps import Lowering, Placement, divided_constants, resident, weighted_nodes
from parverify.strategy.compile import check_all, compile_placement, place_nodes
from parverify.strategy.directives import CHANNEL_PLACES, Strategy


@dataclass(frozen=True)
class Common:
    """A weight in shards that the ranks hold together, or one rank alone.

    Args:
        value: the whole. It may change between two calls of the module, but not within one, because a call begins and
            ends with a message from every rank to every other.
    """

    value: Tensor


@dataclass(frozen=True)
class Shard:
    """A weight of which every rank holds a range of rows.

    Args:
        flat: this rank's entries, padded at the end.
        rows: of every rank, the last ones may have fewer.
        shape: of the whole.
        rank: whose entries they are.
    """

    flat: Tensor
    rows: int
    shape: tuple[int, ...]
    rank: int

    @staticmethod
    def of(layout: Layout, flat: Tensor) -> Shard | None:
        """The shard of a parameter, None where it does not end with a row."""
        width = layout.shape[1:].numel()
        if layout.rows or not width or flat.numel() % width:
            return None
        return Shard(flat.detach(), flat.numel() // width, tuple(layout.shape), layout.comm.rank)

    def owner(self, piece: Piece) -> int | None:
        """The rank that holds a piece, None where several do or it is cut by columns."""
        first, last = piece.rows[0] // self.rows, (piece.rows[1] - 1) // self.rows
        return first if first == last and piece.columns == (0, self.shape[1]) else None

    def piece(self, piece: Piece) -> Tensor:
        """The view of a piece that this rank holds."""
        width = self.flat.numel() // self.rows
        start = (piece.rows[0] - self.rank * self.rows) * width
        shape = piece.shape(self.shape)
        return self.flat[start : start + (piece.rows[1] - piece.rows[0]) * width].view(shape)

    def holds(self, value: Tensor) -> bool:
        """Whether this is the rank's part of a weight."""
        if tuple(value.shape) != self.shape:
            return False
        mine = value.detach().reshape(-1)[self.rank * self.flat.numel() :][: self.flat.numel()]
        return bool((self.flat[: len(mine)] == mine).all())


def divide_in_place(graph: BoundGraph, bounded: Any, strategy: Strategy, comm: Comm) -> Division:
    """A module's network divided over ranks; every rank calls this with its own.

    Args:
        graph: what was recorded of the module on this rank.
        bounded: the module.
        strategy: how rows are divided, and weights that do not lie on every rank.
        comm: the ranks.

    Raises:
        DisagreementError: the ranks' modules have different weights.
    """
    if comm.size > 1:
        agree(comm, {f"weight {name} of the module": const.value for name, const in graph.constants.items()})
    found: dict[str, Where] = {}
    for name in divided_constants(graph):
        where = _find(graph.constants[name].value, bounded, comm)
        kind = next((i for i, each in enumerate((Tensor, Common, Shard)) if isinstance(where, each)), -1)
        alike = comm.all_max(kind) == -comm.all_max(-kind)
        if where is not None and alike:
            found[name] = where
    placements = tuple(
        _placed(graph, compile_placement(graph, strategy, rank, comm.size), strategy, found)
        for rank in range(comm.size)
    )
    check_all(graph, placements)
    if comm.size == 1:
        lying = {name: Const(where.value) for name, where in found.items() if isinstance(where, Common)}
        graph = replace(graph, constants={**graph.constants, **lying})
        return Division(graph, placements[0], {}, comm, placements)
    mine = placements[comm.rank]
    return Division(bare(graph), mine, _held(graph, mine, found), comm, placements)


Where = Tensor | Common | Shard


def _find(value: Tensor, bounded: Any, comm: Comm) -> Where | None:
    """The weight itself where the module holds it whole, the rank's shard of it, or None where it lies elsewhere."""
    memory = value.untyped_storage().data_ptr()
    for parameter in (*bounded.parameters(), *bounded.buffers()):
        if parameter.untyped_storage().data_ptr() == memory:
            return value.detach()
    for node in bounded._modules.values():
        layout = getattr(node, "layout", None)
        if not isinstance(layout, Layout) or "param" not in node._parameters:
            continue
        if (layout.comm.size, layout.comm.rank) != (comm.size, comm.rank):
            continue
        common = _common(node, layout)
        if common is not None and common.dtype == value.dtype and torch.equal(common, value):
            return Common(common)
        shard = Shard.of(layout, node.param)
        if shard is not None and shard.holds(value):
            return shard
    return None


def _common(node: Any, layout: Layout) -> Tensor | None:
    """The whole weight of a divided parameter, where it lies in memory that this rank has."""
    if layout.comm.size == 1:
        return node.param.detach().view(layout.shape)  # type: ignore[no-any-return]
    return None if node.near is None else node.near.whole(node.param, layout.shape)  # type: ignore[no-any-return]


def _placed(graph: BoundGraph, placement: Placement, strategy: Strategy, found: Mapping[str, Where]) -> Placement:
    """A placement in which weights are multiplied where they lie."""
    several = placement.size > 1  # one rank divides no channels
    places = place_nodes(graph, strategy) if several else {}
    lowerings = dict(placement.lowerings)
    for node in weighted_nodes(graph):
        where = found.get(node.consts["weight"])
        if where is None or (several and places[node.name].how in CHANNEL_PLACES):
            continue
        made = _lowering(node, where, placement.rank, ahead=strategy.prefetch)
        lowerings[node.name] = lowerings[node.name] if made is None else made
    return replace(placement, lowerings=lowerings)


def _lowering(node: Node, where: Where, rank: int, *, ahead: bool) -> Lowering | None:
    if not isinstance(where, Shard):  # at any number of ranks, so that parts are no use
        return resident(node, (whole(node),))
    owners: dict[Part, int] = {}
    for part in parts(node, where.shape):
        owner = where.owner(piece_of(node, part))
        if owner is None:
            return None
        owners[part] = owner
    return streamed(node, where.shape, owners, rank, ahead=ahead)


def _held(graph: BoundGraph, placement: Placement, found: Mapping[str, Where]) -> Held:
    """The pieces that a placement keeps on this rank: views where they lie here, else copies."""
    held: Held = {}
    divided = divided_constants(graph)
    for node in weighted_nodes(graph):
        name = node.consts["weight"]
        if name not in divided:
            continue
        where, value = found.get(name), graph.constants[name].value.detach()
        for piece in placement.lowerings[node.name].held:
            if isinstance(where, Shard) and where.owner(piece) == where.rank:
                held[name, piece] = where.piece(piece)
            elif isinstance(where, (Tensor, Common)):
                held[name, piece] = piece.of(where.value if isinstance(where, Common) else where).contiguous()
            else:
                held[name, piece] = piece.of(value).contiguous().clone()
    return held
