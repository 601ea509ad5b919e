"""Whether several ranks give the verdicts of one process, and whether repeated runs ever hang.

    python benchmarks/verdicts.py DIR [--instances 12] [--strategies ...] [--ranks 1,2,4] [--timeout 60]
        [--groups N] [--repeat N]

DIR holds published instances with `expected.csv` (benchmark, onnx, vnnlib, timeout_s, verdict, ...). Takes instances
with both answers from the benchmarks named in `SOURCES`, runs each under every strategy and number of ranks, and
compares the verdict with the expected one; `--groups N` divides the ranks into so many groups, and only then do several
ranks run under `single`, which is for groups of one. `--repeat N` instead
runs the bundled example N times under each strategy with two ranks. Exits with status 1 if a verdict is missing or
wrong, or a run did not end in time.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

STRATEGIES = ("single", "fsdp", "fold", "ring", "tp")
SOURCES = (("acasxu", 7), ("mnist_fc", 5), ("oval21", 1), ("rl_benchmarks", 4), ("test", 3))
EXAMPLE = Path(__file__).parent.parent / "examples" / "bundled"
GRACE = 20.0  # seconds beyond the timeout after which a run counts as hanging


def chosen(folder: Path, count: int) -> list[tuple[Path, Path, str]]:
    """(onnx, vnnlib, verdict) of up to `count` instances, answers alternating within a benchmark."""
    with (folder / "expected.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["verdict"] in ("sat", "unsat")]
    out: list[tuple[Path, Path, str]] = []
    for name, wanted in SOURCES:
        mine = [row for row in rows if row["benchmark"] == name]
        groups = [[row for row in mine if row["verdict"] == verdict] for verdict in ("unsat", "sat")]
        mixed = [row for pair in zip(*groups, strict=False) for row in pair] + max(groups, key=len)
        taken: list[tuple[Path, Path, str]] = []
        for row in mixed:
            entry = (folder / name / row["onnx"], folder / name / row["vnnlib"], row["verdict"])
            if entry not in taken and len(taken) < wanted:
                taken.append(entry)
        out += taken
    return out[:count]


def run(onnx: Path, vnnlib: Path, strategy: str, ranks: int, timeout: float, *, groups: int = 0) -> tuple[str, float]:
    """The verdict of one run, `hang` if it does not end, and its seconds."""
    command = [sys.executable, "-m", "parverify", "run", "-q", "--timeout", str(timeout), "--strategy", strategy]
    command += ["--nproc", str(ranks), str(onnx), str(vnnlib)]
    if groups and ranks % groups == 0:
        command += ["--set", f"parallel.groups={groups}"]
    started = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout + GRACE, check=False)
    except subprocess.TimeoutExpired:
        return "hang", time.monotonic() - started
    words = done.stdout.split()
    return (words[0] if words else f"exit {done.returncode}"), time.monotonic() - started


def table(folder: Path, options: argparse.Namespace) -> bool:
    """Print verdicts and seconds by strategy and ranks; whether all are as expected."""
    good = True
    modes = [(s, p) for s in options.strategies for p in options.ranks if s != "single" or p in (1, options.groups)]
    if not modes:
        raise SystemExit("nothing to run: `single` is for one rank, or for as many groups as ranks")
    print("| instance | expected | " + " | ".join(f"{s} {p}" for s, p in modes) + " |")
    print("| --- " * (len(modes) + 2) + "|")
    for onnx, vnnlib, expected in chosen(folder, options.instances):
        cells = []
        for strategy, ranks in modes:
            verdict, seconds = run(onnx, vnnlib, strategy, ranks, options.timeout, groups=options.groups)
            good &= verdict == expected
            cells.append(f"{verdict} {seconds:.1f} s")
        print(f"| {onnx.stem}, {vnnlib.stem} | {expected} | " + " | ".join(cells) + " |", flush=True)
    return good


def repeated(options: argparse.Namespace) -> bool:
    """Run the bundled example again and again; whether it always ended with the same verdict."""
    good = True
    onnx, vnnlib = EXAMPLE / "digits.onnx", EXAMPLE / "digits_square_unsat.vnnlib"
    for strategy in options.strategies:
        found, slowest = Counter(), 0.0
        for _ in range(options.repeat):
            verdict, seconds = run(onnx, vnnlib, strategy, 2, options.timeout)
            found[verdict] += 1
            slowest = max(slowest, seconds)
        good &= set(found) == {"unsat"}
        print(f"{strategy}: {dict(found)}, slowest {slowest:.1f} s", flush=True)
    return good


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--instances", type=int, default=12)
    parser.add_argument("--strategies", type=lambda text: text.split(","), default=STRATEGIES)
    parser.add_argument("--ranks", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2, 4])
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--groups", type=int, default=0)
    parser.add_argument("--repeat", type=int, default=0)
    options = parser.parse_args()
    sys.exit(0 if (repeated(options) if options.repeat else table(options.folder, options)) else 1)


if __name__ == "__main__":
    main()
