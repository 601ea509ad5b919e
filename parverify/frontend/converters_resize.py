"""Resizing of one axis: nearest as a choice of entries, linear and cubic as a matrix of weights.

Both are affine in the input, whatever the coordinate transformation, and both follow the ONNX operator `Resize`.
Coordinates are float32, as onnxruntime computes them, because `nearest` depends on their rounding.
"""

from __future__ import annotations

import numpy as np
import torch

from parverify.frontend.converters_common import Call, take


def resample(call: Call, x: torch.Tensor, axis: int, size: int, factor: float) -> torch.Tensor:
    """x with `axis` resized to `size` entries; `factor` is the scale that the operator works with."""
    old = call.op == "Upsample" or call.opset < 11
    mode = call.get("mode", "nearest")
    n = x.shape[axis]
    if call.get("antialias", 0) and factor < 1:
        call.refuse("antialias is not supported; allowed is 0")
    if call.get("keep_aspect_ratio_policy", "stretch") != "stretch":
        call.refuse(f"policy {call.get('keep_aspect_ratio_policy')} is not supported; allowed is stretch")
    transformation = "asymmetric" if old else call.get("coordinate_transformation_mode", "half_pixel")
    where = _coordinates(call, transformation, n, size, np.float32(factor))
    if mode == "nearest":
        rounding = ("ceil" if factor < 1 else "floor") if old else call.get("nearest_mode", "round_prefer_floor")
        return take(x, axis, np.clip(_nearest(where, rounding), 0, n - 1).tolist())
    if mode == "cubic":
        weights = _cubic(where, n, call.get("cubic_coeff_a", -0.75), bool(call.get("exclude_outside", 0)))
    else:
        weights = _linear(where, n)
    matrix = torch.from_numpy(weights).to(device=x.device, dtype=x.dtype)
    return torch.matmul(x.movedim(axis, -1), matrix.T).movedim(-1, axis)


def _coordinates(call: Call, transformation: str, n: int, size: int, factor: np.float32) -> np.ndarray:
    """(size,) float32, where in the input each output entry lies."""
    place, half = np.arange(size, dtype=np.float32), np.float32(0.5)
    if transformation == "asymmetric":
        return place / factor
    if transformation == "align_corners":
        return place * np.float32(n - 1) / np.float32(size - 1) if size > 1 else place * 0
    if transformation == "pytorch_half_pixel" and size == 1:
        return place * 0
    if transformation == "tf_half_pixel_for_nn":
        return (place + half) / factor
    if transformation in ("half_pixel", "pytorch_half_pixel"):
        return (place + half) / factor - half
    if transformation == "half_pixel_symmetric":
        offset = np.float32(n / 2) * (1 - np.float32(size) / (factor * np.float32(n)))
        return offset + (place + half) / factor - half
    return call.refuse(f"coordinate transformation {transformation} is not supported; allowed are those without roi")


def _nearest(where: np.ndarray, rounding: str) -> np.ndarray:
    if rounding == "floor":
        return np.floor(where).astype(int)
    if rounding == "ceil":
        return np.ceil(where).astype(int)
    if rounding == "round_prefer_ceil":
        return np.floor(where + np.float32(0.5)).astype(int)
    return np.ceil(where - np.float32(0.5)).astype(int)


def _linear(where: np.ndarray, n: int) -> np.ndarray:
    """(size, n) float64 weights."""
    where = np.clip(where, 0, n - 1).astype(np.float64)
    left = np.floor(where).astype(int)
    right = np.minimum(left + 1, n - 1)
    weights = np.zeros((len(where), n))
    rows = np.arange(len(where))
    np.add.at(weights, (rows, left), 1 - (where - left))
    np.add.at(weights, (rows, right), where - left)
    return weights


def _cubic(where: np.ndarray, n: int, a: float, exclude_outside: bool) -> np.ndarray:
    """(size, n) float64 weights of cubic convolution (Keys 1981, equation 4, with free parameter a)."""
    where = where.astype(np.float64)
    left = np.floor(where).astype(int)
    weights, rows = np.zeros((len(where), n)), np.arange(len(where))
    for shift in (-1, 0, 1, 2):
        t = np.abs(where - (left + shift))
        near = ((a + 2) * t - (a + 3)) * t * t + 1
        far = ((a * t - 5 * a) * t + 8 * a) * t - 4 * a
        value = np.where(t <= 1, near, far)
        outside = (left + shift < 0) | (left + shift >= n)
        np.add.at(weights, (rows, np.clip(left + shift, 0, n - 1)), np.where(outside & exclude_outside, 0.0, value))
    return weights / weights.sum(axis=1, keepdims=True) if exclude_outside else weights
