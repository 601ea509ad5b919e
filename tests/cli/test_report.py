"""`parverify report`: what it refuses, what is in the page, and that the page stands alone."""

from __future__ import annotations

import itertools
import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from parverify.cli import cli
from parverify.cli import report as module
from parverify.errors import UsageError
from parverify.report.page import NO_SAMPLES
from parverify.report.schema import IDLE, RankReport, Sample, Samples, Work, check
from parverify.results import to_json
from tests.cli.conftest import ROOT


def sample(t: float, **changed: Any) -> Sample:
    figures = {"open": int(10 + t), "closed": int(5 * t), "worst": -1.0 / (1 + t), "depth": int(t), "memory": 1 << 28}
    return Sample(**({"t": t, **figures, "phase": "search"} | changed))


def rank(number: int, count: int = 20, **changed: Any) -> RankReport:
    taken = tuple(sample(0.5 * place, phase=IDLE if place % 7 == 3 else "search") for place in range(1, count + 1))
    figures: dict[str, Any] = {"rank": number, "bounded": 640, "received": 3, "sent": 4, "idle_seconds": 1.5}
    figures |= {"batch_sizes": (32, 64, 64), "bytes": 4096, "samples": taken, "stages": {"leaf": Work(7, 0.5)}}
    return RankReport(**(figures | changed))


def content(ranks: int = 2, **changed: Any) -> dict[str, Any]:
    """As `parverify run --json` writes it, infinities and all."""
    stats = {"phases": {"attack": 0.25, "search": 9.0}, "ranks": [rank(place).encode() for place in range(ranks)]}
    whole = {"verdict": "unsat", "reason": "every part was closed", "seconds": 10.5, "witness": None, "stats": stats}
    whole |= {"settings": {}, "model": "nets/a<b>.onnx", "spec": "c & d.vnnlib", "timeout": None, "exit_code": 0}
    return json.loads(to_json(whole | changed))


def write(path: Path, what: Any) -> str:
    path.write_text(what if isinstance(what, str) else json.dumps(what))
    return str(path)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["report", *arguments])


class Checker(HTMLParser):
    """Tags are balanced, ids are unique, what is referred to is in the page."""

    VOID = ("meta", "br", "img", "link", "path", "use")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.ids: list[str] = []
        self.refers: list[str] = []
        self.tags: list[str] = []
        self.feed(text)
        self.close()
        assert not self.stack

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag != "meta":
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(str(value))
            if name in ("href", "xlink:href", "src"):
                self.refers.append(str(value))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag


def check_page(text: str) -> Checker:
    found = Checker(text)
    assert len(set(found.ids)) == len(found.ids)
    refers = found.refers + [f"#{name}" for name in re.findall(r"url\(#([^)]*)\)", text)]
    assert all(name.startswith("#") and name[1:] in found.ids for name in refers)
    assert not {"script", "link", "img", "iframe", "object", "image"} & set(found.tags)
    assert "@import" not in text and not re.search(r"url\((?!#)", text)
    outside = {
        place for place in re.findall(r"https?://[^\"'<> ]*", text) if not place.startswith("http://www.w3.org/")
    }
    assert not outside
    return found


# --- the page -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 14])
def test_the_page_of_a_run_stands_alone(tmp_path: Path, ranks: int) -> None:
    source, out = write(tmp_path / "run.json", content(ranks)), tmp_path / "new" / "page.html"
    result = call(source, "-o", str(out))
    assert (result.exit_code, result.output) == (0, "")
    text = out.read_text()
    found = check_page(text)
    assert found.tags.count("svg") == 5
    for title in ("What each rank did", "Worst bound", "Open domains", "Memory", "Depth of the tree"):
        assert text.count(f"<h3>{title}</h3>") == 1
    assert "a&lt;b&gt;.onnx" in text and "c &amp; d.vnnlib" in text and "every part was closed" in text
    assert "rank 0" in text and IDLE in text
    assert f"{1.5 / 10.5:.1%}" in text and f"{ranks * 640 / 10.5:.1f}" in text
    assert ("14 ranks" in text) == (ranks == 14)  # a band instead of lines
    assert NO_SAMPLES not in text


def test_the_same_runs_give_the_same_page(tmp_path: Path) -> None:
    source = write(tmp_path / "run.json", content())
    texts = set()
    for name in ("a.html", "b.html"):
        assert call(source, "-o", str(tmp_path / name)).exit_code == 0
        texts.add((tmp_path / name).read_text())
    assert len(texts) == 1


def test_several_runs_stand_side_by_side(tmp_path: Path) -> None:
    quick = content(stats={"phases": {"attack": 0.1}}, verdict="sat", reason="")
    sources = [write(tmp_path / f"{place}.json", what) for place, what in enumerate([content(1), quick, content(4)])]
    out = tmp_path / "page.html"
    assert call(*sources, "--out", str(out)).exit_code == 0
    text = out.read_text()
    found = check_page(text)
    assert found.tags.count("svg") == 5 + 0 + 5 + 2
    assert text.count(NO_SAMPLES) == 1
    assert [f"<h2>Run {place}: " in text for place in (1, 2, 3, 4)] == [True, True, True, False]
    together = text[text.index("Runs together") : text.index("<h2>Run 1")]
    assert "run 1<" in together and "run 3<" in together and "run 2<" not in together


@pytest.mark.parametrize(
    "stats",
    [{}, None, {"phases": {}}, {"ranks": []}, {"ranks": [rank(0, 0).encode()]}, {"ranks": None, "phases": None}],
)
def test_a_report_without_samples_gives_a_page_that_says_so(
    tmp_path: Path, stats: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DRAWER", "no_such_library")  # nothing is drawn
    out = tmp_path / "page.html"
    assert call(write(tmp_path / "run.json", content(stats=stats)), "-o", str(out)).exit_code == 0
    assert NO_SAMPLES in out.read_text()
    assert "svg" not in check_page(out.read_text()).tags


def test_odd_figures_are_drawn(tmp_path: Path) -> None:
    odd = [sample(0.0, worst=-math.inf), sample(0.0, worst=math.inf, open=0), sample(3.0, phase="<&>")]
    ranks = [rank(0, samples=tuple(odd)), rank(1, samples=tuple(odd[:1]), batch_sizes=()), rank(2, 0)]
    for count, some in enumerate([ranks, ranks[1:2], ranks * 6]):
        stats = {"ranks": [item.encode() for item in some]}
        source = write(tmp_path / "run.json", json.loads(to_json(content(seconds=0.0) | {"stats": stats})))
        out = tmp_path / f"{count}.html"
        result = call(source, source, "-o", str(out))
        assert result.exit_code == 0, result.output
        check_page(out.read_text())


# --- what is refused ------------------------------------------------------------------------------------------------


def test_a_missing_library_is_named_with_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DRAWER", "no_such_library")
    out = tmp_path / "page.html"
    result = call(write(tmp_path / "run.json", content()), "-o", str(out))
    assert result.exit_code == 2 and not out.exists()
    expected = "error: drawing needs no_such_library, which is not installed; hint: pip install 'parverify[report]'\n"
    assert result.stderr == expected


def broken(path: str, value: Any) -> dict[str, Any]:
    """A report with one value replaced."""
    whole = content()
    node: Any = whole
    *steps, last = [int(step) if step.isdigit() else step for step in path.split("/")]
    for step in steps:
        node = node[step]
    if value is KeyError:
        del node[last]
    else:
        node[last] = value
    return whole


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("no json", "is not JSON"),
        ("[]", "run.json: '[]' is not an object"),
        ("{}", "run.json: no verdict in it"),
        (broken("seconds", KeyError), "run.json: seconds is missing"),
        (broken("seconds", "inf"), "run.json: seconds: 'inf' is not a finite number >= 0"),
        (broken("stats/ranks", {}), "run.json: stats.ranks: '{}' is not a list"),
        (broken("stats/ranks/1/bounded", -1), "run.json: stats.ranks[1].bounded: '-1' is not a whole number >= 0"),
        (broken("stats/ranks/1/bytes", True), "stats.ranks[1].bytes: 'True' is not a whole number"),
        (broken("stats/ranks/0/samples/2/phase", KeyError), "stats.ranks[0].samples[2]: phase is missing"),
        (broken("stats/ranks/0/samples/2/worst", "low"), "samples[2].worst: 'low' is not a number"),
        (broken("stats/ranks/0/samples/2/t", 0.1), "samples[2].t: 0.1 is before 1.0"),
        (broken("stats/ranks/0/batch_sizes/1", 1.5), "batch_sizes[1]: '1.5' is not a whole number"),
        (broken("stats/ranks/0/stages/leaf/domains", -7), "stats.ranks[0].stages.leaf.domains: '-7' is not a whole"),
        (broken("stats/phases/attack", None), "stats.phases.attack: 'None' is not a finite number"),
    ],
)
def test_what_is_no_report_is_named(tmp_path: Path, what: Any, text: str) -> None:
    out = tmp_path / "page.html"
    result = call(write(tmp_path / "run.json", what), "-o", str(out))
    assert result.exit_code == 2 and not out.exists()
    assert text in result.stderr and "; hint: " in result.stderr and result.stderr.count("\n") == 1


def test_files_that_can_not_be_read_or_written(tmp_path: Path) -> None:
    source = write(tmp_path / "run.json", content())
    for arguments, text in (
        ((str(tmp_path / "gone.json"), "-o", "x.html"), "can't read"),
        ((source, "-o", source), "is the same file as"),
        ((source, "-o", str(tmp_path)), "is not a regular file"),
        ((source,), "Missing option"),
        (("-o", "x.html"), "Missing argument"),
    ):
        result = call(*arguments)
        assert result.exit_code == 2 and text in result.stderr and result.stderr.count("\n") == 1
    assert json.loads((tmp_path / "run.json").read_text()) == content()


def test_nothing_heavy_is_loaded_before_it_is_needed() -> None:
    script = "import sys\nimport parverify.cli.report\nprint({'torch', 'numpy', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


# --- recording ------------------------------------------------------------------------------------------------------


@given(st.integers(0, 400), st.integers(2, 33))
def test_a_recorder_keeps_a_bounded_even_choice(count: int, most: int) -> None:
    recorder = Samples(most)
    for place in range(count):
        recorder.add(sample(float(place)))
        assert len(recorder) <= most
    times = [int(item.t) for item in recorder.list()]
    assert times == sorted(set(times))
    if count:
        assert times[0] == 0 and times[-1] == count - 1
        assert len(times) >= min(count, most // 2)
        steps = {after - before for before, after in itertools.pairwise(times[:-1])}
        assert len(steps) <= 1  # evenly spread, but for the last
    if count <= most - 1:
        assert times == list(range(count))


def test_a_recorder_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        Samples(1)


def test_what_is_written_is_read_back() -> None:
    one = rank(3, samples=(sample(0.5, worst=-math.inf), sample(1.0, worst=math.inf)))
    read = check(json.loads(to_json(content() | {"stats": {"ranks": [one.encode()]}})), "x")
    assert read.ranks == (one,) and read.sampled and read.end == 10.5
    with pytest.raises(UsageError, match=r"x: stats\.ranks\[0\]: rank is missing"):
        check(content() | {"stats": {"ranks": [{"samples": []}]}}, "x")
