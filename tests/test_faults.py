"""Small cases with known answers: no verdict is wrong, witnesses hold when replayed, and easy cases are decided.

Runs where the cases are present (see the fixture `shared`).
"""

from __future__ import annotations

import csv
import functools
import gzip
import itertools
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import parverify
from parverify.errors import ParverifyError
from tests.conftest import find_shared

TIMEOUT = 5.0

# What is not decided yet. These sets may only shrink.
UNDECIDED = frozenset({"K3.13c", "K3.21b", "K3.21c"})  # shared maxima; jumps between neighbouring numbers
REFUSED: frozenset[str] = frozenset()  # operators without bounds
SLOW = frozenset({"K2.5", "K3.13"})  # search until the timeout


@functools.cache
def cases() -> dict[str, list[dict[str, str]]]:
    """kind -> rows of the table that state one network and a property in VNN-LIB 1.0."""
    folder = find_shared()
    if folder is None or not (folder / "faults" / "expected.csv").is_file():
        return {}
    found: dict[str, list[dict[str, str]]] = {}
    with open(folder / "faults" / "expected.csv", newline="") as handle:
        for row in csv.DictReader(handle):
            if ";" not in row["onnx"] and "vnnlib-version" not in text_of(folder / "faults" / row["vnnlib"]):
                found.setdefault(row["kind"], []).append(row)
    return found


def text_of(path: Path) -> str:
    """A file, plain or gzipped."""
    if path.is_file():
        return path.read_text()
    with gzip.open(path.with_name(path.name + ".gz"), "rt") as handle:
        return handle.read()


KINDS = [pytest.param(kind, marks=pytest.mark.slow) if kind in SLOW else kind for kind in cases()] or ["absent"]


@pytest.mark.parametrize("kind", KINDS)
def test_cases(kind: str, shared: Path) -> None:
    if kind == "absent":
        pytest.skip("the cases are absent")
    folder = shared / "faults"
    for case in cases()[kind]:
        name, expected = case["id"], case["expected"]
        try:
            result = parverify.verify(folder / case["onnx"], folder / case["vnnlib"], timeout=TIMEOUT)
        except ParverifyError as error:
            assert str(error)
            assert expected in ("error", "not-sat", "not-unsat") or name in REFUSED, f"{name}: {error}"
            continue
        verdict = result.verdict.value
        wrong = {
            "sat": ["unsat"],
            "unsat": ["sat"],
            "not-sat": ["sat"],
            "not-unsat": ["unsat"],
            "error": ["sat", "unsat"],
        }
        assert verdict not in wrong[expected], f"{name}: {verdict}, but {case['why']}"
        assert verdict != "error"
        if verdict == "sat":
            assert result.witness is not None
            replay(folder / case["onnx"], text_of(folder / case["vnnlib"]), result.witness)
        if expected in ("sat", "unsat"):
            assert verdict == expected or name in UNDECIDED, f"{name}: {verdict} ({result.reason})"


def test_the_sets_name_cases_that_exist(shared: Path) -> None:
    known = {row["id"] for rows in cases().values() for row in rows}
    assert known >= UNDECIDED | REFUSED
    assert set(cases()) >= SLOW


# --- an evaluator of its own: the formula as written, in rational arithmetic ---------------------------------------


def replay(model: Path, spec: str, witness: Any) -> None:
    """Check a witness on the model in onnxruntime, and the property's text on what is found."""
    import onnxruntime

    raw = model.read_bytes() if model.is_file() else gzip.decompress(model.with_name(model.name + ".gz").read_bytes())
    session = onnxruntime.InferenceSession(raw, providers=["CPUExecutionProvider"])
    given = session.get_inputs()[0]
    shape = [n if isinstance(n, int) else 1 for n in given.shape]
    kind = {"tensor(float)": np.float32, "tensor(double)": np.float64}[given.type]
    y = session.run(None, {given.name: witness.x.astype(kind).reshape(shape)})[0].ravel()
    np.testing.assert_array_equal(y.astype(np.float64), witness.y)
    # An input counts as the decimal that is printed for it, an output as the number it is.
    values = {f"X_{i}": Fraction(repr(float(v))) for i, v in enumerate(witness.x)}
    values |= {f"Y_{i}": Fraction(float(v)) for i, v in enumerate(y)}
    asserts = [form[1] for form in parse(spec) if form[0] == "assert"]
    assert asserts
    for form in asserts:
        assert holds(form, values), form


def parse(text: str) -> list[Any]:
    """S-expressions as nested lists."""
    stack: list[list[Any]] = [[]]
    for token in re.findall(r"[()]|[^\s()]+", re.sub(r";[^\n]*", "", text)):
        if token == "(":
            stack.append([])
        elif token == ")":
            done = stack.pop()
            stack[-1].append(done)
        else:
            stack[-1].append(token)
    assert len(stack) == 1
    return stack[0]


def holds(form: Any, values: dict[str, Fraction]) -> bool:
    """Whether a formula is true."""
    head, *rest = form
    if head == "and":
        return all(holds(part, values) for part in rest)
    if head == "or":
        return any(holds(part, values) for part in rest)
    if head == "not":
        return not holds(rest[0], values)
    terms = [number(part, values) for part in rest]
    compare = {
        "<=": Fraction.__le__,
        ">=": Fraction.__ge__,
        "<": Fraction.__lt__,
        ">": Fraction.__gt__,
        "=": Fraction.__eq__,
    }[head]
    return all(compare(a, b) for a, b in itertools.pairwise(terms))


def number(term: Any, values: dict[str, Fraction]) -> Fraction:
    """The value of a term."""
    if isinstance(term, str):
        return values[term] if term in values else Fraction(term)
    head, *rest = term
    parts = [number(part, values) for part in rest]
    if head == "+":
        return sum(parts, Fraction(0))
    if head == "-":
        return -parts[0] if len(parts) == 1 else parts[0] - sum(parts[1:], Fraction(0))
    assert head == "*", head
    product = Fraction(1)
    for part in parts:
        product *= part
    return product


def test_the_evaluator_tells_true_from_false() -> None:
    values = {"X_0": Fraction(1, 2), "Y_0": Fraction(-1)}
    text = "(assert (or (and (<= X_0 0.5) (>= Y_0 -1.0)) (< Y_0 -1))) ; a comment\n(assert (<= (+ X_0 (* 2 Y_0)) -1.5))"
    first, second = (form[1] for form in parse(text))
    assert holds(first, values)
    assert holds(second, values)
    assert not holds(first, values | {"X_0": Fraction(3, 4)})
    assert not holds(second, values | {"Y_0": Fraction(-9, 10)})
    assert not holds(["<", "Y_0", "-1"], values)


def test_the_evaluator_refuses_a_false_witness(tmp_path: Path) -> None:
    from onnx import TensorProto, helper

    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 1]) for name in ("x", "y"))
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), tmp_path / "m.onnx")
    spec = "(assert (>= X_0 0))(assert (<= X_0 1))(assert (>= Y_0 0.5))"
    right = parverify.Witness(np.array([0.5]), np.array([0.5]))
    replay(tmp_path / "m.onnx", spec, right)
    for bad in (
        parverify.Witness(np.array([0.25]), np.array([0.25])),
        parverify.Witness(np.array([2.0]), np.array([2.0])),
        parverify.Witness(np.array([0.5]), np.array([0.75])),
    ):
        with pytest.raises(AssertionError):
            replay(tmp_path / "m.onnx", spec, bad)
