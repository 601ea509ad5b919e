"""Whole runs with a journal: killed anywhere, cut off, on a full disk or resumed once more, they give their verdict."""

from __future__ import annotations

import errno
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import parverify
from parverify.bab.books import Books, Share, settle
from parverify.bab.identity import Identity, Keep
from parverify.bab.journal import Journal
from parverify.bab.ledger import LedgerError
from parverify.bab.records import Disk
from parverify.bab.replay import file_name, generations, replay
from parverify.errors import ParverifyError, UsageError
from parverify.progress import NullProgress
from parverify.verdict import Result
from parverify.verifier import Verifier
from tests.bab.searches import BYTES, OPTIONS, check_volumes, hard, killed_at

KINDS = ("input", "activation")


class Lines(NullProgress):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def log(self, message: str) -> None:
        """Keep it."""
        self.lines.append(message)

    warn = log


def verify(kind: str, *, sat: bool = False, boxes: int = 1, **options: Any) -> Result:
    module, query = hard(kind, sat=sat, boxes=boxes)
    return parverify.verify(module, query, **{"branching__kind": kind, **OPTIONS, **options})


@pytest.fixture(scope="module", params=KINDS)
def plain(request: pytest.FixtureRequest) -> tuple[str, Result]:
    """A kind of splits, and a run without a journal."""
    return request.param, verify(request.param)


def test_a_journal_changes_nothing_and_a_finished_run_is_not_run_again(
    plain: tuple[str, Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, without = plain
    kept = verify(kind, journal=tmp_path)
    assert (kept.verdict.value, without.verdict.value) == ("unsat", "unsat")
    assert kept.stats["bounded"] == without.stats["bounded"] > 100
    assert check_volumes(tmp_path, boxes=kind == "input") == 1
    monkeypatch.setattr(Verifier, "_phases", None)
    monkeypatch.setattr(Verifier, "_search", None)
    again = verify(kind, resume=tmp_path)
    assert again.verdict.value == "unsat" and "by the journal" in again.reason


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_that_is_killed_again_and_again(plain: tuple[str, Result], tmp_path: Path, seed: int) -> None:
    """Nothing is lost: what is closed stays closed, and volumes add up after each kill."""
    kind, _ = plain
    chance, kills, share = random.Random(seed), 0, -1.0
    while killed_at(
        chance.randrange(1, BYTES[kind] // 3), tmp_path, lambda: verify(kind, journal=Keep(str(tmp_path), again=True))
    ):
        kills += 1
        closed = check_volumes(tmp_path, boxes=kind == "input")
        assert closed >= share
        share = closed
    assert kills
    result = verify(kind, resume=tmp_path)
    assert result.verdict.value == "unsat" and "by the journal" in result.reason
    assert check_volumes(tmp_path, boxes=kind == "input") == 1


def test_boxes_one_after_the_other_stay_closed(tmp_path: Path) -> None:
    kind = "activation"
    killed, begun = True, set()
    sizes = iter([12_000, 12_000, 10**9])
    bounded = 0
    while killed:
        killed = killed_at(
            next(sizes), tmp_path, lambda: verify(kind, boxes=3, journal=Keep(str(tmp_path), again=True))
        )
        restored = replay(tmp_path)
        closed = {key for key, search in restored.searches.items() if not len(search)}
        assert begun <= closed
        begun = closed
        bounded += 1
    assert bounded == 3 and len(begun) >= 1
    assert verify(kind, boxes=3, resume=tmp_path).verdict.value == "unsat"


@pytest.mark.parametrize("kind", KINDS)
def test_a_witness_is_replayed_by_the_run_that_takes_it_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    found = verify(kind, sat=True, journal=tmp_path)
    again = verify(kind, sat=True, resume=tmp_path)
    assert found.witness is not None and again.witness is not None
    assert (found.witness.x == again.witness.x).all() and "by the journal" in again.reason
    lines = Lines()
    with monkeypatch.context() as patch:
        patch.setattr("parverify.attack.search.WitnessSearch.confirm", lambda *_: None)
        doubted = verify(kind, sat=True, resume=tmp_path, progress=lines)
    assert "by the journal" not in doubted.reason
    assert any("its witness is none here" in line for line in lines.lines)


@pytest.mark.parametrize("cut", [1, pytest.param(2000, marks=pytest.mark.slow)])
def test_a_journal_whose_end_is_gone(plain: tuple[str, Result], tmp_path: Path, cut: int) -> None:
    kind, _ = plain
    assert killed_at(BYTES[kind] // 2, tmp_path, lambda: verify(kind, journal=tmp_path))
    path = tmp_path / file_name(0, 0)
    os.truncate(path, path.stat().st_size - cut)
    check_volumes(tmp_path, boxes=kind == "input")
    lines = Lines()
    assert verify(kind, resume=tmp_path, progress=lines).verdict.value == "unsat"
    assert any("damaged or torn" in line for line in lines.lines)


class Full:
    """A file on a disk that is soon full."""

    def __init__(self, handle: Any, room: int) -> None:
        self._handle, self._room = handle, room

    def write(self, data: Any) -> int:
        if self._room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = self._handle.write(data[: self._room])
        self._room -= done
        return int(done)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


def test_a_disk_that_is_full_stops_the_journal_and_not_the_search(
    plain: tuple[str, Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, without = plain
    create, lines = Disk.create, Lines()
    with monkeypatch.context() as patch:
        patch.setattr(Disk, "create", lambda disk, path: Full(create(disk, path), BYTES[kind] // 2))
        kept = verify(kind, journal=tmp_path, progress=lines)
    assert kept.verdict.value == "unsat" and kept.stats["bounded"] == without.stats["bounded"]
    assert any("is turned off: No space left on device" in line for line in lines.lines)
    check_volumes(tmp_path, boxes=kind == "input")
    again = verify(kind, resume=tmp_path)
    assert again.verdict.value == "unsat" and 0 < again.stats["bounded"] < without.stats["bounded"]


def test_a_clock_that_jumps_does_not_matter(
    plain: tuple[str, Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, without = plain
    chance = random.Random(0)
    monkeypatch.setattr(time, "time", lambda: chance.uniform(-1e9, 1e11))
    assert killed_at(BYTES[kind] // 2, tmp_path, lambda: verify(kind, journal=tmp_path, timeout=600))
    again = verify(kind, resume=tmp_path, timeout=600)
    assert again.verdict.value == "unsat" and again.stats["bounded"] < without.stats["bounded"]


@pytest.mark.parametrize(
    ("option", "text"), [({"dtype": "float64"}, "dtype (float32 there, float64 here)"), ({"sat": True}, "the property")]
)
def test_the_journal_of_another_run_is_refused(tmp_path: Path, option: dict[str, Any], text: str) -> None:
    assert killed_at(1, tmp_path, lambda: verify("input", journal=tmp_path))
    before = [path.read_bytes() for _, _, path in generations(tmp_path)]
    with pytest.raises(UsageError) as caught:
        verify("input", resume=tmp_path, **option)
    assert "is of another run" in caught.value.message and text in caught.value.message
    assert "\n" not in str(caught.value)
    assert [path.read_bytes() for _, _, path in generations(tmp_path)] == before


def test_what_may_be_asked(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="either a new journal or one to resume"):
        verify("input", journal=tmp_path, resume=tmp_path)
    with pytest.raises(UsageError, match="no journal in"):
        verify("input", resume=tmp_path / "none")
    assert killed_at(1, tmp_path, lambda: verify("input", journal=tmp_path))
    with pytest.raises(UsageError, match="holds a journal already"):
        verify("input", journal=tmp_path)


def test_a_run_that_got_no_further_than_a_torn_header_starts_anew(tmp_path: Path) -> None:
    (tmp_path / file_name(0, 0)).write_bytes(b"\0")
    assert verify("input", journal=Keep(str(tmp_path), again=True)).verdict.value == "unsat"


# --- accounts ---------------------------------------------------------------------------------------------------------


def test_a_domain_that_is_lost_is_an_error_and_no_verdict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from parverify.bab.domains import Domains, Pool

    push, lost = Pool.push, []

    def losing(pool: Pool, domains: Domains, *, leaves: bool = False) -> None:
        if len(domains) > 4 and not lost:
            lost.append(len(domains))
            domains = domains.slice(1, len(domains))
        push(pool, domains, leaves=leaves)

    monkeypatch.setattr(Pool, "push", losing)
    with pytest.raises(LedgerError, match="neither closed nor open"):
        verify("input", journal=tmp_path)
    assert lost
    assert "float32/verdict" not in replay(tmp_path).verdicts


def test_groups_settle_together() -> None:
    from parverify.bab.domains import Domains

    journals = [Journal(None, 0), Journal(None, 1)]
    shares = [Share(journal) for journal in journals]
    roots = Domains({"part": torch.zeros(2, dtype=torch.int64), "lower": torch.zeros(2)})
    begun = journals[0].start("k", roots)
    shares[0].begin(begun)
    journals[0].sent(begun.slice(0, 1))
    there = journals[1].received(begun.slice(0, 1))
    journals[0].close_domains(begun.slice(1, 2))
    with pytest.raises(LedgerError):
        settle([share.missing() for share in shares])
    journals[1].close_domains(there)
    settle([share.missing() for share in shares])


def test_without_a_journal_nothing_is_said() -> None:
    books = Books.none()
    books.say("key", {"open": []})
    assert (books.said("key"), books.earlier("key"), books.kept, books.stats()) == (None, None, False, {})


def test_a_verdict_is_written_for_what_is_decided_in_time(tmp_path: Path) -> None:
    from parverify.clock import Clock
    from parverify.parallel.world import World
    from parverify.verdict import Verdict

    books = Books(World(), Keep(str(tmp_path)), lambda: Identity("n", "p"), NullProgress())
    late, soon = Clock(0.5), Clock(1000.0)
    books.conclude("late", Result(Verdict.UNKNOWN, reason="a leaf"), late)
    books.conclude("timeout", Result(Verdict.TIMEOUT, reason="late"), soon)
    books.conclude("soon", Result(Verdict.UNKNOWN, reason="a leaf"), soon)
    books.close()
    assert set(replay(tmp_path).verdicts) == {"soon"}


def test_other_roots_than_were_open_are_an_error(tmp_path: Path) -> None:
    assert killed_at(30_000, tmp_path, lambda: verify("input", boxes=2, journal=tmp_path))
    journal = Journal.resume(replay(tmp_path))
    journal.verdict("float32/bounds", {"open": [0]})
    journal.close()
    with pytest.raises(ParverifyError, match="other disjuncts"):
        verify("input", boxes=2, resume=tmp_path)
