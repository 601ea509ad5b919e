"""Branch and bound on one page: take the worst domains, split, bound, drop what is closed, keep the rest.

Bounding, branching and what a leaf is are the space's business (`ActivationSpace`, `InputSpace`); only the pool touches
open domains. Whether a batch, some leaves or a descent come next is the business of `Turns`. The search ends `unsat`
when the pool is empty and nothing was set aside, `sat` when a candidate is confirmed by replay, and otherwise says why
not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from parverify.attack.batches import out_of_memory
from parverify.bab.batches import BatchSize
from parverify.bab.domains import Domains, Pool
from parverify.bab.turns import Stage, Turns
from parverify.clock import Clock
from parverify.errors import ParverifyError
from parverify.progress import Progress
from parverify.verdict import Witness


@dataclass(frozen=True)
class Bounded:
    """Domains after bounding.

    Args:
        domains: with their new bounds; only those that are still open.
        closed: how many were closed.
        witness: found among the candidates.
    """

    domains: Domains
    closed: int
    witness: Witness | None = None


class Space(Protocol):
    """A way to split: what a domain is, how its children are made, bounded, and decided at a leaf."""

    def split(self, domains: Domains, children: int) -> tuple[Domains, Domains]:
        """About `children` children of the domains, and the domains that can't be split any further."""

    def bound(self, domains: Domains) -> Bounded:
        """Bounds of new domains; closed ones are dropped."""

    def leaf(self, domains: Domains) -> tuple[int, Witness | None, list[str]]:
        """Decide domains that can't be split: how many were closed, a witness, and reasons for those left open."""

    def pad(self, parts: Sequence[Domains]) -> Sequence[Domains]:
        """Make columns of varying width equal, so that batches can be joined."""

    def adopt(self, domains: Domains) -> Domains:
        """Domains that another group of ranks, or an earlier run, has bounded, as this rank can go on with them."""


class Supply(Protocol):
    """Where open domains come from, beside the pool itself, and whether there is any left."""

    def __call__(self, pool: Pool, state: Search) -> bool:
        """False to end the search. May add domains to the pool, take some out of it, or wait for some."""


@dataclass
class Search:
    """The state and the result of a search.

    Args:
        witness: of a `sat`.
        unresolved: reasons for domains that were neither closed nor split further.
        finished: every domain was closed or set aside.
        bounded, closed, open: counts of domains.
        batches: number of batches bounded.
    """

    witness: Witness | None = None
    unresolved: list[str] = field(default_factory=list)
    finished: bool = False
    bounded: int = 0
    closed: int = 0
    open: int = 0
    batches: int = 0
    worst: float = -torch.inf
    spilled: int = 0

    def counts(self) -> dict[str, int]:
        """What adds up over parts of a search."""
        return {"bounded": self.bounded, "closed": self.closed, "batches": self.batches, "spilled": self.spilled}

    def since(self, before: Search) -> Search:
        """This state with only what was added to its figures since another one."""
        left, mine = before.counts(), self.counts()
        counts: dict[str, Any] = {key: mine[key] - left[key] for key in mine}
        return replace(self, unresolved=self.unresolved[len(before.unresolved) :], **counts)

    def after(self, before: Search) -> Search:
        """This state as the end of a search whose first stretch was another one."""
        first, mine = before.counts(), self.counts()
        counts: dict[str, Any] = {key: mine[key] + first[key] for key in mine}
        return replace(self, unresolved=[*before.unresolved, *self.unresolved], **counts)


def search(
    space: Space,
    roots: Domains,
    *,
    batch: BatchSize,
    memory: int,
    clock: Clock,
    progress: Progress,
    pause: Callable[[Search], bool] | None = None,
    pool: Pool | None = None,
    state: Search | None = None,
    supply: Supply | None = None,
    turns: Turns | None = None,
) -> tuple[Search, Pool]:
    """Run until everything is closed, a witness is found, the clock ends, or `pause` says stop.

    Args:
        space: how to split and bound.
        roots: open domains, already bounded.
        batch: size of the batches of children.
        memory: bytes of open domains kept in memory.
        clock: the deadline; running out raises `OutOfTimeError`.
        progress: told about every batch.
        pause: asked after every batch; the pool can be taken up again later.
        pool: continue with this pool instead of a new one.
        state: written after every batch, for a caller that wants the figures of a search that ran out of time too.
        supply: asked before every batch whether to go on; None to go on until the pool is empty.
        turns: says what comes next, attacks, and keeps a record; None for neither of the last two.

    Raises:
        OutOfTimeError: the clock ran out.
    """
    turns = Turns(clock) if turns is None else turns
    pool = Pool(memory=memory, pad=space.pad) if pool is None else pool  # type: ignore[arg-type]
    pool.push(roots)
    state = Search() if state is None else state
    state.finished = False  # whatever an earlier stretch was
    going: Supply = supply or _own
    started, spilled = clock.now(), pool.spilled
    while going(pool, state):
        clock.check("searching")
        stage = turns.next(pool)
        if stage is None:
            continue
        if stage is Stage.ATTACK:
            state.witness = turns.attack(pool)
        elif stage is Stage.LEAF:
            _decide(space, pool, state, turns)
        elif not _bound(space, pool, state, turns, batch):
            progress.log(f"out of memory: the batch is halved to {batch.size} domains")
            continue
        if state.witness is not None:
            break
        state.open, state.worst = len(pool), pool.worst
        state.spilled, spilled = state.spilled + pool.spilled - spilled, pool.spilled
        rate = state.bounded / max(clock.now() - started, 1e-9)
        progress.update(open=state.open, closed=state.closed, worst=state.worst, rate=rate, left=clock.left)
        if pause is not None and len(pool) and pause(state):
            return state, pool
    state.open = len(pool)
    state.finished = state.witness is None and not state.open
    return state, pool


def _bound(space: Space, pool: Pool, state: Search, turns: Turns, batch: BatchSize) -> bool:
    """Split and bound a batch; False where memory ran out, and all is as before but for smaller batches."""
    domains, began = batch.pop(pool), turns.clock.now()
    try:
        with turns.spent(Stage.SEARCH, len(domains)):
            children, stuck = space.split(domains, batch.size)
            bounded = space.bound(children) if len(children) else Bounded(children, 0)
    except (MemoryError, RuntimeError) as error:
        if batch.size <= 1 or not (isinstance(error, MemoryError) or out_of_memory(error)):
            raise
        batch.halve()
        pool.push(domains)
        return False
    state.batches += 1
    state.bounded += len(children)
    state.closed += bounded.closed
    state.witness = bounded.witness
    if state.witness is None:
        pool.push(bounded.domains)
        pool.push(stuck, leaves=True)
        seconds = turns.clock.now() - began
        batch.learn(children, seconds)
        batch.adapt(len(children), seconds)
        turns.note(children, bounded.closed, pool)
    return True


def _decide(space: Space, pool: Pool, state: Search, turns: Turns) -> None:
    """Decide some leaves."""
    leaves = pool.pop_leaves(turns.leaves())
    with turns.spent(Stage.LEAF, len(leaves)):
        closed, state.witness, reasons = space.leaf(leaves)
    state.closed += closed
    state.unresolved.extend(reasons)
    turns.note(leaves.slice(0, 0), closed, pool, Stage.LEAF)


def _own(pool: Pool, state: Search) -> bool:
    del state  # whether to go on is a matter of the pool alone
    return len(pool) > 0


def merged(parts: Sequence[Search]) -> Search:
    """What several searches found together that shared their domains among themselves."""
    counts: dict[str, Any] = {key: sum(part.counts()[key] for part in parts) for key in Search().counts()}
    witness = next((part.witness for part in parts if part.witness is not None), None)
    return Search(
        witness=witness,
        unresolved=[reason for part in parts for reason in part.unresolved],
        worst=min(part.worst for part in parts),
        open=sum(part.open for part in parts),
        finished=witness is None and all(part.finished for part in parts),
        **counts,
    )


def check_kept(gained: Sequence[int]) -> None:
    """Raise unless the domains that groups gave away have all arrived: else nothing can be concluded.

    Args:
        gained: for each group, domains received less those given away.
    """
    lost = -sum(gained)
    if lost:
        raise ParverifyError(f"{lost} domains were lost between groups of ranks")
