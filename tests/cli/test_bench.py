"""`parverify bench`: reading instances, one process each, resuming, being interrupted."""

from __future__ import annotations

import csv
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from parverify.cli import bench, cli
from parverify.cli.instances import Instance, locate, read_instances, spread
from parverify.errors import UsageError
from tests.cli.conftest import ENGINE, ROOT


def make_folder(folder: Path, behaviours: list[str], timeout: float = 30) -> Path:
    """A benchmark folder whose specs hold behaviours of the fake engine."""
    (folder / "vnnlib").mkdir(parents=True)
    (folder / "net.onnx.gz").write_bytes(gzip.compress(b"no network"))
    for i, behaviour in enumerate(behaviours):
        (folder / "vnnlib" / f"p{i}.vnnlib").write_text(behaviour)
    rows = [f"net.onnx,./vnnlib/p{i}.vnnlib,{timeout}" for i in range(len(behaviours))]
    (folder / "instances.csv").write_text("\n".join(["onnx,vnnlib,timeout", *rows, "", ""]))
    return folder


@pytest.fixture(autouse=True)
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "LAUNCHER", (sys.executable, str(ENGINE)))


def call(folder: Path, out: Path, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["bench", str(folder), "--out", str(out), *arguments])


def table(out: Path) -> list[dict[str, str]]:
    with open(out / "results.csv", newline="") as handle:
        return list(csv.DictReader(handle))


def test_every_instance_has_a_row_and_a_second_run_does_nothing(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "some bench", ["unsat", "sat", "raise MemoryError", "signal SIGSEGV", "unknown"])
    result = call(folder, tmp_path / "out", "--jobs", "2")
    assert result.exit_code == 0, result.output
    rows = table(tmp_path / "out")
    assert [row["verdict"] for row in rows] == ["unsat", "sat", "error", "error", "unknown"]
    assert [row["exit_code"] for row in rows] == ["0", "0", "24", "20", "11"]
    assert all(float(row["seconds"]) > 0 and row["onnx"] == "net.onnx" for row in rows)
    assert "error" in result.stdout and "5 of 5" in result.stdout
    records = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "records").iterdir()}
    assert len(records) == 5 and len(list((tmp_path / "out" / "logs").iterdir())) == 5
    again = call(folder, tmp_path / "out")
    assert "5 already done" in again.stderr and again.exit_code == 0
    assert {path: path.stat().st_mtime_ns for path in records} == records


def test_other_options_or_timeouts_are_run_again(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "b", ["unsat"])
    call(folder, tmp_path / "out")
    assert "0 already done" in call(folder, tmp_path / "out", "--", "--method", "crown").stderr
    (report,) = (tmp_path / "out" / "json").iterdir()
    assert json.loads(report.read_text())["settings"]["method"] == "crown"
    assert "0 already done" in call(folder, tmp_path / "out", "--timeout", "20").stderr
    assert json.loads(report.read_text())["timeout"] == 20
    assert "1 already done" in call(folder, tmp_path / "out", "--timeout", "20").stderr
    assert "0 already done" in call(folder, tmp_path / "out", "--timeout-scale", "0.5").stderr
    assert table(tmp_path / "out")[0]["timeout"] == "15.0"


@pytest.mark.parametrize(
    "bad",
    [
        ["--method", "magic"],
        ["--set", "alpha.iteration=1"],
        ["third.vnnlib"],
        ["--nonsense"],
        ["--timeout", "3"],
        ["--json", "x"],
        ["--list", "x"],
        ["--journal", "x"],
    ],
)
def test_what_every_run_would_refuse_is_refused_before_the_first(tmp_path: Path, bad: list[str]) -> None:
    folder = make_folder(tmp_path / "b", ["unsat"])
    result = call(folder, tmp_path / "out", "--", *bad)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert not (tmp_path / "out").exists()


def test_a_broken_record_is_none(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "b", ["unsat"])
    call(folder, tmp_path / "out")
    (record,) = (tmp_path / "out" / "records").iterdir()
    record.write_text('{"onnx": ')
    assert "0 already done" in call(folder, tmp_path / "out").stderr
    assert json.loads(record.read_text())["verdict"] == "unsat"


def test_an_instance_without_a_network_is_an_error_of_its_own(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "b", ["unsat"])
    (folder / "net.onnx.gz").unlink()
    call(folder, tmp_path / "out")
    (row,) = table(tmp_path / "out")
    assert (row["verdict"], row["exit_code"]) == ("error", "21")


def start(folder: Path, out: Path) -> subprocess.Popen[str]:
    """`bench` over the fake engine, as a process of its own."""
    script = (
        f"import sys\nfrom parverify.cli import bench, main\n"
        f"bench.LAUNCHER = (sys.executable, {str(ENGINE)!r})\nmain(['bench', {str(folder)!r}, '--out', {str(out)!r}])"
    )
    return subprocess.Popen(
        [
            sys.executable,
            "-c",
            script.replace("import bench, main", "import main\nimport parverify.cli.bench as bench"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


def wait_for(path: Path, text: str) -> None:
    until = time.monotonic() + 20
    while not path.exists() or text not in path.read_text():
        assert time.monotonic() < until, f"{path} never holds {text!r}"
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_run_is_resumed(tmp_path: Path, number: signal.Signals) -> None:
    folder, out = make_folder(tmp_path / "b", ["unsat", "sleep 60", "unsat"]), tmp_path / "out"
    process = start(folder, out)
    wait_for(out / "logs" / "0001-net.onnx-p1.vnnlib.log", "a library prints")
    process.send_signal(number)
    process.communicate(timeout=10)
    assert process.returncode == (-number if number == signal.SIGKILL else 11)
    assert [path.name for path in (out / "records").iterdir()] == ["0000-net.onnx-p0.vnnlib.json"]
    # What ran has ended too, and has not left an answer that it did not find.
    wait_for(out / "json" / "0001-net.onnx-p1.vnnlib.json", "interrupted by")
    assert (out / "results" / "0001-net.onnx-p1.vnnlib.txt").read_text() == "unknown\n"
    (folder / "vnnlib" / "p1.vnnlib").write_text("sat")
    result = call(folder, out)
    assert result.exit_code == 0 and "1 already done" in result.stderr
    assert [row["verdict"] for row in table(out)] == ["unsat", "sat", "unsat"]


def test_an_instance_that_somebody_else_interrupts_is_left_open(tmp_path: Path) -> None:
    folder, out = make_folder(tmp_path / "b", ["signal SIGTERM"]), tmp_path / "out"
    result = call(folder, out)
    assert result.exit_code == 11 and table(out) == []


def test_two_runs_may_not_share_a_folder(tmp_path: Path) -> None:
    folder, out = make_folder(tmp_path / "b", ["sleep 60"]), tmp_path / "out"
    process = start(folder, out)
    wait_for(out / "logs" / "0000-net.onnx-p0.vnnlib.log", "a library prints")
    result = call(folder, out)
    process.terminate()
    process.communicate(timeout=10)
    assert result.exit_code == 2 and "another run is using" in result.stderr


def test_an_instance_that_ignores_its_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "LAUNCHER", (sys.executable, "-c", "import time; time.sleep(60)"))
    monkeypatch.setattr(bench, "_GRACE", 0.1)
    folder = make_folder(tmp_path / "b", ["unsat"], timeout=0.2)
    assert call(folder, tmp_path / "out").exit_code == 0
    assert table(tmp_path / "out")[0]["verdict"] == "timeout"


def test_an_old_answer_does_not_pass_for_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, out = make_folder(tmp_path / "b", ["unsat"]), tmp_path / "out"
    call(folder, out)
    monkeypatch.setattr(bench, "LAUNCHER", (sys.executable, "-c", "raise SystemExit(3)"))
    call(folder, out, "--timeout", "7")
    assert table(out)[0]["verdict"] == "error"


def test_reading_instances(tmp_path: Path) -> None:
    text = "\ufeffonnx/a.onnx, vnnlib/b.vnnlib , 60\n\nonnx/a.onnx,vnnlib/c.vnnlib,210.0\n"
    (tmp_path / "instances.csv.gz").write_bytes(gzip.compress(text.encode()))
    assert read_instances(tmp_path) == [
        Instance(0, "onnx/a.onnx", "vnnlib/b.vnnlib", 60.0),
        Instance(1, "onnx/a.onnx", "vnnlib/c.vnnlib", 210.0),
    ]


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("", "no instance in it"), ("onnx,vnnlib,timeout\n", "no instance in it"), ("a,b,1\na,b\n", "line 2 is not"),
        ("a,b,1\na,b,soon\n", "line 2 is not"), ("a,b,1\n,b,1\n", "line 2 is not"), ("a,b,0\n", "line 1 is not"),
        ("a,b,-3\nc,d,1\n", "line 1 is not"), ("a.onnx,b.vnnlib\nc,d,1\n", "line 1 is not"),
        ("a,b,nan\nc,d,1\n", "line 1 is not"), ("a" * 200_000 + ",b,1\n", "field larger than field limit"),
    ],
)  # fmt: skip
def test_rows_that_are_none(tmp_path: Path, text: str, where: str) -> None:
    (tmp_path / "instances.csv").write_text(text)
    with pytest.raises(UsageError, match=where):
        read_instances(tmp_path)


def test_paths(tmp_path: Path) -> None:
    (tmp_path / "n=2.onnx.gz").write_text("")
    assert locate(tmp_path, "n=2.onnx") == f"{tmp_path}/n=2.onnx"
    assert locate(tmp_path, "f=a.onnx;g=b.onnx") == f"f={tmp_path}/a.onnx;g={tmp_path}/b.onnx"


def test_names_differ_and_are_plain() -> None:
    names = [Instance(i, "a/odd name!.onnx.gz", "b/../c.vnnlib", 1.0).name for i in (0, 1)]
    assert names == ["0000-odd_name_.onnx-c.vnnlib", "0001-odd_name_.onnx-c.vnnlib"]


def test_spread() -> None:
    instances = [Instance(i, "a", "b", 1.0) for i in range(10)]
    assert [item.number for item in spread(instances, 4)] == [0, 2, 5, 7]
    assert spread(instances, None) == spread(instances, 99) == instances
