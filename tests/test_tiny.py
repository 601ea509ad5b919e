"""The smoke test of the public API: one network small enough to do in the head, under five seconds in all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import parverify
from parverify.errors import ParverifyError
from parverify.frontend.query import Disjunct, Query

# y = relu(x0 + x1) + relu(x0 - x1): over [-1, 1]^2 the largest value is 2, on the edge x0 = 1, and the smallest 0.
HIDDEN = np.array([[1.0, 1.0], [1.0, -1.0]], dtype=np.float32)
OUTPUT = np.array([[1.0, 1.0]], dtype=np.float32)


def network() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 1, bias=False))
    with torch.no_grad():
        module[0].weight.copy_(torch.from_numpy(HIDDEN))
        module[2].weight.copy_(torch.from_numpy(OUTPUT))
    return module


@pytest.fixture
def model(tmp_path: Path) -> Path:
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["a"], "first"),
        helper.make_node("Relu", ["a"], ["b"], "relu"),
        helper.make_node("MatMul", ["b", "w1"], ["y"], "second"),
    ]
    weights = [numpy_helper.from_array(w.T.copy(), name) for name, w in (("w0", HIDDEN), ("w1", OUTPUT))]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", (1, 2)), ("y", (1, 1))))
    graph = helper.make_graph(nodes, "tiny", [x], [y], weights)
    path = tmp_path / "tiny.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), path)
    return path


def write_spec(folder: Path, threshold: float) -> Path:
    """Unsafe where y >= threshold somewhere in [-1, 1]^2."""
    box = "".join(f"(assert (>= X_{i} -1.0))(assert (<= X_{i} 1.0))" for i in range(2))
    declared = "(declare-const X_0 Real)(declare-const X_1 Real)(declare-const Y_0 Real)"
    path = folder / "tiny.vnnlib"
    path.write_text(f"{declared}{box}(assert (>= Y_0 {threshold}))\n")
    return path


def query(threshold: float) -> Query:
    """The same property without a file."""
    edge = np.ones(2)
    part = Disjunct(-edge, edge, np.array([[-1.0]]), np.array([-threshold]), np.array([False]))
    return Query(2, 1, (part,))


def test_sat_comes_with_a_witness(model: Path, tmp_path: Path) -> None:
    result = parverify.verify(model, write_spec(tmp_path, 1.9), timeout=20)
    assert result.verdict.value == "sat", result.reason
    x = result.witness.x
    assert (np.abs(x) <= 1).all()
    assert np.maximum(HIDDEN @ x, 0).sum() >= 1.9


def test_unsat_just_above_the_maximum(model: Path, tmp_path: Path) -> None:
    result = parverify.verify(model, write_spec(tmp_path, 2.01), timeout=20)
    assert result.verdict.value == "unsat", result.reason
    assert result.witness is None


@pytest.mark.parametrize(("threshold", "verdict"), [(1.9, "sat"), (2.01, "unsat")])
def test_modules_and_queries_need_no_files(threshold: float, verdict: str) -> None:
    result = parverify.verify(network(), query(threshold), timeout=20)
    assert result.verdict.value == verdict, result.reason


def test_bounds_hold_the_attained_range() -> None:
    lower, upper = torch.full((1, 2), -1.0), torch.ones(1, 2)
    # Intervals see that each relu alone reaches 2; the line above both relus gives x0 + 2.
    for method, highest in (("ibp", 4.0), ("crown", 3.0)):
        bounds = parverify.compute_bounds(network(), lower, upper, method=method)
        assert float(bounds.upper.max()) == pytest.approx(highest, abs=1e-4), method
        assert float(bounds.lower.min()) <= 0, method


def test_bounds_of_a_point_are_its_value() -> None:
    x = torch.tensor([[0.5, -0.25]])
    bounds = parverify.compute_bounds(network(), x, x, method="crown")
    torch.testing.assert_close(bounds.lower.reshape(1, 1), network()(x).detach(), atol=1e-5, rtol=0)
    torch.testing.assert_close(bounds.upper.reshape(1, 1), network()(x).detach(), atol=1e-5, rtol=0)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ParverifyError, match="method"):
        parverify.compute_bounds(network(), torch.zeros(1, 2), torch.ones(1, 2), method="no-such-method")
    with pytest.raises(ParverifyError):
        parverify.compute_bounds(network(), torch.zeros(1, 3), torch.ones(1, 3), method="crown")
