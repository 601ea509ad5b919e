"""`parverify report FILE... -o OUT`: one page about one or several runs, from what `run --json` wrote."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import click

from parverify.cli.files import keep_inputs
from parverify.errors import UsageError, why
from parverify.report.page import page
from parverify.report.schema import RunReport, check
from parverify.results import AtomicFile

DRAWER = "matplotlib"


@click.command(short_help="One HTML page about one or several runs.")
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@click.option("-o", "--out", required=True, metavar="OUT", help="Where the page goes.")
def command(files: tuple[str, ...], out: str) -> None:
    """Draw runs: what each rank did when, and the worst bound, open domains, memory and depth over time.

    A FILE is what `parverify run --json FILE` wrote. The page is one file that refers to nothing outside it. Exit
    codes: 0 written, 2 a file can't be read or is no report, or matplotlib is not installed.
    """
    keep_inputs(files, {"--out": out})
    runs = [_read(name) for name in files]
    if any(run.sampled for run in runs) and not _installed(DRAWER):
        raise UsageError(
            f"drawing needs {DRAWER}, which is not installed",
            "pip install 'parverify[report]'",
        )
    target = AtomicFile(out, option="--out")
    target.probe()
    target.write(page(runs))


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # imported before, and hidden
        return False


def _read(name: str) -> RunReport:
    try:
        content: Any = json.loads(Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"can't read {name}: {why(error)}", "FILE is what `run --json` wrote") from error
    except (ValueError, RecursionError) as error:  # malformed JSON, malformed UTF-8, brackets without end
        raise UsageError(f"{name} is not JSON: {error}", "FILE is what `run --json` wrote") from error
    return check(content, name)
