"""The standard streams: there from the start, and no trouble when the reader of stdout is gone."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Iterator

from parverify.errors import ParverifyError, why


def open_streams() -> None:
    """Open /dev/null for each of stdin, stdout and stderr that is closed, before anything else gets its number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    # Python has no object for a stream that was closed.
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


@contextlib.contextmanager
def to_stdout() -> Iterator[None]:
    """Write to stdout in this block: a reader that has gone away (`| head`) is no failure, a full disk is one.

    Raises:
        ParverifyError: what was written did not arrive.
    """
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        drop_stdout()
    except OSError as error:
        drop_stdout()
        raise ParverifyError(f"can't write to stdout: {why(error)}", "send stdout elsewhere, and run again") from error


def reader_gone() -> bool:
    """Whether stdout is a pipe that nobody reads any more."""
    poll = select.poll()
    poll.register(1, select.POLLOUT)
    return any(flags & (select.POLLERR | select.POLLHUP) for _, flags in poll.poll(0))


def drop_stdout() -> None:
    """Send what stdout still holds nowhere, so that the end of the process does not try it once more."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
