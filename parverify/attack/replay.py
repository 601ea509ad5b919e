"""The only door to `sat`: a point becomes a witness when the original network, replayed, says so.

Invariant: what is printed is what was replayed. A property speaks of decimal numbers, a network of float32; the two
meet by rounding *inward*, so that a printed number lies in the decimal box and equals the number that the network
was given. Only where a box holds no number of the network's type (an input pinned to 0.1, say) is the decimal
itself printed; every reader rounds it to the same float32 then. Tolerances are zero, and a row that comes so close
to its right-hand side that the order of a sum could decide it is decided in rational arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch

from parverify.errors import ModelError
from parverify.frontend.query import Disjunct, Query
from parverify.verdict import Witness

Replay = Callable[[np.ndarray], np.ndarray]
"""(n_in,) float64 -> (n_out,) float64: the original network, as onnxruntime computes it."""

_NUMPY_TYPES: dict[torch.dtype, type[np.generic]] = {
    torch.float64: np.float64,
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.int16: np.int16,
    torch.int8: np.int8,
    torch.uint8: np.uint8,
}
_MEMORY_OF_FAILURES = 4096


def round_to(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """The numbers of `dtype` nearest to `x`, as float64; beyond the largest they are infinite."""
    kind = numpy_type(dtype)
    if issubclass(kind, np.integer):
        return np.rint(x)
    with np.errstate(over="ignore"):
        return x.astype(kind).astype(np.float64)


def numpy_type(dtype: torch.dtype) -> type[np.generic]:
    """The numpy type of a network's input.

    Raises:
        ModelError: for a type whose numbers can't be replayed.
    """
    if dtype not in _NUMPY_TYPES:
        allowed = ", ".join(str(known).removeprefix("torch.") for known in _NUMPY_TYPES)
        raise ModelError(f"network input of type {str(dtype).removeprefix('torch.')}; allowed: {allowed}")
    return _NUMPY_TYPES[dtype]


def _next(x: np.ndarray, kind: type[np.generic], towards: float) -> np.ndarray:
    """The neighbours of `x` (numbers of the floating type `kind`, as float64) in one direction."""
    with np.errstate(over="ignore", under="ignore"):
        return np.nextafter(x.astype(kind), kind(towards)).astype(np.float64)  # type: ignore[call-overload]


@dataclass(frozen=True)
class Grid:
    """The numbers of the network's input type that lie in one decimal box.

    Args:
        lower, upper: (n_in,) float64, the decimal box.
        first, last: (n_in,) float64, the smallest and the largest such number of each coordinate.
        bare: (n_in,) bool, True where there is none; `first` and `last` are meaningless there.
        dtype: the input type.
    """

    lower: np.ndarray
    upper: np.ndarray
    first: np.ndarray
    last: np.ndarray
    bare: np.ndarray
    dtype: torch.dtype

    @classmethod
    def of(cls, lower: np.ndarray, upper: np.ndarray, dtype: torch.dtype) -> Grid:
        """Round the box [lower, upper] inward to numbers of `dtype`."""
        kind = numpy_type(dtype)
        if issubclass(kind, np.integer):
            first, last = np.ceil(lower), np.floor(upper)
            smallest, largest = float(np.iinfo(kind).min), float(np.iinfo(kind).max)
        else:
            first, last = round_to(lower, dtype), round_to(upper, dtype)
            first = np.where(first < lower, _next(first, kind, np.inf), first)
            last = np.where(last > upper, _next(last, kind, -np.inf), last)
            smallest, largest = float(np.finfo(kind).min), float(np.finfo(kind).max)  # type: ignore[type-var]
        first, last = np.maximum(first, smallest), np.minimum(last, largest)
        return cls(lower, upper, first, last, first > last, dtype)

    def snap(self, x: np.ndarray) -> np.ndarray:
        """The nearest point of the box that can be printed and replayed alike, (n_in,) float64."""
        nearest = np.clip(round_to(x, self.dtype), self.first, self.last)
        return np.where(self.bare, np.clip(x, self.lower, self.upper), nearest)

    def seen(self) -> tuple[np.ndarray, np.ndarray]:
        """The box as the network sees it, numbers of the input type: two (n_in,) float64 arrays."""
        low, high = round_to(self.lower, self.dtype), round_to(self.upper, self.dtype)
        return np.where(self.bare, low, self.first), np.where(self.bare, high, self.last)


def surely_holds(part: Disjunct, x: np.ndarray, y: np.ndarray) -> bool:
    """`part.holds(x, y)`, and no row owes it to the rounding of its own sum."""
    if not part.holds(x, y):
        return False
    residual = part.residual(x, y)
    size = np.abs(part.C_y) @ np.abs(y) + np.abs(part.d)
    if part.C_x is not None:
        size = size + np.abs(part.C_x) @ np.abs(x)
    terms = part.C_y.shape[1] + x.size + 2
    doubtful = np.flatnonzero(np.abs(residual) <= terms * np.finfo(np.float64).eps * size)
    for row in doubtful:
        exact = _exact_residual(part, int(row), x, y)
        if exact > 0 or (part.strict[row] and exact == 0):
            return False
    return True


def _exact_residual(part: Disjunct, row: int, x: np.ndarray, y: np.ndarray) -> Fraction:
    """One row's `C_y y + C_x x - d` in rational arithmetic."""
    total = -Fraction(float(part.d[row]))
    pairs = [(part.C_y[row], y)] if part.C_x is None else [(part.C_y[row], y), (part.C_x[row], x)]
    for coefficients, values in pairs:
        for at in np.flatnonzero(coefficients):
            total += Fraction(float(coefficients[at])) * Fraction(float(values[at]))
    return total


class Confirmer:
    """Replays points, and remembers which ones failed.

    Args:
        replay: the original network.
        query: the property.
        grids: the distinct boxes of the query, rounded inward.
        box: the position in `grids` of each disjunct's box; -1 for disjuncts whose box is empty.
    """

    def __init__(self, replay: Replay, query: Query, grids: Sequence[Grid], box: np.ndarray) -> None:
        self._replay = replay
        self._query = query
        self._grids = grids
        self._box = box
        self._failed: set[bytes] = set()
        self.replays = 0

    def __call__(self, x: np.ndarray, disjunct: int | None = None) -> Witness | None:
        """The witness at the point nearest to `x` in the disjunct's box (in the nearest boxes where None)."""
        x = np.asarray(x, dtype=np.float64).reshape(-1)
        if x.size != self._query.n_in:
            raise ValueError(f"a point of {x.size} numbers for a network of {self._query.n_in} inputs")
        if not np.isfinite(x).all():
            return None
        for grid in self._near(x, disjunct):
            witness = self._try(grid.snap(x))
            if witness is not None:
                return witness
        return None

    def _near(self, x: np.ndarray, disjunct: int | None) -> list[Grid]:
        """The boxes to move `x` into, at most eight: the disjunct's own, or else the nearest ones."""
        if disjunct is not None:
            at = int(self._box[disjunct])
            return [] if at < 0 else [self._grids[at]]
        away = np.array([np.maximum(grid.lower - x, x - grid.upper).max(initial=0.0) for grid in self._grids])
        return [self._grids[at] for at in np.argsort(away, kind="stable")[:8] if away[at] <= away.min()]

    def _try(self, x: np.ndarray) -> Witness | None:
        """Replay one point of a box and look at every disjunct: a point that fails here fails for good."""
        key = x.tobytes()
        if key in self._failed:
            return None
        self.replays += 1
        y = np.asarray(self._replay(x.copy()), dtype=np.float64).reshape(-1)
        if y.size != self._query.n_out:
            raise ModelError(f"the replayed network returned {y.size} outputs; the property has {self._query.n_out}")
        if np.isfinite(y).all() and any(surely_holds(part, x, y) for part in self._query):
            return Witness(x, y)
        if len(self._failed) >= _MEMORY_OF_FAILURES:
            self._failed.clear()
        self._failed.add(key)
        return None
