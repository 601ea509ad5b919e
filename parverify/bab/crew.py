"""Branch and bound by several groups of ranks: each bounds subproblems of its own and obtains more from the others.

All ranks together bound the roots; then every group takes a share of the network (the whole of it where a group is one
rank), searches its own pool, and exchanges open domains through `parverify.parallel.exchange`. When all pools are empty
everywhere, or someone has found a witness, all ranks meet again with one merged result.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parverify.bab.domains import Domains, Pool
from parverify.bab.driver import BatchSize, Search, Space, merged, search
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
    """

    world: World
    group: Group
    engine: Engine
    record: Record
    leaders: ProcessGroup | None = None
    runs: Iterator[int] = field(default_factory=itertools.count)

    @staticmethod
    def make(engine: Engine, subject: Subject, query: Query, settings: Settings, world: World) -> Crew:
        """Form the groups; all ranks call this.

        Args:
            engine: of all ranks together.
            subject, query, settings: of the run.
            world: the ranks.
        """
        count = _group_count(engine, settings, world)
        if count == 1 or subject.compile_for is None:
            return Crew(world, Group(0, 1, world.comm), engine, Record(engine.clock))
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
        return Crew(world, group, Engine.make(mine, query, settings, clock), Record(clock), member)

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
        roots: Domains,
        *,
        batch: BatchSize,
        progress: Progress,
        pause: Callable[[Search], bool] | None = None,
        state: Search,
    ) -> tuple[Search, Tensor]:
        """Search from `roots` until everything is closed everywhere, a witness is found, or `pause` says stop.

        Args:
            space: of this group.
            roots: open domains, the same on all ranks.
            batch: see `batch`.
            progress: told about this group's batches.
            pause: asked after this group's batches.
            state: this group's figures, written as it goes.

        Returns:
            What all groups found together, and the disjuncts of the domains that are left open.
        """
        engine = self.engine
        pool = Pool(memory=engine.budget.pool, pad=space.pad)
        try:
            if self.group.count == 1:
                search(space, roots, batch=batch, memory=0, clock=engine.clock, progress=progress,
                       pause=pause, pool=pool, state=state, record=self.record)  # fmt: skip
                return state, pool.parts()
            sharing = self._sharing()
            mine = roots if self.group.number == 0 else roots.slice(0, 0)
            search(
                space,
                mine,
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
            sharing.finish(pool, state)
            parts = pool.parts()
        finally:
            pool.close()
        leaders = range(0, self.world.size, self.group.comm.size)
        found = [from_rank(self.world.comm, rank, (state, parts, sharing.gained)) for rank in leaders]
        lost = -sum(gained for _, _, gained in found)
        if lost:  # what was given away must have arrived, or nothing can be concluded
            raise ParverifyError(f"{lost} domains were lost between groups of ranks")
        return merged([one for one, _, _ in found]), torch.unique(torch.cat([left for _, left, _ in found]))

    def _sharing(self) -> _Sharing:
        from parverify.parallel.exchange import Exchange

        run = next(self.runs)
        exchange = Exchange(self.leaders, run=run) if self.group.leads else None
        return _Sharing(exchange, self.group.comm, self.record)


class _Sharing:
    """Exchanges domains between batches; the leader talks to other groups, the group's other ranks do as it did."""

    def __init__(self, exchange: Exchange | None, comm: Comm, record: Record) -> None:
        self._exchange, self._comm, self._record = exchange, comm, record
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
                pool.push(domains)
            for count in event.given:
                split_off(pool, count)

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
