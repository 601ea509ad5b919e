"""The interval rules that prove the `unsat` examples, operator by operator against onnxruntime."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@dataclass(frozen=True)
class Case:
    """One operator.

    Args:
        shapes: of the inputs with an interval, each with a batch of one.
        weights: shapes of the constant inputs behind them, or their values.
    """

    op: str
    shapes: tuple[tuple[int, ...], ...]
    weights: tuple[tuple[int, ...] | np.ndarray, ...] = ()
    attributes: dict[str, object] = field(default_factory=dict)


IMAGE = (1, 2, 5, 5)
CONV = {"strides": [2, 2], "pads": [1, 1, 1, 1]}
CASES = [
    Case("Gemm", ((1, 6),), ((4, 6), (4,)), {"transB": 1}),
    Case("Conv", (IMAGE,), ((3, 2, 3, 3), (3,)), CONV),
    Case("Conv", (IMAGE,), ((3, 2, 2, 2),), {"strides": [1, 1], "pads": [0, 0, 0, 0]}),
    Case("BatchNormalization", (IMAGE,), ((2,), (2,), (2,), np.array([0.5, 2.0], np.float32)), {"epsilon": 1e-5}),
    Case("Relu", ((1, 7),)),
    Case("Sigmoid", ((1, 7),)),
    Case("Softmax", ((1, 2, 3, 4),), (), {"axis": -1}),
    Case("Add", ((1, 4, 6), (1, 4, 6))),
    Case("Add", ((1, 4, 6),), ((6,),)),
    Case("Mul", ((1, 4, 6), (1, 4, 6))),
    Case("Mul", ((1, 4, 6),), ((),)),
    Case("MatMul", ((1, 2, 3, 4), (1, 2, 4, 3))),
    Case("MatMul", ((1, 3, 4),), ((4, 5),)),
    Case("Flatten", (IMAGE,), (), {"axis": 1}),
    Case("Reshape", (IMAGE,), (np.array([1, 10, 5]),)),
    Case("Transpose", ((1, 2, 3, 4),), (), {"perm": [0, 2, 1, 3]}),
    Case("ReduceMean", ((1, 3, 4),), (), {"axes": [1], "keepdims": 0}),
]


@pytest.fixture(scope="module")
def intervals() -> Iterator[ModuleType]:
    sys.path.insert(0, str(EXAMPLES))
    try:
        import intervals

        yield intervals
    finally:
        sys.path.remove(str(EXAMPLES))


def make(case: Case, rng: np.random.Generator) -> tuple[onnx.NodeProto, list[np.ndarray], onnxruntime.InferenceSession]:
    """The node, its constants, and a session that runs it alone."""
    constants = [w if isinstance(w, np.ndarray) else rng.normal(size=w).astype(np.float32) for w in case.weights]
    inputs, names = [f"x{i}" for i in range(len(case.shapes))], [f"w{i}" for i in range(len(constants))]
    node = helper.make_node(case.op, [*inputs, *names], ["y"], "node", **case.attributes)
    given = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in zip(inputs, case.shapes, strict=True)]
    stored = [numpy_helper.from_array(np.asarray(c), n) for c, n in zip(constants, names, strict=True)]
    graph = helper.make_graph(
        [node], "one", given, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)], stored
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    return node, constants, onnxruntime.InferenceSession(model.SerializeToString(), None, ["CPUExecutionProvider"])


@pytest.mark.parametrize("width", [0.0, 0.3, 4.0])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op}-{len(case.shapes)}-{len(case.weights)}")
def test_rule_contains_samples(intervals: ModuleType, case: Case, width: float) -> None:
    """Corners and inner points of random intervals; at width zero the rule is the operator itself."""
    rng = np.random.default_rng(0)
    node, constants, session = make(case, rng)
    fixed = [intervals.Interval(np.asarray(c, np.float64), np.asarray(c, np.float64)) for c in constants]
    for _ in range(5):
        lower = [rng.normal(size=s).astype(np.float32).astype(np.float64) for s in case.shapes]
        upper = [low + width * rng.random(low.shape) for low in lower]
        boxes = [intervals.Interval(low, high) for low, high in zip(lower, upper, strict=True)]
        bounds = intervals.apply(node, boxes + fixed)
        for inner in [False] * 20 + [True] * 5:
            shares = [rng.random(low.shape) if inner else rng.random(low.shape) < 0.5 for low in lower]
            points = [low + (high - low) * share for low, high, share in zip(lower, upper, shares, strict=True)]
            y = session.run(None, {f"x{i}": x.astype(np.float32) for i, x in enumerate(points)})[0]
            assert bounds.lower.shape == y.shape
            assert (bounds.lower <= y + 1e-5).all()
            assert (bounds.upper >= y - 1e-5).all()
        if width == 0:
            np.testing.assert_allclose(bounds.lower, bounds.upper, atol=1e-12)


def test_unknown_operators_are_refused(intervals: ModuleType) -> None:
    node = helper.make_node("Tanh", ["x"], ["y"], "some_node")
    x = intervals.Interval(np.zeros((1, 2)), np.ones((1, 2)))
    with pytest.raises(ValueError, match=r"some_node.*Tanh"):
        intervals.apply(node, [x])
