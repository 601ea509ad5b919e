"""The converted module equals onnxruntime on every operator and every published model, or the model is refused."""

from __future__ import annotations

import dataclasses
import gzip
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from parverify.clock import Clock
from parverify.errors import ModelError, OutOfTimeError, UnsupportedOperatorError
from parverify.frontend.converters import OPERATORS, REDUCTIONS
from parverify.frontend.model_file import opset_of, read_model
from parverify.frontend.network import (
    Network,
    check_against_original,
    load_network,
    rounding_gap,
    sample_points,
)
from parverify.frontend.normalize import normalize
from tests.frontend.onnx_cases import CASES, Case, build, onnx_bytes


def load(folder: Path, data: bytes, name: str = "model.onnx") -> Network:
    path = folder / name
    path.write_bytes(data)
    return load_network(path)


def node(op: str, inputs: str, outputs: str, **attributes: Any) -> Any:
    return helper.make_node(op, inputs.split(), outputs.split(), **attributes)


def node_names(network: Network) -> list[str]:
    assert isinstance(network.module, torch.fx.GraphModule)
    return [str(part.target) for part in network.module.graph.nodes if part.op == "call_module"]


def agree(network: Network, low: float = -1.0, high: float = 1.0) -> float:
    return check_against_original(network, np.full(network.n_in, low), np.full(network.n_in, high))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_operator_equals_onnxruntime(case: Case, tmp_path: Path) -> None:
    network = load(tmp_path, case.model())
    assert agree(network, case.low, case.high) < 1e-3
    x = np.random.default_rng(1).uniform(case.low, case.high, (2, network.n_in))
    ours, theirs = network.evaluate(x), network.replay(x)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    assert network.n_out == theirs.shape[1]


class Recorder(TorchDispatchMode):
    """Notes what a tracer of one run can't follow.

    That is a tensor used after the memory under it was changed through another one, and numbers read from tensors that
    depend on the network's input. Tensors stay alive, so that their ids stay unique.
    """

    def __init__(self, x: torch.Tensor) -> None:
        super().__init__()
        self.seen, self.moving = [x], {id(x)}
        self.stale: set[int] = set()
        self.faults: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        given = [part for part in pytree.tree_leaves((args, kwargs)) if isinstance(part, torch.Tensor)]
        self.faults += [f"{name}: stale" for part in given if id(part) in self.stale]
        moves = any(id(part) in self.moving for part in given)
        if name == "_local_scalar_dense" and moves:
            self.faults.append(name)
        out = func(*args, **(kwargs or {}))
        made = [part for part in pytree.tree_leaves(out) if isinstance(part, torch.Tensor)]
        self.seen += given + made
        if func._schema.is_mutable:
            memory = args[0].untyped_storage().data_ptr()
            others = [part for part in self.seen if part is not args[0] and part.untyped_storage().data_ptr() == memory]
            self.stale.update(id(part) for part in others)
        self.moving.update(id(part) for part in made if moves)
        return out


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_operator_can_be_traced(case: Case, tmp_path: Path) -> None:
    network = load(tmp_path, case.model())
    x = torch.full(network.input_shape, 0.4 * case.low + 0.6 * case.high, dtype=network.dtype)
    with torch.no_grad(), Recorder(x) as recorder:
        first = network.module(x)
    assert recorder.faults == []
    assert torch.equal(first, network.module(x))


def test_every_operator_of_the_table_is_tested() -> None:
    elsewhere = {"Equal", "GreaterOrEqual", "LessOrEqual", "And", "Or", "Xor", "Not", "IsNaN", "OneHot", "CastLike"}
    elsewhere |= {"Constant", "ConstantOfShape", "Range", "Shape", "Size"}
    assert set(OPERATORS) == {case.op for case in CASES} | elsewhere


def test_network_survives_pickling(tmp_path: Path) -> None:
    network = load(
        tmp_path, build([node("Softplus", "X", "A"), node("Clip", "A low", "Y")], {"low": np.array(0.7, np.float32)})
    )
    agree(network)
    copied = pickle.loads(pickle.dumps(network))
    assert agree(copied) == agree(network)


def test_logic_and_one_hot(tmp_path: Path) -> None:
    nodes = [
        node("Greater", "X zero", "a"),
        node("LessOrEqual", "X one", "b"),
        node("GreaterOrEqual", "X zero", "c"),
        node("Equal", "X one", "d"),
        node("And", "a b", "e"),
        node("Or", "e d", "f"),
        node("Xor", "f c", "g"),
        node("Not", "g", "h"),
        node("IsNaN", "X", "n"),
        node("Or", "h n", "o"),
        node("Cast", "o", "i", to=TensorProto.INT64),
        node("OneHot", "i depth values", "hot", axis=1),
        node("CastLike", "hot X", "Y"),
    ]
    constants = {
        "zero": np.zeros(1, np.float32),
        "one": np.ones(1, np.float32),
        "depth": np.array(3),
        "values": np.array([0.5, 2.0], np.float32),
    }
    network = load(tmp_path, build(nodes, constants, shape=(1, 4)))
    assert network.output_shape == (1, 3, 4)
    assert agree(network, -2.0, 2.0) == 0


def test_shape_arithmetic_becomes_constant(tmp_path: Path) -> None:
    nodes = [
        node("Shape", "X", "s"),
        node("Gather", "s zero", "n"),
        node("Unsqueeze", "n axis", "n1"),
        node("Concat", "n1 minus", "target", axis=0),
        node("Reshape", "X target", "flat"),
        node("Size", "X", "size"),
        node("Cast", "size", "sizef", to=TensorProto.FLOAT),
        node("ConstantOfShape", "s", "ones", value=numpy_helper.from_array(np.ones(1, np.float32))),
        node("Reshape", "ones target", "ones2"),
        node("Range", "first size step", "r"),
        node("Cast", "r", "rf", to=TensorProto.FLOAT),
        node("Add", "ones2 rf", "scale"),
        node("Div", "scale sizef", "scaled"),
        node("Mul", "flat scaled", "Y"),
    ]
    constants = {
        "zero": np.array(0),
        "axis": np.array([0]),
        "minus": np.array([-1]),
        "first": np.array(0),
        "step": np.array(1),
    }
    network = load(tmp_path, build(nodes, constants, shape=(1, 2, 3)))
    assert node_names(network) == ["flat", "Y"]
    assert agree(network) < 1e-6


def test_slice_at_a_computed_place(tmp_path: Path) -> None:
    nodes = [
        node("Slice", "X zero one zero", "first"),
        node("Cast", "first", "place", to=TensorProto.INT64),
        node("Add", "place two", "end"),
        node("Slice", "table place end zero", "Y"),
    ]
    constants = {
        "zero": np.array([0]),
        "one": np.array([1]),
        "two": np.array([2]),
        "table": np.arange(8, dtype=np.float32),
    }
    network = load(tmp_path, build(nodes, constants, shape=(3,)))
    assert network.output_shape == (2,)
    assert agree(network, 0.0, 5.9) == 0
    with pytest.raises(ModelError, match="can't be evaluated"):
        network.evaluate(np.array([7.5, 0.0, 0.0]))


def test_slice_of_a_computed_size_is_refused(tmp_path: Path) -> None:
    nodes = [node("Cast", "X", "place", to=TensorProto.INT64), node("Slice", "table zero place zero", "Y")]
    constants = {"zero": np.array([0]), "table": np.arange(8, dtype=np.float32)}
    with pytest.raises(ModelError, match=r"Slice.*size of this slice depends"):
        load(tmp_path, build(nodes, constants, shape=(1,)))


def test_computed_shape_is_refused(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Cast", ["X"], ["s"], to=TensorProto.INT64),
        helper.make_node("Reshape", ["X", "s"], ["Y"], name="view"),
    ]
    with pytest.raises(ModelError, match=r"node view \(Reshape\): input s must be constant"):
        load(tmp_path, build(nodes, shape=(1,)))


def test_identities_constants_and_dead_nodes(tmp_path: Path) -> None:
    weight = helper.make_node("Constant", [], ["W0"], value=numpy_helper.from_array(np.eye(2, dtype=np.float32)))
    nodes = [
        weight,
        node("Constant", "", "half", value_float=0.5),
        node("Identity", "W0", "W"),
        node("Dropout", "X", "D M"),
        node("Identity", "D", "I"),
        node("Relu", "I", "dead"),
        node("MatMul", "I W", "Z"),
        node("Mul", "Z half", "Y"),
    ]
    network = load(tmp_path, build(nodes, {"unused": np.zeros(3, np.float32)}))
    assert node_names(network) == ["Z", "Y"]
    assert len(list(network.module.buffers())) == 2
    assert agree(network) == 0


def test_output_that_is_a_second_output_of_its_node(tmp_path: Path) -> None:
    network = load(tmp_path, build([node("Split", "X", "A Y", axis=1)], shape=(1, 4)))
    assert network.output_shape == (1, 2)
    np.testing.assert_array_equal(network.evaluate(np.arange(4.0)), [2, 3])


def test_output_that_does_not_depend_on_the_input(tmp_path: Path) -> None:
    nodes = [node("Shape", "X", "s"), node("Cast", "s", "Y", to=TensorProto.FLOAT)]
    network = load(tmp_path, build(nodes, shape=(1, 4)))
    assert agree(network) == 0


def test_mask_that_is_read_is_refused(tmp_path: Path) -> None:
    nodes = [node("Dropout", "X", "D M"), node("Cast", "M", "Y", to=TensorProto.FLOAT)]
    with pytest.raises(ModelError, match="reads M, an optional output"):
        load(tmp_path, build(nodes))


def test_node_names_are_kept(tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", ["X"], ["A"], name="block.0/relu"), node("Neg", "A", "Y")]
    network = load(tmp_path, build(nodes))
    assert node_names(network) == ["block/0/relu", "Y"]
    assert set(node_names(network)) <= dict(network.module.named_modules()).keys()


ODD_NAMES = [
    "X",
    "C",
    "initializers",
    "forward",
    "training",
    "half",
    "code",
    "class",
    "graph",
    "_graph",
    "1",
    "x.y",
    "é",
]
ODD_NAMES += ["a", "a_split_output", "a/1", "'); raise KeyError('", '"); raise KeyError("', "\\", "{x}", "n\n"]


def test_odd_node_names_change_nothing(tmp_path: Path) -> None:
    """onnx2torch writes names into source code, and keeps them in one table with inputs and weights."""
    nodes, last = [], "X"
    for k, name in enumerate(ODD_NAMES):
        nodes.append(helper.make_node("Mul", [last, "C"], [f"v{k}"], name=name))
        nodes.append(helper.make_node("Add", [f"v{k}", "X"], [f"w{k}"], name=f"{name}\t"))
        last = f"w{k}"
    nodes.append(helper.make_node("Split", [last], ["left", "right"], name="X ", axis=1))
    nodes.append(helper.make_node("Sub", ["left", "right"], ["Y"], name="left"))
    network = load(tmp_path, build(nodes, {"C": np.array([0.5, -0.5], np.float32)}))
    assert agree(network) < 1e-6
    assert len(set(node_names(network))) == len(nodes)
    assert agree(pickle.loads(pickle.dumps(network))) == agree(network)


def test_registry_of_onnx2torch_is_left_as_it_was(tmp_path: Path) -> None:
    from onnx2torch.node_converters import registry as module

    registry = module._CONVERTER_REGISTRY
    before = dict(registry)
    load(tmp_path, build([node("Cosh", "X", "A"), node("Clip", "A low", "Y")], {"low": np.array(0.7, np.float32)}))
    assert registry == before
    with pytest.raises(ModelError):
        load(tmp_path, build([node("Cast", "X", "Y", to=TensorProto.FLOAT16)], out_type=TensorProto.FLOAT16))
    assert registry == before


def test_onnx2torch_converts_the_common_operators(tmp_path: Path) -> None:
    nodes = [
        node("Conv", "X W b", "conv", pads=[1, 1, 1, 1]),
        node("Relu", "conv", "relu"),
        node("MaxPool", "relu", "pool", kernel_shape=[2, 2]),
        node("Flatten", "pool", "flat"),
        node("Gemm", "flat V", "Y"),
    ]
    constants = {"W": np.ones((2, 1, 3, 3), np.float32), "b": np.ones(2, np.float32), "V": np.ones((18, 2), np.float32)}
    network = load(tmp_path, build(nodes, constants, shape=(1, 1, 4, 4)))
    modules = [type(network.module.get_submodule(name)) for name in node_names(network)]
    assert modules == [torch.nn.Conv2d, torch.nn.ReLU, torch.nn.MaxPool2d, torch.nn.Flatten, torch.nn.Linear]
    assert not any(parameter.requires_grad for parameter in network.module.parameters())
    assert agree(network) < 1e-4


def normalized(data: bytes) -> Any:
    return normalize(read_model(data, Path(), OPERATORS))


def test_old_operator_sets_are_raised() -> None:
    constants = {"V": np.eye(2, dtype=np.float32), "c": np.ones(2, np.float32)}
    nodes = [node("Gemm", "X V c", "A"), node("Clip", "A", "B", min=0.1, max=0.5), node("Softmax", "B", "Y")]
    model = normalized(build(nodes, constants, opset=9))
    assert opset_of(model) == 13
    assert {name.name for name in model.graph.node} >= {"A", "B"}


def test_an_operator_set_that_is_raised_wrongly_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    scales = {"scales": np.array([1, 1, 2, 2], np.float32)}
    with caplog.at_level("INFO"):
        model = normalized(
            build([node("Resize", "X scales", "Y", mode="linear")], scales, shape=(1, 1, 3, 3), opset=10)
        )
    assert opset_of(model) == 10
    assert "operator set 10 is kept" in caplog.text


def test_old_operator_sets_can_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What onnx2torch lacks in old versions is converted by a newer one that does the same, or by us."""
    monkeypatch.setattr("parverify.frontend.normalize.OPSET", 1)
    for case in CASES:
        if case.opset < 13:
            network = load(tmp_path, case.model())
            assert agree(network, case.low, case.high) < 1e-3


def test_layer_normalization_of_float64_without_bias(tmp_path: Path) -> None:
    nodes = [node("LayerNormalization", "X scale", "Y")]
    constants = {"scale": np.array([0.5])}
    data = build(nodes, constants, in_type=TensorProto.DOUBLE, out_type=TensorProto.DOUBLE)
    assert agree(load(tmp_path, data)) < 1e-6


def test_channels_of_prelu_are_the_last_axis(tmp_path: Path) -> None:
    network = load(tmp_path, build([node("PRelu", "X s", "Y")], {"s": np.arange(3, dtype=np.float32)}, shape=(1, 3, 3)))
    assert agree(network) < 1e-6


@pytest.mark.parametrize("op", sorted(REDUCTIONS))
@pytest.mark.parametrize("axes", [[-2, -1], [-1, 1], [2, 0], [-3, 2]])
def test_reduced_axes_in_any_order(op: str, axes: list[int], tmp_path: Path) -> None:
    nodes = [node(op, "X axes", "Y", keepdims=0)]
    network = load(tmp_path, build(nodes, {"axes": np.array(axes)}, shape=(2, 3, 4), opset=18))
    assert agree(network, 0.1, 1.0) < 1e-5


def test_symbolic_axes_count_as_one(tmp_path: Path) -> None:
    network = load(tmp_path, build([node("Relu", "X", "Y")], shape=("N", 3)))
    assert network.input_shape == (1, 3)
    assert agree(network) == 0


def test_initializers_among_the_inputs_are_constants(tmp_path: Path) -> None:
    weight = np.array([[1.0], [-2.0]], np.float32)
    graph = helper.make_graph(
        [node("MatMul", "X W", "Y")],
        "case",
        [
            helper.make_tensor_value_info("W", TensorProto.FLOAT, (2, 1)),
            helper.make_tensor_value_info("X", TensorProto.FLOAT, (1, 2)),
        ],
        [helper.make_tensor_value_info("Y", TensorProto.FLOAT, (1, 1))],
        [numpy_helper.from_array(weight, "W")],
    )
    network = load(tmp_path, onnx_bytes(graph))
    assert (network.n_in, network.n_out) == (2, 1)
    assert agree(network) == 0


def test_functions_of_the_model_are_written_out(tmp_path: Path) -> None:
    function = helper.make_function(
        "own", "Twice", ["a"], ["b"], [node("Add", "a a", "b")], [helper.make_opsetid("", 17)]
    )
    graph = helper.make_graph(
        [helper.make_node("Twice", ["X"], ["Y"], domain="own")],
        "case",
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, (1, 2))],
        [helper.make_tensor_value_info("Y", TensorProto.FLOAT, (1, 2))],
    )
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    model = helper.make_model(graph, functions=[function], opset_imports=imports, ir_version=8)
    network = load(tmp_path, model.SerializeToString())
    np.testing.assert_array_equal(network.evaluate(np.array([1.0, -2.0])), [2, -4])
    assert agree(network) == 0


def test_float64_network(tmp_path: Path) -> None:
    nodes = [node("Mul", "X third", "Y")]
    constants = {"third": np.array([1 / 3])}
    data = build(nodes, constants, in_type=TensorProto.DOUBLE, out_type=TensorProto.DOUBLE)
    network = load(tmp_path, data)
    assert network.dtype == torch.float64
    assert network.replay(np.array([0.1, 0.2])).tolist() == [0.1 * (1 / 3), 0.2 * (1 / 3)]
    assert rounding_gap(network, np.random.default_rng(0).random((3, 2))) == 0


def test_gzipped_file(tmp_path: Path) -> None:
    (tmp_path / "small.onnx.gz").write_bytes(gzip.compress(build([node("Relu", "X", "Y")])))
    assert load_network(tmp_path / "small.onnx").name == "small"
    assert load_network(tmp_path / "small.onnx.gz").name == "small"


def test_replay_of_many_points_is_one_at_a_time(tmp_path: Path) -> None:
    network = load(tmp_path, build([node("Softmax", "X", "Y", axis=0)], shape=(1, 2)))
    points = np.array([[0.0, 1.0], [2.0, -1.0]])
    assert network.replay(points).tolist() == [[1, 1], [1, 1]]
    assert network.replay(points[0]).tolist() == [1, 1]
    assert network.replay(points[:0]).shape == (0, 2)
    with pytest.raises(ModelError, match="does not fit"):
        network.replay(np.zeros(3))


def test_all_unsupported_operators_are_named_at_once(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("NonZero", ["X"], ["A"], name="first"),
        helper.make_node("Twist", ["A"], ["B"], domain="own.ops"),
        helper.make_node("Relu", ["B"], ["Y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "case",
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, (1, 2))],
        [helper.make_tensor_value_info("Y", TensorProto.FLOAT, (1, 2))],
    )
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("own.ops", 1)]
    with pytest.raises(UnsupportedOperatorError) as caught:
        load(tmp_path, helper.make_model(graph, opset_imports=imports, ir_version=8).SerializeToString())
    assert caught.value.operators == [("first", "ai.onnx::NonZero"), ("B", "own.ops::Twist")]


def test_standard_operator_in_a_foreign_domain_is_refused(tmp_path: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("Relu", ["X"], ["Y"], domain="own.ops")],
        "case",
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, (1, 2))],
        [helper.make_tensor_value_info("Y", TensorProto.FLOAT, (1, 2))],
    )
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("own.ops", 1)]
    with pytest.raises(UnsupportedOperatorError, match=r"own\.ops::Relu"):
        load(tmp_path, helper.make_model(graph, opset_imports=imports, ir_version=8).SerializeToString())


def test_loop_and_branch_are_refused(tmp_path: Path) -> None:
    def branch(name: str, op: str) -> Any:
        inner = helper.make_node(op, ["X"], [name])
        return helper.make_graph([inner], name, [], [helper.make_tensor_value_info(name, TensorProto.FLOAT, (1, 2))])

    choose = helper.make_node("If", ["c"], ["Y"], then_branch=branch("a", "Relu"), else_branch=branch("b", "Neg"))
    with pytest.raises(UnsupportedOperatorError, match=r"ai\.onnx::If"):
        load(tmp_path, build([choose], {"c": np.array(True)}))


@pytest.mark.parametrize("kind", [TensorProto.INT64, TensorProto.STRING, TensorProto.FLOAT16])
def test_input_types_other_than_float_are_refused(kind: int, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="input X has type"):
        load(tmp_path, build([node("Identity", "X", "Y")], in_type=kind, out_type=kind))


def test_several_inputs_or_outputs_are_refused(tmp_path: Path) -> None:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (1, 2)) for name in "ABCD"]
    two_in = helper.make_graph([node("Add", "A B", "C")], "case", values[:2], values[2:3])
    with pytest.raises(ModelError, match=r"2 inputs \(A, B\)"):
        load(tmp_path, onnx_bytes(two_in))
    two_out = helper.make_graph([node("Relu", "A", "C"), node("Neg", "A", "D")], "case", values[:1], values[2:])
    with pytest.raises(ModelError, match=r"2 outputs \(C, D\)"):
        load(tmp_path, onnx_bytes(two_out))


@pytest.mark.parametrize("data", [b"", b"not a model", b"\x08\x08"])
def test_bytes_that_are_no_model_are_refused(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not an ONNX model"):
        load(tmp_path, data)


def test_invalid_and_misfitting_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not a valid ONNX model"):
        load(tmp_path, build([node("Relu", "missing", "Y")]))
    misfit = helper.make_node("MatMul", ["X", "W"], ["Y"], name="product")
    with pytest.raises(ModelError, match=r"node product \(MatMul\) fails on inputs of shape"):
        load(tmp_path, build([misfit], {"W": np.zeros((3, 1), np.float32)}))
    cast = [helper.make_node("Cast", ["X"], ["Y"], name="narrow", to=TensorProto.FLOAT16)]
    with pytest.raises(ModelError, match="node narrow casts to FLOAT16"):
        load(tmp_path, build(cast, out_type=TensorProto.FLOAT16))


def test_network_without_outputs_is_refused(tmp_path: Path) -> None:
    nodes = [node("Split", "X", "A B Y", axis=1, num_outputs=3)]
    with pytest.raises(ModelError, match=r"maps shape \(1, 4\) to \(1, 0\)"):
        load(tmp_path, build(nodes, shape=(1, 4), opset=18))


def test_version_without_converter_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parverify.frontend.normalize.OPSET", 1)
    monkeypatch.setattr("parverify.frontend.convert.SAME_AS", {("Tan", 7): 1})
    with pytest.raises(ModelError, match=r"node last \(Tan\) can't be converted: onnx2torch has no converter"):
        load(tmp_path, build([helper.make_node("Tan", ["X"], ["Y"], name="last")], opset=7))


def test_training_mode_is_refused(tmp_path: Path) -> None:
    constants = {"ratio": np.array(0.5, np.float32), "train": np.array(True)}
    with pytest.raises(ModelError, match="training mode"):
        load(tmp_path, build([node("Dropout", "X ratio train", "Y")], constants))


def external(folder: Path, location: str) -> Path:
    """A model whose weights lie in the file `location`."""
    data = build([node("Mul", "X W", "Y")], {"W": np.array([2.0, 3.0], np.float32)})
    model = onnx.load_model_from_string(data)
    weight = model.graph.initializer[0]
    (folder / location).write_bytes(weight.raw_data) if not Path(location).is_absolute() else None
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value=location)
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def test_weights_beside_the_model_are_read(tmp_path: Path) -> None:
    network = load_network(external(tmp_path, "weights.bin"))
    assert network.evaluate(np.array([1.0, 1.0])).tolist() == [2, 3]
    assert agree(network) == 0


def test_weights_outside_the_folder_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    with pytest.raises(ModelError, match="not allowed"):
        load_network(external(folder, "../weights.bin"))
    with pytest.raises(ModelError, match="not allowed"):
        load_network(external(folder, str(tmp_path / "weights.bin")))
    path = external(folder, "link.bin")
    (folder / "link.bin").unlink()
    (folder / "link.bin").symlink_to(tmp_path / "weights.bin")
    with pytest.raises(ModelError, match="not allowed"):
        load_network(path)
    (folder / "link.bin").unlink()
    with pytest.raises(ModelError, match="can't read"):
        load_network(path)


def test_a_wrong_module_is_caught(tmp_path: Path) -> None:
    network = load(tmp_path, build([node("Relu", "X", "Y")]))
    wrong = dataclasses.replace(network, module=torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Hardtanh(-0.5, 0.5)))
    with pytest.raises(ModelError, match=r"differs from the original by .* at output \d of test point \d"):
        agree(wrong)
    reciprocal = load(tmp_path, build([node("Sqrt", "X", "Y")]))
    broken = dataclasses.replace(reciprocal, module=torch.nn.ReLU())
    with pytest.raises(ModelError, match="inf"):
        check_against_original(broken, np.full(2, -1.0), np.full(2, -0.5))
    assert check_against_original(reciprocal, np.full(2, -1.0), np.full(2, -0.5)) == 0


def test_rounding_gap_sees_float32(tmp_path: Path) -> None:
    nodes = [node("Add", "X big", "A"), node("Sub", "A big", "Y")]
    network = load(tmp_path, build(nodes, {"big": np.array([2.0**20], np.float32)}))
    points = sample_points(np.full(2, 0.1), np.full(2, 0.11))
    assert 1e-3 < rounding_gap(network, points) < 2.0**-3
    assert network.module(torch.zeros(1, 2)).dtype == torch.float32


def test_clock_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(build([node("Relu", "X", "Y")]))
    with pytest.raises(OutOfTimeError):
        load_network(path, clock=Clock(timeout=0.0))


def test_importing_the_frontend_imports_nothing_heavy() -> None:
    names = "('onnx', 'onnxruntime', 'onnx2torch', 'scipy', 'torch._dynamo', 'sympy')"
    code = f"import parverify.frontend.network, sys; print([name for name in {names} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def models(shared: Path, pattern: str) -> list[Path]:
    found = sorted(shared.glob(pattern))
    assert found
    return found


@pytest.mark.slow
def test_published_models_equal_onnxruntime(shared: Path) -> None:
    for path in models(shared, "vnncomp/*/onnx/*.onnx.gz"):
        if path.parent.parent.name == "acasxu" and "1_1" not in path.name:
            continue
        network = load_network(path)
        lower, upper = np.zeros(network.n_in), np.ones(network.n_in)
        check_against_original(network, lower, upper)


def test_fault_models_equal_onnxruntime(shared: Path) -> None:
    refused = {}
    for path in models(shared, "faults/*.onnx"):
        try:
            network = load_network(path)
        except ModelError as error:
            refused[path.stem] = type(error)
            continue
        agree(network, 0.1, 1.0)
    assert refused == {"E24b": ModelError, "K3.9d": UnsupportedOperatorError}
