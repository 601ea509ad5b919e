"""Whole processes of `parverify run` over a fake engine: words, exit codes, files, the clock, signals, crashes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable

import numpy as np
import pytest

from parverify.cli.run import engine_timeout, hard_timeout
from tests.cli.conftest import Files, start

Make = Callable[[str], Files]
Run = Callable[[list[str]], subprocess.CompletedProcess[str]]


def test_unsat(files: Make, run: Run) -> None:
    made = files("unsat")
    done = run(made.arguments())
    assert (done.stdout, done.returncode) == ("unsat\n", 0)
    assert done.stderr == "a library prints to stdout\n"
    assert made.results.read_text() == "unsat\n"
    report = json.loads(made.json.read_text())
    assert report["verdict"] == "unsat" and report["witness"] is None
    assert report["stats"]["domains"] == 3 and report["stats"]["worst"] == "inf"
    assert report["settings"]["alpha"]["iterations"] > 0 and 0 < report["seconds"] < 60


def test_sat_writes_a_witness_that_reads_back_exactly(files: Make, run: Run) -> None:
    made = files("sat")
    done = run(made.arguments())
    assert done.returncode == 0
    word, witness = made.results.read_text().split("\n", 1)
    assert done.stdout == f"sat\n{witness}" and word == "sat"
    assert re.fullmatch(r"\(\(X_0 \S+\)\n \(X_1 \S+\)\n \(Y_0 \S+\)\n \(Y_1 \S+\)\)\n", witness)
    values = {name: float(value) for name, value in re.findall(r"\((\w+) (\S+?)\)", witness)}
    assert values == {"X_0": 0.1, "X_1": -1 / 3, "Y_0": 1e-7, "Y_1": 2.0}
    assert json.loads(made.json.read_text())["witness"] == {"x": [0.1, -1 / 3], "y": [1e-7, 2.0]}


@pytest.mark.parametrize(("word", "code"), [("unknown", 11), ("timeout", 12), ("error", 20)])
def test_undecided_words(files: Make, run: Run, word: str, code: int) -> None:
    made = files(word)
    done = run(made.arguments())
    assert (done.stdout, done.returncode, made.results.read_text()) == (f"{word}\n", code, f"{word}\n")
    assert f"{word}: it gave up" in done.stderr


@pytest.mark.parametrize(
    ("behaviour", "code", "text"),
    [
        ("raise ValueError", 20, "error: ValueError: first second; hint:"),
        ("raise MemoryError", 24, "error: out of memory"),
        ("raise RecursionError", 20, "error: RecursionError"),
        ("raise ModelError", 21, "error: it is so; hint: do that"),
        ("raise UnsupportedOperatorError", 22, "error: unsupported operators: Sin (node node7)"),
        ("raise SpecError", 23, "error: it is so; hint: do that"),
        ("raise ResourceError", 24, "error: it is so"),
        ("exit 0", 20, "error: SystemExit"),
        ("liar", 20, "error: the engine returned sat without a witness"),
        ("string", 20, "error: the engine returned str, not a result"),
        ("nan", 20, "error: the witness is not finite at X_0"),
        ("signal SIGSEGV", 20, "error: the working process crashed with SIGSEGV"),
        ("signal SIGABRT", 20, "error: the working process crashed with SIGABRT"),
        ("signal SIGKILL", 24, "error: the working process was killed"),
    ],
)
def test_failures_are_errors(files: Make, run: Run, behaviour: str, code: int, text: str) -> None:
    made = files(behaviour)
    done = run(made.arguments())
    assert (done.stdout, done.returncode, made.results.read_text()) == ("error\n", code, "error\n")
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads(made.json.read_text())["exit_code"] == code


def test_verbose_shows_the_traceback_and_quiet_only_the_error(files: Make, run: Run) -> None:
    made = files("raise ValueError")
    assert "Traceback" in run(made.arguments("-v")).stderr
    made.spec.write_text("unknown")
    assert "gave up" not in run(made.arguments("-q")).stderr


def test_out_of_time_in_the_engine_is_timeout(files: Make, run: Run) -> None:
    made = files("raise OutOfTimeError")
    done = run(made.arguments("--timeout", "60"))
    assert (done.stdout, done.returncode, made.results.read_text()) == ("timeout\n", 12, "timeout\n")


@pytest.mark.parametrize("behaviour", ["sleep 30", "native 30", "locked 30"])
def test_the_answer_stands_before_the_timeout_when_the_engine_hangs(files: Make, behaviour: str) -> None:
    made, begun = files(behaviour), time.monotonic()
    process = start(made.arguments("--timeout", "2"))
    while not made.results.exists() or made.results.read_text() != "timeout\n":
        assert time.monotonic() - begun < 2.0, "no answer before the timeout"
        time.sleep(0.01)
    out, err = process.communicate(timeout=3)
    assert time.monotonic() - begun < 4.0
    assert (out, process.returncode) == ("timeout\n", 12)
    assert "timeout: the deadline passed" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("behaviour", ["sleep 30", "locked 30"])
def test_signals_end_the_run_as_unknown(files: Make, behaviour: str, number: signal.Signals) -> None:
    made = files(behaviour)
    process = start(made.arguments())
    assert process.stderr is not None
    process.stderr.readline()  # the worker is in the engine
    assert made.results.read_text() == "unknown\n"
    begun = time.monotonic()
    process.send_signal(number)
    out, err = process.communicate(timeout=10)
    assert time.monotonic() - begun < 2.0
    assert (out, process.returncode, made.results.read_text()) == ("unknown\n", 11, "unknown\n")
    assert f"interrupted by {number.name}" in err


def test_the_worker_ends_with_a_supervisor_that_is_killed(files: Make) -> None:
    made = files("sleep 30")
    process = start(made.arguments())
    assert process.stderr is not None
    process.stderr.readline()
    process.kill()
    # stderr ends only once the worker, which holds it too, is gone.
    process.communicate(timeout=5)
    assert made.results.read_text() == "unknown\n"


def test_no_reader_ever_sees_a_part(files: Make) -> None:
    made = files("sat")
    made.results.write_text("left over\n")
    process, seen = start(made.arguments()), set()
    while process.poll() is None:
        seen.add(made.results.read_text())
    process.communicate()
    final = made.results.read_text()
    assert final.startswith("sat\n((X_0 ") and final.endswith("))\n")
    assert seen <= {"left over\n", "unknown\n", final}
    assert os.listdir(made.folder) and not [name for name in os.listdir(made.folder) if name.endswith(".tmp")]


def test_a_signal_that_the_caller_ignores_stays_ignored(files: Make) -> None:
    made = files("sleep 1")
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = start(made.arguments())
    finally:
        signal.signal(signal.SIGHUP, previous)
    assert process.stderr is not None
    process.stderr.readline()
    process.send_signal(signal.SIGHUP)
    out, _ = process.communicate(timeout=20)
    assert out == "unsat\n"


def test_exit_zero(files: Make, run: Run) -> None:
    made = files("raise ModelError")
    assert run(made.arguments("--exit-zero")).returncode == 0
    assert made.results.read_text() == "error\n"


def test_in_process(files: Make, run: Run) -> None:
    made = files("sat")
    done = run(made.arguments("--in-process"))
    assert done.returncode == 0 and "sat\n((X_0 " in done.stdout
    made.spec.write_text("exit 0")
    assert run(made.arguments("--in-process")).returncode == 20


def test_margins() -> None:
    for timeout in (0.5, 1.0, 10.0, 116.0, 3600.0):
        assert 0.8 * timeout < engine_timeout(timeout) < hard_timeout(timeout) < timeout
    assert np.isinf(engine_timeout(np.inf)) and np.isinf(hard_timeout(np.inf))


def test_the_engine_gets_the_clock_from_the_start_of_the_process(files: Make, run: Run) -> None:
    made = files("unsat")
    run(made.arguments("--timeout", "50"))
    left = json.loads(made.json.read_text())["stats"]["left"]
    assert 30 < left < engine_timeout(50)
