"""Bounds of the outputs, or of linear functionals of them, once the layers are bounded."""

from __future__ import annotations

import torch
from torch import Tensor

from parverify.bounds.alpha import AlphaOptions, optimize
from parverify.bounds.layers import BoundOptions, LayerBounds
from parverify.bounds.region import Region
from parverify.ops.kernel import Box
from parverify.program.executor import Executor
from parverify.program.rows import Dense, Tiled, both_signs


def output_bounds(
    executor: Executor, region: Region, found: LayerBounds, options: BoundOptions, C: Tensor | None
) -> Box:
    """(D, rows) bounds of C times the output; (D, *output shape) without C."""
    output = executor.graph[executor.graph.output]
    domains = region.domains
    if options.method == "ibp":
        return _interval_rows(found.intervals[output.name], C)
    if C is None:
        index = torch.arange(output.numel, device=executor.device).repeat(domains)
        owner = torch.arange(domains, device=executor.device).repeat_interleave(output.numel)
        rows: Tiled = both_signs(index, owner if domains > 1 else None, executor.dtype)
    else:
        rows = _functionals(C.to(executor.device, executor.dtype), domains, output.shape)
    alpha = options.alpha if options.method == "alpha-crown" else AlphaOptions(iterations=0)

    def bound(part: slice) -> Tensor:
        some = rows.take(part)
        if torch.is_grad_enabled():
            return executor.sweep(output.name, some, found.relaxed, region).lower
        return optimize(
            executor, output.name, some, found.relaxed, region, options=alpha, replicated=not executor.splits_rows
        )

    work = executor.work(output.name, alpha.iterations)
    low, high = executor.deal(len(rows), options.tile, bound, work).chunk(2)
    low, high = low.reshape(domains, -1), -high.reshape(domains, -1)
    if options.intersect:
        box = _interval_rows(found.intervals[output.name], C)
        low, high = torch.maximum(low, box[0].reshape(low.shape)), torch.minimum(high, box[1].reshape(low.shape))
    return (low, high) if C is not None else (low.reshape(domains, *output.shape), high.reshape(domains, *output.shape))


def _functionals(C: Tensor, domains: int, shape: tuple[int, ...]) -> Dense:
    C = C.expand(domains, -1, -1) if C.dim() == 2 else C
    owner = torch.arange(domains, device=C.device).repeat_interleave(C.shape[1])
    A = C.reshape(-1, *shape)
    return Dense(torch.cat([A, -A]), None, torch.cat([owner, owner]) if domains > 1 else None)


def _interval_rows(box: Box, C: Tensor | None) -> Box:
    low, high = box
    if C is None:
        return low, high
    low, high = low.flatten(1), high.flatten(1)
    C = C.to(low.dtype).expand(low.shape[0], -1, -1) if C.dim() == 2 else C.to(low.dtype)
    plus, minus = C.clamp(min=0), C.clamp(max=0)
    return (
        (plus @ low[..., None] + minus @ high[..., None])[..., 0],
        (plus @ high[..., None] + minus @ low[..., None])[..., 0],
    )
