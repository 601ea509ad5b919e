"""What a run says while it works, on a file and on a terminal."""

from __future__ import annotations

import io
import math
import sys

import pytest

from parverify.progress import LineProgress, LiveProgress, NullProgress, Progress, make_progress


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def talk(progress: Progress) -> None:
    progress.phase("bounding")
    for i in range(3):
        progress.update(open=5 - i, closed=i, worst=-0.25, rate=12.0, left=math.inf if i else 9.0)
    progress.log("a detail")
    progress.warn("a warning [with] brackets")


def test_lines_are_warnings_only_unless_verbose() -> None:
    stream = io.StringIO()
    talk(LineProgress(stream))
    assert stream.getvalue() == "warning: a warning [with] brackets\n"


def test_a_search_that_lasts_is_reported_in_any_case() -> None:
    stream = io.StringIO()
    talk(LineProgress(stream, interval=0.0))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 4 and lines[2].endswith("3 open, 2 closed, worst bound -0.25, 12/s")


def test_verbose_lines_about_the_state_are_rare() -> None:
    stream = io.StringIO()
    talk(LineProgress(stream, verbose=True))
    lines = stream.getvalue().splitlines()
    assert (
        len(lines) == 4
        and lines[0].endswith("bounding")
        and lines[2:] == ["a detail", "warning: a warning [with] brackets"]
    )
    assert lines[1].endswith("5 open, 0 closed, worst bound -0.25, 12/s, 9 s left")


def test_every_state_is_written_without_an_interval() -> None:
    stream = io.StringIO()
    talk(LineProgress(stream, verbose=True, interval=0.0))
    assert stream.getvalue().count(" closed") == 3


def test_a_closed_stream_does_no_harm() -> None:
    stream = io.StringIO()
    stream.close()
    talk(LineProgress(stream, verbose=True))


def test_the_live_line_goes_away_and_warnings_stay() -> None:
    stream = Terminal()
    progress = LiveProgress(stream, verbose=True, interval=0.0)
    talk(progress)
    progress.close()
    progress.close()
    text = stream.getvalue()
    assert "bounding: 3 open, 2 closed" in text and "a detail" in text
    assert "warning: a warning [with] brackets" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is back


def test_which_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert isinstance(make_progress(), LiveProgress)
    assert isinstance(make_progress(quiet=True), NullProgress)
    talk(make_progress(quiet=True))
    assert sys.stderr.getvalue() == ""  # type: ignore[attr-defined]
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert isinstance(make_progress(), LineProgress)
