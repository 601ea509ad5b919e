"""Bounds and seconds beside auto_LiRPA's, one line per reference case.

    python benchmarks/golden.py GOLDEN_DIR VNNCOMP_DIR [CASE ...]

Each case runs IBP, CROWN (without intersection and without allowance for rounding, as the reference does) and streamed
alpha-CROWN with 20 iterations, on one thread. Differences are relative to the case's largest bound.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import torch

from parverify.api import compute_bounds
from parverify.bounds.alpha import AlphaOptions
from parverify.bounds.layers import BoundOptions
from parverify.budget import make_budget
from parverify.frontend.network import load_network
from parverify.graph.trace import trace
from parverify.ops.rounding import allowance
from parverify.program.executor import Executor


def main(golden: Path, vnncomp: Path, cases: list[str]) -> None:
    torch.set_num_threads(1)
    print("| case | IBP diff | CROWN diff | alpha sum of lower | reference | alpha s | reference s |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    spent = stored = 0.0
    for case in cases or sorted(path.stem for path in golden.glob("*.npz")):
        data = np.load(golden / f"{case}.npz")
        network = load_network(vnncomp / str(data["onnx"]))
        graph = trace(network.module, network.input_shape)
        executor = Executor(graph)
        tile = make_budget(graph, memory=None, itemsize=4).tile()
        lower, upper = (torch.tensor(data[f"x_{side}"]).reshape(1, -1) for side in ("lower", "upper"))

        def difference(method: str, key: str, data=data, executor=executor, lower=lower, upper=upper) -> float:
            with allowance(0):
                found = compute_bounds(executor, lower, upper, method=method, options=BoundOptions(intersect=False))
            theirs = [torch.tensor(data[f"{key}_{side}"]).flatten() for side in ("lower", "upper")]
            scale = max(float(part.abs().max()) for part in theirs)
            pairs = zip((found.lower, found.upper), theirs, strict=True)
            return max(float((mine.flatten() - other).abs().max()) for mine, other in pairs) / scale

        options = BoundOptions(alpha=AlphaOptions(iterations=20), tile=tile)
        began = time.perf_counter()
        alpha = compute_bounds(executor, lower, upper, method="alpha-crown", options=options)
        seconds = time.perf_counter() - began
        spent, stored = spent + seconds, stored + float(data["alpha_crown_seconds"])
        print(
            f"| {case} | {difference('ibp', 'ibp'):.0e} | {difference('crown', 'crown'):.0e} "
            f"| {float(alpha.lower.sum()):.4f} | {float(data['alpha_crown_lower'].sum()):.4f} "
            f"| {seconds:.2f} | {float(data['alpha_crown_seconds']):.2f} |",
            flush=True,
        )
    print(f"\nalpha-CROWN: {spent:.1f} s against {stored:.1f} s stored: {spent / stored:.3f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
