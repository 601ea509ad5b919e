"""The commands `bounds` and `plan`: one task, run on tensors or foreseen on tensors without data.

Both do the same with the same options; so what is predicted is what is run.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from parverify.bounds.alpha import AlphaOptions
from parverify.bounds.joint import joint_bounds
from parverify.bounds.layers import BoundOptions, LayerBounds, bound_layers
from parverify.bounds.outputs import output_bounds
from parverify.bounds.region import Region, outward_box
from parverify.budget import Budget, make_budget
from parverify.clock import Clock
from parverify.config import Settings
from parverify.engine import Subject
from parverify.errors import SpecError, UsageError
from parverify.frontend.query import Query
from parverify.graph.ir import BoundGraph
from parverify.loading import load_subject, share_subject
from parverify.ops.kernel import Box
from parverify.ops.places import Counts, counting
from parverify.ops.rounding import allowance
from parverify.parallel.shared import from_first, from_rank
from parverify.parallel.world import World
from parverify.program.executor import Executor
from parverify.program.steps import Placement
from parverify.progress import NullProgress

SIDES = ("lower", "upper")


@dataclass(frozen=True)
class Bounding:
    """Bounds of a network's layers and outputs over a property's input box.

    Args:
        graph: the network; of its weights only shapes are used.
        region: the box.
        settings: all of them.
        budget: of memory, the same on all ranks.
    """

    graph: BoundGraph
    region: Region
    settings: Settings
    budget: Budget

    @staticmethod
    def of(subject: Subject, query: Query, settings: Settings) -> Bounding:
        """The task of a property; all ranks call this.

        Raises:
            SpecError: no input satisfies the property's input constraints.
        """
        if all(part.empty_box for part in query):
            raise SpecError("no input satisfies the property's input constraints, so there is no box to bound over")
        dtype = getattr(torch, settings.dtype)
        lower, upper = (torch.from_numpy(side) for side in query.hull())
        region = outward_box(lower, upper, dtype, settings.device)
        budget = from_first(
            subject.network.comm,
            lambda: make_budget(subject.graph, memory=settings.memory, itemsize=torch.finfo(dtype).bits // 8),
        )
        return Bounding(subject.graph, region, settings, budget)

    @property
    def dtype(self) -> torch.dtype:
        """Of the bounds."""
        return self.region.box()[0].dtype

    def run(self, executor: Executor, clock: Clock) -> tuple[LayerBounds, Box]:
        """Layer and output bounds.

        Raises:
            UsageError: alphas are to be optimized together, but ranks have different rows.
        """
        settings, placement, region = self.settings, executor.placement, self.region
        joint = settings.alpha.joint and settings.method == "alpha-crown"
        if joint and placement.splits_rows:
            raise UsageError("alpha.joint needs all rows on every rank", "use --strategy fsdp, tp or single")
        options = BoundOptions(
            settings.method,
            AlphaOptions(settings.alpha.iterations, settings.alpha.lr),
            tile=self.budget.tile(settings.bounds.tile or placement.tile),
            intersect=settings.bounds.intersect,
        )
        if executor.device.type == "meta":
            from parverify.program.cost import on_meta

            region = on_meta(region)
        with torch.no_grad():
            if joint:
                return joint_bounds(executor, region, options, clock=clock)
            found = bound_layers(executor, region, options, clock=clock)
            return found, output_bounds(executor, region, found, options, None)

    def predict(self, placement: Placement, counts: Counts) -> dict[str, Any]:
        """What one rank's run costs; see `parverify.program.cost.predict`."""
        from parverify.program.cost import predict

        return predict(self.graph, placement, lambda dry: self.run(dry, Clock()), dtype=self.dtype, counts=counts)


def bounds_report(
    model: str | Path, spec: str | Path, *, settings: Settings, clock: Clock, world: World | None = None
) -> dict[str, Any]:
    """Bounds of the outputs over the property's input box, with what they cost: the JSON of `parverify bounds`."""
    from parverify.parallel.meter import MemoryMeter

    world = world or World()
    subject, query = share_subject(
        world, settings, lambda: load_subject(model, spec, clock, NullProgress(), settings, None)
    )
    task = Bounding.of(subject, query, settings)
    executor = subject.network.executor(dtype=task.dtype, device=settings.device)
    world.comm.meter.clear()
    started = time.monotonic()
    with allowance(settings.bounds.allowance), counting(Counts()) as counts, MemoryMeter(executor.resident()) as meter:
        found, (low, high) = task.run(executor, clock)
    seconds = time.monotonic() - started
    collectives = world.comm.meter.figures()
    boxes = {**found.boxes, "the output": (low, high)}
    executor.agree({f"{side} bounds of {name}": box[i] for name, box in boxes.items() for i, side in enumerate(SIDES)})
    figures = {
        "peak_bytes": meter.peak_bytes,
        "resident_bytes": executor.resident_bytes(),
        "collectives": collectives,
        "predicted": task.predict(executor.placement, counts),
    }
    return {
        "method": settings.method,
        "strategy": executor.placement.strategy,
        "world_size": world.size,
        "dtype": settings.dtype,
        "lower": low.flatten().tolist(),
        "upper": high.flatten().tolist(),
        "layers": [_layer(subject.graph, name, box) for name, box in found.boxes.items()],
        "digest": digest(boxes.values()),
        "seconds": seconds,
        "ranks": [from_rank(world.comm, rank, figures) for rank in range(world.size)],
    }


def _layer(graph: BoundGraph, name: str, box: Box) -> dict[str, Any]:
    low, high = box
    unstable = int(((low < 0) & (high > 0)).sum())
    return {
        "name": name,
        "op": graph[name].source or graph[name].op,
        "neurons": low.numel(),
        "unstable": unstable,
        "lower": low.flatten().tolist(),
        "upper": high.flatten().tolist(),
    }


def digest(boxes: Iterable[Box]) -> str:
    """sha256 over the bytes of all bounds, in order."""
    state = hashlib.sha256()
    for low, high in boxes:
        for part in (low, high):
            state.update(part.detach().cpu().contiguous().numpy().tobytes())
    return state.hexdigest()
