"""Groups of ranks: how a search ends where domains are exchanged, and what several searches come to together."""

from __future__ import annotations

from typing import Any

import torch

from parverify.bab.crew import _Sharing
from parverify.bab.domains import Domains, Pool
from parverify.bab.driver import Search, merged
from parverify.bab.record import Record
from parverify.clock import Clock
from parverify.parallel.comm import Alone
from parverify.parallel.exchange import Counters, Event, Status
from parverify.verdict import Witness


def domains(count: int) -> Domains:
    return Domains({"part": torch.zeros(count, dtype=torch.long), "lower": torch.zeros(count)})


class Ending:
    """An exchange that is over, and gives back at its end what was under way."""

    def __init__(self, back: int) -> None:
        self._back, self.counters = domains(back), Counters()
        self.stopped: list[Any] = []

    def stop(self, why: Any) -> None:
        self.stopped.append(why)

    def close(self, pool: Pool) -> Event:
        pool.push(self._back)
        return Event(Status.PAUSED, (self._back,) if len(self._back) else ())


def finished(back: int) -> tuple[Search, _Sharing]:
    """A search whose pool was empty, after its exchange gave `back` domains back."""
    pool, state = Pool(memory=1 << 20), Search(finished=True)
    sharing = _Sharing(Ending(back), Alone(), Record(Clock()))  # type: ignore[arg-type]
    sharing.finish(pool, state)
    return state, sharing


def test_a_search_is_not_finished_while_domains_come_back_at_its_end() -> None:
    state, sharing = finished(3)
    assert (state.finished, state.open, sharing.gained) == (False, 3, 3)
    state, sharing = finished(0)
    assert (state.finished, state.open, sharing.gained) == (True, 0, 0)


def test_together_searches_are_finished_only_if_each_is() -> None:
    done, left = Search(finished=True, closed=2, bounded=3), Search(finished=False, open=1, bounded=1)
    assert merged([done, done]).finished
    together = merged([done, left])
    assert not together.finished
    assert (together.bounded, together.closed, together.open) == (4, 2, 1)


def test_a_witness_of_any_search_is_that_of_all_and_nothing_is_finished() -> None:
    witness = Witness(torch.zeros(1).numpy(), torch.zeros(1).numpy())
    together = merged([Search(finished=True), Search(witness=witness)])
    assert together.witness is witness
    assert not together.finished


def test_reasons_of_what_was_set_aside_are_kept() -> None:
    assert merged([Search(finished=True), Search(finished=True, unresolved=["a leaf"])]).unresolved == ["a leaf"]
