"""`parverify bounds MODEL SPEC`: bounds on the outputs, and on request on every layer, without any search."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import click

from parverify.cli.files import check_files, keep_inputs
from parverify.cli.options import settings_options, take_settings, talk_options, timeout_option
from parverify.cli.outcome import Outcome
from parverify.cli.run import hard_timeout, lag
from parverify.cli.streams import to_stdout
from parverify.cli.supervise import Worker, private_folder, stop_signals, wait
from parverify.cli.work import DONE, Boundary, Request, perform, rank_count
from parverify.clock import Clock
from parverify.config import Settings
from parverify.errors import ParverifyError
from parverify.parallel.place import place
from parverify.results import AtomicFile, to_json

KEYS = ("method", "strategy", "world_size", "dtype", "lower", "upper", "layers", "digest", "seconds", "ranks")
METHODS = ("ibp", "crown-ibp", "crown", "alpha-crown")
_SHOWN = 10


@click.command(short_help="Bound the outputs of one network over an input region.")
@click.argument("model")
@click.argument("spec")
@settings_options(METHODS)
@timeout_option
@click.option("--json", "json_file", metavar="FILE", help="Where the bounds go; - for stdout.")
@click.option(
    "--layers", is_flag=True, help="Also every neuron's bounds, not only how many are unstable in each layer."
)
@talk_options
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Bound what MODEL (ONNX) gives over the inputs of SPEC (VNN-LIB); the method is `crown` if none is given.

    A table goes to stderr, all figures go to the JSON file. Exit codes: 0 done, 2 usage, 12 timeout, 20 error,
    21 network, 22 unsupported operator, 23 property, 24 memory.
    """
    started = ctx.obj.started if ctx.obj is not None else time.monotonic()
    outcome = Outcome.error("no bounds were found")
    with Boundary(verbose=options["verbose"]) as boundary:
        outcome = _bounds(options, started)
    outcome = boundary.outcome or outcome
    if outcome.verdict != DONE:
        click.echo(f"{outcome.verdict}: {outcome.reason}", err=True)
        ctx.exit(outcome.exit_code)


def prepare(
    options: dict[str, Any], started: float, *, writes: bool = True
) -> tuple[AtomicFile | None, Settings, Clock]:
    """What `bounds` and `plan` do before they load anything: check files, and resolve settings and clock.

    Args:
        options: of the command; those of `settings_options` are taken out.
        started: `time.monotonic()` at the start of the process.
        writes: whether this process writes the JSON file.

    Raises:
        UsageError: a file, a setting or an option is not allowed.
    """
    model, spec, target = options["model"], options["spec"], options["json_file"]
    keep_inputs((model, spec, options["config"]), {"--json": target})
    file = None if target in (None, "-") or not writes else AtomicFile(target, option="--json")
    if file is not None:
        file.probe()
    settings = take_settings(options)
    if settings.method not in METHODS:
        settings = replace(settings, method="crown")
    check_files(model, spec)
    return file, settings, Clock(options["timeout"] or math.inf, started)


def _bounds(options: dict[str, Any], started: float) -> Outcome:
    """Find the bounds, and write and show them unless this is a rank that only takes part."""
    here = place()
    first = here is None or here.rank == 0
    target = options["json_file"]
    file, settings, clock = prepare(options, started, writes=first)
    request = Request(
        options["model"], options["spec"], settings, clock, options["verbose"], options["quiet"], bounds=True
    )
    outcome = perform(request) if rank_count(settings) == 1 else _watch(request)
    if outcome.verdict != DONE or not first:
        return outcome
    report = json.loads(outcome.stats["report"])
    check_report(report)
    if not options["layers"]:
        report["layers"] = [_without_bounds(layer) for layer in report["layers"]]
    if file is not None:
        file.write(to_json(report))
    elif target == "-":
        with to_stdout():
            click.echo(to_json(report), nl=False)
    if not options["quiet"]:
        _print_tables(report)
    return outcome


def _watch(request: Request) -> Outcome:
    """Find the bounds on several ranks, in a worker that is ended with all of them at the deadline."""
    with contextlib.ExitStack() as afterwards:
        stop = afterwards.enter_context(stop_signals())
        folder = afterwards.enter_context(private_folder())
        worker = Worker(replace(request, folder=folder))
        afterwards.callback(worker.end)
        return wait(worker, stop, deadline=request.clock.started + hard_timeout(request.clock.timeout) + lag())


def check_report(report: Mapping[str, Any]) -> None:
    """Raise `ParverifyError` unless the report has every key, and as many lower as upper bounds everywhere."""
    missing = [key for key in KEYS if key not in report]
    if missing:
        raise ParverifyError(f"the engine's report lacks {', '.join(missing)}")
    for where, part in [("outputs", report), *((f"layer {layer['name']}", layer) for layer in report["layers"])]:
        if len(part["lower"]) != len(part["upper"]):
            raise ParverifyError(f"{where}: {len(part['lower'])} lower but {len(part['upper'])} upper bounds")


def _without_bounds(layer: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in layer.items() if key not in ("lower", "upper")}


def _print_tables(report: Mapping[str, Any]) -> None:
    """The outputs, and the layers, as tables on stderr."""
    from rich.console import Console
    from rich.table import Table

    console = Console(file=sys.stderr)
    lower, upper = list(report["lower"]), list(report["upper"])
    table = Table("output", "lower", "upper", "width", title=f"{report['method']} bounds, {report['seconds']:.2f} s")
    for index, (low, high) in enumerate(zip(lower[:_SHOWN], upper[:_SHOWN], strict=True)):
        table.add_row(f"Y_{index}", f"{low:.6g}", f"{high:.6g}", f"{high - low:.6g}")
    if len(lower) > _SHOWN:
        table.caption = f"{len(lower) - _SHOWN} more outputs; --json has them all"
    console.print(table)
    if report["layers"]:
        console.print(_layer_table(report["layers"]))


def _layer_table(layers: list[Mapping[str, Any]]) -> Any:
    from rich.table import Table

    bounded = any("lower" in layer for layer in layers)
    table = Table("layer", "operator", "neurons", "unstable", *(["mean width", "max width"] if bounded else []))
    for layer in layers:
        cells = [str(layer[key]) for key in ("name", "op", "neurons", "unstable")]
        if bounded:
            widths = [high - low for low, high in zip(layer["lower"], layer["upper"], strict=True)]
            cells += [f"{sum(widths) / max(len(widths), 1):.6g}", f"{max(widths, default=0.0):.6g}"]
        table.add_row(*cells)
    return table
