"""FSDP: a weight is sharded on its dim 0 and gathered whole just before use, then freed (arXiv:2606.09377, section 4).

All shards are equal ranges; the last ones are padded in flight where the size does not divide. Every rank pushes every
row, so that what is multiplied, and in which order, is what one process does: bounds are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

from parverify.graph.ir import Node
from parverify.ops.weighted import Piece, parts
from parverify.program.steps import Free, Gather, Inner, Lowering, Wait, products


def gathered(node: Node, weight_shape: Sequence[int], rank: int, size: int) -> Lowering:
    """The lowering of a weight that is gathered for use.

    Args:
        node: a weighted node.
        weight_shape: of the whole weight.
        rank, size: which of how many ranks.
    """
    rows = -(-weight_shape[0] // size)
    mine = (min(rank * rows, weight_shape[0]), min((rank + 1) * rows, weight_shape[0]))
    some = parts(node, weight_shape)

    def steps(kind: str) -> tuple[Inner, ...]:
        return (Gather(node.name), Wait(node.name), *products(node, kind, some), Free(node.name))

    push, pull = steps("push"), steps("pull")
    return Lowering((Piece(mine, (0, weight_shape[1])),), push, pull, steps("pick"), pull, push)
