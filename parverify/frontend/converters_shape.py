"""Operators that move entries around or make constants: reshape, slice, gather, scatter, pad, shape, range, ..."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from parverify.frontend.converters_common import Call, Operator, along, axis_of, take


def _reshape(call: Call, x: torch.Tensor, *_: None) -> torch.Tensor:
    shape = call.ints("shape", 1) or []
    if not call.get("allowzero", 0):
        shape = [x.shape[k] if size == 0 else size for k, size in enumerate(shape)]
    return x.reshape(shape)


def _flatten(call: Call, x: torch.Tensor) -> torch.Tensor:
    axis = axis_of(call.get("axis", 1), x.dim())
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


def _slice(
    call: Call, x: torch.Tensor, starts: torch.Tensor | None = None, ends: torch.Tensor | None = None, *_: None
) -> torch.Tensor:
    if starts is not None or ends is not None:
        return _moving_slice(call, x, starts)
    first, last = call.ints("starts", 1) or [], call.ints("ends", 2) or []
    axes = call.ints("axes", 3) or list(range(len(first)))
    steps = call.ints("steps", 4) or [1] * len(first)
    for start, end, axis, step in zip(first, last, axes, steps, strict=True):
        x = _slice_axis(x, axis_of(axis, x.dim()), range(x.shape[axis])[start:end:step])
    return x


def _slice_axis(x: torch.Tensor, axis: int, index: range) -> torch.Tensor:
    # A range of the axis sliced by Python clamps start and end exactly as the operator does.
    if len(index) == 0:
        return x.narrow(axis, 0, 0)
    if index.step > 0:
        return along(x, axis, slice(index.start, index[-1] + 1, index.step))
    return along(x, axis, slice(index[-1], index.start + 1, -index.step)).flip(axis)


def _moving_slice(call: Call, x: torch.Tensor, starts: torch.Tensor | None) -> torch.Tensor:
    """A slice whose place depends on the network's input while its width does not (attribute `width`)."""
    width, axes, steps = call.get("width"), call.ints("axes", 3) or [0], call.ints("steps", 4) or [1]
    if width is None or starts is None or len(axes) != 1 or steps != [1]:
        call.refuse("the size of this slice depends on the network's input; allowed are sizes that don't")
    index = starts.reshape(1) + torch.arange(width, dtype=starts.dtype, device=x.device)
    return x.index_select(axis_of(axes[0], x.dim()), index)


def _indices(call: Call, indices: torch.Tensor | None, x: torch.Tensor, size: int | torch.Tensor) -> torch.Tensor:
    """Indices counted from the front, as int64 on the device of x."""
    index = (call.static[1] if indices is None else indices).to(device=x.device, dtype=torch.int64)
    return torch.where(index < 0, index + size, index)


def _gather_elements(call: Call, x: torch.Tensor, indices: torch.Tensor | None = None) -> torch.Tensor:
    axis = axis_of(call.get("axis", 0), x.dim())
    index = _indices(call, indices, x, x.shape[axis])
    # torch reads at most the part of the other axes that the indices cover, as ONNX does.
    return torch.gather(x, axis, index)


def _gather_nd(call: Call, x: torch.Tensor, indices: torch.Tensor | None = None) -> torch.Tensor:
    batch = call.get("batch_dims", 0)
    raw = call.static[1] if indices is None else indices
    depth = raw.shape[-1]
    sizes = torch.tensor(x.shape[batch : batch + depth], device=x.device)
    index = _indices(call, indices, x, sizes)
    grid = [
        torch.arange(x.shape[k], device=x.device).reshape((-1,) + (1,) * (index.dim() - 2 - k)) for k in range(batch)
    ]
    return x[tuple(grid) + tuple(index[..., k] for k in range(depth))]


def _scatter_nd(
    call: Call, x: torch.Tensor, indices: torch.Tensor | None, updates: torch.Tensor | None = None
) -> torch.Tensor:
    if updates is None or call.get("reduction", "none") not in ("none", "add"):
        call.refuse(f"reduction {call.get('reduction')} is not supported; allowed are none and add")
    raw = call.static[1] if indices is None else indices
    depth = raw.shape[-1]
    index = _indices(call, indices, x, torch.tensor(x.shape[:depth], device=x.device))
    places = tuple(index[..., k] for k in range(depth))
    return torch.index_put(x, places, updates, accumulate=call.get("reduction", "none") == "add")


def _scatter_elements(
    call: Call, x: torch.Tensor, indices: torch.Tensor | None, updates: torch.Tensor | None = None
) -> torch.Tensor:
    reduction, axis = call.get("reduction", "none"), axis_of(call.get("axis", 0), x.dim())
    index = _indices(call, indices, x, x.shape[axis])
    if updates is None or reduction not in ("none", "add"):
        call.refuse(f"reduction {reduction} is not supported; allowed are none and add")
    return torch.scatter(x, axis, index, updates) if reduction == "none" else torch.scatter_add(x, axis, index, updates)


def _pad(call: Call, x: torch.Tensor, *_: None) -> torch.Tensor:
    amounts = call.ints("pads", 1) or call.ints("paddings") or []
    axes = call.ints("axes", 3) or list(range(len(amounts) // 2))
    before, after = [0] * x.dim(), [0] * x.dim()
    for k, axis in enumerate(axes):
        before[axis], after[axis] = amounts[k], amounts[k + len(axes)]
    mode = call.get("mode", "constant")
    if mode == "constant":
        flat = [amount for pair in zip(before[::-1], after[::-1], strict=True) for amount in pair]
        return F.pad(x, flat, value=call.number("value", 2, 0)) if any(flat) else x
    for axis, size in enumerate(x.shape):
        x = take(x, axis, [_pad_index(call, k, size, mode) for k in range(-before[axis], size + after[axis])])
    return x


def _pad_index(call: Call, position: int, size: int, mode: str) -> int:
    if mode == "edge":
        return min(max(position, 0), size - 1)
    if mode == "wrap":
        return position % size
    if mode != "reflect":
        call.refuse(f"mode {mode} is not supported; allowed are constant, reflect, edge and wrap")
    period = max(2 * (size - 1), 1)
    position %= period
    return position if position < size else period - position


def _depth_to_space(call: Call, x: torch.Tensor) -> torch.Tensor:
    n, c, h, w = x.shape
    b = call.get("blocksize")
    if call.get("mode", "DCR") == "DCR":
        blocks = x.reshape(n, b, b, c // (b * b), h, w).permute(0, 3, 4, 1, 5, 2)
    else:
        blocks = x.reshape(n, c // (b * b), b, b, h, w).permute(0, 1, 4, 2, 5, 3)
    return blocks.reshape(n, c // (b * b), h * b, w * b)


def _space_to_depth(call: Call, x: torch.Tensor) -> torch.Tensor:
    n, c, h, w = x.shape
    b = call.get("blocksize")
    return x.reshape(n, c, h // b, b, w // b, b).permute(0, 3, 5, 1, 2, 4).reshape(n, c * b * b, h // b, w // b)


def _trilu(call: Call, x: torch.Tensor, *_: None) -> torch.Tensor:
    k = int(call.number("k", 1, 0))
    return torch.triu(x, k) if call.get("upper", 1) else torch.tril(x, k)


def _one_hot(call: Call, indices: torch.Tensor, depth: None, values: torch.Tensor) -> torch.Tensor:
    size = int(call.number("depth", 1))
    axis = axis_of(call.get("axis", -1), indices.dim() + 1)
    wrapped = torch.where(indices < 0, indices + size, indices).unsqueeze(axis)
    classes = torch.arange(size, device=indices.device).reshape((-1,) + (1,) * (indices.dim() - axis))
    return torch.where(wrapped == classes, values[1], values[0])


SHAPE: dict[str, Operator] = {
    "Reshape": Operator(_reshape, static=(1,), theirs=lambda call: 1 in call.constant and not call.get("allowzero", 0)),
    "Flatten": Operator(_flatten, theirs=lambda call: call.get("axis", 1) > 0),
    "Slice": Operator(_slice, static=(3, 4), inline=(1, 2)),
    "GatherElements": Operator(_gather_elements, inline=(1,)),
    "GatherND": Operator(_gather_nd, inline=(1,), theirs=lambda call: not call.get("batch_dims", 0)),
    "ScatterND": Operator(_scatter_nd, inline=(1,)),
    "ScatterElements": Operator(_scatter_elements, inline=(1,)),
    "Scatter": Operator(_scatter_elements, inline=(1,)),
    "Pad": Operator(
        _pad,
        static=(1, 2, 3),
        theirs=lambda call: call.get("mode", "constant") == "constant" and call.opset >= 11 and len(call.inputs) < 4,
    ),
    "DepthToSpace": Operator(_depth_to_space, theirs=lambda call: call.get("mode", "DCR") == "CRD"),
    "SpaceToDepth": Operator(_space_to_depth),
    "Trilu": Operator(_trilu, static=(1,)),
    "OneHot": Operator(_one_hot, static=(1,)),
}
