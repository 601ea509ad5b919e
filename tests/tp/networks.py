"""Networks with zones of every kind."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from parverify.graph.ir import BoundGraph
from parverify.graph.trace import trace
from parverify.parallel.comm import Comm
from parverify.program.executor import Executor
from parverify.program.steps import Placement, weighted_nodes
from parverify.tp.lower import tp_lowerings
from tests.bounds.zoo import Composed, random_box, rounded


def mlp(*widths: int, act: type[nn.Module] = nn.ReLU) -> nn.Module:
    """Linear layers with an activation between."""
    layers: list[nn.Module] = []
    for first, second in itertools.pairwise(widths):
        layers += [nn.Linear(first, second), act()]
    return nn.Sequential(*layers[:-1])


class Branches(nn.Module):
    """One value read by two weights, once through an activation; then a part that doesn't pair."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.one, self.other = nn.Linear(3, 7), nn.Linear(7, 5), nn.Linear(7, 5)
        self.last = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.last(torch.relu(self.one(torch.relu(y)) + self.other(y)))


class Residual(nn.Module):
    """y + f(y) with a pair in f."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.down, self.last = nn.Linear(3, 5), nn.Linear(5, 7), nn.Linear(7, 5), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(x))
        y = torch.relu(y + self.down(torch.relu(self.up(y))))
        return self.last(y)


def _conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 5, 3, padding=1), nn.ReLU(), nn.Conv2d(5, 4, 2, stride=2), nn.ReLU(),
                         nn.Flatten(), nn.Linear(16, 7), nn.ReLU(), nn.Linear(7, 4))  # fmt: skip


def _batch() -> nn.Module:
    """Two images at once: their channels are no single range of scalars."""
    return nn.Sequential(nn.Conv2d(1, 4, 2), nn.ReLU(), nn.Conv2d(4, 4, 2), nn.Flatten(1), nn.Linear(4, 4))


def _upward() -> nn.Module:
    return nn.Sequential(nn.ConvTranspose2d(1, 4, 2, 2), nn.ReLU(), nn.Conv2d(4, 4, 2, groups=2), nn.Tanh(),
                         nn.Flatten(), nn.Linear(36, 4))  # fmt: skip


class OneSided(nn.Sequential):
    """All neurons are always active but some of zones, none of which lie on rank 0."""

    def __init__(self) -> None:
        super().__init__(*mlp(3, 8, 8, 8, 4))

    def settle(self, x: Tensor) -> None:
        """Choose the biases: the last neurons of both columns change sign around x."""
        active = iter((4, 8, 6, 0))
        for layer in self:
            if isinstance(layer, nn.Linear):
                layer.bias.copy_(-(x @ layer.weight.T)[0])
                layer.bias[: next(active)] += 6.0
            x = layer(x)


FLAT, IMAGE = (1, 3), (1, 1, 4, 4)
NETWORKS: dict[str, tuple[tuple[int, ...], Callable[[], nn.Module]]] = {
    "mlp2": (FLAT, lambda: mlp(3, 7, 4)),
    "mlp3": (FLAT, lambda: mlp(3, 7, 5, 4)),
    "mlp4": (FLAT, lambda: mlp(3, 7, 6, 9, 4)),
    "mlp5": (FLAT, lambda: mlp(3, 7, 6, 9, 5, 4)),
    "one_output": (FLAT, lambda: mlp(3, 7, 5, 1)),
    "adjacent": (FLAT, lambda: nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4))),
    "two_readers": (FLAT, Branches),
    "twice_nonlinear": (FLAT, lambda: Composed(nn.Linear(3, 7), lambda y: torch.relu(torch.tanh(y)), nn.Linear(7, 4))),
    "residual": (FLAT, Residual),
    "tanh": (FLAT, lambda: mlp(3, 7, 5, 4, act=nn.Tanh)),
    "conv": (IMAGE, _conv),
    "two_images": ((2, 1, 3, 3), _batch),
    "tokens": ((1, 2, 3), lambda: mlp(3, 5, 6, 4)),
    "upward": ((1, 1, 2, 2), _upward),
    "one_sided": (FLAT, OneSided),
}  # fmt: skip


def made(name: str, seed: int = 0) -> BoundGraph:
    """A random network whose weights don't blow up, in float32."""
    shape, make = NETWORKS[name]
    torch.manual_seed(seed)
    module = make()
    with torch.no_grad():
        for tensor in module.parameters():
            if tensor.dim() > 1:
                tensor.copy_(torch.randn_like(tensor) * (2 / tensor[0].numel()) ** 0.5)
        if isinstance(module, OneSided):
            module.settle(random_box(trace(module, shape), 1, 0.5, 1, torch.float32).lower + 0.25)
    return rounded(trace(module, shape))


def names(graph: BoundGraph) -> list[str]:
    """The weighted nodes."""
    return [node.name for node in weighted_nodes(graph)]


def placement(graph: BoundGraph, rank: int, size: int, interm: str = "rows") -> Placement:
    """All weights divided by channels."""
    lowerings, channels, only = tp_lowerings(graph, names(graph), rank, size, interm)
    return Placement("tp", rank, size, lowerings, channels, interval_only=only)


def executor(
    graph: BoundGraph, comm: Comm, dtype: torch.dtype, interm: str = "rows", placed: Placement | None = None
) -> Executor:
    """One rank with its pieces of all weights."""
    placed = placement(graph, comm.rank, comm.size, interm) if placed is None else placed
    held = {}
    for name, lowering in placed.lowerings.items():
        weight = graph[name].consts["weight"]
        held |= {(weight, piece): piece.of(graph.constants[weight].value).clone() for piece in lowering.held}
    return Executor(graph, dtype=dtype, placement=placed, held=held, comm=comm)
