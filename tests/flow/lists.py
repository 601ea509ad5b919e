"""Small networks and properties in files, for lists."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from parverify.flow.entries import Entry


def weights(seed: int, n_in: int = 2) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)
    sizes = (n_in, 12, 12, 1)
    pairs = itertools.pairwise(sizes)
    return [(rng.normal(size=pair).astype(np.float32), rng.normal(size=pair[1]).astype(np.float32)) for pair in pairs]


def save_network(path: Path, seed: int, n_in: int) -> None:
    """A ReLU network."""
    nodes, constants, name = [], [], "x"
    tables = weights(seed, n_in)
    for i, (table, bias) in enumerate(tables):
        last = i == len(tables) - 1
        nodes.append(helper.make_node("Gemm", [name, f"w{i}", f"c{i}"], ["y" if last else f"a{i}"], f"m{i}"))
        constants += [numpy_helper.from_array(table, f"w{i}"), numpy_helper.from_array(bias, f"c{i}")]
        if not last:
            nodes.append(helper.make_node("Relu", [f"a{i}"], [f"b{i}"], f"r{i}"))
            name = f"b{i}"
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, (1, size)) for n, size in (("x", n_in), ("y", 1)))
    graph = helper.make_graph(nodes, "net", [x], [y], constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), path)


def largest(seed: int, n_in: int) -> float:
    """About the network's largest value over the box: the best of random points, and of points ever closer to it."""
    rng = np.random.default_rng(0)
    best, value = np.zeros(n_in), -np.inf
    for radius in (1.0, 0.3, 0.1, 0.03, 0.01, 1e-3, 1e-4, 1e-5):
        points = np.clip(best + rng.uniform(-radius, radius, (20000, n_in)), -1, 1)
        points[0] = best
        outputs = points
        for i, (table, bias) in enumerate(weights(seed, n_in)):
            outputs = (np.maximum(outputs, 0) if i else outputs) @ table + bias
        best, value = points[outputs.argmax()], float(outputs.max())
    return value


def entry(
    folder: Path, name: str, *, seed: int, sat: bool, timeout: float = 60, margin: float = 0.1, n_in: int = 2
) -> Entry:
    """An instance: can the output reach a value a little above, or below, its largest one?"""
    folder.mkdir(exist_ok=True)
    model, spec = folder / f"net{seed}-{n_in}.onnx", folder / f"{name}.vnnlib"
    if not model.exists():
        save_network(model, seed, n_in)
    names = [f"X_{i}" for i in range(n_in)]
    declared = "".join(f"(declare-const {name} Real)" for name in [*names, "Y_0"])
    box = "".join(f"(assert (>= {name} -1.0))(assert (<= {name} 1.0))" for name in names)
    limit = largest(seed, n_in) + (-margin if sat else margin)
    spec.write_text(f"{declared}{box}(assert (>= Y_0 {limit:.9f}))\n")
    return Entry(name, str(model), str(spec), timeout)
