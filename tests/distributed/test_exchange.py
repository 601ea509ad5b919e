"""Exchange between gloo ranks: a skewed tree is worked off once, whatever happens to messages, and all end together."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from parverify.bab.domains import Domains, Pool
from parverify.bab.stealing import Rules
from parverify.parallel.exchange import Exchange, Status
from parverify.parallel.slots import Why
from parverify.parallel.wire import Faults
from parverify.parallel.world import World
from tests.distributed.ranks import on_ranks

QUICK = Rules(answer=0.1, resend=0.05)


def tree(weights: list[int], keys: list[int]) -> Domains:
    """Domains that each stand for a subtree of so many nodes."""
    key = torch.tensor(keys, dtype=torch.int64)
    return Domains(
        {
            "part": torch.zeros(len(keys), dtype=torch.int64),
            "lower": -(key % 97).double(),
            "weight": torch.tensor(weights, dtype=torch.int64),
            "key": key,
        }
    )


def seconds_of(key: int) -> float:
    """The cost of a domain, 0.5 to 5 ms: they differ by 10 times."""
    return 0.0005 * (1 + key * 2654435761 % 1000 / 111)


def children(domains: Domains) -> Domains:
    """A fifth of the rest of each subtree to the left, the others to the right; keys are unique within a tree."""
    weights, keys = [], []
    for weight, key in zip(domains["weight"].tolist(), domains["key"].tolist(), strict=True):
        left = (weight - 1) // 5
        for size, start in ((left, key + 1), (weight - 1 - left, key + 1 + left)):
            if size:
                weights.append(size)
                keys.append(start)
    return tree(weights, keys)


def search(world: World, nodes: int, options: dict[str, Any], stop_at: int | None = None) -> tuple[Any, ...]:
    """Work the tree off from rank 0; keys done here, the end, counters, and when it ended."""
    import torch.distributed as dist

    group = dist.new_group(list(range(world.size)), backend="gloo")
    exchange = Exchange(group, rules=QUICK, run=7, **options)
    pool = Pool(memory=1 << 30)
    if world.rank == 0:
        pool.push(tree([nodes], [0]))
    done: list[int] = []
    stopped = 0.0
    while not exchange.poll(pool).over:
        if not len(pool):
            exchange.idle_wait(0.2)
            continue
        batch = pool.pop(2)
        done.extend(batch["key"].tolist())
        if stop_at in done:
            exchange.stop(Why.WITNESS, b"here")
            stopped = time.monotonic()
        time.sleep(sum(map(seconds_of, batch["key"].tolist())))
        pool.push(children(batch))
    end = exchange.close(pool)
    ended = time.monotonic()
    world.comm.barrier()
    return done, end, exchange.counters, stopped, ended


FAULTS = {
    "none": None,
    "delayed": Faults(delay=0.5, seconds=0.2),
    "all": Faults(drop=0.1, delay=0.2, repeat=0.2, corrupt=0.1),
}


@pytest.mark.parametrize("name", FAULTS)
def test_every_domain_is_done_once(name: str) -> None:
    results = on_ranks(4, search, 600, {"faults": FAULTS[name]})
    assert sorted(key for done, *_ in results for key in done) == list(range(600))
    assert all(end.status is Status.FINISHED for _, end, *_ in results)
    assert all(done for done, *_ in results)
    counters = [counter for _, _, counter, *_ in results]
    assert sum(counter.sent for counter in counters) >= 3
    assert sum(counter.received for counter in counters) == sum(counter.sent for counter in counters)
    assert (sum(counter.rejected for counter in counters) > 0) == (name == "all")
