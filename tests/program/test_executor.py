"""Sweeps: one-hot rows equal dense ones, taps, constants, what can't be bounded."""

from __future__ import annotations

import pytest
import torch

from parverify.bounds.layers import BoundOptions, bound_layers
from parverify.bounds.region import BoxRegion
from parverify.graph.trace import trace
from parverify.program.executor import Executor
from parverify.program.rows import Dense, both_signs
from tests.bounds.zoo import NETWORKS, made, random_box


@pytest.mark.parametrize("name", NETWORKS)
def test_one_hot_rows_equal_dense_rows(name: str) -> None:
    graph = made(name)
    region = random_box(graph, 2, 0.3, 1, torch.float64)
    executor = Executor(graph, dtype=torch.float64)
    with torch.no_grad():
        found = bound_layers(executor, region, BoundOptions("crown"))
        for start in (graph.output, *graph.bounded):
            size = graph[start].numel
            owner = torch.arange(2).repeat_interleave(size)
            rows = both_signs(torch.arange(size).repeat(2), owner, torch.float64)
            one = executor.sweep(start, rows, found.relaxed, region)
            dense = Dense(rows.dense(graph[start].shape), None, rows.owner)
            other = executor.sweep(start, dense, found.relaxed, region)
            assert torch.equal(one.lower.isinf(), other.lower.isinf())
            finite = one.lower.isfinite()
            torch.testing.assert_close(one.lower[finite], other.lower[finite], rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(one.A[finite], other.A[finite], rtol=1e-10, atol=1e-10)


def test_rows_on_the_input_are_minimized_directly() -> None:
    graph = made("mlp")
    region = random_box(graph, 1, 0.5, 2, torch.float64)
    A = torch.tensor([[[1.0, -2.0, 0.0]], [[0.0, 0.0, 0.0]]], dtype=torch.float64)
    swept = Executor(graph, dtype=torch.float64).sweep(graph.input.name, Dense(A, torch.tensor([0.5, 7.0])), {}, region)
    low, high = region.lower[0], region.upper[0]
    assert swept.lower.tolist() == pytest.approx([0.5 + float(low[0] - 2 * high[1]), 7.0])


def test_constants_of_rows_are_added() -> None:
    graph = made("tanh")
    region = random_box(graph, 1, 0.5, 2, torch.float64)
    executor = Executor(graph, dtype=torch.float64)
    with torch.no_grad():
        relaxed = bound_layers(executor, region, BoundOptions("crown")).relaxed
        A = torch.randn(4, *graph[graph.output].shape, dtype=torch.float64)
        plain = executor.sweep(graph.output, Dense(A), relaxed, region).lower
        shifted = executor.sweep(graph.output, Dense(A, torch.arange(4.0).double()), relaxed, region).lower
    torch.testing.assert_close(shifted, plain + torch.arange(4.0), rtol=1e-10, atol=1e-10)


def test_taps_are_the_rows_on_nonlinear_values() -> None:
    """The last layer is linear: the rows on the last activation's value are the rows times its weight."""
    graph = made("tanh")
    region = random_box(graph, 1, 0.5, 2, torch.float64)
    executor = Executor(graph, dtype=torch.float64)
    with torch.no_grad():
        relaxed = bound_layers(executor, region, BoundOptions("crown")).relaxed
        rows = both_signs(torch.arange(2), None, torch.float64)
        swept = executor.sweep(graph.output, rows, relaxed, region, taps=True)
        without = executor.sweep(graph.output, rows, relaxed, region)
    assert set(swept.taps) == {node.name for node in graph.nonlinear}
    weight = executor.constants(graph[graph.output])["weight"]
    last = graph.nonlinear[-1].name
    torch.testing.assert_close(swept.taps[last].flatten(1), torch.cat([weight, -weight]))
    assert torch.equal(swept.lower, without.lower)
    assert not without.taps


def test_bounds_follow_parameters_that_are_live() -> None:
    """The gradient of a bound with respect to a weight equals differences, through the relaxations too.

    For ReLU; for smooth activations the default tangent point counts as given.
    """
    from torch import nn

    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv1d(1, 2, 2, stride=2), nn.BatchNorm1d(2), nn.ReLU(), nn.Flatten(), nn.Linear(4, 2),
                           nn.LeakyReLU(), nn.Linear(2, 1)).double().eval()  # fmt: skip
    region = BoxRegion(-torch.ones(1, 4, dtype=torch.float64), torch.rand(1, 4, dtype=torch.float64) + 0.5)
    graph = trace(module, (1, 1, 4))

    def total() -> torch.Tensor:
        executor = Executor(graph, dtype=torch.float64, live=True)
        relaxed = bound_layers(executor, region, BoundOptions("crown-ibp")).relaxed
        return executor.sweep(
            graph.output, both_signs(torch.arange(1), None, torch.float64), relaxed, region
        ).lower.sum()

    parameters = list(module.parameters())
    gradients = torch.autograd.grad(total(), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        flat = parameter.detach().view(-1)
        for i in range(min(3, flat.numel())):
            kept = flat[i].item()
            ends = []
            for step in (1e-6, -1e-6):
                flat[i] = kept + step
                ends.append(total().item())
            flat[i] = kept
            assert gradient.flatten()[i].item() == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-4, abs=1e-6)


def test_sizes() -> None:
    graph = made("mlp")
    single, double = Executor(graph), Executor(graph, dtype=torch.float64)
    count = sum(const.value.numel() for const in graph.constants.values())
    assert single.resident_bytes() == 4 * count
    assert double.resident_bytes() == 8 * count
    assert graph.constant_bytes() == 4 * count


def test_the_work_of_a_row_is_what_torch_counts_for_a_value() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    weighted = [name for name in NETWORKS if not {node.op for node in made(name)} & {"matmul", "sparse"}]
    assert len(weighted) > len(NETWORKS) // 2  # the others multiply constants that are no weights
    for name in weighted:
        graph = made(name)
        executor = Executor(graph, dtype=torch.float64)
        region = random_box(graph, 1, 0.1, 1, torch.float64)
        with FlopCounterMode(display=False) as counted:
            executor.evaluate(region.lower)
        assert executor.work(graph.output) == counted.get_total_flops() // 2, name
        assert executor.work(graph.output, 10) == 31 * executor.work(graph.output)


@pytest.mark.parametrize("size", [1, 100, 1 << 20])
def test_magnitudes_of_a_weight_are_made_in_blocks(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from parverify.parallel.meter import MemoryMeter
    from parverify.program import products

    torch.manual_seed(0)
    graph = trace(torch.nn.Sequential(torch.nn.Linear(90, 60), torch.nn.ReLU(), torch.nn.Linear(60, 7)), (1, 90))
    region = random_box(graph, 2, 0.3, 1, torch.float32)
    found, peaks = [], []
    for largest in (1 << 30, size):
        monkeypatch.setattr(products, "MAGNITUDES", largest)
        executor = Executor(graph)
        with torch.no_grad(), MemoryMeter(executor.resident()) as meter:
            found.append(bound_layers(executor, region, BoundOptions("ibp")))
        peaks.append(meter.peak_bytes)
    for name, box in found[0].intervals.items():
        for one, other in zip(box, found[1].intervals[name], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    for name, magnitude in found[0].relaxed.magnitudes.items():
        torch.testing.assert_close(magnitude, found[1].relaxed.magnitudes[name], rtol=1e-6, atol=1e-6)
    assert (peaks[1] < peaks[0] - 90 * 60 * 2) == (size < 1 << 20)


def test_a_weight_multiplied_at_once_or_in_parts_gives_the_same_bounds() -> None:
    from parverify.ops.weighted import parts, whole
    from parverify.program.steps import Placement, resident, weighted_nodes
    from tests.distributed.test_divided import WIDE, wide

    for name in WIDE:
        graph, region = wide(name, torch.float64)
        nodes = weighted_nodes(graph)
        cut = {node.name: parts(node, graph.constants[node.consts["weight"]].value.shape) for node in nodes}
        assert max(map(len, cut.values())) > 1
        found = []
        for some in (cut, {node.name: (whole(node),) for node in nodes}):
            placement = Placement("single", 0, 1, {node.name: resident(node, some[node.name]) for node in nodes})
            executor = Executor(graph, dtype=torch.float64, placement=placement)
            with torch.no_grad():
                layers = bound_layers(executor, region, BoundOptions("crown"))
                rows = both_signs(torch.arange(graph[graph.output].numel), None, torch.float64)
                found.append(executor.sweep(graph.output, rows, layers.relaxed, region).lower)
        torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
