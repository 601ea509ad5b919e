"""The command line over a fake engine: `python fake_engine.py run MODEL SPEC ...`, where SPEC's text says what happens.

A script and not a fixture, because what is tested are whole processes. The text of SPEC is a word and its arguments:
a verdict, or `sleep`, `native`, `locked` (seconds, then unsat), or a way to fail. With several ranks, `on R` before it
means that only rank R behaves so, while the others wait for it in a collective; with `once` before all that, only where
there is no journal to go on from, else the verdict is unsat.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import types
from pathlib import Path
from typing import Any


def behave(word: str, arguments: list[str]) -> None:
    """Spend time or fail, as the text says."""
    if word == "sleep":
        time.sleep(float(arguments[0]))
    elif word == "native":  # outside the interpreter, its lock released
        ctypes.CDLL(None).sleep(int(arguments[0]))
    elif word == "locked":  # outside the interpreter, its lock held
        ctypes.PyDLL(None).sleep(int(arguments[0]))
    elif word == "signal":
        os.kill(os.getpid(), signal.Signals[arguments[0]])
    elif word == "exit":
        sys.exit(int(arguments[0]))
    elif word == "raise":
        fail(arguments[0])


def fail(name: str) -> None:
    """Raise the exception of that name."""
    from parverify import errors

    if name == "RecursionError":
        fail(name)
    if name == "UnsupportedOperatorError":
        raise errors.UnsupportedOperatorError([("node7", "Sin")])
    if hasattr(errors, name):
        raise getattr(errors, name)("it is so", hint="do that")
    raise {"MemoryError": MemoryError, "ValueError": ValueError, "RuntimeError": RuntimeError}[name]("first\nsecond")


def together(spec: str, world: Any, journal: Any = None) -> str:
    """Behave on one rank or all, then add up the ranks; the word that says the verdict."""
    words = Path(spec).read_text().split() or [""]
    if words[0] == "once":
        words = ["unsat"] if journal is not None and journal.again else words[1:]
    # A test that waits for this may replace the spec then. One write, so that lines of several ranks stay apart.
    sys.stdout.write("a library prints to stdout\n")
    sys.stdout.flush()
    only = -1
    if words[0] == "on":
        only, words = int(words[1]), words[2:]
    if world is None or only in (-1, world.rank):
        behave(words[0], words[1:])
    if world is not None:
        assert world.comm.all_max(world.rank) == world.size - 1
    return words[0]


def verify(
    model: str, spec: str, *, settings: Any, clock: Any, progress: Any = None, world: Any = None, journal: Any = None
) -> Any:
    """Stands for `parverify.api.verify`."""
    import numpy as np

    from parverify.verdict import Result, Verdict, Witness

    word = together(spec, world, journal)
    if world is not None:
        progress.warn(f"rank {world.rank} talks")
        if word == "sat" and world.rank:
            return Result(Verdict.SAT)
    witness = Witness(np.array([0.1, -1 / 3]), np.array([1e-7, 2.0]))
    if word == "nan":
        return Result(Verdict.SAT, Witness(np.array([np.nan]), np.array([0.0])))
    if word in ("sat", "liar"):
        return Result(Verdict.SAT, witness if word == "sat" else None)
    if word in ("unknown", "timeout", "error"):
        return Result(Verdict(word), reason="it gave up")
    if word == "string":
        return "unsat"
    return Result(Verdict.UNSAT, stats={"domains": np.int64(3), "worst": float("inf"), "left": clock.left})


def bounds_report(model: str, spec: str, *, settings: Any, clock: Any, world: Any = None) -> Any:
    """Stands for `parverify.api.bounds_report`."""
    together(spec, world)
    size = 1 if world is None else world.size
    layer = {"name": "a", "op": "Relu", "neurons": 1, "unstable": 1, "lower": [-1 / 3], "upper": [float("inf")]}
    return {
        "method": settings.method,
        "strategy": "single",
        "world_size": size,
        "dtype": settings.dtype,
        "lower": [0.1],
        "upper": [1e300],
        "layers": [layer],
        "digest": "0",
        "seconds": 0.0,
        "ranks": [{}] * size,
    }


def install() -> None:
    """Put the fake in the place of `parverify.api`."""
    module = types.ModuleType("parverify.api")
    module.verify = verify  # type: ignore[attr-defined]
    module.bounds_report = bounds_report  # type: ignore[attr-defined]
    sys.modules["parverify.api"] = module


if __name__ == "__main__":
    install()
    from parverify.cli import main

    main()
