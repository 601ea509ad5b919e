"""Products with a weight part by part, and what they add up to: the order of the sums is that of the steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from parverify.errors import ParverifyError
from parverify.graph.ir import Node
from parverify.ops.weighted import Part, channel_dim, pull, push
from parverify.program.steps import Product

MAGNITUDES = 512 << 10  # bytes of a linear layer's weight of which magnitudes are made at once


def blocks(node: Node, step: Product, weight: Tensor) -> Iterator[tuple[Product, Tensor]]:
    """The product with a part's piece as products with blocks of its rows, so that their magnitudes take little memory.

    Other products stay as they are: convolutions, whose weights are small, and pushed rows.
    """
    first, last = step.part.out
    size = -(-(last - first) // max(1, -(-weight.nbytes // MAGNITUDES)))
    if node.op != "linear" or step.kind != "pull" or size == last - first:
        yield step, weight
        return
    for begin in range(first, last, size):
        end = min(begin + size, last)
        yield replace(step, part=Part((begin, end), step.part.into)), weight[begin - first : end - first]


class Sum:
    """What products of one kind with the parts of a node's weight add up to: which channels they take and give."""

    def __init__(self, node: Node, multiplied: Sequence[Product]) -> None:
        self.node = node
        self.pushing = multiplied[0].kind == "push"
        self.dim = channel_dim(node) + 1
        ranges = {step: self.ranges(step) for step in multiplied}
        self.given = (min(a for _, (a, _) in ranges.values()), max(b for _, (_, b) in ranges.values()))
        self.taken = min(a for (a, _), _ in ranges.values())

    def ranges(self, step: Product) -> tuple[tuple[int, int], tuple[int, int]]:
        """The channels that a part takes and those that it gives."""
        part = step.part
        return (part.out, part.into) if self.pushing else (part.into, part.out)

    def multiply(self, weight: Tensor, x: Tensor) -> Tensor:
        """The product with a part's piece."""
        return push(self.node, weight, x) if self.pushing else pull(self.node, weight, x)

    def start(self, x: Tensor) -> Tensor:
        """What parts are added to, or written into, that give some of the channels each."""
        shape = [x.shape[0], *(self.node.attrs["in_shapes"][0] if self.pushing else self.node.shape)]
        shape[self.dim] = self.given[1] - self.given[0]
        return x.new_zeros(shape) if self.pushing else x.new_empty(shape)


class Result:
    """A sum of products under way."""

    def __init__(self, made: Sum) -> None:
        self._sum = made
        self._tensor: Tensor | None = None

    @property
    def tensor(self) -> Tensor:
        """The sum; zero where nothing was added."""
        if self._tensor is None:
            raise ParverifyError(f"node {self._sum.node.name}: the program multiplies nothing")
        return self._tensor

    @tensor.setter
    def tensor(self, value: Tensor) -> None:
        self._tensor = value

    def contiguous(self) -> Tensor:
        """The sum, made contiguous in place."""
        self._tensor = self.tensor.contiguous()
        return self._tensor

    def add(self, step: Product, weight: Tensor, x: Tensor, first: int | None) -> None:
        """Add one part's product.

        Args:
            step: which part.
            weight: its piece.
            x: what is multiplied.
            first: the first channel of x, where it was sliced.
        """
        made = self._sum
        taken, given = made.ranges(step)
        start, count = taken[0] - (made.taken if first is None else first), taken[1] - taken[0]
        some = x if count == x.shape[made.dim] else x.narrow(made.dim, start, count)
        if self._tensor is None:
            if given == made.given:
                self._tensor = made.multiply(weight, some)
                return
            self._tensor = made.start(x)
        target = self._tensor.narrow(made.dim, given[0] - made.given[0], given[1] - given[0])
        if not made.pushing:
            target.copy_(made.multiply(weight, some))  # parts give different output channels
        elif made.node.op == "linear" and given == made.given:
            flat = self._tensor.view(-1, self._tensor.shape[-1])
            flat.addmm_(some.reshape(-1, some.shape[-1]), weight)
        else:
            target.add_(made.multiply(weight, some))
