"""Between branch and bound and the exact decision of a leaf: gathers what the linear program needs, tries its point."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from parverify.bab.activation import ActivationSpace
from parverify.bab.domains import Domains
from parverify.bab.leaf import decide_leaf
from parverify.bab.problem import Problem
from parverify.bounds.region import BoxRegion, Region
from parverify.clock import Clock
from parverify.ops.kernel import Box
from parverify.program.executor import Executor
from parverify.program.rows import Dense
from parverify.verdict import Witness


class LeafDecider:
    """Decides single leaves; the float64 copy of the network is made at the first.

    Args:
        problem: the query.
        region: the root boxes of the domains.
        confirm: tries candidate points.
        clock: limits the linear programs.
    """

    def __init__(
        self, problem: Problem, region: Region, confirm: Callable[[Tensor, Tensor], Witness | None], clock: Clock
    ) -> None:
        self._problem, self._confirm, self._clock = problem, confirm, clock
        self._region = region
        self._executor: Executor | None = None

    def __call__(
        self, space: ActivationSpace, leaf: Domains, boxes: Mapping[str, Box]
    ) -> tuple[bool, Witness | None, str]:
        """Whether the leaf is closed, a witness, and why neither."""
        if self._executor is None:
            self._executor = Executor(self._problem.executor.graph, dtype=torch.float64)
        executor, part = self._executor, int(leaf["part"][0])
        shape = executor.graph[executor.graph.output].shape
        rows = self._exact_rows(part, shape)
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
        result = decide_leaf(executor, self._box(leaf), shaped, splits, rows, clock=self._clock)
        if result.closed:
            return True, None, ""
        if result.point is not None:
            points = torch.from_numpy(np.asarray(result.point))[None].to(self._problem.C.dtype)
            witness = self._confirm(points, torch.tensor([part]))
            if witness is not None:
                return False, witness, ""
        return (
            False,
            None,
            result.reason
            or ("a leaf has a point that violates the property in exact arithmetic, but not when replayed"),
        )

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
