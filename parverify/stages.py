"""A run in two stages, so that others may happen in between: everything before branch and bound, and branch and bound.

Here it is decided in which floating-point type: float64 from the start where the property's coefficients are no float32
numbers, and once more in float64 where a search in float32 does not decide.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from parverify.bab.books import Books
from parverify.bab.crew import Crew
from parverify.clock import Clock
from parverify.config import Settings
from parverify.engine import Engine, Subject
from parverify.frontend.query import Query
from parverify.ops.rounding import ULPS, allowance
from parverify.parallel.world import World
from parverify.progress import Progress
from parverify.verdict import Result, Verdict
from parverify.verifier import Verifier


class Stages:
    """One run.

    Args:
        subject, query: what is asked; some disjunct's box is not empty.
        settings: how.
        clock: the deadline.
        progress: who is told.
        world: the ranks that work on it together; None for one.
        books: the run's journal; None for none.
        make_crew: gives the groups that search, see `Verifier`.
    """

    def __init__(
        self,
        subject: Subject,
        query: Query,
        settings: Settings,
        clock: Clock,
        progress: Progress,
        *,
        world: World | None = None,
        books: Books | None = None,
        make_crew: Callable[[Engine], Crew] | None = None,
    ) -> None:
        if settings.dtype == "float32" and not _representable(query):
            progress.log("the property's coefficients are no float32 numbers: bounding in float64")
            settings = replace(settings, dtype="float64")
        self._settings, self._progress = settings, progress

        def verifier(settings: Settings) -> Verifier:
            return Verifier(subject, query, settings, clock, progress, world=world, books=books, make_crew=make_crew)

        self._make = verifier
        with self._allowance():
            self._first = verifier(settings)

    def until_search(self) -> Result | None:
        """The verdict, or None where branch and bound is needed."""
        with self._allowance():
            return self._first.until_search()

    def search(self) -> Result:
        """Branch and bound, after `until_search`; in float64 after float32 did not decide."""
        with self._allowance():
            result = self._first.search()
            if result.verdict is not Verdict.UNKNOWN or self._settings.dtype != "float32":
                return result
            self._progress.log(f"float32 does not decide ({result.reason}): once more in float64")
            first = dict(result.stats)
            result = self._make(replace(self._settings, dtype="float64")).run()
            return replace(result, stats={**result.stats, "float32": first})

    def run(self) -> Result:
        """Both stages."""
        early = self.until_search()
        return self.search() if early is None else early

    def _allowance(self) -> contextlib.AbstractContextManager[None]:
        return allowance(max(ULPS, self._settings.bounds.allowance))


def _representable(query: Query) -> bool:
    """Whether all coefficients on outputs and inputs are float32 numbers."""
    tables = (table for part in query for table in (part.C_y, part.C_x) if table is not None)
    return all(bool((table.astype(np.float32) == table).all()) for table in tables)
