"""The same search with the exchange's own state machines, message by message: what the simulator abbreviates."""

from __future__ import annotations

import heapq
import itertools
from typing import Any

from parverify.bab.batches import BatchSize
from parverify.bab.stealing import Stealing, nearest_first
from parverify.parallel.slots import Message
from parverify.simulate.model import Machine, Scenario
from parverify.simulate.tree import Splitter


class Protocol:
    """A search by `Stealing`, in simulated time; its factors are 1."""

    def __init__(self, scenario: Scenario, machine: Machine) -> None:
        size, batches = machine.ranks, scenario.batches
        self.scenario, self.machine, self.splitter = scenario, machine, Splitter(scenario.tree)
        nodes = [machine.node(rank) for rank in range(size)]
        self.sides = [Stealing(rank, nearest_first(rank, nodes)) for rank in range(size)]
        self.sizes = [BatchSize(batches.start, batches.most, fixed=batches.fixed, pace=0.5) for _ in range(size)]
        self.pools: list[list[int]] = [[] for _ in range(size)]
        self.most = [64] * size
        self.working = [False] * size
        self.busy, self.bounded, self.messages = 0.0, 0, 0
        self.events: list[tuple[float, int, str, int, Any]] = []
        self.numbers = itertools.count()

    def run(self) -> float:
        """Seconds until every rank knows the end."""
        self.pools[0] = [self.scenario.tree.root]
        for rank in reversed(range(len(self.sides))):
            self.look(rank, 0.0)
        now = 0.0
        while not all(side.over for side in self.sides):
            now, _, kind, rank, data = heapq.heappop(self.events)
            if kind == "batch":
                self.working[rank] = False
                for domain in data:
                    heapq.heappush(self.pools[rank], domain)
                self.look(rank, now)
            else:
                side = self.sides[rank]
                self.send(side.tick(now) if kind == "tick" else side.receive(data, now), now)
                if not self.working[rank] and not side.over:
                    self.look(rank, now) if side.open else self.wait(rank)
        return now

    def at(self, when: float, kind: str, rank: int, data: Any = None) -> None:
        heapq.heappush(self.events, (when, next(self.numbers), kind, rank, data))

    def send(self, messages: list[Message], now: float) -> None:
        for message in messages:
            self.messages += 1
            near = self.machine.node(message.sender) == self.machine.node(message.receiver)
            way = self.machine.handling + (self.machine.local if near else self.machine.latency)
            self.at(now + way, "message", message.receiver, message)

    def wait(self, rank: int) -> None:
        when = self.sides[rank].next_time()
        if when < float("inf"):
            self.at(when, "tick", rank)

    def look(self, rank: int, now: float) -> None:
        """What `Exchange.poll` does, then a batch."""
        side, pool, size = self.sides[rank], self.pools[rank], self.sizes[rank]
        if side.over:
            return
        side.low = size.size // 2
        for domains in side.collect():
            for domain in domains:
                heapq.heappush(pool, domain)
        self.send(side.update(len(pool), now), now)
        while (share := side.next_share()) is not None:
            peer, count = share[0], min(share[1], self.most[rank])
            worst = [heapq.heappop(pool) for _ in range(2 * count)]
            for domain in worst[0::2]:
                heapq.heappush(pool, domain)
            self.most[rank] = 4096
            self.send(side.grant(peer, count, worst[1::2], now), now)
        self.send(side.tick(now), now)
        if not pool:
            self.wait(rank)
            return
        size.look(len(pool))
        domains = [heapq.heappop(pool) for _ in range(min(len(pool), max(1, size.size // 2)))]
        children, still = self.splitter.split(domains, size.size)
        seconds = self.scenario.batches.base + self.scenario.batches.each * children
        self.busy, self.bounded, self.working[rank] = self.busy + seconds, self.bounded + children, True
        size.adapt(children, seconds)
        self.at(now + seconds, "batch", rank, still)
