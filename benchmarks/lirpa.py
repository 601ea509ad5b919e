"""Time and memory of auto_LiRPA alone, through `shard`, `apply_fsdp`, or both, on the same script.

    python benchmarks/lirpa.py VNNCOMP [--networks mnist_fc-256x6,oval21-wide] [--methods CROWN,CROWN-Optimized]
        [--modes alone,shard1,shard2,fsdp2] [--repeat 3]

VNNCOMP is a folder with the competition's benchmarks. AUTO_LIRPA names auto_LiRPA's checkout (else what is installed is
taken); AUTO_LIRPA_PYTHON the Python for the runs without parverify's engine, because auto_LiRPA's alphas get no
gradient under newer versions of torch than it allows. Every figure comes from processes of its own, one thread a rank;
seconds are the best of the repetitions after a first call, a peak is that of the worst rank's live tensors, weights
included; of a weight that ranks hold together each has its part. CPU seconds are those of one rank, and tell more than
seconds on a machine that does other things too. The difference is the largest one between bounds, relative to the
largest bound; 0 if all bits are equal.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from runs import RunError, environment, execute, head, mega, row

NETWORKS = {
    "mnist_fc-256x6": ("mnist_fc", "256x6"),
    "oval21-wide": ("oval21", "wide"),
    "oval21-deep": ("oval21", "deep"),
    "sri_resnet_a": ("sri_resnet_a", "resnet"),
}
ITERATIONS = 20


# --- one mode, in a process of its own --------------------------------------------------------------------------------


def script(module: Any, x: Any, method: str, repeat: int, meter: bool) -> dict[str, Any]:
    """What is measured: the same lines whatever the module is."""
    from parverify.parallel.meter import MemoryMeter

    module.compute_bounds(x=(x,), method="IBP")
    held = list({id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}.values())
    if meter:
        engine = getattr(module, "_engine", None)
        if engine is not None:
            (executor,) = engine._divided._executors.values()
            held += [tensor for tensor in executor.resident() if all(tensor is not other for other in held)]
        near = [node for node in module._modules.values() if getattr(node, "near", None) is not None]
        common = [node.near.whole(node.param, node.layout.shape) for node in near]
        with MemoryMeter(held, common) as meter_:
            low, high = module.compute_bounds(x=(x,), method=method)
        return {"peak": meter_.peak_bytes, "lower": low.flatten().tolist(), "upper": high.flatten().tolist()}
    seconds, busy = [], []
    for _ in range(1 if method == "CROWN-Optimized" else repeat):
        began, used = time.perf_counter(), time.process_time()
        low, high = module.compute_bounds(x=(x,), method=method)
        seconds.append(time.perf_counter() - began)
        busy.append(time.process_time() - used)
    sides = {"lower": low.flatten().tolist(), "upper": high.flatten().tolist()}
    return {"seconds": min(seconds), "busy": min(busy), **sides}


def prepare(model: Path, spec: Path) -> tuple[Any, Any]:
    """auto_LiRPA's module of a network, and the property's box."""
    import numpy as np
    import torch

    from parverify.frontend.network import load_network
    from parverify.frontend.vnnlib import read_query
    from parverify.lirpa.compat import lirpa

    network = load_network(model)
    query = read_query(spec, n_in=int(np.prod(network.input_shape)), n_out=network.n_out)
    low, high = (torch.from_numpy(side).float().reshape(network.input_shape) for side in query.hull())
    settings = {
        "enable_opt_interm_bounds": True,
        "optimize_bound_args": {"iteration": ITERATIONS, "early_stop_patience": ITERATIONS + 1},
    }
    library = lirpa().module
    plain = network.module.float().eval()
    module = library.BoundedModule(plain, torch.zeros(network.input_shape), bound_opts=settings, device="cpu")
    module.eval()
    return module, library.BoundedTensor((low + high) / 2, library.PerturbationLpNorm(x_L=low, x_U=high))


def one(options: argparse.Namespace) -> None:
    """Measure one mode and write its figures."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    kind, size = options.one.rstrip("0123456789"), int(options.one.lstrip("abcdefghijklmnopqrstuvwxyz") or 1)

    def measured(comm: Any) -> dict[str, Any]:
        from parverify.lirpa import apply_fsdp, shard

        module, x = prepare(options.model, options.spec)
        if kind in ("fsdp", "both"):
            apply_fsdp(module, comm)
        if kind in ("shard", "both"):
            module = shard(module, "fold" if size > 1 else "single", comm)
        with torch.set_grad_enabled(options.method == "CROWN-Optimized"), contextlib.redirect_stdout(io.StringIO()):
            return script(module, x, options.method, options.repeat, options.meter)

    if size == 1:
        ranks = [measured(None)]
    else:
        from parverify.cli.outcome import Outcome
        from parverify.parallel.launch import launch

        with tempfile.TemporaryDirectory() as folder:

            def job(world: Any) -> Outcome:
                Path(folder, f"{world.rank}.json").write_text(json.dumps(measured(world.comm)))
                return Outcome("unsat")

            outcome = launch(size, job, folder=folder)
            if outcome.verdict != "unsat":
                raise SystemExit(outcome.reason)
            ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(size)]
    figures = dict(ranks[0])
    for key in ("peak", "seconds", "busy"):
        if key in figures:
            figures[key] = max(rank[key] for rank in ranks)
    options.json.write_text(json.dumps(figures))


# --- all of them ------------------------------------------------------------------------------------------------------


def figures(mode: str, model: Path, spec: Path, method: str, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds, peak and bounds of one mode, from two runs.

    Raises:
        RunError: one of them failed.
    """
    home = Path(__file__).resolve()
    python = (
        sys.executable if mode.startswith(("shard", "both")) else os.environ.get("AUTO_LIRPA_PYTHON", sys.executable)
    )
    path = ":".join(part for part in (str(home.parents[1]), os.environ.get("PYTHONPATH")) if part)
    found: dict[str, Any] = {}
    for meter in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "figures.json"
            command = [python, str(home), str(options.vnncomp), "--one", mode, "--model", str(model)]
            command += ["--spec", str(spec), "--methods", method, "--repeat", str(options.repeat)]
            command += ["--json", str(target), *(["--meter"] if meter else [])]
            execute(command, timeout=options.timeout, env=environment(PYTHONPATH=path))
            found |= json.loads(target.read_text())
    return found


def instance(folder: Path, name: str) -> tuple[Path, Path]:
    """The first instance of a network, by its benchmark's list."""
    from runs import published

    benchmark, part = NETWORKS[name]
    for found in published(folder, [benchmark]):
        if part in found.model.name.lower():
            return found.model, found.spec
    raise SystemExit(f"no instance of {name} in {folder}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("vnncomp", type=Path)
    parser.add_argument("--networks", default="mnist_fc-256x6,oval21-wide")
    parser.add_argument("--methods", default="CROWN,CROWN-Optimized")
    parser.add_argument("--modes", default="alone,shard1,shard2")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=600.0)
    for hidden in ("--one", "--model", "--spec", "--json"):
        parser.add_argument(hidden, type=str if hidden == "--one" else Path, help=argparse.SUPPRESS)
    parser.add_argument("--meter", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        options.method = options.methods
        one(options)
        return
    print(
        head(
            "network",
            "method",
            "mode",
            "s",
            "of alone",
            "CPU s",
            "of alone",
            "peak MB",
            "of alone",
            "sum of lower",
            "difference",
        )
    )
    for name in options.networks.split(","):
        model, spec = instance(options.vnncomp, name)
        for method in options.methods.split(","):
            first: dict[str, Any] | None = None
            for mode in options.modes.split(","):
                try:
                    found = figures(mode, model, spec, method, options)
                except RunError as error:
                    print(row(name, method, mode, str(error), "", "", "", "", "", "", ""), flush=True)
                    continue
                first = first or found
                pairs = [zip(found[side], first[side], strict=True) for side in ("lower", "upper")]
                far = max(abs(a - b) for sides in pairs for a, b in sides) / max(
                    map(abs, first["lower"] + first["upper"])
                )
                shares = [f"{found[key] / first[key]:.2f}" for key in ("seconds", "busy", "peak")]
                print(
                    row(name, method, mode, f"{found['seconds']:.3f}", shares[0], f"{found['busy']:.3f}", shares[1],
                        mega(found["peak"]), shares[2], f"{sum(found['lower']):.4f}", f"{far:.1e}"),
                    flush=True,
                )  # fmt: skip


if __name__ == "__main__":
    main()
