"""Ranks in equal groups: each works on subproblems of its own, divided within the group by any strategy.

The mesh axis `domain` counts groups, `shard` the ranks in one. One group is all ranks together.
"""

from __future__ import annotations

from dataclasses import dataclass

from parverify.errors import UsageError
from parverify.parallel.comm import Alone, Comm
from parverify.parallel.world import World


@dataclass(frozen=True)
class Group:
    """This rank's group.

    Args:
        number, count: which of how many.
        comm: its ranks.
    """

    number: int
    count: int
    comm: Comm

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for its group."""
        return self.comm.rank == 0


def check_groups(count: int, size: int) -> None:
    """Raise `UsageError` unless `size` ranks can form `count` equal groups."""
    if size % count:
        allowed = ", ".join(str(number) for number in range(1, size + 1) if size % number == 0)
        raise UsageError(f"parallel.groups: {size} ranks can't form {count} equal groups; allowed: 0, {allowed}")


def make_group(world: World, count: int, device: str) -> Group:
    """Divide the ranks into `count` groups of neighbours; all ranks call this.

    Raises:
        UsageError: the ranks can't be divided evenly.
    """
    check_groups(count, world.size)
    if count == 1:
        return Group(0, 1, world.comm)
    size = world.size // count
    if size == 1:
        return Group(world.rank, count, Alone())
    from parverify.parallel.mesh import axis_comm, make_mesh

    mesh = make_mesh(device, domain=count, shard=size)
    return Group(world.rank // size, count, axis_comm(mesh, "shard"))
