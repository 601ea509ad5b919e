"""Cases for the contract of kernel operators: a node, its constants in float64, and what it means in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from parverify.graph.builder import Builder, Value, Var
from parverify.graph.ir import Const, Node
from parverify.ops.activation import ACTIVATIONS
from parverify.ops.kernel import KERNEL, Rule
from parverify.ops.sparse import tables


@dataclass(frozen=True)
class Case:
    """One operator with settings.

    Args:
        name: for test ids.
        node: the node; its inputs have the shapes `in_shapes`.
        consts: role -> float64 tensor.
        reference: the operator on one instance, from (consts, inputs).
    """

    name: str
    node: Node
    consts: dict[str, Tensor]
    reference: Callable[[dict[str, Tensor], Sequence[Tensor]], Tensor]

    @property
    def rule(self) -> Rule:
        return KERNEL[self.node.op]

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return self.node.attrs["in_shapes"]

    def to(self, dtype: torch.dtype) -> Case:
        return replace(self, consts={role: value.to(dtype) for role, value in self.consts.items()})

    def inputs(self, count: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(count, *shape, generator=generator, dtype=torch.float64).to(dtype) for shape in self.shapes]

    def rows(self, count: int, dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(count, *self.node.shape, generator=generator, dtype=torch.float64).to(dtype)

    def forward(self, xs: Sequence[Tensor]) -> Tensor:
        return self.rule.forward(self.node, self.consts, xs)

    def backward(self, A: Tensor) -> tuple[list[Tensor], Tensor]:
        assert self.rule.backward is not None
        parts, constant = self.rule.backward(self.node, self.consts, A)
        return parts, A.new_zeros(A.shape[0]) if constant is None else constant


Make = Callable[[Builder, Var], Value]
Reference = Callable[[dict[str, Tensor], Sequence[Tensor]], Tensor]


def made(name: str, shape: Sequence[int], make: Make, reference: Reference) -> Case:
    """A case whose node is the last one that `make` appends to a graph with one input of `shape`."""
    builder = Builder(shape)
    out = make(builder, builder.input)
    assert isinstance(out, Var)
    graph = builder.finish(out)
    node = graph.nodes[-1]
    return Case(name, node, {role: graph.constants[key].value.double() for role, key in node.consts.items()}, reference)


def emitted(
    name: str,
    op: str,
    shapes: Sequence[Sequence[int]],
    shape: Sequence[int],
    reference: Reference,
    consts: dict[str, Tensor] | None = None,
    **attrs: Any,
) -> Case:
    """A case whose node is written directly."""
    consts = consts or {}
    attrs["in_shapes"] = tuple(tuple(s) for s in shapes)
    names = tuple(f"x{i}" for i in range(len(shapes)))
    node = Node("n", op, names, tuple(shape), {role: role for role in consts}, attrs)
    return Case(name, node, {role: value.double() for role, value in consts.items()}, reference)


def values(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def movement_cases() -> dict[str, list[Case]]:
    pairs = [((2, 3, 4), (0, 2, 1)), ((2, 3, 4), (2, 0, 1)), ((1, 5), (1, 0)), ((2, 1, 3, 2), (3, 1, 0, 2))]
    return {
        "reshape": [
            made(
                f"{old}-{new}", old, lambda b, x, new=new: b.reshape(x, new), lambda c, xs, new=new: xs[0].reshape(new)
            )
            for old, new in (((2, 3, 4), (6, 4)), ((12,), (1, 3, 2, 2)), ((1, 1), ()))
        ],
        "permute": [
            made(
                f"{dims}",
                shape,
                lambda b, x, dims=dims: b.permute(x, dims),
                lambda c, xs, dims=dims: xs[0].permute(dims),
            )
            for shape, dims in pairs
        ],
        "expand": [
            made(f"{old}-{new}", old, lambda b, x, new=new: b.expand(x, new), lambda c, xs, new=new: xs[0].expand(new))
            for old, new in (((1, 3), (4, 3)), ((3, 1), (2, 3, 5)), ((), (2, 2)), ((1, 4, 1), (3, 4, 2)))
        ],
        "concat": [
            emitted(f"dim{dim}", "concat", shapes, shape, lambda c, xs, dim=dim: torch.cat(list(xs), dim), dim=dim)
            for dim, shapes, shape in (
                (0, [(2, 3), (1, 3), (4, 3)], (7, 3)),
                (1, [(1, 2, 2), (1, 3, 2)], (1, 5, 2)),
                (2, [(2, 1, 3), (2, 1, 1)], (2, 1, 4)),
            )
        ],
        "index": index_cases(),
    }


def index_cases() -> list[Case]:
    table = {
        "gather": ((7,), torch.tensor([3, 3, 0, 6, 1])),
        "matrix": ((2, 3), torch.tensor([[5, 0], [0, 2], [4, 4]])),
        "holes": ((4,), torch.tensor([-1, 2, -1, 0, 3, -1])),
        "many-readers": ((3,), torch.cat([torch.zeros(20, dtype=torch.long), torch.tensor([1, 2, -1])])),
        "unread": ((5,), torch.tensor([4])),
        "scalar": ((5,), torch.tensor(2)),
        "nothing": ((3,), torch.tensor([-1, -1])),
    }
    cases = []
    for name, (shape, index) in table.items():
        fills: list[Const | float] = [0.0, -2.5, Const(values(*index.shape))] if bool((index < 0).any()) else [0.0]
        for position, fill in enumerate(fills):

            def reference(
                c: dict[str, Tensor], xs: Sequence[Tensor], index: Tensor = index, fill: Const | float = fill
            ) -> Tensor:
                taken = xs[0].flatten()[index.clamp(min=0)]
                value = fill.value if isinstance(fill, Const) else torch.tensor(fill)
                return torch.where(index < 0, value.to(taken.dtype), taken)

            make = lambda b, x, index=index, fill=fill: b.index(x, index, fill)  # noqa: E731
            cases.append(made(f"{name}{position}", shape, make, reference))
    return cases


def arithmetic_cases() -> dict[str, list[Case]]:
    def summed(c: dict[str, Tensor], xs: Sequence[Tensor], coefficients: Sequence[float]) -> Tensor:
        return sum(k * x for k, x in zip(coefficients, xs, strict=True))  # type: ignore[return-value]

    def scaled(c: dict[str, Tensor], xs: Sequence[Tensor]) -> Tensor:
        return xs[0] * c.get("factor", torch.tensor(1.0)) + c.get("shift", torch.tensor(0.0))

    shape = (2, 3, 2)
    return {
        "sum": [
            emitted(f"{k}", "sum", [shape] * len(k), shape, lambda c, xs, k=k: summed(c, xs, k), coefficients=k)
            for k in ((1.0, 1.0), (1.0, -1.0), (-0.5, 2.0, 0.0))
        ],
        "scale": [
            emitted(f"{list(consts)}{i}", "scale", [shape], shape, scaled, consts)
            for i, consts in enumerate((
                {"factor": values(2, 3, 2)},
                {"shift": values(2, 3, 2)},
                {"factor": values(3, 1), "shift": values(2)},
                {"factor": torch.tensor(-1.5), "shift": torch.tensor(1e3)},
                {"factor": torch.zeros(3, 1), "shift": values(2, 1, 1)},
            ))
        ],
        "reduce_sum": [
            made(f"{dims}", shape, lambda b, x, dims=dims: b.reduce_sum(x, dims, True),
                 lambda c, xs, dims=dims: xs[0].sum(dims, keepdim=True))
            for dims in ((0,), (1,), (0, 2), (0, 1, 2))
        ],
    }  # fmt: skip


def product_cases() -> dict[str, list[Case]]:
    def linear(c: dict[str, Tensor], xs: Sequence[Tensor]) -> Tensor:
        out = torch.einsum("...i,oi->...o", xs[0], c["weight"])
        return out + c["bias"] if "bias" in c else out

    def matmul(c: dict[str, Tensor], xs: Sequence[Tensor]) -> Tensor:
        return torch.matmul(c["left"], xs[0]) if "left" in c else torch.matmul(xs[0], c["right"])

    linears = [
        emitted(f"{lead}{'-bias' if bias else ''}", "linear", [(*lead, 4)], (*lead, 3), linear,
                {"weight": values(3, 4)} | ({"bias": values(3)} if bias else {}))
        for lead in ((), (1,), (2, 3)) for bias in (True, False)
    ]  # fmt: skip
    matmuls = [
        emitted(f"{role}{tuple(c.shape)}", "matmul", [shape], out, matmul, {role: c})
        for role, c, shape, out in (
            ("left", values(3, 2), (2, 4), (3, 4)),
            ("left", values(3, 2), (5, 2, 4), (5, 3, 4)),
            ("left", values(5, 3, 2), (5, 2, 1), (5, 3, 1)),
            ("right", values(5, 4, 2), (5, 3, 4), (5, 3, 2)),
            ("right", values(2, 1, 4, 2), (2, 3, 3, 4), (2, 3, 3, 2)),
        )
    ]
    sparses = [sparse_case(lead, bias) for lead in ((), (1,), (2, 3)) for bias in (True, False)]
    convs = [conv_case(**settings) for settings in CONVOLUTIONS]
    return {"linear": linears, "sparse": sparses, "matmul": matmuls, "conv": convs}


def sparse_case(lead: tuple[int, ...], bias: bool) -> Case:
    """A weight with rows of none, one, two and three entries, and columns of none to three."""
    weight = values(6, 5) * torch.tensor(
        [[1, 0, 0, 0, 0], [0, 1, 0, 1, 0], [0, 0, 0, 0, 0], [1, 0, 0, 1, 1], [0, 0, 0, 0, 1], [1, 0, 0, 0, 1]]
    )
    (places, factors), (back_places, back_factors) = tables(weight), tables(weight.T)
    consts = {"factors": factors, "back_factors": back_factors} | ({"bias": values(6, seed=4)} if bias else {})

    def reference(c: dict[str, Tensor], xs: Sequence[Tensor]) -> Tensor:
        out = xs[0] @ weight.T.to(xs[0].dtype)
        return out + c["bias"] if "bias" in c else out

    name = f"{lead}{'-bias' if bias else ''}"
    shape = (*lead, 6)
    return emitted(name, "sparse", [(*lead, 5)], shape, reference, consts, places=places, back_places=back_places)


CONVOLUTIONS: list[dict[str, Any]] = [
    {"space": (5,)},
    {"space": (7,), "stride": (2,), "padding": (1,), "bias": False},
    {"space": (9,), "stride": (3,), "dilation": (2,), "padding": (3,), "groups": 2},
    {"space": (5, 4)},
    {"space": (6, 5), "stride": (2, 1), "padding": (1, 2), "images": 2},
    {"space": (7, 8), "stride": (2, 3), "padding": (0, 1), "kernel": (3, 2)},
    {"space": (6, 6), "stride": (4, 4), "kernel": (2, 2)},
    {"space": (4, 4), "padding": (4, 3), "kernel": (2, 3)},
    {"space": (7, 7), "dilation": (2, 3), "kernel": (2, 2), "bias": False},
    {"space": (5, 5), "groups": 2, "padding": (1, 1), "stride": (2, 2)},
    {"space": (4, 3, 5), "kernel": (2, 2, 3), "padding": (1, 0, 1), "stride": (2, 1, 2)},
    {"space": (4, 4, 4), "kernel": (2, 1, 2), "groups": 2, "dilation": (1, 1, 2)},
    {"space": (4,), "transposed": True, "stride": (2,), "output_padding": (1,)},
    {"space": (3, 4), "transposed": True, "stride": (2, 3), "padding": (1, 1), "output_padding": (1, 2)},
    {"space": (3, 3), "transposed": True, "stride": (2, 2), "groups": 2, "bias": False},
    {"space": (4, 4), "transposed": True, "dilation": (2, 3), "output_padding": (1, 2), "kernel": (2, 2)},
    {"space": (3, 2, 3), "transposed": True, "stride": (2, 1, 2), "padding": (1, 0, 0), "kernel": (2, 2, 1)},
]


def conv_case(
    *,
    space: tuple[int, ...],
    kernel: tuple[int, ...] | None = None,
    stride: tuple[int, ...] | None = None,
    padding: tuple[int, ...] | None = None,
    dilation: tuple[int, ...] | None = None,
    groups: int = 1,
    transposed: bool = False,
    output_padding: tuple[int, ...] | None = None,
    bias: bool = True,
    images: int = 1,
) -> Case:
    """A convolution of 2 * groups channels to groups * (2 or 3) channels."""
    rank = len(space)
    ones, zeros = (1,) * rank, (0,) * rank
    kernel, stride, padding = kernel or (3,) * rank, stride or ones, padding or zeros
    dilation, output_padding = dilation or ones, output_padding or zeros
    c_in, per_group = 2 * groups, 3 if groups == 1 else 2
    weight = values(c_in, per_group, *kernel) if transposed else values(groups * per_group, c_in // groups, *kernel)
    consts = {"weight": weight} | ({"bias": values(groups * per_group, seed=4)} if bias else {})
    plain = (F.conv1d, F.conv2d, F.conv3d)[rank - 1]
    upward = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[rank - 1]

    def reference(c: dict[str, Tensor], xs: Sequence[Tensor]) -> Tensor:
        if transposed:
            return upward(xs[0], c["weight"], c.get("bias"), stride, padding, output_padding, groups, dilation)
        return plain(xs[0], c["weight"], c.get("bias"), stride, padding, dilation, groups)

    in_shape = (images, c_in, *space)
    shape = reference(consts, [torch.zeros(in_shape, dtype=torch.float64)]).shape
    name = f"{'T' if transposed else ''}{space}k{kernel}s{stride}p{padding}d{dilation}g{groups}o{output_padding}"
    return emitted(name, "conv", [in_shape], tuple(shape), reference, consts, stride=stride, padding=padding,
                   dilation=dilation, transposed=transposed, output_padding=output_padding, groups=groups)  # fmt: skip


def nonlinear_cases() -> dict[str, list[Case]]:
    shape = (2, 3)
    acts = [
        emitted(name, "act", [shape], shape, lambda c, xs, f=f: f(xs[0]), activation=ACTIVATIONS[name])
        for name, f in (("relu", torch.relu), ("tanh", torch.tanh), ("exp", torch.exp), ("square", torch.square))
    ]
    return {"act": acts, "mul": [emitted("mul", "mul", [shape, shape], shape, lambda c, xs: xs[0] * xs[1])]}


AFFINE: dict[str, list[Case]] = movement_cases() | arithmetic_cases() | product_cases()
NONLINEAR: dict[str, list[Case]] = nonlinear_cases()
