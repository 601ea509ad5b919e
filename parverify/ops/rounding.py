"""The allowance for rounding: how much a computed bound is moved outward, so that it holds in exact arithmetic.

A sum of terms t_i in a dtype with spacing eps is off by a small multiple of eps * sum |t_i|. Intervals are widened by
`ULPS` such units in every operator. A swept bound is lessened by half as many units of everything that was summed up on
the way: constants, the product with the region, and, for every affine node a row was pushed through, the row times
the node's magnitudes |W| |x| + |b|, which bounds what rounding inside the coefficients can do however much they cancel.
Where a verdict is drawn, `VERDICT_ULPS` more. The factor is an allowance for typical, not for worst-case rounding.

The allowance is a context variable only so that bounds can be compared digit by digit with tools that make none
(`allowance(0)`); `verify` never runs with less than the default.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch

ULPS = 2.0
VERDICT_ULPS = 2.0

_CURRENT: ContextVar[float] = ContextVar("allowance", default=ULPS)


def slack(dtype: torch.dtype) -> float:
    """The relative allowance of intervals on a sum of magnitudes in `dtype`."""
    return _CURRENT.get() * torch.finfo(dtype).eps


def row_slack(dtype: torch.dtype) -> float:
    """The relative allowance on the magnitudes that a sweep counts; they are complete, so half the units do."""
    return slack(dtype) / 2


@contextlib.contextmanager
def allowance(ulps: float) -> Iterator[None]:
    """Within this context bounds are widened by `ulps` units instead of the default."""
    token = _CURRENT.set(ulps)
    try:
        yield
    finally:
        _CURRENT.reset(token)
