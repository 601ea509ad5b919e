"""Runs whose search takes some dozens of batches, for either kind of split, and how to stop them half-way."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from parverify.bab.domains import Domains
from parverify.bab.ledger import volume
from parverify.bab.replay import Restored, generations, replay
from parverify.frontend.query import Disjunct, Query

INPUTS = {"input": 3, "activation": 4}
MARGINS = {"input": 0.03, "activation": 0.4}
BYTES = {"input": 120_000, "activation": 40_000}  # of their journals
OPTIONS: dict[str, Any] = {"attack__enabled": False, "branching__batch": 8, "beta__iterations": 5}


def bent(n_in: int) -> nn.Module:
    """A network of three layers that bends a lot."""
    torch.manual_seed(3)
    sizes = [n_in, 16, 16, 16]
    layers = [layer for k in range(3) for layer in (nn.Linear(sizes[k], sizes[k + 1]), nn.ReLU())]
    module = nn.Sequential(*layers, nn.Linear(16, 2))
    with torch.no_grad():
        for parameter in module.parameters():
            scale = 1.6 / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 0.3
            parameter.copy_(torch.randn_like(parameter) * scale)
    return module.requires_grad_(False)


def hard(kind: str, *, sat: bool = False, boxes: int = 1, ease: float = 1.0) -> tuple[nn.Module, Query]:
    """A network and a property that need a search; for `sat` the unsafe region is small.

    Args:
        kind: of splits.
        sat: whether the unsafe region can be reached.
        ease: factor on how far the property is from being violated.
        boxes: into how many the input box is cut, each a disjunct of its own.
    """
    n_in = INPUTS[kind]
    module = bent(n_in)
    x = torch.rand(50_000, n_in, generator=torch.Generator().manual_seed(0)) * 2 - 1
    row = np.array([[1.0, -0.5]])
    values = module(x).double().numpy() @ row.T
    margin = float(np.ptp(values)) * (-0.001 if sat else ease * MARGINS[kind])
    right = np.array([float(np.float32(values.min() - margin))])
    parts = []
    for k in range(boxes):
        low, high = -np.ones(n_in), np.ones(n_in)
        low[0], high[0] = -1 + 2 * k / boxes, -1 + 2 * (k + 1) / boxes
        parts.append(Disjunct(low, high, row, right, np.array([False])))
    return module, Query(n_in, 2, tuple(parts))


def open_domains(restored: Restored, key: str) -> list[Domains]:
    """The open domains of a search, as they lie in the files."""
    return [rows for rows, _ in restored.searches[key].domains()]


def check_volumes(folder: Path, *, boxes: bool) -> Fraction:
    """Every root's closed and open volumes are its own; of boxes also exactly by their corners. The closed share."""
    restored, shares = replay(folder), []
    for key, search in restored.searches.items():
        rows = open_domains(restored, key)
        depths = [depth for some in rows for depth in some["depth"].tolist()]
        assert sum(search.closed, Fraction(0)) + volume(depths) == len(search.roots)
        shares.append(sum(search.closed, Fraction(0)) / len(search.roots))
        if boxes and rows:
            low, high = (torch.cat([some[name] for some in rows]) for name in ("low", "high"))
            root = _volumes(search.roots["low"], search.roots["high"])[0]
            assert [one / root for one in _volumes(low, high)] == [Fraction(1, 1 << depth) for depth in depths]
            wide = (torch.minimum(high[:, None], high) - torch.maximum(low[:, None], low)).amin(2) > 0
            assert int(wide.sum()) == len(low), "open boxes overlap"
    return min(shares, default=Fraction(0))


def _volumes(low: torch.Tensor, high: torch.Tensor) -> list[Fraction]:
    found = []
    for bottom, top in zip(low.tolist(), high.tolist(), strict=True):
        product = Fraction(1)
        for a, b in zip(bottom, top, strict=True):
            product *= Fraction(b) - Fraction(a)
        found.append(product)
    return found


def journal_bytes(folder: Path) -> int:
    """Of all files; 0 where there is none yet."""
    sizes = 0
    for _, _, path in generations(folder):
        with contextlib.suppress(FileNotFoundError):
            sizes += path.stat().st_size
    return sizes


def killed_at(size: int, folder: Path, work: Callable[[], None]) -> bool:
    """Run `work` in a process of its own, and kill it once the journal has grown by `size`; False if it came to its
    end."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    limit = journal_bytes(folder) + size
    while True:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            assert status == 0
            return False
        if journal_bytes(folder) > limit:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            return True
        time.sleep(0.002)


@contextlib.contextmanager
def die_at(size: int, folder: Path) -> Iterator[None]:
    """This process kills itself once the journal has grown by `size`."""
    import threading

    limit, over = journal_bytes(folder) + size, threading.Event()

    def watch() -> None:
        while not over.wait(0.002):
            if journal_bytes(folder) > limit:
                os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        over.set()
