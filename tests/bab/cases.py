"""Small networks, properties whose answer dense sampling tells beforehand, and a planted point that is watched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from parverify.bab.activation import ActivationSpace, BetaOptions
from parverify.bab.domains import Domains
from parverify.bab.driver import Bounded
from parverify.bab.input import InputSpace
from parverify.bab.leaves import LeafDecider
from parverify.bab.problem import Problem, build
from parverify.bounds.layers import BoundOptions, bound_layers
from parverify.bounds.region import select
from parverify.clock import Clock
from parverify.frontend.query import Disjunct, Query
from parverify.graph.trace import trace
from parverify.program.division import Division
from parverify.program.executor import Executor
from parverify.progress import NullProgress
from parverify.verdict import Witness


class Residual(nn.Module):
    """Two blocks with a skip connection."""

    def __init__(self, n_in: int) -> None:
        super().__init__()
        self.first, self.a, self.b, self.last = (nn.Linear(p, q) for p, q in ((n_in, 5), (5, 5), (5, 5), (5, 2)))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(x))
        y = y + self.b(torch.relu(self.a(y)))
        return self.last(torch.relu(y))


class Convolution(nn.Module):
    """One convolution over the inputs as a sequence, and a pool."""

    def __init__(self, n_in: int) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv1d(1, 3, 2, padding=1), nn.Linear(3 * ((n_in + 1) // 2), 2)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.conv(x.unsqueeze(1)))
        return self.last(torch.nn.functional.max_pool1d(y, 2).flatten(1))


class Maxima(nn.Module):
    """Maxima and minima of affine functions."""

    def __init__(self, n_in: int) -> None:
        super().__init__()
        self.a, self.b, self.last = nn.Linear(n_in, 4), nn.Linear(n_in, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a(x), self.b(x)
        return self.last(torch.maximum(a, b) - torch.minimum(a, torch.zeros_like(a)))


class Products(nn.Module):
    """Products of two variables."""

    def __init__(self, n_in: int) -> None:
        super().__init__()
        self.a, self.b, self.last = nn.Linear(n_in, 2), nn.Linear(n_in, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.a(x) * torch.relu(self.b(x)))


class Softmax(nn.Module):
    """Attention of one query over three fixed values."""

    def __init__(self, n_in: int) -> None:
        super().__init__()
        self.score, self.last = nn.Linear(n_in, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.softmax(self.score(x), -1))


def _mlp(n_in: int, act: type[nn.Module], width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(n_in, width), act(), nn.Linear(width, width), act(), nn.Linear(width, 2))


ZOO: dict[str, Callable[[int], nn.Module]] = {
    "relu": lambda n: _mlp(n, nn.ReLU, 6),
    "leaky": lambda n: _mlp(n, nn.LeakyReLU, 5),
    "sigmoid": lambda n: _mlp(n, nn.Sigmoid, 4),
    "tanh": lambda n: _mlp(n, nn.Tanh, 4),
    "residual": Residual,
    "convolution": Convolution,
    "maxima": Maxima,
    "products": Products,
    "softmax": Softmax,
}
SMOOTH = ("sigmoid", "tanh", "products", "softmax")


def make(name: str, n_in: int, seed: int) -> nn.Module:
    """A network of the zoo with weights large enough to bend."""
    torch.manual_seed(seed)
    module = ZOO[name](n_in)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(
                torch.randn_like(parameter) * (1.2 / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 0.4)
            )
    return module.requires_grad_(False)


@dataclass(frozen=True)
class Sampled:
    """A network on a dense grid of [-1, 1]^n.

    Args:
        x, y: (B, n_in) and (B, n_out), float64.
        step: the grid's spacing.
    """

    x: np.ndarray
    y: np.ndarray
    step: float


def sample(module: nn.Module, n_in: int) -> Sampled:
    """The network's values on about 30 000 grid points, in double precision."""
    points = {1: 20001, 2: 181, 3: 33}[n_in]
    axis = np.linspace(-1, 1, points)
    x = np.stack(np.meshgrid(*[axis] * n_in, indexing="ij"), -1).reshape(-1, n_in)
    module.double()
    y = module(torch.from_numpy(x)).numpy()
    module.float()
    return Sampled(x, y, float(axis[1] - axis[0]))


@dataclass(frozen=True)
class Case:
    """A property whose answer is known.

    Args:
        query: the property.
        point: an unsafe point and its disjunct where the answer is `sat`.
    """

    query: Query
    point: np.ndarray | None
    disjunct: int = -1


def random_case(
    module: nn.Module,
    n_in: int,
    *,
    sat: bool,
    seed: int,
    disjuncts: int = 1,
    rows: int = 1,
    boxes: int = 1,
    on_inputs: bool = False,
) -> Case:
    """A random property with a clear answer: the rows' largest value is moved to a margin from its sampled minimum."""
    rng = np.random.default_rng(seed)
    seen = sample(module, n_in)
    cuts = [_box(rng, n_in) if boxes > 1 else (-np.ones(n_in), np.ones(n_in)) for _ in range(boxes)]
    made, point, chosen = [], None, int(rng.integers(disjuncts))
    for k in range(disjuncts):
        low, high = cuts[k % boxes]
        C = rng.normal(size=(rows, seen.y.shape[1])).astype(np.float32).astype(np.float64)  # float32 can say them
        C_x = rng.normal(size=(rows, n_in)).astype(np.float32).astype(np.float64) if on_inputs else None
        inside = ((seen.x >= low) & (seen.x <= high)).all(1)
        value = seen.y @ C.T + (0 if C_x is None else seen.x @ C_x.T)
        d = np.quantile(value[inside], 0.5, axis=0)
        worst = np.where(inside, (value - d).max(1), np.inf)
        at = int(worst.argmin())
        margin = 0.04 * float(np.ptp(worst[inside])) + _coarseness(worst, inside, seen)
        here = sat and k == chosen
        made.append(Disjunct(low, high, C, d + worst[at] + (margin if here else -margin), rng.random(rows) < 0.3, C_x))
        if here:
            point = seen.x[at]
    return Case(Query(n_in, seen.y.shape[1], tuple(made)), point, chosen if sat else -1)


def _box(rng: np.random.Generator, n_in: int) -> tuple[np.ndarray, np.ndarray]:
    low = rng.uniform(-1, 0.3, n_in)
    return low, low + rng.uniform(0.4, 0.7, n_in)


def _coarseness(value: np.ndarray, inside: np.ndarray, seen: Sampled) -> float:
    """How far below its sampled minimum a function may fall between grid points: the largest step seen, once over."""
    n_in = seen.x.shape[1]
    side = round(len(value) ** (1 / n_in))
    grid = np.where(inside, value, np.nan).reshape([side] * n_in)
    return sum(float(np.nanmax(np.abs(np.diff(grid, axis=axis)))) for axis in range(n_in))


def permuted(case: Case, seed: int) -> Case:
    """The same property with disjuncts and rows in another order."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(case.query))
    parts = []
    for k in order:
        part = case.query.disjuncts[k]
        rows = rng.permutation(len(part.d))
        parts.append(
            replace(
                part,
                C_y=part.C_y[rows],
                d=part.d[rows],
                strict=part.strict[rows],
                C_x=None if part.C_x is None else part.C_x[rows],
            )
        )
    where = int(np.flatnonzero(order == case.disjunct)[0]) if case.disjunct >= 0 else -1
    return Case(Query(case.query.n_in, case.query.n_out, tuple(parts)), case.point, where)


# --- spaces made by hand -------------------------------------------------------------------------------------------


def problem_of(module: nn.Module, query: Query, dtype: torch.dtype = torch.float32) -> Problem:
    """The query over the module, ready for branch and bound."""
    return build(Division.whole(trace(module, (1, query.n_in))), query, dtype=dtype, device="cpu")


def nothing(points: Tensor, parts: Tensor) -> Witness | None:
    """Confirms no candidate."""
    return None


def input_space(problem: Problem) -> InputSpace:
    """Input splits by CROWN that confirm nothing."""
    return InputSpace(problem, BoundOptions("crown"), clock=Clock(), confirm=nothing)


def activation_space(problem: Problem, box: int = 0, *, iterations: int = 5, leaves: bool = True) -> ActivationSpace:
    """Activation splits of one box that confirm nothing."""
    region = select(problem.boxes, torch.tensor([box]))
    with torch.no_grad():
        found = bound_layers(problem.executor, region, BoundOptions("crown"))
    decider = LeafDecider(problem, Division.whole(problem.executor.graph), region, nothing, Clock(), NullProgress())
    decide = decider if leaves and problem.executor.graph.piecewise_linear else None
    return ActivationSpace(
        problem, region, found, BetaOptions(iterations), clock=Clock(), confirm=nothing, decide=decide
    )


def roots(space: InputSpace | ActivationSpace, parts: list[int]) -> Domains:
    """Domains without splits."""
    part = torch.tensor(parts)
    return space.roots(part) if isinstance(space, InputSpace) else space.roots(part, torch.zeros_like(part))


def contains(space: InputSpace | ActivationSpace, domains: Domains, x: np.ndarray, *, slack: float = 0.0) -> Tensor:
    """(D,) which domains contain a point, whatever their disjunct."""
    point = torch.from_numpy(x).double()
    if isinstance(space, InputSpace):
        low, high = domains["low"].double(), domains["high"].double()
        return ((point >= low - slack) & (point <= high + slack)).all(1)
    exact = Executor(space.graph, dtype=torch.float64)
    values = exact.values(point.reshape(1, -1))
    inside = torch.ones(len(domains), dtype=torch.bool)
    for number, name in enumerate(space.names):
        flat = values[name].reshape(-1)
        here = (domains["node"] == number) & (domains["sign"] != 0)
        reached = domains["sign"].double() * (flat[domains["index"] * here] - domains["point"].double())
        inside &= (~here | (reached >= -slack)).all(1)
    return inside


class Watched:
    """A space that fails where a planted point is lost.

    Args:
        space: the real one.
        point: inside the unsafe region of `disjunct`.
    """

    def __init__(self, space: InputSpace | ActivationSpace, point: np.ndarray, disjunct: int) -> None:
        self._space, self._point, self._disjunct = space, point, disjunct
        self.seen = 0

    def holds(self, domains: Domains) -> bool:
        """Whether the point is in one of the domains."""
        if not len(domains):
            return False
        return bool((contains(self._space, domains, self._point) & (domains["part"] == self._disjunct)).any())

    def split(self, domains: Domains, children: int) -> tuple[Domains, Domains]:
        made, stuck = self._space.split(domains, children)
        if self.holds(domains):
            assert self.holds(made) or self.holds(stuck), "a split lost the planted point"
        return made, stuck

    def bound(self, domains: Domains) -> Bounded:
        bounded = self._space.bound(domains)
        assert bounded.closed + len(bounded.domains) == len(domains)
        if self.holds(domains):
            self.seen += 1
            assert self.holds(bounded.domains), "a bound closed the domain of the planted point"
        return bounded

    def leaf(self, domains: Domains) -> tuple[int, Witness | None, list[str]]:
        closed, witness, reasons = self._space.leaf(domains)
        assert closed + len(reasons) == len(domains)
        assert not self.holds(domains) or reasons, "the leaf of the planted point was closed"
        return closed, witness, reasons

    def pad(self, parts: list[Domains]) -> list[Domains]:
        return list(self._space.pad(parts))
