"""A backward sweep as a program: a list of steps that is compiled once per start node and then executed many times.

The steps are the vocabulary of every strategy. One process needs `Seed`, `Load`, `Affine`, `Relax`, `Join`, `Free` and
`Concretize`; strategies that divide a sweep over ranks insert communication between them. Algorithms only ever see
the executor, so they do not change when a sweep is divided.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from parverify.graph.ir import BoundGraph


@dataclass(frozen=True)
class Seed:
    """Put the rows on the value of `node`."""

    node: str


@dataclass(frozen=True)
class Load:
    """Make the constants of `node` available."""

    node: str
    constants: tuple[str, ...]


@dataclass(frozen=True)
class Affine:
    """Push the rows on an affine node to its inputs; `picked` where the rows are still one-hot."""

    node: str
    picked: bool = False


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
class Free:
    """Drop constants that were loaded for `node`."""

    node: str
    constants: tuple[str, ...]


@dataclass(frozen=True)
class Concretize:
    """Minimize the rows on the input over the input region."""

    node: str


Step = Seed | Load | Affine | Relax | Join | Free | Concretize


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


def compile_sweep(graph: BoundGraph, start: str) -> Program:
    """The program of one process: every node between `start` and the input once, from back to front."""
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
        constants = tuple(node.consts.values())
        if constants:
            steps.append(Load(node.name, constants))
        steps.append(Affine(node.name, picked=node.name == start))
        if constants:
            steps.append(Free(node.name, constants))
    steps.append(Concretize(graph.input.name))
    return Program(start, tuple(steps), tuple(relaxed))
