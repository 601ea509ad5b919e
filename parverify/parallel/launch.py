"""Several ranks on this machine, started and watched by torch's own elastic launcher.

Nothing listens on a network: ranks find each other through a file in a private folder, and talk over the loopback
interface. Every rank leaves its outcome in that folder; the first that went wrong decides, else rank 0's counts, and
only if every rank came to its end. So a rank that dies never leaves a verdict behind, not even one that was agreed on.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed import FileStore
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from parverify.cli.outcome import EXIT_ERROR, INTERRUPTED, Outcome
from parverify.cli.work import Boundary
from parverify.errors import LostRankError
from parverify.parallel.world import World, join

Job = Callable[[World], Outcome]

_BACKEND = "parverify-file"
_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
_POLL = 0.02
_PR_SET_PDEATHSIG = 1
# A rank that lost another waits to be ended, so that the launcher sees the one that died before it.
_PATIENCE_LOST = 5.0
# A rank that is out of time gives the others, whose clock is the same, the time to say so too.
_PATIENCE_TIMEOUT = 0.5
_NUMBERS = {"OMP_NUM_THREADS": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "2"}


# --- the launcher's side ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Retry:
    """What is done where a rank is lost.

    Args:
        most: how often ranks are started again.
        job: what they call then; see `launch`.
        say: told why, in one line.
    """

    most: int
    job: Job
    say: Callable[[str], None]


def launch(
    nproc: int,
    job: Job,
    *,
    folder: str | Path,
    device: str = "cpu",
    verbose: bool = False,
    retry: Retry | None = None,
) -> Outcome:
    """Run a job on several ranks of this machine; all of them are gone when this returns.

    Args:
        nproc: how many.
        job: what every rank calls with its world; picklable where the device is not the CPU.
        folder: a private, empty folder; it may be removed afterwards.
        device: `cpu`, whose ranks are forked, or `cuda`, whose ranks are started anew.
        verbose: ranks print whole tracebacks.
        retry: what is done where a rank is lost; None for nothing.

    Returns:
        What the ranks came to; `error` naming the rank where one died or raised.
    """
    again = 0
    outcome, lost = _round(nproc, job, folder, device, verbose)
    while lost and retry is not None and again < retry.most:
        again += 1
        retry.say(f"{outcome.reason}; all ranks are started again ({again} of {retry.most})")
        place = Path(folder, f"again-{again}")
        place.mkdir()
        outcome, lost = _round(nproc, retry.job, place, device, verbose)
    return replace(outcome, stats={**outcome.stats, "restarts": again}) if again else outcome


def _round(nproc: int, job: Job, folder: str | Path, device: str, verbose: bool) -> tuple[Outcome, bool]:
    """All ranks, once; what they came to, and whether that is only because one was lost."""
    folder = Path(folder)
    post = Post(str(folder), nproc, device, os.getpid(), verbose)
    failures: Mapping[int, ProcessFailure] = {}
    with _quiet(), _handlers(), _environment(_NUMBERS):
        try:
            elastic_launch(_config(post), run_rank)(post, job)
        except ChildFailedError as error:
            failures = error.failures
        except SignalException as error:
            return Outcome.unknown(f"{INTERRUPTED} by {error.sigval.name}"), False
    records = read_records(folder, nproc)
    said = any(exceptional(record.outcome) and not record.lost for record in records.values())
    whole = len(records) == nproc and not failures and not any(record.lost for record in records.values())
    return decide(records, nproc, failures), not said and not whole


@dataclass(frozen=True)
class Post:
    """What every rank is told.

    Args:
        folder: the private folder.
        nproc: number of ranks.
        device: where tensors live.
        parent: process id of the launcher.
        verbose: print whole tracebacks.
    """

    folder: str
    nproc: int
    device: str
    parent: int
    verbose: bool


def _config(post: Post) -> LaunchConfig:
    rendezvous_handler_registry.register(_BACKEND, _FileRendezvous)
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=post.nproc,
        run_id=f"parverify-{post.parent}",
        role="rank",
        rdzv_backend=_BACKEND,
        rdzv_endpoint=str(Path(post.folder, "agent")),
        max_restarts=0,
        monitor_interval=_POLL,
        start_method="fork" if post.device == "cpu" else "spawn",
        logs_specs=DefaultLogsSpecs(log_dir=post.folder),
        local_addr="localhost",
    )


class _FileRendezvous(RendezvousHandler):
    """The rendezvous of a launcher that is alone: a store in a file.

    Torch's own handlers open a TCP server on every interface for the ranks to meet at, and wait at random before.
    """

    def __init__(self, params: RendezvousParameters) -> None:
        self._run_id = params.run_id
        self._store = FileStore(params.endpoint, 1)
        self._closed = False

    def get_backend(self) -> str:
        """The name under which it is registered."""
        return _BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """One node, which is this one; the address is not used."""
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo("localhost", 0))

    def is_closed(self) -> bool:
        """Whether no further round may begin."""
        return self._closed

    def set_closed(self) -> None:
        """Let no further round begin."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """Nobody else ever joins."""
        return 0

    def get_run_id(self) -> str:
        """The name of the job."""
        return self._run_id

    def shutdown(self) -> bool:
        """Close."""
        self._closed = True
        return True


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drop the log of the elastic launcher: what a rank's end means is said by the outcome."""
    previous = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(previous)


@contextlib.contextmanager
def _handlers() -> Iterator[None]:
    """Put back the signal handlers that the elastic launcher replaces."""
    previous = {number: signal.getsignal(number) for number in map(signal.Signals.__getitem__, _SIGNALS)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set what ranks inherit, and put it back."""
    previous = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in previous.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# --- the rank's side --------------------------------------------------------------------------------------------------


def run_rank(post: Post, job: Job) -> None:
    """What each rank's process runs; leaves the outcome, and ends the process where that is exceptional."""
    _follow(post)
    rank = int(os.environ["RANK"])
    outcome = Outcome.error("the rank came to no end")
    with Boundary(verbose=post.verbose) as boundary:
        store, interface = str(Path(post.folder, "ranks")), loopback()
        world = join(post.device, store=store, interface=interface)
        outcome = job(world)
        if not exceptional(outcome):
            world.comm.barrier()  # a rank that leaves would break what others still send
    lost = isinstance(boundary.error, LostRankError)
    record = Record(boundary.outcome or outcome, time.monotonic(), lost)
    record.save(Path(post.folder), rank)
    sys.stderr.flush()
    if exceptional(record.outcome):
        _linger(_PATIENCE_LOST if lost else _PATIENCE_TIMEOUT if record.outcome.verdict == "timeout" else 0.0)
        os._exit(1)


def _follow(post: Post) -> None:
    """End with the launcher, and at once when told to."""
    logging.disable(logging.NOTSET)
    for name in _SIGNALS:
        number = getattr(signal, name)
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != post.parent:  # it was gone before the request
        os._exit(1)
    if post.verbose:
        faulthandler.enable()


def loopback() -> str | None:
    """Name of the loopback interface; None where there is none of a known name."""
    names = {name for _, name in socket.if_nameindex()}
    return next((name for name in ("lo", "lo0") if name in names), None)


def _linger(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(_POLL)


# --- outcomes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """What a rank leaves.

    Args:
        outcome: how it ended.
        time: `time.monotonic()` then, which is one clock for the whole machine.
        lost: whether it only ended because another rank was gone.
    """

    outcome: Outcome
    time: float
    lost: bool = False

    def save(self, folder: Path, rank: int) -> None:
        """Write the rank's file, as a whole."""
        content = {"outcome": self.outcome.encode().decode(), "time": self.time, "lost": self.lost}
        scratch = folder / f".outcome-{rank}"
        scratch.write_text(json.dumps(content))
        os.replace(scratch, folder / f"outcome-{rank}.json")


def read_records(folder: Path, nproc: int) -> dict[int, Record]:
    """rank -> what it left; ranks that left nothing are absent."""
    found = {}
    for rank in range(nproc):
        with contextlib.suppress(FileNotFoundError):
            content: dict[str, Any] = json.loads((folder / f"outcome-{rank}.json").read_text())
            found[rank] = Record(Outcome.decode(content["outcome"].encode()), content["time"], content["lost"])
    return found


def exceptional(outcome: Outcome) -> bool:
    """Whether the outcome of one rank ends the job."""
    return outcome.verdict in ("error", "timeout")


def decide(records: Mapping[int, Record], nproc: int, failures: Mapping[int, ProcessFailure]) -> Outcome:
    """The outcome of the job.

    Args:
        records: what ranks left.
        nproc: number of ranks.
        failures: ranks whose process failed, as far as the launcher says.
    """
    wrong = sorted((record.lost, record.time, rank) for rank, record in records.items() if exceptional(record.outcome))
    dead = [rank for rank in failures if rank not in records or not exceptional(records[rank].outcome)]
    if wrong and not (dead and wrong[0][0]):
        _, _, rank = wrong[0]
        first = records[rank].outcome
        if first.verdict == "timeout" and 0 in records and records[0].outcome.verdict == "timeout":
            return records[0].outcome
        return _named(rank, first)
    if dead:
        return Outcome.error(_death(dead[0], failures[dead[0]]))
    missing = [rank for rank in range(nproc) if rank not in records]
    if missing or failures:
        return Outcome.error(f"rank {missing[0] if missing else min(failures)} ended without an answer")
    return _agreed(records)


def _agreed(records: Mapping[int, Record]) -> Outcome:
    """Rank 0's outcome, where no rank contradicts it."""
    own = records[0].outcome
    for rank, record in sorted(records.items()):
        if record.outcome.verdict != own.verdict:
            return Outcome.error(f"ranks disagree: rank {rank} says {record.outcome.verdict}, rank 0 {own.verdict}")
    return own


def _named(rank: int, outcome: Outcome) -> Outcome:
    """The outcome with the rank in its reason; what rank 0 refuses in the user's files needs none."""
    if rank == 0 and outcome.exit_code != EXIT_ERROR:
        return outcome
    return Outcome(outcome.verdict, outcome.exit_code, f"rank {rank}: {outcome.reason}", stats=outcome.stats)


def _death(rank: int, failure: ProcessFailure) -> str:
    """What is known of a rank that died without a word."""
    code = failure.exitcode
    if code >= 0:
        return f"rank {rank} ended without an answer, exit status {code}"
    name = signal.Signals(-code).name
    if -code == signal.SIGKILL:
        return f"rank {rank} was killed by {name}; hint: most likely the machine is out of memory; give --memory"
    return f"rank {rank} crashed with {name}; hint: -v shows where"
