"""`parverify plan MODEL SPEC --simulate N`: how long branch and bound would take on up to N ranks, without having them.

Batch times and the tree come from the report of a run (`--measured`, from `run --json`), or from a run that is made for
it. Nothing is started on other ranks.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from parverify.cli.files import check_files, keep_inputs
from parverify.cli.options import Name, Seconds, take_settings
from parverify.cli.streams import to_stdout
from parverify.cli.work import check_device
from parverify.clock import Clock
from parverify.config import Settings
from parverify.errors import UsageError, why
from parverify.results import AtomicFile, jsonable, to_json

if TYPE_CHECKING:
    from parverify.simulate.measured import Measured
    from parverify.simulate.model import Forecast, Scenario

Function = TypeVar("Function", bound=Callable[..., Any])
_CALIBRATE = 20.0
_MOST = 65536
SIMULATION = ("measured", "calibrate", "domains", "nodes", "cores", "latency")  # options of `--simulate` alone


def simulate_options(function: Function) -> Function:
    """The options that say what is simulated."""
    options = [
        click.option("--simulate", type=click.IntRange(1, _MOST), metavar="N", help="Branch and bound on N ranks."),
        click.option("--measured", type=Name(), metavar="FILE", help="A report of `run --json` on it."),
        click.option(
            "--calibrate", type=Seconds(), default=_CALIBRATE, show_default=True,
            help="Without --measured: seconds of a run that is made to measure.",
        ),
        click.option("--domains", type=click.IntRange(min=2), help="Bounded in all, instead of the measured number."),
        click.option("--nodes", type=click.IntRange(min=1), default=1, help="Machines over which ranks are spread."),
        click.option("--cores", type=click.IntRange(min=1), help="Of a machine; shared where it has more ranks."),
        click.option("--latency", type=Seconds(), help="Of a message between machines; 0.0002 without it."),
    ]  # fmt: skip
    for option in reversed(options):
        function = option(function)
    return function


def show_forecast(options: dict[str, Any], started: float) -> None:
    """Measure or read, simulate, and show.

    Args:
        options: of the command.
        started: `time.monotonic()` at the start of the process.

    Raises:
        UsageError: an option or a file is not allowed, or there was no search to measure.
    """
    from parverify.simulate.measured import fit

    target, file = options["json_file"], options["measured"]
    keep_inputs((options["model"], options["spec"], options["config"], file), {"--json": target})
    output = None if target in (None, "-") else AtomicFile(target, option="--json")
    if output is not None:
        output.probe()
    settings = take_settings(options)
    check_files(options["model"], options["spec"])
    measured = _read(file, options) if file is not None else _calibrate(options, settings, started)
    if not measured.decided and options["domains"] is None and not options["quiet"]:
        click.echo(
            f"warning: the measured run ended before a proof: simulating the {measured.bounded} subproblems that are "
            "known; --domains gives another number",
            err=True,
        )
    scenarios = fit(measured, domains=options["domains"])
    machine = {name: options[name] for name in ("nodes", "cores", "latency") if options[name] is not None}
    found = forecasts(scenarios, options["simulate"], **machine)
    content = {
        "model": options["model"],
        "spec": options["spec"],
        "measured": asdict(measured),
        "scenarios": [asdict(scenario) for scenario in scenarios],
        "nodes": options["nodes"],
        "cores": options["cores"],
        "forecasts": [asdict(one) for one in found],
    }
    for key in ("batches", "curve"):  # the times stand in the scenario
        content["measured"].pop(key)
    if output is not None:
        output.write(to_json(content))
    with to_stdout():
        if target == "-":
            click.echo(to_json(content), nl=False)
        elif not options["quiet"]:
            click.echo("\n".join(table(measured, scenarios, found)))


def forecasts(scenarios: Sequence[Scenario], ranks: int, *, nodes: int = 1, **machine: Any) -> list[Forecast]:
    """Forecasts for the powers of two up to `ranks`, and for `ranks`.

    Args:
        scenarios: what is simulated; the median counts.
        ranks: the most.
        nodes: machines over which the most are spread; fewer ranks fill as many of them as they need.
        machine: what else `Machine` takes.

    Raises:
        UsageError: there are fewer ranks than machines.
    """
    from parverify.simulate.measured import forecast
    from parverify.simulate.model import Machine

    Machine(ranks, nodes=nodes)  # refuses what does not fit
    each = -(-ranks // nodes)
    sizes = sorted({*(1 << power for power in range(ranks.bit_length()) if 1 << power <= ranks), ranks})
    return [forecast(scenarios, Machine(size, nodes=min(size, -(-size // each)), **machine)) for size in sizes]


def _read(file: str, options: Mapping[str, Any]) -> Measured:
    """The run in a file; a warning where it was of another instance than `options` name."""
    from parverify.simulate.measured import read_measured

    try:
        with open(file, encoding="utf-8") as handle:
            content = json.load(handle)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"--measured: can't read {file}: {why(error)}", "give what `parverify run --json` wrote"
        ) from error
    measured = read_measured(content, file)
    others = [str(content.get(name)) for name in ("model", "spec") if not _same(content.get(name), options[name])]
    if others and not options["quiet"]:
        click.echo(f"warning: {file} is about {' and '.join(others)}: that instance is simulated", err=True)
    return measured


def _same(one: Any, other: str) -> bool:
    """Whether two texts name a file of one name, in any folder, packed or not."""
    return Path(str(one)).name.removesuffix(".gz") == Path(other).name.removesuffix(".gz")


def _calibrate(options: Mapping[str, Any], settings: Settings, started: float) -> Measured:
    """Run the instance for a while on one rank, and take its own report."""
    from parverify.api import verify
    from parverify.simulate.measured import read_measured

    check_device(settings.device)
    seconds = min(options["calibrate"], options["timeout"] or math.inf)
    clock = Clock(seconds, started)
    result = verify(options["model"], options["spec"], settings=settings, clock=clock)
    content = {
        "verdict": result.verdict.value,
        "seconds": time.monotonic() - started,
        "stats": jsonable(result.stats),
        "settings": asdict(settings),
    }
    return read_measured(content, "the measuring run")


def table(measured: Measured, scenarios: Sequence[Scenario], found: Sequence[Forecast]) -> list[str]:
    """The forecasts as lines."""
    batches, tree = measured.batches, scenarios[0].tree
    lines = [
        f"measured on {measured.ranks} rank{'s' if measured.ranks > 1 else ''}: {measured.bounded} subproblems, "
        f"at most {measured.largest:.0f} open; "
        f"a batch takes {batches.base:.3g} s and {batches.each:.3g} s a subproblem",
        f"simulated: {len(scenarios)} tree{'s' if len(scenarios) > 1 else ''}, the best with {tree.nodes} nodes and "
        f"lighter children of {tree.skew:.0%}; {measured.before:.3g} s before and after the search",
    ]
    rows = [["ranks", "seconds", "search", "speed-up", "idle", "subproblems", "messages", "moved"]]
    for one in found:
        speed = found[0].search / one.search if one.search else 1.0
        rows.append([
            str(one.ranks), f"{one.seconds:.2f}", f"{one.search:.2f}", f"{speed:.1f}", f"{one.idle:.1%}",
            str(one.bounded), str(one.messages), str(one.moved),
        ])  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [*lines, *("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)]
