"""Convolution, pooling and resizing over 1, 2 or 3 spatial axes.

torch pads both ends of an axis alike, ONNX need not: uneven padding is written out before the operator. Max pooling
ignores padding; here its padded places repeat an entry that the same window holds anyway, so no infinity enters the
network.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from parverify.frontend.converters_common import Call, Operator, along, take

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
CONV_TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
MAX_POOL = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


def _spatial_rank(call: Call, x: torch.Tensor) -> int:
    rank = x.dim() - 2
    if rank not in CONV:
        call.refuse(f"input has shape {tuple(x.shape)}; allowed are 1, 2 or 3 spatial axes after batch and channels")
    return rank


def _per_axis(call: Call, name: str, rank: int) -> list[int]:
    return call.ints(name) or [1] * rank


def _padding(call: Call, sizes: Sequence[int], kernel: Sequence[int]) -> tuple[list[int], list[int]]:
    """Padding before and after each spatial axis, automatic padding worked out."""
    rank, mode = len(sizes), call.get("auto_pad", "NOTSET")
    if mode in ("NOTSET", ""):
        pads = call.ints("pads") or [0] * (2 * rank)
        return pads[:rank], pads[rank:]
    if mode == "VALID":
        return [0] * rank, [0] * rank
    strides, dilations = _per_axis(call, "strides", rank), _per_axis(call, "dilations", rank)
    needs = [
        max((-(-n // s) - 1) * s + (k - 1) * d + 1 - n, 0)
        for n, k, s, d in zip(sizes, kernel, strides, dilations, strict=True)
    ]
    small, large = [need // 2 for need in needs], [need - need // 2 for need in needs]
    return (small, large) if mode == "SAME_UPPER" else (large, small)


def _has_plain_padding(call: Call) -> bool:
    """onnx2torch refuses padding that depends on the input's size."""
    return call.get("auto_pad", "NOTSET") in ("NOTSET", "VALID")


def _has_even_padding(call: Call) -> bool:
    pads = call.ints("pads") or []
    half = len(pads) // 2
    return _has_plain_padding(call) and pads[:half] == pads[half:] and min(pads, default=0) >= 0


def _padding_fits_kernel(call: Call) -> bool:
    """torch pads pools by half a kernel at most, and needs to know the number of axes."""
    pads, kernel = call.ints("pads") or [], call.ints("kernel_shape") or []
    return call.shapes[0] is not None and all(2 * p <= k for p, k in zip(pads, kernel + kernel, strict=False))


def _has_constant_weights(call: Call) -> bool:
    return all(k in call.constant for k, name in enumerate(call.inputs) if k > 0 and name)


def _pad_zeros(x: torch.Tensor, before: Sequence[int], after: Sequence[int]) -> torch.Tensor:
    flat = [amount for pair in zip(before[::-1], after[::-1], strict=True) for amount in pair]
    return F.pad(x, flat) if any(flat) else x


def _conv(call: Call, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    rank = _spatial_rank(call, x)
    before, after = _padding(call, x.shape[2:], weight.shape[2:])
    if before != after:
        x, before = _pad_zeros(x, before, after), [0] * rank
    strides, dilations = _per_axis(call, "strides", rank), _per_axis(call, "dilations", rank)
    return CONV[rank](x, weight, bias, strides, before, dilations, call.get("group", 1))


def _conv_transpose(
    call: Call, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    rank = _spatial_rank(call, x)
    strides, dilations = _per_axis(call, "strides", rank), _per_axis(call, "dilations", rank)
    extra = call.ints("output_padding") or [0] * rank
    full = [
        s * (n - 1) + e + (k - 1) * d + 1
        for n, k, s, d, e in zip(x.shape[2:], weight.shape[2:], strides, dilations, extra, strict=True)
    ]
    before, after = _crop(call, x.shape[2:], full)
    groups = call.get("group", 1)
    if before == after and min(before) >= 0:
        return CONV_TRANSPOSE[rank](x, weight, bias, strides, before, extra, groups, dilations)
    if min(before + after) < 0:
        call.refuse(f"output_shape exceeds the {full} that stride and kernel give; allowed is at most that")
    y = CONV_TRANSPOSE[rank](x, weight, bias, strides, [0] * rank, extra, groups, dilations)
    for axis in range(rank):
        y = along(y, axis + 2, slice(before[axis], full[axis] - after[axis]))
    return y


def _crop(call: Call, sizes: Sequence[int], full: Sequence[int]) -> tuple[list[int], list[int]]:
    """How much of the full transposed convolution is cut off before and after each spatial axis."""
    rank, mode, wanted = len(sizes), call.get("auto_pad", "NOTSET"), call.ints("output_shape")
    if wanted is not None:
        wanted = wanted[-rank:]
    elif mode in ("SAME_UPPER", "SAME_LOWER"):
        wanted = [n * s for n, s in zip(sizes, _per_axis(call, "strides", rank), strict=True)]
    if wanted is None:
        pads = call.ints("pads") or [0] * (2 * rank)
        return pads[:rank], pads[rank:]
    cuts = [size - want for size, want in zip(full, wanted, strict=True)]
    small, large = [cut // 2 for cut in cuts], [cut - cut // 2 for cut in cuts]
    return (small, large) if mode == "SAME_UPPER" else (large, small)


def _windows(
    call: Call, sizes: Sequence[int], kernel: Sequence[int]
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Padding before and after, number of windows, and positions that these windows span, each per axis."""
    before, after = _padding(call, sizes, kernel)
    strides, dilations = _per_axis(call, "strides", len(sizes)), _per_axis(call, "dilations", len(sizes))
    counts, spans = [], []
    for axis, n in enumerate(sizes):
        reach, stride = (kernel[axis] - 1) * dilations[axis] + 1, strides[axis]
        free = n + before[axis] + after[axis] - reach
        count = free // stride + 1
        if call.get("ceil_mode", 0):
            count = -(-free // stride) + 1
            # A window must start inside the input or its padding before it.
            count -= (count - 1) * stride >= n + before[axis]
        counts.append(count)
        spans.append((count - 1) * stride + reach)
    return before, after, counts, spans


def _max_pool(call: Call, x: torch.Tensor) -> torch.Tensor:
    rank, kernel = _spatial_rank(call, x), call.ints("kernel_shape") or []
    strides, dilations = _per_axis(call, "strides", rank), _per_axis(call, "dilations", rank)
    sizes = x.shape[2:]
    before, _, _, spans = _windows(call, sizes, kernel)
    for axis, n in enumerate(sizes):
        positions = range(-before[axis], spans[axis] - before[axis])
        x = take(x, axis + 2, [_nearest_in_window(p, n, dilations[axis]) for p in positions])
    return MAX_POOL[rank](x, kernel, strides, 0, dilations)


def _nearest_in_window(position: int, size: int, dilation: int) -> int:
    """The position itself, or, off the input, the nearest one on it that the same windows hold."""
    if position < 0:
        return min(position % dilation, size - 1)
    return position if position < size else max(position - -(-(position - size + 1) // dilation) * dilation, 0)


def _average_pool(call: Call, x: torch.Tensor) -> torch.Tensor:
    rank, kernel = _spatial_rank(call, x), call.ints("kernel_shape") or []
    strides, dilations = _per_axis(call, "strides", rank), _per_axis(call, "dilations", rank)
    sizes, with_pad = x.shape[2:], bool(call.get("count_include_pad", 0))
    before, after, counts, spans = _windows(call, sizes, kernel)
    ends = [span - n - p for span, n, p in zip(spans, sizes, before, strict=True)]
    # The sum over a window as a convolution with ones, channel by channel; then over the entries that count.
    ones = torch.ones([x.shape[1], 1, *kernel], dtype=x.dtype, device=x.device)
    total = CONV[rank](_pad_zeros(x, before, ends), ones, None, strides, 0, dilations, x.shape[1])
    for axis, n in enumerate(sizes):
        low, high = (-before[axis], n + after[axis]) if with_pad else (0, n)
        starts = [k * strides[axis] - before[axis] for k in range(counts[axis])]
        held = [sum(low <= start + j * dilations[axis] < high for j in range(kernel[axis])) for start in starts]
        share = torch.tensor([1.0 / max(count, 1) for count in held], dtype=x.dtype, device=x.device)
        total = total * share.reshape((-1,) + (1,) * (rank - 1 - axis))
    return total


def _global_max_pool(call: Call, x: torch.Tensor) -> torch.Tensor:
    return x.amax(dim=tuple(range(2, x.dim())), keepdim=True)


def _resize(call: Call, x: torch.Tensor, *_: None) -> torch.Tensor:
    from parverify.frontend.converters_resize import resample

    old = call.op == "Upsample" or call.opset < 11
    scales = call.numbers.get(1 if old else 2)
    sizes = None if old else call.ints("sizes", 3)
    factors = scales or call.get("scales")
    axes = call.ints("axes") or list(range(x.dim()))
    for k, axis in enumerate(axes):
        n = x.shape[axis]
        if sizes:
            size, factor = sizes[k], sizes[k] / n
        elif factors:
            factor = factors[k]
            size = math.floor(n * factor)
        else:
            call.refuse("neither scales nor sizes are constant; allowed are constant ones")
        if size != n or factor != 1:
            x = resample(call, x, axis, size, factor)
    return x


SPATIAL: dict[str, Operator] = {
    "Conv": Operator(_conv, theirs=lambda call: _has_plain_padding(call) and _has_constant_weights(call)),
    "ConvTranspose": Operator(
        _conv_transpose,
        theirs=lambda call: (
            _has_even_padding(call) and _has_constant_weights(call) and "output_shape" not in call.attributes
        ),
    ),
    "MaxPool": Operator(_max_pool, theirs=lambda call: _has_even_padding(call) and _padding_fits_kernel(call)),
    "AveragePool": Operator(
        _average_pool,
        theirs=lambda call: (
            _has_even_padding(call) and _padding_fits_kernel(call) and max(call.ints("dilations") or [1]) == 1
        ),
    ),
    "GlobalMaxPool": Operator(_global_max_pool),
    "Resize": Operator(_resize, static=(1, 2, 3)),
    "Upsample": Operator(_resize, static=(1,)),
}
