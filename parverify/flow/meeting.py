"""All ranks on one search: once a rank has nothing left of its own, the others' searches are shared one by one.

Ranks work side by side, each on instances of its own, until one has nothing left; it calls the others, and from then
on the ranks take turns. Whose turn it is goes on with its instances, the search under way first; every search that
lasts longer than a moment is shared by all ranks through the exchange of open domains. The others sit in `attend`,
maybe in the middle of a search of their own whose pool waits. Turns pass by broadcast, so all ranks agree on who is
next, and on which exchange; the time is an instance's own, and running out of it ends the shared search in order.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from parverify.bab.batches import BatchSize
from parverify.bab.books import Start
from parverify.bab.crew import WAIT, Crew, Found
from parverify.bab.domains import Domains, Pool
from parverify.bab.driver import Search, Space, check_kept, merged, search
from parverify.bab.turns import Turns
from parverify.cli.work import Boundary
from parverify.clock import Clock, StoppableClock
from parverify.engine import Engine
from parverify.errors import LostRankError, OutOfTimeError, ParverifyError, StoppedError
from parverify.flow.board import Board
from parverify.flow.entries import Entry
from parverify.flow.recipe import Recipe, recipe_of
from parverify.flow.work import Job
from parverify.parallel.exchange import Event, Exchange
from parverify.parallel.shared import from_rank
from parverify.parallel.slots import Why
from parverify.parallel.world import World
from parverify.progress import Progress

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

PACE = 0.5  # factor on how long a batch may take where others may wait for what is found in it
ALONE = 1.0  # seconds of a search before the other ranks are asked to join: shorter ones end before they would help


@dataclass(frozen=True)
class Call:
    """What a rank asks the others to search with it.

    Args:
        entry: the instance.
        dtype: of the bounds.
        recipe: makes the space.
        left: seconds of work that are left.
        batch: domains bounded at once, to begin with.
        run: number of the exchange.
    """

    entry: Entry
    dtype: str
    recipe: Recipe
    left: float
    batch: int
    run: int


@dataclass
class Share:
    """What one rank's part in a shared search came to.

    Args:
        state: figures, and a witness.
        parts: disjuncts of the domains that were left here.
        gained: domains received less those given away.
        failure: why it failed, empty if it did not.
        late: whether the clock ran out here.
    """

    state: Search
    parts: Tensor
    gained: int = 0
    failure: str = ""
    late: bool = False


@dataclass(frozen=True)
class Part:
    """What one rank needs to take part in a search.

    Args:
        space: how to split and bound.
        batch: how many domains at once.
        clock: of the instance.
        memory: bytes of open domains kept in memory.
        turns: the stages of the search; None for no attacks.
        pause: see `parverify.bab.driver.search`.
    """

    space: Space
    batch: BatchSize
    clock: Clock
    memory: int = 0
    turns: Turns | None = None
    pause: Callable[[Search], bool] | None = None


class Desk(Protocol):
    """Is told what this rank works on."""

    def begin(self, entry: Entry, spent: float) -> None:
        """Work goes on with an instance, after `spent` seconds of it."""

    def rest(self) -> None:
        """This rank waits."""


class Meeting:
    """The ranks of a list, as far as they work together; one for each rank.

    Args:
        world: all ranks.
        board: tells when a rank has nothing left.
        leaders: a gloo group of all ranks for the exchange; None for one rank.
        join: makes this rank's part in a search that another one calls for.
        desk: is told what this rank works on.
        progress: who is told.
    """

    def __init__(
        self,
        world: World,
        board: Board,
        leaders: ProcessGroup | None,
        *,
        join: Callable[[Call], Part],
        desk: Desk,
        progress: Progress,
    ) -> None:
        self._world, self._board, self._leaders = world, board, leaders
        self._join, self._desk, self._progress = join, desk, progress
        self._turn = 0
        self._runs = itertools.count()
        self._called = False

    @property
    def called(self) -> bool:
        """Whether ranks are to work together from now on."""
        self._called = self._called or self._board.called()
        return self._called

    def await_turn(self, job: Job) -> None:
        """Help others until it is this rank's turn; the clock of its own search stands still meanwhile."""
        if self._turn >= self._world.rank:
            return
        with job.stopwatch.paused():
            self._desk.rest()
            while self._turn < self._world.rank:
                self._attend()
        self._desk.begin(job.entry, job.stopwatch.seconds)

    def pass_turn(self) -> None:
        """This rank has nothing left: it helps until its turn, passes it on, and helps until all have had theirs."""
        self._desk.rest()
        while self._turn < self._world.size:
            if self._turn == self._world.rank:
                from_rank(self._world.comm, self._world.rank, None)
                self._turn += 1
            else:
                self._attend()

    def together(self, job: Job, engine: Engine, part: Part, pool: Pool) -> list[Share]:
        """Share a search whose open domains are in `pool` with all other ranks; what each rank came to."""
        dtype = str(engine.problem.C.dtype).removeprefix("torch.")
        call = Call(job.entry, dtype, recipe_of(part.space), part.clock.left, part.batch.size, next(self._runs))
        from_rank(self._world.comm, self._world.rank, call)
        return self._share(call.run, pool, lambda: part)

    def _attend(self) -> None:
        """What the rank whose turn it is wants next."""
        call: Call | None = from_rank(self._world.comm, self._turn, None)
        if call is None:
            self._turn += 1
            return
        next(self._runs)
        self._desk.begin(call.entry, call.entry.timeout - call.left)
        self._share(call.run, None, lambda: self._join(call))
        self._desk.rest()

    def _share(self, run: int, pool: Pool | None, make: Callable[[], Part]) -> list[Share]:
        exchange = Exchange(self._leaders, run=run)
        supply, state, mine = Supply(exchange), Search(), Pool(memory=0) if pool is None else pool
        with Boundary(verbose=False) as boundary:
            part = make()
            if pool is None:
                mine = Pool(memory=part.memory, pad=part.space.pad)
            supply.clock, supply.batch = part.clock, part.batch
            if isinstance(part.clock, StoppableClock):
                part.clock.asks[:] = [exchange.decided]  # a witness elsewhere ends a batch in its middle
            search(part.space, _none(), batch=part.batch, memory=0, clock=part.clock, progress=self._progress,
                   pause=part.pause, pool=mine, state=state, supply=supply, turns=part.turns)  # fmt: skip
        share = self._end(supply, mine, state, boundary)
        mine.close()
        return [from_rank(self._world.comm, rank, share) for rank in range(self._world.size)]

    def _end(self, supply: Supply, pool: Pool, state: Search, boundary: Boundary) -> Share:
        """Part in order, whatever happened."""
        error = boundary.error
        if isinstance(error, (LostRankError, KeyboardInterrupt)):
            raise error
        late = isinstance(error, OutOfTimeError)
        fine = error is None or late or isinstance(error, StoppedError) or boundary.outcome is None
        failure = "" if fine or boundary.outcome is None else boundary.outcome.reason
        if error is not None:
            supply.exchange.stop(Why.PAUSE if late else Why.ERROR)
        elif state.witness is not None:
            supply.exchange.stop(Why.WITNESS)
        elif len(pool):
            supply.exchange.stop(Why.PAUSE)
        supply.take(supply.exchange.close(pool))
        state.open = len(pool)
        state.finished = state.finished and not state.open and error is None
        return Share(state, pool.parts(), supply.gained, failure, late)


class Supply:
    """Exchanges domains between batches, and ends the search of all ranks in order when the clock runs out.

    Args:
        exchange: of this rank.

    Attributes:
        clock: of the instance.
        batch: of this rank; more is asked for while the last one is bounded.
        gained: domains received less those given away.
    """

    def __init__(self, exchange: Exchange, batch: BatchSize | None = None) -> None:
        self.exchange, self.clock, self.batch, self.gained = exchange, Clock(), batch, 0

    def __call__(self, pool: Pool, state: Search) -> bool:
        """See `parverify.bab.driver.Supply`."""
        self.clock.check("searching")
        event = self.exchange.poll(pool, low=0 if self.batch is None else self.batch.size // 2)
        self.take(event)
        if event.over:
            return False
        if not len(pool):
            self.exchange.idle_wait(WAIT)
        return True

    def take(self, event: Event) -> None:
        """Note what came and went."""
        self.gained += sum(len(domains) for domains in event.received) - sum(event.given)


@dataclass(frozen=True)
class FlowCrew(Crew):
    """A search by one rank, to which all others come once they have nothing else to do.

    Args:
        job: the instance.
        meeting: of the ranks; None for a single one.
    """

    job: Job | None = None
    meeting: Meeting | None = None

    def batch(self, size: int, most: int, *, fixed: bool) -> BatchSize:
        """See `Crew.batch`; others may come to wait for what is found in a batch."""
        return BatchSize(size, most, fixed=fixed, pace=1.0 if self.meeting is None else PACE)

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
        """See `Crew.search`."""
        meeting, job = self.meeting, self.job
        if meeting is None or job is None or start is None:
            return super().search(space, start, pool=pool, batch=batch, progress=progress, pause=pause, state=state)
        alone, turns = _Alone(meeting, pause), self.engine.turns(self.record)
        search(space, start.roots, batch=batch, memory=0, clock=self.engine.clock, progress=progress,
               pause=alone, pool=pool, state=state, turns=turns)  # fmt: skip
        if not alone.others:
            return Found(state, pool.parts())
        meeting.await_turn(job)
        progress.log(f"{job.entry.name}: all ranks search, {len(pool)} open")
        part = Part(space, batch, self.engine.clock, turns=turns, pause=pause)
        return self._concluded(state, meeting.together(job, self.engine, part, pool))

    @staticmethod
    def _concluded(alone: Search, shares: list[Share]) -> Found:
        """What all ranks found after what was found alone."""
        found = merged([share.state for share in shares]).after(alone)
        if found.witness is not None:
            return Found(found, torch.zeros(0, dtype=torch.long))
        failures = [f"rank {rank}: {share.failure}" for rank, share in enumerate(shares) if share.failure]
        if failures:
            raise ParverifyError(failures[0])
        if any(share.late for share in shares):
            raise OutOfTimeError("out of time while searching")
        check_kept([share.gained for share in shares])
        return Found(found, torch.unique(torch.cat([share.parts for share in shares])))


class _Alone:
    """Whether a search that one rank has begun alone is to be paused, and whether for the others to join."""

    def __init__(self, meeting: Meeting, pause: Callable[[Search], bool] | None) -> None:
        self._meeting, self._pause, self._started = meeting, pause, time.monotonic()
        self.others = False

    def __call__(self, state: Search) -> bool:
        if self._pause is not None and self._pause(state):
            return True
        self.others = time.monotonic() - self._started >= ALONE and self._meeting.called
        return self.others


def _none() -> Domains:
    """No domains."""
    return Domains({"part": torch.zeros(0, dtype=torch.long), "lower": torch.zeros(0)})
