"""How many ranks search: the fastest flow through both stages, by rates; the board that the rates come from."""

from __future__ import annotations

import pytest

from parverify.flow.allot import Rates, searching_ranks
from parverify.flow.board import Board, OwnCounters


@pytest.mark.parametrize(
    ("ranks", "rates", "wanted"),
    [
        (1, Rates(1, 100, 1), 0),  # one rank bounds everything first
        (4, Rates(1, 0, 0), 0),  # nothing is undecided
        (4, Rates(1, 0, 0.5), 1),  # no search has been measured
        (4, Rates(1, 1, 1), 2),
        (4, Rates(1, 100, 1), 3),  # one bounds in any case
        (4, Rates(3, 1, 1), 1),
        (8, Rates(1, 14, 0.5), 7),
        (8, Rates(1, 2, 0.5), 4),
    ],
)
def test_the_slower_stage_gets_the_ranks(ranks: int, rates: Rates, wanted: int) -> None:
    assert searching_ranks(ranks, rates) == wanted


def test_no_other_division_is_faster() -> None:
    rates = Rates(0.7, 5.0, 0.3)

    def flow(searching: int) -> float:
        return min(rates.undecided * (16 - searching) / rates.bounding, searching / rates.searching)

    best = searching_ranks(16, rates)
    assert flow(best) == max(flow(searching) for searching in range(16))


def test_a_board_hands_out_each_instance_once_and_averages() -> None:
    board = Board(OwnCounters(), 3, 1)
    assert [board.take() for _ in range(5)] == [0, 1, 2, None, None]
    assert board.left() == 0
    board.note_bounded(1.0, undecided=True)
    board.note_bounded(2.0, undecided=False)
    board.note_searched(5.0)
    assert vars(board.rates()) == {"bounding": 1.5, "searching": 5.0, "undecided": 0.5}
    board.call_all()
    assert not board.called()  # there is nobody else
    assert Board(board.counters, 3, 2).called()
