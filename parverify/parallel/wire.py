"""Slots over torch.distributed: one thread that sends to anyone, one that receives from anyone, and an agreed end.

An unmatched send or receive would block for ever, so each side sends every other one a last frame and nothing after
it, and receives until it has the last frame of all others. Frames from one sender arrive in order: nothing is left.
"""

from __future__ import annotations

import contextlib
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

from parverify.errors import LostRankError, ParverifyError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_PREFIX = struct.Struct("<BQ")  # whether it is the sender's last, and the length of the slot
_FRAME = 512
_FIRST = _FRAME - _PREFIX.size  # bytes of a slot that travel in the frame; the rest follows with another tag
_TAG_FRAME, _TAG_REST = 0, 1
_LONGEST = 1 << 40
_FAILURES = (RuntimeError, ValueError)  # torch.distributed raises the latter once the group is gone


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


@dataclass(order=True)
class _Letter:
    """A slot to be sent: when, in which order, to whom; whether it ends the exchange, and is its last one."""

    due: float
    place: int
    peer: int = field(compare=False)
    slot: bytes = field(compare=False)
    final: bool = field(compare=False, default=False)
    last: bool = field(compare=False, default=False)


class Wire:
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
        heard: Callable[[bytes], None],
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

    def start(self) -> None:
        """Begin to send and to receive."""
        for thread in self._threads:
            thread.start()

    def send(self, peer: int, slot: bytes) -> None:
        """Send a slot in a while; returns at once."""
        for due, content in self._spoil(slot):
            self._put(_Letter(due, next(self._places), peer, content))

    def last(self, peer: int, slots: Sequence[bytes]) -> None:
        """Send the last slots to a group, without faults; others that wait are dropped, they are of no use any more."""
        with self._ready:
            self._letters = [letter for letter in self._letters if letter.final]
            heapq.heapify(self._letters)
        for place, slot in enumerate(slots, start=1):
            self._put(_Letter(0.0, next(self._places), peer, slot, final=True, last=place == len(slots)))

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

    def _receive(self) -> tuple[bytes, bool]:
        """One slot from anyone, and whether it is the sender's last."""
        import torch.distributed as dist

        frame = torch.empty(_FRAME, dtype=torch.uint8)
        source = dist.recv(frame, group=self._group, tag=_TAG_FRAME)
        content = frame.numpy().tobytes()
        last, length = _PREFIX.unpack_from(content)
        slot = content[_PREFIX.size : _PREFIX.size + min(length, _FIRST)]
        if length > _LONGEST:
            raise LostRankError(f"rank {source} announces a slot of {length} bytes")
        if length > _FIRST:
            rest = torch.empty(length - _FIRST, dtype=torch.uint8)
            dist.recv(rest, source, group=self._group, tag=_TAG_REST)
            slot += rest.numpy().tobytes()
        return slot, bool(last)


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
