"""Communication without other ranks: what a dry run counts, what a group of one does, what is refused."""

from __future__ import annotations

import pytest
import torch

from parverify.errors import ParverifyError
from parverify.parallel.comm import Alone, Comm, DryComm, agree
from parverify.parallel.traffic import CommMeter


def figures(comm: Comm) -> dict[str, tuple[float, float]]:
    """name -> calls, bytes."""
    return {name: (figure["calls"], figure["bytes"]) for name, figure in comm.meter.figures().items()}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_dry_run_counts_what_a_rank_would_receive(device: str) -> None:
    comm = DryComm(1, 4)
    shard = torch.ones(3, 5, device=device)  # 60 bytes
    full = torch.ones(12, 5, device=device)
    comm.all_gather(full, shard).wait()
    comm.broadcast(shard, 1).wait()
    comm.broadcast(shard, 2).wait()
    comm.shift(shard, torch.empty_like(shard)).wait()
    comm.all_reduce(shard).wait()
    comm.reduce_scatter(shard, full).wait()
    comm.send(shard, 0).wait()
    comm.recv(shard, 0).wait()
    assert comm.all_max(7) == 7
    assert comm.broadcast_bytes(b"four", 0) == b"four"
    comm.barrier()
    assert figures(comm) == {
        "all_gather": (1, 180),
        "all_max": (1, 12),
        "all_reduce": (1, 90),
        "barrier": (1, 0),
        "broadcast": (2, 60),
        "objects": (1, 12),
        "recv": (1, 60),
        "reduce_scatter": (1, 180),
        "send": (1, 0),
        "shift": (1, 60),
    }
    assert {figure["seconds"] for figure in comm.meter.figures().values()} == {0.0}


def test_a_dry_run_moves_nothing() -> None:
    comm, tensor = DryComm(0, 2), torch.ones(2)
    comm.all_reduce(tensor).wait()
    comm.broadcast(tensor, 1).wait()
    assert tensor.tolist() == [1, 1]
    with pytest.raises(ParverifyError, match="waits for"):
        comm.broadcast_bytes(None, 1)


def test_rounds_that_are_alike_are_counted_at_once() -> None:
    meter = CommMeter()
    with meter.times(3):
        meter.record("shift", 10)
        with meter.times(2):
            meter.record("shift", 1)
    meter.record("shift", 100)
    assert meter.figures() == {"shift": {"calls": 3 + 6 + 1, "bytes": 30 + 6 + 100, "seconds": 0.0}}
    meter.clear()
    assert meter.figures() == {}


def test_a_group_of_one_copies_and_counts_no_bytes() -> None:
    comm, out = Alone(), torch.zeros(2, 3)
    given = torch.arange(6.0).reshape(2, 3)
    comm.all_gather(out, given).wait()
    assert torch.equal(out, given)
    comm.reduce_scatter(out.zero_(), given).wait()
    assert torch.equal(out, given)
    comm.shift(given, out.zero_()).wait()
    assert torch.equal(out, given)
    comm.all_reduce(out).wait()
    comm.broadcast(out, 0).wait()
    assert torch.equal(out, given)
    assert (comm.all_max(-4), comm.broadcast_bytes(b"x", 0)) == (-4, b"x")
    agree(comm, {"a": out})
    assert all(counted == (1, 0) for name, counted in figures(comm).items() if name != "all_gather")
    assert figures(comm)["all_gather"] == (2, 0)
    with pytest.raises(ParverifyError, match="nobody"):
        comm.send(out, 0)


def test_only_whole_contiguous_tensors_are_taken() -> None:
    comm = DryComm(0, 2)
    with pytest.raises(ParverifyError, match="all_reduce needs contiguous"):
        comm.all_reduce(torch.ones(2, 3).T)
    with pytest.raises(ParverifyError, match="all_gather between"):
        comm.all_gather(torch.ones(3), torch.ones(2))
    with pytest.raises(ParverifyError, match="reduce_scatter between"):
        comm.reduce_scatter(torch.ones(2), torch.ones(4, dtype=torch.float64))
    with pytest.raises(ParverifyError, match="rank 2 is not in a group of 2"):
        DryComm(2, 2)


def test_agreement_is_only_counted_where_nothing_can_be_compared() -> None:
    comm = DryComm(1, 3)
    agree(comm, {"a": torch.ones(4), "b": torch.ones(2, device="meta")})
    assert figures(comm) == {"all_gather": (1, 2 * 2 * 8)}
