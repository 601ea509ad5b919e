"""Verdicts on small networks whose answers are known from dense sampling: never a wrong one, whatever the settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import parverify
from parverify.attack.search import WitnessSearch
from parverify.bab.activation import ActivationSpace
from parverify.bab.input import InputSpace
from parverify.errors import ParverifyError
from parverify.frontend.query import Disjunct, Query
from parverify.verdict import Result, Verdict
from tests.bab.cases import SMOOTH, ZOO, Case, make, permuted, random_case

DECIDED = (Verdict.SAT, Verdict.UNSAT)
SHAPES: list[dict[str, Any]] = [
    {},
    {"rows": 2},
    {"disjuncts": 3},
    {"disjuncts": 4, "rows": 2, "boxes": 2},
    {"rows": 2, "on_inputs": True},
    {"disjuncts": 3, "boxes": 3, "on_inputs": True},
]
OPTIONS: list[dict[str, Any]] = [
    {"attack__enabled": False},
    {"attack__enabled": True},
    {"attack__enabled": False, "branching__batch": 1},
    {"attack__enabled": False, "branching__batch": 2, "dtype": "float64"},
    {"attack__enabled": False, "branching__batch": 3, "seed": 7},
    {"attack__enabled": False, "branching__batch": 64, "method": "beta-crown"},
    {"attack__enabled": True, "dtype": "float64", "seed": 3},
]


def check(module: nn.Module, case: Case, result: Result) -> None:
    """A verdict that is not wrong; a witness that is one."""
    assert result.verdict is not (Verdict.UNSAT if case.point is not None else Verdict.SAT), result
    assert (result.witness is not None) == (result.verdict is Verdict.SAT)
    assert result.reason
    if result.witness is not None:
        x = result.witness.x
        y = module(torch.from_numpy(x).float()[None]).double().numpy()[0]
        np.testing.assert_array_equal(y, result.witness.y)
        assert case.query.holds(x, y)


@pytest.mark.parametrize("kind", ["input", "activation"])
@pytest.mark.parametrize("sat", [True, False])
@pytest.mark.parametrize("name", ZOO)
def test_verdicts(name: str, sat: bool, kind: str) -> None:
    number = list(ZOO).index(name)
    easy = kind == "input" or name not in SMOOTH
    for seed, n_in, k in ((number, 2, 0), (number + 50, 3, 1)):
        module = make(name, n_in, seed)
        turn = 3 * seed + 2 * k + sat + 2 * (kind == "input")
        case = random_case(module, n_in, sat=sat, seed=seed + 1000 * k, **SHAPES[turn % len(SHAPES)])
        options = {"branching__kind": kind, **OPTIONS[(turn + k) % len(OPTIONS)]}
        result = parverify.verify(module, case.query, timeout=20 if easy else 0.7, **options)
        check(module, case, result)
        assert result.verdict in DECIDED or not easy, (seed, k, options, result.reason)


@pytest.mark.parametrize("kind", ["input", "activation"])
@pytest.mark.parametrize("sat", [True, False])
def test_the_order_and_the_batch_change_no_verdict(sat: bool, kind: str) -> None:
    module = make("relu", 2, 21)
    case = random_case(module, 2, sat=sat, seed=4, disjuncts=4, rows=2, boxes=2)
    for seed, batch in enumerate((1, 2, 3, 64)):
        changed = permuted(case, seed)
        result = parverify.verify(
            module,
            changed.query,
            timeout=30,
            attack__enabled=False,
            branching__kind=kind,
            branching__batch=batch,
            seed=seed,
        )
        check(module, changed, result)
        assert result.verdict in DECIDED


# --- nothing is concluded from a search that is deaf ----------------------------------------------------------------


@pytest.fixture
def deaf(monkeypatch: pytest.MonkeyPatch) -> None:
    """No candidate is ever confirmed."""
    monkeypatch.setattr(WitnessSearch, "try_points", lambda *args, **kwargs: None)


@pytest.mark.usefixtures("deaf")
@pytest.mark.parametrize("kind", ["input", "activation"])
@pytest.mark.parametrize("name", ZOO)
def test_a_sat_property_is_never_unsat(name: str, kind: str) -> None:
    for k, shape in enumerate(({"rows": 2}, {"disjuncts": 3, "boxes": 3})):
        module = make(name, 2, 30 + k)
        case = random_case(module, 2, sat=True, seed=k, **shape)
        result = parverify.verify(module, case.query, timeout=0.3, attack__enabled=False, branching__kind=kind)
        assert result.verdict in (Verdict.UNKNOWN, Verdict.TIMEOUT)


def two_boxes(first: float, second: float) -> tuple[nn.Module, Query]:
    """A network, and the left and the right half of its box with thresholds above the sampled minimum of each."""
    module = make("relu", 2, 40)
    x = torch.rand(100_000, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
    y, left = module(x)[:, 0], x[:, 0] < 0
    parts = []
    for side, low, high, shift in ((left, [-1, -1], [0, 1], first), (~left, [0, -1], [1, 1], second)):
        parts.append(
            Disjunct(
                np.array(low, float),
                np.array(high, float),
                np.eye(2)[:1],
                np.array([float(y[side].min()) + shift]),
                np.zeros(1, dtype=bool),
            )
        )
    return module, Query(2, 2, tuple(parts))


@pytest.mark.usefixtures("deaf")
@pytest.mark.parametrize("kind", ["input", "activation"])
@pytest.mark.parametrize("swap", [False, True])
def test_every_box_is_searched(kind: str, swap: bool) -> None:
    """The first box needs a search and is closed; the second has an unsafe point, so that it can't be."""
    module, query = two_boxes(-0.01, 0.02)
    if swap:
        query = Query(2, 2, query.disjuncts[::-1])
    result = parverify.verify(module, query, timeout=2, attack__enabled=False, branching__kind=kind)
    assert result.verdict in (Verdict.UNKNOWN, Verdict.TIMEOUT)
    module, query = two_boxes(-0.01, -0.01)
    result = parverify.verify(module, query, timeout=20, attack__enabled=False, branching__kind=kind)
    assert result.verdict is Verdict.UNSAT


@pytest.mark.usefixtures("deaf")
def test_boxes_set_aside_are_not_forgotten_by_the_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Input splits set a disjunct's last box aside, then give up: activation splits must take up that disjunct too."""
    from parverify import verifier

    module, query = two_boxes(0.02, -0.01)
    honest = InputSpace.split

    def split(space: InputSpace, domains: Any, children: int) -> Any:
        first = domains["part"] == 0
        if bool(first.any()):
            return domains.take(~first), domains.take(first)
        return honest(space, domains, children)

    monkeypatch.setattr(InputSpace, "split", split)
    monkeypatch.setattr(verifier._Watch, "__call__", lambda self, state: True)
    result = parverify.verify(module, query, timeout=20, attack__enabled=False)
    assert result.verdict in (Verdict.UNKNOWN, Verdict.TIMEOUT)
    assert result.stats["branching"] == "activation"


@pytest.mark.parametrize("space", [InputSpace, ActivationSpace])
def test_an_error_while_bounding_is_no_verdict(space: type, monkeypatch: pytest.MonkeyPatch) -> None:
    module, query = two_boxes(-0.01, -0.01)

    def bound(self: Any, domains: Any) -> Any:
        raise RuntimeError("a defect")

    monkeypatch.setattr(space, "bound", bound)
    kind = "input" if space is InputSpace else "activation"
    with pytest.raises(RuntimeError, match="a defect"):
        parverify.verify(module, query, timeout=20, attack__enabled=False, branching__kind=kind)


@pytest.mark.parametrize("space", [InputSpace, ActivationSpace])
@pytest.mark.parametrize("shift", [-0.01, 0.05])
def test_memory_that_ends_changes_no_verdict(space: type, shift: float, monkeypatch: pytest.MonkeyPatch) -> None:
    module, query = two_boxes(-0.01, shift)
    honest, refused = space.bound, []  # type: ignore[attr-defined]

    def bound(self: Any, domains: Any) -> Any:
        if len(domains) > 3:
            refused.append(len(domains))
            raise MemoryError
        return honest(self, domains)

    monkeypatch.setattr(space, "bound", bound)
    kind = "input" if space is InputSpace else "activation"
    result = parverify.verify(module, query, timeout=30, attack__enabled=False, branching__kind=kind)
    assert result.verdict is (Verdict.UNSAT if shift < 0 else Verdict.SAT)
    assert refused or shift > 0


@pytest.mark.parametrize("kind", ["input", "activation"])
def test_no_time_is_a_timeout(kind: str) -> None:
    module, query = two_boxes(-0.01, -0.01)
    result = parverify.verify(module, query, timeout=0.0, branching__kind=kind)
    assert result.verdict is Verdict.TIMEOUT
    assert result.witness is None
    assert result.reason


@pytest.mark.usefixtures("deaf")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["input", "activation"])
@pytest.mark.parametrize("name", ZOO)
def test_a_point_that_only_just_is_unsafe_is_never_excluded(name: str, kind: str, dtype: str) -> None:
    """The right-hand side is what the module returns at its smallest point found: less than the allowance for rounding
    away from the exact minimum, on either side of it."""
    rng = np.random.default_rng(0)
    module, c = make(name, 2, 0), np.array([0.5, -1.0])
    x = np.concatenate([np.sign(rng.normal(size=(8, 2))), rng.uniform(-1, 1, (5000, 2))]).astype(np.float32)
    for step in range(12):
        values = module(torch.from_numpy(x)).double().numpy() @ c
        best = x[values.argmin()]
        around = (best + rng.normal(size=(1000, 2)) * 3.0**-step).clip(-1, 1)
        x = np.concatenate([best[None], around]).astype(np.float32)
    y = module(torch.from_numpy(best)[None]).double().numpy()[0]
    query = Query(2, 2, (part([-1, -1], [1, 1], c, [float(c @ y)]),))
    assert query.holds(best.astype(np.float64), y)
    result = parverify.verify(module, query, timeout=0.3, attack__enabled=False, branching__kind=kind, dtype=dtype)
    assert result.verdict in (Verdict.UNKNOWN, Verdict.TIMEOUT)


# --- edges -----------------------------------------------------------------------------------------------------------


def part(low: list[float], high: list[float], C: Any, d: list[float], strict: bool = False) -> Disjunct:
    return Disjunct(
        np.array(low, float),
        np.array(high, float),
        np.atleast_2d(np.array(C, float)),
        np.array(d),
        np.full(len(d), strict),
    )


@pytest.mark.parametrize("kind", ["auto", "input", "activation"])
def test_affine_networks(kind: str) -> None:
    module = nn.Linear(2, 2).requires_grad_(False)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[1.0, 1.0], [1.0, -1.0]]))
        module.bias.zero_()
    for d, verdict in (([-1.5], Verdict.SAT), ([-2.5], Verdict.UNSAT)):
        query = Query(2, 2, (part([-1, -1], [1, 1], [1, 0], d),))
        assert (
            parverify.verify(module, query, timeout=10, attack__enabled=False, branching__kind=kind).verdict is verdict
        )
    # x0 + x1 <= -1 and x0 - x1 <= -1.5: each is possible, and both are with x0 = -1 only
    for d, verdict in (([-1.0, -1.0], Verdict.SAT), ([-1.25, -1.0], Verdict.UNSAT)):
        query = Query(2, 2, (part([-1, -1], [1, 1], np.eye(2), d),))
        result = parverify.verify(module, query, timeout=10, attack__enabled=False, branching__kind=kind)
        assert result.verdict is verdict


@pytest.mark.parametrize("kind", ["input", "activation"])
def test_edges(kind: str) -> None:
    module = make("relu", 2, 41)
    run = {"timeout": 10, "attack__enabled": False, "branching__kind": kind}
    assert parverify.verify(module, Query(2, 2, ()), **run).verdict is Verdict.UNSAT
    empty = part([0, 0], [-1, 1], [1, 0], [0.0])
    assert parverify.verify(module, Query(2, 2, (empty,)), **run).verdict is Verdict.UNSAT
    no_rows = part([0, 0], [1, 1], np.zeros((0, 2)), [])
    assert parverify.verify(module, Query(2, 2, (empty, no_rows)), **run).verdict is Verdict.SAT
    y = float(module(torch.zeros(1, 2))[0, 0])
    for shift, verdict in ((1e-3, Verdict.SAT), (-1e-3, Verdict.UNSAT)):
        point = part([0, 0], [0, 0], [1, 0], [y + shift])
        assert parverify.verify(module, Query(2, 2, (empty, point)), **run).verdict is verdict


@pytest.mark.parametrize("option", [{"beta__iterations": 1}, {"branching__candidates": 1},
                                    {"alpha__iterations": 0}, {"memory": 64 << 20}])  # fmt: skip
def test_extreme_settings_decide_alike(option: dict[str, Any]) -> None:
    for shift in (-0.02, 0.02):
        module, query = two_boxes(-0.02, shift)
        result = parverify.verify(
            module, query, timeout=30, attack__enabled=False, branching__kind="activation", **option
        )
        assert result.verdict is (Verdict.UNSAT if shift < 0 else Verdict.SAT)


@pytest.mark.parametrize("method", ["ibp", "crown-ibp", "crown", "alpha-crown"])
def test_bounds_alone_are_never_wrong(method: str) -> None:
    for name in ZOO:
        for sat in (True, False):
            module = make(name, 2, 60)
            case = random_case(module, 2, sat=sat, seed=60, disjuncts=2, rows=2)
            result = parverify.verify(module, case.query, timeout=10, attack__enabled=False, method=method)
            check(module, case, result)
            if result.verdict is Verdict.UNKNOWN:
                assert method in result.reason


# --- leaves ----------------------------------------------------------------------------------------------------------


def test_leaves_decide_where_all_relus_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds that close nothing: every verdict comes from linear programs of leaves."""
    from parverify.bab.problem import Problem

    monkeypatch.setattr(Problem, "closed", lambda self, lower, part: torch.zeros(len(part), dtype=torch.bool))
    leaves = []
    honest = ActivationSpace.leaf

    def leaf(self: ActivationSpace, domains: Any) -> Any:
        leaves.append(len(domains))
        return honest(self, domains)

    monkeypatch.setattr(ActivationSpace, "leaf", leaf)
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 2)).requires_grad_(False)
    for sat in (False, True):
        for rows in (1, 2):
            case = random_case(module, 2, sat=sat, seed=rows, rows=rows)
            with pytest.MonkeyPatch.context() as patch:
                if sat:  # only the points of leaves are tried
                    patch.setattr(ActivationSpace, "_candidates", lambda self, domains: None)
                    patch.setattr("parverify.verifier.Verifier._close", _keep)
                result = parverify.verify(
                    module, case.query, timeout=30, attack__enabled=False, branching__kind="activation"
                )
            check(module, case, result)
            assert result.verdict in DECIDED
    assert len(leaves) >= 4


def _keep(self: Any, found: Any, boxes: Tensor, parts: Tensor, alpha: Any) -> Tensor:
    return parts


def test_a_leaf_that_is_no_linear_program_is_unknown_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from parverify.bab import activation

    def nothing_to_split(space: Any, run: Any, swept: Any, depth: int) -> Any:
        from parverify.bab.branching import Choice

        count = len(run.domains)
        zero = torch.zeros(count, 1, dtype=torch.long)
        return Choice(zero, zero, torch.zeros(count, 1), torch.zeros(count, dtype=torch.long))

    monkeypatch.setattr(activation, "choose_splits", nothing_to_split)
    for module, seed in ((bent("sigmoid", 5), 5), (bent("saddle", 5), 5), (make("relu", 2, 40), 0)):
        case = random_case(module, 2, sat=False, seed=seed)
        result = parverify.verify(module, case.query, timeout=20, attack__enabled=False, branching__kind="activation")
        assert result.verdict is Verdict.UNKNOWN
        assert "stay open" in result.reason


# --- splits of any nonlinearity ------------------------------------------------------------------------------------


class Saddle(nn.Module):
    """Products of two variables and nothing else that is nonlinear."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.b(x)


BENT: dict[str, Callable[[], nn.Module]] = {
    "sigmoid": lambda: nn.Sequential(nn.Linear(2, 4), nn.Sigmoid(), nn.Linear(4, 2)),
    "tanh": lambda: nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2)),
    "saddle": Saddle,
}


def bent(name: str, seed: int) -> nn.Module:
    """A network with large weights."""
    torch.manual_seed(seed)
    module = BENT[name]()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(2 * torch.randn_like(parameter))
    return module.requires_grad_(False)


@pytest.mark.parametrize(
    ("name", "seed"), [("sigmoid", 2), ("sigmoid", 3), ("sigmoid", 5), ("tanh", 5), ("saddle", 3), ("saddle", 5)]
)
def test_activation_splits_decide_what_bounds_alone_do_not(name: str, seed: int) -> None:
    module = bent(name, seed)
    case = random_case(module, 2, sat=False, seed=seed)
    root = parverify.verify(module, case.query, timeout=30, attack__enabled=False, method="alpha-crown")
    assert root.verdict is Verdict.UNKNOWN
    run: dict[str, Any] = {"timeout": 30, "attack__enabled": False, "branching__kind": "activation"}
    result = parverify.verify(module, case.query, **run)
    assert result.verdict is Verdict.UNSAT, result.reason
    assert result.stats["bounded"] > 1
    case = random_case(module, 2, sat=True, seed=seed)
    result = parverify.verify(module, case.query, **run)
    check(module, case, result)
    assert result.verdict is Verdict.SAT


def test_a_module_and_a_file_of_another_size_are_refused() -> None:
    module, query = two_boxes(0, 0)
    with pytest.raises(ParverifyError):
        parverify.verify(module, Query(2, 3, (part([0, 0], [1, 1], [1, 0, 0], [0.0]),)), timeout=5)
    assert len(query) == 2
