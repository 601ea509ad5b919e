"""Importers of nonlinear ATen operators: each becomes activations, products and affine nodes.

ReLU is the only piecewise-linear activation left in a graph. Maxima are tournaments of `a + relu(b - a)`, clips are
nested maxima and minima, |x| is `2 relu(x) - x`: so alpha, beta, splits and exact leaves work for all of them without a
rule of their own.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from parverify.errors import ModelError
from parverify.graph.builder import Builder, Value, Var, number
from parverify.graph.importers import importer, operand, raw
from parverify.graph.ir import Const, derive
from parverify.ops import activation as facts


def _simple(*pairs: tuple[str, str]) -> None:
    """Register ATen operators that are one elementwise activation."""
    for aten, name in pairs:

        def run(b: Builder, func: Any, args: Any, kwargs: dict[str, Any], name: str = name) -> Var:
            return b.activation(args[0], name)

        importer(aten)(run)


_simple(
    *(
        (name, name)
        for name in (
            "relu",
            "sigmoid",
            "tanh",
            "exp",
            "log",
            "sqrt",
            "rsqrt",
            "reciprocal",
            "sin",
            "cos",
            "erf",
            "silu",
            "sign",
            "floor",
            "ceil",
            "square",
            "atan",
            "mish",
            "hardswish",
            "softsign",
            "tan",
        )
    ),
    ("sgn", "sign"),
)


@importer("trunc", "fix", "frac", "fmod", "remainder")
def _refuse(b: Builder, func: Any, args: Any, kwargs: dict[str, Any]) -> Var:
    raise ModelError(f"{b.source}: {func} can't be bounded")


@importer("round")
def _round(b: Builder, func: Any, args: Any, kwargs: dict[str, Any]) -> Var:
    if kwargs.get("decimals"):
        raise ModelError(f"{b.source}: round with decimals is not supported")
    return b.activation(args[0], "round")


@importer("log_sigmoid_forward", "log_sigmoid")
def _log_sigmoid(b: Builder, func: Any, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    return [b.scale(b.activation(b.scale(args[0], -1.0), "softplus"), -1.0), None]


@importer("gelu")
def _gelu(b: Builder, func: Any, args: Any, kwargs: dict[str, Any]) -> Var:
    return b.activation(args[0], "gelu_tanh" if kwargs.get("approximate") == "tanh" else "gelu")


@importer("softplus")
def _softplus(b: Builder, func: Any, args: Any, kwargs: dict[str, Any]) -> Var:
    return b.activation(args[0], facts.softplus(*(float(arg) for arg in args[1:3])))


@importer("elu", "selu", "celu")
def _elu(b: Builder, func: Any, args: Any, kwargs: dict[str, Any]) -> Value:
    """scale * (relu(x) + alpha * (exp(min(input_scale * x, 0)) - 1)), which is elementwise and handled as one."""
    settings = [float(arg) for arg in args[1:]]
    name = func.overloadpacket.__name__.rstrip("_")
    if name == "celu":
        alpha = settings[0] if settings else 1.0
        return b.scale(b.activation(b.scale(args[0], 1 / alpha), facts.elu(1.0)), alpha)
    if name == "selu":
        settings = [1.6732632423543772, 1.0507009873554805]
    alpha, scale, inner = (settings + [1.0, 1.0, 1.0][len(settings) :])[:3]
    return b.mul(
        b.activation(args[0], facts.elu(alpha)) if inner == 1 else _general_elu(b, args[0], alpha, inner),
        number(scale),
    )


def _general_elu(b: Builder, x: Var, alpha: float, inner: float) -> Value:
    below = b.minimum(b.scale(x, inner), number(0.0))
    return b.add(b.relu(x), b.scale(b.activation(below, "exp"), alpha, -alpha))  # type: ignore[arg-type]


@importer("pow")
def _pow(b: Builder, func: Any, args: Any, kwargs: dict[str, Any]) -> Value:
    base, exponent = args[0], args[1]
    if isinstance(base, Var) and isinstance(exponent, Const):
        if exponent.value.numel() != 1 and bool((exponent.value != exponent.value.flatten()[0]).any()):
            raise ModelError(f"{b.source}: a power with different exponents is not supported")
        exponent = float(exponent.value.flatten()[0])
    if isinstance(base, Var) and isinstance(exponent, (int, float)):
        return _power(b, base, float(exponent))
    if isinstance(exponent, Var) and not isinstance(base, Var):
        fixed = base if isinstance(base, Const) else number(base)
        if not bool((fixed.value > 0).all()):
            raise ModelError(f"{b.source}: a power of a base that is not positive is not supported")
        return b.activation(b.scale(exponent, derive(torch.log, fixed)), "exp")
    raise ModelError(f"{b.source}: a power of two variables is not supported")


def _power(b: Builder, x: Var, exponent: float) -> Value:
    named = {1.0: None, 2.0: "square", 0.5: "sqrt", -0.5: "rsqrt", -1.0: "reciprocal"}
    if exponent == 0:
        return Const(torch.ones(x.shape))
    if exponent in named:
        name = named[exponent]
        return x if name is None else b.activation(x, name)
    return b.activation(x, facts.power(exponent))


# --- piecewise linear -----------------------------------------------------------------------------------------------


def _leaky(b: Builder, x: Var, slope: Const | float) -> Value:
    """slope * x + (1 - slope) * relu(x)."""
    rest = derive(lambda v: 1 - v, slope) if isinstance(slope, Const) else 1.0 - slope
    kinked = b.relu(x)
    return b.add(b.scale(x, slope), b.scale(kinked, rest))  # type: ignore[arg-type]


@importer("leaky_relu")
def _leaky_relu(b: Builder, func: Any, args: Any, kwargs: dict[str, Any]) -> Value:
    return _leaky(b, args[0], float(args[1]) if len(args) > 1 else 0.01)


@importer("prelu", "_prelu_kernel")
def _prelu(b: Builder, func: Any, args: Any, kwargs: dict[str, Any]) -> Value:
    x, weight = args
    if isinstance(weight, Const) and weight.value.dim() == 1 and weight.value.numel() > 1:
        weight = derive(torch.reshape, weight, (-1, *[1] * (len(x.shape) - 2)))
    return _leaky(b, x, weight)


@importer("abs")
def _abs(b: Builder, func: Any, args: Any, kwargs: dict[str, Any]) -> Value:
    return absolute(b, args[0])


def absolute(b: Builder, x: Var) -> Value:
    """|x| = 2 relu(x) - x."""
    return b.sub(b.scale(b.relu(x), 2.0), x)  # type: ignore[arg-type]


@importer("maximum", "fmax", "max", "amax")
def _maximum(b: Builder, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if len(args) > 1 and isinstance(args[1], (Var, Const)):
        return b.maximum(args[0], args[1])
    return _extremum(b, func, args, kwargs, 1.0)


@importer("minimum", "fmin", "min", "amin")
def _minimum(b: Builder, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if len(args) > 1 and isinstance(args[1], (Var, Const)):
        return b.minimum(args[0], args[1])
    return _extremum(b, func, args, kwargs, -1.0)


def _extremum(b: Builder, func: Any, args: Any, kwargs: dict[str, Any], sign: float) -> Any:
    x = args[0]
    dims = args[1] if len(args) > 1 else kwargs.get("dim")
    dims = list(range(len(x.shape))) if dims is None or dims == [] else ([dims] if isinstance(dims, int) else dims)
    dims = [dim % len(x.shape) for dim in dims]
    keepdim = bool(args[2]) if len(args) > 2 else bool(kwargs.get("keepdim", False))
    y = b.scale(x, sign)
    for dim in dims:
        y = b.reduce_max(y, dim)
    y = b.scale(y, sign)
    if not keepdim:
        y = b.reshape(y, [size for i, size in enumerate(y.shape) if i not in dims])
    return [y, None] if func.overloadpacket.__name__ in ("max", "min") and len(args) > 1 else y


@importer("clamp", "clamp_min", "clamp_max", "hardtanh", "relu6", "clip")
def _clamp(b: Builder, func: Any, args: Any, kwargs: dict[str, Any]) -> Value:
    name = func.overloadpacket.__name__.rstrip("_")
    low = args[1] if len(args) > 1 else kwargs.get("min")
    high = args[2] if len(args) > 2 else kwargs.get("max")
    if name == "clamp_max":
        low, high = None, args[1]
    if name == "hardtanh":
        low, high = -1.0 if low is None else low, 1.0 if high is None else high
    if name == "relu6":
        low, high = 0.0, 6.0
    return _clip(b, args[0], low, high)


def _clip(b: Builder, x: Value, low: Any, high: Any) -> Value:
    """min(max(x, low), high) as ReLUs that leave a constant outside: low + relu(x - low), high - relu(high - x)."""
    if low is not None and not _infinite(low, -1.0):
        x = b.add(operand(low), b.relu(b.sub(x, operand(low))))
    if high is not None and not _infinite(high, 1.0):
        x = b.sub(operand(high), b.relu(b.sub(operand(high), x)))
    return x


def _infinite(limit: Any, sign: float) -> bool:
    """Whether a bound never binds: exporters write the largest float for "no bound"."""
    if isinstance(limit, Var):
        return False
    value = limit.value if isinstance(limit, Const) else torch.tensor(float(limit))
    return bool((value * sign >= 1e30).all())


@importer("hardsigmoid")
def _hardsigmoid(b: Builder, func: Any, args: Any, kwargs: dict[str, Any]) -> Value:
    return _clip(b, b.scale(args[0], 1 / 6, 0.5), 0.0, 1.0)


@importer("threshold")
def _threshold(b: Builder, func: Any, args: Any, kwargs: dict[str, Any]) -> Value:
    x, at, value = args[0], float(args[1]), float(args[2])
    if at != value:
        raise ModelError(f"{b.source}: threshold with a jump is not supported")
    return _clip(b, x, at, None)


@importer("hardshrink", "softshrink")
def _shrink(b: Builder, func: Any, args: Any, kwargs: dict[str, Any]) -> Value:
    if func.overloadpacket.__name__ == "hardshrink":
        raise ModelError(f"{b.source}: hardshrink has jumps and is not supported")
    at = float(args[1]) if len(args) > 1 else 0.5
    return b.sub(b.relu(b.scale(args[0], None, -at)), b.relu(b.scale(args[0], -1.0, -at)))


@importer(
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
    "max_pool2d_with_indices",
    "max_pool3d_with_indices",
    "max_pool1d_with_indices",
    "adaptive_max_pool2d",
    "adaptive_max_pool3d",
    "adaptive_max_pool1d",
    "mkldnn_max_pool2d",
)
def _max_pool(b: Builder, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    x = args[0]
    rank = int(func.overloadpacket.__name__.split("pool")[1][0])
    windows = _pool_windows(x, rank, func, args, kwargs)
    gathered = b.index(x, windows)
    return [b.reshape(b.reduce_max(gathered, 0), windows.shape[1:]), None]


def _pool_windows(x: Var, rank: int, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """(window size, *output shape): the position that each output's window reads. Places outside the image repeat a
    place inside the same window, which a maximum does not notice."""
    result = func(torch.zeros(1, 1, *x.shape[-rank:]), *raw(args[1:]), **kwargs)
    out = (result[0] if isinstance(result, (tuple, list)) else result).shape[2:]
    if "adaptive" in func.overloadpacket.__name__:
        return _adaptive_windows(x, rank, out)
    return _strided_windows(x, rank, out, args, kwargs)


def _setting(args: Any, kwargs: dict[str, Any], at: int, key: str, rank: int, default: Any) -> list[int]:
    value = args[at] if len(args) > at else kwargs.get(key, default)
    value = default if value is None or value == [] else value
    return [int(value)] * rank if isinstance(value, int) else (list(value) * rank if len(value) == 1 else list(value))


def _strided_windows(x: Var, rank: int, out: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    kernel = _setting(args, kwargs, 1, "kernel_size", rank, 1)
    stride = _setting(args, kwargs, 2, "stride", rank, kernel)
    padding = _setting(args, kwargs, 3, "padding", rank, 0)
    dilation = _setting(args, kwargs, 4, "dilation", rank, 1)
    axes = []
    for axis in range(rank):
        start = torch.arange(out[axis]) * stride[axis] - padding[axis]
        axes.append(start[None] + torch.arange(kernel[axis])[:, None] * dilation[axis])  # (kernel, out)
    return _product_windows(x, rank, axes)


def _adaptive_windows(x: Var, rank: int, out: Any) -> Tensor:
    axes = []
    for size, count in zip(x.shape[-rank:], out, strict=True):
        first = torch.arange(count) * size // count
        last = -((-(torch.arange(count) + 1) * size) // count) - 1
        widest = int((last - first).max()) + 1
        axes.append(torch.minimum(first[None] + torch.arange(widest)[:, None], last[None]))
    return _product_windows(x, rank, axes)


def _product_windows(x: Var, rank: int, axes: list[Tensor]) -> Tensor:
    """Windows over all axes from the places along each; places outside are replaced by the window's first inside."""
    space = x.shape[-rank:]
    inside_axes = []
    for places, size in zip(axes, space, strict=True):
        inside = (places >= 0) & (places < size)
        first = torch.where(inside, places, size).min(0).values  # every window has a place inside
        inside_axes.append(torch.where(inside, places, first[None]))
    flat = torch.zeros([1] * (2 * rank), dtype=torch.long)
    for axis, places in enumerate(inside_axes):
        view = [1] * (2 * rank)
        view[axis], view[rank + axis] = places.shape
        flat = flat * space[axis] + places.reshape(view)
    size, lead = math.prod(space), math.prod(x.shape[:-rank])
    windows = flat.reshape(math.prod(flat.shape[:rank]), 1, *flat.shape[rank:])
    offsets = (torch.arange(lead) * size).reshape(1, lead, *[1] * rank)
    return (windows + offsets).reshape(windows.shape[0], *x.shape[:-rank], *flat.shape[rank:]).contiguous()
