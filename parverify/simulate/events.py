"""The search of many ranks as events in simulated time: batches, requests, refusals, grants, and the end.

The rules are those of `parverify.bab.stealing` and `parverify.parallel.exchange`: a rank whose last domains are in a
batch asks the others, nearest first; one that had more when it last looked keeps the request until its batch is done,
then gives half of the difference, every second one of the worst; the others refuse at once; after a round of refusals
a rank waits, ever longer. Batches adapt by `BatchSize` itself. Two simplifications make a thousand ranks cheap:
refusals by ranks that have nothing are passed over in one step (they are counted, and take their time), and nothing is
lost on the way. The same scenario gives the same figures, always.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field
from random import Random

import numpy as np

from parverify.bab.batches import BatchSize
from parverify.bab.stealing import Rules
from parverify.parallel.slots import HEADER
from parverify.simulate.model import Forecast, Machine, Scenario
from parverify.simulate.tree import Splitter

_FIRST_GRANT = 64
_SWITCHING = 1.1  # factor on batches that share cores: caches are filled anew; 1.08 to 1.17 was measured
_TOGETHER = 0.5  # factor on how long a batch may take where others wait, as in `Crew.batch`


@dataclass
class _Rank:
    """One rank.

    Args:
        size: of its batches.
        most: domains that it gives at once.

    Attributes:
        pool: open domains, see `parverify.simulate.tree`.
        inbox: grants that have arrived and wait for the end of a batch.
        wanted: requests that wait for an answer: rank, place in its order, number, domains that it has.
        order: the other ranks, nearest first.
        same: how many of them are on this rank's machine; they come first.
        idle_since: None while there is work.
        open: domains here, those of the batch under way included.
        pause: before the next round of requests.
        place: in the order, of the rank that is asked next.
        turn: number of the present request.
        asking: whether there is one, or a next one is due.
    """

    size: BatchSize
    most: int
    pool: list[int] = field(default_factory=list)
    inbox: list[int] = field(default_factory=list)
    wanted: list[tuple[int, ...]] = field(default_factory=list)
    order: np.ndarray | None = None
    same: int = 0
    idle_since: float | None = 0.0
    idle: float = 0.0
    busy: float = 0.0
    open: int = 0
    pause: float = 0.0
    place: int = 0
    turn: int = 0
    asking: bool = False

    @property
    def hungry(self) -> bool:
        """Whether more is asked for: what is open fits one batch."""
        return self.open <= self.size.size // 2


class Simulation:
    """One scenario on one machine.

    Args:
        scenario, machine: what is simulated.
        rules: of the exchange.
    """

    def __init__(self, scenario: Scenario, machine: Machine, rules: Rules | None = None) -> None:
        self._scenario, self._machine, self._rules = scenario, machine, rules or Rules()
        self._splitter, self._random = Splitter(scenario.tree), Random(scenario.tree.seed + 1)
        batches = scenario.batches
        pace = 1.0 if machine.ranks == 1 else _TOGETHER
        self._ranks = [
            _Rank(
                BatchSize(batches.start, batches.most, fixed=batches.fixed, pace=pace),
                min(_FIRST_GRANT, self._rules.most),
                pause=self._rules.pause,
            )
            for _ in range(machine.ranks)
        ]
        self._seen = np.zeros(machine.ranks, dtype=np.int64)  # each rank's open domains when it last looked
        self._events: list[tuple[float, int, int, int, tuple[int, ...]]] = []
        self._numbers = itertools.count()
        self._running = [0] * machine.nodes  # batches on each machine
        self._left = 0  # open domains anywhere, those in batches and on their way included
        self._bounded = self._batches = self._messages = self._moved = self._largest = 0
        self._closed = 0
        self._bytes = 0.0
        self.trace: list[tuple[int, int]] = []  # (closed, open) after each batch

    def run(self) -> Forecast:
        """All events up to the verdict."""
        root = self._scenario.tree.root
        first = self._ranks[0]
        first.pool, self._left = ([root], 1) if root else ([], 0)
        for rank in range(1, len(self._ranks)):
            self._look(rank, 0.0)
        self._look(0, 0.0)
        now = 0.0
        handlers = (self._batch_done, self._ask, self._request, self._granted)
        while self._left:
            now, _, kind, rank, data = heapq.heappop(self._events)
            handlers[kind](rank, now, data)
        return self._forecast(now + self._farewell())

    # --- events -------------------------------------------------------------------------------------------------------

    def _at(self, when: float, kind: int, rank: int, data: tuple[int, ...] = ()) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), kind, rank, data))

    def _look(self, rank: int, now: float) -> None:
        """Between two batches: take in what has come, give what is wanted, then begin the next batch, or ask."""
        mine = self._ranks[rank]
        for domain in mine.inbox:
            heapq.heappush(mine.pool, domain)
        mine.inbox.clear()
        wanted, mine.wanted = mine.wanted, []
        for request in wanted:
            now = self._answer(rank, request, now)
        self._seen[rank] = mine.open = len(mine.pool)
        if mine.hungry and not mine.asking and len(self._ranks) > 1:
            mine.asking = True
            self._next_ask(rank, now, mine.place)
        if mine.pool:
            self._begin(rank, now)
        elif mine.idle_since is None:
            mine.idle_since = now

    def _begin(self, rank: int, now: float) -> None:
        mine, batches = self._ranks[rank], self._scenario.batches
        if mine.idle_since is not None:
            mine.idle += now - mine.idle_since
            mine.idle_since = None
        mine.size.look(len(mine.pool))
        count = min(len(mine.pool), max(1, mine.size.size // 2))
        domains = [heapq.heappop(mine.pool) for _ in range(count)]
        children, still = self._splitter.split(domains, mine.size.size)
        factor = batches.factors[int(self._random.random() * len(batches.factors))]
        self._running[self._machine.node(rank)] += 1
        seconds = (batches.base + batches.each * children) * factor * self._crowded(rank)
        mine.busy += seconds
        self._bounded += children
        self._batches += 1
        mine.size.adapt(children, seconds)
        self._left += len(still)
        self._largest = max(self._largest, self._left - count)
        self._at(now + seconds, 0, rank, (count, children - len(still), *still))

    def _batch_done(self, rank: int, now: float, data: tuple[int, ...]) -> None:
        pool = self._ranks[rank].pool
        self._running[self._machine.node(rank)] -= 1
        self._left -= data[0]
        self._closed += data[1]
        for domain in data[2:]:
            heapq.heappush(pool, domain)
        self.trace.append((self._closed, self._left))
        if self._left:
            self._look(rank, now)

    def _ask(self, rank: int, now: float, data: tuple[int, ...]) -> None:
        """Ask the next rank that had something to give; those before it refuse."""
        place, turn = data
        mine = self._ranks[rank]
        if turn != mine.turn:
            return
        mine.place = place
        if not mine.hungry:
            mine.asking = False
            return
        order = self._order(rank)
        rich = self._seen[order[place:]] >= mine.open + 2
        skip = int(rich.argmax())
        if not rich[skip]:
            self._count(2 * (len(order) - place))
            self._next_ask(rank, now + self._refusals(rank, place, len(order)), len(order))
        elif skip:
            self._count(2 * skip)
            self._next_ask(rank, now + self._refusals(rank, place, place + skip), place + skip)
        else:
            peer = int(order[place])
            self._count(1)
            self._at(now + self._way(rank, peer), 2, peer, (rank, place, turn, mine.open))

    def _next_ask(self, rank: int, now: float, place: int) -> None:
        """Ask the rank at a place of the order now, or the first one after a pause where all have refused."""
        mine = self._ranks[rank]
        if place >= len(self._ranks) - 1:
            now, place = now + mine.pause, 0
            mine.pause = min(2 * mine.pause, self._rules.longest_pause)
        mine.turn += 1
        self._at(now, 1, rank, (place, mine.turn))

    def _request(self, rank: int, now: float, data: tuple[int, ...]) -> None:
        peer, place, turn, theirs = data
        if self._seen[rank] >= theirs + 2:
            self._ranks[rank].wanted.append(data)
            # without an answer in time the other goes on, and may still be given something
            self._at(now + self._rules.answer, 1, peer, ((place + 1) % (len(self._ranks) - 1), turn))
        else:
            self._refuse(rank, data, now)

    def _granted(self, rank: int, now: float, data: tuple[int, ...]) -> None:
        mine = self._ranks[rank]
        mine.inbox += data
        mine.open += len(data)
        mine.turn += 1
        mine.asking, mine.place, mine.pause = False, 0, self._rules.pause
        if mine.idle_since is not None:
            self._look(rank, now)

    # --- answers ------------------------------------------------------------------------------------------------------

    def _answer(self, rank: int, request: tuple[int, ...], now: float) -> float:
        """Give half of what this rank has more, or refuse; when it is done with that."""
        mine, limit, (peer, _, _, theirs) = self._ranks[rank], self._scenario, request
        share = min((len(mine.pool) - theirs) // 2, self._rules.most, mine.most)
        if share < 1:
            self._refuse(rank, request, now)
            return now
        worst = [heapq.heappop(mine.pool) for _ in range(2 * share)]
        for domain in worst[0::2]:
            heapq.heappush(mine.pool, domain)
        mine.most = max(1, int(limit.grant_bytes / max(1.0, limit.domain_bytes)))
        size = share * limit.domain_bytes
        self._moved += share
        self._count(2, size)  # and its acknowledgement
        now += self._machine.handling
        self._at(now + self._way(rank, peer) + size / self._machine.bandwidth, 3, peer, tuple(worst[1::2]))
        return now

    def _refuse(self, rank: int, request: tuple[int, ...], now: float) -> None:
        peer, place, turn, _ = request
        self._count(1)
        if self._ranks[peer].turn == turn:  # it still waits for this answer
            self._next_ask(peer, now + self._way(rank, peer), place + 1)

    def _crowded(self, rank: int) -> float:
        """How many times longer a batch takes, by what else runs on this rank's machine as it begins."""
        machine = self._machine
        share = self._running[machine.node(rank)] / (machine.cores or machine.ranks)
        return 1.0 if share <= 1 else share * _SWITCHING

    # --- the way ------------------------------------------------------------------------------------------------------

    def _order(self, rank: int) -> np.ndarray:
        """The other ranks as `nearest_first` puts them."""
        mine, size = self._ranks[rank], len(self._ranks)
        if mine.order is None:
            peers = np.delete(np.arange(size), rank)
            ahead = (peers - rank) % size
            far = peers * self._machine.nodes // size != self._machine.node(rank)
            mine.order = peers[np.lexsort((ahead, np.minimum(ahead, size - ahead), far))]
            mine.same = int((~far).sum())
        return mine.order

    def _way(self, rank: int, peer: int) -> float:
        """Seconds of a message."""
        near = self._machine.node(rank) == self._machine.node(peer)
        return self._machine.handling + (self._machine.local if near else self._machine.latency)

    def _refusals(self, rank: int, start: int, stop: int) -> float:
        """Seconds until the ranks at these places of the order have refused one after the other."""
        near = max(0, min(stop, self._ranks[rank].same) - start)
        far = stop - start - near
        return 2 * (near * self._machine.local + far * self._machine.latency + (near + far) * self._machine.handling)

    def _count(self, messages: int, size: float = 0.0) -> None:
        self._messages += messages
        self._bytes += messages * HEADER + size

    def _farewell(self) -> float:
        """Seconds from the last domain to the verdict: credit comes home, all are told, all part."""
        peers = len(self._ranks) - 1
        if not peers:
            return 0.0
        self._count(peers * (2 + len(self._ranks)))  # credit, the end, and a last frame from each to each
        way = self._machine.latency if self._machine.nodes > 1 else self._machine.local
        return 3 * way + 2 * peers * self._machine.handling

    def _forecast(self, end: float) -> Forecast:
        for mine in self._ranks:
            if mine.idle_since is not None:
                mine.idle += end - mine.idle_since
        total = max(end * len(self._ranks), 1e-12)
        idle, busy = (sum(getattr(mine, key) for mine in self._ranks) for key in ("idle", "busy"))
        return Forecast(
            ranks=len(self._ranks),
            seconds=self._scenario.before + end,
            search=end,
            idle=idle / total,
            overhead=max(0.0, 1 - (idle + busy) / total),
            bounded=self._bounded,
            batches=self._batches,
            largest=self._largest,
            messages=self._messages,
            message_bytes=self._bytes,
            moved=self._moved,
        )


def simulate(scenario: Scenario, machine: Machine, rules: Rules | None = None) -> Forecast:
    """What a scenario would take on a machine."""
    return Simulation(scenario, machine, rules).run()
