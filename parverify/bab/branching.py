"""Which neuron to split: a cheap score for all, then the children's bounds for the best few.

The score of a neuron is how much of the bound its relaxation may cost: the largest gap between function and line on its
box, times the row's coefficient (the BaBSR score of ReLU, Bunel et al., JMLR 2020, for any activation, as in GenBaB).
The best candidates are compared by bounding both children once without optimizing (filtered smart branching, De Palma
et al., 2021): the split whose worse child is best wins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parverify.bab.input import nearest_row
from parverify.graph.ir import Node
from parverify.program.sweep import Swept

if TYPE_CHECKING:
    from parverify.bab.activation import ActivationSpace, BatchRun

MOVABLE = 0.01  # weight of the gap of a line that alpha has already moved to where it costs least


@dataclass(frozen=True)
class Choice:
    """The splits of D domains, best first.

    Args:
        node, index, point: (D, K) which neuron (number of the bounded node, flat index) and where to cut it.
        count: (D,) how many of the K are usable.
    """

    node: Tensor
    index: Tensor
    point: Tensor
    count: Tensor

    def take(self, at: Tensor) -> Choice:
        """The choices of some domains."""
        return Choice(self.node[at], self.index[at], self.point[at], self.count[at])


def scores(space: ActivationSpace, run: BatchRun, swept: Swept) -> list[Tensor]:
    """For each bounded node (D, n): what its neurons' relaxations cost the row that is nearest to closing its domain.

    Where they cost that row nothing, the other rows of the conjunction count; where they cost no row anything, every
    undecided ReLU is worth a split, because only a leaf with all of them decided can be handed to a linear program.
    """
    count = len(run.domains)
    lower = swept.lower.reshape(count, run.width) - space.problem.need[run.part]
    taps = {name: A.reshape(count * run.width, -1) for name, A in swept.taps.items()}
    tables = [
        _costs(space, run, {name: _signed(A[row :: run.width]) for name, A in taps.items()}) for row in range(run.width)
    ]
    spread = torch.stack([torch.stack([score.sum(1) for score in scored]).sum(0) for scored in tables], 1)
    best = nearest_row(lower, spread)
    here = torch.arange(count, device=best.device)
    table = [torch.stack(group, 1)[here, best] for group in zip(*tables, strict=True)]
    if run.width > 1 and bool(_idle(table).any()):
        everyone = {name: _signed(A) for name, A in taps.items()}
        summed = {
            name: (above.reshape(count, run.width, -1).sum(1), below.reshape(count, run.width, -1).sum(1))
            for name, (above, below) in everyone.items()
        }
        table = _instead(table, _costs(space, run, summed))
    if space.graph.piecewise_linear and bool(_idle(table).any()):
        one = {node.name: (torch.ones_like(run.boxes[node.inputs[0]][0]),) * 2 for node in space.graph.nonlinear}
        table = _instead(table, _costs(space, run, one))
    return table


def _signed(A: Tensor) -> tuple[Tensor, Tensor]:
    """The magnitudes of negative and of positive coefficients: how much the upper and the lower line count."""
    return A.clamp(max=0).abs(), A.clamp(min=0)


def _idle(table: list[Tensor]) -> Tensor:
    """(D,) domains without any score."""
    return torch.stack([(score <= 0).all(1) for score in table]).all(0)


def _instead(table: list[Tensor], other: list[Tensor]) -> list[Tensor]:
    """Other scores where there is none."""
    idle = _idle(table)[:, None]
    return [torch.where(idle, there, here) for here, there in zip(table, other, strict=True)]


def _costs(space: ActivationSpace, run: BatchRun, weights: dict[str, tuple[Tensor, Tensor]]) -> list[Tensor]:
    total = {name: torch.zeros_like(run.boxes[name][0]) for name in space.names}
    for node in space.graph.nonlinear:
        if node.name in weights:
            _add_cost(total, node, weights[node.name], run)
    return [total[name].nan_to_num(nan=0.0, posinf=torch.finfo(total[name].dtype).max) for name in space.names]


def _add_cost(total: dict[str, Tensor], node: Node, weights: tuple[Tensor, Tensor], run: BatchRun) -> None:
    above, below = weights
    boxes = [run.boxes[name] for name in node.inputs]
    if node.op == "act":
        upper_gap, lower_gap = node.attrs["activation"].gap(*boxes[0])
        upper_weight, lower_weight = (
            MOVABLE if role in run.relaxed[node.name].free else 1.0 for role in ("upper", "lower")
        )
        cost = torch.where(above > 0, upper_weight * above * upper_gap, 0.0) + torch.where(
            below > 0, lower_weight * below * lower_gap, 0.0
        )
        total[node.inputs[0]] = total[node.inputs[0]] + cost
        return
    (lx, ux), (ly, uy) = boxes
    cost = (above + below) * (ux - lx) * (uy - ly) / 4
    wide_x = (ux - lx) >= (uy - ly)
    total[node.inputs[0]] = total[node.inputs[0]] + torch.where(wide_x, cost, 0.0)
    total[node.inputs[1]] = total[node.inputs[1]] + torch.where(wide_x, 0.0, cost)


def split_points(space: ActivationSpace, run: BatchRun) -> list[Tensor]:
    """For each bounded node (D, n): where to cut; the first nonlinearity that reads it says so."""
    points = []
    for name in space.names:
        low, high = run.boxes[name]
        middle = (low + high) / 2
        readers = [node for node in space.graph.nonlinear if name in node.inputs and node.op == "act"]
        points.append(readers[0].attrs["activation"].split_point(low, high) if readers else middle)
    return points


def choose_splits(space: ActivationSpace, run: BatchRun, swept: Swept, depth: int) -> Choice:
    """The best `depth` splits of every domain."""
    table = scores(space, run, swept)
    points = split_points(space, run)
    usable = []
    for score, point, name in zip(table, points, space.names, strict=True):
        low, high = run.boxes[name]
        usable.append(torch.where((point > low) & (point < high), score, 0.0))
    flat, cut = torch.cat(usable, 1), torch.cat(points, 1)
    sizes = torch.tensor([score.shape[1] for score in table])
    first = torch.cumsum(sizes, 0) - sizes
    number = torch.repeat_interleave(torch.arange(len(sizes)), sizes).to(flat.device)
    offset = torch.repeat_interleave(first, sizes).to(flat.device)
    most = min(max(depth, space.options.candidates), flat.shape[1])
    value, at = flat.topk(most, dim=1)
    if depth == 1 and most > 1:
        order = _look_ahead(space, run, value, number[at], at - offset[at], cut.gather(1, at))
        at, value = at.gather(1, order), value.gather(1, order)
    at, value = at[:, :depth], value[:, :depth]
    count = (value > 0).sum(1)
    return Choice(number[at].cpu(), (at - offset[at]).cpu(), cut.gather(1, at).cpu(), count.cpu())


def _look_ahead(
    space: ActivationSpace, run: BatchRun, value: Tensor, node: Tensor, index: Tensor, point: Tensor
) -> Tensor:
    """(D, K) candidates ordered by the bound of the worse child, unusable ones last."""
    from parverify.bab.activation import BatchRun

    gains = []
    for k in range(value.shape[1]):
        here = Choice(
            node[:, k : k + 1].cpu(),
            index[:, k : k + 1].cpu(),
            point[:, k : k + 1].cpu(),
            torch.ones(len(run.domains), dtype=torch.long),
        )
        children = space._children(run.domains, here)
        trial = BatchRun(space, children)
        rows = trial.sweep().lower.reshape(len(children), run.width)
        bound = space.problem.excess(rows, trial.part).reshape(2, -1)
        gain = torch.minimum(bound[0], bound[1]) + 0.1 * torch.maximum(bound[0], bound[1]).clamp(max=0)
        gains.append(torch.where(value[:, k] > 0, gain, -torch.inf))
    stacked = torch.stack(gains, 1).nan_to_num(nan=-torch.inf)
    return stacked.argsort(dim=1, descending=True, stable=True)
