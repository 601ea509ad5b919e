"""VNN-LIB 1.0: the flat inputs X_i and outputs Y_i, and assertions that describe the unsafe region.

The subset of SMT-LIB 2.6 that VNN-LIB 1.0 files use: `declare-const` of type Real, `assert` over `and`, `or`,
comparisons of two linear terms, and `+`, `-`, `*`. Anything else is an error with its line and column: a constraint
that is not understood must never be skipped. The parser is driven by tokens and keeps its own stack, so neither a large
file nor a deeply nested one is a problem.
"""

from __future__ import annotations

import contextlib
import gc
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TextIO

from parverify.clock import Clock
from parverify.errors import SpecError
from parverify.frontend import files
from parverify.frontend.linear import Linear
from parverify.frontend.normal_form import Conjunction, Formula
from parverify.frontend.query import Query
from parverify.frontend.sexpr import NAME, NUMBER, Place, Source

_COMPARISONS = ("<=", ">=", "<", ">", "=")
_ARITHMETIC = ("+", "-", "*")
_NUMERIC = frozenset((*_COMPARISONS, *_ARITHMETIC))
_CONNECTIVES = ("and", "or")
_COMMANDS = ("declare-const", "assert", "vnnlib-version")
_FLIPPED = {"<=": ">=", ">=": "<=", "<": ">", ">": "<"}


def read_query(path: Path, *, n_in: int, n_out: int, clock: Clock | None = None) -> Query:
    """Read a property over a network with `n_in` inputs and `n_out` outputs (flat sizes).

    The version comes from the content and from nothing in the name; gzip is recognized by content, and `path` + `.gz`
    is read where `path` does not exist.

    Raises:
        UsageError: there is no such file.
        SpecError: the property is malformed, or does not fit the network.
        OutOfTimeError: the clock ran out.
    """
    clock = clock or Clock()
    try:
        with files.open_stream(path) as stream:
            version = sniff_version(stream, clock=clock)
        if version not in _READERS:
            raise SpecError(
                f"{path} is a VNN-LIB {version} file, which can't be read; allowed are {', '.join(_READERS)}",
                hint="state the property in VNN-LIB 1.0, with X_i and Y_i for the flat inputs and outputs",
            )
        with files.open_stream(path) as stream:
            return _READERS[version](stream, n_in=n_in, n_out=n_out, clock=clock)
    except files.DAMAGED as error:
        raise SpecError(f"{path}: the gzip data is damaged or cut off ({error})") from error


def sniff_version(stream: str | TextIO | BinaryIO, *, clock: Clock | None = None) -> str:
    """The version that the first form of a text states, `1.0` where it states none."""
    head = []
    for token in Source(stream, clock=clock or Clock()).tokens():
        head.append(token.group())
        if len(head) == 3 or head[:2] != ["(", "vnnlib-version"][: len(head)]:
            break
    return head[2].strip("<>") if head[:2] == ["(", "vnnlib-version"] and len(head) == 3 else "1.0"


def parse_query(source: str | TextIO | BinaryIO, *, n_in: int, n_out: int, clock: Clock | None = None) -> Query:
    """The query of a VNN-LIB 1.0 text, given as such or as an open stream.

    A bound on one input becomes part of the box; a strict one is a closed bound plus a strict row.

    Args:
        source: the text, or a text or binary (UTF-8) stream that the caller closes.
        n_in, n_out: flat sizes of the network.
        clock: checked now and then.

    Raises:
        SpecError: the property is malformed, or does not fit the network.
        OutOfTimeError: the clock ran out.
    """
    clock = clock or Clock()
    with _without_cycle_collection():
        return _Parser(Source(source, clock=clock), n_in, n_out).formula().query(clock=clock)


@contextlib.contextmanager
def _without_cycle_collection() -> Iterator[None]:
    """Pause the collection of reference cycles: with it, millions of objects without a cycle take twice as long."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


_READERS: dict[str, Callable[..., Query]] = {"1.0": parse_query}


class _Frame:
    """An open parenthesis.

    Attributes:
        place: where it is.
        head: the symbol after it; empty until that was read.
        count: how many arguments were begun.
        into: for `assert` and `and`: where atoms go; for a comparison: where it goes.
        choice: for `or`: its alternatives.
        terms: for a comparison or arithmetic: its operands.
        words: for other commands: the symbols.
    """

    __slots__ = ("choice", "count", "head", "into", "place", "terms", "words")

    def __init__(self, place: Place) -> None:
        self.place = place
        self.head = ""
        self.count = 0
        self.into: Conjunction | None = None
        self.choice: list[Conjunction] | None = None
        self.terms: list[Linear] = []
        self.words: list[str] = []


class _Parser:
    """One pass over the tokens; `formula` returns what was asserted."""

    def __init__(self, source: Source, n_in: int, n_out: int) -> None:
        self._source = source
        self._formula = Formula(n_in, n_out)
        self._sizes = {"X": n_in, "Y": n_out}
        self._variables: dict[str, int] = {}
        self._used_early: dict[str, Place] = {}
        self._stack: list[_Frame] = []
        self._begun = False

    def formula(self) -> Formula:
        """Parse everything."""
        handlers = {
            "bound": self._bound,
            "compare": self._compare,
            "declare": self._declare_form,
            "open": self._open,
            "close": self._close,
            "symbol": self._symbol,
        }
        for token in self._source.tokens():
            handlers[token.lastgroup or ""](token)
        if self._stack:
            frame = self._stack[-1]
            raise _error(f"the parenthesis before {frame.head or 'the end'!r} is never closed", frame.place)
        self._check_declarations()
        return self._formula

    # Whole forms

    def _bound(self, token: re.Match[str]) -> None:
        # `(assert (<= X_12 0.5))`; the groups of a form are numbered from its outer one on.
        operator, index, text = token.group(2, 3, 4)
        if self._stack:
            raise self._error("'assert' is allowed at the top level only", token.start())
        variable = self._variable("X_" + index, token.start(3) - 2)
        value = float(text)
        shared = self._formula.shared
        if not math.isfinite(value):
            raise self._error(f"{text} is out of the range of float64", token.start(4))
        if operator == "<=":
            key = 2 * variable + 1
        elif operator == ">=":
            key, value = 2 * variable, -value
        else:
            self._formula.add_variable_bound(operator, variable, value, self._formula.root)
            return
        if value < shared[key]:
            shared[key] = value

    def _compare(self, token: re.Match[str]) -> None:
        # `(<= Y_0 Y_1)`, `(>= X_0 0.5)`, `(<= 0.5 X_0)`
        into = self._target(token.start())
        first = token.lastindex or 0
        operator, left, right = token.group(first + 1, first + 2, first + 3)
        a = self._operand(left, token.start(first + 2))
        b = self._operand(right, token.start(first + 3))
        if isinstance(a, float):
            if isinstance(b, float):
                holds = {"<=": a <= b, ">=": a >= b, "<": a < b, ">": a > b}[operator]
                into.false |= not holds
            else:
                self._formula.add_variable_bound(_FLIPPED[operator], b, a, into)
        elif isinstance(b, float):
            self._formula.add_variable_bound(operator, a, b, into)
        else:
            self._formula.add_difference(operator, a, b, into)

    def _declare_form(self, token: re.Match[str]) -> None:
        if self._stack:
            raise self._error("'declare-const' is allowed at the top level only", token.start())
        self._declare(token.group((token.lastindex or 0) + 1), self._place(token.start()))

    # Parentheses and symbols

    def _open(self, token: re.Match[str]) -> None:
        if self._stack:
            parent = self._stack[-1]
            if not parent.head:
                raise self._error("an operator must follow '('", token.start())
            if parent.head in ("declare-const", "vnnlib-version"):
                raise self._error(f"no parenthesis is allowed in {parent.head!r}", token.start())
        self._stack.append(_Frame(self._place(token.start())))

    def _symbol(self, token: re.Match[str]) -> None:
        text = token.group()
        if not self._stack:
            raise self._error(f"{_quote(text)} stands outside of any parenthesis", token.start())
        frame = self._stack[-1]
        if not frame.head:
            self._begin(frame, text, token.start())
        elif frame.head in _NUMERIC:
            operand = self._operand(text, token.start())
            frame.terms.append(Linear(constant=operand) if isinstance(operand, float) else Linear(operand))
        elif frame.head in ("declare-const", "vnnlib-version"):
            frame.words.append(text)
        else:
            raise self._error(f"{_quote(text)} is not a comparison, `and` or `or`", token.start())

    def _begin(self, frame: _Frame, head: str, position: int) -> None:
        """A frame gets its first symbol."""
        parent = self._stack[-2] if len(self._stack) > 1 else None
        if parent is None:
            allowed: tuple[str, ...] = _COMMANDS
        elif parent.head in _NUMERIC:
            allowed = _ARITHMETIC
        else:
            allowed = (*_CONNECTIVES, *_COMPARISONS)
        if head not in allowed:
            raise self._error(f"unknown {_quote(head)}; allowed here: {' '.join(allowed)}", position)
        if head == "vnnlib-version" and self._begun:
            raise self._error("'vnnlib-version' must be the first form", position)
        self._begun = True
        if head == "assert":
            frame.into = self._formula.root
        elif head == "or":
            frame.choice = self._alternatives(parent, position)
        elif head == "and" or head in _COMPARISONS:
            frame.into = self._target(position, parent)
        frame.head = head

    def _alternatives(self, parent: _Frame | None, position: int) -> list[Conjunction]:
        """Where the alternatives of an `or` go: those of an `or` around it are the same ones."""
        if parent is not None and parent.choice is not None:
            parent.count += 1
            return parent.choice
        return self._target(position, parent).add_choice()

    def _target(self, position: int, frame: _Frame | None = None) -> Conjunction:
        """The conjunction that the next argument of an `assert`, `and` or `or` goes into."""
        if frame is None:
            if not self._stack:
                raise self._error("a comparison stands outside of 'assert'", position)
            frame = self._stack[-1]
        frame.count += 1
        if frame.choice is not None:
            part = Conjunction()
            frame.choice.append(part)
            return part
        if frame.into is None or frame.head not in ("assert", "and"):
            wrong = f"no comparison is allowed in {frame.head!r}" if frame.head else "an operator must follow '('"
            raise self._error(wrong, position)
        if frame.head == "assert" and frame.count > 1:
            raise self._error("'assert' takes one argument; join several with `and`", position)
        return frame.into

    def _close(self, token: re.Match[str]) -> None:
        if not self._stack:
            raise self._error("')' without a '('", token.start())
        frame = self._stack.pop()
        head = frame.head
        if not head:
            raise _error("'()' is empty", frame.place)
        if head in _COMPARISONS:
            self._close_comparison(frame)
        elif head in _ARITHMETIC:
            self._stack[-1].terms.append(_combine(frame))
        elif head == "declare-const":
            if len(frame.words) != 2 or frame.words[1] != "Real":
                raise _error("a declaration must read (declare-const NAME Real)", frame.place)
            self._declare(frame.words[0], frame.place)
        elif head == "vnnlib-version":
            self._close_version(frame)
        elif not frame.count:
            raise _error(f"'{head}' without an argument", frame.place)

    def _close_comparison(self, frame: _Frame) -> None:
        if len(frame.terms) != 2 or frame.into is None:
            raise _error(f"'{frame.head}' takes two operands, got {len(frame.terms)}", frame.place)
        left, right = frame.terms
        right.negate()
        left.add(right)
        try:
            self._formula.add_linear(frame.head, left, frame.into)
        except OverflowError as error:
            raise _error("a coefficient or constant is out of the range of float64", frame.place) from error

    def _close_version(self, frame: _Frame) -> None:
        if frame.words != ["<1.0>"]:
            raise SpecError(
                f"VNN-LIB version {' '.join(frame.words) or 'without a number'} can't be read; allowed is <1.0>",
                line=frame.place[0],
                column=frame.place[1],
                hint="state the property in VNN-LIB 1.0, with X_i and Y_i for the flat inputs and outputs",
            )

    # Names and numbers

    def _operand(self, text: str, position: int) -> int | float:
        """A variable's number, or a constant as float."""
        variable = self._variables.get(text)
        if variable is not None:
            return variable
        if text[0] in "XY":
            return self._variable(text, position)
        if not NUMBER.fullmatch(text):
            what = "not a finite number" if text.lstrip("+-").lower() in ("nan", "inf", "infinity") else "unknown"
            raise self._error(f"{_quote(text)} is {what}; allowed are numbers, X_i and Y_i", position)
        value = float(text)
        if not math.isfinite(value):
            raise self._error(f"{_quote(text)} is out of the range of float64", position)
        return value

    def _variable(self, name: str, position: int) -> int:
        variable = self._variables.get(name)
        if variable is None:
            place = self._place(position)
            variable = self._number_of(name, place)
            self._used_early.setdefault(name, place)
        return variable

    def _number_of(self, name: str, place: Place) -> int:
        match = NAME.fullmatch(name)
        if match is None:
            raise _error(f"unknown variable {_quote(name)}; allowed are X_i and Y_i with i = 0, 1, ...", place)
        kind, size = match[1], self._sizes[match[1]]
        if len(match[2]) > 12 or int(match[2]) >= size:
            what = "inputs" if kind == "X" else "outputs"
            last = f" ({kind}_0 to {kind}_{size - 1})" if size else ""
            raise _error(f"{_quote(name)} does not exist: the network has {size} {what}{last}", place)
        return int(match[2]) + (self._sizes["X"] if kind == "Y" else 0)

    def _declare(self, name: str, place: Place) -> None:
        self._begun = True
        if name in self._variables:
            raise _error(f"{name} is declared twice", place)
        self._variables[name] = self._number_of(name, place)

    def _check_declarations(self) -> None:
        for name, place in self._used_early.items():
            if name not in self._variables:
                raise _error(f"{name} is used but not declared", place)
        if len(self._variables) == sum(self._sizes.values()):
            return
        for kind, size in self._sizes.items():
            missing = [i for i in range(size) if f"{kind}_{i}" not in self._variables]
            if missing:
                what = "inputs" if kind == "X" else "outputs"
                message = f"the network has {size} {what}, but {size - len(missing)} are declared: "
                raise _error(f"{message}{kind}_{missing[0]} is missing", self._source.end)

    def _place(self, position: int) -> Place:
        return self._source.place(position)

    def _error(self, message: str, position: int) -> SpecError:
        return _error(message, self._place(position))


def _combine(frame: _Frame) -> Linear:
    """The value of an arithmetic term."""
    if not frame.terms:
        raise _error(f"'{frame.head}' without an operand", frame.place)
    if frame.head == "*":
        return _product(frame)
    total = frame.terms[0]
    if frame.head == "-" and len(frame.terms) == 1:
        total.negate()
    for term in frame.terms[1:]:
        if frame.head == "-":
            term.negate()
        total.add(term)
    return total


def _product(frame: _Frame) -> Linear:
    result = Linear(constant=1)
    for term in frame.terms:
        if not term.is_constant():
            result, term = term, result
        if not term.is_constant():
            raise _error("a product of two variables is not linear", frame.place)
        result.multiply(term.constant)
    return result


def _quote(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")


def _error(message: str, place: Place) -> SpecError:
    return SpecError(message, line=place[0], column=place[1])
