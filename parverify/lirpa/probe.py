"""Whether auto_LiRPA's alphas get gradients here.

They are silently left without under newer versions of torch than auto_LiRPA allows: bounds of CROWN-Optimized are then
those of CROWN. Three neurons tell: on them a few iterations always improve.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import warnings

import torch
from torch import Tensor, nn

from parverify.lirpa.compat import lirpa

_LOG = logging.getLogger("parverify.lirpa")


@functools.cache
def alphas_move() -> bool:
    """Whether CROWN-Optimized is tighter than CROWN where it must be; says so in the log if not."""
    crown, optimized = (_bound(method) for method in ("CROWN", "CROWN-Optimized"))
    moved = bool((optimized > crown + 1e-4).any())
    if not moved:
        _LOG.warning(
            "auto_LiRPA %s under torch %s: its alphas get no gradient, so its own CROWN-Optimized bounds are those of "
            "CROWN (sound, not tighter); parverify's alphas are not concerned",
            lirpa().version,
            torch.__version__,
        )
    return moved


class _Sum(nn.Module):
    """relu(x + y) + relu(x - y) - relu(x) on [-1, 1]^2: CROWN says -1.5, alphas get to -1 (the minimum is 0)."""

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


def _bound(method: str) -> Tensor:
    found = lirpa().module
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        bounded = found.BoundedModule(_Sum().eval(), torch.zeros(1, 2), device="cpu")
        x = found.BoundedTensor(torch.zeros(1, 2), found.PerturbationLpNorm(norm=torch.inf, eps=1.0))
        with torch.enable_grad():
            lower, _ = bounded.compute_bounds(x=(x,), method=method, bound_upper=False)
    return lower.detach()
