"""What a run ends with: a verdict, and for `sat` the witness that was replayed.

A verdict is closed (see `docs/design.md`): `sat` only with a witness that onnxruntime confirmed on the original
network, `unsat` only when every part of the input region was closed. Everything else is one of the other words.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


class Verdict(str, enum.Enum):
    """The word on the first line of stdout and of the results file, and the exit code of the process."""

    SAT = "sat"
    UNSAT = "unsat"
    UNKNOWN = "unknown"
    TIMEOUT = "timeout"
    ERROR = "error"

    @property
    def exit_code(self) -> int:
        """0 for a proof or a witness, 11 unknown, 12 timeout; an error has its own code (20 and up)."""
        return {"sat": 0, "unsat": 0, "unknown": 11, "timeout": 12, "error": 20}[self.value]


@dataclass(frozen=True)
class Witness:
    """An input in the unsafe region, and the outputs that onnxruntime gives for it.

    Args:
        x: (n_in,) float64, flat; every value lies inside the box as a decimal number.
        y: (n_out,) float64, flat, as onnxruntime returned them for float32(x) (or float64 for a double network).
    """

    x: np.ndarray
    y: np.ndarray


@dataclass(frozen=True)
class Result:
    """The end of a run.

    Args:
        verdict: the word.
        witness: present exactly when the verdict is `sat`.
        reason: why the run ended as it did; never empty for `unknown`, `timeout` and `error`.
        stats: figures of the run (domains, seconds per phase, peak bytes, ...), JSON-serializable.
    """

    verdict: Verdict
    witness: Witness | None = None
    reason: str = ""
    stats: Mapping[str, Any] = field(default_factory=dict)
