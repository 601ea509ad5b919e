"""Branch and bound by several groups of ranks: each bounds subproblems of its own and obtains more from the others.

Every group has a share of the network (the whole of it where a group is one rank), searches its own pool, and exchanges
open domains through `parverify.parallel.exchange`. When all pools are empty everywhere, someone has found a witness, or
the search is to pause, all ranks meet again with one merged result. How many groups there are when is decided in
`parverify.bab.crews`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parverify.bab.batches import BatchSize
from parverify.bab.books import Books, Share, Start
from parverify.bab.domains import Domains, Pool
from parverify.bab.driver import Search, Space, check_kept, merged, search
from parverify.bab.journaled import Border, Journaled
from parverify.bab.record import Record
from parverify.clock import Clock, StoppableClock
from parverify.config import Settings
from parverify.engine import Engine, Subject, shared_replay
from parverify.errors import ParverifyError, StoppedError
from parverify.frontend.query import Query
from parverify.parallel.comm import Comm
from parverify.parallel.groups import Group, make_group
from parverify.parallel.shared import from_first, from_rank, shared_clock
from parverify.parallel.world import World
from parverify.progress import Progress
from parverify.report.schema import RankReport

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from parverify.parallel.exchange import Event, Exchange

WAIT = 0.2  # seconds that an idle group waits before it looks again


@dataclass(frozen=True)
class Found:
    """What all groups found together in one stretch of a search.

    Args:
        search: figures and the result.
        parts: the disjuncts of the domains that are left open.
        missing: of the volume that was begun with, what is not closed; 0 where no journal is kept.
    """

    search: Search
    parts: Tensor
    missing: Fraction = Fraction(0)


@dataclass(frozen=True)
class Crew:
    """Ranks in groups, and this rank's engine in its own.

    Args:
        world: all ranks.
        group: this rank's.
        engine: of the group.
        record: what this rank did.
        leaders: the first ranks of all groups, for the exchange; None where there is one group.
        books: the run's journal.
    """

    world: World
    group: Group
    engine: Engine
    record: Record
    leaders: ProcessGroup | None = None
    books: Books = field(default_factory=Books.none)
    runs: Iterator[int] = field(default_factory=itertools.count)

    def divided(self, subject: Subject, query: Query, settings: Settings, count: int) -> Crew:
        """The same ranks in `count` groups; all ranks call this on what is one group.

        Args:
            subject, query, settings: of the run.
            count: of groups.

        Raises:
            ParverifyError: the subject can't be divided anew.
        """
        if subject.compile_for is None:
            raise ParverifyError("a network without a strategy can't be divided over groups")
        world, engine = self.world, self.engine
        group = make_group(world, count, settings.device)
        source = from_first(world.comm, lambda: subject.source)
        if source is None:
            raise ParverifyError("rank 0 has no original network to replay on")
        network = subject.network.redivided(subject.compile_for, group.comm)
        clock: Clock = StoppableClock(engine.clock.timeout, engine.clock.started)
        if group.comm.size > 1:  # its ranks are in collectives together, and can't stop just anywhere
            clock = shared_clock(clock, group.comm)
        mine = replace(subject, network=network, replay=shared_replay(source, group.comm))
        import torch.distributed as dist

        leaders = dist.new_group(list(range(0, world.size, group.comm.size)), backend="gloo")
        member = leaders if isinstance(leaders, dist.ProcessGroup) else None
        apart = replace(settings, seed=settings.seed + group.number)  # groups look for witnesses at other places
        return Crew(world, group, Engine.make(mine, query, apart, clock), self.record, member, self.books)

    def reports(self) -> list[RankReport]:
        """Every rank's account; all ranks call this."""
        mine = self.record.report(self.world.rank)
        return [from_rank(self.world.comm, rank, mine) for rank in range(self.world.size)]

    def batch(self, size: int, most: int, *, fixed: bool) -> BatchSize:
        """The size of this group's batches."""
        pace = 1.0 if self.group.count == 1 else 0.5  # others wait for what is found in a batch
        return BatchSize(size, most, fixed=fixed, ranks=self.group.comm.size, pace=pace)

    def search(
        self,
        space: Space,
        start: Start | None,
        *,
        pool: Pool,
        batch: BatchSize,
        progress: Progress,
        pause: Callable[[Search], bool] | None = None,
        state: Search,
    ) -> Found:
        """Search until everything is closed everywhere, a witness is found, or `pause` says stop.

        Args:
            space: of this group.
            start: open domains, the same on all ranks; None to go on with what is in the pools.
            pool: this group's; the same on all its ranks.
            batch: see `batch`.
            progress: told about this group's batches.
            pause: asked after batches of group 0.
            state: this rank's figures, added to as it goes.

        Returns:
            What all groups found together.

        Raises:
            LedgerError: a journal is kept, and its accounts do not add up.
        """
        before, alone = replace(state, unresolved=list(state.unresolved)), self.group.count == 1
        journal = self.books.join(self.group)
        share = None if journal is None else Share(journal)
        sharing = None if alone else self._sharing(Border(space, journal), batch)
        for domains in () if start is None else self._begin(space, start, share):
            pool.push(domains)
        with self._stopped_by(sharing):
            search(
                space if journal is None else Journaled(space, journal),
                Domains({"part": torch.zeros(0, dtype=torch.long)}),
                batch=batch,
                memory=0,
                clock=self.engine.clock,
                progress=progress,
                pause=pause if self.group.number == 0 else None,
                pool=pool,
                state=state,
                supply=sharing,
                turns=self.engine.turns(self.record),
            )
        if sharing is not None:
            sharing.finish(pool, state)
        missing = Fraction(0) if share is None or state.witness is not None else share.missing()
        gained = 0 if sharing is None else sharing.gained
        mine = (state.since(before), pool.parts(), gained, missing)
        found = [mine] if alone else [from_rank(self.world.comm, rank, mine) for rank in self._leading]
        check_kept([gained for _, _, gained, _ in found])
        together = mine[0] if alone else merged([one for one, _, _, _ in found])
        parts = torch.unique(torch.cat([left for _, left, _, _ in found]))
        return Found(together, parts, sum((rest for _, _, _, rest in found), Fraction(0)))

    @contextlib.contextmanager
    def _stopped_by(self, sharing: _Sharing | None) -> Iterator[None]:
        """A batch of this rank is given up in its middle as soon as another group has found a witness.

        Then the domains of that batch are in no pool; they don't matter any more.
        """
        clock = self.engine.clock
        if sharing is None or not isinstance(clock, StoppableClock):
            yield
            return
        clock.asks.append(sharing.decided)
        try:
            yield
        except StoppedError as error:
            logging.getLogger(__name__).info("another group has found a witness: %s", error.message)
        finally:
            clock.asks.remove(sharing.decided)

    @property
    def _leading(self) -> range:
        """The ranks that lead groups."""
        return range(0, self.world.size, self.group.comm.size)

    def gather(self, pool: Pool, space: Space) -> None:
        """Move all open domains to group 0; all ranks call this between searches."""
        if self.group.count == 1:
            return
        border = Border(space, self.books.join(self.group))
        for leader in self._leading[1:]:
            mine = self.group.comm.size * self.group.number == leader
            domains = pool.pop(len(pool)) if mine and len(pool) else None
            if domains is not None:
                border.leave(domains)
            domains = from_rank(self.world.comm, leader, domains)
            if domains is not None and not self.group.number:
                pool.push(border.enter(domains))

    def _begin(self, space: Space, start: Start, share: Share | None) -> Iterator[Domains]:
        """What this group begins with."""
        if self.group.number:
            return
        if share is None:
            yield start.roots
            return
        for domains in self.books.begin(share.journal, start, self.group):
            share.begin(domains)
            yield space.adopt(domains) if start.resumed else domains

    def _sharing(self, border: Border, batch: BatchSize) -> _Sharing:
        from parverify.parallel.exchange import Exchange

        run = next(self.runs)
        exchange = Exchange(self.leaders, run=run, border=border) if self.group.leads else None
        return _Sharing(exchange, self.group.comm, self.record, border, batch)


class _Sharing:
    """Exchanges domains between batches; the leader talks to other groups, the group's other ranks do as it did."""

    def __init__(
        self,
        exchange: Exchange | None,
        comm: Comm,
        record: Record,
        border: Border | None = None,
        batch: BatchSize | None = None,
    ) -> None:
        self._exchange, self._comm, self._record, self._border = exchange, comm, record, border
        self._batch = batch
        self.gained = 0  # domains received less those given away

    def __call__(self, pool: Pool, state: Search) -> bool:
        low = 0 if self._batch is None else self._batch.size // 2  # more is asked for while the last batch is bounded
        event: Event = from_first(self._comm, lambda: self._leader().poll(pool, low=low))
        self._follow(event, pool)
        if event.over:
            return False
        if not len(pool):
            self._record.idle()
            if self._exchange is not None:
                self._exchange.idle_wait(WAIT)
        return True

    def decided(self) -> bool:
        """Whether another group has found a witness."""
        return self._exchange is not None and self._exchange.decided()

    def finish(self, pool: Pool, state: Search) -> None:
        """Tell the others how this group's search ended, and wait for theirs to end."""
        event: Event = from_first(self._comm, lambda: self._end(pool, state))
        self._follow(event, pool)
        # what was under way when the search ended is back in some pool, and open
        state.open = len(pool)
        state.finished = state.finished and not state.open
        if self._exchange is not None:
            self._record.exchanged(self._exchange.counters)

    def _end(self, pool: Pool, state: Search) -> Event:
        from parverify.parallel.slots import Why

        exchange = self._leader()
        if state.witness is not None:
            exchange.stop(Why.WITNESS)
        elif len(pool):
            exchange.stop(Why.PAUSE)
        return exchange.close(pool)

    def _follow(self, event: Event, pool: Pool) -> None:
        self.gained += sum(len(domains) for domains in event.received) - sum(event.given)
        if self._exchange is None:
            from parverify.parallel.exchange import split_off

            for domains in event.received:
                pool.push(domains if self._border is None else self._border.enter(domains))
            for count in event.given:
                domains = split_off(pool, count)
                if self._border is not None:
                    self._border.leave(domains)

    def _leader(self) -> Exchange:
        if self._exchange is None:
            raise ParverifyError("only the first rank of a group talks to other groups")
        return self._exchange
