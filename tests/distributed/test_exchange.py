"""Exchange between gloo ranks: a skewed tree is worked off once, whatever happens to messages, and all end together."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch

from parverify.bab.domains import Domains, Pool
from parverify.bab.stealing import Rules
from parverify.cli.outcome import Outcome
from parverify.errors import ParverifyError
from parverify.parallel.exchange import Exchange, Status, split_off
from parverify.parallel.slots import Why
from parverify.parallel.wire import Faults
from parverify.parallel.world import World
from tests.distributed.ranks import on_ranks, outcome_of

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


def search(
    world: World, nodes: int, options: dict[str, Any], stop_at: int | None = None, *, run: int = 7, group: Any = None
) -> tuple[Any, ...]:
    """Work the tree off from rank 0; keys done here, the end, counters, and when it ended."""
    import torch.distributed as dist

    group = dist.new_group(backend="gloo") if group is None else group
    exchange = Exchange(group, rules=QUICK, run=run, **options)
    pool = Pool(memory=1 << 30)
    if world.rank == 0:
        pool.push(tree([nodes], [0]))
    done: list[int] = []
    stopped = 0.0
    while not exchange.poll(pool, low=2 * (run % 2)).over:
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


def twice(world: World) -> list[tuple[Any, ...]]:
    """Two searches one after the other over one group; the grants of the second are small."""
    import torch.distributed as dist

    group = dist.new_group(backend="gloo")
    faults = {"faults": Faults(delay=0.5, repeat=0.5, seconds=0.02)}
    first = search(world, 200, faults, 100, run=1, group=group)
    return [first, search(world, 200, {**faults, "grant_bytes": 100}, run=2, group=group)]


def test_a_group_can_be_used_again() -> None:
    results = on_ranks(3, twice)
    assert all(first[1].status is Status.WITNESS for first, _ in results)
    assert sorted(key for _, second in results for key in second[0]) == list(range(200))


def test_a_witness_ends_all_of_them() -> None:
    """Within a second, although every message but the last words may be lost; all take the same one."""
    results = on_ranks(4, search, 3000, {"faults": Faults(drop=0.2)}, 1500)
    assert all(end.status is Status.WITNESS and end.payload == b"here" for _, end, *_ in results)
    (found,) = [stopped for *_, stopped, _ in results if stopped]
    (group,) = {end.group for _, end, *_ in results}
    assert 1500 in results[group][0]
    assert max(ended for *_, ended in results) - found < 1.0
    assert sum(len(done) for done, *_ in results) < 3000


def pause(world: World, why: list[Why]) -> tuple[Any, ...]:
    """Stop on each rank that has a reason after a while; what is done and left here, and the end."""
    import torch.distributed as dist

    exchange = Exchange(dist.new_group(backend="gloo"), rules=QUICK, faults=Faults(delay=0.5, repeat=0.3, seconds=0.05))
    pool = Pool(memory=1 << 30)
    pool.push(tree([1000], [0]) if world.rank == 0 else tree([], []))
    done: list[int] = []
    started = time.monotonic()
    while not exchange.poll(pool).over:
        if time.monotonic() - started > 0.3 and world.rank < len(why):
            exchange.stop(why[world.rank], str(world.rank).encode())
        if not len(pool):
            exchange.idle_wait(0.05)
            continue
        batch = pool.pop(1)
        done.extend(batch["key"].tolist())
        time.sleep(0.002)
        pool.push(children(batch))
    end = exchange.close(pool)
    world.comm.barrier()
    left = pool.pop(len(pool)) if len(pool) else tree([], [])
    return done, left["key"].tolist(), left["weight"].tolist(), end


@pytest.mark.parametrize(
    ("why", "status"),
    [
        ([Why.PAUSE], Status.PAUSED),
        ([Why.PAUSE, Why.WITNESS, Why.WITNESS], Status.WITNESS),
        ([Why.WITNESS, Why.PAUSE, Why.ERROR], Status.ERROR),
    ],
)
def test_a_stop_leaves_every_open_domain_in_one_pool(why: list[Why], status: Status) -> None:
    results = on_ranks(4, pause, why)
    keys = [key for done, *_ in results for key in done]
    for _, starts, weights, _ in results:
        keys += [key for start, weight in zip(starts, weights, strict=True) for key in range(start, start + weight)]
    assert sorted(keys) == list(range(1000))
    ends = [end for *_, end in results]
    assert all(end.payload == ends[0].payload and end.status is ends[0].status for end in ends)
    # A reason that comes after another group's end does not count, so only one that stands alone is sure.
    assert ends[0].status is status or len(why) > 1


def test_a_group_alone_needs_no_others() -> None:
    pool = Pool(memory=1 << 30)
    pool.push(tree([20], [0]))
    alone = Exchange()
    count = 0
    while not alone.poll(pool).over:
        batch = pool.pop(3)
        count += len(batch)
        pool.push(children(batch))
    assert count == 20 and alone.close(pool).status is Status.FINISHED


def test_an_exchange_is_not_closed_before_its_end() -> None:
    with pytest.raises(ParverifyError, match="closed before its end"):
        Exchange().close(Pool(memory=1))


def dies(world: World) -> Outcome:
    """Rank 1 dies in the middle of it."""
    import torch.distributed as dist

    exchange = Exchange(dist.new_group(backend="gloo"), rules=QUICK)
    pool = Pool(memory=1 << 30)
    pool.push(tree([2000], [0]) if world.rank == 0 else tree([], []))
    while not exchange.poll(pool).over:
        if world.rank == 1 and len(pool):
            os.kill(os.getpid(), signal.SIGKILL)
        if not len(pool):
            exchange.idle_wait(0.2)
            continue
        batch = pool.pop(1)
        time.sleep(0.002)
        pool.push(children(batch))
    exchange.close(pool)
    return Outcome("unsat")


def test_a_dead_rank_gives_no_verdict() -> None:
    started = time.monotonic()
    outcome = outcome_of(3, dies)
    assert outcome.verdict == "error" and "rank 1 was killed" in outcome.reason
    assert time.monotonic() - started < 15


def test_splitting_a_pool_leaves_two_alike() -> None:
    pool = Pool(memory=1 << 30)
    pool.push(tree([1] * 20, list(range(20))))
    given = split_off(pool, 5)
    assert given["lower"].tolist() == [-18.0, -16.0, -14.0, -12.0, -10.0]
    assert len(pool) == 15 and pool.worst == -19.0
    with pytest.raises(ParverifyError, match="half of a pool of 15"):
        split_off(pool, 8)
