"""`parverify bench DIR --out OUT`: every instance of a VNN-COMP folder, each in a process of its own, resumable.

Nothing is set per benchmark: every instance runs `parverify run` with the same options. OUT holds for each instance
`results/NAME.txt`, `logs/NAME.log`, `json/NAME.json` and `records/NAME.json`, and `results.csv` over all.
"""

from __future__ import annotations

import contextlib
import csv
import ctypes
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from parverify.cli.instances import Instance, Record, locate, read_instances, spread
from parverify.cli.options import Name, Seconds, take_settings
from parverify.cli.outcome import INTERRUPTED
from parverify.cli.streams import to_stdout
from parverify.errors import ParverifyError, UsageError, why
from parverify.results import AtomicFile, read_verdict

LAUNCHER = (sys.executable, "-m", "parverify")
_GRACE = 5.0
_POLL = 0.02
# Options of `run` that each instance is given here, or that would be the same file for all.
_OURS = {
    "timeout": "--timeout", "results_file": "--results-file", "json_file": "--json", "list_file": "--list",
    "results_dir": "--results-dir", "redo": "--redo", "journal": "--journal", "resume": "--resume",
    "restarts": "--restarts",
}  # fmt: skip
_PR_SET_PDEATHSIG = 1


@click.command(short_help="Run a VNN-COMP benchmark folder.")
@click.argument("folder", type=Name(), metavar="DIR")
@click.argument("run_options", nargs=-1, type=click.UNPROCESSED, metavar="[-- RUN_OPTIONS]")
@click.option(
    "--out", type=Name(), required=True, metavar="DIR", help="Where everything goes; run again with it to resume."
)
@click.option("--timeout", type=Seconds(), help="Instead of each instance's own.")
@click.option("--timeout-scale", type=Seconds(), metavar="FACTOR", help="Multiplies each instance's own timeout.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Only N instances, evenly spread.")
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Processes at once.")
@click.option("-q", "--quiet", is_flag=True, help="No line per instance.")
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Run every instance of instances.csv in DIR; what has ended in an earlier run with the same --out is kept.

    What stands behind `--` is given to each `parverify run`. The exit code is 0 once every instance has an answer,
    even `error`; 11 if interrupted.
    """
    if options["timeout"] and options["timeout_scale"]:
        raise UsageError("--timeout and --timeout-scale exclude each other", "give one of them")
    folder, run_options = Path(options["folder"]), list(options["run_options"])
    _check_run_options(run_options)
    instances = [
        replace(item, timeout=options["timeout"] or item.timeout * (options["timeout_scale"] or 1.0))
        for item in spread(read_instances(folder), options["limit"])
    ]
    bench = Bench(folder, Path(options["out"]), run_options, quiet=options["quiet"])
    finished = bench.run(instances, jobs=options["jobs"])
    bench.write_table(instances)
    bench.print_summary(instances)
    ctx.exit(0 if finished else 11)


def _check_run_options(options: list[str]) -> None:
    """Raise at once what each `parverify run` would refuse (an option, a setting, a file), or what is set here."""
    from parverify.cli.run import command as run

    context = run.make_context("parverify run", [*options, "--", "MODEL", "SPEC"])
    for name, flag in _OURS.items():
        if context.params[name]:
            raise UsageError(
                f"{flag} behind `--`: not for a whole folder", "see 'parverify bench --help' for its options"
            )
    take_settings(dict(context.params))


@dataclass
class Running:
    """A process under way."""

    instance: Instance
    process: subprocess.Popen[bytes]
    started: float

    @property
    def overdue(self) -> bool:
        """Whether it should have ended itself long ago."""
        return time.monotonic() - self.started > self.instance.timeout + _GRACE


class Bench:
    """Runs instances of a folder into an output folder.

    Args:
        folder: where the instances' paths start.
        out: the output folder, made where it is missing.
        options: for each `parverify run`.
        quiet: no line per instance.

    Raises:
        UsageError: if the output folder can't be made, or another run uses it.
    """

    def __init__(self, folder: Path, out: Path, options: Sequence[str], *, quiet: bool = False) -> None:
        self._folder, self._out, self._options, self._quiet = folder.resolve(), out.resolve(), list(options), quiet
        self._stopped = False
        try:
            for part in ("results", "logs", "json", "records"):
                (self._out / part).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--out: can't make {out}: {why(error)}", "name a folder where you may write") from error

    def run(self, instances: Sequence[Instance], *, jobs: int = 1) -> bool:
        """Run what has no record yet; whether all have one now.

        Args:
            instances: in the order in which they are started.
            jobs: most processes at once.
        """
        waiting = [item for item in instances if self.record(item) is None]
        self._say(f"{len(instances)} instances, {len(instances) - len(waiting)} already done")
        running: list[Running] = []
        with self._locked(), self._stoppable():
            try:
                while (waiting and not self._stopped) or running:
                    while waiting and not self._stopped and len(running) < jobs:
                        running.append(self._start(waiting.pop(0)))
                    running = [item for item in running if not self._ended(item)]
                    if self._stopped:
                        break
                    time.sleep(_POLL)
            finally:
                _terminate(running)
        return all(self.record(item) is not None for item in instances)

    def record(self, instance: Instance) -> Record | None:
        """The instance's record, if it was run in the same way."""
        record = Record.load(self._path("records", instance, ".json"))
        return record if record is not None and record.answers(instance, self._options) else None

    def _path(self, part: str, instance: Instance, ending: str) -> Path:
        return self._out / part / (instance.name + ending)

    def _start(self, instance: Instance) -> Running:
        command = [*LAUNCHER, "run", *self._options, "--timeout", repr(instance.timeout)]
        command += ["--results-file", str(self._path("results", instance, ".txt"))]
        command += ["--json", str(self._path("json", instance, ".json"))]
        command += ["--", locate(self._folder, instance.onnx), locate(self._folder, instance.vnnlib)]
        package_root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
        with contextlib.suppress(FileNotFoundError):  # an answer of an earlier run must not pass for this one's
            self._path("results", instance, ".txt").unlink()
        with open(self._path("logs", instance, ".log"), "wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONPATH": path},
                preexec_fn=_end_with_parent(),
            )
        return Running(instance, process, time.monotonic())

    def _ended(self, running: Running) -> bool:
        """Whether the process is gone; if it ended by itself, its record is written."""
        code = running.process.poll()
        overdue = code is None and running.overdue
        if code is None and not overdue:
            return False
        if overdue:
            running.process.kill()
            code = running.process.wait()
        instance = running.instance
        killed = code is not None and code < 0 and not overdue
        if killed or (code and was_interrupted(self._path("json", instance, ".json"))):
            return True  # without a record: its `unknown` is no answer
        verdict = "timeout" if overdue else read_verdict(self._path("results", instance, ".txt"))
        seconds = round(time.monotonic() - running.started, 3)
        record = Record(
            instance.onnx, instance.vnnlib, instance.timeout, self._options, verdict, seconds, code if code else 0
        )
        record.save(self._path("records", instance, ".json"))
        self._say(f"{verdict:8} {seconds:8.2f} s  {instance.name}")
        return True

    def write_table(self, instances: Sequence[Instance]) -> None:
        """results.csv: one row an instance that has ended."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["onnx", "vnnlib", "timeout", "verdict", "seconds", "exit_code"])
        for record in self._records(instances):
            writer.writerow(
                [record.onnx, record.vnnlib, record.timeout, record.verdict, record.seconds, record.exit_code]
            )
        AtomicFile(self._out / "results.csv", option="--out").write(text.getvalue())

    def print_summary(self, instances: Sequence[Instance]) -> None:
        """A table of verdicts and times on stdout."""
        from rich.console import Console
        from rich.table import Table

        records = self._records(instances)
        counts = Counter(record.verdict for record in records)
        table = Table("verdict", "instances", "median s", "total s", title=str(self._folder.name))
        for verdict in sorted(counts):
            seconds = sorted(record.seconds for record in records if record.verdict == verdict)
            table.add_row(verdict, str(len(seconds)), f"{seconds[len(seconds) // 2]:.2f}", f"{sum(seconds):.1f}")
        total = sum(record.seconds for record in records)
        table.add_row("all", f"{len(records)} of {len(instances)}", "", f"{total:.1f}")
        with to_stdout():
            Console(file=sys.stdout).print(table)

    def _records(self, instances: Sequence[Instance]) -> list[Record]:
        return [record for record in map(self.record, instances) if record is not None]

    def _say(self, line: str) -> None:
        if not self._quiet:
            click.echo(line, err=True)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep a second run out of the output folder for as long as this one lives."""
        import fcntl

        with open(self._out / ".lock", "w", encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise UsageError(f"another run is using {self._out}", "wait for it, or name another --out") from error
            yield

    @contextlib.contextmanager
    def _stoppable(self) -> Iterator[None]:
        """SIGTERM and SIGINT stop the run instead of ending it."""

        def stop(number: int, frame: Any) -> None:
            self._stopped = True

        previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def was_interrupted(report: Path) -> bool:
    """Whether the JSON file of a run says that a signal ended it."""
    try:
        reason = json.loads(report.read_text(encoding="utf-8"))["reason"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return str(reason).startswith(INTERRUPTED)


def _terminate(running: Sequence[Running]) -> None:
    """End processes that are still there: ask, wait for 3 s, kill."""
    for item in running:
        item.process.terminate()
    until = time.monotonic() + 3.0
    for item in running:
        try:
            item.process.wait(max(until - time.monotonic(), 0.01))
        except subprocess.TimeoutExpired:
            item.process.kill()
            item.process.wait()


def _end_with_parent() -> Callable[[], None] | None:
    """What makes a child end when this process is killed outright; None where the system has no such thing."""
    if sys.platform != "linux":
        return None
    library, parent = ctypes.CDLL(None), os.getpid()

    def arrange() -> None:
        library.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            raise ParverifyError("the benchmark run is gone")

    return arrange
