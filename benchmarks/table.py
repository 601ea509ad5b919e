"""A markdown table of verdicts and seconds beside other verifiers'.

    python benchmarks/table.py OURS.csv PEERS.csv

OURS.csv is what `run_set.py --out` writes; PEERS.csv has the columns peer, benchmark, onnx, vnnlib, verdict, wall_s.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from pathlib import Path

SOLVED = ("sat", "unsat")


def read(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as handle:
        return list(csv.DictReader(handle))


def key(row: dict[str, str]) -> tuple[str, str, str]:
    return row["benchmark"], row["onnx"].replace("=", "-"), row["vnnlib"].replace("=", "-")


def main(ours: Path, peers: Path) -> None:
    others: dict[str, dict[tuple[str, str, str], dict[str, str]]] = defaultdict(dict)
    for row in read(peers):
        others[row["peer"]][key(row)] = row
    names = sorted(others)
    print("| instance | expected | parverify | " + " | ".join(names) + " |")
    print("| --- " * (3 + len(names)) + "|")
    solved = dict.fromkeys(["parverify", *names], 0)
    for row in read(ours):
        cells = [f"{row['verdict']} {float(row['seconds']):.1f}"]
        solved["parverify"] += row["verdict"] in SOLVED and not row["problem"]
        for name in names:
            other = others[name].get(key(row))
            cells.append("" if other is None else f"{other['verdict']} {float(other['wall_s']):.1f}")
            solved[name] += other is not None and other["verdict"] in SOLVED
        label = f"{row['benchmark']}/{Path(row['onnx']).stem}/{Path(row['vnnlib']).stem}"
        print(f"| {label} | {row['expected']} | " + " | ".join(cells) + " |")
    print("| **solved** | | " + " | ".join(str(count) for count in solved.values()) + " |")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
