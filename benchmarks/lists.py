"""A list of instances through the same ranks, against a process for each: verdicts, wall and processor time.

    python benchmarks/lists.py LIST [--timeout 20] [--nproc 1,2]

LIST holds lines of onnx,vnnlib,timeout. From the list's times on one rank follows what lockstep would take on several
ranks: each bounds an instance, all wait, each searches its own where it is undecided, all wait. Exits with status 1 if
a verdict of the list differs from that of the instance's own process although neither ran out of time.
"""

from __future__ import annotations

import argparse
import csv
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from runs import head, row

from parverify.cli.instances import locate, read_list
from parverify.results import read_verdict

RUN = (sys.executable, "-m", "parverify", "run", "-q")


def timed(commands: Sequence[Sequence[str]]) -> tuple[float, float]:
    """Wall seconds, and those of the processor, of commands one after the other."""
    started, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    for command in commands:
        subprocess.run(command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.monotonic() - started, used


def one_by_one(path: Path, timeout: float, folder: Path) -> tuple[list[str], float, float]:
    """Verdicts and times of a process for each instance."""
    items = read_list(path)
    files = [folder / f"{item.name}.txt" for item in items]
    commands = [
        [*RUN, "--timeout", str(timeout), "--results-file", str(file), *(locate(path.parent, name) for name in names)]
        for file, names in zip(files, ((item.onnx, item.vnnlib) for item in items), strict=True)
    ]
    times = timed(commands)
    return [read_verdict(file) for file in files], *times


@dataclass(frozen=True)
class Stages:
    """What a list took on one rank.

    Args:
        bounding, searching: seconds of each instance in each stage.
        start: seconds besides.
    """

    bounding: tuple[float, ...]
    searching: tuple[float, ...]
    start: float

    @staticmethod
    def of(path: Path, folder: Path, wall: float) -> Stages:
        """From the answers in a folder."""
        contents = [json.loads((folder / f"{item.name}.json").read_text()) for item in read_list(path)]
        searching = [float(((one["stats"] or {}).get("phases") or {}).get("search", 0.0)) for one in contents]
        bounding = [one["seconds"] - spent for one, spent in zip(contents, searching, strict=True)]
        return Stages(tuple(bounding), tuple(searching), wall - sum(bounding) - sum(searching))

    def lockstep(self, ranks: int) -> float:
        """Seconds on several ranks in lockstep."""
        rounds = range(0, len(self.bounding), ranks)
        return self.start + sum(max(part[at : at + ranks]) for at in rounds for part in (self.bounding, self.searching))

    def busy(self, ranks: int, wall: float) -> float:
        """The share of the ranks' time that is work."""
        return (sum(self.bounding) + sum(self.searching)) / (ranks * (wall - self.start))


def as_list(path: Path, timeout: float, folder: Path, nproc: int) -> tuple[list[str], float, float]:
    """Verdicts and times of the list."""
    options = ["--timeout", str(timeout), "--nproc", str(nproc), "--results-dir", str(folder)]
    times = timed([[*RUN, "--list", str(path), *options]])
    with open(folder / "summary.csv", newline="") as file:
        return [row["verdict"] for row in csv.DictReader(file)], *times


def main() -> int:
    """Measure each way and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("list", type=Path)
    parser.add_argument("--timeout", type=float, default=20.0)
    parser.add_argument("--nproc", default="1,2")
    options = parser.parse_args()
    path = options.list.resolve()
    print(
        head("way", "ranks", "wall s", "processor s", "busy", "sat", "unsat", "undecided", "other verdicts than alone")
    )
    alone: list[str] = []
    stages: Stages | None = None
    worst = 0
    for nproc in (0, *map(int, options.nproc.split(","))):
        with tempfile.TemporaryDirectory() as folder:
            if nproc:
                found, wall, used = as_list(path, options.timeout, Path(folder), nproc)
                stages = Stages.of(path, Path(folder), wall) if nproc == 1 else stages
            else:
                found, wall, used = one_by_one(path, options.timeout, Path(folder))
                alone = found
        pairs = [pair for pair in zip(found, alone, strict=True) if "timeout" not in pair]
        wrong = sum(one != other for one, other in pairs)
        worst = max(worst, wrong)
        sat, unsat = found.count("sat"), found.count("unsat")
        left, way = len(found) - sat - unsat, "a list" if nproc else "a process each"
        busy = "" if stages is None else f"{stages.busy(nproc, wall):.0%}"
        print(row(way, nproc or 1, f"{wall:.1f}", f"{used:.1f}", busy, sat, unsat, left, wrong), flush=True)
        if stages is not None and nproc > 1:
            wall = stages.lockstep(nproc)
            print(
                row("lockstep", nproc, f"{wall:.1f}", "", f"{stages.busy(nproc, wall):.0%}", "", "", "", ""), flush=True
            )
    return int(worst > 0)


if __name__ == "__main__":
    sys.exit(main())
