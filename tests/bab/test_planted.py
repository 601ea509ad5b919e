"""A planted counterexample is watched: no split, bound or leaf may lose the domain that contains it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from parverify.bab.batches import BatchSize
from parverify.bab.driver import search
from parverify.clock import Clock
from parverify.progress import NullProgress
from tests.bab.cases import ZOO, Watched, activation_space, input_space, make, problem_of, random_case, roots

SHAPES = [{}, {"rows": 2, "on_inputs": True}, {"disjuncts": 3, "rows": 2}]


@pytest.mark.parametrize("kind", ["input", "activation"])
@pytest.mark.parametrize("name", ZOO)
def test_the_planted_point_stays_open(name: str, kind: str) -> None:
    seen = 0
    for k, shape in enumerate(SHAPES):
        seed = 10 * list(ZOO).index(name) + k
        module = make(name, 2, seed)
        case = random_case(module, 2, sat=True, seed=seed, **shape)
        assert case.point is not None
        point = case.point.astype(np.float32).astype(np.float64)
        problem = problem_of(module, case.query, (torch.float32, torch.float64)[k % 2])
        space = input_space(problem) if kind == "input" else activation_space(problem)
        watched = Watched(space, point, case.disjunct)
        every = list(range(len(case.query)))
        state, pool = search(
            watched,
            roots(space, every),
            batch=BatchSize(4 + 3 * k, 64, fixed=True),
            memory=1 << 30,
            clock=Clock(),
            progress=NullProgress(),
            pause=lambda state: state.batches >= 10,
        )
        left = pool.pop(len(pool)) if len(pool) else None
        assert state.unresolved or (left is not None and watched.holds(left))
        seen += watched.seen
        pool.close()
    assert seen >= len(SHAPES)
