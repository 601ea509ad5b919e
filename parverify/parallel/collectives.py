"""Collectives under autograd, each beside its adjoint.

What one direction sums the other copies: a replicated tensor that enters work divided over ranks (`copy`) collects the
ranks' partial gradients, and partial results that are summed (`total`) hand the same gradient to every rank. Used in
pairs they keep replicated parameters equal on all ranks; one without the other lets them drift apart (docs/design.md).

Each function is linear, and its backward pass is its adjoint: with <x, y> summed over ranks where each rank has a
tensor of its own, and counted once where a tensor is replicated, <f(x), y> = <x, f*(y)>. Every rank of the group calls
the same functions in the same order, and later their backward passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from parverify.parallel.comm import Comm

Linear = Callable[[Tensor], Tensor]


class _Pair(torch.autograd.Function):
    """A linear map whose backward pass is the given adjoint."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Linear, adjoint: Linear) -> Tensor:
        ctx.adjoint = adjoint
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.adjoint(gradients[0]), None, None


def _apply(x: Tensor, forward: Linear, adjoint: Linear) -> Tensor:
    return _Pair.apply(x, forward, adjoint)  # type: ignore[no-untyped-call, no-any-return]


# --- identity and all-reduce ------------------------------------------------------------------------------------------


def copy(x: Tensor, comm: Comm) -> Tensor:
    """The identity on a replicated tensor; its gradient is summed over the ranks."""
    return _apply(x, _same, lambda y: _summed(y, comm)) if comm.size > 1 else x


def total(x: Tensor, comm: Comm) -> Tensor:
    """The sum over all ranks; its gradient is the identity, because every rank sees the whole of it."""
    return _apply(x, lambda y: _summed(y, comm), _same) if comm.size > 1 else x


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def _summed(x: Tensor, comm: Comm) -> Tensor:
    out = x.contiguous().clone()
    comm.all_reduce(out).wait()
    return out


# --- gather and reduce-scatter ----------------------------------------------------------------------------------------


def gather(x: Tensor, comm: Comm) -> Tensor:
    """The ranks' (n, ...) behind each other; of the sum of all ranks' gradients each rank gets its piece."""
    return _apply(x, lambda y: _gathered(y, comm), lambda y: _scattered(y, comm)) if comm.size > 1 else x


def scatter(x: Tensor, comm: Comm) -> Tensor:
    """This rank's (n, ...) of the sum of all ranks' (size * n, ...); the gradient is gathered."""
    return _apply(x, lambda y: _scattered(y, comm), lambda y: _gathered(y, comm)) if comm.size > 1 else x


def _gathered(x: Tensor, comm: Comm) -> Tensor:
    out = x.new_empty(comm.size * x.shape[0], *x.shape[1:])
    comm.all_gather(out, x.contiguous()).wait()
    return out


def _scattered(x: Tensor, comm: Comm) -> Tensor:
    out = x.new_empty(x.shape[0] // comm.size, *x.shape[1:])
    comm.reduce_scatter(out, x.contiguous()).wait()
    return out


# --- broadcast and reduce ---------------------------------------------------------------------------------------------


def broadcast(x: Tensor, comm: Comm, *, source: int = 0) -> Tensor:
    """The tensor of rank `source`, whose gradient is the sum of all ranks'; the others' tensors have gradient zero."""
    if comm.size == 1:
        return x
    return _apply(x, lambda y: _spread(y, comm, source), lambda y: _reduced(y, comm, source))


def reduce(x: Tensor, comm: Comm, *, to: int = 0) -> Tensor:
    """The sum over all ranks on rank `to`, zero on the others; the gradient is that of rank `to`."""
    if comm.size == 1:
        return x
    return _apply(x, lambda y: _reduced(y, comm, to), lambda y: _spread(y, comm, to))


def _spread(x: Tensor, comm: Comm, source: int) -> Tensor:
    out = x.contiguous().clone()
    comm.broadcast(out, source).wait()
    return out


def _reduced(x: Tensor, comm: Comm, to: int) -> Tensor:
    out = _summed(x, comm)
    return out if comm.rank == to else torch.zeros_like(out)


# --- around the ring --------------------------------------------------------------------------------------------------


def shift(x: Tensor, comm: Comm) -> Tensor:
    """The tensor of rank + 1; gradients go the other way."""
    if comm.size == 1:
        return x
    return _apply(x, lambda y: _shifted(y, comm, back=False), lambda y: _shifted(y, comm, back=True))


def shift_back(x: Tensor, comm: Comm) -> Tensor:
    """The tensor of rank - 1; gradients go the other way."""
    if comm.size == 1:
        return x
    return _apply(x, lambda y: _shifted(y, comm, back=True), lambda y: _shifted(y, comm, back=False))


def _shifted(x: Tensor, comm: Comm, *, back: bool) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    comm.shift(x.contiguous(), out, back=back).wait()
    return out


# --- from one rank to another -----------------------------------------------------------------------------------------


def move(x: Tensor, comm: Comm, *, source: int, to: int) -> Tensor:
    """The tensor of rank `source` on rank `to`, zero on the others; the gradient moves from `to` to `source`.

    Args:
        x: of the same shape on every rank; only that of `source` matters.
        comm: the group; ranks that are neither source nor target communicate nothing.
        source, to: two different ranks.
    """
    return _apply(x, lambda y: _moved(y, comm, source, to), lambda y: _moved(y, comm, to, source))


def _moved(x: Tensor, comm: Comm, source: int, to: int) -> Tensor:
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    if comm.rank == source:
        comm.send(x.contiguous(), to).wait()
    elif comm.rank == to:
        comm.recv(out, source).wait()
    return out
