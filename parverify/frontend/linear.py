"""Linear terms in exact arithmetic.

A term is `scale * (constant + sum of coefficient * variable)`. Numbers stay the float64 that they were read as until
two of them have to be combined; then they become fractions, so that nothing is rounded before the end. The common
scale makes negation and multiplication cost nothing, and adding always moves the smaller term into the larger one, so
that terms nested ten thousand levels deep take time n log n.
"""

from __future__ import annotations

import math
import sys
from fractions import Fraction

Number = float | int | Fraction


def _times(a: Number, b: Number) -> Number:
    if a == 1 or b == 1:
        return b if a == 1 else a
    if a == -1 or b == -1:
        return -b if a == -1 else -a
    return Fraction(a) * Fraction(b)


def _plus(a: Number, b: Number) -> Number:
    if not a or not b:
        return a or b
    return Fraction(a) + Fraction(b)


class Linear:
    """A linear term over variables numbered from 0; changed in place.

    Args:
        variable: start as this variable, or as a constant where it is None.
        constant: start with this constant.
    """

    __slots__ = ("_constant", "_scale", "_terms")

    def __init__(self, variable: int | None = None, constant: Number = 0) -> None:
        self._terms: dict[int, Number] = {} if variable is None else {variable: 1}
        self._constant: Number = constant
        self._scale: Number = 1

    @property
    def constant(self) -> Number:
        """The part without a variable."""
        return _times(self._constant, self._scale)

    def coefficients(self) -> dict[int, Number]:
        """The nonzero coefficients by variable, in the order of the variables."""
        return {v: _times(c, self._scale) for v, c in sorted(self._terms.items()) if c}

    def is_constant(self) -> bool:
        """Whether no variable has a nonzero coefficient."""
        return not any(self._terms.values())

    def negate(self) -> None:
        """Turn the term into its negative."""
        self._scale = -self._scale

    def multiply(self, factor: Number) -> None:
        """Multiply by a number."""
        if not factor:
            self._terms, self._constant, self._scale = {}, 0, 1
        elif len(self._terms) > 1:
            self._scale = _times(self._scale, factor)
        else:  # the usual `(* 0.5 Y_0)` keeps scale 1, so that it is added without fractions
            self._terms = {variable: _times(value, factor) for variable, value in self._terms.items()}
            self._constant = _times(self._constant, factor)

    def add(self, other: Linear) -> None:
        """Add another term, which must not be used afterwards."""
        if len(other._terms) > len(self._terms):
            self._terms, other._terms = other._terms, self._terms
            self._constant, other._constant = other._constant, self._constant
            self._scale, other._scale = other._scale, self._scale
        ratio = self._ratio(other)
        self._constant = _plus(self._constant, _times(other._constant, ratio))
        for variable, coefficient in other._terms.items():
            self._terms[variable] = _plus(self._terms.get(variable, 0), _times(coefficient, ratio))

    def _ratio(self, other: Linear) -> Number:
        if other._scale is self._scale or other._scale == self._scale:
            return 1
        if other._scale == -self._scale:
            return -1
        return Fraction(other._scale) / Fraction(self._scale)


def round_nearest(value: Number) -> float:
    """The nearest float64.

    Raises:
        OverflowError: the value is out of the range of float64, or not zero but rounded to zero.
    """
    rounded = float(value)
    if value and not rounded:
        raise OverflowError("not zero but too small for float64")
    return rounded


def round_up(value: Number) -> float:
    """The least float64 that is not below `value`, infinite where there is none."""
    try:
        rounded = float(value)
    except OverflowError:
        return math.inf if value > 0 else -sys.float_info.max
    return math.nextafter(rounded, math.inf) if rounded < value else rounded
