"""`parverify plan MODEL SPEC`: what every rank would hold, do and communicate for `bounds`, without doing it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import click
from click.core import ParameterSource

from parverify.cli.bounds import METHODS, prepare
from parverify.cli.forecast import SIMULATION, show_forecast, simulate_options
from parverify.cli.options import Share, settings_options, talk_options, timeout_option
from parverify.cli.streams import to_stdout
from parverify.cli.work import Boundary, check_device
from parverify.clock import Clock
from parverify.config import Settings
from parverify.errors import UsageError
from parverify.results import to_json

_UNSTABLE = 0.05


@click.command(short_help="Show what every rank would hold, do and communicate, without running.")
@click.argument("model")
@click.argument("spec")
@settings_options(METHODS)
@click.option("--start", metavar="NODE", help="Show the sweep from rows on this node; the output without it.")
@click.option(
    "--unstable", type=Share(), default=_UNSTABLE, show_default=True,
    help="Share of a layer's neurons that get rows and slopes, for the predicted figures.",
)  # fmt: skip
@simulate_options
@timeout_option
@click.option("--json", "json_file", metavar="FILE", help="Where the plan goes as JSON; - for stdout instead of text.")
@talk_options
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Show what `bounds` on MODEL (ONNX) and SPEC (VNN-LIB) would do on every rank, in this one process.

    For each rank: the pieces of weights it holds, the steps of a sweep, the steps of its gradient; then a table of
    predicted memory, communication and flops. With --simulate N instead: how long branch and bound would take on up to
    N ranks, simulated from the times of batches that were measured. Exit codes: 0 done, 2 usage, 12 timeout, 20 error,
    21 network, 22 unsupported operator, 23 property, 24 memory.
    """
    started = ctx.obj.started if ctx.obj is not None else time.monotonic()
    with Boundary(verbose=options["verbose"]) as boundary:
        _check_mode(ctx)
        (_plan if options["simulate"] is None else show_forecast)(options, started)
    if boundary.outcome is not None:
        click.echo(f"{boundary.outcome.verdict}: {boundary.outcome.reason}", err=True)
        ctx.exit(boundary.outcome.exit_code)


def _check_mode(ctx: click.Context) -> None:
    """Raise `UsageError` for options that would be ignored: some go with --simulate, some without."""
    simulated = ctx.params["simulate"] is not None
    foreign = ("start", "unstable") if simulated else SIMULATION
    for name in foreign:
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise UsageError(
                f"--{name} goes {'without' if simulated else 'with'} --simulate",
                "leave it away" if simulated else "give --simulate N as well, or leave it away",
            )


def _plan(options: dict[str, Any], started: float) -> None:
    file, settings, clock = prepare(options, started)
    report = make_plan(
        options["model"], options["spec"], settings, clock, start=options["start"], unstable=options["unstable"]
    )
    if file is not None:
        file.write(to_json(report))
    with to_stdout():
        if options["json_file"] == "-":
            click.echo(to_json(report), nl=False)
        elif not options["quiet"]:
            click.echo("\n".join(plan_text(report)))


def make_plan(
    model: str, spec: str, settings: Settings, clock: Clock, *, start: str | None, unstable: float
) -> dict[str, Any]:
    """Load the network and the property, and compile and predict what every rank would do.

    Args:
        model, spec: the files.
        settings: all of them.
        clock: checked while loading and between ranks.
        start: name of the node whose sweep is listed; None for the output.
        unstable: assumed share of a layer's neurons that get rows and slopes.

    Returns:
        What `--json` holds.

    Raises:
        UsageError: no sweep starts from `start`, or the strategy does not fit.
    """
    from parverify.bounding import Bounding
    from parverify.loading import load_subject
    from parverify.ops.places import Counts
    from parverify.program.printer import gradient_lines, held_lines, sweep_lines
    from parverify.program.steps import compile_sweep
    from parverify.progress import NullProgress
    from parverify.strategy.compile import check_all, compile_placement, starts
    from parverify.strategy.directives import choose_strategy

    check_device(settings.device)
    strategy = choose_strategy(settings.parallel, settings.parallel.nproc)
    subject, query = load_subject(model, spec, clock, NullProgress(), settings, None)
    task = Bounding.of(subject, query, settings)
    graph, itemsize = task.graph, task.dtype.itemsize
    first = graph.output if start is None else start
    if first not in starts(graph):
        raise UsageError(
            f"--start: no sweep starts from {first!r}; allowed: {', '.join(starts(graph))}", "leave it away"
        )
    ranks, placements = [], []
    for rank in range(settings.parallel.nproc):
        clock.check("planning")
        placements.append(compile_placement(graph, strategy, rank, settings.parallel.nproc))
    check_all(graph, placements)
    for placement in placements:
        clock.check("planning")
        program = compile_sweep(graph, first, placement, one_hot=True)
        holds = held_lines(graph, placement, itemsize)
        lines = {
            "holds": holds,
            "sweep": sweep_lines(graph, placement, program, itemsize),
            "gradient": gradient_lines(graph, placement, program, itemsize),
        }
        ranks.append(
            {
                "rank": placement.rank,
                "weight_bytes": sum(line.bytes or 0 for line in holds),
                **{name: [asdict(line) for line in some] for name, some in lines.items()},
                "predicted": task.predict(placement, Counts(unstable)),
            }
        )
    return {
        "strategy": strategy.name,
        "world_size": settings.parallel.nproc,
        "method": settings.method,
        "dtype": settings.dtype,
        "start": first,
        "unstable": unstable,
        "ranks": ranks,
    }


# --- text -------------------------------------------------------------------------------------------------------------


def plan_text(report: Mapping[str, Any]) -> list[str]:
    """The plan as lines; a rank that does what rank 0 does says so."""
    from parverify.program.printer import Line, size_text, written

    size = report["world_size"]
    ranks = f"{size} rank{'s' if size > 1 else ''}"
    lines = [f"strategy {report['strategy']}, {ranks}, {report['method']}, {report['dtype']}"]
    first = report["ranks"][0]
    for rank in report["ranks"]:
        lines += ["", f"rank {rank['rank']} holds {size_text(rank['weight_bytes'])} of weights"]
        lines += [f"  {line}" for line in written([Line(**line) for line in rank["holds"]])]
        for name in ("sweep", "gradient"):
            title = f"{name} of rows on {report['start']}" if name == "sweep" else "its gradient"
            if rank is not first and rank[name] == first[name]:
                lines += [f"rank {rank['rank']}, {title}: as on rank 0"]
                continue
            lines += [f"rank {rank['rank']}, {title}"]
            lines += [f"  {line}" for line in written([Line(**line) for line in rank[name]])]
    return [*lines, "", *_table(report)]


def _table(report: Mapping[str, Any]) -> list[str]:
    """Ranks and their predicted figures."""
    from parverify.program.printer import size_text

    used = sorted({name for rank in report["ranks"] for name in rank["predicted"]["collectives"]})
    rows = [["rank", "resident", "peak", *used, "flops"]]
    for rank in report["ranks"]:
        figures = rank["predicted"]
        moved = [figures["collectives"].get(name, {"calls": 0, "bytes": 0}) for name in used]
        texts = [f"{size_text(one['bytes'])} in {one['calls']} calls" for one in moved]
        sizes = [size_text(figures[key]) for key in ("resident_bytes", "peak_bytes")]
        rows.append([str(rank["rank"]), *sizes, *texts, f"{figures['flops']:.3g}"])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    share = f"{100 * report['unstable']:g} %"
    return [f"predicted for {report['method']} bounds with {share} of a layer's neurons in rows"] + [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
    ]
