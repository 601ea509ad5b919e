"""The table of ONNX operators, and the torch module that runs a network with it.

Building a module is one partial evaluation: the nodes run once, in order, on a zero input. What does not depend on the
input (shapes, index arithmetic, constant weights) is computed then and there and becomes a constant; the rest becomes
a step of the module. So shapes need no inference of their own, and every later run takes the same path.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn

from parverify.errors import ModelError
from parverify.frontend.converters_common import Call, Operator, Result
from parverify.frontend.converters_elementwise import ELEMENTWISE
from parverify.frontend.converters_linear import LINEAR
from parverify.frontend.converters_shape import SHAPE
from parverify.frontend.converters_spatial import SPATIAL
from parverify.frontend.normalize import Graph, GraphNode

OPERATORS: Mapping[str, Operator] = MappingProxyType({**ELEMENTWISE, **LINEAR, **SHAPE, **SPATIAL})
"""Every ONNX operator that can be converted."""

WITH_JUMPS = frozenset(
    {"Sign", "Floor", "Ceil", "Round", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"}
    | {"ArgMax", "ArgMin", "CastLike", "ThresholdedRelu", "Shrink", "Mod"}
)
"""Operators whose result may jump when an input moves by one rounding."""

FAILURES = (RuntimeError, ValueError, IndexError, TypeError)
"""What torch raises where a node's inputs don't fit its operator."""


class OnnxOperator(nn.Module):
    """One node of the network; `call` is what the node says."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call

    def extra_repr(self) -> str:
        return f"{self.call.op}, name={self.call.name!r}"

    def forward(self, *inputs: torch.Tensor | None) -> Result:
        """Apply the operator; absent and static inputs are None."""
        return OPERATORS[self.call.op].function(self.call, *inputs)

    def jumps(self) -> bool:
        """Whether the result may jump when an input moves by one rounding."""
        if self.call.op == "Cast":
            return not self.call.get("to").is_floating_point
        return self.call.op in WITH_JUMPS


@dataclass(frozen=True)
class Step:
    """Names that an operator reads (None where nothing is passed) and writes, and those not needed after it."""

    inputs: tuple[str | None, ...]
    outputs: tuple[str, ...]
    freed: tuple[str, ...]


class OnnxModule(nn.Module):
    """A network as a list of operators, in the order of the file.

    Args:
        steps: what each operator reads and writes.
        operators: one `OnnxOperator` a step; its `call.name` is the ONNX node's name.
        constants: by ONNX value name; kept as buffers.
        input, output: ONNX value names.
    """

    def __init__(
        self,
        steps: list[Step],
        operators: list[OnnxOperator],
        constants: Mapping[str, torch.Tensor],
        *,
        input: str,
        output: str,
    ) -> None:
        super().__init__()
        self.steps = tuple(steps)
        self.operators = nn.ModuleList(operators)
        self.input, self.output = input, output
        # Names of values in ONNX may hold anything, names of buffers may not.
        self.buffer_names = {name: f"constant_{k}" for k, name in enumerate(constants)}
        for name, tensor in constants.items():
            self.register_buffer(self.buffer_names[name], tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output of the network for one input of its shape."""
        values = {self.input: x}
        for step, operator in zip(self.steps, self.operators, strict=True):
            result = operator(*(None if name is None else self._value(values, name) for name in step.inputs))
            values.update(zip(step.outputs, result if isinstance(result, tuple) else (result,), strict=False))
            for name in step.freed:
                del values[name]
        return self._value(values, self.output)

    def _value(self, values: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
        return values[name] if name in values else getattr(self, self.buffer_names[name])

    def has_jumps(self) -> bool:
        """Whether some operator's result may jump when an input moves by one rounding."""
        return any(isinstance(part, OnnxOperator) and part.jumps() for part in self.operators)


def build_module(graph: Graph) -> tuple[OnnxModule, torch.Tensor]:
    """Convert a graph.

    Returns:
        the module in eval mode, and its output at zero.

    Raises:
        ModelError: naming the node that can't be converted.
    """
    constants = dict(graph.constants)
    values = {graph.input: torch.zeros(graph.input_shape, dtype=graph.dtype)}
    makers = {name: node for node in graph.nodes for name in node.outputs}
    reads: list[tuple[GraphNode, tuple[str | None, ...]]] = []
    operators = []
    with torch.no_grad():
        for node in graph.nodes:
            operator = OPERATORS[node.op]
            names, call = _prepare(node, graph.opset, constants, makers)
            arguments = [None if name is None else _find(name, values, constants, node) for name in names]
            outputs = _evaluate(operator, call, arguments, node)
            if operator.shape_only or not any(name in values for name in names):
                constants.update(outputs)
            else:
                values.update(outputs)
                reads.append((node, names))
                operators.append(OnnxOperator(call))
    if graph.output not in values and graph.output not in constants:
        raise ModelError(f"output {graph.output} is an optional output that is not supported")
    used = dict.fromkeys([name for _, names in reads for name in names] + [graph.output])
    kept = {name: constants[name] for name in used if name in constants}
    steps = list(_steps(reads, set(values), graph.output))
    module = OnnxModule(steps, operators, kept, input=graph.input, output=graph.output)
    return module.eval(), values.get(graph.output, constants.get(graph.output, torch.empty(0)))


def _prepare(
    node: GraphNode, opset: int, constants: dict[str, torch.Tensor], makers: Mapping[str, GraphNode]
) -> tuple[tuple[str | None, ...], Call]:
    """Which values the node's operator gets as tensors, and the call with those that it gets as numbers."""
    operator, attributes = OPERATORS[node.op], dict(node.attributes)
    names: list[str | None] = [name or None for name in node.inputs]
    static = {}
    for position, name in enumerate(names):
        if name in constants and position in operator.static + operator.inline:
            static[position] = constants[name]
            names[position] = None
        elif name is not None and position in operator.static:
            raise ModelError(f"node {node.name} ({node.op}): input {name} must be constant, but it is computed")
    if node.op == "Cast":
        # The type as an empty constant, so that a module turned to float64 casts to float64 too.
        like = f"{node.outputs[0]}/like"
        constants[like] = torch.empty(0, dtype=attributes["to"])
        names = [names[0], like]
    if node.op == "Slice" and len(names) > 2 and names[1] is not None and names[2] is not None:
        attributes["width"] = _difference(names[1], names[2], constants, makers)
    numbers = {position: tuple(tensor.reshape(-1).tolist()) for position, tensor in static.items()}
    return tuple(names), Call(node.name, node.op, opset, attributes, static, numbers, len(node.outputs))


def _find(
    name: str, values: Mapping[str, torch.Tensor], constants: Mapping[str, torch.Tensor], node: GraphNode
) -> torch.Tensor:
    if name in values:
        return values[name]
    if name not in constants:
        # The checker has seen a node declare it, so it is an output beyond those that its operator's function gives.
        raise ModelError(f"node {node.name} ({node.op}) reads {name}, an optional output that is not supported")
    return constants[name]


def _evaluate(
    operator: Operator, call: Call, arguments: list[torch.Tensor | None], node: GraphNode
) -> dict[str, torch.Tensor]:
    try:
        result = operator.function(call, *arguments)
    except FAILURES as error:
        shapes = ", ".join(str(tuple(value.shape)) for value in arguments if value is not None)
        reason = " ".join(str(error).split())
        raise ModelError(f"node {call.name} ({call.op}) fails on inputs of shape {shapes}: {reason}") from error
    # An output beyond those that the function gives (a mask, an index) is refused where it is read.
    return dict(zip(node.outputs, result if isinstance(result, tuple) else (result,), strict=False))


def _steps(reads: list[tuple[GraphNode, tuple[str | None, ...]]], variable: set[str], output: str) -> Iterator[Step]:
    last = {name: k for k, (_, names) in enumerate(reads) for name in names if name in variable}
    for k, (node, names) in enumerate(reads):
        freed = {name for name in names if name in variable and last[name] == k and name != output}
        unread = {name for name in node.outputs if name in variable and name not in last and name != output}
        yield Step(names, node.outputs, tuple(sorted(freed | unread)))


def _difference(
    start: str, end: str, constants: Mapping[str, torch.Tensor], makers: Mapping[str, GraphNode]
) -> int | None:
    """`end - start` where both are the same computed value plus constants, else None."""
    (low, first), (high, second) = (_root(name, constants, makers) for name in (start, end))
    return second - first if low == high else None


def _root(name: str, constants: Mapping[str, torch.Tensor], makers: Mapping[str, GraphNode]) -> tuple[str, int]:
    """A value as another one plus a constant, as far back as that can be followed."""
    offset = 0
    while name in makers:
        node = makers[name]
        steady = [part for part in node.inputs if part in constants and constants[part].numel() == 1]
        moving = [part for part in node.inputs if part not in constants]
        if node.op in ("Unsqueeze", "Squeeze", "Reshape", "Identity"):
            name = node.inputs[0]
        elif node.op == "Add" and len(steady) == len(moving) == 1:
            name, offset = moving[0], offset + int(constants[steady[0]].item())
        else:
            break
    return name, offset
