"""The search for a witness: cheap looks first, then descent, and every finding through one door.

The search can only ever miss a witness; it can't invent one, because `confirm` replays the original network. It
returns None when its time is over, leaving it to the caller to ask the clock why.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from parverify.attack.batches import Batches, Budget, Forward
from parverify.attack.candidates import CROSSED, corners, coverage, crosses, in_boxes, landmarks, uniform
from parverify.attack.parts import Boxes, Rows
from parverify.attack.pgd import Descent, Problem
from parverify.attack.replay import Confirmer, Replay
from parverify.attack.survey import Survey
from parverify.clock import Clock
from parverify.frontend.query import Query
from parverify.parallel.comm import Comm
from parverify.verdict import Witness

_LOW_DIMENSION = 8
_COVERAGE = 65536
_ELEMENTS = 4_000_000
_CLIMB_ROUNDS = 16


class WitnessSearch:
    """Searches the unsafe region of one query for a point that the original network really maps into it.

    Args:
        forward: the engine's network, (B, n_in) -> (B, n_out), flat and differentiable.
        replay: the original network, (n_in,) float64 -> (n_out,) float64.
        query: the property.
        input_dtype: the type of the original network's input; witnesses are numbers of it where the box has any.
        dtype, device: those of `forward`.
        seed: two searches with one seed do the same, as far as their time reaches.
        clock: the deadline of the run.
        comm: the ranks that search together, each with the same arguments; None for one.

    Raises:
        ModelError: if `input_dtype` is one whose numbers can't be replayed.
    """

    def __init__(
        self,
        forward: Forward,
        replay: Replay,
        query: Query,
        *,
        input_dtype: torch.dtype,
        dtype: torch.dtype,
        device: torch.device | str,
        seed: int,
        clock: Clock,
        comm: Comm | None = None,
    ) -> None:
        self._dtype, self._device, self._seed, self._clock = dtype, torch.device(device), seed, clock
        self._draws, self._parts = 0, len(query)
        boxes = Boxes.of(query, input_dtype=input_dtype, dtype=dtype, device=self._device)
        self._active = np.flatnonzero(boxes.box >= 0)
        self._confirmer = Confirmer(replay, query, boxes.grids, boxes.box)
        self._scanned = False
        if self._active.size == 0:
            return
        rows = Rows.of(query, dtype=dtype, device=self._device)
        batches = Batches(forward, n_in=query.n_in, n_out=query.n_out, dtype=dtype, device=self._device, comm=comm)
        self._problem = Problem(batches, rows, boxes, self._confirmer)
        self._survey = Survey(self._problem)

    @property
    def replays(self) -> int:
        """How often the original network was replayed."""
        return self._confirmer.replays

    @property
    def margins(self) -> np.ndarray:
        """The smallest margin seen of each disjunct by the looks without gradients, (D,); inf where none was seen."""
        if self._active.size == 0:
            return np.full(self._parts, np.inf)
        return self._survey.best.double().cpu().numpy()

    def confirm(self, x: np.ndarray, disjunct: int | None = None) -> Witness | None:
        """The only door to `sat`: move `x` into a box, replay it there, and check with zero tolerance.

        Args:
            x: (n_in,), in the original network's flat input order.
            disjunct: whose box to move `x` into; None for the nearest box. Whichever it is, the replayed point is
                checked against all disjuncts.
        """
        if self._active.size == 0:
            return None
        return self._confirmer(x, disjunct)

    def try_points(self, points: Tensor, disjuncts: Tensor | None = None, *, limit: int = 16) -> Witness | None:
        """Evaluate margins at points, replay the promising ones.

        Args:
            points: (B, n_in); moved into the disjunct's box.
            disjuncts: (B,) int64, the disjunct of each point; None to try each with all disjuncts of the boxes that
                hold it, or of the nearest ones if none does.
            limit: how many points are replayed at most per batch of pairs.
        """
        budget = Budget.of(self._clock, math.inf)
        if self._active.size == 0 or points.shape[0] == 0 or budget.over:
            return None
        x = self._clean(points)
        for place in torch.arange(x.shape[0], device=self._device).split(self._problem.batches.wave):
            if disjuncts is None:
                point, box = self._places(x[place])
                witness = self._survey.look(x[place][point], box, limit=limit, budget=budget)
            else:
                part = disjuncts.to(self._device, torch.int64)[place]
                here = torch.as_tensor(self._problem.boxes.box, device=self._device)[part] >= 0
                witness = self._survey.look_at_pairs(x[place][here], part[here], limit=limit, budget=budget)
            if witness is not None or budget.over:
                return witness
        return None

    def scan(self, *, seconds: float) -> Witness | None:
        """Look at landmarks of every box; where few inputs vary, cover the boxes and climb from the best points."""
        self._scanned = True
        budget = Budget.of(self._clock, seconds)
        if self._active.size == 0 or budget.over:
            return None
        return self._scan_landmarks(budget) or self._scan_coverage(budget)

    def pgd(
        self,
        *,
        restarts: int,
        steps: int,
        seconds: float,
        disjuncts: Sequence[int] | None = None,
        starts: Tensor | None = None,
    ) -> Witness | None:
        """Descend on the margins of all disjuncts at once; the first call scans, for up to 0.3 of its time.

        Args:
            restarts: starts per disjunct.
            steps: steps per start.
            seconds: the time this call may take; less if the clock has less.
            disjuncts: which ones; None for all.
            starts: (S, n_in), where the first S restarts of every disjunct start (all S of them are used).
        """
        budget = Budget.of(self._clock, seconds)
        if self._active.size == 0 or budget.over:
            return None
        if not self._scanned:
            witness = self.scan(seconds=0.3 * budget.left)
            if witness is not None:
                return witness
        return self._descend(self._chosen(disjuncts), self._rounds(restarts, starts), steps, starts, budget)

    def _descend(
        self, chosen: Tensor, restarts: int, steps: int, starts: Tensor | None, budget: Budget
    ) -> Witness | None:
        """Waves of pairs, restart by restart, each with its share of the time."""
        given = None if starts is None or starts.shape[0] == 0 else self._clean(starts)
        total, size = restarts * chosen.numel(), self._problem.batches.wave
        for begin in range(0, total, size):
            if budget.over:
                return None
            pair = torch.arange(begin, min(begin + size, total), device=self._device)
            part, restart = chosen[pair % chosen.numel()], pair // chosen.numel()
            generator = self._generator()
            x = self._starts(part, restart, given, generator)
            waves_left = -((begin - total) // size)
            share = budget.share(max(1 / waves_left, 1 / 8))
            witness = Descent(self._problem, x, part, restart, generator=generator).run(steps, share)
            if witness is not None:
                return witness
        return None

    def _starts(self, part: Tensor, restart: Tensor, given: Tensor | None, generator: torch.Generator) -> Tensor:
        """Where pairs start: the points given; the best point seen or the centre; then corners and anywhere."""
        boxes = self._problem.boxes
        box = self._box(part)
        lower, upper = boxes.lower[box], boxes.upper[box]
        x = in_boxes(lower, upper, uniform(tuple(lower.shape), lower, generator))
        corner = corners(lower, upper, 1, generator)[:, 0]
        x = torch.where((restart % 4 == 2)[:, None], corner, x)
        centre = in_boxes(lower, upper, torch.full_like(lower, 0.5))
        best = self._survey.best_x
        if best is not None:
            centre = torch.where(torch.isfinite(self._survey.best[part])[:, None], best[part], centre)
        x = torch.where((restart == 0)[:, None], centre, x)
        if given is not None:
            taken = restart < given.shape[0]
            x = torch.where(taken[:, None], given[restart.clamp(max=given.shape[0] - 1)], x)
        return x

    def _scan_landmarks(self, budget: Budget) -> Witness | None:
        boxes, batches = self._problem.boxes, self._problem.batches
        crossed = 3 * min(CROSSED, boxes.lower.shape[1])
        cross = len(boxes) <= 16 and crossed <= batches.wave
        count = max(2, min(64, 256 // len(boxes), batches.size, batches.wave // 6))
        generator = self._generator()
        for box in self._box_waves(8 + 5 * count + crossed * cross):
            lower, upper = boxes.lower[box], boxes.upper[box]
            x = landmarks(lower, upper, count, generator)
            if cross:
                x = torch.cat([x, crosses(lower, upper)], dim=1)
            witness = self._look(x, box, budget)
            if witness is not None or budget.over:
                return witness
        return None

    def _scan_coverage(self, budget: Budget) -> Witness | None:
        """For inputs of few dimensions: even coverage, and a climb from its best points."""
        boxes = self._problem.boxes
        if budget.over or int((boxes.upper > boxes.lower).any(0).sum()) > _LOW_DIMENSION:
            return None
        count = min(max(64, _COVERAGE // len(boxes)), _COVERAGE // 4)
        seed = self._next_seed()
        half = budget.share(0.5)
        for box in self._box_waves(count):
            x = coverage(boxes.lower[box], boxes.upper[box], count, seed)
            witness = self._look(x, box, half)
            if witness is not None:
                return witness
            if half.over:
                break
        unit = torch.ones_like(boxes.lower[:1])
        free = (boxes.upper > boxes.lower).any(0).to(unit)
        share = coverage(torch.zeros_like(unit), free * unit, count if self._parts <= 4 else min(count, 4096), seed)[0]
        return self._survey.climb(share, generator=self._generator(), rounds=_CLIMB_ROUNDS, budget=budget)

    def _look(self, x: Tensor, box: Tensor, budget: Budget) -> Witness | None:
        """Survey points (U', K, n_in) of the boxes `box` (U',)."""
        return self._survey.look(x.flatten(0, 1), box.repeat_interleave(x.shape[1]), limit=16, budget=budget)

    def _box_waves(self, points: int) -> tuple[Tensor, ...]:
        """All boxes, in groups small enough for `points` points of each."""
        everyone = torch.arange(len(self._problem.boxes), device=self._device)
        return everyone.split(max(1, self._problem.batches.wave // points))

    def _places(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The boxes that hold each point, or the nearest: two (Q,) tensors, point and box."""
        boxes = self._problem.boxes
        if len(boxes) == 1:
            return torch.arange(x.shape[0], device=x.device), torch.zeros_like(x[:, 0], dtype=torch.int64)
        away = []
        for some in x.split(max(1, _ELEMENTS // boxes.lower.numel())):
            outside = torch.maximum(boxes.lower - some[:, None], some[:, None] - boxes.upper)
            away.append(outside.clamp(min=0).amax(-1))
        distance = torch.cat(away)
        point, box = torch.nonzero(distance <= distance.amin(-1, keepdim=True), as_tuple=True)
        return point, box

    def _chosen(self, disjuncts: Sequence[int] | None) -> Tensor:
        """Disjuncts with a box, the most promising first."""
        wanted = self._active if disjuncts is None else np.intersect1d(self._active, np.asarray(disjuncts, dtype=int))
        chosen = torch.as_tensor(wanted, device=self._device)
        return chosen[self._survey.best[chosen].argsort(stable=True)]

    @staticmethod
    def _rounds(restarts: int, starts: Tensor | None) -> int:
        return max(restarts, 0 if starts is None else starts.shape[0])

    def _box(self, part: Tensor) -> Tensor:
        return torch.as_tensor(self._problem.boxes.box, device=self._device)[part]

    def _clean(self, points: Tensor) -> Tensor:
        """Points in the engine's dtype and on its device, without NaN."""
        points = points.detach().to(self._device, self._dtype)
        return torch.nan_to_num(points.reshape(points.shape[0], -1))

    def _next_seed(self) -> int:
        self._draws += 1
        return (self._seed * 1_000_003 + self._draws) % (1 << 62)

    def _generator(self) -> torch.Generator:
        """A fresh source of random numbers: what one phase draws does not depend on how far another came."""
        return torch.Generator().manual_seed(self._next_seed())
