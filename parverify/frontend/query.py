"""A property without its file format: a union of (box, conjunction of linear constraints).

The property describes the *unsafe* region. A disjunct holds at (x, y) when x lies in its box and every row holds:
`C_y y + C_x x <= d` (or `<` where `strict`). The query is `sat` when some disjunct holds at (x, network(x)).
Real numbers are float64 here, exactly as the decimal text parses; rounding to a network's dtype happens later and
only outward (bounds) or inward (witnesses).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Disjunct:
    """One part of the unsafe region.

    Args:
        lower, upper: (n_in,) float64, the closed input box, flat in C order. May be shared between disjuncts.
        C_y: (m, n_out) float64, coefficients on the outputs.
        C_x: (m, n_in) float64, coefficients on the inputs, or None where no row mentions an input.
        d: (m,) float64, right-hand sides.
        strict: (m,) bool, True where the row is `<` instead of `<=`.
    """

    lower: np.ndarray
    upper: np.ndarray
    C_y: np.ndarray
    d: np.ndarray
    strict: np.ndarray
    C_x: np.ndarray | None = None

    @property
    def empty_box(self) -> bool:
        """True if the input box holds no point, so that the disjunct can't hold."""
        return bool((self.lower > self.upper).any())

    def residual(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """`C_y y + C_x x - d`, (m,) float64; the disjunct holds where all are <= 0 (< 0 if strict)."""
        value = self.C_y @ np.asarray(y, dtype=np.float64) - self.d
        if self.C_x is not None:
            value = value + self.C_x @ np.asarray(x, dtype=np.float64)
        return value

    def holds(self, x: np.ndarray, y: np.ndarray) -> bool:
        """Whether (x, y) satisfies the box and every row with zero tolerance; NaN never does."""
        x = np.asarray(x, dtype=np.float64)
        inside = bool(((x >= self.lower) & (x <= self.upper)).all())
        residual = self.residual(x, y)
        return inside and bool(np.where(self.strict, residual < 0, residual <= 0).all())


@dataclass(frozen=True)
class Query:
    """A property over one network.

    Args:
        n_in, n_out: flat sizes of input and output.
        disjuncts: the parts; none at all means that nothing is unsafe (`unsat`).
    """

    n_in: int
    n_out: int
    disjuncts: tuple[Disjunct, ...]

    def __iter__(self) -> Iterator[Disjunct]:
        return iter(self.disjuncts)

    def __len__(self) -> int:
        return len(self.disjuncts)

    def holds(self, x: np.ndarray, y: np.ndarray) -> bool:
        """Whether (x, y) is unsafe, with zero tolerance."""
        return any(part.holds(x, y) for part in self.disjuncts)

    def hull(self) -> tuple[np.ndarray, np.ndarray]:
        """The smallest box around all nonempty input boxes, two (n_in,) float64 arrays."""
        boxes = [part for part in self.disjuncts if not part.empty_box]
        lower = np.min([part.lower for part in boxes], axis=0)
        upper = np.max([part.upper for part in boxes], axis=0)
        return lower, upper
