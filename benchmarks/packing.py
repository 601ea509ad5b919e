"""Spread of batch times (of the processor): batches of so many domains against batches of so much predicted cost.

    python benchmarks/packing.py VNNCOMP [--instances 3] [--size 64] [--timeout 60]

VNNCOMP is a folder with the competition's benchmarks; the instances are the first of acasxu whose search takes at least
30 batches, because there domains differ in how many neurons are unstable. Sizes don't adapt here, so that only the
choice of the domains differs. Prints, for each way, batches, the mean of their seconds, and their standard deviation
over the mean.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from runs import head, published, row

import parverify
from parverify.bab import crew, driver
from parverify.bab.batches import BatchSize
from parverify.bab.domains import Domains, Pool

FEWEST = 30  # batches


class ByCost(BatchSize):
    """Keeps its size."""

    def adapt(self, children: int, seconds: float) -> None:
        pass


class ByCount(ByCost):
    """Knows no costs."""

    def pop(self, pool: Pool) -> Domains:
        return pool.pop_batch(max(1, self.size // 2))


def batch_seconds(kind: type[BatchSize], model: Path, spec: Path, options: argparse.Namespace) -> list[float]:
    """Processor seconds of each batch of a run whose batches are of this kind, but for the small ones at its ends."""
    found: list[tuple[int, float]] = []
    bound = driver._bound

    def timed(space: Any, pool: Any, state: Any, *others: Any) -> bool:
        began, before = time.process_time(), state.bounded
        done = bound(space, pool, state, *others)
        found.append((state.bounded - before, time.process_time() - began))
        return done

    sizes = crew.BatchSize
    try:
        crew.BatchSize, driver._bound = kind, timed  # type: ignore[misc, assignment]
        parverify.verify(model, spec, timeout=options.timeout, attack__share=0.0)
    finally:
        crew.BatchSize, driver._bound = sizes, bound  # type: ignore[misc]
    full = [seconds for count, seconds in found if 4 * count >= options.size]
    return full[2:]  # the first ones allocate memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("vnncomp", type=Path)
    parser.add_argument("--instances", type=int, default=3)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--timeout", type=float, default=60.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    left = options.instances
    print(head("instance", "packed by", "batches", "mean s", "deviation / mean"))
    for instance in published(options.vnncomp, ["acasxu"]):
        ways = {"count": ByCount, "cost": ByCost}
        found = {}
        for name, kind in ways.items():
            kind_ = type(kind.__name__, (kind,), {"__init__": _sized(options.size)})
            found[name] = batch_seconds(kind_, instance.model, instance.spec, options)
            if len(found[name]) < FEWEST:
                break
        else:
            for name, seconds in found.items():
                mean = statistics.fmean(seconds)
                spread = statistics.stdev(seconds) / mean
                print(row(instance.name, name, len(seconds), f"{mean:.3f}", f"{spread:.2f}"), flush=True)
            left -= 1
        if not left:
            return


def _sized(size: int):  # type: ignore[no-untyped-def]
    def make(self, first, most, *, fixed=False, ranks=1, pace=1.0):  # type: ignore[no-untyped-def]
        BatchSize.__init__(self, size, most, ranks=ranks, pace=pace)

    return make


if __name__ == "__main__":
    main()
