"""The three scripts of the competition's interface, over a fake engine, from any folder and under a traced shell."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / "tests" / "cli" / "fake_engine.py"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("bash") is None, reason="bash is absent"),
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the scripts' clock needs /proc"),
]


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    """A copy of the scripts in a folder with a space in its name, and a `parverify` with the fake engine."""
    folder = tmp_path / "the tool" / "vnncomp"
    shutil.copytree(ROOT / "vnncomp", folder, ignore=shutil.ignore_patterns(".venv", ".run"))
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "parverify"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{ENGINE}" "$@"\n')
    command.chmod(0o755)
    return folder


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """The working directory, with the files of an instance in folders with spaces."""
    folder = tmp_path / "working directory"
    (folder / "the files").mkdir(parents=True)
    (folder / "the files" / "a net.onnx").write_text("no network")
    return folder


def environment(scripts: Path, **extra: str) -> dict[str, str]:
    path = f"{scripts.parents[1] / 'bin'}:{os.environ['PATH']}"
    return os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)} | extra


def instance(work: Path, behaviour: str) -> list[str]:
    (work / "the files" / "a spec.vnnlib").write_text(behaviour)
    return ["v1", "any category", "the files/a net.onnx", "the files/a spec.vnnlib"]


def call(script: Path, arguments: list[str], work: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    env = environment(script.parent, **extra)
    return subprocess.run(
        ["bash", str(script), *arguments], cwd=work, env=env, capture_output=True, text=True, timeout=60
    )


SHELLS = [{}, {"SHELLOPTS": "xtrace"}, {"SHELLOPTS": "errexit:nounset:pipefail:xtrace"}]


@pytest.mark.parametrize("extra", SHELLS)
@pytest.mark.parametrize(
    ("behaviour", "word"), [("unsat", "unsat"), ("sat", "sat"), ("raise ValueError", "error"), ("exit 3", "error")]
)
def test_run_instance(scripts: Path, work: Path, behaviour: str, word: str, extra: dict[str, str]) -> None:
    arguments = [*instance(work, behaviour), "out here/results.txt", "30"]
    done = call(scripts / "run_instance.sh", arguments, work, **extra)
    assert done.returncode == 0, done.stderr
    lines = (work / "out here" / "results.txt").read_text().splitlines()
    assert lines[0] == word and len(lines) == (5 if word == "sat" else 1)


@pytest.mark.parametrize("behaviour", ["sleep 30", "locked 30"])
def test_the_answer_stands_before_the_timeout(scripts: Path, work: Path, behaviour: str) -> None:
    results, begun = work / "results.txt", time.monotonic()
    process = subprocess.Popen(
        ["bash", str(scripts / "run_instance.sh"), *instance(work, behaviour), "results.txt", "2"],
        cwd=work,
        env=environment(scripts, SHELLOPTS="xtrace"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while not results.exists() or results.read_text() != "timeout\n":
        assert time.monotonic() - begun < 2.0
        time.sleep(0.01)
    assert process.wait(timeout=3) == 0


def test_a_slow_launch_counts_against_the_timeout(scripts: Path, work: Path) -> None:
    command = scripts.parents[1] / "bin" / "parverify"
    command.write_text(command.read_text().replace("exec", "sleep 1\nexec"))
    begun = time.monotonic()
    done = call(scripts / "run_instance.sh", [*instance(work, "sleep 30"), "results.txt", "2.5"], work)
    assert time.monotonic() - begun < 3.0
    assert done.returncode == 0 and (work / "results.txt").read_text() == "timeout\n"


def test_a_parverify_that_can_not_start_is_an_error(scripts: Path, work: Path) -> None:
    (scripts.parents[1] / "bin" / "parverify").write_text("#!/bin/sh\nexit 127\n")
    call(scripts / "run_instance.sh", [*instance(work, "unsat"), "results.txt", "30"], work)
    assert (work / "results.txt").read_text() == "error\n"


@pytest.mark.parametrize("extra", SHELLS)
def test_prepare_instance(scripts: Path, work: Path, extra: dict[str, str]) -> None:
    prepare = scripts / "prepare_instance.sh"
    arguments = instance(work, "unsat")
    assert call(prepare, arguments, work, **extra).returncode == 0
    (work / "the files" / "a net.onnx").rename(work / "the files" / "a net.onnx.gz")
    assert call(prepare, arguments, work, **extra).returncode == 0
    (work / "the files" / "a spec.vnnlib").unlink()
    done = call(prepare, arguments, work, **extra)
    assert done.returncode == 1 and "no such file: the files/a spec.vnnlib" in done.stderr


@pytest.mark.parametrize("script", ["install_tool.sh", "prepare_instance.sh", "run_instance.sh"])
def test_another_version_is_refused(scripts: Path, work: Path, script: str) -> None:
    done = call(scripts / script, ["v2", *instance(work, "unsat")[1:], "results.txt", "30"], work)
    assert done.returncode == 1 and "must be v1" in done.stderr
    assert not (work / "results.txt").exists()


def test_prepare_ends_a_leftover_of_ours(scripts: Path, work: Path) -> None:
    process = subprocess.Popen(
        ["bash", str(scripts / "run_instance.sh"), *instance(work, "sleep 60"), "results.txt", "60"],
        cwd=work,
        env=environment(scripts),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    process.stderr.readline()  # the engine is at work
    assert call(scripts / "prepare_instance.sh", instance(work, "unsat"), work).returncode == 0
    process.communicate(timeout=5)
    assert (work / "results.txt").read_text() == "unknown\n"


def test_prepare_leaves_a_process_alone_that_only_has_the_same_number(scripts: Path, work: Path) -> None:
    process = subprocess.Popen(["sleep", "60"])
    try:
        (scripts / ".run").mkdir()
        (scripts / ".run" / "pid").write_text(f"{process.pid} 12345\n")
        assert call(scripts / "prepare_instance.sh", instance(work, "unsat"), work).returncode == 0
        assert process.poll() is None
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
