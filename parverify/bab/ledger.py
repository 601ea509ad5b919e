"""The accounts of a group's regions: every domain has an id, and closed and open volumes always add up to the whole.

A split halves a region some number of times, so a domain's volume is 2^-depth of its root, whatever is split (an input
or an activation). Volumes are added as fractions; sums are exact. A domain comes into the accounts as a root or from
another group, and then founds an *estate*: its region, of which this group answers for every part. Some of an estate is
closed, some open, some given to other groups, and these volumes add up to its own at any time; `audit` checks it. So no
domain is lost, or closed twice, without an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from parverify.errors import ParverifyError

GROUP_BITS = 40  # an id is the group's number and below it the group's counter
DEEPEST_STEP = 52  # halvings in one split; sums of such volumes are exact in float64


class LedgerError(ParverifyError):
    """Accounts of regions that do not add up; nothing may be concluded from them."""


@dataclass
class Estate:
    """A region that a group answers for.

    Args:
        depth: its volume is 2^-depth.
        closed: the volume of what is closed of it.
    """

    depth: int
    closed: Fraction = Fraction(0)


@dataclass(frozen=True)
class Entry:
    """A domain in the accounts: its volume is 2^-depth, and it is a part of `estate`."""

    depth: int
    estate: int


def volume(depths: Iterable[int]) -> Fraction:
    """The sum of 2^-depth."""
    return sum((Fraction(count, 1 << depth) for depth, count in Counter(depths).items()), Fraction(0))


class Ledger:
    """The accounts of one group.

    Args:
        group: its number, in the upper bits of the ids it gives.

    Attributes:
        estates: id of the domain that founded it -> estate; for a root the id is of its own.
        open: id -> entry of the domains that are open here.
        sent: the same of those that were given to other groups.
    """

    def __init__(self, group: int = 0) -> None:
        if not 0 <= group < 1 << (62 - GROUP_BITS):
            raise LedgerError(f"group {group} is out of range")
        self.group = group
        self._next = 0
        self.estates: dict[int, Estate] = {}
        self.open: dict[int, Entry] = {}
        self.sent: dict[int, Entry] = {}

    def fresh(self, count: int) -> Tensor:
        """(count,) ids that nothing had before."""
        first = (self.group << GROUP_BITS) + self._next
        self._next += count
        return torch.arange(first, first + count, dtype=torch.int64)

    # --- what happens to domains -----------------------------------------------------------------------------------

    def found(self, estates: Tensor, ids: Tensor, depths: Tensor) -> None:
        """Domains from outside: roots, or received ones; each founds an estate.

        Args:
            estates, ids, depths: (D,) each.

        Raises:
            LedgerError: an estate or a domain is there already, as where a domain is received twice.
        """
        columns = [estates.tolist(), ids.tolist(), depths.tolist()]
        for estate, name, _ in zip(*columns, strict=True):
            if estate in self.estates:
                raise LedgerError(f"domain {estate} was received twice")
            self._require_new(name)
        for estate, name, depth in zip(*columns, strict=True):
            self.estates[estate] = Estate(depth)
            self.open[name] = Entry(depth, estate)
        self._require_count(ids)

    def split(self, parents: Tensor, ids: Tensor, depths: Tensor, closed: Tensor) -> None:
        """Replace open domains by their children, of which some are closed.

        Args:
            parents, ids, depths: (D,) of the children: id of the parent, own id, own depth.
            closed: (D,) bool.

        Raises:
            LedgerError: a parent is not open, or its children's volumes do not add up to its own.
        """
        owners, slot = torch.unique(parents, return_inverse=True)
        entries = [self._require_open(name) for name in owners.tolist()]
        step = depths - torch.tensor([entry.depth for entry in entries], dtype=torch.int64)[slot]
        if len(step) and not (int(step.min()) >= 0 and int(step.max()) <= DEEPEST_STEP):
            raise LedgerError(f"a child is {int(step.min())} to {int(step.max())} halvings below its parent")
        share = torch.zeros(len(owners), dtype=torch.float64)
        share.scatter_add_(0, slot, torch.exp2(-step.to(torch.float64)))
        for name, part in zip(owners.tolist(), share.tolist(), strict=True):
            if part != 1:
                raise LedgerError(f"the children of domain {name} have {part} of its volume")
        for name in ids.tolist():
            self._require_new(name)
        self._require_count(ids)
        for name in owners.tolist():
            del self.open[name]
        gone: Counter[Entry] = Counter()
        for name, owner, depth, done in zip(ids.tolist(), slot.tolist(), depths.tolist(), closed.tolist(), strict=True):
            entry = Entry(depth, entries[owner].estate)
            if done:
                gone[entry] += 1
            else:
                self.open[name] = entry
        self._close(gone)

    def close(self, ids: Tensor) -> None:
        """Open domains (D,) are closed.

        Raises:
            LedgerError: one of them is not open.
        """
        self._close(Counter(self._leave(ids)))

    def send(self, ids: Tensor) -> None:
        """Open domains (D,) are given to another group.

        Raises:
            LedgerError: one of them is not open.
        """
        self.sent |= dict(zip(ids.tolist(), self._leave(ids), strict=True))

    def _leave(self, ids: Tensor) -> list[Entry]:
        self._require_count(ids)
        entries = [self._require_open(name) for name in ids.tolist()]
        for name in ids.tolist():
            del self.open[name]
        return entries

    def _close(self, gone: Counter[Entry]) -> None:
        for entry, count in gone.items():
            self.estates[entry.estate].closed += Fraction(count, 1 << entry.depth)

    def _require_open(self, name: int) -> Entry:
        if name not in self.open:
            raise LedgerError(f"domain {name} is not open in group {self.group}")
        return self.open[name]

    def _require_new(self, name: int) -> None:
        if name in self.open or name in self.sent:
            raise LedgerError(f"there is a domain {name} already")

    @staticmethod
    def _require_count(ids: Tensor) -> None:
        if len(torch.unique(ids)) != len(ids):
            raise LedgerError("a domain is named twice")

    # --- sums --------------------------------------------------------------------------------------------------------

    @property
    def closed_volume(self) -> Fraction:
        """Of all estates; a root's volume is 1."""
        return sum((estate.closed for estate in self.estates.values()), Fraction(0))

    @property
    def open_volume(self) -> Fraction:
        """Of all open domains."""
        return volume(entry.depth for entry in self.open.values())

    def audit(self) -> None:
        """Check that every estate's closed, open and sent volumes add up to its own.

        Raises:
            LedgerError: one does not.
        """
        counts: dict[int, Counter[int]] = {name: Counter() for name in self.estates}
        for entry in (*self.open.values(), *self.sent.values()):
            counts[entry.estate][entry.depth] += 1
        for name, estate in self.estates.items():
            rest = volume(counts[name])
            if estate.closed + rest != Fraction(1, 1 << estate.depth):
                raise LedgerError(
                    f"estate {name}: closed {estate.closed} and open {rest} are not 2^-{estate.depth}; "
                    "nothing is concluded from this search"
                )
