"""The facts of each smooth function, and of the families with parameters.

Every constant can be checked from the definition: the inflections are roots of the second derivative, the critical
points roots of the first (solved to 17 digits); `tests/ops` checks both against finite differences.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from parverify.errors import UsageError
from parverify.ops.facts import Domain, Facts, Inflections, Waves

INF = math.inf
S_SHAPED = Inflections((0.0,), convex_first=True)
CONVEX = Inflections()
CONCAVE = Inflections(convex_first=False)
POSITIVE = Domain(low=0.0)
REACH = 1e6  # beyond it, an argument's period is known to less than 1e-9 of it, so periodic functions give their range


def bell(x: Tensor) -> Tensor:
    """Derivative of the sigmoid, without cancellation in the tails."""
    return torch.sigmoid(x) * torch.sigmoid(-x)


def soft(x: Tensor) -> Tensor:
    """log(1 + exp(x)) without overflow."""
    return torch.logaddexp(x, torch.zeros_like(x))


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * torch.erfc(-x * math.sqrt(0.5))


def _gelu_slope(x: Tensor) -> Tensor:
    return 0.5 * torch.erfc(-x * math.sqrt(0.5)) + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


_TANH_SCALE, _TANH_CUBE = 2 * math.sqrt(2 / math.pi), 0.044715


def _gelu_tanh(x: Tensor) -> Tensor:
    return x * torch.sigmoid(_TANH_SCALE * (x + _TANH_CUBE * x * x * x))


def _gelu_tanh_slope(x: Tensor) -> Tensor:
    x = x.clamp(-1e6, 1e6)  # the tails are flat to every digit; the cube must not overflow
    inner = _TANH_SCALE * (x + _TANH_CUBE * x * x * x)
    return torch.sigmoid(inner) + x * bell(inner) * _TANH_SCALE * (1 + 3 * _TANH_CUBE * x * x)


def _mish_slope(x: Tensor) -> Tensor:
    return torch.tanh(soft(x)) + x * 4 * bell(2 * soft(x)) * torch.sigmoid(x)


def _hardswish_middle(x: Tensor) -> Tensor:
    return (2 * x + 3) / 6


def _hardswish_tails(x: Tensor) -> Tensor:
    return (x > 0).to(x.dtype)


SMOOTH: dict[str, Facts] = {
    "sigmoid": Facts(torch.sigmoid, bell, S_SHAPED, range=(0, 1)),
    "tanh": Facts(torch.tanh, lambda x: 4 * bell(2 * x), S_SHAPED, range=(-1, 1)),
    "exp": Facts(torch.exp, torch.exp, CONVEX, range=(0, INF)),
    "log": Facts(torch.log, torch.reciprocal, CONCAVE, domain=POSITIVE),
    "sqrt": Facts(
        torch.sqrt, lambda x: 0.5 * torch.rsqrt(x), CONCAVE, domain=Domain(low=0.0, closed=True), range=(0, INF)
    ),
    "rsqrt": Facts(torch.rsqrt, lambda x: -0.5 * torch.rsqrt(x) / x, CONVEX, domain=POSITIVE, range=(0, INF)),
    "reciprocal": Facts(
        torch.reciprocal, lambda x: -1 / (x * x), Inflections((0.0,), convex_first=False), domain=Domain(pole=0.0)
    ),
    "sin": Facts(
        torch.sin,
        torch.cos,
        Waves(-math.pi, 2 * math.pi),
        critical=(-math.pi / 2, math.pi / 2),
        critical_period=2 * math.pi,
        domain=Domain(reach=REACH),
        range=(-1, 1),
    ),
    "cos": Facts(
        torch.cos,
        lambda x: -torch.sin(x),
        Waves(math.pi / 2, 2 * math.pi),
        critical=(0.0, math.pi),
        critical_period=2 * math.pi,
        domain=Domain(reach=REACH),
        range=(-1, 1),
    ),
    "tan": Facts(
        torch.tan,
        lambda x: 1 + torch.tan(x).square(),
        Waves(0.0, math.pi),
        domain=Domain(pole=math.pi / 2, period=math.pi, reach=REACH),
    ),
    "gelu": Facts(
        _gelu,
        _gelu_slope,
        Inflections((-1.4142135623730951, 1.4142135623730951), convex_first=False),
        critical=(-0.75179152469356445746,),
        range=(-0.17, INF),
        cancellation=2.0,
    ),
    "gelu_tanh": Facts(
        _gelu_tanh,
        _gelu_tanh_slope,
        Inflections((-1.4185040087908283555, 1.4185040087908283555), convex_first=False),
        critical=(-0.75246142207101625849,),
        range=(-0.171, INF),
        cancellation=2.0,
    ),
    "silu": Facts(
        lambda x: x * torch.sigmoid(x),
        lambda x: torch.sigmoid(x) + x * bell(x),
        Inflections((-2.3993572805154676678, 2.3993572805154676678), convex_first=False),
        critical=(-1.2784645427610737951,),
        range=(-0.279, INF),
        cancellation=2.0,
    ),
    "mish": Facts(
        lambda x: x * torch.tanh(soft(x)),
        _mish_slope,
        Inflections((-2.25637639636079312, 1.4905711794854284593), convex_first=False),
        critical=(-1.1924312145154952121,),
        range=(-0.309, INF),
        cancellation=2.0,
    ),
    "hardswish": Facts(
        F.hardswish,
        _hardswish_middle,
        Inflections((-3.0, 3.0), convex_first=False),
        critical=(-1.5,),
        range=(-0.375, INF),
        slope_concave=_hardswish_tails,
        cancellation=2.0,
    ),
    "erf": Facts(torch.erf, lambda x: 2 / math.sqrt(math.pi) * torch.exp(-x * x), S_SHAPED, range=(-1, 1)),
    "atan": Facts(torch.atan, lambda x: 1 / (1 + x * x), S_SHAPED, range=(-1.5707963267948968, 1.5707963267948968)),
    "softsign": Facts(F.softsign, lambda x: 1 / (1 + x.abs()).square(), S_SHAPED, range=(-1, 1)),
    "logsigmoid": Facts(lambda x: -soft(-x), lambda x: torch.sigmoid(-x), CONCAVE, range=(-INF, 0)),
}


def softplus_facts(beta: float) -> Facts:
    """`log(1 + exp(beta x)) / beta`, convex for beta > 0."""
    if not 0 < beta < INF:
        raise UsageError(f"softplus: beta is {beta}, allowed are positive numbers")
    return Facts(lambda x: soft(beta * x) / beta, lambda x: torch.sigmoid(beta * x), CONVEX, range=(0, INF))


def elu_facts(alpha: float, scale: float, input_scale: float) -> Facts:
    """`scale * x` right of 0, `scale * alpha * (exp(input_scale * x) - 1)` left of it.

    Convex where the slope does not drop at 0; otherwise (SELU) convex on the left, with a concave kink at 0.
    """
    if not all(0 < value < INF for value in (alpha, scale, input_scale)):
        raise UsageError(f"elu: parameters are {alpha}, {scale}, {input_scale}, allowed are positive numbers")
    steep = scale * alpha * input_scale

    def f(x: Tensor) -> Tensor:
        return torch.where(x > 0, scale * x, scale * alpha * torch.expm1(input_scale * x.clamp(max=0)))

    def left(x: Tensor) -> Tensor:
        return steep * torch.exp(input_scale * x.clamp(max=0))

    limits = (-scale * alpha * (1 + 1e-6), INF)  # an infimum, so a little room for rounding it costs nothing
    if alpha * input_scale > 1 + 1e-12:
        return Facts(f, left, S_SHAPED, range=limits, slope_concave=lambda x: torch.full_like(x, scale))
    return Facts(f, lambda x: torch.where(x > 0, scale, left(x)), CONVEX, range=limits)


def power_facts(exponent: float) -> Facts:
    """`x ** exponent` for a constant exponent other than 0 and 1; defined for x >= 0 only where it is no integer."""
    p = float(exponent)
    if not math.isfinite(p) or p in (0.0, 1.0):
        raise UsageError(f"power: the exponent is {exponent}, allowed are finite numbers other than 0 and 1")

    def slope(x: Tensor) -> Tensor:
        return p * torch.pow(x, p - 1)

    def f(x: Tensor) -> Tensor:
        return torch.pow(x, p)

    whole, odd = p.is_integer(), p % 2 == 1
    bent_right = CONVEX if p < 0 or p > 1 else CONCAVE
    if not whole:
        return Facts(f, slope, bent_right, domain=Domain(low=0.0, closed=p > 0), range=(0, INF))
    domain = Domain() if p > 0 else Domain(pole=0.0)
    if odd:
        return Facts(f, slope, Inflections((0.0,), convex_first=False), domain=domain)
    return Facts(f, slope, CONVEX, critical=(0.0,) if p > 0 else (), domain=domain, range=(0, INF))
