"""Peak memory of alpha-CROWN without parverify's strategies: auto_LiRPA, and a naive CPU offload.

    python benchmarks/baselines.py lirpa|offload MODEL SPEC [--iterations N] [--tile N] [--json FILE]

Both are measured by parverify's meter of live tensors, one mode a process. `lirpa` needs auto_LiRPA 0.7.1, whose
checkout the variable AUTO_LIRPA names; it runs in any Python that has torch, onnx, numpy and this package on its path
(auto_LiRPA allows torch below 2.9: under 2.14 its alphas get no gradient). `offload` keeps weights on the host, copies
a layer's weight to the device just before a product, forward or backward, and drops it afterwards. On a machine without
an accelerator the two are told apart by counting: copies count, what lies on the host does not.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import Tensor, nn
from torch.nn import functional

from parverify.bounds.alpha import AlphaOptions
from parverify.bounds.layers import BoundOptions
from parverify.frontend.vnnlib import read_query
from parverify.graph.ir import BoundGraph, Node
from parverify.ops.weighted import piece_of, whole
from parverify.parallel.meter import MemoryMeter
from parverify.program.executor import Executor
from parverify.program.steps import weighted_nodes
from parverify.program.weights import Weights

MISSING = 3
"""Exit status where auto_LiRPA is not there."""

ALL = 1 << 30
"""More rows than any network here has."""


class Plain(nn.Module):
    """A network that `networks.py` wrote, as a torch module that any tracer understands."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        graph = onnx.load(path).graph
        self.shape = tuple(dim.dim_value for dim in graph.input[0].type.tensor_type.shape.dim)
        self.n_out = graph.output[0].type.tensor_type.shape.dim[1].dim_value
        self._nodes = list(graph.node)
        self._first, self._last = graph.input[0].name, graph.output[0].name
        for tensor in graph.initializer:
            self.register_parameter(tensor.name, nn.Parameter(torch.tensor(numpy_helper.to_array(tensor))))

    def forward(self, x: Tensor) -> Tensor:
        values = {self._first: x}
        for node in self._nodes:
            given = [values[name] if name in values else self.get_parameter(name) for name in node.input]
            values[node.output[0]] = _apply(node, given)
        return values[self._last]


def _apply(node: onnx.NodeProto, given: Sequence[Tensor]) -> Tensor:
    if node.op_type == "Gemm":
        return functional.linear(*given)
    if node.op_type == "Conv":
        (stride,) = [list(a.ints) for a in node.attribute if a.name == "strides"]
        return functional.conv2d(given[0], given[1], given[2], stride, 1)
    if node.op_type == "Relu":
        return functional.relu(given[0])
    if node.op_type == "Add":
        return given[0] + given[1]
    if node.op_type == "Flatten":
        return given[0].flatten(1)
    raise SystemExit(f"{node.op_type} is none of the operators of a generated network")


def box(spec: Path, shape: Sequence[int], n_out: int) -> tuple[Tensor, Tensor]:
    """The property's input box in float32."""
    query = read_query(spec, n_in=int(np.prod(shape)), n_out=n_out)
    lower, upper = (torch.from_numpy(side).float().reshape(*shape) for side in query.hull())
    return lower, upper


# --- auto_LiRPA -------------------------------------------------------------------------------------------------------


def import_lirpa() -> ModuleType:
    """auto_LiRPA from the checkout that AUTO_LIRPA names; stand-ins for what it imports and bounds don't need."""
    place = os.environ.get("AUTO_LIRPA")
    if not place or not (Path(place) / "auto_LiRPA").is_dir():
        print("AUTO_LIRPA must name a checkout of auto_LiRPA 0.7.1 (a folder with auto_LiRPA/ in it)", file=sys.stderr)
        raise SystemExit(MISSING)
    stand_ins: dict[str, dict[str, Any]] = {
        "appdirs": {"user_data_dir": lambda name: str(Path.home() / name)},
        "graphviz": {"Digraph": object},
        "tqdm": {"tqdm": lambda items, *_, **__: items},
    }
    for name, members in stand_ins.items():
        try:
            __import__(name)
        except ModuleNotFoundError:
            sys.modules[name] = module = ModuleType(name)
            vars(module).update(members, __spec__=ModuleSpec(name, None))
    sys.path.insert(0, place)
    return __import__("auto_LiRPA")


def lirpa(model: Path, spec: Path, iterations: int) -> dict[str, Any]:
    """Figures of auto_LiRPA's CROWN-Optimized, intermediate bounds optimized too, as parverify does."""
    library = import_lirpa()
    module = Plain(model).eval()
    lower, upper = box(spec, module.shape, module.n_out)
    settings = {
        "enable_opt_interm_bounds": True,
        "optimize_bound_args": {"iteration": iterations, "early_stop_patience": iterations + 1},
    }
    bounded = library.BoundedModule(module, torch.zeros_like(lower), bound_opts=settings, device="cpu")
    around = library.PerturbationLpNorm(norm=float("inf"), x_L=lower, x_U=upper)
    x = library.BoundedTensor((lower + upper) / 2, around)
    resident = list({id(tensor): tensor for tensor in (*bounded.parameters(), *bounded.buffers())}.values())
    started = time.monotonic()
    with MemoryMeter(resident) as meter:
        low, high = bounded.compute_bounds(x=(x,), method="CROWN-Optimized")
    seconds = time.monotonic() - started
    crown, _ = bounded.compute_bounds(x=(x,), method="CROWN")
    if iterations and torch.allclose(low, crown, rtol=1e-5, atol=1e-6):
        print("auto_LiRPA's optimization changed nothing: its alphas got no gradient", file=sys.stderr)
    return _figures("auto_LiRPA", (low, high), seconds, meter.peak_bytes, resident)


# --- offload ----------------------------------------------------------------------------------------------------------


class HostWeights(Weights):
    """Weights on the host; those of one layer are on the device while it is multiplied."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._host = dict(self._held)
        self._held.clear()

    @contextmanager
    def _copied(self, node: Node) -> Iterator[None]:
        name = self._name(node.name)
        self._held[name] = {piece: tensor.clone() for piece, tensor in self._host[name].items()}
        try:
            yield
        finally:
            del self._held[name]
            self._views.clear()

    def run(self, node: Node, *given: Any, **named: Any) -> list[Tensor]:
        with self._copied(node):
            return super().run(node, *given, **named)

    def pick(self, node: Node, *given: Any) -> Tensor:
        with self._copied(node):
            return super().pick(node, *given)


class OffloadExecutor(Executor):
    """One process whose weights are on the host."""

    def __init__(self, graph: BoundGraph) -> None:
        super().__init__(graph)
        names = {node.consts["weight"]: node for node in weighted_nodes(self.graph)}
        host = {(name, piece_of(node, whole(node))): self._constants.pop(name) for name, node in names.items()}
        self._divided = set(names)  # nothing but products reaches them
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        self.weights = HostWeights(self.graph, self.placement, host, self.comm, like)


def offload(model: Path, spec: Path, iterations: int, tile: int) -> dict[str, Any]:
    """Figures of parverify's alpha-CROWN with weights on the host."""
    from parverify.api import compute_bounds
    from parverify.frontend.network import load_network
    from parverify.graph.trace import trace

    network = load_network(model)
    executor = OffloadExecutor(trace(network.module, network.input_shape))
    lower, upper = box(spec, network.input_shape, network.n_out)
    options = BoundOptions(alpha=AlphaOptions(iterations), tile=ALL if tile < 0 else tile)
    started = time.monotonic()
    with MemoryMeter(executor.resident()) as meter:
        found = compute_bounds(executor, lower, upper, method="alpha-crown", options=options)
    seconds = time.monotonic() - started
    return _figures("offload", (found.lower, found.upper), seconds, meter.peak_bytes, executor.resident())


def _figures(
    name: str, bounds: tuple[Tensor, Tensor], seconds: float, peak: int, resident: Sequence[Tensor]
) -> dict[str, Any]:
    """The same keys as in the JSON of `parverify bounds`."""
    lower, upper = (side.detach().flatten().tolist() for side in bounds)
    stays = sum(tensor.numel() * tensor.element_size() for tensor in resident)
    rank = {"peak_bytes": peak, "resident_bytes": stays, "collectives": {}}
    return {"strategy": name, "world_size": 1, "lower": lower, "upper": upper, "seconds": seconds, "ranks": [rank]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("lirpa", "offload"))
    parser.add_argument("model", type=Path)
    parser.add_argument("spec", type=Path)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--tile", type=int, default=-1, help="rows at once, of offload; -1 for all")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.mode == "lirpa":
        figures = lirpa(options.model, options.spec, options.iterations)
    else:
        figures = offload(options.model, options.spec, options.iterations, options.tile)
    if options.json is not None:
        options.json.write_text(json.dumps(figures))
    (rank,) = figures["ranks"]
    print(
        f"{figures['strategy']}: peak {rank['peak_bytes'] / 1e6:.1f} MB, "
        f"resident {rank['resident_bytes'] / 1e6:.1f} MB, "
        f"{figures['seconds']:.1f} s, sum of lower bounds {sum(figures['lower']):.4f}"
    )


if __name__ == "__main__":
    main()
