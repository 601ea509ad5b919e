"""The examples' known answers, checked without the code that made them: replayed witnesses, sampled boxes."""

from __future__ import annotations

import csv
import importlib
import os
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import onnxruntime
import pytest

import parverify

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
BUNDLED = EXAMPLES / "bundled"
KINDS = ("ball_sat", "ball_unsat", "square_sat", "square_unsat")


class Spec:
    """The little of VNN-LIB 1.0 that the script writes: a box, and pairs (j, i) of which one has Y_j >= Y_i."""

    def __init__(self, path: Path) -> None:
        text = path.read_text()
        self.lower = self._edges(text, ">=")
        self.upper = self._edges(text, "<=")
        self.unsafe = [(int(j), int(i)) for j, i in re.findall(r"\(and \(>= Y_(\d+) Y_(\d+)\)\)", text)]
        assert len(self.lower) == len(self.upper) == 64
        assert len(self.unsafe) == 9
        assert (self.lower <= self.upper).all()

    @staticmethod
    def _edges(text: str, relation: str) -> np.ndarray:
        found = re.findall(rf"\(assert \({relation} X_(\d+) ([\d.]+)\)\)", text)
        assert [int(i) for i, _ in found] == list(range(64))
        return np.array([float(v) for _, v in found])

    def holds(self, x: np.ndarray, y: np.ndarray) -> bool:
        inside = ((self.lower <= x) & (x <= self.upper)).all()
        return bool(inside and any(y[j] >= y[i] for j, i in self.unsafe))

    def samples(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Uniform points, corners and the centre, as float32 inside the box."""
        span = self.upper - self.lower
        free = self.lower + span * rng.random((count, 64))
        corners = np.where(rng.random((count, 64)) < 0.5, self.lower, self.upper)
        points = np.concatenate([free, corners, [(self.lower + self.upper) / 2]])
        return np.clip(points.astype(np.float32), self.lower.astype(np.float32), self.upper.astype(np.float32))


def session(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])


def scores(network: onnxruntime.InferenceSession, x: np.ndarray) -> np.ndarray:
    given = network.get_inputs()[0]
    return network.run(None, {given.name: x.astype(np.float32).reshape(given.shape)})[0].ravel()


def expected(folder: Path) -> list[dict[str, str]]:
    with (folder / "expected.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def read_witness(path: Path) -> tuple[np.ndarray, np.ndarray]:
    text = path.read_text()
    assert text.startswith("sat\n((X_0 ")
    x, y = ([float(v) for v in re.findall(rf"\({name}_\d+ (\S+?)\)", text)] for name in "XY")
    return np.array(x), np.array(y)


def check_folder(folder: Path) -> None:
    """Every `sat` has a witness that replays exactly; no sample contradicts an `unsat`."""
    rng = np.random.default_rng(0)
    rows = expected(folder)
    assert {row["verdict"] for row in rows} == {"sat", "unsat"}
    with (folder / "instances.csv").open(newline="") as file:
        assert [tuple(row[:2]) for row in csv.reader(file)] == [(row["onnx"], row["vnnlib"]) for row in rows]
    for row in rows:
        network, spec = session(folder / row["onnx"]), Spec(folder / row["vnnlib"])
        assert row["why"]
        if row["verdict"] == "sat":
            x, y = read_witness((folder / row["vnnlib"]).with_suffix(".witness"))
            assert spec.holds(x, scores(network, x)), row
            np.testing.assert_allclose(y, scores(network, x), atol=1e-4)
        else:
            assert not any(spec.holds(x, scores(network, x)) for x in spec.samples(200, rng)), row


SCRIPT = """
import runpy, sys
script, *folders = sys.argv[1:]
sys.path.insert(0, script.rpartition("/")[0])
for options in (["--out", folders[0]], ["--bundled", "--out", folders[1]]):
    sys.argv = [script, *options]
    runpy.run_path(script, run_name="__main__")
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders that the script has just written, one without and one with `--bundled`, in a process of its own."""
    folders = tmp_path_factory.mktemp("all"), tmp_path_factory.mktemp("bundled")
    command = [sys.executable, "-c", SCRIPT, str(EXAMPLES / "make_examples.py"), *map(str, folders)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "7"}
    subprocess.run(command, check=True, env=environment, timeout=280)
    return folders


@pytest.fixture(scope="module")
def made(written: tuple[Path, Path]) -> Path:
    """A folder of all examples that the script has just written."""
    return written[0]


@pytest.fixture(scope="module")
def intervals() -> ModuleType:
    sys.path.insert(0, str(EXAMPLES))
    try:
        return importlib.import_module("intervals")
    finally:
        sys.path.remove(str(EXAMPLES))


def box_margins(intervals: ModuleType, model: onnx.ModelProto, spec: Spec) -> np.ndarray:
    """Lower bounds on every safe margin over the whole box, (9,)."""
    rows = np.zeros((len(spec.unsafe), 10))
    for row, (other, label) in zip(rows, spec.unsafe, strict=True):
        row[label], row[other] = 1, -1
    shape = [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim]
    return intervals.bound_margins(model, spec.lower.reshape(shape), spec.upper.reshape(shape), rows)[0]


def check_intervals(intervals: ModuleType, folder: Path) -> None:
    """Interval bounds lie below sampled margins, and prove no box that has a witness."""
    rng = np.random.default_rng(1)
    for row in expected(folder):
        spec, model = Spec(folder / row["vnnlib"]), onnx.load(folder / row["onnx"])
        bounds = box_margins(intervals, model, spec)
        network = session(folder / row["onnx"])
        for x in spec.samples(30, rng):
            y = scores(network, x)
            margins = np.array([y[i] - y[j] for j, i in spec.unsafe])
            assert (bounds <= margins + 1e-4).all(), row
        if row["verdict"] == "sat":
            assert bounds.min() < 0, row
        elif "ball" in row["vnnlib"]:
            assert bounds.min() >= intervals.MARGIN, row


def test_bundled_answers_are_right() -> None:
    check_folder(BUNDLED)


def test_intervals_are_sound_on_the_bundled_example(intervals: ModuleType) -> None:
    check_intervals(intervals, BUNDLED)


def test_cells_cover_the_box(intervals: ModuleType) -> None:
    lower, upper = np.array([0.0, 0.1, 0.5]), np.array([1.0, 0.4, 0.5])
    low, high = intervals.cells(lower, upper, 3)
    assert low.shape == (9, 3)
    assert (low.min(0) == lower).all()
    assert (high.max(0) == upper).all()
    for x in np.random.default_rng(0).uniform(lower, upper, (200, 3)):
        assert ((low <= x) & (x <= high)).all(1).any()
    assert np.prod(high - low + (lower == upper), axis=1).sum() == pytest.approx(0.3)


@pytest.mark.parametrize("row", expected(BUNDLED), ids=lambda row: row["verdict"])
def test_parverify_solves_the_bundled_example(row: dict[str, str]) -> None:
    result = parverify.verify(BUNDLED / row["onnx"], BUNDLED / row["vnnlib"], timeout=60)
    assert result.verdict.value == row["verdict"], result.reason
    if row["verdict"] == "sat":
        spec, network = Spec(BUNDLED / row["vnnlib"]), session(BUNDLED / row["onnx"])
        assert spec.holds(result.witness.x, scores(network, result.witness.x))


@pytest.mark.slow
def test_script_writes_right_answers(made: Path) -> None:
    names = {(row["onnx"], row["vnnlib"]) for row in expected(made)}
    networks = ("mlp", "sigmoid", "resnet", "transformer")
    assert names == {(f"{name}.onnx", f"{name}_{kind}.vnnlib") for name in networks for kind in KINDS}
    check_folder(made)


@pytest.mark.slow
def test_intervals_are_sound_on_every_network(made: Path, intervals: ModuleType) -> None:
    check_intervals(intervals, made)


@pytest.mark.slow
def test_script_is_deterministic(written: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process writes what another one, with other hashes and something before it, has written."""
    script = str(EXAMPLES / "make_examples.py")
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", [script, "--bundled", "--out", str(tmp_path)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter
        runpy.run_path(script, run_name="__main__")
    assert len(list(written[1].iterdir())) == len(list(tmp_path.iterdir())) > 4
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (written[1] / path.name).read_bytes(), path.name


@pytest.mark.slow
def test_parverify_never_contradicts_the_examples(made: Path) -> None:
    verdicts = {}
    for row in expected(made):
        result = parverify.verify(made / row["onnx"], made / row["vnnlib"], timeout=10)
        assert result.verdict.value in (row["verdict"], "unknown", "timeout"), (row, result.reason)
        verdicts[row["vnnlib"]] = result.verdict.value == row["verdict"]
    assert all(solved for name, solved in verdicts.items() if "ball_unsat" in name), verdicts
    assert sum(verdicts.values()) >= 12, verdicts
