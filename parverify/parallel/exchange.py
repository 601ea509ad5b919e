"""Exchange of open domains between groups of ranks over torch.distributed, without a barrier.

The protocol is `parverify.bab.stealing`; here its messages travel as slots on a gloo group of the groups' leaders,
through host memory. A listener thread receives from anyone and answers what needs no domains at once; a courier thread
sends; grants are made by the leader's own thread in `poll`, which alone touches the pool.

An unmatched send or receive would block for ever, so the end is agreed: once a group knows that the search is over it
sends every other group a last frame (with its reason, if the reason is its own) and nothing after it, and its listener
receives until it has the last frame of all others. Frames from one sender arrive in order, so nothing is left over.
"""

from __future__ import annotations

import contextlib
import enum
import heapq
import itertools
import random
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parverify.bab.domains import Domains, Pool
from parverify.bab.stealing import Rules, Stealing, nearest_first
from parverify.errors import LostRankError, ParverifyError
from parverify.parallel.slots import Kind, Message, pack, unpack

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_PREFIX = struct.Struct("<BQ")  # whether it is the sender's last, and the length of the slot
_FRAME = 512
_FIRST = _FRAME - _PREFIX.size  # bytes of a slot that travel in the frame; the rest follows with another tag
_TAG_FRAME, _TAG_REST = 0, 1
_LONGEST = 1 << 40
_LONGEST_WAIT = 0.5
_FAILURES = (RuntimeError, ValueError)  # torch.distributed raises the latter once the group is gone


class Status(enum.Enum):
    """What `poll` found."""

    RUNNING = "running"
    FINISHED = "finished"
    WITNESS = "witness"
    ERROR = "error"


@dataclass(frozen=True)
class Event:
    """What happened since the last call.

    Args:
        status: whether the search goes on, and how it ended if not.
        received: domains that were put into the pool, one batch for each grant.
        given: sizes of the grants that were taken out of the pool, in order (see `split_off`), after `received`.
        payload: of the witness or the error.
        group: where that was found.
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


@dataclass(frozen=True)
class Faults:
    """Faults put on the messages that this group sends, for tests.

    Args:
        drop, delay, repeat, corrupt: probability of each, drawn independently.
        seconds: longest delay.
        seed: of the draws.
    """

    drop: float = 0.0
    delay: float = 0.0
    repeat: float = 0.0
    corrupt: float = 0.0
    seconds: float = 0.1
    seed: int = 0


def split_off(pool: Pool, count: int) -> Domains:
    """Take `count` domains out of a pool that holds at least twice as many: every second one of the worst.

    The same pool and count give the same domains, so that copies of a pool stay alike.
    """
    worst = pool.pop(2 * count)
    order = torch.argsort(worst["lower"], stable=True)
    pool.push(worst.take(order[0::2]))
    return worst.take(order[1::2])


class Exchange:
    """One group's part in the exchange; only the group's leader has one.

    Call `poll` between batches, while all open domains of the group are in the pool; `idle_wait` when the pool is
    empty; `close` at the end, on every leader.

    Args:
        group: a gloo group of the leaders alone, used for nothing else; None for a single group.
        nodes: (groups,) on which machine each leader is; all on one if None.
        rules: figures of the protocol.
        run: a number that all groups share, and no earlier exchange between them had.
        faults: for tests.
    """

    def __init__(
        self,
        group: ProcessGroup | None = None,
        *,
        nodes: Sequence[int] | None = None,
        rules: Rules | None = None,
        run: int = 0,
        faults: Faults | None = None,
    ) -> None:
        self.me, self.size = (0, 1) if group is None else _place(group)
        nodes = [0] * self.size if nodes is None else nodes
        if len(nodes) != self.size:
            raise ParverifyError(f"the nodes of {len(nodes)} groups are given, there are {self.size}")
        self.counters = Counters()
        self._machine = Stealing(self.me, nearest_first(self.me, nodes), rules, now=time.monotonic())
        self._run = run
        self._news = threading.Condition()  # guards the machine and the counters
        self._failure: str | None = None
        self._closing = False
        self._wire = None
        if group is not None and self.size > 1:
            self._wire = _Wire(group, self._heard, self._lost, faults)

    # --- the search's side --------------------------------------------------------------------------------------------

    def poll(self, pool: Pool) -> Event:
        """Put what has arrived into the pool, and take out what others are to have.

        Args:
            pool: all open domains of this group; more or fewer afterwards, unchanged once the search is over.

        Raises:
            LostRankError: another group is gone.
        """
        with self._news:
            self._check()
            if self._machine.over:
                return self._event()
            arrived = tuple(self._machine.collect())
        for domains in arrived:
            pool.push(domains)
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

    def stop(self, witness: bytes) -> None:
        """End the search of all groups: a witness was found here. `close` says which one counts."""
        with self._news:
            self._post(self._machine.stop(witness, time.monotonic()))

    def fail(self, reason: str) -> None:
        """End the search of all groups: something went wrong here."""
        with self._news:
            self._post(self._machine.stop(reason.encode(), time.monotonic(), error=True))

    def close(self) -> Event:
        """Wait until every group knows the end.

        Returns:
            How it ended, the same on every group: an error if there was one, else the witness of the first group that
            has one, else that everything is closed.

        Raises:
            ParverifyError: the search is not over.
            LostRankError: another group is gone.
        """
        with self._news:
            if not self._machine.over and self._failure is None:
                raise ParverifyError("an exchange can only be closed after its end; hint: stop or fail it")
        while self._wire is not None and self._failure is None and not self._wire.join(_LONGEST_WAIT):
            pass
        with self._news:
            self._check()
            return self._event()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _grants(self, pool: Pool) -> list[int]:
        """Give domains to all groups that wait for some; how many each time."""
        given: list[int] = []
        while True:
            with self._news:
                share = self._machine.next_share()
            if share is None:
                return given
            peer, count = share
            domains = split_off(pool, count)
            with self._news:
                if self._machine.over:
                    pool.push(domains)
                    return given
                self._post(self._machine.grant(peer, count, domains, time.monotonic()))
                self.counters.sent += count
            given.append(count)

    def _check(self) -> None:
        if self._failure is not None:
            raise LostRankError(self._failure)

    def _event(self, received: tuple[Domains, ...] = (), given: tuple[int, ...] = ()) -> Event:
        """What the machine's state means; an error before a witness, the first group before others."""
        if not self._machine.over:
            return Event(Status.RUNNING, received, given)
        notice = min(self._machine.notices.values(), key=lambda m: (m.kind is Kind.DONE, m.count == 0, m.sender))
        if notice.kind is Kind.DONE:
            return Event(Status.FINISHED, received, given)
        status = Status.ERROR if notice.count else Status.WITNESS
        return Event(status, received, given, notice.payload or b"", notice.sender)

    def _post(self, messages: Sequence[Message]) -> None:
        """Send messages, or the last frames once the search is over; needs the lock."""
        if self._wire is None or self._closing:
            return
        if self._machine.over:
            self._closing = True
            own = self._machine.notices.get(self.me)
            for peer in self._machine.peers:
                slot = b"" if own is None else pack(_to(own, peer), self._run)
                self._wire.last(peer, slot)
                self.counters.bytes_sent += len(slot)
            self._news.notify_all()
            return
        for message in messages:
            slot = pack(message, self._run)
            self.counters.requests += message.kind is Kind.REQUEST
            self.counters.bytes_sent += len(slot)
            self._wire.send(message.receiver, slot)

    def _heard(self, slot: bytearray) -> None:
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


def _to(message: Message, peer: int) -> Message:
    return Message(message.kind, message.sender, peer, 0, message.count, payload=message.payload)


@dataclass(order=True)
class _Letter:
    """A slot to be sent: when, in which order, to whom."""

    due: float
    place: int
    peer: int = field(compare=False)
    slot: bytes = field(compare=False)
    last: bool = field(compare=False, default=False)


class _Wire:
    """Slots over a gloo group: one thread that sends, one that receives.

    Args:
        group: of the leaders.
        heard: called with every slot that arrives, on the listener's thread.
        lost: called with a reason when communication fails.
        faults: put on what is sent.
    """

    def __init__(
        self,
        group: ProcessGroup,
        heard: Callable[[bytearray], None],
        lost: Callable[[str], None],
        faults: Faults | None,
    ) -> None:
        import torch.distributed as dist

        self._group, self._hear, self._lose = group, heard, lost
        self._ranks = dist.get_process_group_ranks(group)
        self._me = dist.get_rank(group)
        self._faults = faults
        self._random = random.Random(f"{faults.seed if faults else 0}-{self._me}")
        self._letters: list[_Letter] = []
        self._places = itertools.count()
        self._ready = threading.Condition()
        self._threads = [
            threading.Thread(target=target, name=f"exchange-{name}", daemon=True)
            for name, target in (("courier", self._deliver), ("listener", self._listen))
        ]
        for thread in self._threads:
            thread.start()

    def send(self, peer: int, slot: bytes) -> None:
        """Send a slot in a while; returns at once."""
        for due, content in self._spoil(slot):
            self._put(_Letter(due, next(self._places), peer, content))

    def last(self, peer: int, slot: bytes) -> None:
        """Send the last frame to a group; slots that wait are dropped, there is no use for them any more."""
        with self._ready:
            self._letters = [letter for letter in self._letters if letter.last]
            heapq.heapify(self._letters)
        self._put(_Letter(0.0, next(self._places), peer, slot, last=True))

    def join(self, seconds: float) -> bool:
        """Wait until all last frames are sent and received, at most so long for each; whether they are."""
        for thread in self._threads:
            thread.join(seconds)
        return not any(thread.is_alive() for thread in self._threads)

    def _put(self, letter: _Letter) -> None:
        with self._ready:
            heapq.heappush(self._letters, letter)
            self._ready.notify()

    def _spoil(self, slot: bytes) -> list[tuple[float, bytes]]:
        """What becomes of a slot: when to send what. All due now if there are no faults: `place` keeps their order."""
        if self._faults is None:
            return [(0.0, slot)]
        found = []
        faults, draw = self._faults, self._random.random
        for _ in range(2 if draw() < faults.repeat else 1):
            if draw() < faults.drop:
                continue
            due = time.monotonic() + draw() * faults.seconds if draw() < faults.delay else 0.0
            found.append((due, self._corrupt(slot) if draw() < faults.corrupt else slot))
        return found

    def _corrupt(self, slot: bytes) -> bytes:
        """One bit flipped, or the end torn off."""
        place = self._random.randrange(len(slot))
        if self._random.random() < 0.5:
            return slot[:place]
        return slot[:place] + bytes([slot[place] ^ 1 << self._random.randrange(8)]) + slot[place + 1 :]

    def _next(self) -> _Letter:
        with self._ready:
            while True:
                wait = self._letters[0].due - time.monotonic() if self._letters else None
                if wait is not None and wait <= 0:
                    return heapq.heappop(self._letters)
                self._ready.wait(wait)

    def _deliver(self) -> None:
        """The courier: send until the last frame to everyone is out."""
        left = len(self._ranks) - 1
        with self._watched("sending"):
            while left:
                letter = self._next()
                self._send_letter(letter)
                left -= letter.last

    def _send_letter(self, letter: _Letter) -> None:
        """Send a frame, and the rest of the slot if it is longer; the receiver takes both as soon as they come."""
        import torch.distributed as dist

        to, slot = self._ranks[letter.peer], letter.slot
        frame = torch.zeros(_FRAME, dtype=torch.uint8)
        start = _PREFIX.pack(letter.last, len(slot)) + slot[:_FIRST]
        frame[: len(start)] = _bytes(start)
        pending = [dist.isend(frame, to, group=self._group, tag=_TAG_FRAME)]
        if len(slot) > _FIRST:
            rest = _bytes(slot[_FIRST:])
            pending.append(dist.isend(rest, to, group=self._group, tag=_TAG_REST))
        for work in pending:
            if work is not None:
                work.wait()

    def _listen(self) -> None:
        """The listener: receive until everyone's last frame is here."""
        left = len(self._ranks) - 1
        with self._watched("receiving"):
            while left:
                slot, last = self._receive()
                left -= last
                if len(slot) or not last:
                    self._hear(slot)

    @contextlib.contextmanager
    def _watched(self, what: str) -> Iterator[None]:
        """Report the end of a thread that is not its proper end; the search must not wait for it in vain."""
        reason = f"{what} domains ended early"
        try:
            yield
            reason = ""
        except _FAILURES as error:
            reason = f"{what} domains failed, another rank is gone: {error}"
        except ParverifyError as error:
            reason = f"{what} domains failed: {error}"
        finally:
            if reason:
                self._lose(reason)

    def _receive(self) -> tuple[bytearray, bool]:
        """One slot from anyone, and whether it is the sender's last."""
        import torch.distributed as dist

        frame = torch.empty(_FRAME, dtype=torch.uint8)
        source = dist.recv(frame, group=self._group, tag=_TAG_FRAME)
        content = frame.numpy().tobytes()
        last, length = _PREFIX.unpack_from(content)
        slot = bytearray(content[_PREFIX.size : _PREFIX.size + min(length, _FIRST)])
        if length > _LONGEST:
            raise LostRankError(f"rank {source} announces a slot of {length} bytes")
        if length > _FIRST:
            rest = torch.empty(length - _FIRST, dtype=torch.uint8)
            dist.recv(rest, source, group=self._group, tag=_TAG_REST)
            slot += rest.numpy().tobytes()
        return slot, bool(last)


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
