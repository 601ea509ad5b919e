"""Time of alpha-CROWN on one process and folded over ranks, by row tile, with what communication takes of it.

    python benchmarks/scaling.py NETS [--tiles 32,...,2048] [--pairs N] [--iterations N] [--network mlp4096] [--ranks 2]

NETS is what `networks.py` wrote. Runs come in turn, single and fold, each alone on the machine and with one thread a
rank, so that both meet the same conditions; the ratio is the median over pairs. Small tiles stream the weights more
often: bytes moved grow as tiles shrink. Exits with status 1 if fold takes more than 0.65 of single's time at row tile
512 and two ranks, or if bounds differ.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from runs import GENERATED, Instance, Mode, RunError, bounds, counted, generated, head, mega, row, totals

TILES = [32, 64, 128, 256, 512, 1024, 2048]
LIMIT_TILE, LIMIT_RANKS, LIMIT = 512, 2, 0.65


def waited(report: Mapping[str, Any]) -> float:
    """Share of the time for which the rank that waits most is blocked in communication."""
    return max(totals(rank)[1] for rank in report["ranks"]) / report["seconds"]


def moved(report: Mapping[str, Any]) -> int:
    """Bytes that the busiest rank moves."""
    return max(totals(rank)[0] for rank in report["ranks"])


def foretold(report: Mapping[str, Any]) -> str:
    """Whether every rank's predicted collectives are the measured ones."""
    ranks = [rank for rank in report["ranks"] if rank.get("predicted")]
    if len(ranks) < len(report["ranks"]):
        return "no prediction"
    same = all(counted(rank["predicted"]["collectives"]) == counted(rank["collectives"]) for rank in ranks)
    return "equal" if same else "DIFFERENT"


def compare(instance: Instance, tile: int, options: argparse.Namespace) -> tuple[float, bool]:
    """Run the pairs at one tile, print a line, and return the median ratio and whether all bounds were the same."""
    settings = {"bounds.tile": str(tile), "alpha.iterations": str(options.iterations)}
    single, fold, ratios = [], [], []
    for _ in range(options.pairs):
        pair = [
            bounds(instance, mode, settings=settings, timeout=options.timeout)
            for mode in (
                Mode(),
                Mode(options.strategy, options.ranks, {"parallel.prefetch": str(options.prefetch).lower()}),
            )
        ]
        single.append(pair[0])
        fold.append(pair[1])
        ratios.append(pair[1]["seconds"] / pair[0]["seconds"])
    same = len({report["digest"] for report in (*single, *fold)}) == 1
    seconds = [median(report["seconds"] for report in reports) for reports in (single, fold)]
    share = median(waited(report) for report in fold)
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    cells: Sequence[object] = (
        tile,
        f"{seconds[0]:.1f}",
        f"{seconds[1]:.1f}",
        f"{median(ratios):.3f}",
        spread,
        f"{100 * share:.1f} %",
        mega(moved(fold[0])),
        foretold(fold[0]),
        "equal" if same else "DIFFERENT",
    )
    print(row(*cells), flush=True)
    return median(ratios), same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nets", type=Path)
    parser.add_argument("--network", choices=GENERATED, default="mlp4096")
    parser.add_argument("--property", choices=("few", "many"), default="many")
    parser.add_argument("--tiles", type=lambda text: [int(part) for part in text.split(",")], default=TILES)
    parser.add_argument("--strategy", default="fold")
    parser.add_argument("--ranks", type=int, default=LIMIT_RANKS)
    parser.add_argument("--prefetch", action=argparse.BooleanOptionalAction, default=True, help="bring parts early")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--timeout", type=float, default=7200.0, help="seconds for one run")
    options = parser.parse_args()
    (instance,) = generated(options.nets, options.property, [options.network])
    print(f"{instance.name}, {instance.spec.name}, {options.iterations} iterations, {options.pairs} pairs\n")
    folded = f"{options.strategy} P={options.ranks}"
    names = (
        "row tile",
        "single s",
        f"{folded} s",
        "ratio",
        "from",
        "communication",
        "MB a rank",
        "predicted",
        "bounds",
    )
    print(head(*names))
    problems: list[str] = []
    for tile in options.tiles:
        try:
            ratio, same = compare(instance, tile, options)
        except RunError as error:
            problems.append(f"row tile {tile}: {error}")
            print(row(tile, str(error).replace("|", "/"), *[""] * 7), flush=True)
            continue
        if not same and options.strategy == "fold":
            problems.append(f"row tile {tile}: bounds differ between runs")
        if (tile, options.ranks, options.strategy) == (LIMIT_TILE, LIMIT_RANKS, "fold") and ratio > LIMIT:
            problems.append(f"row tile {tile}: fold takes {ratio:.3f} of single's time, at most {LIMIT} allowed")
    print("\n" + ("\n".join(f"missed: {problem}" for problem in problems) or "All limits hold."))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
