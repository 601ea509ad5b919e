"""Idle share of ranks on a skewed tree: exchange without a barrier, against gathering sizes and then all-to-all.

    python benchmarks/exchange.py [--ranks 4] [--nodes 3000] [--batch 4] [--runs 3] [--limit 0.10]

Rank 0 starts with everything, the tree is lopsided, and domains cost 1 to 10 ms. A cost is a sleep, so the figures do
not depend on the number of cores. Idle is all time outside of batches, from a common start to the last rank's end. The
baseline is the usual way: after every batch all ranks gather the sizes of their pools, work out who sends how many to
whom, and exchange them in one all-to-all. Both bound the same domains; each is counted. Exits with status 1 if the
median idle share of the exchange is above the limit.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from parverify.bab.domains import Domains, Pool
from parverify.cli.outcome import Outcome
from parverify.parallel.exchange import Exchange
from parverify.parallel.launch import launch
from parverify.parallel.world import World

ROW = 4  # numbers of a domain


@dataclass(frozen=True)
class Figures:
    """What one rank came to.

    Args:
        done: domains.
        busy, total: seconds within batches, and from the common start to this rank's end.
        moved: domains received.
        calls: requests (exchange) or rounds (baseline).
    """

    done: int
    busy: float
    total: float
    moved: int
    calls: int


def domains(keys: Sequence[int], weights: Sequence[int]) -> Domains:
    """Domains that each stand for a subtree of `weight` nodes whose keys begin with `key`."""
    key = torch.tensor(keys, dtype=torch.int64)
    weight = torch.tensor(weights, dtype=torch.int64)
    return Domains({"part": torch.zeros_like(key), "lower": -(key % 97).double(), "key": key, "weight": weight})


def cost(key: int) -> float:
    """Seconds of a domain: 1 to 10 ms."""
    return 0.001 + 0.009 * (key * 2654435761 % 1000003) / 1000003


def work(batch: Domains) -> Domains:
    """Bound a batch, which takes as long as its domains cost; their children, a tenth to the left."""
    keys, weights = [], []
    time.sleep(sum(map(cost, batch["key"].tolist())))
    for key, weight in zip(batch["key"].tolist(), batch["weight"].tolist(), strict=True):
        left = (weight - 1) // 10
        keys += [key + 1, key + 1 + left]
        weights += [left, weight - 1 - left]
    children = domains(keys, weights)
    return children.take(children["weight"] > 0)


def by_exchange(world: World, pool: Pool, size: int) -> Figures:
    """Batches at each rank's own pace."""
    import torch.distributed as dist

    group = dist.new_group(backend="gloo")
    world.comm.barrier()
    started = time.perf_counter()
    exchange = Exchange(group)
    done, busy = 0, 0.0
    while not exchange.poll(pool, low=size).over:
        if not len(pool):
            exchange.idle_wait(0.5)
            continue
        began = time.perf_counter()
        batch = pool.pop(size)
        done += len(batch)
        pool.push(work(batch))
        busy += time.perf_counter() - began
    exchange.close(pool)
    total = time.perf_counter() - started
    return Figures(done, busy, total, exchange.counters.received, exchange.counters.requests)


def by_rounds(world: World, pool: Pool, size: int) -> Figures:
    """A batch each, then sizes from all, then an all-to-all that levels the pools."""
    world.comm.barrier()
    started = time.perf_counter()
    done = moved = rounds = 0
    busy = 0.0
    while True:
        began = time.perf_counter()
        if len(pool):
            batch = pool.pop(size)
            done += len(batch)
            pool.push(work(batch))
        busy += time.perf_counter() - began
        sizes = torch.empty(world.size, dtype=torch.int64)
        world.comm.all_gather(sizes, torch.tensor([len(pool)])).wait()
        rounds += 1
        if not int(sizes.sum()):
            return Figures(done, busy, time.perf_counter() - started, moved, rounds)
        moved += level(world, pool, transfers(sizes.tolist()))


def transfers(sizes: Sequence[int]) -> list[list[int]]:
    """How many domains go from whom to whom, so that pools differ by one at most."""
    count = len(sizes)
    aim = [sum(sizes) // count + (rank < sum(sizes) % count) for rank in range(count)]
    over = [max(0, have - want) for have, want in zip(sizes, aim, strict=True)]
    short = [max(0, want - have) for have, want in zip(sizes, aim, strict=True)]
    moves = [[0] * count for _ in range(count)]
    for source in range(count):
        for to in range(count):
            moves[source][to] = min(over[source], short[to])
            over[source] -= moves[source][to]
            short[to] -= moves[source][to]
    return moves


def level(world: World, pool: Pool, moves: Sequence[Sequence[int]]) -> int:
    """One all-to-all; how many came here."""
    import torch.distributed as dist

    sent = list(moves[world.rank])
    come = [row[world.rank] for row in moves]
    out = torch.empty(0, ROW, dtype=torch.float64)
    if sum(sent):
        given = pool.pop(sum(sent))
        out = torch.stack([given[name].double() for name in ("part", "lower", "key", "weight")], dim=1)
    got = torch.empty(sum(come), ROW, dtype=torch.float64)
    dist.all_to_all_single(got, out, come, sent)
    if sum(come):
        pool.push(domains(got[:, 2].long().tolist(), got[:, 3].long().tolist()))
    return sum(come)


WAYS: dict[str, Callable[[World, Pool, int], Figures]] = {"gather, all-to-all": by_rounds, "exchange": by_exchange}


def measure(way: str, ranks: int, nodes: int, batch: int) -> list[Figures]:
    """One run; every rank's figures.

    Raises:
        SystemExit: it failed, or a domain was lost or done twice.
    """
    with tempfile.TemporaryDirectory() as folder:

        def job(world: World) -> Outcome:
            pool = Pool(memory=1 << 30)
            if world.rank == 0:
                pool.push(domains([0], [nodes]))
            Path(folder, str(world.rank)).write_text(json.dumps(vars(WAYS[way](world, pool, batch))))
            return Outcome("unsat")

        with tempfile.TemporaryDirectory() as private:
            outcome = launch(ranks, job, folder=private)
        if outcome.verdict != "unsat":
            raise SystemExit(f"{way}: {outcome.reason}")
        found = [Figures(**json.loads(Path(folder, str(rank)).read_text())) for rank in range(ranks)]
    if sum(figures.done for figures in found) != nodes:
        raise SystemExit(f"{way}: {sum(figures.done for figures in found)} domains done, not {nodes}")
    return found


def idle_share(found: Sequence[Figures]) -> float:
    """Share of all ranks' time that is spent outside of batches."""
    total = max(figures.total for figures in found)
    return 1 - sum(figures.busy for figures in found) / (total * len(found))


def main() -> int:
    """Measure both ways in turn and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--nodes", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--limit", type=float, default=0.10)
    options = parser.parse_args()
    shares: dict[str, list[float]] = {way: [] for way in WAYS}
    print("| way | run | seconds | idle share | by rank | domains moved | requests or rounds |")
    print("|---|---|---|---|---|---|---|")
    for run in range(options.runs):
        for way in WAYS:
            found = measure(way, options.ranks, options.nodes, options.batch)
            total = max(figures.total for figures in found)
            shares[way].append(idle_share(found))
            each = " ".join(f"{1 - figures.busy / total:.1%}" for figures in found)
            moved, calls = sum(figures.moved for figures in found), sum(figures.calls for figures in found)
            print(
                f"| {way} | {run + 1} | {total:.2f} | {shares[way][-1]:.1%} | {each} | {moved} | {calls} |", flush=True
            )
    middle = {way: median(found) for way, found in shares.items()}
    print("\nMedian idle share: " + ", ".join(f"{way} {share:.1%}" for way, share in middle.items()))
    return int(middle["exchange"] > options.limit)


if __name__ == "__main__":
    sys.exit(main())
