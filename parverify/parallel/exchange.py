"""Exchange of open domains between groups of ranks over torch.distributed, without a barrier.

The protocol is `parverify.bab.stealing`; here its messages travel as slots on a gloo group of the groups' leaders,
through host memory. A listener thread receives from anyone and answers what needs no domains at once; a courier thread
sends; grants are made by the leader's own thread in `poll`, which alone touches the pool.

Once a group knows that the search is over it tells every other one (its reason, if the reason is its own, and what it
has accepted), and waits until it has heard the same from all.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from parverify.bab.domains import Domains, Pool
from parverify.bab.stealing import Rules, Stealing, nearest_first
from parverify.errors import LostRankError, ParverifyError
from parverify.parallel.slots import Kind, Message, Why, pack, unpack
from parverify.parallel.wire import Faults, Wire

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_LONGEST_WAIT = 0.5
_FIRST_GRANT = 64


class Status(enum.Enum):
    """What `poll` found."""

    RUNNING = "running"
    FINISHED = "finished"
    PAUSED = "paused"
    WITNESS = "witness"
    ERROR = "error"


_STATUS = {Why.PAUSE: Status.PAUSED, Why.WITNESS: Status.WITNESS, Why.ERROR: Status.ERROR}


@dataclass(frozen=True)
class Event:
    """What happened since the last call.

    Args:
        status: whether the search goes on, and how it ended if not.
        received: domains that were put into the pool, one batch for each grant, as they came (see `Border`).
        given: sizes of the grants that were taken out of the pool, in order (see `split_off`), after `received`.
        payload: what the group said that stopped the search.
        group: its number.
    """

    status: Status
    received: tuple[Domains, ...] = ()
    given: tuple[int, ...] = ()
    payload: bytes = b""
    group: int = 0

    @property
    def over(self) -> bool:
        """Whether the search has ended."""
        return self.status is not Status.RUNNING


@dataclass
class Counters:
    """What one group exchanged.

    Args:
        received, sent: domains.
        requests: how often this group asked.
        refused: how often it was refused.
        rejected: slots that did not pass their checks.
        idle: seconds without an open domain.
        bytes_received, bytes_sent: slots in full.
    """

    received: int = 0
    sent: int = 0
    requests: int = 0
    refused: int = 0
    rejected: int = 0
    idle: float = 0.0
    bytes_received: int = 0
    bytes_sent: int = 0


class Border(Protocol):
    """What is done to domains on their way in and out."""

    def enter(self, domains: Domains) -> Domains:
        """Domains that have arrived, or come back; what is put into the pool."""

    def leave(self, domains: Domains) -> None:
        """Domains are about to be sent."""


def split_off(pool: Pool, count: int) -> Domains:
    """Take `count` domains out of a pool that holds at least twice as many: every second one of the worst.

    The same pool and count give the same domains, so that copies of a pool stay alike.

    Raises:
        ParverifyError: the pool holds fewer.
    """
    if len(pool) < 2 * count:
        raise ParverifyError(f"{count} domains can't be half of a pool of {len(pool)}")
    worst = pool.pop(2 * count)
    order = torch.argsort(worst["lower"], stable=True)
    pool.push(worst.take(order[0::2]))
    return worst.take(order[1::2])


class Exchange:
    """One group's part in the exchange; only the group's leader has one.

    Call `poll` between batches, while all open domains of the group are in the pool; `idle_wait` when the pool is
    empty; `close` at the end, on every leader:

        while not exchange.poll(pool, low=batch).over:
            if len(pool):
                ...  # take a batch, bound it, put what is open back; `stop` on a witness
            else:
                exchange.idle_wait(seconds)
        end = exchange.close(pool)

    Args:
        group: a gloo group of the leaders alone, used for nothing else; None for a single group.
        nodes: (groups,) on which machine each leader is; all on one if None.
        rules: figures of the protocol.
        run: a number that all groups share, and no earlier exchange between them had.
        faults: for tests.
        grant_bytes: about how much one grant may be; the first one, before it is known what a domain takes, is small.
        border: sees every domain that comes or leaves; None for nothing to be done.
    """

    def __init__(
        self,
        group: ProcessGroup | None = None,
        *,
        nodes: Sequence[int] | None = None,
        rules: Rules | None = None,
        run: int = 0,
        faults: Faults | None = None,
        grant_bytes: int = 64 << 20,
        border: Border | None = None,
    ) -> None:
        self._border = border
        self.me, self.size = (0, 1) if group is None else _place(group)
        nodes = [0] * self.size if nodes is None else nodes
        if len(nodes) != self.size:
            raise ParverifyError(f"the nodes of {len(nodes)} groups are given, there are {self.size}")
        self.counters = Counters()
        self._machine = Stealing(self.me, nearest_first(self.me, nodes), rules, now=time.monotonic())
        self._run = run
        self._grant_bytes, self._most = grant_bytes, _FIRST_GRANT
        self._news = threading.Condition()  # guards the machine and the counters
        self._failure: str | None = None
        self._closing = False
        self._wire = None
        if group is not None and self.size > 1:
            self._wire = Wire(group, self._heard, self._lost, faults)
            self._wire.start()  # only now: what it hears at once has to be answered

    # --- the search's side --------------------------------------------------------------------------------------------

    def poll(self, pool: Pool, *, low: int | None = None) -> Event:
        """Put what has arrived into the pool, and take out what others are to have.

        Args:
            pool: all open domains of this group; more or fewer afterwards.
            low: ask others with so many open already, best those of one batch: then their answer comes while this
                group works on its last one. As in the rules if None.

        Raises:
            LostRankError: another group is gone.
        """
        with self._news:
            self._check()
            if self._machine.over:
                return self._event()
            self._machine.low = self._machine.rules.low if low is None else low
            arrived = tuple(self._machine.collect())
        self._admit(pool, arrived)
        with self._news:
            self._post(self._machine.update(len(pool), time.monotonic()))
        given = tuple(self._grants(pool))
        with self._news:
            return self._event(arrived, given)

    def idle_wait(self, seconds: float) -> None:
        """Return when something has arrived or the search is over, at the latest after `seconds`; then `poll` again.

        Only for a group whose pool was empty at its last `poll`.
        """
        started = time.monotonic()
        until = started + seconds
        with self._news:
            while not (self._machine.over or self._machine.open or self._failure):
                now = time.monotonic()
                if now >= until:
                    break
                self._post(self._machine.tick(now))
                wait = min(until, self._machine.next_time(), now + _LONGEST_WAIT) - now
                if wait > 0 and not self._machine.over:
                    self._news.wait(wait)
            self.counters.idle += time.monotonic() - started

    def stop(self, why: Why, payload: bytes = b"") -> None:
        """End the search of all groups, unless it is over; `close` says which reason counts.

        Args:
            why: a witness was found here, something went wrong here, or domains are to be left open for later.
            payload: the witness, the error's text, anything.
        """
        with self._news:
            self._post(self._machine.stop(why, payload, time.monotonic()))

    def decided(self) -> bool:
        """Whether another group has found a witness, so that nothing else matters any more; from any thread."""
        with self._news:
            notices = self._machine.notices.values()
            return any(notice.kind is Kind.STOP and Why(notice.count) is Why.WITNESS for notice in notices)

    def close(self, pool: Pool) -> Event:
        """Wait until every group has parted; every leader calls this.

        Args:
            pool: takes the domains that were on their way here, or from here and not accepted: then each open domain
                is in one pool.

        Returns:
            How it ended, the same on every group: the most important reason, of the first group that has it.

        Raises:
            ParverifyError: the search is not over.
            LostRankError: another group is gone.
        """
        with self._news:
            if not self._machine.over and self._failure is None:
                raise ParverifyError("an exchange is closed before its end", "stop it first")
        while self._wire is not None and self._failure is None and not self._wire.join(_LONGEST_WAIT):
            pass
        with self._news:
            self._check()
            left = tuple(self._machine.collect())
            event = self._event(left)
        self._admit(pool, left)
        return event

    # --- inside -------------------------------------------------------------------------------------------------------

    def _admit(self, pool: Pool, arrived: Sequence[Domains]) -> None:
        for domains in arrived:
            pool.push(domains if self._border is None else self._border.enter(domains))

    def _grants(self, pool: Pool) -> list[int]:
        """Give domains to all groups that wait for some; how many each time."""
        given: list[int] = []
        while True:
            with self._news:
                share = self._machine.next_share()
            if share is None:
                return given
            peer, count = share[0], min(share[1], self._most)
            domains = split_off(pool, count)
            self._most = max(1, self._grant_bytes * count // max(1, domains.nbytes()))
            with self._news:
                if self._machine.over:
                    pool.push(domains)
                    return given
                if self._border is not None:
                    self._border.leave(domains)
                self._post(self._machine.grant(peer, count, domains, time.monotonic()))
                self.counters.sent += count
            given.append(count)

    def _check(self) -> None:
        if self._failure is not None:
            raise LostRankError(self._failure)

    def _event(self, received: tuple[Domains, ...] = (), given: tuple[int, ...] = ()) -> Event:
        """What the machine's state means."""
        if not self._machine.over:
            return Event(Status.RUNNING, received, given)
        notices = self._machine.notices.values()
        notice = max(notices, key=lambda m: (m.kind is Kind.STOP, m.count, -m.sender))
        status = _STATUS[Why(notice.count)] if notice.kind is Kind.STOP else Status.FINISHED
        return Event(status, received, given, notice.payload or b"", notice.sender)

    def _post(self, messages: Sequence[Message]) -> None:
        """Send messages, or the last frames once the search is over; needs the lock."""
        if self._wire is None or self._closing:
            return
        if self._machine.over:
            self._closing = True
            for peer in self._machine.peers:
                self._wire.last(peer, [pack(message, self._run) for message in self._machine.last_words(peer)])
            self._news.notify_all()
            return
        for message in messages:
            slot = pack(message, self._run)
            self.counters.requests += message.kind is Kind.REQUEST
            self.counters.bytes_sent += len(slot)
            self._wire.send(message.receiver, slot)

    def _heard(self, slot: bytes) -> None:
        """Take a slot, on the listener's thread."""
        message = unpack(slot, self._run)
        with self._news:
            self.counters.bytes_received += len(slot)
            if message is None:
                self.counters.rejected += 1
                return
            before = self._machine.open
            self._post(self._machine.receive(message, time.monotonic()))
            self.counters.received += max(0, self._machine.open - before)
            self.counters.refused += message.kind is Kind.DENY
            if self._machine.open > before or self._machine.over or self._machine.open == 0:
                self._news.notify_all()

    def _lost(self, reason: str) -> None:
        """Note that communication failed, on either thread."""
        with self._news:
            self._failure = reason
            self._news.notify_all()


def _place(group: ProcessGroup) -> tuple[int, int]:
    import torch.distributed as dist

    return dist.get_rank(group), dist.get_world_size(group)
