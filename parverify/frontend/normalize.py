"""From the bytes of an ONNX file to a small graph of plain values, or a clear refusal.

What comes out has one input and one output, no dead nodes, weights as torch tensors, and nothing that can't be
converted: unknown operators and foreign domains are refused together, never skipped. Symbolic axes count as 1.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from parverify.errors import ModelError, UnsupportedOperatorError

ONNX_DOMAINS = ("", "ai.onnx")


@dataclass(frozen=True)
class GraphNode:
    """One node: names of values in, names of values out ('' where absent), attributes as plain values."""

    name: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]


@dataclass(frozen=True)
class Graph:
    """A network as its file says.

    Args:
        nodes: in topological order, those that the output depends on.
        constants: initializers and values of Constant nodes, by value name.
        input, output: value names.
        input_shape: symbolic axes set to 1.
        dtype: of the input.
        opset: version of the ONNX operator set.
        replay_bytes: a self-contained file of the same network for onnxruntime; the original bytes unless weights lie
            in other files.
    """

    nodes: tuple[GraphNode, ...]
    constants: Mapping[str, torch.Tensor]
    input: str
    output: str
    input_shape: tuple[int, ...]
    dtype: torch.dtype
    opset: int
    replay_bytes: bytes


def read_graph(data: bytes, folder: Path, supported: Collection[str]) -> Graph:
    """Parse, check and clean a model.

    Args:
        data: bytes of the ONNX file.
        folder: where the file lies; weights in other files must lie in it too.
        supported: names of the operators that can be converted.

    Raises:
        ModelError: the bytes are no valid model, or a kind of model that is not supported.
        UnsupportedOperatorError: operators outside `supported`, all at once.
    """
    model, inlined = _inline(_parse(data))
    external = _load_external(model, folder)
    completed = _complete(model)
    _refuse_unsupported(model, supported)
    _check(model if inlined or external or completed else data)
    replay_bytes = model.SerializeToString() if external else data
    constants = {proto.name: _tensor(proto, proto.name) for proto in model.graph.initializer}
    given, returned = _single_input(model, constants), _single_output(model)
    nodes = []
    for proto in model.graph.node:
        node = _node(proto)
        if node.op == "Constant":
            constants[node.outputs[0]] = _constant(node)
        else:
            nodes.append(node)
    live = _live(nodes, returned)
    used = {name for node in live for name in node.inputs} | {returned}
    shape, dtype = _input_type(given)
    return Graph(
        nodes=tuple(live),
        constants={name: tensor for name, tensor in constants.items() if name in used},
        input=given.name,
        output=returned,
        input_shape=shape,
        dtype=dtype,
        opset=_opset(model),
        replay_bytes=replay_bytes,
    )


def _parse(data: bytes) -> Any:
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load_model_from_string(data)
    except DecodeError as error:
        raise ModelError("the file is not an ONNX model: its bytes can't be parsed") from error
    if not model.HasField("graph"):
        raise ModelError("the file is not an ONNX model: it holds no graph")
    return model


def _inline(model: Any) -> tuple[Any, bool]:
    """The model with its own functions written out, and whether it had any."""
    if not model.functions:
        return model, False
    import onnx.inliner

    return onnx.inliner.inline_local_functions(model), True


def _complete(model: Any) -> bool:
    """Give outputs without a shape an empty one: the checker wants one, nothing here reads it. True if any had none."""
    bare = [value.type.tensor_type for value in model.graph.output if not value.type.tensor_type.HasField("shape")]
    for kind in bare:
        kind.shape.SetInParent()
    return bool(bare)


def _check(model: Any) -> None:
    import onnx.checker

    try:
        onnx.checker.check_model(model)
    except (onnx.checker.ValidationError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"the file is not a valid ONNX model: {reason}") from error


def _opset(model: Any) -> int:
    versions = [entry.version for entry in model.opset_import if entry.domain in ONNX_DOMAINS]
    if not versions:
        raise ModelError("the model imports no ONNX operator set; allowed are models that name its version")
    return int(max(versions))


def _refuse_unsupported(model: Any, supported: Collection[str]) -> None:
    """Refuse all unknown operators at once, before the checker stops at the first."""
    _opset(model)
    unknown = [
        (node.name or next((name for name in node.output if name), "?"), f"{node.domain or 'ai.onnx'}::{node.op_type}")
        for node in model.graph.node
        if node.domain not in ONNX_DOMAINS or (node.op_type not in supported and node.op_type != "Constant")
    ]
    if unknown:
        raise UnsupportedOperatorError(unknown)
    if model.graph.sparse_initializer:
        raise ModelError("sparse weights are not supported; allowed are dense ones")


def _load_external(model: Any, folder: Path) -> bool:
    """Read weights that lie in other files into the model; True if there were any."""
    import onnx

    tensors = [tensor for tensor in model.graph.initializer if tensor.data_location == onnx.TensorProto.EXTERNAL]
    for tensor in tensors:
        facts = {entry.key: entry.value for entry in tensor.external_data}
        path = _inside(folder, facts.get("location", ""), tensor.name)
        try:
            with path.open("rb") as file:
                file.seek(int(facts.get("offset", "0")))
                tensor.raw_data = file.read(int(facts["length"])) if "length" in facts else file.read()
        except (OSError, ValueError) as error:
            raise ModelError(f"weights {tensor.name}: can't read {facts.get('location')}: {error}") from error
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")
    return bool(tensors)


def _inside(folder: Path, location: str, tensor: str) -> Path:
    root = folder.resolve()
    path = (root / location).resolve()
    outside = not path.is_relative_to(root) or Path(location).is_absolute() or ".." in Path(location).parts
    if not location or outside or path == root:
        raise ModelError(f"weights {tensor}: file {location!r} is not allowed; allowed are files in the model's folder")
    return path


def _single_input(model: Any, constants: Collection[str]) -> Any:
    given = [value for value in model.graph.input if value.name not in constants]
    if len(given) != 1:
        names = ", ".join(value.name for value in given) or "none"
        raise ModelError(f"the network has {len(given)} inputs ({names}); allowed is one")
    return given[0]


def _single_output(model: Any) -> str:
    names = [value.name for value in model.graph.output]
    if len(names) != 1:
        raise ModelError(f"the network has {len(names)} outputs ({', '.join(names) or 'none'}); allowed is one")
    return names[0]


def _input_type(value: Any) -> tuple[tuple[int, ...], torch.dtype]:
    import onnx

    kind = value.type.tensor_type
    allowed = {onnx.TensorProto.FLOAT: torch.float32, onnx.TensorProto.DOUBLE: torch.float64}
    if not value.type.HasField("tensor_type") or kind.elem_type not in allowed:
        name = onnx.TensorProto.DataType.Name(kind.elem_type)
        raise ModelError(f"input {value.name} has type {name}; allowed are FLOAT and DOUBLE tensors")
    if not kind.HasField("shape"):
        raise ModelError(f"input {value.name} has no shape; allowed are inputs with a fixed number of axes")
    return tuple(axis.dim_value if axis.dim_value > 0 else 1 for axis in kind.shape.dim), allowed[kind.elem_type]


def _tensor(proto: Any, name: str) -> torch.Tensor:
    import onnx.numpy_helper

    try:
        # The array may share the file's bytes, which are read-only.
        return torch.from_numpy(onnx.numpy_helper.to_array(proto).copy())
    except (TypeError, ValueError) as error:
        kind = onnx.TensorProto.DataType.Name(proto.data_type)
        raise ModelError(f"constant {name} of type {kind} can't be read: {error}") from error


def _node(proto: Any) -> GraphNode:
    name = proto.name or next((output for output in proto.output if output), proto.op_type)
    attributes = {attribute.name: _attribute(attribute, name) for attribute in proto.attribute}
    if proto.op_type == "Cast":
        attributes["to"] = _cast_type(attributes["to"], name)
    return GraphNode(name, proto.op_type, tuple(proto.input), tuple(proto.output), attributes)


def _attribute(attribute: Any, node: str) -> Any:
    import onnx

    value = onnx.helper.get_attribute_value(attribute)
    if attribute.type == onnx.AttributeProto.TENSOR:
        return _tensor(value, f"{attribute.name} of node {node}")
    if attribute.type == onnx.AttributeProto.STRING:
        return value.decode("utf-8", errors="replace")
    return list(value) if attribute.type in (onnx.AttributeProto.INTS, onnx.AttributeProto.FLOATS) else value


def _cast_type(code: int | str, node: str) -> torch.dtype:
    import onnx

    # Version 1 of the operator names the type in text.
    name = code if isinstance(code, str) else onnx.TensorProto.DataType.Name(code)
    allowed = {
        "FLOAT": torch.float32,
        "DOUBLE": torch.float64,
        "BOOL": torch.bool,
        "UINT8": torch.uint8,
        "INT8": torch.int8,
        "INT16": torch.int16,
        "INT32": torch.int32,
        "INT64": torch.int64,
    }
    if name not in allowed:
        raise ModelError(f"node {node} casts to {name}; allowed are {', '.join(allowed)}")
    return allowed[name]


def _constant(node: GraphNode) -> torch.Tensor:
    for name, value in node.attributes.items():
        if name == "value":
            return value
        if name in ("value_float", "value_floats"):
            return torch.tensor(value, dtype=torch.float32)
        if name in ("value_int", "value_ints"):
            return torch.tensor(value, dtype=torch.int64)
    raise ModelError(f"node {node.name} (Constant): {', '.join(node.attributes)} is not supported; allowed are numbers")


def _live(nodes: list[GraphNode], output: str) -> list[GraphNode]:
    """The nodes that the output depends on, in the order of the file."""
    needed, live = {output}, []
    for node in reversed(nodes):
        if needed.intersection(node.outputs):
            needed.update(name for name in node.inputs if name)
            live.append(node)
    return live[::-1]
