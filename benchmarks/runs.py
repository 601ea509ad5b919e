"""What measurements of divided bounds share: one run of `parverify bounds` in a process group of its own, instances.

A figure comes from processes that did nothing else: every run starts anew, one thread a rank, and its whole process
group ends before the next one starts.
"""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GENERATED = ("mlp1024", "mlp4096", "resnet")
PUBLISHED = ("mnist_fc", "oval21", "sri_resnet_a")


class RunError(Exception):
    """A run that gave no figures."""


@dataclass(frozen=True)
class Instance:
    """A network and a property.

    Args:
        name: in tables.
        model, spec: the files.
    """

    name: str
    model: Path
    spec: Path


@dataclass(frozen=True)
class Mode:
    """How bounds are divided.

    Args:
        strategy: a preset, or a TOML file.
        nproc: ranks.
        settings: dotted keys of parverify, beside those of the measurement.
    """

    strategy: str = "single"
    nproc: int = 1
    settings: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        extra = "".join(f" {key.split('.')[-1]}={value}" for key, value in self.settings.items())
        return f"{self.strategy} P={self.nproc}{extra}"


def environment(**more: str) -> dict[str, str]:
    """This process's environment with one thread a rank."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **more}


def execute(arguments: Sequence[str], *, timeout: float, env: Mapping[str, str] | None = None) -> None:
    """Run a command to its end in a process group of its own.

    Raises:
        RunError: it failed, or took more than `timeout` seconds; the group is ended.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that a run never outlives its script
    process = subprocess.Popen(
        arguments,
        env=dict(env or environment()),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, talk = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise RunError(f"no result after {timeout:.0f} s") from error
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    if process.returncode:
        lines = talk.strip().splitlines() or ["no message"]
        raise RunError(f"exit {process.returncode}: {lines[-1][:300]}")


def bounds(
    instance: Instance,
    mode: Mode,
    *,
    method: str = "alpha-crown",
    settings: Mapping[str, str] | None = None,
    layers: bool = False,
    timeout: float = 3600.0,
) -> dict[str, Any]:
    """The JSON of `parverify bounds`.

    Raises:
        RunError: there is none.
    """
    command = [sys.executable, "-m", "parverify", "bounds", str(instance.model), str(instance.spec)]
    command += ["--method", method, *(["--layers"] if layers else [])]
    if mode != Mode():  # what `single` on one process is by default
        command += ["--strategy", mode.strategy, "--nproc", str(mode.nproc)]
    for key, value in {**(settings or {}), **mode.settings}.items():
        command += ["--set", f"{key}={value}"]
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "bounds.json"
        try:
            execute([*command, "--json", str(target)], timeout=timeout)
        except RunError as error:
            raise RunError(f"{instance.name}, {mode}, {method}: {error}") from error
        return json.loads(target.read_text())


def totals(rank: Mapping[str, Any]) -> tuple[int, float]:
    """Bytes and seconds of all collectives of one rank."""
    kinds = rank["collectives"].values()
    return sum(int(kind["bytes"]) for kind in kinds), sum(float(kind.get("seconds", 0.0)) for kind in kinds)


def counted(collectives: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[int, int]]:
    """Kind -> (calls, bytes), without kinds that never happened."""
    found = {kind: (int(value["calls"]), int(value["bytes"])) for kind, value in collectives.items()}
    return {kind: value for kind, value in found.items() if value != (0, 0)}


def generated(folder: Path, kind: str, names: Iterable[str] = GENERATED) -> list[Instance]:
    """Networks that `networks.py` wrote, with their property `few` or `many`."""
    found = [Instance(name, folder / f"{name}.onnx", folder / f"{name}_{kind}.vnnlib") for name in names]
    for instance in found:
        for path in (instance.model, instance.spec):
            if not path.exists():
                raise SystemExit(f"{path} is missing: python benchmarks/networks.py {folder}")
    return found


def published(folder: Path, benchmarks: Iterable[str] = PUBLISHED) -> list[Instance]:
    """The first instance of every network of the given benchmarks, by their instances.csv."""
    found: dict[str, Instance] = {}
    for benchmark in benchmarks:
        with open(folder / benchmark / "instances.csv", newline="") as handle:
            for onnx, vnnlib, *_ in csv.reader(handle):
                model, spec = (_present(folder / benchmark / name) for name in (onnx, vnnlib))
                name = f"{benchmark}/{Path(onnx).stem}"
                if model is not None and spec is not None and name not in found:
                    found[name] = Instance(name, model, spec)
    if not found:
        raise SystemExit(f"no instances of {', '.join(benchmarks)} in {folder}")
    return list(found.values())


def _present(path: Path) -> Path | None:
    """The file, itself or gzipped."""
    return next((p for p in (path, path.with_name(path.name + ".gz")) if p.exists()), None)


def row(*cells: object) -> str:
    """A line of a markdown table."""
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def head(*names: str) -> str:
    """The first two lines of a markdown table."""
    return row(*names) + "\n" + row(*["---"] * len(names))


def mega(size: float) -> str:
    """Bytes in MB."""
    return f"{size / 1e6:.1f}"
