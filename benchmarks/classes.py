"""Memory of one batch of domains per rank, by class of tensor: bounds, A, alpha, beta, weights.

    python benchmarks/classes.py MODEL SPEC [--batches 512,4096] [--ranks 1,2,4] [--iterations 3]

A batch of that many domains is divided over groups of one rank each, as a search divides it. Every rank bounds its
share with the number of optimizer steps given; `A` is what its peak has beyond the other classes: coefficients of rows,
relaxations of the domains' bounds, gradients and the optimizer's state. Exits with status 1 unless what belongs to
domains falls as 1/P (within 2 % and one domain).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from runs import head, mega, row

from parverify.bab.activation import ActivationSpace, BatchRun, BetaOptions
from parverify.bab.domains import Domains, join
from parverify.bounds.layers import BoundOptions, bound_layers
from parverify.bounds.region import select
from parverify.clock import Clock
from parverify.config import make_settings
from parverify.engine import Engine
from parverify.loading import load_subject
from parverify.parallel.meter import MemoryMeter
from parverify.progress import NullProgress

SPLITS = 6  # halvings of the root before it is repeated until there are enough domains
OFF = 0.02


def prepared(options: argparse.Namespace) -> tuple[Engine, ActivationSpace]:
    """An engine, and a space over the first box."""
    settings, clock = make_settings({"attack.enabled": False}), Clock()
    subject, query = load_subject(options.model, options.spec, clock, NullProgress(), settings, None)
    engine = Engine.make(subject, query, settings, clock)
    region = select(engine.problem.boxes, torch.zeros(1, dtype=torch.long))
    with torch.no_grad():
        layers = bound_layers(engine.executor, region, BoundOptions("crown"))
    beta = BetaOptions(options.iterations, candidates=1)
    return engine, ActivationSpace(engine.problem, region, layers, beta, clock=clock, confirm=lambda *_: None)


def some_domains(space: ActivationSpace, count: int) -> Domains:
    """So many domains of a few splits each."""
    zero = torch.zeros(1, dtype=torch.long)
    made, _ = space.split(space.roots(zero, zero), 2**SPLITS)
    return join([made] * -(-count // len(made))).slice(0, count)


def classes(engine: Engine, space: ActivationSpace, domains: Domains) -> dict[str, int]:
    """Bytes by class while a rank bounds its domains, and the peak."""
    run = BatchRun(space, domains)
    sizes = {
        "bounds": sum(side.nbytes for box in run.boxes.values() for side in box),
        "alpha": sum(leaf.nbytes for alpha in run.alphas.values() for leaf in alpha.values()),
        "beta": run.beta.nbytes,
        "weights": engine.executor.resident_bytes(),
    }
    del run
    with MemoryMeter(engine.executor.resident()) as meter:
        space._optimize(domains, space.options.iterations, final=True)
    return {**sizes, "A": meter.peak_bytes - sum(sizes.values()), "peak": meter.peak_bytes}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("spec", type=Path)
    numbers = {"type": lambda text: [int(part) for part in text.split(",")]}
    parser.add_argument("--batches", default=[512, 4096], **numbers)  # type: ignore[arg-type]
    parser.add_argument("--ranks", default=[1, 2, 4], **numbers)  # type: ignore[arg-type]
    parser.add_argument("--iterations", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    engine, space = prepared(options)
    names = ("bounds", "A", "alpha", "beta", "weights", "peak")
    print(head("batch", "P", "domains a rank", *(f"{name} MB" for name in names), "domains' of P=1"))
    good = True
    for batch in options.batches:
        alone = 0.0
        for ranks in options.ranks:
            share = -(-batch // ranks)
            found = classes(engine, space, some_domains(space, share))
            mine = found["peak"] - found["weights"]
            alone = alone or mine * ranks
            ratio = mine / alone
            good = good and ratio <= (1 + OFF) / ranks + 1 / batch
            print(row(batch, ranks, share, *(mega(found[name]) for name in names), f"{ratio:.3f}"), flush=True)
    print("\n" + ("What belongs to domains falls as 1/P." if good else "missed: memory does not fall as 1/P"))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
