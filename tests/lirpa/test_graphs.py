"""Networks move between auto_LiRPA's graphs and ours and compute the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parverify.errors import ModelError, UnsupportedOperatorError
from parverify.graph.trace import trace
from parverify.lirpa import from_bounded_module, to_bounded_module
from parverify.lirpa.compat import Lirpa
from parverify.program.executor import Executor
from tests.bounds.zoo import made
from tests.lirpa.networks import around, bounded, far, network

NAMES = ("mlp", "conv", "residual", "leaky", "tanh", "transformer")


@pytest.mark.parametrize("name", NAMES)
def test_from_a_module(library: Lirpa, name: str) -> None:
    module, shape = network(name)
    graph = from_bounded_module(bounded(name))
    x = torch.rand(3, *shape)
    with torch.no_grad():
        found = Executor(graph).evaluate(x[:, None]).flatten(1)
        expected = torch.cat([module(one[None]) for one in x])
    torch.testing.assert_close(found, expected)


def test_the_module_stays_as_it_was(library: Lirpa) -> None:
    module = bounded("conv")
    state = {node.name: dict(vars(node)) for node in module._modules.values()}
    flags = [parameter.requires_grad for parameter in module.parameters()]
    from_bounded_module(module)
    assert {node.name: dict(vars(node)) for node in module._modules.values()} == state
    assert [parameter.requires_grad for parameter in module.parameters()] == flags


def test_sources_name_the_operators(library: Lirpa) -> None:
    module = bounded("mlp")
    for node in from_bounded_module(module).nodes[1:]:
        name, _, kind = node.source.rpartition(" ")
        assert type(module[name]).__name__ == kind


@pytest.mark.parametrize("name", ["mlp", "convolutional", "residual", "indices", "product", "clip", "sigmoid"])
def test_there_and_back(library: Lirpa, name: str) -> None:
    graph = made(name)
    module = to_bounded_module(graph)
    x = torch.rand(3, *graph.input.shape[1:])
    with torch.no_grad():
        expected = Executor(graph).evaluate(x[:, None]).reshape(3, -1)
        torch.testing.assert_close(module(x).reshape(3, -1), expected)
        back = Executor(from_bounded_module(module)).evaluate(x[:, None]).reshape(3, -1)
    torch.testing.assert_close(back, expected)


def test_a_made_module_has_bounds(library: Lirpa) -> None:
    module, shape = network("residual")
    made_module = to_bounded_module(trace(module, (1, *shape)))
    x = around(shape)
    for method in ("IBP", "CROWN"):
        for one, other in zip(
            made_module.compute_bounds(x=(x,), method=method),
            bounded("residual").compute_bounds(x=(x,), method=method),
            strict=True,
        ):
            assert far(one, other) < 1e-5


def test_all_that_has_no_counterpart_is_listed(library: Lirpa) -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 4), nn.Softplus(), nn.Linear(4, 2))
    with pytest.raises(UnsupportedOperatorError) as caught:
        to_bounded_module(trace(module, (1, 3)))
    assert [operator for _, operator in caught.value.operators] == ["act:gelu", "act:softplus"]


def test_all_that_can_not_be_recorded_is_listed(library: Lirpa, monkeypatch: pytest.MonkeyPatch) -> None:
    module = bounded("mlp")
    first, second = [node for node in module._modules.values() if type(node).__name__ == "BoundRelu"][:2]
    monkeypatch.setattr(first, "forward", torch.special.bessel_j0)
    monkeypatch.setattr(second, "forward", torch.special.airy_ai)
    with pytest.raises(UnsupportedOperatorError) as caught:
        from_bounded_module(module)
    assert [name for name, _ in caught.value.operators] == [f"{node.name} BoundRelu" for node in (first, second)]


def test_two_inputs_are_refused(library: Lirpa) -> None:
    class Sum(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y

    module = library.module.BoundedModule(Sum(), (torch.zeros(1, 2), torch.zeros(1, 2)), device="cpu")
    with pytest.raises(ModelError, match="2 inputs"):
        from_bounded_module(module)
