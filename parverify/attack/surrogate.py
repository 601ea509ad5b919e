"""Gradients for step functions and saturated softmax: values stay exact, slopes are made up.

The slope of sign, round, floor and ceil is zero wherever it exists, so that descent has nothing to follow. Under
`surrogate_steps` they are differentiated as if they were smooth ("straight-through", Bengio, Leonard and Courville,
"Estimating or Propagating Gradients Through Stochastic Neurons for Conditional Computation", 2013): sign with a bump
around zero, as wide as the numbers that it is given are large, the others with slope one. A softmax of numbers far
apart is differentiated at a higher temperature, where its slopes do not underflow. Descent only proposes points, so a
slope that is wrong can cost time but never a verdict.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_SOFTMAX_RANGE = 20.0


class _Sign(torch.autograd.Function):
    """sign(x) with the slope 1 / (1 + (x / s)^2) / s, where s is the mean of |x| over each point."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.sign(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        dims = tuple(range(1, x.dim()))
        mean = x.abs().mean(dim=dims, keepdim=True) if dims else x.abs()
        size = mean.clamp(min=torch.finfo(x.dtype).eps)
        return gradients[0] / (size * (1 + (x / size) ** 2))


def _passing(step: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A step function whose slope is taken to be one."""

    class _Step(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return step(x)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return gradients[0]

    return _Step.apply


class _Softmax(torch.autograd.Function):
    """softmax(x) with the slopes of softmax(x / t), where t keeps the numbers of each row within a range of 20."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.dim = dim
        return torch.softmax(x, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (x,), dim = ctx.saved_tensors, ctx.dim
        reach = x.amax(dim, keepdim=True) - x.amin(dim, keepdim=True)
        temperature = (reach / _SOFTMAX_RANGE).clamp(min=1.0)
        share = torch.softmax(x / temperature, dim)
        weighted = share * gradients[0]
        return (weighted - share * weighted.sum(dim, keepdim=True)) / temperature, None


_STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "sign": _Sign.apply,
    "round": _passing(torch.round),
    "floor": _passing(torch.floor),
    "ceil": _passing(torch.ceil),
}


_SOFTMAX = (torch.softmax, torch.nn.functional.softmax, Tensor.softmax, torch.ops.aten._softmax.default)


class _Surrogate(TorchFunctionMode):
    """Calls the functions of `_STEPS` wherever a step function of one differentiable tensor is called."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = getattr(func, "overloadpacket", func)
        step = _STEPS.get(getattr(packet, "__name__", ""))
        if step is not None and not kwargs and len(args) == 1 and args[0].requires_grad:
            return step(args[0])
        if func in _SOFTMAX and not _casts(args, kwargs or {}) and args[0].requires_grad:
            return _Softmax.apply(args[0], args[1] if len(args) > 1 else (kwargs or {})["dim"])
        return func(*args, **(kwargs or {}))


def _casts(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a softmax is called in another way than on a tensor along a dimension, so that it is left alone."""
    named = {key: value for key, value in kwargs.items() if key != "_stacklevel" and value is not None}
    # What may follow the dimension without changing the result: a flag, no dtype, and a depth for warnings.
    extra = [value for value in args[2:] if not isinstance(value, (bool, int)) and value is not None]
    along = args[1] if len(args) > 1 else named.pop("dim", None)
    return bool(named or extra) or not isinstance(along, int)


def surrogate_steps() -> TorchFunctionMode:
    """A context in which step functions have slopes to follow; their values are exact."""
    return _Surrogate()
