"""A graph divided over the ranks of a group: who holds which piece of which weight.

Rank 0 alone has read the network. It sends the others the graph without the entries of its weights, and then, weight by
weight and piece by piece, what each rank is to keep; so no other rank ever holds more than its own pieces. One process
is a group of one that keeps everything.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from parverify.errors import ParverifyError
from parverify.graph.ir import BoundGraph, Const, check
from parverify.ops.weighted import Piece
from parverify.parallel.comm import Alone, Comm
from parverify.parallel.window import open_window
from parverify.program.executor import Executor
from parverify.program.steps import Placement, divided_constants, single, weighted_nodes

Compile = Callable[[BoundGraph, int, int], Placement]
"""(graph, rank, size) -> what the strategy makes of the graph there; reads shapes of constants only."""

Held = dict[tuple[str, Piece], Tensor]


@dataclass(frozen=True)
class Division:
    """One rank's share of a network.

    Args:
        graph: the network; without the entries of weights that are divided.
        placement: what this rank does.
        held: (weight constant, piece) -> tensor, of the weights that are divided.
        comm: the group.
        placements: of all ranks, in order.
        near: the ranks may read each other's memory, see `parverify.parallel.window`.
        window: the pieces of all ranks, where they can.
    """

    graph: BoundGraph
    placement: Placement
    held: Mapping[tuple[str, Piece], Tensor] = field(default_factory=dict)
    comm: Comm = field(default_factory=Alone)
    placements: tuple[Placement, ...] = ()
    near: bool = False
    window: Mapping[tuple[str, Piece], Tensor] | None = None

    @staticmethod
    def whole(graph: BoundGraph) -> Division:
        """One process that holds everything."""
        placement = single(graph)
        return Division(graph, placement, placements=(placement,))

    def executor(
        self, *, graph: BoundGraph | None = None, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> Executor:
        """This rank's executor.

        Args:
            graph: the network with nodes added that have no weights; None for the network itself.
            dtype, device: of the bounds.
        """
        return Executor(
            self.graph if graph is None else graph,
            dtype=dtype,
            device=device,
            placement=self.placement,
            held=self.held,
            comm=self.comm,
            window=self.window,
        )

    def redivided(self, compile_for: Compile, comm: Comm) -> Division:
        """The same network divided over smaller groups of the same ranks; all ranks call this, each with its group.

        Every piece is broadcast once to everybody, who keep what their new placement says.

        Args:
            compile_for: the strategy within a group.
            comm: this rank's new group.
        """
        if self.comm.size == comm.size:
            return self
        placements = tuple(compile_for(self.graph, rank, comm.size) for rank in range(comm.size))
        divided = divided_constants(self.graph)
        wanted: Held = {}
        for node in weighted_nodes(self.graph):
            name = node.consts["weight"]
            if name not in divided:
                continue
            like = self.graph.constants[name].value
            for piece in placements[comm.rank].lowerings[node.name].held:
                if (name, piece) not in wanted:
                    wanted[name, piece] = torch.empty(piece.shape(tuple(like.shape)), dtype=like.dtype)
        sent: set[tuple[str, Piece]] = set()
        for name, piece, owner in _pieces(self.graph, self.placements):
            if (name, piece) in sent:
                continue
            sent.add((name, piece))
            like = self.graph.constants[name].value
            mine = owner == self.comm.rank
            tensor = self.held[name, piece] if mine else torch.empty(piece.shape(tuple(like.shape)), dtype=like.dtype)
            self.comm.broadcast(tensor, owner).wait()
            for (other, place), target in wanted.items():
                both = place.meet(piece) if other == name else None
                if both is not None:
                    both.within(place).of(target).copy_(both.within(piece).of(tensor))
        if comm.size > 1:
            window = _open(wanted, placements, comm) if self.near else None
            return Division(self.graph, placements[comm.rank], wanted, comm, placements, self.near, window)
        whole = {name: Const(tensor) for (name, _), tensor in wanted.items()}
        graph = replace(self.graph, constants={**self.graph.constants, **whole})
        return Division(graph, placements[0], {}, comm, placements)

    def assembled(self, graph: BoundGraph | None = None) -> BoundGraph | None:
        """The network with all weights whole, on rank 0; None on the others, which all must call it too."""
        graph = self.graph if graph is None else graph
        if self.comm.size == 1:
            return graph
        values: dict[str, Tensor] = {}
        for name, piece, owner in _pieces(self.graph, self.placements):
            like = graph.constants[name].value
            if self.comm.rank == 0:
                whole = values.setdefault(name, torch.empty(like.shape, dtype=like.dtype))
                if owner == 0:
                    piece.of(whole).copy_(self.held[name, piece])
                else:
                    tensor = torch.empty(piece.shape(tuple(like.shape)), dtype=like.dtype)
                    self.comm.recv(tensor, owner).wait()
                    piece.of(whole).copy_(tensor)
            elif owner == self.comm.rank:
                self.comm.send(self.held[name, piece], 0).wait()
        if self.comm.rank:
            return None
        return replace(graph, constants={**graph.constants, **{name: Const(value) for name, value in values.items()}})


def divide(graph: BoundGraph | None, compile_for: Compile, comm: Comm, *, near: bool = False) -> Division:
    """Divide a graph over the ranks of a group; all of them call this.

    Args:
        graph: the network on rank 0; None on the others. Its constants are not changed, so that rank 0 keeps less only
            once nobody else holds the graph.
        compile_for: the strategy.
        comm: the group.
        near: the ranks may read each other's memory, see `parverify.parallel.window`; only for bounds on the CPU.
    """
    if comm.size == 1:
        if graph is None:
            raise ParverifyError("a group of one has nobody to get the network from")
        placement = compile_for(graph, 0, 1)
        return Division(graph, placement, {}, comm, (placement,))
    sent = None if graph is None else pickle.dumps(bare(graph))
    skeleton: BoundGraph = check(pickle.loads(comm.broadcast_bytes(sent, 0)))  # from our own rank 0
    placements = tuple(compile_for(skeleton, rank, comm.size) for rank in range(comm.size))
    held: Held = {}
    for name, piece, owner in _pieces(skeleton, placements):
        if graph is not None:
            tensor = piece.of(graph.constants[name].value.detach()).contiguous().clone()
            if owner == 0:
                held[name, piece] = tensor
            else:
                comm.send(tensor, owner).wait()
        elif owner == comm.rank:
            like = skeleton.constants[name].value
            tensor = torch.empty(piece.shape(tuple(like.shape)), dtype=like.dtype)
            comm.recv(tensor, 0).wait()
            held[name, piece] = tensor
    window = _open(held, placements, comm) if near else None
    return Division(skeleton, placements[comm.rank], held, comm, placements, near, window)


def _open(held: Held, placements: tuple[Placement, ...], comm: Comm) -> Mapping[tuple[str, Piece], Tensor] | None:
    """All ranks' pieces, if any are needed on other ranks and can be read there."""
    return open_window(comm, held) if any(lowering.moves for lowering in placements[0].lowerings.values()) else None


def bare(graph: BoundGraph) -> BoundGraph:
    """The graph with nothing but shapes of the weights that are divided."""
    divided = set(divided_constants(graph))
    constants = {
        name: Const(const.value.detach().to("meta") if name in divided else const.value.detach())
        for name, const in graph.constants.items()
    }
    return BoundGraph(graph.nodes, graph.output, constants)


def _pieces(graph: BoundGraph, placements: tuple[Placement, ...]) -> Iterator[tuple[str, Piece, int]]:
    """Every (weight constant, piece, rank that holds it), in one order on all ranks."""
    divided, seen = set(divided_constants(graph)), set()
    for node in weighted_nodes(graph):
        name = node.consts["weight"]
        for rank, placement in enumerate(placements):
            for piece in placement.lowerings[node.name].held:
                if name in divided and (name, piece, rank) not in seen:
                    seen.add((name, piece, rank))
                    yield name, piece, rank
