"""Tracing: what a graph computes is what the module computes, and what can't be followed is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from parverify.errors import ModelError, UnsupportedOperatorError
from parverify.graph.ir import BoundGraph
from parverify.graph.trace import trace
from parverify.program.executor import Executor
from tests.graph.functions import FUNCTIONS, MODULES, Function


class Wrapped(nn.Module):
    """A function as a module."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def traced(function: Function, shape: tuple[int, ...]) -> BoundGraph:
    return trace(Wrapped(function), shape, dtype=torch.float64)


def points(shape: tuple[int, ...], count: int = 4) -> Tensor:
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64) * 1.5


def check_equal(graph: BoundGraph, module: Function, shape: tuple[int, ...]) -> None:
    x = points(shape)
    with torch.no_grad():
        expected = torch.stack([module(one.clone()) for one in x])
        out = Executor(graph, dtype=torch.float64).evaluate(x)
    assert out.shape == expected.shape
    assert expected.isfinite().all()
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    shape, function = FUNCTIONS[name]
    check_equal(traced(function, shape), function, shape)


@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str) -> None:
    shape, module = MODULES[name]
    check_equal(trace(module, shape), module, shape)


@pytest.mark.parametrize("name", [name for name, (_, module) in MODULES.items() if list(module.parameters())])
def test_parameters_keep_their_gradients(name: str) -> None:
    shape, module = MODULES[name]
    x = points(shape, 2)
    parameters = list(module.parameters())
    out = torch.stack([module(one) for one in x])
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    expected = torch.autograd.grad((out * weight).sum(), parameters)
    executor = Executor(trace(module, shape), dtype=torch.float64, live=True)
    found = torch.autograd.grad((executor.evaluate(x) * weight).sum(), parameters)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-7)


def test_constants_that_are_not_live_carry_no_gradient() -> None:
    shape, module = MODULES["linear"]
    assert not Executor(trace(module, shape), dtype=torch.float64).evaluate(points(shape)).requires_grad


def test_float32_modules_stay_equal_in_float64_to_their_precision() -> None:
    shape, module = MODULES["conv_bn"]
    module = nn.Sequential(*module).to(torch.float32)
    x = points(shape)
    with torch.no_grad():
        expected = torch.stack([module(one.float()) for one in x])
    module.double()
    out = Executor(trace(module.float(), shape), dtype=torch.float64).evaluate(x)
    torch.testing.assert_close(out.float(), expected, rtol=1e-4, atol=1e-5)
    module.double()


def test_the_mode_of_the_module_is_restored() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.9)).train()
    module[1].eval()
    trace(module, (1, 2))
    assert [part.training for part in module.modules()] == [True, True, False]


def test_a_constant_network_is_a_network() -> None:
    graph = traced(lambda x: torch.full((1, 2), 3.0, dtype=torch.float64), (1, 3))
    out = Executor(graph, dtype=torch.float64).evaluate(points((1, 3)))
    assert out.tolist() == [[[3.0, 3.0]]] * 4


def test_the_input_itself_may_be_the_output() -> None:
    graph = traced(lambda x: x, (1, 3))
    x = points((1, 3))
    assert torch.equal(Executor(graph, dtype=torch.float64).evaluate(x), x)


BUFFER = torch.zeros(1, 3, dtype=torch.float64)


def written_constant(x: Tensor) -> Tensor:
    y = torch.zeros(1, 3, dtype=torch.float64)
    y[:, 1] = x[:, 0]
    return y + x


def written_variable(x: Tensor) -> Tensor:
    y = x * 2
    y[:, 1] = 5
    return y + x


def written_view(x: Tensor) -> Tensor:
    y = x * 2
    y[:, :2].add_(x[:, 1:])
    return y


def written_base(x: Tensor) -> Tensor:
    y = x * 2
    view = y[:, :2]
    y.relu_()
    return view


def later_view_of_written_constant(x: Tensor) -> Tensor:
    y = torch.zeros(1, 3, dtype=torch.float64)
    y.view(3)[0:2].copy_(x[0, :2])
    return y.view(3) + x


def constant_changed_after_use(x: Tensor) -> Tensor:
    c = torch.ones(1, 3, dtype=torch.float64)
    y = x * c
    c.mul_(2)
    return y + c * x


def written_into(x: Tensor) -> Tensor:
    out = torch.zeros(1, 3, dtype=torch.float64)
    view = out.view(3)
    torch.mul(x, 2, out=out)
    return view + x


ALIASED = {f.__name__: f for f in (written_constant, written_variable, written_view, written_base, written_into,
                                   later_view_of_written_constant, constant_changed_after_use)}  # fmt: skip


@pytest.mark.parametrize("name", ALIASED)
def test_writing_to_shared_memory_is_refused_or_followed(name: str) -> None:
    function = ALIASED[name]
    with pytest.raises(ModelError, match=r"in place|unsupported"):
        traced(function, (1, 3))


DEPENDENT = {
    "if": lambda x: x if x.sum() > 0 else -x,
    "item": lambda x: x * x.sum().item(),
    "while": lambda x: [x := x / 2 for _ in range(int(x.abs().max()) + 1)][-1],
    "nonzero": lambda x: x[x > 0].sum(),
    "argmax": lambda x: x.gather(1, x.argmax(1, keepdim=True)),
    "indices_of_max": lambda x: x.gather(1, x.max(1, keepdim=True).indices),
    "pool_indices": lambda x: torch.nn.functional.max_pool1d(x, 2, return_indices=True)[1].double(),
    "cast": lambda x: x.long().double(),
    "tolist": lambda x: x * torch.tensor(x.tolist()[0][0], dtype=torch.float64),
    "numpy": lambda x: x * float(x.numpy()[0, 0]),
    "data_pointer": lambda x: x + torch.from_numpy(x.numpy()).clone(),
    "sort": lambda x: x.sort(1).values,
    "fill": lambda x: torch.full((1, 3), float(x[0, 0]), dtype=torch.float64) + x,
}


@pytest.mark.parametrize("name", DEPENDENT)
def test_what_depends_on_values_is_refused(name: str) -> None:
    with pytest.raises(ModelError):
        traced(DEPENDENT[name], (1, 3))


def test_control_flow_is_named() -> None:
    with pytest.raises(ModelError, match="depend on values of the input"):
        traced(lambda x: x * x.sum().item(), (1, 3))


class Unsupported(nn.Module):
    """Two operators without an importer, in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Wrapped(torch.special.i0), Wrapped(torch.erfinv)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.second(self.first(x))) + torch.special.i1(x)


def test_unsupported_operators_are_listed_at_once() -> None:
    with pytest.raises(UnsupportedOperatorError) as caught:
        trace(Unsupported(), (1, 3))
    assert [op for _, op in caught.value.operators] == ["aten::i0", "aten::erfinv", "aten::special_i1"]
    assert caught.value.operators[0][0].startswith("first")
    assert caught.value.operators[1][0].startswith("second")
    assert "aten::i0" in str(caught.value)
    assert "erfinv" in str(caught.value)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_weights_must_be_numbers(bad: float) -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    module[0].weight.data[1, 2] = bad
    with pytest.raises(ModelError, match="0 Linear: the weight has entries that are no finite numbers"):
        trace(module, (1, 3))


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ModelError, match=r"0 Linear can't be run on an input of shape \[1, 4\]"):
        trace(nn.Sequential(nn.Linear(3, 2)), (1, 4))


REFUSED = {
    "fmod": lambda x: torch.fmod(x, 2),
    "trunc": torch.trunc,
    "norm3": lambda x: torch.linalg.vector_norm(x, 3),
    "round_decimals": lambda x: torch.round(x, decimals=2),
    "truncated_division": lambda x: torch.div(x, 0.3, rounding_mode="trunc"),
    "power_of_negative": lambda x: torch.pow(-2.0, x),
    "power_of_variables": lambda x: torch.pow(x * x + 1, x),
    "different_powers": lambda x: torch.pow(x, torch.tensor([1.0, 2.0, 3.0])),
    "hardshrink": torch.nn.functional.hardshrink,
    "threshold_jump": lambda x: torch.nn.functional.threshold(x, 0.2, 0.5),
    "softplus_threshold": lambda x: torch.nn.functional.softplus(x, threshold=1),
    "masked_infinity": lambda x: x.masked_fill(torch.tensor([True, False, False]), -torch.inf),
    "circular_padding": lambda x: torch.nn.functional.pad(x, (1, 1), mode="circular"),
    "two_outputs": lambda x: (x, x),
    "variable_kernel": lambda x: torch.conv1d(x[None], x[None]),
    "accumulate": lambda x: x.index_put((torch.tensor([0]),), x, accumulate=True),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_message(name: str) -> None:
    from parverify.errors import ParverifyError

    with pytest.raises(ParverifyError):
        traced(REFUSED[name], (1, 3))
