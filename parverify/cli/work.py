"""What the working process does: call the engine, on one rank or several, and turn what comes of it into an outcome.

With several ranks this process starts them and waits; each of them performs the request with its world. Under torchrun
this process is one of the ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import sys
import time
import traceback
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import click

from parverify.bab.identity import Keep
from parverify.cli.outcome import Outcome
from parverify.clock import Clock
from parverify.config import Settings
from parverify.errors import LostRankError, ParverifyError, UsageError
from parverify.parallel.place import Place, place, restarts_done
from parverify.results import jsonable

if TYPE_CHECKING:
    from parverify.flow.entries import Batch
    from parverify.parallel.world import World

DONE = "done"  # the verdict of a request that asks for none
# A rank under torchrun that is out of time, or that lost another, ends after the one that has to say so.
_PATIENCE = 2.0


@dataclass(frozen=True)
class Request:
    """One run.

    Args:
        model, spec: the two files as given.
        settings: all of them.
        clock: the engine's deadline.
        verbose, quiet: how much to say on stderr.
        folder: a private folder through which several ranks meet; needed with more than one.
        bounds: ask for bounds instead of a verdict; the outcome is `done`, the report a JSON text in its figures.
        keep: the journal; None for none.
        restarts: how often ranks are started again where one is lost, to go on from the journal.
        batch: a list of instances instead of one; the outcome is `done`, each instance's answer in a file.
    """

    model: str
    spec: str
    settings: Settings
    clock: Clock
    verbose: bool = False
    quiet: bool = False
    folder: str = ""
    bounds: bool = False
    keep: Keep | None = None
    restarts: int = 0

    def once_more(self) -> Request:
        """The same after ranks were lost."""
        keep = self.keep and dataclasses.replace(self.keep, again=True)
        return dataclasses.replace(self, keep=keep)

    batch: Batch | None = None


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


def rank_count(settings: Settings) -> int:
    """How many ranks the settings and the environment ask for.

    Raises:
        UsageError: if torchrun has started some, and the settings want others.
    """
    wanted = settings.parallel.nproc
    here = place()
    if here is not None and wanted not in (1, here.size):
        raise UsageError(f"--nproc {wanted}, but torchrun has started {here.size} ranks", "leave --nproc away")
    return wanted if here is None else here.size


def work(request: Request) -> Outcome:
    """Perform the request, and say how it ended. Raises nothing."""
    outcome = Outcome.error("the engine returned nothing")
    with Boundary(verbose=request.verbose) as boundary:
        here = place()
        if here is not None:
            return _take_part(request, here)
        here_alone = rank_count(request.settings) == 1 and not request.restarts
        outcome = perform(request) if here_alone else _launch(request)
    return boundary.outcome or outcome


def _launch(request: Request) -> Outcome:
    """Perform the request on several ranks of this machine."""
    device = request.settings.device
    check_device(device)  # ranks that have none would each say so
    if device == "cpu":
        import parverify.api  # noqa: F401  (ranks are forked from here: loaded once for all)
        from parverify.loading import warm_up

        warm_up()
    from parverify.parallel.launch import Retry, launch

    def say(line: str) -> None:
        with contextlib.suppress(OSError):
            click.echo(line, err=True)

    job, nproc = functools.partial(perform, request), request.settings.parallel.nproc
    retry = Retry(request.restarts, functools.partial(perform, request.once_more()), say)
    return launch(nproc, job, folder=request.folder, device=device, verbose=request.verbose, retry=retry)


def _take_part(request: Request, here: Place) -> Outcome:
    """Perform the request as one of the ranks that torchrun has started."""
    outcome = Outcome.error("the engine returned nothing")
    with Boundary(verbose=request.verbose) as boundary:
        from parverify.parallel.world import join

        world = join(request.settings.device)
        if _started_before(world):
            request = request.once_more()
        outcome = perform(dataclasses.replace(request, folder=""), world)  # each rank's folder is its own
        if outcome.verdict not in ("error", "timeout"):
            _check_agreed(world, outcome.verdict)
            world.comm.barrier()  # a rank that leaves would break what others still send
    outcome = boundary.outcome or outcome
    if here.rank and (outcome.verdict == "timeout" or isinstance(boundary.error, LostRankError)):
        time.sleep(_PATIENCE)
    return outcome


def _started_before(world: World) -> bool:
    """Whether torchrun has started these ranks before; it counts by machine."""
    from parverify.parallel.shared import from_rank

    everyone = [from_rank(world.comm, rank, restarts_done()) for rank in range(world.size)]
    return any(everyone)


def _check_agreed(world: World, verdict: str) -> None:
    """Raise `ParverifyError` unless every rank came to this verdict; our launcher sees to it by itself."""
    from parverify.parallel.shared import from_rank

    said = [from_rank(world.comm, rank, verdict) for rank in range(world.size)]  # all of them, before any rank leaves
    if len(set(said)) > 1:
        raise ParverifyError(f"ranks disagree: they say {', '.join(said)}")


def perform(request: Request, world: World | None = None) -> Outcome:
    """Call the engine on this rank.

    Args:
        request: the same on every rank.
        world: all ranks; None for one.
    """
    if request.batch is not None:
        return _stream(request, request.batch, world)
    options = {} if world is None or world.size == 1 else {"world": world}
    first = world is None or world.rank == 0
    return _bound(request, first, options) if request.bounds else _verify(request, first, options)


def _bound(request: Request, first: bool, options: dict[str, Any]) -> Outcome:
    from parverify.api import bounds_report

    check_device(request.settings.device)
    report = bounds_report(request.model, request.spec, settings=request.settings, clock=request.clock, **options)
    return Outcome(DONE, stats={"report": json.dumps(report, default=jsonable)} if first else {})


def _stream(request: Request, batch: Batch, world: World | None) -> Outcome:
    from parverify.flow.rank import work_on_list
    from parverify.parallel.world import alone
    from parverify.progress import LineProgress, NullProgress

    def say(line: str) -> None:
        if not request.quiet:
            with contextlib.suppress(OSError):  # a closed stderr is no reason to lose a verdict
                click.echo(line, err=True)

    check_device(request.settings.device)
    progress = LineProgress(verbose=True) if request.verbose else NullProgress()
    return work_on_list(
        batch, request.settings, world or alone(), progress=progress, say=say, folder=request.folder,
        verbose=request.verbose,
    )  # fmt: skip


def _verify(request: Request, first: bool, options: dict[str, Any]) -> Outcome:
    from parverify.progress import make_progress

    progress = make_progress(verbose=request.verbose, quiet=request.quiet or not first)
    try:
        progress.phase("loading torch")
        from parverify.api import verify

        check_device(request.settings.device)
        if request.keep is not None:
            options = options | {"journal": request.keep}
        result = verify(
            request.model, request.spec, settings=request.settings, clock=request.clock, progress=progress, **options
        )
    finally:
        progress.close()
    return outcome_of(result, first=first)


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


def outcome_of(result: Any, *, first: bool) -> Outcome:
    """The engine's result, checked to be closed: a witness exactly with `sat`, a reason with the undecided words.

    Only the first rank has the original network, and with it the witness.
    """
    from parverify.verdict import Result, Verdict

    if not isinstance(result, Result) or not isinstance(result.verdict, Verdict):
        raise ParverifyError(f"the engine returned {type(result).__name__}, not a result")
    word = result.verdict.value
    if first and (result.verdict is Verdict.SAT) != (result.witness is not None):
        raise ParverifyError(f"the engine returned {word} {'without' if result.witness is None else 'with'} a witness")
    outcome = Outcome(
        word, result.verdict.exit_code, result.reason or ("" if word in ("sat", "unsat") else "no reason given")
    )
    if result.witness is not None:
        x, y = ([float(value) for value in part.ravel()] for part in (result.witness.x, result.witness.y))
        outcome = dataclasses.replace(outcome, x=x, y=y)
    return dataclasses.replace(outcome, stats=result.stats)
