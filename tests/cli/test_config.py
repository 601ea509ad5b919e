"""Settings: defaults, TOML, assignments, flags, what is refused, and that every key is documented."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from parverify import config
from parverify.config import (
    AlphaSettings,
    BranchingSettings,
    Settings,
    keys,
    make_settings,
    parse_assignment,
    parse_memory,
    read_toml,
    resolve,
)
from parverify.errors import UsageError

DOCS = Path(__file__).resolve().parents[2] / "docs" / "config.md"


def shown(value: Any) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def test_every_key_is_documented_with_its_default() -> None:
    rows = re.findall(r"^\| `([a-z_.]+)` \| `([^`]*)` \|", DOCS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert dict(rows) == {name: shown(value) for name, value in keys().items()}
    assert len(rows) == len(keys())


def test_every_key_is_read() -> None:
    """Somewhere in the package, outside of the module that declares it, `section.key` is looked up."""
    package = Path(config.__file__).parent
    files = [path for path in package.rglob("*.py") if path != Path(config.__file__)]
    read = {pair for path in files for pair in looked_up(path.read_text(encoding="utf-8"))}
    unread = [name for name in keys() if (name.rpartition(".")[0] or "settings", name.rpartition(".")[2]) not in read]
    assert not unread
    assert ("alpha", "learning") not in read


def looked_up(source: str) -> Iterator[tuple[str, str]]:
    """Pairs (owner, attribute) in a module, where `x = a.owner` makes x another name of the owner in its function."""
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        names: dict[str, str] = {}
        for node in ast.walk(function):
            for target, value in assigned(node):
                if isinstance(target, ast.Name) and isinstance(value, ast.Attribute):
                    names[target.id] = value.attr.lstrip("_")
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute):
                owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
                yield owner.lstrip("_"), node.attr
                yield names.get(owner, ""), node.attr


def assigned(node: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    """What an assignment gives to what, one by one."""
    if not isinstance(node, ast.Assign):
        return []
    target, value = node.targets[0], node.value
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return list(zip(target.elts, value.elts, strict=True))
    return [(target, value)]


def test_the_example_in_the_documentation_is_read(tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", DOCS.read_text(encoding="utf-8"), flags=re.DOTALL)
    path = tmp_path / "mine.toml"
    path.write_text(example)
    settings = resolve(path)
    assert settings.method == "beta-crown" and settings.memory == 2 * 1024**3
    assert settings.alpha.iterations == 50 and settings.branching.batch == 256


def test_order_of_precedence(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('method = "ibp"\nseed = 1\n[alpha]\nlr = 1\niterations = 2\n')
    settings = resolve(path, ["alpha.iterations=3", "seed=2", "seed=3"], {"method": "crown", "dtype": None})
    assert (settings.method, settings.dtype, settings.seed) == ("crown", "float32", 3)
    assert settings.alpha == AlphaSettings(iterations=3, lr=1)
    assert resolve(None) == Settings()


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("iterations = 3", ["unknown key 'iterations'", "allowed in a configuration: device", "alpha.iterations"]),
        ("[alpha]\nlearning = 3", ["unknown key 'learning'", "allowed in [alpha]: iterations, joint, lr"]),
        ("[gamma]\nlr = 1", ["unknown key 'gamma'", "[alpha]"]),
        ("alpha = 3", ["unknown key 'alpha'"]),
        ("[alpha.lr]\nx = 1", ["setting lr: {'x': 1} is not of type float"]),
        ("[alpha]\niterations = true", ["[alpha] setting iterations: True is not of type int"]),
        ("[alpha]\niterations = -1", ["-1 is not a finite number >= 0"]),
        ("[alpha]\nlr = nan", ["nan is not a finite number > 0"]),
        ("[attack]\nseconds = inf", ["inf is not a finite number"]),
        ("[attack]\nenabled = 1", ["1 is not of type bool"]),
        ('[branching]\nkind = "both"', ["'both' is not one of auto, input, activation"]),
        ('memory = "much"', ["'much' is not an amount of memory"]),
        ("memory = 0", ["0 is not a finite number > 0"]),
        ("[parallel]\nnproc = 0", ["0 is not a finite number >= 1"]),
        ('[parallel]\ninterm = "crown"', ["'crown' is not one of rows, ibp"]),
        ("[parallel]\nprefetch = 1", ["1 is not of type bool"]),
        ("[bounds]\ntile = -2", ["-2 is not a finite number >= -1"]),
        ("[bounds]\ntile = 2147483648", ["2147483648 is more than 2147483647"]),
        ("[alpha]\nlr = 1e300", ["1e+300 is more than"]),
        ("[parallel]\nnproc = 1025", ["1025 is more than 1024"]),
        ('memory = "9999999TiB"', ["is more than"]),
        ("method = ", ["is not TOML"]),
    ],
)
def test_what_a_file_may_not_hold(tmp_path: Path, text: str, parts: list[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        resolve(path)
    assert "mine.toml" in str(caught.value) and all(part in str(caught.value) for part in parts), str(caught.value)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="is not TOML"):
        read_toml(path)
    with pytest.raises(UsageError, match="can't read"):
        read_toml(tmp_path)


def test_assignments() -> None:
    assert parse_assignment("alpha.joint=true") == ("alpha.joint", True)
    assert parse_assignment("memory = 1KiB") == ("memory", 1024)
    assert parse_assignment("memory=none") == ("memory", None)
    assert parse_assignment("parallel.prefetch=none") == ("parallel.prefetch", None)
    assert parse_assignment("parallel.prefetch=false") == ("parallel.prefetch", False)
    assert parse_assignment("parallel.interm=ibp") == ("parallel.interm", "ibp")
    assert parse_assignment("bounds.tile=-1") == ("bounds.tile", -1)
    assert parse_assignment("attack.seconds=1e-3") == ("attack.seconds", 1e-3)
    for bad in ("alpha.joint=yes", "seed=1.5", "seed", "nothing=1", "alpha=1", "alpha.lr.x=1",
                "parallel.nproc=none", "parallel.prefetch=maybe"):  # fmt: skip
        with pytest.raises(UsageError):
            parse_assignment(bad)


def test_settings_check_themselves_and_are_frozen() -> None:
    with pytest.raises(UsageError, match="is not one of"):
        Settings(method="magic")
    with pytest.raises(UsageError, match=">= 1"):
        BranchingSettings(candidates=0)
    with pytest.raises(UsageError, match="not of type AlphaSettings"):
        Settings(alpha={"lr": 1.0})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="unknown key 'speed'"):
        make_settings({"speed": 1})
    with pytest.raises(FrozenInstanceError):
        Settings().seed = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GiB", 2 << 30), ("512 MiB", 512 << 20), ("1.5G", 1_500_000_000), ("7", 7), (".5k", 500), ("1tb", 10**12)],
)
def test_memory(text: str, size: int) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1G", "0", "1.2.3M", "1e9", "nan", "1 PB", "9" * 400, "0.1"])
def test_what_is_no_memory(text: str) -> None:
    with pytest.raises(UsageError, match="not an amount of memory"):
        parse_memory(text)


@examples(deadline=None)
@given(st.sampled_from(sorted(keys())), st.text(max_size=8))
def test_an_assignment_is_read_or_refused(name: str, value: str) -> None:
    try:
        settings = resolve(None, [f"{name}={value}"])
    except UsageError as error:
        assert error.message
    else:
        assert isinstance(settings, Settings)
