"""Points worth a look before any gradient: landmarks of a box, even coverage of a small one, and local steps.

Step functions and equalities have witnesses only at special values, so landmarks include zero, integers, halves and
the faces of the box. Everything is drawn from the generator that is passed in, on the host, so that devices agree.
"""

from __future__ import annotations

import torch
from torch import Tensor

CROSSED = 64
"""How many coordinates `crosses` looks at."""


def uniform(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform numbers in [0, 1), drawn on the host, with the dtype and device of `like`."""
    return torch.rand(shape, generator=generator, dtype=torch.float64).to(like)


def in_boxes(lower: Tensor, upper: Tensor, share: Tensor) -> Tensor:
    """The points at `share` (0 to 1) of the way from lower to upper."""
    return lower + share * (upper - lower)


def corners(lower: Tensor, upper: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Random corners of boxes (U, n_in): (U, count, n_in)."""
    side = uniform((lower.shape[0], count, lower.shape[1]), lower, generator) < 0.5
    return torch.where(side, lower[:, None], upper[:, None])


def landmarks(lower: Tensor, upper: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Centre, extremes, zero, integers, halves, corners and mixtures of boxes (U, n_in): (U, 8 + 5 * count, n_in).

    The points may have to be moved back into their boxes.
    """
    boxes, n_in = lower.shape
    low, high = lower[:, None], upper[:, None]
    centre, zero = in_boxes(low, high, torch.full_like(low, 0.5)), torch.zeros_like(low)
    quarters = [in_boxes(low, high, torch.full_like(low, share)) for share in (0.25, 0.75)]
    fixed = [centre, low, high, zero, centre.round(), (2 * centre).round() / 2, *quarters]
    anywhere = in_boxes(low, high, uniform((boxes, count, n_in), lower, generator))
    choice = (5 * uniform((boxes, count, n_in), lower, generator)).long()
    mixed = torch.where(choice == 0, low, anywhere)
    for pick, value in ((1, high), (2, zero), (3, centre)):
        mixed = torch.where(choice == pick, value, mixed)
    rounded = [anywhere.round(), (2 * anywhere).round() / 2]
    return torch.cat([*fixed, corners(lower, upper, count, generator), anywhere, mixed, *rounded], dim=1)


def crosses(lower: Tensor, upper: Tensor) -> Tensor:
    """The centre with one coordinate at its lower end, its upper end, or zero: (U, 3 * n_free, n_in).

    Only the first few coordinates that vary in some box are used.
    """
    free = torch.nonzero((upper > lower).any(0)).flatten()[:CROSSED]
    centre = in_boxes(lower, upper, torch.full_like(lower, 0.5))
    points = centre[:, None, None].repeat(1, free.numel(), 3, 1)
    at = torch.arange(free.numel(), device=lower.device)
    points[:, at, 0, free] = lower[:, free]
    points[:, at, 1, free] = upper[:, free]
    points[:, at, 2, free] = 0.0
    return points.flatten(1, 2)


def coverage(lower: Tensor, upper: Tensor, count: int, seed: int) -> Tensor:
    """Points spread evenly over the coordinates that vary, (U, count, n_in): a scrambled Sobol sequence."""
    free = torch.nonzero((upper > lower).any(0)).flatten()
    share = torch.full((1, count, lower.shape[1]), 0.5, dtype=lower.dtype, device=lower.device)
    if free.numel() > 0:
        engine = torch.quasirandom.SobolEngine(free.numel(), scramble=True, seed=seed)
        share[0, :, free] = engine.draw(count, dtype=torch.float64).to(lower)
    return in_boxes(lower[:, None], upper[:, None], share)


def nearby(x: Tensor, width: Tensor, spread: float, generator: torch.Generator) -> Tensor:
    """Points around `x` (N, n_in) at normally distributed distances of `spread` times the `width` of its box."""
    step = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
    return x + spread * width * step


def mutated(x: Tensor, lower: Tensor, upper: Tensor, generator: torch.Generator) -> Tensor:
    """`x` (N, n_in) with a few coordinates drawn anew: a step where there is no gradient to follow."""
    share = max(0.1, 1.0 / max(x.shape[1], 1))
    change = uniform(tuple(x.shape), x, generator) < share
    return torch.where(change, in_boxes(lower, upper, uniform(tuple(x.shape), x, generator)), x)
