"""The allowance for rounding: how much a computed bound is moved outward, so that it holds in exact arithmetic.

A sum of terms t_i in a dtype with spacing eps is off by a small multiple of eps * sum |t_i|; every interval and every
swept bound is widened by `ULPS` such units, and by `VERDICT_ULPS` where a verdict is drawn from it. The allowance is a
context variable only so that bounds can be compared digit by digit with tools that make none (`allowance(0)`); `verify`
never runs with less than the default.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch

ULPS = 2.0
VERDICT_ULPS = 6.0

_CURRENT: ContextVar[float] = ContextVar("allowance", default=ULPS)


def slack(dtype: torch.dtype) -> float:
    """The relative allowance on a sum of magnitudes in `dtype`."""
    return _CURRENT.get() * torch.finfo(dtype).eps


@contextlib.contextmanager
def allowance(ulps: float) -> Iterator[None]:
    """Within this context bounds are widened by `ulps` units instead of the default."""
    token = _CURRENT.set(ulps)
    try:
        yield
    finally:
        _CURRENT.reset(token)
