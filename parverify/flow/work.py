"""One instance of a list on its way through the stages, with a clock that only runs while it is worked on."""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from parverify.bab.crew import Crew
from parverify.cli.files import check_files
from parverify.cli.outcome import Outcome
from parverify.cli.work import Boundary, outcome_of
from parverify.clock import Clock, StoppableClock
from parverify.config import Settings
from parverify.engine import Engine, Subject
from parverify.errors import LostRankError
from parverify.flow.entries import Entry
from parverify.frontend.query import Query
from parverify.graph.ir import BoundGraph
from parverify.loading import Loaded, file_subject, load_file
from parverify.progress import Progress
from parverify.stages import Stages
from parverify.verdict import Result, Verdict
from parverify.verifier import Run


class Stopwatch:
    """Adds up the time spent on one instance."""

    def __init__(self) -> None:
        self._spent = 0.0
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """So far."""
        return self._spent + (0.0 if self._since is None else time.monotonic() - self._since)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Count the time within."""
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._spent, self._since = self.seconds, None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Don't count the time within a part of `running`."""
        self._spent, self._since = self.seconds, None
        try:
            yield
        finally:
            self._since = time.monotonic()


@dataclass(frozen=True)
class WorkClock(StoppableClock):
    """A deadline in seconds of work.

    Args:
        stopwatch: of the instance.
    """

    stopwatch: Stopwatch = field(default_factory=Stopwatch)

    @property
    def elapsed(self) -> float:
        """Seconds of work so far."""
        return self.stopwatch.seconds

    def alone(self) -> Clock:
        """Itself: no other rank reads it."""
        return self


class Files:
    """Networks that have been read, the last few of them: instances of a list often share theirs.

    Args:
        most: how many are kept.
    """

    def __init__(self, most: int = 2) -> None:
        self._most = most
        self._loaded: OrderedDict[str, Loaded] = OrderedDict()

    def subject(self, entry: Entry, settings: Settings, clock: Clock, progress: Progress) -> tuple[Subject, Query]:
        """What `parverify.loading.load_subject` gives for the entry's files."""
        check_files(entry.model, entry.spec)
        if entry.model not in self._loaded:
            self._loaded[entry.model] = load_file(entry.model, clock, progress)
        self._loaded.move_to_end(entry.model)
        while len(self._loaded) > self._most:
            self._loaded.popitem(last=False)
        return file_subject(self._loaded[entry.model], entry.spec, clock, progress, settings)


CrewOf = Callable[["Job", Engine], Crew]


class Job:
    """An instance under way on this rank.

    Args:
        entry: which.
        settings: how.
        files: gives the network.
        progress: who is told.
        crew: gives the groups that search it.
        verbose: print tracebacks.

    Attributes:
        graph: the network's, once it is loaded.
        stopwatch: the time spent on it.
    """

    def __init__(
        self, entry: Entry, settings: Settings, files: Files, progress: Progress, *, crew: CrewOf, verbose: bool = False
    ) -> None:
        self.entry, self.settings, self.stopwatch = entry, settings, Stopwatch()
        self._files, self._progress, self._crew, self._verbose = files, progress, crew, verbose
        self._clock = WorkClock(entry.engine_timeout, time.monotonic(), stopwatch=self.stopwatch)
        self._stages: Stages | None = None
        self.graph: BoundGraph | None = None

    def bound(self) -> Outcome | None:
        """Load, attack and bound; the outcome where that decides, None where `search` has to."""
        return self._do(self._bound)

    def search(self) -> Outcome:
        """Branch and bound, after `bound`."""
        stages = self._stages
        outcome = None if stages is None else self._do(stages.search)
        return Outcome.error("the engine returned nothing") if outcome is None else outcome

    def _bound(self) -> Result | None:
        subject, query = self._files.subject(self.entry, self.settings, self._clock, self._progress)
        self.graph = subject.graph
        if not any(not part.empty_box for part in query):
            return Result(Verdict.UNSAT, reason="the unsafe region is empty")
        run = Run(
            subject,
            query,
            self.settings,
            self._clock,
            self._progress,
            make_crew=lambda engine: self._crew(self, engine),
        )
        self._stages = Stages(run)
        return self._stages.until_search()

    def _do(self, stage: Callable[[], Result | None]) -> Outcome | None:
        """Run a stage; whatever it raises is the outcome of this instance alone, unless ranks lost each other."""
        outcome: Outcome | None = None
        with Boundary(verbose=self._verbose) as boundary, self.stopwatch.running():
            result = stage()
            outcome = None if result is None else outcome_of(result, first=True)
        if isinstance(boundary.error, (LostRankError, KeyboardInterrupt)):
            raise boundary.error
        return boundary.outcome or outcome
