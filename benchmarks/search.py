"""Branch and bound by several ranks against one: domains a second, and time to the verdict.

    python benchmarks/search.py DIR NAME:MODEL:SPEC[:FACTOR] ... [--ranks 2] [--pairs 3] [--timeout 100]
        [--strategy auto]

DIR/NAME/MODEL and DIR/NAME/SPEC are the files; FACTOR makes the radii of the property's box that much larger, and so a
harder property of a published one. Runs come in turn, one rank and several, each alone on the machine with
one thread a rank; ratios are medians over the pairs. Domains a second are those of the search alone; the verdict's time
is that of the whole run behind its start. Exits with status 1 if a verdict differs, if an instance with 20 000 domains
or more speeds up by less than 0.9 of the ranks, or if the median ratio of times to the verdict is above 0.6.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from runs import RunError, execute, head, row

MANY, SPEEDUP, RATIO = 20_000, 0.9, 0.6


def run(model: Path, spec: Path, ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """The JSON of one run."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "run.json"
        command = [sys.executable, "-m", "parverify", "run", str(model), str(spec), "-q", "--json", str(target)]
        command += ["--timeout", str(options.timeout), "--nproc", str(ranks), "--strategy", options.strategy]
        execute(command, timeout=2 * options.timeout + 60)
        return json.loads(target.read_text())


def widened(spec: Path, factor: float, folder: Path) -> Path:
    """A copy of a property (VNN-LIB 1, with a plain box) whose radii are so many times as large.

    Raises:
        RunError: an input has no bound on one side, or several.
    """
    text = (gzip.open if spec.suffix == ".gz" else open)(spec, "rt").read()  # type: ignore[operator]
    bound = re.compile(r"\(assert \((<=|>=) (X_\d+) ([-+.\deE]+)\)\)")
    sides: dict[str, dict[str, float]] = {"<=": {}, ">=": {}}
    for way, name, value in bound.findall(text):
        if name in sides[way]:
            raise RunError(f"{name} has several bounds")
        sides[way][name] = float(value)
    if not sides["<="] or sides["<="].keys() != sides[">="].keys():
        raise RunError("the inputs are no plain box")

    def wider(match: re.Match[str]) -> str:
        way, name, _ = match.groups()
        high, low = sides["<="][name], sides[">="][name]
        value = (high + low) / 2 + (1 if way == "<=" else -1) * factor * (high - low) / 2
        return f"(assert ({way} {name} {value:.17f}))"

    target = folder / f"{spec.name.partition('.vnnlib')[0]}_x{factor:g}.vnnlib"
    target.write_text(bound.sub(wider, text))
    return target


def pace(report: dict[str, Any]) -> float:
    """Domains bounded a second of the search."""
    return report["stats"].get("bounded", 0) / max(report["stats"]["phases"].get("search", 0.0), 1e-9)


def idle(report: dict[str, Any]) -> float:
    """Share of the search for which ranks had no domain, on average."""
    ranks = report["stats"].get("ranks", [])
    return sum(rank["idle_seconds"] for rank in ranks) / max(
        len(ranks) * report["stats"]["phases"].get("search", 0.0), 1e-9
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("instances", nargs="+")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=100.0)
    parser.add_argument("--strategy", default="auto")
    options = parser.parse_args()
    many = f"P={options.ranks}"
    print(head("instance", "verdict", "domains", "a second", many, "speed-up", "seconds", many, "ratio", "idle"))
    problems: list[str] = []
    ratios: list[float] = []
    folder = tempfile.TemporaryDirectory()
    for text in options.instances:
        name, model, spec, *factor = text.split(":")
        try:
            files = options.folder / name / model, options.folder / name / spec
            if factor:
                files = files[0], widened(files[1], float(factor[0]), Path(folder.name))
            pairs = [[run(*files, ranks, options) for ranks in (1, options.ranks)] for _ in range(options.pairs)]
        except RunError as error:
            problems.append(f"{text}: {error}")
            continue
        verdicts = {one["verdict"] for pair in pairs for one in pair}
        searched = all(pace(one) for pair in pairs for one in pair)  # else bounds of the whole box decided
        speedup = median(pace(other) / pace(one) for one, other in pairs) if searched else 1.0
        ratio = median(other["seconds"] / one["seconds"] for one, other in pairs)
        domains = [int(median(pair[k]["stats"].get("bounded", 0) for pair in pairs)) for k in (0, 1)]
        print(
            row(
                f"{Path(model).stem} {files[1].stem}",
                "/".join(sorted(verdicts)),
                "/".join(map(str, domains)),
                *(f"{median(pace(pair[k]) for pair in pairs):.0f}" for k in (0, 1)),
                f"{speedup:.2f}" if searched else "",
                *(f"{median(pair[k]['seconds'] for pair in pairs):.1f}" for k in (0, 1)),
                f"{ratio:.2f}",
                f"{100 * median(idle(other) for _, other in pairs):.1f} %",
            ),
            flush=True,
        )
        ratios.append(ratio)
        if len(verdicts) > 1:
            problems.append(f"{text}: verdicts {', '.join(sorted(verdicts))}")
        if domains[0] >= MANY and speedup < SPEEDUP * options.ranks:
            problems.append(
                f"{text}: {speedup:.2f} times as many domains a second, {SPEEDUP * options.ranks:.2f} wanted"
            )
    if ratios and median(ratios) > RATIO:
        problems.append(f"the median ratio of times is {median(ratios):.2f}, at most {RATIO} wanted")
    print("\n" + ("\n".join(f"missed: {problem}" for problem in problems) or "All limits hold."))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
