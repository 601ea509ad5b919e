"""The journal: whatever is cut, flipped, full or interrupted, what comes back covers what was open, exactly once."""

from __future__ import annotations

import errno
import itertools
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parverify.bab import journal as module
from parverify.bab.domains import Domains, join
from parverify.bab.identity import Identity, identify
from parverify.bab.journal import Journal
from parverify.bab.ledger import Ledger, LedgerError
from parverify.bab.records import DIGEST, DTYPES, HEAD, Disk, Kind, Reader, RecordError, decode, encode
from parverify.bab.replay import Restored, file_name, generations, replay
from parverify.config import BoundsSettings, Settings
from parverify.errors import UsageError

ME = Identity("a" * 64, "b" * 64, {"dtype": "float64"})
KEY = "float64/input"
ROOT = Path(__file__).resolve().parents[2]
SCALE = 2**300


@pytest.fixture(autouse=True)
def closed_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close what a test, as a process that is killed, leaves open."""
    handles: list[Any] = []

    def watch(method: Callable[[Disk, Path], Any]) -> Callable[[Disk, Path], Any]:
        def watched(disk: Disk, path: Path) -> Any:
            handles.append(method(disk, path))
            return handles[-1]

        return watched

    for name in ("create", "lock"):
        monkeypatch.setattr(Disk, name, watch(getattr(Disk, name)))
    yield
    for handle in handles:
        handle.close()


def square(count: int = 1) -> Domains:
    """Unit squares side by side."""
    low = torch.tensor([[float(place), 0.0] for place in range(count)], dtype=torch.float64)
    return Domains(
        {
            "part": torch.arange(count),
            "lower": torch.full((count,), -torch.inf),
            "low": low,
            "high": low + 1,
            "beta": torch.zeros(count, 1, 0),
        }
    )


def halve(domains: Domains, dims: list[int]) -> Domains:
    """As `InputSpace` does: halves along `dims` one after the other; columns of the parent stay."""
    for dim in dims:
        low, high = domains["low"].clone(), domains["high"].clone()
        middle = (low[:, dim] + high[:, dim]) / 2
        high[:, dim], low[:, dim] = middle, middle
        deeper = domains.with_columns(depth=domains["depth"] + 1, beta=torch.ones(len(domains), 1, int(dims[0]) + 1))
        domains = join([deeper.with_columns(high=high), deeper.with_columns(low=low)])
    return domains


Box = tuple[tuple[int, int], ...]


def boxes(domains: Domains) -> list[Box]:
    """Exact, in units of 1 / SCALE."""

    def exact(value: float) -> int:
        top, bottom = value.as_integer_ratio()
        return top * (SCALE // bottom)

    rows = zip(domains["low"].tolist(), domains["high"].tolist(), strict=True)
    return [tuple((exact(a), exact(b)) for a, b in zip(low, high, strict=True)) for low, high in rows]


def area(box: Box) -> Fraction:
    (a, b), (c, d) = box
    return Fraction((b - a) * (d - c), SCALE**2)


def overlap(one: Box, other: Box) -> int:
    """In units of SCALE^-2."""
    out = 1
    for (a, b), (c, d) in zip(one, other, strict=True):
        out *= max(0, min(b, d) - max(a, c))
    return out


class World:
    """Groups that split, close and exchange domains at random, with the truth beside them."""

    def __init__(self, folder: Path, groups: int, roots: int = 1, disk: Disk | None = None) -> None:
        self.journals = [Journal(folder, group, ME, disk=disk, log=self.log) for group in range(groups)]
        self.lines: list[str] = []
        self.roots = roots
        self.open: list[list[Domains]] = [[] for _ in range(groups)]
        started = self.journals[0].start(KEY, square(roots), {"layer": torch.arange(3.0)})
        self.open[0] = [started.slice(place, place + 1) for place in range(roots)]

    def log(self, line: str) -> None:
        self.lines.append(line)

    def step(self, chance: random.Random) -> None:
        """One thing happens in one group that has domains."""
        loaded = [group for group, domains in enumerate(self.open) if domains]
        if not loaded:
            return
        group = chance.choice(loaded)
        journal, here = self.journals[group], self.open[group]
        taken = [here.pop(chance.randrange(len(here))) for _ in range(min(len(here), chance.randint(1, 3)))]
        action = chance.random()
        if action < 0.6:
            for some in taken:
                children = journal.name(halve(some, [chance.randrange(2) for _ in range(chance.randint(1, 3))]))
                keep = torch.tensor([chance.random() < 0.7 for _ in range(len(children))])
                keep[0] = True  # so that the run goes on
                kept = journal.split(children, children.take(keep).with_columns(lower=torch.zeros(int(keep.sum()))))
                here += [kept.slice(place, place + 1) for place in range(len(kept))]
        elif action < 0.7 and sum(map(len, self.open)) > 1:
            for some in taken:
                journal.close_domains(some)
        else:
            other = chance.randrange(len(self.journals))
            for some in taken:
                journal.sent(some)
                self.open[other].append(self.journals[other].received(some))
        if chance.random() < 0.1:
            chance.choice(self.journals).compact()

    def run(self, seed: int, steps: int) -> None:
        chance = random.Random(seed)
        for _ in range(steps):
            self.step(chance)

    def close(self) -> None:
        for journal in self.journals:
            journal.close()

    def truth(self) -> list[Box]:
        return [box for domains in self.open for part in domains for box in boxes(part)]

    def audit(self) -> None:
        for journal in self.journals:
            journal.audit()
        closed = sum((journal.ledger.closed_volume for journal in self.journals), Fraction(0))
        still = sum((journal.ledger.open_volume for journal in self.journals), Fraction(0))
        assert closed + still == self.roots
        assert still == sum(map(area, self.truth()), Fraction(0))


def all_open(restored: Restored) -> list[Box]:
    found = [rows for rows, _ in restored.searches[KEY].domains()] if KEY in restored.searches else []
    return [box for rows in found for box in boxes(rows)]


def check_cover(restored: Restored, truth: list[Box], roots: int = 1) -> None:
    """Restored domains are disjoint, with what is closed they are the roots, and they cover all that was open."""
    search = restored.searches[KEY]
    found = all_open(restored)
    assert len(found) == len(search)
    assert sum(search.closed, Fraction(0)) + sum(map(area, found), Fraction(0)) == roots
    for rows, _ in search.domains():
        assert [Fraction(1, 2**depth) for depth in rows["depth"].tolist()] == [area(box) for box in boxes(rows)]
    for box in truth:
        assert Fraction(sum(overlap(box, other) for other in found), SCALE**2) == area(box)


# --- a whole run -----------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 3), st.integers(0, 30))
def test_a_replay_gives_back_exactly_what_was_open(
    tmp_path_factory: pytest.TempPathFactory, seed: int, groups: int, roots: int, steps: int
) -> None:
    folder = tmp_path_factory.mktemp("journal")
    world = World(folder, groups, roots)
    world.run(seed, steps)
    world.audit()
    world.close()
    restored = replay(folder, ME)
    check_cover(restored, world.truth(), roots)
    assert sorted(all_open(restored)) == sorted(world.truth())
    assert torch.equal(restored.searches[KEY].space["layer"], torch.arange(3.0))
    assert restored.flaws == () and not world.lines


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_a_run_is_taken_up_by_another_number_of_groups_again_and_again(tmp_path: Path, groups: int) -> None:
    world = World(tmp_path, 3, roots=2)
    world.run(1, 25)
    world.close()
    for round_ in range(3):
        truth = world.truth()
        assert truth
        first = Journal.resume(replay(tmp_path, ME))
        assert [group for _, group, _ in generations(tmp_path)] == [0]
        world.journals = [first]
        world.journals += [Journal(tmp_path, n, ME, generation=first.generation) for n in range(1, groups)]
        found = [part.slice(i, i + 1) for part in first.domains(KEY) for i in range(len(part))]
        names = [int(part["id"]) for part in found]
        assert len(set(names)) == len(names) and set(names) == set(first.ledger.open)
        world.open = [found, *([] for _ in range(groups - 1))]
        assert sorted(world.truth()) == sorted(truth)
        world.audit()
        world.run(round_, 12)
        world.close()
        check_cover(replay(tmp_path), world.truth(), 2)


def test_ids_are_unique_over_groups_and_time(tmp_path: Path) -> None:
    world = World(tmp_path, 3, roots=4)
    seen: set[int] = set()
    for ledger in (journal.ledger for journal in world.journals):
        fresh = ledger.fresh

        def watched(count: int, fresh: Callable[[int], torch.Tensor] = fresh) -> torch.Tensor:
            names = fresh(count)
            assert not seen & set(names.tolist())
            seen.update(names.tolist())
            return names

        ledger.fresh = watched  # type: ignore[method-assign]
    world.run(5, 40)
    assert len(seen) > 60
    world.close()


# --- damage ----------------------------------------------------------------------------------------------------------


def ends(path: Path) -> list[int]:
    """Where each record of a file ends."""
    reader = Reader(path)
    return [reader.end for _ in reader]


def small_run(folder: Path, steps: int = 9) -> tuple[World, list[Box]]:
    world = World(folder, 2)
    world.run(7, steps)
    world.close()
    return world, world.truth()


@pytest.mark.parametrize("group", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_file_cut_at_every_byte_of_its_last_record(tmp_path: Path, group: int) -> None:
    _, truth = small_run(tmp_path)
    path = tmp_path / file_name(0, group)
    whole, marks = path.read_bytes(), ends(path)
    assert truth and len(marks) > 2 and marks[-1] == len(whole)
    for length in range(marks[-2], len(whole)):
        path.write_bytes(whole[:length])
        restored = replay(tmp_path, ME)
        check_cover(restored, truth)
        assert bool(restored.flaws) == (length > marks[-2])


@pytest.mark.parametrize("group", [0, 1])
def test_a_file_cut_behind_every_record(tmp_path: Path, group: int) -> None:
    _, truth = small_run(tmp_path, 30)
    path = tmp_path / file_name(0, group)
    whole = path.read_bytes()
    for length in ends(path)[1 - group :]:
        path.write_bytes(whole[:length])
        check_cover(replay(tmp_path, ME), truth)
    path.write_bytes(whole)
    if group:  # a group's file may be lost altogether
        path.unlink()
        check_cover(replay(tmp_path, ME), truth)


@pytest.mark.parametrize("record", [2, 4, pytest.param(-1, marks=pytest.mark.slow)])
def test_every_flipped_byte_of_a_record_ends_the_file_there(tmp_path: Path, record: int) -> None:
    _, truth = small_run(tmp_path)
    path = tmp_path / file_name(0, 0)
    whole, marks = path.read_bytes(), ends(path)
    start, stop = marks[record - 1], marks[record]
    for at in range(start, stop):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        assert ends(path)[-1] == start
        if at % 7 == 0 or at < start + HEAD.size or at >= stop - DIGEST:
            restored = replay(tmp_path, ME)
            check_cover(restored, truth)
            assert len(restored.flaws) == 1 and f"at byte {start} " in restored.flaws[0]


def test_a_doubled_or_missing_record_ends_the_file_there(tmp_path: Path) -> None:
    _, truth = small_run(tmp_path)
    path = tmp_path / file_name(0, 0)
    whole, marks = path.read_bytes(), ends(path)
    for at in range(2, len(marks) - 1):
        for damaged in (whole[: marks[at]] + whole[marks[at - 1] :], whole[: marks[at - 1]] + whole[marks[at] :]):
            path.write_bytes(damaged)
            assert ends(path)[-1] in (marks[at], marks[at - 1])
            check_cover(replay(tmp_path, ME), truth)


@pytest.mark.parametrize("seed", range(6))
def test_all_files_cut_at_random_places(tmp_path: Path, seed: int) -> None:
    world = World(tmp_path, 3, roots=2)
    world.run(seed, 30)
    world.close()
    truth, chance = world.truth(), random.Random(seed)
    saved = {path: (path.read_bytes(), ends(path)) for _, _, path in generations(tmp_path)}
    for _ in range(15):
        for path, (whole, marks) in saved.items():
            least = marks[1] if path.name == file_name(0, 0) else 0  # the roots themselves
            path.write_bytes(whole[: chance.choice([chance.randint(least, len(whole)), len(whole)])])
        check_cover(replay(tmp_path, ME), truth, 2)


def test_a_damaged_snapshot_is_only_its_roots(tmp_path: Path) -> None:
    world = World(tmp_path, 1)
    world.run(7, 6)
    world.journals[0].compact()
    world.close()
    path = tmp_path / file_name(0, 0)
    kinds = [record.kind for record in Reader(path)]
    assert kinds[:2] == [Kind.HEADER, Kind.START] and kinds[-1] is Kind.COMMIT and Kind.OPEN in kinds
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1
    path.write_bytes(whole)
    restored = replay(tmp_path, ME)
    assert all_open(restored) == boxes(square()) and restored.searches[KEY].closed == (0,)


RUNNING = """
import sys
from pathlib import Path
from tests.bab.test_journal import World
world = World(Path(sys.argv[1]), 2)
seed = 0
while True:
    print(seed, flush=True)
    world.run(seed, 3)
    world.journals[0].flush()
    seed += 1
"""


@pytest.mark.slow
def test_a_process_that_is_killed(tmp_path: Path) -> None:
    for rounds in (1, 4):
        folder = tmp_path / str(rounds)
        with subprocess.Popen(
            [sys.executable, "-c", RUNNING, str(folder)], stdout=subprocess.PIPE, cwd=ROOT
        ) as process:
            assert process.stdout is not None
            for _ in range(rounds):
                process.stdout.readline()
            process.kill()
        check_cover(replay(folder, ME), [])
        Journal.resume(replay(folder, ME)).close()
        check_cover(replay(folder, ME), [])


# --- the disk --------------------------------------------------------------------------------------------------------


class FullDisk(Disk):
    """Takes `room` bytes, the last of them as a part of a write, and then raises ENOSPC."""

    def __init__(self, room: int) -> None:
        self.room = room

    def create(self, path: Path) -> Any:
        disk, handle = self, super().create(path)

        class File:
            def write(self, data: memoryview) -> int:
                if disk.room <= 0:
                    raise OSError(errno.ENOSPC, "No space left on device")
                taken = min(len(data), disk.room)
                disk.room -= taken
                return handle.write(data[:taken])

            def __getattr__(self, name: str) -> Any:
                return getattr(handle, name)

        return File()


def test_a_full_disk_turns_the_journal_off_and_a_resume_is_still_safe(tmp_path: Path) -> None:
    small_run(tmp_path / "whole")
    total = sum(path.stat().st_size for _, _, path in generations(tmp_path / "whole"))
    for room in range(1200, total, 97):
        folder = tmp_path / "full"
        world = World(folder, 2, disk=FullDisk(room))
        world.run(7, 9)
        world.audit()  # the accounts go on
        assert world.lines and all("No space left on device" in line for line in world.lines)
        off = sum("is turned off" in line for line in world.lines)
        assert off == sum(not journal.writes for journal in world.journals)
        world.close()
        check_cover(replay(folder, ME), world.truth())
        shutil.rmtree(folder)


class Killed(BaseException):
    """Stands for the end of the process."""


class DyingDisk(Disk):
    """Counts down, and at 0 either dies or fails."""

    def __init__(self) -> None:
        self.left = 10**9
        self.error: BaseException = Killed()

    def _tick(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise self.error

    def create(self, path: Path) -> Any:
        disk = self
        disk._tick()
        handle = super().create(path)

        class File:
            def write(self, data: memoryview) -> int:
                if disk.left == 0:
                    handle.write(data[: len(data) // 2])
                disk._tick()
                return handle.write(data)

            def __getattr__(self, name: str) -> Any:
                return getattr(handle, name)

        return File()

    def sync(self, handle: Any) -> None:
        self._tick()
        super().sync(handle)
        self._tick()

    def replace(self, source: Path, target: Path) -> None:
        self._tick()
        super().replace(source, target)
        self._tick()

    def sync_folder(self, folder: Path) -> None:
        self._tick()
        super().sync_folder(folder)


@pytest.mark.parametrize(
    "error", [pytest.param(Killed(), marks=pytest.mark.slow), OSError(errno.ENOSPC, "No space left on device")]
)
@pytest.mark.parametrize("resume", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_snapshot_interrupted_at_each_step(tmp_path: Path, error: BaseException, resume: bool) -> None:
    reached = 0
    for left in range(40):
        folder, disk = tmp_path / str(left), DyingDisk()
        world = World(folder, 2, disk=disk)
        world.run(7, 9)
        disk.left, disk.error = left, error
        outcome: BaseException | None = None
        try:
            if resume:
                world.journals[0].close(sync=False)
                Journal.resume(replay(folder, ME), disk=disk).close(sync=False)
            else:
                world.journals[0].compact()
        except (Killed, UsageError) as caught:
            outcome = caught
        if isinstance(error, Killed):
            assert (outcome is error) == (disk.left < 0)
        reached += disk.left < 0
        disk.left = 10**9
        restored = replay(folder, ME)
        check_cover(restored, world.truth())
        assert sorted(all_open(restored)) == sorted(world.truth())
        if not resume and outcome is None:  # it goes on, with the old file or the new one
            world.run(8, 6)
            world.audit()
            world.close()
            check_cover(replay(folder, ME), world.truth())
            if isinstance(error, Killed):  # else a rename may have happened although it failed
                assert sorted(all_open(replay(folder, ME))) == sorted(world.truth())
        if disk.left == 10**9 and left > reached:
            break
    assert 5 < reached < 40
    assert left > reached  # the last rounds were not interrupted


def test_a_sync_that_fails_turns_the_journal_off(tmp_path: Path) -> None:
    disk = DyingDisk()
    world = World(tmp_path, 1, disk=disk)
    disk.left, disk.error = 0, OSError(errno.EIO, "Input/output error")
    world.journals[0].flush(force=True)
    assert not world.journals[0].writes and len(world.lines) == 1
    assert "turned off: Input/output error" in world.lines[0]


def test_syncs_are_at_most_one_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, synced = [100.0], []

    class Watched(Disk):
        def sync(self, handle: Any) -> None:
            synced.append(now[0])

    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    journal = Journal(tmp_path, 0, ME, disk=Watched())
    del synced[:]
    for _ in range(40):
        now[0] += 0.25
        journal.flush()
    assert synced == [101.0 + place for place in range(10)]
    journal.flush(force=True)
    assert len(synced) == 11
    journal.close()
    assert len(synced) == 12


def test_a_file_that_has_grown_is_compacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLACK", 20_000)
    world = World(tmp_path, 1)
    sizes, chance = [], random.Random(3)
    while len(world.open[0]) < 60 and len(sizes) < 200:
        world.step(chance)
        world.journals[0].flush(force=True)
        sizes.append((tmp_path / file_name(0, 0)).stat().st_size)
    assert any(later < before for before, later in itertools.pairwise(sizes))
    world.close()
    check_cover(replay(tmp_path, ME), world.truth())


# --- what is refused -------------------------------------------------------------------------------------------------


def test_a_journal_of_another_run_is_refused(tmp_path: Path) -> None:
    small_run(tmp_path)
    other = Identity(ME.network, "c" * 64, {"dtype": "float32"})
    with pytest.raises(UsageError) as caught:
        replay(tmp_path, other)
    assert "the property, dtype (float64 there, float32 here) differs" in caught.value.message
    assert "the network" not in caught.value.message and caught.value.hint


def test_a_folder_with_a_journal_is_not_overwritten(tmp_path: Path) -> None:
    _, truth = small_run(tmp_path)
    with pytest.raises(UsageError, match="holds a journal already; hint: resume from it"):
        Journal(tmp_path, 0, ME)
    check_cover(replay(tmp_path, ME), truth)


def test_two_runs_do_not_write_one_journal(tmp_path: Path) -> None:
    first = Journal(tmp_path, 0, ME)
    for another in (lambda: Journal(tmp_path, 0, ME), lambda: Journal.resume(replay(tmp_path, ME))):
        with pytest.raises(UsageError, match="another run writes the journal"):
            another()
    first.close()
    second = Journal.resume(replay(tmp_path, ME))
    assert second.generation == 1 and second.writes
    second.close()


@pytest.mark.parametrize("content", [None, b"", b"no journal at all, but long enough for a header and more" * 9])
def test_what_is_no_journal_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / file_name(0, 0)).write_bytes(content)
    with pytest.raises(UsageError, match="no journal in" if content is None else "can't be read"):
        replay(tmp_path)


def test_files_of_another_run_or_generation_are_ignored(tmp_path: Path) -> None:
    _, truth = small_run(tmp_path)
    stranger = tmp_path / "stranger"
    World(stranger, 2).close()
    shutil.copy(stranger / file_name(0, 1), tmp_path / file_name(7, 1))  # a base of generation 7 is missing
    check_cover(replay(tmp_path, ME), truth)
    first = Journal.resume(replay(tmp_path, ME))
    assert first.generation == 8
    first.close()
    check_cover(replay(tmp_path, ME), truth)
    foreign = Journal(stranger, 3, Identity("x", "y"), generation=8)
    foreign.received(square().with_columns(id=torch.tensor([5]), depth=torch.tensor([0])))
    foreign.close()
    shutil.copy(stranger / file_name(8, 3), tmp_path / file_name(8, 3))
    restored = replay(tmp_path, ME)
    check_cover(restored, truth)
    assert any("is of another run" in flaw for flaw in restored.flaws)


def test_an_identity_is_that_of_the_files_and_of_what_decides(tmp_path: Path) -> None:
    model, spec = tmp_path / "m.onnx", tmp_path / "s.vnnlib"
    model.write_bytes(b"m")
    spec.write_bytes(b"s")
    first = identify(model, spec, Settings())
    assert first == identify(model, spec, Settings(seed=3, memory=10**9))
    assert Identity.decode(first.encode()) == first
    looser = identify(model, spec, Settings(bounds=BoundsSettings(allowance=0.0)))
    assert first.differences(looser) == ["bounds.allowance (2.0 there, 0.0 here)"]
    model.write_bytes(b"n")
    assert identify(model, spec, Settings()).differences(first) == ["the network"]
    with pytest.raises(UsageError, match="can't read"):
        identify(tmp_path / "gone", spec, Settings())


# --- accounts --------------------------------------------------------------------------------------------------------


def started() -> tuple[Journal, Domains]:
    journal = Journal(None)
    return journal, journal.start(KEY, square())


def test_no_domain_is_closed_twice_or_received_twice() -> None:
    journal, root = started()
    children = journal.name(halve(root, [0]))
    kept = journal.split(children, children.slice(0, 1))
    with pytest.raises(LedgerError, match="is not open"):
        journal.split(children, children)
    with pytest.raises(LedgerError, match="is not open"):
        journal.close_domains(children["id"][1:])
    with pytest.raises(LedgerError, match="named twice"):
        journal.close_domains(kept["id"].repeat(2))
    other = Journal(None, 1)
    other.received(kept)
    with pytest.raises(LedgerError, match="received twice"):
        other.received(kept)
    journal.close_domains(kept)
    journal.audit()
    assert journal.ledger.closed_volume == 1 and not journal.ledger.open


def test_a_split_that_loses_or_doubles_a_child_is_an_error() -> None:
    journal, root = started()
    children = journal.name(halve(root, [0, 1]))
    with pytest.raises(LedgerError, match=r"have 0\.75 of its volume"):
        journal.split(children.slice(0, 3), children.slice(0, 3))
    with pytest.raises(LedgerError, match="no child, or twice"):
        journal.split(children, children.take(torch.tensor([0, 0])))
    with pytest.raises(LedgerError, match="no child, or twice"):
        journal.split(children.slice(0, 3), children)
    with pytest.raises(LedgerError, match="halvings below"):
        journal.split(children.with_columns(depth=children["depth"] - 3), children)
    journal.audit()  # nothing of it was entered
    assert journal.ledger.open_volume == 1


def test_an_audit_finds_a_domain_that_was_lost() -> None:
    journal, root = started()
    children = journal.name(halve(root, [0]))
    journal.split(children, children)
    del journal.ledger.open[int(children["id"][0])]
    with pytest.raises(LedgerError, match="nothing is concluded"):
        journal.audit()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=1, max_size=120))
def test_volumes_of_deep_trees_are_exact(steps: list[tuple[int, bool]]) -> None:
    journal, root = started()
    depth, closed = 0, Fraction(0)
    for halvings, _ in steps:  # always the first child is split further; the others are closed
        children = root
        for _ in range(halvings):
            deeper = children.with_columns(depth=children["depth"] + 1)
            children = join([deeper, deeper])
        children = journal.name(children)
        root = journal.split(children, children.slice(0, 1))
        depth += halvings
        closed += Fraction(2**halvings - 1, 2**depth)
    assert journal.ledger.closed_volume == closed == 1 - Fraction(1, 2**depth)
    journal.audit()


def test_a_group_number_out_of_range() -> None:
    with pytest.raises(LedgerError, match="out of range"):
        Ledger(1 << 22)


# --- records ---------------------------------------------------------------------------------------------------------


def test_every_type_and_shape_comes_back() -> None:
    arrays = {
        f"{name}{shape}": torch.ones(shape).to(dtype) for name, dtype in DTYPES.items() for shape in [(3,), (2, 0)]
    }
    arrays |= {
        "scalar": torch.tensor(2.5),
        "column": torch.arange(6.0).reshape(2, 3).T,
        "nan": torch.tensor([torch.nan]),
    }
    meta, found = decode(bytearray(encode({"a": [1, None, "ü"]}, arrays)))
    assert meta == {"a": [1, None, "ü"]} and list(found) == list(arrays)
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape
        assert torch.equal(found[name].nan_to_num(7.0), array.nan_to_num(7.0))


def test_what_is_no_record_is_refused() -> None:
    with pytest.raises(RecordError, match="complex64"):
        encode({}, {"x": torch.zeros(1, dtype=torch.complex64)})
    for payload in (b"", b"\xff" * 40, encode({}, {"x": torch.zeros(4)})[:-8]):
        with pytest.raises(RecordError, match="malformed"):
            decode(bytearray(payload))


def test_a_verdict_is_kept(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 0, ME)
    journal.verdict("crown", {"open": [1, 2]})
    journal.verdict("crown", {"open": [2]})
    journal.compact()
    journal.close()
    assert replay(tmp_path).verdicts == {"crown": {"open": [2]}}
    Journal.resume(replay(tmp_path)).close()
    assert replay(tmp_path).verdicts == {"crown": {"open": [2]}}
