"""Communication between gloo ranks: what arrives, that a dry run counts the same, and that disagreement is noticed."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from parverify.errors import DisagreementError
from parverify.parallel.comm import Comm, DryComm, agree
from parverify.parallel.mesh import axis_comm, make_mesh
from parverify.parallel.world import World
from tests.distributed.ranks import on_ranks


def everything(comm: Comm, *, dry: bool = False) -> list[Any]:
    """One call of each method; what arrived."""
    rank, size = comm.rank, comm.size
    mine = torch.full((2, 3), float(rank), requires_grad=True)
    out, piece, ring, back = torch.empty(2 * size, 3), torch.empty(1), torch.empty(2, 3), torch.empty(2, 3)
    spread, summed, point = (torch.full((3,), float(rank), dtype=torch.float64) for _ in range(3))
    pending = [comm.all_gather(out, mine), comm.reduce_scatter(piece, torch.arange(float(size)))]
    for item in pending:
        item.wait()
        item.wait()  # again does nothing
    comm.broadcast(spread, 1).wait()
    comm.all_reduce(summed).wait()
    comm.shift(mine, ring).wait()
    comm.shift(mine, back, back=True).wait()
    if rank == 0:
        comm.send(point, 1).wait()
    if rank == 1:
        comm.recv(point, 0).wait()
    largest = comm.all_max(10 * rank)
    data = comm.broadcast_bytes(b"some bytes" if rank == 1 or dry else None, 1)
    nothing = comm.broadcast_bytes(b"" if rank == 0 or dry else None, 0)
    comm.barrier()
    agree(comm, {"a": torch.ones(3), "empty": torch.ones(0), "scalar": torch.tensor(2.0), "odd": torch.ones(2, 3).T})
    tensors = [out[::2, 0], piece, spread[:1], summed[:1], ring[0, :1], back[0, :1], point[:1]]
    return [*(tensor.tolist() for tensor in tensors), largest, data, nothing]


def arrived_and_counted(world: World) -> tuple[list[Any], list[Any], list[Any]]:
    """What arrived, and calls and bytes of the group and of a dry run of this rank."""
    arrived = everything(world.comm)
    dry = DryComm(world.rank, world.size)
    everything(dry, dry=True)
    seconds = [figure["seconds"] for figure in world.comm.meter.figures().values()]
    assert all(0 < spent < 10 for spent in seconds)
    counts = [
        [(name, figure["calls"], figure["bytes"]) for name, figure in comm.meter.figures().items()]
        for comm in (world.comm, dry)
    ]
    return arrived, counts[0], counts[1]


@pytest.mark.parametrize("size", [2, 3])
def test_every_call_arrives_and_counts_as_in_a_dry_run(size: int) -> None:
    for rank, (arrived, counted, dry) in enumerate(on_ranks(size, arrived_and_counted)):
        assert arrived == [
            [float(r) for r in range(size)],
            [float(size * rank)],
            [1.0],
            [size * (size - 1) / 2],
            [float((rank + 1) % size)],
            [float((rank - 1) % size)],
            [0.0 if rank == 1 else float(rank)],
            10 * (size - 1),
            b"some bytes",
            b"",
        ]
        assert counted == dry
        assert len(counted) == (9 if rank < 2 else 8)


def disagreement(world: World, odd: int) -> tuple[str, list[int], str]:
    """The error about a tensor that is another one on rank `odd`."""
    tensors = {
        "same": torch.ones(3),
        "alpha of layer 3": torch.tensor([0.0, float(world.rank == odd)]),
        "z": torch.ones(1),
    }
    with contextlib.suppress(DisagreementError):
        agree(world.comm, {"fine": torch.ones(1)})
        agree(world.comm, tensors)
    with pytest.raises(DisagreementError) as caught:
        agree(world.comm, tensors)
    return caught.value.tensor, caught.value.ranks, str(caught.value)


def test_disagreement_names_the_tensor_and_the_ranks() -> None:
    for tensor, ranks, text in on_ranks(3, disagreement, 2):
        assert (tensor, ranks) == ("alpha of layer 3", [2])
        assert "ranks disagree: alpha of layer 3 on rank 2 is not what it is on rank 0" in text
    for _, ranks, text in on_ranks(3, disagreement, 0):
        assert ranks == [1, 2] and "on ranks 1, 2 is" in text


def differing(world: World) -> list[bool]:
    """Whether tensors that differ in dtype, shape, sign of zero or the last bit are told apart."""
    first = world.rank == 0
    kinds = [
        torch.ones(4) if first else torch.ones(2, 2),
        torch.zeros(2) if first else torch.zeros(2, dtype=torch.int32),
        torch.zeros(2) if first else -torch.zeros(2),
        torch.ones(2) if first else torch.nextafter(torch.ones(2), torch.full((2,), 2.0)),
    ]
    found = []
    for kind in kinds:
        try:
            agree(world.comm, {"x": kind})
            found.append(False)
        except DisagreementError:
            found.append(True)
    return found


def test_agreement_is_bit_for_bit() -> None:
    assert on_ranks(2, differing) == [[True] * 4] * 2


def along_the_axes(world: World) -> dict[str, tuple[int, int, float]]:
    """Rank, size and sum of world ranks along each axis of a 2 x 2 mesh."""
    mesh = make_mesh("cpu", domain=2, shard=2)
    found = {}
    for axis in ("domain", "shard", "stage"):
        comm, number = axis_comm(mesh, axis), torch.tensor([float(world.rank)])
        comm.all_reduce(number).wait()
        found[axis] = (comm.rank, comm.size, float(number))
    return found


def test_axes_of_the_mesh() -> None:
    domain = {0: 0 + 2, 1: 1 + 3}
    for rank, found in enumerate(on_ranks(4, along_the_axes)):
        row, column = divmod(rank, 2)
        assert found["domain"] == (row, 2, domain[column])
        assert found["shard"] == (column, 2, {0: 0 + 1, 1: 2 + 3}[row])
        assert found["stage"] == (0, 1, rank)
