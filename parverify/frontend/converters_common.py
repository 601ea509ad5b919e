"""What each of our operators is written with: one node's facts, and the row of the table.

An operator is a function of a `Call` (attributes, version, constant inputs) and of its input tensors. It is plain
torch: no in-place writes, nothing read back from tensors that depend on the network's input, and control flow on
shapes only, so that one run records all that the network does. Differences between operator-set versions are settled
inside the function, for models that onnx's own converter can't raise to a newer one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from parverify.errors import ModelError


@dataclass(frozen=True)
class Call:
    """One node of the model, as its operator's function sees it.

    Args:
        name: the node's name in the module.
        op: the operator.
        opset: the operator set that this version of the operator came with.
        attributes: attributes by name, as plain values.
        inputs: names of the values that it reads, '' where absent.
        shapes: of the inputs, None where not known.
        constant: positions of the constant inputs.
        static: constant inputs by position, those that the table asks for as values.
        numbers: the same, flat, as Python numbers, so that a run reads nothing back from tensors.
        n_outputs: how many outputs the node declares.
    """

    name: str
    op: str
    opset: int
    attributes: Mapping[str, Any] = field(default_factory=dict)
    inputs: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...] | None, ...] = ()
    constant: frozenset[int] = frozenset()
    static: Mapping[int, torch.Tensor] = field(default_factory=dict)
    numbers: Mapping[int, tuple[Any, ...]] = field(default_factory=dict)
    n_outputs: int = 1

    def get(self, name: str, default: Any = None) -> Any:
        """The attribute `name`, or `default`."""
        return self.attributes.get(name, default)

    def ints(self, name: str, position: int | None = None) -> list[int] | None:
        """Whole numbers from the constant input at `position`, else from the attribute `name`, else None."""
        if position is not None and position in self.numbers:
            return [int(value) for value in self.numbers[position]]
        value = self.attributes.get(name)
        if value is None:
            return None
        return [int(value)] if isinstance(value, int) else [int(part) for part in value]

    def number(self, name: str, position: int | None = None, default: Any = None) -> Any:
        """One number from the constant input at `position`, else from the attribute `name`, else `default`."""
        if position is not None and position in self.numbers:
            return self.numbers[position][0]
        return self.attributes.get(name, default)

    @property
    def rank(self) -> int:
        """Number of axes of the first input."""
        if not self.shapes or self.shapes[0] is None:
            self.refuse("the shape of its input can't be inferred")
        return len(self.shapes[0])

    def refuse(self, what: str) -> NoReturn:
        """Raise `ModelError` that names this node."""
        raise ModelError(f"node {self.name} ({self.op}): {what}")


Result = torch.Tensor | tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Operator:
    """A row of the table.

    Args:
        function: called with a `Call` and one tensor (or None) an input; static inputs are None.
        static: positions of inputs that must be constant, handed over in `Call.static`.
        inline: positions of inputs that are handed over in `Call.static` where they are constant.
        theirs: whether onnx2torch's converter serves for a node; ours is used where it doesn't. Never by default.
    """

    function: Callable[..., Result]
    static: tuple[int, ...] = ()
    inline: tuple[int, ...] = ()
    theirs: Callable[[Call], bool] = lambda call: False


def axis_of(axis: int, rank: int) -> int:
    """The axis counted from the front."""
    return axis + rank if axis < 0 else axis


def take(x: torch.Tensor, axis: int, index: Sequence[int]) -> torch.Tensor:
    """The entries `index` of x along `axis`, in that order; x itself where that is all of it."""
    if list(index) == list(range(x.shape[axis])):
        return x
    return x.index_select(axis, torch.tensor(list(index), dtype=torch.int64, device=x.device))


def along(x: torch.Tensor, axis: int, part: slice) -> torch.Tensor:
    """A slice of x along one axis counted from the front."""
    return x[(slice(None),) * axis + (part,)]
