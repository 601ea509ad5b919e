"""Importers of comparisons and logic: truth values that depend on the input are variables that are 0 or 1.

`x > y` is `relu(sign(x - y))`, which is 0 at equality; the other comparisons follow from it. A choice by such a value
is a product. The steps jump, so that bounds over a box across the jump contain both sides.
"""

from __future__ import annotations

from typing import Any

import torch

from parverify.errors import ModelError
from parverify.graph.builder import Builder, Value, Var
from parverify.graph.importers import finite, importer, operand
from parverify.graph.ir import Const


def _greater(b: Builder, x: Value, y: Value) -> Value:
    """1 where x > y, else 0."""
    return b.relu(b.activation(b.sub(x, y), "sign"))  # type: ignore[arg-type]


def _opposite(b: Builder, x: Value) -> Value:
    """1 - x."""
    return b.sub(Const(torch.tensor(1.0)), x)


@importer("gt", "greater", "lt", "less", "ge", "greater_equal", "le", "less_equal", "eq", "ne", "not_equal")
def _compare(b: Builder, func: Any, args: Any, kwargs: dict[str, Any]) -> Value:
    x, y = operand(args[0]), operand(args[1])
    name = func.overloadpacket.__name__.rstrip("_")
    if name in ("gt", "greater"):
        out = _greater(b, x, y)
    elif name in ("lt", "less"):
        out = _greater(b, y, x)
    elif name in ("ge", "greater_equal"):
        out = _opposite(b, _greater(b, y, x))
    elif name in ("le", "less_equal"):
        out = _opposite(b, _greater(b, x, y))
    else:
        apart = b.add(_greater(b, x, y), _greater(b, y, x))
        out = apart if name in ("ne", "not_equal") else _opposite(b, apart)
    return b.truth(out)


@importer("logical_not", "bitwise_not")
def _not(b: Builder, func: Any, args: Any, kwargs: dict[str, Any]) -> Value:
    return b.truth(_opposite(b, _truth(b, args[0])))


@importer("logical_and", "bitwise_and")
def _and(b: Builder, func: Any, args: Any, kwargs: dict[str, Any]) -> Value:
    """max(x + y - 1, 0), exact for truth values and tighter than a product."""
    both = b.add(_truth(b, args[0]), _truth(b, args[1]))
    return b.truth(b.relu(b.add(both, Const(torch.tensor(-1.0)))))


@importer("logical_or", "bitwise_or")
def _or(b: Builder, func: Any, args: Any, kwargs: dict[str, Any]) -> Value:
    """1 - max(1 - x - y, 0)."""
    neither = _opposite(b, b.add(_truth(b, args[0]), _truth(b, args[1])))
    return b.truth(_opposite(b, b.relu(neither)))


def _truth(b: Builder, value: Any) -> Value:
    """A truth value as 0 or 1."""
    if isinstance(value, Const):
        return Const(value.value.bool().to(torch.get_default_dtype()))
    if isinstance(value, Var) and b.is_truth(value):
        return value
    raise ModelError(f"{b.source}: logic on values that are no truth values is not supported")


def choose(b: Builder, condition: Var, x: Value, y: Value) -> Value:
    """x where the condition is 1, y where it is 0."""
    for value in (x, y):
        if isinstance(value, Const):
            finite(value)
    return b.add(y, b.mul(_truth(b, condition), b.sub(x, y)))
