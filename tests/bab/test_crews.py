"""How many groups of ranks there are for how many open domains, and that a search survives their forming anew."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torch import nn

import parverify
from parverify.bab.activation import ActivationSpace
from parverify.bab.crew import Crew
from parverify.bab.crews import group_count
from parverify.bab.domains import Domains
from parverify.bab.driver import Bounded
from parverify.frontend.query import Query
from parverify.parallel.world import World
from parverify.verdict import Witness
from tests.bab.searches import OPTIONS, hard
from tests.distributed.ranks import on_ranks

QUICK = {**OPTIONS, "alpha__iterations": 2, "beta__iterations": 2}  # the search is wanted, not what comes before it


@pytest.mark.parametrize(
    ("domains", "size", "most", "count"),
    [(1, 4, 4, 1), (2, 4, 4, 2), (3, 4, 4, 2), (4, 4, 4, 4), (64, 4, 4, 4), (64, 4, 2, 2), (5, 6, 6, 3), (0, 4, 4, 1)],
)
def test_as_many_groups_as_domains(domains: int, size: int, most: int, count: int) -> None:
    assert group_count(domains, size, most) == count


def stretches(
    world: World, kind: str, sat: bool, given: tuple[nn.Module, Query] | None = None
) -> tuple[str, list[tuple[int, int, bool]]]:
    """The verdict, and of each stretch of the search: groups, bytes moved in this rank's group, whether it began."""
    module, query = given or hard(kind, sat=sat)
    seen: list[tuple[int, int, bool]] = []
    inner = Crew.search

    def search(self: Crew, space: Any, start: Any, **options: Any) -> Any:
        meter = self.group.comm.meter
        before = sum(figures["bytes"] for figures in meter.figures().values())
        found = inner(self, space, start, **options)
        moved = sum(figures["bytes"] for figures in meter.figures().values()) - before
        seen.append((self.group.count, moved, start is not None))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Crew, "search", search)
        result = parverify.verify(
            module, query, timeout=60, world=world, parallel__strategy="fold", branching__kind=kind, **QUICK
        )  # fmt: skip
    return result.verdict.value, seen


@pytest.mark.parametrize("kind", ["input", "activation"])
def test_groups_are_formed_anew_once_there_are_domains_for_all(kind: str) -> None:
    for verdict, seen in on_ranks(4, stretches, kind, False):
        assert verdict == "unsat"
        assert [(count, began) for count, _, began in seen] == [(1, True), (4, False)]
        assert seen[0][1] > 0 and seen[1][1] == 0  # a group of one moves nothing


def test_a_witness_in_any_stretch_is_everybodys() -> None:
    found = on_ranks(4, stretches, "activation", True)
    assert {verdict for verdict, _ in found} == {"sat"}


def seconds_after_a_witness(world: World) -> tuple[str, float, float]:
    """When the last rank finds a witness while the others are in the middle of batches that would take a minute."""
    module, query = hard("activation")
    found, batches = [0.0], [0]
    inner = ActivationSpace.bound

    def bound(self: ActivationSpace, domains: Domains) -> Bounded:
        batches[0] += 1
        if self.problem.executor.comm.size > 1 or batches[0] < 3:
            return inner(self, domains)
        if world.rank == world.size - 1:
            time.sleep(1.0)
            found[0] = time.time()
            return Bounded(domains, 0, Witness(np.zeros(query.n_in), np.zeros(query.n_out)))
        for _ in range(1200):
            self.clock.check("being slow")
            time.sleep(0.05)
        return inner(self, domains)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ActivationSpace, "bound", bound)
        result = parverify.verify(
            module, query, timeout=100, world=world, branching__kind="activation", **QUICK
        )  # fmt: skip
    return result.verdict.value, found[0], time.time()


def test_a_witness_ends_the_others_in_the_middle_of_their_batches() -> None:
    ranks = on_ranks(3, seconds_after_a_witness)
    at = max(found for _, found, _ in ranks)
    assert at > 0
    for verdict, _, ended in ranks:
        assert verdict == "sat"
        assert ended - at < 1.0


def two_disjuncts(world: World) -> tuple[str, list[tuple[int, int, bool]]]:
    """As `stretches`, from two disjuncts over one box."""
    module, query = hard("activation")
    (one,) = query.disjuncts
    twice = replace(query, disjuncts=(one, replace(one, d=one.d - 1e-3)))
    return stretches(world, "activation", False, (module, twice))


def test_several_groups_gather_what_is_open_before_they_are_more() -> None:
    for verdict, seen in on_ranks(4, two_disjuncts):
        assert verdict == "unsat"
        assert [(count, began) for count, _, began in seen] == [(2, True), (4, False)]
