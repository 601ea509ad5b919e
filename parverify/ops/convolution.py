"""The transpose of a two-dimensional convolution as a convolution: several times faster on CPUs than the library's own.

A transposed convolution of stride s is s*s ordinary convolutions of stride 1, one for each remainder of the output's
coordinates, whose kernels are the remainders' taps, followed by interleaving (sub-pixel convolution, Shi et al., CVPR
2016). With t = o*s + k running over padded coordinates, t = q*s + r, the tap at k = r + m*s meets o = q - m. Its own
transpose, needed where alphas are optimized, is the ordinary strided convolution.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def transpose_conv2d(
    A: Tensor, weight: Tensor, stride: tuple[int, int], padding: tuple[int, int], size: tuple[int, int]
) -> Tensor:
    """The vector-Jacobian product of `conv2d(x, weight, stride=stride, padding=padding)`.

    Args:
        A: (N, C_out, *out).
        weight: (C_out, C_in, *kernel), no groups, no dilation.
        size: spatial size of x.

    Returns:
        (N, C_in, *size). Not differentiable in `weight`.
    """
    return _Transposed.apply(A, weight, stride, padding, size)  # type: ignore[no-any-return]


class _Transposed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, A, weight, stride, padding, size):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(weight)
        ctx.settings = stride, padding
        return _sub_pixel(A, weight, stride, padding, size)

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        (weight,) = ctx.saved_tensors
        stride, padding = ctx.settings
        g = g.contiguous(memory_format=torch.channels_last)
        return F.conv2d(g, weight, None, stride, padding).contiguous(), None, None, None, None


def _sub_pixel(
    A: Tensor, weight: Tensor, stride: tuple[int, int], padding: tuple[int, int], size: tuple[int, int]
) -> Tensor:
    c_out, c_in, *kernel = weight.shape
    (sh, sw), taps = stride, [-(-k // s) for k, s in zip(kernel, stride, strict=True)]
    padded = F.pad(weight, (0, taps[1] * sw - kernel[1], 0, taps[0] * sh - kernel[0]))
    parts = padded.reshape(c_out, c_in, taps[0], sh, taps[1], sw).flip(2, 4).permute(1, 3, 5, 0, 2, 4)
    parts = parts.reshape(c_in * sh * sw, c_out, *taps).contiguous(memory_format=torch.channels_last)
    y = F.conv2d(A.contiguous(memory_format=torch.channels_last), parts, None, 1, (taps[0] - 1, taps[1] - 1))
    rows, columns = y.shape[2:]
    if sh > 1 or sw > 1:
        y = y.reshape(-1, c_in, sh, sw, rows, columns).permute(0, 1, 4, 2, 5, 3)
        y = y.reshape(-1, c_in, rows * sh, columns * sw)
    missing = [max(0, p + n - have) for p, n, have in zip(padding, size, y.shape[2:], strict=True)]
    if any(missing):
        y = F.pad(y, (0, missing[1], 0, missing[0]))
    return y[:, :, padding[0] : padding[0] + size[0], padding[1] : padding[1] + size[1]].contiguous()
