"""The exact decision of a leaf: where splits decide every ReLU, the network is affine and the leaf a linear program.

On a leaf, the disjunct's rows f_r and the split neurons are affine functionals of the input. A point of the box is
unsafe where every G_i <= 0, G being the rows and the negated split constraints. The solver proposes, it never decides:
its multipliers are clipped to w >= 0, and the leaf is closed only if `min over the box of sum_i w_i G_i(x)`, evaluated
here in float64 and lessened by all that rounding may have added, is positive (weak duality; Farkas' lemma where the
splits alone contradict each other). Its point is a candidate that a caller must replay.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from parverify.bounds.region import BoxRegion
from parverify.clock import Clock
from parverify.graph.ir import BoundGraph, Node
from parverify.ops.kernel import KERNEL, Box
from parverify.ops.relaxation import Alpha
from parverify.ops.rounding import ULPS
from parverify.program.executor import Executor
from parverify.program.rows import Dense, OneHot, Tiled, tiles

ALLOWANCE = 1e-9  # least rounding allowance, relative to the sum of the magnitudes of all terms
TOLERANCE = 1e-6  # how far a candidate may break a constraint, relative to what the constraint ranges over
TILE_SCALARS = 1 << 22  # scalars on all activations together that one tile of rows may hold


@dataclass(frozen=True)
class LeafResult:
    """What is known about a leaf.

    Args:
        closed: proved: no point of the leaf satisfies all rows (<= 0).
        point: (n_in,) float64, a point that satisfies rows and splits up to the solver's tolerance, or None. A
            candidate only: replay decides.
        reason: why the leaf is neither closed nor has a point; empty otherwise.
    """

    closed: bool
    point: np.ndarray | None = None
    reason: str = ""


@dataclass(frozen=True)
class _Gate:
    """A decided ReLU: its input where `gate` is 1, zero where it is 0. A `Relaxed` without error."""

    gate: Tensor  # (n,)
    free: dict[str, Tensor] = field(default_factory=dict)

    def start(self, owner: Tensor | None, rows: int) -> Alpha:
        return {}

    def push(self, A: Tensor, owner: Tensor | None, alpha: Alpha | None) -> tuple[list[Tensor], Tensor]:
        return [(A.reshape(A.shape[0], -1) * self.gate).reshape(A.shape)], A.new_zeros(A.shape[0])

    def mass(self, A: Tensor, owner: Tensor | None, constant: Tensor) -> Tensor:
        return constant


@dataclass(frozen=True)
class _System:
    """Affine functionals `G = A x + constant` over a box; the question is whether some x has all of them <= 0.

    Args:
        A: (k, n) float64.
        constant: (k,).
        mass: (k,) the sum of the magnitudes of all terms that were added up for G.
        lower, upper: (n,) the box.
        allowance: rounding error of G over the box, relative to `mass`.
    """

    A: np.ndarray
    constant: np.ndarray
    mass: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    allowance: float

    @property
    def usable(self) -> bool:
        """Whether the box is one and all numbers are finite."""
        parts = (self.A, self.constant, self.mass, self.lower, self.upper)
        return all(bool(np.isfinite(part).all()) for part in parts) and bool((self.lower <= self.upper).all())

    def take(self, index: slice) -> _System:
        """Some of the functionals."""
        return replace(self, A=self.A[index], constant=self.constant[index], mass=self.mass[index])

    def minimum(self, weights: np.ndarray) -> np.ndarray:
        """(j,) proved lower bounds over the box of the combinations `weights @ G`, weights (j, k) >= 0."""
        A = weights @ self.A
        ends = np.where(A >= 0, A * self.lower, A * self.upper).sum(1)
        slack = self.allowance * (weights @ self.mass) + np.finfo(np.float64).tiny
        return ends + weights @ self.constant - slack

    def refutes(self, weights: np.ndarray) -> bool:
        """Whether `weights` (k,) prove that no point of the box has all functionals <= 0."""
        if not bool(np.isfinite(weights).all()) or not bool((weights >= 0).all()):
            return False
        return bool(self.minimum(weights[None])[0] > 0)  # NaN proves nothing

    def alone(self) -> np.ndarray:
        """(k,) proved lower bounds of each functional."""
        positive, negative = np.maximum(self.A, 0), np.minimum(self.A, 0)
        slack = self.allowance * self.mass + np.finfo(np.float64).tiny
        return positive @ self.lower + negative @ self.upper + self.constant - slack

    def scale(self) -> np.ndarray:
        """(k,) how large each functional gets on the box at most; 1 where it is zero or all but."""
        center, radius = (self.lower + self.upper) / 2, (self.upper - self.lower) / 2
        size = np.abs(self.A) @ radius + np.abs(self.A @ center + self.constant)
        return np.where(size > 1e-200, size, 1.0)


@dataclass(frozen=True)
class _Solution:
    """What the solver says, none of it trusted.

    Args:
        weights: (k,) multipliers, clipped to >= 0 and normalized to sum 1 over all constraints; None where all are zero
            or there is no answer.
        point: (n,) the minimizer, inside the box; None without an answer.
        infeasible: the solver found no answer other than for want of time.
        reason: why there is no answer.
    """

    weights: np.ndarray | None = None
    point: np.ndarray | None = None
    infeasible: bool = False
    reason: str = ""


@torch.no_grad()
@np.errstate(all="ignore")  # what overflows proves nothing, see `_System.refutes`
def decide_leaf(
    executor64: Executor,
    region: BoxRegion,
    boxes: Mapping[str, Box],
    splits: Sequence[tuple[str, int, float]],
    rows: Dense,
    *,
    clock: Clock,
) -> LeafResult:
    """Decide a leaf of activation splits.

    Args:
        executor64: a float64 executor of a network whose only nonlinearity is ReLU.
        region: one domain.
        boxes: node name -> bounds of the inputs of all ReLUs on this leaf, one domain, with the splits applied:
            l >= 0 or u <= 0 everywhere.
        splits: (node name, flat index, sign) for every constraint `sign * value >= 0` that was imposed.
        rows: m functionals of the output; unsafe where all are <= 0.
        clock: limits the solver. Running out leaves the leaf open.

    Raises:
        TypeError: the executor is not float64 or there is more than one domain.
    """
    if executor64.dtype != torch.float64 or region.domains != 1:
        raise TypeError(f"a leaf is one float64 domain, not {region.domains} of {executor64.dtype}")
    graph = executor64.graph
    if not graph.piecewise_linear:
        return LeafResult(False, reason="a nonlinearity other than ReLU: the leaf is no linear program")
    if clock.left <= 0:
        return LeafResult(False, reason="out of time")
    leaf = _Leaf.build(executor64, region, boxes)
    if leaf is None:
        return LeafResult(False, reason="the splits do not decide every ReLU")
    system = leaf.system(rows, splits)
    if not system.usable:
        return LeafResult(False, reason="the affine functionals of the leaf or its box are not finite")
    return _decide(system, len(rows), clock)


def _decide(system: _System, m: int, clock: Clock) -> LeafResult:
    """The first `m` functionals are rows, the others negated split constraints."""
    if bool((system.alone() > 0).any()):
        return LeafResult(True)
    scale = system.scale()
    elastic = np.arange(len(scale)) < m
    if m:
        scale = np.where(elastic, scale[:m].max(), scale)
    solution = _least_excess(system, elastic, scale, clock)
    if solution.infeasible:
        # Either the splits contradict each other or the solver is in trouble; a certificate for the first tells.
        only = system.take(slice(m, None))
        again = _least_excess(only, np.ones(len(only.A), dtype=bool), scale[m:], clock)
        if again.weights is not None and only.refutes(again.weights):
            return LeafResult(True)
        reason = again.reason or f"no certificate that the splits contradict each other ({solution.reason})"
        return LeafResult(False, reason=reason)
    if solution.point is None:
        return LeafResult(False, reason=solution.reason)
    if solution.weights is not None and system.refutes(solution.weights):
        return LeafResult(True)
    excess = (system.A @ solution.point + system.constant) / scale
    if bool((excess <= TOLERANCE).all()):
        return LeafResult(False, solution.point)
    return LeafResult(False, reason="the solver's certificate does not hold after rounding")


@np.errstate(all="ignore")
def certified_combination(
    A: Tensor | np.ndarray, constant: Tensor | np.ndarray, region: BoxRegion, *, clock: Clock | None = None
) -> float:
    """A proved lower bound of the best convex combination of rows, `max over w of min over x of w (A x + c)`.

    Positive means that no point of the region has all rows <= 0, even where every row alone has such points. The solver
    only proposes w. Never below the best single row (each lessened by the allowance); -inf where nothing is proved.

    Args:
        A: (m, n_in) rows on the input, such as a backward sweep leaves them.
        constant: (m,).
        region: one domain.
        clock: limits the solver.
    """
    if region.domains != 1:
        raise TypeError(f"rows are combined on one domain, not {region.domains}")
    eps = torch.finfo(A.dtype).eps if isinstance(A, Tensor) else np.finfo(A.dtype).eps
    matrix, offset, lower, upper = (_numpy(part) for part in (A, constant, region.lower[0], region.upper[0]))
    mass = np.abs(matrix) @ np.maximum(np.abs(lower), np.abs(upper)) + np.abs(offset)
    system = _System(matrix, offset, mass, lower, upper, max(ALLOWANCE, ULPS * float(eps)))
    if not system.usable or not len(matrix):
        return -np.inf
    best = float(system.alone().max())
    if len(matrix) == 1:
        return best
    scale = np.full(len(matrix), system.scale().max())
    solution = _least_excess(system, np.ones(len(matrix), dtype=bool), scale, clock or Clock())
    if solution.weights is None:
        return best
    # The weights sum to 1 only up to rounding, which matters to a bound that is to be compared with others.
    combined = float(system.minimum(solution.weights[None])[0]) / float(solution.weights.sum())
    return max(best, combined) if np.isfinite(combined) else best


def _least_excess(system: _System, elastic: np.ndarray, scale: np.ndarray, clock: Clock) -> _Solution:
    """Solve `min t` subject to `G_i(x) / scale_i <= t` where elastic and `<= 0` elsewhere, x in the box.

    The program is stated in `z = (x - center) / radius`, so that the solver's absolute tolerances mean something.
    """
    from scipy.optimize import linprog

    if clock.left <= 0:
        return _Solution(reason="out of time")
    center, radius = (system.lower + system.upper) / 2, (system.upper - system.lower) / 2
    wide = np.flatnonzero(radius > 0)
    k, n = len(scale), len(wide)
    matrix = np.empty((k, n + 1))
    np.multiply(system.A[:, wide], radius[wide], out=matrix[:, :n])
    matrix[:, :n] /= scale[:, None]
    matrix[:, n] = np.where(elastic, -1.0, 0.0)
    right = -(system.A @ center + system.constant) / scale
    if not bool(np.isfinite(matrix).all()) or not bool(np.isfinite(right).all()):
        return _Solution(reason="the linear program's coefficients overflow")
    cost = np.zeros(n + 1)
    cost[n] = 1.0
    bounds = np.tile([-1.0, 1.0], (n + 1, 1))
    bounds[n] = (-2.0, 2.0)  # every scaled functional lies in [-1, 1]
    options = {"time_limit": max(clock.left, 1e-3)} if np.isfinite(clock.left) else {}
    answer = linprog(cost, A_ub=matrix, b_ub=right, bounds=bounds, method="highs", options=options)
    if answer.status != 0 or answer.x is None:
        timeout = answer.status == 1  # scipy: iteration or time limit
        reason = "out of time" if timeout else f"the solver gave up: {str(answer.message).strip()}"
        return _Solution(infeasible=not timeout, reason=reason)
    weights = np.maximum(-np.asarray(answer.ineqlin.marginals, dtype=np.float64), 0) / scale
    total = weights.sum()
    z = np.asarray(answer.x, dtype=np.float64)[:n]
    if not np.isfinite(total) or not bool(np.isfinite(z).all()):
        return _Solution(reason="the solver returned numbers that are not finite")
    point = center.copy()
    point[wide] += radius[wide] * z
    return _Solution(weights / total if total > 0 else None, np.clip(point, system.lower, system.upper))


@dataclass(frozen=True)
class _Leaf:
    """A network that is affine on a leaf.

    Args:
        executor: the network, float64.
        region: the input box, float64.
        gates: ReLU node name -> whether each neuron is active.
        magnitudes: node name -> (n,) bounds of the sum of magnitudes that make up each scalar of its value on the leaf.
    """

    executor: Executor
    region: BoxRegion
    gates: dict[str, _Gate]
    magnitudes: dict[str, Tensor]

    @staticmethod
    def build(executor: Executor, region: BoxRegion, boxes: Mapping[str, Box]) -> _Leaf | None:
        """The leaf, or None where some ReLU is not decided (or its bounds are no numbers)."""
        region = BoxRegion(*(part.to(executor.device, torch.float64) for part in region.box()))
        gates: dict[str, _Gate] = {}
        largest: dict[str, Tensor] = {}
        for node in executor.graph.nonlinear:
            lower, upper = (part.reshape(-1).to(executor.device, torch.float64) for part in boxes[node.inputs[0]])
            # A contradictory box (l > u) may take either side: no point of the leaf has such a value.
            active = lower >= 0
            if not bool((active | (upper <= 0)).all()):
                return None
            gates[node.name] = _Gate(active.to(torch.float64))
            largest[node.name] = torch.where(active, upper.clamp(min=0), 0.0)
        return _Leaf(executor, region, gates, _magnitudes(executor, region, largest))

    def system(self, rows: Dense, splits: Iterable[tuple[str, int, float]]) -> _System:
        """Rows first, then the negated split constraints."""
        device, output = self.executor.device, self.executor.graph[self.executor.graph.output]
        A = rows.A.to(device, torch.float64).reshape(len(rows), *output.shape)
        constant = None if rows.constant is None else rows.constant.to(device, torch.float64)
        parts = [self.functionals(output.name, Dense(A, constant))]
        by_node: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for name, position, side in splits:
            by_node[name].append((int(position), -float(side)))
        for name, items in by_node.items():
            index = torch.tensor([place for place, _ in items], device=device)
            sign = torch.tensor([sign for _, sign in items], dtype=torch.float64, device=device)
            parts.append(self.functionals(name, OneHot(index, sign)))
        matrix, offset, mass = (np.concatenate([part[i] for part in parts]) for i in range(3))
        lower, upper = (_numpy(part[0]) for part in self.region.box())
        return _System(matrix, offset, mass, lower, upper, self.allowance(len(matrix)))

    def allowance(self, count: int) -> float:
        """Relative rounding error of a combination of `count` functionals, over the box.

        A sum of N terms in any order is off by N eps at most, relative to the sum of magnitudes, and no sum of a
        backward sweep through a node has more terms than the node has scalars.
        """
        terms = count + sum(node.numel + len(node.inputs) for node in self.executor.graph)
        return max(ALLOWANCE, 4 * terms * float(np.finfo(np.float64).eps))

    def functionals(self, start: str, rows: Tiled) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A (k, n), constant (k,) and mass (k,) of rows on `start`."""
        graph = self.executor.graph
        held = sum(node.numel for node in graph.nonlinear) + graph.input.numel
        found = [self._tile(start, rows.take(part)) for part in tiles(len(rows), max(1, TILE_SCALARS // held))]
        if not found:
            return np.zeros((0, graph.input.numel)), np.zeros(0), np.zeros(0)
        A, constant, mass = (_numpy(torch.cat([item[i] for item in found])) for i in range(3))
        return A, constant, mass

    def _tile(self, start: str, rows: Tiled) -> tuple[Tensor, Tensor, Tensor]:
        # At the origin a row on the input is zero, so that the bound is the constant (less an ulp or two).
        origin = BoxRegion(torch.zeros_like(self.region.lower), torch.zeros_like(self.region.upper))
        swept = self.executor.sweep(start, rows, self.gates, origin, taps=True)
        graph = self.executor.graph
        # Every sum of the sweep is off by some eps of its magnitudes, and that error meets the values of the node it is
        # made on; so altogether it is relative to the rows at all ReLUs times the magnitudes of what they multiply.
        mass = rows.constant.abs() if isinstance(rows, Dense) and rows.constant is not None else 0.0
        seed = rows.dense(graph[start].shape) if isinstance(rows, OneHot) else rows.A
        mass = mass + seed.reshape(len(rows), -1).abs() @ self.magnitudes[start]
        for name, tap in swept.taps.items():
            weight = tap.reshape(len(rows), -1).abs() * self.gates[name].gate
            mass = mass + weight @ self.magnitudes[graph[name].inputs[0]]
        return swept.A, swept.lower, mass


def _magnitudes(executor: Executor, region: BoxRegion, largest: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Bounds of the sum of magnitudes of all terms of each scalar, name -> (n,): every operator without cancellation.

    Args:
        executor: the network.
        region: the input box.
        largest: ReLU node name -> (n,) bounds of its value, from where magnitudes start anew.
    """
    graph: BoundGraph = executor.graph
    lower, upper = region.box()
    values = {graph.input.name: torch.maximum(lower.abs(), upper.abs()).reshape(1, *graph.input.shape)}
    for node in graph.nodes[1:]:
        if node.name in largest:
            values[node.name] = largest[node.name].reshape(1, *node.shape)
            continue
        consts = {role: value.abs() for role, value in executor.constants(node).items()}
        values[node.name] = KERNEL[node.op].forward(_positive(node), consts, [values[name] for name in node.inputs])
    return {name: value.reshape(-1) for name, value in values.items()}


def _positive(node: Node) -> Node:
    """The node with the magnitudes of its coefficients."""
    if "coefficients" not in node.attrs:
        return node
    return replace(node, attrs={**node.attrs, "coefficients": tuple(abs(c) for c in node.attrs["coefficients"])})


def _numpy(part: Tensor | np.ndarray) -> np.ndarray:
    array = part.detach().cpu().numpy() if isinstance(part, Tensor) else np.asarray(part)
    return array.astype(np.float64, copy=False)
