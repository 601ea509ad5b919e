"""Small ONNX models, one operator each, for comparing the converted module with onnxruntime."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

Array = np.ndarray


@dataclass(frozen=True)
class Case:
    """One operator applied to the input `X` and constants.

    Args:
        name: of the case.
        op: the operator.
        shape: of the input.
        inputs: names or constants, in order; "X" is the network's input, "" an absent one.
        attributes: of the node.
        opset: version of the operator set.
        low, high: range of the test points.
        outputs: number of outputs of the node; the last one is the network's.
    """

    name: str
    op: str
    shape: tuple[int, ...]
    inputs: tuple[Any, ...] = ("X",)
    attributes: dict[str, Any] = field(default_factory=dict)
    opset: int = 17
    low: float = -2.0
    high: float = 2.0
    outputs: int = 1

    def model(self) -> bytes:
        """The serialized model."""
        constants, names = {}, []
        for position, part in enumerate(self.inputs):
            name = part if isinstance(part, str) else f"C{position}"
            if not isinstance(part, str):
                constants[name] = np.asarray(part)
            names.append(name)
        outputs = [f"Y{k}" for k in range(self.outputs)]
        node = helper.make_node(self.op, names, outputs, name="the_node", **self.attributes)
        return build(
            [node], constants, shape=self.shape, output=outputs[-1], opset=self.opset, out_type=self._output_type()
        )

    def _output_type(self) -> int:
        if self.op in ("ArgMax", "ArgMin"):
            return TensorProto.INT64
        return TensorProto.BOOL if self.op in ("Greater", "Less", "IsNaN") else TensorProto.FLOAT


def build(
    nodes: list[Any],
    constants: dict[str, Array] | None = None,
    *,
    shape: tuple[Any, ...] = (1, 2),
    output: str = "Y",
    opset: int = 17,
    out_type: int = TensorProto.FLOAT,
    in_type: int = TensorProto.FLOAT,
) -> bytes:
    """A model with the input `X`, serialized."""
    graph = helper.make_graph(
        nodes,
        "case",
        [helper.make_tensor_value_info("X", in_type, shape)],
        [helper.make_tensor_value_info(output, out_type, None)],
        [numpy_helper.from_array(value, name) for name, value in (constants or {}).items()],
    )
    return onnx_bytes(graph, opset)


def onnx_bytes(graph: Any, opset: int = 17) -> bytes:
    """A serialized model around a graph."""
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    return model.SerializeToString()


def _ints(*values: int) -> Array:
    return np.array(values, dtype=np.int64)


def _floats(*values: float) -> Array:
    return np.array(values, dtype=np.float32)


def _random(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def _scalar(value: float) -> Array:
    return np.array(value, dtype=np.float32)


PLAIN = (
    "Abs Ceil Cos Erf Exp Floor HardSigmoid Identity LeakyRelu Neg Relu Round Selu Sigmoid Sign Sin Softplus Softsign"
)
PLAIN += " Tanh Elu ThresholdedRelu HardSwish Celu Mish Atan Sinh Cosh Asinh Dropout Softmax LogSoftmax Shrink"
POSITIVE = "Log Sqrt Reciprocal Acosh"
SMALL = "Tan Asin Acos Atanh"
PAIRS = "Add Sub Mul Div Max Min Sum Mean Pow Greater Less PRelu"
REDUCTIONS = "ReduceSum ReduceMean ReduceMax ReduceMin ReduceProd ReduceL1 ReduceL2 ReduceSumSquare ReduceLogSumExp"


def _elementwise() -> list[Case]:
    x = (1, 3, 4)
    cases = [Case(op, op, x, opset=18) for op in PLAIN.split()]
    cases += [Case(op, op, x, low=1.05, high=4.0) for op in POSITIVE.split()]
    cases += [Case(op, op, x, low=-0.9, high=0.9) for op in SMALL.split()]
    cases += [Case(op, op, x, ("X", np.abs(_random(3, 1)) + 0.5), low=0.3) for op in PAIRS.split()]
    cases += [Case(f"{op}_self", op, x, ("X", "X"), low=0.5) for op in ("Add", "Mul", "Div", "Pow", "Max")]
    cases += [Case(f"Pow_{p}", "Pow", x, ("X", _scalar(p))) for p in (1.0, 2.0, 3.0)]
    cases += [
        Case("Pow_int", "Pow", x, ("X", np.array([2], dtype=np.int64))),
        Case("Pow_base", "Pow", x, (_scalar(1.5), "X")),
        Case("Pow_wide", "Pow", (3,), ("X", _floats(2.0).reshape(1, 1))),
        Case("Sub_from", "Sub", x, (_random(3, 1), "X")),
        Case("Div_from", "Div", x, (_random(3, 1), "X"), low=0.5),
        Case("Mod_fmod", "Mod", x, ("X", _scalar(0.75)), {"fmod": 1}),
        Case("Shrink_own", "Shrink", x, attributes={"bias": 0.2, "lambd": 0.4}),
        Case("Elu_alpha", "Elu", x, attributes={"alpha": 0.3}),
        Case("Selu_own", "Selu", x, attributes={"alpha": 1.3, "gamma": 0.9}),
        Case("Celu_alpha", "Celu", x, attributes={"alpha": 0.7}),
        Case("LeakyRelu_alpha", "LeakyRelu", x, attributes={"alpha": 0.25}),
        Case("HardSigmoid_own", "HardSigmoid", x, attributes={"alpha": 0.4, "beta": 0.3}),
        Case("Gelu", "Gelu", x, opset=20),
        Case("Gelu_tanh", "Gelu", x, attributes={"approximate": "tanh"}, opset=20),
        Case("Sin_22", "Sin", x, opset=22),
        Case("PRelu_one", "PRelu", x, ("X", _floats(0.3))),
        Case("PRelu_channel", "PRelu", (1, 3, 2, 2), ("X", _random(3, 1, 1))),
        Case("Clip_6", "Clip", x, attributes={"min": -0.5, "max": 0.8}, opset=6 + 1),
        Case("Clip_6_open", "Clip", x, attributes={"max": 0.8}, opset=10),
        Case("Clip_11", "Clip", x, ("X", _scalar(-0.5), _scalar(0.8)), opset=11),
        Case("Clip_min", "Clip", x, ("X", _scalar(-0.5), "")),
        Case("Clip_relu", "Clip", x, ("X", _scalar(0.0))),
        Case("Clip_max", "Clip", x, ("X", "", _scalar(0.8))),
        Case("Clip_crossed", "Clip", x, ("X", _scalar(1.0), _scalar(-1.0))),
        Case("Clip_all", "Clip", x, ("X", _scalar(-3.4028235e38), _scalar(3.4028235e38))),
        Case("Max_three", "Max", x, ("X", _random(1, 3, 1), _random(4))),
        Case("Sum_three", "Sum", x, ("X", _random(3, 1), "X")),
        Case("Where", "Where", x, (np.array([True, False, True, False]), "X", _random(3, 1))),
        Case("Cast_same", "Cast", x, attributes={"to": TensorProto.FLOAT}),
        Case("Dropout_7", "Dropout", x, attributes={"ratio": 0.5}, opset=7),
        Case("Softmax_old", "Softmax", (2, 3, 4), opset=11),
        Case("Softmax_old_last", "Softmax", (2, 3, 4), attributes={"axis": 2}, opset=9),
        Case("Softmax_axis", "Softmax", (2, 3, 4), attributes={"axis": 1}, opset=13),
        Case("LogSoftmax_old", "LogSoftmax", (2, 3, 4), attributes={"axis": 1}, opset=11),
    ]
    return cases


def _spatial() -> list[Case]:
    image, line, cube = (1, 2, 6, 5), (1, 2, 7), (1, 2, 4, 4, 5)
    w, b = _random(4, 2, 3, 3), _random(4)
    cases = [
        Case("Conv", "Conv", image, ("X", w, b), {"pads": [1, 1, 1, 1], "strides": [2, 1]}),
        Case("Conv_no_bias", "Conv", image, ("X", w)),
        Case("Conv_empty_bias", "Conv", image, ("X", w, "")),
        Case("Conv_uneven", "Conv", image, ("X", w, b), {"pads": [0, 1, 2, 0]}),
        Case("Conv_groups", "Conv", image, ("X", _random(4, 1, 3, 3), b), {"group": 2}),
        Case("Conv_dilated", "Conv", image, ("X", _random(4, 2, 2, 2), b), {"dilations": [2, 3], "pads": [1, 2, 1, 2]}),
        Case("Conv_1d", "Conv", line, ("X", _random(3, 2, 3)), {"pads": [2, 0]}),
        Case("Conv_3d", "Conv", cube, ("X", _random(3, 2, 2, 3, 2)), {"pads": [0, 1, 0, 1, 1, 0]}),
        Case("ConvTranspose", "ConvTranspose", image, ("X", _random(2, 3, 3, 3), _random(3)), {"strides": [2, 2]}),
        Case("ConvTranspose_1d", "ConvTranspose", line, ("X", _random(2, 3, 3)), {"strides": [2], "pads": [1, 1]}),
        Case("ConvTranspose_3d", "ConvTranspose", cube, ("X", _random(2, 3, 2, 2, 2))),
        Case(
            "ConvTranspose_all",
            "ConvTranspose",
            image,
            ("X", _random(2, 2, 3, 2), _random(4)),
            {"strides": [2, 3], "pads": [1, 0, 1, 0], "output_padding": [1, 2], "group": 2, "dilations": [2, 1]},
        ),
        Case("ConvTranspose_uneven", "ConvTranspose", image, ("X", _random(2, 3, 3, 3)), {"pads": [0, 1, 2, 0]}),
        Case(
            "ConvTranspose_shape",
            "ConvTranspose",
            image,
            ("X", _random(2, 3, 3, 3)),
            {"strides": [2, 2], "output_shape": [12, 10]},
        ),
    ]
    for mode in ("SAME_UPPER", "SAME_LOWER", "VALID"):
        for stride in (1, 2):
            facts = {"auto_pad": mode, "strides": [stride, stride]}
            kernel = {"kernel_shape": [3, 2], **facts}
            cases += [
                Case(f"Conv_{mode}_{stride}", "Conv", image, ("X", _random(4, 2, 2, 3), b), facts),
                Case(f"MaxPool_{mode}_{stride}", "MaxPool", image, attributes=kernel, low=-3, high=-1),
                Case(f"AveragePool_{mode}_{stride}", "AveragePool", image, attributes=kernel),
            ]
            if mode != "VALID":
                case = Case(f"ConvTranspose_{mode}_{stride}", "ConvTranspose", image, ("X", _random(2, 3, 3, 3)), facts)
                cases.append(case)
    return cases + _pooling()


def _pooling() -> list[Case]:
    image, line, cube = (1, 2, 6, 5), (1, 2, 7), (1, 2, 4, 4, 5)
    square, pads = {"kernel_shape": [3, 3]}, {"pads": [1, 1, 1, 1]}
    cases = []
    for op in ("MaxPool", "AveragePool"):
        variants: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
            "plain": (image, square),
            "padded": (image, {**square, **pads, "strides": [2, 2]}),
            "ceil": (image, {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1}),
            "ceil_padded": (image, {**square, **pads, "strides": [2, 2], "ceil_mode": 1}),
            "ceil_dropped": ((1, 1, 5, 5), {"kernel_shape": [1, 1], "strides": [3, 3], "ceil_mode": 1}),
            "uneven": (image, {**square, "pads": [0, 1, 2, 0], "strides": [2, 1]}),
            "wide": (image, {**square, "pads": [2, 2, 2, 2]}),
            "dilated": (image, {"kernel_shape": [2, 2], "dilations": [2, 3]}),
            "1d": (line, {"kernel_shape": [3], "pads": [1, 0]}),
            "3d": (cube, {"kernel_shape": [2, 2, 3]}),
        }
        for name, (shape, facts) in variants.items():
            opset = 19 if op == "AveragePool" and name == "dilated" else 12
            cases.append(Case(f"{op}_{name}", op, shape, attributes=facts, opset=opset, low=-3, high=-1))
    counted = {"count_include_pad": 1}
    dilated = {"kernel_shape": [2, 2], "dilations": [3, 3]}
    cases += [
        Case("MaxPool_dilated_uneven", "MaxPool", image, attributes={**dilated, "pads": [1, 1, 0, 1]}, low=-3, high=-1),
        Case("AveragePool_counted", "AveragePool", image, attributes={**square, **pads, **counted}),
        Case("AveragePool_counted_odd", "AveragePool", image, attributes={**square, "pads": [0, 1, 2, 0], **counted}),
        Case(
            "AveragePool_counted_ceil",
            "AveragePool",
            image,
            attributes={**square, **pads, **counted, "strides": [2, 2], "ceil_mode": 1},
            opset=19,
        ),
        Case("GlobalAveragePool", "GlobalAveragePool", image),
        Case("GlobalMaxPool", "GlobalMaxPool", image),
    ]
    return cases


def _linear() -> list[Case]:
    image = (1, 4, 3, 2)
    channels = tuple(_random(4) + k for k in range(3))
    batch_norm = ("X", *channels, np.abs(_random(4)) + 0.5)
    cases = [
        Case("MatMul", "MatMul", (1, 3), ("X", _random(3, 4))),
        Case("MatMul_left", "MatMul", (3, 2), (_random(4, 3), "X")),
        Case("MatMul_batch", "MatMul", (2, 3, 4), ("X", _random(2, 4, 2))),
        Case("MatMul_vector", "MatMul", (3,), ("X", _random(3, 4))),
        Case("Gemm", "Gemm", (1, 3), ("X", _random(3, 4), _random(4))),
        Case("Gemm_no_bias", "Gemm", (1, 3), ("X", _random(3, 4))),
        Case("Gemm_B", "Gemm", (2, 3), ("X", _random(4, 3), _random(2, 1)), {"transB": 1, "alpha": 0.5, "beta": 2.0}),
        Case("Gemm_A", "Gemm", (3, 2), ("X", _random(3, 4), _scalar(0.5)), {"transA": 1}),
        Case("Gemm_second", "Gemm", (3, 4), (_random(2, 3), "X", _random(1, 4))),
        Case("Gemm_7", "Gemm", (1, 3), ("X", _random(3, 4), _random(4)), opset=7),
        Case("Gemm_constant", "Gemm", (1, 4), (_random(1, 3), _random(4, 3), "X"), {"beta": 0.5, "transB": 1}),
        Case("Gemm_wide_bias", "Gemm", (1, 3), ("X", _random(3, 4), _random(1)), {"alpha": 0.5}),
        Case("Einsum", "Einsum", (2, 3), ("X", _random(3, 4)), {"equation": "bi,io->bo"}),
        Case("Einsum_trace", "Einsum", (3, 3), attributes={"equation": "ij->j"}),
        Case("BatchNormalization", "BatchNormalization", image, batch_norm, {"epsilon": 0.01}),
        Case("BatchNormalization_9", "BatchNormalization", image, batch_norm, opset=9),
        Case("BatchNormalization_7", "BatchNormalization", image, batch_norm, opset=7),
        Case("BatchNormalization_2d", "BatchNormalization", (1, 4), batch_norm, opset=15),
        Case("BatchNormalization_3d", "BatchNormalization", (1, 4, 3), batch_norm, opset=15),
        Case("InstanceNormalization", "InstanceNormalization", image, ("X", *channels[:2])),
        Case("LayerNormalization", "LayerNormalization", image, ("X", _random(2), _random(2)), {"epsilon": 0.01}),
        Case("LayerNormalization_axis", "LayerNormalization", image, ("X", _random(3, 2)), {"axis": 2}),
        Case("GroupNormalization_21", "GroupNormalization", image, ("X", *channels[:2]), {"num_groups": 2}, opset=21),
        Case("LpNormalization", "LpNormalization", image, attributes={"axis": 1}),
        Case("LpNormalization_1", "LpNormalization", image, attributes={"p": 1}),
        Case("RMSNormalization", "RMSNormalization", image, ("X", _random(2)), opset=23),
        Case("MatMul_vectors", "MatMul", (3,), (_random(3), "X")),
        Case("MatMul_vector_batch", "MatMul", (3,), ("X", _random(2, 3, 4))),
        Case("LRN", "LRN", image, attributes={"size": 3, "alpha": 0.2}),
        Case("ArgMax", "ArgMax", image, attributes={"axis": 1}),
        Case("ArgMin_flat", "ArgMin", image, attributes={"axis": -1, "keepdims": 0}),
        Case("CumSum", "CumSum", image, ("X", np.array(1, dtype=np.int64))),
        Case("CumSum_back", "CumSum", image, ("X", np.array(-2, dtype=np.int64)), {"exclusive": 1, "reverse": 1}),
    ]
    for op in REDUCTIONS.split():
        axes = ("X", _ints(1, -1))
        cases += [
            Case(f"{op}_all", op, image, opset=18),
            Case(f"{op}_axes", op, image, axes, {"keepdims": 0}, opset=18),
            Case(f"{op}_noop", op, image, ("X", _ints()), {"noop_with_empty_axes": 1}, opset=18),
        ]
        if op != "ReduceSum":
            cases.append(Case(f"{op}_11", op, image, attributes={"axes": [1, 2]}, opset=11))
    cases.append(Case("ReduceSum_11", "ReduceSum", image, attributes={"axes": [1, 2], "keepdims": 0}, opset=11))
    cases.append(Case("ReduceLogSum", "ReduceLogSum", image, low=0.5, opset=18))
    noop = {"noop_with_empty_axes": 1}
    cases.append(Case("ReduceLogSum_noop", "ReduceLogSum", image, attributes=noop, low=0.5, opset=18))
    return cases


def _shape() -> list[Case]:
    x = (2, 3, 4)
    far = np.iinfo(np.int64).max
    cases = [
        Case("Reshape", "Reshape", x, ("X", _ints(0, -1))),
        Case("Reshape_5", "Reshape", x, ("X", _ints(4, 6)), opset=7),
        Case("Reshape_allowzero", "Reshape", x, ("X", _ints(4, 6)), {"allowzero": 1}),
        Case("Flatten", "Flatten", x),
        Case("Flatten_0", "Flatten", x, attributes={"axis": 0}),
        Case("Flatten_negative", "Flatten", x, attributes={"axis": -1}),
        Case("Flatten_7", "Flatten", x, attributes={"axis": 2}, opset=7),
        Case("Squeeze", "Squeeze", (1, 3, 1), ("X", _ints(-1))),
        Case("Squeeze_all", "Squeeze", (1, 3, 1)),
        Case("Squeeze_11", "Squeeze", (1, 3, 1), attributes={"axes": [0]}, opset=11),
        Case("Unsqueeze", "Unsqueeze", x, ("X", _ints(0, -1))),
        Case("Unsqueeze_11", "Unsqueeze", x, attributes={"axes": [1, 3]}, opset=11),
        Case("Transpose", "Transpose", x),
        Case("Transpose_perm", "Transpose", x, attributes={"perm": [1, 0, 2]}),
        Case("Concat", "Concat", x, ("X", _random(2, 1, 4), "X"), {"axis": 1}),
        Case("Concat_negative", "Concat", x, (_random(2, 3, 1), "X"), {"axis": -1}),
        Case("Split", "Split", x, attributes={"axis": 2}, outputs=2),
        Case("Split_one", "Split", x, attributes={"axis": 1, "num_outputs": 1}, opset=18),
        Case("Split_uneven", "Split", (1, 7), attributes={"axis": -1, "num_outputs": 3}, outputs=3, opset=18),
        Case("Split_sizes", "Split", x, ("X", _ints(1, 3)), {"axis": -1}, outputs=2),
        Case("Split_11", "Split", x, attributes={"axis": 1, "split": [2, 1]}, outputs=2, opset=11),
        Case("Split_18", "Split", x, attributes={"axis": 1, "num_outputs": 2}, outputs=2, opset=18),
        Case("Slice", "Slice", x, ("X", _ints(0, 1), _ints(1, 3), _ints(0, 2))),
        Case("Slice_plain", "Slice", x, ("X", _ints(1, 0), _ints(2, far))),
        Case("Slice_steps", "Slice", x, ("X", _ints(0), _ints(far), _ints(-1), _ints(2))),
        Case("Slice_back", "Slice", x, ("X", _ints(-1), _ints(-far), _ints(2), _ints(-1))),
        Case("Slice_back_2", "Slice", x, ("X", _ints(3), _ints(0), _ints(2), _ints(-2))),
        Case("Slice_back_far", "Slice", x, ("X", _ints(far, 1), _ints(-far, 0), _ints(1, 0), _ints(-2, -1))),
        Case("Slice_empty_axes", "Slice", x, ("X", _ints(0, 0), _ints(1, 2), "", _ints(1, 1))),
        Case("Slice_1", "Slice", x, attributes={"starts": [0, -2], "ends": [1, 100], "axes": [0, 2]}, opset=9),
        Case("Gather", "Gather", x, ("X", _ints(2, 0, -1)), {"axis": 1}),
        Case("Gather_scalar", "Gather", x, ("X", np.array(-1, dtype=np.int64)), {"axis": 2}),
        Case("Gather_matrix", "Gather", x, ("X", np.array([[0, 1], [-1, 0]], dtype=np.int32)), {"axis": 2}),
        Case("Gather_all", "Gather", x, ("X", _ints(0, 1, 2)), {"axis": 1}),
        Case("GatherElements", "GatherElements", x, ("X", np.array([[[1, -1, 0]], [[2, 3, 0]]])), {"axis": 2}),
        Case("GatherND", "GatherND", x, ("X", np.array([[0, 1], [-1, 2]]))),
        Case("GatherND_batch", "GatherND", x, ("X", np.array([[[1, 0]], [[2, -1]]])), {"batch_dims": 1}),
        Case("ScatterND", "ScatterND", x, ("X", np.array([[0, 1], [-1, 2]]), _random(2, 4))),
        Case("ScatterND_into", "ScatterND", (2, 4), (_random(2, 3, 4), np.array([[0, 1], [1, 2]]), "X")),
        Case("ScatterND_add", "ScatterND", x, ("X", np.array([[0], [0]]), _random(2, 3, 4)), {"reduction": "add"}, 18),
        Case("ScatterElements", "ScatterElements", x, ("X", np.array([[[1], [-1]]]), _random(1, 2, 1)), {"axis": 2}),
        Case(
            "ScatterElements_add",
            "ScatterElements",
            x,
            ("X", np.array([[[1, 1]]]), _random(1, 1, 2)),
            {"axis": 2, "reduction": "add"},
            18,
        ),
        Case("Scatter", "Scatter", (2, 3), ("X", np.array([[0, -1]]), _random(1, 2)), {"axis": 1}, 10),
        Case("Pad", "Pad", x, ("X", _ints(0, 1, 0, 2, 0, 1))),
        Case("Pad_value", "Pad", x, ("X", _ints(0, 1, 0, 2, 0, 1), _scalar(1.5))),
        Case("Pad_no_value", "Pad", x, ("X", _ints(0, 1, 0, 2, 0, 1), "")),
        Case("Pad_crop", "Pad", x, ("X", _ints(0, -1, 0, 0, 0, -1))),
        Case("Pad_reflect", "Pad", x, ("X", _ints(1, 2, 0, 0, 1, 3)), {"mode": "reflect"}),
        Case("Pad_edge", "Pad", x, ("X", _ints(1, 2, 0, 3, 1, 3)), {"mode": "edge"}),
        Case("Pad_wrap", "Pad", x, ("X", _ints(1, 2, 0, 0, 1, 3)), {"mode": "wrap"}, opset=19),
        Case("Pad_axes", "Pad", x, ("X", _ints(1, 2), "", _ints(-1)), opset=18),
        Case("Pad_2", "Pad", x, attributes={"pads": [0, 1, 0, 2, 0, 1], "value": 0.5}, opset=9),
        Case("Expand", "Expand", (1, 3, 1), ("X", _ints(2, 1, 4))),
        Case("Expand_rank", "Expand", (3, 1), ("X", _ints(2, 3, 4))),
        Case("Expand_low", "Expand", (2, 3, 1), ("X", _ints(4))),
        Case("Tile", "Tile", x, ("X", _ints(1, 2, 3))),
        Case("DepthToSpace", "DepthToSpace", (1, 8, 2, 3), attributes={"blocksize": 2}),
        Case("DepthToSpace_CRD", "DepthToSpace", (1, 8, 2, 3), attributes={"blocksize": 2, "mode": "CRD"}),
        Case("SpaceToDepth", "SpaceToDepth", (1, 2, 4, 6), attributes={"blocksize": 2}),
        Case("Trilu", "Trilu", (3, 3)),
        Case("Trilu_lower", "Trilu", (3, 3), ("X", np.array(-1, dtype=np.int64)), {"upper": 0}),
        Case("EyeLike", "EyeLike", (2, 3), attributes={"k": 1}),
    ]
    return cases


def _resize() -> list[Case]:
    image = (1, 2, 4, 3)
    up, down = _floats(1, 1, 2, 3), _floats(1, 1, 0.5, 0.67)
    cases = []
    for name, scales in (("up", up), ("down", down)):
        for place in ("asymmetric", "half_pixel", "pytorch_half_pixel", "align_corners", "half_pixel_symmetric"):
            facts = {"coordinate_transformation_mode": place}
            opset = 19 if place == "half_pixel_symmetric" else 13
            for mode in ("nearest", "linear", "cubic"):
                inputs = ("X", "", scales)
                cases.append(
                    Case(f"Resize_{name}_{place}_{mode}", "Resize", image, inputs, {"mode": mode, **facts}, opset)
                )
    for rounding in ("floor", "ceil", "round_prefer_floor", "round_prefer_ceil"):
        facts = {"nearest_mode": rounding, "coordinate_transformation_mode": "half_pixel"}
        cases.append(Case(f"Resize_{rounding}", "Resize", image, ("X", "", "", _ints(1, 2, 7, 2)), facts, 13))
    outside = {"mode": "cubic", "exclude_outside": 1, "cubic_coeff_a": -0.5}
    cases += [
        Case("Resize_sizes", "Resize", image, ("X", "", "", _ints(1, 2, 8, 6)), {"mode": "linear"}, 13),
        Case("Resize_outside", "Resize", image, ("X", "", up), outside, 13),
        Case("Resize_axes", "Resize", image, ("X", "", _floats(2, 2)), {"axes": [2, 3]}, 18),
        Case("Resize_10", "Resize", image, ("X", _floats(1, 1, 2, 2)), {"mode": "linear"}, 10),
        Case("Resize_10_down", "Resize", image, ("X", _floats(1, 1, 0.5, 1)), {}, 10),
        Case("Upsample_9", "Upsample", image, ("X", _floats(1, 1, 2, 2)), {}, 9),
        Case("Upsample_7", "Upsample", image, ("X",), {"scales": [1.0, 1.0, 2.0, 3.0], "mode": "linear"}, 7),
    ]
    return cases


FAMILIES: tuple[Callable[[], list[Case]], ...] = (_elementwise, _spatial, _linear, _shape, _resize)
CASES: tuple[Case, ...] = tuple(case for family in FAMILIES for case in family())
