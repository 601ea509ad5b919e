"""Whose turn it is: the stages around the pool of one search, each at its own pace.

Splitting and bounding brings forth leaves, which linear programs decide, and open domains, in which a witness may lie.
Neither has to follow at once: leaves wait in the pool (other ranks can take them there), and descents come when there
is time. Among splitting and deciding, the next turn goes to the stage of which the smaller share of what has arrived is
done, which makes the slower of the two as fast as it can be whatever their rates are: the largest minimum over stages
of ranks' shares times rates (FlowTrain, arXiv:2606.23087). How much is done in a turn follows from the measured rates,
so that no turn keeps messages waiting. Descents get a fixed share of the time, and what a rank would wait through.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from parverify.bab.domains import Domains, Pool
from parverify.bab.record import Record
from parverify.clock import Clock
from parverify.verdict import Witness

TURN = 0.5  # seconds that deciding leaves may take at a time
DESCENT = 0.25  # seconds of the first descent, and of all while others may send domains at any time
LONGEST = 1.0  # seconds of any descent; they become longer where the first one does not come to its end
PATIENCE = 0.5  # seconds without a domain before the wait is used
PLACES = 64  # domains in which a descent begins

Look = Callable[[Domains, float], "Witness | None"]


class Stage(enum.Enum):
    """What a rank does next."""

    SEARCH = "search"
    LEAF = "leaf"
    ATTACK = "attack"


@dataclass
class Account:
    """What a stage did.

    Args:
        done: domains.
        seconds: that it took.
    """

    done: int = 0
    seconds: float = 0.0

    def served(self, waiting: int) -> float:
        """The share that is done of what has come so far, where so many wait."""
        return self.done / (self.done + waiting)

    def fit(self, seconds: float) -> int:
        """How many can be done in so many seconds; one where none has been measured."""
        return max(1, int(seconds * self.done / self.seconds)) if self.seconds > 0 else 1


@dataclass
class Turns:
    """The stages of one search on one rank; ranks that hold the same pool decide alike.

    Args:
        clock: read alike by ranks that work together.
        look: descends towards a witness from domains, for so many seconds; None for never.
        record: is told of every turn.
        share: of the time of the others, for descents.
        accounts: what each stage did.
    """

    clock: Clock
    look: Look | None = None
    record: Record | None = None
    share: float = 0.05
    accounts: dict[Stage, Account] = field(default_factory=lambda: {stage: Account() for stage in Stage})
    _descent: float = DESCENT
    _idle_since: float | None = None

    def next(self, pool: Pool) -> Stage | None:
        """What to do with a pool; None to wait."""
        if not len(pool):
            return self._waiting()
        self._idle_since = None
        if self._attack_due():
            return Stage.ATTACK
        leaves = pool.leaves
        if not leaves or leaves == len(pool):
            return Stage.LEAF if leaves else Stage.SEARCH
        search, leaf = self.accounts[Stage.SEARCH], self.accounts[Stage.LEAF]
        return Stage.LEAF if leaf.served(leaves) < search.served(len(pool) - leaves) else Stage.SEARCH

    @contextmanager
    def spent(self, stage: Stage, count: int) -> Iterator[None]:
        """Note what is done within as a stage's work on `count` domains."""
        began = self.clock.now()
        yield
        account, seconds = self.accounts[stage], self.clock.now() - began
        account.done += count
        account.seconds += seconds
        if self.record is not None:
            self.record.spent(stage.value, count, seconds)

    def note(self, bounded: Domains, closed: int, pool: Pool, stage: Stage = Stage.SEARCH) -> None:
        """A turn is over: `bounded` were bounded in it, and so many domains closed."""
        if self.record is not None:
            self.record.turn(bounded, closed, pool, stage.value)

    def leaves(self) -> int:
        """How many leaves to decide in a turn."""
        return self.accounts[Stage.LEAF].fit(TURN)

    def attack(self, pool: Pool) -> Witness | None:
        """One descent, from the worst domains."""
        if self.look is None:
            return None
        places, began = pool.peek(PLACES), self.clock.now()
        with self.spent(Stage.ATTACK, len(places)):
            found = self.look(places, self._descent if len(pool) else DESCENT)
        self.note(places.slice(0, 0), 0, pool, Stage.ATTACK)
        if len(pool) and self.clock.now() - began > 0.8 * self._descent:  # it did not come to its end
            self._descent = min(LONGEST, 2 * self._descent)
        self._idle_since = None
        return found

    def _attack_due(self) -> bool:
        if self.look is None:
            return False
        others = self.accounts[Stage.SEARCH].seconds + self.accounts[Stage.LEAF].seconds
        return self.accounts[Stage.ATTACK].seconds + self._descent <= self.share * others

    def _waiting(self) -> Stage | None:
        now = self.clock.now()
        if self._idle_since is None:
            self._idle_since = now
        waited = now - self._idle_since
        return Stage.ATTACK if self.look is not None and waited > PATIENCE else None
