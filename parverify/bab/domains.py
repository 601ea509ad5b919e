"""Open subproblems as a struct of arrays, and the pool that owns them.

A batch of domains is a mapping from column name to a host tensor whose first dimension is the domain; there is no
Python object per domain. Only the pool touches open domains. It keeps batches in a heap ordered by their worst bound
and moves the least urgent ones to a temporary file when they outgrow the memory budget.
"""

from __future__ import annotations

import heapq
import itertools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

_Entry = tuple[float, int, "Domains | Path", int]  # lowest bound, order, body, number of domains

Price = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Domains:
    """D domains.

    Args:
        columns: name -> (D, ...) tensor. `part` (the disjunct) and `lower` (the best bound so far) are always present.
    """

    columns: Mapping[str, Tensor]

    def __len__(self) -> int:
        return len(self.columns["part"])

    def __getitem__(self, name: str) -> Tensor:
        return self.columns[name]

    @property
    def cost(self) -> Tensor:
        """(D,) how much there is to do for each domain's children; all alike where they have no such column."""
        cost = self.columns.get("cost")
        return torch.zeros(len(self)) if cost is None else cost

    def take(self, index: Tensor) -> Domains:
        """The domains `index` (positions or a bool mask)."""
        if index.dtype == torch.bool:
            index = torch.nonzero(index).flatten()
        return Domains({name: column.index_select(0, index) for name, column in self.columns.items()})

    def slice(self, start: int, stop: int) -> Domains:
        """The domains start..stop without copying."""
        return Domains({name: column[start:stop] for name, column in self.columns.items()})

    def with_columns(self, **columns: Tensor) -> Domains:
        """The same domains with some columns replaced or added."""
        return Domains({**self.columns, **columns})

    def nbytes(self) -> int:
        """Bytes of all columns."""
        return sum(column.numel() * column.element_size() for column in self.columns.values())


def join(parts: Sequence[Domains], pad: Callable[[Sequence[Domains]], Sequence[Domains]] | None = None) -> Domains:
    """All domains of `parts` behind each other; `pad` first makes columns of varying width equal."""
    if len(parts) == 1:
        return parts[0]
    if pad is not None:
        parts = pad(parts)
    return Domains({name: torch.cat([part[name] for part in parts]) for name in parts[0].columns})


def pad_width(parts: Sequence[Domains], names: Sequence[str]) -> Sequence[Domains]:
    """Zero-pad the last dimension of the named columns to the widest among `parts`."""
    out = []
    for part in parts:
        changed = {}
        for name in names:
            width = max(other[name].shape[-1] for other in parts)
            missing = width - part[name].shape[-1]
            if missing:
                changed[name] = torch.nn.functional.pad(part[name], (0, missing))
        out.append(part.with_columns(**changed) if changed else part)
    return out


class Pool:
    """Open domains, worst bound first, and behind them leaves that wait to be decided.

    Args:
        memory: bytes that may stay in memory; batches beyond it go to a temporary folder.
        pad: see `join`.
        chunk: most domains kept together.
    """

    def __init__(
        self, *, memory: int, pad: Callable[[Sequence[Domains]], Sequence[Domains]] | None = None, chunk: int = 256
    ) -> None:
        self._memory = memory
        self._pad = pad
        self._chunk = chunk
        self._heap: list[_Entry] = []
        self._leaves: list[_Entry] = []
        self._order = itertools.count()
        self._bytes = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.spilled = 0

    def __len__(self) -> int:
        return _total(self._heap) + self.leaves

    @property
    def leaves(self) -> int:
        """How many of the domains are leaves."""
        return _total(self._leaves)

    @property
    def worst(self) -> float:
        """The lowest bound of all open domains; inf if there is none."""
        return min((heap[0][0] for heap in (self._heap, self._leaves) if heap), default=torch.inf)

    def push(self, domains: Domains, *, leaves: bool = False) -> None:
        """Add open domains, or such as can't be split any further."""
        if not len(domains):
            return
        order = torch.argsort(domains["lower"])
        domains = domains.take(order)
        for start in range(0, len(domains), self._chunk):
            part = domains.slice(start, min(start + self._chunk, len(domains)))
            self._store(part, self._leaves if leaves else self._heap)

    def _store(self, part: Domains, heap: list[_Entry]) -> None:
        size = part.nbytes()
        body: Domains | Path = part
        if self._bytes + size > self._memory:
            body = self._spill(part)
        else:
            self._bytes += size
        heapq.heappush(heap, (float(part["lower"][0]), next(self._order), body, len(part)))

    def _spill(self, part: Domains) -> Path:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="parverify-")
        path = Path(self._folder.name) / f"{next(self._order)}.pt"
        torch.save({name: column.clone() for name, column in part.columns.items()}, path)
        self.spilled += len(part)
        return path

    def pop(self, count: int) -> Domains:
        """Up to `count` of the worst domains, leaves only where there are no others; the pool must not be empty."""
        taken = self._take(self._heap, count)
        taken += self._take(self._leaves, count - sum(len(part) for part in taken))
        return join(taken, self._pad)

    def pop_batch(self, count: int, price: Price | None = None, load: float = torch.inf) -> Domains:
        """The worst domains that can be split, as many as take at most `load` together (but one at least).

        Args:
            count: the most.
            price: costs (D,) -> what each takes; None for no limit but `count`.
            load: in the unit of `price`.
        """
        domains = join(self._take(self._heap, count), self._pad)
        keep = len(domains) if price is None else max(1, int((price(domains.cost).cumsum(0) <= load).sum()))
        if keep < len(domains):
            self.push(domains.slice(keep, len(domains)))
        return domains.slice(0, keep)

    def pop_leaves(self, count: int) -> Domains:
        """Up to `count` leaves; there must be some."""
        return join(self._take(self._leaves, count), self._pad)

    def peek(self, count: int) -> Domains:
        """Up to `count` of the worst domains without taking them out; none where they are not in memory."""
        for heap in (self._heap, self._leaves):
            if heap and isinstance(heap[0][2], Domains):
                return heap[0][2].slice(0, min(count, heap[0][3]))
        return Domains({"part": torch.zeros(0, dtype=torch.long)})

    def _take(self, heap: list[_Entry], count: int) -> list[Domains]:
        taken: list[Domains] = []
        have = 0
        while heap and have < count:
            _, _, body, size = heapq.heappop(heap)
            if isinstance(body, Path):
                part = Domains(torch.load(body, weights_only=True))
                body.unlink()
            else:
                part = body
                self._bytes -= part.nbytes()
            if have + size > count:
                self._store(part.slice(count - have, size), heap)
                part = part.slice(0, count - have)
            taken.append(part)
            have += len(part)
        return taken

    def parts(self) -> Tensor:
        """The disjuncts of all open domains, each once."""
        found = []
        for _, _, body, _ in (*self._heap, *self._leaves):
            part = torch.load(body, weights_only=True)["part"] if isinstance(body, Path) else body["part"]
            found.append(torch.unique(part))
        return torch.unique(torch.cat(found)) if found else torch.zeros(0, dtype=torch.long)

    def close(self) -> None:
        """Remove the temporary folder."""
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _total(heap: list[_Entry]) -> int:
    return sum(entry[3] for entry in heap)
