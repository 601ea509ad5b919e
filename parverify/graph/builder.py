"""Writes kernel nodes: the one place where a graph grows, so that importers read like mathematics.

A `Var` is a value that depends on the network's input, a `Const` one that does not. Helpers here broadcast, fold
constants and keep trivial operators (adding zero, reshaping to the same shape) out of the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parverify.graph.ir import BoundGraph, Const, Node, check, derive
from parverify.ops.activation import Activation


def _together(*shapes: Sequence[int]) -> tuple[int, ...]:
    """Shapes broadcast against each other. (torch imports a computer algebra system for that.)"""
    return np.broadcast_shapes(*(tuple(shape) for shape in shapes))


@dataclass(frozen=True)
class Var:
    """A value in the graph: the name of its node, and its shape."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of scalars."""
        return int(torch.Size(self.shape).numel())


Value = Var | Const


class Builder:
    """Collects nodes and constants; `finish` gives the graph."""

    def __init__(self, input_shape: Sequence[int]) -> None:
        self._nodes: list[Node] = [Node("input", "input", (), tuple(input_shape))]
        self._constants: dict[str, Const] = {}
        self._names: dict[int, str] = {}
        self._truths: set[str] = set()
        self.source = ""
        self.input = Var("input", tuple(input_shape))

    def truth(self, value: Value) -> Value:
        """The same value, known to be 0 or 1."""
        if isinstance(value, Var):
            self._truths.add(value.name)
        return value

    def is_truth(self, value: Var) -> bool:
        """Whether a value is known to be 0 or 1; moving it around keeps it so."""
        name = value.name
        by_name = {node.name: node for node in self._nodes}
        while name not in self._truths and by_name[name].op in ("reshape", "permute", "expand"):
            name = by_name[name].inputs[0]
        return name in self._truths

    def finish(self, output: Var) -> BoundGraph:
        """The graph with `output` as its output."""
        return check(BoundGraph(tuple(self._nodes), output.name, dict(self._constants)))

    def const(self, value: Const | Tensor) -> str:
        """The name under which a constant is stored."""
        const = value if isinstance(value, Const) else Const(value)
        if id(const) not in self._names:
            name = f"c{len(self._constants)}"
            self._constants[name] = const
            self._names[id(const)] = name
        return self._names[id(const)]

    def emit(
        self,
        op: str,
        inputs: Sequence[Var],
        shape: Sequence[int],
        *,
        consts: dict[str, Const] | None = None,
        **attrs: Any,
    ) -> Var:
        """Append a node and return its value."""
        roles = {role: self.const(value) for role, value in (consts or {}).items()}
        name = f"n{len(self._nodes)}"
        names = tuple(var.name for var in inputs)
        attrs["in_shapes"] = tuple(var.shape for var in inputs)
        self._nodes.append(Node(name, op, names, tuple(shape), roles, attrs, self.source))
        return Var(name, tuple(shape))

    # --- shape -----------------------------------------------------------------------------------------------------

    def reshape(self, x: Var, shape: Sequence[int]) -> Var:
        """The same scalars in C order under another shape."""
        return x if tuple(shape) == x.shape else self.emit("reshape", [x], shape)

    def permute(self, x: Var, dims: Sequence[int]) -> Var:
        """Dimensions in another order."""
        dims = tuple(dim % len(x.shape) for dim in dims)
        if dims == tuple(range(len(dims))):
            return x
        return self.emit("permute", [x], [x.shape[dim] for dim in dims], dims=dims)

    def index(self, x: Var, index: Tensor, fill: Const | float = 0.0) -> Var:
        """`out[i] = x.flatten()[index[i]]`, or `fill[i]` where index[i] is -1; `index` has the shape of the result."""
        flat, shape = index.reshape(-1), tuple(index.shape)
        if flat.numel() == x.numel and bool((flat == torch.arange(x.numel)).all()):
            return self.reshape(x, shape)
        consts = {}
        extra = {}
        if bool((flat < 0).any()):
            extra["outside"] = flat < 0
            value = derive(_filled, fill if isinstance(fill, Const) else number(fill), flat < 0, shape)
            if value.trainable or bool((value.value != 0).any()):
                consts["fill"] = value
        return self.emit("index", [x], shape, consts=consts, index=flat, inverse=_inverse(flat, x.numel), **extra)

    def expand(self, x: Var, shape: Sequence[int]) -> Var:
        """`x` broadcast to `shape`."""
        if x.shape == tuple(shape):
            return x
        return self.emit("expand", [x], shape)

    def concat(self, parts: Sequence[Value], dim: int) -> Var:
        """Parts, variable or constant, behind each other along `dim`."""
        variables = [part for part in parts if isinstance(part, Var)]
        rank = len(variables[0].shape)
        dim %= rank
        shape = list(variables[0].shape)
        shape[dim] = sum(part.shape[dim] for part in variables)
        joined = variables[0] if len(variables) == 1 else self.emit("concat", variables, shape, dim=dim)
        if len(variables) == len(parts):
            return joined
        index = torch.arange(joined.numel).reshape(joined.shape)
        pieces, at = [], 0
        for part in parts:
            if isinstance(part, Var):
                pieces.append(index.narrow(dim, at, part.shape[dim]))
                at += part.shape[dim]
            else:
                pieces.append(torch.full(tuple(part.value.shape), -1))
        fills = derive(_joined, dim, *(part.shape if isinstance(part, Var) else part for part in parts))
        return self.index(joined, torch.cat(pieces, dim), fills)

    # --- arithmetic ------------------------------------------------------------------------------------------------

    def scale(self, x: Var, factor: Const | float | None = None, shift: Const | float | None = None) -> Var:
        """`x * factor + shift` elementwise; constants broadcast, and may widen the shape of `x`."""
        consts = {}
        shape = x.shape
        for role, value, neutral in (("factor", factor, 1.0), ("shift", shift, 0.0)):
            if value is None:
                continue
            const = value if isinstance(value, Const) else number(value)
            shape = _together(shape, const.value.shape)
            if const.trainable or bool((const.value != neutral).any()):
                consts[role] = const
        x = self.expand(x, shape)
        return self.emit("scale", [x], shape, consts=consts) if consts else x

    def add(self, x: Value, y: Value, coefficient: float = 1.0) -> Value:
        """`x + coefficient * y` with broadcasting."""
        if isinstance(x, Const) and isinstance(y, Const):
            return derive(lambda a, b: a + coefficient * b, x, y)
        if isinstance(x, Const):
            return self.scale(y if isinstance(y, Var) else self.input, coefficient, x)
        if isinstance(y, Const):
            return self.scale(x, None, derive(lambda b: coefficient * b, y))
        shape = _together(x.shape, y.shape)
        return self.emit("sum", [self.expand(x, shape), self.expand(y, shape)], shape, coefficients=(1.0, coefficient))

    def sub(self, x: Value, y: Value) -> Value:
        """`x - y` with broadcasting."""
        return self.add(x, y, -1.0)

    def mul(self, x: Value, y: Value) -> Value:
        """`x * y` with broadcasting; a product of two variables is a kernel operator of its own."""
        if isinstance(x, Const) and isinstance(y, Const):
            return derive(torch.mul, x, y)
        if isinstance(x, Const):
            x, y = y, x
        if isinstance(y, Const):
            return self.scale(self._var(x), y)
        left, right = self._var(x), self._var(y)
        if left.name == right.name:
            return self.activation(left, "square")
        shape = _together(left.shape, right.shape)
        return self.emit("mul", [self.expand(left, shape), self.expand(right, shape)], shape)

    def reduce_sum(self, x: Var, dims: Sequence[int], keepdim: bool = False) -> Var:
        """Sum over `dims`."""
        dims = sorted(dim % len(x.shape) for dim in dims)
        kept = [1 if i in dims else size for i, size in enumerate(x.shape)]
        out = x if all(x.shape[dim] == 1 for dim in dims) else self.emit("reduce_sum", [x], kept, dims=tuple(dims))
        shape = kept if keepdim else [size for i, size in enumerate(kept) if i not in dims]
        return self.reshape(out, shape)

    def mean(self, x: Var, dims: Sequence[int], keepdim: bool = False) -> Var:
        """Mean over `dims`."""
        count = 1
        for dim in dims:
            count *= x.shape[dim]
        return self.scale(self.reduce_sum(x, dims, keepdim), 1.0 / count)

    def matmul(self, x: Value, y: Value) -> Var:
        """`torch.matmul` of at least two-dimensional operands, one or both variable."""
        if isinstance(x, Var) and isinstance(y, Var):
            rank = max(len(x.shape), len(y.shape))
            left = self.reshape(x, (*[1] * (rank - len(x.shape)), *x.shape, 1))
            right = self.reshape(y, (*[1] * (rank - len(y.shape)), *y.shape[:-2], 1, *y.shape[-2:]))
            return self.reduce_sum(self._var(self.mul(left, right)), [-2])
        if isinstance(x, Var) and isinstance(y, Const):
            if y.value.dim() == 2:
                return self.linear(x, derive(torch.t, y), None)
            shape = _together(x.shape[:-2], y.value.shape[:-2])
            x = self.expand(x, (*shape, *x.shape[-2:]))
            return self.emit("matmul", [x], (*shape, x.shape[-2], y.value.shape[-1]), consts={"right": y})
        if isinstance(x, Const) and isinstance(y, Var):
            shape = _together(x.value.shape[:-2], y.shape[:-2])
            y = self.expand(y, (*shape, *y.shape[-2:]))
            return self.emit("matmul", [y], (*shape, x.value.shape[-2], y.shape[-1]), consts={"left": x})
        raise TypeError("matmul of two constants must be folded before")

    def linear(self, x: Var, weight: Const, bias: Const | None) -> Var:
        """`x @ weight.T + bias` on the last dimension; weight (out, in), bias (out,)."""
        consts = {"weight": weight} | ({} if bias is None else {"bias": bias})
        return self.emit("linear", [x], (*x.shape[:-1], weight.value.shape[0]), consts=consts)

    # --- nonlinear -------------------------------------------------------------------------------------------------

    def activation(self, x: Var, activation: str | Activation) -> Var:
        """An elementwise nonlinear function, by name or as facts."""
        from parverify.ops.activation import ACTIVATIONS

        facts = ACTIVATIONS[activation] if isinstance(activation, str) else activation
        return self.emit("act", [x], x.shape, activation=facts)

    def relu(self, x: Value) -> Value:
        """max(x, 0)."""
        return derive(torch.relu, x) if isinstance(x, Const) else self.activation(x, "relu")

    def maximum(self, x: Value, y: Value) -> Value:
        """max(x, y) = x + relu(y - x)."""
        return self.add(x, self.relu(self.sub(y, x)))

    def minimum(self, x: Value, y: Value) -> Value:
        """min(x, y) = x - relu(x - y)."""
        return self.add(x, self.relu(self.sub(x, y)), -1.0)

    def reduce_max(self, x: Var, dim: int) -> Var:
        """Maximum over one dimension (kept with size 1), as a tournament of pairwise maxima."""
        dim %= len(x.shape)
        while (size := x.shape[dim]) > 1:
            index = torch.arange(x.numel).reshape(x.shape)
            half = size // 2
            winner = self.maximum(
                self.index(x, index.narrow(dim, 0, half).contiguous()),
                self.index(x, index.narrow(dim, half, half).contiguous()),
            )
            rest = [] if size % 2 == 0 else [self.index(x, index.narrow(dim, size - 1, 1).contiguous())]
            x = self.concat([winner, *rest], dim) if rest else self._var(winner)
        return x

    def divide(self, x: Value, y: Value) -> Value:
        """`x / y` with broadcasting."""
        if isinstance(y, Const):
            return self.mul(x, derive(torch.reciprocal, y))
        return self.mul(x, self.activation(y, "reciprocal"))

    @staticmethod
    def _var(x: Value) -> Var:
        if not isinstance(x, Var):
            raise TypeError("a variable was expected")
        return x


def number(value: float) -> Const:
    """A number as a constant, in float64: rounding it is the executor's business."""
    return Const(torch.tensor(float(value), dtype=torch.float64))


def _filled(value: Tensor, outside: Tensor, shape: tuple[int, ...]) -> Tensor:
    """(n,) what an index fills in where `outside`, zero elsewhere."""
    return torch.where(outside, value.to(torch.float64).expand(shape).reshape(-1), 0.0)


def _joined(dim: int, *parts: Tensor | tuple[int, ...]) -> Tensor:
    """Constants behind each other along `dim`, zeros where a variable stands (given by its shape)."""
    tensors = (torch.zeros(part) if isinstance(part, tuple) else part for part in parts)
    return torch.cat([tensor.to(torch.float64) for tensor in tensors], dim)


MOST_READERS = 16


def _inverse(index: Tensor, size: int) -> tuple[Tensor, ...] | None:
    """For each input scalar the outputs that read it, padded with the place behind the last output.

    The transpose of a gather is then a sum of a few gathers, which is faster than scattered additions. None where some
    scalar has more than `MOST_READERS` readers.
    """
    outputs = torch.nonzero(index >= 0).flatten()
    source = index[outputs]
    counts = torch.bincount(source, minlength=size)
    most = int(counts.max()) if len(source) else 0
    if most > MOST_READERS:
        return None
    order = torch.argsort(source, stable=True)
    first = torch.cumsum(counts, 0) - counts
    rank = torch.arange(len(source)) - first[source[order]]
    inverse = torch.full((max(most, 1), size), len(index))
    inverse[rank, source[order]] = outputs[order]
    return tuple(inverse)
