"""Rounding inward, and the door to `sat`."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parverify.attack.replay import Grid, surely_holds
from parverify.errors import ModelError
from parverify.frontend.query import Query
from tests.attack.helpers import check, disjunct, search, single

NUMBERS = st.floats(-1e30, 1e30)


def identity(x: torch.Tensor) -> torch.Tensor:
    return x * 1.0


@given(NUMBERS, NUMBERS, NUMBERS)
def test_snap_stays_inside_and_on_float32(a: float, b: float, x: float) -> None:
    lower, upper = np.array([min(a, b)]), np.array([max(a, b)])
    grid = Grid.of(lower, upper, torch.float32)
    snapped = grid.snap(np.array([x]))
    assert lower <= snapped <= upper
    if not grid.bare[0]:
        assert snapped == snapped.astype(np.float32)
        nearest = np.float64(np.float32(np.clip(x, lower[0], upper[0])))
        if lower[0] <= nearest <= upper[0]:
            assert snapped == nearest
    low, high = grid.seen()
    assert low <= np.float64(np.float32(snapped[0])) <= high


@given(NUMBERS, st.floats(0, 1e-6))
def test_grid_is_the_largest_inside(a: float, width: float) -> None:
    lower, upper = np.array([a]), np.array([a + width * abs(a)])
    grid = Grid.of(lower, upper, torch.float32)
    near = np.float32(a)
    around = [np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf))]
    inside = [float(value) for value in around if lower[0] <= float(value) <= upper[0]]
    if inside:
        assert grid.first[0] == min(inside)
        assert not grid.bare[0]
    elif upper[0] < float(around[2]):
        assert grid.bare[0]


@pytest.mark.parametrize("end", [1e300, np.inf])
def test_unbounded_boxes_snap_to_finite_numbers(end: float) -> None:
    grid = Grid.of(np.array([-end]), np.array([end]), torch.float32)
    assert grid.snap(np.array([1e200]))[0] == np.finfo(np.float32).max
    assert np.isfinite(grid.seen()).all()


def test_integer_inputs_round_inward() -> None:
    grid = Grid.of(np.array([0.5, 0.2]), np.array([3.5, 0.8]), torch.int64)
    np.testing.assert_array_equal(grid.snap(np.array([0.0, 0.0])), [1.0, 0.2])
    np.testing.assert_array_equal(grid.snap(np.array([2.6, 5.0])), [3.0, 0.8])
    assert grid.bare.tolist() == [False, True]


def test_unknown_input_type_is_named() -> None:
    with pytest.raises(ModelError, match=r"complex64; allowed: float64, float32"):
        Grid.of(np.zeros(1), np.ones(1), torch.complex64)


def test_pinned_decimal_is_printed_as_it_is() -> None:
    query = Query(2, 2, (disjunct([0.1, 0.0], [0.1, 1.0], [[0, -1]], [-0.5]),))
    witness = search(identity, query).confirm(np.array([0.3, 0.7]))
    check(witness, query, single(identity))
    assert witness.x[0] == 0.1
    assert witness.x[1] == np.float64(np.float32(0.7))
    assert witness.y[0] == np.float64(np.float32(0.1))


def test_float32_neighbours_outside_the_box() -> None:
    # float32(0.1) > 0.1 and float32(0.7) < 0.7, so rounding to nearest leaves this box at either end.
    query = Query(1, 1, (disjunct([0.7], [0.7 + 1e-7], [[1]], [9]), disjunct([0.05], [0.1], [[1]], [9])))
    finder = search(identity, query)
    for point, part in ((0.7, 0), (0.1, 1)):
        witness = finder.confirm(np.array([point]), part)
        check(witness, query, single(identity))
        assert witness.x[0] == np.float64(np.float32(witness.x[0]))


def test_all_disjuncts_are_checked() -> None:
    low, high = [0.0], [1.0]
    query = Query(1, 1, (disjunct(low, high, [[1]], [-5]), disjunct(low, high, [[1]], [0.5])))
    finder = search(identity, query)
    assert finder.confirm(np.array([0.25]), 0) is not None
    assert finder.confirm(np.array([0.75]), 0) is None


def test_without_a_disjunct_the_nearest_box_is_used() -> None:
    query = Query(1, 1, (disjunct([0], [1], [[1]], [-5]), disjunct([2], [3], [[1]], [2.5])))
    finder = search(identity, query)
    assert finder.confirm(np.array([1.8])).x[0] == 2.0
    assert finder.confirm(np.array([0.9])) is None


@pytest.mark.parametrize(("strict", "found"), [(False, True), (True, False)])
def test_strict_rows_need_more_than_equality(strict: bool, found: bool) -> None:
    query = Query(1, 1, (disjunct([0.5], [1], [[1]], [0.5], strict=[strict]),))
    finder = search(identity, query)
    assert (finder.confirm(np.array([0.5])) is not None) is found
    assert (finder.pgd(restarts=4, steps=20, seconds=5) is not None) is found


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_outputs_that_are_not_finite_are_no_witness(bad: float) -> None:
    query = Query(1, 2, (disjunct([0], [1], [[1, 0]], [9]), disjunct([0], [1], np.zeros((0, 2)), [])))
    finder = search(lambda x: torch.cat([x, x], 1), query, replay=lambda x: np.array([0.0, bad]))
    assert finder.confirm(np.array([0.5])) is None
    assert finder.pgd(restarts=2, steps=5, seconds=5) is None
    assert finder.replays > 0
    assert search(lambda x: torch.cat([x, x], 1), query).confirm(np.array([0.5])) is not None


def test_points_that_are_not_finite_or_do_not_fit() -> None:
    finder = search(identity, Query(1, 1, (disjunct([0], [1], [[1]], [9]),)))
    assert finder.confirm(np.array([np.nan])) is None
    with pytest.raises(ValueError, match="2 numbers for a network of 1 inputs"):
        finder.confirm(np.array([0.5, 0.5]))


def test_wrong_number_of_outputs_is_an_error() -> None:
    query = Query(1, 1, (disjunct([0], [1], np.zeros((0, 1)), []),))
    with pytest.raises(ModelError, match="returned 2 outputs; the property has 1"):
        search(identity, query, replay=lambda x: np.zeros(2)).confirm(np.array([0.5]))


def test_a_row_can_not_hold_by_the_rounding_of_its_sum() -> None:
    # 1e16 + 1 - 1e16 is 1, but summed from the left in float64 it is 0.
    part = disjunct([0], [1], [[1, 1, 1]], [0.0])
    y = np.array([1e16, 1.0, -1e16])
    assert not surely_holds(part, np.array([0.5]), y)
    assert surely_holds(part, np.array([0.5]), np.array([1e16, 0.0, -1e16]))
    strict = disjunct([0], [1], [[1, 1, 1]], [0.0], strict=[True])
    assert not surely_holds(strict, np.array([0.5]), np.array([1e16, 0.0, -1e16]))


def test_a_strict_row_can_not_hold_by_the_rounding_of_its_sum() -> None:
    # Exactly 0 in every order; in float64 it is negative in some.
    strict = disjunct([0], [1], [[1, 1, 1, 1]], [0.0], strict=[True])
    x, seen = np.array([0.5]), 0
    for y in itertools.permutations([1e16, 1.0, 1.0, -1e16 - 2]):
        seen += strict.holds(x, np.array(y))
        assert not surely_holds(strict, x, np.array(y))
    assert seen > 0


def test_failed_points_are_replayed_once() -> None:
    finder = search(identity, Query(1, 1, (disjunct([0], [1], [[1]], [-1]),)))
    for _ in range(3):
        assert finder.confirm(np.array([0.5])) is None
    assert finder.replays == 1


def test_double_networks_are_replayed_in_double() -> None:
    query = Query(1, 1, (disjunct([0.1], [0.1], [[1]], [0.1]),))
    double = single(identity, torch.float64)
    witness = search(identity, query, replay=double, input_dtype=torch.float64).confirm(np.array([0.1]))
    assert witness is not None
    assert witness.y[0] == 0.1
    assert search(identity, query).confirm(np.array([0.1])) is None  # float32(0.1) > 0.1
