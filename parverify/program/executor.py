"""Runs programs on one rank: the seam between the algorithms and where weights, rows and tiles really are.

Algorithms in `parverify.bounds` and `parverify.bab` reach constants, evaluate values, sweep rows and deal out row tiles
only through an `Executor`. Dividing them over ranks means another placement, not another algorithm; one process is the
placement of one rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from parverify.bounds.region import Region
from parverify.errors import ModelError
from parverify.graph.ir import BoundGraph, Node, on_device
from parverify.ops.kernel import KERNEL, Box, Consts, inflate
from parverify.ops.relaxation import Alpha, Relaxations, Relaxed, relax
from parverify.ops.rounding import VERDICT_ULPS, row_slack, slack
from parverify.ops.weighted import WEIGHTED, Piece, channel_of, multiplications, per_channel, piece_of, whole
from parverify.parallel.collectives import copy
from parverify.parallel.comm import Alone, Comm, agree
from parverify.program.rows import OneHot, Picked, Rows, Tiled
from parverify.program.steps import (
    Affine,
    Concretize,
    Join,
    Placement,
    Program,
    Relax,
    Total,
    compile_sweep,
    divided_constants,
    single,
    weighted_nodes,
)
from parverify.program.sweep import Splits, Sweep, Swept
from parverify.program.weights import Weights, collect_channels, mapped, takes_some


class Executor:
    """One rank. Alone, it holds all constants; otherwise what its placement says.

    Args:
        graph: what is bounded.
        dtype, device: of the bounds.
        live: keep constants attached to the module's parameters, so that bounds can be differentiated.
        placement: how weights are held and multiplied; None for one process.
        held: (weight constant, piece) -> tensor on this rank, for a placement.
        comm: the ranks that share the placement.
        window: the pieces of all of them, where this rank can read them.
    """

    def __init__(
        self,
        graph: BoundGraph,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        live: bool = False,
        placement: Placement | None = None,
        held: Mapping[tuple[str, Piece], Tensor] | None = None,
        comm: Comm | None = None,
        window: Mapping[tuple[str, Piece], Tensor] | None = None,
    ) -> None:
        self.graph = on_device(graph, torch.device(device))
        self.dtype = dtype
        self.device = torch.device(device)
        self.comm: Comm = Alone() if comm is None else comm
        self.placement = single(self.graph) if placement is None else placement
        held = {} if held is None else held
        divided = set(divided_constants(self.graph)) if self.placement.size > 1 else set()
        memo: dict[int, Tensor] = {}
        self._constants = {
            name: (const.live(memo) if live else const.value.detach()).to(self.device, dtype)
            for name, const in graph.constants.items()
            if name not in divided
        }
        self.live = any(value.requires_grad for value in self._constants.values())
        placed = {key: tensor.to(self.device, dtype) for key, tensor in held.items()}
        for node in weighted_nodes(self.graph):
            name = node.consts["weight"]
            if name not in divided:
                placed[name, piece_of(node, whole(node))] = self._constants[name]
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        self.weights = Weights(self.graph, self.placement, placed, self.comm, like, window)
        self._divided = divided
        self.frugal = False  # let go of the buffers of weights while no weight is needed; they are made anew each time
        self.skips = False  # leave neurons that are off on all domains out of rows and products; other rounding
        self.worth = 0  # rows with fewer multiplications are bounded by every rank instead of dealing them out
        self._roles: dict[str, Consts] = {}

    @functools.cache  # noqa: B019  (an executor lives as long as its run)
    def program(self, start: str, *, one_hot: bool = False) -> Program:
        """The sweep from rows on `start`."""
        return compile_sweep(self.graph, start, self.placement, one_hot=one_hot)

    def constants(self, node: Node) -> Consts:
        """Role -> tensor of a node's constants that are whole on this rank."""
        if node.name not in self._roles:
            whole = {role: name for role, name in node.consts.items() if name not in self._divided}
            self._roles[node.name] = {role: self._constants[name] for role, name in whole.items()}
        return self._roles[node.name]

    @functools.cache  # noqa: B019
    def takes_some(self, name: str) -> bool:
        """Whether rows that arrive on a node could have coefficients on some of its scalars alone."""
        node = self.graph[name]
        readers = sum(name in other.inputs for other in self.graph.nodes)
        if self.live or readers != 1 or node.op not in WEIGHTED or name in self.placement.channels:
            return False
        return takes_some(node, self.placement.lowerings[name].push)

    @functools.cache  # noqa: B019
    def offset(self, node: Node) -> Tensor:
        """(n,) what an affine node gives for inputs of zero: its constants, spread over its value."""
        consts = self.constants(node)
        if node.op in WEIGHTED:
            value = torch.zeros(node.shape, dtype=self.dtype, device=self.device)
            bias = consts.get("bias")
            return (value if bias is None else value + per_channel(node, bias.detach())).reshape(-1)
        zeros = [torch.zeros(1, *shape, dtype=self.dtype, device=self.device) for shape in node.attrs["in_shapes"]]
        return KERNEL[node.op].forward(node, consts, zeros).detach().reshape(-1)

    def resident(self) -> list[Tensor]:
        """The tensors that stay on this rank."""
        found = {id(tensor): tensor for tensor in (*self._constants.values(), *self.weights.tensors())}
        return list(found.values())

    def resident_bytes(self) -> int:
        """Bytes of constants that stay on this rank."""
        return sum(value.numel() * value.element_size() for value in self.resident())

    # --- ranks -----------------------------------------------------------------------------------------------------

    @property
    def splits_rows(self) -> bool:
        """Whether row tiles are dealt to the ranks."""
        return self.placement.splits_rows and self.comm.size > 1

    def gets_rows(self, name: str) -> bool:
        """Whether the placement bounds a node's neurons by rows at all."""
        return name not in self.placement.interval_only

    @functools.cache  # noqa: B019
    def work(self, start: str, iterations: int = 0) -> int:
        """Multiplications with weights for one row on `start`; a gradient takes two more sweeps, roughly."""
        passed = [self.graph[step.node] for step in self.program(start).steps if isinstance(step, Affine)]
        shapes = [
            (node, self.graph.constants[node.consts["weight"]].value.shape) for node in passed if node.op in WEIGHTED
        ]
        return (1 + 3 * iterations) * sum(multiplications(node, shape) for node, shape in shapes)

    def deal(self, count: int, tile: int, bound: Callable[[slice], Tensor], work: int = 0) -> Tensor:
        """Bound `count` rows in tiles, each on one rank where the placement splits rows, else on all.

        Tiles are dealt out in order, so that tile k is the same rows at any number of ranks. Where the last round has
        fewer tiles than ranks, a rank repeats a row, so that all enter the same collectives.

        Args:
            count: of rows (or pairs of rows), at least one.
            tile: the most in a tile; 0 or less for one tile a rank.
            bound: which rows, n of them -> (n, w).
            work: multiplications for one row, see `work`.

        Returns:
            (count, w), the same on every rank.
        """
        divided = self.splits_rows and count * work >= self.worth
        ranks, rank = (self.comm.size, self.comm.rank) if divided else (1, 0)
        tiles = -(-count // tile) if tile > 0 else min(count, ranks)
        size, rounds = -(-count // tiles), -(-tiles // ranks)
        found: list[tuple[int, Tensor]] = []  # round, what its tile gave
        for number, times in self._rounds(rounds):
            first = (number * ranks + rank) * size
            part = slice(first, min(first + size, count)) if first < count else slice(0, 1)
            with self.comm.meter.times(times):
                value = bound(part)
            if first < count:
                found.append((number, value))
        if ranks == 1 and not value.is_meta:
            return torch.cat([value for _, value in found])
        mine = value.new_zeros(rounds, size, *value.shape[1:])
        for number, bounds in found:
            mine[number, : len(bounds)] = bounds
        if ranks == 1:
            return mine.flatten(0, 1)[:count]
        out = mine.new_empty(ranks * rounds, *mine.shape[1:])
        self.comm.all_gather(out, mine).wait()
        return out.reshape(ranks, *mine.shape).transpose(0, 1).flatten(0, 2)[:count]

    def spread(self, rows: Tiled, work: Callable[[Rows], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """What `work` makes of rows, (n,) and (n, w) for n of them: each on one rank where the placement deals rows.

        So it is the same on all ranks even where each of them would sum up in an order of its own. Rows of several
        domains must say whose they are.
        """
        if not self.splits_rows:
            return work(rows)

        def bound(part: slice) -> Tensor:
            first, second = work(rows.take(part))
            return torch.cat([first[:, None], second], 1)

        both = self.deal(len(rows), 0, bound)
        return both[:, 0], both[:, 1:]

    def _rounds(self, rounds: int) -> list[tuple[int, int]]:
        """The rounds to go through, and how often each counts: a dry run needs those that are alike only once.

        The first is not like the others, because buffers are made while it runs.
        """
        if self.device.type == "meta" and rounds > 3:
            return [(0, 1), (1, rounds - 2), (rounds - 1, 1)]
        return [(number, 1) for number in range(rounds)]

    def replicated(self, alphas: Mapping[str, Alpha]) -> dict[str, Tensor]:
        """Those alphas that every rank has, by a name for messages; not those of channels that it has alone."""
        return {
            f"{role} alpha of {name}": tensor
            for name, alpha in alphas.items()
            if name not in self.placement.channels
            for role, tensor in alpha.items()
        }

    def agree(self, tensors: Mapping[str, Tensor]) -> None:
        """Check that replicated tensors are the same on all ranks, by their hashes.

        Raises:
            DisagreementError: naming the tensor.
        """
        if self.comm.size > 1:
            agree(self.comm, tensors)

    def channels(self, name: str) -> tuple[int, int] | None:
        """The flat range of a node's value that a sweep's rows have on this rank; None for all of it."""
        if name not in self.placement.channels:
            return None
        place, node = self.placement.channels[name], self.graph[name]
        inner = node.numel // node.shape[place.dim]
        first, last = place.mine
        return first * inner, last * inner

    def relax(self, node: Node, boxes: Sequence[Box]) -> Relaxed:
        """The relaxation of a nonlinear node, of those of its neurons that a sweep has on this rank.

        Args:
            node: an `act` or `mul`.
            boxes: bounds of its inputs, (D, *shape) each, replicated.
        """
        if node.name not in self.placement.channels:
            return relax(node, list(boxes))
        place = self.placement.channels[node.name]
        first, last = place.mine
        shape = tuple(last - first if i == place.dim else size for i, size in enumerate(node.shape))
        mine = [
            (
                copy(low, self.comm).narrow(place.dim + 1, first, last - first),
                copy(high, self.comm).narrow(place.dim + 1, first, last - first),
            )
            for low, high in boxes
        ]
        made = relax(replace(node, shape=shape), mine)
        with torch.no_grad():
            everywhere = relax(node, [(low.detach(), high.detach()) for low, high in boxes]).free
        # a rank without a free neuron gets alphas of no neurons: what it differentiates must not depend on its channels
        nothing = torch.empty(0, dtype=torch.int64, device=self.device)
        return replace(made, free={role: made.free.get(role, nothing) for role in everywhere})  # type: ignore[type-var]

    def own(self, name: str, flat: Tensor) -> Tensor:
        """Of (D, n) on a node's value, what belongs to the scalars that a sweep has on this rank."""
        mine = self.channels(name)
        return flat if mine is None else flat[:, mine[0] : mine[1]]

    # --- forward ---------------------------------------------------------------------------------------------------

    def evaluate(self, x: Tensor) -> Tensor:
        """Outputs (B, *output shape) of inputs (B, *input shape) or (B, n_in)."""
        return self.values(x)[self.graph.output]

    def values(self, x: Tensor) -> dict[str, Tensor]:
        """Values of all nodes, name -> (B, *shape)."""
        values = {self.graph.input.name: x.reshape(x.shape[0], *self.graph.input.shape)}
        for node in self.graph.nodes[1:]:
            inputs = [values[name] for name in node.inputs]
            consts = self.constants(node)
            if node.op in WEIGHTED and node.consts["weight"] in self._divided:
                (value,) = self._forward(node, inputs)
                bias = consts.get("bias")
                values[node.name] = value if bias is None else value + per_channel(node, bias)
            else:
                values[node.name] = KERNEL[node.op].forward(node, consts, inputs)
        return values

    def _forward(self, node: Node, xs: Sequence[Tensor], absolute: Sequence[bool] | None = None) -> list[Tensor]:
        lowering = self.placement.lowerings[node.name]
        return mapped(self.weights, node, (lowering.forward, lowering.back, True), absolute, xs)

    def interval(self, node: Node, boxes: Sequence[Box]) -> tuple[Box, Tensor | None]:
        """The box of a node's value from its inputs' boxes, (D, *shape), and the node's magnitudes.

        What is no number, or overflowed to the wrong side, is not known: -inf below, inf above.

        Returns:
            The box; (D, n) the largest sum of magnitudes of terms that its scalars are on it (see `Relaxations`), None
            where nothing is summed up.
        """
        summing = node.op not in ("act", "mul") and (KERNEL[node.op].mixing or bool(node.consts))
        summing = summing and slack(self.dtype) > 0  # without an allowance for rounding nobody asks for magnitudes
        with torch.no_grad():
            largest = [torch.maximum(low.abs(), high.abs()) for low, high in boxes] if summing else []
        if node.op in WEIGHTED and not self.live:
            box, magnitude = self._weighted_interval(node, boxes[0], largest)
        else:
            consts = self.constants(node)
            box, magnitude = KERNEL[node.op].interval(node, consts, boxes), None
            if summing:
                with torch.no_grad():
                    low, high = KERNEL[node.op].interval(node, consts, [(-size, size) for size in largest])
                    magnitude = torch.maximum(low.abs(), high.abs())
        unknown = torch.inf
        lower = box[0].nan_to_num(nan=-unknown, posinf=-unknown, neginf=-unknown)
        upper = box[1].nan_to_num(nan=unknown, posinf=unknown, neginf=unknown)
        return (lower, upper), None if magnitude is None else self._known(node, magnitude)

    def _known(self, node: Node, magnitude: Tensor) -> Tensor:
        flat = magnitude.detach().flatten(1)
        if flat.is_meta or not flat.numel() or flat.amax() < torch.inf:  # not if one of them is no number
            return flat
        # where an input has no finite bound, the node's constants are all there is to go by
        return torch.where(flat.isfinite(), flat, self.offset(node).abs())

    def _weighted_interval(self, node: Node, box: Box, largest: Sequence[Tensor]) -> tuple[Box, Tensor | None]:
        """Centre, radius and magnitude, where it is asked for, in one pass over the weight."""
        center, radius = inflate(*box)
        sizes = [size * (1 + slack(size.dtype)) for size in largest]
        center, radius, *found = self._forward(node, [center, radius, *sizes], [False, True, *[True] * len(sizes)])
        magnitude = found[0] if found else None
        bias, extra = self.constants(node).get("bias"), slack(center.dtype)
        if bias is not None:
            shift = per_channel(node, bias)
            center = center + shift
            radius = radius + extra * shift.abs() if extra else radius
            magnitude = None if magnitude is None else magnitude + (1 + extra) * shift.abs()
        return (center - radius, center + radius), magnitude

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
        magnitudes = relaxed.magnitudes if isinstance(relaxed, Relaxations) else {}
        weighed = verdict or row_slack(self.dtype) > 0
        run = Sweep(self, self.begin(start, rows), region.domains, magnitudes, weighed=weighed)
        alphas, splits = alphas or {}, splits or {}
        lower, final = None, None
        tapped: dict[str, Tensor] = {}
        for step in self.program(start, one_hot=run.picked).steps:
            if isinstance(step, Affine):
                run.affine(step, splits)
            elif isinstance(step, Relax):
                if taps:
                    tapped[step.node] = self.whole_rows(step.node, run.at(step.node))
                run.relax(self.graph[step.node], relaxed[step.node], alphas.get(step.node), splits)
            elif isinstance(step, Join):
                run.join(step.node)
            elif isinstance(step, Total):
                run.total_constants()
            elif isinstance(step, Concretize):
                if self.frugal:
                    self.weights.rest()
                final = run.at(step.node, splits).flatten(1)
                lower = region.lower_bound(final, run.owner)
                if verdict:
                    extra = VERDICT_ULPS * torch.finfo(lower.dtype).eps
                    lower = lower - extra * (region.magnitude(final.detach(), run.owner) + run.sums.mass)
                lower = run.total(lower)
        if lower is None or final is None:
            raise ModelError(f"the sweep from {start} does not reach the input")
        return Swept(lower, final, tapped)

    def begin(self, start: str, rows: Rows) -> Rows:
        """Rows on `start` with their first product done, where that only picks slices of a weight."""
        node = self.graph[start]
        if not isinstance(rows, OneHot) or node.op not in WEIGHTED or self.live:
            return rows
        bias, constant = self.constants(node).get("bias"), None
        if bias is not None:
            constant = bias.index_select(0, channel_of(node, rows.index)) * rows.sign
        steps = self.placement.lowerings[start].pick
        return Picked(self.weights.pick(node, steps, rows.index, rows.sign), constant, rows.owner)

    def whole_rows(self, name: str, A: Tensor) -> Tensor:
        """Rows on all channels of a node's value, from those that this rank has."""
        place = self.placement.channels.get(name)
        return A if place is None else collect_channels(self.comm, A.detach(), place.dim + 1, place.sizes)
