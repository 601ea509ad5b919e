"""Projected gradient descent on the margin, for many (disjunct, restart) pairs at once.

A step moves along the sign of the gradient, scaled by each coordinate's width, or as Adam would; a pair whose best
margin has stopped improving goes back to its best point and halves its step (Croce and Hein, "Reliable evaluation of
adversarial robustness", ICML 2020, section 3). What is minimized is the real margin, the largest residual, or on
every other restart the sum of the positive residuals. The descent never decides: it hands points whose margin has
reached the target to `confirm`, and where that refuses, it aims lower.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from parverify.attack.batches import Batches, Budget
from parverify.attack.candidates import mutated
from parverify.attack.parts import Boxes, Rows
from parverify.verdict import Witness

Confirm = Callable[[np.ndarray, int], "Witness | None"]
"""A point and its disjunct -> the witness there, if the replayed network agrees."""

_CONFIRMS_PER_STEP = 4
_FIRST_SLACK = 1e-6
_ADAM = (0.9, 0.99, 1e-12)


@dataclass(frozen=True)
class Problem:
    """What all descents of one search share."""

    batches: Batches
    rows: Rows
    boxes: Boxes
    confirm: Confirm


class Descent:
    """One wave of pairs.

    Args:
        problem: network, rows, boxes, and the door to a witness.
        x: (N, n_in), where each pair starts.
        part: (N,), the disjunct of each pair.
        restart: (N,), its restart number, which chooses the kind of step and of loss.
        generator: the source of all random numbers here.
    """

    def __init__(
        self, problem: Problem, x: Tensor, part: Tensor, restart: Tensor, *, generator: torch.Generator
    ) -> None:
        self._problem, self._part, self._generator = problem, part, generator
        box = torch.as_tensor(problem.boxes.box, device=x.device)[part]
        self._lower, self._upper = problem.boxes.lower[box], problem.boxes.upper[box]
        self._width = self._upper - self._lower
        self.x = problem.boxes.snap(x, self._lower, self._upper)
        self._sums = restart % 2 == 1
        self._adam = ((restart // 2) % 3 == 2)[:, None]
        self._step = 0.5 * 0.5 ** (restart % 3).to(x.dtype)[:, None]
        self._first, self._second = torch.zeros_like(x), torch.zeros_like(x)
        self._slack = torch.zeros(problem.rows.d.shape[0], dtype=x.dtype, device=x.device)
        self.best, self.best_x = torch.full_like(x[:, 0], torch.inf), self.x.clone()

    def run(self, steps: int, budget: Budget) -> Witness | None:
        """Take up to `steps` steps; the witness, if one is found before the budget is over."""
        period = max(4, steps // 6)
        before = self.best.clone()
        for count in range(steps + 1):
            found = self._problem.batches.gradients(self.x, self._objective, budget)
            if found is None:
                return None
            margin, gradient = found
            better = margin < self.best
            self.best = torch.where(better, margin, self.best)
            self.best_x = torch.where(better[:, None], self.x, self.best_x)
            witness = self._confirm_hits(margin, budget)
            if witness is not None or budget.over:
                return witness
            if count == steps:
                break
            self._move(gradient, count)
            if count % period == period - 1:
                self._anneal(before)
                before = self.best.clone()
        return None

    def _objective(self, y: Tensor, x: Tensor, place: slice) -> tuple[Tensor, Tensor]:
        """Loss and margin of the pairs at `place`; a point with an output that is not finite has margin inf."""
        rows, part = self._problem.rows, self._part[place]
        here = torch.arange(x.shape[0], device=x.device)
        residual = rows.residual(rows.join(y, x), here, part)
        margin = residual.amax(-1)
        aim = self._slack[part][:, None]
        positive = torch.relu((residual + aim) * rows.weight[part]).sum(-1)
        finite = torch.isfinite(y).all(-1)
        return torch.where(self._sums[place], positive, margin), torch.where(finite, margin, torch.inf)

    def _confirm_hits(self, margin: Tensor, budget: Budget) -> Witness | None:
        """Confirm the best point of each of a few disjuncts that reached their target; aim lower on refusal."""
        reached = torch.nonzero(margin <= -self._slack[self._part]).flatten()
        tried: set[int] = set()
        for at in reached[margin[reached].argsort(stable=True)].tolist():
            part = int(self._part[at])
            if part in tried:
                continue
            tried.add(part)
            if len(tried) > _CONFIRMS_PER_STEP or budget.over:
                break
            witness = self._problem.confirm(self.x[at].double().cpu().numpy(), part)
            if witness is not None:
                return witness
            self._lower_target(at, part, budget)
        return None

    def _lower_target(self, at: int, part: int, budget: Budget) -> None:
        """The engine and the original network round differently: ask for a little more than a margin of zero."""
        rows, x = self._problem.rows, self.x[at : at + 1]
        z = rows.join(self._problem.batches.outputs(x, budget), x)
        scale = rows.scale(z, torch.zeros_like(self._part[:1]), self._part[at : at + 1])[0]
        if bool(torch.isfinite(scale)):
            self._slack[part] = torch.maximum(4 * self._slack[part], _FIRST_SLACK * scale)

    def _move(self, gradient: Tensor, count: int) -> None:
        """One step of every pair, back onto its box."""
        scaled = gradient * self._width
        direction = torch.sign(scaled)
        if bool(self._adam.any()):
            direction = torch.where(self._adam, self._adam_direction(scaled, count), direction)
        moved = self.x - self._step * self._width * direction
        flat = (scaled == 0).all(-1, keepdim=True)
        if bool(flat.any()):
            fresh = mutated(self.best_x, self._lower, self._upper, self._generator)
            moved = torch.where(flat, fresh, moved)
        self.x = self._problem.boxes.snap(moved, self._lower, self._upper)

    def _adam_direction(self, gradient: Tensor, count: int) -> Tensor:
        """The update of Adam (Kingma and Ba, ICLR 2015, algorithm 1), free of the gradient's scale."""
        beta, gamma, tiny = _ADAM
        size = gradient.abs().amax(-1, keepdim=True)
        gradient = torch.where(size > 0, gradient / size, gradient)
        self._first = beta * self._first + (1 - beta) * gradient
        self._second = gamma * self._second + (1 - gamma) * gradient * gradient
        mean = self._first / (1 - beta ** (count + 1))
        return mean / (torch.sqrt(self._second / (1 - gamma ** (count + 1))) + tiny)

    def _anneal(self, before: Tensor) -> None:
        """Halve every step; pairs that have not improved since `before` halve it twice and return to their best."""
        stuck = (self.best >= before)[:, None]
        self._step = torch.where(stuck, self._step / 4, self._step / 2)
        self.x = torch.where(stuck, self.best_x, self.x)
