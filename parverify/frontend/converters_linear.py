"""Matrix products, normalizations, softmax and reductions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from parverify.frontend.converters_common import Call, Operator, along, axis_of


def _matmul(call: Call, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    # torch squeezes the product with a vector in place; written out, no step does.
    if b.dim() == 1:
        return torch.matmul(a if a.dim() > 1 else a.unsqueeze(0), b.unsqueeze(1)).reshape(a.shape[:-1])
    if a.dim() == 1:
        return torch.matmul(a.unsqueeze(0), b).reshape(b.shape[:-2] + b.shape[-1:])
    return torch.matmul(a, b)


def _gemm(call: Call, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None = None) -> torch.Tensor:
    alpha, beta = call.get("alpha", 1.0), call.get("beta", 1.0)
    a = a.transpose(0, 1) if call.get("transA", 0) else a
    if alpha == 1 and beta == 1 and (c is None or c.dim() == 1):
        return F.linear(a, b if call.get("transB", 0) else b.transpose(0, 1), c)
    product = torch.matmul(a, b.transpose(0, 1) if call.get("transB", 0) else b)
    product = product if alpha == 1 else product * alpha
    if c is None or beta == 0:
        return product
    return product + (c if beta == 1 else c * beta)


def _einsum(call: Call, *inputs: torch.Tensor) -> torch.Tensor:
    return torch.einsum(call.get("equation"), *inputs)


def _along_channels(parameter: torch.Tensor, rank: int) -> torch.Tensor:
    return parameter.reshape((-1,) + (1,) * (rank - 2)) if parameter.dim() == 1 and rank > 1 else parameter


def _batch_normalization(
    call: Call,
    x: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor,
    mean: torch.Tensor,
    variance: torch.Tensor,
) -> torch.Tensor:
    if call.get("training_mode", 0):
        call.refuse("training mode is not supported; allowed is inference (training_mode 0)")
    factor = scale / torch.sqrt(variance + call.get("epsilon", 1e-5))
    shift = bias - mean * factor
    return x * _along_channels(factor, x.dim()) + _along_channels(shift, x.dim())


def _standardize(x: torch.Tensor, axes: tuple[int, ...], epsilon: float) -> torch.Tensor:
    centered = x - x.mean(dim=axes, keepdim=True)
    variance = (centered * centered).mean(dim=axes, keepdim=True)
    return centered / torch.sqrt(variance + epsilon)


def _instance_normalization(call: Call, x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    plain = _standardize(x, tuple(range(2, x.dim())), call.get("epsilon", 1e-5))
    return plain * _along_channels(scale, x.dim()) + _along_channels(bias, x.dim())


def _layer_normalization(
    call: Call, x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    axes = tuple(range(axis_of(call.get("axis", -1), x.dim()), x.dim()))
    y = _standardize(x, axes, call.get("epsilon", 1e-5)) * scale
    return y if bias is None else y + bias


def _group_normalization(call: Call, x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    groups = call.get("num_groups")
    split = x.reshape(x.shape[0], groups, -1)
    plain = _standardize(split, (2,), call.get("epsilon", 1e-5))
    return plain.reshape(x.shape) * _along_channels(scale, x.dim()) + _along_channels(bias, x.dim())


def _rms_normalization(call: Call, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    axes = tuple(range(axis_of(call.get("axis", -1), x.dim()), x.dim()))
    return x / torch.sqrt((x * x).mean(dim=axes, keepdim=True) + call.get("epsilon", 1e-5)) * scale


def _lp_normalization(call: Call, x: torch.Tensor) -> torch.Tensor:
    axis = call.get("axis", -1)
    if call.get("p", 2) == 1:
        norm = x.abs().sum(dim=axis, keepdim=True)
    else:
        norm = torch.sqrt((x * x).sum(dim=axis, keepdim=True))
    # A vector of zeros stays one.
    return x / torch.clamp(norm, min=torch.finfo(torch.float32).tiny)


def _local_response(call: Call, x: torch.Tensor) -> torch.Tensor:
    size = call.get("size")
    before, squares = (size - 1) // 2, x * x
    flat = [0, 0] * (x.dim() - 2) + [before, size - 1 - before]
    padded = F.pad(squares, flat)
    total = functools.reduce(torch.add, [padded.narrow(1, k, x.shape[1]) for k in range(size)])
    return x / torch.pow(call.get("bias", 1.0) + call.get("alpha", 1e-4) / size * total, call.get("beta", 0.75))


def _softmax_like(function: Callable[..., torch.Tensor]) -> Operator:
    def apply(call: Call, x: torch.Tensor) -> torch.Tensor:
        axis = axis_of(call.get("axis", 1 if call.opset < 13 else -1), x.dim())
        if call.opset >= 13 or axis == x.dim() - 1:
            return function(x, dim=axis)
        # Before version 13 everything from `axis` on was one distribution.
        return function(x.reshape(math.prod(x.shape[:axis]), -1), dim=1).reshape(x.shape)

    return Operator(apply)


def _reduction(
    function: Callable[[torch.Tensor, list[int], bool], torch.Tensor],
    alone: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Operator:
    """A reduction; `alone` is what it does to an entry where no axis is reduced, nothing by default."""

    def apply(call: Call, x: torch.Tensor, *_: None) -> torch.Tensor:
        axes = call.ints("axes", 1)
        if not axes:
            if call.get("noop_with_empty_axes", 0):
                return x if alone is None else alone(x)
            axes = list(range(x.dim()))
        return function(x, [axis_of(axis, x.dim()) for axis in axes], bool(call.get("keepdims", 1)))

    return Operator(apply, static=(1,))


def _product(x: torch.Tensor, axes: list[int], keepdim: bool) -> torch.Tensor:
    for axis in sorted(axes, reverse=True):
        x = x.prod(dim=axis, keepdim=keepdim)
    return x


def _extreme_index(function: Callable[..., torch.Tensor]) -> Operator:
    def apply(call: Call, x: torch.Tensor) -> torch.Tensor:
        axis, keepdim = axis_of(call.get("axis", 0), x.dim()), bool(call.get("keepdims", 1))
        if call.get("select_last_index", 0):
            return x.shape[axis] - 1 - function(x.flip(axis), dim=axis, keepdim=keepdim)
        return function(x, dim=axis, keepdim=keepdim)

    return Operator(apply)


def _cumulative_sum(call: Call, x: torch.Tensor, *_: None) -> torch.Tensor:
    axis, backward = axis_of(int(call.number("axis", 1)), x.dim()), bool(call.get("reverse", 0))
    x = x.flip(axis) if backward else x
    total = torch.cumsum(x, dim=axis)
    if call.get("exclusive", 0):
        first = torch.zeros_like(along(total, axis, slice(0, 1)))
        total = torch.cat([first, along(total, axis, slice(0, -1))], dim=axis)
    return total.flip(axis) if backward else total


LINEAR: dict[str, Operator] = {
    "MatMul": Operator(_matmul),
    "Gemm": Operator(_gemm),
    "Einsum": Operator(_einsum),
    "BatchNormalization": Operator(_batch_normalization),
    "InstanceNormalization": Operator(_instance_normalization),
    "LayerNormalization": Operator(_layer_normalization),
    "GroupNormalization": Operator(_group_normalization),
    "RMSNormalization": Operator(_rms_normalization),
    "LpNormalization": Operator(_lp_normalization),
    "LRN": Operator(_local_response),
    "Softmax": _softmax_like(torch.softmax),
    "LogSoftmax": _softmax_like(torch.log_softmax),
    "ReduceSum": _reduction(lambda x, axes, keep: x.sum(dim=axes, keepdim=keep)),
    "ReduceMean": _reduction(lambda x, axes, keep: x.mean(dim=axes, keepdim=keep)),
    "ReduceMax": _reduction(lambda x, axes, keep: x.amax(dim=axes, keepdim=keep)),
    "ReduceMin": _reduction(lambda x, axes, keep: x.amin(dim=axes, keepdim=keep)),
    "ReduceProd": _reduction(_product),
    "ReduceL1": _reduction(lambda x, axes, keep: x.abs().sum(dim=axes, keepdim=keep), torch.abs),
    "ReduceL2": _reduction(lambda x, axes, keep: torch.sqrt((x * x).sum(dim=axes, keepdim=keep)), torch.abs),
    "ReduceSumSquare": _reduction(lambda x, axes, keep: (x * x).sum(dim=axes, keepdim=keep), lambda x: x * x),
    "ReduceLogSum": _reduction(lambda x, axes, keep: torch.log(x.sum(dim=axes, keepdim=keep)), torch.log),
    "ReduceLogSumExp": _reduction(lambda x, axes, keep: torch.logsumexp(x, dim=axes, keepdim=keep)),
    "ArgMax": _extreme_index(torch.argmax),
    "ArgMin": _extreme_index(torch.argmin),
    "CumSum": Operator(_cumulative_sum, static=(1,)),
}
