"""alpha-CROWN: every tile of rows optimizes its own alphas against its own bounds, and forgets them.

The alphas of an intermediate neuron serve that neuron's rows only, so they need not exist together with anyone else's:
a tile is optimized, its best bounds are kept, its alphas dropped (docs/design.md, decision 4). Every iterate is a sound
bound, so the best one over all iterations is taken row by row, and the result is never looser than CROWN.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from parverify.bounds.region import Region
from parverify.clock import Clock
from parverify.ops.relaxation import Alpha, Relaxed
from parverify.program.executor import Executor
from parverify.program.rows import Rows


@dataclass(frozen=True)
class AlphaOptions:
    """How alphas are optimized.

    Args:
        iterations: bound evaluations after the first; 0 is plain CROWN.
        lr: learning rate of Adam.
        decay: factor on the learning rate per iteration.
    """

    iterations: int = 20
    lr: float = 0.5
    decay: float = 0.9


class Adam:
    """Adam on a list of tensors (Kingma and Ba, 2015), without weight decay.

    torch.optim's class would import the compiler stack on its first step, which costs more than a small run.
    """

    def __init__(self, parameters: Iterable[Tensor], lrs: Iterable[float], decay: float) -> None:
        self._parameters = list(parameters)
        self._lrs = list(lrs)
        self._decay = decay
        self._first = [torch.zeros_like(p) for p in self._parameters]
        self._second = [torch.zeros_like(p) for p in self._parameters]
        self._step = 0

    @torch.no_grad()
    def step(self, gradients: Iterable[Tensor | None]) -> None:
        """One descent step in place."""
        self._step += 1
        correction = (1 - 0.999**self._step) ** 0.5 / (1 - 0.9**self._step)
        for i, gradient in enumerate(gradients):
            if gradient is None:
                continue
            first = self._first[i].lerp_(gradient, 0.1)
            second = self._second[i].mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            size = self._lrs[i] * self._decay ** (self._step - 1) * correction
            # where a gradient is 0 so far, so is the step; the tiny constant only avoids 0 / 0
            self._parameters[i].addcdiv_(first, second.sqrt().add_(1e-12), value=-size)


def start_alphas(
    executor: Executor, start: str, rows: Rows, relaxed: Mapping[str, Relaxed], domains: int
) -> dict[str, Alpha]:
    """Default alphas for `rows` on every nonlinear node that a sweep from `start` passes."""
    owner = rows.owner if domains > 1 else None
    alphas = {}
    for name in executor.program(start).relaxed:
        made = relaxed[name].start(owner, len(rows))
        if made:
            alphas[name] = made
    return alphas


def flatten(alphas: Mapping[str, Alpha]) -> list[Tensor]:
    """All alpha tensors in a fixed order."""
    return [alphas[name][role] for name in alphas for role in alphas[name]]


def optimize(
    executor: Executor,
    start: str,
    rows: Rows,
    relaxed: Mapping[str, Relaxed],
    region: Region,
    *,
    options: AlphaOptions,
    clock: Clock | None = None,
    replicated: bool = True,
    verdict: bool = False,
) -> Tensor:
    """The best lower bounds (N,) of `rows` over all iterations.

    Args:
        executor, start, rows, relaxed, region: as for `Executor.sweep`.
        options: how long and how fast.
        clock: checked in every iteration.
        replicated: every rank has these rows, so that their alphas and bounds must stay the same on all of them.
        verdict: as for `Executor.sweep`.
    """
    with torch.no_grad():
        if options.iterations:
            rows = executor.begin(start, rows)
        best = executor.sweep(start, rows, relaxed, region, verdict=verdict).lower
    if options.iterations == 0:
        return best
    alphas = start_alphas(executor, start, rows, relaxed, region.domains)
    leaves = [leaf.requires_grad_() for leaf in flatten(alphas)]
    if not leaves:
        return best
    adam = Adam(leaves, [options.lr] * len(leaves), options.decay)
    lower = best
    for iteration in range(options.iterations + 1):
        if iteration:
            ascend(lower, leaves, adam)
        if clock is not None:
            clock.check("optimizing bounds")
        with torch.enable_grad():
            lower = executor.sweep(start, rows, relaxed, region, alphas=alphas, verdict=verdict).lower
        best = torch.maximum(best, lower.detach())
    if replicated:
        executor.agree({f"bounds of {start}": best, **executor.replicated(alphas)})
    return best


def ascend(lower: Tensor, leaves: list[Tensor], adam: Adam, nonnegative: frozenset[int] = frozenset()) -> None:
    """One step that raises the sum of finite bounds; alphas are clamped to [0, 1], multipliers to >= 0."""
    with torch.enable_grad():
        objective = -torch.where(torch.isfinite(lower), lower, 0.0).sum()
    if not objective.requires_grad:
        return
    gradients = torch.autograd.grad(objective, leaves, allow_unused=True)
    adam.step(None if g is None else g.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) for g in gradients)
    with torch.no_grad():
        for i, leaf in enumerate(leaves):
            leaf.clamp_(min=0) if i in nonnegative else leaf.clamp_(0, 1)
