"""What an elementwise operator means to a bound: its range on a box, its lines on a box, and where to cut the box.

All tensors are (D, *shape): D domains, elementwise. Bounds that are NaN or infinite, and boxes that leave the domain
of the function, give "nothing known" (or the global range of the function), never a finite wrong number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from parverify.ops.lines import Lines


@dataclass(frozen=True)
class Activation(ABC):
    """An elementwise function with its bounds.

    Args:
        name: the operator, as the table of activations spells it.
        fn: the function itself.
        piecewise_linear: True if cutting the box often enough makes the lines exact.
        recipe: the maker in `parverify.ops.activation` and its arguments, where it is no row of the table; so that an
            activation travels between processes by name, as functions can't.
    """

    name: str
    fn: Callable[[Tensor], Tensor]
    piecewise_linear: bool = False
    recipe: tuple[Any, ...] = ()

    def __reduce__(self) -> tuple[Callable[..., Activation], tuple[Any, ...]]:
        return _remade, (self.recipe or ("", self.name))

    @abstractmethod
    def interval(self, l: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """The tightest range of f on [l, u], up to rounding outward."""

    @abstractmethod
    def relax(self, l: Tensor, u: Tensor) -> Lines:
        """Lines that enclose f on [l, u]."""

    @abstractmethod
    def split_point(self, l: Tensor, u: Tensor) -> Tensor:
        """Where branch and bound cuts [l, u]; strictly inside where l < u, but the kink of ReLU is fixed."""

    @abstractmethod
    def gap(self, l: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """Largest distance on [l, u] of the default upper and of the default lower line from f; inf if unknown."""


def _remade(maker: str, *args: Any) -> Activation:
    """An activation from its recipe; the inverse of pickling."""
    from parverify.ops import activation

    if not maker:
        return activation.ACTIVATIONS[args[0]]
    return activation.MAKERS[maker](*args)
