"""Joint alpha-CROWN, for comparison: the alphas of all layers' rows are optimized together against the output bounds.

This is how auto_LiRPA optimizes by default. Every intermediate neuron keeps its own alphas for the whole run, so memory
grows with neurons times neurons; `parverify.bounds.layers` streams instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parverify.bounds.alpha import Adam, ascend, flatten
from parverify.bounds.layers import BoundOptions, LayerBounds, bound_layers, interval_is_exact, meet, worth_rows
from parverify.bounds.region import Region
from parverify.clock import Clock
from parverify.ops.kernel import Box
from parverify.ops.places import places
from parverify.ops.relaxation import Alpha, Relaxations, Relaxed
from parverify.program.executor import Executor
from parverify.program.rows import OneHot, both_signs


def joint_bounds(
    executor: Executor, region: Region, options: BoundOptions, *, clock: Clock | None = None
) -> tuple[LayerBounds, Box]:
    """Layer and output bounds with all alphas optimized together; one region only.

    Returns:
        The best layer bounds, and lower and upper output bounds (1, *output shape).
    """
    graph = executor.graph
    crown = bound_layers(
        executor, region, BoundOptions("crown", tile=options.tile, intersect=options.intersect), clock=clock
    )
    rows: dict[str, OneHot] = {}
    for name in graph.bounded:
        if not interval_is_exact(graph, name, region):
            (index,) = places(worth_rows(graph, name, crown.boxes[name]).flatten())
            if len(index):
                rows[name] = both_signs(index, None, executor.dtype)
    rows[graph.output] = both_signs(
        torch.arange(graph[graph.output].numel, device=executor.device), None, executor.dtype
    )
    alphas: dict[str, dict[str, Alpha]] = {}
    for start, group in rows.items():
        passed = executor.program(start).relaxed
        made = {name: crown.relaxed[name].start(None, len(group)) for name in passed}
        alphas[start] = {name: alpha for name, alpha in made.items() if alpha}
    leaves = [leaf.requires_grad_() for group in alphas.values() for leaf in flatten(group)]
    adam = Adam(leaves, [options.alpha.lr] * len(leaves), options.alpha.decay)
    best: Box | None = None
    boxes = dict(crown.boxes)
    for _ in range(options.alpha.iterations + 1):
        if clock is not None:
            clock.check("optimizing bounds")
        with torch.enable_grad():
            lower, boxes = _evaluate(executor, region, crown, rows, alphas, boxes)
        low, high = lower.detach().chunk(2)
        best = (low, -high) if best is None else meet(best, (low, -high))
        if leaves:
            ascend(lower, leaves, adam)
    if best is None:
        raise ValueError("at least one evaluation is needed")
    if not executor.splits_rows:
        replicated = {
            f"{what} in rows of {start}": tensor
            for start, group in alphas.items()
            for what, tensor in executor.replicated(group).items()
        }
        executor.agree({f"bounds of {graph.output}": torch.cat(best), **replicated})
    shape = (1, *graph[graph.output].shape)
    relaxed = Relaxations(crown.relaxed.magnitudes)
    relaxed.update({node.name: executor.relax(node, [boxes[name] for name in node.inputs]) for node in graph.nonlinear})
    return LayerBounds(boxes, relaxed, crown.intervals), (best[0].reshape(shape), best[1].reshape(shape))


def _evaluate(
    executor: Executor,
    region: Region,
    crown: LayerBounds,
    rows: dict[str, OneHot],
    alphas: dict[str, dict[str, Alpha]],
    best: dict[str, Box],
) -> tuple[Tensor, dict[str, Box]]:
    """Output rows' bounds under autograd through every layer's bounds, and the best layer boxes so far."""
    graph = executor.graph
    boxes: dict[str, Box] = {}
    relaxed = Relaxations(crown.relaxed.magnitudes)
    wanted = set(graph.bounded)
    kept = dict(best)
    for node in graph.nodes:
        if node.op in ("act", "mul"):
            made = executor.relax(node, [boxes[name] for name in node.inputs])
            relaxed[node.name] = _same_free(made, crown.relaxed[node.name])
        if node.name in wanted:
            low, high = (part.flatten(1) for part in crown.boxes[node.name])
            if node.name in rows:
                group = rows[node.name]
                found = executor.sweep(node.name, group, relaxed, region, alphas=alphas[node.name]).lower
                lows, highs = found.chunk(2)
                index = group.index[: len(lows)]
                low = low.index_put((torch.zeros_like(index), index), lows)
                high = high.index_put((torch.zeros_like(index), index), -highs)
            shape = crown.boxes[node.name][0].shape
            boxes[node.name] = (low.reshape(shape), high.reshape(shape))
            kept[node.name] = meet(best[node.name], (boxes[node.name][0].detach(), boxes[node.name][1].detach()))
    return executor.sweep(graph.output, rows[graph.output], relaxed, region, alphas=alphas[graph.output]).lower, kept


def _same_free(made: Relaxed, like: Relaxed) -> Relaxed:
    """`made` with the packing of `like`, so that alphas keep their places while bounds move."""
    from dataclasses import replace

    return replace(made, free=like.free)  # type: ignore[type-var]
