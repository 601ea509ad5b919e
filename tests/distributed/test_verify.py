"""Verdicts over ranks: those of one process under every preset, with attacks, splits and leaves; nothing hangs."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

import parverify
from parverify.cli.work import _check_agreed
from parverify.errors import DisagreementError, ParverifyError, UsageError
from parverify.frontend.query import Disjunct, Query
from parverify.parallel.meter import MemoryMeter
from parverify.parallel.world import World
from parverify.program.division import divide
from parverify.program.executor import Executor
from parverify.strategy.compile import compile_placement
from parverify.strategy.directives import load_strategy
from parverify.verdict import Verdict
from tests.bab.cases import Case, make, random_case
from tests.distributed.ranks import on_ranks
from tests.distributed.test_divided import wide, wide_module

STRATEGIES = ("fsdp", "fold", "ring", "tp")
NAMES = ("relu", "convolution", "residual", "maxima")


@functools.cache  # made before ranks are forked, which then have them
def cases(half: int) -> list[tuple[int, Case, dict[str, Any]]]:
    """Small instances with both answers, decided by either kind of split: of each network one answer by each kind.

    Args:
        half: 0 or 1, which answer by which.
    """
    out = []
    for number, name in enumerate(NAMES):
        for turn, kind in enumerate(("input", "activation")):
            case = random_case(make(name, 2, number), 2, sat=(number + turn + half) % 2 == 0, seed=number)
            out.append((number, case, {"branching__kind": kind, "attack__enabled": (number // 2) % 2 == 0}))
    return out


Verdicts = list[tuple[str, list[float] | None, int]]


def verdicts(world: World, strategy: str, half: int, groups: int = 1) -> Verdicts:
    out = []
    for number, case, options in cases(half):
        module = make(NAMES[number], 2, number)
        result = parverify.verify(
            module,
            case.query,
            timeout=60,
            world=world,
            parallel__strategy=strategy,
            parallel__groups=groups,
            attack__steps=10,
            **options,
        )
        witness = None if result.witness is None else result.witness.x.tolist()
        out.append((result.verdict.value, witness, result.stats.get("bounded", 0)))
    return out


@functools.cache
def in_one_process(half: int) -> Verdicts:
    return verdicts(World(), "single", half)


@pytest.mark.parametrize(("strategy", "size", "half"), [("fsdp", 2, 0), ("fold", 4, 1), ("ring", 2, 1), ("tp", 2, 0)])
def test_verdicts_are_those_of_one_process(strategy: str, size: int, half: int) -> None:
    alone = in_one_process(half)
    assert Counter(verdict for verdict, _, _ in alone) == {"sat": len(NAMES), "unsat": len(NAMES)}
    ranks = on_ranks(size, verdicts, strategy, half)
    for rank in ranks:
        assert [verdict for verdict, _, _ in rank] == [verdict for verdict, _, _ in alone]
        assert rank == ranks[0]


@pytest.mark.parametrize(("size", "half", "strategy"), [(2, 0, "fold"), (4, 0, "fold"), (4, 1, "fsdp")])
def test_two_groups_that_exchange_domains_give_the_same_verdicts(size: int, half: int, strategy: str) -> None:
    alone = in_one_process(half)
    ranks = on_ranks(size, verdicts, strategy, half, 2)
    for rank in ranks:
        assert [verdict for verdict, _, _ in rank] == [verdict for verdict, _, _ in alone]
        assert rank == ranks[0]


def test_bounds_that_differ_between_ranks_are_an_error() -> None:
    """A rank whose weights are not what they should be (a faulty memory, say) is noticed before any verdict."""

    def tampered(world: World) -> str:
        graph, region = wide("mlp", torch.float32)
        chosen = load_strategy("fsdp")
        network = divide(
            graph if world.rank == 0 else None, lambda g, r, s: compile_placement(g, chosen, r, s), world.comm
        )
        executor = network.executor()
        if world.rank == 1:
            bias = next(t for name, t in executor._constants.items() if t.dim() == 1)
            bias += 1e-6
        from parverify.bounds.alpha import AlphaOptions
        from parverify.bounds.layers import BoundOptions, bound_layers

        try:
            with torch.no_grad():
                bound_layers(executor, region, BoundOptions("alpha-crown", AlphaOptions(2)))
        except DisagreementError as error:
            return str(error)
        return ""

    for message in on_ranks(2, tampered):
        assert "bounds of" in message


def test_a_rank_never_holds_more_than_its_pieces_and_one_in_flight() -> None:
    def peak(world: World) -> tuple[int, int, int]:
        graph = wide("mlp", torch.float32)[0] if world.rank == 0 else None
        chosen = load_strategy("fold")
        with MemoryMeter([]) as meter:
            network = divide(graph, lambda g, r, s: compile_placement(g, chosen, r, s), world.comm)
        own = sum(tensor.nbytes for tensor in network.held.values())
        small = sum(const.value.nbytes for const in network.graph.constants.values() if not const.value.is_meta)
        return meter.peak_bytes, own, small

    whole = sum(const.value.nbytes for const in wide("mlp", torch.float32)[0].constants.values())
    for rank, (peak_bytes, own, small) in enumerate(on_ranks(3, peak)):
        assert own < 0.45 * whole
        if rank:
            assert peak_bytes <= 1.05 * (own + small)


def test_time_runs_out_on_all_ranks() -> None:
    def late(world: World) -> str:
        module = make("relu", 2, 0)
        case = random_case(module, 2, sat=False, seed=0)
        return parverify.verify(module, case.query, timeout=0.0, world=world).verdict.value

    assert on_ranks(2, late) == [Verdict.TIMEOUT.value] * 2


def test_ranks_that_come_to_different_verdicts_come_to_none() -> None:
    """As under torchrun, where no launcher of ours compares them."""

    def checked(world: World, verdicts: list[str]) -> str:
        try:
            _check_agreed(world, verdicts[world.rank])
        except ParverifyError as error:
            return str(error)
        return ""

    assert on_ranks(2, checked, ["unsat", "unsat"]) == ["", ""]
    for message in on_ranks(2, checked, ["unsat", "unknown"]):
        assert "ranks disagree" in message


def test_groups_that_do_not_fit_the_ranks_are_refused_before_any_work() -> None:
    module = make("relu", 2, 0)
    case = random_case(module, 2, sat=True, seed=0)  # decided by the attack, long before groups are formed
    with pytest.raises(UsageError, match="1 ranks can't form 2 equal groups; allowed: 0, 1"):
        parverify.verify(module, case.query, parallel__groups=2)
    assert parverify.verify(module, case.query, parallel__groups=1).verdict is Verdict.SAT


def most_rows(world: World, strategy: str) -> tuple[str, int]:
    """The verdict, and the most rows that were swept at once with multipliers."""
    module = make("residual", 2, 2)
    case = random_case(module, 2, sat=False, seed=2)
    seen = [0]
    inner = Executor.sweep

    def sweep(self: Executor, start: str, rows: Any, *arguments: Any, **options: Any) -> Any:
        if options.get("splits"):
            seen[0] = max(seen[0], len(rows))
        return inner(self, start, rows, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Executor, "sweep", sweep)
        result = parverify.verify(
            module, case.query, timeout=60, world=world, parallel__strategy=strategy, parallel__groups=1,
            branching__kind="activation", branching__batch=16, attack__enabled=False,
        )  # fmt: skip
    return result.verdict.value, seen[0]


def test_a_batch_is_divided_over_the_ranks_that_fold() -> None:
    verdict, alone = most_rows(World(), "single")
    assert verdict == "unsat" and alone >= 8
    for strategy, share in (("fold", 2), ("fsdp", 1)):
        for found in on_ranks(2, most_rows, strategy):
            assert found == (verdict, pytest.approx(alone / share, abs=2))


@functools.cache
def edge() -> tuple[torch.nn.Module, Query]:
    """A property that CROWN does not decide, of a network whose weights have several parts."""
    torch.manual_seed(3)
    module = wide_module("mlp").requires_grad_(False)
    center = torch.rand(30, generator=torch.Generator().manual_seed(5))
    low, high = (center - 0.03).double().numpy(), (center + 0.03).double().numpy()
    row = np.array([[1.0, -0.5, -0.25]])
    box = torch.stack([center - 0.03, center + 0.03])
    crown = parverify.compute_bounds(module, box[:1], box[1:], method="crown", C=torch.from_numpy(row).float())
    points = center + 0.03 * (2 * torch.rand(4096, 30, generator=torch.Generator().manual_seed(6)) - 1)
    least = float((module(points).double() @ torch.from_numpy(row).T).min())
    right = float(crown.lower.min()) + 0.1 * (least - float(crown.lower.min()))
    return module, Query(30, 3, (Disjunct(low, high, row, np.array([right]), np.array([False])),))


def at_the_edge(world: World, strategy: str) -> tuple[str, int]:
    """The verdict of ranks that stay together."""
    module, query = edge()
    result = parverify.verify(
        module, query, timeout=60, world=world, parallel__strategy=strategy, parallel__groups=1, attack__steps=10,
        branching__kind="activation",
    )  # fmt: skip
    return result.verdict.value, result.stats.get("bounded", 0)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_that_sum_up_in_other_orders_agree_in_every_phase(strategy: str) -> None:
    alone, _ = at_the_edge(World(), "single")
    assert alone == "unsat"
    first, second = on_ranks(2, at_the_edge, strategy)
    assert first == second
    assert first[0] == alone
