"""Ranks that torchrun has started again: they meet under keys that no earlier start has used.

The agent's store outlives the ranks, and what ranks that are gone have left in it (addresses above all) would be taken
for that of the new ones. How often ranks were started is counted by machine, so it names no common prefix. Here rank 0
draws a name, and tells it to each rank that shows a number it has just drawn itself; what is left over from earlier
starts gets an answer that nobody reads.
"""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING

from parverify.errors import LostRankError

if TYPE_CHECKING:
    from torch.distributed import Store

_POLL = 0.01
_PATIENCE = 600.0  # seconds that ranks may differ in when they are started


def fresh_store(rank: int, size: int) -> Store:
    """The store that torchrun names, under a prefix that is new.

    Raises:
        LostRankError: the other ranks don't come.
    """
    from datetime import timedelta

    from torch.distributed import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(rendezvous("env://", rank, size, timeout=timedelta(seconds=_PATIENCE)))
    return PrefixStore(agree_on_name(store, rank, size), store)


def agree_on_name(store: Store, rank: int, size: int, *, patience: float = _PATIENCE) -> str:
    """A name that the present ranks share and no earlier ones knew; all of them call this.

    Raises:
        LostRankError: the other ranks don't come.
    """
    until = time.monotonic() + patience
    return _tell(store, size, until) if rank == 0 else _ask(store, rank, until)


def _tell(store: Store, size: int, until: float) -> str:
    name, waiting = f"round/{uuid.uuid4()}", set(range(1, size))
    while waiting:
        for rank in tuple(waiting):
            if store.check([f"hello/{rank}"]):
                store.set(f"reply/{store.get(f'hello/{rank}').decode()}", name)
            if store.check([f"{name}/heard/{rank}"]):
                waiting.remove(rank)
        _wait(until, f"ranks {sorted(waiting)} do not come")
    return name


def _ask(store: Store, rank: int, until: float) -> str:
    mine = str(uuid.uuid4())
    store.set(f"hello/{rank}", mine)
    while not store.check([f"reply/{mine}"]):
        _wait(until, "rank 0 does not come")
    name = store.get(f"reply/{mine}").decode()
    store.set(f"{name}/heard/{rank}", "yes")
    return str(name)


def _wait(until: float, problem: str) -> None:
    if time.monotonic() > until:
        raise LostRankError(problem)
    time.sleep(_POLL)
