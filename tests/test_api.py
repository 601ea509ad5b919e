"""The library's bounds: regions, functionals, gradients, files and modules; and the report of `parverify bounds`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import parverify
from parverify.api import BOUND_METHODS
from parverify.bounding import bounds_report
from parverify.clock import Clock
from parverify.config import make_settings
from parverify.errors import UsageError

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "bundled"
WIDTH = 5


def network(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 12), nn.ReLU(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def ball_points(center: Tensor, eps: float, norm: float, count: int = 4000) -> Tensor:
    step = torch.randn(count, WIDTH, dtype=center.dtype)
    if norm == float("inf"):
        return center + eps * (2 * torch.rand(count, WIDTH, dtype=center.dtype) - 1)
    size = step.norm(p=norm, dim=1, keepdim=True)
    return center + eps * step / size * torch.rand(count, 1, dtype=center.dtype)


@pytest.mark.parametrize("norm", [1, 2, float("inf")])
@pytest.mark.parametrize("method", BOUND_METHODS)
def test_balls_contain_their_samples(method: str, norm: float) -> None:
    module, center = network(), torch.linspace(-1, 1, WIDTH, dtype=torch.float64)[None]
    bounds = parverify.compute_bounds(module, center=center, eps=0.3, norm=norm, method=method)
    with torch.no_grad():
        out = module(ball_points(center, 0.3, norm))
    assert (out >= bounds.lower - 1e-12).all()
    assert (out <= bounds.upper + 1e-12).all()


def test_smaller_norms_have_tighter_bounds() -> None:
    module, center = network(), torch.zeros(1, WIDTH, dtype=torch.float64)
    widths = []
    for norm in (1, 2, float("inf")):
        bounds = parverify.compute_bounds(module, center=center, eps=0.2, norm=norm, method="crown")
        widths.append(float((bounds.upper - bounds.lower).sum()))
    assert widths[0] < widths[1] < widths[2]


@pytest.mark.parametrize("method", BOUND_METHODS)
def test_functionals_are_tighter_than_combined_outputs(method: str) -> None:
    module = network()
    low = torch.full((1, WIDTH), -0.4, dtype=torch.float64)
    C = torch.tensor([[1.0, -1.0, 0.0], [0.0, 1.0, -1.0]], dtype=torch.float64)
    plain = parverify.compute_bounds(module, low, -low, method=method)
    rows = parverify.compute_bounds(module, low, -low, method=method, C=C)
    combined = C.clamp(min=0) @ plain.lower.flatten() + C.clamp(max=0) @ plain.upper.flatten()
    assert (rows.lower.flatten() >= combined - 1e-9).all()
    with torch.no_grad():
        out = module(ball_points(torch.zeros(1, WIDTH, dtype=torch.float64), 0.4, float("inf"))) @ C.T
    assert (out >= rows.lower - 1e-12).all()
    assert (out <= rows.upper + 1e-12).all()


@pytest.mark.parametrize("method", ["ibp", "crown-ibp", "crown"])
def test_gradients_equal_finite_differences(method: str) -> None:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(WIDTH, 9), nn.ReLU(), nn.Linear(9, 3)).double()
    low = torch.full((1, WIDTH), -0.3, dtype=torch.float64, requires_grad=True)

    def objective(box: Tensor) -> Tensor:
        bounds = parverify.compute_bounds(module, box, box + 0.6, method=method, differentiable=True)
        return bounds.lower.sum() - bounds.upper.sum()

    value = objective(low)
    weight = module[0].weight
    by_input, by_weight = torch.autograd.grad(value, [low, weight])
    step = 1e-6
    for place in ((0, 0), (0, 3)):
        moved = low.detach().clone()
        moved[place] += step
        assert float((objective(moved) - value).detach() / step) == pytest.approx(float(by_input[place]), abs=1e-4)
    with torch.no_grad():
        weight[2, 1] += step
        changed = objective(low.detach())
        weight[2, 1] -= step
    assert float((changed - value).detach() / step) == pytest.approx(float(by_weight[2, 1]), abs=1e-4)


def test_several_boxes_equal_one_by_one() -> None:
    module = network()
    low = torch.rand(4, WIDTH, dtype=torch.float64) - 0.5
    together = parverify.compute_bounds(module, low, low + 0.2, method="crown", input_shape=(1, WIDTH))
    for i in range(4):
        alone = parverify.compute_bounds(module, low[i : i + 1], low[i : i + 1] + 0.2, method="crown")
        torch.testing.assert_close(alone.lower.flatten(), together.lower[i].flatten(), rtol=0, atol=1e-12)
        torch.testing.assert_close(alone.upper.flatten(), together.upper[i].flatten(), rtol=0, atol=1e-12)


def test_what_makes_no_sense_is_refused() -> None:
    module, low = network(), torch.zeros(1, WIDTH, dtype=torch.float64)
    for arguments in (
        {"lower": low},
        {"center": low},
        {"lower": low, "upper": low, "center": low},
        {"lower": low, "upper": low, "method": "magic"},
        {"lower": low, "upper": low, "method": "alpha-crown", "differentiable": True},
        {"center": low, "eps": 0.1, "norm": 3},
        {"lower": torch.zeros(1, 4), "upper": torch.ones(1, 4), "input_shape": (1, WIDTH)},
    ):
        with pytest.raises(UsageError):
            parverify.compute_bounds(module, **arguments)  # type: ignore[arg-type]


def report(*, joint: bool = False, method: str = "alpha-crown", intersect: bool = True) -> dict[str, object]:
    (model,) = EXAMPLES.glob("*.onnx")
    spec = sorted(EXAMPLES.glob("*unsat*.vnnlib"))[0]
    settings = make_settings({"method": method, "alpha.joint": joint, "alpha.iterations": 10,
                              "bounds.intersect": intersect})  # fmt: skip
    return bounds_report(model, spec, settings=settings, clock=Clock())


def test_the_report_has_its_schema_and_the_same_digest_every_time() -> None:
    first, second = report(), report()
    wanted = {"method", "strategy", "world_size", "dtype", "lower", "upper", "layers", "digest", "seconds", "ranks"}
    assert wanted <= first.keys()
    assert first["digest"] == second["digest"]
    assert first["digest"] != report(method="crown")["digest"]
    (rank,) = first["ranks"]  # type: ignore[misc]
    assert rank["peak_bytes"] > rank["resident_bytes"] > 0
    assert rank["collectives"] == {}
    json.dumps(first)


def test_joint_alphas_are_sound_and_no_looser_than_crown() -> None:
    joint, streamed, crown = report(joint=True), report(), report(method="crown")
    low = {name: np.array(found["lower"]) for name, found in (("j", joint), ("s", streamed), ("c", crown))}
    high = {name: np.array(found["upper"]) for name, found in (("j", joint), ("s", streamed), ("c", crown))}
    slack = 1e-5 * np.abs(low["c"]).max()
    assert (low["j"] >= low["c"] - slack).all()
    assert (high["j"] <= high["c"] + slack).all()
    # both optimize the same relaxation: neither may cross what the other proves
    assert (low["j"] <= high["s"]).all()
    assert (low["s"] <= high["j"]).all()
