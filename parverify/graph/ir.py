"""The bound graph: a network as a short list of kernel operators on one instance, constants apart.

Every node's value has the shape of *one* instance of the network (the file's batch axis of 1 included); domains and
rows are leading dimensions that the operators' rules add. There are few kernel operators (see `parverify.ops.kernel`):
affine ones, elementwise activations, and the elementwise product of two variables. Everything richer (max pooling,
softmax, layer norm, ...) has been rewritten into them before a graph exists. A graph is never changed: passes return a
new one, and bounds live in mappings from node name to tensors that a call returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from parverify.errors import ModelError


@dataclass(frozen=True, eq=False)
class Const:
    """A constant of the graph.

    Args:
        value: the folded value.
        fn: how to compute it anew from `args` (which may contain other constants), or None for a leaf. Only constants
            that depend on trainable parameters keep their recipe, so that bounds can be differentiated through it.
        args: arguments of `fn`.
    """

    value: Tensor
    fn: Callable[..., Tensor] | None = None
    args: tuple[Any, ...] = ()

    @property
    def trainable(self) -> bool:
        """Whether the value depends on a parameter that requires a gradient."""
        return self.fn is not None or self.value.requires_grad

    def live(self, memo: dict[int, Tensor]) -> Tensor:
        """The value recomputed from the leaves under autograd; `memo` maps id(constant) to its value."""
        if self.fn is None:
            return self.value
        if id(self) not in memo:
            memo[id(self)] = self.fn(*(_live(arg, memo) for arg in self.args))
        return memo[id(self)]


def _live(arg: Any, memo: dict[int, Tensor]) -> Any:
    """`arg` with constants in it, also those in lists, recomputed."""
    if isinstance(arg, Const):
        return arg.live(memo)
    if isinstance(arg, (list, tuple)):
        return type(arg)(_live(item, memo) for item in arg)
    return arg


def derive(fn: Callable[..., Tensor], *args: Any) -> Const:
    """A constant computed from others; the recipe is kept only where a parameter is involved."""
    with torch.no_grad():
        value = fn(*(arg.value if isinstance(arg, Const) else arg for arg in args))
    keep = any(isinstance(arg, Const) and arg.trainable for arg in args)
    return Const(value.detach(), fn, args) if keep else Const(value.detach())


@dataclass(frozen=True, eq=False)
class Node:
    """One operator.

    Args:
        name: unique in the graph.
        op: kernel operator, a key of `parverify.ops.kernel.KERNEL`, or "input".
        inputs: names of the variable inputs.
        shape: of the value, for one instance.
        consts: role -> name of a constant in the graph.
        attrs: plain settings of the operator.
        source: what the user calls it (ONNX node or module name, and operator), for messages.
    """

    name: str
    op: str
    inputs: tuple[str, ...]
    shape: tuple[int, ...]
    consts: Mapping[str, str] = field(default_factory=dict)
    attrs: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""

    @property
    def numel(self) -> int:
        """Number of scalars of one instance."""
        return int(torch.Size(self.shape).numel())


@dataclass(frozen=True, eq=False)
class BoundGraph:
    """A network ready to be bounded.

    Args:
        nodes: in topological order, the input first.
        output: name of the output node.
        constants: name -> constant.
    """

    nodes: tuple[Node, ...]
    output: str
    constants: Mapping[str, Const]

    @cached_property
    def by_name(self) -> dict[str, Node]:
        """Node by name."""
        return {node.name: node for node in self.nodes}

    def __getitem__(self, name: str) -> Node:
        return self.by_name[name]

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    @property
    def input(self) -> Node:
        """The input node."""
        return self.nodes[0]

    @cached_property
    def nonlinear(self) -> tuple[Node, ...]:
        """Nodes that need a relaxation, in topological order."""
        return tuple(node for node in self.nodes if node.op in ("act", "mul"))

    @cached_property
    def bounded(self) -> tuple[str, ...]:
        """Names of the nodes whose bounds the relaxations need (inputs of nonlinear nodes), in topological order."""
        wanted = {name for node in self.nonlinear for name in node.inputs}
        return tuple(node.name for node in self.nodes if node.name in wanted)

    @cached_property
    def piecewise_linear(self) -> bool:
        """Whether ReLU is the only nonlinearity, so that a leaf of activation splits is a linear program."""
        return all(node.op == "act" and node.attrs["activation"].name == "relu" for node in self.nonlinear)

    def ancestors(self, name: str) -> tuple[Node, ...]:
        """`name` and all nodes it depends on, in topological order."""
        wanted = {name}
        for node in reversed(self.nodes):
            if node.name in wanted:
                wanted.update(node.inputs)
        return tuple(node for node in self.nodes if node.name in wanted)

    def constant_bytes(self) -> int:
        """Bytes of all constants in their present dtype."""
        return sum(const.value.numel() * const.value.element_size() for const in self.constants.values())


def check(graph: BoundGraph) -> BoundGraph:
    """The graph itself, after checking order, names, shapes of inputs and constants.

    Raises:
        ModelError: a pass produced an ill-formed graph; names the node.
    """
    seen: set[str] = set()
    for position, node in enumerate(graph.nodes):
        where = f"node {node.name} ({node.op}, shape {list(node.shape)})"
        if (node.op == "input") != (position == 0):
            raise ModelError(f"{where}: the input must be the first node and the only one of its kind")
        if node.name in seen:
            raise ModelError(f"{where}: name used twice")
        for name in node.inputs:
            if name not in seen:
                raise ModelError(f"{where}: input {name} is not defined before it")
        for role, name in node.consts.items():
            if name not in graph.constants:
                raise ModelError(f"{where}: constant {name} ({role}) does not exist")
        seen.add(node.name)
    if graph.output not in seen:
        raise ModelError(f"output {graph.output} does not exist")
    return graph


def prune(graph: BoundGraph) -> BoundGraph:
    """Without the nodes and constants that the output does not depend on (the input stays)."""
    kept = graph.ancestors(graph.output)
    if kept[0].op != "input":
        kept = (graph.input, *kept)
    names = {name for node in kept for name in node.consts.values()}
    constants = {name: const for name, const in graph.constants.items() if name in names}
    return check(BoundGraph(kept, graph.output, constants))


def on_device(graph: BoundGraph, device: torch.device) -> BoundGraph:
    """The graph with the index tensors in its nodes' attributes on `device`; constants stay where they are."""
    if device.type == "cpu":
        return graph

    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device)
        return tuple(moved(item) for item in value) if isinstance(value, tuple) else value

    nodes = [replace(node, attrs={key: moved(value) for key, value in node.attrs.items()}) for node in graph.nodes]
    return check(BoundGraph(tuple(nodes), graph.output, graph.constants))


def rename_inputs(inputs: Sequence[str], alias: Mapping[str, str]) -> tuple[str, ...]:
    """`inputs` with every name that has an alias replaced by it, transitively."""
    out = []
    for name in inputs:
        while name in alias:
            name = alias[name]
        out.append(name)
    return tuple(out)
