"""Matrix products, normalizations and cumulative sums."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from parverify.frontend.converters_common import Call, Operator, axis_of


def _gemm(call: Call, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    a = a.transpose(0, 1) if call.get("transA", 0) else a
    b = b.transpose(0, 1) if call.get("transB", 0) else b
    return torch.matmul(a, b) * call.get("alpha", 1.0) + c * call.get("beta", 1.0)


def _has_variable_product(call: Call) -> bool:
    """onnx2torch adds in place to the product, which no trace can follow where that is constant."""
    return not {0, 1} <= call.constant


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


def _has_fixed_statistics(call: Call) -> bool:
    """onnx2torch has modules for constant parameters and up to three spatial axes, and no eye for the training mode."""
    ranks = (2, 3, 4, 5)
    return not call.get("training_mode", 0) and call.constant == {1, 2, 3, 4} and len(call.shapes[0] or ()) in ranks


def _layer_normalization(
    call: Call, x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    shape = x.shape[axis_of(call.get("axis", -1), x.dim()) :]
    bias = None if bias is None else bias.expand(shape)
    return F.layer_norm(x, shape, scale.expand(shape), bias, call.get("epsilon", 1e-5))


def _has_whole_parameters(call: Call) -> bool:
    """onnx2torch reads parameters in the shape of what is normalized, and makes up a missing bias in float32."""
    shape = call.shapes[0] or ()
    wanted = shape[axis_of(call.get("axis", -1), len(shape)) :]
    return call.constant == {1, 2} and call.shapes[1] == call.shapes[2] == wanted


def _standardize(x: torch.Tensor, axes: tuple[int, ...], epsilon: float) -> torch.Tensor:
    centered = x - x.mean(dim=axes, keepdim=True)
    variance = (centered * centered).mean(dim=axes, keepdim=True)
    return centered / torch.sqrt(variance + epsilon)


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


def _cumulative_sum(call: Call, x: torch.Tensor, *_: None) -> torch.Tensor:
    axis, backward = axis_of(int(call.number("axis", 1)), x.dim()), bool(call.get("reverse", 0))
    x = x.flip(axis) if backward else x
    total = torch.cumsum(x, dim=axis)
    total = total - x if call.get("exclusive", 0) else total
    return total.flip(axis) if backward else total


LINEAR: dict[str, Operator] = {
    "Gemm": Operator(_gemm, theirs=_has_variable_product),
    "BatchNormalization": Operator(_batch_normalization, theirs=_has_fixed_statistics),
    "LayerNormalization": Operator(_layer_normalization, theirs=_has_whole_parameters),
    "GroupNormalization": Operator(_group_normalization),
    "RMSNormalization": Operator(_rms_normalization),
    "LpNormalization": Operator(_lp_normalization),
    "CumSum": Operator(_cumulative_sum, static=(1,)),
}
