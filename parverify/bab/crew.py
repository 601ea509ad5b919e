"""Branch and bound by several groups of ranks: each bounds subproblems of its own and obtains more from the others.

All ranks together bound the roots; then every group takes a share of the network (the whole of it where a group is one
rank), searches its own pool, and exchanges open domains through `parverify.parallel.exchange`. When all pools are empty
everywhere, or someone has found a witness, all ranks meet again with one merged result.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parverify.bab.books import Books, Share, Start, settle
from parverify.bab.domains import Domains, Pool
from parverify.bab.driver import BatchSize, Search, Space, merged, search
from parverify.bab.journal import Journal
from parverify.bab.journaled import Border, Journaled
from parverify.bab.record import Record
from parverify.clock import Clock
from parverify.config import Settings
from parverify.engine import Engine, Subject, shared_replay
from parverify.errors import ParverifyError
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
class Crew:
    """The groups of a run, and this rank's engine in its own.

    Args:
        world: all ranks.
        group: this rank's.
        engine: of the group.
        record: what this rank did.
        leaders: the first ranks of all groups, for the exchange; None where there is one group.
        books: the run's journal.
        journal: this group's; None where none is kept.
    """

    world: World
    group: Group
    engine: Engine
    record: Record
    leaders: ProcessGroup | None = None
    books: Books = field(default_factory=Books.none)
    journal: Journal | None = None
    runs: Iterator[int] = field(default_factory=itertools.count)

    @staticmethod
    def make(
        engine: Engine, subject: Subject, query: Query, settings: Settings, world: World, books: Books | None = None
    ) -> Crew:
        """Form the groups; all ranks call this.

        Args:
            engine: of all ranks together.
            subject, query, settings: of the run.
            world: the ranks.
            books: the run's journal; None for none.
        """
        books = books or Books.none(world)
        count = _group_count(engine, settings, world)
        if count == 1 or subject.compile_for is None:
            group = Group(0, 1, world.comm)
            return Crew(world, group, engine, Record(engine.clock), None, books, books.join(group))
        group = make_group(world, count, settings.device)
        source = from_first(world.comm, lambda: subject.source)
        if source is None:
            raise ParverifyError("rank 0 has no original network to replay on")
        network = subject.network.redivided(subject.compile_for, group.comm)
        clock = shared_clock(Clock(engine.clock.timeout, engine.clock.started), group.comm)
        mine = replace(subject, network=network, replay=shared_replay(source, group.comm))
        import torch.distributed as dist

        leaders = dist.new_group(list(range(0, world.size, group.comm.size)), backend="gloo")
        member = leaders if isinstance(leaders, dist.ProcessGroup) else None
        own = Engine.make(mine, query, settings, clock)
        return Crew(world, group, own, Record(clock), member, books, books.join(group))

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
        start: Start,
        *,
        batch: BatchSize,
        progress: Progress,
        pause: Callable[[Search], bool] | None = None,
        state: Search,
    ) -> tuple[Search, Tensor]:
        """Search from `start` until everything is closed everywhere, a witness is found, or `pause` says stop.

        Args:
            space: of this group.
            start: open domains, the same on all ranks.
            batch: see `batch`.
            progress: told about this group's batches.
            pause: asked after this group's batches.
            state: this group's figures, written as it goes.

        Returns:
            What all groups found together, and the disjuncts of the domains that are left open.

        Raises:
            LedgerError: a journal is kept, and what was begun with is not closed although nothing is open.
        """
        engine, alone = self.engine, self.group.count == 1
        share = None if self.journal is None else Share(self.journal)
        sharing = None if alone else self._sharing(Border(space, self.journal))
        pool = Pool(memory=engine.budget.pool, pad=space.pad)
        try:
            for domains in self._begin(space, start, share):
                pool.push(domains)
            search(
                space if self.journal is None else Journaled(space, self.journal),
                start.roots.slice(0, 0),
                batch=batch,
                memory=0,
                clock=engine.clock,
                progress=progress,
                pause=pause if self.group.number == 0 else None,
                pool=pool,
                state=state,
                supply=sharing,
                record=self.record,
            )
            if sharing is not None:
                sharing.finish(pool, state)
            parts = pool.parts()
        finally:
            pool.close()
        missing = Fraction(0) if share is None or state.witness is not None else share.missing()
        gained = 0 if sharing is None else sharing.gained
        leaders = range(0, self.world.size, self.group.comm.size)
        mine = (state, parts, gained, missing)
        found = [mine] if alone else [from_rank(self.world.comm, rank, mine) for rank in leaders]
        lost = -sum(gained for _, _, gained, _ in found)
        if lost:  # what was given away must have arrived, or nothing can be concluded
            raise ParverifyError(f"{lost} domains were lost between groups of ranks")
        together = state if alone else merged([one for one, _, _, _ in found])
        if share is not None and together.finished and not together.unresolved:
            settle([rest for _, _, _, rest in found])
        return together, torch.unique(torch.cat([left for _, left, _, _ in found]))

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

    def _sharing(self, border: Border) -> _Sharing:
        from parverify.parallel.exchange import Exchange

        run = next(self.runs)
        exchange = Exchange(self.leaders, run=run, border=border) if self.group.leads else None
        return _Sharing(exchange, self.group.comm, self.record, border)


class _Sharing:
    """Exchanges domains between batches; the leader talks to other groups, the group's other ranks do as it did."""

    def __init__(self, exchange: Exchange | None, comm: Comm, record: Record, border: Border | None = None) -> None:
        self._exchange, self._comm, self._record, self._border = exchange, comm, record, border
        self.gained = 0  # domains received less those given away

    def __call__(self, pool: Pool, state: Search) -> bool:
        event: Event = from_first(self._comm, lambda: self._leader().poll(pool))
        self._follow(event, pool)
        if event.over:
            return False
        if not len(pool):
            self._record.idle()
            if self._exchange is not None:
                self._exchange.idle_wait(WAIT)
        return True

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


def _group_count(engine: Engine, settings: Settings, world: World) -> int:
    """As the settings say; else one group a rank where the memory allows the whole network on each."""
    if world.size == 1:
        return 1
    if settings.parallel.groups:
        return settings.parallel.groups
    whole = engine.network.graph.constant_bytes()
    return world.size if settings.memory is None or 2 * whole < settings.memory else 1
