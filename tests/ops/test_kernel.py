"""The contract of kernel operators, inherited by a test class per operator.

A value is checked against plain torch, a row against the vector-Jacobian product, a picked row against the pushed
one-hot row, an interval against samples and against the exact range, a batch against its members, gradients against
differences.
"""

from __future__ import annotations

from typing import ClassVar

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from parverify.ops.convolution import transpose_conv2d
from parverify.ops.kernel import KERNEL, Box
from tests.ops.kernel_cases import AFFINE, NONLINEAR, Case, conv_case

DTYPES = (torch.float32, torch.float64)
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = metafunc.cls.cases
        metafunc.parametrize("case", cases, ids=[case.name for case in cases])


def close(a: Tensor, b: Tensor, tolerance: float = 1e-9) -> None:
    """Equal shapes, and values equal to `tolerance` times the largest magnitude."""
    assert a.shape == b.shape
    scale = max(1.0, float(b.detach().abs().max())) if b.numel() else 1.0
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance * scale)


def boxes(case: Case, dtype: torch.dtype, count: int, width: float) -> list[Box]:
    centers, radii = case.inputs(count, dtype, 5), case.inputs(count, dtype, 6)
    return [(c - width * r.abs(), c + width * r.abs()) for c, r in zip(centers, radii, strict=True)]


def samples(case: Case, box: list[Box], count: int = 300) -> Tensor:
    """Outputs (count * D, *shape) in float64 of random points and corners; row i belongs to domain i mod D."""
    generator = torch.Generator().manual_seed(9)
    xs = []
    for low, high in box:
        t = torch.rand(count, *low.shape, generator=generator, dtype=torch.float64)
        t[: count // 2] = t[: count // 2].round()
        x = low.double() + t * (high.double() - low.double())
        xs.append(torch.minimum(torch.maximum(x, low.double()), high.double()).flatten(0, 1))
    return case.to(torch.float64).forward(xs)


class KernelContract:
    """What every operator keeps; affine ones inherit `AffineContract`."""

    cases: ClassVar[list[Case]] = []

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_forward_equals_torch_one_by_one(self, case: Case, dtype: torch.dtype) -> None:
        case = case.to(dtype)
        xs = case.inputs(3, dtype)
        out = case.forward(xs)
        assert out.shape == (3, *case.node.shape)
        assert out.dtype == dtype
        for i in range(3):
            close(out[i], case.reference(case.consts, [x[i] for x in xs]), TOLERANCE[dtype])
            close(case.forward([x[i : i + 1] for x in xs])[0], out[i], TOLERANCE[dtype])

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("width", [0.0, 1e-3, 1.0, 100.0])
    def test_interval_contains_samples(self, case: Case, dtype: torch.dtype, width: float) -> None:
        case = case.to(dtype)
        box = boxes(case, dtype, 2, width)
        lower, upper = case.rule.interval(case.node, case.consts, box)
        assert lower.shape == upper.shape == (2, *case.node.shape)
        assert lower.dtype == dtype
        out = samples(case, box).unflatten(0, (-1, 2))
        assert (lower.double() <= out).all()
        assert (upper.double() >= out).all()

    def test_interval_of_a_batch_equals_one_by_one(self, case: Case) -> None:
        box = boxes(case, torch.float64, 3, 1.0)
        lower, upper = case.rule.interval(case.node, case.consts, box)
        for i in range(3):
            one = case.rule.interval(case.node, case.consts, [(low[i : i + 1], high[i : i + 1]) for low, high in box])
            close(one[0][0], lower[i], 1e-12)
            close(one[1][0], upper[i], 1e-12)


class AffineContract(KernelContract):
    """What operators with rows keep as well."""

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_backward_equals_vjp(self, case: Case, dtype: torch.dtype) -> None:
        tolerance = 1e-9 if dtype == torch.float64 else 1e-4
        A, xs = case.rows(4, dtype), [x[0] for x in case.inputs(1, dtype)]
        case = case.to(dtype)
        parts, constant = case.backward(A)
        assert constant.dtype == dtype
        value, vjp = torch.func.vjp(lambda *xs: case.reference(case.consts, xs), *xs)
        for row in range(4):
            for part, expected in zip(parts, vjp(A[row]), strict=True):
                close(part[row], expected, tolerance)
        pushed = sum((part * x).reshape(4, -1).sum(1) for part, x in zip(parts, xs, strict=True)) + constant
        close(pushed, (A * value).reshape(4, -1).sum(1), tolerance)

    def test_backward_of_rows_equals_one_by_one(self, case: Case) -> None:
        A = case.rows(3)
        parts, constant = case.backward(A)
        for i in range(3):
            one, c = case.backward(A[i : i + 1])
            close(c[0], constant[i], 1e-12)
            for part, single in zip(parts, one, strict=True):
                close(single[0], part[i], 1e-12)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("width", [0.0, 1.0])
    def test_interval_is_the_exact_range(self, case: Case, dtype: torch.dtype, width: float) -> None:
        case = case.to(dtype)
        box = boxes(case, dtype, 1, width)
        lower, upper = case.rule.interval(case.node, case.consts, box)
        size = case.node.numel
        exact = case.to(torch.float64)
        jacobian, constant = exact.backward(torch.eye(size, dtype=torch.float64).reshape(size, *case.node.shape))
        least, most, mass = constant.clone(), constant.clone(), constant.abs()
        for part, (low, high) in zip(jacobian, box, strict=True):
            J, low, high = part.reshape(size, -1), low.flatten().double(), high.flatten().double()
            least += J.clamp(min=0) @ low + J.clamp(max=0) @ high
            most += J.clamp(min=0) @ high + J.clamp(max=0) @ low
            mass += J.abs() @ torch.maximum(low.abs(), high.abs())
        allowed = 16 * torch.finfo(dtype).eps * mass
        assert (lower.flatten().double() <= least + 1e-15 * mass).all()
        assert (upper.flatten().double() >= most - 1e-15 * mass).all()
        assert (lower.flatten().double() >= least - allowed).all()
        assert (upper.flatten().double() <= most + allowed).all()

    def test_gradients_of_backward(self, case: Case) -> None:
        A = case.rows(2).requires_grad_()
        roles = list(case.consts)
        tensors = [case.consts[role].clone().requires_grad_() for role in roles]

        def pushed(A: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
            consts = dict(zip(roles, tensors, strict=True))
            parts, constant = case.rule.backward(case.node, consts, A)  # type: ignore[misc]
            return (*parts, A.new_zeros(1) if constant is None else constant)

        assert torch.autograd.gradcheck(pushed, (A, *tensors), fast_mode=True)
        fixed = [tensor.detach() for tensor in tensors]
        assert torch.autograd.gradcheck(lambda A: pushed(A, *fixed)[:-1], (A,), fast_mode=True)

    def test_gradients_of_interval(self, case: Case) -> None:
        flat = [side.clone().requires_grad_() for box in boxes(case, torch.float64, 1, 1.0) for side in box]

        def mapped(*sides: Tensor) -> Box:
            return case.rule.interval(case.node, case.consts, list(zip(sides[::2], sides[1::2], strict=True)))

        assert torch.autograd.gradcheck(mapped, tuple(flat), fast_mode=True)


class PickContract(AffineContract):
    """What operators keep that can pick one-hot rows."""

    def test_pick_equals_backward_of_one_hot_rows(self, case: Case) -> None:
        check_pick(case)


def check_pick(case: Case) -> None:
    size = case.node.numel
    index = torch.arange(size) if size <= 90 else torch.randperm(size, generator=torch.Generator().manual_seed(0))[:90]
    index = torch.cat([index, index[:1]])  # one neuron twice
    sign = torch.where(torch.arange(len(index)) % 3 == 0, -1.0, 1.0).double()
    one_hot = torch.zeros(len(index), size, dtype=torch.float64).scatter(1, index[:, None], sign[:, None])
    expected, constant = case.backward(one_hot.reshape(-1, *case.node.shape))
    parts, picked = case.rule.pick(case.node, case.consts, index, sign)  # type: ignore[misc]
    close(torch.zeros_like(constant) if picked is None else picked, constant, 1e-12)
    for part, other in zip(parts, expected, strict=True):
        close(part, other, 1e-12)


class TestReshape(AffineContract):
    cases = AFFINE["reshape"]


class TestPermute(AffineContract):
    cases = AFFINE["permute"]


class TestExpand(AffineContract):
    cases = AFFINE["expand"]


class TestIndex(AffineContract):
    cases = AFFINE["index"]


class TestConcat(AffineContract):
    cases = AFFINE["concat"]


class TestSum(AffineContract):
    cases = AFFINE["sum"]


class TestScale(AffineContract):
    cases = AFFINE["scale"]


class TestReduceSum(AffineContract):
    cases = AFFINE["reduce_sum"]


class TestLinear(PickContract):
    cases = AFFINE["linear"]


class TestSparse(PickContract):
    cases = AFFINE["sparse"]


class TestMatmul(AffineContract):
    cases = AFFINE["matmul"]


class TestConv(PickContract):
    cases = AFFINE["conv"]


class TestActivation(KernelContract):
    cases = NONLINEAR["act"]


class TestMul(KernelContract):
    cases = NONLINEAR["mul"]


def test_every_kernel_operator_inherits_the_contract() -> None:
    contracts = (KernelContract, AffineContract, PickContract)
    classes = [cls for contract in contracts for cls in contract.__subclasses__()]
    assert {case.node.op for cls in classes for case in cls.cases} == set(KERNEL)
    picked = {case.node.op for cls in PickContract.__subclasses__() for case in cls.cases}
    assert picked == {name for name, rule in KERNEL.items() if rule.pick is not None}


def test_affine_operators_are_those_with_rows() -> None:
    assert {name for name, rule in KERNEL.items() if rule.backward is None} == {"act", "mul"}


@st.composite
def convolutions(draw: st.DrawFn) -> Case:
    rank = draw(st.integers(1, 2))

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(rank))

    kernel, stride, dilation = each(1, 3), each(1, 3), each(1, 3)
    padding = each(0, 3)
    transposed = draw(st.booleans())
    least = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    if transposed:
        # A transposed convolution must leave something of its image after the padding is cut off.
        padding = tuple(min(p, (k - 1) // 2) for p, k in zip(padding, least, strict=True))
        extra = tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True))
        space = each(1, 4)
    else:
        extra = None
        space = tuple(max(1, k - 2 * p) + draw(st.integers(0, 4)) for k, p in zip(least, padding, strict=True))
    return conv_case(space=space, kernel=kernel, stride=stride, padding=padding, dilation=dilation,
                     groups=draw(st.integers(1, 2)), transposed=transposed, output_padding=extra,
                     images=draw(st.integers(1, 2)), bias=draw(st.booleans()))  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(convolutions())
def test_any_convolution(case: Case) -> None:
    contract = AffineContract()
    contract.test_forward_equals_torch_one_by_one(case, torch.float64)
    contract.test_backward_equals_vjp(case, torch.float64)
    check_pick(case)


@settings(max_examples=100, deadline=None)
@given(kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)), stride=st.tuples(st.integers(1, 4), st.integers(1, 4)),
       padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
       more=st.tuples(st.integers(0, 5), st.integers(0, 5)))  # fmt: skip
def test_transpose_conv2d(
    kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int], more: tuple[int, int]
) -> None:
    size = tuple(max(1, k - 2 * p) + m for k, p, m in zip(kernel, padding, more, strict=True))
    weight = torch.randn(2, 3, *kernel, dtype=torch.float64)
    x = torch.zeros(2, 3, *size, dtype=torch.float64)
    value, vjp = torch.func.vjp(lambda x: torch.conv2d(x, weight, None, stride, padding), x)
    A = torch.randn_like(value).requires_grad_()
    out = transpose_conv2d(A, weight, stride, padding, size)
    close(out, vjp(A)[0])
    g = torch.randn_like(out)
    (gradient,) = torch.autograd.grad(out, A, g)
    close(gradient, torch.conv2d(g, weight, None, stride, padding))
