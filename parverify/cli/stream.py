"""`parverify run --list FILE --results-dir DIR`: many instances through one worker and its ranks, supervised.

The ranks write each instance's answer as soon as it is there. This process only watches: it ends a worker in which an
instance is long overdue (native code that never returns), and starts another for what is left when one is gone. What
the ranks worked on when a worker crashed is tried again, each alone; an instance that crashes a worker alone is an
`error`. Instances that have an answer are skipped, so a run that was ended goes on where it was.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import select
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from parverify.cli.instances import Instance, locate, read_list
from parverify.cli.outcome import Outcome
from parverify.cli.streams import to_stdout
from parverify.cli.supervise import Stop, Worker, private_folder, stop_signals, stopped
from parverify.cli.work import DONE, Request, rank_count, work
from parverify.clock import Clock
from parverify.config import Settings
from parverify.errors import UsageError
from parverify.flow.entries import GRACE, Answer, Batch, Entry, UnderWay, result_path, under_way
from parverify.parallel.place import place
from parverify.results import AtomicFile, read_verdict, to_json

_TICK = 0.1


@dataclass(frozen=True)
class ListTask:
    """The arguments of one run over a list.

    Args:
        instances: the list's file.
        results: the folder for the answers.
        timeout: instead of each instance's own, or None.
        redo: also instances that have an answer.
        in_process: don't fork.
        verbose, quiet: how much to say.
    """

    instances: Path
    results: Path
    timeout: float | None = None
    redo: bool = False
    in_process: bool = False
    verbose: bool = False
    quiet: bool = False

    def entries(self) -> list[Entry]:
        """The instances.

        Raises:
            UsageError: the list can't be read.
        """
        folder = self.instances.resolve().parent

        def entry(item: Instance) -> Entry:
            files = locate(folder, item.onnx), locate(folder, item.vnnlib)
            return Entry(item.name, *files, self.timeout or item.timeout)

        return [entry(item) for item in read_list(self.instances)]


def stream(task: ListTask, settings: Settings) -> int:
    """Bring every instance of the list to an answer.

    Returns:
        The exit code: 0 once every instance has an answer, 11 if interrupted, that of the failure otherwise.

    Raises:
        UsageError: the list can't be read, the settings don't fit, or nothing can be written to the folder.
    """
    check_settings(settings, rank_count(settings))
    entries, here = task.entries(), place()
    first = here is None or here.rank == 0
    AtomicFile(task.results / "summary.json", option="--results-dir").probe()
    if task.redo and first:
        for entry in entries:
            result_path(task.results, entry).unlink(missing_ok=True)
    run = _Stream(task, settings, first=first)
    todo = [entry for entry in entries if not run.answered(entry)] if not task.redo else entries
    for entry in entries:
        if entry not in todo:
            run.say(f"skipped: {entry.name} has an answer already")
    with contextlib.ExitStack() as afterwards:
        stop = None if task.in_process else afterwards.enter_context(stop_signals())
        outcome = run.bring_to_end(todo, stop)
    if first:
        write_summary(task, entries)
    if outcome.verdict == DONE:
        return 0
    click.echo(f"{outcome.verdict}: {outcome.reason}", err=True)
    return outcome.exit_code


def check_settings(settings: Settings, ranks: int) -> None:
    """Raise `UsageError` where ranks would have to divide a network: on a list each holds all of it."""
    parallel = settings.parallel
    if parallel.strategy not in ("auto", "single"):
        raise UsageError(
            f"--strategy {parallel.strategy}: each rank holds the whole network when it works on a list",
            "leave it away, or run the instances one by one",
        )
    if parallel.groups not in (0, ranks):
        raise UsageError(f"parallel.groups: each of the {ranks} ranks is a group of its own on a list", "leave it away")


class _Stream:
    """Workers, one after the other, until all instances have an answer.

    Args:
        task, settings: of the run.
        first: whether this process speaks.
    """

    def __init__(self, task: ListTask, settings: Settings, *, first: bool) -> None:
        self._task, self._settings, self._first = task, settings, first

    def say(self, line: str) -> None:
        """Tell the user."""
        if self._first and not self._task.quiet:
            click.echo(line, err=True)

    def answered(self, entry: Entry) -> bool:
        """Whether an instance is done."""
        return result_path(self._task.results, entry).exists()

    def bring_to_end(self, entries: Sequence[Entry], stop: Stop | None) -> Outcome:
        """Work on instances until each has an answer; `done`, or why not.

        Args:
            entries: the instances.
            stop: the signals that end the run; None to stay in this process.
        """
        queue = [list(entries)]
        while queue:
            batch = queue.pop(0)
            if not batch:
                continue
            outcome, active, late = self._attempt(batch, stop)
            left = [entry for entry in batch if not self.answered(entry)]
            blamed = [one for one in active if one.name in {entry.name for entry in left}]
            if outcome.verdict == DONE and not left:
                continue
            restarts = stop is not None and not stop.name and place() is None
            if outcome.verdict == DONE or not blamed or not restarts:
                return outcome if outcome.verdict != DONE else Outcome.error(f"{left[0].name} has no answer")
            suspects = [entry for entry in left if entry.name in {one.name for one in blamed}]
            if late or len(suspects) == 1:
                self._blame(suspects, blamed, outcome)
                suspects = []
            else:
                self.say(f"a worker is gone ({outcome.reason}): what it worked on is tried again, each alone")
            others = [entry for entry in left if entry not in suspects and not self.answered(entry)]
            queue[:0] = [*([entry] for entry in suspects), others]
        return Outcome(DONE)

    def _attempt(self, batch: Sequence[Entry], stop: Stop | None) -> tuple[Outcome, list[UnderWay], bool]:
        """One worker: how it ended, what it is blamed for if it was ended or crashed, and whether that was late."""
        with private_folder() as folder:
            for name in ("ranks", "desks"):
                Path(folder, name).mkdir()
            desks, results = str(Path(folder, "desks")), str(self._task.results)
            request = Request(
                "", "", self._settings, Clock(), verbose=self._task.verbose, quiet=self._task.quiet,
                folder=str(Path(folder, "ranks")), batch=Batch(tuple(batch), results, desks),
            )  # fmt: skip
            if stop is None:
                return work(request), [], False
            worker = Worker(request)
            try:
                return _watch(worker, stop, desks)
            finally:
                worker.end()

    def _blame(self, suspects: Sequence[Entry], blamed: Sequence[UnderWay], outcome: Outcome) -> None:
        """Answer for instances whose worker can't."""
        until = {one.name: one.until for one in blamed}
        for entry in suspects:
            spent = max(0.0, entry.timeout + GRACE - until[entry.name] + time.monotonic())
            self.say(Answer(entry, outcome, spent).save(self._task.results).line())


def _watch(worker: Worker, stop: Stop, folder: str) -> tuple[Outcome, list[UnderWay], bool]:
    """See `_Stream._attempt`."""
    while True:
        ready, _, _ = select.select([worker.pipe, stop.wakeup], [], [], _TICK)
        if worker.pipe in ready:
            outcome = worker.receive()
            if outcome is not None:
                return outcome, under_way(folder), False
        if stop.name:
            return stopped(stop.name), [], False
        now = time.monotonic()
        late = [one for one in under_way(folder) if now > one.until]
        if late:
            return Outcome.timeout("the deadline passed before the engine ended"), late, True


# --- summary ----------------------------------------------------------------------------------------------------------


def write_summary(task: ListTask, entries: Sequence[Entry]) -> None:
    """summary.csv and summary.json in the results' folder, and the number of each verdict on stdout."""
    rows = [row for row in (_row(task.results, entry) for entry in entries) if row]
    counts = Counter(row["verdict"] for row in rows)
    text = io.StringIO()
    writer = csv.DictWriter(text, ["name", "onnx", "vnnlib", "timeout", "verdict", "seconds"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    AtomicFile(task.results / "summary.csv", option="--results-dir").write(text.getvalue())
    content = {"list": str(task.instances), "instances": len(entries), "verdicts": counts, "answers": rows}
    AtomicFile(task.results / "summary.json", option="--results-dir").write(to_json(content))
    with to_stdout():
        for verdict, count in sorted(counts.items()):
            click.echo(f"{verdict}\t{count}")


def _row(folder: Path, entry: Entry) -> dict[str, Any]:
    """One instance's row; empty where it has no answer."""
    path = result_path(folder, entry)
    if not path.exists():
        return {}
    seconds: Any = ""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # an answer from elsewhere has no figures
        seconds = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))["seconds"]
    row = {"name": entry.name, "onnx": entry.model, "vnnlib": entry.spec, "timeout": entry.timeout}
    return row | {"verdict": read_verdict(path), "seconds": seconds}
