"""auto_LiRPA's operators over weights that are divided over ranks: its own propagation runs, ours only brings weights.

A divided weight leaves a placeholder behind: NaNs of the whole shape in the memory of one, so that whatever only asks
for shapes still works and whatever would read it is seen. An operator puts the real weight in its place for the time of
one call. Under `FSDP...` all ranks gather it, and autograd remembers to gather it again rather than the weight itself;
where they hold it together and nothing is recorded, they read it in place, and wait for each other before and after it.
Under `TPBoundLinear` each rank multiplies its output features, and coefficients are summed (the two parallelisms of
arXiv:2606.09377). auto_LiRPA asks `type(node) == BoundLinear`; the metaclass lets a subclass answer yes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from copy import copy as copy_of
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parverify.lirpa.compat import lirpa
from parverify.parallel.collectives import copy, total
from parverify.parallel.comm import Comm
from parverify.parallel.window import Together
from parverify.program.steps import even

# --- how a weight lies on the ranks -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """One weight, divided.

    Args:
        comm: the ranks.
        shape: of the whole.
        rows: ranks hold ranges of its dim 0; otherwise equal ranges of its entries.
    """

    comm: Comm
    shape: torch.Size
    rows: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Layout:
        """A copy of a module lies on the same ranks."""
        return self

    @property
    def counts(self) -> tuple[int, ...]:
        """Rows of every rank."""
        return tuple(even(self.shape[0], self.comm.size))

    @property
    def mine(self) -> tuple[int, int]:
        """This rank's range of rows: first and how many."""
        return sum(self.counts[: self.comm.rank]), self.counts[self.comm.rank]

    def share(self, whole: Tensor) -> Tensor:
        """This rank's part of a weight; entries are padded, so that all ranks hold as many."""
        if self.rows:
            return whole.detach().narrow(0, *self.mine).clone()
        flat = whole.detach().reshape(-1)
        each = -(-flat.numel() // self.comm.size)
        part = flat.new_zeros(each)
        here = flat[self.comm.rank * each : (self.comm.rank + 1) * each]
        part[: len(here)] = here
        return part

    def gather(self, part: Tensor) -> Tensor:
        """The whole weight from all ranks' parts, in fresh memory."""
        part = part.detach()
        if not self.rows:
            out = part.new_empty(self.comm.size * len(part))
            self.comm.all_gather(out, part).wait()
            return out[: self.shape.numel()].view(self.shape)
        return _behind_each_other(part, self.counts, self.comm)

    def own(self, gradient: Tensor) -> Tensor:
        """This rank's part of a gradient that all ranks have; they all compute the same."""
        return self.share(gradient)


def _behind_each_other(part: Tensor, counts: Sequence[int], comm: Comm) -> Tensor:
    """All ranks' parts along dim 0, of different sizes."""
    most = max(counts)
    padded = part.contiguous()
    if len(part) < most:
        padded = part.new_zeros(most, *part.shape[1:])
        padded[: len(part)] = part
    out = part.new_empty(comm.size * most, *part.shape[1:])
    comm.all_gather(out, padded).wait()
    if min(counts) == most:
        return out
    return torch.cat([piece[:count] for piece, count in zip(out.split(most), counts, strict=True)])


class _Whole(torch.autograd.Function):
    """A gathered weight; of its gradient, which every rank has, each keeps its part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, layout: Layout) -> Tensor:
        ctx.layout = layout
        return layout.gather(part)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.layout.own(gradients[0]), None


class _Collect(torch.autograd.Function):
    """Ranges of the last dim behind each other; of the gradient, which every rank has, each keeps its range."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, layout: Layout) -> Tensor:
        ctx.mine = layout.mine
        first = part.movedim(-1, 0).contiguous()
        return _behind_each_other(first, layout.counts, layout.comm).movedim(0, -1).contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0].narrow(-1, *ctx.mine), None


def placeholder(whole: Tensor) -> Tensor:
    """NaNs of the same shape, dtype and device that take the memory of one."""
    return torch.full((), torch.nan, dtype=whole.dtype, device=whole.device).expand(whole.shape)


# --- classes ----------------------------------------------------------------------------------------------------------


class _SameAsBase(type):
    """Makes a subclass compare equal to the operator that it stands in for."""

    stands_for: type

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.stands_for

    def __hash__(cls) -> int:
        return hash(cls.stands_for)


_GATHERED: ContextVar[bool] = ContextVar("gathered", default=False)


@contextmanager
def gathered() -> Iterator[None]:
    """Within this context weights are gathered into memory that may be kept, never lent."""
    token = _GATHERED.set(True)
    try:
        yield
    finally:
        _GATHERED.reset(token)


class Near:
    """A weight that the ranks of one machine hold together. A copy of the module has parts of its own.

    Args:
        both: the memory.
    """

    def __init__(self, both: Together) -> None:
        self._both = both

    def whole(self, part: Tensor, shape: torch.Size) -> Tensor | None:
        """The weight; None where the parameter was given other memory since, and `part` is no part of it."""
        mine = self._both.part
        if (part.data_ptr(), part.dtype, part.shape) != (mine.data_ptr(), mine.dtype, mine.shape):
            return None
        return self._both.whole[: shape.numel()].view(shape)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()


class DividedParams:
    """A parameter node that holds this rank's part; its value is a placeholder.

    Attributes:
        near: the whole, where the ranks of one machine hold it together. Whoever reads it must know that no rank
            changes its part meanwhile.
    """

    layout: Layout
    near: Near | None = None
    hollow: Tensor
    param: Any

    def forward(self) -> Tensor:
        super().forward()  # type: ignore[misc]  # decides whether the parameter trains
        return self.hollow

    @contextmanager
    def lent(self) -> Iterator[tuple[Tensor, bool]]:
        """The weight while this is active, on all ranks; and whether it is only lent, so that nothing may keep it.

        Gathered, a gradient reaches this rank's part.
        """
        near = None if torch.is_grad_enabled() or _GATHERED.get() else self.near  # alike on all ranks
        whole = None if near is None else near.whole(self.param, self.layout.shape)
        if near is None or self.layout.comm.all_max(int(whole is None)) or whole is None:
            yield _Whole.apply(self.param, self.layout), False
            return
        try:
            yield whole, True
        finally:
            self.layout.comm.barrier()  # now ranks may change their parts


@dataclass(frozen=True)
class Source:
    """Where an operator's weight comes from.

    Args:
        params: the parameter node.
        between: nodes that move its entries around, in order.
        node: the operator's input: the last of them, or the parameter node.
    """

    params: Any
    between: tuple[Any, ...]
    node: Any

    def through(self, weight: Tensor) -> Tensor:
        """What the operator's input is for a weight."""
        for node in self.between:
            weight = type(node).forward(node, weight, *(before.forward_value for before in node.inputs[1:]))
        return weight


VALUES = ("lower", "upper", "value", "forward_value", "center")
"""Attributes under which nodes keep constants."""


class Gathering:
    """An operator whose weight is gathered before each use and freed after it."""

    source: Source | None = None

    def forward(self, *x: Any) -> Any:
        return self._with_weight(super().forward, (), x, {})  # type: ignore[misc]

    def interval_propagate(self, *v: Any, **options: Any) -> Any:
        return self._with_weight(super().interval_propagate, (), v, options)  # type: ignore[misc]

    def bound_backward(self, last_lA: Any, last_uA: Any, *x: Any, **options: Any) -> Any:
        return self._with_weight(super().bound_backward, (last_lA, last_uA), x, options)  # type: ignore[misc]

    def bound_forward(self, dim_in: Any, *x: Any, **options: Any) -> Any:
        return self._with_weight(super().bound_forward, (dim_in,), x, options)  # type: ignore[misc]

    def bound_dynamic_forward(self, *x: Any, **options: Any) -> Any:
        return self._with_weight(super().bound_dynamic_forward, (), x, options)  # type: ignore[misc]

    def build_solver(self, *v: Any, **options: Any) -> Any:
        return self._with_weight(super().build_solver, (), v, options)  # type: ignore[misc]

    def _with_weight(
        self, method: Callable[..., Any], first: tuple[Any, ...], given: Sequence[Any], options: dict[str, Any]
    ) -> Any:
        """Call a method of auto_LiRPA's operator while the weight is there, and in `given` for the placeholder."""
        if self.source is None:
            return method(*first, *given, **options)
        with self.source.params.lent() as (whole, lent):
            value = self.source.through(whole)
            with _in_place(self, self.source, value, whole) as filled, _forgotten(self.source, whole):
                result = method(*first, *filled(given), **options)
            return _kept(result, whole) if lent else result


def _filled(argument: Any, hollow: Tensor, value: Tensor) -> Any:
    """An argument of an operator with the placeholder replaced; no closure, whose cycle would keep the weight alive."""
    if isinstance(argument, Tensor):
        return value if _shares(argument, hollow) else argument
    if type(argument) is tuple:
        return tuple(_filled(part, hollow, value) for part in argument)
    if type(argument).__name__ == "LinearBound":
        argument = copy_of(argument)
        for name, part in vars(argument).items():
            setattr(argument, name, _filled(part, hollow, value))
    return argument


@contextmanager
def _in_place(
    operator: Any, source: Source, value: Tensor, memory: Tensor
) -> Iterator[Callable[[Sequence[Any]], list[Any]]]:
    """Put `value` where the operator looks for its weight, and take it away again."""
    hollow = source.params.hollow
    node = source.node

    before = {name: getattr(node, name, None) for name in VALUES}
    held = {name: tensor for name, tensor in before.items() if isinstance(tensor, Tensor) and _shares(tensor, hollow)}
    for name in held:
        setattr(node, name, value)
    try:
        yield lambda arguments: [_filled(argument, hollow, value) for argument in arguments]
    finally:
        for name, tensor in held.items():
            setattr(node, name, tensor)
        for name, tensor in list(vars(operator).items()):
            if isinstance(tensor, Tensor) and _shares(tensor, memory):
                setattr(operator, name, source.through(hollow))


def _kept(result: Any, lent: Tensor) -> Any:
    """What an operator gave, with copies of whatever lies in a weight that is only lent."""
    if isinstance(result, Tensor):
        return result.clone() if _shares(result, lent) else result
    if isinstance(result, (tuple, list)):
        parts = [_kept(part, lent) for part in result]
        if all(part is before for part, before in zip(parts, result, strict=True)):
            return result  # auto_LiRPA tells coefficients of the same neurons by the identity of their index
        return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)
    if type(result).__name__ in ("LinearBound", "Patches"):
        for name, part in vars(result).items():
            setattr(result, name, _kept(part, lent))
    return result


def _shares(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors lie in the same memory."""
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _forgotten(source: Source, whole: Tensor) -> Any:
    """While active, autograd keeps of a gathered weight only where in it a tensor lies, and gathers it anew."""
    if not torch.is_grad_enabled():
        return nullcontext()
    start = whole.untyped_storage().data_ptr()

    def pack(tensor: Tensor) -> Any:
        if tensor.untyped_storage().data_ptr() != start:
            return tensor
        return tensor.size(), tensor.stride(), tensor.storage_offset()

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        gathered = source.params.layout.gather(source.params.param)
        return gathered.as_strided(*packed)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


class Splitting(Gathering):
    """A linear operator that multiplies only this rank's output features; what has no such form gathers the weight."""

    def forward(self, x: Any, w: Any, b: Any = None) -> Any:
        if not self._splits():
            return super().forward(*((x, w) if b is None else (x, w, b)))
        layout = self.layout
        bias = None if b is None else b.narrow(0, *layout.mine)
        part = self._plain("forward")(copy(x, layout.comm), self._part(), *(() if bias is None else (bias,)))
        return _Collect.apply(part, layout)

    def interval_propagate(self, *v: Any, **options: Any) -> Any:
        if not self._splits() or any(value is not None for value in options.values()):
            return super().interval_propagate(*v, **options)
        layout, part = self.layout, self._part()
        bias = [tuple(side.narrow(0, *layout.mine) for side in v[2])] if len(v) == 3 else []
        sides = self._plain("interval_propagate")(v[0], (part, part), *bias)
        lower, upper = _Collect.apply(torch.stack(list(sides)), layout)
        return lower, upper

    def bound_backward(self, last_lA: Any, last_uA: Any, *x: Any, **options: Any) -> Any:
        given = [A for A in (last_lA, last_uA) if A is not None]
        if not self._splits() or not given or any(type(A) is not Tensor for A in given):
            return super().bound_backward(last_lA, last_uA, *x, **options)
        layout = self.layout
        mine = [None if A is None else copy(A, layout.comm).narrow(-1, *layout.mine) for A in (last_lA, last_uA)]
        with _parts_in_place(x, self._part(), layout):
            pairs, lower, upper = self._plain("bound_backward")(*mine, *x, **options)
        summed = [tuple(_total(part, layout) for part in pairs[0]), *pairs[1:]]
        return summed, _total(lower, layout), _total(upper, layout)

    @property
    def layout(self) -> Layout:
        """Of the weight."""
        if self.source is None:
            raise TypeError("the operator's weight is not divided")
        found: Layout = self.source.params.layout
        return found

    def _splits(self) -> bool:
        return self.source is not None and self.layout.rows

    def _part(self) -> Tensor:
        part: Tensor = self.source.params.param  # type: ignore[union-attr]
        return part

    def _plain(self, name: str) -> Callable[..., Any]:
        """The method of auto_LiRPA's own operator."""
        method: Callable[..., Any] = getattr(type(self).stands_for, name).__get__(self)  # type: ignore[attr-defined]
        return method


@contextmanager
def _parts_in_place(x: Sequence[Any], weight: Tensor, layout: Layout) -> Iterator[None]:
    """While active, the nodes of weight and bias hold this rank's output features."""
    sides = [(x[1], weight)] + [(node, node.lower.narrow(0, *layout.mine)) for node in x[2:]]
    before = [(node, node.lower, node.upper) for node, _ in sides]
    for node, value in sides:
        node.lower = node.upper = value
    try:
        yield
    finally:
        for node, lower, upper in before:
            node.lower, node.upper = lower, upper


def _total(part: Any, layout: Layout) -> Any:
    return total(part, layout.comm) if isinstance(part, Tensor) else part


KINDS: dict[str, tuple[type, str]] = {
    "FSDPBoundParams": (DividedParams, "BoundParams"),
    "FSDPBoundLinear": (Gathering, "BoundLinear"),
    "FSDPBoundMatMul": (Gathering, "BoundMatMul"),
    "FSDPBoundConv": (Gathering, "BoundConv"),
    "FSDPBoundConvTranspose": (Gathering, "BoundConvTranspose"),
    "TPBoundLinear": (Splitting, "BoundLinear"),
}
"""Name of a subclass -> what it adds, to which operator of auto_LiRPA."""


@functools.cache
def operator(name: str) -> Any:
    """The subclass of that name; None where auto_LiRPA's version has no such operator."""
    added, base_name = KINDS[name]
    base = lirpa().operator(base_name)
    if base is None:
        return None
    return _SameAsBase(name, (added, base), {"stands_for": base, "__module__": __name__})
