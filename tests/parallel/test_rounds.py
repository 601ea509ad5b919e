"""Ranks that were started again agree on a name that no earlier start knew, whatever those have left behind."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from parverify.errors import LostRankError
from parverify.parallel.place import restarts_done, restarts_left, restarts_possible
from parverify.parallel.rounds import agree_on_name


def names(store: HashStore, size: int) -> set[str]:
    """What all ranks of one start agree on."""
    with ThreadPoolExecutor(size) as pool:
        return set(pool.map(lambda rank: agree_on_name(store, rank, size, patience=20), range(size)))


def test_each_start_has_a_name_of_its_own() -> None:
    store, seen = HashStore(), set()
    for size in (3, 3, 2, 4):
        (name,) = names(store, size)
        assert name not in seen
        seen.add(name)


def test_what_a_start_that_failed_has_left_is_not_taken_for_an_answer() -> None:
    store = HashStore()
    with pytest.raises(LostRankError, match="rank 0 does not come"):
        agree_on_name(store, 1, 3, patience=0.05)
    with pytest.raises(LostRankError, match=r"ranks \[1, 2\] do not come"):
        agree_on_name(store, 0, 3, patience=0.05)
    assert len(names(store, 3)) == 1


def test_what_torchrun_says_of_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    assert (restarts_done(), restarts_left(), restarts_possible()) == (0, 0, False)
    for name, value in {"RESTART_COUNT": "1", "MAX_RESTARTS": "3"}.items():
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    assert restarts_left() == 0  # a process of its own
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert (restarts_done(), restarts_left(), restarts_possible()) == (1, 2, True)
