"""Drawings of runs as SVG that can stand in a page: a timeline of the ranks, and quantities over time.

matplotlib does the drawing, through figures of its object interface only: nothing global is set, no window is opened.
Up to `LINES` ranks have a line each; more of them are a band from the least to the greatest with the median in it.
"""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from parverify.report.schema import IDLE, SEARCH, RankReport, RunReport, Sample

LINES = 12
WIDTH = 9.0  # inches
_COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#997700", "#004488", "#994455", "#5d8a66")
_IDLE_COLOR = "#e4e4e4"
_TICKS = 300  # batches of a rank up to which each one is marked
_DOTS = 60  # samples of a rank up to which each one has a dot
_STYLE: dict[Any, Any] = {"svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9}
_GRID = 400  # points of a band

Value = Callable[[Sample], float]


def timeline(run: RunReport, mark: str) -> str:
    """A row for each rank: what it did when, each batch a tick.

    Args:
        run: with samples.
        mark: makes ids unique in a page with several drawings.
    """
    ranks = run.ranks
    phases = list(dict.fromkeys(sample.phase for rank in ranks for sample in rank.samples))
    colors = dict(zip([name for name in phases if name != IDLE], _COLORS * len(phases), strict=False))
    colors[IDLE] = _IDLE_COLOR

    def paint(figure: Figure, axes: Axes) -> None:
        for row, rank in enumerate(ranks):
            for phase, bars in _bars(rank).items():
                axes.broken_barh(bars, (row - 0.4, 0.8), color=colors[phase], linewidth=0)
            batches = [sample.t for sample in rank.samples if sample.phase == SEARCH]
            if len(batches) <= _TICKS:
                axes.vlines(batches, row - 0.4, row - 0.2, color="#222222", linewidth=0.5)
        shown = range(0, len(ranks), max(1, len(ranks) // 32))
        axes.set_yticks(list(shown), [f"rank {ranks[row].rank}" for row in shown])
        axes.set_ylim(len(ranks) - 0.4, -0.6)
        handles = [Patch(color=colors[name], label=name) for name in phases]
        figure.legend(handles=handles, loc="outside upper center", ncols=8, frameon=False)

    return _drawing(paint, min(40.0, 1.2 + 0.28 * len(ranks)), run.end, mark)


def _bars(rank: RankReport) -> dict[str, list[tuple[float, float]]]:
    """Phase -> (start, length) of its stretches; neighbours of one phase are one."""
    found: dict[str, list[tuple[float, float]]] = {}
    before, last = 0.0, ""
    for sample in rank.samples:
        bars = found.setdefault(sample.phase, [])
        if sample.phase == last:
            start, _ = bars.pop()
            bars.append((start, sample.t - start))
        else:
            bars.append((before, sample.t - before))
        before, last = sample.t, sample.phase
    return found


def over_time(run: RunReport, value: Value, label: str, mark: str) -> str:
    """A quantity of every rank over time; values that are not finite are gaps.

    Args:
        run: with samples.
        value: of a sample.
        label: of the quantity, with its unit.
        mark: see `timeline`.
    """
    ranks = [rank for rank in run.ranks if rank.samples]

    def paint(figure: Figure, axes: Axes) -> None:
        if len(ranks) > LINES:
            _band(axes, ranks, value, run.end)
        else:
            for rank, color in zip(ranks, _COLORS * 2, strict=False):
                times, values = _series(rank, value)
                dot = "o" if len(times) <= _DOTS else ""
                look: dict[str, Any] = {"color": color, "linewidth": 1, "marker": dot, "markersize": 2}
                axes.plot(times, values, drawstyle="steps-post", label=f"rank {rank.rank}", **look)
        if len(ranks) > 1:
            figure.legend(loc="outside right upper", frameon=False)
        axes.set_ylabel(label)

    return _drawing(paint, 2.6, run.end, mark)


def _series(rank: RankReport, value: Value) -> tuple[np.ndarray, np.ndarray]:
    times = np.array([sample.t for sample in rank.samples])
    values = np.array([value(sample) for sample in rank.samples], dtype=float)
    return times, np.where(np.isfinite(values), values, np.nan)


def _on_grid(ranks: Sequence[RankReport], value: Value, grid: np.ndarray) -> np.ndarray:
    """(ranks, grid): each rank's last value at each time; NaN before the first."""
    rows = []
    for rank in ranks:
        times, values = _series(rank, value)
        place = np.searchsorted(times, grid, side="right") - 1
        rows.append(np.where(place < 0, np.nan, values[np.maximum(place, 0)]))
    return np.stack(rows)


def _band(axes: Axes, ranks: Sequence[RankReport], value: Value, end: float) -> None:
    grid = np.linspace(0.0, end, _GRID)
    rows = np.ma.masked_invalid(_on_grid(ranks, value, grid))
    low, high, middle = (part.filled(np.nan) for part in (rows.min(0), rows.max(0), np.ma.median(rows, axis=0)))
    axes.fill_between(grid, low, high, color=_COLORS[0], alpha=0.25, linewidth=0, label=f"{len(ranks)} ranks")
    axes.plot(grid, middle, color=_COLORS[0], linewidth=1, label="median")


def compare(runs: Mapping[int, RunReport], value: Value, total: str, label: str, mark: str) -> str:
    """One line for each run.

    Args:
        runs: number of the run -> one with samples.
        value: of a sample.
        total: `sum` over ranks, or `min`.
        label, mark: see `over_time`.
    """

    def paint(figure: Figure, axes: Axes) -> None:
        for (number, run), color in zip(runs.items(), itertools.cycle(_COLORS)):
            grid = np.linspace(0.0, run.end, _GRID)
            rows = np.ma.masked_invalid(_on_grid([rank for rank in run.ranks if rank.samples], value, grid))
            values = (rows.sum(0) if total == "sum" else rows.min(0)).filled(np.nan)
            axes.plot(grid, values, label=f"run {number}", color=color, linewidth=1)
        figure.legend(loc="outside right upper", frameon=False)
        axes.set_ylabel(label)

    return _drawing(paint, 2.8, max(run.end for run in runs.values()), mark)


def _drawing(paint: Callable[[Figure, Axes], None], height: float, end: float, mark: str) -> str:
    """A figure over time, painted by `paint`, as an SVG element whose ids begin with `mark`."""
    out = io.StringIO()
    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": mark}):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        axes = figure.add_subplot()
        paint(figure, axes)
        axes.set_xlim(0.0, max(end, 1e-3))
        axes.set_xlabel("seconds since the start")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", color="#eeeeee")
        axes.set_axisbelow(True)
        figure.savefig(out, format="svg")
    text = out.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{mark}-", text)
