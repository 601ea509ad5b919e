"""Groups that follow the number of open domains, against one group of all ranks: bytes, seconds, and the same bounds.

    python benchmarks/groups.py MODEL SPEC [--ranks 4] [--domains 1,2,4,64] [--strategy fold] [--iterations 10]

Bounds D domains of one activation split search once by N ranks in one group, which divide rows and weights whatever D
is, and once in as many groups as there are domains (at most N), each with its share of them. Bytes are those that a
rank receives while it bounds, from the meters; the weights that are sent once when groups are formed stand beside them.
Exits with status 1 if bounds differ by more than 1e-4 of the largest.
"""

from __future__ import annotations

import argparse
import pickle
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from runs import head, mega, row
from torch import Tensor

from parverify.bab.activation import ActivationSpace, BetaOptions
from parverify.bab.crew import Crew
from parverify.bab.crews import group_count
from parverify.bab.domains import Domains
from parverify.bab.record import Record
from parverify.bab.shares import of_each
from parverify.bounds.layers import BoundOptions, bound_layers
from parverify.bounds.region import select
from parverify.cli.outcome import Outcome
from parverify.clock import Clock
from parverify.config import make_settings
from parverify.engine import Engine
from parverify.loading import load_subject, share_subject
from parverify.parallel.comm import Comm
from parverify.parallel.groups import Group
from parverify.parallel.launch import launch
from parverify.parallel.shared import from_rank
from parverify.parallel.world import World
from parverify.progress import NullProgress

TOLERANCE = 1e-4


@dataclass(frozen=True)
class Figures:
    """What bounding some domains took.

    Args:
        groups: of ranks.
        formed: bytes that a rank received when the groups were formed.
        moved: bytes that a rank received while bounding.
        seconds: from the common start to the last rank's end.
        lower: (D,) bounds.
    """

    groups: int
    formed: int
    moved: int
    seconds: float
    lower: Tensor


def received(*comms: Comm) -> int:
    """Bytes so far."""
    return sum(int(kind["bytes"]) for comm in comms for kind in comm.meter.figures().values())


def measure(world: World, options: argparse.Namespace) -> list[Figures]:
    """All figures, one group first and then as many as there are domains, for each number of domains."""
    settings = make_settings({"parallel.strategy": options.strategy, "attack.enabled": False})
    clock, progress = Clock(), NullProgress()
    subject, query = share_subject(
        world, settings, lambda: load_subject(options.model, options.spec, clock, progress, settings, None)
    )
    engine = Engine.make(subject, query, settings, clock)
    boxes = torch.zeros(1, dtype=torch.long)
    region = select(engine.problem.boxes, boxes)
    with torch.no_grad():
        layers = bound_layers(engine.executor, region, BoundOptions("crown", tile=256))

    def space(crew: Crew) -> ActivationSpace:
        beta = BetaOptions(options.iterations, candidates=1)
        return ActivationSpace(crew.engine.problem, region, layers, beta, clock=Clock(), confirm=lambda *_: None)

    crews = {1: Crew(world, Group(0, 1, world.comm), engine, Record(clock))}
    root = space(crews[1]).roots(boxes, boxes)
    found: list[Figures] = []
    for domains in options.domains:
        some = root
        while len(some) < domains:
            some, _ = space(crews[1]).split(some, 2 * len(some))
        some = some.slice(0, domains)
        for count in (1, group_count(domains, world.size, world.size)):
            before = received(world.comm)
            if count not in crews:
                crews[count] = crews[1].divided(subject, query, settings, count)
            formed = received(world.comm) - before
            found.append(bound(world, crews[count], space(crews[count]), some, formed))
    return found


def bound(world: World, crew: Crew, space: ActivationSpace, domains: Domains, formed: int) -> Figures:
    """Bound this group's share of the domains, all of them to the last iteration."""
    share = len(domains) // crew.group.count
    mine = domains.slice(crew.group.number * share, (crew.group.number + 1) * share)
    comms = {id(comm): comm for comm in (world.comm, crew.group.comm)}.values()
    world.comm.barrier()
    before, started = received(*comms), time.monotonic()
    steps = space.options.iterations
    found = of_each(space.problem.executor, mine, lambda some: space._optimize(some, steps, final=True))
    moved = received(*comms) - before
    world.comm.barrier()
    seconds = time.monotonic() - started
    leaders = range(0, world.size, crew.group.comm.size)
    lower = torch.cat([from_rank(world.comm, rank, found["rows"]) for rank in leaders])
    return Figures(crew.group.count, formed, moved, seconds, lower)


def all_ranks(options: argparse.Namespace) -> list[list[Figures]]:
    """The figures of every rank."""
    with tempfile.TemporaryDirectory() as folder:

        def job(world: World) -> Outcome:
            torch.set_num_threads(1)
            Path(folder, str(world.rank)).write_bytes(pickle.dumps(measure(world, options)))
            return Outcome("unsat")

        outcome = launch(options.ranks, job, folder=folder)
        if outcome.verdict != "unsat":
            raise SystemExit(f"failed: {outcome.reason}")
        return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(options.ranks)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("spec", type=Path)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--domains", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2, 4, 64])
    parser.add_argument("--strategy", default="fold")
    parser.add_argument("--iterations", type=int, default=10)
    options = parser.parse_args()
    ranks = all_ranks(options)
    print(head("domains", "groups", "ranks in one", "MB to form them", "MB while bounding", "seconds", "deviation"))
    good = True
    for place, domains in enumerate(options.domains):
        one, many = ([figures[2 * place + k] for figures in ranks] for k in (0, 1))
        scale = float(one[0].lower.abs().max())
        for group in (one, many):
            off = float((group[0].lower - one[0].lower).abs().max()) / scale
            good = good and off <= TOLERANCE
            formed, moved = (max(getattr(rank, name) for rank in group) for name in ("formed", "moved"))
            size = options.ranks // group[0].groups
            print(
                row(domains, group[0].groups, size, mega(formed), mega(moved), f"{group[0].seconds:.2f}", f"{off:.1e}")
            )
    print("\n" + ("All bounds are the same." if good else "Bounds differ."))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
