"""Against reference bounds, through sharded modules: the same for IBP and CROWN, as tight for alpha-CROWN."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from parverify.frontend.network import load_network
from parverify.lirpa import shard
from parverify.lirpa.compat import Lirpa
from tests.bounds.ties import break_ties

QUICK = ["acasxu_0", "acasxu_1", "acasxu_2", "mnist_fc_x2_0", "mnist_fc_x2_1", "mnist_fc_x4_0", "mnist_fc_x4_1",
         "mnist_fc_x6_0", "mnist_fc_x6_1", "reach_robot", "reach_vdp", "rl_cartpole", "rl_lunarlander", "tll_0",
         "tll_1", "oval21_base_0"]  # fmt: skip
ROUNDED = {"mnist_fc_x6_1": 3e-5}  # of the largest bound, in float32; in float64 they differ by 4e-14
LONG = ["oval21_wide_0", "oval21_deep_0", "sri_resnet_a_0"]


@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in LONG)])
def test_bounds(library: Lirpa, shared: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = np.load(shared / "golden" / f"{case}.npz")
    network = load_network(shared / "vnncomp" / str(data["onnx"]))
    options = {"conv_mode": "matrix", "enable_opt_interm_bounds": True}
    module = library.module.BoundedModule(
        network.module.float().eval(), torch.zeros(network.input_shape), bound_opts=options
    )
    sharded = shard(module)
    low, high = (torch.tensor(data[f"x_{side}"]).float().reshape(network.input_shape) for side in ("lower", "upper"))
    x = library.module.BoundedTensor((low + high) / 2, library.module.PerturbationLpNorm(x_L=low, x_U=high))
    tolerance = ROUNDED.get(case, 1e-5)
    break_ties(monkeypatch, case)
    methods = {"ibp": "IBP", "crown_ibp": "CROWN-IBP", "crown": "CROWN", "alpha_crown": "CROWN-Optimized"}
    for key, method in methods.items():
        their_low, their_high = (torch.tensor(data[f"{key}_{side}"]).flatten() for side in ("lower", "upper"))
        with torch.no_grad():
            found_low, found_high = (side.flatten() for side in sharded.compute_bounds(x=(x,), method=method))
        largest = float(torch.maximum(their_low.abs(), their_high.abs()).max())
        if key == "alpha_crown":
            assert found_low.sum() >= their_low.sum() - 1e-5 * their_low.abs().sum()
            continue
        assert (found_low - their_low).abs().max() <= tolerance * largest, method
        assert (found_high - their_high).abs().max() <= tolerance * largest, method
