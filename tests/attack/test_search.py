"""Planted witnesses are found, planted illusions are not reported, and the clock is kept."""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
import pytest
import torch
from torch import Tensor

from parverify.attack import WitnessSearch
from parverify.attack.batches import Batches, Budget
from parverify.clock import Clock, StoppableClock
from parverify.errors import ResourceError
from parverify.frontend.query import Query
from tests.attack.helpers import check, disjunct, mlp, search, single, spike

LOW, HIGH = [-1.0, -1.0], [1.0, 1.0]


@pytest.mark.parametrize(
    ("centre", "radius"),
    [([0.31, -0.62], 0.02), ([0.31, -0.62, 0.77], 0.05), ([0.9, 0.9, -0.9, 0.1], 0.2)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_planted_spike(centre: list[float], radius: float, dtype: torch.dtype) -> None:
    net, n = spike(centre, radius), len(centre)
    query = Query(n, 1, (disjunct([-1] * n, [1] * n, [[-1]], [-0.97]),))
    check(search(net, query, dtype=dtype).pgd(restarts=10, steps=50, seconds=10), query, single(net))


def test_spike_among_decoys() -> None:
    real, decoy = spike([0.4, 0.4], 0.05), spike([-0.4, -0.4], 0.5)

    def net(x: Tensor) -> Tensor:
        return real(x) + 0.8 * decoy(x)

    query = Query(2, 1, (disjunct(LOW, HIGH, [[-1]], [-0.95]),))
    check(search(net, query).pgd(restarts=10, steps=50, seconds=10), query, single(net))


def test_gradient_finds_what_sampling_can_not() -> None:
    n = 200
    target = torch.linspace(-0.8, 0.8, n, dtype=torch.float64)

    def net(x: Tensor) -> Tensor:
        return (x - target.to(x.dtype)).abs().amax(-1, keepdim=True)

    query = Query(n, 1, (disjunct([-1] * n, [1] * n, [[1]], [0.15]),))
    finder = search(net, query)
    assert finder.scan(seconds=5) is None
    check(finder.pgd(restarts=12, steps=300, seconds=20), query, single(net))


def test_conjunction_needs_every_row() -> None:
    net = mlp([6, 32, 32, 4], seed=3)
    inside = net(torch.full((1, 6), 0.3, dtype=torch.float64))[0].numpy()
    C_y = np.concatenate([np.eye(4), -np.eye(4)])
    d = np.concatenate([inside + 0.01, -(inside - 0.01)])
    query = Query(6, 4, (disjunct([-1] * 6, [1] * 6, C_y, d),))
    check(search(net, query).pgd(restarts=20, steps=200, seconds=20), query, single(net))


def test_one_among_thousands_of_disjuncts() -> None:
    net = mlp([5, 16, 3], seed=1)
    lower, upper = -np.ones(5), np.ones(5)
    y = net(torch.full((1, 5), 0.9, dtype=torch.float64))[0]
    far = [disjunct(lower, upper, [[1, 0, 0]], [-1e3 - at]) for at in range(3000)]
    far[1234] = disjunct(lower, upper, [[1, 0, 0], [-1, 0, 0]], [float(y[0]) + 0.01, 0.01 - float(y[0])])
    query = Query(5, 3, tuple(far))
    witness = search(net, query).pgd(restarts=3, steps=30, seconds=20)
    check(witness, query, single(net))
    assert far[1234].holds(witness.x, witness.y)


def test_thousands_of_boxes() -> None:
    edges = np.linspace(-1, 1, 2001)
    parts = tuple(disjunct([a, -1], [b, 1], [[-1]], [-0.9]) for a, b in itertools.pairwise(edges))
    net = spike([0.3337, 0.5], 0.3)
    query = Query(2, 1, parts)
    check(search(net, query).pgd(restarts=2, steps=20, seconds=20), query, single(net))


def test_only_the_chosen_disjuncts_are_descended_on() -> None:
    n = 20
    net = mlp([n, 16, 1], seed=5)
    low, high = -np.ones(n), np.ones(n)
    finder = search(net, Query(n, 1, (disjunct(low, high, [[1]], [-1e3]), disjunct(low, high, [[-1]], [1e3]))))
    assert finder.pgd(restarts=2, steps=5, seconds=5) is not None
    # The scan is over; the disjunct that holds everywhere isn't looked at, so nothing is replayed.
    before = finder.replays
    assert finder.pgd(restarts=2, steps=5, seconds=5, disjuncts=[0]) is None
    assert finder.replays == before


def test_empty_boxes_and_no_disjuncts() -> None:
    net = mlp([2, 4, 1], seed=0)
    empty = disjunct([0, 0], [-1, 1], [[1]], [1e3])
    for parts in ((), (empty,)):
        finder = search(net, Query(2, 1, parts))
        assert finder.pgd(restarts=2, steps=5, seconds=1) is None
        assert finder.confirm(np.zeros(2)) is None
        assert finder.try_points(torch.zeros(3, 2)) is None
    query = Query(2, 1, (empty, disjunct([0, 0], [1, 1], [[1]], [1e3])))
    witness = search(net, query).try_points(torch.zeros(2, 2), torch.tensor([0, 1]))
    check(witness, query, single(net))


def test_disjunct_without_rows() -> None:
    net = mlp([2, 4, 1], seed=0)
    query = Query(2, 1, (disjunct(LOW, HIGH, np.zeros((0, 1)), []), disjunct(LOW, HIGH, [[1], [1]], [-1e3, -1e3])))
    check(search(net, query).pgd(restarts=1, steps=1, seconds=5), query, single(net))


def test_rows_on_inputs() -> None:
    def net(x: Tensor) -> Tensor:
        return x.sum(-1, keepdim=True)

    # x0 >= 0.9, x1 <= -0.8 and y <= x0 - 0.895 + x2, where y = x0 + x1 + x2, in 30 dimensions.
    n = 30
    C_x = np.zeros((3, n))
    C_x[0, 0], C_x[1, 1], C_x[2, 0], C_x[2, 2] = -1, 1, -1, -1
    query = Query(n, 1, (disjunct([-1] * n, [1] * n, [[0], [0], [1]], [-0.9, -0.8, -0.895], C_x=C_x),))
    check(search(net, query).pgd(restarts=8, steps=100, seconds=10), query, single(net))


def test_pinned_decimals_in_a_search() -> None:
    net = spike([0.1, 0.4, 0.7], 0.05)
    query = Query(3, 1, (disjunct([0.1, -1, 0.7], [0.1, 1, 0.7], [[-1]], [-0.98]),))
    witness = search(net, query).pgd(restarts=5, steps=50, seconds=5)
    check(witness, query, single(net))
    assert (witness.x[[0, 2]] == [0.1, 0.7]).all()


def test_step_function_with_a_witness_at_zero_only() -> None:
    def net(x: Tensor) -> Tensor:
        return torch.sign(x).abs().sum(-1, keepdim=True)

    n = 12
    query = Query(n, 1, (disjunct([-1] * n, [2.3] * n, [[1]], [0]),))
    check(search(net, query).pgd(restarts=2, steps=5, seconds=5), query, single(net))


def test_dead_gradients_fall_back_on_mutation() -> None:
    n = 30
    pattern = torch.rand(n, generator=torch.Generator().manual_seed(0)) < 0.5

    def net(x: Tensor) -> Tensor:
        return ((x > 0.2) == pattern).to(x.dtype).sum(-1, keepdim=True)

    query = Query(n, 1, (disjunct([-1] * n, [1] * n, [[-1]], [-28]),))
    finder = search(net, query)
    assert finder.scan(seconds=5) is None
    check(finder.pgd(restarts=8, steps=300, seconds=10), query, single(net))


def test_rounding_makes_a_violation_vanish() -> None:
    # In real numbers y = 1e-9 * x > 0 for x > 0; float32 absorbs it into 1, so the runtime never sees y > 1.
    def net(x: Tensor) -> Tensor:
        return (1 + 1e-9 * x[:, :1]) + 0 * x[:, 1:]

    query = Query(2, 1, (disjunct([0.5, 0], [1, 1], [[-1]], [-1], strict=[True]),))
    finder = search(net, query)
    assert finder.pgd(restarts=6, steps=30, seconds=5) is None
    assert finder.replays > 0
    check(search(net, query, replay=single(net, torch.float64)).pgd(restarts=2, steps=10, seconds=5), query,
          single(net, torch.float64))  # fmt: skip


def test_search_goes_on_where_the_runtime_disagrees() -> None:
    # The engine is off by 1e-4, so its first points with margin 0 fail; a lower target gets past them.
    n = 40
    target = torch.linspace(-0.8, 0.8, n, dtype=torch.float64)

    def net(x: Tensor) -> Tensor:
        return (x - target.to(x.dtype)).pow(2).mean(-1, keepdim=True)

    def replay(x: np.ndarray) -> np.ndarray:
        return single(net)(x) + 1e-4

    query = Query(n, 1, (disjunct([-1] * n, [1] * n, [[1]], [1e-3]),))
    finder = search(net, query, replay=replay)
    check(finder.pgd(restarts=12, steps=200, seconds=20), query, replay)
    # Refused 1e6 times too often, it must not replay at every step.
    finder = search(net, query, replay=lambda x: np.array([9.0]))
    assert finder.pgd(restarts=12, steps=200, seconds=20) is None
    assert 0 < finder.replays < 40


def test_hopeless_points_are_not_replayed() -> None:
    def net(x: Tensor) -> Tensor:
        return torch.cat([0 * x, -1 / (0 * x)], 1)

    low, high = [0.5], [1.0]
    # A strict row that is exactly 0 everywhere, and an output that is infinite.
    strict = Query(1, 2, (disjunct(low, high, [[1, 0]], [0], strict=[True]),))
    infinite = Query(1, 2, (disjunct(low, high, [[0, 1]], [0]),))
    for query, forward in ((strict, lambda x: torch.cat([0 * x, 0 * x], 1)), (infinite, net)):
        finder = search(forward, query)
        assert finder.pgd(restarts=4, steps=20, seconds=5) is None
        assert finder.replays == 0
        assert finder.margins[0] == (np.inf if query is infinite else np.finfo(np.float64).tiny)


def test_margins_and_the_points_they_belong_to() -> None:
    net = mlp([3, 8, 2], seed=0)
    low, high = -np.ones(3), np.ones(3)
    parts = (
        disjunct(low, high, [[1, 0], [0, 1]], [1e3, 2e3]),
        disjunct(low, high, [[1, 0]], [1e3], C_x=[[1, 0, 0]]),
        disjunct(high, low, [[1, 0]], [1e3]),
    )
    finder = search(net, Query(3, 2, parts), replay=lambda x: np.full(2, 1e6))
    points = torch.rand(50, 3, generator=torch.Generator().manual_seed(0))
    assert finder.try_points(points) is None
    y = net(points.double()).numpy()
    residuals = [[part.residual(x, out).max() for x, out in zip(points.numpy(), y, strict=True)] for part in parts[:2]]
    np.testing.assert_allclose(finder.margins, [min(residuals[0]), min(residuals[1]), np.inf])
    best = finder._survey.best_x.numpy()
    np.testing.assert_array_equal(best[0], points[int(np.argmin(residuals[0]))])
    np.testing.assert_array_equal(best[1], points[int(np.argmin(residuals[1]))])


def test_networks_with_nan_regions() -> None:
    def net(x: Tensor) -> Tensor:
        return torch.sqrt(x[:, :1]) + x[:, 1:]

    query = Query(2, 1, (disjunct(LOW, HIGH, [[-1]], [-1.9]), disjunct([-1, -1], [-0.5, 1], [[-1]], [9])))
    witness = search(net, query).pgd(restarts=4, steps=50, seconds=5)
    check(witness, query, single(net))


@pytest.mark.parametrize("seed", [0, 7])
def test_one_seed_one_witness(seed: int) -> None:
    net = mlp([10, 32, 32, 3], seed=2)
    low, high = -np.ones(10), np.ones(10)
    query = Query(10, 3, (disjunct(low, high, [[1, 0, 0], [0, 1, 0]], [-0.5, -0.3]),))
    state = torch.random.get_rng_state(), np.random.get_state()[1].tolist()
    first, second = (search(net, query, seed=seed).pgd(restarts=20, steps=50, seconds=60) for _ in range(2))
    check(first, query, single(net))
    assert first.x.tobytes() == second.x.tobytes()
    assert torch.equal(state[0], torch.random.get_rng_state())
    assert state[1] == np.random.get_state()[1].tolist()


def test_try_points_with_and_without_disjuncts() -> None:
    net = mlp([2, 8, 2], seed=4)
    parts = tuple(disjunct([a, -1], [a + 0.5, 1], [[1, 0]], [-1e3 if a < 0.4 else 1e3]) for a in (-1, -0.5, 0, 0.5))
    query = Query(2, 2, parts)
    inside = torch.tensor([[0.7, 0.1], [-0.7, 0.1]])
    check(search(net, query).try_points(inside), query, single(net))
    check(search(net, query).try_points(inside, torch.tensor([3, 0])), query, single(net))
    assert search(net, query).try_points(inside, torch.tensor([0, 0])) is None
    assert search(net, query).try_points(torch.tensor([[-0.7, 0.1]])) is None
    check(search(net, query).try_points(torch.tensor([[9.0, 9.0]])), query, single(net))
    assert search(net, query).try_points(torch.zeros(0, 2)) is None


def test_try_points_replays_at_most_limit() -> None:
    net = mlp([2, 8, 1], seed=4)
    query = Query(2, 1, (disjunct(LOW, HIGH, [[1]], [1e3]),))
    finder = search(net, query, replay=lambda x: np.array([1e6]))
    assert finder.try_points(torch.linspace(-1, 1, 200)[:, None].repeat(1, 2), limit=5) is None
    assert finder.replays == 5


def test_starts_are_used() -> None:
    # A needle in 50 dimensions: only a start within it can tell.
    net = spike([0.123] * 50, 0.01)
    query = Query(50, 1, (disjunct([-1] * 50, [1] * 50, [[-1]], [-0.9]),))
    near = torch.full((3, 50), 0.5, dtype=torch.float64)
    near[2] = 0.127
    assert search(net, query).pgd(restarts=1, steps=100, seconds=10, starts=near[:2]) is None
    check(search(net, query).pgd(restarts=1, steps=100, seconds=10, starts=near), query, single(net))


@pytest.mark.parametrize("parts", [1, 3000])
@pytest.mark.parametrize("limit", ["seconds", "clock"])
def test_budget_is_kept(parts: int, limit: str) -> None:
    net = mlp([20, 256, 256, 3], seed=0)
    low, high = -np.ones(20), np.ones(20)
    query = Query(20, 3, tuple(disjunct(low, high, [[1, 0, 0]], [-1e3 - at]) for at in range(parts)))
    seconds = 0.8
    finder = search(net, query, timeout=math.inf if limit == "seconds" else 5)
    if limit == "clock":
        object.__setattr__(finder, "_clock", Clock(seconds))
    begin = time.monotonic()
    assert finder.pgd(restarts=10**5, steps=1000, seconds=seconds if limit == "seconds" else 1e6) is None
    spent = time.monotonic() - begin
    assert 0.9 * seconds < spent < seconds + 0.3
    late = WitnessSearch(
        net, single(net), query, input_dtype=torch.float32, dtype=torch.float64, device="cpu", seed=0, clock=Clock(0.0)
    )
    assert late.pgd(restarts=1, steps=1, seconds=10) is None
    assert late.try_points(torch.zeros(1, 20)) is None


def test_no_graph_is_kept() -> None:
    net = mlp([10, 16, 1], seed=0)
    weight = torch.ones(1, dtype=torch.float64, requires_grad=True)
    query = Query(10, 1, (disjunct(-np.ones(10), np.ones(10), [[1]], [-1e3]),))
    finder = search(lambda x: net(x) * weight, query, replay=single(net))
    assert finder.pgd(restarts=3, steps=5, seconds=5) is None
    assert weight.grad is None
    assert not any(value.requires_grad for value in vars(finder._survey).values() if isinstance(value, Tensor))


def test_out_of_memory_halves_the_batch() -> None:
    net = mlp([4, 8, 2], seed=0)
    sizes = []

    def greedy(x: Tensor) -> Tensor:
        sizes.append(x.shape[0])
        if x.shape[0] > 50:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate many bytes")
        return net(x)

    batches = Batches(greedy, n_in=4, n_out=2, dtype=torch.float64, device="cpu")
    x = torch.rand(1000, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = batches.outputs(x, Budget.of(Clock(), math.inf))
    torch.testing.assert_close(y, net(x))
    assert max(sizes) > 50 >= batches.size

    def full(x: Tensor) -> Tensor:
        raise RuntimeError("CUDA out of memory")

    batches = Batches(full, n_in=4, n_out=2, dtype=torch.float64, device="cpu")
    batches._size = 8
    with pytest.raises(ResourceError, match="single point"):
        batches.outputs(x, Budget.of(Clock(), math.inf))


def test_a_search_that_has_become_useless_returns() -> None:
    asks = [lambda: False]
    budget = Budget.of(StoppableClock(asks=asks), 60.0)  # type: ignore[arg-type]
    assert not budget.over
    assert not budget.share(0.5).over
    asks.append(lambda: True)
    assert budget.over
    assert budget.share(0.5).over


def test_batches_stop_with_the_budget() -> None:
    net = mlp([4, 8, 2], seed=0)
    batches = Batches(net, n_in=4, n_out=2, dtype=torch.float64, device="cpu")
    x, over = torch.zeros(5, 4, dtype=torch.float64), Budget.of(Clock(), -1.0)
    assert torch.isnan(batches.outputs(x, over)).all()
    assert batches.gradients(x, lambda y, x, place: (y.sum(-1), y.sum(-1)), over) is None


def test_batches_grow_smaller_with_the_work() -> None:
    small, large = (Batches(mlp([10, n, n, 1], 0), n_in=10, n_out=1, dtype=torch.float64, device="cpu").size
                    for n in (8, 2048))  # fmt: skip
    assert 1 <= large < 200 < small


def test_other_errors_pass_through() -> None:
    def broken(x: Tensor) -> Tensor:
        raise RuntimeError("shapes do not match")

    query = Query(1, 1, (disjunct([0], [1], [[1]], [0]),))
    with pytest.raises(RuntimeError, match="shapes do not match"):
        search(broken, query).pgd(restarts=1, steps=1, seconds=1)
