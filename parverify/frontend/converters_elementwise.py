"""Operators that act entry by entry: arithmetic, activations, comparisons, logic, casts."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from parverify.frontend.converters_common import Call, Operator

FLOAT32_LARGEST = 3.4028234663852886e38
"""A bound of this size or more, as exporters write it for `none`, clips nothing but infinities."""

SELU_ALPHA, SELU_GAMMA = 1.67326319217681884765625, 1.05070102214813232421875
"""The defaults of the ONNX operator, in float32."""


def _unary(function: Callable[[torch.Tensor], torch.Tensor]) -> Operator:
    return Operator(lambda call, x: function(x))


def _clip(
    call: Call, x: torch.Tensor, least: torch.Tensor | None = None, most: torch.Tensor | None = None
) -> torch.Tensor:
    low = None if least is not None else call.number("min", 1)
    high = None if most is not None else call.number("max", 2)
    low = None if low is not None and low <= -FLOAT32_LARGEST else low
    high = None if high is not None and high >= FLOAT32_LARGEST else high
    if low is not None or high is not None:
        x = torch.relu(x) if low == 0 and high is None else torch.clamp(x, low, high)
    x = x if least is None else torch.maximum(x, least)
    return x if most is None else torch.minimum(x, most)


def _has_two_bounds(call: Call) -> bool:
    """onnx2torch takes an absent bound for a computed one, and clips at the numbers that stand for `none`."""
    bounds = [call.number("min", 1), call.number("max", 2)]
    return None not in bounds and bounds[0] > -FLOAT32_LARGEST and bounds[1] < FLOAT32_LARGEST


def _has_one_slope(call: Call) -> bool:
    """onnx2torch picks entries by a mask where the slope has many."""
    return 1 in call.static and call.static[1].numel() == 1 and call.static[1].dim() == 1


def _prelu(call: Call, x: torch.Tensor, slope: torch.Tensor | None = None) -> torch.Tensor:
    if slope is None:
        constant = call.static[1]
        if constant.numel() == 1 and constant.dim() <= x.dim():
            return F.leaky_relu(x, call.number("slope", 1))
        slope = constant.to(device=x.device, dtype=x.dtype)
    if call.opset < 7 and slope.dim() == 1 and x.dim() > 1:
        slope = slope.reshape((-1,) + (1,) * (x.dim() - 2))
    return torch.relu(x) - slope * torch.relu(-x)


def _selu(call: Call, x: torch.Tensor) -> torch.Tensor:
    return call.get("gamma", SELU_GAMMA) * F.elu(x, call.get("alpha", SELU_ALPHA))


def _gelu(call: Call, x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate=call.get("approximate", "none"))


def _shrink(call: Call, x: torch.Tensor) -> torch.Tensor:
    bias, lambd = call.get("bias", 0.0), call.get("lambd", 0.5)
    inner = torch.where(x > lambd, x - bias, torch.zeros_like(x))
    return torch.where(x < -lambd, x + bias, inner)


def _cast(call: Call, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return x.to(like.dtype)


def _variadic(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Operator:
    """onnx2torch stacks the inputs, or adds them to zeros in place: more to bound, or not to be traced."""
    return Operator(lambda call, *inputs: functools.reduce(function, inputs))


ELEMENTWISE: dict[str, Operator] = {
    "Acosh": _unary(torch.acosh),
    "Asinh": _unary(torch.asinh),
    "Atanh": _unary(torch.atanh),
    "Cosh": _unary(torch.cosh),
    "Mish": _unary(F.mish),
    "Sinh": _unary(torch.sinh),
    "Gelu": Operator(_gelu),
    "PRelu": Operator(_prelu, inline=(1,), theirs=_has_one_slope),
    "Selu": Operator(_selu, theirs=lambda call: "alpha" not in call.attributes and "gamma" not in call.attributes),
    "Shrink": Operator(_shrink),
    "ThresholdedRelu": Operator(lambda call, x: F.threshold(x, call.get("alpha", 1.0), 0.0)),
    "Clip": Operator(_clip, inline=(1, 2), theirs=_has_two_bounds),
    "Max": _variadic(torch.maximum),
    "Min": _variadic(torch.minimum),
    "Sum": _variadic(torch.add),
    "Mean": Operator(lambda call, *inputs: functools.reduce(torch.add, inputs) / len(inputs)),
    "Cast": Operator(_cast),
    "CastLike": Operator(_cast),
}
