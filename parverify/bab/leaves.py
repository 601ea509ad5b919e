"""Between branch and bound and the exact decision of a leaf: gathers what the linear program needs, tries its point.

The linear program is solved on rank 0, which needs the whole network for it; the others take over what it finds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from parverify.bab.activation import ActivationSpace
from parverify.bab.domains import Domains
from parverify.bab.leaf import LeafResult, decide_leaf
from parverify.bab.problem import Problem
from parverify.bounds.region import BoxRegion, Region
from parverify.clock import Clock
from parverify.errors import ParverifyError
from parverify.ops.kernel import Box
from parverify.parallel.shared import from_first
from parverify.program.division import Division
from parverify.program.executor import Executor
from parverify.program.rows import Dense
from parverify.progress import Progress
from parverify.verdict import Witness


class LeafDecider:
    """Decides single leaves; the float64 copy of the network is made at the first.

    Args:
        problem: the query.
        network: this rank's share of the network.
        region: the root boxes of the domains.
        confirm: tries candidate points.
        clock: limits the linear programs.
        progress: told where the network has to be assembled.
    """

    def __init__(
        self,
        problem: Problem,
        network: Division,
        region: Region,
        confirm: Callable[[Tensor, Tensor], Witness | None],
        clock: Clock,
        progress: Progress,
    ) -> None:
        self._problem, self._confirm, self._network, self._progress = problem, confirm, network, progress
        self._clock = clock.alone()  # one rank alone reads it
        self._region = region
        self._executor: Executor | None = None
        self._ready = False

    def __call__(
        self, space: ActivationSpace, leaf: Domains, boxes: Mapping[str, Box]
    ) -> tuple[bool, Witness | None, str]:
        """Whether the leaf is closed, a witness, and why neither."""
        self._prepare()
        result = from_first(self._network.comm, lambda: self._solve(space, leaf, boxes))
        if result.closed:
            return True, None, ""
        if result.point is not None:
            points = torch.from_numpy(np.asarray(result.point))[None].to(self._problem.C.dtype)
            witness = self._confirm(points, leaf["part"])
            if witness is not None:
                return False, witness, ""
        return (
            False,
            None,
            result.reason
            or ("a leaf has a point that violates the property in exact arithmetic, but not when replayed"),
        )

    def _prepare(self) -> None:
        """Make the float64 copy of the network where the programs are solved."""
        if self._ready:
            return
        self._ready = True
        if self._network.comm.size > 1:
            self._progress.log("deciding leaves: rank 0 assembles the whole network")
        graph = self._network.assembled(self._problem.executor.graph)
        if graph is not None:
            self._executor = Executor(graph, dtype=torch.float64)

    def _solve(self, space: ActivationSpace, leaf: Domains, boxes: Mapping[str, Box]) -> LeafResult:
        executor, part = self._executor, int(leaf["part"][0])
        if executor is None:
            raise ParverifyError("only rank 0 has the whole network")
        rows = self._exact_rows(part, executor.graph[executor.graph.output].shape)
        used = torch.nonzero(leaf["sign"][0]).flatten().tolist()
        splits = [
            (space.names[int(leaf["node"][0, i])], int(leaf["index"][0, i]), float(leaf["sign"][0, i])) for i in used
        ]
        shaped = {
            name: (
                low.double().cpu().reshape(1, *executor.graph[name].shape),
                high.double().cpu().reshape(1, *executor.graph[name].shape),
            )
            for name, (low, high) in boxes.items()
        }
        return decide_leaf(executor, self._box(leaf), shaped, splits, rows, clock=self._clock)

    def _exact_rows(self, part: int, shape: tuple[int, ...]) -> Dense:
        """The disjunct's rows as the property says them, not as rounded into the dtype of the bounds, less what they
        need: the original rounds, so that a point may be unsafe in it that misses by less in exact arithmetic."""
        disjunct, size = self._problem.query.disjuncts[part], int(torch.Size(shape).numel())
        C = np.zeros((len(disjunct.d), size))
        C[:, : disjunct.C_y.shape[1]] = disjunct.C_y
        if disjunct.C_x is not None:
            C[:, disjunct.C_y.shape[1] :] = disjunct.C_x
        need = self._problem.need[part, : len(disjunct.d)].double().cpu()
        return Dense(torch.from_numpy(C).reshape(-1, *shape), -torch.from_numpy(disjunct.d) - need)

    def _box(self, leaf: Domains) -> BoxRegion:
        root = int(leaf["root"][0])
        low, high = self._region.box()
        return BoxRegion(low[root : root + 1].double().cpu(), high[root : root + 1].double().cpu())
