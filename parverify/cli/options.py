"""Options that several commands share: how the settings are given, and how much is said."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from parverify.bab.identity import Keep
from parverify.config import DEVICES, DTYPES, INTERMS, METHODS, MOST_RANKS, Settings, parse_memory, resolve
from parverify.errors import UsageError
from parverify.strategy.directives import choose_strategy

Function = TypeVar("Function", bound=Callable[..., Any])


class Memory(click.ParamType):
    """An amount of memory such as 2GiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Bytes."""
        try:
            return parse_memory(value)
        except UsageError as error:
            self.fail(str(error), param, ctx)


class Seconds(click.ParamType):
    """A positive, finite number of seconds."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Seconds."""
        try:
            seconds = float(value)
        except ValueError:
            self.fail(f"{value!r} is not a number of seconds", param, ctx)
        if not 0 < seconds < math.inf:
            self.fail(f"{value!r} is not a positive, finite number of seconds", param, ctx)
        return seconds


class Name(click.ParamType):
    """The name of a file or a folder; not the empty text of an unset variable, which would be the current folder."""

    name = "name"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The name as given."""
        if not value:
            self.fail("the name is empty", param, ctx)
        return str(value)


class Share(click.ParamType):
    """A number from 0 to 1."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number."""
        try:
            share = float(value)
        except ValueError:
            share = math.nan
        if not 0 <= share <= 1:
            self.fail(f"{value!r} is not a number from 0 to 1", param, ctx)
        return share


def timeout_option(function: Function) -> Function:
    """--timeout."""
    text = "Seconds from the start of the process to the answer; no end without it."
    return click.option("--timeout", type=Seconds(), help=text)(function)


@dataclass(frozen=True)
class Journaling:
    """What `journal_options` say.

    Args:
        keep: the journal; None for none.
        restarts: how often ranks are started again where one is lost.
    """

    keep: Keep | None = None
    restarts: int = 0


def journal_options(function: Function) -> Function:
    """--journal, --resume and --restarts."""
    options = [
        click.option(
            "--journal", type=Name(), metavar="DIR", help="Write the search down in a new folder; see docs/journal.md."
        ),
        click.option("--resume", type=Name(), metavar="DIR", help="Go on from such a folder, and go on writing there."),
        click.option(
            "--restarts",
            type=click.IntRange(min=0),
            default=0,
            help="Start lost ranks again so often, from the journal.",
        ),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def take_journal(options: dict[str, Any]) -> Journaling:
    """Remove the options of `journal_options` from `options`.

    Raises:
        UsageError: they exclude each other, or one needs another.
    """
    journal, resume, restarts = (options.pop(name) for name in ("journal", "resume", "restarts"))
    if journal is not None and resume is not None:
        raise UsageError("--journal and --resume are both given", "give --resume alone: it writes there too")
    folder = journal if resume is None else resume
    if folder is None and restarts:
        raise UsageError("--restarts needs a journal to go on from", "name a folder by --journal")
    return Journaling(None if folder is None else Keep(folder, resume=resume is not None), restarts)


def settings_options(methods: tuple[str, ...] = METHODS) -> Callable[[Function], Function]:
    """The options that are settings, --config and --set, as keyword arguments of those names."""
    options = [
        click.option("--method", type=click.Choice(methods), help="Strongest bounds used."),
        click.option("--device", type=click.Choice(DEVICES), help="Where tensors live."),
        click.option("--dtype", type=click.Choice(DTYPES), help="Floating-point type of the bounds."),
        click.option("--memory", type=Memory(), help="Budget such as 2GiB; without it what the machine has."),
        click.option("--seed", type=click.IntRange(min=0), help="Of every random choice."),
        click.option("--nproc", type=click.IntRange(1, MOST_RANKS), help="Ranks that are started on this machine."),
        click.option(
            "--strategy", type=Name(), metavar="NAME|FILE", help="How ranks share the work; see docs/strategies.md."
        ),
        click.option("--interm", type=click.Choice(INTERMS), help="Bounds of neurons within tensor-parallel pairs."),
        click.option("--config", type=Name(), metavar="FILE", help="Settings in TOML; see docs/config.md."),
        click.option(
            "--set", "assignments", multiple=True, metavar="SECTION.KEY=VALUE", help="One setting; may be repeated."
        ),
    ]

    def decorate(function: Function) -> Function:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def talk_options(function: Function) -> Function:
    """-v and -q."""
    function = click.option("-q", "--quiet", is_flag=True, help="Say nothing on stderr but errors.")(function)
    return click.option("-v", "--verbose", is_flag=True, help="Say what happens; show tracebacks.")(function)


def take_settings(options: dict[str, Any]) -> Settings:
    """Remove the options of `settings_options` from `options` and resolve them.

    Raises:
        UsageError: if the file, a key or a value is not allowed.
    """
    file, assignments = options.pop("config"), options.pop("assignments")
    flags = {name: options.pop(name) for name in ("method", "device", "dtype", "memory", "seed")}
    flags |= {f"parallel.{name}": options.pop(name) for name in ("nproc", "strategy", "interm")}
    settings = resolve(file, assignments, flags)
    choose_strategy(settings.parallel, settings.parallel.nproc)  # what is wrong with it is said at once
    return settings
