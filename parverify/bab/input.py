"""Input splits: a domain is a box, bounded anew by CROWN with its parent's intermediate bounds to start from.

Where few inputs vary, halving boxes is complete in the limit for every continuous network and needs no multipliers. A
child inherits its parent's pre-activation boxes, so that neurons that were stable stay stable and only those still
unstable get rows. The dimension to halve is the one whose width costs the bound most, |A_i| (u_i - l_i). A row that is
flat still pays for the width, by relaxations: coefficients count as at least a thousandth of the steepest, in units of
the whole box, so that boxes become small in every dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from parverify.bab.combine import combine
from parverify.bab.domains import Domains
from parverify.bab.driver import Bounded
from parverify.bab.problem import Problem
from parverify.bounds.layers import BoundOptions, bound_layers, worth_rows
from parverify.bounds.region import BoxRegion
from parverify.clock import Clock
from parverify.ops.kernel import Box
from parverify.program.rows import Rows
from parverify.verdict import Witness

Confirm = Callable[[Tensor, Tensor], "Witness | None"]

FLAT = 1e-3  # of the steepest coefficient, the least that one counts
FEW = 64  # boxes up to which a batch is filled by halving several times: more would often be closed halved once
INHERIT_LIMIT = 20_000  # pre-activations per domain up to which boxes are inherited


class InputSpace:
    """Domains are input boxes. See `parverify.bab.driver.Space`.

    Args:
        problem: the query.
        options: how the layers of a child are bounded.
        clock: checked while bounding.
        confirm: tries candidate points (points, parts) and returns a witness.
    """

    def __init__(self, problem: Problem, options: BoundOptions, *, clock: Clock, confirm: Confirm) -> None:
        self.problem, self.options, self.clock = problem, options, clock
        self._confirm = confirm
        self.graph = problem.executor.graph
        sizes = [self.graph[name].numel for name in self.graph.bounded]
        self._inherited = self.graph.bounded if sum(sizes) <= INHERIT_LIMIT else ()
        self._weights = {name: (depth, self.graph[name].numel) for depth, name in enumerate(self.graph.bounded, 1)}

    def roots(self, part: Tensor) -> Domains:
        """The disjuncts' own boxes."""
        box = self.problem.box_of[part]
        low, high = self.problem.boxes.lower[box], self.problem.boxes.upper[box]
        columns = {
            "part": part,
            "lower": low.new_full((len(part),), -torch.inf),
            "low": low,
            "high": high,
            "score": (high - low),
            "depth": part.new_zeros(len(part)),
        }
        for name in self._inherited:
            size = self.graph[name].numel
            columns[f"box/{name}/low"] = low.new_full((len(part), size), -torch.inf)
            columns[f"box/{name}/high"] = low.new_full((len(part), size), torch.inf)
        columns["cost"] = low.new_full((len(part),), sum(depth * size for depth, size in self._weights.values()))
        return Domains({name: column.cpu() for name, column in columns.items()})

    def _cost(self, boxes: Mapping[str, Box], like: Tensor) -> Tensor:
        """(D,) what bounding halves of the boxes will cost: each neuron that gets rows, times the depth it is at.

        Args:
            boxes: of the layers; a layer that depends on no input has one for all domains.
            like: (D,) in the dtype of bounds.
        """
        total = torch.zeros_like(like)
        for name, (depth, _) in self._weights.items():
            total += depth * worth_rows(self.graph, name, boxes[name]).flatten(1).sum(1)
        return total

    def _score(self, A: Tensor, part: Tensor, region: BoxRegion) -> Tensor:
        """(D, n_in) what the width of each dim costs.

        Args:
            A: (D, n_in) the row that is to be closed.
            part: (D,) the disjuncts.
            region: the boxes.
        """
        box = self.problem.box_of.to(part.device)[part]
        whole = (self.problem.boxes.upper - self.problem.boxes.lower)[box]
        width = region.upper - region.lower
        steepest = (A.abs() * whole).amax(1, keepdim=True)
        steepest = steepest.masked_fill(steepest == 0, 1.0)  # the row is a constant
        share = width / whole.clamp(min=torch.finfo(whole.dtype).tiny)
        return torch.maximum(A.abs() * width, FLAT * steepest * share)

    def pad(self, parts: Sequence[Domains]) -> Sequence[Domains]:
        """All columns have fixed widths."""
        return parts

    def adopt(self, domains: Domains) -> Domains:
        """Nothing in a box depends on who bounded it; what it costs is unknown in old journals."""
        return domains if "cost" in domains.columns else domains.with_columns(cost=torch.zeros(len(domains)))

    def split(self, domains: Domains, children: int) -> tuple[Domains, Domains]:
        """Halve every box along its most costly dimensions, several where there are few boxes."""
        middle = (domains["low"] + domains["high"]) / 2
        splittable = (middle > domains["low"]) & (middle < domains["high"])
        stuck = ~splittable.any(1)
        rest, domains = domains.take(stuck), domains.take(~stuck)
        if not len(domains):
            return domains, rest
        depth = 1
        while len(domains) * 2 ** (depth + 1) <= min(children, FEW):
            depth += 1
        for _ in range(depth):
            domains = self._halve(domains)
        return domains, rest

    def _halve(self, domains: Domains) -> Domains:
        low, high = domains["low"], domains["high"]
        middle = (low + high) / 2
        usable = (middle > low) & (middle < high)
        score = torch.where(usable, domains["score"], -torch.inf)
        dim = score.argmax(1, keepdim=True)
        fine = usable.gather(1, dim)[:, 0]
        cut = middle.gather(1, dim)
        left = domains.with_columns(
            high=high.scatter(1, dim, cut),
            score=domains["score"].scatter(1, dim, domains["score"].gather(1, dim) / 2),
            depth=domains["depth"] + 1,
        )
        right = left.with_columns(low=low.scatter(1, dim, cut), high=high)
        whole, left, right = domains.take(~fine), left.take(fine), right.take(fine)
        return Domains({name: torch.cat([whole[name], left[name], right[name]]) for name in domains.columns})

    def bound(self, domains: Domains) -> Bounded:
        """CROWN on every box; closed ones are dropped, the others' minimizers are tried."""
        problem, executor = self.problem, self.problem.executor
        device = executor.device
        region = BoxRegion(domains["low"].to(device), domains["high"].to(device))
        known: dict[str, Box] = {}
        for name in self._inherited:
            shape = (len(domains), *self.graph[name].shape)
            known[name] = (
                domains[f"box/{name}/low"].to(device).reshape(shape),
                domains[f"box/{name}/high"].to(device).reshape(shape),
            )
        part = domains["part"].to(device)
        with torch.no_grad():
            found = bound_layers(executor, region, self.options, known=known, clock=self.clock)
            # a share of the rows has to say which domains it is of
            rows = problem.rows(part, torch.arange(len(part), device=device) if executor.splits_rows else None)

            def sweep(some: Rows) -> tuple[Tensor, Tensor]:
                swept = executor.sweep(self.graph.output, some, found.relaxed, region, verdict=True)
                return swept.lower, swept.A

            lower, A = executor.spread(rows, sweep)
        executor.agree({"bounds of a batch": lower, "rows on the input": A})
        width = problem.rows_per_part
        lower = lower.reshape(len(domains), width)
        closed = problem.closed(lower, part)
        A = A.reshape(len(domains), width, -1)
        best = nearest_row(lower - problem.need[part], (A.abs() * (region.upper - region.lower)[:, None]).sum(2))
        excess, points = problem.excess(lower, part), None
        if width > 1:
            together = combine(lower, A, problem.need[part], region)
            closed = closed | ((together.excess > 0) & ~problem.trivial[part])
            excess, points = torch.maximum(excess, together.bound(excess.dtype)), together.x.to(region.lower.dtype)
        A = A[torch.arange(len(domains), device=device), best]
        excess = torch.maximum(excess, domains["lower"].to(device))  # a parent's bound holds too
        columns = {
            "lower": excess,
            "score": self._score(A, part, region),
            "cost": self._cost(found.boxes, excess),
        }
        for name in self._inherited:
            low, high = found.boxes[name]
            columns[f"box/{name}/low"], columns[f"box/{name}/high"] = low.flatten(1), high.flatten(1)
        kept = ~closed
        open_domains = domains.with_columns(**{name: column.cpu() for name, column in columns.items()}).take(kept.cpu())
        witness = None
        if bool(kept.any()):
            points = region.minimizer(A, None) if points is None else points
            witness = self._confirm(points[kept].cpu(), part[kept].cpu())
        return Bounded(open_domains, int(closed.sum()), witness)

    def leaf(self, domains: Domains) -> tuple[int, Witness | None, list[str]]:
        """Boxes that are single points in this dtype: their corners are tried, and they stay unresolved."""
        witness = self._confirm(domains["low"], domains["part"])
        return (
            0,
            witness,
            ["an input box shrank to neighbouring numbers, and its bounds still do not decide"] * len(domains),
        )


def nearest_row(lower: Tensor, spread: Tensor) -> Tensor:
    """(D,) the row of each domain that splitting brings closest to being positive everywhere.

    A row that is affine on the box takes values in [lower, lower + spread]; the share of them that is not positive is
    -lower / spread. A row that is never positive (or does not vary) can't close any part of the box, however high it
    is.

    Args:
        lower, spread: (D, R).
    """
    missing = torch.where(lower + spread > 0, -lower / spread.clamp(min=torch.finfo(lower.dtype).tiny), torch.inf)
    hopeless = torch.isinf(missing).all(1, keepdim=True)
    return torch.where(hopeless, -spread, missing).argmin(1)
