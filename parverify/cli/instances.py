"""The instances of a VNN-COMP benchmark folder, and the records that make a run over them resumable.

A record is a small JSON file that is written once the process of an instance has ended by itself. What has no record,
or one made with another timeout or other options, is run again; so a killed run loses only what was under way.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import re
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from parverify.errors import UsageError, why
from parverify.results import AtomicFile, to_json

_FORM = "it has lines such as net.onnx,spec.vnnlib,60: a network, a property, a positive number of seconds"


@dataclass(frozen=True)
class Instance:
    """One row of `instances.csv`.

    Args:
        number: its place in the file, from 0.
        onnx, vnnlib: as written there.
        timeout: seconds.
    """

    number: int
    onnx: str
    vnnlib: str
    timeout: float

    @property
    def name(self) -> str:
        """A file name of its own, readable."""
        stems = [Path(text).name.removesuffix(".gz") for text in (self.onnx, self.vnnlib)]
        network, query = (re.sub(r"[^A-Za-z0-9._=+-]+", "_", stem)[:60] for stem in stems)
        return f"{self.number:04d}-{network}-{query}"


@dataclass(frozen=True)
class Record:
    """The end of one instance.

    Args:
        onnx, vnnlib, timeout, options: what was run.
        verdict: the first line of the results file.
        seconds: wall time of the process, its launch included.
        exit_code: negative if a signal ended it.
    """

    onnx: str
    vnnlib: str
    timeout: float
    options: list[str]
    verdict: str
    seconds: float
    exit_code: int

    def save(self, path: Path) -> None:
        """Write it at once or not at all."""
        AtomicFile(path, option="--out").write(to_json(asdict(self)))

    @staticmethod
    def load(path: Path) -> Record | None:
        """The record in a file, None if there is none that can be read."""
        try:
            return Record(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def answers(self, instance: Instance, options: Sequence[str]) -> bool:
        """Whether it is about this instance, run in the same way."""
        mine = (self.onnx, self.vnnlib, self.timeout, self.options)
        return mine == (instance.onnx, instance.vnnlib, instance.timeout, list(options))


def read_instances(folder: Path) -> list[Instance]:
    """The rows of `instances.csv` (or `instances.csv.gz`) in a folder; see `read_list`.

    Raises:
        UsageError: if there is no such file, or a row is not of that form.
    """
    path = next((folder / name for name in ("instances.csv", "instances.csv.gz") if (folder / name).is_file()), None)
    if path is None:
        raise UsageError(f"no instances.csv in {folder}", "name a benchmark folder of VNN-COMP")
    return read_list(path)


def read_list(path: Path) -> list[Instance]:
    """The rows of a file: onnx, vnnlib, timeout; a header is passed over. It may be gzipped.

    Raises:
        UsageError: if it can't be read, or a row is not of that form.
    """
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8-sig")
        rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines())]
    except (OSError, EOFError, ValueError, zlib.error, csv.Error) as error:
        raise UsageError(f"can't read {path}: {why(error)}", _FORM) from error
    numbered = [(line, row) for line, row in enumerate(rows, start=1) if any(row)]
    if numbered and _is_header(numbered[0][1]):
        numbered = numbered[1:]
    bad = [line for line, row in numbered if not _seconds(row)]
    if bad:
        raise UsageError(f"{path}: line {bad[0]} is not of the form onnx,vnnlib,timeout", _FORM)
    if not numbered:
        raise UsageError(f"{path}: no instance in it", _FORM)
    return [Instance(i, row[0], row[1], _seconds(row)) for i, (_, row) in enumerate(numbered)]


def _is_header(row: Sequence[str]) -> bool:
    """Whether a first row names columns; one that names files, or a number, is an instance, perhaps a broken one."""
    return not any(re.search(r"\.(onnx|vnnlib)(\.gz)?$|^[-+]?(\.?\d|nan$|inf)", cell.lower()) for cell in row)


def _seconds(row: Sequence[str]) -> float:
    """The timeout in a row, 0 if there is none."""
    try:
        value = float(row[2]) if len(row) >= 3 and row[0] and row[1] else 0.0
    except ValueError:
        return 0.0
    return value if 0 < value < math.inf else 0.0


def locate(folder: Path, text: str) -> str:
    """The path of a file in the folder; of each one in `name=path;name=path`, unless a file is named like that."""
    if "=" in text and not (folder / text).exists() and not (folder / f"{text}.gz").exists():
        pairs = [part.partition("=") for part in text.split(";")]
        if all(equals for _, equals, _ in pairs):
            return ";".join(f"{name}={folder / path}" for name, _, path in pairs)
    return str(folder / text)


def spread(instances: list[Instance], limit: int | None) -> list[Instance]:
    """At most `limit` of them, evenly spread over the file."""
    if limit is None or limit >= len(instances):
        return instances
    return [instances[i * len(instances) // limit] for i in range(limit)]
