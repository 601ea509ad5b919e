"""Products with a weight that is nearly all zeros: a few entries are picked for each scalar instead of multiplying.

An output scalar is a sum of `factor * input` over the few inputs that it reads, and a row's coefficient of an input is
the same kind of sum over the few outputs that read it. Both directions keep a table of places and one of factors, of
as many lines as the fullest scalar has entries; shorter ones are filled up with a factor of zero. Sums are taken line
by line, so that they are rounded alike everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from parverify.graph.ir import Node
from parverify.ops.weighted import bias_rows


class _Picked(torch.autograd.Function):
    """sum_k factors[k] * x[..., places[k]], whose gradient picks by the tables of the other direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, here: tuple[Tensor, Tensor], back: tuple[Tensor, Tensor]) -> Tensor:
        ctx.here, ctx.back = here, back
        return _sum(x, *here)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return picked(gradient, ctx.back, ctx.here), None, None


def _sum(x: Tensor, places: Tensor, factors: Tensor) -> Tensor:
    out = x.index_select(-1, places[0]) * factors[0]
    for place, factor in zip(places[1:], factors[1:], strict=True):
        out = torch.addcmul(out, x.index_select(-1, place), factor)
    return out


def picked(x: Tensor, here: tuple[Tensor, Tensor], back: tuple[Tensor, Tensor]) -> Tensor:
    """The product along the last dim, by the tables of its direction; those of the other one serve its gradient.

    Args:
        x: (..., n).
        here: places (K, m) in x and factors (K, m), of each scalar of the result.
        back: places (J, n) in the result and factors (J, n), of each scalar of x.

    Returns:
        (..., m).
    """
    if here[1].requires_grad:  # then autograd has to see the sums themselves
        return _sum(x, *here)
    found: Tensor = _Picked.apply(x, here, back)
    return found


def tables(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Places and factors (K, rows) of the entries of each row of a weight (rows, columns); K is at least 1."""
    count = (weight != 0).sum(1)
    most = max(1, int(count.max()))
    order = torch.argsort((weight != 0).to(torch.int8), dim=1, descending=True, stable=True)[:, :most]
    factors = weight.gather(1, order)
    return order.T.contiguous(), factors.T.contiguous()


def _both(node: Node, consts: Mapping[str, Tensor]) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Places and factors of the node's value, and those of its input."""
    return (node.attrs["places"], consts["factors"]), (node.attrs["back_places"], consts["back_factors"])


def forward(node: Node, consts: Mapping[str, Tensor], xs: Sequence[Tensor]) -> Tensor:
    """(B, *in_shape) -> (B, *shape)."""
    here, back = _both(node, consts)
    out = picked(xs[0], here, back)
    return out + consts["bias"] if "bias" in consts else out


def backward(node: Node, consts: Mapping[str, Tensor], A: Tensor) -> tuple[list[Tensor], Tensor | None]:
    """Rows (N, *shape) -> [(N, *in_shape)] and what the bias adds (N,)."""
    here, back = _both(node, consts)
    constant = bias_rows(node, consts["bias"], A) if "bias" in consts else None
    return [picked(A, back, here)], constant


def pick(node: Node, consts: Mapping[str, Tensor], index: Tensor, sign: Tensor) -> tuple[list[Tensor], Tensor | None]:
    """`backward` of one-hot rows `sign * value.flatten()[index]`, (N,) each."""
    width, in_shape = node.shape[-1], node.attrs["in_shapes"][0]
    lead, channel = index // width, index % width
    places = lead[:, None] * in_shape[-1] + node.attrs["places"][:, channel].T
    values = consts["factors"][:, channel].T * sign[:, None]
    A = values.new_zeros(len(index), math.prod(in_shape)).scatter_add(1, places, values)
    constant = consts["bias"][channel] * sign if "bias" in consts else None
    return [A.reshape(len(index), *in_shape)], constant


def dense(node: Node, consts: Mapping[str, Tensor]) -> Tensor:
    """The weight (out, in)."""
    places, factors = node.attrs["places"], consts["factors"]
    return factors.new_zeros(places.shape[1], node.attrs["in_shapes"][0][-1]).scatter_add(1, places.T, factors.T)
