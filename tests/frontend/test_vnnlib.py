"""VNN-LIB 1.0: the query equals a direct evaluation of the assertions, and everything else is refused with its place.

The evaluator here shares no code with the package: it works on nested lists in exact fractions.
"""

from __future__ import annotations

import gzip
import io
import re
import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parverify.clock import Clock
from parverify.errors import OutOfTimeError, SpecError, UsageError
from parverify.frontend import files, normal_form
from parverify.frontend.query import Query
from parverify.frontend.sexpr import Source
from parverify.frontend.vnnlib import parse_query, read_query, sniff_version

# ---------------------------------------------------------------- an evaluator of its own


def parse_lists(text: str) -> list:
    """Nested lists of symbols."""
    stack: list[list] = [[]]
    for token in re.findall(r"[()]|[^\s()]+", re.sub(r";[^\r\n]*", "", text)):
        if token == "(":
            stack.append([])
        elif token == ")":
            done = stack.pop()
            stack[-1].append(done)
        else:
            stack[-1].append(token)
    return stack[0]


def term_value(term, values: dict[str, Fraction]) -> Fraction:
    if isinstance(term, str):
        return values[term] if term in values else Fraction(float(term))
    head, *rest = term
    numbers = [term_value(part, values) for part in rest]
    if head == "*":
        product = Fraction(1)
        for number in numbers:
            product *= number
        return product
    if head == "-":
        return -numbers[0] if len(numbers) == 1 else numbers[0] - sum(numbers[1:])
    return sum(numbers, Fraction(0))


def formula_holds(formula, values: dict[str, Fraction]) -> bool:
    head, *rest = formula
    if head == "and":
        return all(formula_holds(part, values) for part in rest)
    if head == "or":
        return any(formula_holds(part, values) for part in rest)
    a, b = (term_value(part, values) for part in rest)
    return {"<=": a <= b, ">=": a >= b, "<": a < b, ">": a > b, "=": a == b}[head]


def text_holds(assertions: list, x: np.ndarray, y: np.ndarray) -> bool:
    values = {f"X_{i}": Fraction(float(v)) for i, v in enumerate(x)}
    values.update({f"Y_{i}": Fraction(float(v)) for i, v in enumerate(y)})
    return all(formula_holds(part, values) for part in assertions)


# ---------------------------------------------------------------- helpers


def declare(n_in: int, n_out: int) -> str:
    names = [f"X_{i}" for i in range(n_in)] + [f"Y_{i}" for i in range(n_out)]
    return "\n".join(f"(declare-const {name} Real)" for name in names) + "\n"


def box(n_in: int, low: float = -1, high: float = 1) -> str:
    return "".join(f"(assert (>= X_{i} {low}))\n(assert (<= X_{i} {high}))\n" for i in range(n_in))


def query_of(body: str, n_in: int = 2, n_out: int = 2) -> Query:
    """The query of `body` after declarations and the box [-1, 1]."""
    return parse_query(declare(n_in, n_out) + box(n_in) + body, n_in=n_in, n_out=n_out)


def rows_of(body: str, n_in: int = 2, n_out: int = 2) -> list[tuple]:
    """(C_y, C_x, d, strict) per row of the only disjunct, as plain numbers."""
    (part,) = query_of(body, n_in, n_out).disjuncts
    c_x = [None] * len(part.d) if part.C_x is None else part.C_x.tolist()
    return list(zip(part.C_y.tolist(), c_x, part.d.tolist(), part.strict.tolist(), strict=True))


def place_of_error(text: str, match: str, n_in: int = 1, n_out: int = 1) -> tuple[int | None, int | None]:
    with pytest.raises(SpecError, match=match) as caught:
        parse_query(text, n_in=n_in, n_out=n_out)
    return caught.value.line, caught.value.column


# ---------------------------------------------------------------- what is read


def test_box_and_row() -> None:
    (part,) = query_of("(assert (<= Y_0 0.25))").disjuncts
    assert part.lower.tolist() == [-1, -1] and part.upper.tolist() == [1, 1]
    assert part.C_y.tolist() == [[1, 0]] and part.d.tolist() == [0.25] and part.strict.tolist() == [False]
    assert part.C_x is None
    assert {a.dtype for a in (part.lower, part.upper, part.C_y, part.d)} == {np.dtype(np.float64)}


def test_no_output_assertion_is_one_disjunct_without_rows() -> None:
    (part,) = query_of("").disjuncts
    assert part.C_y.shape == (0, 2) and part.d.shape == (0,) and part.strict.shape == (0,)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("(assert (>= Y_0 0.25))", ([-1, 0], None, -0.25, False)),
        ("(assert (< Y_1 3))", ([0, 1], None, 3, True)),
        ("(assert (> 3 Y_1))", ([0, 1], None, 3, True)),
        ("(assert (<= 3 Y_1))", ([0, -1], None, -3, False)),
        ("(assert (<= Y_0 Y_1))", ([1, -1], None, 0, False)),
        ("(assert (> Y_0 Y_1))", ([-1, 1], None, 0, True)),
        ("(assert (>= X_1 Y_0))", ([1, 0], [0, -1], 0, False)),
        ("(assert (<= X_1 X_0))", ([0, 0], [-1, 1], 0, False)),
        ("(assert (< X_1 1))", ([0, 0], [0, 1], 1, True)),
        ("(assert (> X_1 -1))", ([0, 0], [0, -1], 1, True)),
        ("(assert (>= Y_0 (+ Y_1 9.5)))", ([-1, 1], None, -9.5, False)),
        ("(assert (<= (+ Y_0 (* 2 X_1) 1) (- (* X_0 3 0.5) (- 4))))", ([1, 0], [-1.5, 2], 3, False)),
        ("(assert (<= (- Y_0 1 Y_1) 0))", ([1, -1], None, 1, False)),
        ("(assert (<= (- (- (- Y_0))) (+ 1)))", ([-1, 0], None, 1, False)),
        ("(assert (<= (* 0 X_0) (+ Y_0 (* 3 (- Y_1 Y_1)))))", ([-1, 0], None, 0, False)),
    ],
)
def test_rows(body: str, expected: tuple) -> None:
    assert rows_of(body) == [expected]


def test_equality_is_two_rows() -> None:
    assert rows_of("(assert (= Y_0 2))") == [([1, 0], None, 2, False), ([-1, 0], None, -2, False)]
    (part,) = query_of("(assert (or (= X_0 0.5)))").disjuncts
    assert part.lower[0] == part.upper[0] == 0.5 and len(part.d) == 0


def test_sums_are_exact_until_the_end() -> None:
    # In float64 arithmetic 1e16 + 1 - 1e16 is 0, and 0.1 + 0.2 - 0.3 is 5.6e-17; exactly it is 2.8e-17.
    assert rows_of("(assert (<= Y_0 (+ 1e16 1 -1e16)))")[0][2] == 1
    exact = Fraction(0.1) + Fraction(0.2) - Fraction(0.3)
    assert rows_of("(assert (<= Y_0 (+ 0.1 0.2 -0.3)))")[0][2] == float(exact) != 0.1 + 0.2 - 0.3


@pytest.mark.parametrize("text", ["0.5", "+0.5", ".5", "5e-1", "5E-01", "50.0e-2", "0.500", "0.05e+1"])
def test_numbers(text: str) -> None:
    assert query_of(f"(assert (<= X_0 {text}))").disjuncts[0].upper[0] == 0.5
    assert query_of(f"(assert (<= X_0 (+ {text})))").disjuncts[0].upper[0] == 0.5
    assert query_of(f"(assert (or (<= X_0 {text})))").disjuncts[0].upper[0] == 0.5


@pytest.mark.parametrize(("text", "value"), [("-1", -1), ("5.", 5), ("-5", -5), ("007", 7), ("-0", 0), ("1e-400", 0)])
def test_integers(text: str, value: float) -> None:
    assert rows_of(f"(assert (<= Y_0 {text}))")[0][2] == value


def test_the_tightest_bound_holds_in_any_form() -> None:
    body = "(assert (<= X_0 0.75))(assert (<= X_0 0.5))(assert (and (>= 0.9 X_0) (>= X_0 -0.5)))(assert (>= X_0 -0.75))"
    (part,) = query_of(body).disjuncts
    assert (part.lower[0], part.upper[0]) == (-0.5, 0.5)


def test_scaled_input_bound_is_rounded_outward_and_kept_as_row() -> None:
    (part,) = query_of("(assert (<= (* 3 X_0) 1))(assert (>= (* -4 X_1) 2))").disjuncts
    assert Fraction(part.upper[0]) > Fraction(1, 3) and part.upper[0] <= np.nextafter(1 / 3, 1)
    assert part.upper[1] == -0.5 and part.C_x is not None
    assert part.C_x.tolist() == [[3, 0]] and part.d.tolist() == [1]


def test_strict_input_bound_keeps_the_closed_box() -> None:
    (part,) = query_of("(assert (> X_0 0.5))").disjuncts
    assert part.lower[0] == 0.5
    assert not part.holds(np.array([0.5, 0]), np.zeros(2)) and part.holds(np.array([0.75, 0]), np.zeros(2))


def test_whitespace_comments_and_line_ends() -> None:
    text = (
        "\ufeff; a comment with ) and (assert (>= Y_0 5))\r\n"
        "(declare-const X_0 Real)(declare-const\tY_0 ; trailing (\n Real)\r"
        "(assert(>= X_0 0.0))\t(assert (<= X_0 1.0;half )\n))\r\n; (assert (<= Y_0 -1.0)) \N{SNOWMAN}\n"
        "(assert\n   (>= Y_0\n       0.5))\n(assert(or(<= Y_0 1)))   ; end"
    )
    for source in (text, text.encode(), io.BytesIO(text.encode()), io.StringIO(text, newline="")):
        stream = io.BytesIO(source) if isinstance(source, bytes) else source
        (part,) = parse_query(stream, n_in=1, n_out=1).disjuncts
        assert (part.lower[0], part.upper[0], part.d.tolist()) == (0, 1, [-0.5, 1])


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 40])
def test_any_cut_into_pieces_gives_the_same_tokens(piece: int) -> None:
    text = (
        ";c\r\n" + declare(2, 1) + "(assert (<= X_0 0.125)) ; comment\r\n(assert (or (<= (+ X_1 1) Y_0)(>= Y_0 1e-3)))"
    )

    def flat(size: int) -> list[str]:
        source = Source(text, clock=Clock(), piece=size)
        return [part for token in source.tokens() for part in re.findall(r"[()]|[^\s()]+", token.group())]

    assert flat(piece) == flat(10_000)


def test_declarations_in_any_order_and_after_use() -> None:
    text = "(declare-const Y_0 Real)(assert (<= X_0 1))(assert (>= X_0 0))(declare-const X_0 Real)"
    assert len(parse_query(text, n_in=1, n_out=1)) == 1


# ---------------------------------------------------------------- the normal form


def test_assertions_before_and_after_an_or_are_conjuncts() -> None:
    choice = "(assert (or (<= Y_0 -0.5) (>= Y_0 0.5)))"
    for body in (choice + "(assert (>= Y_1 2))", "(assert (>= Y_1 2))" + choice):
        query = query_of(body)
        assert [part.C_y.shape for part in query] == [(2, 2), (2, 2)]
        x = np.zeros(2)
        assert query.holds(x, np.array([0.5, 2])) and not query.holds(x, np.array([0.5, 1]))
        assert not query.holds(x, np.array([0, 2]))


def test_or_over_inputs_times_or_over_outputs() -> None:
    query = query_of("(assert (or (<= X_0 0) (>= X_0 0.5)))(assert (or (<= Y_0 0) (<= Y_1 0) (<= Y_0 Y_1)))")
    assert len(query) == 6
    assert len({id(part.upper) for part in query}) == 2 and len({id(part.C_y) for part in query}) == 3


def test_outputs_share_one_box() -> None:
    body = "".join(f"(and (<= Y_0 {i}))" for i in range(1000))
    query = query_of(f"(assert (or {body}))")
    assert len(query) == 1000 and len({id(part.lower) for part in query}) == 1
    assert [part.d[0] for part in query] == list(range(1000))


def test_same_box_written_twice_is_shared() -> None:
    body = "(and (>= X_0 0) (<= X_0 0.5) (<= Y_0 1)) (and (<= X_0 0.5) (>= X_0 0) (>= Y_0 2))"
    first, second = query_of(f"(assert (or {body}))").disjuncts
    assert first.lower is second.lower and first.upper is second.upper


def test_equal_disjuncts_are_dropped() -> None:
    assert len(query_of("(assert (or (<= Y_0 1) (and (<= Y_0 1) (<= X_0 2)) (or (<= Y_0 1))))")) == 1


def test_disjunct_overrides_only_where_tighter() -> None:
    first, second = query_of("(assert (or (and (>= X_0 0) (<= X_0 3)) (>= X_1 0.5)))").disjuncts
    assert first.lower.tolist() == [0, -1] and first.upper.tolist() == [1, 1]
    assert second.lower.tolist() == [-1, 0.5] and second.upper is first.upper


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ("(assert (>= X_0 1.5))", 0),
        ("(assert (or (>= X_0 1.5) (<= Y_0 1)))", 1),
        ("(assert (or (and (<= X_0 -0.5) (>= X_0 0.5)) (and (>= X_0 0.5) (<= X_0 -0.5))))", 0),
        ("(assert (or (<= X_0 -0.5) (>= X_0 0.5)))(assert (or (<= X_0 -0.6) (>= X_0 0.6)))", 2),
        ("(assert (<= 1 0))", 0),
        ("(assert (<= 1 1))", 1),
        ("(assert (< 1 1))", 0),
        ("(assert (>= (+ 1 1) 2))", 1),
        ("(assert (< (- X_0 X_0) 0))", 0),
        ("(assert (< X_0 X_0))", 0),
        ("(assert (>= Y_0 Y_0))", 1),
        ("(assert (= 1 2))", 0),
        ("(assert (or (< 1 1) (and (<= Y_0 1) (> 2 2)) (<= Y_0 3)))", 1),
    ],
)
def test_empty_and_constant_parts(body: str, count: int) -> None:
    assert len(query_of(body)) == count


def test_one_argument_connectives() -> None:
    assert rows_of("(assert (and (or (and (or (<= Y_0 1))))))") == [([1, 0], None, 1, False)]


@pytest.mark.parametrize("connective", ["and", "or", "mixed", "alternating", "terms", "left"])
def test_ten_thousand_levels(connective: str) -> None:
    depth, count = 10_000, 1
    head = {"and": "(and ", "or": "(or ", "mixed": "(or (and "}.get(connective, "")
    closes = ")" * head.count("(")
    body = head * depth + "(<= Y_0 1)" + closes * depth
    if connective == "alternating":
        depth = 1000
        body = "".join(f"(or (<= Y_0 {i}) (and (<= Y_1 {i}) (<= X_0 0.5) " for i in range(depth)) + "(<= Y_0 1)"
        body, count = body + "))" * depth, depth + 1
    elif connective == "terms":
        body = "(<= " + "(+ (* 2 Y_1) (- " * depth + "Y_0" + "))" * depth + " 1)"
    elif connective == "left":
        body = "(<= " + "(- " * depth + "Y_0" + " 1)" * depth + " 1)"
    start = time.process_time()
    query = query_of(f"(assert {body})")
    assert len(query) == count
    assert time.process_time() - start < 20
    if connective == "left":
        assert query.disjuncts[0].d.tolist() == [depth + 1]


def test_wide_sums_nest_in_little_time() -> None:
    n = 5000
    right = "".join(f"(+ Y_{i} " for i in range(n)) + "0" + ")" * n
    left = "(+ " * n + "0" + "".join(f" Y_{i})" for i in range(n))
    rows = rows_of(f"(assert (<= {right} 1))(assert (<= {left} 2))", 1, n)
    assert [row[0] == [1] * n for row in rows] == [True, True]


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("line", "match", "column"),
    [
        ("(assert ((<= Y_0 -1)))", "must follow", 10),
        ("(assert ((and (<= Y_0 -1))))", "must follow", 10),
        ("(assert (<= Y_0 -1)", "never closed", 1),
        ("(assert (and (<= Y_0 -1))", "never closed", 1),
        ("(assert (<= Y_0 -1)))", r"without a '\('", 21),
        ("  stray", "outside", 3),
        ("(assert (<= Y_0 1)) 5", "outside", 21),
        ("(check-sat)", "unknown 'check-sat'", 2),
        ("(assert (not (<= Y_0 1)))", "unknown 'not'", 10),
        ("(assert (=> (<= Y_0 1) (<= Y_0 2)))", "unknown '=>'", 10),
        ("(assert (== Y_0 1))", "unknown '=='", 10),
        ("(assert (<= (/ Y_0 2) 1))", r"unknown '/'", 14),
        ("(assert (<= (* Y_0 X_0) 1))", "not linear", 13),
        ("(assert (<= (* (+ Y_0 1) (- X_0)) 1))", "not linear", 13),
        ("(assert (<= Y_0 nan))", "'nan' is not a finite", 17),
        ("(assert (<= X_0 inf))", "'inf' is not a finite", 17),
        ("(assert (<= X_0 -Infinity))", "not a finite", 17),
        ("(assert (<= X_0 1e999))", "out of the range", 17),
        ("(assert (<= Y_0 (+ 1e999)))", "out of the range", 20),
        ("(assert (<= Y_0 -1e999))", "out of the range", 17),
        ("(assert (<= (* 1e200 1e200 Y_0) 1))", "out of the range", 9),
        ("(assert (<= (* 1e-200 1e-200 Y_0) 1))", "out of the range", 9),
        ("(assert (<= X_0 0x10))", "'0x10' is unknown", 17),
        ("(assert (<= X_0 1_000))", "'1_000' is unknown", 17),
        ("(assert (<= X_0 1.5.2))", "unknown", 17),
        ("(assert (<= X_0 \N{ARABIC-INDIC DIGIT ONE}))", "unknown", 17),
        ("(assert (<= Z_0 1))", "'Z_0' is unknown", 13),
        ("(assert (<= X_00 1))", "unknown variable 'X_00'", 13),
        ("(assert (<= X_1 1))", "network has 1 inputs", 13),
        ("(assert (or (<= 1 Y_7)))", "network has 1 outputs", 19),
        ("(assert (<= Y_0))", "two operands, got 1", 9),
        ("(assert (<= 0 Y_0 1))", "two operands, got 3", 9),
        ("(assert (<= Y_0 (+)))", "without an operand", 17),
        ("(assert (<= Y_0 ()))", "empty", 17),
        ("(assert)", "without an argument", 1),
        ("(assert (and))", "without an argument", 9),
        ("(assert (or))", "without an argument", 9),
        ("(assert (or (or)))", "without an argument", 13),
        ("()", "empty", 1),
        ("(assert true)", "'true' is not a comparison", 9),
        ("(assert Y_0)", "'Y_0' is not a comparison", 9),
        ("(assert (and (<= Y_0 1) Y_0))", "'Y_0' is not a comparison", 25),
        ("(assert (+ Y_0 1))", r"unknown '\+'", 10),
        ("(assert (<= (and Y_0) 1))", "unknown 'and'", 14),
        ("(assert (<= (<= Y_0 1) 1))", "no comparison is allowed in '<='", 13),
        ("(assert (<= (= Y_0 1) 1))", "unknown '='", 14),
        ("(assert (<= Y_0 1) (<= Y_0 2))", "one argument", 20),
        ("(assert (<= Y_0 1) (or (<= Y_0 2)))", "one argument", 21),
        ("(assert (assert (<= Y_0 1)))", "unknown 'assert'", 10),
        ("(assert (assert (<= X_0 1)))", "top level only", 9),
        ("(assert (declare-const Y_0 Real))", "top level only", 9),
        ("(<= Y_0 1)", "outside of 'assert'", 1),
        ("(and (<= Y_0 1))", "unknown 'and'", 2),
        ("(declare-const X_0 Real)", "declared twice", 1),
        ("(declare-const Z Real)", "unknown variable 'Z'", 1),
        ("(declare-const X_1 Real)", "network has 1 inputs", 1),
        ("(declare-const X_2 Int)", "must read", 1),
        ("(declare-const X_2)", "must read", 1),
        ("(declare-const X_2 () Real)", "no parenthesis", 20),
        ("(vnnlib-version <1.0>)", "must be the first", 2),
        ('(assert (<= Y_0 1)) "text"', "outside", 21),
    ],
)
def test_refusals_name_the_place(line: str, match: str, column: int) -> None:
    for prefix in ("", "; comment\r\n", "\n\n"):
        text = prefix + declare(1, 1) + box(1) + line
        line_number = (prefix + declare(1, 1) + box(1)).count("\n") + 1
        assert place_of_error(text, match) == (line_number, column)
        assert place_of_error(text + "\n", match) == (line_number, column)


def test_place_is_right_far_into_the_text() -> None:
    filler = "(assert (<= Y_0 1)) " * 20_000  # one line over several pieces
    assert place_of_error(declare(1, 1) + box(1) + filler + "\n\n  (foo)", "unknown 'foo'") == (7, 4)
    assert place_of_error(declare(1, 1) + box(1) + filler + "(foo)", "unknown 'foo'") == (5, 20 * 20_000 + 2)


def test_endless_symbol_is_refused() -> None:
    assert place_of_error(declare(1, 1) + " " + "a" * 1_000_000, "symbol of more than") == (3, 2)


def test_a_comment_over_several_pieces() -> None:
    assert len(query_of("; " + "(a " * 300_000 + "\n(assert (<= Y_0 1))")) == 1


def test_missing_declarations() -> None:
    text = "(declare-const X_0 Real)\n(declare-const Y_0 Real)\n(assert (<= Y_0 1))\n"
    assert place_of_error(text, r"2 inputs, but 1 are declared: X_1 is missing", n_in=2) == (4, 1)
    assert place_of_error(text, r"3 outputs, but 1 are declared: Y_1 is missing", n_out=3) == (4, 1)
    assert place_of_error(text + "(assert (<= 0 X_1))", "X_1 is used but not declared", n_in=2) == (4, 15)
    assert place_of_error("", "0 are declared: X_0 is missing") == (1, 1)


def test_inputs_must_be_bounded() -> None:
    head = declare(2, 1)
    with pytest.raises(SpecError, match="X_1 has no finite lower bound"):
        parse_query(head + box(1) + "(assert (<= X_1 0))", n_in=2, n_out=1)
    with pytest.raises(SpecError, match="X_0 has no finite upper bound in some alternative"):
        parts = "(and (>= X_0 0) (<= X_0 1)) (and (>= X_0 0) (<= Y_0 1))"
        parse_query(head + f"(assert (>= X_1 0))(assert (<= X_1 1))(assert (or {parts}))", n_in=2, n_out=1)
    # An empty alternative is no reason to refuse; a row does not bound an input.
    parts = "(and (>= X_0 0) (<= X_0 1)) (and (>= X_1 2) (<= Y_0 1))"
    query = parse_query(head + f"(assert (>= X_1 0))(assert (<= X_1 1))(assert (or {parts}))", n_in=2, n_out=1)
    assert len(query) == 1
    with pytest.raises(SpecError, match="X_1 has no finite lower bound"):
        parse_query(head + box(1) + "(assert (<= X_0 X_1))(assert (<= X_1 X_0))", n_in=2, n_out=1)


@pytest.mark.slow
def test_too_many_disjuncts_are_refused() -> None:
    body = "(assert (or (<= Y_0 0) (<= Y_1 1)))" * 3 + "".join(
        f"(assert (or (<= Y_0 {i}.5) (<= Y_1 {i}.5)))" for i in range(30)
    )
    start = time.process_time()
    with pytest.raises(SpecError, match=r"more than 1000000 alternatives.*hint"):
        query_of(body)
    assert time.process_time() - start < 60


def test_too_large_boxes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(normal_form, "ENTRY_LIMIT", 9)
    assert len(query_of("(assert (<= Y_0 1))")) == 1
    with pytest.raises(SpecError, match="entries; at most 9"):
        query_of("(assert (or (<= X_0 0) (>= X_0 0.5)))(assert (<= Y_0 Y_1))")


def test_contradicting_choices_are_cut_off_early() -> None:
    # 3^30 alternatives, of which the first choice leaves one.
    body = "".join("(assert (or (<= X_0 -0.5) (and (>= X_0 -0.25) (<= X_0 0.25)) (>= X_0 0.5)))" for _ in range(30))
    assert len(query_of(body)) == 3


def test_clock_is_checked() -> None:
    with pytest.raises(OutOfTimeError, match="parsing the property"):
        parse_query(declare(1, 1) + box(1), n_in=1, n_out=1, clock=Clock(timeout=-1))


# ---------------------------------------------------------------- files

SMALL = declare(1, 1) + box(1) + "(assert (<= Y_0 0.5))\n"


def test_plain_and_compressed_files(tmp_path: Path) -> None:
    (tmp_path / "plain.vnnlib").write_text(SMALL)
    (tmp_path / "packed.vnnlib").write_bytes(gzip.compress(SMALL.encode()))
    (tmp_path / "absent.vnnlib.gz").write_bytes(gzip.compress(SMALL.encode()))
    (tmp_path / "unpacked.vnnlib.gz").write_text(SMALL)
    names = ("plain.vnnlib", "packed.vnnlib", "absent.vnnlib", "absent.vnnlib.gz", "unpacked.vnnlib.gz")
    for name in names:
        assert read_query(tmp_path / name, n_in=1, n_out=1).disjuncts[0].d.tolist() == [0.5]
        assert files.read_bytes(tmp_path / name) == SMALL.encode()


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    for read in (files.read_bytes, lambda path: read_query(path, n_in=1, n_out=1)):
        with pytest.raises(UsageError, match=r"no such file: .*nothing\.vnnlib \(nor nothing\.vnnlib\.gz"):
            read(tmp_path / "nothing.vnnlib")
        with pytest.raises(UsageError, match="folder"):
            read(tmp_path)
    (tmp_path / "cut.vnnlib").write_bytes(gzip.compress(SMALL.encode() * 50)[:-20])
    with pytest.raises(UsageError, match="damaged"):
        files.read_bytes(tmp_path / "cut.vnnlib")
    with pytest.raises(SpecError, match="damaged"):
        read_query(tmp_path / "cut.vnnlib", n_in=1, n_out=1)


def test_version_comes_from_the_content(tmp_path: Path) -> None:
    folder = tmp_path / "1.0"
    folder.mkdir()
    (folder / "a.vnnlib").write_text("; (comment)\n( vnnlib-version ; x\n <2.0>)\n(declare-network net)")
    with pytest.raises(SpecError, match=r"VNN-LIB 2\.0.*hint"):
        read_query(folder / "a.vnnlib", n_in=1, n_out=1)
    assert place_of_error("(vnnlib-version <2.0>)", "hint") == (1, 1)
    assert len(parse_query("(vnnlib-version <1.0>)" + SMALL, n_in=1, n_out=1)) == 1
    assert sniff_version(SMALL) == sniff_version("") == sniff_version("(vnnlib-version") == "1.0"
    assert sniff_version("; " + "long " * 200_000 + "\n(vnnlib-version <2.0>)") == "2.0"


# ---------------------------------------------------------------- equality with direct evaluation

GRID = [-1.0, -0.5, -0.25, 0.0, 0.25, 0.5, 1.0]
N_IN, N_OUT = 2, 2

numbers = st.sampled_from([str(v) for v in GRID] + ["2", "-3", "1e-1", "+.5", "0.3"])
names = st.sampled_from(["X_0", "X_1", "Y_0", "Y_1"])
constants = st.recursive(
    numbers,
    lambda inner: st.builds(
        lambda head, parts: f"({head} {' '.join(parts)})",
        st.sampled_from("+-*"),
        st.lists(inner, min_size=1, max_size=3),
    ),
    max_leaves=4,
)
terms = st.recursive(
    names | constants,
    lambda inner: (
        st.builds(lambda h, ps: f"({h} {' '.join(ps)})", st.sampled_from("+-"), st.lists(inner, min_size=1, max_size=3))
        | st.builds(lambda a, b: f"(* {a} {b})", constants, inner)
        | st.builds(lambda a, b: f"(* {b} {a})", constants, inner)
    ),
    max_leaves=5,
)
simple = names | numbers
atoms = st.builds(
    lambda op, pair: f"({op} {pair[0]} {pair[1]})",
    st.sampled_from(["<=", ">=", "<", ">", "<=", ">=", "="]),
    st.tuples(simple, simple) | st.tuples(names, numbers) | st.tuples(terms, terms),
)
formulas = st.recursive(
    atoms,
    lambda inner: st.builds(
        lambda h, ps: f"({h} {' '.join(ps)})", st.sampled_from(["and", "or"]), st.lists(inner, min_size=1, max_size=4)
    ),
    max_leaves=10,
)


@given(st.lists(formulas, max_size=4), st.integers(0, 4), st.integers(0, 2**32 - 1))
@settings(max_examples=250, deadline=None)
def test_query_equals_the_formula(bodies: list[str], cut: int, seed: int) -> None:
    asserts = [f"(assert {body})" for body in bodies]
    text = declare(N_IN, N_OUT) + "\n".join(asserts[:cut]) + box(N_IN) + "\n".join(asserts[cut:])
    query = parse_query(text, n_in=N_IN, n_out=N_OUT)
    assertions = [form[1] for form in parse_lists(text) if form[0] == "assert"]
    rng = np.random.default_rng(seed)
    for _ in range(25):
        x, y = rng.choice([*GRID, 1.25], N_IN), rng.choice([*GRID, 2.0], N_OUT)
        if _exactly_representable(text):
            assert query.holds(x, y) == text_holds(assertions, x, y)
        else:  # rounded rows: compare away from their boundaries
            x, y = x + rng.uniform(-0.01, 0.01, N_IN), y + rng.uniform(-0.01, 0.01, N_OUT)
            if not _on_a_boundary(query, x, y):
                assert query.holds(x, y) == text_holds(assertions, x, y)


def _exactly_representable(text: str) -> bool:
    """Whether all numbers are small dyadic fractions, so that nothing is ever rounded."""
    return "1e-1" not in text and "0.3" not in text and "*" not in text


def _on_a_boundary(query: Query, x: np.ndarray, y: np.ndarray) -> bool:
    return any((np.abs(part.residual(x, y)) < 1e-9).any() for part in query)


@given(
    st.lists(
        st.tuples(st.sampled_from(["X_0", "Y_0"]), st.floats(-1, 1), st.sampled_from(["<=", ">=", "<", ">"])),
        max_size=3,
    )
)
def test_any_float_survives(parts: list[tuple[str, float, str]]) -> None:
    body = "".join(f"(assert ({op} {name} {value!r}))" for name, value, op in parts)
    query = query_of(body, 1, 1)
    for _, value, _ in parts:
        for point in (value, np.nextafter(value, 2), np.nextafter(value, -2)):
            x, y = np.array([point]), np.array([point])
            values = [(x[0] if name == "X_0" else y[0], bound, op) for name, bound, op in parts]
            expected = abs(point) <= 1 and all(
                {"<=": a <= b, ">=": a >= b, "<": a < b, ">": a > b}[op] for a, b, op in values
            )
            assert query.holds(x, y) == expected


def version_one_files(folder: Path) -> list[Path]:
    return [p for p in sorted(folder.rglob("*.vnnlib*")) if p.suffix in (".vnnlib", ".gz")]


def check_against_text(path: Path, points: int) -> bool:
    """Compare the query of a file with its raw assertions at random points; False if it is no version 1.0 file."""
    text = files.read_bytes(path).decode()
    if "vnnlib-version" in text:
        return False
    n_in, n_out = (len(re.findall(rf"declare-const\s+{kind}_", text)) for kind in "XY")
    query = read_query(path, n_in=n_in, n_out=n_out)
    # Cheap atoms first: exact fractions are needed only where arithmetic occurs, and these files have none.
    assertions = [form[1] for form in parse_lists(text) if form[0] == "assert"]
    rng = np.random.default_rng(0)
    for x, y in sample_points(query, rng, points):
        values = {f"X_{i}": v for i, v in enumerate(x.tolist())} | {f"Y_{i}": v for i, v in enumerate(y.tolist())}
        assert query.holds(x, y) == all(float_holds(part, values) for part in assertions), path
    return True


def float_holds(formula, values: dict[str, float]) -> bool:
    """Like `formula_holds`, for atoms without arithmetic (a float comparison is exact)."""
    head, *rest = formula
    if head in ("and", "or"):
        return (all if head == "and" else any)(float_holds(part, values) for part in rest)
    a, b = (values[part] if part in values else float(part) for part in rest)
    return {"<=": a <= b, ">=": a >= b, "<": a < b, ">": a > b}[head]


def sample_points(query: Query, rng: np.random.Generator, count: int):
    """Points in and around the boxes, with outputs near the thresholds, on corners and off by one input."""
    for index in range(count):
        if not len(query):
            yield rng.normal(size=query.n_in), rng.normal(size=query.n_out)
            continue
        part = query.disjuncts[rng.integers(len(query))]
        x = rng.uniform(part.lower, part.upper)
        x = np.clip(x, part.lower, part.upper)
        if index % 3 == 1:
            x = np.where(rng.random(query.n_in) < 0.5, part.lower, part.upper)
        scale = float(np.abs(part.d).max()) if len(part.d) else 1.0
        y = rng.normal(size=query.n_out) * max(scale, 1.0)
        if len(part.d):  # move onto or over the boundary of a row
            row = rng.integers(len(part.d))
            normal = part.C_y[row]
            gap = normal @ y - part.d[row]
            y = y - normal * (gap / max(float(normal @ normal), 1.0)) * rng.choice([1.0, 1.5, 0.5])
        if index % 3 == 2:
            i = rng.integers(query.n_in)
            x[i] = rng.choice([np.nextafter(part.lower[i], -np.inf), np.nextafter(part.upper[i], np.inf)])
        yield x, y


def test_files_of_the_fault_set(shared: Path) -> None:
    refused = {"E26b", "K1.15a", "K1.15b"}
    read = 0
    for path in version_one_files(shared / "faults"):
        if path.name.split(".vnnlib")[0] in refused:
            with pytest.raises(SpecError, match="line 5, column"):
                check_against_text(path, 1)
        else:
            read += check_against_text(path, 60)
    assert read > 60


@pytest.mark.slow
def test_files_of_the_benchmarks(shared: Path) -> None:
    groups: dict[Path, list[Path]] = {}
    for path in version_one_files(shared / "vnncomp"):
        groups.setdefault(path.parent, []).append(path)
    assert len(groups) >= 18
    for paths in groups.values():
        # Many files of a folder differ in their numbers only; all are read, a few are compared with their text.
        for path in paths[:: max(1, len(paths) // 3)]:
            assert check_against_text(path, 6)


@pytest.mark.slow
def test_all_benchmark_files_are_read(shared: Path) -> None:
    for path in version_one_files(shared / "vnncomp"):
        text = files.read_bytes(path).decode()
        n_in, n_out = (len(re.findall(rf"declare-const\s+{kind}_", text)) for kind in "XY")
        assert len(read_query(path, n_in=n_in, n_out=n_out)) > 0


def test_large_text_in_reasonable_time() -> None:
    n = 20_000
    text = declare(n, 1) + "".join(f"(assert (<= X_{i} {i}.5))\n(assert (>= X_{i} -{i}.25))\n" for i in range(n))
    start = time.process_time()
    (part,) = parse_query(text, n_in=n, n_out=1).disjuncts
    assert len(text) / 1e6 / (time.process_time() - start) > 1.0  # MB/s; about 20 measured
    assert part.upper.tolist() == [i + 0.5 for i in range(n)]


def test_thousands_of_input_alternatives() -> None:
    n = 20_000
    parts = "".join(f"(and (>= X_0 0.{i:06d}) (<= X_0 0.{i + 5:06d}) (<= Y_0 {i}.5))\n" for i in range(n))
    query = query_of(f"(assert (or\n{parts}))", 1, 1)
    assert len(query) == n
    assert query.disjuncts[17].lower[0] == 0.000017
