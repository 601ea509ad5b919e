"""Spread of batch times (of the processor): batches of so many domains against batches of so much predicted cost.

    python benchmarks/packing.py VNNCOMP [--instances 3] [--size 128] [--timeout 60]

VNNCOMP is a folder with the competition's benchmarks; the instances are those of acasxu whose search takes at least 20
batches, because there domains differ in how many neurons are unstable. A batch by cost holds what is predicted to take
as long as a mean batch by count; nothing else adapts.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from runs import head, row

import parverify
from parverify.bab import crew, driver
from parverify.bab.batches import BatchSize
from parverify.bab.domains import Domains, Pool

FEWEST = 20  # batches


class ByCount(BatchSize):
    """Keeps its size, and knows no costs."""

    def pop(self, pool: Pool) -> Domains:
        return pool.pop_batch(max(1, self.size // 2))

    def adapt(self, children: int, seconds: float) -> None:
        pass


class ByCost(ByCount):
    """Holds what is predicted to take as long as a mean batch of so many did."""

    AIM = 0.0

    def pop(self, pool: Pool) -> Domains:
        self.size = self._most
        return BatchSize.pop(self, pool)


def batch_seconds(kind: type[BatchSize], size: int, model: Path, spec: Path, timeout: float) -> list[float]:
    """Processor seconds of each batch of a run with batches of this kind, but for the first ones and the last."""
    found: list[float] = []
    bound = driver._bound

    def timed(*given: Any) -> bool:
        began = time.process_time()
        done = bound(*given)
        found.append(time.process_time() - began)
        return done

    class Sized(kind):  # type: ignore[misc, valid-type]
        def __init__(self, first: int, most: int, **options: Any) -> None:
            super().__init__(size, most, ranks=options.get("ranks", 1))

        def learn(self, children: Domains, seconds: float) -> None:
            super().learn(children, found[-1] if found else seconds)

    sizes = crew.BatchSize
    try:
        crew.BatchSize, driver._bound = Sized, timed  # type: ignore[misc, assignment]
        parverify.verify(model, spec, timeout=timeout, attack__share=0.0)
    finally:
        crew.BatchSize, driver._bound = sizes, bound  # type: ignore[misc]
    return found[4:-2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("vnncomp", type=Path)
    parser.add_argument("--instances", type=int, default=3)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--timeout", type=float, default=60.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    left = options.instances
    print(head("instance", "packed by", "batches", "mean s", "deviation / mean", "longest / mean"))
    for model, spec in instances(options.vnncomp / "acasxu"):
        by_count = batch_seconds(ByCount, options.size, model, spec, options.timeout)
        if len(by_count) < FEWEST:
            continue
        ByCost.AIM = statistics.fmean(by_count)
        by_cost = batch_seconds(ByCost, options.size, model, spec, options.timeout)
        for name, seconds in {"count": by_count, "cost": by_cost}.items():
            mean = statistics.fmean(seconds)
            spread = f"{statistics.stdev(seconds) / mean:.2f}"
            where = f"{model.stem} {spec.stem}"
            print(row(where, name, len(seconds), f"{mean:.3f}", spread, f"{max(seconds) / mean:.2f}"), flush=True)
        left -= 1
        if not left:
            return


def instances(folder: Path) -> Iterator[tuple[Path, Path]]:
    """A benchmark's instances, from the last of its list, where the harder ones are."""
    with open(folder / "instances.csv", newline="") as handle:
        for onnx, vnnlib, *_ in reversed(list(csv.reader(handle))):
            files = [
                path for name in (onnx, vnnlib) for path in (folder / name, folder / f"{name}.gz") if path.exists()
            ]
            if len(files) == 2:
                yield files[0], files[1]


if __name__ == "__main__":
    main()
