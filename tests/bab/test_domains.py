"""The pool of open domains: order, splits of chunks, what is spilled comes back equal, nothing is lost."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parverify.bab.domains import Domains, Pool, join, pad_width


def domains(lower: list[float], first: int = 0) -> Domains:
    """Domains with a mark of their own and a column that depends on it."""
    part = torch.arange(first, first + len(lower))
    return Domains({"part": part, "lower": torch.tensor(lower), "x": part[:, None] * torch.tensor([1.0, 0.5])})


def drain(pool: Pool, count: int) -> Domains:
    """Everything, `count` at a time."""
    parts = []
    while len(pool):
        parts.append(pool.pop(count))
        assert 0 < len(parts[-1]) <= count
    return join(parts)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=12), min_size=1, max_size=5),
    st.integers(1, 7),
    st.sampled_from([0, 100, 1 << 20]),
    st.integers(1, 5),
)
def test_nothing_is_lost_or_changed(batches: list[list[float]], count: int, memory: int, chunk: int) -> None:
    pool = Pool(memory=memory, chunk=chunk)
    first = 0
    for lower in batches:
        pool.push(domains(lower, first))
        first += len(lower)
    assert len(pool) == first
    assert pool.worst == min(min(lower) for lower in batches)
    found = drain(pool, count)
    order = found["part"].argsort()
    whole = domains([x for lower in batches for x in lower])
    for name in whole.columns:
        assert torch.equal(found[name][order], whole[name])
        assert found[name].dtype == whole[name].dtype
    pool.close()


@pytest.mark.parametrize("memory", [0, 1 << 20])
def test_the_worst_come_first(memory: int) -> None:
    pool = Pool(memory=memory, chunk=2)
    pool.push(domains([3.0, -1.0, 2.0, -5.0, 0.0]))
    pool.push(domains([-2.0], 5))
    assert pool.pop(1)["lower"].tolist() == [-5.0]
    assert pool.worst == -2.0  # the rest of a chunk is filed anew under its own bound
    assert pool.pop(2)["lower"].tolist() == [-2.0, -1.0]
    assert len(pool) == 3
    assert (pool.spilled > 0) == (memory == 0)
    pool.close()


def test_minus_infinity_is_the_worst() -> None:
    pool = Pool(memory=1 << 20)
    pool.push(domains([1.0, -torch.inf]))
    assert pool.worst == -torch.inf
    assert pool.pop(1)["part"].tolist() == [1]


def test_an_empty_pool() -> None:
    pool = Pool(memory=1 << 20)
    pool.push(domains([]))
    assert len(pool) == 0
    assert pool.worst == torch.inf


def test_lists_of_varying_width_are_padded() -> None:
    narrow, wide = domains([1.0]).with_columns(s=torch.ones(1, 1)), domains([2.0], 1).with_columns(s=torch.ones(1, 3))
    pool = Pool(memory=0, pad=lambda parts: pad_width(parts, ["s"]))
    pool.push(narrow)
    pool.push(wide)
    both = pool.pop(2)
    assert both["s"].tolist() == [[1, 0, 0], [1, 1, 1]]
    pool.close()


def test_files_of_spilled_domains_are_removed() -> None:
    pool = Pool(memory=0)
    pool.push(domains([1.0, 2.0]))
    folder = pool._folder
    assert folder is not None
    from pathlib import Path

    assert list(Path(folder.name).iterdir())
    pool.pop(2)
    assert not list(Path(folder.name).iterdir())
    pool.close()
    assert not Path(folder.name).exists()
