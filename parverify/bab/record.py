"""What one rank did during a run: batches, waiting, exchanged domains, and samples over time for `parverify report`."""

from __future__ import annotations

import os
from typing import Protocol

import torch

from parverify.bab.domains import Domains, Pool
from parverify.clock import Clock
from parverify.report.schema import IDLE, RankReport, Sample, Samples, Work

_BATCHES = 1000  # sizes kept; every second is dropped where there are more


class Exchanged(Protocol):
    """Counters of an exchange."""

    received: int
    sent: int
    idle: float
    bytes_sent: int


class Record:
    """A rank's account of its searches.

    Args:
        clock: of this rank alone.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock.alone()
        self._samples = Samples()
        self._sizes: list[int] = []
        self._bounded = self._closed = self._received = self._sent = self._bytes = 0
        self._idle = 0.0
        self._stages: dict[str, Work] = {}

    def turn(self, bounded: Domains, closed: int, pool: Pool, stage: str) -> None:
        """Note a turn.

        Args:
            bounded: domains that were bounded in it.
            closed: how many domains were closed.
            pool: what is open on this rank now.
            stage: what was done.
        """
        self._bounded += len(bounded)
        self._closed += closed
        if len(bounded):
            self._sizes.append(len(bounded))
        if len(self._sizes) > _BATCHES:
            self._sizes = self._sizes[::2]
        self._sample(len(pool), pool.worst, _depth(bounded), stage)

    def spent(self, stage: str, count: int, seconds: float) -> None:
        """Note what a stage did: on how many domains, in how many seconds."""
        before = self._stages.get(stage, Work())
        self._stages[stage] = Work(before.domains + count, before.seconds + seconds)

    def idle(self) -> None:
        """Note that the rank waits for domains."""
        self._sample(0, torch.inf, 0, IDLE)

    def exchanged(self, counters: Exchanged) -> None:
        """Add what an exchange counted."""
        self._received += counters.received
        self._sent += counters.sent
        self._bytes += counters.bytes_sent
        self._idle += counters.idle

    def report(self, rank: int) -> RankReport:
        """The account so far."""
        return RankReport(
            rank,
            self._bounded,
            self._received,
            self._sent,
            self._idle,
            tuple(self._sizes),
            self._bytes,
            tuple(self._samples.list()),
            dict(self._stages),
        )

    def _sample(self, left: int, worst: float, depth: int, phase: str) -> None:
        self._samples.add(Sample(self._clock.elapsed, left, self._closed, worst, depth, _memory(), phase))


def _depth(domains: Domains) -> int:
    """How often the deepest domain was halved."""
    depth = domains.columns.get("depth")
    return 0 if depth is None or not len(domains) else int(depth.max())


def _memory() -> int:
    """Resident bytes of this process; 0 where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0
