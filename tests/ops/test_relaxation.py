"""Rows through nonlinear nodes: below the function at samples, whatever alpha; owners, packing, the lean path."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from parverify.graph.ir import Node
from parverify.ops.activation import ACTIVATIONS
from parverify.ops.kernel import KERNEL, Box
from parverify.ops.relaxation import Alpha, Relaxed, RelaxedActivation, RelaxedProduct, relax

SHAPE = (2, 3)
OPERATORS = ["mul", "relu", "tanh", "sigmoid", "exp", "square", "gelu", "sin", "sign", "floor"]
DOMAINS = 3


def node_of(op: str) -> Node:
    if op == "mul":
        return Node("n", "mul", ("x", "y"), SHAPE, {}, {"in_shapes": (SHAPE, SHAPE)})
    return Node("n", "act", ("x",), SHAPE, {}, {"in_shapes": (SHAPE,), "activation": ACTIVATIONS[op]})


def boxes_of(op: str, dtype: torch.dtype, width: float = 1.5, seed: int = 0) -> list[Box]:
    """Random boxes, one neuron of each domain a point."""
    generator = torch.Generator().manual_seed(seed)
    boxes = []
    for _ in node_of(op).inputs:
        center = torch.randn(DOMAINS, *SHAPE, generator=generator)
        radius = width * torch.rand(DOMAINS, *SHAPE, generator=generator)
        radius[:, 0, 1] = 0
        boxes.append(((center - radius).to(dtype), (center + radius).to(dtype)))
    return boxes


def rows(count: int, dtype: torch.dtype, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(count, *SHAPE, generator=generator)
    A[torch.rand(A.shape, generator=generator) < 0.2] = 0
    return A.to(dtype), torch.randint(DOMAINS, (count,), generator=generator)


def random_alpha(relaxed: Relaxed, owner: Tensor | None, count: int, seed: int) -> Alpha:
    generator = torch.Generator().manual_seed(seed)
    start = relaxed.start(owner, count)
    return {role: torch.rand(a.shape, generator=generator).to(a.dtype) for role, a in start.items()}


def inner(box: Box, count: int, seed: int) -> Tensor:
    """(count, D, *shape) points of a box in float64."""
    low, high = box[0].double(), box[1].double()
    t = torch.rand(count, *low.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    t[: count // 3] = t[: count // 3].round()
    return torch.minimum(torch.maximum(low + t * (high - low), low), high)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("op", OPERATORS)
def test_rows_stay_below_the_function(op: str, dtype: torch.dtype) -> None:
    node = node_of(op)
    for seed, width in enumerate((0.0, 1e-4, 1.5, 30.0)):
        boxes = boxes_of(op, dtype, width, seed)
        relaxed = relax(node, boxes)
        A, owner = rows(20, dtype, seed)
        xs = [inner(box, 900, i) for i, box in enumerate(boxes)]
        value = KERNEL[node.op].forward(node, {}, [x.flatten(0, 1) for x in xs]).unflatten(0, xs[0].shape[:2])
        for alpha in (None, relaxed.start(owner, 20), random_alpha(relaxed, owner, 20, seed)):
            parts, constant = relaxed.push(A, owner, alpha)
            left = sum(
                torch.einsum("nij,pnij->pn", part.double(), x[:, owner]) for part, x in zip(parts, xs, strict=True)
            )
            right = torch.einsum("nij,pnij->pn", A.double(), value[:, owner])
            mass = sum(
                torch.einsum("nij,pnij->pn", part.double().abs(), x[:, owner].abs())
                for part, x in zip(parts, xs, strict=True)
            )
            mass = (
                mass + constant.double().abs() + torch.einsum("nij,pnij->pn", A.double().abs(), value[:, owner].abs())
            )
            known = constant.isfinite()
            assert not (constant == torch.inf).any()
            rounding = 4 * torch.finfo(dtype).eps * mass
            assert (left + constant.double() <= right + rounding)[:, known].all()


@pytest.mark.parametrize("op", OPERATORS)
def test_the_default_is_the_start_of_alpha(op: str) -> None:
    relaxed = relax(node_of(op), boxes_of(op, torch.float64))
    A, owner = rows(7, torch.float64)
    start = relaxed.start(owner, 7)
    assert set(start) == set(relaxed.free)
    for role, alpha in start.items():
        assert alpha.shape == (7, len(relaxed.free[role]))
    plain, one = relaxed.push(A, owner, None), relaxed.push(A, owner, start)
    for a, b in zip([*plain[0], plain[1]], [*one[0], one[1]], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("op", OPERATORS)
def test_rows_of_a_batch_equal_rows_one_by_one(op: str) -> None:
    node, boxes = node_of(op), boxes_of(op, torch.float64)
    relaxed = relax(node, boxes)
    A, owner = rows(9, torch.float64)
    alpha = random_alpha(relaxed, owner, 9, 4)
    parts, constant = relaxed.push(A, owner, alpha)
    for i in range(9):
        d = int(owner[i])
        alone = relax(node, [(low[d : d + 1], high[d : d + 1]) for low, high in boxes])
        mine = {}
        for role, index in alone.free.items():
            place = torch.searchsorted(relaxed.free[role], index)
            assert torch.equal(relaxed.free[role][place], index)
            mine[role] = alpha[role][i : i + 1, place]
        one, c = alone.push(A[i : i + 1], None, mine)
        torch.testing.assert_close(c[0], constant[i], rtol=1e-12, atol=1e-12)
        for part, other in zip(one, parts, strict=True):
            torch.testing.assert_close(part[0], other[i], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("op", OPERATORS)
def test_without_owner_row_i_belongs_to_domain_i(op: str) -> None:
    relaxed = relax(node_of(op), boxes_of(op, torch.float64))
    A, _ = rows(DOMAINS, torch.float64)
    alpha = random_alpha(relaxed, None, DOMAINS, 4)
    (first, *_), constant = relaxed.push(A, None, alpha)
    (second, *_), other = relaxed.push(A, torch.arange(DOMAINS), alpha)
    torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(constant, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("packed", [True, False])
def test_the_lean_path_equals_the_general_one(packed: bool) -> None:
    """Values and gradients, with neurons that are free in some domains only, and with all free."""
    boxes = boxes_of("relu", torch.float64)
    if not packed:
        boxes = [(-box[0].abs() - 0.1, box[1].abs() + 0.1) for box in boxes]
    lean = relax(node_of("relu"), boxes)
    assert isinstance(lean, RelaxedActivation)
    assert lean.lean
    assert (len(lean.free["lower"]) < 6) == packed
    general = replace(lean, lean=False)
    A, owner = rows(11, torch.float64)
    weight = torch.randn(A.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    found = []
    for relaxed in (lean, general):
        alpha = {role: a.requires_grad_() for role, a in random_alpha(relaxed, owner, 11, 3).items()}
        leaf = A.clone().requires_grad_()
        (out,), constant = relaxed.push(leaf, owner, alpha)
        objective = (out * weight).sum() + (constant * torch.arange(1.0, 12, dtype=torch.float64)).sum()
        gradients = torch.autograd.grad(objective, [leaf, *alpha.values()])
        nonzero = A != 0  # at 0 there is a kink, and either side's slope will do
        found.append([out, constant, gradients[0] * nonzero, gradients[1]])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_relu_relaxation_is_the_known_one() -> None:
    """The upper line is the chord; the lower slope is 1 where u > -l, else 0; stable neurons are exact."""
    low = torch.tensor([[-1.0, -2.0, 0.5, -3.0]], dtype=torch.float64)
    high = torch.tensor([[2.0, 1.0, 1.5, -1.0]], dtype=torch.float64)
    node = Node("n", "act", ("x",), (4,), {}, {"in_shapes": ((4,),), "activation": ACTIVATIONS["relu"]})
    relaxed = relax(node, [(low, high)])
    (lower,), constant = relaxed.push(torch.eye(4, dtype=torch.float64), torch.zeros(4, dtype=torch.long), None)
    assert lower.diagonal().tolist() == [1.0, 0.0, 1.0, 0.0]
    assert constant.tolist() == [0.0] * 4
    (upper,), constant = relaxed.push(-torch.eye(4, dtype=torch.float64), torch.zeros(4, dtype=torch.long), None)
    assert (-upper.diagonal()).tolist() == pytest.approx([2 / 3, 1 / 3, 1.0, 0.0])
    assert (-constant).tolist() == pytest.approx([2 / 3, 2 / 3, 0.0, 0.0])
    assert relaxed.free["lower"].tolist() == [0, 1]


def test_product_planes_touch_the_corners() -> None:
    relaxed = relax(node_of("mul"), boxes_of("mul", torch.float64))
    assert isinstance(relaxed, RelaxedProduct)
    (lx, ux), (ly, uy) = relaxed.box
    for sign, corners in ((1.0, ((0, 0), (1, 1))), (-1.0, ((0, 1), (1, 0)))):
        for alpha, (i, j) in zip((1.0, 0.0), corners, strict=True):
            x, y = (lx, ux)[i], (ly, uy)[j]
            A = torch.full((DOMAINS, *SHAPE), sign, dtype=torch.float64)
            full = {role: torch.full((DOMAINS, len(index)), alpha, dtype=torch.float64)
                    for role, index in relaxed.free.items()}  # fmt: skip
            (for_x, for_y), constant = relaxed.push(A, None, full)
            value = (for_x.flatten(1) * x + for_y.flatten(1) * y).sum(1) + constant
            free = torch.zeros(6, dtype=torch.bool)
            free[relaxed.free["lower"]] = True
            exact = (sign * x * y).sum(1)
            if bool(free.all()):
                torch.testing.assert_close(value, exact, rtol=1e-12, atol=1e-12)
            assert (value <= exact + 1e-12).all()


@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.parametrize("bad", [(-torch.inf, torch.inf), (0.5, torch.inf), (torch.nan, torch.nan), (-torch.inf, -1.0)])
def test_unknown_boxes_give_no_finite_claim_that_is_wrong(op: str, bad: tuple[float, float]) -> None:
    """A row on an unbounded value is either -inf or NaN, or a line that holds there as well."""
    boxes = boxes_of(op, torch.float64)
    low, high = boxes[0]
    low[:, 0, 0], high[:, 0, 0] = bad
    node = node_of(op)
    relaxed = relax(node, boxes)
    A, owner = rows(12, torch.float64)
    A[:, 0, 0] = torch.where(torch.arange(12) % 2 == 0, 1.0, -1.0)
    parts, constant = relaxed.push(A, owner, None)
    known = constant.isfinite()
    for part in parts:
        known &= part.flatten(1).isfinite().all(1)
    assert not (constant == torch.inf).any()
    for x in (-1e3, -2.0, 0.7, 5.0, 1e3):
        if not bad[0] <= x <= bad[1]:
            continue
        xs = [(box[0] / 2 + box[1] / 2).clone() for box in boxes]
        xs[0][:, 0, 0] = x
        value = (A * KERNEL[node.op].forward(node, {}, xs)[owner]).flatten(1).sum(1)
        line = sum((part * p[owner]).flatten(1).sum(1) for part, p in zip(parts, xs, strict=True)) + constant
        assert (line <= value + 1e-9 * (1 + value.abs()))[known & value.isfinite()].all()
