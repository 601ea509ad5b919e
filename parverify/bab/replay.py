"""Reading a journal: the files of any number of groups become the open domains and the closed volume of each search.

Each file's valid records go through the same accounts that wrote them (`parverify.bab.ledger`); a record that does not
fit ends the file as a damaged one does. The merge starts at the roots and follows domains from file to file; why that
is safe is argued in `parverify.bab.journal`.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parverify.bab.domains import Domains
from parverify.bab.identity import Identity
from parverify.bab.ledger import Entry, Estate, Ledger, LedgerError, volume
from parverify.bab.records import Kind, Reader, Record, RecordError, decode
from parverify.errors import ParverifyError, UsageError

_NAME = re.compile(r"(\d{6})-(\d{6})\.journal")
_HOLDERS = (Kind.START, Kind.SPLIT, Kind.RECEIVED, Kind.OPEN)  # records with data of domains


def file_name(generation: int, group: int) -> str:
    """The name of a group's file."""
    return f"{generation:06d}-{group:06d}.journal"


def generations(folder: Path) -> list[tuple[int, int, Path]]:
    """(generation, group, path) of all journal files in `folder`, in this order."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match:
            found.append((int(match[1]), int(match[2]), path))
    return sorted(found)


def holds_journal(folder: Path) -> bool:
    """Whether some file of a first group has a header that is whole."""
    heads = (next(iter(Reader(path)), None) for _, group, path in generations(folder) if group == 0)
    return any(head is not None and head.kind is Kind.HEADER for head in heads)


def pick(reader: Reader, names: Container[int]) -> Iterator[Domains]:
    """The data of the domains `names` that a file holds, each once, a record at a time."""
    seen: set[int] = set()
    for record in reader:
        if record.kind in _HOLDERS:
            rows = _domains(decode(record.payload)[1])
            ids = rows["id"].tolist()
            chosen = [place for place, name in enumerate(ids) if name in names and name not in seen]
            if chosen:
                seen.update(ids[place] for place in chosen)
                yield rows.take(torch.tensor(chosen))


def _domains(arrays: Mapping[str, Tensor]) -> Domains:
    lead = "column/"
    return Domains({name[len(lead) :]: column for name, column in arrays.items() if name.startswith(lead)})


@dataclass
class _Start:
    """A search that a file began."""

    roots: Domains
    estates: list[int]
    space: dict[str, Tensor]


@dataclass
class _Account:
    """One file, read.

    Args:
        path: of the file.
        identity, generation, group: of its header.
    """

    path: Path
    identity: Identity
    generation: int
    group: int
    ledger: Ledger
    starts: dict[str, _Start] = field(default_factory=dict)
    verdicts: dict[str, Any] = field(default_factory=dict)
    flaw: str = ""
    staged: dict[int, Entry] = field(default_factory=dict)

    def apply(self, record: Record) -> None:
        """Enter one record.

        Raises:
            LedgerError, RecordError, KeyError: it does not fit.
        """
        meta, arrays = decode(record.payload)
        if record.kind is Kind.START:
            roots = _domains(arrays)
            if meta["key"] in self.starts:
                raise LedgerError(f"a search {meta['key']} was begun twice")
            self.ledger.found(arrays["estates"], roots["id"], roots["depth"])
            space = {name[6:]: tensor for name, tensor in arrays.items() if name.startswith("space/")}
            self.starts[meta["key"]] = _Start(roots, arrays["estates"].tolist(), space)
        elif record.kind is Kind.SPLIT:
            self.ledger.split(arrays["parents"], arrays["ids"], arrays["depths"], arrays["closed"])
        elif record.kind is Kind.CLOSED:
            self.ledger.close(arrays["ids"])
        elif record.kind is Kind.SENT:
            self.ledger.send(arrays["ids"])
        elif record.kind is Kind.RECEIVED:
            domains = _domains(arrays)
            self.ledger.found(arrays["estates"], domains["id"], domains["depth"])
        elif record.kind is Kind.VERDICT:
            self.verdicts[meta["key"]] = meta["conclusion"]
        elif record.kind is Kind.OPEN:
            columns = [arrays[name].tolist() for name in ("column/id", "column/depth", "of")]
            self.staged |= {name: Entry(depth, of) for name, depth, of in zip(*columns, strict=True)}
        elif record.kind is Kind.COMMIT:
            self._commit(meta, arrays)

    def _commit(self, meta: Mapping[str, Any], arrays: Mapping[str, Tensor]) -> None:
        ledger, sent = Ledger(self.group), set(arrays["sent"].tolist())
        columns = [arrays["estates"].tolist(), arrays["depths"].tolist(), meta["closed"]]
        for name, depth, closed in zip(*columns, strict=True):
            ledger.estates[name] = Estate(depth, Fraction(closed))
        ledger.sent = {name: entry for name, entry in self.staged.items() if name in sent}
        ledger.open = {name: entry for name, entry in self.staged.items() if name not in sent}
        ledger.audit()
        self.ledger, self.staged = ledger, {}


def _read(path: Path) -> _Account | None:
    """A file's account; None where not even its header is valid."""
    reader, account = Reader(path), None
    for record in reader:
        try:
            if account is None:
                account = _header(path, record)
            else:
                account.apply(record)
        except (LedgerError, RecordError, KeyError, ValueError) as error:
            if account is not None:
                account.flaw = f"{path.name} holds a record that does not fit: {error}"
            return account
    if account is not None:
        account.flaw = reader.flaw
    return account


def _header(path: Path, record: Record) -> _Account:
    meta, _ = decode(record.payload)
    if record.kind is not Kind.HEADER:
        raise RecordError("no header")
    identity = Identity.decode(meta["identity"])
    return _Account(path, identity, int(meta["generation"]), int(meta["group"]), Ledger(int(meta["group"])))


@dataclass(frozen=True)
class RestoredSearch:
    """What is left of one search.

    Args:
        key, space: as given at its start.
        roots: its root domains.
        closed: for each root the volume that is closed, of 1.
        alive: file -> id of an open domain -> position of its root.
    """

    key: str
    space: Mapping[str, Tensor]
    roots: Domains
    closed: tuple[Fraction, ...]
    alive: Mapping[Path, Mapping[int, int]]

    def __len__(self) -> int:
        """How many domains are open."""
        return sum(len(names) for names in self.alive.values())

    def domains(self) -> Iterator[tuple[Domains, Tensor]]:
        """The open domains with the positions of their roots, read from the files a few at a time."""
        for path, names in self.alive.items():
            missing = len(names)
            for rows in pick(Reader(path), names):
                missing -= len(rows)
                yield rows, torch.tensor([names[name] for name in rows["id"].tolist()])
            if missing:
                raise ParverifyError(f"the journal {path} changed while it was read", "resume once more")


@dataclass(frozen=True)
class Restored:
    """What a journal holds.

    Args:
        folder, identity, generation: whose it is.
        searches: by key, in the order of their starts.
        verdicts: the last conclusion of each phase.
        flaws: a line for each file that was cut off or ignored.
    """

    folder: Path
    identity: Identity
    generation: int
    searches: Mapping[str, RestoredSearch]
    verdicts: Mapping[str, Any]
    flaws: tuple[str, ...]


def replay(folder: str | Path, identity: Identity | None = None) -> Restored:
    """Merge the files of all groups of the newest generation.

    Args:
        folder: of the journal.
        identity: of the run that wants to resume; None takes any.

    Raises:
        UsageError: there is no journal that can be read, or it is of another run.
    """
    place = Path(folder)
    found = generations(place)
    if not found:
        raise UsageError(f"no journal in {place}", "name the folder that was given to the run")
    flaws = []
    for generation in sorted({number for number, _, _ in found}, reverse=True):
        accounts = []
        for _, _, path in (entry for entry in found if entry[0] == generation):
            account = _read(path)
            if account is None or account.generation != generation:
                flaws.append(f"{path.name} is ignored: it has no valid header")
            else:
                accounts.append(account)
        if accounts and accounts[0].group == 0:
            base = accounts[0]
            break
    else:
        raise UsageError(f"the journal in {place} can't be read: {'; '.join(flaws)}", "start the run anew")
    if identity is not None:
        base.identity.require(identity, place)
    for other in [account for account in accounts if account.identity.differences(base.identity)]:
        flaws.append(f"{other.path.name} is ignored: it is of another run")
        accounts.remove(other)
    flaws += [account.flaw for account in accounts if account.flaw]
    verdicts = {key: value for account in accounts for key, value in account.verdicts.items()}
    return Restored(place, base.identity, generation, _merge(accounts), verdicts, tuple(flaws))


def _merge(accounts: list[_Account]) -> dict[str, RestoredSearch]:
    homes: dict[int, _Account] = {}
    for account in accounts:
        for name in account.ledger.estates:
            homes.setdefault(name, account)
    parts = {id(account): _parts(account.ledger) for account in accounts}
    searches: dict[str, RestoredSearch] = {}
    for account in accounts:
        for key, start in account.starts.items():
            if key not in searches:
                searches[key] = _search(key, start, homes, parts)
    return searches


def _parts(ledger: Ledger) -> dict[int, list[tuple[int, Entry]]]:
    """Estate -> its open and sent domains."""
    found: dict[int, list[tuple[int, Entry]]] = {name: [] for name in ledger.estates}
    for name, entry in (*ledger.open.items(), *ledger.sent.items()):
        found[entry.estate].append((name, entry))
    return found


def _search(
    key: str, start: _Start, homes: Mapping[int, _Account], parts: Mapping[int, dict[int, list[tuple[int, Entry]]]]
) -> RestoredSearch:
    """Follow each root through the files."""
    alive: dict[Path, dict[int, int]] = {}
    closed = []
    for place, root in enumerate(start.estates):
        done, depths, waiting = Fraction(0), [], [root]
        while waiting:
            name = waiting.pop()
            home = homes[name]
            done += home.ledger.estates[name].closed
            for part, entry in parts[id(home)][name]:
                other = homes.get(part)
                if other is not None and other.ledger.estates[part].depth == entry.depth:
                    waiting.append(part)
                else:
                    alive.setdefault(home.path, {})[part] = place
                    depths.append(entry.depth)
        if done + volume(depths) != 1:
            raise LedgerError(f"the journal's volumes of {key} do not add up; nothing is resumed from it")
        closed.append(done)
    return RestoredSearch(key, start.space, start.roots, tuple(closed), alive)
