"""Which disjuncts bounds over their whole boxes rule out, once the layers of the boxes are bounded."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from parverify.bounds.alpha import AlphaOptions, optimize
from parverify.bounds.layers import LayerBounds
from parverify.bounds.region import Region, select
from parverify.engine import Engine
from parverify.program.rows import Rows
from parverify.verdict import Witness


@dataclass(frozen=True)
class Closing:
    """How rows on the output are bounded.

    Args:
        tile: disjuncts whose rows are pushed at once.
        alpha: how the rows' alphas are optimized; None for plain CROWN.
        confirm: try the points where the rows of open disjuncts are smallest.
    """

    tile: int
    alpha: AlphaOptions | None = None
    confirm: bool = True


def close_by_interval(engine: Engine, found: LayerBounds, boxes: Tensor, parts: Tensor) -> Tensor:
    """The disjuncts of `parts` that stay open under intervals of the output.

    Args:
        engine: the query.
        found: bounds of the layers on `boxes`.
        boxes: (B,) numbers of the query's boxes, ascending.
        parts: (P,) disjuncts over these boxes.
    """
    problem = engine.problem
    low, high = (side.flatten(1) for side in found.intervals[engine.executor.graph.output])
    owner = torch.searchsorted(boxes, problem.box_of[parts])
    C, d = problem.C[parts], problem.d[parts]
    lower = (
        torch.einsum("prn,pn->pr", C.clamp(min=0), low[owner])
        + torch.einsum("prn,pn->pr", C.clamp(max=0), high[owner])
        - d
    )
    return parts[~problem.closed(lower, parts)]


def close(
    engine: Engine,
    found: LayerBounds,
    boxes: Tensor,
    parts: Tensor,
    options: Closing,
) -> tuple[Tensor, Witness | None]:
    """As `close_by_interval`, under rows on the output.

    Returns:
        The disjuncts that stay open; and a witness, where candidates are tried: then the rest may not have been looked
        at.
    """
    problem, executor = engine.problem, engine.executor
    region, width = select(problem.boxes, boxes), problem.rows_per_part
    owner = torch.searchsorted(boxes, problem.box_of[parts])
    kept = [parts[:0]]
    for some in torch.arange(len(parts), device=parts.device).split(options.tile):
        part = parts[some]
        rows = problem.rows(part, owner[some])
        lower, A = executor.spread(rows, functools.partial(_swept, engine, found, region))
        if options.alpha is not None:
            lower, _ = executor.spread(rows, functools.partial(_optimized, engine, found, region, options.alpha))
        still = ~problem.closed(lower.reshape(len(part), width), part)
        kept.append(part[still])
        if options.confirm and bool(still.any()):
            points = region.minimizer(A, rows.owner if region.domains > 1 else None)
            every = still.repeat_interleave(width)
            witness = engine.confirm(points[every].cpu(), part.repeat_interleave(width)[every].cpu())
            if witness is not None:
                return torch.cat(kept), witness
    return torch.cat(kept), None


def _swept(engine: Engine, found: LayerBounds, region: Region, rows: Rows) -> tuple[Tensor, Tensor]:
    """Bounds of rows on the output, and the rows on the input."""
    executor = engine.executor
    swept = executor.sweep(executor.graph.output, rows, found.relaxed, region, verdict=True)
    return swept.lower, swept.A


def _optimized(
    engine: Engine, found: LayerBounds, region: Region, options: AlphaOptions, rows: Rows
) -> tuple[Tensor, Tensor]:
    """Bounds of rows on the output with alphas of their own, and nothing."""
    executor = engine.executor
    lower = optimize(
        executor,
        executor.graph.output,
        rows,
        found.relaxed,
        region,
        options=options,
        clock=engine.clock,
        replicated=not executor.splits_rows,
        verdict=True,
    )
    return lower, lower.new_empty(len(lower), 0)
