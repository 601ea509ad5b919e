"""Lay out a folder of instances anew, as links, with "=" in file names replaced by "-".

    python benchmarks/plain_names.py DIR OUT

run_set.py reads "=" in a network's name as `name=path` of a property over several networks, so that it can neither pass
such a file on nor replay a witness on it. Some published networks are named like that. Everything else stays the same.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path


def main(source: Path, target: Path) -> None:
    with open(source / "expected.csv", newline="") as handle:
        rows = list(csv.DictReader(handle))
    for row in rows:
        folder = Path(row.get("benchmark", ""))
        for key in ("onnx", "vnnlib"):
            plain = row[key].replace("=", "-")
            for ending in ("", ".gz"):
                original = (source / folder / (row[key] + ending)).resolve()
                link = target / folder / (plain + ending)
                if original.exists() and not link.exists():
                    link.parent.mkdir(parents=True, exist_ok=True)
                    link.symlink_to(original)
            row[key] = plain
    with open(target / "expected.csv", "w", newline="") as handle:
        writer = csv.DictWriter(handle, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
