"""A run's journal over all its ranks: what an earlier run said, and the journals of the groups that search.

Rank 0 leads group 0, whose journal is made (or taken up) first and alone says what phases conclude; all ranks are told
what it holds. The leaders of other groups write files of their own; the other ranks of a group keep the same accounts
without a file, so that the domains of a group carry the same ids on all its ranks.

A conclusion is written down only where every rank has come to it, and nothing is concluded from a search before
`settle`: over all groups, what it has closed must be exactly what it was begun with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from parverify.bab.domains import Domains
from parverify.bab.identity import Identity, Keep
from parverify.bab.journal import Journal
from parverify.bab.ledger import LedgerError, volume
from parverify.bab.replay import Restored, generations, holds_journal, replay
from parverify.clock import Clock
from parverify.errors import ParverifyError, UsageError
from parverify.parallel.groups import Group
from parverify.parallel.shared import from_first, from_rank
from parverify.parallel.world import World
from parverify.progress import NullProgress, Progress
from parverify.verdict import Result, Verdict, Witness

_IN_TIME = 1.0  # seconds that are left where a run is undecided for another reason than time


@dataclass(frozen=True)
class Earlier:
    """What is left of a search that an earlier run began.

    Args:
        parts: the disjuncts of its roots.
        open: how many domains are open.
    """

    parts: tuple[int, ...]
    open: int


@dataclass(frozen=True)
class Start:
    """How a search begins.

    Args:
        key: names it within the run.
        roots: its domains without splits.
        space: what a resume needs to understand its domains.
        resumed: its open domains are in the journal.
    """

    key: str
    roots: Domains
    space: Mapping[str, Tensor] = field(default_factory=dict)
    resumed: bool = False


@dataclass(frozen=True)
class _Past:
    """What a journal held, told to all ranks."""

    generation: int = 0
    verdicts: Mapping[str, Any] = field(default_factory=dict)
    searches: Mapping[str, Earlier] = field(default_factory=dict)


class Books:
    """The journal of a run; with no folder none is kept, and nothing was said before.

    Every method is called by all ranks alike, except `close`.

    Args:
        world: the ranks.
        keep: where the journal is; None for none.
        identify: the run's identity; asked on rank 0 alone.
        progress: told what was taken up, and if a journal is turned off.

    Raises:
        UsageError: the journal is of another run, is not there, is there already, or can't be written.
    """

    def __init__(self, world: World, keep: Keep | None, identify: Callable[[], Identity], progress: Progress) -> None:
        self._world, self._keep, self._progress = world, keep, progress
        self._restored: Restored | None = None
        self._base: Journal | None = None  # group 0's, on rank 0
        self._led: dict[int, Journal] = {}  # of groups that this rank leads
        self._identity: Identity | None = None
        self._past = _Past()
        if keep is not None:
            self._past, self._identity = from_first(world.comm, lambda: self._open(keep, identify()))

    @staticmethod
    def none(world: World | None = None) -> Books:
        """No journal."""
        return Books(world or World(), None, lambda: Identity("", ""), NullProgress())

    def _open(self, keep: Keep, identity: Identity) -> tuple[_Past, Identity]:
        folder = Path(keep.folder)
        if keep.again and not holds_journal(folder):
            for _, _, path in generations(folder):  # torn before anything was in them
                path.unlink(missing_ok=True)
        elif keep.again or keep.resume:
            return self._take_up(folder, identity), identity
        self._base = self._led[0] = Journal(folder, 0, identity, log=self._progress.warn)
        return _Past(), identity

    def _take_up(self, folder: Path, identity: Identity) -> _Past:
        restored = self._restored = replay(folder, identity)
        for flaw in restored.flaws:
            self._progress.warn(f"journal: {flaw}; what was written behind it is searched again")
        self._base = self._led[0] = Journal.resume(restored, log=self._progress.warn)
        searches = {
            key: Earlier(tuple(search.roots["part"].tolist()), len(search)) for key, search in restored.searches.items()
        }
        left = sum(earlier.open for earlier in searches.values())
        self._progress.log(f"journal: {folder} is taken up, {left} subproblems are open")
        return _Past(self._base.generation, restored.verdicts, searches)

    @property
    def kept(self) -> bool:
        """Whether there is a journal."""
        return self._keep is not None

    def stats(self) -> dict[str, Any]:
        """How often the journal was taken up, and how many subproblems were open then."""
        taken = {"generation": self._past.generation, "open": sum(one.open for one in self._past.searches.values())}
        return {"journal": taken} if self.kept else {}

    # --- what was said ------------------------------------------------------------------------------------------------

    def said(self, key: str) -> Any:
        """What an earlier run concluded; None for nothing."""
        return self._past.verdicts.get(key)

    def say(self, key: str, conclusion: Mapping[str, Any]) -> None:
        """Write down what all ranks conclude.

        Raises:
            ParverifyError: they do not conclude the same.
        """
        if not self.kept:
            return
        everyone = [from_rank(self._world.comm, rank, dict(conclusion)) for rank in range(self._world.size)]
        if any(one != everyone[0] for one in everyone):
            raise ParverifyError(f"ranks disagree about {key}; nothing is concluded from it")
        if self._base is not None:
            self._base.verdict(key, conclusion)
            self._base.flush(force=True)

    def conclude(self, key: str, result: Result, clock: Clock) -> None:
        """Write down a verdict; not `timeout`, nor `unknown` for want of time."""
        if not self.kept or result.verdict in (Verdict.TIMEOUT, Verdict.ERROR):
            return
        left = from_first(self._world.comm, lambda: clock.timeout - clock.elapsed)
        if result.verdict is Verdict.UNKNOWN and left < _IN_TIME:
            return
        x = [] if result.witness is None else [float(value) for value in result.witness.x.ravel()]
        self.say(key, {"verdict": result.verdict.value, "reason": result.reason, "x": x})

    def concluded(self, key: str, confirm: Callable[[np.ndarray], Witness | None]) -> Result | None:
        """The verdict of an earlier run; a witness only if it is one still.

        Args:
            key: see `conclude`.
            confirm: replays a point on the original.
        """
        said = self.said(key)
        if said is None:
            return None
        verdict, reason = Verdict(said["verdict"]), f"{said['reason']} (by the journal)"
        if verdict is not Verdict.SAT:
            return Result(verdict, reason=reason, stats=self.stats())
        witness = confirm(np.array(said["x"]))
        if witness is None:
            self._progress.warn("journal: its witness is none here; the run starts anew from what was bounded")
            return None
        return Result(verdict, witness, reason, self.stats())

    def earlier(self, key: str) -> Earlier | None:
        """A search that an earlier run began."""
        return self._past.searches.get(key)

    def space(self, key: str) -> Mapping[str, Tensor]:
        """What was kept with an earlier search to understand its domains."""

        def find() -> Mapping[str, Tensor]:
            if self._restored is None:
                raise ParverifyError("only rank 0 has read the journal")
            return self._restored.searches[key].space

        return from_first(self._world.comm, find)

    # --- searches -----------------------------------------------------------------------------------------------------

    def join(self, group: Group) -> Journal | None:
        """This rank's journal as a member of a group; None where none is kept.

        A journal is numbered by the rank that leads its group, so that groups of other sizes go on with those of their
        leaders. The other ranks of a group get the leader's accounts as they are now.
        """
        if self._keep is None:
            return None
        number = group.number * group.comm.size
        if group.leads and number not in self._led:
            self._led[number] = self._of_group(number)
        mine = self._led[number] if group.leads else Journal(None, number)
        ledger = from_first(group.comm, lambda: mine.ledger)
        if not group.leads:
            mine.ledger = ledger
        return mine

    def _of_group(self, number: int) -> Journal:
        """Where the file can't be made, what this group gets stays open at the groups that gave it: that is no loss."""
        if self._keep is None or not number:
            raise ParverifyError("group 0 is not led by rank 0")
        try:
            return Journal(self._keep.folder, number, self._identity, generation=self._past.generation)
        except UsageError as error:
            self._progress.warn(f"group {number} keeps no journal: {error.message}")
            return Journal(None, number)

    def begin(self, journal: Journal, start: Start, group: Group) -> Iterator[Domains]:
        """The domains that a search begins with, on group 0; those of an earlier run a few at a time."""
        if group.number:
            return
        if not start.resumed:
            yield journal.start(start.key, start.roots, start.space)
            return
        waiting = journal.domains(start.key) if group.leads else iter(())
        while True:
            some = from_first(group.comm, lambda: next(waiting, None))
            if some is None:
                return
            yield some

    def close(self) -> None:
        """End writing; may be called at any time, by any rank."""
        for journal in self._led.values():
            journal.close()
        if self._base is not None:
            self._base.close()


@dataclass
class Share:
    """What one group answers for in one search.

    Args:
        journal: of the group.
        begun: volume of the domains that it began with.
    """

    journal: Journal
    begun: Fraction = Fraction(0)

    def __post_init__(self) -> None:
        self._before = self.journal.ledger.closed_volume

    def begin(self, domains: Domains) -> None:
        """Domains that the search begins with."""
        self.begun += volume(domains["depth"].tolist())

    def missing(self) -> Fraction:
        """Begun here and not closed here; negative where more came from other groups than went there.

        Raises:
            LedgerError: the accounts do not add up.
        """
        self.journal.flush(force=True)
        self.journal.audit()
        return self.begun - (self.journal.ledger.closed_volume - self._before)


def settle(missing: list[Fraction]) -> None:
    """Raise unless all groups together have closed exactly what a search began with.

    Raises:
        LedgerError: they have not; then nothing is concluded.
    """
    rest = sum(missing, Fraction(0))
    if rest:
        raise LedgerError(f"a search ended with {float(rest)} of its volume neither closed nor open")
