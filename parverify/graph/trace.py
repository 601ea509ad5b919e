"""From a torch module to a BoundGraph: run it once on one instance and record the ATen operators.

The module runs on concrete numbers under a dispatch mode. Tensors that do not depend on the network's input are simply
computed, which folds all constants (shapes, masks, reshaped weights); every operator that touches the input is handed
to an importer, which writes kernel nodes. So ONNX models and users' own modules share a vocabulary of some hundred ATen
operators, and shape arithmetic never reaches the graph. What can't be imported is collected, and reported all at once.
Control flow on values of the input is refused, because one run would not show it. What the recorder can't see (memory
shared by views, values that leave torch) is refused where it is noticed, and a second run must agree with the graph.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from parverify.dispatch import DispatchMode
from parverify.errors import ModelError, UnsupportedOperatorError
from parverify.graph.builder import Builder, Value, Var
from parverify.graph.importers import IMPORTERS
from parverify.graph.ir import BoundGraph, Const, prune
from parverify.graph.simplify import simplify
from parverify.graph.sparsify import sparsify

ALIASED = (
    "a tensor is used after another view of its memory was changed in place; "
    "hint: use the out-of-place form of the operator"
)


class _Recorder(DispatchMode):
    """Follows every tensor by identity; `values` maps id(tensor) to what it is in the graph."""

    def __init__(self, builder: Builder) -> None:
        super().__init__()
        self.builder = builder
        self.values: dict[int, Value] = {}
        self.alive: list[Tensor] = []  # ids stay unique only while the tensors live
        self.refused: dict[int, str] = {}  # id(tensor) -> why the graph does not know its value
        self.written: set[int] = set()  # memory that in-place operators put values of the input into
        self.unsupported: list[tuple[str, str]] = []
        self._versions: dict[int, tuple[Tensor, int]] = {}

    def track(self, tensor: Tensor, value: Value) -> None:
        self.values[id(tensor)] = value
        self.alive.append(tensor)

    def lift(self, arg: Any) -> Any:
        """Tensors in `arg` replaced by graph values."""
        if isinstance(arg, Tensor):
            why = self.refused.get(id(arg))
            if why is None and id(arg) not in self.values and _memory(arg) in self.written:
                why = ALIASED
            if why is not None:
                raise ModelError(f"{self.builder.source or 'the network'}: {why}")
            return self.values.get(id(arg), Const(arg))
        if isinstance(arg, (list, tuple)):
            return type(arg)(self.lift(item) for item in arg)
        return arg

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        lifted = self.lift(args)
        extra = {key: self.lift(value) for key, value in kwargs.items()}
        touched = list(_values(lifted)) + list(_values(list(extra.values())))
        name = func.overloadpacket.__name__
        if not any(isinstance(value, Var) for value in touched):
            self._fold(func, out, lifted, extra, touched)
            return out
        importer = IMPORTERS.get(name)
        if importer is None and name.endswith("_") and not name.endswith("__"):
            importer = IMPORTERS.get(name[:-1])
        if importer is None:
            self._miss(func, out)
            return out
        with torch.no_grad():
            result = importer(self.builder, func, lifted, extra)
        self._versions.update(
            {
                id(value.value): (value.value, _version(value.value))
                for value in touched
                if isinstance(value, Const) and id(value.value) not in self._versions
            }
        )
        for tensor in _written(func, args, kwargs):
            self._overwrite(tensor)
        self._bind(func, out, result)
        return out

    def _fold(self, func: Any, out: Any, args: Any, kwargs: Any, touched: Sequence[Value]) -> None:
        """Remember how a constant came from parameters."""
        if not any(isinstance(value, Const) and value.trainable for value in touched):
            return
        for position, tensor in enumerate(out if isinstance(out, (list, tuple)) else [out]):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():

                def run(
                    flat: Any, names: Any, rest: Any, at: int = position, many: bool = isinstance(out, (list, tuple))
                ) -> Tensor:
                    result = func(*flat, **dict(zip(names, rest, strict=True)))
                    return result[at] if many else result

                recipe = (tuple(args), tuple(kwargs), tuple(kwargs.values()))
                self.track(tensor, Const(tensor.detach(), run, recipe))

    def _bind(self, func: Any, out: Any, result: Any) -> None:
        outs = out if isinstance(out, (list, tuple)) else [out]
        results = result if isinstance(result, (list, tuple)) else [result]
        for tensor, value in zip(outs, results, strict=False):
            if not isinstance(tensor, Tensor):
                continue
            self.refused.pop(id(tensor), None)
            if value is None:
                # Nobody knows what it depends on: an error only if the output does depend on it.
                value = self.builder.emit("opaque", [], tensor.shape, operator=str(func))
            shape = value.shape if isinstance(value, Var) else tuple(value.value.shape)
            if tuple(tensor.shape) != shape:
                raise ModelError(f"{self.builder.source}: importer of {func} gives {shape}, not {tuple(tensor.shape)}")
            self.track(tensor, value)

    def _overwrite(self, tensor: Tensor) -> None:
        """After an in-place write, other tensors on the same memory no longer hold what the graph says."""
        storage = _memory(tensor)
        self.written.add(storage)
        for other in [tensor, *self.alive]:
            if _memory(other) == storage:
                self.refused[id(other)] = ALIASED  # `_bind` takes the written tensor itself back
        self.alive.append(tensor)

    def check_constants(self) -> None:
        """Constants that the graph holds must still have the values that they were used with."""
        for tensor, version in self._versions.values():
            if _version(tensor) != version:
                raise ModelError(
                    f"a constant of shape {list(tensor.shape)} is changed in place after it was used",
                    "use the out-of-place form of the operator",
                )

    def _miss(self, func: Any, out: Any) -> None:
        """Note an operator without importer, and go on so that all are found in one run."""
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "unique"):
            raise ModelError(
                f"{self.builder.source or 'the network'}: control flow or shapes depend on values of the "
                f"input (aten::{name}), which bounds can't follow"
            )
        entry = (self.builder.source or "?", f"aten::{name}")
        if entry not in self.unsupported:
            self.unsupported.append(entry)
        for tensor in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(tensor, Tensor):
                self.track(tensor, self.builder.emit("unsupported", [], tensor.shape))


def _memory(tensor: Tensor) -> int:
    """The memory behind a tensor, shared by its views."""
    return tensor.untyped_storage().data_ptr() or id(tensor)


def _version(tensor: Tensor) -> int:
    """How often a tensor was written to."""
    return 0 if tensor.is_inference() else tensor._version


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that an operator writes to."""
    given = [*zip(func._schema.arguments, args, strict=False)]
    given += [(argument, kwargs[argument.name]) for argument in func._schema.arguments if argument.name in kwargs]
    return [
        value
        for argument, value in given
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor)
    ]


def _values(arg: Any) -> Iterator[Value]:
    if isinstance(arg, (Var, Const)):
        yield arg
    elif isinstance(arg, (list, tuple)):
        for item in arg:
            yield from _values(item)


@contextlib.contextmanager
def _named(module: nn.Module, builder: Builder) -> Iterator[None]:
    """While active, `builder.source` is the path of the innermost module that runs."""
    stack: list[str] = []
    handles = []
    for path, child in module.named_modules():
        label = f"{path or type(module).__name__} {type(child).__name__}".strip()

        def enter(_module: nn.Module, _args: Any, label: str = label) -> None:
            stack.append(label)
            builder.source = label

        def leave(_module: nn.Module, _args: Any, _out: Any) -> None:
            stack.pop()
            builder.source = stack[-1] if stack else ""

        handles += [child.register_forward_pre_hook(enter), child.register_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def trace(
    module: nn.Module, input_shape: Sequence[int], *, dtype: torch.dtype | None = None, example: Tensor | None = None
) -> BoundGraph:
    """Record `module` on one instance.

    Args:
        module: evaluated in eval mode; its mode is restored. It takes one tensor and returns one.
        input_shape: of one instance, the batch axis of 1 included if the network has one.
        dtype: of the input; default: that of the first floating parameter or buffer, else torch's default.
        example: the point to run on, `input_shape`; default: 0.5 everywhere. The module is also run on a second point,
            where graph and module must agree.

    Returns:
        The simplified graph.

    Raises:
        UnsupportedOperatorError: all operators that have no importer.
        ModelError: control flow on values, several outputs, or memory that is written to and read in another way.
    """
    tensors = [t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()]
    dtype = dtype or (tensors[0].dtype if tensors else torch.get_default_dtype())
    device = tensors[0].device if tensors else torch.device("cpu")
    point = torch.full(tuple(input_shape), 0.5) if example is None else example
    point = point.reshape(tuple(input_shape)).to(device, dtype)
    builder = Builder(input_shape)
    recorder = _Recorder(builder)
    for parameter in module.parameters():
        recorder.track(parameter, Const(parameter))
    recorder.track(point, builder.input)
    modes = [(part, part.training) for part in module.modules()]
    fastpath = torch.backends.mha.get_fastpath_enabled()
    module.eval()
    torch.backends.mha.set_fastpath_enabled(False)  # its fused kernel hides the operators
    try:
        with torch.no_grad(), _named(module, builder), recorder:
            out = module(point)
        if recorder.unsupported:
            raise UnsupportedOperatorError(recorder.unsupported)
        with torch.no_grad():
            second = torch.rand(point.shape, generator=torch.Generator().manual_seed(0)).to(point)
            expected = module(second.clone())  # a module may write to its input
    except RuntimeError as error:
        message = " ".join(str(error).split())
        raise ModelError(
            f"{builder.source or 'the network'} can't be run on an input of shape {list(input_shape)}: {message}"
        ) from error
    finally:
        for part, training in modes:
            part.training = training
        torch.backends.mha.set_fastpath_enabled(fastpath)
    recorder.check_constants()
    if isinstance(out, (list, tuple)) and len(out) == 1:
        out = out[0]
    if not isinstance(out, Tensor):
        raise ModelError(f"the network must return one tensor, not {type(out).__name__}")
    value = recorder.lift(out)
    if isinstance(value, Const):
        # A constant output is still a network: zero times the input plus the constant.
        value = builder.add(_constant_zero(builder, out.numel(), out.shape), value)
    graph = prune(builder.finish(value))
    for node in graph:
        if node.op == "opaque":
            raise ModelError(
                f"{node.source}: the output depends on a secondary result of {node.attrs['operator']}, such "
                "as indices or statistics, which bounds can't follow"
            )
    return _compared(sparsify(_finite(simplify(graph))), module, second, expected)


TOLERANCE = 1e-3  # of the largest output; rounding stays far below it


def _finite(graph: BoundGraph) -> BoundGraph:
    """The graph itself, unless a constant holds what is no finite number: nothing could be bounded."""
    for node in graph:
        for role, name in node.consts.items():
            if not bool(graph.constants[name].value.isfinite().all()):
                raise ModelError(f"{node.source or node.name}: the {role} has entries that are no finite numbers")
    return graph


def _compared(graph: BoundGraph, module: nn.Module, point: Tensor, expected: Any) -> BoundGraph:
    """The graph itself, unless it differs from the module at a point other than the one it was recorded on.

    What leaves torch and comes back (lists, numpy) is not recorded and would be a constant of the graph. Where the two
    differ, both are evaluated in float64 before that is said: rounding alone can make ill-conditioned networks differ.

    Raises:
        ModelError: it does.
    """
    if any(node.op == "act" and node.attrs["activation"].name in ("sign", "floor", "ceil", "round") for node in graph):
        return graph  # rounding may decide on which side of a jump a value is
    difference = _difference(graph, point, expected)
    if difference and point.dtype != torch.float64:
        exact, wide = copy.deepcopy(module).double(), point.double()
        with torch.no_grad():
            difference = _difference(graph, wide, exact(wide))
    if difference:
        raise ModelError(
            f"the recorded graph differs from the module by {difference:.3g} at a second point",
            "the output must follow from the input by tensor operators only",
        )
    return graph


def _difference(graph: BoundGraph, point: Tensor, expected: Any) -> float:
    """By how much graph and module differ beyond the tolerance, 0 where they agree."""
    from parverify.program.executor import Executor

    expected = expected[0] if isinstance(expected, (list, tuple)) else expected
    with torch.no_grad():
        out = Executor(graph, dtype=point.dtype, device=point.device).evaluate(point[None])[0]
    if out.shape != expected.shape:
        raise ModelError(
            f"the shape of the network's output depends on the values of its input: {list(out.shape)} and "
            f"{list(expected.shape)}"
        )
    known = out.isfinite() & expected.isfinite()
    difference = torch.where(known, out - expected, 0.0).abs()
    scale = torch.where(known, expected, 0.0).abs()
    if not difference.numel():
        return 0.0
    worst = float(difference.max())
    return worst if worst > TOLERANCE * float(scale.max()) + 1e-6 else 0.0


def _constant_zero(builder: Builder, numel: int, shape: Sequence[int]) -> Var:
    flat = builder.reshape(builder.input, (1, builder.input.numel))
    zero = builder.linear(flat, Const(torch.zeros(numel, builder.input.numel)), None)
    return builder.reshape(zero, tuple(shape))
