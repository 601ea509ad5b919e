"""Groups that follow the number of open domains: many ranks on a few domains, then groups of their own on many.

N ranks with D open domains form as many groups as there are domains, at most what the memory allows: one group of all
ranks for a single domain, whose rows and weights they divide, and N groups of one, without any collective, once there
are N or more (batch-aware sequence parallelism, arXiv:2609.03151, for domains instead of sequences). A search begins
with the groups that its domains ask for; once the pool of group 0 has enough for all, the ranks meet between two
batches, gather what is open, and go on in the largest number of groups. The network is divided anew the first time a
number of groups is formed, and kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from parverify.bab.batches import BatchSize
from parverify.bab.books import Books, Start, settle
from parverify.bab.crew import Crew, Found
from parverify.bab.domains import Pool
from parverify.bab.driver import Search, Space
from parverify.bab.record import Record
from parverify.budget import free_memory
from parverify.config import Settings
from parverify.engine import Engine, Subject
from parverify.errors import ParverifyError
from parverify.frontend.query import Query
from parverify.parallel.groups import Group
from parverify.parallel.shared import from_first, from_rank
from parverify.parallel.world import World
from parverify.progress import Progress
from parverify.report.schema import RankReport

Pause = Callable[[Search], bool]


@dataclass(frozen=True)
class Task:
    """A search, whoever does it.

    Args:
        domains: how many are open at its start; the same on all ranks.
        space: how an engine splits and bounds.
        start: the open domains, of what `space` made.
        batch: how many domains a crew bounds at once.
        pause: says when an engine's search should stop; None for never.
    """

    domains: int
    space: Callable[[Engine], Space]
    start: Callable[[Any], Start]
    batch: Callable[[Crew], BatchSize]
    pause: Callable[[Engine], Pause] | None = None


def group_count(domains: int, size: int, most: int) -> int:
    """Into how many equal groups `size` ranks divide for so many domains: at most `most`, and one for each domain."""
    fits = [count for count in range(1, size + 1) if size % count == 0 and count <= min(domains, most)]
    return max(fits, default=1)


class Crews:
    """The ranks of a run in groups of any size; all ranks use it alike.

    Args:
        alone: all ranks as one group.
        most: the most groups that are formed.
        fixed: form that many whatever is open.
        divide: all ranks in so many groups.
    """

    def __init__(
        self, alone: Crew, most: int = 1, *, fixed: bool = False, divide: Callable[[int], Crew] | None = None
    ) -> None:
        self._made, self._most, self._fixed, self._divide = {1: alone}, most, fixed, divide

    @staticmethod
    def make(engine: Engine, subject: Subject, query: Query, settings: Settings, books: Books, world: World) -> Crews:
        """The groups of a run.

        Args:
            engine: of all ranks together.
            subject, query, settings: of the run.
            books: its journal.
            world: the ranks.
        """
        alone = Crew(world, Group(0, 1, world.comm), engine, Record(engine.clock), books=books)
        if world.size == 1 or subject.compile_for is None:
            return Crews(alone)
        fixed = settings.parallel.groups > 0
        most = settings.parallel.groups if fixed else most_groups(engine, settings, world)
        return Crews(alone, most, fixed=fixed, divide=lambda count: alone.divided(subject, query, settings, count))

    def apart(self, progress: Progress) -> Crew:
        """Every rank a group of its own where that is allowed, else all ranks as one group."""
        return self._of(self._size if self._most == self._size else 1, progress)

    @property
    def replays(self) -> int:
        """How often this rank has asked for a replay on the original network."""
        return sum(crew.engine.witnesses.replays for crew in self._made.values())

    def reports(self) -> list[RankReport]:
        """Every rank's account; all ranks call this."""
        return self._made[1].reports()

    def report(self) -> RankReport:
        """This rank's account."""
        return self._made[1].record.report(self._made[1].world.rank)

    def search(self, task: Task, *, progress: Progress, state: Search) -> tuple[Search, Tensor]:
        """Run a search to its end, or until it is to pause.

        Args:
            task: the search.
            progress: told about batches and groups.
            state: this rank's figures, added to as it goes.

        Returns:
            What all ranks found together, and the disjuncts of the domains that are left open.

        Raises:
            LedgerError: a journal is kept, and what was begun with is not closed although nothing is open.
        """
        crew = self._of(self._most if self._fixed else group_count(task.domains, self._size, self._most), progress)
        found, pool, going = Found(Search(), Tensor()), None, True
        try:
            while going:
                space = task.space(crew.engine)
                pool, first = self._moved(pool, crew, space), pool is None
                if not first and not crew.group.number and len(pool) != found.search.open:
                    raise ParverifyError(f"{found.search.open} domains were open, and {len(pool)} are gathered")
                enough = _Enough(self._most, None if task.pause is None else task.pause(crew.engine))
                stretch = crew.search(
                    space,
                    task.start(space) if first else None,
                    pool=pool,
                    batch=task.batch(crew),
                    progress=progress,
                    pause=enough if crew.group.count < self._most else enough.inner,
                    state=state,
                )
                found = Found(
                    stretch.search if first else stretch.search.after(found.search),
                    stretch.parts,
                    found.missing + stretch.missing,
                )
                going = stretch.search.witness is None and crew.group.count < self._most
                going = going and from_rank(crew.world.comm, 0, enough.reached)
                if going:
                    crew.gather(pool, space)
                    crew = self._of(self._most, progress)
        finally:
            if pool is not None:
                pool.close()
        if found.search.finished and not found.search.unresolved:
            settle([found.missing])
        return found.search, found.parts

    @property
    def _size(self) -> int:
        return self._made[1].world.size

    def _of(self, count: int, progress: Progress) -> Crew:
        """The crew of so many groups."""
        if count not in self._made and self._divide is not None:
            self._made[count] = self._divide(count)
            progress.log(f"{count} groups of ranks are formed")
        return self._made[count]

    @staticmethod
    def _moved(pool: Pool | None, crew: Crew, space: Space) -> Pool:
        """A pool for a crew, with what group 0 goes on with."""
        moved = Pool(memory=crew.engine.budget.pool, pad=space.pad)
        while pool is not None and len(pool):
            domains = pool.pop(1024)
            if not crew.group.number:
                moved.push(space.adopt(domains))
        if pool is not None:
            pool.close()
        return moved


class _Enough:
    """Says when a search has open domains enough for more groups; or asks another one whether to stop."""

    def __init__(self, domains: int, inner: Pause | None) -> None:
        self._domains, self.inner = domains, inner
        self.reached = False

    def __call__(self, state: Search) -> bool:
        if self.inner is not None and self.inner(state):
            return True
        self.reached = state.open >= self._domains
        return self.reached


def most_groups(engine: Engine, settings: Settings, world: World) -> int:
    """The most equal groups whose weights leave half of each rank's memory, or of this machine's, for all else.

    All ranks call this; the machine is that of rank 0.
    """
    whole, size = engine.network.graph.constant_bytes(), world.size
    counts = [count for count in range(1, size + 1) if size % count == 0]
    if settings.memory is not None:
        fits = [count for count in counts if 2 * whole * count <= settings.memory * size]
    elif settings.device == "cpu":
        free = from_first(world.comm, free_memory)
        fits = [count for count in counts if 4 * whole * count <= free]
    else:
        fits = counts
    return max(fits, default=1)
