"""Rows through nonlinear operators: every row takes the lower line where its coefficient is positive, the upper where
not.

A `Relaxed` holds the lines of one nonlinear node for all domains of a batch; `push` carries rows through it. Which line
a coefficient takes depends on its sign only (Zhang et al., CROWN, 2018); a free parameter alpha per row and neuron
chooses within a family of sound lines (Xu et al., alpha-CROWN, ICLR 2021). The product of two variables uses the four
McCormick planes, mixed by alpha. Alphas are packed: only neurons that are free in some domain have one.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from parverify.graph.ir import Node
from parverify.ops.kernel import Box
from parverify.ops.lines import Family, FixedLine, Lines, SlopeLine
from parverify.ops.places import places

Alpha = dict[str, Tensor]  # role ("lower", "upper") -> (N, free neurons), packed


class Relaxed(Protocol):
    """The relaxation of one nonlinear node on D domains."""

    @property
    def free(self) -> dict[str, Tensor]:
        """role -> flat indices (F,) of the neurons whose alpha matters in some domain; roles without any are absent."""

    def start(self, owner: Tensor | None, rows: int) -> Alpha:
        """The default alphas of `rows` rows, (N, F) each."""

    def push(self, A: Tensor, owner: Tensor | None, alpha: Alpha | None) -> tuple[list[Tensor], Tensor]:
        """Rows (N, *shape) on the node's value -> rows on each input, and the constants (N,) they pick up.

        Args:
            A: the rows.
            owner: (N,) domain of each row; None if there is one domain, or one row per domain in order.
            alpha: packed parameters, or None for the default lines.
        """

    def mass(self, A: Tensor, owner: Tensor | None, constant: Tensor) -> Tensor:
        """(N,) an upper bound on the magnitudes that were summed up for `constant`, for the allowance for rounding."""


class Relaxations(dict[str, Relaxed]):
    """The relaxations of a graph's nonlinear nodes by name, with what the allowance for rounding needs of the others.

    Attributes:
        magnitudes: affine node name -> (D, n) the largest sum of magnitudes of terms that its scalars are on each
            domain, |W| |x| + |b|. Pushing a row through the node rounds its coefficients; what that can change in the
            bound is at most a few eps times |row| . magnitudes, however much the coefficients cancel.
    """

    def __init__(self, magnitudes: Mapping[str, Tensor] | None = None) -> None:
        super().__init__()
        self.magnitudes: dict[str, Tensor] = dict(magnitudes or {})


def rows_of(table: Tensor, owner: Tensor | None) -> Tensor:
    """Per-domain values for rows: gathered by owner, or broadcast as they are."""
    return table if owner is None else table.index_select(0, owner)


class _ReluStep(torch.autograd.Function):
    """A ReLU step that keeps for the backward pass only A and the packed alphas, not slopes of every row.

    `packing` is where alphas are (index), 1 where they are free and 0 elsewhere, and the slope elsewhere and 0 where
    they are free; None without alphas. Of the two lines that a coefficient may meet one is multiplied by zero, so that
    nothing is rounded: choosing by a mask would take many times longer, because signs follow no pattern.
    """

    @staticmethod
    def forward(ctx, A, alpha, packing, lower, upper, intercept):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(A, alpha, *(packing or ()), lower, upper, intercept)
        return _relu_step(A, alpha, packing, lower, upper, intercept)

    @staticmethod
    def backward(ctx, g_out, g_constant):  # type: ignore[no-untyped-def]
        A, alpha, *packing, lower, upper, intercept = ctx.saved_tensors
        positive = torch.ge(A, 0, out=torch.empty_like(A))
        g_alpha = None
        if alpha is None:
            g_A = positive * lower
        else:
            index, free, _ = packing
            g_A = _relu_slope(alpha, packing, lower, A.shape).mul_(positive)
            g_alpha = g_out.index_select(1, index).mul_(A.index_select(1, index).clamp(min=0)).mul_(free)
        negative = positive.neg_().add_(1)
        g_A = g_A.addcmul_(negative, upper).mul_(g_out)
        g_A = g_A.addcmul_(g_constant[:, None], negative.mul_(intercept))
        return g_A, g_alpha, None, None, None, None


def _relu_step(
    A: Tensor, alpha: Tensor | None, packing: Sequence[Tensor] | None, lower: Tensor, upper: Tensor, intercept: Tensor
) -> tuple[Tensor, Tensor]:
    """Rows behind a ReLU, and the constants they pick up; see `_ReluStep`."""
    rising = A.clamp(min=0)
    if alpha is None or packing is None:
        out = rising.mul_(lower)
    else:
        out = _relu_slope(alpha, packing, lower, A.shape).mul_(rising)
    falling = torch.clamp(A, max=0, out=rising) if out is not rising else A.clamp(max=0)
    return out.addcmul_(falling, upper), dot(falling, intercept)


def _relu_slope(alpha: Tensor, packing: Sequence[Tensor], lower: Tensor, shape: torch.Size) -> Tensor:
    """Lower slopes of all rows, a new tensor: the fixed ones, with alpha where free."""
    index, free, fixed = packing
    packed = torch.addcmul(fixed, alpha, free)
    if len(index) == shape[1]:
        return packed  # every neuron is free somewhere: packing is the identity
    return lower.expand(shape).index_copy(1, index, packed)


def dot(A: Tensor, table: Tensor) -> Tensor:
    """(N,) products of rows with their domain's vector; table (1, n) or (N, n)."""
    return A @ table[0] if table.shape[0] == 1 else (A * table).sum(1)


@dataclass(frozen=True)
class Living:
    """A relaxation on those of its neurons that pass anything on; the others are zero on all domains.

    Args:
        index: (K,) flat, ascending.
        relaxed: of these neurons, shape (K,).
    """

    index: Tensor
    relaxed: RelaxedActivation


@dataclass(frozen=True)
class RelaxedActivation:
    """An elementwise activation: one lower and one upper line per neuron.

    Args:
        lines: of (D, n) neurons, flat.
        shape: of the node's value.
        free: see `Relaxed.free`.
        lean: a ReLU with finite lines that no gradient flows into: the hot path.
    """

    lines: Lines
    shape: tuple[int, ...]
    free: dict[str, Tensor]
    lean: bool = False

    def start(self, owner: Tensor | None, rows: int) -> Alpha:
        alpha = {}
        for role, index in self.free.items():
            default = self._family(role).default().index_select(1, index)
            alpha[role] = rows_of(default, owner).expand(rows, -1).clone()
        return alpha

    def with_slopes_of(self, low: Tensor, high: Tensor) -> RelaxedActivation:
        """A ReLU's lines with the default lower slopes that it has on the boxes [low, high], (D, n)."""
        lower = self.lines.lower
        if not isinstance(lower, SlopeLine):
            return self
        slope = torch.where(lower.free > 0, (high > -low).to(low.dtype), lower.slope)
        return replace(self, lines=Lines(SlopeLine(lower.free, slope), self.lines.upper))

    @functools.cached_property
    def living(self) -> Living | None:
        """A ReLU's lines without neurons that are off on all domains; None where that can't be said."""
        lower, upper = self.lines.lower, self.lines.upper
        if not self.lean or not isinstance(lower, SlopeLine) or not isinstance(upper, FixedLine):
            return None
        tables = lower.free, lower.slope, upper.slope, upper.intercept
        if lower.slope.is_meta:
            return None
        together = torch.cat(tables)
        index = torch.nonzero((together != 0).any(0)).flatten()  # what is no number counts, too
        free, slope, chord, intercept = together.index_select(1, index).chunk(4)
        lines = Lines(SlopeLine(free, slope), FixedLine(chord, intercept, upper.known))
        roles = {role: torch.searchsorted(index, where) for role, where in self.free.items()}
        return Living(index, RelaxedActivation(lines, (len(index),), roles, lean=True))

    def _family(self, role: str) -> Family:
        return self.lines.lower if role == "lower" else self.lines.upper

    def push(self, A: Tensor, owner: Tensor | None, alpha: Alpha | None) -> tuple[list[Tensor], Tensor]:
        flat = A.reshape(A.shape[0], -1)
        push = self._push_relu if self.lean else self._push_lines
        out, constant = push(flat, owner, alpha or {})
        return [out.reshape(A.shape)], constant

    def mass(self, A: Tensor, owner: Tensor | None, constant: Tensor) -> Tensor:
        if self.lean:
            return -constant  # only chords have intercepts, and all terms have one sign
        flat = A.reshape(A.shape[0], -1).abs()
        total = torch.zeros_like(constant)
        for role in ("lower", "upper"):
            intercept = self._family(role).line()[1]
            if intercept is not None:
                total = total + dot(flat, rows_of(intercept.detach().abs().nan_to_num(posinf=0.0), owner))
        return total

    def _push_relu(self, A: Tensor, owner: Tensor | None, alpha: Alpha) -> tuple[Tensor, Tensor]:
        lower, upper = self.lines.lower, self.lines.upper
        if not isinstance(lower, SlopeLine) or not isinstance(upper, FixedLine) or upper.intercept is None:
            raise TypeError("the lean path is for ReLU only")
        slope, chord, intercept = (rows_of(table, owner) for table in (lower.slope, upper.slope, upper.intercept))
        given, packing = alpha.get("lower"), None
        if given is not None:
            index = self.free["lower"]
            free = lower.free.index_select(1, index)
            fixed = lower.slope.index_select(1, index) * (1 - free)
            packing = (index, rows_of(free, owner), rows_of(fixed, owner))
        if torch.is_grad_enabled() and (A.requires_grad or (given is not None and given.requires_grad)):
            return _ReluStep.apply(A, given, packing, slope, chord, intercept)  # type: ignore[no-any-return]
        return _relu_step(A, given, packing, slope, chord, intercept)

    def _push_lines(self, A: Tensor, owner: Tensor | None, alpha: Alpha) -> tuple[Tensor, Tensor]:
        positive, negative = A.clamp(min=0), A.clamp(max=0)
        out, constant = None, A.new_zeros(A.shape[0])
        for role, part in (("lower", positive), ("upper", negative)):
            family = self._family(role)
            if owner is not None:
                family = family.select(owner)
            full = None
            if role in alpha:
                full = family.default().expand(A.shape).index_copy(1, self.free[role], alpha[role])
            slope, intercept = family.line(full)
            term = part * slope
            out = term if out is None else out + term
            if intercept is not None:
                # 0 * inf is "no coefficient on an unknown line", not NaN
                constant = constant + torch.where(part == 0, 0.0, part * intercept).sum(1)
        return out, constant  # type: ignore[return-value]


@dataclass(frozen=True)
class RelaxedProduct:
    """The elementwise product of two variables between McCormick planes.

    Args:
        box: lower and upper bounds of both factors, (D, n) each, flat.
        shape: of the node's value.
        free: see `Relaxed.free`.
    """

    box: tuple[Box, Box]
    shape: tuple[int, ...]
    free: dict[str, Tensor]

    def start(self, owner: Tensor | None, rows: int) -> Alpha:
        like = self.box[0][0]
        return {role: like.new_full((rows, len(index)), 0.5) for role, index in self.free.items()}

    def push(self, A: Tensor, owner: Tensor | None, alpha: Alpha | None) -> tuple[list[Tensor], Tensor]:
        flat = A.reshape(A.shape[0], -1)
        (lx, ux), (ly, uy) = ((rows_of(low, owner), rows_of(high, owner)) for low, high in self.box)
        mixes = []
        for role in ("lower", "upper"):
            mix = flat.new_full((1, 1), 0.5)
            if alpha and role in alpha:
                mix = flat.new_full(flat.shape, 0.5).index_copy(1, self.free[role], alpha[role])
            mixes.append(mix)
        low, high = mixes
        positive, negative = flat.clamp(min=0), flat.clamp(max=0)
        # lower: a (lx y + ly x - lx ly) + (1 - a) (ux y + uy x - ux uy)
        # upper: a (lx y + uy x - lx uy) + (1 - a) (ux y + ly x - ux ly)
        for_x = positive * torch.lerp(uy, ly, low) + negative * torch.lerp(ly, uy, high)
        for_y = positive * torch.lerp(ux, lx, low) + negative * torch.lerp(ux, lx, high)
        constant = -(positive * torch.lerp(ux * uy, lx * ly, low) + negative * torch.lerp(ux * ly, lx * uy, high))
        return [for_x.reshape(A.shape), for_y.reshape(A.shape)], constant.sum(1)

    def mass(self, A: Tensor, owner: Tensor | None, constant: Tensor) -> Tensor:
        (lx, ux), (ly, uy) = self.box
        largest = torch.maximum(lx.abs(), ux.abs()) * torch.maximum(ly.abs(), uy.abs())
        return dot(A.reshape(A.shape[0], -1).abs(), rows_of(largest.detach(), owner))


def relax(node: Node, boxes: list[Box]) -> Relaxed:
    """The relaxation of a nonlinear node.

    Args:
        node: an `act` or `mul`.
        boxes: bounds of its inputs, (D, *shape) each.
    """
    flat = [(low.reshape(low.shape[0], -1), high.reshape(high.shape[0], -1)) for low, high in boxes]
    if node.op == "mul":
        (lx, ux), (ly, uy) = flat
        (index,) = places(((ux > lx) & (uy > ly)).any(0))
        free = {"lower": index, "upper": index} if len(index) else {}
        return RelaxedProduct((flat[0], flat[1]), node.shape, free)
    lines = node.attrs["activation"].relax(*flat[0])
    free = {}
    for role, family in (("lower", lines.lower), ("upper", lines.upper)):
        if family.free is not None:
            (index,) = places(family.free.sum(0) > 0)
            if len(index):
                free[role] = index
    return RelaxedActivation(lines, node.shape, free, _is_lean(lines))


def _is_lean(lines: Lines) -> bool:
    lower, upper = lines.lower, lines.upper
    if not isinstance(lower, SlopeLine) or not isinstance(upper, FixedLine) or upper.intercept is None:
        return False
    if upper.slope.requires_grad:
        return False
    return upper.known or upper.intercept.is_meta or bool(upper.intercept.isfinite().all())
