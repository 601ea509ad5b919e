"""Importers of softmax, norms and attention: sums, products and activations of each other.

Softmax is `1 / sum_j exp(x_j - x_i)` where the axis is short: the differences cancel what the scores share and the
denominator is at least 1.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from parverify.errors import ModelError
from parverify.graph.builder import Builder, Value, Var
from parverify.graph.importers import importer
from parverify.graph.importers_nonlinear import absolute
from parverify.graph.ir import Const, derive

PAIRWISE_SOFTMAX_LIMIT = 64


@importer("_softmax", "softmax", "_safe_softmax")
def _softmax(b: Builder, func: Any, args: Any, kwargs: dict[str, Any]) -> Value:
    return softmax(b, args[0], int(args[1]))


def softmax(b: Builder, x: Var, dim: int, keep: Tensor | None = None) -> Value:
    """Softmax along `dim`: pairwise differences on short axes, else exp over its sum.

    Args:
        keep: bool, broadcasts to x; False where a score counts as minus infinity. Every sum must keep some.
    """
    dim %= len(x.shape)
    size = x.shape[dim]
    kept = None if keep is None else keep.expand(x.shape).to(torch.float64)
    if size > PAIRWISE_SOFTMAX_LIMIT:
        powers = b.activation(x, "exp")
        powers = powers if kept is None else b.scale(powers, Const(kept))
        return b.divide(powers, b.reduce_sum(powers, [dim], True))
    this = b.reshape(x, (*x.shape[:dim], size, 1, *x.shape[dim + 1 :]))
    other = b.reshape(x, (*x.shape[:dim], 1, size, *x.shape[dim + 1 :]))
    powers = b.activation(b.sub(other, this), "exp")  # type: ignore[arg-type]
    powers = powers if kept is None else b.scale(powers, Const(kept.unsqueeze(dim)))
    quotient = b.activation(b.reduce_sum(powers, [dim + 1]), "reciprocal")
    return quotient if kept is None else b.scale(quotient, Const(kept))


@importer("_log_softmax", "log_softmax", "logsumexp")
def _log_softmax(b: Builder, func: Any, args: Any, kwargs: dict[str, Any]) -> Value:
    x = args[0]
    if func.overloadpacket.__name__ == "logsumexp":
        dims = [args[1]] if isinstance(args[1], int) else list(args[1])
        keepdim = bool(args[2]) if len(args) > 2 else bool(kwargs.get("keepdim", False))
        return b.activation(b.reduce_sum(b.activation(x, "exp"), dims, keepdim), "log")
    dim = int(args[1]) % len(x.shape)
    this = b.reshape(x, (*x.shape[:dim], x.shape[dim], 1, *x.shape[dim + 1 :]))
    other = b.reshape(x, (*x.shape[:dim], 1, x.shape[dim], *x.shape[dim + 1 :]))
    powers = b.activation(b.sub(other, this), "exp")  # type: ignore[arg-type]
    return b.scale(b.activation(b.reduce_sum(powers, [dim + 1]), "log"), -1.0)


def _normalized(b: Builder, x: Var, dims: list[int], eps: float) -> Value:
    """(x - mean) / sqrt(variance + eps) over `dims`."""
    centred = b.sub(x, b.mean(x, dims, True))
    variance = b.mean(b.activation(centred, "square"), dims, True)  # type: ignore[arg-type]
    return b.mul(centred, b.activation(b.scale(variance, None, eps), "rsqrt"))


@importer(
    "native_batch_norm",
    "_native_batch_norm_legit_no_training",
    "_native_batch_norm_legit",
    "cudnn_batch_norm",
    "_batch_norm_impl_index",
    "batch_norm",
)
def _batch_norm(b: Builder, func: Any, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """With running statistics a scale; with those of the instance (instance norm, or no running statistics) like layer
    norm."""
    given = _given(func, args, kwargs)
    x, weight, bias, eps = given["input"], given.get("weight"), given.get("bias"), float(given["eps"])
    mean, variance = given.get("running_mean"), given.get("running_var")
    shape = (-1, *[1] * (len(x.shape) - 2))
    if given.get("training") or mean is None or variance is None:
        y = _normalized(b, x, [dim for dim in range(len(x.shape)) if dim != 1], eps)
        y = y if weight is None else b.mul(y, derive(torch.reshape, weight, shape))
        return [y if bias is None else b.add(y, derive(torch.reshape, bias, shape)), None, None]
    factor = derive(lambda v: torch.rsqrt(v + eps), variance)
    if weight is not None:
        factor = derive(torch.mul, factor, weight)
    shift = derive(lambda m, f: -m * f, mean, factor)
    if bias is not None:
        shift = derive(torch.add, shift, bias)
    return [b.scale(x, derive(torch.reshape, factor, shape), derive(torch.reshape, shift, shape)), None, None]


def _given(func: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by the names of the operator's schema."""
    return {argument.name: arg for argument, arg in zip(func._schema.arguments, args, strict=False)} | kwargs


@importer("native_layer_norm", "layer_norm")
def _layer_norm(b: Builder, func: Any, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    x, shape, weight, bias, eps = args[:5]
    dims = list(range(len(x.shape) - len(shape), len(x.shape)))
    y = _normalized(b, x, dims, float(eps))
    y = y if weight is None else b.mul(y, weight)
    return [y if bias is None else b.add(y, bias), None, None]


@importer("native_group_norm", "group_norm")
def _group_norm(b: Builder, func: Any, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    x, weight, bias, count, channels, _, groups, eps = args[:8]
    grouped = b.reshape(x, (count, groups, x.numel // (count * groups)))
    y: Value = b.reshape(_normalized(b, grouped, [2], float(eps)), x.shape)  # type: ignore[arg-type]
    shape = (1, channels, *[1] * (len(x.shape) - 2))
    y = y if weight is None else b.mul(y, derive(torch.reshape, weight, shape))
    return [y if bias is None else b.add(y, derive(torch.reshape, bias, shape)), None, None]


@importer("linalg_vector_norm", "norm")
def _norm(b: Builder, func: Any, args: Any, kwargs: dict[str, Any]) -> Value:
    x = args[0]
    order = args[1] if len(args) > 1 and args[1] is not None else kwargs.get("ord", 2)
    dims = args[2] if len(args) > 2 and args[2] is not None else kwargs.get("dim")
    dims = list(range(len(x.shape))) if not dims else ([dims] if isinstance(dims, int) else list(dims))
    keepdim = bool(args[3]) if len(args) > 3 else bool(kwargs.get("keepdim", False))
    if float(order) == 2:
        return b.activation(b.reduce_sum(b.activation(x, "square"), dims, keepdim), "sqrt")
    if float(order) == 1:
        return b.reduce_sum(absolute(b, x), dims, keepdim)  # type: ignore[arg-type]
    raise ModelError(f"{b.source}: a norm of order {order} is not supported; allowed: 1 and 2")


def _transposed(b: Builder, x: Value) -> Value:
    """`x` with its last two dimensions exchanged."""
    if isinstance(x, Const):
        return derive(torch.transpose, x, -1, -2)
    rank = len(x.shape)
    return b.permute(x, (*range(rank - 2), rank - 1, rank - 2))


@importer(
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_attention_math",
    "scaled_dot_product_attention",
    "_fused_sdp_choice",
)
def _attention(b: Builder, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if func.overloadpacket.__name__ == "_fused_sdp_choice":
        return None
    given = _given(func, args, kwargs)
    query, key, value = args[:3]
    mask = given.get("attn_mask", given.get("attn_bias"))
    if given.get("enable_gqa") or given.get("dropout_p"):
        raise ModelError(f"{b.source}: attention that is grouped or has dropout is not supported")
    width = (query.shape if isinstance(query, Var) else query.value.shape)[-1]
    scale = 1.0 / math.sqrt(width) if given.get("scale") is None else float(given["scale"])
    scores = b.matmul(query, _transposed(b, key))
    scores = b.scale(scores, scale)
    keep = torch.ones(scores.shape[-2:], dtype=torch.bool)
    if given.get("is_causal"):
        keep = keep.tril()
    if isinstance(mask, Const):
        keep = keep & (mask.value if mask.value.dtype == torch.bool else mask.value != -torch.inf).cpu()
        mask = (
            None if mask.value.dtype == torch.bool else derive(lambda v: v.clamp(min=-1e30) * (v != -torch.inf), mask)
        )
    if not bool(keep.any(-1).all()):
        raise ModelError(f"{b.source}: an attention mask that leaves nothing to attend to is not supported")
    if mask is not None:
        scores = b.add(scores, mask)  # type: ignore[assignment]
    attended = b.matmul(softmax(b, scores, -1, None if bool(keep.all()) else keep), value)
    return attended if func.overloadpacket.__name__ == "scaled_dot_product_attention" else [attended, None, None, None]
