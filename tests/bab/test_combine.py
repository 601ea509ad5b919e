"""Combinations of rows: never above what any point says, near the optimum, the same in any batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from parverify.bab.combine import combine
from parverify.bab.leaf import certified_combination
from parverify.bounds.region import BallRegion, BoxRegion


def random_rows(seed: int, count: int, rows: int, n: int) -> tuple[Tensor, Tensor, BoxRegion]:
    """Rows `A x + constant` in single precision on random boxes."""
    made = torch.Generator().manual_seed(seed)
    A = torch.randn(count, rows, n, generator=made)
    constant = torch.randn(count, rows, generator=made)
    return A, constant, BoxRegion(-torch.rand(count, n, generator=made), torch.rand(count, n, generator=made))


def least(A: Tensor, region: BoxRegion) -> Tensor:
    """(D, R) minima in double precision."""
    low, high = region.lower.double()[:, None], region.upper.double()[:, None]
    return torch.where(A >= 0, A.double() * low, A.double() * high).sum(2)


@pytest.mark.parametrize("rows", [1, 2, 3, 6])
def test_no_combination_is_above_a_point_and_all_are_near_the_best(rows: int) -> None:
    A, constant, region = random_rows(rows, 60, rows, 4)
    need = torch.full((60, rows), 0.01).double()
    found = combine(least(A, region) + constant, A, need, region)
    x = region.lower[:, None] + torch.rand(60, 3000, 4) * (region.upper - region.lower)[:, None]
    x = torch.cat([x.double(), found.x[:, None]], 1)
    values = (torch.einsum("dpn,drn->dpr", x, A.double()) + (constant.double() - need.double())[:, None]).amax(2)
    assert (found.excess <= values.amin(1)).all()
    torch.testing.assert_close(found.x, found.x.clamp(region.lower.double(), region.upper.double()), rtol=0, atol=0)
    assert (found.bound(torch.float32).double() <= found.excess).all()
    for d in range(60):
        box = BoxRegion(region.lower[d : d + 1].double(), region.upper[d : d + 1].double())
        best = certified_combination(A[d].double(), constant[d].double() - need[d].double(), box)
        if found.excess[d] <= 0 and values[d].min() > 0:  # neither closed nor with a point that can't be excluded
            assert found.excess[d] >= best - 0.25
        assert found.excess[d] <= best + 1e-7


def test_what_no_single_row_closes() -> None:
    """x <= -0.25 and -x <= -0.25 on [-1, 1]; the sum of both is positive."""
    region = BoxRegion(-torch.ones(1, 1), torch.ones(1, 1))
    A = torch.tensor([[[1.0], [-1.0]]])
    assert combine(torch.tensor([[-0.75, -0.75]]), A, torch.zeros(1, 2), region).excess > 0
    touching = combine(torch.tensor([[-1.0, -1.0]]), A, torch.zeros(1, 2), region)
    assert touching.excess <= 0
    assert touching.x == pytest.approx(0.0, abs=1e-9)
    assert combine(torch.tensor([[-0.75, -0.75]]), A, torch.full((1, 2), 0.25), region).excess <= 0
    assert combine(torch.tensor([[-0.75, -0.75]]), A, torch.full((1, 2), 0.2499), region).excess > 0


def test_the_batch_changes_nothing() -> None:
    A, constant, region = random_rows(7, 20, 3, 5)
    lower, need = least(A, region).float() + constant, torch.zeros(20, 3)
    whole = combine(lower, A, need, region)
    for d in range(20):
        one = slice(d, d + 1)
        single = combine(lower[one], A[one], need[one], BoxRegion(region.lower[one], region.upper[one]))
        assert float(single.excess) == pytest.approx(float(whole.excess[d]), abs=1e-12)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_rows_that_are_no_numbers_count_for_nothing(number: float) -> None:
    region = BoxRegion(-torch.ones(1, 1), torch.ones(1, 1))
    good, A = torch.tensor([[-0.9, -0.9, -5.0]]), torch.tensor([[[1.0], [-1.0], [0.0]]])
    for bad_lower, bad_A in ((number, 0.0), (-5.0, number)):
        lower, rows = good.clone(), A.clone()
        lower[0, 2], rows[0, 2] = bad_lower, bad_A
        assert combine(lower, rows, torch.zeros(1, 3), region).excess > 0  # by the two others
        lower[0, 1] = -5.0
        assert combine(lower, rows, torch.zeros(1, 3), region).excess <= 0
    nothing = combine(torch.full((1, 2), number), A[:, :2], torch.zeros(1, 2), region)
    assert nothing.excess == -torch.inf
    wide = BoxRegion(torch.full((1, 1), -torch.inf), torch.full((1, 1), torch.inf))
    assert combine(good, A, torch.zeros(1, 3), wide).excess == -torch.inf


def test_balls_are_refused() -> None:
    ball = BallRegion(torch.zeros(1, 1), torch.ones(1), 2)
    with pytest.raises(TypeError, match="BallRegion"):
        combine(torch.zeros(1, 1), torch.zeros(1, 1, 1), torch.zeros(1, 1), ball)
