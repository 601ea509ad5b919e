"""A tree of subproblems that stands for one that was searched: every node knows only how many there are below it.

A domain is one number, so that pools of them are fast: its place in the order of the search above its weight, the
smallest first. That order is by weight, the largest first, as where bounds tell how much work is left, or at random.

A domain of weight w has w descendants, an even number; 0 means that bounding closes it. Its children take w - 2 between
them, one of them a share that varies around `skew`. So the number of nodes is exact whatever the order of the search,
as it is for a property that holds. Where few domains are split over several levels at once, as the spaces of branch and
bound do to fill a batch, what would have been closed on the way is split on and bounded in vain, as there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

FEW = 64  # domains up to which a batch is filled by splitting several levels at once, as a search does
_BITS = 44  # of a weight
_MASK = (1 << _BITS) - 1


@dataclass(frozen=True)
class Shape:
    """A tree.

    Args:
        nodes: below the root; rounded up to an even number.
        skew: mean share of the lighter child, up to 0.5.
        wide: whether few domains are split over several levels to fill a batch.
        heaviest: whether the order is by weight, else at random.
        seed: of the shares and of the order.
    """

    nodes: int
    skew: float = 0.3
    wide: bool = True
    heaviest: bool = True
    seed: int = 0

    @property
    def root(self) -> int:
        """The domain at the root."""
        return self.nodes + self.nodes % 2


@dataclass
class Splitter:
    """Splits domains of a tree, one after the other by the same random numbers."""

    shape: Shape
    random: Random = field(init=False)

    def __post_init__(self) -> None:
        self.random = Random(self.shape.seed)

    def split(self, domains: Sequence[int], room: int) -> tuple[int, list[int]]:
        """Split domains.

        Args:
            domains: at least one.
            room: how many children should be bounded at once.

        Returns:
            How many children are bounded, and those that stay open.
        """
        depth = 1
        while self.shape.wide and len(domains) << (depth + 1) <= min(room, FEW):
            depth += 1
        count = len(domains) << depth
        weights = [domain & _MASK for domain in domains]
        for _ in range(depth):
            weights = self._halve(weights)
        if self.shape.heaviest:
            return count, [(_MASK - weight) << _BITS | weight for weight in weights]
        draw = self.random.random
        return count, [int(draw() * _MASK) << _BITS | weight for weight in weights]

    def _halve(self, weights: Sequence[int]) -> list[int]:
        """The children that are not closed of domains of these weights."""
        draw, twice = self.random.random, 2 * self.shape.skew
        out = []
        for weight in weights:
            pairs = weight // 2 - 1
            left = int(min(1.0, twice * draw()) * pairs)
            if left:
                out.append(2 * left)
            if pairs > left:
                out.append(2 * (pairs - left))
        return out
