"""Step functions and saturated softmax: exact values, slopes that descent can follow."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor

from parverify.attack import batches
from parverify.attack.surrogate import surrogate_steps
from parverify.frontend.query import Query
from tests.attack.helpers import Net, check, disjunct, search, single

STEPS = [
    torch.sign, torch.round, torch.floor, torch.ceil, Tensor.sign, torch.ops.aten.sign.default,
    torch.ops.aten.floor.default,
]  # fmt: skip
SOFTMAXES = [
    lambda x: torch.softmax(x, 1),
    lambda x: torch.softmax(x, dim=-1),
    lambda x: torch.nn.functional.softmax(x, dim=1),
    lambda x: x.softmax(1),
    lambda x: torch.ops.aten._softmax.default(x, 1, False),
]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_keep_values_and_gain_slopes(step: Net, dtype: torch.dtype) -> None:
    x = torch.tensor([[0.3, -2.5, 0.0, 7.1]], dtype=dtype, requires_grad=True)
    with surrogate_steps():
        y = step(x)
    assert torch.equal(y, step(x.detach()))
    (slope,) = torch.autograd.grad(y.sum(), x)
    assert (slope > 0).all()
    (flat,) = torch.autograd.grad(step(x).sum(), x)
    assert (flat == 0).all()


@pytest.mark.parametrize("softmax", SOFTMAXES)
def test_softmax_keeps_values_and_does_not_saturate(softmax: Net) -> None:
    x = torch.tensor([[0.0, 400.0, 100.0], [0.1, 0.4, 0.2]], requires_grad=True)
    with surrogate_steps():
        y = softmax(x)
    assert torch.equal(y, torch.softmax(x.detach(), 1))
    (slope,) = torch.autograd.grad(y[:, 1].sum(), x)
    (plain,) = torch.autograd.grad(torch.softmax(x, 1)[:, 1].sum(), x)
    assert (plain[0] == 0).all()
    assert slope[0, 1] > 0 > slope[0, 2]
    torch.testing.assert_close(slope[1], plain[1])


def test_softmax_that_casts_is_left_alone() -> None:
    x = torch.tensor([[0.0, 400.0]], requires_grad=True)
    with surrogate_steps():
        y = torch.softmax(x, 1, dtype=torch.float64)
    assert y.dtype == torch.float64
    assert (torch.autograd.grad(y[0, 0], x)[0] == 0).all()


def test_binary_network_with_saturated_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    W, V = (torch.randn(shape, generator=generator, dtype=torch.float64).sign() for shape in ((400, 200), (200, 3)))

    def net(x: Tensor) -> Tensor:
        hidden = torch.sign(torch.sign(x @ W.to(x.dtype)) + 0.1)
        return torch.softmax(3 * hidden @ V.to(x.dtype), 1)

    middle = torch.rand(1, 400, generator=generator, dtype=torch.float64)
    first, last = net(middle)[0].argmax().item(), net(middle)[0].argmin().item()
    row = [[0.0, 0.0, 0.0]]
    row[0][first], row[0][last] = 1.0, -1.0
    query = Query(400, 3, (disjunct(middle[0] - 0.1, middle[0] + 0.1, row, [0.0], strict=[True]),))
    check(search(net, query).pgd(restarts=10, steps=100, seconds=20), query, single(net))
    monkeypatch.setattr(batches, "surrogate_steps", contextlib.nullcontext)
    assert search(net, query).pgd(restarts=10, steps=100, seconds=20) is None
