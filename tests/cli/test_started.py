"""When a run began: with the process, or with torchrun where that has started its ranks again."""

from __future__ import annotations

import time

import pytest

from parverify.cli import started


def test_a_rank_that_is_started_again_goes_by_the_start_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    ages = {"self": 2.0}
    monkeypatch.setattr(started, "_age", lambda process: ages.get(process, 30.0))
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    assert time.monotonic() - started.process_started() == pytest.approx(2.0, abs=0.5)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert time.monotonic() - started.process_started() == pytest.approx(30.0, abs=0.5)
    ages["self"] = float("nan")  # the kernel does not say
    assert time.monotonic() - started.process_started() == pytest.approx(0.0, abs=0.5)
    ages |= {"self": 1e6}  # clocks that can't be compared
    assert time.monotonic() - started.process_started() == pytest.approx(0.0, abs=0.5)


def test_the_age_of_a_process_is_what_the_kernel_says() -> None:
    assert 0 <= started._age("self") < 3600
    assert started._age("1") >= started._age("self")
    assert started._age("none") != started._age("none")  # NaN
