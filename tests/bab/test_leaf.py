"""Leaves against an oracle that clips polygons, and against a solver that lies."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from parverify.bab.leaf import LeafResult, certified_combination, decide_leaf
from parverify.bounds.layers import BoundOptions, bound_layers
from parverify.bounds.region import BoxRegion
from parverify.clock import Clock
from parverify.graph.trace import trace
from parverify.ops.kernel import Box
from parverify.program.executor import Executor
from parverify.program.rows import Dense

EXTRA = 1e-5  # verdicts of leaves whose margin is smaller are left to rounding


@dataclass(frozen=True)
class Problem:
    """A network on a box, with the pre-activation bounds of the whole box."""

    executor: Executor
    region: BoxRegion
    boxes: dict[str, Box]

    @staticmethod
    def of(module: nn.Module, lower: Tensor, upper: Tensor, shape: tuple[int, ...] | None = None) -> Problem:
        graph = trace(module, shape or (1, lower.numel()))
        executor = Executor(graph, dtype=torch.float64)
        region = BoxRegion(lower.double().reshape(1, -1), upper.double().reshape(1, -1))
        return Problem(executor, region, bound_layers(executor, region, BoundOptions("ibp")).boxes)

    def unstable(self) -> list[tuple[str, int]]:
        """Neurons of either sign."""
        found = []
        for name, (lower, upper) in self.boxes.items():
            found += [(name, i) for i in torch.nonzero(((lower < 0) & (upper > 0)).flatten()).flatten().tolist()]
        return found

    def split(self, splits: list[tuple[str, int, int]]) -> dict[str, Box]:
        """The bounds with splits applied."""
        boxes = {name: (low.clone(), high.clone()) for name, (low, high) in self.boxes.items()}
        for name, index, sign in splits:
            side = boxes[name][0 if sign > 0 else 1].view(-1)
            side[index] = side[index].clamp(min=0) if sign > 0 else side[index].clamp(max=0)
        return boxes

    def decide(
        self, splits: list[tuple[str, int, int]], A: Any, constant: Any, clock: Clock | None = None
    ) -> LeafResult:
        """The leaf of `splits` with rows `A y + constant`."""
        rows = Dense(torch.as_tensor(np.atleast_2d(A)).double(), torch.as_tensor(np.atleast_1d(constant)).double())
        return decide_leaf(self.executor, self.region, self.split(splits), splits, rows, clock=clock or Clock())

    def outputs(self, x: Any) -> np.ndarray:
        """(B, n_out) outputs of (B, n_in) points."""
        return self.executor.evaluate(torch.as_tensor(x)).flatten(1).numpy()

    def pattern(self, x: Tensor) -> list[tuple[str, int, int]]:
        """The splits of unstable neurons that hold at one point (n_in,)."""
        values = self.executor.values(x.reshape(1, -1))
        return [(name, i, 1 if values[name].flatten()[i] >= 0 else -1) for name, i in self.unstable()]


def mlp(sizes: list[int], seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(itertools.pairwise(sizes)):
        linear = nn.Linear(a, b)
        nn.init.normal_(linear.weight, std=1.2 / a**0.5)
        nn.init.normal_(linear.bias, std=0.3)
        layers += [linear] if i == len(sizes) - 2 else [linear, nn.ReLU()]
    return nn.Sequential(*layers)


def identity(width: int) -> nn.Module:
    """An affine network that returns its input."""
    layer = nn.Linear(width, width)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(width))
        layer.bias.zero_()
    return layer


# --- an oracle in the plane ----------------------------------------------------------------------------------------


def clip(polygon: list[np.ndarray], a: np.ndarray, c: float) -> list[np.ndarray]:
    """The part of a convex polygon where `a x + c >= 0` (Sutherland and Hodgman, 1974)."""
    out = []
    for p, q in zip(polygon, polygon[1:] + polygon[:1], strict=True):
        at_p, at_q = a @ p + c, a @ q + c
        if at_p >= 0:
            out.append(p)
        if (at_p > 0 and at_q < 0) or (at_p < 0 and at_q > 0):
            out.append(p + (q - p) * at_p / (at_p - at_q))
    return out


def affine_on(module: nn.Sequential, active: list[list[bool]]) -> tuple[list[tuple[np.ndarray, np.ndarray]], Any]:
    """(signed constraints `a x + c >= 0`, (matrix, constant) of the output) where ReLUs have the given pattern."""
    M, k = np.eye(2), np.zeros(2)
    constraints = []
    layers = iter(active)
    for layer in module:
        if isinstance(layer, nn.Linear):
            W, b = layer.weight.detach().double().numpy(), layer.bias.detach().double().numpy()
            M, k = W @ M, W @ k + b
        else:
            gate = np.array(next(layers))
            constraints += [((1 if on else -1) * a, (1 if on else -1) * c) for on, a, c in zip(gate, M, k, strict=True)]
            M, k = M * gate[:, None], k * gate
    return constraints, (M, k)


def unsafe_part(
    module: nn.Sequential, active: list[list[bool]], rows: tuple[np.ndarray, np.ndarray], extra: float
) -> list[np.ndarray]:
    """The points of [-1, 1]^2 in the pattern where all rows are <= extra, as a polygon; every constraint is relaxed."""
    polygon = [np.array(p, dtype=float) for p in ((-1, -1), (1, -1), (1, 1), (-1, 1))]
    constraints, (M, k) = affine_on(module, active)
    C, d = rows
    halves = constraints + list(zip(-(C @ M), -(C @ k + d), strict=True))
    for a, c in halves:
        polygon = clip(polygon, a, c + extra)
    return polygon


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("m", [1, 2, 3])
def test_every_pattern_agrees_with_clipped_polygons(seed: int, m: int) -> None:
    module = mlp([2, 3, 3, 3], seed)
    problem = Problem.of(module, -torch.ones(2), torch.ones(2))
    first, second = problem.executor.graph.bounded
    rng = np.random.default_rng(seed)
    C = rng.normal(size=(m, 3))
    y = problem.outputs(rng.uniform(-1, 1, (200, 2)))
    d = -np.quantile(y @ C.T, 0.3, axis=0)
    seen = set()
    for bits in itertools.product([False, True], repeat=6):
        splits = [(first, i, 1 if on else -1) for i, on in enumerate(bits[:3])]
        splits += [(second, i, 1 if on else -1) for i, on in enumerate(bits[3:])]
        active = [list(bits[:3]), list(bits[3:])]
        result = problem.decide(splits, C, d)
        shrunk, grown = (unsafe_part(module, active, (C, d), extra) for extra in (-EXTRA, EXTRA))
        if shrunk:
            assert not result.closed
            assert result.point is not None
        if not grown:
            assert result.closed, result.reason
            assert result.point is None
        seen.add(result.closed)
        if result.point is not None:
            values = problem.executor.values(torch.as_tensor(result.point)[None])
            assert all(sign * values[name].flatten()[i] >= -EXTRA for name, i, sign in splits)
            assert (C @ problem.outputs(result.point[None])[0] + d <= EXTRA).all()
            assert (np.abs(result.point) <= 1).all()
    assert True in seen  # with six splits in the plane most patterns are empty


@pytest.mark.parametrize("seed", range(4))
def test_the_leaves_together_find_the_minimum(seed: int) -> None:
    module = mlp([3, 4, 4, 1], seed)
    problem = Problem.of(module, -torch.ones(3), torch.ones(3))
    grid = torch.stack(torch.meshgrid(*[torch.linspace(-1, 1, 41).double()] * 3, indexing="ij"), -1).reshape(-1, 3)
    sampled = float(problem.outputs(grid).min())
    unstable = problem.unstable()
    assert unstable
    for offset, sat in ((-sampled - 1e-3, True), (-sampled + 0.5, False)):
        results = []
        for signs in itertools.product([1, -1], repeat=len(unstable)):
            splits = [(name, i, sign) for (name, i), sign in zip(unstable, signs, strict=True)]
            results.append(problem.decide(splits, [[1.0]], [offset]))
        assert all(result.closed or result.point is not None for result in results)
        assert any(not result.closed for result in results) == sat


class Residual(nn.Module):
    """Convolutions, a skip connection, a pooling layer: every kind of operator on the way."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1, groups=2)
        self.norm, self.pool, self.last = nn.BatchNorm2d(2), nn.MaxPool2d(2), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(x))
        y = self.pool(torch.relu(y - self.norm(self.second(y))))
        return self.last(y.flatten(1))


def test_convolutions_and_skips() -> None:
    problem = Problem.of(Residual(), torch.zeros(16), torch.ones(16), (1, 1, 4, 4))
    torch.manual_seed(1)
    for x in torch.rand(5, 16, dtype=torch.float64):
        splits = problem.pattern(x)
        assert splits
        y = problem.outputs(x[None])[0]
        C = np.eye(3)
        # x itself is unsafe
        found = problem.decide(splits, C, -y - 1e-4)
        assert not found.closed
        assert found.point is not None
        assert (problem.outputs(found.point[None])[0] - y - 1e-4 <= 1e-5).all()
        # the output can't be on both sides, though each row alone has its points
        pair = np.stack([C[0], -C[0]])
        assert problem.decide(splits, pair, [-y[0] + 1e-3, y[0]]).closed
        assert not problem.decide(splits, pair, [-y[0] - 1e-3, y[0]]).closed


# --- what is closed, and by what -----------------------------------------------------------------------------------


def test_a_conjunction_that_no_single_row_closes() -> None:
    problem = Problem.of(identity(2), -torch.ones(2), torch.ones(2))
    rows = np.array([[1.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])
    assert problem.decide([], rows, [0.1, 0.0, 0.0]).closed
    assert not problem.decide([], rows[:2], [0.1, 0.0]).closed
    assert not problem.decide([], rows[1:], [0.0, 0.0]).closed


def hinge() -> Problem:
    """One input x in [-1, 1]; pre-activations x, x - 0.5, -x - 0.5; the output is their ReLUs' sum."""
    module = nn.Sequential(nn.Linear(1, 3), nn.ReLU(), nn.Linear(3, 1))
    with torch.no_grad():
        module[0].weight.copy_(torch.tensor([[1.0], [1.0], [-1.0]]))
        module[0].bias.copy_(torch.tensor([0.0, -0.5, -0.5]))
        module[2].weight.fill_(1.0)
        module[2].bias.zero_()
    return Problem.of(module, -torch.ones(1), torch.ones(1))


def test_splits_that_contradict_each_other() -> None:
    problem = hinge()
    (name,) = problem.executor.graph.bounded
    always = ([[0.0]], [-1.0])  # the row holds everywhere
    assert problem.decide([(name, 0, 1), (name, 1, 1), (name, 2, 1)], *always).closed
    assert problem.decide([(name, 0, -1), (name, 1, 1), (name, 2, -1)], *always).closed
    fine = problem.decide([(name, 0, 1), (name, 1, 1), (name, 2, -1)], *always)
    assert not fine.closed
    assert fine.point is not None
    assert fine.reason == ""
    assert 0.5 - 1e-6 <= fine.point[0] <= 1


def test_both_signs_on_one_neuron_leave_its_zero() -> None:
    problem = hinge()
    (name,) = problem.executor.graph.bounded
    splits = [(name, 0, 1), (name, 0, -1), (name, 1, -1), (name, 2, -1)]
    result = problem.decide(splits, [[1.0]], [0.0])
    assert not result.closed
    assert result.point == pytest.approx([0.0], abs=1e-6)
    assert problem.decide(splits, [[1.0]], [1e-3]).closed


def test_a_contradictory_box_closes_by_its_splits_only() -> None:
    problem = hinge()
    (name,) = problem.executor.graph.bounded
    splits = [(name, 0, 1), (name, 1, -1), (name, 2, -1)]
    boxes = problem.split(splits)
    boxes[name][1].view(-1)[0] = -0.25  # someone claims x <= -0.25, which no split says
    rows = Dense(torch.ones(1, 1).double(), torch.zeros(1).double())
    result = decide_leaf(problem.executor, problem.region, boxes, splits, rows, clock=Clock())
    assert not result.closed


def test_no_rows_ask_for_any_point_of_the_leaf() -> None:
    problem = hinge()
    (name,) = problem.executor.graph.bounded
    rows = Dense(torch.zeros(0, 1).double(), torch.zeros(0).double())
    for signs, closed in (((1, 1, -1), False), ((1, 1, 1), True)):
        splits = [(name, i, sign) for i, sign in enumerate(signs)]
        result = decide_leaf(problem.executor, problem.region, problem.split(splits), splits, rows, clock=Clock())
        assert result.closed == closed
        assert (result.point is not None) == (not closed)


@pytest.mark.parametrize("value", [0.0, 0.3])
def test_degenerate_boxes(value: float) -> None:
    problem = Problem.of(identity(2), torch.full((2,), value), torch.full((2,), value))
    at = float(np.float32(value))
    assert problem.decide([], [[1.0, 0.0]], [-at + 1e-3]).closed
    result = problem.decide([], [[1.0, 0.0]], [-at])
    assert not result.closed
    assert result.point == pytest.approx([at, at], abs=0)
    # half of the inputs fixed, and rows that only combine to a proof
    mixed = Problem.of(identity(2), torch.tensor([-1.0, value]), torch.tensor([1.0, value]))
    assert mixed.decide([], [[1.0, 1.0], [-1.0, 0.0]], [1e-3 - at, 0.0]).closed
    assert not mixed.decide([], [[1.0, 1.0], [-1.0, 0.0]], [-1e-3 - at, 0.0]).closed


# --- what must stay open -------------------------------------------------------------------------------------------


def test_touching_is_not_closed() -> None:
    problem = Problem.of(identity(1), torch.zeros(1), torch.ones(1))
    result = problem.decide([], [[1.0]], [0.0])
    assert not result.closed
    assert result.point == pytest.approx([0.0], abs=1e-9)
    assert not problem.decide([], [[1.0]], [1e-12]).closed  # true, but less than the allowance
    assert problem.decide([], [[1.0]], [1e-6]).closed


class Branches(nn.Module):
    """`left * x + sign * right * x + 1`: two branches that may cancel."""

    def __init__(self, left: float, right: float, sign: int) -> None:
        super().__init__()
        self.left, self.right, self.sign = (nn.Linear(1, 1).double(), nn.Linear(1, 1).double(), sign)
        with torch.no_grad():
            for layer, weight, bias in ((self.left, left, 1.0), (self.right, right, 0.0)):
                layer.weight.fill_(weight)
                layer.bias.fill_(bias)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.left(x), self.right(x)
        return left + right if self.sign > 0 else left - right


BIG = 2.0**40  # times the allowance this is more than the output's margin of 1


@pytest.mark.parametrize("big", [1.0, BIG])
@pytest.mark.parametrize("sign", [1, -1])
def test_cancellation_between_branches_is_allowed_for(big: float, sign: int) -> None:
    """The coefficient on the input is zero, but was made of large numbers that cancel."""
    problem = Problem.of(Branches(big, -sign * big, sign), torch.ones(1), 2 * torch.ones(1))
    assert problem.decide([], [[1.0]], [0.0]).closed == (big == 1)


@pytest.mark.parametrize("big", [1.0, BIG])
def test_cancellation_behind_a_relu_is_allowed_for(big: float) -> None:
    """The large numbers meet before a ReLU whose own bounds are small."""
    module = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 1), nn.ReLU(), nn.Linear(1, 1)).double()
    with torch.no_grad():
        for layer, weight, bias in ((0, [[1.0], [1.0]], 0.0), (2, [[big, -big]], 1.0), (4, [[1.0]], 0.0)):
            module[layer].weight.copy_(torch.tensor(weight))
            module[layer].bias.fill_(bias)
    problem = Problem.of(module, torch.ones(1), 2 * torch.ones(1))
    middle = problem.executor.graph.bounded[1]
    shape = problem.boxes[middle][0].shape
    problem.boxes[middle] = (torch.full(shape, 0.5).double(), torch.full(shape, 2.0).double())
    assert problem.decide([], [[1.0]], [0.0]).closed == (big == 1)


def test_undecided_neurons_and_other_nonlinearities_stay_open() -> None:
    problem = hinge()
    (name,) = problem.executor.graph.bounded
    result = problem.decide([(name, 0, 1)], [[1.0]], [5.0])
    assert not result.closed
    assert "decide every ReLU" in result.reason
    smooth = Problem.of(nn.Sequential(nn.Linear(1, 1), nn.Sigmoid()), torch.zeros(1), torch.ones(1))
    result = smooth.decide([], [[1.0]], [5.0])
    assert not result.closed
    assert "ReLU" in result.reason


def test_numbers_that_are_not_finite_stay_open() -> None:
    problem = Problem.of(identity(1), torch.zeros(1), torch.ones(1))
    for row, constant in (([[np.nan]], [1.0]), ([[1.0]], [np.inf]), ([[1.0]], [np.nan])):
        assert not problem.decide([], row, constant).closed
    boxes = [(np.inf, np.inf), (0.0, np.inf), (np.nan, 1.0), (1.0, 0.0)]
    for low, high in boxes:
        region = BoxRegion(torch.tensor([[low]]).double(), torch.tensor([[high]]).double())
        rows = Dense(torch.ones(1, 1).double(), torch.ones(1).double())
        assert not decide_leaf(problem.executor, region, {}, [], rows, clock=Clock()).closed


def test_an_unusable_executor_or_region_is_refused() -> None:
    problem = hinge()
    rows = Dense(torch.ones(1, 1).double())
    single = Executor(problem.executor.graph, dtype=torch.float32)
    with pytest.raises(TypeError, match="float64"):
        decide_leaf(single, problem.region, problem.boxes, [], rows, clock=Clock())
    two = BoxRegion(problem.region.lower.expand(2, -1), problem.region.upper.expand(2, -1))
    with pytest.raises(TypeError, match="2"):
        decide_leaf(problem.executor, two, problem.boxes, [], rows, clock=Clock())
    with pytest.raises(TypeError, match="2"):
        certified_combination(torch.ones(1, 1), torch.ones(1), two)


# --- a solver that lies --------------------------------------------------------------------------------------------


def conjunction() -> Callable[[float], LeafResult]:
    """x >= 0 and x <= -margin on [-1, 1]: closed for a positive margin, by multipliers (1, 1)."""
    problem = Problem.of(identity(1), -torch.ones(1), torch.ones(1))
    return lambda margin: problem.decide([], [[1.0], [-1.0]], [margin, 0.0])


@pytest.fixture
def lie(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any], None]], None]:
    """Install a change to every answer of the solver."""
    honest = scipy.optimize.linprog

    def install(change: Callable[[Any], None]) -> None:
        def linprog(*args: Any, **kwargs: Any) -> Any:
            answer = honest(*args, **kwargs)
            answer.ineqlin = SimpleNamespace(marginals=np.array(answer.ineqlin.marginals, dtype=float))
            change(answer)
            return answer

        monkeypatch.setattr(scipy.optimize, "linprog", linprog)

    return install


def test_the_honest_solver_closes_and_opens() -> None:
    decide = conjunction()
    assert decide(0.1).closed
    assert not decide(-0.1).closed


MARGINALS = {
    "zero": [0.0, 0.0], "positive": [1.0, 1.0], "one-sided": [-1.0, 0.0], "mixed": [-1.0, 2.0], "nan": [np.nan, -1.0],
    "infinite": [-np.inf, -1.0], "huge": [-1e308, -1e308],
}  # fmt: skip


@pytest.mark.parametrize("name", MARGINALS)
def test_wrong_multipliers_never_close(lie: Callable[..., None], name: str) -> None:
    decide = conjunction()

    def change(answer: Any) -> None:
        answer.ineqlin.marginals = np.array(MARGINALS[name])
        answer.fun = 1.0

    lie(change)
    assert not decide(-0.1).closed
    if name != "huge":  # right up to scale, and overflows
        result = decide(0.1)
        assert not result.closed
        assert result.point is None
        assert result.reason


def test_random_multipliers_never_close_a_leaf_with_an_unsafe_point(lie: Callable[..., None]) -> None:
    module = mlp([2, 4, 2], 3)
    problem = Problem.of(module, -torch.ones(2), torch.ones(2))
    rng = np.random.default_rng(0)

    def change(answer: Any) -> None:
        size = len(answer.ineqlin.marginals)
        answer.ineqlin.marginals = rng.normal(size=size) * 10.0 ** rng.uniform(-8, 8, size)

    lie(change)
    for x in torch.as_tensor(rng.uniform(-1, 1, (200, 2))):
        y = problem.outputs(x[None])[0]
        assert not problem.decide(problem.pattern(x), np.eye(2), -y).closed


@pytest.mark.parametrize("status", [1, 2, 3, 4])
def test_a_status_is_no_proof(lie: Callable[..., None], status: int) -> None:
    problem = hinge()
    (name,) = problem.executor.graph.bounded
    splits = [(name, 0, 1), (name, 1, 1), (name, 2, -1)]
    asked = []

    def change(answer: Any) -> None:
        asked.append(status)
        answer.status, answer.x, answer.message = status, None, "a lie"

    lie(change)
    result = problem.decide(splits, [[0.0]], [-1.0])
    assert not result.closed
    assert result.point is None
    assert result.reason
    assert len(asked) == (1 if status == 1 else 2)  # only a solver that has time left is asked for a certificate


def test_a_false_claim_of_infeasibility_needs_a_certificate(lie: Callable[..., None]) -> None:
    problem = hinge()
    (name,) = problem.executor.graph.bounded
    count = itertools.count()

    def change(answer: Any) -> None:
        if next(count) == 0:
            answer.status, answer.x = 2, None

    lie(change)
    assert not problem.decide([(name, 0, 1), (name, 1, 1), (name, 2, -1)], [[0.0]], [-1.0]).closed


def test_a_false_point_is_not_returned(lie: Callable[..., None]) -> None:
    problem = Problem.of(identity(1), -torch.ones(1), torch.ones(1))

    def change(answer: Any) -> None:
        answer.x = np.ones_like(answer.x)

    lie(change)
    result = problem.decide([], [[1.0]], [0.5])
    assert not result.closed
    assert result.point is None
    assert result.reason


def test_out_of_time(lie: Callable[..., None]) -> None:
    problem = Problem.of(identity(1), -torch.ones(1), torch.ones(1))
    result = problem.decide([], [[1.0]], [5.0], Clock(timeout=0.0))
    assert not result.closed
    assert result.reason == "out of time"
    limits = []
    honest = scipy.optimize.linprog

    def linprog(*args: Any, **kwargs: Any) -> Any:
        limits.append(kwargs["options"]["time_limit"])
        return honest(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scipy.optimize, "linprog", linprog)
        problem.decide([], [[1.0]], [0.5], Clock(timeout=30.0))
    assert 0 < limits[0] <= 30


# --- convex combinations of rows -----------------------------------------------------------------------------------


def box(n: int) -> BoxRegion:
    return BoxRegion(-torch.ones(1, n).double(), torch.ones(1, n).double())


def test_a_combination_by_hand() -> None:
    A = torch.tensor([[1.0], [-1.0]]).double()
    assert certified_combination(A, torch.tensor([0.2, 0.0]).double(), box(1)) == pytest.approx(0.1, abs=1e-7)
    assert certified_combination(A, torch.tensor([-0.2, 0.0]).double(), box(1)) == pytest.approx(-0.1, abs=1e-7)
    assert certified_combination(A[:1], torch.tensor([2.0]).double(), box(1)) == pytest.approx(1.0, abs=1e-7)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 5))
def test_the_best_combination(seed: int, n: int, m: int) -> None:
    rng = np.random.default_rng(seed)
    A, c = rng.normal(size=(m, n)), rng.normal(size=m)
    found = certified_combination(A, c, box(n))
    weights = np.concatenate([np.eye(m), rng.dirichlet(np.full(m, 0.5), 2000)])
    values = weights @ c - np.abs(weights @ A).sum(1)
    assert found >= values.max() - 1e-6
    # weak duality: no proved bound lies above the rows' maximum at any point
    points = np.concatenate([rng.uniform(-1, 1, (2000, n)), np.sign(rng.normal(size=(200, n)))])
    assert found <= (points @ A.T + c).max(1).min()


@pytest.mark.parametrize(("weights", "expected"), [([3.0, 1.0], 0.15 - 0.5), ([1.0, 99.0], -0.8), ([0.0, 0.0], -0.8)])
def test_a_combination_survives_a_lying_solver(lie: Callable[..., None], weights: list[float], expected: float) -> None:
    A, c = np.array([[1.0], [-1.0]]), np.array([0.2, 0.0])

    def change(answer: Any) -> None:
        answer.ineqlin.marginals = -np.array(weights)

    lie(change)
    # the bound of these weights or of the better row alone
    assert certified_combination(A, c, box(1)) == pytest.approx(expected, abs=1e-7)


def test_rows_in_single_precision_get_their_own_allowance() -> None:
    A, c = torch.tensor([[1.0], [-1.0]]), torch.tensor([1e-7, 0.0])
    assert certified_combination(A, c, box(1)) < 0
    assert certified_combination(A.double(), c.double(), box(1)) > 0


def test_nothing_proved_without_numbers() -> None:
    assert certified_combination(np.array([[np.nan]]), np.array([1.0]), box(1)) == -np.inf
    assert certified_combination(np.zeros((0, 1)), np.zeros(0), box(1)) == -np.inf
    A, c = torch.tensor([[1.0], [-1.0]]).double(), torch.tensor([0.2, 0.0]).double()
    late = certified_combination(A, c, box(1), clock=Clock(timeout=0.0))
    assert late == pytest.approx(-0.8, abs=1e-7)  # the better row alone


def test_time_that_ends_before_the_solver_starts(lie: Callable[..., None]) -> None:
    """The clock is read again for the solver's limit, which must be positive."""

    class Jumping(Clock):
        @property
        def left(self) -> float:
            readings.append(next(values))
            return readings[-1]

    readings: list[float] = []
    values = itertools.chain([1.0, 1.0], itertools.repeat(-1.0))
    problem = Problem.of(identity(1), -torch.ones(1), torch.ones(1))
    result = problem.decide([], [[1.0]], [0.5], Jumping(timeout=1.0))
    assert len(readings) > 2
    assert not result.closed
