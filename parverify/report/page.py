"""The page: runs side by side in a table, then a section for each run; one file that refers to nothing outside it."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from parverify.report.schema import RankReport, RunReport, Sample, Work

_STYLE = """
body { font: 15px/1.45 sans-serif; color: #222; background: #fff; max-width: 62rem; }
body { margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; border-bottom: 1px solid #ddd; }
h3 { font-size: 1rem; margin: 1.2rem 0 0.2rem; }
table { border-collapse: collapse; margin: 0.8rem 0; } td, th { padding: 0.15rem 0.8rem 0.15rem 0; text-align: left; }
th { font-weight: 600; border-bottom: 1px solid #ccc; } td.n, th.n { text-align: right; }
svg { max-width: 100%; height: auto; } .note { color: #555; }
""".strip()
_MIB = 1 << 20
NO_SAMPLES = (
    "This run recorded nothing over time: it was decided before the search, or written by a version without samples."
)


def _worst(sample: Sample) -> float:
    return sample.worst


def _open(sample: Sample) -> float:
    return float(sample.open)


def _memory(sample: Sample) -> float:
    return sample.memory / _MIB


def _depth(sample: Sample) -> float:
    return float(sample.depth)


QUANTITIES = (
    ("Worst bound", _worst, "worst bound"),
    ("Open domains", _open, "open domains"),
    ("Memory", _memory, "MiB"),
    ("Depth of the tree", _depth, "halvings"),
)


def page(runs: Sequence[RunReport]) -> str:
    """The HTML text.

    Args:
        runs: at least one.
    """
    title = "parverify: " + (runs[0].name if len(runs) == 1 else f"{len(runs)} runs")
    body = [f"<h1>{_text(title)}</h1>", _overview(runs)]
    sampled = [run for run in runs if run.sampled]
    if len(sampled) > 1:
        body.append(_together(runs))
    body += [_section(number, run) for number, run in enumerate(runs, start=1)]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{_text(title)}</title>\n<style>\n{_STYLE}\n</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _text(value: object) -> str:
    return html.escape(str(value))


def _table(heads: Sequence[str], rows: Sequence[Sequence[object]], left: int) -> str:
    """A table whose first `left` columns are texts and the others numbers."""
    kind = ["" if place < left else ' class="n"' for place in range(len(heads))]
    lines = ["".join(f"<th{mark}>{_text(head)}</th>" for mark, head in zip(kind, heads, strict=True))]
    lines += ["".join(f"<td{mark}>{_text(cell)}</td>" for mark, cell in zip(kind, row, strict=True)) for row in rows]
    return "<table>\n" + "\n".join(f"<tr>{line}</tr>" for line in lines) + "\n</table>"


def _overview(runs: Sequence[RunReport]) -> str:
    heads = ["run", "network", "property", "verdict", "seconds", "ranks", "domains", "domains/s", "idle"]
    rows = []
    for number, run in enumerate(runs, start=1):
        bounded = sum(rank.bounded for rank in run.ranks)
        rate = f"{bounded / run.seconds:.1f}" if run.ranks and run.seconds > 0 else "–"
        rows.append(
            [
                *(number, PurePath(run.model).name, PurePath(run.spec).name, run.verdict, f"{run.seconds:.2f}"),
                *(len(run.ranks) or "–", bounded if run.ranks else "–", rate, _share(run)),
            ]
        )
    return _table(heads, rows, 4)


def _share(run: RunReport) -> str:
    """The ranks' idle share of the run."""
    if not run.ranks or run.seconds <= 0:
        return "–"
    return f"{sum(rank.idle_seconds for rank in run.ranks) / (len(run.ranks) * run.seconds):.1%}"


def _together(runs: Sequence[RunReport]) -> str:
    from parverify.report import draw

    some = {number: run for number, run in enumerate(runs, start=1) if run.sampled}
    return "\n".join(
        [
            "<h2>Runs together</h2>",
            "<h3>Worst bound of all ranks</h3>",
            draw.compare(some, _worst, "min", "worst bound", "all-worst"),
            "<h3>Open domains of all ranks</h3>",
            draw.compare(some, _open, "sum", "open domains", "all-open"),
        ]
    )


def _section(number: int, run: RunReport) -> str:
    out = [f"<h2>Run {number}: {_text(run.name)}</h2>"]
    out.append(f"<p>{_text(run.verdict)}{': ' if run.reason else ''}{_text(run.reason)}</p>")
    if run.phases:
        out.append(_phases(run.phases))
    if run.ranks:
        out.append(_ranks(run.ranks))
    if not run.sampled:
        out.append(f'<p class="note">{_text(NO_SAMPLES)}</p>')
        return "\n".join(out)
    from parverify.report import draw

    out += ["<h3>What each rank did</h3>", draw.timeline(run, f"run{number}-timeline")]
    for place, (title, value, label) in enumerate(QUANTITIES):
        out += [f"<h3>{title}</h3>", draw.over_time(run, value, label, f"run{number}-{place}")]
    return "\n".join(out)


def _phases(phases: Mapping[str, float]) -> str:
    return _table(["phase", "seconds"], [[name, f"{seconds:.3f}"] for name, seconds in phases.items()], 1)


def _ranks(ranks: Sequence[RankReport]) -> str:
    stages = list(dict.fromkeys(stage for rank in ranks for stage in rank.stages))
    heads = ["rank", "bounded", "received", "sent", *(f"{stage} s" for stage in stages)]
    heads += ["idle s", "batches", "median batch", "MiB sent"]
    rows = []
    for rank in ranks:
        sizes = sorted(rank.batch_sizes)
        middle: object = sizes[len(sizes) // 2] if sizes else "–"
        rows.append(
            [
                *(rank.rank, rank.bounded, rank.received, rank.sent),
                *(f"{rank.stages.get(stage, Work()).seconds:.2f}" for stage in stages),
                *(f"{rank.idle_seconds:.2f}", len(sizes), middle, f"{rank.bytes / _MIB:.2f}"),
            ]
        )
    return _table(heads, rows, 1)
