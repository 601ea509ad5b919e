"""Strategies are data: a list of directives that say how weights are placed, rows split, and communication ordered.

Nothing here knows a network or imports torch; `parverify.strategy.compile` applies a strategy to a graph. A directive
that is later in the list overrides an earlier one for the nodes that both match. Two directives about the very same
thing (a `Place` with the same match, two of another kind) that say different things are a mistake, unless the later one
says `override`. A strategy is read from a TOML file whose keys are the directives' names and fields; what is neither
known nor meaningful there is refused, and the message names the directive.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from parverify.config import INTERMS, ParallelSettings, toml_loads
from parverify.errors import UsageError, why

PLACES = ("replicate", "gather", "stream", "ring", "column", "row", "pair")
CHANNEL_PLACES = ("column", "row", "pair")  # ranks hold channels of rows
AXES = ("rows", "none")
_SEE = "see docs/strategies.md"


class _Directive:
    """What all directives share: their text and what they are about."""

    override: bool

    @property
    def kind(self) -> str:
        """Its name in a file."""
        return type(self).__name__.lower()

    @property
    def about(self) -> tuple[str, ...]:
        """What two directives must not say different things about."""
        return (self.kind,)

    def says(self) -> Any:
        """What it says about that."""
        return replace(self, override=False)  # type: ignore[type-var]

    def __str__(self) -> str:
        fields = [(f.name, getattr(self, f.name), f.default) for f in dataclasses.fields(self)]  # type: ignore[arg-type]
        said = [f"{name} = {_toml(value)}" for name, value, default in fields if value != default]
        return f"{self.kind} {{ {', '.join(said)} }}"


def _toml(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


def _check(directive: _Directive, value: Any, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise UsageError(f"{directive}: {value!r} is not one of {', '.join(allowed)}", _SEE)


@dataclass(frozen=True)
class Place(_Directive):
    """Where the weights of some nodes are and how they are multiplied.

    Args:
        match: a pattern (`*`, `?`, `[...]`) for the node's name, its operator (`linear`, `conv`), or its name or
            operator in the user's network.
        how: `replicate`: whole on every rank. `gather`: sharded, gathered whole for use. `stream`: parts are broadcast
            by the ranks that hold them. `ring`: shards go around (streamed where there are fewer parts than ranks).
            `column`: divided by output channels; `row`: by input channels; `pair`: in pairs found in the network.
        override: instead of an earlier directive with the same match.
    """

    match: str = "*"
    how: str = "replicate"
    override: bool = False

    def __post_init__(self) -> None:
        _check(self, self.how, PLACES)

    @property
    def about(self) -> tuple[str, ...]:
        """Its nodes."""
        return self.kind, self.match

    def __str__(self) -> str:
        return f'place {{ match = "{self.match}", how = "{self.how}" }}'


@dataclass(frozen=True)
class Split(_Directive):
    """What is dealt out to the ranks.

    Args:
        axis: `rows`: tiles of rows; `none`: every rank pushes every row.
        tile: rows in a tile where the settings leave it open; 0 for what the memory allows, -1 for all rows of a rank.
        override: instead of an earlier one.
    """

    axis: str = "none"
    tile: int = 0
    override: bool = False

    def __post_init__(self) -> None:
        _check(self, self.axis, AXES)
        if self.tile < -1:
            raise UsageError(f"{self}: tile {self.tile} is no whole number >= -1", _SEE)


@dataclass(frozen=True)
class Order(_Directive):
    """When weights are communicated.

    Args:
        prefetch: start to bring the next weight or part while the present one is multiplied; takes a second buffer.
        override: instead of an earlier one.
    """

    prefetch: bool = False
    override: bool = False


@dataclass(frozen=True)
class Interm(_Directive):
    """How neurons between the two products of a pair are bounded.

    Args:
        how: `rows`: by rows, exact. `ibp`: by intervals (arXiv:2606.09377), looser but without communication.
        override: instead of an earlier one.
    """

    how: str = "rows"
    override: bool = False

    def __post_init__(self) -> None:
        _check(self, self.how, INTERMS)


Directive = Place | Split | Order | Interm
KINDS: dict[str, type[Place] | type[Split] | type[Order] | type[Interm]] = {
    "place": Place, "split": Split, "order": Order, "interm": Interm
}  # fmt: skip


@dataclass(frozen=True)
class Strategy:
    """A named list of directives.

    Args:
        name: in reports and messages.
        directives: in order; later ones override earlier ones.

    Raises:
        UsageError: if two directives contradict each other, or one has no meaning beside the others.
    """

    name: str
    directives: tuple[Directive, ...] = ()

    def __post_init__(self) -> None:
        said: dict[tuple[str, ...], Directive] = {}
        for directive in self.directives:
            earlier = said.get(directive.about)
            if earlier is not None and earlier.says() != directive.says() and not directive.override:
                raise UsageError(
                    f"strategy {self.name}: {earlier} and {directive} contradict each other",
                    "narrow a match, or write override = true in the later one",
                )
            said[directive.about] = directive
        hows = {place.how for place in self.places}
        channels = [place for place in self.places if place.how in CHANNEL_PLACES]
        if channels and self.splits_rows:
            raise UsageError(
                f"strategy {self.name}: {channels[0]} does not go with {self._last(Split)}: ranks that divide channels "
                "must push the same rows",
                'place the weights otherwise, or write split = { axis = "none", override = true }',
            )
        if self.interm == "ibp" and not channels:
            raise UsageError(
                f"strategy {self.name}: {self._last(Interm)} needs weights placed as {', '.join(CHANNEL_PLACES)}",
                "take --strategy tp, or leave interm away",
            )
        if self.prefetch and not hows & {"gather", "stream"}:
            raise UsageError(
                f"strategy {self.name}: {self._last(Order)} needs weights placed as gather or stream",
                "leave prefetch away",
            )

    def _last(self, kind: type[Directive]) -> Any:
        return next((found for found in reversed(self.directives) if isinstance(found, kind)), kind())

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """The placements that are left where a later one has the same match."""
        last = {place.match: place for place in self.directives if isinstance(place, Place)}
        return tuple(p for p in self.directives if isinstance(p, Place) and last[p.match] is p)

    @property
    def splits_rows(self) -> bool:
        """Whether row tiles are dealt to the ranks."""
        return bool(self._last(Split).axis == "rows")

    @property
    def prefetch(self) -> bool:
        """See `Order`."""
        return bool(self._last(Order).prefetch)

    @property
    def interm(self) -> str:
        """See `Interm`."""
        return str(self._last(Interm).how)

    def tile(self, wanted: int) -> int:
        """Rows in a tile: as `bounds.tile` says unless that is 0, else as the strategy says."""
        return wanted or int(self._last(Split).tile)


# --- files ------------------------------------------------------------------------------------------------------------


def presets() -> tuple[str, ...]:
    """The names of the presets."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


_FOLDER = Path(__file__).parent / "presets"


def load_strategy(name: str) -> Strategy:
    """A preset by its name, or the strategy in a file whose name ends in `.toml`.

    Raises:
        UsageError: there is none, it can't be read, or it says what is not allowed.
    """
    if name in presets():
        return read_strategy((_FOLDER / f"{name}.toml").read_text(encoding="utf-8"), name=name, where=name)
    path = Path(name)
    if path.suffix != ".toml":
        raise UsageError(
            f"unknown strategy {name!r}; allowed: {', '.join(presets())}", "or name a file that ends in .toml"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"can't read the strategy {name}: {why(error)}", "name a TOML file") from error
    return read_strategy(text, name=path.stem, where=name)


def read_strategy(text: str, *, name: str, where: str) -> Strategy:
    """The strategy in a TOML text.

    Args:
        text: see docs/strategies.md.
        name: of the strategy.
        where: the text stands, for messages.

    Raises:
        UsageError: naming the directive.
    """
    try:
        document = toml_loads(text)
    except ValueError as error:
        raise UsageError(f"{where} is not TOML: {error}", _SEE) from error
    unknown = sorted(document.keys() - {"use", *KINDS})
    if unknown:
        raise UsageError(f"{where}: unknown key {unknown[0]!r}; allowed: use, {', '.join(KINDS)}", _SEE)
    found: list[Directive] = []
    for entry in _listed(document.get("use", []), where, "use"):
        found += _used(entry, where)
    for kind in KINDS:
        given = document.get(kind, [])
        for entry in _listed(given, where, kind) if kind == "place" else [given] if given else []:
            found.append(_directive(kind, entry, where))
    try:
        return Strategy(name, tuple(found))
    except UsageError as error:
        raise error if where == name else UsageError(f"{where}: {error.message}", error.hint) from error


def _listed(given: Any, where: str, key: str) -> list[Any]:
    if not isinstance(given, list):
        raise UsageError(f"{where}: {key} is not a list", _SEE)
    return given


def _directive(kind: str, entry: Any, where: str) -> Directive:
    """One directive from its table."""
    fields = {item.name: type(item.default) for item in dataclasses.fields(KINDS[kind])}
    _check_table(kind, entry, fields, where)
    if kind == "place" and not {"match", "how"} <= entry.keys():
        raise UsageError(f"{where}: place {entry} lacks match or how", _SEE)
    try:
        return KINDS[kind](**entry)
    except UsageError as error:
        raise UsageError(f"{where}: {error.message}", error.hint) from error


def _check_table(kind: str, entry: Any, fields: Mapping[str, type], where: str) -> None:
    if not isinstance(entry, dict):
        raise UsageError(f"{where}: {kind} {entry!r} is not a table with the keys {', '.join(fields)}", _SEE)
    for key, value in entry.items():
        if key not in fields:
            raise UsageError(f"{where}: {kind}: unknown key {key!r}; allowed: {', '.join(fields)}", _SEE)
        if type(value) is not fields[key]:
            raise UsageError(f"{where}: {kind}: {key} = {value!r} is not of type {fields[key].__name__}", _SEE)


def _used(entry: Any, where: str) -> list[Directive]:
    """The directives of a preset, by name, or for some nodes only: { preset = ..., match = ... }."""
    table = {"preset": entry} if isinstance(entry, str) else entry
    _check_table("use", table, {"preset": str, "match": str}, where)
    name = table.get("preset")
    if name not in presets():
        raise UsageError(f"{where}: use: {name!r} is no preset; allowed: {', '.join(presets())}", _SEE)
    match = table.get("match", "*")
    preset = load_strategy(str(name)).directives
    return [replace(one, match=match) if isinstance(one, Place) else one for one in preset]


# --- settings ---------------------------------------------------------------------------------------------------------


def choose_strategy(parallel: ParallelSettings, size: int) -> Strategy:
    """The strategy that the settings ask for on `size` ranks.

    `auto` is `single` on one rank, where nothing is divided and the other settings have nothing to say, else `fold`.

    Raises:
        UsageError: as `load_strategy`, or a setting has no meaning under the strategy.
    """
    if parallel.strategy == "auto" and size == 1:
        return load_strategy("single")
    strategy = load_strategy("fold" if parallel.strategy == "auto" else parallel.strategy)
    added: list[Directive] = []
    if parallel.prefetch is not None:
        added.append(Order(parallel.prefetch, override=True))
    if parallel.interm is not None:
        added.append(Interm(parallel.interm, override=True))
    return replace(strategy, directives=(*strategy.directives, *added))
