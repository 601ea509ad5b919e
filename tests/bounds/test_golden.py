"""Against reference bounds: the same for IBP and CROWN, tighter in sum for alpha-CROWN where ReLU is all there is."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from parverify.bounds.alpha import AlphaOptions
from parverify.bounds.layers import BoundOptions
from parverify.bounds.region import BoxRegion
from parverify.frontend.network import load_network
from parverify.graph.trace import trace
from parverify.ops.kernel import Box
from parverify.ops.rounding import allowance
from parverify.program.executor import Executor
from tests.bounds.ties import SLOPES, break_ties
from tests.bounds.zoo import bounded

QUICK = ["acasxu_0", "acasxu_1", "acasxu_2", "mnist_fc_x2_0", "mnist_fc_x2_1", "mnist_fc_x4_0", "mnist_fc_x4_1",
         "mnist_fc_x6_0", "mnist_fc_x6_1", "oval21_base_0", "reach_robot", "reach_vdp", "rl_cartpole", "rl_lunarlander",
         "tll_0", "tll_1"]  # fmt: skip
LONG = ["oval21_deep_0", "oval21_wide_0", "sri_resnet_a_0"]
CASES = [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in LONG)]
ALPHA_QUICK = ["acasxu_0", "acasxu_1", "acasxu_2", "mnist_fc_x2_0", "mnist_fc_x2_1", "reach_robot", "reach_vdp",
               "rl_cartpole", "rl_lunarlander"]  # fmt: skip
ALPHA = [case if case in ALPHA_QUICK else pytest.param(case, marks=pytest.mark.slow) for case in [*QUICK, *LONG]]


class Golden:
    """One case: the reference bounds, and ours."""

    def __init__(self, shared: Path, case: str, dtype: torch.dtype = torch.float32) -> None:
        self._data = np.load(shared / "golden" / f"{case}.npz")
        network = load_network(shared / "vnncomp" / str(self._data["onnx"]))
        self.executor = Executor(trace(network.module, network.input_shape), dtype=dtype)
        low, high = (torch.tensor(self._data[f"x_{side}"]).reshape(1, -1).to(dtype) for side in ("lower", "upper"))
        self.region = BoxRegion(low, high)

    def expected(self, method: str) -> Box:
        low, high = (torch.tensor(self._data[f"{method}_{side}"]).flatten() for side in ("lower", "upper"))
        return low, high

    def found(self, options: BoundOptions, ulps: float | None = None) -> Box:
        with contextlib.nullcontext() if ulps is None else allowance(ulps):
            _, (low, high) = bounded(self.executor, self.region, options)
        return low.flatten(), high.flatten()


@functools.cache  # consecutive tests of a worker share what was read
def read(shared: Path, case: str) -> Golden:
    return Golden(shared, case)


def scale(box: Box) -> Tensor:
    return torch.maximum(box[0].abs(), box[1].abs()).max()


def assert_equal(found: Box, expected: Box, tolerance: float = 1e-4) -> None:
    for one, other in zip(found, expected, strict=True):
        assert ((one - other).abs() <= tolerance * scale(expected)).all()


@pytest.mark.parametrize("case", CASES)
def test_ibp(shared: Path, case: str) -> None:
    golden = read(shared, case)
    assert_equal(golden.found(BoundOptions("ibp")), golden.expected("ibp"))


@pytest.mark.parametrize("case", CASES)
def test_crown_ibp(shared: Path, case: str) -> None:
    golden = read(shared, case)
    assert_equal(golden.found(BoundOptions("crown-ibp")), golden.expected("crown_ibp"))


ROUNDED = 1e-3  # the allowance for rounding in float32, which the reference does not make, adds up in deep networks


@pytest.mark.parametrize("case", CASES)
def test_crown_without_intersection(shared: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal but for the allowance for rounding; with it, still close."""
    break_ties(monkeypatch, case)
    golden = read(shared, case)
    options = BoundOptions("crown", intersect=False)
    assert_equal(golden.found(options, 0), golden.expected("crown"))
    if case not in SLOPES:  # the allowance moves bounds apart that are tied
        assert_equal(golden.found(options), golden.expected("crown"), ROUNDED)


@pytest.mark.parametrize("case", CASES)
def test_crown_is_never_looser(shared: Path, case: str) -> None:
    golden = read(shared, case)
    their_low, their_high = golden.expected("crown")
    allowed = 1e-4 * scale((their_low, their_high))
    low, high = golden.found(BoundOptions("crown"), 0)
    assert (low >= their_low - allowed).all()
    assert (high <= their_high + allowed).all()


@pytest.mark.parametrize("case", ALPHA)
def test_streamed_alpha_is_as_tight(shared: Path, case: str) -> None:
    golden = read(shared, case)
    low, high = golden.found(BoundOptions("alpha-crown", AlphaOptions(iterations=20)))
    their_low, _ = golden.expected("alpha_crown")
    assert low.sum() >= their_low.sum() - 1e-5 * their_low.abs().sum()
    crown = golden.found(BoundOptions("crown"))
    assert (high - low).sum() <= (crown[1] - crown[0]).sum() * (1 + 1e-6)
