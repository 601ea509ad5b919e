"""Which ranks work on a module: whatever a caller has at hand, as a `Comm`."""

from __future__ import annotations

from typing import Any

import torch

from parverify.errors import UsageError
from parverify.parallel.comm import Alone, Comm
from parverify.parallel.place import place


def comm_of(mesh: Any, bounded: Any) -> Comm:
    """Communication among the ranks that `mesh` stands for.

    Args:
        mesh: a `Comm`; a `DeviceMesh`, of which the axis `shard` or the only one is taken; a process group; or None for
            all ranks. Where torchrun started several and nobody has joined them yet, they are joined.
        bounded: the module, whose device says how.

    Raises:
        UsageError: it is something else, or a mesh with several axes and none called `shard`.
    """
    if mesh is not None and hasattr(mesh, "all_max") and hasattr(mesh, "meter"):
        found: Comm = mesh
        return found
    import torch.distributed as dist

    from parverify.parallel.comm import GroupComm

    if not dist.is_available():
        return Alone()
    if mesh is None:
        if not dist.is_initialized():
            if place() is None:
                return Alone()
            from parverify.parallel.world import join

            return join("cpu" if torch.device(getattr(bounded, "device", "cpu")).type == "cpu" else "cuda").comm
        return GroupComm() if dist.get_world_size() > 1 else Alone()
    names = getattr(mesh, "mesh_dim_names", None)
    if hasattr(mesh, "get_group"):
        if names and "shard" in names:
            return GroupComm(mesh.get_group("shard"))
        if mesh.ndim == 1:
            return GroupComm(mesh.get_group())
        raise UsageError(f"a mesh with the axes {names or mesh.ndim} has none called shard", "give a submesh")
    if isinstance(mesh, dist.ProcessGroup):
        return GroupComm(mesh)
    raise UsageError(f"mesh must be a DeviceMesh, a process group or a Comm, not a {type(mesh).__name__}")
