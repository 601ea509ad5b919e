"""Memory as a budget: how many rows and domains are worked on at once.

Sizes follow from the network and the budget (`--memory`), never from a network's name. They only change cost: every row
and every domain is bounded alike in any tile or batch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from parverify.errors import ResourceError
from parverify.graph.ir import BoundGraph

ROW_COPIES = 4  # tensors the size of a row's coefficients alive at one node of a sweep, gradients included
TILE_BYTES = 1 << 20  # of rows at the widest node: larger tiles take more memory and are not faster
TILE_MOST, TILE_GOOD, TILE_LEAST = 8192, 64, 2
BATCH_MOST = 4096


@dataclass(frozen=True)
class Budget:
    """How the memory of this process may be used.

    Args:
        total: bytes.
        row_bytes: bytes that one row takes in an optimized sweep through the whole network.
        widest_bytes: bytes of one row at the widest node.
    """

    total: int
    row_bytes: int
    widest_bytes: int

    def tile(self, wanted: int = 0) -> int:
        """Rows pushed backward at once: `wanted`, or as many as fit a quarter of the budget.

        Raises:
            ResourceError: not even the smallest tile fits.
        """
        fits = self.total // 4 // self.row_bytes
        if wanted:
            return wanted
        if fits < TILE_LEAST:
            least = 4 * TILE_LEAST * self.row_bytes
            raise ResourceError(
                f"the memory budget of {self.total} bytes is too small for this network",
                f"it needs at least {least} bytes: --memory {-(-least // 2**20)}MiB",
            )
        return int(min(fits, TILE_MOST, max(TILE_GOOD, TILE_BYTES // self.widest_bytes)))

    def batch(self, wanted: int = 0, rows: int = 1) -> int:
        """Domains bounded at once, each with `rows` rows."""
        return wanted or int(max(2, min(BATCH_MOST, self.total // 4 // (self.row_bytes * rows))))

    @property
    def pool(self) -> int:
        """Bytes of open domains kept in memory; the rest is spilled."""
        return self.total // 2


def make_budget(graph: BoundGraph, *, memory: int | None, itemsize: int) -> Budget:
    """The budget for a network: `memory` bytes, or half of what the machine has free."""
    widths = sum(node.numel for node in graph.nodes)
    total = memory or max(256 << 20, free_memory() // 2)
    constants = graph.constant_bytes()
    if memory is not None and constants >= memory:
        raise ResourceError(
            f"the network's weights alone take {constants} bytes, the memory budget is {memory}",
            f"--memory {-(-2 * constants // 2**20)}MiB or more",
        )
    widest = max(node.numel for node in graph.nodes)
    return Budget(max(1, total - constants), widths * itemsize * ROW_COPIES, widest * itemsize)


def free_memory() -> int:
    """Bytes of memory that this machine (or this process's control group) can still give; 4 GiB where unknown."""
    try:
        with open("/proc/meminfo") as handle:
            for line in handle:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (ValueError, OSError, AttributeError):
        return 4 << 30
