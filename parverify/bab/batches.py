"""Which domains a batch holds: as many as take about a second, packed by what they are predicted to cost.

A domain takes some seconds, and some more for every unit of its column `cost` (rows times depth); both are fitted to
the batches so far. So batches take alike long whether their domains are costly or cheap (FlowTrain, arXiv:2606.23087).
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from parverify.bab.domains import Domains, Pool
from parverify.errors import ResourceError

PLENTY = 4  # batches whose domains are open: nobody waits for what the next one finds
_KEPT = 0.95  # weight of what was measured before, for each batch since


class Prediction:
    """Seconds of a domain, a + b cost, by least squares over the last batches."""

    def __init__(self) -> None:
        self._products, self._seconds = np.zeros((2, 2)), np.zeros(2)
        self.base, self.each = 0.0, 0.0

    @property
    def known(self) -> bool:
        """Whether anything was measured."""
        return self.base > 0 or self.each > 0

    def of(self, cost: Tensor) -> Tensor:
        """(D,) predicted seconds."""
        return self.base + self.each * cost

    def learn(self, cost: Tensor, seconds: float) -> None:
        """A batch of domains with these costs (D,) took so long."""
        row = np.array([float(len(cost)), float(cost.sum())])
        self._products = _KEPT * self._products + np.outer(row, row)
        self._seconds = _KEPT * self._seconds + seconds * row
        (nn, nc), (_, cc) = self._products
        det = nn * cc - nc * nc
        if det > 1e-9 * nn * cc:
            base, each = np.linalg.solve(self._products, self._seconds)
            if base > 0 and each > 0:
                self.base, self.each = float(base), float(each)
            elif each > 0:
                self.base, self.each = 0.0, float(self._seconds[1] / cc)
            else:
                self.base, self.each = float(self._seconds[0] / nn), 0.0


class BatchSize:
    """How many children are bounded at once: what takes about a second, and half of it when memory runs out.

    Short batches keep the search responsive: the clock, candidates and the order of the pool act between batches. As
    soon as a batch has been measured, the next ones hold no more than what is predicted to take as long as they should.

    Args:
        size: of the largest batch, to start with.
        most: what the memory allows.
        fixed: never change it (except when memory runs out).
        ranks: that bound every batch together; one that runs out of memory alone can't change what the others do.
        pace: factor on how long a batch may take where few domains are open.
    """

    SHORT, AIM, LONG = 0.4, 0.8, 1.2  # seconds

    def __init__(self, size: int, most: int, *, fixed: bool = False, ranks: int = 1, pace: float = 1.0) -> None:
        self._most, self._fixed, self._ranks, self._pace = most, fixed, ranks, pace
        self._factor = pace
        self._predicted = Prediction()
        self.size = max(1, min(size, most))

    def pop(self, pool: Pool) -> Domains:
        """The domains whose halves are the next batch."""
        self.look(len(pool))
        half = max(1, self.size // 2)
        if self._fixed or not self._predicted.known:
            return pool.pop_batch(half)
        return pool.pop_batch(half, self._predicted.of, self._factor * self.AIM / 2)

    def look(self, waiting: int) -> None:
        """Before a batch: how many domains are open here."""
        self._factor = 1.0 if waiting >= PLENTY * self.size else self._pace

    def halve(self) -> None:
        """After an out-of-memory error.

        Raises:
            ResourceError: other ranks are in the middle of this batch.
        """
        if self._ranks > 1:
            raise ResourceError("out of memory while ranks work together", "give --memory, or use more ranks")
        self._most = self.size = max(1, self.size // 2)

    def learn(self, children: Domains, seconds: float) -> None:
        """What a batch took."""
        if len(children):
            self._predicted.learn(children.cost, seconds)

    def adapt(self, children: int, seconds: float) -> None:
        """After a batch of `children` that took `seconds`."""
        if self._fixed:
            return
        if seconds < self._factor * self.SHORT and children >= self.size // 2:
            self.size = min(self._most, 2 * self.size)
        elif seconds > self._factor * self.LONG:
            self.size = max(2, self.size // 2)
