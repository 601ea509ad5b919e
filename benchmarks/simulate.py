"""Simulated against measured time of a search on 1, 2 and 4 ranks.

    python benchmarks/simulate.py [--ranks 1,2,4] [--nodes 4000] [--runs 3] [--limit 0.15]
    python benchmarks/simulate.py --instance MODEL SPEC [--ranks 1,2]

The search is real (`parverify.bab.driver.search`, the exchange, processes), over a lopsided tree whose domains cost 1
to 10 ms each. A cost is a sleep, so that more ranks than cores can be measured. The run on one rank is recorded as
`parverify run --json` records it; from that record alone all numbers of ranks are simulated. The tree is not the
simulator's: its shares are fixed, its order is not by weight, and its costs belong to the domains. With `--instance`
the runs are those of `parverify run` on a network, and ranks share this machine's cores. Exits with status 1 if a
simulated time is further from the median of the measured ones than the limit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from exchange import cost, domains
from runs import environment

from parverify.bab.batches import BatchSize
from parverify.bab.domains import Domains, Pool
from parverify.bab.driver import Bounded, Search, search
from parverify.bab.record import Record
from parverify.cli.outcome import Outcome
from parverify.clock import Clock
from parverify.flow.meeting import PACE, Supply
from parverify.parallel.exchange import Exchange
from parverify.parallel.launch import launch
from parverify.parallel.world import World
from parverify.progress import NullProgress
from parverify.results import jsonable
from parverify.simulate.measured import fit, forecast, read_measured
from parverify.simulate.model import Machine

FEW = 64


class Asleep:
    """A space whose bounding is sleep; see `parverify.bab.driver.Space`."""

    def split(self, parents: Domains, children: int) -> tuple[Domains, Domains]:
        """Children over as many levels as fill the batch, those that are closed on the way included."""
        depth = 1
        while len(parents) << (depth + 1) <= min(children, FEW):
            depth += 1
        pairs = list(zip(parents["key"].tolist(), parents["weight"].tolist(), strict=True))
        for _ in range(depth):
            pairs = [child for pair in pairs for child in self._halves(*pair)]
        return domains(*zip(*pairs, strict=True)), parents.slice(0, 0)

    @staticmethod
    def _halves(key: int, weight: int) -> list[tuple[int, int]]:
        """A fifth to one side, at every third domain a half."""
        rest = max(0, weight - 2)
        left = 2 * (rest // 2 // (5 if key % 3 else 2))
        return [(key + 1, left), (key + 2 + left, rest - left)]

    def bound(self, children: Domains) -> Bounded:
        """Sleep, and keep those with descendants."""
        time.sleep(sum(map(cost, children["key"].tolist())))
        still = children["weight"] > 0
        return Bounded(children.take(still), len(children) - int(still.sum()))

    def leaf(self, stuck: Domains) -> tuple[int, Any, list[str]]:
        """There is none."""
        return len(stuck), None, []

    def adopt(self, received: Domains) -> Domains:
        """They are the same everywhere."""
        return received

    def pad(self, parts: Sequence[Domains]) -> Sequence[Domains]:
        """All columns have fixed widths."""
        return parts


@dataclass(frozen=True)
class Run:
    """A measured run: its seconds of search, and the report."""

    search: float
    report: dict[str, Any]


def on_rank(world: World, nodes: int) -> dict[str, Any]:
    """One rank's part in a search; its report and seconds."""
    import torch.distributed as dist

    pool, state = Pool(memory=1 << 30), Search()
    several = world.size > 1
    group = dist.new_group(backend="gloo") if several else None
    world.comm.barrier()
    record, started = Record(Clock()), time.perf_counter()
    exchange = Exchange(group if isinstance(group, dist.ProcessGroup) else None)
    roots = domains([0], [nodes]) if world.rank == 0 else domains([], [])
    size = BatchSize(16, 4096, pace=PACE if several else 1.0)
    search(
        Asleep(), roots, batch=size, memory=0, clock=Clock(), progress=NullProgress(), pool=pool, state=state,
        supply=Supply(exchange, size) if several else None, record=record,
    )  # fmt: skip
    if several:
        exchange.close(pool)
        record.exchanged(exchange.counters)
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "report": record.report(world.rank).encode()}


def measure(ranks: int, nodes: int) -> Run:
    """One run of the synthetic search.

    Raises:
        SystemExit: it failed.
    """
    with tempfile.TemporaryDirectory() as folder:

        def job(world: World) -> Outcome:
            Path(folder, str(world.rank)).write_text(json.dumps(jsonable(on_rank(world, nodes))))
            return Outcome("unsat")

        with tempfile.TemporaryDirectory() as private:
            outcome = launch(ranks, job, folder=private)
        if outcome.verdict != "unsat":
            raise SystemExit(outcome.reason)
        found = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(ranks)]
    seconds = max(one["seconds"] for one in found)
    stats = {"ranks": [one["report"] for one in found], "branching": "activation"}
    return Run(seconds, {"verdict": "unsat", "seconds": seconds, "stats": stats, "settings": {}})


def measure_instance(ranks: int, model: str, spec: str) -> Run:
    """One run of `parverify run`.

    Raises:
        SystemExit: it did not end `unsat`.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "report.json")
        command = [sys.executable, "-m", "parverify", "run", "-q", "--nproc", str(ranks), "--json", str(path)]
        subprocess.run([*command, model, spec], check=False, stdout=subprocess.DEVNULL, env=environment())
        report = json.loads(path.read_text())
    if report["verdict"] != "unsat":
        raise SystemExit(f"{ranks} ranks: {report['verdict']}: {report['reason']}")
    return Run(report["seconds"] - read_measured(report, str(path)).before, report)


def main() -> int:
    """Measure, simulate, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--nodes", type=int, default=4000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--limit", type=float, default=0.15)
    parser.add_argument("--instance", nargs=2, metavar=("MODEL", "SPEC"))
    options = parser.parse_args()
    sizes = [int(text) for text in options.ranks.split(",")]

    def one(ranks: int) -> Run:
        return measure_instance(ranks, *options.instance) if options.instance else measure(ranks, options.nodes)

    runs = {size: sorted((one(size) for _ in range(options.runs)), key=lambda run: run.search) for size in sizes}
    middle = runs[sizes[0]][len(runs[sizes[0]]) // 2]
    scenarios = fit(read_measured(middle.report, "the first run"))
    cores = len(os.sched_getaffinity(0)) if options.instance else None
    print("| ranks | measured s (each run) | median s | bounded | simulated s | bounded | idle | difference |")
    print("|---|---|---|---|---|---|---|---|")
    worst = 0.0
    for size in sizes:
        found = forecast(scenarios, Machine(size, cores=cores))
        measured = median(run.search for run in runs[size])
        off = found.search / measured - 1
        worst = max(worst, abs(off))
        each = " ".join(f"{run.search:.2f}" for run in runs[size])
        bounded = sum(rank["bounded"] for rank in runs[size][len(runs[size]) // 2].report["stats"]["ranks"])
        print(
            f"| {size} | {each} | {measured:.2f} | {bounded} | {found.search:.2f} | {found.bounded} | "
            f"{found.idle:.1%} | {off:+.1%} |"
        )
    return int(worst > options.limit)


if __name__ == "__main__":
    sys.exit(main())
