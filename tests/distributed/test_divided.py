"""Bounds divided over ranks: equal to one process's, bit for bit or to a tolerance; cost as predicted, byte by byte."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parverify.bounding import Bounding, digest
from parverify.bounds.region import BoxRegion, Region
from parverify.budget import make_budget
from parverify.clock import Clock
from parverify.config import make_settings
from parverify.graph.ir import BoundGraph
from parverify.graph.trace import trace
from parverify.ops.places import Counts, counting
from parverify.parallel.comm import _Works
from parverify.parallel.meter import MemoryMeter
from parverify.parallel.world import World
from parverify.program.cost import predict
from parverify.program.division import Division, divide
from parverify.program.executor import Executor
from parverify.strategy.compile import compile_placement
from parverify.strategy.directives import load_strategy
from tests.bounds.zoo import NETWORKS, made, random_box
from tests.distributed.ranks import on_ranks

METHODS = ("ibp", "crown-ibp", "crown", "alpha-crown")
TILE = 64  # rows; several tiles of most layers


def wide_module(name: str) -> nn.Module:
    """Networks whose weights have several parts."""
    relu = nn.ReLU
    return {
        "mlp": lambda: nn.Sequential(nn.Linear(30, 300), relu(), nn.Linear(300, 260), relu(), nn.Linear(260, 3)),
        "conv": lambda: nn.Sequential(
            nn.Conv2d(3, 64, 3, 2, 1), relu(), nn.Conv2d(64, 200, 3, padding=1), relu(),
            nn.Conv2d(200, 24, 2), relu(), nn.Flatten(), nn.Linear(24, 5),
        ),
        "groups": lambda: nn.Sequential(
            nn.Conv2d(2, 130, 3), relu(), nn.Conv2d(130, 260, 3, groups=130), relu(),
            nn.Conv2d(260, 260, 3, groups=2, padding=1), relu(), nn.Flatten(), nn.Linear(260, 3),
        ),
        "transposed": lambda: nn.Sequential(
            nn.Conv2d(1, 130, 2, 2), relu(), nn.ConvTranspose2d(130, 140, 3, 2, 1, output_padding=1), relu(),
            nn.ConvTranspose2d(140, 6, 2, groups=2), relu(), nn.Flatten(), nn.Linear(150, 2),
        ),
        "residual": lambda: nn.Sequential(
            nn.Linear(12, 256), relu(), _Residual(256), nn.Linear(256, 4),
        ),
    }[name]()  # fmt: skip


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.second(torch.relu(self.first(x))))


WIDE = {"mlp": (1, 30), "conv": (1, 3, 4, 4), "groups": (1, 2, 5, 5), "transposed": (1, 1, 4, 4), "residual": (1, 12)}


def wide(name: str, dtype: torch.dtype) -> tuple[BoundGraph, Region]:
    torch.manual_seed(3)
    graph = trace(wide_module(name).to(dtype), WIDE[name], dtype=dtype)
    center = torch.rand(1, graph.input.numel, dtype=dtype)
    return graph, BoxRegion(center - 0.02, center + 0.02)


def bounded(executor: Executor, region: Region, method: str, tile: int) -> list[tuple[Tensor, Tensor]]:
    settings = make_settings({"method": method, "alpha.iterations": 2, "bounds.tile": tile})
    budget = make_budget(executor.graph, memory=None, itemsize=executor.dtype.itemsize)
    found, output = Bounding(executor.graph, region, settings, budget).run(executor, Clock())
    return [*found.boxes.values(), output]


def divided(world: World, graph: BoundGraph, strategy: str, *, near: bool = False) -> Division:
    chosen = load_strategy(strategy)
    mine = graph if world.rank == 0 else None
    return divide(mine, lambda g, rank, size: compile_placement(g, chosen, rank, size), world.comm, near=near)


@contextlib.contextmanager
def let_go() -> Iterator[None]:
    """After the wait for a collective, gloo's thread may hold its tensors a moment longer: wait for that too.

    Otherwise a measured peak depends on when that thread happened to run.
    """
    inner = _Works.wait

    def wait(self: _Works) -> None:
        held = [tensor for tensor in self._held if hasattr(tensor, "_use_count")]
        inner(self)
        until = time.monotonic() + 2.0
        while any(tensor._use_count() > 1 for tensor in held) and time.monotonic() < until:
            time.sleep(0.0002)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Works, "wait", wait)
        yield


def measured(
    world: World,
    graph: BoundGraph,
    region: Region,
    strategy: str,
    tile: int,
    methods: Sequence[str] = METHODS,
    near: bool = False,
) -> list[dict[str, Any]]:
    """Digest, predicted and measured figures of every method on one rank."""
    dtype = region.box()[0].dtype
    network = divided(world, graph, strategy, near=near)
    out = []
    for method in methods:
        executor = network.executor(dtype=dtype)
        world.comm.meter.clear()
        with let_go(), counting(Counts()) as counts, MemoryMeter(executor.resident()) as meter:
            boxes = bounded(executor, region, method, tile)
        moved = {name: (f["calls"], f["bytes"]) for name, f in world.comm.meter.figures().items()}
        expected = predict(
            network.graph,
            network.placement,
            lambda dry, method=method: bounded(dry, region, method, tile),
            dtype=dtype,
            counts=counts,
        )
        out.append(
            {
                "method": method,
                "digest": digest(boxes),
                "boxes": boxes,
                "peak": (expected["peak_bytes"], meter.peak_bytes),
                "moved": ({n: (f["calls"], f["bytes"]) for n, f in expected["collectives"].items()}, moved),
                "resident": executor.resident_bytes(),
            }
        )
    return out


@functools.cache
def in_one_process(name: str, dtype: torch.dtype, methods: Sequence[str] = METHODS) -> list[dict[str, Any]]:
    return measured(World(), *wide(name, dtype), "single", TILE, methods)


@pytest.mark.parametrize("strategy", ["fsdp", "fold"])
@pytest.mark.parametrize(("name", "size"), [("mlp", 4), ("conv", 4), ("groups", 4), ("transposed", 2), ("residual", 2)])
def test_bounds_are_bitwise_those_of_one_process(name: str, size: int, strategy: str) -> None:
    graph, region = wide(name, torch.float32)
    alone = in_one_process(name, torch.float32)
    ranks = on_ranks(size, measured, graph, region, strategy, TILE)
    for rank in ranks:
        for mine, theirs in zip(rank, alone, strict=True):
            assert mine["digest"] == theirs["digest"], mine["method"]
            predicted, seen = mine["moved"]
            assert predicted == seen
            assert mine["peak"][0] == pytest.approx(mine["peak"][1], rel=0.1)
    assert alone[0]["moved"] == ({}, {})
    for mine in alone:
        assert mine["peak"][0] == pytest.approx(mine["peak"][1], rel=0.1)


@pytest.mark.parametrize("strategy", ["ring", "tp"])
@pytest.mark.parametrize(
    ("name", "dtype", "tolerance", "size"),
    [
        *((name, torch.float32, 1e-5, 4) for name in ("mlp", "conv")),
        *((name, torch.float64, 1e-12, 2) for name in ("groups", "residual", "transposed")),
    ],
)
def test_sums_in_another_order_change_only_the_rounding(
    name: str, dtype: torch.dtype, tolerance: float, size: int, strategy: str
) -> None:
    graph, region = wide(name, dtype)
    alone = in_one_process(name, dtype, METHODS[2:])
    ranks = on_ranks(size, measured, graph, region, strategy, TILE, METHODS[2:])
    for rank in ranks:
        for mine, theirs in zip(rank, alone, strict=True):
            for (low, high), (expected_low, expected_high) in zip(mine["boxes"], theirs["boxes"], strict=True):
                scale = max(float(expected_low.abs().max()), float(expected_high.abs().max()))
                assert float((low - expected_low).abs().max()) <= tolerance * scale
                assert float((high - expected_high).abs().max()) <= tolerance * scale
            predicted, seen = mine["moved"]
            assert predicted == seen
        for mine in rank:
            assert mine["peak"][0] == pytest.approx(mine["peak"][1], rel=0.1), mine["method"]


def _zoo(world: World, strategy: str, names: Sequence[str]) -> dict[str, list[str]]:
    out = {}
    for name in names:
        graph = made(name)
        network = divided(world, graph, strategy)
        executor = network.executor(dtype=torch.float64)
        region = random_box(graph, 2, 0.2, 1, torch.float64)
        out[name] = [digest(bounded(executor, region, method, 6)) for method in METHODS[2:]]
    return out


def test_every_network_of_the_zoo_has_the_same_bounds() -> None:
    for turn, strategy in enumerate(("fsdp", "fold")):
        names = list(NETWORKS)[turn::2]
        alone = _zoo(World(), "single", names)
        for rank in on_ranks(3, _zoo, strategy, names):
            assert rank == alone


@pytest.mark.parametrize("strategy", ["fsdp", "fold", "ring", "tp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_rank_without_any_weight_takes_part(dtype: torch.dtype, strategy: str) -> None:
    torch.manual_seed(0)
    graph = trace(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)).to(dtype), (1, 2), dtype=dtype)
    region = BoxRegion(torch.zeros(1, 2, dtype=dtype), torch.ones(1, 2, dtype=dtype))
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    (*alone,) = measured(World(), graph, region, "single", 2)
    for rank in on_ranks(4, measured, graph, region, strategy, 2):
        for mine, theirs in zip(rank, alone, strict=True):
            for box, expected in zip(mine["boxes"], theirs["boxes"], strict=True):
                torch.testing.assert_close(torch.stack(box), torch.stack(expected), rtol=tolerance, atol=tolerance)
