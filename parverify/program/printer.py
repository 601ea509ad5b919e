"""Programs as lines of text: what a rank holds, and every step of a sweep and of its gradient, one a line.

Bytes of communication are those that the rank receives, counted as the meters count them. What is as large as there are
rows has its bytes for one row. The lines are data first, so that a report can hold them too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from parverify.graph.ir import BoundGraph, Node
from parverify.ops.weighted import Piece, channel_dim, piece_of
from parverify.parallel.traffic import received
from parverify.program.steps import (
    Affine,
    Broadcast,
    Collect,
    Concretize,
    Free,
    Gather,
    Inner,
    Join,
    Placement,
    Product,
    Program,
    Reduce,
    Relax,
    Shift,
    Slice,
    Step,
    Total,
    weighted_nodes,
)


@dataclass(frozen=True)
class Line:
    """One step.

    Args:
        step: its name.
        node: whose value or weight it is about.
        part: of the weight, as ranges of output and input channels; or the range of channels of rows.
        shape: of what is moved or multiplied; `rows` stands for their number.
        bytes: of that; for communication, what this rank receives; None where nothing is.
        each: the bytes are for one row.
    """

    step: str
    node: str
    part: str = ""
    shape: str = ""
    bytes: int | None = None
    each: bool = False


def held_lines(graph: BoundGraph, placement: Placement, itemsize: int) -> list[Line]:
    """The pieces of weights that stay on the rank; a weight of several nodes is listed once."""
    seen: set[tuple[str, Piece]] = set()
    lines = []
    for node in weighted_nodes(graph):
        for piece in placement.lowerings[node.name].held:
            key = node.consts["weight"], piece
            if key not in seen:
                seen.add(key)
                shape = piece.shape(_weight_shape(graph, node))
                lines.append(Line("hold", node.name, _range(piece), _text(shape), itemsize * math.prod(shape)))
    return lines


def sweep_lines(graph: BoundGraph, placement: Placement, program: Program, itemsize: int) -> list[Line]:
    """The steps of a sweep, from back to front."""
    writer = _Writer(graph, placement, itemsize)
    for step in program.steps:
        writer.outer(step)
        if isinstance(step, Affine):
            writer.inner(graph[step.node], step.inner)
    return writer.lines


def gradient_lines(graph: BoundGraph, placement: Placement, program: Program, itemsize: int) -> list[Line]:
    """The steps of a sweep's gradient, from front to back: all that lies before a slope on the way of the rows."""
    writer = _Writer(graph, placement, itemsize)
    moving: set[str] = set()  # nodes whose rows depend on slopes
    taken: list[Affine | Relax] = []
    for step in program.steps:
        if isinstance(step, Relax) or (isinstance(step, Affine) and step.node in moving):
            taken.append(step)
            moving.update(graph[step.node].inputs)
    for step in reversed(taken):
        writer.outer(step, "gradient of ")
        if isinstance(step, Affine):
            writer.inner(graph[step.node], step.adjoint)
    return writer.lines


class _Writer:
    """Writes steps in their order; knows which gathered weights are there already."""

    def __init__(self, graph: BoundGraph, placement: Placement, itemsize: int) -> None:
        self._graph, self._placement, self._itemsize = graph, placement, itemsize
        self._there: set[str] = set()
        self.lines: list[Line] = []

    def outer(self, step: Step, prefix: str = "") -> None:
        """A step of the sweep itself, with the rows as it finds them."""
        name = prefix + type(step).__name__.lower()
        if isinstance(step, Total):
            traffic = received("all_reduce", 2 * self._itemsize, self._placement.size)
            self.lines.append(Line(name, "", "", "[2, rows]", traffic, each=True))
            return
        node = self._graph[step.node]
        shape, part = list(node.shape), ""
        place = self._placement.channels.get(node.name)
        if place is not None:
            first, last = place.mine
            shape[place.dim], part = last - first, f"channels {first}:{last}"
        if isinstance(step, Join):
            part = f"{step.readers} readers"
        if isinstance(step, Concretize):
            shape = [math.prod(shape)]
        self.lines.append(Line(name, node.name, part, _rows(shape), self._itemsize * math.prod(shape), each=True))

    def inner(self, node: Node, steps: Iterable[Inner]) -> None:
        """The steps that bring and multiply a weight, indented."""
        steps = list(steps)
        pushing = next((step.kind != "pull" for step in steps if isinstance(step, Product)), True)
        for step in steps:
            self.lines.append(self._inner(self._graph[step.node], step, pushing=pushing))

    def _inner(self, node: Node, step: Inner, *, pushing: bool) -> Line:
        name, whole = "  " + type(step).__name__.lower(), _weight_shape(self._graph, node)
        if isinstance(step, Gather):
            return self._gather(name, node, whole)
        if isinstance(step, Broadcast):
            source = self._placement.rank == step.source
            shape = step.piece.shape(whole)
            traffic = received("broadcast", self._bytes(shape), self._placement.size, source=source)
            return Line(name, node.name, f"{_range(step.piece)} from {step.source}", _text(shape), traffic)
        if isinstance(step, Shift):
            shape = step.take.shape(whole)
            traffic = received("shift", self._bytes(shape), self._placement.size)
            return Line(name, node.name, f"{_range(step.send)} for {_range(step.take)}", _text(shape), traffic)
        if isinstance(step, Free):
            self._there.discard(node.consts["weight"])
            shape = whole if step.piece is None else step.piece.shape(whole)
            return Line(name, node.name, "" if step.piece is None else _range(step.piece), _text(shape))
        if isinstance(step, Product):
            shape = piece_of(node, step.part).shape(whole)
            return Line(f"  {step.kind}", node.name, str(step.part), _text(shape), self._bytes(shape))
        if isinstance(step, Slice):
            return self._channels(name, node, (step.first, step.last), pushed=not pushing, nbytes=0)
        if isinstance(step, Collect):
            return self._collect(name, node, step, pushed=pushing)
        if isinstance(step, Reduce):
            shape = _value(node, pushed=pushing)
            traffic = received("all_reduce", self._bytes(shape), self._placement.size)
            return Line(name, node.name, "", _rows(shape), traffic, each=True)
        return Line(name, node.name)

    def _gather(self, name: str, node: Node, whole: Sequence[int]) -> Line:
        if node.consts["weight"] in self._there:
            return Line(name, node.name, "on its way", _text(whole), 0)
        self._there.add(node.consts["weight"])
        size = self._placement.size
        shard = (-(-whole[0] // size), *whole[1:])
        return Line(name, node.name, "", _text(whole), received("all_gather", self._bytes(shard), size))

    def _channels(self, name: str, node: Node, span: tuple[int, int], *, pushed: bool, nbytes: int) -> Line:
        shape = list(_value(node, pushed=pushed))
        shape[channel_dim(node)] = span[1] - span[0]
        return Line(name, node.name, f"channels {span[0]}:{span[1]}", _rows(shape), nbytes, each=True)

    def _collect(self, name: str, node: Node, step: Collect, *, pushed: bool) -> Line:
        shape = _value(node, pushed=pushed)
        shard = list(shape)
        shard[channel_dim(node)] = max(step.sizes)
        traffic = received("all_gather", self._bytes(shard), self._placement.size)
        return Line(name, node.name, f"channels 0:{sum(step.sizes)}", _rows(shape), traffic, each=True)

    def _bytes(self, shape: Iterable[int]) -> int:
        return self._itemsize * math.prod(shape)


def _value(node: Node, *, pushed: bool) -> tuple[int, ...]:
    """The shape of what a product gives: on the node's input if rows are pushed, else on its value."""
    return tuple(node.attrs["in_shapes"][0]) if pushed else node.shape


def _weight_shape(graph: BoundGraph, node: Node) -> tuple[int, ...]:
    return tuple(graph.constants[node.consts["weight"]].value.shape) if "weight" in node.consts else ()


def _range(piece: Piece) -> str:
    return f"[{piece.rows[0]}:{piece.rows[1]}, {piece.columns[0]}:{piece.columns[1]}]"


def _text(shape: Iterable[int]) -> str:
    return str(list(shape))


def _rows(shape: Iterable[int]) -> str:
    return f"[rows, {', '.join(map(str, shape))}]"


# --- text -------------------------------------------------------------------------------------------------------------


def written(lines: Sequence[Line]) -> list[str]:
    """The lines as text, in columns."""
    cells = [(line.step, line.node, line.part, line.shape, _size(line)) for line in lines]
    widths = [max((len(cell[column]) for cell in cells), default=0) for column in range(len(fields(Line)) - 1)]
    return [
        "  ".join(
            text.rjust(width) if column == len(widths) - 1 else text.ljust(width)
            for column, (text, width) in enumerate(zip(cell, widths, strict=True))
        ).rstrip()
        for cell in cells
    ]


def _size(line: Line) -> str:
    if line.bytes is None:
        return ""
    return f"{size_text(line.bytes)}{' a row' if line.each else ''}"


def size_text(count: float) -> str:
    """Bytes in the largest unit that leaves a digit before the point."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
