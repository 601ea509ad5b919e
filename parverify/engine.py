"""What is verified, and what bounds and attacks it within one group of ranks.

A `Subject` is a network and its original; an `Engine` is the query over one group's share of the network, with its
executor, its budget and its search for witnesses. A run has one engine of all ranks, and another for each group of
ranks once they search different subproblems.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from parverify.attack.search import WitnessSearch
from parverify.bab.domains import Domains
from parverify.bab.problem import Problem, build
from parverify.bab.record import Record
from parverify.bab.turns import Turns
from parverify.budget import Budget, make_budget
from parverify.clock import Clock
from parverify.config import AttackSettings, Settings
from parverify.errors import ParverifyError
from parverify.frontend.query import Query
from parverify.graph.ir import BoundGraph
from parverify.parallel.comm import Comm
from parverify.parallel.shared import from_first
from parverify.program.division import Compile, Division
from parverify.program.executor import Executor
from parverify.verdict import Witness

Replay = Callable[[np.ndarray], np.ndarray]

ROUNDING_SAFETY = 2.0  # the original's rounding may be this much larger than what was seen at a few points


@dataclass(frozen=True)
class Subject:
    """What is verified.

    Args:
        network: this rank's share of the network.
        replay: the original, (n_in,) float64 -> (n_out,) float64.
        input_dtype: of the original's input.
        gap: the largest difference seen between original and exact outputs.
        source: what replays on rank 0 itself and can be sent to others; None on the others.
        compile_for: the strategy, for a division over smaller groups; None where there is one rank.
    """

    network: Division
    replay: Replay
    input_dtype: torch.dtype
    gap: float = 0.0
    source: Replay | None = None
    compile_for: Compile | None = None

    @property
    def graph(self) -> BoundGraph:
        """The network's graph."""
        return self.network.graph


@dataclass(frozen=True)
class Engine:
    """What bounds and attacks within one group of ranks.

    Args:
        network: this rank's share of the network.
        problem: the query over it.
        budget: of memory.
        witnesses: candidates, and the replay that decides.
        clock: read alike by all ranks of the group.
        attack: how long and how often to look for a witness.
    """

    network: Division
    problem: Problem
    budget: Budget
    witnesses: WitnessSearch
    clock: Clock
    attack: AttackSettings

    @staticmethod
    def make(subject: Subject, query: Query, settings: Settings, clock: Clock) -> Engine:
        """The engine of the group that shares `subject.network`."""
        dtype, network = getattr(torch, settings.dtype), subject.network
        problem = build(network, query, dtype=dtype, device=settings.device, gap=ROUNDING_SAFETY * subject.gap)
        itemsize = torch.finfo(dtype).bits // 8
        budget = from_first(network.comm, lambda: make_budget(network.graph, memory=settings.memory, itemsize=itemsize))
        witnesses = WitnessSearch(
            lambda x: problem.executor.values(x)[network.graph.output].reshape(x.shape[0], -1),
            subject.replay,
            query,
            input_dtype=subject.input_dtype,
            dtype=dtype,
            device=settings.device,
            seed=settings.seed,
            clock=clock,
            comm=network.comm,
        )
        return Engine(network, problem, budget, witnesses, clock, settings.attack)

    @property
    def executor(self) -> Executor:
        """Runs programs on this rank."""
        return self.problem.executor

    def confirm(self, points: Tensor, parts: Tensor) -> Witness | None:
        """A witness among candidates (N, n_in) for the disjuncts `parts` (N,)."""
        return self.witnesses.try_points(points, parts)

    def turns(self, record: Record | None = None) -> Turns:
        """The stages of a search by this group."""
        attack = self.attack
        look = self._look if attack.enabled and attack.share > 0 else None
        return Turns(self.clock, look, record, share=attack.share)

    def _look(self, domains: Domains, seconds: float) -> Witness | None:
        """Descend from new places, the middles of domains among them where these are boxes."""
        starts = None
        if "low" in domains.columns:
            starts = ((domains["low"] + domains["high"]) / 2)[: self.attack.restarts]
        return self.witnesses.pgd(
            restarts=self.attack.restarts,
            steps=self.attack.steps,
            seconds=seconds,
            disjuncts=torch.unique(domains["part"]).tolist() or None,
            starts=starts,
        )


def shared_replay(replay: Replay | None, comm: Comm) -> Replay:
    """Replays on rank 0 of a group, whose results all its ranks see."""
    if comm.size == 1 and replay is not None:
        return replay

    def shared(x: np.ndarray) -> np.ndarray:
        def make() -> np.ndarray:
            if replay is None:
                raise ParverifyError("only rank 0 has the original network")
            return replay(x)

        return from_first(comm, make)

    return shared
