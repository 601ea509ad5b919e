"""The weights of one rank, and the steps that bring parts of them here and multiply them.

A rank holds pieces of weights; other pieces pass through a few reused buffers. `Weights.run` executes the inner steps
of a product on a list of tensors at once, so that an interval's centre and radius load a weight once. `Map` makes such
a list of steps differentiable: its backward pass runs the adjoint steps, so that a weight that was gathered is never
recorded by autograd but gathered again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parverify.errors import ParverifyError
from parverify.graph.ir import BoundGraph, Node
from parverify.ops.places import places_in_rounds
from parverify.ops.weighted import (
    Part,
    Piece,
    channel_dim,
    channel_of,
    in_channels,
    out_channels,
    pick,
    piece_of,
    whole,
)
from parverify.parallel.comm import Comm, Pending
from parverify.program.products import Result, Sum, blocks
from parverify.program.steps import (
    Broadcast,
    Collect,
    Free,
    Gather,
    Inner,
    Placement,
    Product,
    Reduce,
    Shift,
    Slice,
    Wait,
)


@dataclass
class _Slot:
    """A buffer that pieces pass through."""

    memory: Tensor
    owner: str | None = None


@dataclass
class _Arriving:
    """A piece on its way into a slot."""

    piece: Piece
    view: Tensor
    slot: _Slot | None
    pending: Pending
    keep: tuple[Tensor, ...] = ()


class Weights:
    """What one rank holds of the weights of a graph.

    Args:
        graph: gives the nodes and the shapes of their weights.
        placement: which pieces stay here and what is done for a product.
        held: (weight constant, piece) -> tensor.
        comm: the ranks that share the weights.
        like: of the dtype and device of all pieces; a rank that holds none receives the others' all the same.
        window: the pieces of all ranks where this one can read them, so that nothing has to be sent; see
            `parverify.parallel.window`.
    """

    def __init__(
        self,
        graph: BoundGraph,
        placement: Placement,
        held: Mapping[tuple[str, Piece], Tensor],
        comm: Comm,
        like: Tensor,
        window: Mapping[tuple[str, Piece], Tensor] | None = None,
    ) -> None:
        self._window = window
        self._graph, self._placement, self._comm, self._like = graph, placement, comm, like
        self._held: dict[str, dict[Piece, Tensor]] = {}
        for (name, piece), tensor in held.items():
            self._held.setdefault(name, {})[piece] = tensor
        self._loaded: dict[str, dict[Piece, tuple[Tensor, _Slot | None]]] = {}
        self._arriving: dict[str, list[_Arriving]] = {}
        self._slots: list[_Slot] = []
        self._views: dict[tuple[str, Part], Tensor] = {}  # of what stays here, found before
        self._sums: dict[int, tuple[Node, tuple[Inner, ...], Sum]] = {}

    def tensors(self) -> list[Tensor]:
        """What stays on this rank."""
        return [tensor for pieces in self._held.values() for tensor in pieces.values()]

    def _name(self, node: str) -> str:
        return self._graph[node].consts["weight"]

    def _shape(self, node: str) -> tuple[int, ...]:
        return tuple(self._graph.constants[self._name(node)].value.shape)

    # --- pieces ---------------------------------------------------------------------------------------------------

    def piece(self, node: Node, part: Part) -> Tensor:
        """The piece of a part, a view of what is held or loaded.

        Raises:
            ParverifyError: the program multiplies what it has not loaded.
        """
        known = self._views.get((node.name, part))
        if known is not None:
            return known
        name, wanted = self._name(node.name), piece_of(node, part)
        for piece, tensor in self._held.get(name, {}).items():
            if piece.covers(wanted):
                view = self._views[node.name, part] = wanted.within(piece).of(tensor)
                return view
        for piece, (tensor, _) in self._loaded.get(name, {}).items():
            if piece.covers(wanted):
                return wanted.within(piece).of(tensor)
        raise ParverifyError(f"node {node.name}: part {part} of its weight is not on rank {self._placement.rank}")

    def _largest(self) -> int:
        """Entries of the largest buffer that any step of the placement needs."""
        most = 1
        for node, lowering in self._placement.lowerings.items():
            shape = self._shape(node)
            steps = (*lowering.push, *lowering.pull, *lowering.pick, *lowering.forward, *lowering.back)
            for step in steps:
                if isinstance(step, Gather):
                    rows = -(-shape[0] // self._comm.size) * self._comm.size
                    most = max(most, rows * torch.Size(shape[1:]).numel())
                elif isinstance(step, Broadcast):
                    most = max(most, torch.Size(step.piece.shape(shape)).numel())
                elif isinstance(step, Shift):
                    most = max(most, torch.Size(step.take.shape(shape)).numel())
        return most

    def _slot(self, node: str) -> _Slot:
        for slot in self._slots:
            if slot.owner is None:
                slot.owner = node
                return slot
        for name, arriving in list(self._arriving.items()):
            if len(self._slots) > 1 and arriving and self._graph[node].consts["weight"] != name:
                self._land(name)  # was fetched ahead for a gradient that nobody asked for
                self._release(name, None)
                return self._slot(node)
        memory = self._like.new_empty(self._largest())
        self._slots.append(_Slot(memory, node))
        return self._slots[-1]

    def rest(self) -> None:
        """Let go of the buffers that are not in use."""
        self._slots = [slot for slot in self._slots if slot.owner is not None]

    def _land(self, name: str, piece: Piece | None = None) -> None:
        later = []
        for arriving in self._arriving.pop(name, []):
            if piece is not None and arriving.piece != piece:
                later.append(arriving)
                continue
            arriving.pending.wait()
            self._loaded.setdefault(name, {})[arriving.piece] = (arriving.view, arriving.slot)
        if later:
            self._arriving[name] = later

    def _release(self, name: str, piece: Piece | None) -> None:
        loaded = self._loaded.get(name, {})
        for key in [piece] if piece is not None else list(loaded):
            entry = loaded.pop(key, None)
            if entry is not None and entry[1] is not None:
                entry[1].owner = None

    # --- steps ----------------------------------------------------------------------------------------------------

    def load(self, step: Inner) -> None:
        """Execute a step that moves weights."""
        name = self._name(step.node)
        if isinstance(step, Gather):
            self._gather(step, name)
        elif isinstance(step, Broadcast):
            self._broadcast(step, name)
        elif isinstance(step, Shift):
            self._shift(step, name)
        elif isinstance(step, Wait):
            self._land(name, step.piece)
        elif isinstance(step, Free):
            self._release(name, step.piece)

    def _bring(
        self,
        collective: str,
        nbytes: int,
        send: Callable[[], Pending],
        wanted: Mapping[tuple[str, Piece], Tensor],
        *,
        source: bool = False,
    ) -> Pending:
        """Pieces into tensors: by a collective, or out of the other ranks' memory where this one can read it.

        Args:
            collective, nbytes, source: what is counted either way, see `parverify.parallel.traffic.received`.
            send: starts the collective.
            wanted: (weight constant, piece) -> what it is to fill.
        """
        if self._window is None:
            return send()
        copies = [(target, self._window[key]) for key, target in wanted.items()]
        return self._comm.instead(collective, nbytes, copies, source=source)

    def _gather(self, step: Gather, name: str) -> None:
        if name in self._arriving or self._loaded.get(name):
            return
        shape = self._shape(step.node)
        rows, rest = -(-shape[0] // self._comm.size), torch.Size(shape[1:]).numel()
        (shard,) = self._held[name].values()
        padded = shard.reshape(-1)
        if len(padded) < rows * rest:
            padded = torch.cat([padded, padded.new_zeros(rows * rest - len(padded))])
        slot = self._slot(step.node)
        out = slot.memory[: rows * self._comm.size * rest]
        view = out[: shape[0] * rest].view(shape)
        near = [key[1] for key in self._window or () if key[0] == name]
        pending = self._bring(
            "all_gather",
            padded.nbytes,
            lambda: self._comm.all_gather(out, padded),
            {(name, piece): piece.of(view) for piece in near},
        )
        everything = Piece((0, shape[0]), (0, shape[1]))
        self._arriving[name] = [_Arriving(everything, view, slot, pending, (padded,))]

    def _broadcast(self, step: Broadcast, name: str) -> None:
        shape = step.piece.shape(self._shape(step.node))
        if step.source == self._comm.rank:
            mine = self._held[name][step.piece]
            pending = self._bring(
                "broadcast", mine.nbytes, lambda: self._comm.broadcast(mine, step.source), {}, source=True
            )
            self._arriving.setdefault(name, []).append(_Arriving(step.piece, mine, None, pending))
            return
        slot = self._slot(step.node)
        view = slot.memory[: torch.Size(shape).numel()].view(shape)
        pending = self._bring(
            "broadcast", view.nbytes, lambda: self._comm.broadcast(view, step.source), {(name, step.piece): view}
        )
        self._arriving.setdefault(name, []).append(_Arriving(step.piece, view, slot, pending))

    def _shift(self, step: Shift, name: str) -> None:
        held = self._held[name]
        send = held[step.send] if step.send in held else self._loaded[name][step.send][0]
        shape = step.take.shape(self._shape(step.node))
        slot = self._slot(step.node)
        view = slot.memory[: torch.Size(shape).numel()].view(shape)
        pending = self._bring("shift", view.nbytes, lambda: self._comm.shift(send, view), {(name, step.take): view})
        self._arriving.setdefault(name, []).append(_Arriving(step.take, view, slot, pending, (send,)))

    # --- products -------------------------------------------------------------------------------------------------

    def _sum(self, node: Node, steps: tuple[Inner, ...]) -> Sum:
        """What a product's steps add up to. They are the same object each time, and a hash of them takes longer."""
        known = self._sums.get(id(steps))
        if known is None or known[0] is not node:
            made = Sum(node, [step for step in steps if isinstance(step, Product)])
            known = self._sums[id(steps)] = (node, steps, made)  # `steps` stay alive, so that their id stays theirs
        return known[2]

    def push_some(self, node: Node, steps: tuple[Inner, ...], A: Tensor, index: Tensor) -> Tensor:
        """Push rows that have coefficients on some channels of a linear node only, see `takes_some`.

        Args:
            node: the node.
            steps: of a push.
            A: (N, K) the rows.
            index: (K,) their channels, ascending.

        Returns:
            (N, *in_shape).
        """
        out: Tensor | None = None
        edges = [edge for step in steps if isinstance(step, Product) for edge in step.part.out]
        whole = len(edges) == 2
        cuts = iter([0, len(index)] if whole else torch.searchsorted(index, index.new_tensor(edges)).tolist())
        for step in steps:
            if not isinstance(step, Product):
                self.load(step)
                continue
            weight, first, last = self.piece(node, step.part), next(cuts), next(cuts)
            some, rows = (A, index) if whole else (A[:, first:last], index[first:last] - step.part.out[0])
            out = _add_some(out, some, weight, rows)
        if out is None:
            raise ParverifyError(f"node {node.name}: the program multiplies nothing")
        return out.reshape(len(A), *node.attrs["in_shapes"][0])

    def run(
        self, node: Node, steps: tuple[Inner, ...], xs: Sequence[Tensor], absolute: Sequence[bool] | None = None
    ) -> list[Tensor]:
        """Execute the inner steps of a product on each of `xs`.

        Args:
            node: the weighted node.
            steps: all of one kind, `push` or `pull`.
            xs: rows (N, *shape) to push, or values (B, *in_shape) to pull.
            absolute: which of them meet the magnitudes of the weight.
        """
        flags = list(absolute or [False] * len(xs))
        made = self._sum(node, steps)
        currents, results = list(xs), [Result(made) for _ in xs]
        first = None
        for step in steps:
            if isinstance(step, Slice):
                dim = channel_dim(node) + 1
                currents = [x.narrow(dim, step.first, step.last - step.first) for x in currents]
                first = step.first
            elif isinstance(step, Product):
                weight = self.piece(node, step.part)
                for some, piece in blocks(node, step, weight) if any(flags) else [(step, weight)]:
                    magnitude = piece.abs() if any(flags) else piece
                    for result, x, flag in zip(results, currents, flags, strict=True):
                        result.add(some, magnitude if flag else piece, x, first)
                    del magnitude  # before the next one is made
                del weight, piece
            elif isinstance(step, Reduce):
                for result in results:
                    self._comm.all_reduce(result.contiguous()).wait()
            elif isinstance(step, Collect):
                for result in results:
                    result.tensor = collect_channels(self._comm, result.tensor, made.dim, step.sizes)
            else:
                self.load(step)
        return [result.tensor for result in results]

    def from_first(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Rank 0's values, on every rank."""
        found = [value.contiguous() for value in values]
        for value in found:
            self._comm.broadcast(value, 0).wait()
        return found

    def pick(self, node: Node, steps: Sequence[Inner], index: Tensor, sign: Tensor) -> Tensor:
        """Rows on the node's input from one-hot rows `sign * value.flatten()[index]`, (N,) each."""
        multiplied = [step for step in steps if isinstance(step, Product)]
        everything = self._held.get(self._name(node.name), {}).get(piece_of(node, whole(node)))
        if everything is not None and len(multiplied) == len(steps):
            return pick(node, everything, index, sign)
        low, high = min(step.part.into[0] for step in multiplied), max(step.part.into[1] for step in multiplied)
        dim, shape = channel_dim(node) + 1, [len(index), *node.attrs["in_shapes"][0]]
        shape[dim] = high - low
        out: Tensor | None = None
        alone = len(multiplied) == 1 and multiplied[0].part.out == (0, out_channels(node))
        for step in steps:
            if isinstance(step, Product):
                weight = self.piece(node, step.part)
                if alone:
                    out = pick(node, weight, index, sign)
                else:
                    out = sign.new_zeros(shape) if out is None else out
                    target = out.narrow(dim, step.part.into[0] - low, step.part.into[1] - step.part.into[0])
                    self._pick_some(node, step.part, weight, (index, sign), target)
            elif isinstance(step, Reduce) and out is not None:
                out = out.contiguous()
                self._comm.all_reduce(out).wait()
            else:
                self.load(step)
        if out is None:
            raise ParverifyError(f"node {node.name}: the program picks nothing")
        return out

    @staticmethod
    def _pick_some(node: Node, part: Part, weight: Tensor, rows: tuple[Tensor, Tensor], out: Tensor) -> None:
        """Fill in the rows whose channel lies in the part."""
        index, sign = rows
        channel = channel_of(node, index)
        here = (channel >= part.out[0]) & (channel < part.out[1])
        share = (part.out[1] - part.out[0]) / out_channels(node)
        at = places_in_rounds(here, (node.name, part), math.ceil(share * len(index)))
        if len(at):
            out[at] = pick(node, weight, index[at], sign[at], part.out[0])


COPIED = 128 << 10  # bytes of some rows of a weight that are copied at once


def _add_some(out: Tensor | None, A: Tensor, weight: Tensor, rows: Tensor) -> Tensor:
    """`out` plus A (N, K) times K rows of a weight; in blocks of columns, so that their copies take little memory."""
    width = weight.shape[1]
    size = -(-width // max(1, -(-len(rows) * width * weight.element_size() // COPIED)))
    if out is None and size == width:
        return A @ weight.index_select(0, rows)
    out = A.new_zeros(len(A), width) if out is None else out
    for first in range(0, width, size):
        last = min(first + size, width)
        out[:, first:last].addmm_(A, weight[:, first:last].index_select(0, rows))
    return out


def takes_some(node: Node, steps: Sequence[Inner]) -> bool:
    """Whether rows may be pushed on some channels of a node alone (`Weights.push_some`): a vector's linear layer, whose
    products take all of a row and give all of its inputs."""
    if node.op != "linear" or node.numel != out_channels(node):
        return False
    inputs = (0, in_channels(node))
    products = [step for step in steps if isinstance(step, Product)]
    moves = [step for step in steps if isinstance(step, (Gather, Broadcast, Wait, Free))]
    covered = sum(step.part.out[1] - step.part.out[0] for step in products) == out_channels(node)
    return covered and len(products) + len(moves) == len(steps) and all(step.part.into == inputs for step in products)


def collect_channels(comm: Comm, tensor: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """All ranks' ranges of channels along `dim`, of the given sizes, behind each other."""
    mine, most = tensor.movedim(dim, 0), max(sizes)
    padded = mine.new_zeros(most, *mine.shape[1:])
    padded[: len(mine)] = mine
    out = mine.new_empty(most * comm.size, *mine.shape[1:])
    comm.all_gather(out, padded).wait()
    kept = [out[rank * most : rank * most + size] for rank, size in enumerate(sizes)]
    return torch.cat(kept).movedim(0, dim)


class Map(torch.autograd.Function):
    """The inner steps of a product as a differentiable function of rows or values.

    Gradients of values that every rank has must be the same everywhere, and a ring adds up in another order on each
    rank: then those of rank 0 are taken.
    """

    @staticmethod
    def forward(ctx: Any, weights: Weights, node: Node, steps: Any, absolute: Any, *xs: Tensor) -> Any:
        forward, adjoint, replicated = steps
        ctx.rest = weights, node, adjoint, absolute, replicated
        return tuple(weights.run(node, forward, xs, absolute))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        weights, node, adjoint, absolute, replicated = ctx.rest
        found = weights.run(node, adjoint, gradients, absolute)
        if replicated and any(isinstance(step, Shift) for step in adjoint):
            found = weights.from_first(found)
        return (None, None, None, None, *found)


def mapped(
    weights: Weights, node: Node, steps: Any, absolute: Sequence[bool] | None, xs: Sequence[Tensor]
) -> list[Tensor]:
    """`Map` of rows or values; where no gradient flows, without autograd's share of the time.

    Args:
        weights, node, absolute, xs: as for `Weights.run`.
        steps: what to run, its adjoint, and whether the values are replicated.
    """
    if torch.is_grad_enabled() and any(x.requires_grad for x in xs):
        return list(Map.apply(weights, node, steps, absolute, *xs))  # type: ignore[no-untyped-call]
    return weights.run(node, steps[0], xs, absolute)
