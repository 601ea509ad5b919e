"""A function on several gloo ranks, forked from the test's own process: a tenth of a second a call."""

from __future__ import annotations

import pickle
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from parverify.cli.outcome import Outcome
from parverify.parallel.launch import launch
from parverify.parallel.world import World


def outcome_of(size: int, function: Callable[[World], Outcome], **options: Any) -> Outcome:
    """The outcome of a job."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on: forks from a process with threads
        return launch(size, function, folder=folder, **options)


def on_ranks(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `function(world, *arguments)` returns on each rank.

    Raises:
        AssertionError: if it raised on a rank.
    """
    with tempfile.TemporaryDirectory() as folder:

        def job(world: World) -> Outcome:
            value = function(world, *arguments)
            Path(folder, str(world.rank)).write_bytes(pickle.dumps(value))
            return Outcome("unsat")

        outcome = outcome_of(size, job)
        assert outcome.verdict == "unsat", outcome.reason
        return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(size)]
