"""Input and activation splits: children cover their parent, bounds hold and never fall, NaN closes nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from parverify.bab.activation import ActivationSpace
from parverify.bab.batches import BatchSize
from parverify.bab.domains import Domains, join
from parverify.bab.driver import search
from parverify.bab.input import InputSpace
from parverify.bounds.region import BoxRegion
from parverify.clock import Clock
from parverify.errors import OutOfTimeError
from parverify.frontend.query import Disjunct, Query
from parverify.program.executor import Executor
from parverify.progress import NullProgress
from tests.bab.cases import ZOO, activation_space, contains, input_space, make, problem_of, random_case, roots


def points(count: int, seed: int, n_in: int = 2) -> np.ndarray:
    """float32 points of [-1, 1]^n, as float64."""
    return np.random.default_rng(seed).uniform(-1, 1, (count, n_in)).astype(np.float32).astype(np.float64)


def residuals(space: InputSpace | ActivationSpace, x: np.ndarray, part: int) -> np.ndarray:
    """(B, R) the rows' values `C y - d` in double precision."""
    exact = Executor(space.graph, dtype=torch.float64)
    y = exact.evaluate(torch.from_numpy(x)).flatten(1).numpy()
    return y @ space.problem.C[part].double().numpy().T - space.problem.d[part].double().numpy()


def hard(name: str, seed: int, **shape: Any) -> Any:
    """A `sat` problem: roots can't be closed."""
    module = make(name, 2, seed)
    return problem_of(module, random_case(module, 2, sat=True, seed=seed, **shape).query)


# --- both spaces ---------------------------------------------------------------------------------------------------


def grow(space: InputSpace | ActivationSpace, rounds: int, children: int) -> list[tuple[Domains, Domains]]:
    """(parents, open children) of some rounds of splitting everything."""
    domains, out = roots(space, [0]), []
    for _ in range(rounds):
        made, _ = space.split(domains, children)
        if not len(made):
            break
        domains_after = space.bound(made).domains
        out.append((domains, domains_after))
        if not len(domains_after):
            break
        domains = domains_after.slice(0, 6)
    return out


@pytest.mark.parametrize("kind", ["input", "activation"])
@pytest.mark.parametrize("name", ZOO)
def test_children_cover_their_parent_and_their_bounds_hold(name: str, kind: str) -> None:
    problem = hard(name, 3, rows=2)
    space = input_space(problem) if kind == "input" else activation_space(problem)
    x = points(300, 0)
    value = residuals(space, x, 0) - problem.need[0].double().numpy()
    domains, rounds = roots(space, [0]), 0
    for children in (2, 8, 8, 4):
        made, stuck = space.split(domains, children)
        everyone = join([part for part in (made, stuck) if len(part)], space.pad)
        before = torch.stack([contains(space, domains, point) for point in x])
        after = torch.stack([contains(space, everyone, point) for point in x])
        assert torch.equal(before.any(1), after.any(1))
        inner = torch.stack([contains(space, everyone, point, slack=-1e-9) for point in x])
        assert (inner.sum(1) <= before.sum(1)).all()  # a point off the cuts is in one child of its parent
        if not len(made):
            break
        bounded = space.bound(made)
        # A domain's bound is the best over its rows, so no point has all rows below it.
        low = bounded.domains["lower"].double()
        for k, point in enumerate(x):
            inside = contains(space, bounded.domains, point)
            assert (low[inside] <= value[k].max() + 1e-9).all()
            if after[k].any() and (value[k] < 0).all() and contains(space, made, point).any():
                assert inside.any(), "a domain with an unsafe point was closed"
        rounds += 1
        if not len(bounded.domains):
            break
        domains = bounded.domains.slice(0, 5)
    assert rounds >= 2


@pytest.mark.parametrize("kind", ["input", "activation"])
@pytest.mark.parametrize("name", ["relu", "tanh", "products"])
def test_no_child_is_worse_than_its_parent(name: str, kind: str) -> None:
    problem = hard(name, 4)
    space = input_space(problem) if kind == "input" else activation_space(problem)
    domains = space.bound(roots(space, [0])).domains
    for _ in range(3):
        assert len(domains)
        single = domains.slice(0, 1)
        made, _ = space.split(single, 2)
        children = space.bound(made).domains
        assert (children["lower"] >= single["lower"]).all()
        domains = children
        if not len(domains):
            break


@pytest.mark.parametrize("kind", ["input", "activation"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_none_close_nothing(kind: str, number: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least number that could close the domain, were it one."""
    problem = hard("relu", 0, rows=2)
    space = input_space(problem) if kind == "input" else activation_space(problem)
    made = roots(space, [0])
    honest = problem.executor.sweep

    def sweep(*args: Any, **kwargs: Any) -> Any:
        swept = honest(*args, **kwargs)
        bad = torch.where(swept.lower.isnan() | (number == torch.inf), -torch.inf, swept.lower * 0 + number)
        return replace(swept, lower=bad)

    monkeypatch.setattr(problem.executor, "sweep", sweep)
    bounded = space.bound(made)
    assert bounded.closed == 0
    assert len(bounded.domains) == 1
    _, stuck = space.split(bounded.domains, 4)
    if len(stuck):
        closed, _, reasons = space.leaf(stuck)
        assert closed == 0
        assert all(reasons)


@pytest.mark.parametrize("kind", ["input", "activation"])
def test_bounds_that_overflow_close_nothing(kind: str) -> None:
    """Weights whose products are beyond float32: y = 1e60 relu(x) - 1e60 relu(x) + small in exact arithmetic."""
    module = make("relu", 2, 0)
    with torch.no_grad():
        for layer in (module[2], module[4]):
            layer.weight.mul_(1e30)
    part = Disjunct(-np.ones(2), np.ones(2), np.eye(2)[:1], np.array([-1.0]), np.array([False]))
    space = (
        input_space(problem_of(module, Query(2, 2, (part,))))
        if kind == "input"
        else activation_space(problem_of(module, Query(2, 2, (part,))))
    )
    domains = roots(space, [0])
    for _ in range(3):
        bounded = space.bound(domains)
        assert bounded.closed == 0
        domains, _ = space.split(bounded.domains, 4)
        if not len(domains):
            break


@pytest.mark.parametrize("kind", ["input", "activation"])
def test_a_disjunct_without_rows_is_never_closed(kind: str) -> None:
    module = make("relu", 2, 0)
    query = Query(2, 2, (Disjunct(-np.ones(2), np.ones(2), np.zeros((0, 2)), np.zeros(0), np.zeros(0, dtype=bool)),))
    space = input_space(problem_of(module, query)) if kind == "input" else activation_space(problem_of(module, query))
    assert space.bound(roots(space, [0])).closed == 0


def test_strict_rows_close_at_equality() -> None:
    module = make("relu", 2, 0)
    rows = {
        strict: Disjunct(-np.ones(2), np.ones(2), np.eye(2)[:1], np.zeros(1), np.array([strict]))
        for strict in (True, False)
    }
    problem = problem_of(module, Query(2, 2, (rows[True], rows[False])))
    both = torch.tensor([0, 1])
    assert problem.closed(torch.zeros(2, 1), both).tolist() == [True, False]
    assert problem.closed(torch.full((2, 1), 1e-30), both).tolist() == [True, True]
    assert problem.closed(torch.full((2, 1), -1e-30), both).tolist() == [False, False]
    assert problem.closed(torch.full((2, 1), torch.nan), both).tolist() == [False, False]


@pytest.mark.parametrize("kind", ["input", "activation"])
def test_the_clock_stops_bounding(kind: str) -> None:
    problem = hard("relu", 0)
    space = input_space(problem) if kind == "input" else activation_space(problem)
    made = roots(space, [0])
    space.clock = Clock(timeout=0.0)
    with pytest.raises(OutOfTimeError):
        space.bound(made)


@pytest.mark.parametrize("batch", [1, 2, 3, 64])
@pytest.mark.parametrize("kind", ["input", "activation"])
def test_memory_that_ends_changes_no_verdict(kind: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for sat in (True, False):
        module = make("relu", 2, 8)
        problem = problem_of(module, random_case(module, 2, sat=sat, seed=8, rows=2).query)
        space = input_space(problem) if kind == "input" else activation_space(problem)
        honest, calls = space.bound, [0]

        def bound(domains: Domains, honest: Any = honest, calls: list[int] = calls) -> Any:
            calls[0] += 1
            if calls[0] % 3 == 1 and len(domains) > 2:
                raise MemoryError
            return honest(domains)

        monkeypatch.setattr(space, "bound", bound)
        state, pool = search(
            space,
            roots(space, [0]),
            batch=BatchSize(batch, 64),
            memory=0,
            clock=Clock(),
            progress=NullProgress(),
            pause=lambda state: state.batches >= 60,
        )
        pool.close()
        if sat:
            assert state.open or state.unresolved
        else:
            assert state.finished
            assert not state.unresolved


# --- input boxes ---------------------------------------------------------------------------------------------------


def volume(domains: Domains) -> float:
    return float((domains["high"].double() - domains["low"].double()).prod(1).sum())


@pytest.mark.parametrize("children", [2, 3, 8, 64, 1024])
def test_halves_tile_the_box(children: int) -> None:
    space = input_space(hard("relu", 1))
    whole = roots(space, [0])
    domains = whole
    for _ in range(3):
        domains, stuck = space.split(domains, children)
        assert not len(stuck)
        assert volume(domains) == pytest.approx(volume(whole), rel=1e-12)
        for point in points(50, children):
            assert contains(space, domains, point).any()
        # ends meet: every end inside the box is an end of a neighbour too
        for dim in range(2):
            low, high = set(domains["low"][:, dim].tolist()), set(domains["high"][:, dim].tolist())
            assert low - {-1.0} == high - {1.0}
    assert (domains["low"] < domains["high"]).all()


@pytest.mark.parametrize("name", ["relu", "affine"])
def test_what_halves_will_cost_is_known_of_every_box(name: str) -> None:
    module = torch.nn.Linear(2, 2).requires_grad_(False) if name == "affine" else make(name, 2, 1)
    everything = Disjunct(-np.ones(2), np.ones(2), np.ones((1, 2)), np.array([1e3]), np.array([False]))
    space = input_space(problem_of(module, Query(2, 2, (everything,))))
    whole = roots(space, [0])
    made, _ = space.split(whole, 8)
    left = space.bound(made).domains
    assert left.cost.shape == (8,)
    assert bool((left.cost <= whole.cost).all())
    assert bool((left.cost > 0).any()) == (name != "affine")
    alike = {name: (low[:1], high[:1]) for name, (low, high) in space_boxes(space, left).items()}
    assert space._cost(alike, left["lower"]).tolist() == [float(left.cost[0])] * 8  # a layer that depends on no input


def space_boxes(space: InputSpace, domains: Domains) -> dict[str, tuple[Tensor, Tensor]]:
    return {name: (domains[f"box/{name}/low"], domains[f"box/{name}/high"]) for name in space.graph.bounded}


def test_a_box_is_halved_down_to_neighbours_and_then_stuck() -> None:
    low = np.float32(0.3)
    high = low
    for _ in range(4):
        high = np.nextafter(high, np.float32(1))
    query = Query(
        2,
        2,
        (
            Disjunct(
                np.array([low, 0.5], float),
                np.array([high, 0.5], float),
                np.eye(2),
                np.zeros(2),
                np.zeros(2, dtype=bool),
            ),
        ),
    )
    space = input_space(problem_of(make("relu", 2, 0), query))
    stuck, domains = [], roots(space, [0])
    while len(domains):
        domains, rest = space.split(domains, 2)
        if len(rest):
            stuck.append(rest)
    found = join(stuck)
    order = found["low"][:, 0].argsort()
    ends = found["low"][order, 0], found["high"][order, 0]
    assert len(found) == 4
    assert ends[0][0] == low
    assert ends[1][-1] == high
    assert torch.equal(ends[0][1:], ends[1][:-1])
    assert (found["low"][:, 1] == 0.5).all()
    closed, witness, reasons = space.leaf(found)
    assert (closed, witness, len(reasons)) == (0, None, 4)


def test_boxes_are_rounded_outward() -> None:
    query = Query(
        2, 2, (Disjunct(np.array([0.1, 0.1]), np.array([0.1, 0.3]), np.eye(2), np.zeros(2), np.zeros(2, dtype=bool)),)
    )
    domains = roots(input_space(problem_of(make("relu", 2, 0), query)), [0])
    assert (domains["low"].double() <= 0.1).all()
    assert (domains["high"].double() >= torch.tensor([0.1, 0.3]).double()).all()


# --- split neurons -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["relu", "tanh", "residual"])
def test_siblings_differ_in_signs_only(name: str) -> None:
    space = activation_space(hard(name, 5), iterations=6)
    parent = roots(space, [0])
    for children, depth in ((2, 1), (8, 3)):
        made, _ = space.split(parent, children)
        assert len(made) == 2**depth
        for column in ("node", "index", "point"):
            assert (made[column] == made[column][0]).all()
        assert len({tuple(row) for row in made["sign"].tolist()}) == len(made)
        assert (made["sign"].abs() == 1).all()
        assert (made["beta"] == 0).all()


def test_clipped_boxes_are_cut_at_their_points() -> None:
    space = activation_space(hard("tanh", 6), iterations=6)
    made, _ = space.split(roots(space, [0]), 8)
    boxes = space.clipped(made)
    for d in range(len(made)):
        for s in range(made["node"].shape[1]):
            name, index = space.names[int(made["node"][d, s])], int(made["index"][d, s])
            point, sign = float(made["point"][d, s]), float(made["sign"][d, s])
            low, high = float(boxes[name][0][d, index]), float(boxes[name][1][d, index])
            assert low <= high
            assert low >= point if sign > 0 else high <= point
    for name in space.names:
        low, high = space.boxes[name]
        assert (boxes[name][0] >= low).all()
        assert (boxes[name][1] <= high).all()


def test_a_batch_bounds_like_its_domains_alone() -> None:
    space = activation_space(hard("relu", 7, rows=2))
    made, _ = space.split(roots(space, [0]), 8)
    together = space.bound(made)
    alone = [space.bound(made.slice(i, i + 1)) for i in range(len(made))]
    assert together.closed == sum(one.closed for one in alone)
    lower = torch.cat([one.domains["lower"] for one in alone])
    torch.testing.assert_close(together.domains["lower"], lower, rtol=1e-3, atol=1e-4)


def test_the_best_row_of_a_conjunction_may_have_nothing_to_split() -> None:
    """Row 0 reads an affine output, row 1 a bent one: splits must go on for row 1 until leaves are affine."""

    class Half(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bent = make("relu", 2, 9)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([x.sum(1, keepdim=True), self.bent(x)[:, :1]], 1)

    module = Half()
    x = torch.from_numpy(points(20000, 1)).float()
    y = module(x)
    best = float(y[y[:, 0] <= 0.2, 1].min())
    part = Disjunct(-np.ones(2), np.ones(2), np.eye(2), np.array([0.2, best - 0.05]), np.zeros(2, dtype=bool))
    space = activation_space(problem_of(module, Query(2, 2, (part,))))
    state, _ = search(
        space, roots(space, [0]), batch=BatchSize(16, 64), memory=1 << 30, clock=Clock(60), progress=NullProgress()
    )
    assert state.finished
    assert not state.unresolved


@pytest.mark.parametrize("slopes", [(1.0, 0.0), (0.0, -3.0), (1e-9, 1.0), (0.0, 0.0)])
def test_boxes_become_small_in_every_dimension(slopes: tuple[float, float]) -> None:
    """However flat the rows are: what relaxations cost follows from the width, too."""
    space = input_space(hard("relu", 1))
    domains = roots(space, [0])
    whole = domains["high"] - domains["low"]
    for _ in range(40):
        region = BoxRegion(domains["low"], domains["high"])
        A = torch.tensor([slopes], dtype=whole.dtype)
        score = space._score(A, domains["part"], region)
        domains = space._halve(domains.with_columns(score=score)).slice(0, 1)
    share = (domains["high"] - domains["low"]) / whole
    assert share.prod() == pytest.approx(2.0**-40, rel=1e-3)
    assert 1e-4 < share[0, 0] / share[0, 1] < 1e4


def test_boxes_that_are_flat_themselves_are_never_halved_there() -> None:
    space = input_space(hard("relu", 1))
    domains = roots(space, [0])
    flat = domains.with_columns(high=torch.stack([domains["low"][:, 0], domains["high"][:, 1]], 1))
    A = torch.ones(1, 2, dtype=flat["low"].dtype)
    score = space._score(A, flat["part"], BoxRegion(flat["low"], flat["high"]))
    assert score[0, 0] == 0 < score[0, 1]


@pytest.mark.parametrize(("iterations", "levels"), [(1, 1), (2, 1), (4, 2), (7, 3), (30, 5)])
def test_a_batch_has_no_more_splits_than_its_steps_can_follow(iterations: int, levels: int) -> None:
    space = activation_space(hard("relu", 1), iterations=iterations)
    made, stuck = space.split(roots(space, [0]), 64)
    assert not len(stuck)
    assert len(made) == 2**levels
    assert set(made["depth"].tolist()) == {levels}
