"""Small random networks of every kind, and what is needed to check bounds of them by sampling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parverify.bounds.alpha import AlphaOptions, optimize
from parverify.bounds.layers import BoundOptions, LayerBounds, bound_layers
from parverify.bounds.region import BoxRegion, Region
from parverify.graph.ir import BoundGraph, Const
from parverify.graph.trace import trace
from parverify.ops.kernel import Box
from parverify.program.executor import Executor
from parverify.program.rows import both_signs

METHODS = ("ibp", "crown-ibp", "crown", "alpha-crown")


class Composed(nn.Module):
    """A first module, a function of its value, a last module."""

    def __init__(self, first: nn.Module, function: Callable[[Tensor], Tensor], last: nn.Module) -> None:
        super().__init__()
        self.first, self.function, self.last = first, function, last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


class Residual(nn.Module):
    """x + f(x), twice, with a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(x))
        y = torch.relu(y + self.second(y))
        return self.last(y + F.pad(x, (0, 2)))


class Block(nn.Module):
    """A transformer block: attention and a feed-forward part, with residuals and layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(3, 3) for _ in range(3))
        self.norm, self.up, self.down = nn.LayerNorm(3, eps=0.1), nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        scores = (self.query(x) @ self.key(x).transpose(1, 2)) / 3**0.5
        y = self.norm(x + scores.softmax(-1) @ self.value(x))
        return self.down(F.gelu(self.up(y))).flatten(1)


def _sandwich(
    function: Callable[[Tensor], Tensor], width: int = 4, inner: int | None = None
) -> Callable[[], nn.Module]:
    return lambda: Composed(nn.Linear(3, width), function, nn.Linear(inner or width, 2))


def _convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2),
                         nn.Conv2d(3, 2, 2, stride=1), nn.ReLU(), nn.Flatten(), nn.Linear(2, 2))  # fmt: skip


def _upward() -> nn.Module:
    return nn.Sequential(nn.ConvTranspose2d(1, 2, 2, 2, bias=False), nn.BatchNorm2d(2), nn.LeakyReLU(0.2),
                         nn.AvgPool2d(2), nn.Conv2d(2, 2, 2, groups=2), nn.Tanh(), nn.Flatten(),
                         nn.Linear(2, 2))  # fmt: skip


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)
    )


FLAT, IMAGE, TOKENS = (1, 3), (1, 1, 4, 4), (1, 2, 3)
NETWORKS: dict[str, tuple[tuple[int, ...], Callable[[], nn.Module]]] = {
    "mlp": (FLAT, _mlp),
    "linear": (FLAT, lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))),
    "residual": (FLAT, Residual),
    "convolutional": (IMAGE, _convolutional),
    "upward": ((1, 1, 2, 2), _upward),
    "block": (TOKENS, Block),
    "layer_norm": (FLAT, lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 2))),
    "product": (FLAT, _sandwich(lambda y: y[:, :2] * y[:, 2:], inner=2)),
    "product_of_products": (FLAT, _sandwich(lambda y: torch.relu(y[:, :1] * y) * y)),
    "matmul": (TOKENS, lambda: Composed(nn.Linear(3, 3), lambda y: y @ y.transpose(1, 2), nn.Linear(2, 2))),
    "division": (FLAT, _sandwich(lambda y: y[:, :2] / (y[:, 2:] ** 2 + 0.5), inner=2)),
    "division_by_anything": (FLAT, _sandwich(lambda y: y[:, :2] / y[:, 2:], inner=2)),
    "softmax": (FLAT, _sandwich(lambda y: (3 * y).softmax(1))),
    "log_softmax": (FLAT, _sandwich(lambda y: F.log_softmax(y, 1))),
    "max": (FLAT, _sandwich(lambda y: torch.maximum(y, y.flip(1)) - torch.minimum(y, 0.5 * y.roll(1, 1)))),
    "clip": (FLAT, _sandwich(lambda y: y.clamp(-0.5, 0.3) + F.hardsigmoid(y) + y.abs())),
    "sort_of_step": (FLAT, _sandwich(lambda y: torch.sign(y) + torch.floor(y))),
    "deviation": (FLAT, _sandwich(lambda y: y / (y.std(1, keepdim=True) + 0.1))),
    "indices": (FLAT, _sandwich(lambda y: torch.relu(torch.cat([y[:, [2, 0]], y.flip(1), y], 1))[:, 2:6])),
}  # fmt: skip


class Elementwise(nn.Module):
    """An elementwise function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def _twice(function: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        nn.Linear(3, 4), Elementwise(function), nn.Linear(4, 4), Elementwise(function), nn.Linear(4, 2)
    )


NETWORKS |= {
    name: (FLAT, _twice(function))
    for name, function in {
        "sigmoid": torch.sigmoid, "tanh": torch.tanh, "gelu": F.gelu, "silu": F.silu, "sin": torch.sin,
        "square": torch.square, "exp": torch.exp, "leaky_relu": F.leaky_relu, "elu": F.elu, "softplus": F.softplus,
        "mish": F.mish, "hardswish": F.hardswish, "atan": torch.atan, "cube": lambda y: y**3,
        "root": lambda y: torch.sqrt(y.abs() + 0.1), "log": lambda y: torch.log(y * y + 1), "erf": torch.erf,
    }.items()
}  # fmt: skip


def made(name: str, seed: int = 0) -> BoundGraph:
    """A random network, with constants that float32 holds exactly: so that one function is bounded in both dtypes."""
    shape, make = NETWORKS[name]
    torch.manual_seed(seed)
    module = make()
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.rand_like(tensor) + 0.1 if tensor.dim() == 1 else torch.randn_like(tensor))
    return rounded(trace(module, shape))


def rounded(graph: BoundGraph) -> BoundGraph:
    """The graph with its constants rounded to float32."""
    return replace(
        graph, constants={name: Const(const.value.detach().float()) for name, const in graph.constants.items()}
    )


def random_box(graph: BoundGraph, domains: int, width: float, seed: int, dtype: torch.dtype) -> BoxRegion:
    """Boxes around random centres; every third input of the second domain is a point."""
    generator = torch.Generator().manual_seed(seed)
    center = torch.randn(domains, graph.input.numel, generator=generator)
    radius = width * torch.rand(domains, graph.input.numel, generator=generator)
    radius[1:2, ::3] = 0
    return BoxRegion((center - radius).to(dtype), (center + radius).to(dtype))


def sampled(region: BoxRegion, count: int, seed: int = 0) -> Tensor:
    """(domains, count, n) points in float64: corners, faces and inner points, the two ends among them."""
    low, high = region.lower.double(), region.upper.double()
    t = torch.rand(
        low.shape[0], count, low.shape[1], generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    t[:, : count // 3] = t[:, : count // 3].round()
    t[:, count // 3 : count // 2] = (3 * t[:, count // 3 : count // 2] - 1).clamp(0, 1)
    t[:, 0], t[:, 1] = 0, 1
    x = low[:, None] + t * (high - low)[:, None]
    return torch.minimum(torch.maximum(x, low[:, None]), high[:, None])


def values(graph: BoundGraph, x: Tensor) -> dict[str, Tensor]:
    """Values of all nodes at points (domains, count, n), in float64: name -> (domains, count, *shape)."""
    found = Executor(graph, dtype=torch.float64).values(x.flatten(0, 1))
    return {name: value.unflatten(0, x.shape[:2]) for name, value in found.items()}


def bounded(executor: Executor, region: Region, options: BoundOptions) -> tuple[LayerBounds, Box]:
    """Layer bounds, and output bounds (domains, *output shape)."""
    graph = executor.graph
    with torch.no_grad():
        found = bound_layers(executor, region, options)
        if options.method == "ibp":
            return found, found.intervals[graph.output]
        size = graph[graph.output].numel
        owner = torch.arange(region.domains).repeat_interleave(size)
        rows = both_signs(torch.arange(size).repeat(region.domains), owner, executor.dtype)
        settings = options.alpha if options.method == "alpha-crown" else AlphaOptions(0)
        best = optimize(executor, graph.output, rows, found.relaxed, region, options=settings)
    low, high = best.reshape(2, region.domains, *graph[graph.output].shape)
    return found, (low, -high)


def contains(box: Box, inside: Tensor) -> bool:
    """Whether boxes (domains, *shape) contain values (domains, count, *shape), up to the values' own rounding."""
    inside = inside.flatten(2)
    low, high = (side.double().reshape(side.shape[0], 1, -1) for side in box)
    slack = 1e-13 * (1 + inside.abs().amax((1, 2), keepdim=True)) * 10
    known = inside.isfinite()
    return not bool(((inside < low - slack) & known).any() | ((inside > high + slack) & known).any()
                    | low.isnan().any() | high.isnan().any())  # fmt: skip


def check_sound(
    graph: BoundGraph, region: BoxRegion, options: BoundOptions, dtype: torch.dtype, count: int = 1500
) -> None:
    """All boxes and output bounds contain all sampled values."""
    found, output = bounded(Executor(graph, dtype=dtype), region, options)
    inside = values(graph, sampled(region, count))
    for name, box in [*found.intervals.items(), *found.boxes.items(), (graph.output, output)]:
        assert contains(box, inside[name]), f"{name} ({graph[name].op})"
