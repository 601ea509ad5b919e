"""The ranks as a grid with named axes: `domain` (subproblems), `shard` (rows and weights), `stage` (layers).

A strategy receives the axis it uses, never the world; an axis of length 1 costs nothing and is the same code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from parverify.errors import UsageError
from parverify.parallel.comm import CommMeter, GroupComm

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

AXES = ("domain", "shard", "stage")


def make_mesh(device: str, *, domain: int = 1, shard: int | None = None, stage: int = 1) -> DeviceMesh:
    """The mesh over all ranks; every rank calls this.

    Args:
        device: `cpu` or `cuda`.
        domain, shard, stage: lengths of the axes; `shard` takes what the others leave if None.

    Raises:
        UsageError: if the lengths do not multiply to the number of ranks.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    size = dist.get_world_size()
    lengths = (domain, size // max(domain * stage, 1) if shard is None else shard, stage)
    if min(lengths) < 1 or lengths[0] * lengths[1] * lengths[2] != size:
        listed = " x ".join(f"{axis} {length}" for axis, length in zip(AXES, lengths, strict=True))
        raise UsageError(f"a mesh of {listed} does not fit {size} ranks")
    return init_device_mesh(device, lengths, mesh_dim_names=AXES)


def axis_comm(mesh: DeviceMesh, axis: str, meter: CommMeter | None = None) -> GroupComm:
    """Communication along one axis of the mesh, within this rank's row of it.

    Args:
        mesh: from `make_mesh`.
        axis: one of `AXES`.
        meter: what counts; a new one if None.
    """
    return GroupComm(mesh.get_group(axis), meter)
