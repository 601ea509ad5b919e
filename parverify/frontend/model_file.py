"""From the bytes of an ONNX file to a checked `ModelProto` with one input and one output, or a clear refusal.

Weights that lie in other files are read in, functions of the model's own are written out, and what can't be verified is
refused: unknown operators and foreign domains (all at once), several inputs or outputs, inputs that aren't float.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from parverify.errors import ModelError, UnsupportedOperatorError

ONNX_DOMAINS = ("", "ai.onnx")
_COMPLETE = "the network comes before the property; is the file whole?"


@dataclass(frozen=True)
class ModelFile:
    """A model that passed the checks.

    Args:
        model: the `ModelProto`, self-contained.
        input, output: value names.
        input_shape: symbolic axes as 1.
        dtype: of the input.
        replay_bytes: a self-contained file of the same network for onnxruntime; the original bytes unless weights lie
            in other files.
    """

    model: Any
    input: str
    output: str
    input_shape: tuple[int, ...]
    dtype: torch.dtype
    replay_bytes: bytes


def read_model(data: bytes, folder: Path, supported: Collection[str]) -> ModelFile:
    """Parse and check a model.

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
    given, returned = _single_input(model), _single_output(model)
    shape, dtype = _input_type(given)
    replay_bytes = model.SerializeToString() if external else data
    return ModelFile(model, given.name, returned, shape, dtype, replay_bytes)


def _parse(data: bytes) -> Any:
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load_model_from_string(data)
    except DecodeError as error:
        raise ModelError("the file is not an ONNX model: its bytes can't be parsed", _COMPLETE) from error
    if not model.HasField("graph"):
        raise ModelError("the file is not an ONNX model: it holds no graph", _COMPLETE)
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


def name_of(node: Any) -> str:
    """The node's name, or that of its first output where the file gives none."""
    return node.name or next((name for name in node.output if name), node.op_type)


def opset_of(model: Any) -> int:
    """The version of the ONNX operator set that the model imports."""
    versions = [entry.version for entry in model.opset_import if entry.domain in ONNX_DOMAINS]
    if not versions:
        raise ModelError("the model imports no ONNX operator set; allowed are models that name its version")
    return int(max(versions))


def _refuse_unsupported(model: Any, supported: Collection[str]) -> None:
    """Refuse all unknown operators at once, before the checker stops at the first."""
    opset_of(model)
    unknown = [
        (name_of(node), f"{node.domain or 'ai.onnx'}::{node.op_type}")
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


def _single_input(model: Any) -> Any:
    constants = {tensor.name for tensor in model.graph.initializer}
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
