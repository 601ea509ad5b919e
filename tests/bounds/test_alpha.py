"""The objective that is optimized: its gradient against differences, and split constraints against samples."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

from parverify.bounds.alpha import Adam, AlphaOptions, ascend, flatten, optimize, start_alphas
from parverify.bounds.layers import BoundOptions, bound_layers
from parverify.bounds.region import BoxRegion
from parverify.clock import Clock
from parverify.errors import OutOfTimeError
from parverify.graph.trace import trace
from parverify.ops.relaxation import Alpha
from parverify.program.executor import Executor
from parverify.program.rows import Dense, both_signs
from parverify.program.sweep import Splits
from tests.bounds.zoo import NETWORKS, made, random_box, sampled, values

RELUS = ["mlp", "residual", "convolutional", "leaky_relu", "max", "clip"]
SMOOTH = ["sigmoid", "tanh", "product", "softmax", "block", "gelu", "sin", "softplus", "division"]


class Problem:
    """A network on two domains with rows for all its outputs."""

    def __init__(self, name: str, seed: int = 0, width: float = 0.4) -> None:
        self.graph = made(name, seed)
        self.region = random_box(self.graph, 2, width, seed + 1, torch.float64)
        self.executor = Executor(self.graph, dtype=torch.float64)
        size = self.graph[self.graph.output].numel
        self.owner = torch.arange(2).repeat_interleave(size)
        self.rows = both_signs(torch.arange(size).repeat(2), self.owner, torch.float64)
        with torch.no_grad():
            self.found = bound_layers(self.executor, self.region, BoundOptions("crown"))

    def alphas(self, seed: int) -> dict[str, Alpha]:
        """Random alphas in (0, 1)."""
        generator = torch.Generator().manual_seed(seed)
        made = start_alphas(self.executor, self.graph.output, self.rows, self.found.relaxed, 2)
        return {
            name: {
                role: 0.05 + 0.9 * torch.rand(a.shape, generator=generator, dtype=a.dtype) for role, a in alpha.items()
            }
            for name, alpha in made.items()
        }

    def bound(self, alphas: dict[str, Alpha], splits: dict[str, Splits] | None = None) -> Tensor:
        swept = self.executor.sweep(self.graph.output, self.rows, self.found.relaxed, self.region, alphas=alphas,
                                    splits=splits)  # fmt: skip
        return swept.lower

    def truth(self, x: Tensor) -> Tensor:
        """(N, count) values of the rows at points (2, count, n)."""
        out = values(self.graph, x)[self.graph.output].flatten(2)
        return out[self.rows.owner, :, self.rows.index] * self.rows.sign[:, None]


def packed(alphas: dict[str, Alpha], leaves: tuple[Tensor, ...]) -> dict[str, Alpha]:
    rest = list(leaves)
    return {name: {role: rest.pop(0) for role in alpha} for name, alpha in alphas.items()}


@pytest.mark.parametrize("name", RELUS + SMOOTH)
def test_gradient_of_alpha_equals_differences(name: str) -> None:
    problem = Problem(name, 3, 1.0 if name in RELUS else 0.4)
    alphas = problem.alphas(1)
    leaves = tuple(leaf.requires_grad_() for leaf in flatten(alphas))
    assert leaves
    assert torch.autograd.gradcheck(lambda *leaves: problem.bound(packed(alphas, leaves)), leaves, eps=1e-7, atol=1e-5,
                                    rtol=1e-4, fast_mode=name == "block")  # fmt: skip


@pytest.mark.parametrize("name", list(NETWORKS))
def test_every_alpha_is_sound(name: str) -> None:
    for seed in range(3):
        problem = Problem(name, seed)
        truth = problem.truth(sampled(problem.region, 1000)).amin(1)
        ends = problem.alphas(seed)
        for alphas in (
            problem.alphas(seed),
            {n: {r: a.round() for r, a in alpha.items()} for n, alpha in ends.items()},
        ):
            with torch.no_grad():
                bound = problem.bound(alphas)
            assert (bound <= truth + 1e-11 * (1 + truth.abs())).all()


def constraints(
    problem: Problem, x: Tensor, generator: torch.Generator, *, zero: bool
) -> tuple[dict[str, Splits], Tensor]:
    """Random constraints that the first point of each domain satisfies, and which points satisfy them, (2, count)."""
    found = values(problem.graph, x)
    holds = torch.ones(x.shape[:2], dtype=torch.bool)
    splits = {}
    candidates = [*problem.graph.bounded, *(node.name for node in problem.graph.nonlinear), problem.graph.input.name]
    for name in dict.fromkeys(candidates):
        if torch.rand((), generator=generator) < 0.4:
            continue
        value = found[name].flatten(2)
        index = torch.randint(value.shape[2], (2, 3), generator=generator)
        at = value.gather(2, index[:, None].expand(-1, value.shape[1], -1))  # (2, count, 3)
        sign = torch.where(torch.rand(2, 3, generator=generator) < 0.5, -1.0, 1.0).double()
        margin = 0.3 * torch.rand(2, 3, generator=generator, dtype=torch.float64)
        point = at[:, 0] - sign * margin
        sign[:, 2] = 0  # an unused place
        holds &= ((at - point[:, None]) * sign[:, None] >= 0).all(2)
        beta = torch.rand(len(problem.rows), 3, generator=generator, dtype=torch.float64) * (0.0 if zero else 2.0)
        owner = problem.rows.owner
        splits[name] = Splits(index[owner], sign[owner], point[owner], beta)
    return splits, holds


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(RELUS + SMOOTH), st.integers(0, 10**6))
def test_split_constraints_are_sound(name: str, seed: int) -> None:
    problem = Problem(name, seed % 7)
    generator = torch.Generator().manual_seed(seed)
    x = sampled(problem.region, 1500, seed)
    x[:, 0] = x[:, 5:50].mean(1)  # not a corner
    splits, holds = constraints(problem, x, generator, zero=False)
    truth = torch.where(holds[problem.rows.owner], problem.truth(x), torch.inf).amin(1)
    for alphas in ({}, problem.alphas(seed)):
        with torch.no_grad():
            bound = problem.bound(alphas, splits)
        assert (bound <= truth + 1e-10 * (1 + truth.abs())).all()


def test_multipliers_of_zero_change_nothing() -> None:
    problem = Problem("mlp")
    splits, _ = constraints(problem, sampled(problem.region, 10), torch.Generator().manual_seed(0), zero=True)
    with torch.no_grad():
        torch.testing.assert_close(problem.bound({}, splits), problem.bound({}), rtol=1e-12, atol=1e-12)


def test_gradient_of_multipliers_equals_differences() -> None:
    problem = Problem("residual", 2)
    splits, _ = constraints(problem, sampled(problem.region, 10), torch.Generator().manual_seed(3), zero=False)
    alphas = problem.alphas(2)
    names = list(splits)
    betas = tuple(splits[name].beta.clone().requires_grad_() for name in names)

    def bound(*betas: Tensor) -> Tensor:
        return problem.bound(alphas, {
            name: Splits(splits[name].index, splits[name].sign, splits[name].point, beta)
            for name, beta in zip(names, betas, strict=True)
        })  # fmt: skip

    assert torch.autograd.gradcheck(bound, betas, eps=1e-7, atol=1e-5, rtol=1e-4)


def relu_of_one() -> tuple[Executor, BoxRegion]:
    module = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1)).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(1.0 if parameter.dim() == 2 else 0.0)
    graph = trace(module, (1, 1))
    ends = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
    return Executor(graph, dtype=torch.float64), BoxRegion(ends[:1], ends[1:])


def test_a_split_and_its_multiplier_tighten() -> None:
    """-relu(x) on [-1, 1] is at least -1; where x <= 0 it is 0, and the multiplier 1/2 proves -1/2."""
    executor, region = relu_of_one()
    graph = executor.graph
    found = bound_layers(executor, region, BoundOptions("crown"))
    rows = Dense(torch.full((1, 1, 1), -1.0, dtype=torch.float64))
    name = graph.bounded[0]
    sign, point = torch.full((1, 1), -1.0, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    for beta, expected in ((0.0, -1.0), (0.25, -0.75), (0.5, -0.5), (0.75, -0.75)):
        splits = {name: Splits(torch.zeros(1, 1, dtype=torch.long), sign, point, torch.full_like(point, beta))}
        lower = executor.sweep(graph.output, rows, found.relaxed, region, splits=splits).lower
        assert lower.item() == pytest.approx(expected, abs=1e-12)


def test_ascent_stays_in_range_and_skips_what_is_unknown() -> None:
    leaf = torch.tensor([0.5, 0.5, 0.99, 0.3], dtype=torch.float64, requires_grad=True)
    free = torch.tensor([5.0, 0.001], dtype=torch.float64, requires_grad=True)
    adam = Adam([leaf, free], [0.1, 0.1], 0.9)
    for _ in range(30):
        factor = torch.tensor([1.0, -1.0, 1.0, 0.0], dtype=torch.float64)
        lower = torch.cat([leaf * factor + free.sum() * -1.0, torch.tensor([-torch.inf], dtype=torch.float64)])
        ascend(lower, [leaf, free], adam, frozenset({1}))
    assert leaf.tolist() == pytest.approx([1.0, 0.0, 1.0, 0.3])
    assert (free >= 0).all()
    assert free[0] < 5


def test_the_clock_stops_the_optimizer() -> None:
    problem = Problem("mlp", width=1.0)
    clock = Clock(timeout=0.0)
    with pytest.raises(OutOfTimeError, match="optimizing"):
        optimize(problem.executor, problem.graph.output, problem.rows, problem.found.relaxed, problem.region,
                 options=AlphaOptions(5), clock=clock)  # fmt: skip
