"""A run in two stages, so that others may happen in between: everything before branch and bound, and branch and bound.

Here it is decided in which floating-point type: float64 from the start where the property's coefficients are no float32
numbers, and once more in float64 where a search in float32 does not decide.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np

from parverify.frontend.query import Query
from parverify.ops.rounding import ULPS, allowance
from parverify.verdict import Result, Verdict
from parverify.verifier import Run, Verifier


class Stages:
    """One run.

    Args:
        run: what is asked, and how; some disjunct's box is not empty.
    """

    def __init__(self, run: Run) -> None:
        if run.settings.dtype == "float32" and not _representable(run.query):
            run.progress.log("the property's coefficients are no float32 numbers: bounding in float64")
            run = replace(run, settings=replace(run.settings, dtype="float64"))
        self._run = run
        with self._allowance():
            self._first = Verifier(run)

    def until_search(self) -> Result | None:
        """The verdict, or None where branch and bound is needed."""
        with self._allowance():
            return self._first.until_search()

    def search(self) -> Result:
        """Branch and bound, after `until_search`; in float64 after float32 did not decide."""
        with self._allowance():
            result = self._first.search()
            settings = self._run.settings
            if result.verdict is not Verdict.UNKNOWN or settings.dtype != "float32":
                return result
            self._run.progress.log(f"float32 does not decide ({result.reason}): once more in float64")
            first = dict(result.stats)
            result = Verifier(replace(self._run, settings=replace(settings, dtype="float64"))).run()
            return replace(result, stats={**result.stats, "float32": first})

    def run(self) -> Result:
        """Both stages."""
        early = self.until_search()
        return self.search() if early is None else early

    def _allowance(self) -> contextlib.AbstractContextManager[None]:
        return allowance(max(ULPS, self._run.settings.bounds.allowance))


def _representable(query: Query) -> bool:
    """Whether all coefficients on outputs and inputs are float32 numbers."""
    tables = (table for part in query for table in (part.C_y, part.C_x) if table is not None)
    return all(bool((table.astype(np.float32) == table).all()) for table in tables)
