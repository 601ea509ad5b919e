"""Small networks of the kinds that auto_LiRPA's users have, as its modules, and boxes or balls around points."""

from __future__ import annotations

import contextlib
import io
import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parverify.lirpa.compat import lirpa

RELU_ONLY = ("mlp", "conv", "residual", "leaky")


class Residual(nn.Module):
    """Two residual blocks, one with a projection, and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.down, self.skip = nn.Conv2d(4, 4, 3, stride=2, padding=1), nn.Conv2d(4, 4, 1, stride=2)
        self.norm, self.last = nn.BatchNorm2d(4), nn.Linear(36, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        x = F.relu(self.second(x) + x)
        return self.last(F.relu(self.down(x) + self.skip(x)).flatten(1))


class Transformer(nn.Module):
    """One block of attention and a feed-forward part on three tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(4, 4) for _ in range(3))
        self.up, self.down, self.last = nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.matmul(self.query(x), self.key(x).transpose(-1, -2)) / 2.0
        y = x + torch.matmul(F.softmax(scores, dim=-1), self.value(x))
        y = y + self.down(F.relu(self.up(y)))
        return self.last((y - y.mean(-1, keepdim=True)).reshape(y.shape[0], 12))


def network(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    """A network with fixed weights, and the shape of one input."""
    torch.manual_seed(0)
    if name == "mlp":
        layers = (nn.Linear(3, 9), nn.ReLU(), nn.Linear(9, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        return nn.Sequential(*layers).eval(), (3,)
    if name == "leaky":
        return nn.Sequential(nn.Linear(3, 8), nn.LeakyReLU(0.1), nn.Linear(8, 2)).eval(), (3,)
    if name == "tanh":
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).eval(), (3,)
    if name == "conv":
        layers = (nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, stride=2, padding=1), nn.ReLU())
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3)).eval(), (2, 6, 6)
    if name == "residual":
        return Residual().eval(), (2, 6, 6)
    return Transformer().eval(), (3, 4)


def bounded(name: str, **options: Any) -> Any:
    """The network as a `BoundedModule`."""
    module, shape = network(name)
    opts = {"conv_mode": "matrix", "fixed_reducemax_index": True, **options}
    return lirpa().module.BoundedModule(module, torch.zeros(1, *shape), bound_opts=opts)


def around(shape: tuple[int, ...], *, batch: int = 1, norm: float = torch.inf, box: bool = False) -> Tensor:
    """A `BoundedTensor` around points."""
    module = lirpa().module
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(batch, *shape, generator=generator)
    if box:
        return module.BoundedTensor(x, module.PerturbationLpNorm(norm=norm, x_L=x - 0.05, x_U=x + 0.2))
    return module.BoundedTensor(x, module.PerturbationLpNorm(norm=norm, eps=0.2))


def far(one: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the largest entry."""
    return float((one - other).abs().max() / torch.maximum(one.abs().max(), other.abs().max()))


@contextlib.contextmanager
def quiet() -> Any:
    """Ranks that are forked write to the test's own output; auto_LiRPA and our log talk there."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(before)
