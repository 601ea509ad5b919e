"""Operators that act entry by entry: arithmetic, activations, comparisons, logic, casts."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from parverify.frontend.converters_common import Call, Operator, axis_of

FLOAT32_LARGEST = 3.4028234663852886e38
"""A bound of this size or more, as exporters write it for `none`, clips nothing but infinities."""

SELU_ALPHA, SELU_GAMMA = 1.67326319217681884765625, 1.05070102214813232421875
"""The defaults of the ONNX operator, in float32."""


def _unary(function: Callable[[torch.Tensor], torch.Tensor]) -> Operator:
    return Operator(lambda call, x: function(x))


def _binary(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Operator:
    def apply(call: Call, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if call.opset < 7 and call.get("broadcast", 0) and call.get("axis") is not None:
            b = b.reshape(b.shape + (1,) * (a.dim() - axis_of(call.get("axis"), a.dim()) - b.dim()))
        return function(a, b)

    return Operator(apply)


def _variadic(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Operator:
    return Operator(lambda call, *inputs: functools.reduce(function, inputs))


def _divide(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")


def _mod(call: Call, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.fmod(a, b) if call.get("fmod", 0) else torch.remainder(a, b)


def _mean(call: Call, *inputs: torch.Tensor) -> torch.Tensor:
    return functools.reduce(torch.add, inputs) / len(inputs)


def _pow(call: Call, base: torch.Tensor, exponent: torch.Tensor | None = None) -> torch.Tensor:
    if exponent is not None:
        return torch.pow(base, exponent).to(base.dtype)
    constant = call.static[1]
    if constant.numel() == 1 and constant.dim() <= base.dim():
        power = call.number("exponent", 1)
        return base if power == 1 else torch.pow(base, power).to(base.dtype)
    # The result has the type of the base, whatever the type of the exponent is.
    return torch.pow(base, constant.to(base.device)).to(base.dtype)


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


def _prelu(call: Call, x: torch.Tensor, slope: torch.Tensor | None = None) -> torch.Tensor:
    if slope is None:
        constant = call.static[1]
        if constant.numel() == 1 and constant.dim() <= x.dim():
            return F.leaky_relu(x, call.number("slope", 1))
        slope = constant.to(device=x.device, dtype=x.dtype)
    if call.opset < 7 and slope.dim() == 1 and x.dim() > 1:
        slope = slope.reshape((-1,) + (1,) * (x.dim() - 2))
    return torch.relu(x) - slope * torch.relu(-x)


def _hard_sigmoid(call: Call, x: torch.Tensor) -> torch.Tensor:
    return torch.clamp(call.get("alpha", 0.2) * x + call.get("beta", 0.5), 0.0, 1.0)


def _selu(call: Call, x: torch.Tensor) -> torch.Tensor:
    return call.get("gamma", SELU_GAMMA) * F.elu(x, call.get("alpha", SELU_ALPHA))


def _gelu(call: Call, x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate=call.get("approximate", "none"))


def _shrink(call: Call, x: torch.Tensor) -> torch.Tensor:
    bias, lambd = call.get("bias", 0.0), call.get("lambd", 0.5)
    inner = torch.where(x > lambd, x - bias, torch.zeros_like(x))
    return torch.where(x < -lambd, x + bias, inner)


def _same(call: Call, x: torch.Tensor, *_: torch.Tensor | None) -> torch.Tensor:
    return x


def _dropout(call: Call, x: torch.Tensor, ratio: torch.Tensor | None = None, *_: torch.Tensor | None) -> torch.Tensor:
    if call.number("training_mode", 2, False):
        call.refuse("Dropout in training mode is random; only inference is allowed")
    return x


def _cast(call: Call, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return x.to(like.dtype)


def _where(call: Call, condition: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.where(condition, a, b)


ELEMENTWISE: dict[str, Operator] = {
    "Abs": _unary(torch.abs),
    "Acos": _unary(torch.acos),
    "Acosh": _unary(torch.acosh),
    "Asin": _unary(torch.asin),
    "Asinh": _unary(torch.asinh),
    "Atan": _unary(torch.atan),
    "Atanh": _unary(torch.atanh),
    "Ceil": _unary(torch.ceil),
    "Cos": _unary(torch.cos),
    "Cosh": _unary(torch.cosh),
    "Erf": _unary(torch.erf),
    "Exp": _unary(torch.exp),
    "Floor": _unary(torch.floor),
    "HardSwish": _unary(F.hardswish),
    "IsNaN": _unary(torch.isnan),
    "Log": _unary(torch.log),
    "Mish": _unary(F.mish),
    "Neg": _unary(torch.neg),
    "Not": _unary(torch.logical_not),
    "Reciprocal": _unary(torch.reciprocal),
    "Relu": _unary(torch.relu),
    "Round": _unary(torch.round),
    "Sigmoid": _unary(torch.sigmoid),
    "Sign": _unary(torch.sign),
    "Sin": _unary(torch.sin),
    "Sinh": _unary(torch.sinh),
    "Softplus": _unary(F.softplus),
    "Softsign": _unary(F.softsign),
    "Sqrt": _unary(torch.sqrt),
    "Tan": _unary(torch.tan),
    "Tanh": _unary(torch.tanh),
    "Celu": Operator(lambda call, x: F.celu(x, call.get("alpha", 1.0))),
    "Elu": Operator(lambda call, x: F.elu(x, call.get("alpha", 1.0))),
    "Gelu": Operator(_gelu),
    "HardSigmoid": Operator(_hard_sigmoid),
    "LeakyRelu": Operator(lambda call, x: F.leaky_relu(x, call.get("alpha", 0.01))),
    "PRelu": Operator(_prelu, inline=(1,)),
    "Selu": Operator(_selu),
    "Shrink": Operator(_shrink),
    "ThresholdedRelu": Operator(lambda call, x: F.threshold(x, call.get("alpha", 1.0), 0.0)),
    "Clip": Operator(_clip, inline=(1, 2)),
    "Add": _binary(torch.add),
    "Sub": _binary(torch.sub),
    "Mul": _binary(torch.mul),
    "Div": _binary(_divide),
    "Mod": Operator(_mod),
    "Pow": Operator(_pow, inline=(1,)),
    "Max": _variadic(torch.maximum),
    "Min": _variadic(torch.minimum),
    "Sum": _variadic(torch.add),
    "Mean": Operator(_mean),
    "Equal": _binary(torch.eq),
    "Greater": _binary(torch.gt),
    "GreaterOrEqual": _binary(torch.ge),
    "Less": _binary(torch.lt),
    "LessOrEqual": _binary(torch.le),
    "And": _binary(torch.logical_and),
    "Or": _binary(torch.logical_or),
    "Xor": _binary(torch.logical_xor),
    "Where": Operator(_where),
    "Identity": Operator(_same),
    "Dropout": Operator(_dropout, static=(1, 2)),
    "Cast": Operator(_cast),
    "CastLike": Operator(_cast),
}
