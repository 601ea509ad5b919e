"""Generated networks of any size, as ONNX files with VNN-LIB properties, for measurements of memory and time.

    python benchmarks/networks.py OUT [--seed S] [--only NAME,...]

Weights are random and every layer is scaled on a batch of points so that pre-activations have standard deviation 1:
activations keep their size through depth. Each network comes with two properties on L-infinity boxes around one random
point: `NAME_few.vnnlib`, where about 5 % of the hidden neurons are unstable under CROWN, and `NAME_many.vnnlib`, where
60 to 100 % are. Their radii are found by bisection; a seed always gives the same files.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor
from torch.nn import functional

from parverify.api import compute_bounds
from parverify.frontend.network import load_network

POINTS = 64
"""Points on which layers are scaled."""

FEW, FEW_OFF = 0.05, 0.002
MANY, MANY_OFF = 0.8, 0.15
"""Shares of unstable neurons, and how far from them a radius may end."""

TRIES = 40


class Sketch:
    """An ONNX network in the making: every layer is written down and computed on some points at once.

    Args:
        shape: of one input.
        seed: of weights and points.
    """

    def __init__(self, shape: tuple[int, ...], seed: int) -> None:
        self._rng = torch.Generator().manual_seed(seed)
        self._shape = shape
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []
        self._values = {"x": torch.rand(POINTS, *shape[1:], generator=self._rng)}

    def _emit(self, op: str, inputs: list[str], value: Tensor, **attributes: Any) -> str:
        name = f"{op.lower()}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(op, inputs, [name], name=name, **attributes))
        self._values[name] = value
        return name

    def _weighted(
        self, op: str, x: str, shape: tuple[int, ...], apply: Callable[[Tensor, Tensor], Tensor], **attributes: Any
    ) -> str:
        """A layer with a weight of `shape`, scaled by what comes out, and a small bias."""
        weight = torch.randn(shape, generator=self._rng)
        weight /= apply(self._values[x], weight).std()
        bias = 0.1 * torch.randn(shape[0], generator=self._rng)
        value = apply(self._values[x], weight)
        value = value + bias.reshape(1, -1, *(1,) * (value.dim() - 2))
        names = [f"weight_{len(self._nodes)}", f"bias_{len(self._nodes)}"]
        for name, tensor in zip(names, (weight, bias), strict=True):
            self._weights.append(numpy_helper.from_array(tensor.numpy(), name))
        return self._emit(op, [x, *names], value, **attributes)

    def linear(self, x: str, width: int) -> str:
        """A linear layer to `width` values."""
        shape = (width, self._values[x].shape[1])
        return self._weighted("Gemm", x, shape, functional.linear, transB=1)

    def conv(self, x: str, channels: int, stride: int = 1) -> str:
        """A convolution 3 x 3 with padding 1."""
        shape = (channels, self._values[x].shape[1], 3, 3)
        return self._weighted(
            "Conv",
            x,
            shape,
            lambda value, weight: functional.conv2d(value, weight, stride=stride, padding=1),
            kernel_shape=[3, 3],
            strides=[stride, stride],
            pads=[1, 1, 1, 1],
        )

    def relu(self, x: str) -> str:
        """max(x, 0)."""
        return self._emit("Relu", [x], self._values[x].relu())

    def add(self, x: str, y: str) -> str:
        """x + y."""
        return self._emit("Add", [x, y], self._values[x] + self._values[y])

    def flatten(self, x: str) -> str:
        """All values in one row."""
        return self._emit("Flatten", [x], self._values[x].flatten(1), axis=1)

    def model(self, output: str) -> onnx.ModelProto:
        """The finished network."""
        graph = helper.make_graph(
            self._nodes,
            "generated",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, list(self._shape))],
            [helper.make_tensor_value_info(output, TensorProto.FLOAT, [1, self._values[output].shape[1]])],
            self._weights,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
        onnx.checker.check_model(model)
        return model


def mlp(width: int, seed: int) -> onnx.ModelProto:
    """784 inputs, four hidden layers of `width`, 10 outputs."""
    sketch = Sketch((1, 784), seed)
    x = "x"
    for _ in range(4):
        x = sketch.relu(sketch.linear(x, width))
    return sketch.model(sketch.linear(x, 10))


def resnet(seed: int, blocks: int = 4) -> onnx.ModelProto:
    """A residual network, wide in channels and narrow in space: 1024 neurons in every layer, 4.9 M parameters."""
    sketch = Sketch((1, 3, 8, 8), seed)
    x = sketch.relu(sketch.conv("x", 64, stride=2))
    x = sketch.relu(sketch.conv(x, 256, stride=2))
    for _ in range(blocks):
        inner = sketch.conv(sketch.relu(sketch.conv(x, 256)), 256)
        x = sketch.relu(sketch.add(x, inner))
    return sketch.model(sketch.linear(sketch.flatten(x), 10))


NETWORKS: dict[str, Callable[[int], onnx.ModelProto]] = {
    "mlp1024": lambda seed: mlp(1024, seed),
    "mlp4096": lambda seed: mlp(4096, seed),
    "resnet": resnet,
}


def radius(share: Callable[[float], float], wanted: float, off: float) -> tuple[float, float]:
    """A radius at which `share` is `wanted` give or take `off`, and the share there."""
    low, high, eps = 0.0, float("inf"), 1e-4
    for _ in range(TRIES):
        found = share(eps)
        if abs(found - wanted) <= off:
            return eps, found
        low, high = (eps, high) if found < wanted else (low, eps)
        eps = 2 * low if high == float("inf") else (low + high) / 2
    raise SystemExit(f"no radius found at which {wanted} of the neurons are unstable; the last was {eps} with {found}")


def property_text(lower: np.ndarray, upper: np.ndarray, label: int, other: int, n_out: int) -> str:
    """A VNN-LIB 1.0 property: can output `other` reach output `label` in the box?"""
    lines = [f"; {len(lower)} inputs in a box; unsafe where Y_{other} >= Y_{label}.", ""]
    lines += [f"(declare-const X_{i} Real)" for i in range(len(lower))]
    lines += [f"(declare-const Y_{i} Real)" for i in range(n_out)]
    for i, (low, high) in enumerate(zip(lower, upper, strict=True)):
        lines += [f"(assert (>= X_{i} {low:.9f}))", f"(assert (<= X_{i} {high:.9f}))"]
    return "\n".join([*lines, f"(assert (<= Y_{label} Y_{other}))", ""])


def write(name: str, out: Path, seed: int) -> None:
    """The network, its two properties and a line of figures for each."""
    path = out / f"{name}.onnx"
    onnx.save(NETWORKS[name](seed), path)
    network = load_network(path)
    center = np.random.default_rng(seed).random(network.n_in)
    point = torch.from_numpy(center).float().reshape(network.input_shape)

    def share(eps: float) -> float:
        found = compute_bounds(network.module, center=point, eps=eps, input_shape=network.input_shape)
        boxes = list(found.layers.values())
        return sum(int(((low < 0) & (high > 0)).sum()) for low, high in boxes) / sum(low.numel() for low, _ in boxes)

    outputs = network.evaluate(center)
    label, other = (int(i) for i in np.argsort(outputs)[::-1][:2])
    size = sum(int(np.prod(weight.dims)) for weight in onnx.load(path).graph.initializer)
    for kind, wanted, off in (("few", FEW, FEW_OFF), ("many", MANY, MANY_OFF)):
        eps, found = radius(share, wanted, off)
        text = property_text(center - eps, center + eps, label, other, network.n_out)
        (out / f"{name}_{kind}.vnnlib").write_text(text)
        print(f"| {name} | {size / 1e6:.2f} M | {kind} | {eps:.6g} | {100 * found:.1f} % |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default=",".join(NETWORKS), help=f"of {', '.join(NETWORKS)}")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    print("| network | parameters | property | radius | unstable neurons |")
    print("| --- | --- | --- | --- | --- |")
    for name in options.only.split(","):
        write(name, options.out, options.seed)


if __name__ == "__main__":
    main()
