"""How a run ended, in plain Python values, so that it crosses from one process to another as JSON.

The process that holds the results file never loads torch or numpy; hence words and lists here instead of
`parverify.verdict` types. A test checks that both agree.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from parverify.errors import OutOfTimeError, ParverifyError, ResourceError, one_line
from parverify.results import jsonable

INTERRUPTED = "interrupted"
EXIT_DECIDED = 0
EXIT_UNKNOWN = 11
EXIT_TIMEOUT = OutOfTimeError.exit_code
EXIT_ERROR = ParverifyError.exit_code
EXIT_MEMORY = ResourceError.exit_code
# What the machine may run out of: disk, quota, open files, processes.
_SHORTAGES = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.EROFS)


@dataclass(frozen=True)
class Outcome:
    """The end of a run.

    Args:
        verdict: `sat`, `unsat`, `unknown`, `timeout` or `error`.
        exit_code: what the process returns.
        reason: one line; never empty unless the verdict is `sat` or `unsat`.
        x, y: the witness, flat; empty unless the verdict is `sat`.
        stats: figures of the run.
    """

    verdict: str
    exit_code: int = EXIT_DECIDED
    reason: str = ""
    x: list[float] = field(default_factory=list)
    y: list[float] = field(default_factory=list)
    stats: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def unknown(reason: str) -> Outcome:
        """Neither proved nor refuted."""
        return Outcome("unknown", EXIT_UNKNOWN, reason)

    @staticmethod
    def timeout(reason: str) -> Outcome:
        """The clock ended the run."""
        return Outcome("timeout", EXIT_TIMEOUT, reason)

    @staticmethod
    def error(reason: str, *, exit_code: int = EXIT_ERROR) -> Outcome:
        """The run failed."""
        return Outcome("error", exit_code, one_line(reason))

    @staticmethod
    def of(error: BaseException) -> Outcome:
        """What an exception means for the verdict; never `sat` or `unsat`."""
        if isinstance(error, OutOfTimeError):
            return Outcome.timeout(str(error))
        if isinstance(error, ParverifyError):
            return Outcome.error(str(error), exit_code=error.exit_code)
        if isinstance(error, KeyboardInterrupt):
            return Outcome.unknown(INTERRUPTED)
        if _is_out_of_memory(error):
            hint = "give --memory less than the machine has, or use a machine with more"
            return Outcome.error(f"out of memory: {error or type(error).__name__}; hint: {hint}", exit_code=EXIT_MEMORY)
        if isinstance(error, OSError) and error.errno in _SHORTAGES:
            place = f" ({error.filename})" if error.filename else ""
            hint = "this is the machine's limit, not parverify's; make room, and run again"
            return Outcome.error(f"{error.strerror}{place}; hint: {hint}")
        hint = "this is a fault of parverify; -v shows where"
        return Outcome.error(f"{type(error).__name__}: {error}; hint: {hint}")

    def encode(self) -> bytes:
        """JSON; floats survive exactly."""
        content = asdict(self) | {"stats": jsonable(self.stats)}
        return json.dumps(content).encode()

    @staticmethod
    def decode(data: bytes) -> Outcome:
        """The inverse of `encode`."""
        return Outcome(**json.loads(data))


def _is_out_of_memory(error: BaseException) -> bool:
    """MemoryError, or what torch raises on an accelerator and on the CPU (known by class name and by its text)."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("can't allocate memory" in text or "not enough memory" in text)
