"""The ranks of a run as one object: who this process is, and how it talks to the others.

`join` reads what torchrun, or the launcher in `parverify.parallel.launch`, put into the environment. One process is a
world of its own (`alone`) and runs the same code.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from parverify.errors import LostRankError, ParverifyError, UsageError
from parverify.parallel.comm import FOREVER, Alone, Comm
from parverify.parallel.place import place, restarts_possible
from parverify.parallel.rounds import fresh_store

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class World:
    """The ranks of a run.

    Args:
        rank, size: this process, of how many.
        comm: along the mesh axis `shard`.
        mesh: all of them; None for a single process.
    """

    rank: int = 0
    size: int = 1
    comm: Comm = field(default_factory=Alone)
    mesh: DeviceMesh | None = None


def alone() -> World:
    """A world of one rank; torch.distributed is not touched."""
    return World()


def join(
    device: str = "cpu",
    *,
    domain: int = 1,
    stage: int = 1,
    store: str | None = None,
    interface: str | None = None,
) -> World:
    """Find the other ranks; each rank calls this once, and `leave` at the end.

    Args:
        device: `cpu` (gloo) or `cuda` (NCCL, one device a rank).
        domain, stage: lengths of these mesh axes; `shard` has the rest.
        store: a file through which ranks of one machine find each other; None for the address that torchrun gives.
        interface: the network interface that gloo binds to; None for its own choice.

    Returns:
        The world; a single process, without torch.distributed, where nobody started several.

    Raises:
        UsageError: if there are more ranks on this machine than devices.
        LostRankError: if the others can't be found.
    """
    here = place()
    if here is None:
        return alone()
    import torch.distributed as dist

    from parverify.parallel.mesh import axis_comm, make_mesh

    torch.set_num_threads(1)
    backend = "gloo" if device == "cpu" else _take_device(here.local)
    if interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    rank, size = here.rank, here.size
    place_of: dict[str, Any] = {"init_method": "env://" if store is None else f"file://{store}"}
    try:
        if store is None and restarts_possible():
            place_of = {"store": fresh_store(rank, size)}
        dist.init_process_group(backend, rank=rank, world_size=size, timeout=FOREVER, **place_of)
        mesh = make_mesh(device, domain=domain, stage=stage)
    except (RuntimeError, ValueError) as error:  # the latter where the environment says only a part
        raise LostRankError(f"rank {rank} does not find the other {size - 1}: {error}") from error
    return World(rank, size, axis_comm(mesh, "shard"), mesh)


def _take_device(local: int) -> str:
    """Choose this rank's accelerator; the backends for it, and for tensors on the CPU beside it."""
    if local >= torch.cuda.device_count():
        raise UsageError(
            f"rank {local} of this machine has no device of its own: there are {torch.cuda.device_count()}",
            "start fewer ranks, or use --device cpu",
        )
    torch.cuda.set_device(local)
    return "cpu:gloo,cuda:nccl"


def leave(world: World) -> None:
    """Part from the other ranks in order.

    Raises:
        ParverifyError: if this process has never joined.
    """
    if world.size == 1:
        return
    import torch.distributed as dist

    if not dist.is_initialized():
        raise ParverifyError("this process has left the world already")
    dist.destroy_process_group()
