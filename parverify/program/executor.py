"""Runs programs in one process: the seam between the algorithms and where weights, rows and tiles really are.

Algorithms in `parverify.bounds` and `parverify.bab` reach constants, evaluate values and sweep rows only through an
`Executor`. Dividing them over ranks means another executor, not another algorithm.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from parverify.bounds.region import Region
from parverify.errors import ModelError
from parverify.graph.ir import BoundGraph, Node, on_device
from parverify.ops.kernel import KERNEL, Box, Consts
from parverify.ops.relaxation import Alpha, Relaxations, Relaxed, dot, rows_of
from parverify.ops.rounding import VERDICT_ULPS, row_slack
from parverify.program.rows import OneHot, Rows
from parverify.program.steps import Affine, Concretize, Join, Program, Relax, compile_sweep


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


class Executor:
    """One process: all constants are resident.

    Args:
        graph: what is bounded.
        dtype, device: of the bounds.
        live: keep constants attached to the module's parameters, so that bounds can be differentiated.
    """

    def __init__(
        self,
        graph: BoundGraph,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        live: bool = False,
    ) -> None:
        self.graph = on_device(graph, torch.device(device))
        self.dtype = dtype
        self.device = torch.device(device)
        memo: dict[int, Tensor] = {}
        self._constants = {
            name: (const.live(memo) if live else const.value.detach()).to(self.device, dtype)
            for name, const in graph.constants.items()
        }

    @functools.cache  # noqa: B019  (an executor lives as long as its run)
    def program(self, start: str) -> Program:
        """The sweep from rows on `start`."""
        return compile_sweep(self.graph, start)

    def constants(self, node: Node) -> Consts:
        """Role -> tensor of a node's constants."""
        return {role: self._constants[name] for role, name in node.consts.items()}

    @functools.cache  # noqa: B019
    def offset(self, node: Node) -> Tensor:
        """(n,) what an affine node gives for inputs of zero: its constants, spread over its value."""
        zeros = [torch.zeros(1, *shape, dtype=self.dtype, device=self.device) for shape in node.attrs["in_shapes"]]
        return KERNEL[node.op].forward(node, self.constants(node), zeros).detach().reshape(-1)

    def resident_bytes(self) -> int:
        """Bytes of constants that stay on this rank."""
        return sum(value.numel() * value.element_size() for value in self._constants.values())

    def resident(self) -> list[Tensor]:
        """The tensors that stay on this rank."""
        return list(self._constants.values())

    # --- forward ---------------------------------------------------------------------------------------------------

    def evaluate(self, x: Tensor) -> Tensor:
        """Outputs (B, *output shape) of inputs (B, *input shape) or (B, n_in)."""
        return self.values(x)[self.graph.output]

    def values(self, x: Tensor) -> dict[str, Tensor]:
        """Values of all nodes, name -> (B, *shape)."""
        values = {self.graph.input.name: x.reshape(x.shape[0], *self.graph.input.shape)}
        for node in self.graph.nodes[1:]:
            inputs = [values[name] for name in node.inputs]
            values[node.name] = KERNEL[node.op].forward(node, self.constants(node), inputs)
        return values

    def interval(self, node: Node, boxes: Sequence[Box]) -> Box:
        """The box of a node's value from its inputs' boxes, (D, *shape).

        What is no number, or overflowed to the wrong side, is not known: -inf below, inf above.
        """
        lower, upper = KERNEL[node.op].interval(node, self.constants(node), boxes)
        unknown = torch.inf
        return (
            lower.nan_to_num(nan=-unknown, posinf=-unknown, neginf=-unknown),
            upper.nan_to_num(nan=unknown, posinf=unknown, neginf=unknown),
        )

    # --- backward --------------------------------------------------------------------------------------------------

    def sweep(
        self,
        start: str,
        rows: Rows,
        relaxed: Mapping[str, Relaxed],
        region: Region,
        *,
        alphas: Mapping[str, Alpha] | None = None,
        splits: Mapping[str, Splits] | None = None,
        taps: bool = False,
        verdict: bool = False,
    ) -> Swept:
        """Lower bounds of `rows` on the value of `start` (CROWN, with alpha and beta where given).

        Args:
            start: node name.
            rows: N rows.
            relaxed: relaxation of every nonlinear node on the way; `Relaxations` for a full allowance for rounding.
            region: the input domains.
            alphas: node name -> packed alphas (N, F).
            splits: node name -> split constraints on its value, for these rows.
            taps: also return the rows as they arrive on nonlinear nodes.
            verdict: a verdict is drawn from the bounds: a larger allowance for rounding.

        Returns:
            The bounds, with an allowance for rounding.
        """
        run = _Sweep(self, rows, region.domains, relaxed.magnitudes if isinstance(relaxed, Relaxations) else {})
        alphas, splits = alphas or {}, splits or {}
        lower, final = None, None
        tapped: dict[str, Tensor] = {}
        for step in self.program(start).steps:
            if isinstance(step, Affine):
                run.affine(self.graph[step.node], picked=step.picked and isinstance(rows, OneHot), splits=splits)
            elif isinstance(step, Relax):
                if taps:
                    tapped[step.node] = run.at(step.node)
                run.relax(self.graph[step.node], relaxed[step.node], alphas.get(step.node), splits)
            elif isinstance(step, Join):
                run.join(step.node)
            elif isinstance(step, Concretize):
                final = run.at(step.node, splits).reshape(len(rows), -1)
                lower = region.lower_bound(final, run.owner)
                if verdict:
                    extra = VERDICT_ULPS * torch.finfo(lower.dtype).eps
                    lower = lower - extra * (region.magnitude(final.detach(), run.owner) + run.mass)
                lower = run.total(lower)
        if lower is None or final is None:
            raise ModelError(f"the sweep from {start} does not reach the input")
        return Swept(lower, final, tapped)


class _Sweep:
    """The state of one sweep: rows waiting on nodes, and the constants picked up so far."""

    def __init__(self, executor: Executor, rows: Rows, domains: int, magnitudes: Mapping[str, Tensor]) -> None:
        self._executor = executor
        self._magnitudes = magnitudes
        self._rows = rows
        self.owner = rows.owner if domains > 1 else None
        self._waiting: dict[str, list[Tensor]] = {}
        like = rows.sign if isinstance(rows, OneHot) else rows.A
        self._constant = like.new_zeros(len(rows))
        self.mass = like.new_zeros(len(rows))
        if not isinstance(rows, OneHot) and rows.constant is not None:
            self._add(rows.constant)

    def _add(self, constant: Tensor | None, mass: Tensor | None = None) -> None:
        """Add a constant, and the magnitude of what was summed up for it (its own where it is a single term)."""
        if constant is not None:
            self._constant = self._constant + constant
            self.mass = self.mass + (constant.detach().abs() if mass is None else mass)

    def _put(self, node: Node, parts: Sequence[Tensor], constant: Tensor | None, mass: Tensor | None = None) -> None:
        for name, part in zip(node.inputs, parts, strict=True):
            self._waiting.setdefault(name, []).append(part)
        self._add(constant, mass)

    def join(self, name: str) -> None:
        parts = self._waiting.get(name, [])
        if len(parts) > 1:
            self._waiting[name] = [functools.reduce(torch.add, parts)]

    def at(self, name: str, splits: Mapping[str, Splits] | None = None) -> Tensor:
        """The rows that wait on a node, dense, with its split constraints added."""
        if name not in self._waiting:
            shape = self._executor.graph[name].shape
            A = self._rows.dense(shape) if isinstance(self._rows, OneHot) else self._rows.A
        else:
            (A,) = self._waiting[name]
        if splits and name in splits:
            A, constant = splits[name].apply(A)
            self._add(constant)
        return A

    def affine(self, node: Node, *, picked: bool, splits: Mapping[str, Splits]) -> None:
        rule, consts = KERNEL[node.op], self._executor.constants(node)
        if picked and rule.pick is not None and isinstance(self._rows, OneHot):
            self._put(node, *rule.pick(node, consts, self._rows.index, self._rows.sign))
            return
        if rule.backward is None:
            raise ModelError(f"node {node.name} ({node.op}) is not affine")
        A = self.at(node.name, splits)
        self._waiting.pop(node.name, None)
        parts, constant = rule.backward(node, consts, A)
        magnitude = self._magnitudes.get(node.name)
        if magnitude is None and constant is not None:
            magnitude = self._executor.offset(node).abs()[None]
        if magnitude is not None:
            table = magnitude if len(magnitude) == 1 else rows_of(magnitude, self.owner)
            self.mass = self.mass + dot(A.detach().abs().reshape(A.shape[0], -1), table)
        self._put(node, parts, constant, torch.zeros_like(self.mass))

    def relax(self, node: Node, relaxed: Relaxed, alpha: Alpha | None, splits: Mapping[str, Splits]) -> None:
        A = self.at(node.name, splits)
        self._waiting.pop(node.name, None)
        parts, constant = relaxed.push(A, self.owner, alpha)
        self._put(node, parts, constant, relaxed.mass(A.detach(), self.owner, constant.detach()))

    def total(self, value: Tensor) -> Tensor:
        """Concretized rows plus constants, less what rounding may have added; no number is no bound."""
        lower = value + self._constant - row_slack(value.dtype) * self.mass
        return torch.where(lower.isnan() | (lower == torch.inf), -torch.inf, lower)
