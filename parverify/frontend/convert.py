"""From a normalized ONNX model to a torch module, by onnx2torch and converters of ours in its registry.

onnx2torch looks converters up by operator and version. For the time of a call, its table holds one entry for each
operator and version of the model: its own, or ours where it has none or a wrong one. Afterwards the table is as it was,
for others in the process who use onnx2torch. Names of submodules are those of the ONNX nodes.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn

from parverify.errors import ModelError
from parverify.frontend.converters import OURS, RESTATED, SAME_AS, WITH_JUMPS
from parverify.frontend.converters_common import Call, Operator, Result
from parverify.frontend.deferred import torchvision_on_call
from parverify.frontend.model_file import opset_of

FAILURES = (RuntimeError, ValueError, IndexError, TypeError, KeyError, AttributeError)
"""What torch and onnx2torch raise where a node's inputs or attributes don't fit its operator."""

_REGISTRY_LOCK = threading.Lock()


class OnnxOperator(nn.Module):
    """One node that is converted by a function of ours; `call` is what the node says."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call
        if call.op == "Cast":
            # The type as an empty constant, so that a module turned to float64 casts to float64 too.
            self.register_buffer("like", torch.empty(0, dtype=call.get("to")))

    def extra_repr(self) -> str:
        return self.call.op

    def forward(self, *given: torch.Tensor) -> Result:
        """Apply the operator to the inputs that are neither absent nor static."""
        operands = iter(given)
        skipped = self.call.static.keys() | {k for k, name in enumerate(self.call.inputs) if not name}
        inputs: list[Any] = [None if k in skipped else next(operands) for k in range(len(self.call.inputs))]
        if self.call.op == "Cast":
            inputs.append(self.like)
        return OURS[self.call.op].function(self.call, *inputs)


def convert(model: Any) -> fx.GraphModule:
    """Convert a model that went through `normalize`.

    Returns:
        the module in eval mode, without gradients for its weights.

    Raises:
        ModelError: naming the node that can't be converted.
    """
    with warnings.catch_warnings():
        # onnx2torch calls parts of torch that are due to go; nothing a user can act on.
        for kind in (DeprecationWarning, FutureWarning):
            warnings.filterwarnings("ignore", category=kind, module=r"(onnx2torch|torch)\..*")
        with torchvision_on_call():
            import onnx2torch

        try:
            with _registered(model):
                module = onnx2torch.convert(model)
        except (*FAILURES, NotImplementedError) as error:
            raise ModelError(f"onnx2torch can't convert the network: {' '.join(str(error).split())}") from error
    return module.eval().requires_grad_(False)


def run_at_zero(module: fx.GraphModule, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The module's output for zeros.

    Raises:
        ModelError: naming the node that fails.
    """
    with torch.no_grad():
        return _Naming(module).run(torch.zeros(shape, dtype=dtype))


class _Naming(fx.Interpreter):
    """Runs a module node by node, and says at which one it failed."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.extra_traceback = False

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return super().call_module(target, args, kwargs)
        except FAILURES as error:
            shapes = ", ".join(str(tuple(value.shape)) for value in args if isinstance(value, torch.Tensor))
            module = self.fetch_attr(target)
            kind = module.call.op if isinstance(module, OnnxOperator) else type(module).__name__.removeprefix("Onnx")
            reason = " ".join(str(error).split())
            raise ModelError(f"node {target} ({kind}) fails on inputs of shape {shapes}: {reason}") from error


def has_jumps(model: Any) -> bool:
    """Whether some operator's result may jump when an input moves by one rounding."""
    return any(
        node.op_type in WITH_JUMPS
        or (node.op_type == "Cast" and not _cast_type(node.attribute[0], node.name).is_floating_point)
        for node in model.graph.node
    )


@contextlib.contextmanager
def _registered(model: Any) -> Iterator[None]:
    """While active, onnx2torch's registry has a converter for every node of the model."""
    from onnx2torch.node_converters import registry

    table = registry._CONVERTER_REGISTRY
    with _REGISTRY_LOCK:
        before = dict(table)
        kinds = {(node.op_type, _version(node, opset_of(model))) for node in model.graph.node}
        converters = {(op, version): _converter(op, version, before) for op, version in kinds}
        try:
            for (op, version), converter in converters.items():
                table.pop(registry.OperationDescription("", op, version), None)
                registry.add_converter(operation_type=op, version=version)(converter)
            yield
        finally:
            table.clear()
            table.update(before)


def _version(node: Any, opset: int) -> int:
    import onnx

    try:
        return int(onnx.defs.get_schema(node.op_type, max_inclusive_version=opset, domain="").since_version)
    except onnx.defs.SchemaError as error:
        raise ModelError(f"node {node.name}: operator set {opset} has no {node.op_type}") from error


def _converter(op: str, version: int, table: dict[Any, Any]) -> Callable[[Any, Any], Any]:
    """onnx2torch's converter or ours, node by node."""
    from onnx2torch.onnx_node import OnnxNode

    def apply(node: Any, graph: Any) -> Any:
        operator = OURS.get(op)
        call = _call(node, graph, version, operator)
        try:
            if op in RESTATED:
                older, attributes = RESTATED[op](call)
                proto = _restated(node.proto, attributes)
                return _theirs(op, older, table)(OnnxNode(proto, node.unique_name), graph)
            if operator is None or operator.theirs(call):
                return _theirs(op, version, table)(node, graph)
        except (*FAILURES, NotImplementedError) as error:
            reason = " ".join(str(error).split())
            raise ModelError(f"node {call.name} ({op}) can't be converted: {reason}") from error
        return _ours(call)

    return apply


def _theirs(op: str, version: int, table: dict[Any, Any]) -> Callable[[Any, Any], Any]:
    """onnx2torch's converter of the version or of one that does the same; most new versions only add types."""
    version = SAME_AS.get((op, version), version)
    known = [key.version for key in table if key.operation_type == op and key.version <= version]
    if not known:
        raise NotImplementedError(f"onnx2torch has no converter for its version {version}")
    return next(table[key] for key in table if key.operation_type == op and key.version == max(known))


def _ours(call: Call) -> Any:
    from onnx2torch.utils.common import OnnxMapping, OperationConverterResult

    tensors = tuple(name for k, name in enumerate(call.inputs) if name and k not in call.static)
    return OperationConverterResult(OnnxOperator(call), OnnxMapping(tensors, ()))


def _restated(proto: Any, attributes: dict[str, Any]) -> Any:
    import onnx

    return onnx.helper.make_node(proto.op_type, proto.input[:1], list(proto.output), name=proto.name, **attributes)


def _call(node: Any, graph: Any, version: int, operator: Operator | None) -> Call:
    """What the node says."""
    op, inputs = node.operation_type, node.input_values
    static, inline = (operator.static, operator.inline) if operator else ((1,) if op in RESTATED else (), ())
    constants = {}
    for position, name in enumerate(inputs):
        if name in graph.initializers and position in static + inline:
            constants[position] = graph.initializers[name].to_torch()
        elif name and position in static:
            raise ModelError(f"node {node.unique_name} ({op}): input {name} must be constant, but it is computed")
    attributes = {part.name: _attribute(part, node.unique_name) for part in node.proto.attribute}
    if op == "Cast":
        attributes["to"] = _cast_type(node.proto.attribute[0], node.unique_name)
    if op == "Slice" and len(inputs) > 2 and not constants.keys() & {1, 2}:
        attributes["width"] = _difference(inputs[1], inputs[2], graph)
    return Call(
        name=node.unique_name,
        op=op,
        opset=version,
        attributes=attributes,
        inputs=inputs,
        shapes=tuple(_shape(name, graph) for name in inputs),
        constant=frozenset(k for k, name in enumerate(inputs) if name in graph.initializers),
        static=constants,
        numbers={position: tuple(tensor.reshape(-1).tolist()) for position, tensor in constants.items()},
        n_outputs=len(node.output_values),
    )


def _shape(name: str, graph: Any) -> tuple[int, ...] | None:
    if name in graph.initializers:
        return tuple(graph.initializers[name].proto.dims)
    value = graph.value_info.get(name)
    if value is None or not value.type.tensor_type.HasField("shape"):
        return None
    return tuple(axis.dim_value for axis in value.type.tensor_type.shape.dim)


def _attribute(attribute: Any, node: str) -> Any:
    import onnx

    value = onnx.helper.get_attribute_value(attribute)
    if attribute.type == onnx.AttributeProto.STRING:
        return value.decode("utf-8", errors="replace")
    return list(value) if attribute.type in (onnx.AttributeProto.INTS, onnx.AttributeProto.FLOATS) else value


def _cast_type(attribute: Any, node: str) -> torch.dtype:
    import onnx

    # Version 1 of the operator names the type in text.
    name = attribute.s.decode() if attribute.s else onnx.TensorProto.DataType.Name(attribute.i)
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


def _difference(start: str, end: str, graph: Any) -> int | None:
    """`end - start` where both are the same computed value plus constants, else None."""
    (low, first), (high, second) = (_root(name, graph) for name in (start, end))
    return second - first if low == high else None


def _root(name: str, graph: Any) -> tuple[str, int]:
    """A value as another one plus a constant, as far back as that can be followed."""
    offset = 0
    while name not in graph.initializers and name not in graph.input_values:
        node, _ = graph.value_as_node_output(name)
        steady = [
            part for part in node.input_values if _shape(part, graph) in ((), (1,)) and part in graph.initializers
        ]
        moving = [part for part in node.input_values if part not in graph.initializers]
        if node.operation_type in ("Unsqueeze", "Squeeze", "Reshape"):
            name = node.input_values[0]
        elif node.operation_type == "Add" and len(steady) == len(moving) == 1:
            name, offset = moving[0], offset + int(graph.initializers[steady[0]].to_numpy().item())
        else:
            break
    return name, offset
