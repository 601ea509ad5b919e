"""Four small classifiers of 8x8 digits, each with its forward pass and its ONNX graph side by side.

Every class is an ordinary torch module; `to_onnx` writes the same computation with a `GraphBuilder`, operator by
operator, so that no exporter has to be installed. The script compares both before it uses a network.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from onnx_builder import GraphBuilder
from torch import Tensor, nn

SIDE = 8
CLASSES = 10


class FullyConnected(nn.Module):
    """Linear layers with one activation between them; input (1, 64).

    Args:
        widths: sizes of the hidden layers.
        activation: the ONNX name of the activation, `Relu` or `Sigmoid`.
    """

    input_shape = (1, SIDE * SIDE)

    def __init__(self, widths: tuple[int, ...], activation: str) -> None:
        super().__init__()
        sizes = (SIDE * SIDE, *widths, CLASSES)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:  # (batch, 64) -> (batch, 10)
        function = {"Relu": torch.relu, "Sigmoid": torch.sigmoid}[self.activation]
        for layer in self.layers[:-1]:
            x = function(layer(x))
        return self.layers[-1](x)

    def to_onnx(self, g: GraphBuilder, x: str) -> str:
        for layer in self.layers[:-1]:
            x = g.op(self.activation, g.linear(x, layer))
        return g.linear(x, self.layers[-1])


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with batch norm, and a 1x1 convolution past them where the shape changes."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        same = stride == 1 and channels_in == channels
        self.shortcut = None if same else nn.Conv2d(channels_in, channels, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return torch.relu(y + (x if self.shortcut is None else self.shortcut(x)))

    def to_onnx(self, g: GraphBuilder, x: str) -> str:
        y = g.op("Relu", g.batch_norm(g.conv(x, self.conv1), self.norm1))
        y = g.batch_norm(g.conv(y, self.conv2), self.norm2)
        return g.op("Relu", g.op("Add", y, x if self.shortcut is None else g.conv(x, self.shortcut)))


class ResNet(nn.Module):
    """A convolutional network with batch norm and two residual blocks; input (1, 1, 8, 8)."""

    input_shape = (1, 1, SIDE, SIDE)

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.blocks = nn.ModuleList([ResidualBlock(channels, channels, 1), ResidualBlock(channels, 2 * channels, 2)])
        self.head = nn.Linear(2 * channels * 4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:  # (batch, 1, 8, 8) -> (batch, 10)
        x = torch.relu(self.norm(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        return self.head(x.flatten(1))

    def to_onnx(self, g: GraphBuilder, x: str) -> str:
        x = g.op("Relu", g.batch_norm(g.conv(x, self.stem), self.norm))
        for block in self.blocks:
            x = block.to_onnx(g, x)
        return g.linear(g.op("Flatten", x, axis=1), self.head)


class Transformer(nn.Module):
    """One block of softmax attention over four 4x4 patches, then a ReLU MLP; input (1, 1, 8, 8).

    There is no layer norm: a network this small trains without, and its division by a standard deviation would make
    interval proofs (which the known answers rest on) worthless.
    """

    input_shape = (1, 1, SIDE, SIDE)

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.width, self.heads = width, heads
        self.patch = nn.Conv2d(1, width, 4, stride=4)
        self.position = nn.Parameter(0.02 * torch.randn(1, 4, width))
        self.query, self.key, self.value, self.mix = (nn.Linear(width, width) for _ in range(4))
        self.expand, self.contract = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:  # (batch, 1, 8, 8) -> (batch, 10)
        x = self.patch(x).flatten(2).transpose(1, 2) + self.position  # (batch, 4 tokens, width)
        q, k, v = (self._split(layer(x)) for layer in (self.query, self.key, self.value))
        scores = q @ k.transpose(2, 3) / math.sqrt(self.width // self.heads)  # (batch, heads, 4, 4)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = x + self.mix(mixed)
        x = x + self.contract(torch.relu(self.expand(x)))
        return self.head(x.mean(1))

    def _split(self, x: Tensor) -> Tensor:
        """(batch, 4, width) -> (batch, heads, 4, width / heads)."""
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)

    def to_onnx(self, g: GraphBuilder, x: str) -> str:
        x = g.op("Transpose", g.reshape(g.conv(x, self.patch), (1, self.width, 4)), perm=[0, 2, 1])
        x = g.op("Add", x, g.constant(self.position))
        q, k, v = (self._split_onnx(g, g.dense(x, layer)) for layer in (self.query, self.key, self.value))
        scores = g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2]))
        scores = g.op("Mul", scores, g.constant(torch.tensor(1 / math.sqrt(self.width // self.heads))))
        mixed = g.op("Transpose", g.op("MatMul", g.op("Softmax", scores, axis=-1), v), perm=[0, 2, 1, 3])
        x = g.op("Add", x, g.dense(g.reshape(mixed, (1, 4, self.width)), self.mix))
        x = g.op("Add", x, g.dense(g.op("Relu", g.dense(x, self.expand)), self.contract))
        return g.linear(g.op("ReduceMean", x, axes=[1], keepdims=0), self.head)

    def _split_onnx(self, g: GraphBuilder, x: str) -> str:
        return g.op("Transpose", g.reshape(x, (1, 4, self.heads, self.width // self.heads)), perm=[0, 2, 1, 3])


def all_networks() -> dict[str, nn.Module]:
    """The networks of the examples by name, untrained and with fixed seeds."""
    makers = {
        "mlp": lambda: FullyConnected((48, 48), "Relu"),
        "sigmoid": lambda: FullyConnected((32, 32), "Sigmoid"),
        "resnet": lambda: ResNet(4),
        "transformer": lambda: Transformer(16, 2),
    }
    networks = {}
    for name, make in makers.items():
        torch.manual_seed(0)
        networks[name] = make()
    return networks


def bundled_network() -> nn.Module:
    """The smallest of all, committed in `examples/bundled`."""
    torch.manual_seed(0)
    return FullyConnected((24, 24), "Relu")
