"""A list of instances on one rank and on several: the verdicts of single runs, whatever a single instance does."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import parverify
from parverify.cli.outcome import Outcome
from parverify.config import Settings, make_settings
from parverify.errors import OutOfTimeError, ParverifyError
from parverify.flow import meeting as meeting_module
from parverify.flow import rank as rank_module
from parverify.flow.entries import Batch, Entry, under_way
from parverify.flow.rank import work_on_list
from parverify.flow.work import Stopwatch, WorkClock
from parverify.parallel.world import World
from parverify.progress import NullProgress
from parverify.results import read_verdict
from tests.distributed.ranks import on_ranks, outcome_of
from tests.flow.lists import entry

FEW = {"branching.batch": 2, "attack.enabled": False, "branching.kind": "input", "method": "beta-crown"}


class Listener(NullProgress):
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def log(self, message: str) -> None:
        self.lines.append(message)


def batch_of(folder: Path, entries: Sequence[Entry]) -> Batch:
    (folder / "desks").mkdir(exist_ok=True)
    (folder / "answers").mkdir(exist_ok=True)
    return Batch(tuple(entries), str(folder / "answers"), str(folder / "desks"))


def on_list(world: World, batch: Batch, settings: Settings) -> tuple[Outcome, list[str]]:
    """What a rank came to, and said."""
    heard = Listener()
    folder = str(Path(batch.folder).parent) if world.size > 1 else ""
    done = work_on_list(batch, settings, world, progress=heard, say=heard.lines.append, folder=folder)
    return done, heard.lines


def verdicts(batch: Batch) -> dict[str, str]:
    return {e.name: read_verdict(Path(batch.results, f"{e.name}.txt")) for e in batch.entries}


def report(batch: Batch, name: str) -> dict[str, Any]:
    return dict(json.loads(Path(batch.results, f"{name}.json").read_text()))


def mixed(folder: Path) -> list[Entry]:
    """Both answers twice, a file that is not there, one that is none, and a box that is empty."""
    out = [
        entry(folder / "files", f"{'sat' if sat else 'unsat'}{seed}", seed=seed, sat=sat)
        for seed in (1, 2)
        for sat in (True, False)
    ]
    good = out[0]
    (folder / "files" / "broken.vnnlib").write_text("(assert (>= X_0")
    (folder / "files" / "broken.onnx").write_bytes(b"no network")
    empty = Path(good.spec).read_text().replace("(<= X_1 1.0)", "(<= X_1 -2.0)")
    (folder / "files" / "empty.vnnlib").write_text(empty)
    out.insert(1, Entry("absent", str(folder / "absent.onnx"), good.spec, 60))
    out.insert(2, Entry("spec", good.model, str(folder / "files" / "broken.vnnlib"), 60))
    out.insert(4, Entry("model", str(folder / "files" / "broken.onnx"), good.spec, 60))
    out.append(Entry("empty", good.model, str(folder / "files" / "empty.vnnlib"), 60))
    return out


EXPECTED = {
    "sat1": "sat", "unsat1": "unsat", "sat2": "sat", "unsat2": "unsat", "absent": "error", "spec": "error",
    "model": "error", "empty": "unsat",
}  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_verdicts_are_those_of_single_runs(tmp_path: Path, ranks: int) -> None:
    batch = batch_of(tmp_path, mixed(tmp_path))
    settings = make_settings({"attack.steps": 20})
    if ranks == 1:
        done, _ = on_list(World(), batch, settings)
    else:
        done = on_ranks(ranks, on_list, batch, settings)[0][0]
    assert done.verdict == "done"
    assert verdicts(batch) == EXPECTED
    assert under_way(batch.folder) == []
    for name in ("sat1", "unsat2"):
        one = next(e for e in batch.entries if e.name == name)
        assert parverify.verify(one.model, one.spec, settings=settings).verdict.value == EXPECTED[name]
    found = report(batch, "sat1")
    assert found["witness"]["x"] and found["seconds"] > 0
    assert [report(batch, name)["exit_code"] for name in ("absent", "spec", "model")] == [21, 23, 21]


def stages(lines: Sequence[str]) -> list[str]:
    return [line.split(": ")[1] for line in lines if line.endswith((": bounding", ": searching"))]


def test_searches_wait_while_there_is_something_to_bound_unless_too_many_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [entry(tmp_path / "files", f"u{i}", seed=3, sat=False) for i in range(4)]
    _, lines = on_list(World(), batch_of(tmp_path, entries), make_settings(FEW))
    assert stages(lines) == ["bounding"] * 4 + ["searching"] * 4
    monkeypatch.setattr(rank_module, "HELD", 2)
    _, lines = on_list(World(), batch_of(tmp_path, entries), make_settings(FEW))
    assert stages(lines) == ["bounding"] * 2 + ["searching", "bounding"] * 2 + ["searching"] * 2


def test_a_clock_of_work_stands_still_while_the_instance_waits() -> None:
    watch, started = Stopwatch(), time.monotonic()
    clock = WorkClock(0.3, started - 100, stopwatch=watch)
    assert clock.alone().left == clock.left == 0.3
    with watch.running():
        with watch.paused():
            time.sleep(0.4)
        assert clock.left > 0 or time.monotonic() - started > 0.7
        time.sleep(0.3)
        with pytest.raises(OutOfTimeError):
            clock.alone().check("working")
    assert 0.3 <= watch.seconds <= time.monotonic() - started - 0.4


# --- searches that all ranks share ------------------------------------------------------------------------------------


def shared_list(folder: Path, entries: Sequence[Entry], settings: Settings, ranks: int = 2) -> tuple[Batch, str]:
    """A list of fewer instances than ranks, so that they are shared; everything that was said."""
    batch = batch_of(folder, entries)
    found = on_ranks(ranks, on_list, batch, settings)
    assert all(done.verdict == "done" for done, _ in found)
    return batch, "\n".join(line for _, lines in found for line in lines)


@pytest.mark.parametrize(("ranks", "kind"), [(2, "input"), (3, "activation")])
@pytest.mark.parametrize("sat", [True, False])
def test_ranks_without_work_join_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, kind: str, sat: bool
) -> None:
    monkeypatch.setattr(meeting_module, "ALONE", 0.0)
    n_in = 4 if kind == "input" else 2
    entries = [entry(tmp_path / "files", f"one{i}", seed=7, sat=sat, n_in=n_in) for i in range(ranks - 1)]
    settings = make_settings({**FEW, "branching.kind": kind, "beta.iterations": 3, "alpha.iterations": 2})
    batch, said = shared_list(tmp_path, entries, settings, ranks)
    assert set(verdicts(batch).values()) == {"sat" if sat else "unsat"}
    assert sat or "all ranks search" in said
    alone = parverify.verify(entries[0].model, entries[0].spec, settings=settings)
    assert alone.verdict.value == verdicts(batch)["one0"]
    assert sat or report(batch, "one0")["stats"]["bounded"] >= 0.5 * alone.stats["bounded"]


def test_a_shared_search_ends_at_its_timeout_and_all_ranks_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting_module, "ALONE", 0.0)
    hard = entry(tmp_path / "files", "hard", seed=7, sat=False, timeout=2.5, margin=1e-3, n_in=6)
    easy = entry(tmp_path / "files", "later", seed=7, sat=False)
    batch, said = shared_list(tmp_path, [hard, easy], make_settings(FEW), 2)
    assert verdicts(batch) == {"hard": "timeout", "later": "unsat"}
    assert "hard: all ranks search" in said
    assert 2 < report(batch, "hard")["seconds"] < 6


def test_a_rank_that_can_not_help_makes_an_error_of_that_instance_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any, call: Any) -> Any:
        if call.entry.name == "first":
            raise ParverifyError("no room")
        return join(self, call)

    join = rank_module._Rank.join
    monkeypatch.setattr(rank_module._Rank, "join", fail)
    monkeypatch.setattr(meeting_module, "ALONE", 0.0)
    first = entry(tmp_path / "files", "first", seed=7, sat=False, timeout=30, margin=1e-3, n_in=6)
    second = entry(tmp_path / "files", "second", seed=7, sat=False, n_in=4)
    batch, _ = shared_list(tmp_path, [first, second], make_settings(FEW), 3)
    assert verdicts(batch) == {"first": "error", "second": "unsat"}
    assert "no room" in report(batch, "first")["reason"]


def test_a_rank_that_dies_ends_the_worker(tmp_path: Path) -> None:
    import os
    import signal

    batch = batch_of(tmp_path, [entry(tmp_path / "files", "one", seed=7, sat=False, n_in=6)])

    def job(world: World) -> Outcome:
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return on_list(world, batch, make_settings(FEW))[0]

    outcome = outcome_of(2, job)
    assert outcome.verdict == "error" and "rank 1" in outcome.reason
    assert read_verdict(Path(batch.results, "one.txt")) == "error"  # no file: no answer
    assert not Path(batch.results, "one.txt").exists()


@pytest.mark.slow
def test_the_command_line_brings_a_list_through_two_ranks(tmp_path: Path) -> None:
    entries = mixed(tmp_path)
    path = tmp_path / "instances.csv"
    path.write_text("".join(f"{e.model},{e.spec},60\n" for e in entries))
    command = [sys.executable, "-m", "parverify", "run", "--list", str(path), "--results-dir", str(tmp_path / "out")]
    done = subprocess.run([*command, "--nproc", "2"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "error\t3\nsat\t2\nunsat\t3\n"), done.stderr
    found = [read_verdict(file) for file in sorted((tmp_path / "out").glob("*.txt"))]
    assert found == [EXPECTED[e.name] for e in entries]
