"""Two processes for one run: a worker that verifies, and a supervisor that watches the clock, the signals, the worker.

The supervisor is the process that was started. It forks before torch or numpy are loaded, holds the results file, and
does nothing but wait; so the answer is on time whatever happens in the worker: a call into native code that never
returns (with or without the interpreter's lock), a crash, a kill for memory. There is one writer and one moment of
decision, so no verdict can overwrite another: the first of a complete message from the worker, a signal, the deadline.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import select
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from parverify.cli.outcome import EXIT_MEMORY, INTERRUPTED, Outcome
from parverify.cli.work import Request, work
from parverify.parallel.place import place

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_HEADER = struct.Struct("!Q")
_PR_SET_PDEATHSIG = 1


def _heeded() -> list[signal.Signals]:
    """The signals that end a run, without those that the caller had ignored (nohup, a job in the background)."""
    return [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


class Stop:
    """Which signal asked the run to end, and a file descriptor that becomes readable when one did."""

    def __init__(self, wakeup: int) -> None:
        self.wakeup = wakeup
        self.name = ""

    def record(self, number: int, _: Any) -> None:
        """Remember the first signal; `wakeup` ends the wait."""
        self.name = self.name or signal.Signals(number).name


@contextlib.contextmanager
def stop_signals() -> Iterator[Stop]:
    """Catch the signals that end a run for as long as the block runs; none is lost, none interrupts a write."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    stop = Stop(reader)
    previous_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    previous = {number: signal.signal(number, stop.record) for number in _heeded()}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(previous_fd)
        os.close(reader)
        os.close(writer)


@contextlib.contextmanager
def private_folder() -> Iterator[str]:
    """A folder that only this user can read, for the ranks of this machine to meet; removed afterwards."""
    # Ranks that are being killed may still write.
    with tempfile.TemporaryDirectory(prefix="parverify-", ignore_cleanup_errors=True) as folder:
        yield folder


class Worker:
    """A forked process that verifies and sends its outcome through a pipe."""

    def __init__(self, request: Request) -> None:
        self._buffer = bytearray()
        self._status: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pipe, writer = os.pipe()
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            _become_worker(request, writer, parent)
        os.close(writer)

    def receive(self) -> Outcome | None:
        """Read what is there; the outcome once it is complete or the worker is gone without one."""
        chunk = os.read(self.pipe, 1 << 20)
        self._buffer += chunk
        if len(self._buffer) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._buffer)
            if len(self._buffer) >= _HEADER.size + length:
                return Outcome.decode(bytes(self._buffer[_HEADER.size : _HEADER.size + length]))
        return None if chunk else self._lost()

    def end(self, *, patience: float = 1.0) -> None:
        """Kill the worker, and wait at most `patience` seconds for it to be gone (a driver may hold it)."""
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            self._reap(patience)
        os.close(self.pipe)

    def _reap(self, patience: float) -> None:
        until = time.monotonic() + patience
        while self._status is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                self._status = status
            elif time.monotonic() > until:
                return
            else:
                time.sleep(0.002)

    def _lost(self) -> Outcome:
        """The worker closed its pipe without an outcome: it crashed or was killed."""
        self._reap(1.0)
        code = 0 if self._status is None else os.waitstatus_to_exitcode(self._status)
        if code >= 0:
            hint = "-v shows where; nothing is concluded from it"
            return Outcome.error(f"the working process ended without an answer, exit status {code}; hint: {hint}")
        name = signal.Signals(-code).name
        if -code in STOP_SIGNALS:
            return Outcome.unknown(f"{INTERRUPTED} by {name}")
        if -code == signal.SIGKILL:
            hint = "most likely the machine is out of memory; give --memory"
            return Outcome.error(f"the working process was killed; hint: {hint}", exit_code=EXIT_MEMORY)
        return Outcome.error(f"the working process crashed with {name}; hint: -v shows where")


def wait(worker: Worker, stop: Stop, *, deadline: float) -> Outcome:
    """The first of: the worker's outcome, a signal, the deadline.

    Args:
        deadline: `time.monotonic()` at which the run must be decided; may be infinite.
    """
    while True:
        left = deadline - time.monotonic()
        # An hour at most, because select refuses an infinite wait.
        ready, _, _ = select.select([worker.pipe, stop.wakeup], [], [], min(max(left, 0.0), 3600.0))
        if worker.pipe in ready:
            outcome = worker.receive()
            if outcome is not None:
                return outcome
        if time.monotonic() >= deadline:
            return Outcome.timeout("the deadline passed before the engine ended")
        if stop.name:
            return stopped(stop.name)


def stopped(name: str) -> Outcome:
    """The run was told to end; torchrun does so where another rank has failed."""
    if name == "SIGTERM" and place() is not None:
        what = "ended by SIGTERM from torchrun: another rank failed, or torchrun itself was told to end"
        return Outcome.error(f"{what}; hint: torchrun names the rank that failed first")
    return Outcome.unknown(f"{INTERRUPTED} by {name}")


def _become_worker(request: Request, writer: int, parent: int) -> None:
    """The forked side; never returns."""
    code = 1
    try:
        _detach(parent)
        if request.verbose:
            faulthandler.enable()
        message = work(request).encode()
        sys.stderr.flush()
        _send(writer, _HEADER.pack(len(message)) + message)
        code = 0
    finally:
        # No interpreter shutdown: it takes time, and may hang in a native library's threads.
        os._exit(code)


def _detach(parent: int) -> None:
    """Restore the signals, end with the supervisor, and keep stdout free of what libraries print."""
    signal.set_wakeup_fd(-1)
    for number in _heeded():
        signal.signal(number, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it was gone before the request
            os._exit(1)
    try:
        os.dup2(2, 1)
    except OSError:  # stderr is closed
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _send(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
