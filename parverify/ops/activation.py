"""The table of elementwise activations, and the families with parameters.

A row is a name, the function, and its facts. Other piecewise linear functions (abs, clip, leaky ReLU, hard sigmoid and
the like) are not here: graph passes rewrite them to ReLU and affine operators.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from parverify.errors import UsageError
from parverify.ops.catalog import SMOOTH, elu_facts, power_facts, softplus_facts
from parverify.ops.elementwise import Activation
from parverify.ops.facts import Function
from parverify.ops.relu import Relu
from parverify.ops.smooth import Smooth
from parverify.ops.steps import Step

__all__ = ["ACTIVATIONS", "MAKERS", "Activation", "celu", "elu", "power", "selu", "softplus"]

SELU_ALPHA, SELU_SCALE = 1.6732632423543772848, 1.0507009873554804934


def softplus(beta: float = 1.0, threshold: float = 20.0) -> Activation:
    """`log(1 + exp(beta x)) / beta`.

    Args:
        beta: positive.
        threshold: torch goes on with x where beta * x is above this. Bounds are those of the exact function, which
            torch's differs from by less than exp(-threshold) / beta; so small thresholds are refused.

    Raises:
        UsageError: for a beta or a threshold that is not allowed.
    """
    if not threshold >= 20:
        raise UsageError(f"softplus: threshold is {threshold}, allowed are 20 and more")
    facts = softplus_facts(beta)
    return Smooth("softplus", facts.f, recipe=("softplus", beta, threshold), facts=facts)


def elu(alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Activation:
    """`scale * x` for x > 0, else `scale * alpha * (exp(input_scale * x) - 1)`; the parameters must be positive."""
    facts = elu_facts(alpha, scale, input_scale)
    return Smooth("elu", facts.f, recipe=("elu", alpha, scale, input_scale), facts=facts)


def selu() -> Activation:
    """ELU with the two constants of self-normalizing networks."""
    facts = elu_facts(SELU_ALPHA, SELU_SCALE, 1.0)
    return Smooth("selu", torch.selu, facts=facts)


def celu(alpha: float = 1.0) -> Activation:
    """`x` for x > 0, else `alpha * (exp(x / alpha) - 1)`; alpha must be positive."""
    if not alpha > 0:
        raise UsageError(f"celu: alpha is {alpha}, allowed are positive numbers")
    facts = elu_facts(alpha, 1.0, 1.0 / alpha)
    return Smooth("celu", facts.f, recipe=("celu", alpha), facts=facts)


def power(exponent: float) -> Activation:
    """`x ** exponent` for a constant exponent other than 0 and 1; x >= 0 is required where it is no integer."""
    facts = power_facts(exponent)
    return Smooth(f"power({exponent:g})", facts.f, recipe=("power", exponent), facts=facts)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


_FUNCTIONS: dict[str, Function] = {
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": F.silu,
    "mish": F.mish,
    "logsigmoid": F.logsigmoid,
}

MAKERS: dict[str, Callable[..., Activation]] = {"softplus": softplus, "elu": elu, "celu": celu, "power": power}

ACTIVATIONS: dict[str, Activation] = {
    "relu": Relu("relu", torch.relu, True),
    **{name: Smooth(name, _FUNCTIONS.get(name, facts.f), facts=facts) for name, facts in SMOOTH.items()},
    "square": Smooth("square", torch.square, facts=power_facts(2)),
    "softplus": softplus(),
    "elu": elu(),
    "selu": selu(),
    "celu": celu(),
    "sign": Step("sign", torch.sign, True, bound=1.0),
    "floor": Step("floor", torch.floor, True, after=1.0, before=0.0),
    "ceil": Step("ceil", torch.ceil, True, after=0.0, before=-1.0),
    "round": Step("round", torch.round, True, after=0.5, before=-0.5),
}
