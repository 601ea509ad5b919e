"""Margins at many points without gradients, the best point of each disjunct, and replay of the promising ones.

A point is run through the network once and compared with every disjunct that shares its box. A point is promising
where its margin is zero up to the rounding of float32 in which networks are replayed; `confirm` decides.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parverify.attack.batches import Budget
from parverify.attack.candidates import nearby
from parverify.attack.pgd import Problem
from parverify.verdict import Witness

_ELEMENTS = 4_000_000
_PROMISING = 1e-6
_BEST_BYTES = 256 << 20
_CLIMBED_PARTS, _CLIMBERS, _CHILDREN = 64, 16, 32


class Survey:
    """The state of a search without gradients.

    Args:
        problem: network, rows, boxes, and the door to a witness.

    Attributes:
        best: (D,), the smallest margin seen of each disjunct; inf where none was.
        best_x: (D, n_in), where that was; None where that would take too much memory.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        lower = problem.boxes.lower
        parts = problem.rows.d.shape[0]
        self.best = torch.full((parts,), torch.inf, dtype=lower.dtype, device=lower.device)
        self.best_x: Tensor | None = None
        if parts * lower.shape[1] * lower.element_size() <= _BEST_BYTES:
            self.best_x = torch.zeros(parts, lower.shape[1], dtype=lower.dtype, device=lower.device)

    def look(self, x: Tensor, box: Tensor, *, limit: int, budget: Budget) -> Witness | None:
        """Try points (Q, n_in) of the boxes `box` (Q,) against all disjuncts of their boxes."""
        x = self._snap(x, box)
        y = self._problem.batches.outputs(x, budget)
        most = int(self._problem.boxes.count.max()) * self._problem.rows.elements
        for place in torch.arange(x.shape[0], device=x.device).split(max(1, _ELEMENTS // most)):
            point, part = self._problem.boxes.pairs(box[place])
            witness = self._judge(x[place], y[place], point, part, limit=limit, budget=budget)
            if witness is not None or budget.over:
                return witness
        return None

    def look_at_pairs(self, x: Tensor, part: Tensor, *, limit: int, budget: Budget) -> Witness | None:
        """Try points (N, n_in) against one disjunct each."""
        x = self._snap(x, self._box(part))
        y = self._problem.batches.outputs(x, budget)
        return self._judge(x, y, torch.arange(x.shape[0], device=x.device), part, limit=limit, budget=budget)

    def margins(self, x: Tensor, y: Tensor, point: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
        """Margins of pairs, and margins relative to the size of their rows, two (P,); inf where y is not finite."""
        rows = self._problem.rows
        z = rows.join(y, x)
        margin = rows.residual(z, point, part).amax(-1)
        relative = margin / (rows.scale(z, point, part) + torch.finfo(margin.dtype).tiny)
        bad = ~torch.isfinite(y).all(-1)[point]
        return margin.masked_fill(bad, torch.inf), relative.masked_fill(bad, torch.inf)

    def climb(self, share: Tensor, *, generator: torch.Generator, rounds: int, budget: Budget) -> Witness | None:
        """Local random search for the disjuncts with the smallest margins, each from its best points.

        Every climber keeps its own place, so that several spikes can be followed at once.

        Args:
            share: (K, n_in), starts as shares (0 to 1) of the way across a box.
            generator: the source of all random numbers here.
            rounds: how many times each climber looks around.
            budget: when to stop.
        """
        parts = torch.nonzero(torch.isfinite(self.best)).flatten()
        parts = parts[self.best[parts].argsort(stable=True)][:_CLIMBED_PARTS]
        if parts.numel() == 0:
            return None
        for part in parts.split(max(1, self._problem.batches.wave // max(share.shape[0], 1))):
            start = self._climbers(share, part, budget)
            if budget.over:
                return None
            witness = self._climb(start, part, generator=generator, rounds=rounds, budget=budget)
            if witness is not None:
                return witness
        return None

    def _climbers(self, share: Tensor, part: Tensor, budget: Budget) -> tuple[Tensor, Tensor]:
        """The best of the points at `share` of the way across the box of each disjunct: margins and points."""
        box = self._box(part)
        lower, upper = self._problem.boxes.lower[box][:, None], self._problem.boxes.upper[box][:, None]
        x = (lower + share * (upper - lower)).flatten(0, 1)
        owner = part.repeat_interleave(share.shape[0])
        x = self._snap(x, self._box(owner))
        y = self._problem.batches.outputs(x, budget)
        margin, _ = self.margins(x, y, torch.arange(x.shape[0], device=x.device), owner)
        margin = margin.reshape(part.numel(), -1)
        value, at = margin.topk(min(_CLIMBERS, margin.shape[1]), dim=1, largest=False)
        points = x.reshape(part.numel(), share.shape[0], -1)
        place = points[torch.arange(part.numel(), device=x.device)[:, None], at]
        if self.best_x is not None:
            value[:, -1], place[:, -1] = self.best[part], self.best_x[part]
        return value, place

    def _climb(
        self,
        start: tuple[Tensor, Tensor],
        part: Tensor,
        *,
        generator: torch.Generator,
        rounds: int,
        budget: Budget,
    ) -> Witness | None:
        """Rounds of ever smaller random steps from the climbers (D', T) at (D', T, n_in)."""
        value, place = start
        n_in = place.shape[-1]
        owner = part[:, None, None].expand(-1, place.shape[1], _CHILDREN).flatten()
        boxes, box = self._problem.boxes, self._box(part)
        width = (
            (boxes.upper[box] - boxes.lower[box])[:, None, None]
            .expand(-1, place.shape[1], _CHILDREN, -1)
            .reshape(-1, n_in)
        )
        spread = 0.1
        for _ in range(rounds):
            around = place[:, :, None].expand(-1, -1, _CHILDREN, -1).reshape(-1, n_in)
            x = self._snap(nearby(around, width, spread, generator), self._box(owner))
            y = self._problem.batches.outputs(x, budget)
            everyone = torch.arange(x.shape[0], device=x.device)
            witness = self._judge(x, y, everyone, owner, limit=4, budget=budget)
            if witness is not None or budget.over:
                return witness
            margin, _ = self.margins(x, y, everyone, owner)
            child, at = margin.reshape(*value.shape, _CHILDREN).min(-1)
            chosen = x.reshape(*value.shape, _CHILDREN, n_in).gather(2, at[..., None, None].expand(-1, -1, 1, n_in))
            better = child < value
            value = torch.where(better, child, value)
            place = torch.where(better[..., None], chosen[:, :, 0], place)
            spread *= 0.6
        return None

    def _judge(
        self, x: Tensor, y: Tensor, point: Tensor, part: Tensor, *, limit: int, budget: Budget
    ) -> Witness | None:
        """Remember the best points of pairs (P,), and confirm up to `limit` promising points."""
        step = max(1, _ELEMENTS // self._problem.rows.elements)
        figures = [self.margins(x, y, *pair) for pair in zip(point.split(step), part.split(step), strict=True)]
        if not figures:
            return None
        margin, relative = (torch.cat(column) for column in zip(*figures, strict=True))
        self._remember(x, margin, point, part)
        hits = torch.nonzero(relative <= _PROMISING).flatten()
        tried: set[int] = set()
        for at in hits[relative[hits].argsort(stable=True)].tolist():
            if budget.over or len(tried) >= limit:
                return None
            if int(point[at]) in tried:
                continue
            tried.add(int(point[at]))
            witness = self._problem.confirm(x[point[at]].double().cpu().numpy(), int(part[at]))
            if witness is not None:
                return witness
        return None

    def _remember(self, x: Tensor, margin: Tensor, point: Tensor, part: Tensor) -> None:
        """Update the best margin of each disjunct and, of equal points, the first."""
        new = self.best.scatter_reduce(0, part, margin, "amin")
        improved = new < self.best
        self.best = new
        if self.best_x is None or not bool(improved.any()):
            return
        here = torch.nonzero(improved[part] & (margin == new[part])).flatten()
        none = torch.full_like(part[:1], x.shape[0]).expand(new.shape[0])
        first = none.scatter_reduce(0, part[here], point[here], "amin")
        chosen = torch.nonzero(first < x.shape[0]).flatten()
        self.best_x[chosen] = x[first[chosen]]

    def _box(self, part: Tensor) -> Tensor:
        """The box of each disjunct."""
        return torch.as_tensor(self._problem.boxes.box, device=part.device)[part]

    def _snap(self, x: Tensor, box: Tensor) -> Tensor:
        boxes = self._problem.boxes
        return boxes.snap(x, boxes.lower[box], boxes.upper[box])
