"""What a run costs on one rank, without running it: the same program on tensors without data.

The dry run is the run itself on torch's meta device, with communication that only counts: the same algorithm, the same
executor, the same steps. Bytes of every collective, resident and peak memory and the flops of products are therefore
not modelled but added up, and can't drift from what is executed (docs/design.md). Where the course of a run depends on
numbers (how many neurons are unstable), it follows recorded `Counts` or an assumed share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from parverify.bounds.region import BallRegion, BoxRegion, Region
from parverify.graph.ir import BoundGraph, Const
from parverify.ops.places import Counts, counting
from parverify.ops.weighted import Piece
from parverify.parallel.comm import Alone, Comm, DryComm
from parverify.parallel.meter import MemoryMeter
from parverify.program.executor import Executor
from parverify.program.steps import Placement, divided_constants, weighted_nodes


def predict(
    graph: BoundGraph,
    placement: Placement,
    run: Callable[[Executor], object],
    *,
    dtype: torch.dtype,
    counts: Counts,
) -> dict[str, Any]:
    """Peak and resident bytes, bytes of every collective, and flops of one rank.

    Args:
        graph: the network; only shapes of its constants are used.
        placement: what the rank does.
        run: the algorithm, on an executor whose tensors have no data.
        dtype: of the bounds.
        counts: recorded by the run that is predicted, or an assumed share.

    Returns:
        `peak_bytes`, `resident_bytes`, `collectives` (name -> calls, bytes), `flops`.
    """
    comm: Comm = DryComm(placement.rank, placement.size) if placement.size > 1 else Alone()
    executor = _without_data(graph, placement, comm, dtype)
    meter = _DryMeter(executor, comm)
    with counting(counts), meter:
        run(executor)
    return {
        "peak_bytes": meter.peak_bytes,
        "resident_bytes": executor.resident_bytes(),
        "collectives": {name: _moved(figure) for name, figure in comm.meter.figures().items()},
        "flops": meter.flops,
    }


def _moved(figure: dict[str, float]) -> dict[str, float]:
    return {key: figure[key] for key in ("calls", "bytes")}


def on_meta(region: Region) -> Region:
    """The region without its numbers."""
    if isinstance(region, BallRegion):
        return BallRegion(region.center.to("meta"), region.eps.to("meta"), region.p)
    low, high = region.box()
    return BoxRegion(low.to("meta"), high.to("meta"))


def _without_data(graph: BoundGraph, placement: Placement, comm: Comm, dtype: torch.dtype) -> Executor:
    constants = {name: Const(torch.empty_like(const.value, device="meta")) for name, const in graph.constants.items()}
    bare = BoundGraph(graph.nodes, graph.output, constants)
    held: dict[tuple[str, Piece], Tensor] = {}
    if placement.size > 1:
        divided = set(divided_constants(graph))
        for node in weighted_nodes(graph):
            name = node.consts["weight"]
            shape = tuple(graph.constants[name].value.shape)
            for piece in placement.lowerings[node.name].held:
                if name in divided:
                    held[name, piece] = torch.empty(piece.shape(shape), dtype=dtype, device="meta")
    return Executor(bare, dtype=dtype, device="meta", placement=placement, held=held, comm=comm)


class _DryMeter(MemoryMeter):
    """Peak bytes, and the flops of products by torch's own formulas."""

    counts_meta = True

    def __init__(self, executor: Executor, comm: Comm) -> None:
        super().__init__(executor.resident())
        from torch.utils.flop_counter import flop_registry

        self._formulas: dict[Any, Callable[..., int]] = flop_registry
        self._comm = comm
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        formula = self._formulas.get(func.overloadpacket)
        if formula is not None:
            self.flops += self._comm.meter.factor * int(formula(*args, **(kwargs or {}), out_val=out))
        return out
