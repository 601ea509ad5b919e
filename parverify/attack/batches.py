"""Batches of points through the network, sized so that memory is bounded and the clock is seen often.

The size follows from the work of one point, counted once by watching the operators that three points and one point
run; it depends on the network and the device but on no stopwatch, so that a search repeats exactly. Running out of
memory halves the size and goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parverify.attack.surrogate import surrogate_steps
from parverify.clock import Clock
from parverify.dispatch import DispatchMode
from parverify.errors import ResourceError
from parverify.parallel.comm import Alone, Comm
from parverify.parallel.shared import from_rank

Forward = Callable[[Tensor], Tensor]
"""(B, n_in) -> (B, n_out), flat and differentiable, in the engine's dtype and on its device."""

Objective = Callable[[Tensor, Tensor, slice], tuple[Tensor, Tensor]]
"""Outputs, inputs and place in the batch of some points -> (loss, margin) of each, two (B,) tensors."""

_MOST_POINTS = 16384
_CPU_BYTES, _CPU_FLOPS = 64 << 20, 4e8
_GPU_BYTES, _GPU_FLOPS = 4 << 30, 4e11


@dataclass(frozen=True)
class Budget:
    """A share of the clock: over when its seconds or the whole run's are spent."""

    clock: Clock
    until: float

    @classmethod
    def of(cls, clock: Clock, seconds: float) -> Budget:
        """`seconds` from now, or what the clock has left if that is less."""
        return cls(clock, clock.now() + seconds)

    @property
    def left(self) -> float:
        """Seconds left; negative once over."""
        return min(self.until - self.clock.now(), self.clock.left)

    @property
    def over(self) -> bool:
        """Whether the search must return."""
        return self.clock.stopped or self.left <= 0

    def share(self, part: float) -> Budget:
        """A part (0 to 1) of what is left."""
        return Budget(self.clock, self.clock.now() + part * self.left)


class _Work(DispatchMode):
    """Counts the bytes that operators write and the multiply-adds of products and convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0.0
        self.flops = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        written = result if isinstance(result, (tuple, list)) else (result,)
        for value in written:
            if isinstance(value, Tensor):
                self.bytes += value.numel() * value.element_size()
        if written and isinstance(written[0], Tensor):
            self.flops += written[0].numel() * _contracted(func.overloadpacket.__name__, args)
        return result


def _contracted(name: str, args: tuple[Any, ...]) -> float:
    """Multiply-adds per element of an operator's result."""
    if name in ("mm", "bmm", "mv", "dot"):
        return float(args[0].shape[-1])
    if name in ("addmm", "baddbmm", "addmv"):
        return float(args[1].shape[-1])
    if name in ("convolution", "_convolution") and args[1].shape[0] > 0:
        return args[1].numel() / args[1].shape[0]
    return 1.0


def out_of_memory(error: RuntimeError) -> bool:
    """Whether torch ran out of memory, on an accelerator or on the host."""
    text = str(error)
    return isinstance(error, torch.cuda.OutOfMemoryError) or "allocate memory" in text or "out of memory" in text


class Batches:
    """The network, run on any number of points.

    Args:
        forward: the network.
        n_in, n_out: flat sizes of input and output.
        dtype, device: those of the engine.
        comm: the ranks that run the network together; None for one.
    """

    def __init__(
        self,
        forward: Forward,
        *,
        n_in: int,
        n_out: int,
        dtype: torch.dtype,
        device: torch.device | str,
        comm: Comm | None = None,
    ) -> None:
        self._forward = forward
        self._comm = comm or Alone()
        self._n_in, self._n_out = n_in, n_out
        self._dtype, self._device = dtype, torch.device(device)
        self._size = 0

    @property
    def size(self) -> int:
        """Points per call of the network."""
        if self._size == 0:
            self._size = from_rank(self._comm, 0, self._measure())  # ranks see different shares of the work
        return self._size

    @property
    def wave(self) -> int:
        """Points to search at a time: a few calls of the network, and a bounded state."""
        state = 8 * self._n_in * self._dtype.itemsize
        limit = _CPU_BYTES if self._device.type == "cpu" else _GPU_BYTES
        return max(1, min(4 * self.size, 4 * limit // max(state, 1)))

    def _measure(self) -> int:
        """Points per call that keep within the bounds on bytes and work."""
        one, three = self._work(1), self._work(3)
        # Differences leave out what does not grow with the batch, such as weights that are reshaped.
        written = max(three.bytes - one.bytes, 0.0) / 2 + (self._n_in + self._n_out) * self._dtype.itemsize
        flops = max(three.flops - one.flops, 0.0) / 2
        most_bytes, most_flops = (_CPU_BYTES, _CPU_FLOPS) if self._device.type == "cpu" else (_GPU_BYTES, _GPU_FLOPS)
        if self._device.type == "cuda":
            most_bytes = min(most_bytes, torch.cuda.mem_get_info(self._device)[0] // 4)
        fit = min(most_bytes / (2 * written), most_flops / max(flops, 1.0), _MOST_POINTS)
        return max(1, int(fit))

    def _work(self, points: int) -> _Work:
        work = _Work()
        x = torch.zeros(points, self._n_in, dtype=self._dtype, device=self._device)
        with torch.no_grad(), work:
            self._forward(x)
        return work

    def outputs(self, x: Tensor, budget: Budget) -> Tensor:
        """The network at (N, n_in) points, (N, n_out); NaN from where the budget ended."""
        y = torch.full((x.shape[0], self._n_out), torch.nan, dtype=self._dtype, device=self._device)
        for place in self._places(x.shape[0], budget, lambda place: self._store(x, y, place)):
            if place is None:
                break
        return y

    def gradients(self, x: Tensor, objective: Objective, budget: Budget) -> tuple[Tensor, Tensor] | None:
        """Margins (N,) at the points and gradients (N, n_in) of their losses; None once the budget is over."""
        margin, gradient = torch.empty_like(x[:, 0]), torch.empty_like(x)

        def differentiate(place: slice) -> None:
            margin[place], gradient[place] = self._differentiate(x[place], objective, place)

        for place in self._places(x.shape[0], budget, differentiate):
            if place is None:
                return None
        return margin, gradient

    def _places(self, total: int, budget: Budget, act: Callable[[slice], None]) -> Iterator[slice | None]:
        """Act on batch after batch, halving them where memory runs out; None as soon as the budget is over."""
        begin = 0
        while begin < total:
            if budget.over:
                yield None
                return
            place = slice(begin, min(begin + self.size, total))
            if self._fits(act, place):
                begin = place.stop
                yield place
            else:
                self._size = max(1, (place.stop - place.start) // 2)

    def _fits(self, act: Callable[[slice], None], place: slice) -> bool:
        """Act on one batch; False if memory ran out and a smaller batch may do."""
        try:
            act(place)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            if self._comm.size > 1:  # the others are in the middle of this batch
                raise ResourceError(f"rank {self._comm.rank} is out of memory", "use more ranks") from error
            if place.stop - place.start == 1:
                raise ResourceError(
                    "out of memory while the network is run on a single point", "use a device with more memory"
                ) from error
            return False
        return True

    def _store(self, x: Tensor, y: Tensor, place: slice) -> None:
        with torch.no_grad():
            y[place] = self._forward(x[place])

    def _differentiate(self, x: Tensor, objective: Objective, place: slice) -> tuple[Tensor, Tensor]:
        """Margin and gradient of one batch; a gradient that does not exist is zero."""
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            with surrogate_steps():
                y = self._forward(x)
            loss, margin = objective(y, x, place)
            found = None
            if loss.requires_grad:
                (found,) = torch.autograd.grad(loss.sum(), x, allow_unused=True)
        gradient = torch.zeros_like(x) if found is None else torch.nan_to_num(found, nan=0.0, posinf=1.0, neginf=-1.0)
        return margin.detach(), gradient.detach()
