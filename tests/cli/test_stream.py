"""`run --list`: the process that supervises, over a fake worker; what was answered stays, what crashes is an error."""

from __future__ import annotations

import csv
import json
import os
import signal
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from parverify.cli import cli, supervise
from parverify.cli.outcome import Outcome
from parverify.cli.work import Request
from parverify.flow import entries
from parverify.flow.entries import Answer, UnderWay
from parverify.results import read_verdict


def fake_work(request: Request) -> Outcome:
    """Each spec's text is a verdict, or a way to fail; two at once are under way."""
    batch = request.batch
    assert batch is not None
    for number, entry in enumerate(batch.entries):
        word = Path(entry.spec).read_text()
        with open(Path(batch.results).parent / "begun", "a") as begun:
            begun.write(entry.name + "\n")
        UnderWay.of(entry, 0.0).save(batch.folder, number % 2)
        if word == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if word == "hang":
            time.sleep(60)
        if word == "idle":  # a fault that no instance is to blame for
            UnderWay().save(batch.folder, 0), UnderWay().save(batch.folder, 1)
            os._exit(3)
        if word == "leave":
            continue
        outcome = Outcome(word, x=[1.0], y=[2.0])
        Answer(entry, outcome, 1.5).save(batch.results)
        UnderWay().save(batch.folder, number % 2)
    return Outcome("done")


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "work", fake_work)


def make_list(folder: Path, words: list[str], timeout: float = 30) -> Path:
    (folder / "net.onnx").write_bytes(b"")
    for i, word in enumerate(words):
        (folder / f"{i}.vnnlib").write_text(word)
    rows = [f"net.onnx,{i}.vnnlib,{timeout}" for i in range(len(words))]
    path = folder / "some list.csv"
    path.write_text("\n".join(["onnx,vnnlib,timeout", *rows]) + "\n")
    return path


def call(path: Path, *extra: str) -> Result:
    return CliRunner().invoke(cli, ["run", "--list", str(path), "--results-dir", str(path.parent / "out"), *extra])


def verdicts(folder: Path) -> list[str]:
    return [read_verdict(path) for path in sorted((folder / "out").glob("*.txt"))]


def begun(folder: Path) -> list[str]:
    return [line[:4] for line in (folder / "begun").read_text().splitlines()]


def test_every_instance_has_an_answer_and_a_row(tmp_path: Path) -> None:
    done = call(make_list(tmp_path, ["sat", "unsat", "timeout"]))
    assert (done.exit_code, done.stdout) == (0, "sat\t1\ntimeout\t1\nunsat\t1\n")
    assert (tmp_path / "out" / "0000-net.onnx-0.vnnlib.txt").read_text() == "sat\n((X_0 1)\n (Y_0 2))\n"
    with open(tmp_path / "out" / "summary.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["verdict"], row["seconds"], row["timeout"]) for row in rows] == [
        ("sat", "1.5", "30.0"), ("unsat", "1.5", "30.0"), ("timeout", "1.5", "30.0"),
    ]  # fmt: skip
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["verdicts"] == {"sat": 1, "unsat": 1, "timeout": 1} and len(summary["answers"]) == 3
    report = json.loads((tmp_path / "out" / "0000-net.onnx-0.vnnlib.json").read_text())
    assert report["witness"] == {"x": [1.0], "y": [2.0]} and report["spec"] == str(tmp_path / "0.vnnlib")


def test_what_has_an_answer_is_skipped_unless_it_is_to_be_redone(tmp_path: Path) -> None:
    path = make_list(tmp_path, ["unsat", "unsat"])
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "0001-net.onnx-1.vnnlib.txt").write_text("sat\n((X_0 0))\n")
    done = call(path)
    assert "skipped: 0001-net.onnx-1.vnnlib has an answer already" in done.stderr
    assert begun(tmp_path) == ["0000"] and verdicts(tmp_path) == ["unsat", "sat"]
    assert done.stdout == "sat\t1\nunsat\t1\n"
    call(path)
    assert begun(tmp_path) == ["0000"]
    assert "skipped" not in call(path, "--redo").stderr
    assert begun(tmp_path) == ["0000"] * 2 + ["0001"] and verdicts(tmp_path) == ["unsat", "unsat"]


def test_a_crash_is_the_error_of_what_crashes_alone(tmp_path: Path) -> None:
    done = call(make_list(tmp_path, ["unsat", "leave", "crash", "unsat"]))
    # Instance 1 was under way too when the worker crashed: both are tried alone, where 1 still gives no answer.
    assert "tried again, each alone" in done.stderr
    assert begun(tmp_path)[:4] == ["0000", "0001", "0002", "0001"]
    assert done.exit_code == 20 and "0001-net.onnx-1.vnnlib has no answer" in done.stderr
    (tmp_path / "1.vnnlib").write_text("sat")
    done = call(tmp_path / "some list.csv")
    assert (done.exit_code, verdicts(tmp_path)) == (0, ["unsat", "sat", "error", "unsat"])
    assert "the working process was killed" in (tmp_path / "out" / "0002-net.onnx-2.vnnlib.json").read_text()


def test_what_is_overdue_is_ended_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "GRACE", 0.2)
    done = call(make_list(tmp_path, ["unsat", "hang", "unsat"], timeout=0.5))
    assert (done.exit_code, verdicts(tmp_path)) == (0, ["unsat", "timeout", "unsat"])
    assert begun(tmp_path) == ["0000", "0001", "0002"]


def test_a_failure_of_no_instance_ends_the_run(tmp_path: Path) -> None:
    done = call(make_list(tmp_path, ["unsat", "idle", "unsat"]))
    assert done.exit_code == 20 and "exit status 3" in done.stderr
    assert verdicts(tmp_path) == ["unsat"] and done.stdout == "unsat\t1\n"


def test_a_witness_that_is_none_is_an_error(tmp_path: Path) -> None:
    path = make_list(tmp_path, ["unsat"])
    entry = entries.Entry("x", "m", "s", 1.0)
    saved = Answer(entry, Outcome("sat", x=[float("nan")], y=[1.0]), 0.1).save(tmp_path / "out")
    assert saved.outcome.verdict == "error" and read_verdict(tmp_path / "out" / "x.txt") == "error"
    assert json.loads((tmp_path / "out" / "x.json").read_text())["witness"] is None
    assert call(path).exit_code == 0


def test_a_signal_ends_the_run_and_the_next_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_list(tmp_path, ["unsat", "hang"])
    parent = os.getpid()

    def and_signal(request: Request) -> Outcome:
        time.sleep(0.3)
        os.kill(parent, signal.SIGTERM)
        return fake_work(request)

    monkeypatch.setattr(supervise, "work", and_signal)
    done = call(path)
    assert done.exit_code == 11 and "interrupted by SIGTERM" in done.stderr
    (tmp_path / "1.vnnlib").write_text("unsat")
    monkeypatch.setattr(supervise, "work", fake_work)
    assert call(path).exit_code == 0 and verdicts(tmp_path) == ["unsat", "unsat"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--list", "l.csv"], "--list needs --results-dir"),
        (["--list", "l.csv", "--results-dir", "d", "a", "b"], "--list stands instead of"),
        (["--list", "l.csv", "--results-dir", "d", "--json", "x"], "--list stands instead of"),
        (["--list", "absent.csv", "--results-dir", "d"], "can't read"),
        (["--results-dir", "d", "a", "b"], "go with --list"),
        (["--list", "l.csv", "--results-dir", "d", "--strategy", "fold"], "holds the whole network"),
        (["--list", "l.csv", "--results-dir", "d", "--set", "parallel.groups=3"], "parallel.groups"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: list[str], text: str) -> None:
    done = CliRunner().invoke(cli, ["run", *arguments])
    assert done.exit_code == 2 and text in done.stderr
