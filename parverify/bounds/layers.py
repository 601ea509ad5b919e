"""Bounds of all pre-activations, layer by layer: IBP, CROWN and streamed alpha-CROWN.

Nodes are visited in topological order. Intervals come first and are cheap; where a method bounds backward, only neurons
whose relaxation could gain get rows (an unstable ReLU, any other nonlinearity on a box that is not a point), in tiles
of fixed size. Lower and upper bounds intersect with the interval unless `intersect` is off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from parverify.bounds.alpha import AlphaOptions, optimize
from parverify.bounds.region import Region
from parverify.clock import Clock
from parverify.graph.ir import BoundGraph, Node
from parverify.ops.kernel import KERNEL, Box
from parverify.ops.places import places
from parverify.ops.relaxation import Relaxations, RelaxedActivation
from parverify.program.executor import Executor
from parverify.program.rows import both_signs


@dataclass(frozen=True)
class BoundOptions:
    """How intermediate layers are bounded.

    Args:
        method: "ibp", "crown-ibp" (intermediate layers as ibp), "crown" or "alpha-crown".
        alpha: used by "alpha-crown".
        tile: rows pushed backward at once; 0 or less for all that a rank has.
        intersect: intersect backward bounds with interval bounds. Without it a neuron that gets rows keeps what they
            say.
    """

    method: str = "crown"
    alpha: AlphaOptions = field(default_factory=AlphaOptions)
    tile: int = 512
    intersect: bool = True

    @property
    def backward(self) -> bool:
        """Whether intermediate layers are bounded by rows at all."""
        return self.method in ("crown", "alpha-crown")


@dataclass(frozen=True)
class LayerBounds:
    """Bounds of every node whose bounds a relaxation needs, and the relaxations.

    Args:
        boxes: node name -> (lower, upper), (D, *shape) each.
        relaxed: nonlinear node name -> relaxation, with the magnitudes of affine nodes.
        intervals: boxes of all nodes, as intervals gave them (refined where rows were pushed).
        rows: node name -> how many rows were pushed from it.
        raw: node name -> (D, n) boxes before they were intersected with intervals, where plain CROWN bounds stand
            alone: the default slopes of ReLU are chosen by them, as in auto_LiRPA. Chosen by tighter boxes, single
            outputs could get looser than without any intersection.
    """

    boxes: dict[str, Box] = field(default_factory=dict)
    relaxed: Relaxations = field(default_factory=Relaxations)
    intervals: dict[str, Box] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    raw: dict[str, Box] = field(default_factory=dict)


def meet(box: Box, other: Box) -> Box:
    """The intersection of two boxes; an empty one (contradiction or rounding) keeps lower <= upper where possible."""
    return torch.maximum(box[0], other[0]), torch.minimum(box[1], other[1])


def interval_is_exact(graph: BoundGraph, name: str, region: Region) -> bool:
    """Whether rows from `name` can't improve the interval: at most one operator on the way mixes scalars, none is
    nonlinear, and the region is a box."""
    nodes = graph.ancestors(name)
    mixing = sum(node.op != "input" and KERNEL[node.op].mixing for node in nodes)
    return region.exact_intervals and mixing <= 1 and not any(node.op in ("act", "mul") for node in nodes)


def is_first_product(graph: BoundGraph, node: Node, region: Region) -> bool:
    """Whether a node is the first that mixes scalars of a region that is no box: there an interval ignores the region's
    shape, which one step of its rows gives exactly (the dual norm of the weight)."""
    if region.exact_intervals or not KERNEL[node.op].mixing:
        return False
    before = graph.ancestors(node.name)[:-1]
    return not any(other.op in ("act", "mul") or KERNEL[other.op].mixing for other in before if other.op != "input")


def _whole_product(
    executor: Executor, node: Node, found: LayerBounds, region: Region, options: BoundOptions, clock: Clock | None
) -> Box:
    """Bounds of all neurons of a node by rows, without alphas."""
    shape = (region.domains, *node.shape)
    place = torch.arange(region.domains * node.numel, device=executor.device)
    owner, index = place // node.numel, place % node.numel
    plain = replace(options, alpha=replace(options.alpha, iterations=0))
    low, high = _bound_neurons(executor, node, (owner, index), found, region, plain, clock)
    return low.reshape(shape), high.reshape(shape)


def bound_layers(
    executor: Executor,
    region: Region,
    options: BoundOptions,
    *,
    known: Mapping[str, Box] | None = None,
    clock: Clock | None = None,
) -> LayerBounds:
    """Bounds of all pre-activations on D domains.

    Args:
        executor: the network.
        region: D input domains.
        options: the method.
        known: boxes that are already proved (D, *shape), intersected with what is found here: bounds of a parent
            domain, or what splits say.
        clock: checked before every tile.
    """
    graph = executor.graph
    low, high = region.box()
    shape = (region.domains, *graph.input.shape)
    found = LayerBounds(intervals={graph.input.name: (low.reshape(shape), high.reshape(shape))})
    wanted = set(graph.bounded)
    for node in graph.nodes:
        if node.op != "input":
            box, magnitude = executor.interval(node, [found.intervals[name] for name in node.inputs])
            if is_first_product(graph, node, region) and executor.gets_rows(node.name):
                box = meet(box, _whole_product(executor, node, found, region, options, clock))
            found.intervals[node.name] = box
            if magnitude is not None:
                found.relaxed.magnitudes[node.name] = magnitude
        if node.op in ("act", "mul"):
            made = executor.relax(node, [found.boxes[name] for name in node.inputs])
            if node.inputs[0] in found.raw and isinstance(made, RelaxedActivation):
                made = made.with_slopes_of(*(executor.own(node.name, side) for side in found.raw[node.inputs[0]]))
            found.relaxed[node.name] = made
        if node.name in wanted:
            box = found.intervals[node.name]
            if known is not None and node.name in known:
                box = meet(box, known[node.name])
            if options.backward and executor.gets_rows(node.name) and not interval_is_exact(graph, node.name, region):
                box = refine(executor, node, box, found, region, options, clock, alone=known is None)
            found.intervals[node.name] = found.boxes[node.name] = box
    return found


def worth_rows(graph: BoundGraph, name: str, box: Box) -> Tensor:
    """(D, *shape) bool: neurons whose tighter bounds could tighten some relaxation."""
    lower, upper = box
    mask = torch.zeros_like(lower, dtype=torch.bool)
    for node in graph.nonlinear:
        if name in node.inputs:
            relu = node.op == "act" and node.attrs["activation"].name == "relu"
            mask |= (lower < 0) & (upper > 0) if relu else lower < upper
    return mask


def refine(
    executor: Executor,
    node: Node,
    box: Box,
    found: LayerBounds,
    region: Region,
    options: BoundOptions,
    clock: Clock | None,
    *,
    alone: bool,
) -> Box:
    """`box` improved by backward rows: CROWN first, then alpha for the neurons that are still worth it."""
    flat = (box[0].reshape(region.domains, -1), box[1].reshape(region.domains, -1))
    for iterations in (0, options.alpha.iterations) if options.method == "alpha-crown" else (0,):
        mask = worth_rows(executor.graph, node.name, flat)
        owner, index = places(mask)
        found.rows[node.name] = found.rows.get(node.name, 0) + 2 * len(index)
        if len(index):
            tighter = _bound_neurons(
                executor,
                node,
                (owner, index),
                found,
                region,
                replace(options, alpha=replace(options.alpha, iterations=iterations)),
                clock,
            )
            raw = _put(flat, (owner, index), tighter)
            if options.method == "crown" and alone:
                found.raw[node.name] = raw
            if options.intersect or iterations:
                tighter = meet(tighter, (flat[0][owner, index], flat[1][owner, index]))
                raw = _put(flat, (owner, index), tighter)
            flat = raw
    return flat[0].reshape(box[0].shape), flat[1].reshape(box[1].shape)


def _put(box: Box, place: tuple[Tensor, Tensor], some: Box) -> Box:
    """A box (D, n) with the bounds of some neurons (K,) replaced."""
    return box[0].index_put(place, some[0]), box[1].index_put(place, some[1])


def _bound_neurons(
    executor: Executor,
    node: Node,
    place: tuple[Tensor, Tensor],
    found: LayerBounds,
    region: Region,
    options: BoundOptions,
    clock: Clock | None,
) -> Box:
    """Bounds (K,) of the neurons `place` = (domain, flat index), in tiles of rows."""
    owner, index = place
    size = max(1, options.tile // 2) if options.tile > 0 else 0

    def bound(part: slice) -> Tensor:
        if clock is not None:
            clock.check("bounding layers")
        rows = both_signs(index[part], owner[part] if region.domains > 1 else None, executor.dtype)
        low, high = optimize(
            executor,
            node.name,
            rows,
            found.relaxed,
            region,
            options=options.alpha,
            clock=clock,
            replicated=not executor.splits_rows,
        ).chunk(2)
        return torch.stack([low, -high], 1)

    work = 2 * executor.work(node.name, options.alpha.iterations)
    boxes = executor.deal(len(index), size, bound, work)
    return boxes[:, 0], boxes[:, 1]
