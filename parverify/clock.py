"""One deadline for a whole run, checked in every phase.

The clock is monotonic and starts where the process was started as far as that is known, so that
time spent on imports counts too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from parverify.errors import OutOfTimeError, StoppedError


@dataclass(frozen=True)
class Clock:
    """A deadline.

    Args:
        timeout: seconds from `started`; infinite where there is none.
        started: `time.monotonic()` at the start of the run.
    """

    timeout: float = math.inf
    started: float = field(default_factory=time.monotonic)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def now(self) -> float:
        """Seconds since the start, for decisions; ranks that work together see the same."""
        return self.elapsed

    @property
    def left(self) -> float:
        """Seconds until the deadline by `now`; negative once it has passed."""
        return math.inf if math.isinf(self.timeout) else self.timeout - self.now()

    @property
    def stopped(self) -> bool:
        """Whether work has become useless before the deadline."""
        return False

    def alone(self) -> Clock:
        """The same deadline for one rank alone."""
        return Clock(self.timeout, self.started)

    def check(self, phase: str) -> None:
        """Raise `OutOfTimeError` naming `phase` once the deadline has passed."""
        if self.elapsed >= self.timeout:
            raise OutOfTimeError(f"out of time while {phase}")


@dataclass(frozen=True)
class StoppableClock(Clock):
    """A clock at whose checks work that has become useless ends too.

    Args:
        asks: each says whether it has; may be changed at any time by the thread that checks.
    """

    asks: list[Callable[[], bool]] = field(default_factory=list)

    @property
    def stopped(self) -> bool:
        """Whether work has become useless before the deadline."""
        return any(ask() for ask in self.asks)

    def check(self, phase: str) -> None:
        """Raise `OutOfTimeError` past the deadline, and `StoppedError` where the work has become useless."""
        super().check(phase)
        if self.stopped:
            raise StoppedError(f"stopped while {phase}")
