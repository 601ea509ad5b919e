"""ATen operators → kernel nodes: the table, and the importers of affine operators.

An importer receives the builder, the ATen overload, and its arguments with tensors replaced by graph values (at least
one of them a `Var`). Operators that only move scalars around (slices, flips, pads, gathers, ...) need no importer of
their own: they are run once on a tensor of positions, and the result *is* the index of an `index` node.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from parverify.errors import ModelError
from parverify.graph.builder import Builder, Value, Var, number
from parverify.graph.ir import Const, derive

Importer = Callable[[Builder, Any, Any, dict[str, Any]], Any]
IMPORTERS: dict[str, Importer] = {}


def importer(*names: str) -> Callable[[Importer], Importer]:
    """Register an importer under ATen operator names."""

    def register(function: Importer) -> Importer:
        for name in names:
            IMPORTERS[name] = function
        return function

    return register


def raw(arg: Any) -> Any:
    """Constants in `arg` as plain tensors."""
    if isinstance(arg, Const):
        return arg.value.detach()
    if isinstance(arg, (list, tuple)):
        return type(arg)(raw(item) for item in arg)
    return arg


def positions(x: Var, offset: int = 1) -> Tensor:
    """A tensor shaped like `x` that holds each scalar's flat position plus `offset` (exact in float64)."""
    return torch.arange(x.numel, dtype=torch.float64).reshape(x.shape) + offset


def to_index(moved: Tensor) -> Tensor:
    """Positions as `positions` made them (0 = filled) back to flat indices (-1 = filled)."""
    return (moved.round().long() - 1).contiguous()


# --- operators that move scalars ------------------------------------------------------------------------------------


@importer(
    "view",
    "_unsafe_view",
    "reshape",
    "squeeze",
    "unsqueeze",
    "flatten",
    "alias",
    "detach",
    "clone",
    "contiguous",
    "lift_fresh",
    "lift_fresh_copy",
    "positive",
    "real",
    "dropout",
    "feature_dropout",
    "identity",
    "slice",
    "select",
    "expand",
    "index_select",
    "flip",
    "repeat",
    "roll",
    "tril",
    "triu",
    "diagonal",
    "narrow",
    "unfold",
    "reflection_pad1d",
    "reflection_pad2d",
    "reflection_pad3d",
    "replication_pad1d",
    "replication_pad2d",
    "replication_pad3d",
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d",
    "im2col",
    "pixel_shuffle",
    "pixel_unshuffle",
    "channel_shuffle",
    "rot90",
    "take",
    "gather",
    "index",
    "_pad_circular",
    "t",
    "transpose",
    "permute",
    "numpy_T",
    "movedim",
    "swapaxes",
    "view_as",
    "expand_as",
    "unsqueeze_copy",
    "squeeze_copy",
    "slice_copy",
    "select_copy",
    "permute_copy",
    "view_copy",
    "expand_copy",
    "embedding_renorm",
)
def _move(b: Builder, func: Any, args: Any, kwargs: dict[str, Any]) -> Var:
    x = args[0]
    if not isinstance(x, Var) or any(isinstance(value, Var) for value in _flat([*args[1:], *kwargs.values()])):
        raise ModelError(f"{b.source}: {func} takes indices that depend on the input")
    name = func.overloadpacket.__name__
    if name in ("permute", "transpose", "t"):
        probe = func(torch.empty(tuple(range(2, 2 + len(x.shape))), device="meta"), *raw(args[1:]), **kwargs)
        return b.permute(x, [size - 2 for size in probe.shape])
    moved = func(positions(x), *raw(args[1:]), **{key: raw(value) for key, value in kwargs.items()})
    return b.index(x, to_index(moved))


@importer("_reshape_alias")
def _reshape_alias(b: Builder, func: Any, args: Any, kwargs: dict[str, Any]) -> Var:
    return b.reshape(args[0], tuple(args[1]))  # the strides that follow say the same of the memory


@importer("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
def _filled_like(b: Builder, func: Any, args: Any, kwargs: dict[str, Any]) -> Const:
    """Only shape and type of the operand matter, so the result is a constant."""
    name = func.overloadpacket.__name__
    if any(isinstance(value, Var) for value in args[1:]):
        raise ModelError(f"{b.source}: {func} is filled with a value that depends on the input")
    shape = _shape(args[0]) if name.endswith("like") else tuple(args[1])
    values = {"zeros": 0.0, "ones": 1.0}
    fill = next((value for key, value in values.items() if key in name), None)
    if fill is None:
        fill = raw(args[1 if name == "full_like" else 2])
    return Const(torch.full(shape, float(fill), dtype=kwargs.get("dtype") or torch.float64))


def _flat(arg: Any) -> list[Any]:
    if isinstance(arg, (list, tuple)):
        return [leaf for item in arg for leaf in _flat(item)]
    return [arg]


@importer("split", "split_with_sizes", "chunk", "unbind", "tensor_split", "unsafe_split", "unsafe_chunk")
def _pieces(b: Builder, func: Any, args: Any, kwargs: dict[str, Any]) -> list[Var]:
    moved = func(positions(args[0]), *raw(args[1:]), **kwargs)
    return [b.index(args[0], to_index(piece)) for piece in moved]


@importer("constant_pad_nd")
def _pad(b: Builder, func: Any, args: Any, kwargs: dict[str, Any]) -> Var:
    value = args[2] if len(args) > 2 else kwargs.get("value", 0)
    return b.index(args[0], to_index(func(positions(args[0]), args[1], 0)), float(value))


@importer("_to_copy", "to", "type_as")
def _cast(b: Builder, func: Any, args: Any, kwargs: dict[str, Any]) -> Var:
    dtype = kwargs.get("dtype")
    if dtype is not None and not dtype.is_floating_point and not b.is_truth(args[0]):
        raise ModelError(
            f"{b.source}: casts a value that depends on the input to {dtype}",
            "only casts between floating-point types can be bounded",
        )
    return args[0]


@importer("cat", "concat", "stack")
def _concat(b: Builder, func: Any, args: Any, kwargs: dict[str, Any]) -> Var:
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    parts = list(args[0])
    if func.overloadpacket.__name__ == "stack":
        rank = len(_shape(parts[0])) + 1
        dim %= rank
        parts = [_unsqueeze(b, part, dim) for part in parts]
    parts = [part for part in parts if math.prod(_shape(part))]
    return b.concat(parts, dim)


def _shape(value: Value) -> tuple[int, ...]:
    return value.shape if isinstance(value, Var) else tuple(value.value.shape)


def _unsqueeze(b: Builder, value: Value, dim: int) -> Value:
    if isinstance(value, Const):
        return derive(torch.unsqueeze, value, dim)
    return b.reshape(value, (*value.shape[:dim], 1, *value.shape[dim:]))


@importer("index_put", "scatter", "slice_scatter", "select_scatter", "diagonal_scatter", "masked_scatter", "copy")
def _scatter(b: Builder, func: Any, args: Any, kwargs: dict[str, Any]) -> Var:
    """Overwriting scalars at constant places: positions of both operands are scattered alike."""
    name = func.overloadpacket.__name__.rstrip("_")
    at = {"index_put": 2, "scatter": 3}.get(name, 1)
    base, source = args[0], args[at] if len(args) > at else kwargs.get("src", kwargs.get("value"))
    accumulate = name == "index_put" and (args[3] if len(args) > 3 else kwargs.get("accumulate", False))
    if accumulate or kwargs.get("reduce") is not None:
        raise ModelError(f"{b.source}: {func} that accumulates is not supported")
    source = operand(source)
    base_count, count = math.prod(_shape(base)), math.prod(_shape(source))
    marked = torch.arange(base_count, dtype=torch.float64).reshape(_shape(base)) + 1
    other = torch.arange(count, dtype=torch.float64).reshape(_shape(source)) + 1 + base_count
    rest = [raw(arg) for arg in args]
    rest[0] = marked
    if len(args) > at:
        rest[at] = other if other.dim() or name != "scatter" else float(other)
    out = to_index(func(*rest, **{key: raw(value) for key, value in kwargs.items() if key not in ("src", "value")}))
    joined = b.concat([_flatten(b, base), _flatten(b, source)], 0)
    return b.index(joined, out)


def _flatten(b: Builder, value: Value) -> Value:
    count = math.prod(_shape(value))
    return b.reshape(value, (count,)) if isinstance(value, Var) else derive(torch.reshape, value, (count,))


# --- arithmetic -----------------------------------------------------------------------------------------------------


def operand(value: Any) -> Value:
    """A number or a value as a value."""
    return value if isinstance(value, (Var, Const)) else number(value)


@importer("add", "sub", "rsub", "subtract")
def _add(b: Builder, func: Any, args: Any, kwargs: dict[str, Any]) -> Value:
    x, y = operand(args[0]), operand(args[1])
    alpha = float(args[2] if len(args) > 2 else kwargs.get("alpha", 1))
    name = func.overloadpacket.__name__.rstrip("_")
    if name == "rsub":
        return b.add(y, x, -alpha)
    return b.add(x, y, -alpha if name in ("sub", "subtract") else alpha)


@importer("neg", "negative")
def _neg(b: Builder, func: Any, args: Any, kwargs: dict[str, Any]) -> Var:
    return b.scale(args[0], -1.0)


@importer("mul", "multiply")
def _mul(b: Builder, func: Any, args: Any, kwargs: dict[str, Any]) -> Value:
    return b.mul(operand(args[0]), operand(args[1]))


@importer("div", "divide", "true_divide")
def _div(b: Builder, func: Any, args: Any, kwargs: dict[str, Any]) -> Value:
    quotient = b.divide(operand(args[0]), operand(args[1]))
    mode = kwargs.get("rounding_mode")
    if mode is None:
        return quotient
    if mode == "floor" and isinstance(quotient, Var):
        return b.activation(quotient, "floor")
    raise ModelError(f"{b.source}: division with rounding mode {mode} is not supported")


@importer("where")
def _where(b: Builder, func: Any, args: Any, kwargs: dict[str, Any]) -> Value:
    condition, x, y = args[0], operand(args[1]), operand(args[2])
    if isinstance(condition, Var):
        from parverify.graph.importers_logic import choose

        return choose(b, condition, x, y)
    mask = condition.value.to(torch.get_default_dtype())
    return b.add(b.mul(finite(x), Const(mask)), b.mul(finite(y), Const(1 - mask)))


def finite(value: Value) -> Value:
    """The value itself, unless it is an infinite constant, which no product with 0 takes away."""
    if isinstance(value, Const) and bool(torch.isinf(value.value).any()):
        raise ModelError("`where` with an infinite constant is not supported", "use a large finite number as the mask")
    return value


@importer("masked_fill")
def _masked_fill(b: Builder, func: Any, args: Any, kwargs: dict[str, Any]) -> Value:
    return _where(b, func, (args[1], operand(args[2]), args[0]), kwargs)


@importer("sum", "mean")
def _reduce(b: Builder, func: Any, args: Any, kwargs: dict[str, Any]) -> Var:
    x = args[0]
    dims = args[1] if len(args) > 1 else kwargs.get("dim")
    dims = [dims] if isinstance(dims, int) else dims
    dims = list(range(len(x.shape))) if not dims else list(dims)
    keepdim = bool(args[2]) if len(args) > 2 else bool(kwargs.get("keepdim", False))
    if not x.shape:
        return x
    return (b.mean if func.overloadpacket.__name__ == "mean" else b.reduce_sum)(x, dims, keepdim)


@importer("var", "std")
def _variance(b: Builder, func: Any, args: Any, kwargs: dict[str, Any]) -> Var:
    x = args[0]
    dims = args[1] if len(args) > 1 and not isinstance(args[1], bool) else kwargs.get("dim")
    dims = list(range(len(x.shape))) if not dims else ([dims] if isinstance(dims, int) else list(dims))
    correction = kwargs.get("correction", 1)
    correction = 1 if correction is None else correction
    count = math.prod(x.shape[dim] for dim in dims)
    centred = b.sub(x, b.mean(x, dims, True))
    total = b.reduce_sum(b.activation(centred, "square"), dims, bool(kwargs.get("keepdim", False)))  # type: ignore[arg-type]
    variance = b.scale(total, 1.0 / max(count - correction, 1))
    return b.activation(variance, "sqrt") if func.overloadpacket.__name__ == "std" else variance


@importer("cumsum")
def _cumsum(b: Builder, func: Any, args: Any, kwargs: dict[str, Any]) -> Var:
    x, dim = args[0], args[1] % len(args[0].shape)
    last = [*(i for i in range(len(x.shape)) if i != dim), dim]
    size = x.shape[dim]
    y = b.linear(b.permute(x, last), Const(torch.tril(torch.ones(size, size))), None)
    return b.permute(y, [last.index(i) for i in range(len(last))])


# --- products with weights ------------------------------------------------------------------------------------------


@importer("mm", "bmm", "matmul")
def _matmul(b: Builder, func: Any, args: Any, kwargs: dict[str, Any]) -> Var:
    return b.matmul(args[0], args[1])


@importer("addmm", "baddbmm", "addbmm")
def _addmm(b: Builder, func: Any, args: Any, kwargs: dict[str, Any]) -> Value:
    beta, alpha = float(kwargs.get("beta", 1)), float(kwargs.get("alpha", 1))
    bias, x, y = args
    plain = beta == alpha == 1 and isinstance(bias, Const) and bias.value.dim() == 1
    if plain and isinstance(x, Var) and isinstance(y, Const) and y.value.dim() == 2:
        return b.linear(x, derive(torch.t, y), bias)
    product = b.matmul(x, y)
    if func.overloadpacket.__name__.rstrip("_") == "addbmm":
        product = b.reduce_sum(product, [0])
    return b.add(b.scale(product, alpha), b.mul(bias, number(beta)))


@importer("linear")
def _linear(b: Builder, func: Any, args: Any, kwargs: dict[str, Any]) -> Value:
    x, weight, bias = args[0], args[1], args[2] if len(args) > 2 else None
    if isinstance(weight, Const) and (bias is None or isinstance(bias, Const)):
        return b.linear(x, weight, bias)
    product = b.matmul(x, b.permute(weight, (1, 0)) if isinstance(weight, Var) else derive(torch.t, weight))
    return product if bias is None else b.add(product, bias)


@importer("mv", "dot", "addmv")
def _matvec(b: Builder, func: Any, args: Any, kwargs: dict[str, Any]) -> Value:
    name = func.overloadpacket.__name__.rstrip("_")
    x, y = args[-2], args[-1]
    rows = _unsqueeze(b, x, 0) if name == "dot" else x
    product = b.matmul(rows, _unsqueeze(b, y, 1))
    flat = b.reshape(product, () if name == "dot" else (product.shape[0],))
    if name != "addmv":
        return flat
    return b.add(b.scale(flat, kwargs.get("alpha", 1)), b.mul(args[0], number(kwargs.get("beta", 1))))


@importer("convolution", "_convolution", "mkldnn_convolution", "conv1d", "conv2d", "conv3d")
def _convolution(b: Builder, func: Any, args: Any, kwargs: dict[str, Any]) -> Var:
    x, weight, bias, stride, padding, dilation, transposed, output_padding, groups = args[:9]
    if not isinstance(x, Var) or not isinstance(weight, Const) or isinstance(bias, Var):
        raise ModelError(f"{b.source}: a convolution whose weight depends on the input is not supported")
    rank = weight.value.dim() - 2
    settings: dict[str, Any] = {
        "stride": _tuple(stride, rank),
        "padding": _tuple(padding, rank),
        "dilation": _tuple(dilation, rank),
        "transposed": bool(transposed),
        "output_padding": _tuple(output_padding, rank),
        "groups": int(groups),
    }
    consts = {"weight": weight} | ({} if bias is None else {"bias": bias})
    return b.emit("conv", [x], _convolved(x.shape, weight.value.shape, **settings), consts=consts, **settings)


def _convolved(
    shape: Sequence[int],
    weight: Sequence[int],
    *,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> tuple[int, ...]:
    """The shape of a convolution's value. (torch tells it too, but imports a computer algebra system for it.)"""
    spatial = []
    for size, kernel, s, p, d, more in zip(
        shape[2:], weight[2:], stride, padding, dilation, output_padding, strict=True
    ):
        reach = d * (kernel - 1) + 1
        spatial.append((size - 1) * s - 2 * p + reach + more if transposed else (size + 2 * p - reach) // s + 1)
    return (shape[0], weight[1] * groups if transposed else weight[0], *spatial)


def _tuple(value: Sequence[int], rank: int) -> tuple[int, ...]:
    value = tuple(int(item) for item in value)
    return value * rank if len(value) == 1 and rank > 1 else value


@importer(
    "avg_pool1d",
    "avg_pool2d",
    "avg_pool3d",
    "_adaptive_avg_pool2d",
    "_adaptive_avg_pool3d",
    "adaptive_avg_pool1d",
    "upsample_bilinear2d",
    "_upsample_bilinear2d_aa",
    "upsample_linear1d",
    "upsample_trilinear3d",
    "upsample_bicubic2d",
)
def _resample(b: Builder, func: Any, args: Any, kwargs: dict[str, Any]) -> Value:
    """Linear maps of the spatial dimensions, the same for every channel: a matrix found by running unit images."""
    x = args[0]
    rank = int(func.overloadpacket.__name__.rstrip("_a").removesuffix("_aa")[-2])
    space = x.shape[-rank:]
    size = math.prod(space)
    unit = torch.eye(size, dtype=torch.float64).reshape(1, size, *space)
    response = func(unit, *raw(args[1:]), **kwargs)[0]
    flat = b.reshape(x, (*x.shape[:-rank], size))
    out = b.linear(flat, Const(response.reshape(size, -1).t().contiguous()), None)
    return b.reshape(out, (*x.shape[:-rank], *response.shape[1:]))


# These fill the same table.
from parverify.graph import importers_nonlinear as _nonlinear  # noqa: E402, I001  (the next one imports it)
from parverify.graph import importers_composite as _composite  # noqa: E402
from parverify.graph import importers_logic as _logic  # noqa: E402

__all__ = [
    "IMPORTERS",
    "Importer",
    "_composite",
    "_logic",
    "_nonlinear",
    "finite",
    "importer",
    "operand",
    "positions",
    "raw",
    "to_index",
]
