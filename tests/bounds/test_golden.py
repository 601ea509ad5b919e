"""Against reference bounds: the same for IBP and CROWN, tighter in sum for alpha-CROWN where ReLU is all there is."""

from __future__ import annotations

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
from parverify.program.executor import Executor
from tests.bounds.zoo import bounded

QUICK = ["acasxu_0", "acasxu_1", "acasxu_2", "mnist_fc_x2_0", "mnist_fc_x2_1", "mnist_fc_x4_0", "mnist_fc_x4_1",
         "mnist_fc_x6_0", "mnist_fc_x6_1", "oval21_base_0", "reach_robot", "reach_vdp", "rl_cartpole", "rl_lunarlander",
         "tll_0", "tll_1"]  # fmt: skip
LONG = ["oval21_deep_0", "oval21_wide_0", "sri_resnet_a_0"]
CASES = [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in LONG)]
ALPHA_QUICK = ["acasxu_0", "acasxu_1", "acasxu_2", "mnist_fc_x2_0", "mnist_fc_x2_1", "reach_robot", "reach_vdp",
               "rl_cartpole", "rl_lunarlander"]  # fmt: skip
ALPHA = [case if case in ALPHA_QUICK else pytest.param(case, marks=pytest.mark.slow) for case in [*QUICK, *LONG]]


# Rows of a layer are optimized for themselves here, in the reference for the output; where that pays, by how much.
JOINT_IS_TIGHTER = {"mnist_fc_x4_1": 3e-3}


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

    def found(self, options: BoundOptions) -> Box:
        _, (low, high) = bounded(self.executor, self.region, options)
        return low.flatten(), high.flatten()


def scale(box: Box) -> Tensor:
    return torch.maximum(box[0].abs(), box[1].abs()).max()


def assert_equal(found: Box, expected: Box, tolerance: float = 1e-4) -> None:
    for one, other in zip(found, expected, strict=True):
        assert ((one - other).abs() <= tolerance * scale(expected)).all()


@pytest.mark.parametrize("case", CASES)
def test_ibp(shared: Path, case: str) -> None:
    golden = Golden(shared, case)
    assert_equal(golden.found(BoundOptions("ibp")), golden.expected("ibp"))


@pytest.mark.parametrize("case", CASES)
def test_crown_ibp(shared: Path, case: str) -> None:
    golden = Golden(shared, case)
    assert_equal(golden.found(BoundOptions("crown-ibp")), golden.expected("crown_ibp"))


# Rounding may turn the default slope of a ReLU with u = -l, about which CROWN's bounds jump; tll_1 has many of them.
TIES = {"tll_1": 2e-2, "oval21_deep_0": 3e-4}
# A tighter layer box may choose another default slope, so that single outputs get looser, if not their sum.
OTHER_SLOPES = {"reach_robot"}
TOLERANCE = {torch.float64: 1e-4, torch.float32: 3e-4}  # what is allowed for rounding adds up in deep networks
DTYPES = [torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_crown_without_intersection(shared: Path, case: str, dtype: torch.dtype) -> None:
    golden = Golden(shared, case, dtype)
    found = golden.found(BoundOptions("crown", intersect=False))
    assert_equal(found, golden.expected("crown"), TIES.get(case, TOLERANCE[dtype]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_crown_is_never_looser(shared: Path, case: str, dtype: torch.dtype) -> None:
    golden = Golden(shared, case, dtype)
    (low, high), (their_low, their_high) = golden.found(BoundOptions("crown")), golden.expected("crown")
    allowed = TIES.get(case, TOLERANCE[dtype]) * scale((their_low, their_high))
    assert (high - low).sum() <= (their_high - their_low).sum() + allowed * 2 * len(low)
    if golden.executor.graph.piecewise_linear and case not in OTHER_SLOPES:
        assert (low >= their_low - allowed).all()
        assert (high <= their_high + allowed).all()


@pytest.mark.parametrize("case", ALPHA)
def test_streamed_alpha_is_as_tight(shared: Path, case: str) -> None:
    golden = Golden(shared, case)
    if not golden.executor.graph.piecewise_linear:
        pytest.skip("the reference relaxes other activations in another way")
    low, high = golden.found(BoundOptions("alpha-crown", AlphaOptions(iterations=20)))
    their_low, _ = golden.expected("alpha_crown")
    assert low.sum() >= their_low.sum() - JOINT_IS_TIGHTER.get(case, 1e-5) * their_low.abs().sum()
    crown = golden.found(BoundOptions("crown"))
    assert (high - low).sum() <= (crown[1] - crown[0]).sum() * (1 + 1e-6)
