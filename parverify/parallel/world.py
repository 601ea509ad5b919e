"""The ranks of a run as one object: who this process is, and how it talks to the others.

`join` reads what torchrun, or the launcher in `parverify.parallel.launch`, put into the environment. One process is a
world of its own (`alone`) and runs the same code.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from parverify.errors import ParverifyError, UsageError
from parverify.parallel.comm import FOREVER, Alone, Comm

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

STORE = "PARVERIFY_STORE"  # the file through which ranks of the local launcher find each other
LOOPBACK = "PARVERIFY_LOOPBACK"  # the interface that they bind to


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


def launched() -> bool:
    """Whether this process was started as one of several ranks."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def join(device: str = "cpu", *, domain: int = 1, stage: int = 1) -> World:
    """Find the other ranks; each rank calls this once, and `leave` at the end.

    Args:
        device: `cpu` (gloo) or `cuda` (NCCL, one device a rank).
        domain, stage: lengths of these mesh axes; `shard` has the rest.

    Returns:
        The world; a single process, without torch.distributed, where nobody started several.

    Raises:
        UsageError: if there are more ranks on this machine than devices.
    """
    if not launched():
        return alone()
    import torch.distributed as dist

    from parverify.parallel.mesh import axis_comm, make_mesh

    torch.set_num_threads(1)
    local, backend = int(os.environ.get("LOCAL_RANK", "0")), "gloo"
    if device == "cuda":
        if local >= torch.cuda.device_count():
            raise UsageError(
                f"rank {local} of this machine has no device: there are {torch.cuda.device_count()}", "fewer ranks"
            )
        torch.cuda.set_device(local)
        backend = "cpu:gloo,cuda:nccl"
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = os.environ.get(STORE)
    if store is None:
        dist.init_process_group(backend, timeout=FOREVER)
    else:
        if LOOPBACK in os.environ:
            os.environ["GLOO_SOCKET_IFNAME"] = os.environ[LOOPBACK]
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=FOREVER)
    mesh = make_mesh(device, domain=domain, stage=stage)
    return World(rank, size, axis_comm(mesh, "shard"), mesh)


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
