"""A backward sweep as a program: a list of steps that is compiled once per start node and then executed many times.

A sweep computes (`Seed`, `Affine`, `Relax`, `Join`, `Concretize`). What a strategy adds lies inside `Affine`: the steps
that bring the parts of a node's weight to where they are multiplied (`Gather`, `Broadcast`, `Shift`, `Wait`, `Free`),
that multiply them (`Product`), and that divide or combine rows between ranks (`Slice`, `Collect`, `Reduce`). Each
`Affine` also carries its adjoint, the steps that its gradient runs. The executor runs these steps, the cost model runs
them on tensors without data, the printer prints them: there is no other description of what a rank does.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from parverify.errors import ParverifyError
from parverify.graph.ir import BoundGraph, Node
from parverify.ops.weighted import WEIGHTED, Part, Piece, parts, piece_of, whole

# --- steps within a product with a weight -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Gather:
    """Start to gather the ranks' shards of a weight, equal ranges of its dim 0, into one buffer; nothing where the
    weight is there or on its way already."""

    node: str


@dataclass(frozen=True)
class Broadcast:
    """Start to send a piece of a weight from rank `source` to all others."""

    node: str
    piece: Piece
    source: int


@dataclass(frozen=True)
class Shift:
    """Start to pass a piece on to the rank before and to take one from the rank behind, around the ring."""

    node: str
    send: Piece
    take: Piece


@dataclass(frozen=True)
class Wait:
    """Wait for a piece that was started for this node; for everything if None."""

    node: str
    piece: Piece | None = None


@dataclass(frozen=True)
class Free:
    """Give back the buffer of a piece that is not needed any more; of all pieces if None."""

    node: str
    piece: Piece | None = None


@dataclass(frozen=True)
class Product:
    """Multiply one part: `push` rows, `pull` values, or `pick` slices of the weight for one-hot rows."""

    node: str
    kind: str
    part: Part


@dataclass(frozen=True)
class Slice:
    """Keep a range of channels of what is replicated."""

    node: str
    first: int
    last: int


@dataclass(frozen=True)
class Collect:
    """All-gather ranges of channels into what is replicated; `sizes` of each rank's range."""

    node: str
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Reduce:
    """Sum partial results over the ranks."""

    node: str


Inner = Gather | Broadcast | Shift | Wait | Free | Product | Slice | Collect | Reduce
COLLECTIVES = (Gather, Broadcast, Shift, Collect, Reduce)

# --- steps of a sweep -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seed:
    """Put the rows on the value of `node`."""

    node: str


@dataclass(frozen=True)
class Affine:
    """Push the rows on an affine node to its inputs.

    Args:
        node: its name.
        picked: the rows may still be one-hot.
        inner: what happens to its weight; empty for a node without one.
        adjoint: what the gradient does, in its order.
    """

    node: str
    picked: bool = False
    inner: tuple[Inner, ...] = ()
    adjoint: tuple[Inner, ...] = ()


@dataclass(frozen=True)
class Relax:
    """Push the rows on a nonlinear node to its inputs through its relaxation."""

    node: str


@dataclass(frozen=True)
class Join:
    """Add up the rows that several readers of `node` pushed to it."""

    node: str
    readers: int


@dataclass(frozen=True)
class Total:
    """Sum the constants that rows picked up where ranks hold different channels of them."""


@dataclass(frozen=True)
class Concretize:
    """Minimize the rows on the input over the input region."""

    node: str


Step = Seed | Affine | Relax | Join | Total | Concretize


# --- how a rank holds and multiplies weights --------------------------------------------------------------------------


@dataclass(frozen=True)
class Lowering:
    """One node's weight on one rank.

    Args:
        held: the pieces that stay on this rank.
        push: steps for rows in a sweep; `pull` is its adjoint, for the gradient.
        pull: see `push`.
        pick: steps for one-hot rows on the node's value.
        forward: steps for values and intervals, which are replicated on all ranks; `back` is its adjoint.
        back: see `forward`.
    """

    held: tuple[Piece, ...]
    push: tuple[Inner, ...]
    pull: tuple[Inner, ...]
    pick: tuple[Inner, ...]
    forward: tuple[Inner, ...]
    back: tuple[Inner, ...]

    @property
    def moves(self) -> bool:
        """Whether pieces of the weight pass between ranks."""
        steps = (*self.push, *self.pull, *self.pick, *self.forward, *self.back)
        return any(isinstance(step, (Gather, Broadcast, Shift)) for step in steps)


@dataclass(frozen=True)
class Channels:
    """The range of channels that a sweep's rows on a node have on each rank.

    Args:
        dim: of the node's value.
        sizes: how many channels each rank has, in order.
        rank: whose range is `mine`.
    """

    dim: int
    sizes: tuple[int, ...]
    rank: int

    @property
    def mine(self) -> tuple[int, int]:
        """First channel of this rank, and the one behind its last."""
        first = sum(self.sizes[: self.rank])
        return first, first + self.sizes[self.rank]


def even(count: int, size: int) -> tuple[int, ...]:
    """`count` channels over `size` ranks as evenly as possible, the larger shares first."""
    return tuple(count // size + (rank < count % size) for rank in range(size))


@dataclass(frozen=True)
class Placement:
    """What a strategy makes of a graph on one of `size` ranks.

    Args:
        strategy: its name.
        rank, size: which rank of how many.
        lowerings: weighted node name -> how its weight is held and multiplied.
        channels: node name -> the channels that a sweep's rows have on this rank, where it isn't all of them.
        splits_rows: row tiles are dealt to the ranks; otherwise every rank pushes every row.
        ahead: gather the weight of the next step while the present one is multiplied.
        interval_only: nodes whose neurons get no rows: interval bounds have to do.
        tile: rows in a tile, where the strategy says so; 0 leaves it to the memory, -1 is all rows of a rank.
    """

    strategy: str
    rank: int
    size: int
    lowerings: Mapping[str, Lowering]
    channels: Mapping[str, Channels] = field(default_factory=dict)
    splits_rows: bool = False
    ahead: bool = False
    interval_only: frozenset[str] = frozenset()
    tile: int = 0


def products(node: Node, kind: str, some: Sequence[Part]) -> tuple[Product, ...]:
    """One product a part, in order."""
    return tuple(Product(node.name, kind, part) for part in some)


def resident(node: Node, some: Sequence[Part]) -> Lowering:
    """The whole weight on this rank, multiplied in these parts: those in which it is divided elsewhere, or at once."""
    push, pull = products(node, "push", some), products(node, "pull", some)
    pick = products(node, "pick", some)
    return Lowering((piece_of(node, whole(node)),), push, pull, pick, pull, push)


def weighted_nodes(graph: BoundGraph) -> tuple[Node, ...]:
    """The nodes with a weight, in topological order."""
    return tuple(node for node in graph.nodes if node.op in WEIGHTED)


def divided_constants(graph: BoundGraph) -> tuple[str, ...]:
    """Names of the constants that can be divided: those that are nothing but weights of weighted nodes."""
    weights = {node.consts["weight"]: None for node in weighted_nodes(graph)}
    for node in graph.nodes:
        for role, name in node.consts.items():
            if role != "weight" or "weight" not in node.consts or node.consts["weight"] not in weights:
                weights.pop(name, None)
    return tuple(weights)


def single(graph: BoundGraph) -> Placement:
    """One process: everything is resident."""
    lowerings = {
        node.name: resident(node, parts(node, graph.constants[node.consts["weight"]].value.shape))
        for node in weighted_nodes(graph)
    }
    return Placement("single", 0, 1, lowerings)


# --- programs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """The steps of one sweep, from rows on `start` to numbers.

    Args:
        start: name of the node that the rows are functionals of.
        steps: in order.
        relaxed: names of the nonlinear nodes it passes, in the order it meets them.
    """

    start: str
    steps: tuple[Step, ...]
    relaxed: tuple[str, ...]

    def collectives(self) -> Iterator[Inner | Total]:
        """Every step in which ranks meet, those of the gradient behind those of the sweep."""
        for step in self.steps:
            if isinstance(step, Affine):
                yield from (inner for inner in step.inner if isinstance(inner, COLLECTIVES))
            elif isinstance(step, Total):
                yield step
        for step in reversed(self.steps):
            if isinstance(step, Affine):
                yield from (inner for inner in step.adjoint if isinstance(inner, COLLECTIVES))


def compile_sweep(graph: BoundGraph, start: str, placement: Placement, *, one_hot: bool = False) -> Program:
    """The program of one rank: every node between `start` and the input once, from back to front.

    Args:
        graph: what is swept.
        start: where rows start.
        placement: how weights are held and multiplied.
        one_hot: rows are one-hot, so that the first product only picks slices of its weight.
    """
    nodes = graph.ancestors(start)
    readers = Counter(name for node in nodes for name in node.inputs)
    steps: list[Step] = [Seed(start)]
    relaxed = []
    for node in reversed(nodes):
        if readers[node.name] > 1:
            steps.append(Join(node.name, readers[node.name]))
        if node.op == "input":
            continue
        if node.op in ("act", "mul"):
            steps.append(Relax(node.name))
            relaxed.append(node.name)
            continue
        picked = node.name == start
        lowering = placement.lowerings.get(node.name)
        if lowering is None:
            steps.append(Affine(node.name, picked))
        else:
            chosen = picked and one_hot  # slices of a weight need no gradient
            inner, adjoint = (lowering.pick, ()) if chosen else (lowering.push, lowering.pull)
            steps.append(Affine(node.name, picked, inner, adjoint))
    if placement.ahead:
        steps = _gathered_ahead(steps)
    if any(node.name in placement.channels for node in nodes):
        steps.append(Total())
    steps.append(Concretize(graph.input.name))
    return Program(start, tuple(steps), tuple(relaxed))


def _gathered_ahead(steps: list[Step]) -> list[Step]:
    """With every gather also started one product early, in the sweep and in its gradient."""
    out = list(steps)
    gathering = [i for i, step in enumerate(steps) if isinstance(step, Affine) and _gather(step.inner) is not None]
    for here, there in itertools.pairwise(gathering):
        now, then = out[here], out[there]
        if isinstance(now, Affine) and isinstance(then, Affine):
            out[here] = Affine(now.node, now.picked, _with(now.inner, _gather(then.inner)), now.adjoint)
            if now.adjoint:
                out[there] = Affine(then.node, then.picked, then.inner, _with(then.adjoint, _gather(now.adjoint)))
    return out


def _gather(steps: Sequence[Inner]) -> Gather | None:
    return next((step for step in steps if isinstance(step, Gather)), None)


def _with(steps: tuple[Inner, ...], gather: Gather | None) -> tuple[Inner, ...]:
    """`steps` with a gather behind their own wait."""
    at = next((i for i, step in enumerate(steps) if isinstance(step, Wait)), None)
    return steps if at is None or gather is None else (*steps[: at + 1], gather, *steps[at + 1 :])


def check_matching(programs: Sequence[Program]) -> None:
    """Check that the ranks' programs meet in the same collectives in the same order, so that none waits for ever.

    Args:
        programs: of rank 0, 1, ... of one group, from the same start.

    Raises:
        ParverifyError: naming the first step that has no partner.
    """
    size = len(programs)
    lists = [list(program.collectives()) for program in programs]
    if len({len(steps) for steps in lists}) > 1:
        counts = ", ".join(str(len(steps)) for steps in lists)
        raise ParverifyError(f"the ranks' programs from {programs[0].start} have {counts} collectives; they must agree")
    for position, met in enumerate(zip(*lists, strict=True)):
        for rank, step in enumerate(met):
            other = met[(rank + 1) % size]
            if isinstance(step, Shift):
                fits = isinstance(other, Shift) and (other.node, other.send) == (step.node, step.take)
            elif isinstance(step, Slice):
                fits = True
            else:
                fits = step == other
            if not fits:
                raise ParverifyError(
                    f"collective {position} of the program from {programs[0].start}: rank {rank} has {step}, "
                    f"rank {(rank + 1) % size} has {other}"
                )
