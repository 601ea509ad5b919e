"""Two and four ranks: sharded modules, and auto_LiRPA's own propagation over divided weights."""

from __future__ import annotations

import copy
import pickle
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor

from parverify.errors import DisagreementError, UsageError
from parverify.lirpa import apply, apply_fsdp, apply_tp, divided, from_bounded_module, operators, shard
from parverify.lirpa.compat import Lirpa, lirpa
from parverify.parallel.meter import MemoryMeter
from parverify.parallel.world import World
from tests.distributed.ranks import on_ranks
from tests.lirpa.networks import around, bounded, far, network, quiet

METHODS = ("IBP", "CROWN-IBP", "CROWN")
NAMES = ("mlp", "conv", "residual", "transformer")
Found = dict[tuple[str, str, bool], tuple[Tensor, Tensor]]


@pytest.fixture(autouse=True)
def rows_are_dealt_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """In tiles of eight, although networks as small as these are not worth it."""
    monkeypatch.setattr(divided, "WORTH", 0)
    monkeypatch.setattr(divided, "TILE", (0, 8))
    monkeypatch.setattr(divided, "SHARDED_TILE", (0, 8))


def bounds(name: str, module: Any) -> Found:
    x = around(network(name)[1])
    C = torch.randn(1, 4, module(x).shape[1], generator=torch.Generator().manual_seed(2))
    found = {}
    for method in METHODS:
        for given in (None, C):
            low, high = module.compute_bounds(x=(x,), method=method, C=given)
            found[name, method, given is None] = low.detach(), high.detach()
    return found


def expected(names: tuple[str, ...] = NAMES) -> Found:
    found: Found = {}
    for name in names:
        found |= bounds(name, bounded(name))
    return found


def weights(module: Any) -> int:
    """Entries of weights that this rank holds."""
    return sum(parameter.numel() for parameter in module.parameters())


def _applied(world: World, how: Any, recorded: bool = True) -> tuple[Found, dict[str, tuple[int, int]]]:
    found: Found = {}
    sizes = {}
    with quiet(), torch.set_grad_enabled(recorded):
        for name in NAMES:
            module = bounded(name)
            before = weights(module)
            assert how(module, world.comm) is module
            found |= bounds(name, module)
            sizes[name] = before, weights(module)
    return found, sizes


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("together", [True, False])
def test_fsdp_is_bitwise_auto_lirpa(
    library: Lirpa, size: int, recorded: bool, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not together:
        monkeypatch.setattr(apply, "hold_together", lambda comm, parts: None)
    reference = expected()
    for found, sizes in on_ranks(size, _applied, apply_fsdp, recorded):
        for key, box in reference.items():
            assert torch.equal(found[key][0], box[0]) and torch.equal(found[key][1], box[1]), key
        for name, (before, after) in sizes.items():
            module, _ = network(name)
            whole = sum(parameter.numel() for parameter in module.parameters() if parameter.dim() < 2)
            padding = size * len(list(module.parameters()))
            assert after <= whole + (before - whole) // size + padding, name


def peak(world: World | None, method: str = "CROWN", inner: int = 3) -> tuple[int, int, int]:
    """Bytes at the peak of a method, of the weights at rest, and of the whole of them."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 200), *(torch.nn.Linear(200, 200) for _ in range(inner)), torch.nn.Linear(200, 2)]
    plain = torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.ReLU())))[:-1].eval()
    library = lirpa().module
    with quiet(), torch.no_grad():
        module = library.BoundedModule(plain, torch.zeros(1, 64), bound_opts={"conv_mode": "matrix"})
        whole = sum(parameter.nbytes for parameter in module.parameters())
        if world is not None:
            apply_fsdp(module, world.comm)
        x = library.BoundedTensor(torch.rand(1, 64), library.PerturbationLpNorm(norm=torch.inf, eps=0.01))
        module.compute_bounds(x=(x,), method="IBP")
        held = list(module.parameters())
        near = [node for node in module._modules.values() if getattr(node, "near", None) is not None]
        with MemoryMeter(held, [node.near.whole(node.param, node.layout.shape) for node in near]) as meter:
            module.compute_bounds(x=(x,), method=method)
    return meter.peak_bytes, sum(tensor.nbytes for tensor in held), whole


def test_fsdp_takes_no_more_memory(library: Lirpa, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight is let go as soon as its product is done, so the peak is below that of whole weights.

    Where one weight is nearly all of the network that holds only if the ranks hold it together.
    """
    for method, inner in ("CROWN", 3), ("IBP", 1), ("CROWN", 1), ("CROWN-IBP", 1):
        alone, _, _ = peak(None, method, inner)
        for most, resident, whole in on_ranks(2, peak, method, inner):
            assert resident <= 0.51 * whole
            assert most < alone, (method, inner)
    monkeypatch.setattr(apply, "hold_together", lambda comm, parts: None)
    alone, _, _ = peak(None)
    for most, resident, whole in on_ranks(2, peak):
        assert resident <= 0.51 * whole
        assert most < alone


def _lent(world: World) -> list[str]:
    """What still lies in a weight that was lent, after bounds were computed; and collectives."""
    left: list[str] = []
    with quiet(), torch.no_grad():
        for name in NAMES:
            module = apply_fsdp(bounded(name), world.comm)
            near = [node for node in module._modules.values() if hasattr(node, "layout")]
            lent = [node.near.whole(node.param, node.layout.shape) for node in near]
            world.comm.meter.clear()
            found = bounds(name, module)
            assert "all_gather" not in world.comm.meter.figures()
            assert not near or world.comm.meter.figures()["barrier"]["calls"] > 0
            held = {f"{name} {key}": side for key, box in found.items() for side in box}
            held |= {key: const.value for key, const in from_bounded_module(module).constants.items()}
            for number, node in enumerate(module._modules.values()):
                held |= {f"{name} {number} {key}": value for key, value in vars(node).items()}
            left += [key for key, value in held.items() if any(_lies_in(value, whole) for whole in lent)]
    return left


def _lies_in(value: Any, whole: Tensor) -> bool:
    if isinstance(value, (tuple, list)):
        return any(_lies_in(part, whole) for part in value)
    if not isinstance(value, Tensor):
        return False
    return value.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def test_nothing_keeps_a_weight_that_was_lent(library: Lirpa) -> None:
    assert on_ranks(2, _lent) == [[], []]


def test_what_an_operator_gives_is_copied_where_it_lies_in_the_weight(library: Lirpa) -> None:
    class Patches:
        def __init__(self, patches: Tensor) -> None:
            self.patches, self.stride = patches, 1

    whole, other = torch.rand(4, 3), torch.rand(2)
    pair = namedtuple("pair", "first second")(whole.T, other)
    given = (whole[1:], [other, (None, 3)], pair, Patches(whole.view(-1)), Patches(other))
    kept = operators._kept(given, whole)
    tensors = [kept[0], kept[1][0], kept[2].first, kept[2].second, kept[3].patches, kept[4].patches]
    assert not any(_lies_in(tensor, whole) for tensor in tensors)
    for tensor, before in zip(tensors, [whole[1:], other, whole.T, other, whole.view(-1), other], strict=True):
        assert torch.equal(tensor, before)
    assert kept[1] is given[1] and kept[4].patches is other


def test_tp_agrees(library: Lirpa) -> None:
    reference = expected()
    for found, sizes in on_ranks(3, _applied, apply_tp):
        for key, box in reference.items():
            assert far(found[key][0], box[0]) < 1e-5 and far(found[key][1], box[1]) < 1e-5, key
        assert all(after < before for before, after in sizes.values())


def _sharded(world: World, strategy: str) -> tuple[Found, dict[str, Tensor]]:
    more = {}
    with quiet():
        module = shard(bounded("conv"), strategy, world.comm)
        found = bounds("conv", module)
        module.train()
        module.compute_bounds(x=(around((2, 6, 6)),), method="CROWN-IBP")[0].sum().backward()
        more["gradient"] = next(iter(module.parameters())).grad
        module = apply_fsdp(bounded("mlp", optimize_bound_args={"iteration": 2}), world.comm)
        both = shard(module, strategy, world.comm)
        found |= bounds("mlp", both)
        x = around((3,), batch=2, norm=2.0)
        more |= {method: both.compute_bounds(x=(x,), method=method)[0] for method in ("CROWN", "alpha-CROWN")}
        more["forward"] = both.compute_bounds(x=(x,), method="forward")[0]  # auto_LiRPA itself, on divided weights
        return found, more


@pytest.mark.parametrize(
    "strategy", ["fold", pytest.param("fsdp", marks=pytest.mark.slow), pytest.param("tp", marks=pytest.mark.slow)]
)
def test_sharded_modules(library: Lirpa, strategy: str) -> None:
    """One of them over weights that auto_LiRPA's own operators have divided."""
    reference = expected(("mlp", "conv"))
    plain = bounded("mlp", optimize_bound_args={"iteration": 2})
    alone, x = shard(plain), around((3,), batch=2, norm=2.0)
    more = {method: alone.compute_bounds(x=(x,), method=method)[0] for method in ("CROWN", "alpha-CROWN", "forward")}
    results = on_ranks(2, _sharded, strategy)
    for found, ours in results:
        for key, box in reference.items():
            assert far(found[key][0], box[0]) < 1e-5 and far(found[key][1], box[1]) < 1e-5, key
        for method, low in more.items():
            assert far(ours[method], low) < 1e-5, method
        assert torch.equal(ours["gradient"], results[0][1]["gradient"]) and ours["gradient"].abs().sum() > 0


def _plain() -> torch.nn.Sequential:
    """256 features are cut between the ranks where parts end; 200 are not."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(*pair) for pair in ((256, 256), (256, 256), (256, 200), (200, 200), (200, 3))]
    return torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.ReLU())))[:-1].eval()


def _lying(world: World, applied: bool) -> tuple[list[tuple[int, ...]], int, dict[str, int], tuple[Tensor, Tensor]]:
    """Shapes of weights that the engine holds beside the module, bytes of all, calls of collectives, and bounds."""
    library = lirpa().module
    with quiet(), torch.no_grad():
        module = library.BoundedModule(_plain(), torch.zeros(1, 256), bound_opts={"conv_mode": "matrix"})
        if applied:
            apply_fsdp(module, world.comm)
        sharded = shard(module, "fold", world.comm)
        x = library.BoundedTensor(torch.full((1, 256), 0.5), library.PerturbationLpNorm(norm=torch.inf, eps=0.02))
        sharded.compute_bounds(x=(x,), method="IBP")
        world.comm.meter.clear()
        found = sharded.compute_bounds(x=(x,), method="CROWN")
    (executor,) = sharded._engine._divided._executors.values()
    mine = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    near = [node for node in module._modules.values() if getattr(node, "near", None) is not None]
    mine |= {node.near.whole(node.param, node.layout.shape).untyped_storage().data_ptr() for node in near}
    beside = [t for t in executor.resident() if t.dim() > 1 and t.untyped_storage().data_ptr() not in mine]
    calls = {name: figures["calls"] for name, figures in world.comm.meter.figures().items()}
    return sorted(tuple(t.shape) for t in beside), sum(t.nbytes for t in module.parameters()), calls, found


def test_weights_are_used_where_they_lie(library: Lirpa) -> None:
    _, whole, _, reference = _lying(World(), applied=False)
    for beside, size, calls, found in on_ranks(2, _lying, False):
        assert not beside and size == whole and not calls.get("broadcast")
        # whether weights have changed, the rows on three layers and on the outputs, and what is agreed on
        assert calls["all_gather"] == 6
        assert torch.equal(found[0], reference[0]) and torch.equal(found[1], reference[1])
    alone, _, _, reference = _lying(World(), applied=True)  # in smaller tiles
    assert not alone
    for beside, size, calls, found in on_ranks(2, _lying, True):
        assert not beside and size < 0.51 * whole and not calls.get("broadcast")
        assert torch.equal(found[0], reference[0]) and torch.equal(found[1], reference[1])


def test_weights_in_shards_are_sent_where_they_cannot_be_read(library: Lirpa, monkeypatch: pytest.MonkeyPatch) -> None:
    _, whole, _, reference = _lying(World(), applied=True)
    monkeypatch.setattr(apply, "hold_together", lambda comm, parts: None)
    ranks = on_ranks(2, _lying, True)
    for _, size, calls, found in ranks:
        assert size < 0.51 * whole and calls["broadcast"] > 0
        assert torch.equal(found[0], ranks[0][3][0]) and torch.equal(found[1], ranks[0][3][1])
        assert far(found[0], reference[0]) < 1e-5 and far(found[1], reference[1]) < 1e-5
    # shards of 256 features end where parts do; of the others only rows 128 to 200 lie on one rank and are its part
    assert sorted(shape for beside, *_ in ranks for shape in beside) == [
        (3, 200), (36, 200), (128, 256), (164, 200),
    ]  # fmt: skip


def test_rows_that_are_not_worth_it_are_bounded_by_every_rank(library: Lirpa, monkeypatch: pytest.MonkeyPatch) -> None:
    *_, reference = _lying(World(), applied=False)
    monkeypatch.setattr(divided, "WORTH", 1 << 40)
    for _, _, calls, found in on_ranks(2, _lying, False):
        assert calls["all_gather"] == 2  # whether weights have changed, and what is agreed on
        assert torch.equal(found[0], reference[0]) and torch.equal(found[1], reference[1])


def _moved(world: World, how: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Bounds of a divided module before and after its weights were changed in a way, and of copies of it."""
    x, found = around((3,)), {}
    with quiet(), torch.no_grad():
        module = apply_fsdp(bounded("mlp"), world.comm)
        sharded = shard(module, "fold", world.comm)
        other = copy.deepcopy(sharded)
        found["first"] = sharded.compute_bounds(x=(x,), method="CROWN")
        for i, parameter in enumerate(module.parameters()):
            if how == "in place":
                parameter.mul_(1.5)
            elif how == "elsewhere" or world.rank == 0 or parameter.dim() > 1 or i % 2:
                parameter.data = parameter.data * 1.5
            else:
                parameter.mul_(1.5)
        found["then"] = sharded.compute_bounds(x=(x,), method="CROWN")
        found["copy"] = other.compute_bounds(x=(x,), method="CROWN")
        next(other.parameters()).zero_()
        found["again"] = sharded.compute_bounds(x=(x,), method="CROWN")
    return found


@pytest.mark.parametrize("how", ["in place", "elsewhere", "here and there"])
def test_weights_that_change_between_calls(library: Lirpa, how: str) -> None:
    module = shard(bounded("mlp"))
    with torch.no_grad():
        first = module.compute_bounds(x=(around((3,)),), method="CROWN")
        for parameter in module.parameters():
            parameter.mul_(1.5)
        then = module.compute_bounds(x=(around((3,)),), method="CROWN")
    assert far(first[0], then[0]) > 0.01
    for found in on_ranks(2, _moved, how):
        for name, expected in (("first", first), ("copy", first), ("then", then), ("again", then)):
            assert far(found[name][0], expected[0]) < 1e-5 and far(found[name][1], expected[1]) < 1e-5, name


def test_shards_that_ranks_hold_together_do_not_go_into_a_file(library: Lirpa) -> None:
    assert on_ranks(2, _pickled) == [True, True]


def _pickled(world: World) -> bool:
    module = apply_fsdp(bounded("mlp"), world.comm)
    near = [node.near for node in module._modules.values() if hasattr(node, "layout")]
    return all(one is not None for one in near) and pickle.loads(pickle.dumps(near)) == [None] * len(near)


def _different(world: World) -> str:
    module = bounded("mlp")
    with torch.no_grad():
        next(iter(module.parameters())).add_(world.rank)
    try:
        shard(module, "fold", world.comm).compute_bounds(x=(around((3,)),), method="IBP")
    except DisagreementError as error:
        return str(error)
    return ""


def test_modules_that_differ(library: Lirpa) -> None:
    assert all("of the module" in message for message in on_ranks(2, _different))


def _misused(world: World) -> list[str]:
    found = []
    with quiet():
        module = apply_fsdp(bounded("mlp"), world.comm)
        for call in (lambda: apply_fsdp(module, world.comm), lambda: apply_tp(torch.nn.Linear(1, 1), world.comm)):
            try:
                call()
            except UsageError as error:
                found.append(str(error))
    return found


def test_misuse(library: Lirpa) -> None:
    first, second = _misused(World())
    assert "divided already" in first and "Linear" in second


def test_a_leaking_placeholder_is_seen(library: Lirpa) -> None:
    """What reads a weight without an operator of ours gets no number, rather than a wrong one."""
    module = apply_fsdp(bounded("mlp"))
    hollow = [node for node in module._modules.values() if hasattr(node, "hollow")]
    assert len(hollow) == 4
    for node in hollow:
        assert node.forward().isnan().all() and node.forward().untyped_storage().nbytes() <= 8
        assert node.param.numel() == node.forward().numel()  # one rank holds everything
