"""`parverify bounds MODEL SPEC`: bounds on the outputs, and on request on every layer, without any search."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import click

from parverify.cli.options import settings_options, take_settings, talk_options, timeout_option
from parverify.cli.run import check_files
from parverify.cli.work import Boundary
from parverify.clock import Clock
from parverify.errors import UsageError
from parverify.results import AtomicFile, to_json

METHODS = ("ibp", "crown-ibp", "crown", "alpha-crown")
_SHOWN = 10


@click.command(short_help="Bound the outputs of one network over an input region.")
@click.argument("model")
@click.argument("spec")
@settings_options(METHODS)
@timeout_option
@click.option("--json", "json_file", metavar="FILE", help="Where the bounds go; - for stdout.")
@click.option("--layers", is_flag=True, help="Also the bounds of every layer.")
@talk_options
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Bound what MODEL (ONNX) gives over the inputs of SPEC (VNN-LIB); the method is `crown` if none is given.

    A table goes to stderr, all figures go to the JSON file. Exit codes: 0 done, 2 usage, 12 timeout, 20 error,
    21 network, 22 unsupported operator, 23 property, 24 memory.
    """
    started = ctx.obj.started if ctx.obj is not None else time.monotonic()
    with Boundary(verbose=options["verbose"]) as boundary:
        _bounds(options, started)
    if boundary.outcome is not None:
        click.echo(f"{boundary.outcome.verdict}: {boundary.outcome.reason}", err=True)
        ctx.exit(boundary.outcome.exit_code)


def _bounds(options: dict[str, Any], started: float) -> None:
    model, spec, target = options["model"], options["spec"], options["json_file"]
    file = None if target in (None, "-") else AtomicFile(target, option="--json")
    settings = take_settings(options)
    if settings.method not in METHODS:
        settings = replace(settings, method="crown")
    check_files(model, spec)
    clock = Clock(started=started) if options["timeout"] is None else Clock(options["timeout"], started)
    from parverify.api import bounds_report

    report = dict(bounds_report(model, spec, settings=settings, clock=clock))
    if not options["layers"]:
        report.pop("layers", None)
    if file is not None:
        file.write(to_json(report))
    elif target == "-":
        click.echo(to_json(report), nl=False)
    if not options["quiet"]:
        _print_tables(report)


def _print_tables(report: Mapping[str, Any]) -> None:
    """The outputs, and the layers if they are there, as tables on stderr."""
    from rich.console import Console
    from rich.table import Table

    console = Console(file=sys.stderr)
    outputs = report.get("outputs", {})
    lower, upper = list(outputs.get("lower", [])), list(outputs.get("upper", []))
    table = Table("output", "lower", "upper", "width", title=f"{report.get('method', '')} bounds")
    for index, (low, high) in enumerate(zip(lower[:_SHOWN], upper[:_SHOWN], strict=True)):
        table.add_row(f"Y_{index}", f"{low:.6g}", f"{high:.6g}", f"{high - low:.6g}")
    if len(lower) > _SHOWN:
        table.caption = f"{len(lower) - _SHOWN} more outputs; --json has them all"
    console.print(table)
    if report.get("layers"):
        console.print(_layer_table(report["layers"]))


def _layer_table(layers: list[Mapping[str, Any]]) -> Any:
    from rich.table import Table

    table = Table("layer", "operator", "neurons", "mean width", "max width")
    for layer in layers:
        if len(layer["lower"]) != len(layer["upper"]):
            raise UsageError(f"layer {layer.get('name')}: as many lower as upper bounds are needed")
        widths = [high - low for low, high in zip(layer["lower"], layer["upper"], strict=True)]
        mean = sum(widths) / max(len(widths), 1)
        table.add_row(
            str(layer.get("name", "")),
            str(layer.get("op", "")),
            str(len(widths)),
            f"{mean:.6g}",
            f"{max(widths, default=0.0):.6g}",
        )
    return table
