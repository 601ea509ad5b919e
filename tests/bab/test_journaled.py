"""Real searches with a journal: the same counts, interrupted and taken up again, all volume closed in the end."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from parverify.bab.batches import BatchSize
from parverify.bab.domains import Domains
from parverify.bab.driver import Search, search
from parverify.bab.identity import Identity
from parverify.bab.journal import Journal
from parverify.bab.journaled import Journaled
from parverify.bab.replay import replay
from parverify.clock import Clock
from parverify.progress import NullProgress
from tests.bab.cases import activation_space, input_space, make, problem_of, random_case, roots

ME = Identity("n", "p")
KEY = "search"
SEED = 4


def space_of(kind: str) -> Any:
    module = make("relu", 2, SEED)
    problem = problem_of(module, random_case(module, 2, sat=False, seed=SEED).query)
    return input_space(problem) if kind == "input" else activation_space(problem)


def go(space: Any, start: Domains, pause: Any = None) -> Search:
    batch = BatchSize(8, 8, fixed=True)
    figures = {"memory": 1 << 30, "clock": Clock(), "progress": NullProgress()}
    return search(space, start, batch=batch, pause=pause, **figures)[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["input", "activation"])
def test_a_search_is_interrupted_and_taken_up_again(tmp_path: Path, kind: str) -> None:
    plain_space = space_of(kind)
    plain = go(plain_space, roots(plain_space, [0]))
    assert plain.finished and not plain.unresolved and plain.batches > 2
    journal, space = Journal(tmp_path, 0, ME), space_of(kind)
    first = go(Journaled(space, journal), journal.start(KEY, roots(space, [0])), lambda state: True)
    assert first.batches == 1 and first.open
    journal.audit()
    journal.close()
    bounded, rounds = first.bounded, 0
    while len(replay(tmp_path, ME).searches[KEY]):
        journal = Journal.resume(replay(tmp_path, ME))
        parts = list(journal.domains(KEY))
        joined = space.pad(parts)
        start = Domains({name: torch.cat([part[name] for part in joined]) for name in joined[0].columns})
        after = go(Journaled(space_of(kind), journal), start, lambda state: state.batches == 2)
        journal.audit()
        journal.close()
        bounded += after.bounded
        rounds += 1
    assert journal.ledger.closed_volume == 1 and not journal.ledger.open
    assert replay(tmp_path, ME).searches[KEY].closed == (Fraction(1),)
    assert bounded == plain.bounded
