"""From nested `and`/`or` to a union of (box, rows).

A formula is held as alternating `Conjunction`s and lists of alternatives: atoms of nested `and`s melt into one
conjunction, nested `or`s into one list. `Formula.query` walks that tree without recursion and carries for every branch
only what differs from the box that all share, so a contradiction of input bounds cuts a branch off at once, and equal
boxes and equal rows become the same arrays. Its cost is that of its result.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from parverify.clock import Clock
from parverify.errors import SpecError
from parverify.frontend.linear import Linear, Number, round_nearest, round_up
from parverify.frontend.query import Disjunct, Query

DISJUNCT_LIMIT = 1_000_000
"""More alternatives than this are refused."""

ENTRY_LIMIT = 1 << 28
"""More float64 entries than this in all boxes and rows (2 GiB) are refused."""

_PHASE = "parsing the property"

# An input bound is a key and a value, such that smaller values are tighter: the upper bound u of input i is
# (2i + 1, u), the lower bound l is (2i, -l). `key ^ 1` is the opposite bound of the same input.
Bounds = dict[int, float]
Rows = tuple[int, ...]


def lower_key(index: int) -> int:
    """Key of the lower bound of an input."""
    return 2 * index


def upper_key(index: int) -> int:
    """Key of the upper bound of an input."""
    return 2 * index + 1


class Conjunction:
    """Atoms and lists of alternatives that must all hold; it starts as `true`.

    Attributes:
        bounds: input bounds by key, the tightest ones.
        rows: numbers of rows in the formula's table.
        choices: lists of alternatives; of each list, one must hold.
        false: a constant in it is false.
    """

    __slots__ = ("bounds", "choices", "false", "rows")

    def __init__(self) -> None:
        self.bounds: Bounds = {}
        self.rows: list[int] | tuple[()] = ()
        self.choices: list[list[Conjunction]] | tuple[()] = ()
        self.false = False

    def tighten(self, key: int, value: float) -> None:
        """Add an input bound."""
        if value < self.bounds.get(key, math.inf):
            self.bounds[key] = value

    def add_row(self, row: int) -> None:
        """Add a row by its number."""
        if self.rows:
            self.rows.append(row)
        else:
            self.rows = [row]

    def add_choice(self) -> list[Conjunction]:
        """Add a list of alternatives, empty at first (and then unsatisfiable)."""
        choice: list[Conjunction] = []
        if self.choices:
            self.choices.append(choice)
        else:
            self.choices = [choice]
        return choice


class Row(NamedTuple):
    """`sum of coefficient * variable <= limit` (`<` if strict); a tuple, because a file may have millions.

    Args:
        coefficients: pairs (variable, coefficient) in the order of variables; outputs come after the inputs.
    """

    coefficients: tuple[tuple[int, float], ...]
    limit: float
    strict: bool


# The choices that a branch of the walk has still to make, as a linked list, so that branches share its tail; and the
# branch: the bounds that are tighter than the shared box, its rows, its choices.
_Pending = tuple[list[Conjunction], Any] | None
_Branch = tuple[Bounds, Rows, _Pending]

_Box = tuple[np.ndarray, np.ndarray]
_RowArrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]


class Formula:
    """A conjunction of assertions over `n_in` inputs (variables 0..n_in-1) and `n_out` outputs (after them).

    Attributes:
        root: what holds of everything.
        shared: (2 n_in) values by key of the box that all alternatives share.
    """

    def __init__(self, n_in: int, n_out: int) -> None:
        self.n_in, self.n_out = n_in, n_out
        self.root = Conjunction()
        self.shared = [math.inf] * (2 * n_in)
        self._rows: list[Row] = []
        self._numbers: dict[Row, int] = {}

    def add_variable_bound(self, operator: str, variable: int, value: float, into: Conjunction) -> None:
        """Add `variable operator value`, with operator <=, <, >= or >."""
        sign = 1.0 if operator[0] == "<" else -1.0
        strict = len(operator) == 1
        if variable < self.n_in:
            into.tighten(2 * variable + (sign > 0), sign * value)
            if not strict:
                return
        into.add_row(self._number(Row(((variable, sign),), sign * value, strict)))

    def add_difference(self, operator: str, left: int, right: int, into: Conjunction) -> None:
        """Add `left operator right` between two variables, with operator <=, <, >= or >."""
        strict = len(operator) == 1
        if left == right:
            into.false |= strict
            return
        sign = 1.0 if operator[0] == "<" else -1.0
        pair = ((left, sign), (right, -sign)) if left < right else ((right, -sign), (left, sign))
        into.add_row(self._number(Row(pair, 0.0, strict)))

    def add_linear(self, operator: str, term: Linear, into: Conjunction) -> None:
        """Add `term operator 0`, with operator <=, <, >=, > or =; `term` is changed.

        Raises:
            OverflowError: a coefficient or the right-hand side is out of the range of float64.
        """
        if operator == "=":
            self._add_at_most(term, False, into)
            operator = ">="
        if operator[0] == ">":
            term.negate()
        self._add_at_most(term, len(operator) == 1, into)

    def _add_at_most(self, term: Linear, strict: bool, into: Conjunction) -> None:
        limit = -term.constant
        coefficients = term.coefficients()
        if not coefficients:
            into.false |= bool(limit <= 0 if strict else limit < 0)
            return
        if len(coefficients) == 1:
            ((variable, coefficient),) = coefficients.items()
            if variable < self.n_in and self._tighten_exactly(variable, coefficient, limit, into) and not strict:
                return
        # Rounding to nearest moves a row by at most an ulp per number; numbers not combined with others are exact.
        rounded = tuple((variable, round_nearest(value)) for variable, value in coefficients.items())
        into.add_row(self._number(Row(rounded, round_nearest(limit), strict)))

    def _tighten_exactly(self, variable: int, coefficient: Number, limit: Number, into: Conjunction) -> bool:
        """Tighten the box by `coefficient * variable <= limit`; False if the box had to be rounded outward."""
        value = limit if abs(coefficient) == 1 else Fraction(limit) / abs(Fraction(coefficient))
        rounded = round_up(value)
        into.tighten(upper_key(variable) if coefficient > 0 else lower_key(variable), rounded)
        return rounded == value

    def _number(self, row: Row) -> int:
        number = self._numbers.setdefault(row, len(self._rows))
        if number == len(self._rows):
            self._rows.append(row)
        return number

    def query(self, *, clock: Clock, limit: int = DISJUNCT_LIMIT) -> Query:
        """The disjunctive normal form; alternatives with an empty box or a false constant are left out.

        Raises:
            SpecError: more than `limit` alternatives, too many entries, or an input without a finite bound.
        """
        for key, value in self.root.bounds.items():
            self.shared[key] = min(self.shared[key], value)
        self.root.bounds = {}
        below = np.negative(self.shared[0::2])
        above = np.array(self.shared[1::2], dtype=np.float64)
        if self.root.false or bool((below > above).any()):
            return Query(self.n_in, self.n_out, ())
        pairs = {(frozenset(bounds.items()), rows): bounds for bounds, rows in self._expand(clock, limit)}
        boxes = {name: bounds for (name, _), bounds in pairs.items()}
        conjunctions = dict.fromkeys(rows for _, rows in pairs)
        self._check_size(boxes, conjunctions)
        box_arrays = self._box_arrays(boxes, below, above, clock)
        row_arrays = self._row_arrays(conjunctions, clock)
        return Query(self.n_in, self.n_out, tuple(_disjunct(box_arrays[box], row_arrays[rows]) for box, rows in pairs))

    def _expand(self, clock: Clock, limit: int) -> list[tuple[Bounds, Rows]]:
        done: list[tuple[Bounds, Rows]] = []
        stack: list[_Branch] = [({}, tuple(dict.fromkeys(self.root.rows)), _link(self.root, None))]
        steps = 0
        while stack:
            bounds, rows, pending = stack.pop()
            if pending is None:
                done.append((bounds, rows))
                continue
            choice, rest = pending
            for part in reversed(choice):
                merged = None if part.false else self._merge(bounds, part.bounds)
                if merged is not None:
                    stack.append((merged, _union(rows, part.rows), _link(part, rest)))
            steps += 1
            if steps % 1024 == 0:
                clock.check(_PHASE)
            if len(done) + len(stack) > limit:
                raise SpecError(
                    f"the property has more than {limit} alternatives when its `or`s are multiplied out",
                    hint="split the property into several files",
                )
        return done

    def _merge(self, bounds: Bounds, more: Bounds) -> Bounds | None:
        """Both sets of bounds, without those that the shared box implies; None if they contradict each other."""
        if not more:
            return bounds
        merged = None
        shared = self.shared
        for key, value in more.items():
            now = bounds if merged is None else merged
            if value < now.get(key, shared[key]):
                opposite = key ^ 1
                if value < -now.get(opposite, shared[opposite]):
                    return None
                merged = dict(bounds) if merged is None else merged
                merged[key] = value
        return bounds if merged is None else merged

    def _check_size(self, boxes: dict[frozenset[tuple[int, float]], Bounds], conjunctions: dict[Rows, None]) -> None:
        entries = 2 * self.n_in * len(boxes)
        for rows in conjunctions:
            inputs = any(self._mentions_input(number) for number in rows)
            entries += len(rows) * (self.n_out + (self.n_in if inputs else 0))
        if entries > ENTRY_LIMIT:
            raise SpecError(
                f"the boxes and constraints of the property have {entries} entries; at most {ENTRY_LIMIT} are allowed",
                hint="split the property into several files, or use <= and >= for input bounds instead of < and >",
            )

    def _mentions_input(self, number: int) -> bool:
        return self._rows[number].coefficients[0][0] < self.n_in

    def _box_arrays(
        self,
        boxes: dict[frozenset[tuple[int, float]], Bounds],
        below: np.ndarray,
        above: np.ndarray,
        clock: Clock,
    ) -> dict[frozenset[tuple[int, float]], _Box]:
        """The lower and upper bounds of every box; what equals the shared array is that array."""
        open_keys = [key for key, value in enumerate(self.shared) if value == math.inf]
        arrays = {}
        for count, (name, bounds) in enumerate(boxes.items()):
            if count % 1024 == 0:
                clock.check(_PHASE)
            for key in open_keys:
                if not math.isfinite(bounds.get(key, math.inf)):
                    side = "upper" if key % 2 else "lower"
                    raise SpecError(
                        f"input X_{key // 2} has no finite {side} bound" + (" in some alternative" if bounds else ""),
                        hint="bound every input from both sides",
                    )
            lower = {key // 2: -value for key, value in bounds.items() if key % 2 == 0}
            upper = {key // 2: value for key, value in bounds.items() if key % 2}
            arrays[name] = (_changed(below, lower), _changed(above, upper))
        return arrays

    def _row_arrays(self, conjunctions: dict[Rows, None], clock: Clock) -> dict[Rows, _RowArrays]:
        """C_y, d, strict, and C_x or None of every conjunction of rows."""
        arrays = {}
        for count, numbers in enumerate(conjunctions):
            if count % 1024 == 0:
                clock.check(_PHASE)
            rows = [self._rows[number] for number in numbers]
            c_y = np.zeros((len(rows), self.n_out))
            c_x = np.zeros((len(rows), self.n_in)) if any(map(self._mentions_input, numbers)) else None
            for index, row in enumerate(rows):
                for variable, coefficient in row.coefficients:
                    if variable >= self.n_in:
                        c_y[index, variable - self.n_in] = coefficient
                    elif c_x is not None:
                        c_x[index, variable] = coefficient
            limits = np.array([row.limit for row in rows], dtype=np.float64)
            arrays[numbers] = (c_y, limits, np.array([row.strict for row in rows], dtype=bool), c_x)
        return arrays


def _link(part: Conjunction, rest: _Pending) -> _Pending:
    for choice in reversed(part.choices):
        rest = (choice, rest)
    return rest


def _union(rows: Rows, more: list[int] | tuple[()]) -> Rows:
    if not more:
        return rows
    if not rows and len(more) == 1:
        return (more[0],)
    return tuple(dict.fromkeys((*rows, *more)))


def _disjunct(box: _Box, rows: _RowArrays) -> Disjunct:
    c_y, limits, strict, c_x = rows
    return Disjunct(lower=box[0], upper=box[1], C_y=c_y, d=limits, strict=strict, C_x=c_x)


def _changed(array: np.ndarray, values: dict[int, float]) -> np.ndarray:
    if not values:
        return array
    changed = array.copy()
    changed[list(values)] = list(values.values())
    return changed
