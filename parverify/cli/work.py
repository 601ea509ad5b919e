"""What the working process does: call the engine, and turn whatever comes of it into an outcome."""

from __future__ import annotations

import dataclasses
import sys
import traceback
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from parverify.cli.outcome import Outcome
from parverify.clock import Clock
from parverify.config import Settings
from parverify.errors import ParverifyError, UsageError


@dataclass(frozen=True)
class Request:
    """One run.

    Args:
        model, spec: the two files as given.
        settings: all of them.
        clock: the engine's deadline.
        verbose, quiet: how much to say on stderr.
    """

    model: str
    spec: str
    settings: Settings
    clock: Clock
    verbose: bool = False
    quiet: bool = False


class Boundary:
    """Turns any exception raised inside it into `outcome`, and keeps it as `error`; the one place that stops them all.

    Nothing may leave the process without a verdict in the results file, so this catches by being a context manager
    what no `except` clause should: also `SystemExit` from a library, which would else end the process as a success.

    Args:
        verbose: print the traceback.
    """

    def __init__(self, *, verbose: bool) -> None:
        self.outcome: Outcome | None = None
        self.error: BaseException | None = None
        self._verbose = verbose

    def __enter__(self) -> Boundary:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None:
            return False
        self.error, self.outcome = error, Outcome.of(error)
        if self._verbose:
            traceback.print_exception(kind, error, trace, file=sys.stderr)
        return True


def work(request: Request) -> Outcome:
    """Verify, and say how it ended. Raises nothing."""
    outcome = Outcome.error("the engine returned nothing")
    with Boundary(verbose=request.verbose) as boundary:
        outcome = _verify(request)
    return boundary.outcome or outcome


def _verify(request: Request) -> Outcome:
    from parverify.progress import make_progress

    progress = make_progress(verbose=request.verbose, quiet=request.quiet)
    try:
        progress.phase("loading torch")
        from parverify.api import verify

        check_device(request.settings.device)
        result = verify(request.model, request.spec, settings=request.settings, clock=request.clock, progress=progress)
    finally:
        progress.close()
    return _outcome(result)


def check_device(device: str) -> None:
    """Raise `UsageError` if this machine lacks the device. Loads torch unless it is the CPU.

    Args:
        device: `cpu` or `cuda`.
    """
    if device == "cpu":
        return
    import torch

    if not torch.cuda.is_available():
        raise UsageError(f"device: {device} is not available on this machine", "use --device cpu")


def _outcome(result: Any) -> Outcome:
    """The engine's result, checked to be closed: a witness exactly with `sat`, a reason with the undecided words."""
    from parverify.verdict import Result, Verdict

    if not isinstance(result, Result) or not isinstance(result.verdict, Verdict):
        raise ParverifyError(f"the engine returned {type(result).__name__}, not a result")
    word = result.verdict.value
    if (result.verdict is Verdict.SAT) != (result.witness is not None):
        raise ParverifyError(f"the engine returned {word} {'without' if result.witness is None else 'with'} a witness")
    outcome = Outcome(
        word, result.verdict.exit_code, result.reason or ("" if word in ("sat", "unsat") else "no reason given")
    )
    if result.witness is not None:
        x, y = ([float(value) for value in part.ravel()] for part in (result.witness.x, result.witness.y))
        outcome = dataclasses.replace(outcome, x=x, y=y)
    return dataclasses.replace(outcome, stats=result.stats)
