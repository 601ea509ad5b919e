"""Peak memory per rank of alpha-CROWN under every strategy, as a table beside the baselines, and the limits on it.

    python benchmarks/memory.py NETS [--networks NAME,...] [--settings untiled,tiled] [--ranks 1,2,4] [--untiled few]

NETS is what `networks.py` wrote. Every mode runs in processes of its own, one thread a rank; a peak is that of the
worst rank, weights, alphas and optimizer included. Two settings: *untiled*, where a rank holds all of its rows at once,
and *tiled*, 32 rows at any number of ranks on boxes with about 5 % of the neurons unstable. auto_LiRPA runs where
AUTO_LIRPA names its checkout (see `baselines.py`), in the Python that AUTO_LIRPA_PYTHON names. Exits with status 1 if
limits are missed, naming them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import environ
from pathlib import Path
from typing import Any

from runs import GENERATED, Instance, Mode, RunError, bounds, environment, execute, generated, head, mega, row

TILE = 32
UNTILED = {"bounds.tile": "-1"}
TILED = {"bounds.tile": str(TILE)}

FOLD_UNTILED = {2: 0.60, 4: 0.35}
FOLD_TILED = {2: 0.62, 4: 0.40}
FOLD_TILED_ON = "mlp4096"
FSDP_PEAK = 0.95
FSDP_RESIDENT = {2: 0.51, 4: 0.26}
WORKING = 1.15
PREDICTED = 0.10


@dataclass(frozen=True)
class Figure:
    """One mode on one instance; what is largest over the ranks."""

    mode: str
    nproc: int
    peak: int
    resident: int
    predicted: int | None
    seconds: float
    digest: str | None


def figure(mode: str, report: Mapping[str, Any]) -> Figure:
    """From the JSON of a run."""
    ranks = report["ranks"]
    predicted = [rank["predicted"]["peak_bytes"] for rank in ranks if rank.get("predicted")]
    return Figure(
        mode,
        len(ranks),
        max(rank["peak_bytes"] for rank in ranks),
        max(rank["resident_bytes"] for rank in ranks),
        max(predicted) if predicted else None,
        report["seconds"],
        report.get("digest"),
    )


def modes(ranks: Sequence[int]) -> list[Mode]:
    """Everything but the baselines; `single` comes first."""
    found = [Mode()]
    for nproc in ranks:
        for prefetch in ("false", "true"):
            found.append(Mode("fsdp", nproc, {"parallel.prefetch": prefetch}))
        found.append(Mode("fold", nproc))
    return found


def baseline(name: str, instance: Instance, iterations: int, tile: int, timeout: float) -> Figure:
    """`lirpa` or `offload`, by baselines.py.

    Raises:
        RunError: there is no figure.
    """
    home = Path(__file__).resolve().parent
    python = environ.get("AUTO_LIRPA_PYTHON", sys.executable) if name == "lirpa" else sys.executable
    path = ":".join(part for part in (str(home.parent), environ.get("PYTHONPATH")) if part)
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "figures.json"
        command = [python, str(home / "baselines.py"), name, str(instance.model), str(instance.spec)]
        command += ["--iterations", str(iterations), "--tile", str(tile), "--json", str(target)]
        execute(command, timeout=timeout, env=environment(PYTHONPATH=path))
        report = json.loads(target.read_text())
    return figure(report["strategy"], report)


def largest_block(model: Path) -> int:
    """Bytes of the largest part of a weight."""
    from parverify.frontend.network import load_network
    from parverify.graph.trace import trace
    from parverify.ops.weighted import parts, piece_of
    from parverify.program.steps import weighted_nodes

    network = load_network(model)
    graph = trace(network.module, network.input_shape)
    sizes = [0]
    for node in weighted_nodes(graph):
        weight = graph.constants[node.consts["weight"]].value
        sizes += [piece_of(node, part).of(weight).numel() for part in parts(node, weight.shape)]
    return 4 * max(sizes)


def measure(instance: Instance, setting: Mapping[str, str], options: argparse.Namespace) -> list[Figure]:
    """All modes on one instance; prints a line for each."""
    tile = int(setting["bounds.tile"])
    settings = {"alpha.iterations": str(options.iterations)}
    found: list[Figure] = []
    for mode in modes(options.ranks):
        label = str(mode)
        try:
            report = bounds(instance, mode, settings={**settings, **setting}, timeout=options.timeout)
        except RunError as error:
            _failed(label, error)
            continue
        found.append(figure(label, report))
        _show(found[-1], found[0])
    extra: list[tuple[str, Instance, int]] = [("offload", instance, tile), ("lirpa", instance, -1)]
    for name, where, rows in extra:
        try:
            _show(baseline(name, where, options.iterations, rows, options.timeout), found[0] if found else None)
        except RunError as error:
            _failed("auto_LiRPA" if name == "lirpa" else name, error)
    if tile > 0:
        try:
            report = bounds(instance, Mode(), settings={**settings, **UNTILED}, timeout=options.timeout)
            _show(figure("single untiled", report), found[0] if found else None)
        except RunError as error:
            _failed("single untiled", error)
    return found


def _failed(label: str, error: RunError) -> None:
    print(row(label, str(error).replace("|", "/"), "", "", "", "", ""), flush=True)


def _show(one: Figure, single: Figure | None) -> None:
    peak = f"{one.peak / single.peak:.3f}" if single is not None else ""
    resident = f"{one.resident / single.resident:.3f}" if single is not None else ""
    predicted = "" if one.predicted is None else f"{one.predicted / one.peak:.3f}"
    print(
        row(one.mode, mega(one.peak), peak, mega(one.resident), resident, predicted, f"{one.seconds:.1f}"), flush=True
    )


def missed(instance: Instance, tiled: bool, found: Sequence[Figure], block: int) -> list[str]:
    """Limits that the figures of one instance in one setting miss, in words."""
    where = f"{instance.name} {'tiled' if tiled else 'untiled'}"
    if not found or found[0].mode != str(Mode()):
        return [f"{where}: no figure for single"]
    single, problems = found[0], []

    def limit(one: Figure, what: str, value: float, most: float) -> None:
        if value > most:
            problems.append(f"{where}, {one.mode}: {what} {value:.3f}, at most {most:.3f} allowed")

    for one in found:
        if one.predicted is None:
            problems.append(f"{where}, {one.mode}: no predicted peak")
        else:
            limit(one, "predicted peak off by", abs(one.predicted / one.peak - 1), PREDICTED)
        if tiled and one.digest != single.digest:
            problems.append(f"{where}, {one.mode}: bounds differ from single's")
        if one.mode.startswith("fsdp") and one.nproc in FSDP_RESIDENT:
            limit(one, "resident weights of single's", one.resident / single.resident, FSDP_RESIDENT[one.nproc])
            if "prefetch=false" in one.mode:
                limit(one, "peak of single's", one.peak / single.peak, FSDP_PEAK)
        if one.mode.startswith("fold") and one.nproc > 1:
            ratios = FOLD_TILED if tiled else FOLD_UNTILED
            if one.nproc in ratios and (not tiled or instance.name == FOLD_TILED_ON):
                limit(one, "peak of single's", one.peak / single.peak, ratios[one.nproc])
            if tiled:
                allowed = single.resident / one.nproc + block + WORKING * (single.peak - single.resident)
                limit(one, "peak in MB", one.peak / 1e6, allowed / 1e6)
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nets", type=Path)
    parser.add_argument("--networks", default=",".join(GENERATED))
    parser.add_argument("--settings", default="untiled,tiled")
    parser.add_argument(
        "--untiled", choices=("few", "many"), default="few", help="which boxes the untiled setting takes"
    )
    parser.add_argument("--ranks", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2, 4])
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for one run")
    options = parser.parse_args()
    problems: list[str] = []
    for name in options.settings.split(","):
        tiled = name == "tiled"
        for instance in generated(options.nets, "few" if tiled else options.untiled, options.networks.split(",")):
            print(f"\n### {instance.name}, {name}\n")
            print(head("mode", "peak MB", "of single", "resident MB", "of single", "predicted/peak", "seconds"))
            found = measure(instance, TILED if tiled else UNTILED, options)
            problems += missed(instance, tiled, found, largest_block(instance.model) if tiled else 0)
            expected = {str(mode) for mode in modes(options.ranks)} - {one.mode for one in found}
            problems += [f"{instance.name} {name}, {mode}: no figure" for mode in sorted(expected)]
    print("\n" + ("\n".join(f"missed: {problem}" for problem in problems) or "All limits hold."))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
