"""The journal: open and closed regions of a search on disk, a file for each group of ranks, to be taken up again.

Its idea is that **every prefix of a file is a true state of the past**. Records are facts (`records.Kind`):

  HEADER    group, generation, identity                START     a search: its space and its root domains
  SPLIT     domains are replaced by their children,    CLOSED    domains are closed
            of which some are closed                   SENT      domains are given to another group; their data stays
  RECEIVED  domains from elsewhere, under new ids      VERDICT   what a phase concluded
  OPEN, COMMIT   a snapshot, see below

After each of them the closed, open and sent parts of every estate cover it exactly (`parverify.bab.ledger`). SPLIT is
written once the children are bounded, with the data of those that stay open; until then the parent is what is open. So
wherever a file is cut off, by a kill in the middle of a write, a lost page, a full disk or a flipped byte (the chained
checksums of `parverify.bab.records` end the valid part there), what was written later is as if it had not happened: its
domains are open again as themselves or within an ancestor, and never closed.

Between files: a received domain founds an estate of its own in the receiver's file, named by the giver's id. A replay
starts at the roots and goes from file to file: a domain that is open or sent in one file and has an estate in another
is replaced by that estate, else it is open with the giver's data. So it does not matter which of the two files lost
more. An estate that nothing reached refers to is dropped: the giver lost the record that made the domain, and an
ancestor is open instead. Volumes add up to the root's in each case, and nothing is counted twice.

A compaction writes to another file: all STARTs, the domains that are open or sent (OPEN), and a COMMIT with what is
closed; then it is synced and renamed over the old file. OPEN records mean nothing before the COMMIT, so a snapshot that
is damaged later is again only its STARTs, that is, roots that are open, and its estates are open at the giver's. The
data of sent domains is kept for this reason. A resume is a compaction of all files into the base of the next
generation (group 0's file); its rename ends the older generation, whose files are removed, and ignored if they stay.

Writing that fails turns the journal off; the search goes on and its accounts too, and what is on disk is a prefix.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from parverify.bab.domains import Domains
from parverify.bab.identity import Identity
from parverify.bab.ledger import Entry, Estate, Ledger, LedgerError
from parverify.bab.records import Disk, Kind, Reader, Writer, decode, encode, require_byte_order
from parverify.bab.replay import Restored, file_name, generations, pick
from parverify.bab.snapshot import columns, write_snapshot
from parverify.errors import ParverifyError, UsageError

Log = Callable[[str], None]

SYNC_EVERY = 1.0  # seconds
SLACK = 64 << 20  # bytes that a file may grow beyond twice its last snapshot before it is compacted


class Journal:
    """The accounts of one group's domains, and their file.

    Domains that pass through it have the columns `id` and `depth`; a space raises `depth` by one for each halving and
    keeps the other columns of a parent in its children. All ranks of a group may keep the accounts; one has the file.

    Args:
        folder: where the files are; None keeps the accounts only.
        group: this group's number. Group 0 must make its file before the others.
        identity: what is verified; required with a folder.
        generation: that of group 0 after a resume.
        log: told, in one line, when the journal turns itself off; the module's logger if None.
        disk: does what is done to files.

    Raises:
        UsageError: the folder holds a journal already, or can't be written.
    """

    def __init__(
        self,
        folder: str | Path | None,
        group: int = 0,
        identity: Identity | None = None,
        *,
        generation: int = 0,
        log: Log | None = None,
        disk: Disk | None = None,
    ) -> None:
        self.ledger = Ledger(group)
        self.generation = generation
        self._log, self._disk = log or logging.getLogger(__name__).warning, disk or Disk()
        self._writer: Writer | None = None
        self._lock: BinaryIO | None = None
        self._folder = None if folder is None else Path(folder)
        self._identity = identity
        self._slack, self._limit = SLACK, SLACK
        self._synced = time.monotonic()
        if self._folder is not None:
            self._create()

    def _create(self) -> None:
        folder = self._folder_of_file()
        require_byte_order()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._take()
            if self.ledger.group == 0 and self.generation == 0:
                if any(group == 0 for _, group, _ in generations(folder)):
                    raise UsageError(f"{folder} holds a journal already", "resume from it, or name a new folder")
                _remove(path for _, _, path in generations(folder))
            self._writer = Writer(self._path, self._disk)
            self._writer.append(Kind.HEADER, self._header())
            self._writer.sync()
            self._disk.sync_folder(folder)
        except UsageError:
            self.close(sync=False)
            raise
        except OSError as error:
            self.close(sync=False)
            raise UsageError(
                f"can't write a journal in {folder}: {error.strerror or error}", "name a folder where you may write"
            ) from error

    def _take(self) -> None:
        """Let no other run write here; group 0 does it for all."""
        folder = self._folder_of_file()
        if self.ledger.group == 0:
            try:
                self._lock = self._disk.lock(folder / "lock")
            except BlockingIOError as error:
                raise UsageError(f"another run writes the journal in {folder}", "wait for its end") from error

    def _folder_of_file(self) -> Path:
        if self._folder is None or self._identity is None:
            raise UsageError("a journal needs a folder and an identity")
        return self._folder

    @property
    def _path(self) -> Path:
        return self._folder_of_file() / file_name(self.generation, self.ledger.group)

    def _header(self) -> bytes:
        identity = {} if self._identity is None else self._identity.encode()
        return encode({"group": self.ledger.group, "generation": self.generation, "identity": identity})

    @property
    def writes(self) -> bool:
        """Whether what happens is written down."""
        return self._writer is not None

    # --- what the search does ----------------------------------------------------------------------------------------

    def start(self, key: str, roots: Domains, space: Mapping[str, Tensor] | None = None) -> Domains:
        """A search begins.

        Args:
            key: names it, so that a resume knows what its domains are (kind of splits, box, dtype).
            roots: D domains of volume 1 each.
            space: tensors that a resume needs to understand the domains, for example the layers' bounds.

        Returns:
            The roots with `id` and `depth`.
        """
        estates = self.ledger.fresh(len(roots))
        roots = self._named(roots).with_columns(depth=torch.zeros(len(roots), dtype=torch.int64))
        self.ledger.found(estates, roots["id"], roots["depth"])
        spaces = {f"space/{name}": tensor for name, tensor in (space or {}).items()}
        self._write(Kind.START, {"key": key}, columns(roots) | {"estates": estates} | spaces)
        return roots

    def name(self, children: Domains) -> Domains:
        """Children as the space made them, with ids of their own; the parent's, which they had, becomes `parent`."""
        return self._named(children).with_columns(parent=children["id"])

    def _named(self, domains: Domains) -> Domains:
        return domains.with_columns(id=self.ledger.fresh(len(domains)))

    def split(self, children: Domains, kept: Domains) -> Domains:
        """All children of some open domains are bounded; those that are not in `kept` are closed.

        Args:
            children: from `name`.
            kept: those of them that stay open, with new bounds.

        Returns:
            `kept` without `parent`.

        Raises:
            LedgerError: the accounts do not add up.
        """
        closed = ~torch.isin(children["id"], kept["id"])
        if int(closed.sum()) + len(kept) != len(children):
            raise LedgerError("a domain stays open that is no child, or twice")
        parents, ids, depths = children["parent"], children["id"], children["depth"]
        self.ledger.split(parents, ids, depths, closed)
        kept = Domains({name: column for name, column in kept.columns.items() if name != "parent"})
        table = {"parents": parents, "ids": ids, "depths": depths, "closed": closed}
        self._write(Kind.SPLIT, {}, columns(kept) | table)
        return kept

    def close_domains(self, domains: Domains | Tensor) -> None:
        """Open domains, or ids (D,), are closed without a split.

        Raises:
            LedgerError: one of them is not open.
        """
        ids = domains if isinstance(domains, Tensor) else domains["id"]
        self.ledger.close(ids)
        self._write(Kind.CLOSED, {}, {"ids": ids})

    def sent(self, domains: Domains) -> None:
        """Open domains are given to another group; call it before they leave.

        Raises:
            LedgerError: one of them is not open.
        """
        self.ledger.send(domains["id"])
        self._write(Kind.SENT, {}, {"ids": domains["id"]})

    def received(self, domains: Domains) -> Domains:
        """Domains arrived, or could not be delivered and are taken back.

        Returns:
            Them with ids of this group.

        Raises:
            LedgerError: one of them was received before.
        """
        estates = domains["id"]
        domains = self._named(domains)
        self.ledger.found(estates, domains["id"], domains["depth"])
        self._write(Kind.RECEIVED, {}, columns(domains) | {"estates": estates})
        return domains

    def verdict(self, key: str, conclusion: Mapping[str, Any]) -> None:
        """A phase has concluded something (what JSON can hold); a later verdict of the same key replaces it."""
        self._write(Kind.VERDICT, {"key": key, "conclusion": dict(conclusion)}, {})

    def audit(self) -> None:
        """Check that closed, open and sent volumes add up.

        Raises:
            LedgerError: they do not.
        """
        self.ledger.audit()

    # --- the file ----------------------------------------------------------------------------------------------------

    def _write(self, kind: Kind, meta: Mapping[str, Any], arrays: Mapping[str, Tensor]) -> None:
        if self._writer is None:
            return
        try:
            self._writer.append(kind, encode(meta, arrays))
        except OSError as error:
            self._turn_off(error)

    def _turn_off(self, error: OSError) -> None:
        where = self._path
        self.close(sync=False)
        self._log(f"the journal {where} is turned off: {error.strerror or error}; what it holds can be resumed")

    def flush(self, *, force: bool = False) -> None:
        """The end of a batch: sync to the disk, at most once a second unless `force`; compact where it is worth it."""
        if self._writer is None or not (force or time.monotonic() - self._synced >= SYNC_EVERY):
            return
        try:
            self._writer.sync()
        except OSError as error:
            self._turn_off(error)
            return
        if self._writer.size > self._limit:
            self.compact()
        self._synced = time.monotonic()

    def close(self, *, sync: bool = True) -> None:
        """End writing; the accounts stay."""
        if sync:
            self.flush(force=True)
        writer, self._writer = self._writer, None
        lock, self._lock = self._lock, None
        for held in (writer, lock):
            if held is not None:
                with contextlib.suppress(OSError):
                    held.close()

    def compact(self) -> None:
        """Replace the file by a snapshot; where that fails, the file stays and grows on."""
        if self._writer is None:
            return
        alive = {*self.ledger.open, *self.ledger.sent}
        copied = (Kind.START, Kind.VERDICT)
        heads = ((record.kind, bytes(record.payload)) for record in Reader(self._path) if record.kind in copied)
        try:
            writer = self._snapshot(heads, pick(Reader(self._path), alive))
        except (OSError, LedgerError) as error:
            self._log(f"the journal {self._path} is not compacted: {error}")
            self._limit = 2 * self._writer.size + self._slack
            return
        old, self._writer = self._writer, writer
        with contextlib.suppress(OSError):
            old.close()
        self._limit = 2 * writer.size + self._slack

    def _snapshot(self, heads: Iterable[tuple[Kind, bytes]], rows: Iterable[Domains]) -> Writer:
        """Write a file with the present accounts, and give it the journal's name."""
        scratch = self._path.with_suffix(".tmp")
        _remove([scratch])
        writer = Writer(scratch, self._disk)
        try:
            writer.append(Kind.HEADER, self._header())
            for kind, payload in heads:
                writer.append(kind, payload)
            write_snapshot(writer, rows, self.ledger)
            writer.sync()
            self._disk.replace(scratch, self._path)
        except (OSError, LedgerError):
            with contextlib.suppress(OSError):
                writer.close()
            _remove([scratch])
            raise
        with contextlib.suppress(OSError):  # at worst the old file comes back after a power cut: an older state
            self._disk.sync_folder(self._path.parent)
        return writer

    # --- taking up again ---------------------------------------------------------------------------------------------

    @classmethod
    def resume(
        cls,
        restored: Restored,
        *,
        log: Log | None = None,
        disk: Disk | None = None,
    ) -> Journal:
        """Group 0's journal of the next generation, which holds everything that was restored.

        The other groups start with empty files of the same `generation` and are sent domains. The domains themselves
        come from `domains`.

        Raises:
            UsageError: nothing can be written; the old files are as they were.
        """
        self = cls(None, 0, log=log, disk=disk)
        self.generation = 1 + max(number for number, _, _ in generations(restored.folder))
        self._folder, self._identity = restored.folder, restored.identity
        try:
            self._take()
            self._take_up(restored)
        except ParverifyError:
            self.close(sync=False)
            raise
        except OSError as error:
            self.close(sync=False)
            raise UsageError(
                f"can't write the journal {self._path}: {error.strerror or error}", "make room, or resume from a copy"
            ) from error
        _remove(path for number, _, path in generations(restored.folder) if number < self.generation)
        return self

    def _take_up(self, restored: Restored) -> None:
        """Write what was restored as this journal's first snapshot."""
        heads: list[tuple[Kind, bytes]] = []
        for key, conclusion in restored.verdicts.items():
            heads.append((Kind.VERDICT, encode({"key": key, "conclusion": conclusion})))
        owner: dict[str, Tensor] = {}
        for key, search in restored.searches.items():
            roots = self._named(search.roots)
            estates = owner[key] = self.ledger.fresh(len(roots))
            for name, closed in zip(estates.tolist(), search.closed, strict=True):
                self.ledger.estates[name] = Estate(0, closed)
            spaces = {f"space/{name}": tensor for name, tensor in search.space.items()}
            heads.append((Kind.START, encode({"key": key}, columns(roots) | {"estates": estates} | spaces)))
        self._writer = self._snapshot(heads, self._adopted(restored, owner))

    def _adopted(self, restored: Restored, owner: Mapping[str, Tensor]) -> Iterator[Domains]:
        """Open domains of the old files, entered into the accounts under new ids as they pass by."""
        for key, search in restored.searches.items():
            for rows, root in search.domains():
                rows = self._named(rows)
                estates = owner[key][root]
                columns = [column.tolist() for column in (rows["id"], rows["depth"], estates)]
                for name, depth, estate in zip(*columns, strict=True):
                    self.ledger.open[name] = Entry(depth, estate)
                yield rows

    def domains(self, key: str) -> Iterator[Domains]:
        """What is open of a search that was taken up again, read from the file a few at a time, before it goes on."""
        estates: set[int] = set()
        for record in Reader(self._path):
            if record.kind is Kind.START:
                meta, arrays = decode(record.payload)
                estates.update(arrays["estates"].tolist() if meta["key"] == key else ())
        yield from pick(Reader(self._path), {name for name, at in self.ledger.open.items() if at.estate in estates})


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink()
