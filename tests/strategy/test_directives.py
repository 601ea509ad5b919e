"""Strategies as text: what is read, what overrides what, and what is refused with the directive named."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from parverify.config import ParallelSettings
from parverify.errors import UsageError
from parverify.strategy import directives
from parverify.strategy.directives import (
    Interm,
    Order,
    Place,
    Split,
    Strategy,
    choose_strategy,
    load_strategy,
    presets,
    read_strategy,
)

PRESETS = ("fold", "fsdp", "ring", "single", "tp")


def read(text: str) -> Strategy:
    return read_strategy(text, name="mine", where="mine.toml")


# --- presets ----------------------------------------------------------------------------------------------------------


def test_presets() -> None:
    assert presets() == PRESETS
    assert load_strategy("single").directives == (Place("*", "replicate"),)
    assert load_strategy("fsdp").directives == (Place("*", "gather"), Order(True))
    assert load_strategy("tp").directives == (Place("*", "pair"), Interm("rows"))
    assert load_strategy("fold").directives == (Place("*", "stream"), Split("rows"))
    assert load_strategy("ring").directives == (Place("*", "ring"), Split("rows"))
    assert all(load_strategy(name).name == name for name in presets())


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_short(name: str) -> None:
    text = (Path(directives.__file__).parent / "presets" / f"{name}.toml").read_text(encoding="utf-8")
    assert 0 < len(text.splitlines()) <= 15


def test_presets_are_packaged() -> None:
    """Every file beside the presets' code is named in the package data."""
    root = Path(directives.__file__).parents[2]
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    assert '"strategy/presets/*.toml"' in text
    assert {path.suffix for path in (root / "parverify/strategy/presets").iterdir()} == {".toml"}


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_file_states_directives() -> None:
    strategy = read(
        """
        place = [{ match = "conv", how = "gather" }, { match = "n?", how = "replicate" }]
        split = { axis = "rows", tile = 64 }
        order = { prefetch = true }
        """
    )
    assert strategy == Strategy(
        "mine", (Place("conv", "gather"), Place("n?", "replicate"), Split("rows", 64), Order(True))
    )
    assert strategy.splits_rows and strategy.prefetch and strategy.interm == "rows"
    assert (strategy.tile(0), strategy.tile(8), strategy.tile(-1)) == (64, 8, -1)
    assert read("") == Strategy("mine") and Strategy("mine").tile(0) == 0


def test_a_file_composes_presets() -> None:
    strategy = read(
        """
        use = [{ preset = "tp", match = "linear" }, { preset = "fsdp", match = "conv" }]
        place = [{ match = "n7", how = "replicate" }]
        order = { prefetch = false, override = true }
        """
    )
    assert strategy.places == (Place("linear", "pair"), Place("conv", "gather"), Place("n7", "replicate"))
    assert not strategy.prefetch and not strategy.splits_rows
    assert read('use = ["fold"]').directives == load_strategy("fold").directives


def test_a_strategy_is_a_preset_or_a_file(tmp_path: Path) -> None:
    path = tmp_path / "my own.toml"
    path.write_text('use = ["ring"]')
    assert load_strategy(str(path)) == Strategy("my own", load_strategy("ring").directives)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="can't read the strategy"):
        load_strategy(str(path))
    with pytest.raises(UsageError, match="can't read the strategy"):
        load_strategy(str(tmp_path / "none.toml"))
    with pytest.raises(UsageError, match="unknown strategy 'zero'; allowed: fold, fsdp, ring, single, tp"):
        load_strategy("zero")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("placed = []", ["unknown key 'placed'", "allowed: use, place, split, order, interm"]),
        ("place = {}", ["place is not a list"]),
        ('place = ["conv"]', ["place 'conv' is not a table with the keys match, how, override"]),
        ('place = [{ match = "*", hwo = "ring" }]', ["place: unknown key 'hwo'", "match, how, override"]),
        ('place = [{ match = "*" }]', ["lacks match or how"]),
        ('place = [{ how = "ring" }]', ["lacks match or how"]),
        ('place = [{ match = "*", how = "diagonal" }]', ['place { match = "*"', "'diagonal' is not one of replicate"]),
        ('place = [{ match = 3, how = "ring" }]', ["place: match = 3 is not of type str"]),
        ('split = "rows"', ["split 'rows' is not a table with the keys axis, tile, override"]),
        ('split = { axis = "columns" }', ['split { axis = "columns" }', "is not one of rows, none"]),
        ('split = { axis = "rows", tile = -2 }', ["tile = -2", "whole number >= -1"]),
        ('split = { axis = "rows", tile = true }', ["split: tile = True is not of type int"]),
        ("order = { prefetch = 1 }", ["order: prefetch = 1 is not of type bool"]),
        ("order = { fetch = true }", ["order: unknown key 'fetch'"]),
        ('interm = { how = "crown" }', ['interm { how = "crown" }', "is not one of rows, ibp"]),
        ("use = 'fold'", ["use is not a list"]),
        ('use = ["zero"]', ["use: 'zero' is no preset; allowed: fold"]),
        ('use = [{ match = "conv" }]', ["use: None is no preset"]),
        ('use = [{ preset = "tp", nodes = "conv" }]', ["use: unknown key 'nodes'; allowed: preset, match"]),
        ("use = [3]", ["use 3 is not a table"]),
        ("use = ", ["is not TOML"]),
    ],
)
def test_what_a_file_may_not_hold(text: str, parts: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        read(text)
    assert all(part in caught.value.message for part in ["mine.toml", *parts]), caught.value.message


# --- directives among each other --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ((Place("conv", "ring"), Place("conv", "gather")), ['place { match = "conv", how = "gather" } contradict']),
        ((Split("rows"), Split("rows", 5)), ['split { axis = "rows", tile = 5 } contradict']),
        ((Split("rows"), Split("none")), ["contradict"]),
        ((Place("*", "gather"), Order(True), Order(False)), ["order { prefetch = true }", "contradict"]),
        ((Place("*", "pair"), Interm("ibp"), Interm("rows")), ["contradict"]),
        ((Place("*", "pair"), Split("rows")), ['place { match = "*", how = "pair" }', 'split { axis = "rows" }']),
        ((Split("rows"), Place("*", "stream"), Place("n1", "column")), ["must push the same rows"]),
        ((Split("rows"), Place("*", "stream"), Place("n1", "row")), ["must push the same rows"]),
        ((Place("*", "gather"), Interm("ibp")), ['interm { how = "ibp" } needs weights placed as column, row, pair']),
        ((Place("*", "ring"), Order(True)), ["order { prefetch = true } needs weights placed as gather or stream"]),
    ],
)
def test_contradictions_are_refused(given: tuple[directives.Directive, ...], parts: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        Strategy("mine", given)
    assert all(part in caught.value.message for part in ["strategy mine", *parts]), caught.value.message


def test_what_overrides() -> None:
    later = Place("conv", "gather", override=True)
    strategy = Strategy("mine", (Place("conv", "ring"), Place("*", "replicate"), later))
    assert strategy.places == (Place("*", "replicate"), later)
    assert not Strategy("mine", (Split("rows", 7), Split("none", override=True))).splits_rows
    assert not Strategy("mine", (Place("*", "gather"), Order(True), Order(override=True))).prefetch
    folded = (*load_strategy("fold").directives, Split("none", override=True), Place("*", "pair", override=True))
    assert not Strategy("mine", folded).splits_rows
    # saying the same twice is no contradiction
    assert Strategy("mine", (Split("rows"), Split("rows", override=True), Split("rows"))).splits_rows


# --- settings ---------------------------------------------------------------------------------------------------------


def test_settings_choose_a_strategy() -> None:
    assert choose_strategy(ParallelSettings(), 1) == load_strategy("single")
    assert choose_strategy(ParallelSettings(), 2) == load_strategy("fold")
    assert choose_strategy(ParallelSettings(strategy="fsdp"), 1) == load_strategy("fsdp")
    assert choose_strategy(ParallelSettings(strategy="fsdp"), 2).prefetch
    assert not choose_strategy(ParallelSettings(strategy="fsdp", prefetch=False), 2).prefetch
    assert not choose_strategy(ParallelSettings(), 2).prefetch
    assert choose_strategy(ParallelSettings(prefetch=True), 2).prefetch
    assert choose_strategy(ParallelSettings(strategy="tp"), 2).interm == "rows"
    assert choose_strategy(ParallelSettings(strategy="tp", interm="ibp"), 2).interm == "ibp"
    assert choose_strategy(ParallelSettings(prefetch=True, interm="ibp"), 1) == load_strategy("single")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (ParallelSettings(interm="ibp"), "strategy fold: interm"),
        (ParallelSettings(strategy="fsdp", interm="ibp"), "strategy fsdp: interm"),
        (ParallelSettings(strategy="ring", prefetch=True), "strategy ring: order"),
        (ParallelSettings(strategy="tp", prefetch=True), "strategy tp: order"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings: ParallelSettings, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        choose_strategy(settings, 2)


# --- documentation ----------------------------------------------------------------------------------------------------

DOCS = Path(directives.__file__).parents[2] / "docs" / "strategies.md"


def test_the_examples_in_the_documentation_are_read() -> None:
    examples = re.findall(r"```toml\n(.*?)```", DOCS.read_text(encoding="utf-8"), flags=re.DOTALL)
    mixed, folded = (read(example) for example in examples)
    assert mixed.places == (Place("conv", "gather"), Place("linear", "pair"), Place("linear_9", "replicate"))
    assert folded.splits_rows and folded.prefetch and folded.tile(0) == 32


def test_every_key_is_documented() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", DOCS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    documented = {name: re.findall(r"`(\w+)`", fields) for name, fields in rows}
    for kind, made in directives.KINDS.items():
        assert documented[kind] == [field.name for field in dataclasses.fields(made)]
    assert set(directives.PLACES) | set(PRESETS) <= documented.keys()
