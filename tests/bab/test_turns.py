"""Stages around a pool: none starves, none keeps the others waiting, and ranks with the same pool agree."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from parverify.bab.batches import BatchSize, Prediction
from parverify.bab.domains import Domains, Pool
from parverify.bab.driver import Bounded, Search, search
from parverify.bab.record import Record
from parverify.bab.turns import DESCENT, LONGEST, PATIENCE, TURN, Account, Stage, Turns
from parverify.clock import Clock
from parverify.progress import NullProgress
from parverify.verdict import Witness


class Hand(Clock):
    """A clock that is set by hand."""

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "time", 0.0)

    @property
    def elapsed(self) -> float:
        return self.time  # type: ignore[attr-defined,no-any-return]

    def pass_by(self, seconds: float) -> None:
        object.__setattr__(self, "time", self.elapsed + seconds)

    def alone(self) -> Clock:
        return self


def domains(count: int, cost: list[float] | None = None) -> Domains:
    columns = {"part": torch.zeros(count, dtype=torch.long), "lower": torch.arange(count) / 10}
    return Domains(columns | ({} if cost is None else {"cost": torch.tensor(cost)}))


def pool_of(others: int, leaves: int = 0) -> Pool:
    pool = Pool(memory=1 << 20)
    pool.push(domains(others))
    pool.push(domains(leaves), leaves=True)
    return pool


def test_leaves_wait_behind_what_can_be_split() -> None:
    pool = pool_of(3, leaves=2)
    assert (len(pool), pool.leaves) == (5, 2)
    assert len(pool.pop_batch(9)) == 3
    assert len(pool.pop(1)) == 1  # none but leaves are left
    assert len(pool.pop_leaves(9)) == 1
    assert len(pool) == 0


def test_a_batch_takes_no_longer_than_its_load() -> None:
    pool = Pool(memory=1 << 20)
    pool.push(domains(6, [1, 1, 1, 4, 1, 1]))
    assert pool.pop_batch(6, lambda cost: cost, 5.0)["cost"].tolist() == [1, 1, 1]
    assert pool.pop_batch(6, lambda cost: cost, 5.0)["cost"].tolist() == [4, 1]
    assert pool.pop_batch(6, lambda cost: cost, 0.5)["cost"].tolist() == [1]  # one at least
    assert not len(pool)


@pytest.mark.parametrize(("base", "each"), [(0.1, 0.02), (0.5, 0.0), (0.0, 0.3)])
def test_prediction_finds_what_domains_take(base: float, each: float) -> None:
    predicted = Prediction()
    for count, most in [(3, 10), (20, 100), (7, 3), (50, 30)]:
        cost = torch.linspace(1, most, count)
        predicted.learn(cost, base * count + each * float(cost.sum()))
    assert predicted.of(torch.tensor([0.0, 10.0])).tolist() == pytest.approx([base, base + 10 * each], abs=1e-6)


def test_predictions_are_never_negative() -> None:
    falling, alike = Prediction(), Prediction()
    for cost, seconds in [(1.0, 9.0), (2.0, 8.0), (9.0, 0.1)]:
        falling.learn(torch.full((4,), cost), seconds)
        alike.learn(torch.full((4,), 5.0), seconds)
    assert (falling.each, alike.each) == (0.0, 0.0)
    assert falling.base > 0
    assert falling.known
    assert not Prediction().known


def test_a_batch_takes_as_long_as_it_should_whatever_its_domains_cost() -> None:
    batch, pool = BatchSize(256, 256), Pool(memory=1 << 20)
    for count, cost in [(10, 1.0), (10, 9.0), (30, 3.0)]:
        batch.learn(domains(count, [cost] * count), 0.005 * count * cost)
    for cost, expected in [(1.0, 80), (4.0, 20), (1000.0, 1), (0.01, 128)]:
        pool.push(domains(300, [cost] * 300))
        assert len(batch.pop(pool)) == pytest.approx(expected, abs=1), cost  # their halves take 0.8 s
        pool.pop(len(pool))


def test_batches_are_shorter_where_few_domains_are_open() -> None:
    batch, pool = BatchSize(64, 64, pace=0.5), Pool(memory=1 << 20)
    for cost in (1.0, 2.0, 5.0):
        batch.learn(domains(10, [cost] * 10), 0.2 * cost)  # 20 ms for a cost of 1
    pool.push(domains(4 * 64, [1.0] * 4 * 64))
    assert len(batch.pop(pool)) == 20  # others find enough here meanwhile
    assert len(batch.pop(pool)) == 10
    for waiting, seconds, size in [(255, 0.3, 64), (256, 0.3, 128), (511, 0.7, 64), (256, 0.7, 64), (256, 1.3, 32)]:
        grown = BatchSize(64 if size != 64 or waiting < 511 else 128, 128, pace=0.5)
        grown.look(waiting)
        grown.adapt(64 if grown.size == 64 else 128, seconds)
        assert grown.size == size, (waiting, seconds)


def test_a_fixed_size_of_batches_knows_no_costs() -> None:
    batch, pool = BatchSize(8, 64, fixed=True), Pool(memory=1 << 20)
    batch.learn(domains(2, [1.0, 2.0]), 3.0)
    batch.learn(domains(2, [5.0, 2.0]), 7.0)
    pool.push(domains(12, [1.0] * 4 + [100.0] * 8))
    assert [len(batch.pop(pool)) for _ in range(3)] == [4, 4, 4]


def test_the_stage_that_is_behind_has_its_turn() -> None:
    turns, pool = Turns(Hand()), pool_of(5, leaves=4)
    turns.accounts[Stage.SEARCH] = Account(done=5, seconds=1)  # half of what came
    turns.accounts[Stage.LEAF] = Account(done=6, seconds=9)  # six of ten
    assert turns.next(pool) is Stage.SEARCH
    turns.accounts[Stage.LEAF].done = 3  # three of seven
    assert turns.next(pool) is Stage.LEAF
    assert turns.next(pool_of(0, leaves=1)) is Stage.LEAF
    assert turns.next(pool_of(1)) is Stage.SEARCH
    assert turns.next(pool_of(0)) is None


def test_a_turn_of_leaves_lasts_about_as_long_as_it_may() -> None:
    turns = Turns(Hand())
    assert turns.leaves() == 1
    turns.accounts[Stage.LEAF] = Account(done=10, seconds=1)
    assert turns.leaves() == int(TURN * 10)
    turns.accounts[Stage.LEAF].seconds = 1000.0
    assert turns.leaves() == 1


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_descents_take_their_share_of_the_time(share: float) -> None:
    clock = Hand()
    turns = Turns(clock, lambda some, seconds: clock.pass_by(seconds / 2), share=share)
    pool = pool_of(1)
    while clock.elapsed < 200:
        stage = turns.next(pool)
        if stage is Stage.ATTACK:
            turns.attack(pool)
        else:
            with turns.spent(Stage.SEARCH, 1):
                clock.pass_by(0.7)
    attack, search_ = turns.accounts[Stage.ATTACK].seconds, turns.accounts[Stage.SEARCH].seconds
    assert attack == pytest.approx(share * search_, rel=0.1)


def test_descents_that_were_cut_short_become_longer() -> None:
    clock = Hand()
    turns = Turns(clock, lambda some, seconds: clock.pass_by(seconds))
    for longer in (DESCENT, 2 * DESCENT, LONGEST, LONGEST):
        before = clock.elapsed
        turns.attack(pool_of(1))
        assert clock.elapsed - before == pytest.approx(longer)
    before = clock.elapsed
    turns.attack(pool_of(0))
    assert clock.elapsed - before == pytest.approx(DESCENT)  # domains may arrive meanwhile


def test_a_long_wait_is_used() -> None:
    clock, seen = Hand(), []
    turns = Turns(clock, lambda some, seconds: seen.append(len(some)))
    assert turns.next(pool_of(0)) is None
    clock.pass_by(PATIENCE / 2)
    assert turns.next(pool_of(0)) is None
    clock.pass_by(PATIENCE)
    assert turns.next(pool_of(0)) is Stage.ATTACK
    assert turns.attack(pool_of(0)) is None
    assert seen == [0]
    assert turns.next(pool_of(0)) is None  # patience begins anew
    assert Turns(clock).next(pool_of(0)) is None


class Twigs:
    """Splits once; children that are even are closed, the others are leaves, of which number 7 is a witness."""

    def __init__(self, clock: Hand, witness: Witness | None = None) -> None:
        self.clock, self.witness, self.decided = clock, witness, 0

    def split(self, some: Domains, children: int) -> tuple[Domains, Domains]:
        stuck = some["lower"] >= 1
        return Domains({name: torch.cat([column[~stuck]] * 2) for name, column in some.columns.items()}), some.take(
            stuck
        )

    def bound(self, some: Domains) -> Bounded:
        self.clock.pass_by(0.1)
        kept = some.take(torch.arange(0, len(some), 2))
        return Bounded(kept.with_columns(lower=kept["lower"] + 1), len(some) - len(kept))

    def leaf(self, some: Domains) -> tuple[int, Witness | None, list[str]]:
        self.clock.pass_by(0.2 * len(some))
        self.decided += len(some)
        return len(some), self.witness if self.decided >= 7 else None, []

    def pad(self, parts: list[Domains]) -> list[Domains]:
        return parts


def run(witness: Witness | None = None) -> tuple[Search, Twigs, Record]:
    clock = Hand()
    space, record = Twigs(clock, witness), Record(clock)
    state, _ = search(
        space, domains(10).with_columns(lower=torch.zeros(10)), batch=BatchSize(4, 4, fixed=True), memory=1 << 20,
        clock=clock, progress=NullProgress(), turns=Turns(clock, record=record),
    )  # fmt: skip
    return state, space, record


def test_every_leaf_is_decided_and_counted_once() -> None:
    state, space, record = run()
    assert space.decided == 10
    assert state.finished
    assert (state.closed, state.open, state.unresolved) == (20, 0, [])
    stages = record.report(0).stages
    assert stages["leaf"].domains == 10
    assert stages["leaf"].seconds == pytest.approx(2.0)
    assert stages["search"].seconds == pytest.approx(0.5)


def test_leaves_are_decided_before_all_is_split() -> None:
    state, _, _ = run(Witness(np.zeros(1), np.zeros(1)))
    assert state.witness is not None
    assert not state.finished
    assert state.open > 0
