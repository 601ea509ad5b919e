"""When this process was started, so that the time spent on loading it counts against the deadline."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

from parverify.parallel.place import restarts_done

# More than any launch takes; an older start time means a clock that can't be compared (a time namespace, a restored
# container), and then the present is the better guess.
_OLDEST = 60.0


def process_started() -> float:
    """`time.monotonic()` at the start of this process, from the kernel where it says so, else now.

    Where a shell replaced itself by this process (`exec`), the shell's start counts, as it should. The kernel's
    figure is in ticks of 10 ms, rounded down, so the start is never taken too late. A rank that torchrun has started
    again goes by the start of torchrun: its run began then.
    """
    now = time.monotonic()
    age = _age("self")
    if not 0 <= age <= _OLDEST:
        return now
    return now - (max(age, _age(str(os.getppid()))) if restarts_done() else age)


def _age(process: str) -> float:
    """Seconds since a process started, NaN where unknown."""
    try:
        text = Path("/proc", process, "stat").read_text()
        ticks = int(text.rpartition(")")[2].split()[19])  # field 22, counted after the name, which may hold spaces
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return math.nan
