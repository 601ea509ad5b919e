"""A `BoundedModule`'s network divided over ranks, and its bounds as auto_LiRPA defines them.

auto_LiRPA makes no allowance for rounding and does not intersect backward bounds with intervals, and its last linear
layer absorbs the specification before an interval is taken; so does what stands here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parverify.bounds.alpha import AlphaOptions, optimize
from parverify.bounds.layers import BoundOptions, LayerBounds, bound_layers
from parverify.bounds.region import BoxRegion
from parverify.budget import make_budget
from parverify.graph.ir import BoundGraph
from parverify.lirpa.in_place import divide_in_place
from parverify.lirpa.request import Request
from parverify.ops.kernel import Box
from parverify.ops.rounding import allowance
from parverify.parallel.comm import Comm, agreeing
from parverify.parallel.shared import from_first
from parverify.program.division import Division
from parverify.program.executor import Executor
from parverify.program.rows import Dense, OneHot, Tiled
from parverify.program.steps import Affine
from parverify.program.sweep import Sweep
from parverify.strategy.directives import Strategy

# of rows at the widest node, and the least rows of a tile: auto_LiRPA's networks are small, and so is the work beside
# their weights. Where the weights are divided, memory is what counts, and tiles are smaller still.
TILE = 1024 << 10, 64
SHARDED_TILE = 416 << 10, 64
WORTH = 200 << 20  # multiplications that take about as long as to share what they give


@dataclass(frozen=True)
class Found:
    """Bounds of one call.

    Args:
        lower, upper: (D, *output shape), or (D, rows) for another number of rows; None where they were not wanted.
        boxes: kernel node -> bounds of what nonlinear operators read, (D, *shape) each.
        agreed: to be called before anybody trusts them: waits for the other ranks, and raises `DisagreementError` where
            one has found other bounds.
    """

    lower: Tensor | None
    upper: Tensor | None
    boxes: dict[str, Box]
    agreed: Callable[[], None]


class Divided:
    """This rank's share of a network.

    Args:
        graph: the network, as it was recorded on this rank.
        bounded: the module that it was recorded of, whose weights are used where they lie.
        strategy: how it is divided.
        comm: the ranks.
        ulps: the allowance for rounding; 0 for auto_LiRPA's own digits.
    """

    def __init__(self, graph: BoundGraph, bounded: Any, strategy: Strategy, comm: Comm, ulps: float) -> None:
        self.division: Division = divide_in_place(graph, bounded, strategy, comm)
        self._ulps = ulps
        sharded = any(hasattr(node, "layout") for node in bounded._modules.values())
        self._tile_bytes, self._least = SHARDED_TILE if sharded else TILE
        self._executors: dict[tuple[torch.dtype, torch.device], Executor] = {}
        self._tiles: dict[torch.dtype, int] = {}

    @property
    def graph(self) -> BoundGraph:
        """The network; without entries of weights that are divided."""
        return self.division.graph

    def executor(self, dtype: torch.dtype, device: torch.device) -> Executor:
        """This rank's executor for bounds in a dtype on a device."""
        key = (dtype, device)
        if key not in self._executors:
            self._executors[key] = self.division.executor(dtype=dtype, device=device)
            self._executors[key].frugal = True
            self._executors[key].worth = WORTH
            self._executors[key].skips = True
        return self._executors[key]

    def _tile(self, executor: Executor) -> int:
        """Rows pushed at once, the same on all ranks."""
        if executor.dtype not in self._tiles:
            self._tiles[executor.dtype] = from_first(executor.comm, lambda: self._fitting(executor))
        return self._tiles[executor.dtype]

    def _fitting(self, executor: Executor) -> int:
        wanted = executor.placement.tile
        budget = make_budget(self.graph, memory=None, itemsize=executor.dtype.itemsize)
        return (
            budget.tile(wanted)
            if wanted
            else min(budget.tile(), max(self._least, self._tile_bytes // budget.widest_bytes))
        )

    def bounds(self, request: Request) -> Found:
        """What a call asks for; every rank calls this with the same request and gets the same."""
        low, _ = request.region.box()
        executor = self.executor(low.dtype, low.device)
        tile = self._tile(executor)
        options = BoundOptions(request.layers, request.alpha, tile=tile, intersect=False)
        with torch.no_grad(), allowance(self._ulps):
            found = bound_layers(executor, request.region, options)
            if request.method == "ibp":
                lower, upper = self._intervals(executor, request, found)
            else:
                lower, upper = self._rows(executor, request, found, tile)
        sides = {name: side for name, side in (("lower", lower), ("upper", upper)) if side is not None}
        return Found(lower, upper, found.boxes, agreeing(executor.comm, sides))

    def _intervals(
        self, executor: Executor, request: Request, found: LayerBounds
    ) -> tuple[Tensor | None, Tensor | None]:
        box = found.intervals[self.graph.output]
        if request.C is not None:
            box = _interval_of(executor, request.C.to(executor.device, executor.dtype), found)
        lower, upper = (self._shaped(side) for side in box)
        return lower if request.lower else None, upper if request.upper else None

    def _rows(
        self, executor: Executor, request: Request, found: LayerBounds, tile: int
    ) -> tuple[Tensor | None, Tensor | None]:
        rows = _rows_of(executor, request)
        alpha = request.alpha if request.method == "alpha-crown" else AlphaOptions(iterations=0)
        bound = self._bounding(executor, request, found, rows, alpha)
        value = executor.deal(len(rows), tile, bound, executor.work(self.graph.output, alpha.iterations))
        sides = value.reshape(request.lower + request.upper, request.region.domains, -1)
        lower = self._shaped(sides[0]) if request.lower else None
        upper = self._shaped(-sides[-1]) if request.upper else None
        return lower, upper

    def _bounding(
        self, executor: Executor, request: Request, found: LayerBounds, rows: Tiled, alpha: AlphaOptions
    ) -> Callable[[slice], Tensor]:
        def bound(part: slice) -> Tensor:
            return optimize(
                executor,
                self.graph.output,
                rows.take(part),
                found.relaxed,
                request.region,
                options=alpha,
                replicated=not executor.splits_rows,
            )

        return bound

    def _shaped(self, side: Tensor) -> Tensor:
        """As auto_LiRPA shapes bounds: like the output where there are as many."""
        output = self.graph[self.graph.output]
        flat = side.reshape(len(side), -1)
        return flat.reshape(len(side), *output.shape[1:]) if flat.shape[1] == output.numel else flat


def _rows_of(executor: Executor, request: Request) -> Tiled:
    """Rows of the lower bounds, then those of the negated upper bounds, as far as they are wanted."""
    output = executor.graph[executor.graph.output]
    domains, device = request.region.domains, executor.device
    signs = [sign for sign, wanted in ((1.0, request.lower), (-1.0, request.upper)) if wanted]
    count = output.numel if request.C is None else request.C.shape[1]
    owner = torch.arange(domains, device=device).repeat_interleave(count).repeat(len(signs))
    if request.C is not None:
        A = request.C.to(device, executor.dtype).expand(domains, -1, -1).reshape(-1, *output.shape)
        return Dense(torch.cat([sign * A for sign in signs]), None, owner if domains > 1 else None)
    index = torch.arange(count, device=device).repeat(domains * len(signs))
    sign = torch.tensor(signs, dtype=executor.dtype, device=device).repeat_interleave(domains * count)
    return OneHot(index, sign, owner if domains > 1 else None)


def _interval_of(executor: Executor, C: Tensor, found: LayerBounds) -> Box:
    """Intervals (D, rows) of C (D, rows, outputs) times the output; a last linear layer is multiplied by C first."""
    graph = executor.graph
    output = graph[graph.output]
    low, high = found.intervals[output.name]
    domains = len(low)
    A = C.expand(domains, -1, -1).reshape(-1, *output.shape)
    owner = torch.arange(domains, device=A.device).repeat_interleave(len(A) // domains)
    constant = A.new_zeros(len(A))
    if output.op == "linear":
        run = Sweep(executor, Dense(A, None, owner), domains, {})
        steps = (step for step in executor.program(output.name).steps if isinstance(step, Affine))
        run.affine(next(step for step in steps if step.node == output.name), {})
        A, constant = executor.whole_rows(output.inputs[0], run.at(output.inputs[0])), run.sums.constant
        low, high = found.intervals[output.inputs[0]]
    box = BoxRegion(low.reshape(domains, -1), high.reshape(domains, -1))
    A = A.reshape(len(A), -1)
    lower, upper = box.lower_bound(A, owner) + constant, constant - box.lower_bound(-A, owner)
    return lower.reshape(domains, -1), upper.reshape(domains, -1)
