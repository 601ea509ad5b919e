"""Whether auto_LiRPA's alphas get gradients here.

They are silently left without under newer versions of torch than auto_LiRPA allows: bounds of CROWN-Optimized are then
those of CROWN. A tiny network tells, whose alphas certainly matter: auto_LiRPA optimizes its bounds with an optimizer
that only looks at the gradients (torch's own would take seconds to import).
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from parverify.lirpa.compat import lirpa

_LOG = logging.getLogger("parverify.lirpa")


@functools.cache
def alphas_move() -> bool:
    """Whether the alphas of auto_LiRPA's own CROWN-Optimized get a gradient; says so in the log if not."""
    moved = _sees_gradients()
    if not moved:
        _LOG.warning(
            "auto_LiRPA %s under torch %s: its alphas get no gradient, so its own CROWN-Optimized bounds are those of "
            "CROWN (sound, not tighter); parverify's alphas are not concerned",
            lirpa().version,
            torch.__version__,
        )
    return moved


class _Sum(nn.Module):
    """relu(x + y - 0.1) + relu(x - y - 0.1) - relu(x) on [-1, 1]^2: slopes of 0.5 below the first two would help."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 3), nn.Linear(3, 1)
        with torch.no_grad():
            self.first.weight.copy_(torch.tensor([[1.0, 1.0], [1.0, -1.0], [1.0, 0.0]]))
            self.first.bias.copy_(torch.tensor([-0.1, -0.1, 0.0]))
            self.last.weight.copy_(torch.tensor([[1.0, 1.0, -1.0]]))
            self.last.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)))


def _sees_gradients() -> bool:
    found = lirpa().module
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        _disable_current_modes(),  # a caller's modes, such as a meter's, are not meant for it
        _watching() as seen,
    ):
        warnings.simplefilter("ignore")
        bounded = found.BoundedModule(_Sum().eval(), torch.zeros(1, 2), device="cpu")
        x = found.BoundedTensor(torch.zeros(1, 2), found.PerturbationLpNorm(norm=torch.inf, eps=1.0))
        with torch.enable_grad():
            bounded.compute_bounds(x=(x,), method="CROWN-Optimized", bound_upper=False)
    return bool(seen)


@contextlib.contextmanager
def _watching() -> Iterator[list[bool]]:
    """While active, auto_LiRPA's optimizers note gradients other than zero and step nowhere."""
    seen: list[bool] = []

    def optimizer(groups: list[dict[str, Any]], **_: Any) -> SimpleNamespace:
        def step(**_: Any) -> None:
            gradients = [p.grad for group in groups for p in group["params"] if p.grad is not None]
            seen.extend(True for gradient in gradients if bool((gradient != 0).any()))

        return SimpleNamespace(param_groups=groups, step=step, zero_grad=lambda **_: None)

    def schedule(*_: Any, **__: Any) -> SimpleNamespace:
        return SimpleNamespace(step=lambda: None)

    names = vars(lirpa().part("optimized_bounds"))
    before = names["optim"]
    names["optim"] = SimpleNamespace(
        Adam=optimizer, SGD=optimizer, lr_scheduler=SimpleNamespace(ExponentialLR=schedule)
    )
    try:
        yield seen
    finally:
        names["optim"] = before
