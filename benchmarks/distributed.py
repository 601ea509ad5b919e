"""Whether dividing bounds over ranks changes them, and whether the cost model foresees what is moved.

    python benchmarks/distributed.py [--nets NETS] [--vnncomp DIR] [--methods ...] [--strategies ...] [--ranks 1,2,4]
                                     [--dtypes float32,float64] [--networks TEXT,...] [--interm]

NETS is what `networks.py` wrote, DIR holds published instances (mnist_fc, oval21 and sri_resnet_a, each with its
instances.csv). `fsdp` and `fold` must give the digest of one process; `ring` and `tp` reorder sums and must be within
1e-5 (float32) or 1e-12 (float64) of the largest bound of each layer. Every rank must move exactly the bytes that were
predicted. `--interm` also measures tensor parallelism with exact and with interval bounds of intermediate neurons,
beside published figures; `--methods ''` leaves all else out. Exits with status 1 if anything fails.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from networks import property_text
from runs import Instance, Mode, RunError, bounds, counted, generated, head, published, row, totals

METHODS = ("ibp", "crown", "crown-ibp", "alpha-crown")
EXACT = ("single", "fsdp", "fold")
STRATEGIES = ("fsdp", "fold", "ring", "tp")
TOLERANCE = {"float32": 1e-5, "float64": 1e-12}
PREDICTED_PEAK = 0.10

INTERM_EPS = 0.02
PAPER = {"mnist-net_256x2": "6e-8", "mnist-net_256x4": "5.64", "mnist-net_256x6": "792"}
"""Deviation of the outputs' bounds under tensor parallelism in arXiv 2606.09377, by network."""


# --- comparison -------------------------------------------------------------------------------------------------------


def tables(report: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """All bounds of a report: name, (2, n)."""
    for layer in report["layers"]:
        yield layer["name"], np.array([layer["lower"], layer["upper"]], dtype=np.float64)
    yield "output", np.array([report["lower"], report["upper"]], dtype=np.float64)


def deviation(report: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """The largest difference between bounds over the largest bound of the layer; infinite where layers differ."""
    mine, theirs = dict(tables(report)), dict(tables(other))
    if mine.keys() != theirs.keys() or any(mine[name].shape != theirs[name].shape for name in mine):
        return float("inf")
    return max(_relative(mine[name], theirs[name]) for name in mine)


def _relative(mine: np.ndarray, theirs: np.ndarray) -> float:
    finite = np.isfinite(theirs)
    if not (finite == np.isfinite(mine)).all() or not (mine[~finite] == theirs[~finite]).all():
        return float("inf")
    scale = np.abs(theirs[finite]).max(initial=0.0)
    gap = np.abs(mine[finite] - theirs[finite]).max(initial=0.0)
    return float(gap / scale) if scale else float(gap)


def foretold(report: Mapping[str, Any]) -> tuple[bool, float]:
    """Whether every rank's collectives were predicted exactly, and how far off the predicted peak is at worst."""
    ranks = report["ranks"]
    if any(not rank.get("predicted") for rank in ranks):
        return False, float("inf")
    same = all(counted(rank["predicted"]["collectives"]) == counted(rank["collectives"]) for rank in ranks)
    off = max(abs(rank["predicted"]["peak_bytes"] / rank["peak_bytes"] - 1) for rank in ranks)
    return same, off


# --- all strategies ---------------------------------------------------------------------------------------------------


class Survey:
    """Runs, compares and prints; remembers what failed.

    Args:
        options: of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self.problems: list[str] = []

    def _run(self, instance: Instance, mode: Mode, method: str, dtype: str) -> dict[str, Any]:
        settings = {"alpha.iterations": str(self._options.iterations), "dtype": dtype}
        if self._options.tile:
            settings["bounds.tile"] = str(self._options.tile)
        return bounds(instance, mode, method=method, settings=settings, layers=True, timeout=self._options.timeout)

    def compare(self, instance: Instance, method: str, dtype: str) -> None:
        """All strategies against one process."""
        try:
            single = self._run(instance, Mode(), method, dtype)
        except RunError as error:
            self._fail(instance, Mode(), method, dtype, str(error))
            return
        for strategy in self._options.strategies:
            for nproc in self._options.ranks:
                mode = Mode(strategy, nproc)
                try:
                    self._judge(instance, mode, (method, dtype), single, self._run(instance, mode, method, dtype))
                except RunError as error:
                    self._fail(instance, mode, method, dtype, str(error))

    def _judge(
        self,
        instance: Instance,
        mode: Mode,
        how: tuple[str, str],
        single: Mapping[str, Any],
        report: Mapping[str, Any],
    ) -> None:
        same, off = report["digest"] == single["digest"], deviation(report, single)
        bytes_same, peak_off = foretold(report)
        faults = []
        if len(report["ranks"]) != mode.nproc:
            faults.append(f"figures of {len(report['ranks'])} ranks")
        if (mode.strategy in EXACT or mode.nproc == 1) and not same:
            faults.append(f"bounds differ by {off:.1e}")
        if off > TOLERANCE[how[1]]:
            faults.append(f"deviation {off:.1e}, at most {TOLERANCE[how[1]]:.0e} allowed")
        if not bytes_same:
            faults.append("collectives are not the predicted ones")
        if peak_off > PREDICTED_PEAK:
            faults.append(f"predicted peak off by {100 * peak_off:.0f} %")
        moved = max(totals(rank)[0] for rank in report["ranks"])
        cells = ("equal" if same else "differs", f"{off:.1e}", moved, "equal" if bytes_same else "DIFFERENT")
        self._line(instance, mode, how, *cells, f"{100 * peak_off:.1f} %", "; ".join(faults) or "ok")
        self.problems += [f"{instance.name}, {how[0]}, {how[1]}, {mode}: {fault}" for fault in faults]

    def _fail(self, instance: Instance, mode: Mode, method: str, dtype: str, why: str) -> None:
        self._line(instance, mode, (method, dtype), "", "", "", "", "", why.replace("|", "/"))
        self.problems.append(f"{instance.name}, {method}, {dtype}, {mode}: {why}")

    @staticmethod
    def _line(instance: Instance, mode: Mode, how: tuple[str, str], *cells: object) -> None:
        print(row(instance.name, *how, mode, *cells), flush=True)

    # --- tensor parallelism's intermediate bounds ---

    def interm(self, instance: Instance) -> None:
        """The outputs' CROWN bounds under tensor parallelism with `rows` and with `ibp`, against one process."""
        for nproc in self._options.ranks:
            if nproc == 1:
                continue
            try:
                single = self._run(instance, Mode(), "crown", "float32")
                found = {
                    kind: self._run(instance, Mode("tp", nproc, {"parallel.interm": kind}), "crown", "float32")
                    for kind in ("rows", "ibp")
                }
            except RunError as error:
                self._fail(instance, Mode("tp", nproc), "crown", "float32", str(error))
                continue
            reference = _output(single)
            rows, ibp = (_output(found[kind]) for kind in ("rows", "ibp"))
            scale = np.abs(reference).max()
            slack = TOLERANCE["float32"] * scale
            looser = bool((ibp[0] <= reference[0] + slack).all() and (ibp[1] >= reference[1] - slack).all())
            exact, loose = np.abs(rows - reference).max(), np.abs(ibp - reference).max()
            paper = PAPER.get(instance.name.rpartition("/")[2], "")
            cells = (f"{exact:.1e}", f"{exact / scale:.1e}", f"{loose:.3g}", "yes" if looser else "NO", paper)
            print(row(instance.name, nproc, *cells), flush=True)
            if exact > slack:
                self.problems.append(f"{instance.name}, tp P={nproc} with rows: deviation {exact / scale:.1e}")
            if not looser:
                self.problems.append(f"{instance.name}, tp P={nproc} with ibp: tighter than exact bounds")


def _output(report: Mapping[str, Any]) -> np.ndarray:
    return np.array([report["lower"], report["upper"]], dtype=np.float64)


def narrowed(instance: Instance, eps: float, folder: Path) -> Instance:
    """The instance with radius `eps` around the same point, which is in [0, 1] and where boxes are cut off there."""
    from parverify.frontend.network import load_network
    from parverify.frontend.vnnlib import read_query

    network = load_network(instance.model)
    lower, upper = read_query(instance.spec, n_in=network.n_in, n_out=network.n_out).hull()
    radius = (upper - lower).max() / 2
    center = np.where(lower <= 0, upper - radius, lower + radius).clip(0, 1)
    spec = folder / f"{instance.model.name.split('.')[0]}.vnnlib"
    spec.write_text(property_text((center - eps).clip(0), (center + eps).clip(None, 1), 0, 1, network.n_out))
    return Instance(instance.name, instance.model, spec)


# --- command line -----------------------------------------------------------------------------------------------------


def _names(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", type=Path)
    parser.add_argument("--vnncomp", type=Path)
    parser.add_argument("--networks", type=_names, help="only those whose name contains one of these")
    parser.add_argument("--methods", type=_names, default=METHODS)
    parser.add_argument("--strategies", type=_names, default=STRATEGIES)
    parser.add_argument("--ranks", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2, 4])
    parser.add_argument("--dtypes", type=_names, default=["float32", "float64"])
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--tile", type=int, default=0, help="rows at once; 0 for what parverify takes")
    parser.add_argument("--interm", action="store_true", help="the table of tensor parallelism's intermediate bounds")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for one run")
    options = parser.parse_args()
    if options.nets is None and options.vnncomp is None:
        parser.error("give --nets, --vnncomp, or both")
    return options


def instances(options: argparse.Namespace) -> list[Instance]:
    """What is bounded."""
    found = published(options.vnncomp) if options.vnncomp is not None else []
    found += generated(options.nets, "few") if options.nets is not None else []
    wanted = options.networks or [""]
    return [instance for instance in found if any(part in instance.name for part in wanted)]


def main() -> int:
    options = arguments()
    survey = Survey(options)
    names = ("network", "method", "dtype", "mode", "digest", "deviation", "bytes a rank", "predicted", "peak off", "")
    if options.methods:
        print(head(*names))
        for instance in instances(options):
            for method in options.methods:
                for dtype in options.dtypes:
                    survey.compare(instance, method, dtype)
    if options.interm:
        print("\n" + head("network", "P", "rows: deviation", "relative", "ibp: deviation", "looser", "paper"))
        with tempfile.TemporaryDirectory() as folder:
            for instance in published(options.vnncomp, ["mnist_fc"]):
                survey.interm(narrowed(instance, INTERM_EPS, Path(folder)))
    print("\n" + ("\n".join(f"failed: {problem}" for problem in survey.problems) or "All hold."))
    return 1 if survey.problems else 0


if __name__ == "__main__":
    sys.exit(main())
