"""The search loop with a space of integers: nothing is lost when memory ends, nothing concluded from a failure."""

from __future__ import annotations

import pytest
import torch

from parverify.bab.batches import BatchSize
from parverify.bab.domains import Domains
from parverify.bab.driver import Bounded, Search, search
from parverify.clock import Clock
from parverify.errors import OutOfTimeError
from parverify.progress import NullProgress


class Numbers:
    """A domain is an interval [start, start + size) of integers; one of size 1 is closed unless it is `kept`.

    Args:
        kept: numbers that are never closed.
        most: domains bounded at once before memory ends.
        error: what is raised then.
    """

    def __init__(self, kept: frozenset[int] = frozenset(), most: int = 1000, error: Exception | None = None) -> None:
        self.kept, self.most, self.error = kept, most, error
        self.closed: list[int] = []
        self.sizes: list[int] = []

    def split(self, domains: Domains, children: int) -> tuple[Domains, Domains]:
        stuck = domains["size"] == 1
        rest, domains = domains.take(stuck), domains.take(~stuck)
        half = domains["size"] // 2
        left = domains.with_columns(size=half)
        right = domains.with_columns(start=domains["start"] + half, size=domains["size"] - half)
        return Domains({name: torch.cat([left[name], right[name]]) for name in domains.columns}), rest

    def bound(self, domains: Domains) -> Bounded:
        self.sizes.append(len(domains))
        if len(domains) > self.most:
            raise self.error or MemoryError
        single = domains["size"] == 1
        keep = torch.tensor([int(start) in self.kept for start in domains["start"]], dtype=torch.bool)
        closed = single & ~keep
        self.closed += domains["start"][closed].tolist()
        return Bounded(domains.take(~closed), int(closed.sum()))

    def leaf(self, domains: Domains) -> tuple[int, None, list[str]]:
        return 0, None, [f"{int(start)} is kept" for start in domains["start"]]

    def pad(self, parts: list[Domains]) -> list[Domains]:
        return parts


def whole(size: int) -> Domains:
    return Domains(
        {
            "part": torch.zeros(1, dtype=torch.long),
            "lower": torch.zeros(1),
            "start": torch.zeros(1, dtype=torch.long),
            "size": torch.tensor([size]),
        }
    )


def run(space: Numbers, batch: BatchSize, size: int = 37, clock: Clock | None = None, memory: int = 1 << 20) -> Search:
    state, pool = search(
        space, whole(size), batch=batch, memory=memory, clock=clock or Clock(), progress=NullProgress()
    )
    pool.close()
    return state


@pytest.mark.parametrize("memory", [0, 1 << 20])
@pytest.mark.parametrize("size", [1, 2, 3, 64])
def test_everything_is_closed_once(size: int, memory: int) -> None:
    space = Numbers()
    state = run(space, BatchSize(size, 64, fixed=True), memory=memory)
    assert sorted(space.closed) == list(range(37))
    assert state.closed == 37
    assert state.finished
    assert not state.unresolved
    assert state.open == 0


def test_what_stays_open_is_named() -> None:
    state = run(Numbers(kept=frozenset([5, 9])), BatchSize(4, 64))
    assert state.finished
    assert sorted(state.unresolved or []) == ["5 is kept", "9 is kept"]
    assert state.closed == 35


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.cuda.OutOfMemoryError("x"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
)
def test_out_of_memory_halves_the_batch_and_loses_nothing(error: Exception) -> None:
    space = Numbers(most=5, error=error)
    batch = BatchSize(32, 64, fixed=True)
    state = run(space, batch)
    assert sorted(space.closed) == list(range(37))
    assert state.finished
    assert batch.size <= 5
    assert max(space.sizes) > 5  # it did run out


def test_out_of_memory_with_a_single_domain_is_raised() -> None:
    with pytest.raises(MemoryError):
        run(Numbers(most=0), BatchSize(8, 64))


@pytest.mark.parametrize("error", [RuntimeError("a defect"), ValueError("a defect"), KeyError("a defect")])
def test_other_errors_are_raised(error: Exception) -> None:
    space = Numbers(most=3, error=error)
    with pytest.raises(type(error), match="a defect"):
        run(space, BatchSize(32, 64))


def test_the_clock_is_an_error_not_an_end() -> None:
    with pytest.raises(OutOfTimeError):
        run(Numbers(), BatchSize(4, 64), clock=Clock(timeout=0.0))


def test_a_pause_can_be_taken_up_again() -> None:
    space = Numbers()
    batch = BatchSize(4, 64, fixed=True)
    state, pool = search(
        space,
        whole(37),
        batch=batch,
        memory=1 << 20,
        clock=Clock(),
        progress=NullProgress(),
        pause=lambda state: state.batches == 3,
    )
    assert not state.finished
    assert len(pool) == state.open > 0
    again, pool = search(
        space, whole(37).slice(0, 0), batch=batch, memory=1 << 20, clock=Clock(), progress=NullProgress(), pool=pool
    )
    assert again.finished
    assert sorted(space.closed) == list(range(37))


def test_an_empty_pool_is_finished_not_paused() -> None:
    state, _ = search(
        Numbers(),
        whole(2),
        batch=BatchSize(4, 64),
        memory=1 << 20,
        clock=Clock(),
        progress=NullProgress(),
        pause=lambda state: True,
    )
    assert state.finished


def test_batch_sizes() -> None:
    batch = BatchSize(16, 40)
    batch.adapt(16, 0.1)
    assert batch.size == 32
    batch.adapt(32, 0.1)
    assert batch.size == 40  # what the memory allows
    batch.adapt(4, 0.1)
    assert batch.size == 40  # a short batch of few children says nothing
    batch.adapt(40, 5.0)
    assert batch.size == 20
    batch.halve()
    assert batch.size == 10
    batch.adapt(10, 0.1)
    assert batch.size == 10  # memory ran out above
    for _ in range(10):
        batch.halve()
    assert batch.size == 1
    fixed = BatchSize(7, 40, fixed=True)
    fixed.adapt(7, 0.0)
    fixed.adapt(7, 9.0)
    assert fixed.size == 7
    assert BatchSize(100, 8).size == 8
    assert BatchSize(0, 8).size == 1
