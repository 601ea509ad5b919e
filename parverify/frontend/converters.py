"""Which ONNX operators can be converted, and by whom: onnx2torch, or a function of ours.

`OURS` holds what onnx2torch lacks or gets wrong; a row says for which nodes onnx2torch serves all the same. `RESTATED`
holds what onnx2torch reads in an older version only: there constant inputs become the attributes that they once were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from parverify.frontend.converters_common import Call, Operator, axis_of
from parverify.frontend.converters_elementwise import ELEMENTWISE
from parverify.frontend.converters_linear import LINEAR
from parverify.frontend.converters_shape import SHAPE
from parverify.frontend.converters_spatial import SPATIAL
from parverify.frontend.normalize import COPIES, FOLDED

OURS: Mapping[str, Operator] = MappingProxyType({**ELEMENTWISE, **LINEAR, **SHAPE, **SPATIAL})
"""Operators with a function of ours."""

THEIRS = frozenset(
    {"Abs", "Acos", "Add", "And", "ArgMax", "ArgMin", "Asin", "Atan", "Ceil", "Celu", "Concat", "Cos", "Div", "Einsum"}
    | {"Elu", "Equal", "Erf", "Exp", "Expand", "Floor", "Gather", "GlobalAveragePool", "Greater"}
    | {"GreaterOrEqual", "HardSigmoid", "HardSwish", "InstanceNormalization", "IsNaN", "LeakyRelu", "LRN", "Less"}
    | {"LessOrEqual", "Log", "LogSoftmax", "MatMul", "Mod", "Mul", "Neg", "Not", "Or", "Pow", "Reciprocal", "Relu"}
    | {"Round", "Sigmoid", "Sign", "Sin", "Softmax", "Softplus", "Softsign", "Sqrt", "Sub", "Tan", "Tanh", "Tile"}
    | {"Transpose", "Where", "Xor"}
)
"""Operators that onnx2torch converts as they are."""

SAME_AS: Mapping[tuple[str, int], int] = MappingProxyType(
    {
        ("BatchNormalization", 7): 9,
        ("Cast", 6): 9,
        ("Flatten", 1): 9,
        ("Gemm", 7): 9,
        ("MaxPool", 1): 8,
    }
)
"""Old versions that onnx2torch lacks, and newer ones that do the same for what the older one allows."""

WITH_JUMPS = frozenset(
    {"Sign", "Floor", "Ceil", "Round", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"}
    | {"ArgMax", "ArgMin", "CastLike", "ThresholdedRelu", "Shrink", "Mod"}
)
"""Operators whose result may jump when an input moves by one rounding."""

Restatement = tuple[int, dict[str, Any]]
"""A version, and attributes that replace the node's own."""


def _reduction(call: Call) -> Restatement:
    axes = call.ints("axes", 1) or range(call.rank)
    # In order and counted from the front: onnx2torch reduces one axis after the other for some.
    return 11, {"axes": sorted(axis_of(axis, call.rank) for axis in axes), "keepdims": call.get("keepdims", 1)}


def _squeeze(call: Call) -> Restatement:
    axes = call.ints("axes", 1)
    if axes is None:
        shape = call.shapes[0] if call.shapes[0] is not None else ()
        axes = [axis for axis in range(call.rank) if shape[axis] == 1]
    return 11, {"axes": [axis_of(axis, call.rank) for axis in axes]}


def _unsqueeze(call: Call) -> Restatement:
    axes = call.ints("axes", 1) or []
    return 11, {"axes": [axis_of(axis, call.rank + len(axes)) for axis in axes]}


def _split(call: Call) -> Restatement:
    axis, sizes = axis_of(call.get("axis", 0), call.rank), call.ints("split", 1)
    if sizes is None:
        shape = call.shapes[0] if call.shapes[0] is not None else ()
        step = -(-shape[axis] // call.n_outputs)
        sizes = [max(0, min(step, shape[axis] - k * step)) for k in range(call.n_outputs)]
    return 11, {"axis": axis, "split": sizes}


REDUCTIONS = frozenset(
    {"ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd"}
    | {"ReduceSum", "ReduceSumSquare"}
)

RESTATED: Mapping[str, Callable[[Call], Restatement]] = MappingProxyType(
    {**dict.fromkeys(REDUCTIONS, _reduction), "Split": _split, "Squeeze": _squeeze, "Unsqueeze": _unsqueeze}
)
"""Operators that onnx2torch converts in another version; input 1 must be constant."""

OPERATORS = frozenset(OURS) | THEIRS | frozenset(RESTATED) | FOLDED | COPIES
"""Names of the supported ONNX operators."""
