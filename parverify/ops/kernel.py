"""The kernel operators: what each affine one means to a value, an interval and a row.

A rule works on one node and its constants. Leading dimensions are free: values come as (B, *shape), rows as
(N, *shape). `forward` evaluates; `interval` maps boxes; `backward` pushes rows of linear functionals from the node's
value to its inputs (the vector-Jacobian product, exact because the operator is affine) together with what its constants
add; `pick` is `backward` of one-hot rows without building them: for a product with a weight it is a slice of the
weight. Interval rules of operators that round inflate their radius by a few units in the last place (see `inflate`).
Nonlinear operators (`act`, `mul`) have `forward` and `interval` here, relaxations in `parverify.ops.relaxation`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parverify.graph.ir import Node
from parverify.ops import sparse
from parverify.ops.rounding import slack
from parverify.ops.weighted import bias_rows, channel_of, per_channel, pick, pull, push

Consts = Mapping[str, Tensor]
Box = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Rule:
    """What a kernel operator means.

    Args:
        forward: (node, consts, [(B, *in_shape)...]) -> (B, *shape).
        interval: (node, consts, [((B, *in_shape), (B, *in_shape))...]) -> box of (B, *shape).
        backward: (node, consts, A (N, *shape)) -> ([(N, *in_shape)...], constant (N,) or None); None if nonlinear.
        pick: (node, consts, index (N,), sign (N,)) -> the same for rows `sign * value.flatten()[index]`.
        exact: the interval rule gives the exact range of each output scalar of this operator alone.
        mixing: several input scalars meet in one output scalar, so that intervals of intervals lose what they share.
    """

    forward: Callable[[Node, Consts, Sequence[Tensor]], Tensor]
    interval: Callable[[Node, Consts, Sequence[Box]], Box]
    backward: Callable[[Node, Consts, Tensor], tuple[list[Tensor], Tensor | None]] | None = None
    pick: Callable[[Node, Consts, Tensor, Tensor], tuple[list[Tensor], Tensor | None]] | None = None
    mixing: bool = False


def inflate(lower: Tensor, upper: Tensor) -> Box:
    """Centre, and radius with an allowance for the rounding of the sums that they enter."""
    center, radius = (lower + upper) / 2, (upper - lower) / 2
    extra = slack(center.dtype)
    if extra == 0:
        return center, radius
    return center, torch.add(radius * (1 + extra), center.abs(), alpha=extra)


def _spread(center: Tensor, radius: Tensor) -> Box:
    return center - radius, center + radius


def _flat(x: Tensor, lead: int = 1) -> Tensor:
    return x.reshape(*x.shape[:lead], -1)


# --- reshape, permute, expand, index, concat ------------------------------------------------------------------------


def _reshape(node: Node, consts: Consts, xs: Sequence[Tensor]) -> Tensor:
    return xs[0].reshape(xs[0].shape[0], *node.shape)


def _reshape_back(node: Node, consts: Consts, A: Tensor) -> tuple[list[Tensor], None]:
    return [A.reshape(A.shape[0], *node.attrs["in_shapes"][0])], None


def _permute(node: Node, consts: Consts, xs: Sequence[Tensor]) -> Tensor:
    return xs[0].permute(0, *(dim + 1 for dim in node.attrs["dims"]))


def _permute_back(node: Node, consts: Consts, A: Tensor) -> tuple[list[Tensor], None]:
    dims = node.attrs["dims"]
    return [A.permute(0, *(dims.index(i) + 1 for i in range(len(dims))))], None


def _expand(node: Node, consts: Consts, xs: Sequence[Tensor]) -> Tensor:
    x = xs[0]
    missing = len(node.shape) - (x.dim() - 1)
    return x.reshape(x.shape[0], *[1] * missing, *x.shape[1:]).expand(x.shape[0], *node.shape)


def _expand_back(node: Node, consts: Consts, A: Tensor) -> tuple[list[Tensor], None]:
    small = node.attrs["in_shapes"][0]
    padded = (1,) * (len(node.shape) - len(small)) + tuple(small)
    dims = [i + 1 for i, (a, b) in enumerate(zip(padded, node.shape, strict=True)) if a != b]
    return [A.sum(dims).reshape(A.shape[0], *small) if dims else A.reshape(A.shape[0], *small)], None


def _index(node: Node, consts: Consts, xs: Sequence[Tensor]) -> Tensor:
    index = node.attrs["index"]
    out = _flat(xs[0])[:, index.clamp(min=0)]
    if "outside" in node.attrs:
        fill = consts["fill"] if "fill" in consts else torch.zeros((), dtype=out.dtype, device=out.device)
        out = torch.where(node.attrs["outside"], fill, out)
    return out.reshape(out.shape[0], *node.shape)


def _index_back(node: Node, consts: Consts, A: Tensor) -> tuple[list[Tensor], Tensor | None]:
    flat, shape = _flat(A), node.attrs["in_shapes"][0]
    bias = flat @ consts["fill"] if "fill" in consts else None
    inverse = node.attrs["inverse"]
    if inverse is None:
        inside = node.attrs["index"] >= 0
        out = A.new_zeros(A.shape[0], math.prod(shape)).index_add(1, node.attrs["index"][inside], flat[:, inside])
    else:
        padded = torch.cat([flat, flat.new_zeros(A.shape[0], 1)], 1)
        out = padded[:, inverse[0]]
        for place in inverse[1:]:
            out = out + padded[:, place]
    return [out.reshape(A.shape[0], *shape)], bias


def _concat(node: Node, consts: Consts, xs: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(xs), node.attrs["dim"] + 1)


def _concat_back(node: Node, consts: Consts, A: Tensor) -> tuple[list[Tensor], None]:
    dim = node.attrs["dim"]
    return list(A.split([shape[dim] for shape in node.attrs["in_shapes"]], dim + 1)), None


def _moved(forward: Callable[[Node, Consts, Sequence[Tensor]], Tensor]) -> Callable[[Node, Consts, Sequence[Box]], Box]:
    """Interval rule of an operator that only moves scalars or adds non-negative multiples of them."""

    def interval(node: Node, consts: Consts, boxes: Sequence[Box]) -> Box:
        return forward(node, consts, [box[0] for box in boxes]), forward(node, consts, [box[1] for box in boxes])

    return interval


# --- sum, scale, reduce_sum -----------------------------------------------------------------------------------------


def _sum(node: Node, consts: Consts, xs: Sequence[Tensor]) -> Tensor:
    out = None
    for x, coefficient in zip(xs, node.attrs["coefficients"], strict=True):
        term = x if coefficient == 1 else x * coefficient
        out = term if out is None else out + term
    return out  # type: ignore[return-value]


def _sum_interval(node: Node, consts: Consts, boxes: Sequence[Box]) -> Box:
    centers, radii = zip(*(inflate(*box) for box in boxes), strict=True)
    radius = sum(abs(c) * r for c, r in zip(node.attrs["coefficients"], radii, strict=True))
    return _spread(_sum(node, consts, centers), radius)  # type: ignore[arg-type]


def _sum_back(node: Node, consts: Consts, A: Tensor) -> tuple[list[Tensor], None]:
    return [A if c == 1 else A * c for c in node.attrs["coefficients"]], None


def _scale(node: Node, consts: Consts, xs: Sequence[Tensor]) -> Tensor:
    out = xs[0]
    if "factor" in consts:
        out = out * consts["factor"]
    return out + consts["shift"] if "shift" in consts else out


def _scale_interval(node: Node, consts: Consts, boxes: Sequence[Box]) -> Box:
    center, radius = inflate(*boxes[0])
    if "factor" in consts:
        center, radius = center * consts["factor"], radius * consts["factor"].abs()
    if "shift" in consts:
        center = center + consts["shift"]
        radius = radius + slack(center.dtype) * consts["shift"].abs()
    return _spread(center, radius)


def _scale_back(node: Node, consts: Consts, A: Tensor) -> tuple[list[Tensor], Tensor | None]:
    bias = None
    if "shift" in consts:
        shift = consts["shift"].expand(node.shape)
        bias = _flat(A) @ shift.reshape(-1)
    return [A * consts["factor"] if "factor" in consts else A], bias


def _reduce_sum(node: Node, consts: Consts, xs: Sequence[Tensor]) -> Tensor:
    return xs[0].sum([dim + 1 for dim in node.attrs["dims"]], keepdim=True)


def _reduce_interval(node: Node, consts: Consts, boxes: Sequence[Box]) -> Box:
    center, radius = inflate(*boxes[0])
    return _spread(_reduce_sum(node, consts, [center]), _reduce_sum(node, consts, [radius]))


def _reduce_back(node: Node, consts: Consts, A: Tensor) -> tuple[list[Tensor], None]:
    return [A.expand(A.shape[0], *node.attrs["in_shapes"][0])], None


# --- linear, matmul, conv -------------------------------------------------------------------------------------------


def _weighted(node: Node, consts: Consts, xs: Sequence[Tensor]) -> Tensor:
    return pull(node, consts["weight"], xs[0], consts.get("bias"))


def _product_interval(
    apply: Callable[[Node, Consts, Sequence[Tensor]], Tensor], *roles: str
) -> Callable[[Node, Consts, Sequence[Box]], Box]:
    """Interval rule of a product with a constant: centre with it, radius with its magnitude."""

    def interval(node: Node, consts: Consts, boxes: Sequence[Box]) -> Box:
        center, radius = inflate(*boxes[0])
        magnitude = {role: value.abs() for role, value in consts.items() if role in roles}
        out = apply(node, consts, [center])
        spread = apply(node, magnitude, [radius])
        if "bias" in consts:
            spread = spread + slack(out.dtype) * per_channel(node, consts["bias"].abs())
        return _spread(out, spread)

    return interval


def _weighted_back(node: Node, consts: Consts, A: Tensor) -> tuple[list[Tensor], Tensor | None]:
    bias = bias_rows(node, consts["bias"], A) if "bias" in consts else None
    return [push(node, consts["weight"], A)], bias


def _weighted_pick(node: Node, consts: Consts, index: Tensor, sign: Tensor) -> tuple[list[Tensor], Tensor | None]:
    bias = consts["bias"].index_select(0, channel_of(node, index)) * sign if "bias" in consts else None
    return [pick(node, consts["weight"], index, sign)], bias


def _matmul(node: Node, consts: Consts, xs: Sequence[Tensor]) -> Tensor:
    return consts["left"] @ xs[0] if "left" in consts else xs[0] @ consts["right"]


def _matmul_back(node: Node, consts: Consts, A: Tensor) -> tuple[list[Tensor], None]:
    if "left" in consts:
        return [consts["left"].transpose(-1, -2) @ A], None
    return [A @ consts["right"].transpose(-1, -2)], None


# --- nonlinear ------------------------------------------------------------------------------------------------------


def _act(node: Node, consts: Consts, xs: Sequence[Tensor]) -> Tensor:
    return node.attrs["activation"].fn(xs[0])


def _act_interval(node: Node, consts: Consts, boxes: Sequence[Box]) -> Box:
    return node.attrs["activation"].interval(*boxes[0])


def _mul(node: Node, consts: Consts, xs: Sequence[Tensor]) -> Tensor:
    return xs[0] * xs[1]


def _mul_interval(node: Node, consts: Consts, boxes: Sequence[Box]) -> Box:
    (lx, ux), (ly, uy) = boxes
    products = torch.stack([lx * ly, lx * uy, ux * ly, ux * uy])
    lower, upper = products.amin(0), products.amax(0)
    extra = slack(lower.dtype)
    return lower - extra * lower.abs(), upper + extra * upper.abs()


KERNEL: dict[str, Rule] = {
    "reshape": Rule(_reshape, _moved(_reshape), _reshape_back),
    "permute": Rule(_permute, _moved(_permute), _permute_back),
    "expand": Rule(_expand, _moved(_expand), _expand_back),
    "index": Rule(_index, _moved(_index), _index_back),
    "concat": Rule(_concat, _moved(_concat), _concat_back),
    "sum": Rule(_sum, _sum_interval, _sum_back, mixing=True),
    "scale": Rule(_scale, _scale_interval, _scale_back),
    "reduce_sum": Rule(_reduce_sum, _reduce_interval, _reduce_back, mixing=True),
    "linear": Rule(_weighted, _product_interval(_weighted, "weight"), _weighted_back, _weighted_pick, mixing=True),
    "sparse": Rule(
        sparse.forward,
        _product_interval(sparse.forward, "factors", "back_factors"),
        sparse.backward,
        sparse.pick,
        mixing=True,
    ),
    "matmul": Rule(_matmul, _product_interval(_matmul, "left", "right"), _matmul_back, mixing=True),
    "conv": Rule(_weighted, _product_interval(_weighted, "weight"), _weighted_back, _weighted_pick, mixing=True),
    "act": Rule(_act, _act_interval),
    "mul": Rule(_mul, _mul_interval),
}
