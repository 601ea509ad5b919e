"""Interval arithmetic over an ONNX graph in numpy, to prove the `unsat` examples without parverify.

Each operator maps lower and upper bounds, float64 with a batch of boxes in front, to bounds on its result. It is the
textbook method (Moore, *Interval Analysis*, 1966), weak and hard to get wrong; where it is too weak for one box, the
box is cut into cells that are proved one by one. Rounding errors of float64 here and of float32 in a runtime are far
below `MARGIN`, by which every proof must hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.lib.stride_tricks import sliding_window_view
from onnx import numpy_helper

MARGIN = 1e-2

Array = np.ndarray


@dataclass(frozen=True)
class Interval:
    """Bounds on a tensor.

    Args:
        lower, upper: (boxes, *shape) float64; equal for a constant, which broadcasts over the boxes.
    """

    lower: Array
    upper: Array

    def map(self, function: Callable[[Array], Array]) -> Interval:
        """Apply a function that is nondecreasing in every element, or one that only moves elements."""
        return Interval(function(self.lower), function(self.upper))

    def through(self, linear: Callable[[Array, bool], Array]) -> Interval:
        """Apply an affine map; `linear(v, True)` is the map with absolute weights and without its offset."""
        middle, radius = (self.lower + self.upper) / 2, (self.upper - self.lower) / 2
        centre, spread = linear(middle, False), linear(radius, True)
        return Interval(centre - spread, centre + spread)


def _gemm(x: Interval, weight: Array, bias: Array) -> Interval:
    return x.through(lambda v, absolute: v @ np.abs(weight).T if absolute else v @ weight.T + bias)


def _conv(x: Interval, weight: Array, bias: Array | None, strides: list[int], pads: list[int]) -> Interval:
    offset = np.zeros(len(weight)) if bias is None else bias

    def linear(v: Array, absolute: bool) -> Array:
        padded = np.pad(v, ((0, 0), (0, 0), (pads[0], pads[2]), (pads[1], pads[3])))
        windows = sliding_window_view(padded, weight.shape[2:], (2, 3))[:, :, :: strides[0], :: strides[1]]
        result = np.einsum("bchwij,ocij->bohw", windows, np.abs(weight) if absolute else weight, optimize=True)
        return result if absolute else result + offset[:, None, None]

    return x.through(linear)


def _batch_norm(x: Interval, scale: Array, offset: Array, mean: Array, variance: Array, epsilon: float) -> Interval:
    factor = (scale / np.sqrt(variance + epsilon))[:, None, None]
    shift = offset[:, None, None] - mean[:, None, None] * factor
    return x.through(lambda v, absolute: v * np.abs(factor) if absolute else v * factor + shift)


def _products(a: tuple[Array, Array], b: tuple[Array, Array]) -> Interval:
    """The hull of the products of two broadcast intervals: it lies at a corner."""
    corners = [p * q for p in a for q in b]
    return Interval(np.minimum.reduce(corners), np.maximum.reduce(corners))


def _matmul(a: Interval, b: Interval) -> Interval:
    left = (a.lower[..., :, :, None], a.upper[..., :, :, None])
    right = (b.lower[..., None, :, :], b.upper[..., None, :, :])
    return _products(left, right).map(lambda v: v.sum(-2))


def _softmax(x: Interval) -> Interval:
    """Over the last axis; increasing in its own score and decreasing in the others, so both bounds are attained."""
    top = x.upper.max(-1, keepdims=True)
    low, high = np.exp(x.lower - top), np.exp(x.upper - top)
    others_high = high.sum(-1, keepdims=True) - high
    others_low = low.sum(-1, keepdims=True) - low
    return Interval(low / (low + others_high), high / (high + others_low))


def _sigmoid(v: Array) -> Array:
    return 1 / (1 + np.exp(-v))


def apply(node: onnx.NodeProto, inputs: list[Interval]) -> Interval:
    """One operator; the axes of its attributes count the batch of one, in whose place the boxes stand."""
    attributes: dict[str, Any] = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    x, weights = inputs[0], [i.lower for i in inputs[1:]]
    match node.op_type:
        case "Gemm":
            return _gemm(x, *weights)
        case "Conv":
            bias = weights[1] if len(weights) > 1 else None
            return _conv(x, weights[0], bias, attributes["strides"], attributes["pads"])
        case "BatchNormalization":
            return _batch_norm(x, *weights, attributes["epsilon"])
        case "Relu":
            return x.map(lambda v: np.maximum(v, 0))
        case "Sigmoid":
            return x.map(_sigmoid)
        case "Softmax":
            return _softmax(x)
        case "Add":
            return Interval(x.lower + inputs[1].lower, x.upper + inputs[1].upper)
        case "Mul":
            return _products((x.lower, x.upper), (inputs[1].lower, inputs[1].upper))
        case "MatMul":
            return _matmul(x, inputs[1])
        case "Flatten":
            return x.map(lambda v: v.reshape(len(v), -1))
        case "Reshape":
            return x.map(lambda v: v.reshape(len(v), *weights[0][1:].astype(int)))
        case "Transpose":
            return x.map(lambda v: v.transpose(attributes["perm"]))
        case "ReduceMean":
            return x.map(lambda v: v.mean(tuple(attributes["axes"])))
    raise ValueError(f"node {node.name}: no interval rule for {node.op_type}")


def bound_margins(model: onnx.ModelProto, lower: Array, upper: Array, rows: Array) -> Array:
    """Lower bounds on `rows @ y` over boxes.

    Args:
        model: ends in a Gemm, which the rows are multiplied into: differences of scores are far tighter than scores.
        lower, upper: (boxes, *input shape without the batch) float64.
        rows: (m, outputs).

    Returns:
        (boxes, m) float64.
    """
    weights = {w.name: numpy_helper.to_array(w).astype(np.float64) for w in model.graph.initializer}
    values = {name: Interval(w, w) for name, w in weights.items()}
    values[model.graph.input[0].name] = Interval(lower, upper)
    *body, last = model.graph.node
    for node in body:
        values[node.output[0]] = apply(node, [values[name] for name in node.input])
    weight, bias = (weights[name] for name in last.input[1:])
    return _gemm(values[last.input[0]], rows @ weight, rows @ bias).lower


def cells(lower: Array, upper: Array, parts: int) -> tuple[Array, Array]:
    """Cut a box into equal cells, `parts` along every free dimension.

    Args:
        lower, upper: (*shape) float64, few of them different.

    Returns:
        two (cells, *shape) arrays whose union is the box.
    """
    free = np.flatnonzero((upper > lower).ravel())
    steps = np.stack([g.ravel() for g in np.meshgrid(*[np.arange(parts)] * len(free), indexing="ij")], -1)
    flat_lower, flat_upper = lower.ravel(), upper.ravel()
    width = (flat_upper - flat_lower)[free] / parts
    low, high = np.tile(flat_lower, (len(steps), 1)), np.tile(flat_upper, (len(steps), 1))
    low[:, free] = flat_lower[free] + steps * width
    # The last cell ends where the box does, and neighbours share their edge, whatever the rounding.
    high[:, free] = np.where(steps == parts - 1, flat_upper[free], flat_lower[free] + (steps + 1) * width)
    return low.reshape(-1, *lower.shape), high.reshape(-1, *upper.shape)
