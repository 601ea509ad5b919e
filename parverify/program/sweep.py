"""One sweep under way: the rows that wait on nodes, and the constants that they have picked up so far.

The executor goes through the steps of a program; here is what each does to the rows. Rows on nodes that are divided
over channels are this rank's range of them, and what they pick up there is summed over the ranks at the end.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parverify.errors import ModelError
from parverify.graph.ir import Node
from parverify.ops.kernel import KERNEL, Consts
from parverify.ops.relaxation import Alpha, Living, Relaxed, RelaxedActivation, dot, rows_of
from parverify.ops.rounding import row_slack
from parverify.ops.weighted import bias_rows
from parverify.parallel.collectives import copy, total
from parverify.parallel.comm import Comm
from parverify.program.rows import Dense, OneHot, Picked, Rows
from parverify.program.steps import Affine
from parverify.program.weights import mapped

if TYPE_CHECKING:
    from parverify.program.executor import Executor


COPY = 40  # multiplications that take as long as to copy an entry of a weight


@dataclass(frozen=True)
class Splits:
    """Constraints `sign * (value.flatten()[index] - point) >= 0` on one node, S per row, with their multipliers.

    Lagrangian relaxation adds `-beta * sign * (value - point)` to a row, which can only lower its true minimum over the
    constrained domain (Wang et al., beta-CROWN, NeurIPS 2021). Unused places have sign 0.

    Args:
        index: (N, S) int64.
        sign: (N, S).
        point: (N, S).
        beta: (N, S), non-negative.
    """

    index: Tensor
    sign: Tensor
    point: Tensor
    beta: Tensor

    def among(self, mine: tuple[int, int] | None, comm: Comm) -> Splits:
        """The constraints on the flat range `mine` of the value; multipliers stay replicated, so their gradient is
        summed over the ranks."""
        first, last = mine or (0, 0)
        here = (self.index >= first) & (self.index < last)
        return Splits(
            torch.where(here, self.index - first, 0),
            torch.where(here, self.sign, 0.0),
            self.point,
            copy(self.beta, comm),
        )

    def apply(self, A: Tensor) -> tuple[Tensor, Tensor]:
        """Rows with the constraints added, and the constants (N,) they bring."""
        weight = self.beta * self.sign
        out = A.reshape(A.shape[0], -1).scatter_add(1, self.index, -weight)
        return out.reshape(A.shape), (weight * self.point).sum(1)


@dataclass(frozen=True)
class Swept:
    """The result of a sweep.

    Args:
        lower: (N,) lower bounds of the rows over their domains; -inf where nothing is known.
        A: (N, n_in) the rows on the input.
        taps: rows on the values of nonlinear nodes, where they were asked for.
    """

    lower: Tensor
    A: Tensor
    taps: Mapping[str, Tensor] = field(default_factory=dict)


class Sums:
    """Constants that rows pick up, and the magnitudes of what was summed up for them, (N,) each.

    Magnitudes are left out where no allowance for rounding is made.
    """

    def __init__(self, like: Tensor, rows: int, *, weighed: bool) -> None:
        self.constant = like.new_zeros(rows)
        self.mass = like.new_zeros(rows)
        self._weighed = weighed

    def add(self, constant: Tensor | None, mass: Tensor | None = None) -> None:
        """Add a constant with its mass: its own magnitude where it is a single term."""
        if constant is not None:
            self.constant = self.constant + constant
            mass = constant.detach().abs() if mass is None and self._weighed else mass
        if mass is not None:
            self.mass = self.mass + mass


class Sweep:
    """The state of one sweep: rows waiting on nodes, and the constants picked up so far."""

    def __init__(
        self,
        executor: Executor,
        rows: Rows,
        domains: int,
        magnitudes: Mapping[str, Tensor],
        *,
        weighed: bool = True,
    ) -> None:
        self._executor = executor
        self._weighed = weighed
        self._magnitudes = magnitudes
        self._rows: Rows | None = rows  # let go once they are on their way
        self.owner = rows.owner if domains > 1 else None
        self._waiting: dict[str, list[Tensor]] = {}
        self._some: dict[str, Tensor] = {}  # node -> the scalars that the rows waiting there have, where not all
        like = rows.sign if isinstance(rows, OneHot) else rows.A
        self.sums = Sums(like, len(rows), weighed=weighed)
        # of channels that only this rank has
        self._partial = Sums(like, len(rows), weighed=weighed) if executor.placement.channels else self.sums
        self.picked = isinstance(rows, Picked)
        if isinstance(rows, Dense):
            self.sums.add(rows.constant)

    def _sums_of(self, name: str) -> Sums:
        return self._partial if name in self._executor.placement.channels else self.sums

    def _put(self, node: Node, parts: Sequence[Tensor]) -> None:
        for name, part in zip(node.inputs, parts, strict=True):
            self._waiting.setdefault(name, []).append(part)

    def join(self, name: str) -> None:
        parts = self._waiting.get(name, [])
        if len(parts) > 1:
            self._waiting[name] = [functools.reduce(torch.add, parts)]

    def at(self, name: str, splits: Mapping[str, Splits] | None = None) -> Tensor:
        """The rows that wait on a node, dense, with its split constraints added; of this rank's channels."""
        executor = self._executor
        place = executor.placement.channels.get(name)
        if name not in self._waiting:
            shape = executor.graph[name].shape
            if self._rows is None:
                raise ModelError(f"no rows wait on {name}")
            A = self._rows.dense(shape) if isinstance(self._rows, OneHot) else self._rows.A
            if place is not None:
                A = copy(A, executor.comm).narrow(place.dim + 1, place.mine[0], place.mine[1] - place.mine[0])
        else:
            (A,) = self._waiting[name]
        if splits and name in splits:
            here = splits[name]
            if place is not None:
                here = here.among(executor.channels(name), executor.comm)
            A, constant = here.apply(A)
            self._sums_of(name).add(constant)
        return A

    def affine(self, step: Affine, splits: Mapping[str, Splits]) -> None:
        executor, node = self._executor, self._executor.graph[step.node]
        consts = executor.constants(node)
        if step.picked and isinstance(self._rows, Picked):
            self.sums.add(self._rows.constant)
            self._put(node, [self._rows.A])
            self._rows = None
            return
        rule = KERNEL[node.op]
        if step.picked and rule.pick is not None and isinstance(self._rows, OneHot):
            parts, constant = rule.pick(node, consts, self._rows.index, self._rows.sign)
            self.sums.add(constant)
            self._put(node, parts)
            return
        if rule.backward is None:
            raise ModelError(f"node {node.name} ({node.op}) is not affine")
        A = self.at(node.name, splits)
        self._waiting.pop(node.name, None)
        index = self._some.pop(node.name, None)
        if index is not None:
            parts = [executor.weights.push_some(node, step.inner, A, index)]
            constant = A @ consts["bias"].index_select(0, index) if "bias" in consts else None
        elif step.inner and not executor.live:
            parts = mapped(executor.weights, node, (step.inner, step.adjoint, False), None, [A])
            constant = self._bias(node, consts, A)
        else:
            parts, constant = rule.backward(node, consts, A)
        self._sums_of(node.name).add(constant, self._rounding(node, A, constant, index))
        self._put(node, parts)

    def _bias(self, node: Node, consts: Consts, A: Tensor) -> Tensor | None:
        if "bias" not in consts:
            return None
        bias, place = consts["bias"], self._executor.placement.channels.get(node.name)
        if place is not None:
            bias = bias[place.mine[0] : place.mine[1]]
        return bias_rows(node, bias, A)

    def _rounding(self, node: Node, A: Tensor, constant: Tensor | None, index: Tensor | None) -> Tensor | None:
        """What pushing the rows through an affine node adds to their mass; `index` as in `_some`."""
        if not self._weighed:
            return None
        magnitude = self._magnitudes.get(node.name)
        if magnitude is None and constant is not None:
            magnitude = self._executor.offset(node).abs()[None]
        if magnitude is None:
            return None
        mine = self._executor.channels(node.name)
        if mine is not None:
            magnitude = magnitude[:, mine[0] : mine[1]]
        magnitude = magnitude if index is None else magnitude.index_select(1, index)
        table = magnitude if len(magnitude) == 1 else rows_of(magnitude, self.owner)
        return dot(A.detach().abs().reshape(A.shape[0], -1), table)

    def _living(
        self, node: Node, relaxed: Relaxed, A: Tensor, alpha: Alpha | None, splits: Mapping[str, Splits]
    ) -> Living | None:
        """The neurons that rows need to be pushed through, where that saves time; None for all of them."""
        (name, *others), rows = node.inputs, A.shape[0]
        if not self._executor.skips or others or name in splits or A.is_meta or not self._executor.takes_some(name):
            return None
        recorded = torch.is_grad_enabled() and any(x.requires_grad for x in (A, *(alpha or {}).values()))
        living = None if recorded or not isinstance(relaxed, RelaxedActivation) else relaxed.living
        if living is None or rows * (node.numel - len(living.index)) < COPY * len(living.index):
            return None
        return living

    def relax(self, node: Node, relaxed: Relaxed, alpha: Alpha | None, splits: Mapping[str, Splits]) -> None:
        A = self.at(node.name, splits)
        self._waiting.pop(node.name, None)
        living = self._living(node, relaxed, A, alpha, splits)
        if living is not None:
            A, relaxed = A.reshape(A.shape[0], -1).index_select(1, living.index), living.relaxed
            self._some[node.inputs[0]] = living.index
        parts, constant = relaxed.push(A, self.owner, alpha)
        mass = relaxed.mass(A.detach(), self.owner, constant.detach()) if self._weighed else None
        self._sums_of(node.name).add(constant, mass)
        self._put(node, parts)

    def total_constants(self) -> None:
        """Add what all ranks picked up for their channels."""
        both = total(torch.stack([self._partial.constant, self._partial.mass]), self._executor.comm)
        self.sums.add(both[0], both[1].detach())

    def total(self, value: Tensor) -> Tensor:
        """Concretized rows plus constants, less what rounding may have added; no number is no bound."""
        lower = value + self.sums.constant
        if self._weighed:
            lower = lower - row_slack(value.dtype) * self.sums.mass
        return lower.nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf)
