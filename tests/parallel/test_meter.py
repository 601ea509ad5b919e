"""The memory meter against torch's own tracker, and against hand-counted tensors."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker

from parverify.bounds.alpha import AlphaOptions
from parverify.bounds.layers import BoundOptions, bound_layers
from parverify.bounds.region import BoxRegion
from parverify.graph.trace import trace
from parverify.parallel.meter import MemoryMeter
from parverify.program.executor import Executor


def executor() -> Executor:
    torch.manual_seed(0)
    return Executor(
        trace(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3)), (1, 8))
    )


def work(run: Executor) -> None:
    region = BoxRegion(torch.full((1, 8), -1.0), torch.ones(1, 8))
    with torch.no_grad():
        bound_layers(run, region, BoundOptions("alpha-crown", AlphaOptions(iterations=3), tile=16))


def test_counts_what_is_alive_and_nothing_else() -> None:
    run = executor()
    with MemoryMeter(run.resident()) as meter:
        first = torch.zeros(1000)
        view = first[10:20]
        del first
        second = torch.zeros(500)
        del view
        third = torch.zeros(700)
    assert meter.peak_bytes == run.resident_bytes() + 4 * 1500
    assert len(second) + len(third) == 1200


def test_memory_of_other_ranks_is_not_counted() -> None:
    theirs, mine = torch.zeros(1000), torch.zeros(100)
    with MemoryMeter([mine, theirs], [theirs[500:]]) as meter:
        view, copy = theirs[10:20], theirs[10:20].clone()
    assert meter.peak_bytes == mine.nbytes + copy.nbytes
    assert len(view) == 10


def test_equals_torchs_tracker() -> None:
    run = executor()
    work(run)  # whatever is cached on first use is there for both
    with MemoryMeter(run.resident()) as meter:
        work(run)
    tracker = MemTracker()
    tracker.track_external(*run.resident())
    with tracker:
        work(run)
    peak = sum(int(kinds["Total"]) for kinds in tracker.get_tracker_snapshot("peak").values())
    assert abs(meter.peak_bytes - peak) <= 0.02 * peak


def test_the_peak_is_the_same_every_time() -> None:
    run = executor()
    work(run)
    peaks = []
    for _ in range(2):
        with MemoryMeter(run.resident()) as meter:
            work(run)
        peaks.append(meter.peak_bytes)
    assert peaks[0] == peaks[1]
