"""Passes that bring a checked ONNX model into the form that the converter reads, each a function from model to model.

Afterwards the input has a fixed shape, all constants are initializers, every node depends on the network's input, has a
name that is unique and fit for a module, and one output (`Split` aside), and the operator set is at least 13 where
onnx's own converter leads there. What the network computes does not change.
"""

from __future__ import annotations

import keyword
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from parverify.errors import ModelError
from parverify.frontend.model_file import ONNX_DOMAINS, ModelFile, name_of, opset_of
from parverify.frontend.original import run_model

OPSET = 13
"""The least operator set that models are raised to: from here on axes and sizes are inputs, as in all later sets."""

OF_SHAPE = frozenset({"Shape", "Size", "EyeLike"})
"""Operators whose result depends on the shape of their input alone."""

FOLDED = OF_SHAPE | {"Constant", "ConstantOfShape", "Range"}
"""Operators that never depend on values of the network's input, so that folding removes every one that is allowed."""

COPIES = frozenset({"Identity", "Dropout"})
"""Operators that hand their input on; so does `Split` into one part."""

EMPTY_REDUCTIONS = {"ReduceL1": "Abs", "ReduceL2": "Abs", "ReduceLogSum": "Log", "ReduceSumSquare": "Mul"}
"""What a reduction over no axis does to each entry, where it does anything."""

LEAST_IR = 4
"""The first version of the file format in which initializers need not be inputs."""

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Graph:
    """The parts of a model that passes exchange; weights are shared with the model that they come from, not copied.

    Args:
        nodes: `NodeProto`s in topological order.
        constants: `TensorProto`s by name.
        output: name of the output's value.
        opset: version of the ONNX operator set.
        file: for the input's name, shape and type.
        kind: type of the output's entries.
    """

    nodes: tuple[Any, ...]
    constants: Mapping[str, Any]
    output: str
    opset: int
    file: ModelFile
    kind: int

    def model(self, outputs: Sequence[str] | None = None) -> Any:
        """The `ModelProto`; with other outputs only what these depend on."""
        import onnx

        nodes, needed = _live(self.nodes, outputs or [self.output])
        kind = {torch.float32: onnx.TensorProto.FLOAT, torch.float64: onnx.TensorProto.DOUBLE}[self.file.dtype]
        result = onnx.ModelProto(ir_version=max(self.file.model.ir_version, LEAST_IR))
        result.opset_import.add(domain="", version=self.opset)
        result.graph.name = self.file.model.graph.name or "network"
        result.graph.node.extend(nodes)
        result.graph.initializer.extend(tensor for name, tensor in self.constants.items() if name in needed)
        result.graph.input.append(onnx.helper.make_tensor_value_info(self.file.input, kind, self.file.input_shape))
        if outputs is None:
            result.graph.output.append(onnx.helper.make_tensor_value_info(self.output, self.kind, None))
        else:
            result.graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
        return result


def normalize(file: ModelFile) -> Any:
    """All passes over a model.

    Returns:
        the new `ModelProto`.

    Raises:
        ModelError: the model reads an output that is not supported, or its constants can't be computed.
    """
    graph = graph_of(file)
    for change in PASSES:
        graph = change(graph)
    return graph.model()


def _renamed(node: Any, names: Mapping[str, str], *, name: str | None = None) -> Any:
    """A copy of the node that reads other values."""
    import onnx

    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.input[:] = [names.get(part, part) for part in node.input]
    copy.name = node.name if name is None else name
    return copy


def graph_of(file: ModelFile) -> Graph:
    """The model's parts: every node named and of the domain '', initializers no longer counted as inputs."""
    proto = file.model.graph
    nodes = []
    for node in proto.node:
        copy = _renamed(node, {}, name=name_of(node))
        copy.domain = "" if copy.domain in ONNX_DOMAINS else copy.domain
        nodes.append(copy)
    constants = {tensor.name: tensor for tensor in proto.initializer}
    kind = proto.output[0].type.tensor_type.elem_type
    return Graph(tuple(nodes), constants, file.output, opset_of(file.model), file, kind)


def with_constants_as_initializers(graph: Graph) -> Graph:
    """Values of `Constant` nodes as initializers."""
    constants = {node.output[0]: _constant(node) for node in graph.nodes if node.op_type == "Constant"}
    nodes = tuple(node for node in graph.nodes if node.op_type != "Constant")
    return replace(graph, nodes=nodes, constants={**graph.constants, **constants})


def _constant(node: Any) -> Any:
    import onnx

    attribute = node.attribute[0]
    value = onnx.helper.get_attribute_value(attribute)
    if attribute.name == "value":
        tensor = onnx.TensorProto()
        tensor.CopyFrom(value)
        tensor.name = node.output[0]
        return tensor
    kinds = {"value_float": np.float32, "value_floats": np.float32, "value_int": np.int64, "value_ints": np.int64}
    if attribute.name not in kinds:
        raise ModelError(f"node {node.name} (Constant): {attribute.name} is not supported; allowed are numbers")
    return onnx.numpy_helper.from_array(np.array(value, kinds[attribute.name]), node.output[0])


def without_dead_parts(graph: Graph) -> Graph:
    """Only nodes and initializers that the output depends on, and of their outputs only those that can be converted."""
    live, needed = _live(graph.nodes, [graph.output])
    nodes = tuple(node if node.op_type == "Split" else _single_output(node, needed) for node in live)
    return replace(graph, nodes=nodes, constants={k: tensor for k, tensor in graph.constants.items() if k in needed})


def _live(nodes: Sequence[Any], outputs: Iterable[str]) -> tuple[list[Any], set[str]]:
    """The nodes that some values depend on, and the names of all values that are needed."""
    needed, live = set(outputs), []
    for node in reversed(nodes):
        if needed.intersection(node.output):
            needed.update(name for name in node.input if name)
            live.append(node)
    return live[::-1], needed


def _single_output(node: Any, needed: set[str]) -> Any:
    extra = [name for name in node.output[1:] if name in needed]
    if extra:
        raise ModelError(
            f"node {node.name} ({node.op_type}): the network reads {extra[0]}, an optional output that is not supported"
        )
    copy = _renamed(node, {})
    # Absent optional inputs at the end say nothing, and onnx2torch counts them.
    while copy.input and not copy.input[-1]:
        copy.input.pop()
    del copy.output[1:]
    return copy


def without_copies(graph: Graph) -> Graph:
    """Readers of `Identity` and `Dropout` read what these read."""
    source: dict[str, str] = {}
    nodes = []
    for node in graph.nodes:
        whole = node.op_type == "Split" and len(node.output) == 1
        if whole or (node.op_type in COPIES and not _trains(node, graph.constants)):
            source[node.output[0]] = source.get(node.input[0], node.input[0])
        else:
            nodes.append(_renamed(node, source))
    return replace(graph, nodes=tuple(nodes), output=source.get(graph.output, graph.output))


def _trains(node: Any, initializers: Mapping[str, Any]) -> bool:
    import onnx

    if node.op_type != "Dropout" or len(node.input) < 3 or not node.input[2]:
        return False
    mode = initializers.get(node.input[2])
    if mode is None or onnx.numpy_helper.to_array(mode).any():
        raise ModelError(
            f"node {node.name} (Dropout): training mode is random; allowed is inference (training_mode false)"
        )
    return False


def without_empty_reductions(graph: Graph) -> Graph:
    """Reductions over no axis as operators on entries: onnx2torch reduces over all axes then."""
    return replace(graph, nodes=tuple(_entrywise(node) if _is_empty(node, graph) else node for node in graph.nodes))


def _is_empty(node: Any, graph: Graph) -> bool:
    if not any(part.name == "noop_with_empty_axes" and part.i for part in node.attribute):
        return False
    axes = node.input[1] if len(node.input) > 1 else ""
    return not axes or (axes in graph.constants and graph.constants[axes].dims == [0])


def _entrywise(node: Any) -> Any:
    import onnx

    op = EMPTY_REDUCTIONS.get(node.op_type, "Identity")
    inputs = [node.input[0]] * (2 if op == "Mul" else 1)
    return onnx.helper.make_node(op, inputs, list(node.output), name=node.name)


def with_opset(graph: Graph) -> Graph:
    """The graph in operator set `OPSET` at least.

    onnx's converter refuses some models and gets others wrong, so its result must agree with the model in onnxruntime
    at a point. Where it doesn't, the model stays as it is: our converters read every operator set, and onnx2torch's are
    registered version by version.
    """
    import onnx.version_converter

    if graph.opset >= OPSET:
        return graph
    try:
        model = graph.model()
        raised = onnx.version_converter.convert_version(model, OPSET)
        before, after = (run_model(part, _some_point(graph), graph.file.dtype)[0] for part in (model, raised))
    # The converter raises RuntimeError on what it has no adapter for.
    except (RuntimeError, ValueError, ModelError) as error:
        _LOG.info("operator set %d is kept: %s", graph.opset, " ".join(str(error).split()))
        return graph
    if before.shape != after.shape or not np.allclose(before, after, rtol=1e-4, atol=1e-5, equal_nan=True):
        _LOG.info("operator set %d is kept: raised to %d the model differs", graph.opset, OPSET)
        return graph
    nodes = tuple(_renamed(node, {}, name=name_of(node)) for node in raised.graph.node)
    constants = {tensor.name: tensor for tensor in raised.graph.initializer}
    return replace(graph, nodes=nodes, constants=constants, output=raised.graph.output[0].name, opset=OPSET)


def _some_point(graph: Graph) -> np.ndarray:
    return np.random.default_rng(0).uniform(0.1, 0.9, graph.file.input_shape)


def with_folded_constants(graph: Graph) -> Graph:
    """What does not depend on the input's values (shapes, index arithmetic, constant weights) as initializers.

    onnxruntime computes it at a zero input, in the arithmetic of the original.
    """
    import onnx

    variable = {graph.file.input}
    for node in graph.nodes:
        if node.op_type not in OF_SHAPE and variable.intersection(node.input):
            variable.update(node.output)
    kept = tuple(node for node in graph.nodes if variable.intersection(node.output))
    read = dict.fromkeys([name for node in kept for name in node.input if name] + [graph.output])
    folded = [name for name in read if name not in variable and name not in graph.constants]
    if not folded:
        return graph
    values = run_model(graph.model(folded), np.zeros(graph.file.input_shape), graph.file.dtype)
    constants = {name: onnx.numpy_helper.from_array(value, name) for name, value in zip(folded, values, strict=True)}
    return replace(graph, nodes=kept, constants={**graph.constants, **constants})


def with_names(graph: Graph) -> Graph:
    """Names for nodes that a module and the code of its `forward` may have, and a node of its own for the output.

    onnx2torch keeps inputs, initializers and nodes in one table by name, returns all outputs of the last node, and
    writes node names into Python source as they are: names must be unique among all three and hold nothing that ends a
    string.
    """
    import onnx

    taken = {*_reserved(), *graph.constants, graph.file.input}
    nodes, output = [], graph.output
    for node in graph.nodes:
        name = next(name for name in _candidates(node) if name not in taken)
        taken.add(name)
        nodes.append(_renamed(node, {}, name=name))
    if not any(list(node.output) == [output] for node in nodes):
        output = f"{output}/output"
        nodes.append(onnx.helper.make_node("Identity", [graph.output], [output], name=f"{len(nodes)}/output"))
    return replace(graph, nodes=tuple(nodes), output=output)


def _candidates(node: Any) -> Iterator[str]:
    """The node's name without odd characters, then with numbers."""
    plain = re.sub(r"[^\w/: \-\[\]()<>]", "_", node.name.replace(".", "/"), flags=re.ASCII)
    plain = plain.replace("_split_output", "_split/output") or node.op_type
    if not plain.isidentifier() or not keyword.iskeyword(plain):
        yield plain
    number = 0
    while True:
        number += 1
        yield f"{plain}/{number}"


def _reserved() -> list[str]:
    import torch.fx

    return [*dir(torch.fx.GraphModule), *vars(torch.nn.Module()), "initializers", "_graph"]


PASSES: tuple[Callable[[Graph], Graph], ...] = (
    with_constants_as_initializers,
    without_dead_parts,
    without_copies,
    with_opset,
    with_constants_as_initializers,
    with_folded_constants,
    without_empty_reductions,
    without_copies,
    without_dead_parts,
    with_names,
)
"""In the order in which they run. The converter of operator sets writes `Constant` nodes."""
