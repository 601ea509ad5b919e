"""The command `parverify`: a group whose commands are imported when they are asked for.

Nothing here imports torch, so that help and usage errors answer at once. stdout is data, stderr is talk. Every error
raised on purpose ends as one line `error: ...; hint: ...` on stderr and the exit code of its class.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import click

from parverify.cli.outcome import Outcome
from parverify.cli.streams import drop_stdout, open_streams, reader_gone, to_stdout
from parverify.cli.work import Boundary
from parverify.errors import ParverifyError, UsageError

COMMANDS = {
    "run": "parverify.cli.run",
    "bounds": "parverify.cli.bounds",
    "plan": "parverify.cli.plan",
    "supports": "parverify.cli.supports",
    "bench": "parverify.cli.bench",
    "report": "parverify.cli.report",
}

EXIT_CODES = """\b
Exit codes:
   0  sat or unsat; success of the other commands
   2  an option, a configuration key or a file name that is not allowed
  11  unknown (also: interrupted)
  12  timeout
  20  error inside parverify
  21  the network can't be read
  22  the network uses unsupported operators
  23  the property can't be read or does not fit the network
  24  out of memory, or nothing fits the memory budget"""


@dataclass(frozen=True)
class Launch:
    """What the process knows of its own start.

    Args:
        started: `time.monotonic()` when the process was started, or when it is first known.
    """

    started: float = field(default_factory=time.monotonic)


class LazyGroup(click.Group):
    """A group that knows its commands by module name, and turns errors into one line and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command; None where there is none of that name."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(COMMANDS[cmd_name]).command
        return command

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any) -> Any:  # type: ignore[override]
        """Run, print errors as one line, and exit with the documented code."""
        arguments = list(sys.argv[1:] if args is None else args) or ["--help"]
        standalone = extra.pop("standalone_mode", True)
        code: Any = 0
        with Boundary(verbose=False) as boundary, to_stdout():
            code = super().main(arguments, prog_name, standalone_mode=False, **extra)
        if boundary.error is not None:
            code = _end(boundary.error, verbose="-v" in arguments or "--verbose" in arguments)
        if not standalone:
            return code
        sys.exit(code if isinstance(code, int) else 0)


def _end(error: BaseException, *, verbose: bool) -> int:
    """Say in one line what ended a command, after the traceback of a fault if wanted, and give the exit code."""
    if isinstance(error, SystemExit) and reader_gone():  # so ends click where it writes help to nobody
        drop_stdout()
        return 0
    if isinstance(error, click.ClickException):
        message = " ".join(error.format_message().split()).rstrip(".")
        error = UsageError(message, None if "; hint: " in message else _help_hint(error))
    if verbose and isinstance(error, Exception) and not isinstance(error, ParverifyError | click.Abort):
        traceback.print_exception(error, file=sys.stderr)
    outcome = Outcome.of(KeyboardInterrupt() if isinstance(error, click.Abort) else error)
    with contextlib.suppress(OSError):
        click.echo(f"{outcome.verdict}: {outcome.reason}", err=True)
    return outcome.exit_code


def _help_hint(error: click.ClickException) -> str:
    ctx = getattr(error, "ctx", None)
    return f"see '{ctx.command_path if ctx is not None else 'parverify'} --help'"


def _print_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(f"parverify {version()}")
        ctx.exit()


def version() -> str:
    """The installed version, or `unknown` when the package is used without being installed."""
    from importlib import metadata

    try:
        return metadata.version("parverify")
    except metadata.PackageNotFoundError:
        return "unknown"


@click.group(cls=LazyGroup, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Say which.")
def cli() -> None:
    """Verify neural networks: a proof, or an input that violates the property."""


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point of the console script; ends the process.

    Args:
        arguments: those of the process if None; only then does the time before this call count.
    """
    from parverify.cli.started import process_started

    open_streams()
    launch = Launch(process_started()) if arguments is None else Launch()
    cli.main(arguments, "parverify", obj=launch)
