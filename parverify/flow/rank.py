"""What one rank does with a list: bound the next instance, search an undecided one, and share the last searches.

Cheap stages come first: a rank bounds new instances as long as there are any, unless it holds too many undecided ones
or the measured rates say that more ranks should search (`allot`). An undecided instance stays on its rank, with all
that was found so far. Once a rank has nothing left, all ranks share what is left (`meeting`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from parverify.bab.batches import BatchSize
from parverify.bab.record import Record
from parverify.budget import free_memory
from parverify.cli.outcome import Outcome
from parverify.clock import StoppableClock
from parverify.config import Settings
from parverify.engine import Engine
from parverify.flow.allot import searching_ranks
from parverify.flow.board import Board, OwnCounters, shared_counters
from parverify.flow.entries import Answer, Batch, Entry, UnderWay
from parverify.flow.meeting import PACE, Call, FlowCrew, Meeting, Part
from parverify.flow.recipe import ActivationRecipe
from parverify.flow.work import Files, Job
from parverify.loading import warm_up
from parverify.ops.rounding import ULPS, allowance
from parverify.parallel.comm import Alone
from parverify.parallel.groups import Group
from parverify.parallel.shared import from_first
from parverify.parallel.world import World
from parverify.progress import Progress

HELD = 32  # undecided instances that a rank keeps waiting before it searches one
HELD_SHARE = 4  # and at most 1 / HELD_SHARE of its memory in their networks


@dataclass(frozen=True)
class Desk:
    """Tells the process that supervises what this rank works on."""

    folder: str
    rank: int

    def begin(self, entry: Entry, spent: float) -> None:
        """Work goes on with an instance, after `spent` seconds of it."""
        UnderWay.of(entry, spent).save(self.folder, self.rank)

    def rest(self) -> None:
        """This rank waits."""
        UnderWay().save(self.folder, self.rank)


def work_on_list(
    batch: Batch,
    settings: Settings,
    world: World,
    *,
    progress: Progress,
    say: Callable[[str], None],
    folder: str = "",
    verbose: bool = False,
) -> Outcome:
    """Bring the instances to their end; all ranks call this.

    Args:
        batch: the instances; rank 0's counts.
        settings: of each.
        world: the ranks.
        progress: who is told by this rank.
        say: takes a line for each instance that has ended.
        folder: that all ranks of this machine see; empty under torchrun, or for one rank.
        verbose: print tracebacks of instances that fail.

    Returns:
        `done`, with figures.
    """
    warm_up()
    entries = from_first(world.comm, lambda: batch.entries)
    with allowance(max(ULPS, settings.bounds.allowance)):  # also for searches that others have begun
        return _Rank(replace(batch, entries=entries), settings, world, progress, say, folder, verbose).run()


@dataclass
class _Rank:
    """The state of one rank's work; see `work_on_list`."""

    batch: Batch
    settings: Settings
    world: World
    progress: Progress
    say: Callable[[str], None]
    folder: str
    verbose: bool
    waiting: list[Job] = field(default_factory=list)
    ended: int = 0

    def __post_init__(self) -> None:
        several = self.world.size > 1
        counters = shared_counters(self.folder) if several else OwnCounters()
        self.board = Board(counters, len(self.batch.entries), self.world.size)
        self.desk, self.files = Desk(self.batch.folder, self.world.rank), Files()
        self.meeting = self._meeting() if several else None

    def _meeting(self) -> Meeting:
        import torch.distributed as dist

        made = dist.new_group(backend="gloo")
        leaders = made if isinstance(made, dist.ProcessGroup) else None
        return Meeting(self.world, self.board, leaders, join=self.join, desk=self.desk, progress=self.progress)

    def run(self) -> Outcome:
        """All stages of all instances."""
        started = time.monotonic()
        while True:
            if not self._should_search():
                number = self.board.take()
                if number is not None:
                    self._bound(self.batch.entries[number])
                    continue
            if not self.waiting:
                break
            self._search()
        if self.meeting is not None:
            self.board.call_all()
            self.meeting.pass_turn()
        self.desk.rest()
        seconds = round(time.monotonic() - started, 3)
        return Outcome("done", stats={"ended": self.ended, "seconds": seconds, "rates": vars(self.board.rates())})

    def _should_search(self) -> bool:
        """Whether an undecided instance comes before a new one."""
        if not self.waiting or not self.board.left():
            return bool(self.waiting)
        if len(self.waiting) >= HELD or self._held() > (self.settings.memory or free_memory()) // HELD_SHARE:
            return True
        return self.board.searchers() < searching_ranks(self.world.size, self.board.rates())

    def _held(self) -> int:
        """Bytes of the networks of instances that wait."""
        graphs = {id(job.graph): job.graph for job in self.waiting if job.graph is not None}
        return sum(graph.constant_bytes() for graph in graphs.values())

    def _bound(self, entry: Entry) -> None:
        job = Job(entry, self.settings, self.files, self.progress, crew=self.crew, verbose=self.verbose)
        self.progress.log(f"{entry.name}: bounding")
        self.desk.begin(entry, 0.0)
        outcome = job.bound()
        self.board.note_bounded(job.stopwatch.seconds, undecided=outcome is None)
        if outcome is not None:
            self._end(job, outcome)
            return
        self.waiting.append(job)
        self.waiting.sort(key=lambda job: job.stopwatch.seconds)  # what was cheap to bound is cheap to search

    def _search(self) -> None:
        job = self.waiting.pop(0)
        self.progress.log(f"{job.entry.name}: searching")
        spent = job.stopwatch.seconds
        self.desk.begin(job.entry, spent)
        self.board.enter_search(1)
        outcome = job.search()
        self.board.enter_search(-1)
        self.board.note_searched(job.stopwatch.seconds - spent)
        self._end(job, outcome)

    def _end(self, job: Job, outcome: Outcome) -> None:
        stats = {**outcome.stats, "rank": self.world.rank}
        answer = Answer(job.entry, replace(outcome, stats=stats), job.stopwatch.seconds).save(self.batch.results)
        self.desk.rest()
        self.ended += 1
        self.say(answer.line())

    # --- searches ---------------------------------------------------------------------------------------------------

    def crew(self, job: Job, engine: Engine) -> FlowCrew:
        """This rank alone, until others join."""
        return FlowCrew(World(), Group(0, 1, Alone()), engine, Record(engine.clock), job=job, meeting=self.meeting)

    def join(self, call: Call) -> Part:
        """This rank's part in a search that another one calls for."""
        settings = replace(self.settings, dtype=call.dtype)
        clock = StoppableClock(call.left, time.monotonic())
        subject, query = self.files.subject(call.entry, settings, clock, self.progress)
        engine = Engine.make(subject, query, settings, clock)
        space = call.recipe.make(engine, self.progress)
        wanted = settings.branching.batch
        rows = engine.problem.rows_per_part if isinstance(call.recipe, ActivationRecipe) else 1
        size = BatchSize(call.batch, engine.budget.batch(wanted, rows), fixed=bool(wanted), pace=PACE)
        return Part(space, size, clock, engine.budget.pool, engine.turns())
