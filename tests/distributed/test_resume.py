"""Ranks with a journal: one is killed at any time, the run is started again or resumed, and the verdict is right."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

import parverify
from parverify.bab.identity import Keep
from parverify.cli.outcome import Outcome
from parverify.errors import ModelError
from parverify.parallel.launch import Retry
from parverify.parallel.world import World
from tests.bab.searches import OPTIONS, check_volumes, die_at, hard
from tests.distributed.ranks import outcome_of

KINDS = ("input", "activation")
EASE = {"input": 3.0, "activation": 1.25}
BYTES = {"input": 60_000, "activation": 26_000}  # of their journals


class Job:
    """A run on several ranks, of which one kills itself once the journal has grown by so many bytes."""

    def __init__(
        self, folder: Path, kind: str, *, victim: int = -1, size: int = 0, sat: bool = False, **options: Any
    ) -> None:
        self._keep, self._kind, self._sat = Keep(str(folder), again=True), kind, sat
        self._victim, self._size, self._folder = victim, size, folder
        self._options = {"branching__kind": kind, **OPTIONS, **options}

    def __call__(self, world: World) -> Outcome:
        module, query = hard(self._kind, sat=self._sat, ease=EASE[self._kind])
        dying = die_at(self._size, self._folder) if world.rank == self._victim else contextlib.nullcontext()
        with dying:
            result = parverify.verify(module, query, world=world, journal=self._keep, **self._options)
        stats = {key: result.stats[key] for key in ("bounded", "journal") if key in result.stats}
        return Outcome(result.verdict.value, reason=result.reason, stats=stats)


@pytest.mark.parametrize(
    ("kind", "size", "groups", "strategy", "victim"),
    [
        ("input", 2, 2, "fold", 0),
        pytest.param("activation", 2, 2, "fold", 1, marks=pytest.mark.slow),
        pytest.param("activation", 4, 2, "fold", 1, marks=pytest.mark.slow),
        pytest.param("input", 2, 1, "fsdp", 1, marks=pytest.mark.slow),
    ],
)
def test_a_lost_rank_is_started_again_and_the_run_goes_on(
    tmp_path: Path, kind: str, size: int, groups: int, strategy: str, victim: int
) -> None:
    lines: list[str] = []
    options = {"parallel__groups": groups, "parallel__strategy": strategy}
    dying = Job(tmp_path, kind, victim=victim, size=BYTES[kind] // 2, **options)
    retry = Retry(2, Job(tmp_path, kind, **options), lines.append)
    outcome = outcome_of(size, dying, retry=retry)
    assert outcome.verdict == "unsat", outcome.reason
    assert (
        lines == [line for line in lines if line.startswith(f"rank {victim} was killed by SIGKILL")] and len(lines) == 1
    )
    assert outcome.stats["restarts"] == 1 and outcome.stats["journal"]["generation"] == 1
    assert check_volumes(tmp_path, boxes=kind == "input") == 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_any_rank_is_killed_at_any_time(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    kind, size = chance.choice(KINDS), chance.choice([2, 3, 4])
    groups = chance.choice([count for count in (1, 2, 3, 4) if size % count == 0])
    options = {"parallel__groups": groups, "parallel__strategy": chance.choice(["fold", "fsdp"])}
    while True:
        job = Job(
            tmp_path,
            kind,
            victim=chance.randrange(size),
            size=chance.randrange(BYTES[kind] // 2),
            sat=seed % 4 == 3,
            **options,
        )
        outcome = outcome_of(size, job)
        if outcome.verdict != "error":
            break
        assert "was killed by SIGKILL" in outcome.reason
        check_volumes(tmp_path, boxes=kind == "input")
    assert outcome.verdict == ("sat" if seed % 4 == 3 else "unsat")


@pytest.mark.parametrize("kind", ["activation", pytest.param("input", marks=pytest.mark.slow)])
def test_other_numbers_of_ranks_and_groups_go_on(tmp_path: Path, kind: str) -> None:
    shares = []
    for size, groups, strategy in ((2, 1, "fsdp"), (2, 2, "fold")):
        job = Job(
            tmp_path,
            kind,
            victim=size - 1,
            size=BYTES[kind] // 6,
            parallel__groups=groups,
            parallel__strategy=strategy,
        )
        outcome = outcome_of(size, job)
        assert "was killed by SIGKILL" in outcome.reason
        shares.append(check_volumes(tmp_path, boxes=kind == "input"))
    assert shares == sorted(shares)
    module, query = hard(kind, ease=EASE[kind])
    result = parverify.verify(module, query, resume=tmp_path, branching__kind=kind, **OPTIONS)
    assert result.verdict.value == "unsat" and result.stats["journal"]["generation"] == 2
    again = outcome_of(2, Job(tmp_path, kind))
    assert again.verdict == "unsat" and "by the journal" in again.reason


def test_a_witness_of_any_group_is_in_the_journal(tmp_path: Path) -> None:
    job = Job(tmp_path, "input", sat=True, parallel__groups=2)
    assert outcome_of(2, job).verdict == "sat"
    again = outcome_of(2, job)
    assert again.verdict == "sat" and "by the journal" in again.reason


# --- the launcher -----------------------------------------------------------------------------------------------------


def test_what_is_tried_again_is_another_job_and_no_more_often_than_allowed() -> None:
    def killed(world: World) -> Outcome:
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        world.comm.barrier()
        return Outcome("unsat")

    lines: list[str] = []
    outcome = outcome_of(2, killed, retry=Retry(2, killed, lines.append))
    assert outcome.verdict == "error" and outcome.reason.startswith("rank 1 was killed by SIGKILL")
    assert [line.rpartition(" all ranks ")[2] for line in lines] == [
        "are started again (1 of 2)",
        "are started again (2 of 2)",
    ]
    lines.clear()
    outcome = outcome_of(2, killed, retry=Retry(2, lambda world: Outcome("unsat"), lines.append))
    assert outcome.verdict == "unsat" and outcome.stats == {"restarts": 1} and len(lines) == 1


def test_what_a_rank_says_itself_is_final() -> None:
    def refused(world: World) -> Outcome:
        if world.rank == 1:
            raise ModelError("it can't be read")
        world.comm.barrier()
        return Outcome("unsat")

    lines: list[str] = []
    outcome = outcome_of(2, refused, retry=Retry(3, refused, lines.append))
    assert outcome.exit_code == 21 and not lines
    late = outcome_of(2, lambda world: Outcome.timeout("late"), retry=Retry(3, refused, lines.append))
    assert late.verdict == "timeout" and not lines


def test_one_rank_that_is_lost_is_started_again(tmp_path: Path) -> None:
    lines: list[str] = []
    dying = Job(tmp_path, "input", victim=0, size=BYTES["input"] // 3)
    outcome = outcome_of(1, dying, retry=Retry(1, Job(tmp_path, "input"), lines.append))
    assert outcome.verdict == "unsat" and len(lines) == 1
