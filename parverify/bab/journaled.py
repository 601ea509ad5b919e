"""A space whose splits, closed domains and leaves go through a journal; the search itself needs not know of it."""

from __future__ import annotations

from collections.abc import Sequence

from parverify.bab.domains import Domains
from parverify.bab.driver import Bounded, Space
from parverify.bab.journal import Journal
from parverify.verdict import Witness


class Journaled:
    """Another space, written down. See `parverify.bab.driver.Space`.

    The inner space keeps the columns of a parent in its children and raises `depth` by one for each halving. Domains
    come from `Journal.start`, `Journal.received` or `Journal.domains`.

    Args:
        space: does the work.
        journal: is told of it.
    """

    def __init__(self, space: Space, journal: Journal) -> None:
        self._space, self._journal = space, journal

    def split(self, domains: Domains, children: int) -> tuple[Domains, Domains]:
        """The inner space's children with ids of their own."""
        made, stuck = self._space.split(domains, children)
        return self._journal.name(made), stuck

    def bound(self, domains: Domains) -> Bounded:
        """Bounds of children; what is closed and what stays open is written down, unless there is a witness.

        Raises:
            LedgerError: the accounts do not add up.
        """
        bounded = self._space.bound(domains)
        if bounded.witness is not None:
            return bounded
        kept = self._journal.split(domains, bounded.domains)
        self._journal.flush()
        return Bounded(kept, bounded.closed)

    def leaf(self, domains: Domains) -> tuple[int, Witness | None, list[str]]:
        """Decide leaves one after the other; those that are not closed stay open in the journal."""
        closed = 0
        reasons: list[str] = []
        for place in range(len(domains)):
            leaf = domains.slice(place, place + 1)
            done, witness, why = self._space.leaf(leaf)
            if witness is not None:
                return closed, witness, reasons
            if done:
                self._journal.close_domains(leaf)
            closed += done
            reasons += why
        return closed, None, reasons

    def adopt(self, domains: Domains) -> Domains:
        """As the inner space."""
        return self._space.adopt(domains)

    def pad(self, parts: Sequence[Domains]) -> Sequence[Domains]:
        """As the inner space."""
        return self._space.pad(parts)


class Border:
    """What is done to domains that come to a group or leave it, on each of its ranks.

    Args:
        space: adopts those that come.
        journal: is told of both; None where none is kept.
    """

    def __init__(self, space: Space, journal: Journal | None) -> None:
        self._space, self._journal = space, journal

    def enter(self, domains: Domains) -> Domains:
        """Domains from another group, or that come back, as this group goes on with them."""
        domains = self._space.adopt(domains)
        return domains if self._journal is None else self._journal.received(domains)

    def leave(self, domains: Domains) -> None:
        """Domains are about to be sent."""
        if self._journal is not None:
            self._journal.sent(domains)
