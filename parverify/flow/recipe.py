"""A space of branch and bound as something that can be sent: what another rank needs to bound the same domains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from parverify.bab.activation import ActivationSpace, BetaOptions
from parverify.bab.driver import Space
from parverify.bab.input import InputSpace
from parverify.bab.leaves import LeafDecider
from parverify.bounds.layers import BoundOptions, LayerBounds
from parverify.bounds.region import BoxRegion
from parverify.engine import Engine
from parverify.errors import ParverifyError
from parverify.ops.relaxation import Relaxations
from parverify.progress import Progress

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class InputRecipe:
    """Input splits.

    Args:
        options: how layers are bounded.
    """

    options: BoundOptions

    def make(self, engine: Engine, progress: Progress) -> Space:
        """The space over an engine of this rank."""
        del progress  # nothing is told
        return InputSpace(engine.problem, self.options, clock=engine.clock, confirm=engine.confirm)


@dataclass(frozen=True)
class ActivationRecipe:
    """Activation splits below one root; tensors are on the CPU.

    Args:
        options: how domains are bounded.
        region: lower and upper of the root's box.
        boxes: bounds of the root's layers.
        magnitudes: see `parverify.ops.relaxation.Relaxations`.
    """

    options: BetaOptions
    region: Pair
    boxes: Mapping[str, Pair]
    magnitudes: Mapping[str, Tensor]

    def make(self, engine: Engine, progress: Progress) -> Space:
        """The space over an engine of this rank."""
        graph, device = engine.executor.graph, engine.problem.boxes.lower.device

        def pair(low: Tensor, high: Tensor) -> Pair:
            return low.to(device), high.to(device)

        region = BoxRegion(*pair(*self.region))
        magnitudes = Relaxations({name: value.to(device) for name, value in self.magnitudes.items()})
        layers = LayerBounds(boxes={name: pair(*box) for name, box in self.boxes.items()}, relaxed=magnitudes)
        decider = LeafDecider(engine.problem, engine.network, region, engine.confirm, engine.clock, progress)
        return ActivationSpace(
            engine.problem,
            region,
            layers,
            self.options,
            clock=engine.clock,
            confirm=engine.confirm,
            decide=decider if graph.piecewise_linear else None,
        )


Recipe = InputRecipe | ActivationRecipe


def recipe_of(space: Space) -> Recipe:
    """What makes a space like this one elsewhere.

    Raises:
        ParverifyError: it is of a kind that can't be sent.
    """
    if isinstance(space, InputSpace):
        return InputRecipe(space.options)
    if isinstance(space, ActivationSpace) and isinstance(space.region, BoxRegion):
        low, high = space.region.box()
        boxes = {name: (box[0].cpu(), box[1].cpu()) for name, box in space.boxes.items()}
        magnitudes = {name: value.cpu() for name, value in space.magnitudes.items()}
        return ActivationRecipe(space.options, (low.cpu(), high.cpu()), boxes, magnitudes)
    raise ParverifyError(f"a space of kind {type(space).__name__} can't be searched by other ranks")
