"""A fake engine, in processes of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ENGINE = Path(__file__).with_name("fake_engine.py")
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Files:
    """The files of one run; `results` does not exist yet."""

    folder: Path
    model: Path
    spec: Path
    results: Path
    json: Path

    def arguments(self, *extra: str) -> list[str]:
        """`run` with all of them."""
        files = ["--results-file", str(self.results), "--json", str(self.json)]
        return ["run", str(self.model), str(self.spec), *files, *extra]


@pytest.fixture
def files(tmp_path: Path) -> Callable[[str], Files]:
    """Makes the files for a behaviour of the fake engine."""

    def make(behaviour: str) -> Files:
        model, spec = tmp_path / "a net.onnx", tmp_path / "a spec.vnnlib"
        model.write_text("no network")
        spec.write_text(behaviour)
        return Files(tmp_path, model, spec, tmp_path / "results.txt", tmp_path / "report.json")

    return make


def start(
    arguments: list[str], launcher: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """A process of the command line over the fake engine, or of a launcher, a module with its options, that runs it."""
    variables = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | dict(environment or {})
    command = [sys.executable, *launcher, str(ENGINE), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables)


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """A shell that started the tests in the background made them ignore SIGINT, and what they start inherits that."""
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def run() -> Callable[[list[str]], subprocess.CompletedProcess[str]]:
    """Runs the command line over the fake engine."""

    def call(arguments: list[str]) -> subprocess.CompletedProcess[str]:
        process = start(arguments)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    return call
