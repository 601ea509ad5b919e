"""The results file: seeded, atomic, closed by the first verdict."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parverify.errors import ParverifyError, UsageError
from parverify.results import AtomicFile, ResultsFile, format_witness, jsonable, read_verdict


def test_the_first_final_verdict_wins(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "r.txt"
    results = ResultsFile(path)
    assert path.read_text() == "unknown\n" and results.verdict is None
    assert results.finish("timeout")
    assert not results.finish("sat", "((X_0 1))")
    assert (path.read_text(), results.verdict) == ("timeout\n", "timeout")


def test_only_one_of_many_threads_wins(tmp_path: Path) -> None:
    path, won, barrier = tmp_path / "r.txt", [], threading.Barrier(8)
    results = ResultsFile(path)

    def race(word: str) -> None:
        barrier.wait()
        if results.finish(word):
            won.append(word)

    threads = [threading.Thread(target=race, args=(word,)) for word in ["unsat", "timeout", "unknown", "error"] * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1 and path.read_text() == f"{won[0]}\n"
    assert os.listdir(tmp_path) == ["r.txt"]


def test_a_witness_exactly_with_sat(tmp_path: Path) -> None:
    results = ResultsFile(tmp_path / "r.txt")
    with pytest.raises(ParverifyError, match="sat without a witness"):
        results.finish("sat")
    with pytest.raises(ParverifyError, match="unsat with a witness"):
        results.finish("unsat", "((X_0 1))")
    assert results.verdict is None and (tmp_path / "r.txt").read_text() == "unknown\n"
    assert ResultsFile(None).finish("unsat")


def test_a_failed_write_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = AtomicFile(tmp_path / "r.txt")
    file.write("old\n")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsageError, match="No space left"):
        file.write("new\n")
    assert (tmp_path / "r.txt").read_text() == "old\n"
    assert os.listdir(tmp_path) == ["r.txt"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link.txt").symlink_to(tmp_path / "real" / "r.txt")
    ResultsFile(tmp_path / "link.txt").finish("unsat")
    assert (tmp_path / "link.txt").is_symlink() and (tmp_path / "real" / "r.txt").read_text() == "unsat\n"


def test_what_is_no_regular_file_is_refused_and_kept(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/null")):
        with pytest.raises(UsageError, match="not a regular file"):
            ResultsFile(path)
    assert (tmp_path / "pipe").is_fifo()


def test_others_may_read_the_file(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        ResultsFile(tmp_path / "r.txt")
    finally:
        os.umask(old)
    assert (tmp_path / "r.txt").stat().st_mode & 0o777 == 0o644


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=4))
def test_witnesses_read_back_exactly(x: list[float]) -> None:
    lines = format_witness(np.array(x), []).removeprefix("(").removesuffix(")").split("\n")
    read = [line.strip().strip("()").split() for line in lines]
    assert [name for name, _ in read] == [f"X_{i}" for i in range(len(x))]
    assert np.array([float(value) for _, value in read]).tobytes() == np.array(x).tobytes()


@pytest.mark.parametrize(("x", "y"), [([], [1.0]), ([float("nan")], [1.0]), ([0.0], [float("inf")])])
def test_what_is_no_witness(x: list[float], y: list[float]) -> None:
    with pytest.raises(ParverifyError, match="the witness is"):
        format_witness(x, y)


def test_jsonable() -> None:
    value = {1: np.float32(0.5), "a": np.array([1.0, np.inf]), "b": (Path("x"), None, True), "c": float("nan")}
    assert jsonable(value) == {"1": 0.5, "a": [1.0, "inf"], "b": ["x", None, True], "c": "nan"}


def test_read_verdict(tmp_path: Path) -> None:
    (tmp_path / "r.txt").write_text("SAT\n((X_0 1))\n")
    (tmp_path / "empty.txt").write_text("")
    assert read_verdict(tmp_path / "r.txt") == "sat"
    assert read_verdict(tmp_path / "empty.txt") == read_verdict(tmp_path / "none.txt") == "error"
