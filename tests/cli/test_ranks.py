"""`run` and `bounds` on several ranks over a fake engine: one answer, however a rank ends, and no process left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Files, start

Make = Callable[[str], Files]
Run = Callable[[list[str]], subprocess.CompletedProcess[str]]

TWO = ("--nproc", "2")
PRINTS = "a library prints to stdout\n"


@pytest.fixture(autouse=True)
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A place for temporary folders that no other test uses."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))


def folders(made: Files) -> list[Path]:
    """The private folders that runs have left."""
    return list((made.folder / "temporary").glob("parverify-*"))


def processes(made: Files) -> set[int]:
    """All processes of a test's runs; forked ones have the arguments of the first."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.fsencode(made.spec) in (folder / "cmdline").read_bytes():
                found.add(int(folder.name))
    return found


def wait_until_gone(made: Files, seconds: float = 5.0) -> None:
    """Raise unless the processes end in time; one that has ended and only waits for its parent has no arguments."""
    until = time.monotonic() + seconds
    while alive := processes(made):
        assert time.monotonic() < until, f"still there: {alive}"
        time.sleep(0.01)


def read_line(process: subprocess.Popen[str]) -> str:
    """The next line of stderr."""
    assert process.stderr is not None
    return process.stderr.readline()


def test_two_ranks_give_one_answer(files: Make, run: Run) -> None:
    made = files("unsat")
    done = run(made.arguments(*TWO))
    assert (done.stdout, done.returncode, made.results.read_text()) == ("unsat\n", 0, "unsat\n")
    # Both ranks are in the library; only rank 0 talks.
    assert sorted(done.stderr.splitlines()) == [PRINTS.strip()] * 2 + ["warning: rank 0 talks"]
    assert json.loads(made.json.read_text())["stats"]["domains"] == 3
    assert folders(made) == []


def test_the_witness_comes_from_rank_0(files: Make, run: Run) -> None:
    made = files("sat")
    done = run(made.arguments(*TWO))
    assert done.returncode == 0 and done.stdout.startswith("sat\n((X_0 0.1")
    assert made.results.read_text() == done.stdout


@pytest.mark.parametrize(
    ("behaviour", "code", "text"),
    [
        ("on 1 raise ValueError", 20, "error: rank 1: ValueError: first second; hint:"),
        ("on 0 raise ModelError", 21, "error: it is so; hint: do that"),
        ("on 1 signal SIGKILL", 20, "error: rank 1 was killed by SIGKILL"),
        ("on 1 exit 0", 20, "error: rank 1: SystemExit"),
        ("liar", 20, "error: rank 0: the engine returned sat without a witness"),
    ],
)
def test_a_rank_that_fails_is_an_error(files: Make, behaviour: str, code: int, text: str) -> None:
    made = files(behaviour)
    process = start(made.arguments(*TWO))
    assert read_line(process) == PRINTS  # a rank is in the engine, the other may not come to it
    begun = time.monotonic()
    out, err = process.communicate(timeout=60)
    assert time.monotonic() - begun < 10
    assert (out, process.returncode, made.results.read_text()) == ("error\n", code, "error\n")
    assert text in err
    assert "Traceback" not in err


def test_verbose_shows_the_traceback_of_the_rank(files: Make, run: Run) -> None:
    made = files("on 1 raise ValueError")
    err = run(made.arguments(*TWO, "-v")).stderr
    assert "Traceback" in err and "raise {" in err


@pytest.mark.parametrize("behaviour", ["raise OutOfTimeError", "on 1 raise OutOfTimeError", "on 1 sleep 30"])
def test_out_of_time_on_any_rank_is_timeout(files: Make, behaviour: str) -> None:
    made, begun = files(behaviour), time.monotonic()
    limit = "4" if "sleep" in behaviour else "60"
    process = start(made.arguments(*TWO, "--timeout", limit))
    while not made.results.exists() or made.results.read_text() != "timeout\n":
        assert time.monotonic() - begun < float(limit), "no answer before the timeout"
        time.sleep(0.01)
    out, _ = process.communicate(timeout=5)
    assert (out, process.returncode) == ("timeout\n", 12)


@pytest.mark.parametrize(
    ("behaviour", "number"),
    [("sleep 60", signal.SIGKILL), ("on 1 sleep 60", signal.SIGTERM), ("on 0 locked 60", signal.SIGTERM)],
)
def test_no_rank_outlives_the_supervisor(files: Make, behaviour: str, number: signal.Signals) -> None:
    made = files(behaviour)
    process = start(made.arguments(*TWO))
    assert [read_line(process) for _ in range(2)] == [PRINTS] * 2  # both ranks are in the engine
    assert len(processes(made)) == 4
    process.send_signal(number)
    out, _ = process.communicate(timeout=5)
    wait_until_gone(made)
    assert made.results.read_text() == "unknown\n"
    if number == signal.SIGTERM:
        assert (out, process.returncode) == ("unknown\n", 11)
        assert folders(made) == []


def test_the_launcher_that_dies_takes_its_ranks_along(files: Make) -> None:
    made = files("sleep 60")
    process = start(made.arguments(*TWO))
    assert [read_line(process) for _ in range(2)] == [PRINTS] * 2
    (worker,) = (int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
    os.kill(worker, signal.SIGKILL)
    out, _ = process.communicate(timeout=5)
    wait_until_gone(made)
    assert (out, process.returncode) == ("error\n", 24)


def test_in_process_means_without_a_supervisor(files: Make, run: Run) -> None:
    done = run(files("unsat").arguments(*TWO, "--in-process"))
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "unsat")


# --- bounds -----------------------------------------------------------------------------------------------------------


def bounds(made: Files, *extra: str) -> list[str]:
    """`bounds` with the files of a run."""
    return ["bounds", str(made.model), str(made.spec), "--json", str(made.json), "--layers", *extra]


def test_bounds_on_two_ranks_are_reported_exactly(files: Make, run: Run) -> None:
    made = files("unsat")
    done = run(bounds(made, *TWO, "--method", "ibp"))
    assert done.returncode == 0 and done.stdout == ""
    report = json.loads(made.json.read_text())
    assert (report["world_size"], report["method"], len(report["ranks"])) == (2, "ibp", 2)
    assert (report["lower"], report["upper"], report["layers"][0]["lower"]) == ([0.1], [1e300], [-1 / 3])
    assert report["layers"][0]["upper"] == ["inf"]


def test_bounds_on_stdout_are_not_mixed_with_what_libraries_print(files: Make, run: Run) -> None:
    made = files("unsat")
    done = run(["bounds", str(made.model), str(made.spec), "--json", "-", *TWO])
    assert json.loads(done.stdout)["world_size"] == 2


@pytest.mark.parametrize(
    ("behaviour", "code", "text"),
    [
        ("on 1 signal SIGKILL", 20, "error: rank 1 was killed by SIGKILL"),
        ("on 0 raise SpecError", 23, "error: it is so"),
        ("raise OutOfTimeError", 12, "timeout: it is so"),
    ],
)
def test_bounds_end_with_a_rank_that_fails(files: Make, run: Run, behaviour: str, code: int, text: str) -> None:
    made = files(behaviour)
    done = run(bounds(made, *TWO))
    assert done.returncode == code and text in done.stderr
    assert not made.json.exists()


def test_bounds_end_at_the_timeout_and_leave_no_process(files: Make, run: Run) -> None:
    made = files("on 1 sleep 60")
    done = run(bounds(made, *TWO, "--timeout", "4"))
    assert done.returncode == 12 and "timeout: " in done.stderr
    wait_until_gone(made)


# --- torchrun ---------------------------------------------------------------------------------------------------------


def free_port() -> str:
    """A port of the loopback interface that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def torchrun(arguments: list[str], *more: str) -> subprocess.Popen[str]:
    """Two ranks under torchrun, as a user starts them."""
    options = ["--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}", *more]
    return start(arguments, ["-m", "torch.distributed.run", *options])


def test_torchrun_gives_one_answer(files: Make) -> None:
    made = files("unsat")
    process = torchrun(made.arguments())
    out, err = process.communicate(timeout=60)
    assert (out, process.returncode, made.results.read_text()) == ("unsat\n", 0, "unsat\n"), err
    assert err.count(PRINTS) == 2 and err.count("talks") == 1
    assert json.loads(made.json.read_text())["verdict"] == "unsat"


@pytest.mark.parametrize(
    "behaviour",
    [
        "on 1 raise ValueError",
        pytest.param("on 1 signal SIGKILL", marks=pytest.mark.slow),
        pytest.param("on 0 raise ValueError", marks=pytest.mark.slow),
    ],
)
def test_torchrun_with_a_rank_that_fails(files: Make, behaviour: str) -> None:
    made = files(behaviour)
    process = torchrun(made.arguments())
    out, err = process.communicate(timeout=60)
    assert (out, made.results.read_text()) == ("error\n", "error\n"), err
    assert process.returncode != 0
    assert "ValueError: first second" in err or "the working process was killed" in err


@pytest.mark.slow
def test_torchrun_with_a_clock_that_runs_out(files: Make) -> None:
    made = files("on 1 sleep 60")
    process = torchrun(made.arguments("--timeout", "6", "--exit-zero"))
    out, err = process.communicate(timeout=60)
    assert (out, made.results.read_text()) == ("timeout\n", "timeout\n"), err


@pytest.mark.slow
def test_torchrun_bounds(files: Make) -> None:
    made = files("unsat")
    process = torchrun(bounds(made))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert json.loads(made.json.read_text())["world_size"] == 2


@pytest.mark.parametrize(
    ("behaviour", "word"),
    [
        ("once on 1 signal SIGKILL", "unsat"),
        pytest.param("once on 0 signal SIGKILL", "unsat", marks=pytest.mark.slow),
        pytest.param("unknown", "unknown", marks=pytest.mark.slow),
    ],
)
def test_torchrun_starts_ranks_again_and_there_is_one_answer(files: Make, behaviour: str, word: str) -> None:
    made = files(behaviour)
    process = torchrun(
        made.arguments("--journal", str(made.folder / "journal")), "--max-restarts=2", "--monitor-interval=0.1"
    )
    out, err = process.communicate(timeout=120)
    assert (out, made.results.read_text(), process.returncode) == (f"{word}\n", f"{word}\n", 0), err
    assert ("was killed" in err) == (word == "unsat")


def test_a_lost_rank_is_started_again_where_a_journal_is_kept(files: Make, run: Run) -> None:
    made = files("once on 1 signal SIGKILL")
    done = run(made.arguments(*TWO, "--journal", str(made.folder / "journal"), "--restarts", "1"))
    assert (done.stdout, done.returncode) == ("unsat\n", 0), done.stderr
    assert "rank 1 was killed by SIGKILL" in done.stderr and "all ranks are started again (1 of 1)" in done.stderr
    assert json.loads(made.json.read_text())["stats"]["restarts"] == 1
    done = run(made.arguments(*TWO, "--journal", str(made.folder / "journal")))
    assert (done.stdout, done.returncode) == ("error\n", 20)
    assert folders(made) == []


def as_rank(made: Files, rank: int, *extra: str, port: str = "9") -> subprocess.Popen[str]:
    """One of two ranks, as torchrun would start it; nobody listens on port 9."""
    place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    return start(made.arguments(*extra), environment=place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})


def test_torchrun_and_another_number_of_ranks_exclude_each_other(files: Make) -> None:
    made = files("unsat")
    out, err = as_rank(made, 0, "--nproc", "3").communicate(timeout=60)
    assert out == "error\n" and "--nproc 3, but torchrun has started 2 ranks" in err


def test_a_rank_that_torchrun_ends_does_not_say_that_the_user_did(files: Make) -> None:
    made = files("unsat")
    process = as_rank(made, 0, port=free_port())  # it waits for rank 1
    until = time.monotonic() + 20
    while not made.results.exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=10)
    assert (out, process.returncode) == ("error\n", 20) and "another rank failed" in err


def test_a_rank_that_only_takes_part_writes_nothing(files: Make) -> None:
    made = files("unsat")
    process = as_rank(made, 1, "--timeout", "1")
    out, err = process.communicate(timeout=20)
    assert (out, err, process.returncode) == ("", "", 0)
    assert not made.results.exists() and not made.json.exists()
