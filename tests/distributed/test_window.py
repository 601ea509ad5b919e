"""Memory that ranks read from each other: what is found there, and that all of them send where one can't."""

from __future__ import annotations

import gc
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from parverify.bounding import digest
from parverify.parallel import window
from parverify.parallel.comm import Alone, DryComm
from parverify.parallel.window import hold_together, open_window
from parverify.parallel.world import World
from tests.distributed.ranks import on_ranks
from tests.distributed.test_divided import TILE, bounded, divided, measured, wide

SHAPES = {"row": (3,), "matrix": (5, 7), "kernel": (2, 3, 3, 3), "scalar": (), "nothing": (0, 4)}


def pieces(rank: int) -> dict[str, Tensor]:
    """What a rank holds: of some shapes and dtypes, and one tensor that every rank has."""
    generator = torch.Generator().manual_seed(rank)
    made = {f"{name} of {rank}": torch.rand(shape, generator=generator) for name, shape in SHAPES.items()}
    made[f"double of {rank}"] = torch.rand(4, generator=generator, dtype=torch.float64)
    return {**made, "of all": torch.arange(3.0)}


def _look(world: World) -> None:
    mine = pieces(world.rank)
    seen = open_window(world.comm, mine)
    assert seen is not None
    expected = {key: tensor for rank in range(world.size) for key, tensor in pieces(rank).items()}
    held = {key for key in expected if expected[key].numel()} | {f"nothing of {world.rank}"}
    assert set(seen) == held
    for key, tensor in seen.items():
        assert tensor.dtype == expected[key].dtype
        assert torch.equal(tensor, expected[key]), key
    for key, tensor in pieces(world.rank).items():
        assert torch.equal(mine[key], tensor), key
    other = (world.rank + 1) % world.size
    seen[f"row of {other}"].zero_()  # a copy of ours from here on
    del mine
    seen = {key: tensor for key, tensor in seen.items() if f"of {world.rank}" not in key}  # the others'
    gc.collect()
    world.comm.barrier()
    for key, tensor in seen.items():
        if key != f"row of {other}":
            assert torch.equal(tensor, expected[key]), f"{key}, whose owner let go of it"


def _untouched(world: World) -> bool:
    mine = pieces(world.rank)
    seen = open_window(world.comm, mine)
    assert seen is not None
    seen[f"row of {1 - world.rank}"].zero_()
    world.comm.barrier()
    return torch.equal(mine[f"row of {world.rank}"], pieces(world.rank)[f"row of {world.rank}"])


@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_reads_what_all_of_them_hold(size: int) -> None:
    on_ranks(size, _look)


def test_what_is_written_there_does_not_reach_the_owner() -> None:
    assert on_ranks(2, _untouched) == [True, True]


def _no_call(patch: pytest.MonkeyPatch) -> None:
    patch.delattr(os, "memfd_create")


def _no_room(patch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    patch.setattr(os, "posix_fallocate", full)


def _little_room(patch: pytest.MonkeyPatch) -> None:
    reserve, left = os.posix_fallocate, iter(range(3))

    def some(*place: int) -> None:
        if next(left, None) is None:
            raise OSError(28, "No space left on device")
        reserve(*place)

    patch.setattr(os, "posix_fallocate", some)


def _too_short(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(window._Offer, "map", lambda offer: mmap.mmap(os.memfd_create("empty"), 8))


def _elsewhere(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(window, "_machine", lambda: ("another", "machine"))


def _forbidden(patch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def refuse(path: Any, *rest: Any) -> int:
        if str(path).startswith("/proc/"):
            raise PermissionError(13, "Permission denied", path)
        return opened(path, *rest)

    patch.setattr(os, "open", refuse)


def _closed(world: World, broken: Callable[[pytest.MonkeyPatch], None]) -> tuple[bool, bool, list[str]]:
    mine, said = pieces(world.rank), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(window._LOG, "info", lambda message, *values: said.append(message % values))
        if world.rank == 1:
            broken(patch)
        seen = open_window(world.comm, mine)
    same = all(torch.equal(mine[key], tensor) for key, tensor in pieces(world.rank).items())
    return seen is None, same, said


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (_no_call, "memfd_create"),
        (_no_room, "No space left"),
        (_little_room, "No space left"),
        (_elsewhere, "different machines"),
        (_forbidden, "Permission denied"),
        (_too_short, "greater than file size"),
    ],
)
def test_where_one_rank_cannot_read_all_of_them_send(broken: Callable[[pytest.MonkeyPatch], None], reason: str) -> None:
    found = on_ranks(3, _closed, broken)
    assert [(closed, same) for closed, same, _ in found] == [(True, True)] * 3
    said = [message for _, _, messages in found for message in messages]
    assert len(said) == 3
    assert all(message.startswith("weights are sent from rank to rank: ") for message in said)
    assert any(reason in message for message in said)


def parts(rank: int) -> list[Tensor]:
    """A rank's parts of three tensors."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.rand(5, generator=generator), torch.rand(0), torch.rand(3, generator=generator, dtype=torch.float64)]


def _together(world: World) -> None:
    found = hold_together(world.comm, parts(world.rank))
    assert found is not None
    everything = [torch.cat(some) for some in zip(*map(parts, range(world.size)), strict=True)]
    for held, mine, whole in zip(found, parts(world.rank), everything, strict=True):
        assert held.part.dtype == mine.dtype and held.part.untyped_storage().nbytes() == mine.nbytes
        assert torch.equal(held.part, mine) and torch.equal(held.whole, whole)
    world.comm.barrier()
    found[0].part.add_(1)
    world.comm.barrier()
    assert torch.equal(found[0].whole, everything[0] + 1)  # what the others have written, too
    wholes = [held.whole for held in found]
    del found, held
    gc.collect()
    world.comm.barrier()
    assert torch.equal(wholes[2], everything[2])


@pytest.mark.parametrize("size", [2, 3])
def test_what_ranks_hold_together_each_has_whole(size: int) -> None:
    on_ranks(size, _together)


def _apart(world: World, broken: Callable[[pytest.MonkeyPatch], None], rank: int) -> tuple[bool, list[str]]:
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(window._LOG, "info", lambda message, *values: said.append(message % values))
        if world.rank == rank:
            broken(patch)
        return hold_together(world.comm, parts(world.rank)) is None, said


@pytest.mark.parametrize(
    ("broken", "rank", "reason"),
    [
        (_no_call, 0, "memfd_create"),
        (_no_room, 0, "No space left"),
        (_no_room, 1, "No space left"),
        (_elsewhere, 1, "different machines"),
        (_forbidden, 2, "Permission denied"),
    ],
)
def test_where_one_rank_cannot_hold_its_part_there_nobody_does(
    broken: Callable[[pytest.MonkeyPatch], None], rank: int, reason: str
) -> None:
    found = on_ranks(3, _apart, broken, rank)
    assert all(apart for apart, _ in found)
    assert reason in found[rank][1][0] and all(len(said) == 1 for _, said in found)


def test_one_rank_and_a_dry_run_have_nobody_to_read_from() -> None:
    assert open_window(Alone(), pieces(0)) is None
    assert open_window(DryComm(0, 2), pieces(0)) is None
    assert hold_together(Alone(), parts(0)) is None
    assert hold_together(DryComm(0, 2), parts(0)) is None


@pytest.mark.parametrize("strategy", ["fsdp", "fold", "ring"])
@pytest.mark.parametrize("name", ["mlp", "groups"])
def test_bounds_and_figures_are_those_of_ranks_that_send(name: str, strategy: str) -> None:
    graph, region = wide(name, torch.float32)
    methods = ("crown-ibp", "alpha-crown")
    (sent, *_), (read, *others) = (
        on_ranks(3, measured, graph, region, strategy, TILE, methods, near) for near in (False, True)
    )
    for theirs, mine in zip(sent, read, strict=True):
        assert mine["digest"] == theirs["digest"]
        assert mine["moved"][0] == mine["moved"][1] == theirs["moved"][1]
        assert mine["resident"] == theirs["resident"]
        assert mine["peak"][0] == theirs["peak"][0]
        assert mine["peak"][1] == pytest.approx(theirs["peak"][1], rel=0.01)
    for rank in others:
        assert [mine["digest"] for mine in rank] == [mine["digest"] for mine in read]


def _in_double(world: World, names: Sequence[str]) -> list[str]:
    out = []
    for name in names:
        graph, region = wide(name, torch.float32)
        box = region.box()
        network = divided(world, graph, "fold" if world.size > 1 else "single", near=True)
        assert (network.window is None) == (world.size == 1)
        exact = type(region)(box[0].double(), box[1].double())
        out.append(digest(bounded(network.executor(dtype=torch.float64), exact, "crown", TILE)))
    return out


def test_weights_are_read_in_the_precision_of_the_bounds() -> None:
    names = ("mlp", "transposed")
    assert on_ranks(2, _in_double, names) == [_in_double(World(), names)] * 2
