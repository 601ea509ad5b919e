"""Activation splits with beta-CROWN: a domain is a list of split neurons over the root's intermediate bounds.

Intermediate bounds are those of the root box, clipped by the splits; a domain stores only its splits, its alphas and
its multipliers, so that its memory does not grow with the network's depth. Any nonlinearity can be split at a point
(GenBaB, Shi et al., 2024); a ReLU is split at zero. Bounding optimizes alphas and betas of a whole batch in a few
stages and drops what is closed in between (beta-CROWN, Wang et al., NeurIPS 2021).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from parverify.bab.branching import Choice, choose_splits
from parverify.bab.combine import combine
from parverify.bab.domains import Domains, pad_width
from parverify.bab.driver import Bounded
from parverify.bab.problem import Problem
from parverify.bab.shares import of_each
from parverify.bounds.alpha import Adam, ascend
from parverify.bounds.layers import LayerBounds
from parverify.bounds.region import Region, select
from parverify.clock import Clock
from parverify.ops.kernel import Box
from parverify.ops.relaxation import Alpha, Relaxations
from parverify.program.sweep import Splits, Swept
from parverify.verdict import Witness

Confirm = Callable[[Tensor, Tensor], "Witness | None"]
Decide = Callable[["ActivationSpace", Domains, Mapping[str, Box]], "tuple[bool, Witness | None, str]"]

FEW = 32  # domains up to which a batch is filled by several splits at once: more would often be closed by the first
SPLIT_COLUMNS = ("node", "index", "sign", "point", "beta")


@dataclass(frozen=True)
class BetaOptions:
    """How a batch of domains is bounded.

    Args:
        iterations: optimizer steps in all.
        lr_alpha, lr_beta: learning rates.
        candidates: splits per domain whose children are bounded before one is chosen.
    """

    iterations: int = 20
    lr_alpha: float = 0.05
    lr_beta: float = 0.05
    candidates: int = 3


class ActivationSpace:
    """Domains are split neurons. See `parverify.bab.driver.Space`.

    Args:
        problem: the query.
        region: the input boxes of the roots, K of them.
        layers: pre-activation bounds of the roots, (K, *shape) each.
        options: how to bound.
        clock: checked in every iteration.
        confirm: tries candidate points (points, parts) and returns a witness.
        decide: decides leaves exactly, or None where the network is not piecewise linear.
    """

    def __init__(
        self,
        problem: Problem,
        region: Region,
        layers: LayerBounds,
        options: BetaOptions,
        *,
        clock: Clock,
        confirm: Confirm,
        decide: Decide | None = None,
    ) -> None:
        self.problem, self.region, self.options, self.clock = problem, region, options, clock
        self.graph = problem.executor.graph
        self.names = list(self.graph.bounded)
        self.boxes = {name: (low.flatten(1), high.flatten(1)) for name, (low, high) in layers.boxes.items()}
        self.magnitudes = layers.relaxed.magnitudes
        self._confirm, self._decide = confirm, decide
        roots = self._relax({name: self.boxes[name] for name in self.names}, {})
        self._free = {name: relaxed.free for name, relaxed in roots.items()}
        one = self.roots(*torch.zeros((2, 1), dtype=torch.long, device=problem.executor.device))
        self._example = {name: (column.shape[1:], column.dtype) for name, column in one.columns.items()}

    # --- domains ---------------------------------------------------------------------------------------------------

    def roots(self, part: Tensor, root: Tensor, lower: Tensor | None = None) -> Domains:
        """One domain without splits for each pair of a disjunct and a root box, with default alphas; `lower` (D,) what
        is known of their bounds."""
        count, width = len(part), self.problem.rows_per_part
        like = self.boxes[self.names[0]][0]
        owner = root.repeat_interleave(width)
        relaxed = self._relax({name: self.boxes[name] for name in self.names}, self._free)
        columns = {
            "part": part,
            "root": root,
            "lower": like.new_full((count,), -torch.inf) if lower is None else lower,
            "node": part.new_zeros((count, 0)),
            "index": part.new_zeros((count, 0)),
            "sign": like.new_zeros((count, 0)),
            "point": like.new_zeros((count, 0)),
            "beta": like.new_zeros((count, width, 0)),
            "depth": part.new_zeros(count),
        }
        for name in self.problem.executor.program(self.graph.output).relaxed:
            for role, value in (
                relaxed[name].start(owner if len(self.boxes[self.names[0]][0]) > 1 else None, count * width).items()
            ):
                columns[f"alpha/{name}/{role}"] = value.reshape(count, width, -1)
        return Domains({name: column.cpu() for name, column in columns.items()})

    def pad(self, parts: Sequence[Domains]) -> Sequence[Domains]:
        """Split lists of equal width."""
        return pad_width(parts, SPLIT_COLUMNS)

    def adopt(self, domains: Domains) -> Domains:
        """Domains of another group of ranks, with default alphas where theirs are not this rank's.

        A rank may have alphas of its own channels alone, and those of one rank are all that travels or is journaled.
        Alphas only say where the next optimization starts; a domain's bound stays.
        """
        device, channels = self.problem.executor.device, self.problem.executor.placement.channels
        alphas = [name for name in self._example if name.startswith("alpha/")]
        theirs = {name: domains.columns.get(name) for name in alphas}
        foreign = [
            name
            for name in alphas
            if (column := theirs[name]) is None
            or (column.shape[1:], column.dtype) != self._example[name]
            or name.split("/")[1] in channels
        ]
        if not foreign:
            return domains
        default = self.roots(domains["part"].to(device), domains["root"].to(device))
        kept = {name: column for name, column in domains.columns.items() if name in alphas or "alpha/" not in name}
        return Domains(kept).with_columns(**{name: default[name] for name in foreign})

    def clipped(self, domains: Domains) -> dict[str, Box]:
        """Pre-activation boxes of domains: the root's, cut at the splits; name -> (D, n)."""
        out = {}
        device = self.problem.executor.device
        root = domains["root"].to(device)
        single = len(self.boxes[self.names[0]][0]) == 1
        for number, name in enumerate(self.names):
            low, high = self.boxes[name]
            low, high = (
                (part.expand(len(domains), -1) if single else part.index_select(0, root)) for part in (low, high)
            )
            here = (domains["node"] == number) & (domains["sign"] != 0)
            if bool(here.any()):
                owner, place = torch.nonzero(here, as_tuple=True)
                at = (owner.to(device), domains["index"][owner, place].to(device))
                point, sign = domains["point"][owner, place].to(device), domains["sign"][owner, place].to(device)
                low = _limit(low, at, torch.where(sign > 0, point, -torch.inf), "amax")
                high = _limit(high, at, torch.where(sign < 0, point, torch.inf), "amin")
            out[name] = (low, high)
        return out

    def _relax(
        self, boxes: Mapping[str, Box], free: Mapping[str, Mapping[str, Tensor]], root: Tensor | None = None
    ) -> Relaxations:
        """Relaxations on boxes (D, n) of the roots themselves, or of domains whose roots are `root` (D,)."""
        magnitudes = self.magnitudes
        if root is not None and len(self.boxes[self.names[0]][0]) > 1:
            magnitudes = {name: table.index_select(0, root) for name, table in magnitudes.items()}
        made = Relaxations(magnitudes)
        for node in self.graph.nonlinear:
            shaped = [
                (low.reshape(-1, *self.graph[name].shape), high.reshape(-1, *self.graph[name].shape))
                for name in node.inputs
                for low, high in [boxes[name]]
            ]
            relaxed = self.problem.executor.relax(node, shaped)
            if node.name in free:
                relaxed = replace(relaxed, free=dict(free[node.name]))  # type: ignore[type-var]
            made[node.name] = relaxed
        return made

    # --- bounding --------------------------------------------------------------------------------------------------

    def bound(self, domains: Domains) -> Bounded:
        """Optimize alphas and betas in stages; closed domains leave between stages."""
        total, last = len(domains), max(1, self.options.iterations)
        stages = sorted({max(1, last // 5), max(1, last // 2), last})
        done = 0
        witness = None
        for stage in stages:
            steps, final = stage - done, stage == last
            found = of_each(
                self.problem.executor,
                domains,
                lambda some, steps=steps, final=final: self._optimize(some, steps, final=final),  # type: ignore[misc]
            )
            domains = domains.with_columns(**found)
            done = stage
            lower = domains["rows"]
            part = domains["part"].to(self.problem.d.device)
            closed = self.problem.closed(lower.to(self.problem.d.device), part).cpu()
            if "together" in domains.columns:
                closed |= (domains["together"] > 0) & ~self.problem.trivial[part].cpu()
            keep = torch.nonzero(~closed).flatten()
            domains = domains.take(keep)
            if not len(domains):
                break
        if len(domains):
            witness = self._candidates(domains)
        columns = {name: value for name, value in domains.columns.items() if name not in ("rows", "x", "together")}
        return Bounded(Domains(columns), total - len(domains), witness)

    def _candidates(self, domains: Domains) -> Witness | None:
        return self._confirm(domains["x"], domains["part"])

    def _optimize(self, domains: Domains, iterations: int, *, final: bool) -> dict[str, Tensor]:
        """New columns of the domains."""
        run = BatchRun(self, domains)
        best = None
        swept = None
        for step in range(iterations):
            self.clock.check("searching")
            with torch.enable_grad():
                swept = run.sweep()
            best = swept.lower.detach() if best is None else torch.maximum(best, swept.lower.detach())
            if step + 1 < iterations or not final:
                run.ascend(swept.lower)
        if swept is None or best is None:
            raise ValueError("at least one iteration is needed")
        return run.store(best, swept)

    # --- branching -------------------------------------------------------------------------------------------------

    def split(self, domains: Domains, children: int) -> tuple[Domains, Domains]:
        """Split every domain on its most promising neuron, or on several where there are few domains.

        A batch's steps must be able to follow its splits, two for each, or slopes and multipliers fall behind for good.
        """
        depth, most = 1, self.options.iterations // 2
        while depth < most and len(domains) * 2 ** (depth + 1) <= min(children, FEW):
            depth += 1
        choice = Choice(**of_each(self.problem.executor, domains, lambda some: self._choose(some, depth)))
        stuck = choice.count == 0
        if bool(stuck.any()):
            keep = torch.nonzero(~stuck).flatten()
            return self._children(domains.take(keep), choice.take(keep)), domains.take(stuck)
        return self._children(domains, choice), domains.slice(0, 0)

    def _choose(self, domains: Domains, depth: int) -> dict[str, Tensor]:
        """The fields of the best `depth` splits of every domain."""
        run = BatchRun(self, domains)
        with torch.no_grad():
            return vars(choose_splits(self, run, run.sweep(taps=True), depth))

    def _children(self, domains: Domains, choice: Choice) -> Domains:
        """All sign patterns of each domain's chosen splits."""
        made: list[Domains] = []
        for depth in range(1, choice.node.shape[1] + 1):
            here = torch.nonzero(choice.count == depth).flatten()
            if not len(here):
                continue
            group, some = domains.take(here), choice.take(here)
            for pattern in range(2**depth):
                signs = torch.tensor([1.0 if pattern >> bit & 1 else -1.0 for bit in range(depth)])
                sign = signs.to(group["sign"].dtype).expand(len(group), -1)
                beta = group["beta"]
                zero = beta.new_zeros(*beta.shape[:-1], depth)
                made.append(
                    group.with_columns(
                        node=torch.cat([group["node"], some.node[:, :depth]], 1),
                        index=torch.cat([group["index"], some.index[:, :depth]], 1),
                        sign=torch.cat([group["sign"], sign], 1),
                        point=torch.cat([group["point"], some.point[:, :depth]], 1),
                        beta=torch.cat([beta, zero], 2),
                        depth=group["depth"] + depth,
                    )
                )
        if not made:
            return domains.slice(0, 0)
        padded = self.pad(made)
        return Domains({name: torch.cat([part[name] for part in padded]) for name in padded[0].columns})

    def leaf(self, domains: Domains) -> tuple[int, Witness | None, list[str]]:
        """Leaves by linear programming where the network is piecewise linear."""
        if self._decide is None:
            return (
                0,
                None,
                ["every nonlinear neuron is split to the last bit, and the bounds still do not decide"] * len(domains),
            )
        closed = 0
        reasons: list[str] = []
        boxes = self.clipped(domains)
        for i in range(len(domains)):
            self.clock.check("deciding leaves")
            done, witness, reason = self._decide(
                self,
                domains.slice(i, i + 1),
                {name: (low[i : i + 1], high[i : i + 1]) for name, (low, high) in boxes.items()},
            )
            if witness is not None:
                return closed, witness, reasons
            if done:
                closed += 1
            else:
                reasons.append(reason)
        return closed, None, reasons


class BatchRun:
    """One batch of domains on the device: relaxations, rows, and the parameters that are optimized."""

    def __init__(self, space: ActivationSpace, domains: Domains) -> None:
        self.space, self.domains = space, domains
        problem, device = space.problem, space.problem.executor.device
        self.width = problem.rows_per_part
        self.part = domains["part"].to(device)
        self.boxes = space.clipped(domains)
        self.relaxed = space._relax(self.boxes, space._free, domains["root"].to(device))
        self.rows = problem.rows(self.part)
        self.region = select(space.region, domains["root"].to(device))
        self.alphas: dict[str, Alpha] = {}
        for name, column in domains.columns.items():
            if name.startswith("alpha/"):
                _, node, role = name.split("/")
                leaf = column.reshape(len(domains) * self.width, -1).to(device).clone()
                self.alphas.setdefault(node, {})[role] = leaf.requires_grad_()
        self.beta = domains["beta"].reshape(len(domains) * self.width, -1).to(device).clone().requires_grad_()
        leaves = [leaf for alpha in self.alphas.values() for leaf in alpha.values()]
        self._leaves = [*leaves, self.beta]
        options = space.options
        self._adam = Adam(self._leaves, [options.lr_alpha] * len(leaves) + [options.lr_beta], 0.98)

    def _per_row(self, column: Tensor) -> Tensor:
        column = column.to(self.beta.device)
        return column if self.width == 1 else column.repeat_interleave(self.width, 0)

    def splits(self) -> dict[str, Splits]:
        """The split constraints of each node, for all rows; columns that no domain of the batch uses are left out."""
        node, sign = self._per_row(self.domains["node"]), self._per_row(self.domains["sign"])
        index, point = self._per_row(self.domains["index"]), self._per_row(self.domains["point"])
        out = {}
        for number, name in enumerate(self.space.names):
            here = (node == number) & (sign != 0)
            columns = torch.nonzero(here.any(0)).flatten()
            if len(columns):
                some = here[:, columns]
                out[name] = Splits(
                    torch.where(some, index[:, columns], 0),
                    torch.where(some, sign[:, columns], 0.0),
                    point[:, columns],
                    self.beta[:, columns],
                )
        return out

    def sweep(self, *, taps: bool = False) -> Swept:
        """Bounds with the present parameters."""
        executor = self.space.problem.executor
        return executor.sweep(
            executor.graph.output,
            self.rows,
            self.relaxed,
            self.region,
            alphas=self.alphas,
            splits=self.splits(),
            taps=taps,
            verdict=True,
        )

    def ascend(self, lower: Tensor) -> None:
        """One optimizer step."""
        ascend(lower, self._leaves, self._adam, frozenset([len(self._leaves) - 1]))

    def store(self, lower: Tensor, swept: Swept) -> dict[str, Tensor]:
        """New columns: bounds and parameters, and candidates, the minimizer of each domain's best row."""
        count = len(self.domains)
        executor = self.space.problem.executor
        if not executor.splits_rows:
            executor.agree({"bounds of a batch": lower, "beta": self.beta, **executor.replicated(self.alphas)})
        rows = lower.reshape(count, self.width)
        excess = self.space.problem.excess(rows, self.part)
        best = (rows - self.space.problem.need[self.part]).argmax(1)
        A = swept.A.detach().reshape(count, self.width, -1)[torch.arange(count, device=best.device), best]
        columns: dict[str, Tensor] = {"rows": rows}
        if self.width > 1:
            need, last = self.space.problem.need[self.part], swept.lower.detach().reshape(count, self.width)
            together = combine(last, swept.A.detach().reshape(count, self.width, -1), need, self.region)
            columns |= {"together": together.excess, "x": together.x.to(rows.dtype)}
            excess = torch.maximum(excess, together.bound(excess.dtype))
        else:
            columns["x"] = self.region.minimizer(A, None)
        columns["lower"] = torch.maximum(excess, self.domains["lower"].to(excess.device))  # a parent's bound holds too
        for name, alpha in self.alphas.items():
            for role, leaf in alpha.items():
                columns[f"alpha/{name}/{role}"] = leaf.detach().reshape(count, self.width, -1)
        columns["beta"] = self.beta.detach().reshape(count, self.width, -1)
        return {name: column.cpu() for name, column in columns.items()}


def _limit(table: Tensor, at: tuple[Tensor, Tensor], value: Tensor, reduce: str) -> Tensor:
    """`table` with entries raised (amax) or lowered (amin) to `value`; several values for one entry combine."""
    flat = table.contiguous().clone().reshape(-1)
    place = at[0] * table.shape[1] + at[1]
    return flat.scatter_reduce(0, place, value.to(flat.dtype), reduce).reshape(table.shape)
