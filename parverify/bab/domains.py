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
    """Open domains, worst bound first.

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
        self._heap: list[tuple[float, int, Domains | Path, int]] = []
        self._order = itertools.count()
        self._bytes = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.spilled = 0

    def __len__(self) -> int:
        return sum(entry[3] for entry in self._heap)

    @property
    def worst(self) -> float:
        """The lowest bound of all open domains; inf if there is none."""
        return self._heap[0][0] if self._heap else torch.inf

    def push(self, domains: Domains) -> None:
        """Add open domains."""
        if not len(domains):
            return
        order = torch.argsort(domains["lower"])
        domains = domains.take(order)
        for start in range(0, len(domains), self._chunk):
            part = domains.slice(start, min(start + self._chunk, len(domains)))
            self._store(part)

    def _store(self, part: Domains) -> None:
        size = part.nbytes()
        body: Domains | Path = part
        if self._bytes + size > self._memory:
            body = self._spill(part)
        else:
            self._bytes += size
        heapq.heappush(self._heap, (float(part["lower"][0]), next(self._order), body, len(part)))

    def _spill(self, part: Domains) -> Path:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="parverify-")
        path = Path(self._folder.name) / f"{next(self._order)}.pt"
        torch.save({name: column.clone() for name, column in part.columns.items()}, path)
        self.spilled += len(part)
        return path

    def pop(self, count: int) -> Domains:
        """Up to `count` of the worst domains; the pool must not be empty."""
        taken: list[Domains] = []
        have = 0
        while self._heap and have < count:
            _, _, body, size = heapq.heappop(self._heap)
            if isinstance(body, Path):
                part = Domains(torch.load(body, weights_only=True))
                body.unlink()
            else:
                part = body
                self._bytes -= part.nbytes()
            if have + size > count:
                self._store(part.slice(count - have, size))
                part = part.slice(0, count - have)
            taken.append(part)
            have += len(part)
        return join(taken, self._pad)

    def parts(self) -> Tensor:
        """The disjuncts of all open domains, each once."""
        found = []
        for _, _, body, _ in self._heap:
            part = torch.load(body, weights_only=True)["part"] if isinstance(body, Path) else body["part"]
            found.append(torch.unique(part))
        return torch.unique(torch.cat(found)) if found else torch.zeros(0, dtype=torch.long)

    def close(self) -> None:
        """Remove the temporary folder."""
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
