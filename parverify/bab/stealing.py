"""How groups of ranks share open domains and agree that none is left: a state machine without input or output.

A group that runs low asks the others, nearest first, and gets half of the difference or a refusal. Nothing waits for
all groups. Messages may be lost, repeated, delayed and overtaken; what must arrive (domains, credit, the end) is kept
and sent again until it is acknowledged, and a repeat is dropped by its number. The end is found by credit recovery
(Mattern, "Global quiescence detection based on credit distribution and recovery", 1989; also Huang 1989).

Note: why the end is right
--------------------------
Group 0 knows `outstanding`, the credit that is not at home. Credit is whole numbers:

1. `outstanding` = credit held by groups 1.. + credit in parcels (grants, credit) that no receiver has accepted yet.
   Group 0 adds to it what it puts into a parcel, and subtracts what it accepts. A parcel between other groups moves
   credit without changing the sum. A parcel is accepted once: it has a number of its own per (sender, receiver), the
   receiver drops numbers it has accepted, and the sender forgets it only after an acknowledgement, which is only sent
   by a receiver that has accepted it. Loss, repetition, delay and order therefore do not matter to the sum.
2. A group other than 0 with open domains, those it works on included, holds credit >= 1: it began with some, or its
   domains came with some; granting gives away half, rounded down, and never the last; it returns credit only at a
   moment when it has no domain.
3. A grant that is not accepted yet carries credit >= 1.

So `outstanding` = 0 says by 1 that all three sums are 0, by 2 that no other group has a domain, and by 3 that none is
on its way, neither now nor later: only a group with domains can send some. If group 0 has none either, all are closed.
Conversely, once every domain is closed, each group has returned its credit or does so at its next step, parcels are
sent again until they arrive, and requests only move words that carry no credit; so `outstanding` reaches 0 as soon as
a message that is sent again and again arrives once. A group that has only 1 left can't grant; it asks group 0 for
`MORE`, keeps its 1 meanwhile, and refuses requests until then.

The same holds for `STOP` (a witness, an error, a pause) and `DONE`, which are parcels too. A stopped search can leave
domains on their way. Its groups therefore part with `END`, which says which parcels the sender has accepted; it accepts
none afterwards, so the others take back the domains of exactly those that it has not.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from parverify.bab.parcels import Parcel, Seen
from parverify.errors import ParverifyError
from parverify.parallel.slots import Kind, Message, Why

_NEVER = float("inf")
_LOW_CREDIT = 24  # more is asked for below mint / 2 ** this: early enough never to wait for it


class State(enum.Enum):
    """Where a group stands."""

    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"


@dataclass(frozen=True)
class Rules:
    """Figures of the protocol; times are in seconds.

    Args:
        low: ask once no more than so many domains are open; 0 asks when there is nothing left. See `Stealing.low`.
        most: the most domains of one grant.
        answer: a request without an answer is given up after this.
        resend: a parcel without an acknowledgement is sent again after this, doubling up to `longest_resend`.
        pause: wait after every other group refused, doubling up to `longest_pause`.
        mint: credit that group 0 gives at a time.
    """

    low: int = 0
    most: int = 4096
    answer: float = 1.0
    resend: float = 1.0
    longest_resend: float = 8.0
    pause: float = 0.002
    longest_pause: float = 0.05
    mint: int = 1 << 32


def nearest_first(me: int, nodes: Sequence[int]) -> tuple[int, ...]:
    """The other groups, those on this group's node first, then by their distance around the ring.

    Args:
        me: this group.
        nodes: (groups,) the node of each.
    """
    size = len(nodes)
    distance = {peer: min((peer - me) % size, (me - peer) % size) for peer in range(size) if peer != me}
    return tuple(sorted(distance, key=lambda peer: (nodes[peer] != nodes[me], distance[peer], (peer - me) % size)))


class Stealing:
    """One group's side of the protocol. Every method that takes the time returns the messages to be sent.

    The group calls `update` at points where all its domains are in the pool; until the next call `open` stands for
    them, whatever happens to them meanwhile. Grants are only made there too (`next_share`, `grant`); everything else is
    answered when it comes.

    `low` may be changed at any time. With as many domains as a batch takes, a group asks while it works on its last
    batch and need not wait for the answer.

    Args:
        me: this group's number; group 0 finds the end.
        peers: the other groups in the order in which they are asked.
        rules: figures.
        now: the time.
    """

    def __init__(self, me: int, peers: Sequence[int], rules: Rules | None = None, *, now: float = 0.0) -> None:
        self.me, self.peers, self.rules = me, tuple(peers), rules or Rules()
        self.state = State.RUNNING
        self.open, self.low = 0, self.rules.low
        self._pool = 0  # domains that the group can give; others may have arrived since
        self.credit = self.rules.mint if me else 0
        self.outstanding = 0 if me else self.rules.mint * len(self.peers)
        self.notices: dict[int, Message] = {}
        self._started = False  # nobody is idle before the first update
        self._arrived: list[Message] = []
        self._out: list[Message] = []
        self._parcels: dict[tuple[int, int], Parcel] = {}
        self._unsure: dict[tuple[int, int], Message] = {}  # grants without acknowledgement when the search ended
        self._parted: dict[int, Seen] = {}  # what groups had accepted when they parted
        self._epochs = dict.fromkeys(self.peers, 0)
        self._seen = {peer: Seen() for peer in self.peers}
        self._heard = {(peer, kind): 0 for peer in self.peers for kind in (Kind.REQUEST, Kind.MORE)}
        self._wanted: dict[int, int] = {}
        self._asks = self._mores = 0
        self._asked: int | None = None
        self._turn = self._denials = 0
        self._ask_due, self._more_due = now, now
        self._pause = self.rules.pause

    # --- what the group says ------------------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Whether the search has ended, here at least."""
        return self.state is not State.RUNNING

    @property
    def settled(self) -> bool:
        """Whether it has ended and every other group is known to know."""
        return self.over and not self._parcels

    def collect(self) -> list[Any]:
        """Domains that have arrived, or come back after the end, since the last call.

        The group puts them into its pool, then calls `update` unless the search is over.
        """
        arrived = [message.payload for message in self._arrived]
        self._arrived.clear()
        return arrived

    def update(self, pool: int, now: float) -> list[Message]:
        """The pool holds so many domains, and the group none elsewhere.

        Raises:
            ParverifyError: there are domains without credit, which can't be.
        """
        self._started = True
        self._pool = pool
        self.open = pool + sum(message.count for message in self._arrived)
        if self.open and self.me and not self.credit and not self.over:
            raise ParverifyError(f"group {self.me} has {self.open} open domains and no credit")
        return self.tick(now)

    def next_share(self) -> tuple[int, int] | None:
        """A group that is to be granted domains now, and how many; None if there is none (left)."""
        while self._wanted and not self.over:
            peer, theirs = next(iter(self._wanted.items()))
            share = self._share(theirs)
            if share > 0:
                return peer, share
            self._deny(peer)
        return None

    def grant(self, peer: int, count: int, payload: Any, now: float) -> list[Message]:
        """Give domains that have been taken out of the pool, after `next_share`."""
        self._wanted.pop(peer, None)
        self.open -= count
        self._pool -= count
        self._parcel(peer, Kind.GRANT, now, count=count, credit=self._split(), payload=payload)
        return self.tick(now)

    def stop(self, why: Why, payload: bytes, now: float) -> list[Message]:
        """End the search everywhere."""
        if not self.over:
            self._conclude(Kind.STOP, now, count=int(why), payload=payload)
        return self._drain()

    def last_words(self, peer: int) -> list[Message]:
        """What a group must still hear once the search is over: this group's reason, if it has one, and its `END`.

        From now on nothing that the other sends is accepted. These have to be sent in order and without loss.
        """
        own = self.notices.get(self.me)
        end = Message(Kind.END, self.me, peer, 0, payload=self._seen[peer].write())
        return [end] if own is None else [replace(own, receiver=peer), end]

    def tick(self, now: float) -> list[Message]:
        """Do what is due: send again, return credit, find the end, ask."""
        if not self.over and self._started:
            self._settle(now)
        for parcel in self._parcels.values():
            if parcel.due <= now:
                self._out.append(parcel.message)
                parcel.wait = min(2 * parcel.wait, self.rules.longest_resend)
                parcel.due = now + parcel.wait
        if not self.over and self._started:
            self._refill(now)
            self._ask(now)
        return self._drain()

    def next_time(self) -> float:
        """When `tick` has something to do again, if nothing else happens; inf for never."""
        times = [parcel.due for parcel in self._parcels.values()]
        if not self.over and self._hungry:
            times.append(self._ask_due)
        return min(times, default=_NEVER)

    # --- what comes ---------------------------------------------------------------------------------------------------

    def receive(self, message: Message, now: float) -> list[Message]:
        """Take a message that has arrived intact; one that is not for this group, or from no peer, is dropped."""
        if message.receiver == self.me and message.sender in self._epochs:
            handlers = {
                Kind.REQUEST: self._on_request,
                Kind.DENY: self._on_deny,
                Kind.GRANT: self._on_parcel,
                Kind.CREDIT: self._on_parcel,
                Kind.MORE: self._on_more,
                Kind.ACK: self._on_ack,
                Kind.STOP: self._on_notice,
                Kind.DONE: self._on_notice,
                Kind.END: self._on_end,
            }
            handlers[message.kind](message, now)
        return self.tick(now)

    def _on_request(self, message: Message, now: float) -> None:
        if self.over or not self._is_new(message):
            return
        peer = message.sender
        if any(key[0] == peer and parcel.message.kind is Kind.GRANT for key, parcel in self._parcels.items()):
            return  # the answer to an earlier request is on its way, and will be sent again
        self._wanted[peer] = message.count
        if self._share(message.count) < 1:
            self._deny(peer)

    def _on_deny(self, message: Message, now: float) -> None:
        if message.sender == self._asked and message.epoch == self._asks:
            self._refused(now)

    def _on_parcel(self, message: Message, now: float) -> None:
        if self.over:
            return
        self._send(message.sender, Kind.ACK, message.epoch)
        if not self._seen[message.sender].add(message.epoch):
            return
        if self.me:
            self.credit += message.credit
        else:
            self.outstanding -= message.credit
        if message.kind is Kind.GRANT:
            self.open += message.count
            self._arrived.append(message)
            self._asked, self._ask_due, self._pause = None, now, self.rules.pause
            self._turn = self._denials = 0

    def _on_more(self, message: Message, now: float) -> None:
        if self.me == 0 and not self.over and self._is_new(message):
            self._parcel(message.sender, Kind.CREDIT, now, credit=self._split())

    def _on_ack(self, message: Message, now: float) -> None:
        self._parcels.pop((message.sender, message.epoch), None)
        self._unsure.pop((message.sender, message.epoch), None)

    def _on_end(self, message: Message, now: float) -> None:
        self._parted[message.sender] = Seen.read(message.payload)
        self._take_back()

    def _on_notice(self, message: Message, now: float) -> None:
        self._send(message.sender, Kind.ACK, message.epoch)
        self._end(message)  # a repeat changes nothing

    def _is_new(self, message: Message) -> bool:
        """Whether a request is not a repeat, nor overtaken by a later one."""
        key = (message.sender, message.kind)
        new = message.epoch > self._heard[key]
        self._heard[key] = max(message.epoch, self._heard[key])
        return new

    # --- what is done -------------------------------------------------------------------------------------------------

    @property
    def _hungry(self) -> bool:
        return self._started and bool(self.peers) and self.open <= self.low

    def _settle(self, now: float) -> None:
        """With nothing open: give the credit back, or find that all of it is back."""
        if self.open:
            return
        if self.me and self.credit:
            self._parcel(0, Kind.CREDIT, now, credit=self.credit)
            self.credit = 0
        if not self.me and not self.outstanding:
            self._conclude(Kind.DONE, now)

    def _refill(self, now: float) -> None:
        if self.me and self.open and self.credit < max(2, self.rules.mint >> _LOW_CREDIT) and now >= self._more_due:
            self._mores += 1
            self._more_due = now + self.rules.answer
            self._send(0, Kind.MORE, self._mores)

    def _ask(self, now: float) -> None:
        """Ask the next group, if domains run low and it is time."""
        if not self._hungry or now < self._ask_due:
            return
        if self._asked is not None:
            self._refused(now)  # no answer: as good as a refusal
            if now < self._ask_due:
                return
        self._asks += 1
        self._asked = self.peers[self._turn]
        self._ask_due = now + self.rules.answer
        self._send(self._asked, Kind.REQUEST, self._asks, self.open)

    def _refused(self, now: float) -> None:
        self._asked = None
        self._turn = (self._turn + 1) % len(self.peers)
        self._denials += 1
        self._ask_due = now
        if self._denials >= len(self.peers):
            self._denials = self._turn = 0
            self._ask_due = now + self._pause
            self._pause = min(2 * self._pause, self.rules.longest_pause)

    def _deny(self, peer: int) -> None:
        del self._wanted[peer]
        self._send(peer, Kind.DENY, self._heard[peer, Kind.REQUEST])

    def _share(self, theirs: int) -> int:
        """How many domains to give to a group that has `theirs`."""
        if self.me and self.credit < 2:
            return 0
        return min((self._pool - theirs) // 2, self.rules.most)

    def _split(self) -> int:
        """Credit to give away; group 0 makes it."""
        if not self.me:
            self.outstanding += self.rules.mint
            return self.rules.mint
        half = self.credit // 2
        self.credit -= half
        return half

    def _conclude(self, kind: Kind, now: float, *, count: int = 0, payload: bytes | None = None) -> None:
        """End the search and tell everyone."""
        self._end(Message(kind, self.me, self.me, 0, count, payload=payload))
        for peer in self.peers:
            self._parcel(peer, kind, now, count=count, payload=payload)

    def _end(self, notice: Message) -> None:
        """Note an end; the first one decides what this group does, all are kept."""
        self.notices.setdefault(notice.sender, replace(notice, receiver=self.me))
        if not self.over:
            self.state = State.FINISHED if notice.kind is Kind.DONE else State.STOPPED
            self._unsure = {
                key: parcel.message for key, parcel in self._parcels.items() if parcel.message.kind is Kind.GRANT
            }
            self._parcels.clear()
            self._wanted.clear()
            self._asked = None
            self._take_back()  # a group may part before its reason is known here

    def _take_back(self) -> None:
        """Once the search is over: decide the grants to groups that have parted."""
        for key in [key for key in self._unsure if key[0] in self._parted]:
            grant = self._unsure.pop(key)
            if key[1] not in self._parted[key[0]]:
                self._arrived.append(grant)

    def _parcel(
        self, peer: int, kind: Kind, now: float, *, count: int = 0, credit: int = 0, payload: Any = None
    ) -> None:
        """Send what must arrive."""
        epoch = self._epochs[peer]
        self._epochs[peer] += 1
        message = Message(kind, self.me, peer, epoch, count, credit, payload)
        self._parcels[peer, epoch] = Parcel(message, now + self.rules.resend, self.rules.resend)
        self._out.append(message)

    def _send(self, peer: int, kind: Kind, epoch: int, count: int = 0) -> None:
        self._out.append(Message(kind, self.me, peer, epoch, count))

    def _drain(self) -> list[Message]:
        out, self._out = self._out, []
        return out
