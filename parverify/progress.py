"""How a run talks while it works: phases, the state of the search, messages. Never a result.

Everything goes to stderr. The engine knows only the protocol; the command line picks an implementation: nothing at
all, plain lines for files and pipes, or one live line on a terminal (rich, imported when the first line is drawn).
"""

from __future__ import annotations

import math
import sys
import time
from typing import Any, Protocol, TextIO


class Progress(Protocol):
    """What the engine may say."""

    def phase(self, name: str) -> None:
        """A new phase begins, for example `bounding`."""

    def update(self, *, open: int, closed: int, worst: float, rate: float, left: float) -> None:
        """The state of branch and bound.

        Args:
            open, closed: subproblems that wait, and that are proved.
            worst: the lowest bound among the open ones; the property is proved where it is positive.
            rate: subproblems a second.
            left: seconds until the deadline, infinite where there is none.
        """

    def log(self, message: str) -> None:
        """Something worth reading only with -v."""

    def warn(self, message: str) -> None:
        """Something that the user should know in any case."""


class NullProgress:
    """Says nothing."""

    def phase(self, name: str) -> None:
        """Drop it."""

    def update(self, *, open: int, closed: int, worst: float, rate: float, left: float) -> None:
        """Drop it."""

    def log(self, message: str) -> None:
        """Drop it."""

    def warn(self, message: str) -> None:
        """Drop it."""

    def close(self) -> None:
        """Nothing to end."""


class LineProgress:
    """Plain lines: warnings, and the state of a search that lasts; with `verbose` also messages and phases.

    Args:
        stream: where lines go; stderr as it is at the time of the call if None.
        verbose: say more, and the state of the search more often.
        interval: least seconds between two lines about the state of the search, and before the first unless
            `verbose`; a few with `verbose`, else more, if None.
    """

    def __init__(self, stream: TextIO | None = None, *, verbose: bool = False, interval: float | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._verbose = verbose
        self._interval = interval if interval is not None else 3.0 if verbose else 10.0
        self._started = time.monotonic()
        self._last = -math.inf if verbose else self._started

    def phase(self, name: str) -> None:
        """Write the phase's name and when it began."""
        if self._verbose:
            self._write(f"[{time.monotonic() - self._started:7.2f} s] {name}")

    def update(self, *, open: int, closed: int, worst: float, rate: float, left: float) -> None:
        """Write the state, unless the last one was written less than `interval` ago."""
        now = time.monotonic()
        if now - self._last >= self._interval:
            self._last = now
            self._write(f"[{now - self._started:7.2f} s] " + format_state(open, closed, worst, rate, left))

    def log(self, message: str) -> None:
        """Write the message with -v only."""
        if self._verbose:
            self._write(message)

    def warn(self, message: str) -> None:
        """Write the message in any case."""
        self._write(f"warning: {message}")

    def close(self) -> None:
        """Nothing to end."""

    def _write(self, line: str) -> None:
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except (OSError, ValueError):  # a closed stderr is no reason to lose a verdict
            return


class LiveProgress:
    """One line on a terminal that is redrawn in place; messages scroll by above it.

    Args:
        stream: a terminal; stderr if None.
        verbose: also show messages of `log`.
    """

    def __init__(self, stream: TextIO | None = None, *, verbose: bool = False, interval: float = 0.1) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._verbose = verbose
        self._interval = interval
        self._last = -math.inf
        self._name = ""
        self._live: Any = None

    def phase(self, name: str) -> None:
        """Show the phase's name."""
        self._name = name
        self._draw(name, force=True)

    def update(self, *, open: int, closed: int, worst: float, rate: float, left: float) -> None:
        """Show the state of the search behind the phase's name."""
        self._draw(f"{self._name}: " + format_state(open, closed, worst, rate, left))

    def log(self, message: str) -> None:
        """Write the message above the line, with -v only."""
        if self._verbose:
            self._say(message)

    def warn(self, message: str) -> None:
        """Write the message above the line."""
        self._say(f"warning: {message}")

    def close(self) -> None:
        """Take the line away."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def _draw(self, line: str, *, force: bool = False) -> None:
        now = time.monotonic()
        if force or now - self._last >= self._interval:
            self._last = now
            from rich.text import Text

            self._open().update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)

    def _say(self, message: str) -> None:
        self._open().console.print(message, markup=False, highlight=False, soft_wrap=True)

    def _open(self) -> Any:
        if self._live is None:
            from rich.console import Console
            from rich.live import Live

            # No refresh thread: a process that is about to end must have none that holds a lock.
            self._live = Live(console=Console(file=self._stream), auto_refresh=False, transient=True)
            self._live.start()
        return self._live


def format_state(open: int, closed: int, worst: float, rate: float, left: float) -> str:
    """One line about branch and bound."""
    line = f"{open} open, {closed} closed, worst bound {worst:.4g}, {rate:.0f}/s"
    return line if math.isinf(left) else line + f", {max(left, 0.0):.0f} s left"


def make_progress(*, verbose: bool = False, quiet: bool = False) -> NullProgress | LineProgress | LiveProgress:
    """The implementation that fits stderr: nothing if `quiet`, a live line on a terminal, else plain lines."""
    if quiet:
        return NullProgress()
    if sys.stderr.isatty():
        return LiveProgress(verbose=verbose)
    return LineProgress(verbose=verbose)
