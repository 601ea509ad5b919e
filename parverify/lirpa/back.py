"""From a `BoundGraph` to an auto_LiRPA `BoundedModule`: the kernel nodes as plain torch operators, which it converts.

A value of one instance has a batch axis of 1 in front; the module leaves that axis to the batch. Kernel operators and
activations that auto_LiRPA has no counterpart for are listed all at once, before anything is converted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parverify.errors import ModelError, UnsupportedOperatorError
from parverify.graph.ir import BoundGraph, Node
from parverify.graph.sparsify import densify
from parverify.lirpa.compat import lirpa

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "exp": torch.exp,
    "log": torch.log,
    "sin": torch.sin,
    "cos": torch.cos,
    "sqrt": torch.sqrt,
    "reciprocal": lambda x: 1 / x,
    "rsqrt": lambda x: 1 / torch.sqrt(x),
    "square": lambda x: x**2,
}
"""Activations that auto_LiRPA converts."""

Constants = Mapping[str, Tensor]
Operator = Callable[[Node, Constants, Sequence[Tensor]], Tensor]


def to_bounded_module(graph: BoundGraph, *, bound_opts: dict[str, Any] | None = None, device: str = "cpu") -> Any:
    """The network as an `auto_LiRPA.BoundedModule`.

    Args:
        graph: whose constants have data; its input has a batch axis of 1 in front.
        bound_opts: auto_LiRPA's options; coefficients are matrices unless they say otherwise, because not all of its
            operators know patches.
        device: of the module.

    Raises:
        UnsupportedOperatorError: all kernel operators and activations without a counterpart.
        ModelError: the input has no batch axis.
    """
    if graph.input.shape[0] != 1:
        raise ModelError(f"the input's shape {list(graph.input.shape)} has no batch axis of 1 in front")
    graph = densify(graph)
    missing = [(node.source or node.name, _kind(node)) for node in graph.nodes[1:] if not _known(node)]
    if missing:
        raise UnsupportedOperatorError(missing)
    module = GraphModule(graph).eval()
    options = {"conv_mode": "matrix", **(bound_opts or {})}
    example = torch.zeros(1, *graph.input.shape[1:], dtype=module.dtype)
    return lirpa().module.BoundedModule(module, example, bound_opts=options, device=device)


def _kind(node: Node) -> str:
    return f"act:{node.attrs['activation'].name}" if node.op == "act" else node.op


def _known(node: Node) -> bool:
    if node.op == "act":
        return node.attrs["activation"].name in ACTIVATIONS
    return node.op in OPERATORS


class GraphModule(nn.Module):
    """A graph as a torch module on batches (B, *input shape without the batch axis).

    Args:
        graph: whose constants have data.
    """

    def __init__(self, graph: BoundGraph) -> None:
        super().__init__()
        self._graph = graph
        floating = [const.value.dtype for const in graph.constants.values() if const.value.is_floating_point()]
        self.dtype = torch.float32 if torch.float32 in floating or not floating else floating[0]
        self._shared: dict[str, str] = {}
        for node in graph.nodes:
            for role, name in node.consts.items():
                value = graph.constants[name].value.detach().to(self.dtype)
                key = name.replace(".", "_")
                if node.op == "scale":  # spread out here, because converting would record it as operators
                    key, value = f"{node.name}_{role}", value.expand(node.shape).reshape(1, *_rest(node.shape))
                if key not in self._parameters:
                    self.register_parameter(key, nn.Parameter(value.contiguous(), requires_grad=False))
                self._shared[f"{node.name} {role}"] = key

    def forward(self, x: Tensor) -> Tensor:
        values = {self._graph.input.name: x}
        for node in self._graph.nodes[1:]:
            given = [values[name] for name in node.inputs]
            roles = {role: self.get_parameter(self._shared[f"{node.name} {role}"]) for role in node.consts}
            values[node.name] = OPERATORS[node.op](node, roles, given)
        return values[self._graph.output]


def _rest(shape: Sequence[int]) -> tuple[int, ...]:
    """A value's shape behind the batch axis."""
    return tuple(shape[1:] if shape and shape[0] == 1 else shape)


def _shaped(x: Tensor, shape: Sequence[int]) -> Tensor:
    """(B, *rest of the shape); left alone where it is that already, so that no needless operator is converted."""
    rest = _rest(shape)
    return x if tuple(x.shape[1:]) == rest else x.reshape(-1, *rest)


def _lost(shape: Sequence[int]) -> int:
    """How many dims of a value the batch axis stands for: what a dim of one instance moves by."""
    return 0 if shape and shape[0] == 1 else 1


def _permute(node: Node, _consts: Constants, xs: Sequence[Tensor]) -> Tensor:
    shape, dims = node.attrs["in_shapes"][0], node.attrs["dims"]
    if shape[0] == 1 and dims[0] == 0:
        return xs[0].permute(*dims)
    return _shaped(xs[0].reshape(-1, *shape).permute(0, *(dim + 1 for dim in dims)), node.shape)


def _expand(node: Node, _consts: Constants, xs: Sequence[Tensor]) -> Tensor:
    rest, before = _rest(node.shape), _rest(node.attrs["in_shapes"][0])
    x = xs[0].reshape(-1, *[1] * (len(rest) - len(before)), *before) if len(rest) > len(before) else xs[0]
    return x + torch.zeros(1, *rest, dtype=x.dtype)


def _index(node: Node, consts: Constants, xs: Sequence[Tensor]) -> Tensor:
    index, size = node.attrs["index"], node.numel
    flat = xs[0] if xs[0].dim() == 2 else xs[0].flatten(1)
    out = torch.index_select(flat, 1, index.clamp(min=0))
    if "outside" in node.attrs:
        out = out * (~node.attrs["outside"]).to(out.dtype)[None]
        out = out + consts["fill"].reshape(1, size) if "fill" in consts else out
    return _shaped(out, node.shape)


def _concat(node: Node, _consts: Constants, xs: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(xs), node.attrs["dim"] + _lost(node.shape))


def _sum(node: Node, _consts: Constants, xs: Sequence[Tensor]) -> Tensor:
    total = None
    for x, factor in zip(xs, node.attrs["coefficients"], strict=True):
        if total is None:
            total = x if factor == 1 else x * float(factor)
        elif abs(factor) == 1:
            total = total + x if factor == 1 else total - x
        else:
            total = total + x * float(factor)
    if total is None:
        raise ModelError(f"node {node.name} sums up nothing")
    return total


def _scale(_node: Node, consts: Constants, xs: Sequence[Tensor]) -> Tensor:
    x = xs[0]
    for role in ("factor", "shift"):
        if role in consts:
            x = x * consts[role] if role == "factor" else x + consts[role]
    return x


def _reduce_sum(node: Node, _consts: Constants, xs: Sequence[Tensor]) -> Tensor:
    moved = _lost(node.attrs["in_shapes"][0])
    return _shaped(xs[0].sum([dim + moved for dim in node.attrs["dims"]], keepdim=True), node.shape)


def _matmul(node: Node, consts: Constants, xs: Sequence[Tensor]) -> Tensor:
    if "right" in consts:
        return torch.matmul(xs[0], consts["right"])
    return torch.matmul(consts["left"], xs[0])


def _conv(node: Node, consts: Constants, xs: Sequence[Tensor]) -> Tensor:
    attrs = node.attrs
    rest = (attrs["stride"], attrs["padding"])
    if attrs["transposed"]:
        transpose = F.conv_transpose2d if len(node.shape) == 4 else F.conv_transpose1d
        more = (attrs["output_padding"], attrs["groups"], attrs["dilation"])
        return transpose(xs[0], consts["weight"], consts.get("bias"), *rest, *more)
    convolve = F.conv2d if len(node.shape) == 4 else F.conv1d
    return convolve(xs[0], consts["weight"], consts.get("bias"), *rest, attrs["dilation"], attrs["groups"])


OPERATORS: dict[str, Operator] = {
    "reshape": lambda node, _consts, xs: _shaped(xs[0], node.shape),
    "permute": _permute,
    "expand": _expand,
    "index": _index,
    "concat": _concat,
    "sum": _sum,
    "scale": _scale,
    "reduce_sum": _reduce_sum,
    "linear": lambda _node, consts, xs: F.linear(xs[0], consts["weight"], consts.get("bias")),
    "matmul": _matmul,
    "conv": _conv,
    "act": lambda node, _consts, xs: ACTIVATIONS[node.attrs["activation"].name](xs[0]),
    "mul": lambda _node, _consts, xs: xs[0] * xs[1],
}
