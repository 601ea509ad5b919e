"""`parverify run MODEL SPEC`: one verdict, on stdout and in the results file, before the timeout.

The run is over a little before the timeout: the engine is told to end `1 s` (at most a tenth of the timeout) early, so
that it can say how far it came, and what has not ended `0.3 s` (at most a twentieth) before the timeout is ended from
outside, so that the answer stands in the file when the clock strikes.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click

from parverify.cli.files import check_files, keep_inputs
from parverify.cli.options import (
    Journaling,
    Name,
    journal_options,
    settings_options,
    take_journal,
    take_settings,
    talk_options,
    timeout_option,
)
from parverify.cli.outcome import EXIT_ERROR, EXIT_MEMORY, Outcome
from parverify.cli.streams import to_stdout
from parverify.cli.supervise import Stop, Worker, private_folder, stop_signals, wait
from parverify.cli.work import Boundary, Request, rank_count, work
from parverify.clock import Clock
from parverify.config import Settings
from parverify.errors import UsageError
from parverify.parallel.place import place, restarts_left
from parverify.results import AtomicFile, ResultsFile, format_witness, to_json

LOST = (EXIT_ERROR, EXIT_MEMORY)  # what ranks end with where one is gone; another try may do better
_SHOW_CURSOR = "\r\x1b[K\x1b[?25h"


def engine_timeout(timeout: float) -> float:
    """When the engine's clock ends, in seconds after the start."""
    return timeout - min(1.0, 0.1 * timeout) if math.isfinite(timeout) else timeout


def hard_timeout(timeout: float) -> float:
    """When the run is ended from outside, in seconds after the start."""
    return timeout - min(0.3, 0.05 * timeout) if math.isfinite(timeout) else timeout


def lag() -> float:
    """Seconds by which a rank under torchrun that writes nothing outlives the one that has to say `timeout`."""
    return 2.0 if _rank() else 0.0


@dataclass(frozen=True)
class Task:
    """The arguments of one run.

    Args:
        model, spec: the files as given.
        timeout: seconds after `started`; may be infinite.
        started: `time.monotonic()` at the start of the process.
        in_process: don't fork.
        verbose, quiet: how much to say.
        rank: which of several ranks this process is; only rank 0 writes, and prints the verdict.
        journaling: whether a journal is kept, and what for.
    """

    model: str
    spec: str
    timeout: float
    started: float
    in_process: bool = False
    verbose: bool = False
    quiet: bool = False
    rank: int = 0
    journaling: Journaling = field(default_factory=Journaling)


@click.command(short_help="Verify one property of one network, or a list of them.")
@click.argument("model", required=False)
@click.argument("spec", required=False)
@timeout_option
@click.option("--results-file", metavar="FILE", help="Where the verdict and the witness go, in the form of VNN-COMP.")
@click.option("--json", "json_file", metavar="FILE", help="Where verdict, reason, seconds, witness and figures go.")
@click.option(
    "--list", "list_file", type=Name(), metavar="CSV", help="Instead of MODEL and SPEC: lines onnx,vnnlib,timeout."
)
@click.option(
    "--results-dir", type=Name(), metavar="DIR", help="Where the answers to --list go; what is there is not run again."
)
@click.option("--redo", is_flag=True, help="With --list: run again what has an answer.")
@journal_options
@settings_options()
@click.option("--exit-zero", is_flag=True, help="Exit with 0 whatever the verdict, as VNN-COMP wants.")
@click.option("--in-process", is_flag=True, help="Do not fork; for debuggers. Only the engine keeps the time then.")
@talk_options
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Verify that no input of SPEC (VNN-LIB) leads MODEL (ONNX) into the unsafe region.

    \b
    stdout is one word, for `sat` followed by the witness:
      sat      an unsafe input was found, and onnxruntime confirms it
      unsat    there is none
      unknown  neither was shown
      timeout  the clock ran out
      error    the run failed; stderr says why

    Exit codes: 0 sat or unsat, 2 usage, 11 unknown, 12 timeout, 20 error, 21 network, 22 unsupported operator,
    23 property, 24 memory.
    """
    zero = options.pop("exit_zero")
    if options["list_file"] is not None and any(options[name] for name in ("journal", "resume", "restarts")):
        raise UsageError("--journal, --resume and --restarts go with one instance", "a list goes on by its answers")
    journaling = take_journal(options)
    if _is_list(options):
        code = _run_list(options)
        ctx.exit(0 if zero else code)
    task = Task(
        model=options.pop("model"),
        spec=options.pop("spec"),
        timeout=options.pop("timeout") or math.inf,
        started=ctx.obj.started if ctx.obj is not None else time.monotonic(),
        in_process=options.pop("in_process") or not hasattr(os, "fork"),
        verbose=options.pop("verbose"),
        quiet=options.pop("quiet"),
        rank=_rank(),
        journaling=journaling,
    )
    code = run(task, options)
    ctx.exit(0 if zero else code)


def _is_list(options: dict[str, Any]) -> bool:
    """Whether a list is given instead of one instance; the options that only go with a list are gone otherwise.

    Raises:
        UsageError: options that exclude each other, or a missing one.
    """
    if options["list_file"] is not None:
        for name in ("model", "spec", "results_file", "json_file"):
            if options.pop(name) is not None:
                raise UsageError("--list stands instead of MODEL, SPEC, --results-file and --json", "see --results-dir")
        if options["results_dir"] is None:
            raise UsageError("--list needs --results-dir", "name a folder for the answers")
        return True
    for name in ("model", "spec"):
        if options[name] is None:
            raise UsageError(f"Missing argument '{name.upper()}'", "see 'parverify run --help'")
    if options.pop("results_dir") is not None or options.pop("redo"):
        raise UsageError("--results-dir and --redo go with --list", "give --results-file or --json for one instance")
    del options["list_file"]
    return False


def _run_list(options: dict[str, Any]) -> int:
    from parverify.cli.stream import ListTask, stream

    task = ListTask(
        Path(options.pop("list_file")),
        Path(options.pop("results_dir")),
        timeout=options.pop("timeout"),
        redo=options.pop("redo"),
        in_process=options.pop("in_process") or not hasattr(os, "fork"),
        verbose=options.pop("verbose"),
        quiet=options.pop("quiet"),
    )
    return stream(task, take_settings(options))


def _rank() -> int:
    here = place()
    return 0 if here is None else here.rank


def run(task: Task, options: dict[str, Any]) -> int:
    """Seed the files, verify, write the answer.

    Args:
        task: what to do.
        options: `results_file`, `json_file`, and those of `settings_options`.

    Returns:
        The exit code.

    Raises:
        UsageError: if a file can't be written or is an input, before any work.
    """
    report_path, results_path = options.pop("json_file"), options.pop("results_file")
    outputs = {"--results-file": results_path, "--json": report_path}
    keep_inputs((task.model, task.spec, options.get("config")), outputs)
    report = Report(task, report_path if task.rank == 0 else None)
    results = ResultsFile(results_path if task.rank == 0 else None)
    with contextlib.ExitStack() as afterwards:  # the worker is put away once the answer stands in the file
        stop = None if task.in_process else afterwards.enter_context(stop_signals())
        settings = None
        with Boundary(verbose=task.verbose) as boundary:
            settings = take_settings(options)
            rank_count(settings)
            check_files(task.model, task.spec)
        outcome = boundary.outcome or _decide(_request(task, settings, afterwards), task, stop, afterwards)
        return _answer(outcome, results, report, settings, task)


def _request(task: Task, settings: Settings | None, afterwards: contextlib.ExitStack) -> Request:
    settings = settings or Settings()
    clock = Clock(engine_timeout(task.timeout), task.started)
    several = rank_count(settings) > 1 or task.journaling.restarts
    folder = afterwards.enter_context(private_folder()) if several else ""
    return Request(
        task.model, task.spec, settings, clock, verbose=task.verbose, quiet=task.quiet, folder=folder,
        keep=task.journaling.keep, restarts=task.journaling.restarts,
    )  # fmt: skip


def _decide(request: Request, task: Task, stop: Stop | None, afterwards: contextlib.ExitStack) -> Outcome:
    """Verify here, or in a worker that is watched."""
    if stop is None:
        return work(request)
    worker = Worker(request)
    afterwards.callback(worker.end)
    outcome = wait(worker, stop, deadline=task.started + hard_timeout(task.timeout) + lag())
    if not task.quiet and sys.stderr.isatty():
        click.echo(_SHOW_CURSOR, nl=False, err=True)  # a worker that was cut off leaves its live line
    return outcome


def _answer(outcome: Outcome, results: ResultsFile, report: Report, settings: Settings | None, task: Task) -> int:
    """Write the outcome to the results file, to stdout, to the JSON file, in this order; the exit code."""
    witness = ""
    with Boundary(verbose=task.verbose) as formatting:
        witness = format_witness(outcome.x, outcome.y) if outcome.verdict == "sat" else ""
    outcome = formatting.outcome or outcome
    if task.rank or (task.journaling.keep is not None and restarts_left() and outcome.exit_code in LOST):
        return _end_quietly(outcome, task)
    with Boundary(verbose=task.verbose) as writing:
        results.finish(outcome.verdict, witness)
    with Boundary(verbose=task.verbose) as saying, to_stdout():
        click.echo(f"{outcome.verdict}\n{witness}" if witness else outcome.verdict)
    with Boundary(verbose=task.verbose) as reporting:
        report.write(outcome, settings)
    failures = [boundary.outcome for boundary in (writing, saying, reporting) if boundary.outcome is not None]
    _talk([outcome, *failures], quiet=task.quiet)
    if not failures and restarts_left() and outcome.verdict in ("unknown", "timeout"):
        return 0  # torchrun would start all ranks again, for the same answer
    return failures[0].exit_code if failures else outcome.exit_code


def _end_quietly(outcome: Outcome, task: Task) -> int:
    """A rank that only took part says nothing but errors, and fails only then: torchrun ends all ranks for one."""
    if outcome.verdict != "error":
        return 0
    with contextlib.suppress(OSError):
        click.echo(f"error: rank {task.rank}: {outcome.reason}", err=True)
    return outcome.exit_code


def _talk(outcomes: list[Outcome], *, quiet: bool) -> None:
    for outcome in outcomes:
        if outcome.reason and (outcome.verdict == "error" or not quiet):
            with contextlib.suppress(OSError):
                click.echo(f"{outcome.verdict}: {outcome.reason}", err=True)


class Report:
    """The JSON file of a run; says `unknown` until the run has ended.

    Args:
        task: what the run does.
        path: the file, or None for no report.

    Raises:
        UsageError: if nothing can be written there.
    """

    def __init__(self, task: Task, path: str | None) -> None:
        if path == "-":
            raise UsageError("--json: stdout holds the verdict and nothing else", "name a file")
        self._task = task
        self._file = None if path is None else AtomicFile(path, option="--json")
        self.write(Outcome.unknown("the run has not ended"), None)

    def write(self, outcome: Outcome, settings: Settings | None) -> None:
        """Replace the content by the outcome."""
        if self._file is None:
            return
        content = {
            "verdict": outcome.verdict,
            "reason": outcome.reason,
            "seconds": round(time.monotonic() - self._task.started, 3),
            "witness": {"x": outcome.x, "y": outcome.y} if outcome.verdict == "sat" else None,
            "stats": outcome.stats,
            "settings": None if settings is None else asdict(settings),
            "model": self._task.model,
            "spec": self._task.spec,
            "timeout": self._task.timeout if math.isfinite(self._task.timeout) else None,
            "exit_code": outcome.exit_code,
        }
        self._file.write(to_json(content))
