"""A snapshot of a journal's accounts as records: what is open or sent, and a COMMIT that makes it count.

Until the COMMIT the records say nothing, so a snapshot that is cut off is what stood before it: the starts of searches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from parverify.bab.domains import Domains
from parverify.bab.ledger import Entry, Ledger, LedgerError
from parverify.bab.records import Kind, Writer, encode

CHUNK = 256  # domains in a record


def columns(domains: Domains) -> dict[str, Tensor]:
    """The columns of domains under the names that records have for them."""
    return {f"column/{name}": column for name, column in domains.columns.items()}


def write_snapshot(writer: Writer, rows: Iterable[Domains], ledger: Ledger) -> None:
    """Write the present accounts behind what the file holds.

    Args:
        writer: of the file.
        rows: the data of all domains that are open or sent, each once.
        ledger: the accounts; complete once `rows` has been gone through.

    Raises:
        OSError: nothing more can be written.
        LedgerError: data is missing, or the accounts do not add up.
    """
    written: set[int] = set()
    for chunk in _regrouped(rows):
        names = chunk["id"].tolist()
        of = torch.tensor([_entry(ledger, name).estate for name in names], dtype=torch.int64)
        writer.append(Kind.OPEN, encode({}, columns(chunk) | {"of": of}))
        written.update(names)
    if written != {*ledger.open, *ledger.sent}:
        raise LedgerError("data of open domains is missing in the file")
    ledger.audit()
    writer.append(Kind.COMMIT, _commit(ledger))


def _entry(ledger: Ledger, name: int) -> Entry:
    entry = ledger.open.get(name) or ledger.sent.get(name)
    if entry is None:
        raise LedgerError(f"domain {name} is not in the accounts")
    return entry


def _commit(ledger: Ledger) -> bytes:
    names = list(ledger.estates)
    arrays = {
        "estates": torch.tensor(names, dtype=torch.int64),
        "depths": torch.tensor([ledger.estates[name].depth for name in names], dtype=torch.int64),
        "sent": torch.tensor(list(ledger.sent), dtype=torch.int64),
    }
    return encode({"closed": [str(ledger.estates[name].closed) for name in names]}, arrays)


def _regrouped(rows: Iterable[Domains]) -> Iterator[Domains]:
    """The same domains in chunks of up to `CHUNK`, as far as neighbours have columns of the same shapes."""
    waiting: list[Domains] = []
    count = 0
    for part in rows:
        if waiting and (_signature(part) != _signature(waiting[0]) or count + len(part) > CHUNK):
            yield _joined(waiting)
            waiting, count = [], 0
        if len(part):
            waiting.append(part)
            count += len(part)
    if waiting:
        yield _joined(waiting)


def _signature(domains: Domains) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (column.dtype, column.shape[1:]) for name, column in domains.columns.items()}


def _joined(parts: list[Domains]) -> Domains:
    return Domains({name: torch.cat([part[name] for part in parts]) for name in parts[0].columns})
