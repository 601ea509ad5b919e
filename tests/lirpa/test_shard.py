"""A sharded module is a BoundedModule whose bounds are auto_LiRPA's, or tighter where alphas are optimized."""

from __future__ import annotations

import copy
import logging
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from parverify.errors import UsageError
from parverify.lirpa import shard
from parverify.lirpa.compat import Lirpa
from parverify.lirpa.request import UndividedError, alpha_options, understand
from tests.lirpa.networks import RELU_ONLY, around, bounded, far, network

METHODS = ("IBP", "CROWN-IBP", "CROWN")


def undivided(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Reasons that the log gives for calls that stayed with auto_LiRPA."""
    marker = "not divided, runs in auto_LiRPA on every rank: "
    return [record.getMessage().removeprefix(marker) for record in caplog.records if marker in record.getMessage()]


def specification(module: Any, x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(x.shape[0], 4, module(x).shape[1], generator=generator)


def one_by_one(library: Lirpa, module: Any, x: Tensor, method: str, C: Tensor | None) -> tuple[Tensor, Tensor]:
    """auto_LiRPA's bounds of each element of a batch by itself.

    Of a whole batch it bounds a neuron by rows in all elements if it is unstable in one of them, and drops tighter
    intervals that it has of it in the others.
    """
    around = x.ptb
    sides = []
    for i in range(len(x)):
        low, high = (None if side is None else side[i : i + 1] for side in (around.x_L, around.x_U))
        ball = library.module.PerturbationLpNorm(eps=around.eps, norm=around.norm, x_L=low, x_U=high)
        one = library.module.BoundedTensor(torch.Tensor(x)[i : i + 1].detach(), ball)
        sides.append(module.compute_bounds(x=(one,), method=method, C=None if C is None else C[i : i + 1]))
    lower, upper = (torch.cat(side) for side in zip(*sides, strict=True))
    return lower, upper


@pytest.mark.parametrize("name", RELU_ONLY)
def test_a_batch_is_not_looser(library: Lirpa, name: str) -> None:
    """On the whole; single bounds may be, because the slopes of ReLUs follow from other bounds."""
    module = bounded(name)
    x = around(network(name)[1], batch=3)
    low, high = shard(module).compute_bounds(x=(x,), method="CROWN")
    their_low, their_high = module.compute_bounds(x=(x,), method="CROWN")
    assert (high - low).sum() <= (their_high - their_low).sum() * (1 + 1e-5)


@pytest.mark.parametrize("name", RELU_ONLY)
def test_the_same_bounds(library: Lirpa, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Where nearly all neurons are unstable auto_LiRPA gives up intervals too, unless `minimum_sparsity` is 1."""
    module = bounded(name, minimum_sparsity=1.0)
    sharded = shard(module)
    _, shape = network(name)
    for x in (around(shape, batch=3), around(shape, box=True)):
        for C in (None, specification(module, x)):
            for method in METHODS:
                expected = one_by_one(library, module, x, method, C)
                found = sharded.compute_bounds(x=(x,), method=method, C=C)
                for one, other in zip(found, expected, strict=True):
                    assert one.shape == other.shape
                    assert far(one, other) < 1e-5, (method, C is None)
    assert not undivided(caplog)


@pytest.mark.parametrize("norm", [1.0, 2.0])
@pytest.mark.parametrize("name", ["mlp", "residual"])
def test_balls(library: Lirpa, name: str, norm: float, caplog: pytest.LogCaptureFixture) -> None:
    """Of a first convolution auto_LiRPA takes the whole kernel's norm everywhere; ours is exact at borders too."""
    module = bounded(name)
    sharded = shard(module)
    x = around(network(name)[1], batch=2, norm=norm)
    for method in METHODS:
        low, high = sharded.compute_bounds(x=(x,), method=method)
        their_low, their_high = module.compute_bounds(x=(x,), method=method)
        slack = 1e-5 * float(their_high.abs().max())
        assert (low >= their_low - slack).all() and (high <= their_high + slack).all()
        if name == "mlp":
            assert far(low, their_low) < 1e-5 and far(high, their_high) < 1e-5
    assert not undivided(caplog)


@pytest.mark.parametrize("everywhere", [False, True])
def test_alphas_are_tighter_and_sound(library: Lirpa, everywhere: bool) -> None:
    module = bounded("residual", enable_opt_interm_bounds=everywhere)
    sharded = shard(module)
    x = around((2, 6, 6), batch=2)
    crown = sharded.compute_bounds(x=(x,), method="CROWN")
    low, high = sharded.compute_bounds(x=(x,), method="CROWN-Optimized")
    assert (low > crown[0] + 1e-3).any() and (low >= crown[0] - 1e-5).all() and (high <= crown[1] + 1e-5).all()
    points = x + 0.2 * (2 * torch.rand(200, *x.shape) - 1)
    values = torch.stack([module(point) for point in points])
    assert (values >= low - 1e-5).all() and (values <= high + 1e-5).all()


def test_options_of_the_optimization(library: Lirpa) -> None:
    x = around((3,))
    sharded = shard(bounded("mlp", optimize_bound_args={"iteration": 0}))
    low = sharded.compute_bounds(x=(x,), method="alpha-CROWN")[0]
    assert torch.equal(low, sharded.compute_bounds(x=(x,), method="CROWN")[0])
    sharded.set_bound_opts({"optimize_bound_args": {"iteration": 5}})
    assert (sharded.compute_bounds(x=(x,), method="alpha-CROWN")[0] > low + 1e-4).any()
    found = alpha_options({"iteration": 7, "lr_alpha": 0.1, "lr_decay": 0.98})
    assert (found.iterations, found.lr, found.decay) == (7, 0.1, 0.9)


def test_it_is_the_module(library: Lirpa) -> None:
    module = bounded("mlp")
    sharded = shard(module)
    assert isinstance(sharded, library.module.BoundedModule) and sharded.original is module
    assert shard(sharded).original is module
    x = around((3,))
    torch.testing.assert_close(sharded(x), module(x))
    sharded.set_bound_opts({"verbosity": 0})
    sharded.something = 1
    assert module.something == 1 and module.bound_opts is sharded.bound_opts
    assert [name for name, _ in sharded.named_parameters()] == [name for name, _ in module.named_parameters()]
    found = sharded(method_opt="compute_bounds", x=(x,), method="CROWN")
    torch.testing.assert_close(found[0], module.compute_bounds(x=(x,), method="CROWN")[0])


def test_one_side(library: Lirpa) -> None:
    sharded, x = shard(bounded("mlp")), around((3,))
    for method in (*METHODS, "CROWN-Optimized"):
        low, high = sharded.compute_bounds(x=(x,), method=method)
        only = sharded.compute_bounds(x=(x,), method=method, bound_upper=False)
        assert only[1] is None
        torch.testing.assert_close(only[0], low)
        only = sharded.compute_bounds(x=(x,), method=method, bound_lower=False)
        assert only[0] is None
        torch.testing.assert_close(only[1], high)


def test_what_a_call_leaves_behind(library: Lirpa) -> None:
    """Bounds on the nodes, and the input, which a later call without one takes."""
    module, other, x = bounded("mlp"), bounded("mlp"), around((3,), batch=2)
    sharded = shard(module)
    found = sharded.compute_bounds(x=(x,), method="CROWN")
    other.compute_bounds(x=(x,), method="CROWN")
    readers = [node for node in module._modules.values() if type(node).__name__ == "BoundRelu"]
    assert len(readers) == 3
    for node in readers:
        before = node.inputs[0]
        assert far(before.lower, other[before.name].lower) < 1e-5
        assert far(before.upper, other[before.name].upper) < 1e-5
    assert torch.equal(module[module.final_name].lower, found[0])
    again = sharded.compute_bounds(method="CROWN")
    assert torch.equal(again[0], found[0])


def test_new_weights_are_seen(library: Lirpa) -> None:
    module, x = bounded("conv"), around((2, 6, 6))
    sharded = shard(module)
    first = sharded.compute_bounds(x=(x,), method="CROWN")[0]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.rand_like(parameter))
    second = sharded.compute_bounds(x=(x,), method="CROWN")[0]
    assert far(second, first) > 1e-3
    assert far(second, module.compute_bounds(x=(x,), method="CROWN")[0]) < 1e-5


@pytest.mark.parametrize("broken", ["_set_input", "_network"])
def test_new_weights_are_seen_after_a_call_that_failed(
    library: Lirpa, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x = shard(bounded("mlp")), around((3,))

    def fails(*_: Any) -> None:
        raise RuntimeError("once")

    with torch.no_grad():
        first = module.compute_bounds(x=(x,), method="CROWN")
        for parameter in module.parameters():
            parameter.data = parameter.data * 1.5
        with monkeypatch.context() as patch:
            patch.setattr(type(module._engine), broken, fails)
            with pytest.raises(RuntimeError, match="once"):
                module.compute_bounds(x=(x,), method="CROWN")
        then = module.compute_bounds(x=(x,), method="CROWN")
        expected = module.original.compute_bounds(x=(x,), method="CROWN")
    assert far(then[0], expected[0]) < 1e-5 < far(then[0], first[0])


def test_gradients_are_those_of_auto_lirpa(library: Lirpa) -> None:
    """Of bounds by weights, and by the input; for certified training."""
    module = bounded("mlp")
    module.train()
    sharded = shard(module)
    x = around((3,), batch=2)
    x.requires_grad_()
    found = []
    for one in (module, sharded):
        module.zero_grad()
        x.grad = None
        low, high = one.compute_bounds(x=(x,), method="CROWN-IBP")
        assert low.requires_grad
        (low.sum() - 2 * (high**2).sum()).backward()
        found.append([p.grad.clone() for p in (*module.parameters(), x)])
    for ours, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, theirs)
    with torch.no_grad():
        assert not sharded.compute_bounds(x=(x,), method="CROWN-IBP")[0].requires_grad


def test_what_can_not_be_divided_stays_with_auto_lirpa(library: Lirpa, caplog: pytest.LogCaptureFixture) -> None:
    module, x = bounded("mlp"), around((3,))
    sharded = shard(module)
    calls: list[tuple[str, dict[str, Any]]] = [
        ("method forward+backward", {"method": "forward+backward"}),
        ("method forward", {"method": "forward"}),
        ("argument final_node_name", {"method": "IBP", "final_node_name": module[module.final_name].inputs[0].name}),
        ("argument reuse_ibp", {"method": "IBP", "reuse_ibp": True}),
    ]
    for reason, call in calls:
        for _ in range(2):
            found = sharded.compute_bounds(x=(x,), **call)
        for one, other in zip(found, module.compute_bounds(x=(x,), **call), strict=True):
            assert torch.equal(one, other)
        assert undivided(caplog) == [reason]  # once, though called twice
        caplog.clear()
    needed = {module.final_name: [module.input_name[0]]}
    found = sharded.compute_bounds(x=(x,), method="CROWN", return_A=True, needed_A_dict=needed)
    assert found[2][module.final_name][module.input_name[0]]["lA"].shape == (1, 2, 3)
    assert undivided(caplog) == ["argument return_A"]


def test_other_options_and_regions_are_reasons(library: Lirpa) -> None:
    module, x = bounded("mlp"), around((3,))
    kind, found = library.module.PerturbationLpNorm, library.module

    def reason(x: Any = x, options: dict[str, Any] | None = None, method: str = "CROWN") -> str:
        before = dict(module.bound_opts)
        module.bound_opts.update(options or {})
        try:
            understand(module, {"x": (x,), "method": method}, {}, kind)
        except UndividedError as error:
            return str(error)
        finally:
            module.bound_opts.clear()
            module.bound_opts.update(before)
        return ""

    assert reason() == ""
    assert reason(options={"conv_mode": "patches", "crown_batch_size": 10}) == ""
    assert reason(options={"relu": "same-slope"}) == "bound_opts['relu']"
    assert reason(options={"unheard_of": 3}) == "bound_opts['unheard_of']"
    optimizing = {"optimize_bound_args": {**module.bound_opts["optimize_bound_args"], "enable_beta_crown": True}}
    assert reason(options=optimizing) == ""
    assert reason(options=optimizing, method="alpha-CROWN") == "optimize_bound_args['enable_beta_crown']"
    assert reason(torch.rand(1, 3)) == "perturbation None"
    words = found.PerturbationSynonym.__new__(found.PerturbationSynonym)
    assert reason(found.BoundedTensor(torch.rand(1, 3), words)) == "perturbation PerturbationSynonym"
    assert reason(found.BoundedTensor(torch.rand(1, 3), kind(norm=3.0, eps=0.1))).startswith("norm 3.0")


@pytest.mark.parametrize("name", ["tanh", "transformer"])
def test_other_relaxations(library: Lirpa, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Bounds stay auto_LiRPA's unless parverify's own are asked for; those are sound."""
    module, x = bounded(name), around(network(name)[1])
    for method in ("CROWN-IBP", "CROWN"):
        theirs = module.compute_bounds(x=(x,), method=method)
        same = shard(module).compute_bounds(x=(x,), method=method)
        assert all(torch.equal(one, other) for one, other in zip(same, theirs, strict=True))
        assert len(undivided(caplog)) == 1 and "own_relaxations" in undivided(caplog)[0]
        caplog.clear()
        low, high = shard(module, own_relaxations=True).compute_bounds(x=(x,), method=method)
        assert not undivided(caplog)
        values = torch.stack([module(x + 0.2 * (2 * torch.rand(x.shape) - 1)) for _ in range(300)])
        assert (values >= low).all() and (values <= high).all()


def test_an_allowance_for_rounding(library: Lirpa) -> None:
    module, x = bounded("residual"), around((2, 6, 6))
    plain = shard(module).compute_bounds(x=(x,), method="CROWN")
    wide = shard(module, allowance=2.0).compute_bounds(x=(x,), method="CROWN")
    assert (wide[0] < plain[0]).all() and (wide[1] > plain[1]).all()


def test_copies(library: Lirpa) -> None:
    with torch.no_grad():  # values that autograd knows can't be copied, and modules keep some
        module, x = bounded("mlp"), around((3,))
        module(torch.zeros(1, 3))
        sharded = shard(module)
        other = copy.deepcopy(sharded)
    assert type(other) is type(sharded) and other.original is not module
    torch.testing.assert_close(
        other.compute_bounds(x=(x,), method="CROWN")[0], sharded.compute_bounds(x=(x,), method="CROWN")[0]
    )
    with pytest.raises(TypeError, match="original"):
        pickle.dumps(sharded)


def test_misuse(library: Lirpa) -> None:
    with pytest.raises(UsageError, match="Linear"):
        shard(torch.nn.Linear(1, 1))
    with pytest.raises(UsageError, match="nonsense"):
        shard(bounded("mlp"), "nonsense")
    with pytest.raises(UsageError, match="mesh"):
        shard(bounded("mlp"), mesh=3)


def test_the_log_is_a_library_log(library: Lirpa) -> None:
    """No handler of ours: who uses the library decides what is shown."""
    assert logging.getLogger("parverify.lirpa").handlers == []
