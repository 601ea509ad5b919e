"""Ranks of this machine: how a job ends when one of them fails, that nothing is left, and that nothing listens."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from parverify.cli.outcome import Outcome
from parverify.errors import LostRankError, ModelError, OutOfTimeError, ParverifyError
from parverify.parallel import launch as launching
from parverify.parallel.launch import Record, decide, loopback, read_records
from parverify.parallel.world import World, alone, join, leave
from tests.distributed.ranks import on_ranks, outcome_of

Job = Callable[[World], Outcome]


def one_fails(rank: int, failure: Callable[[], None]) -> Job:
    """A job in which one rank fails while the others wait in a collective."""

    def job(world: World) -> Outcome:
        world.comm.barrier()
        if world.rank == rank:
            failure()
        world.comm.all_reduce(torch.ones(1000)).wait()
        return Outcome("unsat")

    return job


def killed() -> None:
    """End as the kernel ends a process when memory is short."""
    os.kill(os.getpid(), signal.SIGKILL)


def crashed() -> None:
    """End by a fault in native code."""
    os.kill(os.getpid(), signal.SIGSEGV)


def left() -> None:
    """Leave without a word."""
    os._exit(3)


def raised() -> None:
    """Raise."""
    raise ValueError("first\nsecond")


def refused() -> None:
    """Raise on purpose."""
    raise ModelError("it can't be read", hint="do that")


def out_of_time() -> None:
    """The clock of one rank runs out."""
    raise OutOfTimeError("out of time while bounding")


def out_of_memory() -> None:
    """One rank has no memory left."""
    raise MemoryError


@pytest.mark.parametrize(
    ("rank", "failure", "verdict", "code", "text"),
    [
        (1, killed, "error", 20, "rank 1 was killed by SIGKILL; hint: most likely the machine is out of memory"),
        (0, killed, "error", 20, "rank 0 was killed by SIGKILL"),
        (1, crashed, "error", 20, "rank 1 crashed with SIGSEGV"),
        (1, left, "error", 20, "rank 1 ended without an answer, exit status 3"),
        (1, raised, "error", 20, "rank 1: ValueError: first second; hint:"),
        (0, raised, "error", 20, "rank 0: ValueError: first second; hint:"),
        (0, refused, "error", 21, "it can't be read; hint: do that"),
        (1, refused, "error", 21, "rank 1: it can't be read; hint: do that"),
        (1, out_of_time, "timeout", 12, "rank 1: out of time while bounding"),
        (0, out_of_time, "timeout", 12, "out of time while bounding"),
        (1, out_of_memory, "error", 24, "rank 1: out of memory"),
    ],
)
@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_fails_ends_the_job(
    size: int, rank: int, failure: Callable[[], None], verdict: str, code: int, text: str
) -> None:
    begun = time.monotonic()
    outcome = outcome_of(size, one_fails(rank, failure))
    assert time.monotonic() - begun < 5
    assert (outcome.verdict, outcome.exit_code) == (verdict, code)
    assert outcome.reason.startswith(text)


def test_a_rank_that_dies_before_it_finds_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def dying(*arguments: object, **options: object) -> World:
        if os.environ["RANK"] == "1":
            killed()
        return join(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(launching, "join", dying)
    begun = time.monotonic()
    outcome = outcome_of(2, lambda world: Outcome("unsat"))
    assert time.monotonic() - begun < 5
    assert outcome.reason.startswith("rank 1 was killed by SIGKILL")


def test_a_rank_that_dies_after_the_verdict_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    save = Record.save

    def dying(record: Record, folder: Path, rank: int) -> None:
        save(record, folder, rank)
        if rank == 1:
            time.sleep(0.2)  # rank 0 has said `unsat` long since
            killed()

    monkeypatch.setattr(Record, "save", dying)
    outcome = outcome_of(2, lambda world: Outcome("unsat"))
    assert outcome.verdict == "error" and outcome.reason.startswith("rank 1 was killed by SIGKILL")


def test_all_ranks_out_of_time_end_in_the_words_of_rank_0() -> None:
    def job(world: World) -> Outcome:
        return Outcome.timeout(f"said by {world.rank}")

    assert outcome_of(2, job) == Outcome.timeout("said by 0")


def test_ranks_that_contradict_each_other_prove_nothing() -> None:
    outcome = outcome_of(2, lambda world: Outcome("unsat") if world.rank == 0 else Outcome.unknown("?"))
    assert outcome.reason == "ranks disagree: rank 1 says unknown, rank 0 unsat"


def test_rank_0_answers() -> None:
    outcome = outcome_of(3, lambda world: Outcome("sat", x=[float(world.rank)], stats={"size": world.size}))
    assert outcome == Outcome("sat", x=[0.0], stats={"size": 3})


def test_the_whole_traceback_on_request(capfd: pytest.CaptureFixture[str]) -> None:
    outcome_of(2, one_fails(1, raised))
    assert capfd.readouterr() == ("", "")
    outcome_of(2, one_fails(1, raised), verbose=True)
    assert 'raise ValueError("first\\nsecond")' in capfd.readouterr().err


def test_the_caller_is_left_as_it_was() -> None:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = [signal.getsignal(number) for number in numbers], logging.root.manager.disable, dict(os.environ)
    outcome_of(2, one_fails(1, raised))
    assert before == ([signal.getsignal(number) for number in numbers], logging.root.manager.disable, dict(os.environ))


def pid_of(world: World) -> int:
    """The rank's process."""
    return os.getpid()


def test_no_process_is_left() -> None:
    for pid in on_ranks(2, pid_of):
        assert not Path(f"/proc/{pid}").exists()


def pids_of_a_failed_job(folder: Path) -> list[int]:
    """The ranks of a job in which one was killed while the other slept."""

    def job(world: World) -> Outcome:
        (folder / str(world.rank)).write_text(str(os.getpid()))
        world.comm.barrier()
        if world.rank == 1:
            killed()
        time.sleep(60)
        return Outcome("unsat")

    assert outcome_of(2, job).verdict == "error"
    return [int((folder / str(rank)).read_text()) for rank in range(2)]


def test_no_process_is_left_of_a_failed_job(tmp_path: Path) -> None:
    for pid in pids_of_a_failed_job(tmp_path):
        assert not Path(f"/proc/{pid}").exists()


def listening(world: World) -> tuple[int, list[str]]:
    """How many sockets of this rank and of its launcher listen, and the addresses that are not on the loopback."""
    world.comm.barrier()
    own = {os.readlink(path) for pid in (os.getpid(), os.getppid()) for path in readable(Path(f"/proc/{pid}/fd"))}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            cells = line.split()
            if cells[3] == "0A" and f"socket:[{cells[9]}]" in own:
                found.append(cells[1].partition(":")[0])
    world.comm.barrier()
    return len(found), [address for address in found if not on_loopback(address)]


def readable(folder: Path) -> list[Path]:
    """The links of a folder that can be followed."""
    return [path for path in folder.iterdir() if os.path.islink(path)]


def on_loopback(address: str) -> bool:
    """Whether an address as the kernel writes it is 127.x.x.x or ::1."""
    return address.endswith("7F") if len(address) == 8 else address == "00000000000000000000000001000000"


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs /proc")
def test_nothing_listens_beyond_the_loopback() -> None:
    for count, elsewhere in on_ranks(2, listening):
        assert count > 0  # gloo's own, so the test sees what it looks for
        assert elsewhere == []


def test_the_loopback_interface_has_a_name() -> None:
    assert loopback() in ("lo", "lo0")


def hostname_resolves_elsewhere(world: World) -> str:
    """The interface that gloo was bound to."""
    return os.environ["GLOO_SOCKET_IFNAME"]


def test_gloo_is_bound_to_the_loopback_only_in_ranks() -> None:
    assert on_ranks(2, hostname_resolves_elsewhere) == [loopback()] * 2
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_a_rank_leaves_once() -> None:
    def job(world: World) -> Outcome:
        leave(world)
        with pytest.raises(ParverifyError, match="left the world already"):
            leave(world)
        return Outcome.error("it has left")  # a verdict would be followed by a barrier

    assert outcome_of(2, job).reason.endswith(": it has left")
    leave(alone())


def answer(world: World) -> Outcome:
    """A job that can be pickled."""
    return Outcome("unsat", stats={"size": world.size})


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="there are enough devices")
def test_ranks_for_an_accelerator_are_started_anew_and_need_one_each() -> None:
    outcome = outcome_of(2, answer, device="cuda")
    assert outcome.exit_code == 2 and "has no device of its own" in outcome.reason


# --- who decides ------------------------------------------------------------------------------------------------------


def test_the_first_that_went_wrong_decides_and_not_those_that_lost_it() -> None:
    lost = Record(Outcome.of(LostRankError("all_reduce failed")), 1.0, lost=True)
    late = Record(Outcome.error("late"), 3.0)
    early = Record(Outcome.error("early"), 2.0)
    assert decide({0: lost, 1: late, 2: early}, 3, {}).reason == "rank 2: early"
    said = "rank 0: all_reduce failed; hint: with --journal and --restarts lost ranks are started again"
    assert decide({0: lost, 1: Record(Outcome("unsat"), 0.0)}, 2, {}).reason == said
    assert decide({0: Record(Outcome("unsat"), 0.0)}, 2, {}).reason == "rank 1 ended without an answer"
    assert decide({}, 2, {}).verdict == "error"


def test_records_read_back(tmp_path: Path) -> None:
    record = Record(Outcome("sat", x=[0.1], y=[1e-300], stats={"a": [1]}), 12.5, lost=True)
    record.save(tmp_path, 1)
    assert read_records(tmp_path, 3) == {1: record}
