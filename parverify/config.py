"""Every setting of a run, in frozen dataclasses, and how they are read from TOML and from `section.key=value`.

A field declares its type, default, range and choices once; reading, checking and the messages derive from that.
Nothing is ignored: an unknown key is an error that names the key, where it stands, and the keys that are allowed.
The order is defaults, then the file, then `--set`, then the options of the command line.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from parverify.errors import UsageError, why

METHODS = ("auto", "ibp", "crown-ibp", "crown", "alpha-crown", "beta-crown")
DEVICES = ("cpu", "cuda")
DTYPES = ("float32", "float64")
INTERMS = ("rows", "ibp")
MOST_RANKS = 1024
_SEE = "see docs/config.md for what is allowed"
# Beyond these a number does not fit the types that torch and numpy compute with.
_MOST = {int: 2**31 - 1, float: 1e9}

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {_letter: 1000**_power, f"{_letter}b": 1000**_power, f"{_letter}ib": 1024**_power}


def parse_memory(text: str | int) -> int:
    """Bytes from a number of bytes or a text such as `2GiB`, `512MiB` or `1.5G`.

    `KiB`, `MiB`, `GiB`, `TiB` are powers of 1024; `K`/`KB`, `M`/`MB`, `G`/`GB`, `T`/`TB` are powers of 1000.

    Raises:
        UsageError: if the text is no positive amount of memory.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]*)\s*", str(text))
    unit = None if match is None or isinstance(text, bool) else _UNITS.get(match[2].lower())
    amount = float(match[1]) * unit if match and unit else 0.0
    if not 1 <= amount < math.inf:
        raise UsageError(f"memory: {text!r} is not an amount of memory", "write for example 2GiB, 512MiB or 1.5G")
    return int(amount)


def _option(
    default: Any,
    *,
    choices: Sequence[str] = (),
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
) -> Any:
    """A dataclass field with what is allowed: one of `choices`, `>= least` or `> above`, and `<= most`.

    Without `most` a number is at most what `_MOST` says of its type.
    """
    return field(default=default, metadata={"choices": tuple(choices), "least": least, "above": above, "most": most})


def _check_value(section: Any, item: dataclasses.Field[Any]) -> None:
    """Raise `UsageError` unless the field's value has the declared type and is allowed."""
    value, kind = getattr(section, item.name), get_type_hints(type(section))[item.name]
    if value is None and _optional(kind):
        return
    if not _has_type(value, _optional(kind) or kind):
        raise UsageError(f"setting {item.name}: {value!r} is not of type {_type_name(kind)}", _SEE)
    choices = item.metadata.get("choices")
    if choices and value not in choices:
        raise UsageError(f"setting {item.name}: {value!r} is not one of {', '.join(choices)}", _SEE)
    _check_range(item, value, _optional(kind) or kind)


def _check_range(item: dataclasses.Field[Any], value: Any, kind: type) -> None:
    """Raise `UsageError` unless a number is in the field's range."""
    least, above, most = (item.metadata.get(key) for key in ("least", "above", "most"))
    if least is not None and not (least <= value < math.inf):
        raise UsageError(f"setting {item.name}: {value!r} is not a finite number >= {least}", _SEE)
    if above is not None and not (above < value < math.inf):
        raise UsageError(f"setting {item.name}: {value!r} is not a finite number > {above}", _SEE)
    limit = most or _MOST.get(kind)
    if limit is not None and value > limit:
        raise UsageError(f"setting {item.name}: {value!r} is more than {limit}, the most that is allowed", _SEE)


def _optional(kind: Any) -> Any:
    """The type X of `X | None`; None for another type."""
    return next((plain for plain in (int, bool, str) if kind == (plain | None)), None)


def _has_type(value: Any, kind: Any) -> bool:
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def _type_name(kind: Any) -> str:
    return str((_optional(kind) or kind).__name__)


@dataclass(frozen=True)
class _Section:
    """A group of settings that checks itself, however it is made."""

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            _check_value(self, item)


@dataclass(frozen=True)
class AlphaSettings(_Section):
    """[alpha]: optimizing the lower slopes of unstable activations (alpha-CROWN, arXiv:2011.13824).

    Args:
        iterations: steps of the optimizer for each tile of rows; 0 keeps the slopes of CROWN.
        lr: its learning rate.
        joint: optimize the slopes of all layers at once instead of tile by tile.
    """

    iterations: int = _option(20, least=0)
    lr: float = _option(0.5, above=0)
    joint: bool = _option(False)


@dataclass(frozen=True)
class BetaSettings(_Section):
    """[beta]: optimizing the multipliers of split constraints in each subproblem (beta-CROWN, arXiv:2103.06624).

    Args:
        iterations: steps of the optimizer for each batch of subproblems.
        lr_alpha, lr_beta: learning rates of the slopes and of the multipliers.
    """

    iterations: int = _option(10, least=1)
    lr_alpha: float = _option(0.1, above=0)
    lr_beta: float = _option(0.1, above=0)


@dataclass(frozen=True)
class BranchingSettings(_Section):
    """[branching]: how a subproblem is split.

    Args:
        kind: split the input box, split activations, or let the network decide.
        batch: subproblems bounded at once; 0 takes what the memory allows.
        candidates: splits whose children are bounded before one is chosen.
    """

    kind: str = _option("auto", choices=("auto", "input", "activation"))
    batch: int = _option(0, least=0)
    candidates: int = _option(3, least=1)


@dataclass(frozen=True)
class AttackSettings(_Section):
    """[attack]: the search for a witness before and during branch and bound.

    Args:
        enabled: search at all.
        restarts: random starting points.
        steps: gradient steps from each.
        seconds: most seconds spent before bounding starts.
        share: of the time of branch and bound, for more of it meanwhile; 0 for none.
    """

    enabled: bool = _option(True)
    restarts: int = _option(30, least=1)
    steps: int = _option(100, least=1)
    seconds: float = _option(10.0, least=0)
    share: float = _option(0.05, least=0)


@dataclass(frozen=True)
class BoundsSettings(_Section):
    """[bounds]: bounding intermediate layers.

    Args:
        tile: rows pushed backward at once; 0 takes what the memory allows, -1 all rows of a rank.
        intersect: intersect backward bounds with interval bounds.
        allowance: units in the last place by which bounds are widened for rounding; `run` uses at least 2.
    """

    tile: int = _option(0, least=-1)
    intersect: bool = _option(True)
    allowance: float = _option(2.0, least=0)


@dataclass(frozen=True)
class ParallelSettings(_Section):
    """[parallel]: how the work is divided over ranks; see `parverify.strategy.directives.choose_strategy`.

    Args:
        nproc: ranks that are started on this machine.
        strategy: a preset, or a file that ends in `.toml`; `auto` is `single` on one rank, else `fold`.
        interm: bound neurons between the products of a tensor-parallel pair by rows or by intervals; None leaves it to
            the strategy.
        prefetch: bring the next weight while the present one is multiplied; None leaves it to the strategy.
        shared_memory: ranks of one machine copy weights from each other's memory instead of sending them; on the CPU.
        groups: groups of ranks that search different subproblems of branch and bound; 0 follows the number of open
            ones, up to a group a rank where the memory allows the whole network on each.
    """

    nproc: int = _option(1, least=1, most=MOST_RANKS)
    strategy: str = _option("auto")
    interm: str | None = _option(None, choices=INTERMS)
    prefetch: bool | None = _option(None)
    shared_memory: bool = _option(True)
    groups: int = _option(0, least=0, most=MOST_RANKS)


@dataclass(frozen=True)
class Settings(_Section):
    """All settings of a run; the deadline is not one of them, see `parverify.clock.Clock`.

    Args:
        method: the strongest bounds used; `auto` chooses by network and query.
        device: where tensors live.
        dtype: floating-point type of the bounds.
        memory: budget in bytes, or None for what the machine has.
        seed: of every random choice.
        alpha, beta, branching, attack, bounds, parallel: see the class of each.

    Raises:
        UsageError: if a value is not allowed.
    """

    method: str = _option("auto", choices=METHODS)
    device: str = _option("cpu", choices=DEVICES)
    dtype: str = _option("float32", choices=DTYPES)
    memory: int | None = _option(None, above=0, most=2**60)
    seed: int = _option(0, least=0, most=2**63 - 1)
    alpha: AlphaSettings = AlphaSettings()
    beta: BetaSettings = BetaSettings()
    branching: BranchingSettings = BranchingSettings()
    attack: AttackSettings = AttackSettings()
    bounds: BoundsSettings = BoundsSettings()
    parallel: ParallelSettings = ParallelSettings()


SECTIONS = {"alpha", "beta", "branching", "attack", "bounds", "parallel"}


def keys() -> dict[str, Any]:
    """Every key, dotted (`alpha.iterations`), with its default."""
    found: dict[str, Any] = {}
    for name, value in dataclasses.asdict(Settings()).items():
        if name in SECTIONS:
            found |= {f"{name}.{key}": default for key, default in value.items()}
        else:
            found[name] = value
    return found


def read_toml(path: str | Path) -> dict[str, Any]:
    """The settings in a TOML file, dotted, each key checked for existence (not yet its value).

    Raises:
        UsageError: if the file can't be read, is no TOML, or holds an unknown key.
    """
    try:
        document = toml_loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"can't read the configuration {path}: {why(error)}", "name a TOML file") from error
    except ValueError as error:  # malformed TOML and malformed UTF-8 alike
        raise UsageError(f"{path} is not TOML: {error}", "see docs/config.md for an example") from error
    found: dict[str, Any] = {}
    for name, value in document.items():
        if isinstance(value, Mapping):
            if name not in SECTIONS:
                raise _unknown(name, source=str(path))
            found |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            found[name] = value
    for name in found:
        if name not in keys():
            raise _unknown(name, source=str(path))
    return found


def toml_loads(text: str) -> dict[str, Any]:
    """The tables of a TOML text; raises `ValueError` for another."""
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        try:
            import tomli as tomllib  # type: ignore[import-not-found, no-redef]
        except ModuleNotFoundError as error:
            raise UsageError("reading TOML needs Python 3.11 or the package tomli", "pip install tomli") from error
    return tomllib.loads(text)


def _unknown(name: str, *, source: str) -> UsageError:
    section, _, key = name.rpartition(".")
    known = sorted(keys())
    if section in SECTIONS:
        allowed = [known_name.split(".")[1] for known_name in known if known_name.startswith(f"{section}.")]
        place = f"[{section}]"
    else:
        key, place = name, "a configuration"
        allowed = [known_name for known_name in known if "." not in known_name] + [f"[{s}]" for s in sorted(SECTIONS)]
    in_sections = [known_name for known_name in known if known_name.endswith(f".{key}")]
    close = in_sections or difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {' or '.join(close)}?" if close else "see docs/config.md"
    return UsageError(f"unknown key {key!r} in {source}; allowed in {place}: {', '.join(allowed)}", hint)


def parse_assignment(text: str) -> tuple[str, Any]:
    """A dotted key and its typed value from `section.key=value`.

    Raises:
        UsageError: if there is no `=`, no such key, or the value has the wrong type.
    """
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals:
        raise UsageError(f"--set {text!r} has no '='", "write --set section.key=value")
    if name not in keys():
        raise _unknown(name, source=f"--set {text}")
    section, _, key = name.rpartition(".")
    owner = type(getattr(Settings(), section)) if section else Settings
    return name, _parse(value, get_type_hints(owner)[key], source=f"--set {text}")


def _parse(value: str, kind: Any, *, source: str) -> Any:
    """The text `value` as the type `kind`."""
    if kind is str:
        return value
    if _optional(kind) is not None and value == "none":
        return None
    if kind == (int | None):
        return parse_memory(value)
    kind = _optional(kind) or kind
    if kind is str:
        return value
    if kind is bool:
        if value not in ("true", "false"):
            raise UsageError(f"{source}: {value!r} is neither true nor false", _SEE)
        return value == "true"
    try:
        return kind(value)
    except ValueError as error:
        raise UsageError(f"{source}: {value!r} is not of type {_type_name(kind)}", _SEE) from error


def make_settings(values: Mapping[str, Any]) -> Settings:
    """Settings from dotted keys; what is absent keeps its default.

    Raises:
        UsageError: if a key is unknown or a value is not allowed.
    """
    top: dict[str, Any] = {}
    inner: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        if name not in keys():
            raise _unknown(name, source="the settings")
        section, _, key = name.rpartition(".")
        if section:
            inner.setdefault(section, {})[key] = value
        else:
            top[key] = parse_memory(value) if key == "memory" and isinstance(value, str) else value
    for section, given in inner.items():
        try:
            top[section] = type(getattr(Settings(), section))(**given)
        except UsageError as error:
            raise UsageError(f"[{section}] {error.message}", error.hint) from error
    return Settings(**top)


def resolve(
    file: str | Path | None, assignments: Sequence[str] = (), flags: Mapping[str, Any] | None = None
) -> Settings:
    """The settings of one run.

    Args:
        file: a TOML file, or None.
        assignments: texts `section.key=value`; the last of equal keys wins.
        flags: dotted keys given as options; None means not given. They override everything else.

    Raises:
        UsageError: naming the key, its file and what is allowed.
    """
    values: dict[str, Any] = {}
    if file is not None:
        values |= read_toml(file)
        try:
            make_settings(values)
        except UsageError as error:
            raise UsageError(f"{file}: {error.message}", error.hint) from error
    values |= dict(parse_assignment(text) for text in assignments)
    values |= {name: value for name, value in (flags or {}).items() if value is not None}
    return make_settings(values)
