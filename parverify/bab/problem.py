"""A query over a bound graph, as tensors: distinct input boxes, and the rows that must be positive to close a disjunct.

A disjunct is the conjunction of rows `f_r(x) <= 0`; it can't hold on a domain where one row is bounded away from zero.
Rows that mention inputs are handled by appending the input to the output, so that everything behind sees one kind of
row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from parverify.bounds.region import BoxRegion, outward_box
from parverify.errors import SpecError
from parverify.frontend.query import Query
from parverify.graph.ir import BoundGraph, Node, check
from parverify.program.division import Division
from parverify.program.executor import Executor
from parverify.program.rows import Dense


def with_input(graph: BoundGraph) -> BoundGraph:
    """The graph with output (flat output, flat input), shape (n_out + n_in,)."""
    out, source = graph[graph.output], graph.input
    total = out.numel + source.numel
    nodes = (
        *graph.nodes,
        Node("flat.output", "reshape", (out.name,), (out.numel,), attrs={"in_shapes": (out.shape,)}),
        Node("flat.input", "reshape", (source.name,), (source.numel,), attrs={"in_shapes": (source.shape,)}),
        Node(
            "joined",
            "concat",
            ("flat.output", "flat.input"),
            (total,),
            attrs={"dim": 0, "in_shapes": ((out.numel,), (source.numel,))},
        ),
    )
    return check(BoundGraph(nodes, "joined", graph.constants))


@dataclass(frozen=True)
class Problem:
    """A query ready for branch and bound.

    Args:
        executor: over the graph whose output the rows are functionals of.
        query: the property.
        boxes: the distinct input boxes, (B, n_in), rounded outward.
        box_of: (P,) box of each disjunct, -1 where the disjunct's box is empty.
        C: (P, R, n) rows on the flat output; shorter conjunctions repeat their first row.
        d: (P, R) right-hand sides.
        need: (P, R) a row closes its disjunct where its lower bound is larger than this (or equal, where strict).
        strict: (P, R).
        trivial: (P,) disjuncts without rows: they hold anywhere in their box and can't be closed.
    """

    executor: Executor
    query: Query
    boxes: BoxRegion
    box_of: Tensor
    C: Tensor
    d: Tensor
    need: Tensor
    strict: Tensor
    trivial: Tensor

    @property
    def rows_per_part(self) -> int:
        """R."""
        return self.C.shape[1]

    def rows(self, part: Tensor, owner: Tensor | None = None) -> Dense:
        """All rows of the disjuncts `part` (D,), (D * R) rows; owned by domain 0..D-1 in order without `owner`."""
        count, width = len(part), self.rows_per_part
        shape = self.executor.graph[self.executor.graph.output].shape
        A = self.C[part].reshape(count * width, *shape)
        own = torch.arange(count, device=part.device) if owner is None else owner
        if width > 1:
            own = own.repeat_interleave(width)
        elif owner is None:
            return Dense(A, -self.d[part].reshape(-1), None)
        return Dense(A, -self.d[part].reshape(-1), own)

    def excess(self, lower: Tensor, part: Tensor) -> Tensor:
        """(D,) by how much the best row of each disjunct exceeds what it needs; lower is (D, R)."""
        return (lower - self.need[part]).amax(1)

    def closed(self, lower: Tensor, part: Tensor) -> Tensor:
        """(D,) disjuncts that lower bounds (D, R) rule out. NaN rules nothing out."""
        need = self.need[part]
        proved = (lower > need) | (self.strict[part] & (lower >= need))
        return proved.any(1) & ~self.trivial[part]


def build(network: Division, query: Query, *, dtype: torch.dtype, device: str, gap: float = 0.0) -> Problem:
    """The problem of `query` over a network.

    Args:
        network: this rank's share of it.
        query: with flat sizes equal to the network's.
        dtype, device: of the bounds.
        gap: how much an output of the original network may differ from the real-valued one by rounding; a row must
            exceed what it needs by its share of this.
    """
    graph = network.graph
    sizes = graph.input.numel, graph[graph.output].numel
    if sizes != (query.n_in, query.n_out):
        raise SpecError(
            f"the property has {query.n_in} inputs and {query.n_out} outputs, the network has {sizes[0]} and {sizes[1]}"
        )
    joint = any(part.C_x is not None for part in query)
    executor = network.executor(graph=with_input(graph) if joint else graph, dtype=dtype, device=device)
    lowers, uppers, box_of = _boxes(query)
    region = outward_box(torch.from_numpy(lowers), torch.from_numpy(uppers), dtype, device)
    width = max([len(part.d) for part in query] + [1])
    size = query.n_out + (query.n_in if joint else 0)
    count = len(query)
    C, d = np.zeros((count, width, size)), np.zeros((count, width))
    need, strict = np.zeros((count, width)), np.zeros((count, width), dtype=bool)
    for p, part in enumerate(query):
        m = len(part.d)
        if not m:
            continue
        C[p, :m, : query.n_out], d[p, :m], strict[p, :m] = part.C_y, part.d, part.strict
        if part.C_x is not None:
            C[p, :m, query.n_out :] = part.C_x
        need[p, :m] = gap * np.abs(part.C_y).sum(1)
        for array in (C, d, strict, need):
            array[p, m:] = array[p, 0]

    def tensor(array: np.ndarray) -> Tensor:
        made = torch.from_numpy(array)
        return made.to(device, dtype) if made.is_floating_point() else made.to(device)

    rounding = torch.finfo(dtype).eps * np.abs(d)  # d itself is rounded on its way into `dtype`
    return Problem(
        executor,
        query,
        region,
        torch.as_tensor(box_of, device=device),
        tensor(C),
        tensor(d),
        tensor(need + rounding),
        tensor(strict),
        torch.tensor([not len(part.d) for part in query], device=device),
    )


def _boxes(query: Query) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Distinct nonempty boxes and the box of each disjunct."""
    seen: dict[tuple[bytes, bytes], int] = {}
    by_identity: dict[tuple[int, int], int] = {}
    lowers: list[np.ndarray] = []
    uppers: list[np.ndarray] = []
    box_of: list[int] = []
    for part in query:
        if part.empty_box:
            box_of.append(-1)
            continue
        identity = (id(part.lower), id(part.upper))
        if identity not in by_identity:
            key = (part.lower.tobytes(), part.upper.tobytes())
            if key not in seen:
                seen[key] = len(lowers)
                lowers.append(part.lower)
                uppers.append(part.upper)
            by_identity[identity] = seen[key]
        box_of.append(by_identity[identity])
    empty = np.zeros((0, query.n_in))
    return (np.stack(lowers), np.stack(uppers), box_of) if lowers else (empty, empty, box_of)
