"""Each collective against plain tensors, and each pair of them as adjoints, on gloo ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from parverify.parallel import collectives
from parverify.parallel.comm import Comm
from parverify.parallel.world import World
from tests.distributed.ranks import on_ranks

Function = Callable[[Tensor, Comm], Tensor]

# name -> the function, and whether its input and its output are replicated (then they count once)
PAIRS: dict[str, tuple[Function, bool, bool]] = {
    "copy": (collectives.copy, True, False),
    "total": (collectives.total, False, True),
    "gather": (collectives.gather, False, False),
    "scatter": (collectives.scatter, False, False),
    "broadcast": (lambda x, comm: collectives.broadcast(x, comm, source=1), False, False),
    "reduce": (lambda x, comm: collectives.reduce(x, comm, to=1), False, False),
    "shift": (collectives.shift, False, False),
    "shift_back": (collectives.shift_back, False, False),
    "move": (lambda x, comm: collectives.move(x, comm, source=1, to=0), False, False),
}


def expected(name: str, parts: list[Tensor], rank: int) -> Tensor:
    """What a rank gets, computed from all ranks' tensors."""
    size, both = len(parts), torch.stack(parts)
    nothing = torch.zeros_like(parts[0])
    return {
        "copy": lambda: parts[rank],
        "total": lambda: both.sum(0),
        "gather": lambda: torch.cat(parts),
        "scatter": lambda: both.sum(0).chunk(size)[rank],
        "broadcast": lambda: parts[1],
        "reduce": lambda: both.sum(0) if rank == 1 else nothing,
        "shift": lambda: parts[(rank + 1) % size],
        "shift_back": lambda: parts[(rank - 1) % size],
        "move": lambda: parts[1] if rank == 0 else nothing,
    }[name]()


def values(seed: int, size: int, shape: tuple[int, ...], *, replicated: bool) -> list[Tensor]:
    """A tensor for each rank."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(size)]
    return [drawn[0]] * size if replicated else drawn


def both_sides(world: World, name: str) -> tuple[float, float]:
    """This rank's share of <f(x), y> and of <x, f*(y)>."""
    function, single_in, single_out = PAIRS[name]
    parts = values(1, world.size, (2 * world.size, 3), replicated=single_in)
    x = parts[world.rank].clone().requires_grad_()
    out = function(x, world.comm)
    wanted = expected(name, parts, world.rank)
    # Not torch.testing: each rank would spend a second on importing sympy for it.
    assert out.shape == wanted.shape and torch.allclose(out.detach(), wanted, rtol=1e-13, atol=1e-14)
    y = values(2, world.size, tuple(out.shape), replicated=single_out)[world.rank]
    (out * y).sum().backward()  # not out.backward(y), for the same reason
    assert x.grad is not None
    counts_in, counts_out = ((not single or world.rank == 0) for single in (single_in, single_out))
    return float((out.detach() * y).sum()) * counts_out, float((x.detach() * x.grad).sum()) * counts_in


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", PAIRS)
def test_pairs_are_adjoint(name: str, size: int) -> None:
    sides = on_ranks(size, both_sides, name)
    left, right = (sum(side) for side in zip(*sides, strict=True))
    assert abs(left) > 1e-3
    assert left == pytest.approx(right, rel=1e-12)


def drift(world: World, entrance: Function, exit: Function) -> list[float]:
    """A replicated parameter after some steps of gradient descent on a loss whose terms are divided over ranks."""
    parameter = torch.ones(3, dtype=torch.float64, requires_grad=True)
    weights = values(3, world.size, (3,), replicated=False)[world.rank]
    for _ in range(3):
        loss = (exit((entrance(parameter, world.comm) * weights).square(), world.comm)).sum()
        (gradient,) = torch.autograd.grad(loss, parameter)
        parameter = (parameter - 0.05 * gradient).detach().requires_grad_()
    return parameter.tolist()


def identity(x: Tensor, comm: Comm) -> Tensor:
    """No communication in either direction."""
    return x


def test_only_the_right_pair_keeps_replicas_equal() -> None:
    first, second = on_ranks(2, drift, collectives.copy, collectives.total)
    assert first == second
    first, second = on_ranks(2, drift, identity, collectives.total)
    assert first != second


def alone(world: World) -> None:
    """The same functions in a group of one."""
    x = torch.ones(2)
    for name, (function, _, _) in PAIRS.items():
        if name != "move":
            assert function(x, world.comm) is x


def test_one_rank_communicates_nothing() -> None:
    on_ranks(1, alone)
