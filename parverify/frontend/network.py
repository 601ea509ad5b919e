"""A network from an ONNX file: a torch module to bound, and the original file to replay witnesses on.

The two must be the same function. The module is compared with the original at a few points before anything is
concluded from it; a witness counts only by the original's outputs (`Network.replay`).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from parverify.errors import ModelError, UsageError
from parverify.frontend.convert import FAILURES, convert, has_jumps, run_at_zero
from parverify.frontend.converters import OPERATORS
from parverify.frontend.files import read_bytes
from parverify.frontend.model_file import read_model
from parverify.frontend.normalize import normalize
from parverify.frontend.original import Original

if TYPE_CHECKING:
    from parverify.clock import Clock

TOLERANCE, SLACK = 1e-4, 1e-5
"""Allowed difference between module and original: `TOLERANCE` times the largest output plus `SLACK`. Two float32
evaluations in different orders of summation differ by about 1e-7 times the square root of the number of terms, growing
with depth: 1e-5 of the largest output in the worst published networks. Where large terms cancel to small outputs they
differ by 1e-6 of the terms, hence the slack. A wrong conversion is off by the size of the outputs."""

POINTS_INSIDE, CORNERS = 4, 4
"""Random points inside the box and at its corners at which module and original are compared."""

FORGIVEN = 0.25
"""Share of points that may differ where the network jumps (sign, rounding, comparisons): one rounding can flip one."""


@dataclass(frozen=True)
class Replay:
    """Runs the original file in onnxruntime, one instance at a time. It can be sent to another process.

    Args:
        original: the file.
        input_shape, dtype: of its input.
        n_out: entries of its output.
    """

    original: Original = field(repr=False)
    input_shape: tuple[int, ...]
    n_out: int
    dtype: torch.dtype

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """The outputs.

        Args:
            x: (n_in,) or (B, n_in) float64; rounded to the network's type.

        Returns:
            (n_out,) or (B, n_out) float64.
        """
        x = np.asarray(x)
        n_in = int(np.prod(self.input_shape, dtype=np.int64))
        if x.ndim not in (1, 2) or x.shape[-1] != n_in:
            raise ModelError(f"an input of shape {x.shape} does not fit; allowed are ({n_in},) and (B, {n_in})")
        with np.errstate(over="ignore"):  # beyond float32 the network is given infinities, which confirm nothing
            rows = x.reshape(-1, n_in).astype(np.float32 if self.dtype == torch.float32 else np.float64)
        outputs = [self.original.run(row.reshape(self.input_shape)).astype(np.float64).reshape(-1) for row in rows]
        y = np.stack(outputs) if outputs else np.zeros((0, self.n_out))
        return y if x.ndim == 2 else y[0]


@dataclass(frozen=True)
class Network:
    """A network to verify.

    Args:
        module: in eval mode; maps one tensor of `input_shape` to one of `output_shape`.
        input_shape: as the file says, symbolic axes as 1.
        output_shape: of the module's result.
        dtype: of the input, float32 or float64.
        name: the file's name without its endings.
        original: the file in onnxruntime.
        jumps: whether some operator's result may jump when an input moves by one rounding.
    """

    module: torch.nn.Module
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    dtype: torch.dtype
    name: str
    original: Original = field(repr=False, compare=False)
    jumps: bool = False

    @property
    def n_in(self) -> int:
        """Number of input entries."""
        return int(np.prod(self.input_shape, dtype=np.int64))

    @property
    def n_out(self) -> int:
        """Number of output entries."""
        return int(np.prod(self.output_shape, dtype=np.int64))

    @property
    def replay(self) -> Replay:
        """What onnxruntime gives for the original file."""
        return Replay(self.original, self.input_shape, self.n_out, self.dtype)

    def evaluate(self, x: np.ndarray) -> np.ndarray:
        """What the module gives; arguments and result as in `replay`."""
        return _evaluate(self.module, self, np.asarray(x), self.dtype)


def _evaluate(module: torch.nn.Module, network: Network, x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    # Inputs are rounded to the network's own type first, whatever type the module computes in.
    rows = torch.from_numpy(np.ascontiguousarray(x.reshape(-1, network.n_in))).to(network.dtype).to(dtype)
    try:
        with torch.no_grad():
            # Not called itself: a module of torch.fx prints to stderr where a call fails.
            outputs = [module.forward(row.reshape(network.input_shape)).to(torch.float64).reshape(-1) for row in rows]
    except FAILURES as error:
        raise ModelError(f"the converted network can't be evaluated: {' '.join(str(error).split())}") from error
    y = torch.stack(outputs).numpy() if outputs else np.zeros((0, network.n_out))
    return y if x.ndim == 2 else y[0]


def load_network(path: Path, *, clock: Clock | None = None) -> Network:
    """Read an ONNX file, plain or gzipped.

    Raises:
        ModelError: the file can't be read or is not supported.
        UnsupportedOperatorError: operators that can't be converted, all at once.
        OutOfTimeError: the clock ran out.
    """
    try:
        data = read_bytes(path)
    except UsageError as error:
        raise ModelError(error.message, error.hint or "MODEL names an ONNX file, itself or as .gz") from error
    if clock is not None:
        clock.check("reading the network")
    file = read_model(data, path.parent, OPERATORS)
    if clock is not None:
        clock.check("converting the network")
    model = normalize(file)
    module = convert(model)
    output = run_at_zero(module, file.input_shape, file.dtype)
    if 0 in (*file.input_shape, *output.shape):
        raise ModelError(
            f"the network maps shape {file.input_shape} to {tuple(output.shape)}; allowed are shapes with entries"
        )
    name = path.name.removesuffix(".gz").removesuffix(".onnx")
    original = Original(file.replay_bytes)
    return Network(module, file.input_shape, tuple(output.shape), file.dtype, name, original, jumps=has_jumps(model))


def check_against_original(network: Network, lower: np.ndarray, upper: np.ndarray, *, seed: int = 0) -> float:
    """Compare the module with the original at the box's centre, at random points and at corners.

    Args:
        lower, upper: (n_in,) float64.
        seed: of the random points.

    Returns:
        the largest absolute difference between outputs.

    Raises:
        ModelError: the two differ by more than is allowed (see `TOLERANCE`), or one is NaN alone.
    """
    points = sample_points(lower, upper, seed=seed)
    ours, theirs = network.evaluate(points), network.replay(points)
    if ours.shape != theirs.shape:
        raise ModelError(f"the module gives {ours.shape[1]} outputs, the original gives {theirs.shape[1]}")
    gaps = _gaps(ours, theirs)
    finite = theirs[np.isfinite(theirs)]
    allowed = TOLERANCE * float(np.abs(finite).max(initial=0.0)) + SLACK
    worst = gaps.max(axis=1)
    bad = ~(worst <= allowed)
    forgiven = FORGIVEN if network.jumps else 0.0
    if bad.mean() > forgiven:
        point, output = np.unravel_index(int(np.argmax(gaps)), gaps.shape)
        raise ModelError(
            f"the converted network differs from the original by {gaps[point, output]:.3g} at output {output} of test "
            f"point {point} ({ours[point, output]:.9g} instead of {theirs[point, output]:.9g}); "
            f"allowed is {allowed:.3g}"
        )
    return float(worst[~bad].max(initial=0.0))


def _gaps(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """|ours - theirs|; 0 where both are NaN or the same infinity, infinite where only one is."""
    same = (ours == theirs) | (np.isnan(ours) & np.isnan(theirs))
    difference = np.abs(np.subtract(ours, theirs, where=~same, out=np.zeros_like(theirs)))
    return np.where(np.isnan(difference), np.inf, difference)


def sample_points(lower: np.ndarray, upper: np.ndarray, *, seed: int = 0) -> np.ndarray:
    """(1 + inside + corners, n_in) float64: the centre, uniform random points, random corners."""
    generator = np.random.default_rng(seed)
    width = upper - lower
    inside = lower + generator.random((POINTS_INSIDE, len(lower))) * width
    corners = np.where(generator.random((CORNERS, len(lower))) < 0.5, lower, upper)
    return np.concatenate([(lower + width / 2)[None], inside, corners])


def rounding_gap(network: Network, points: np.ndarray) -> float:
    """How far the original's rounding moves its outputs: the largest |replay(x) - exact(x)| over some points.

    `exact` is the module with weights and arithmetic in float64, so that rounding of its own is negligible.

    Args:
        points: (B, n_in) float64.
    """
    exact = copy.deepcopy(network.module).double()
    gaps = _gaps(_evaluate(exact, network, np.asarray(points), torch.float64), network.replay(points))
    return float(gaps.max(initial=0.0))
