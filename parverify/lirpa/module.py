"""`shard`: an auto_LiRPA `BoundedModule` whose bounds are computed by parverify, divided over ranks.

What comes back is of a subclass of `BoundedModule` and shares all state with the module that was given. Calls of
`compute_bounds` that parverify can divide go through its engine; all others go to auto_LiRPA itself, on every rank, and
the log says why, once a reason. Gradients of divided bounds are auto_LiRPA's: the backward pass repeats the call there.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from parverify.errors import ModelError, UsageError
from parverify.lirpa.compat import lirpa
from parverify.lirpa.divided import Divided, Found
from parverify.lirpa.graphs import from_bounded_module
from parverify.lirpa.probe import alphas_move
from parverify.lirpa.ranks import comm_of
from parverify.lirpa.request import Request, UndividedError, input_of, method_of, understand
from parverify.parallel.comm import Comm
from parverify.strategy.directives import Strategy, load_strategy

_LOG = logging.getLogger("parverify.lirpa")

ALIKE: Mapping[str, frozenset[str]] = {
    "BoundRelu": frozenset({"ibp", "crown-ibp", "crown", "alpha-crown"}),
    "BoundLeakyRelu": frozenset({"ibp", "crown-ibp", "crown", "alpha-crown"}),
    **dict.fromkeys(("BoundSigmoid", "BoundTanh", "BoundExp", "BoundLog", "BoundSoftplus"), frozenset({"ibp"})),
}
"""Nonlinear operators that are bounded here as they are there, by method."""


def shard(
    bounded_module: Any,
    strategy: str | Strategy = "fold",
    mesh: Any = None,
    *,
    own_relaxations: bool = False,
    allowance: float = 0.0,
) -> Any:
    """The module with its bounds divided over ranks; every rank calls this.

    Args:
        bounded_module: an `auto_LiRPA.BoundedModule`, the same on all ranks.
        strategy: a preset's name, a TOML file, or a strategy.
        mesh: the ranks: a `DeviceMesh` (its axis `shard`, or its only one), a process group, or a `Comm`; None for all
            ranks there are, one where there are no others.
        own_relaxations: also divide networks with operators that parverify relaxes in another way than auto_LiRPA
            (anything but ReLU and leaky ReLU); bounds are then sound but not auto_LiRPA's.
        allowance: for rounding, in units in the last place; 0 gives auto_LiRPA's own digits, which have none.

    Returns:
        An instance of a subclass of `BoundedModule` that shares its state with `bounded_module`.

    Raises:
        UsageError: it is no `BoundedModule`, or the strategy or the mesh can't be used.
    """
    if not isinstance(bounded_module, lirpa().bounded_module):
        raise UsageError(f"shard needs an auto_LiRPA BoundedModule, not a {type(bounded_module).__name__}")
    if isinstance(bounded_module, Sharding):
        bounded_module = bounded_module.original
    chosen = strategy if isinstance(strategy, Strategy) else load_strategy(strategy)
    base: Any = type(bounded_module)
    sharded: Any = object.__new__(_sharded_class(base))
    object.__setattr__(sharded, "__dict__", bounded_module.__dict__)
    object.__setattr__(
        sharded, "_engine", _Engine(bounded_module, chosen, comm_of(mesh, bounded_module), own_relaxations, allowance)
    )
    return sharded


@functools.cache
def _sharded_class(base: Any) -> Any:
    """A subclass of the module's own class; what is ours lives in a slot, outside of the state that is shared."""
    return type(f"Sharded{base.__name__}", (Sharding, base), {"__slots__": ("_engine",), "__module__": __name__})


class Sharding:
    """What a sharded module does differently."""

    _engine: _Engine

    @property
    def original(self) -> Any:
        """The module of auto_LiRPA that shares its state."""
        return self._engine.bounded

    def compute_bounds(self, *args: Any, **kwargs: Any) -> Any:
        """Bounds as auto_LiRPA's method of this name gives them; see there for the arguments."""
        return self._engine.compute_bounds(args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._engine.copied(memo)

    def __reduce_ex__(self, _protocol: Any) -> Any:
        raise TypeError("a sharded module belongs to its ranks and can't be pickled; pickle its `original`")


class _Engine:
    """What stands behind a sharded module: its network as it was last divided, and what the log was told."""

    def __init__(self, bounded: Any, strategy: Strategy, comm: Comm, own_relaxations: bool, allowance: float) -> None:
        self.bounded = bounded
        self._strategy, self._comm, self._own, self._ulps = strategy, comm, own_relaxations, allowance
        self._signature = inspect.signature(type(bounded).compute_bounds)
        self._defaults = {name: parameter.default for name, parameter in self._signature.parameters.items()}
        self._divided: Divided | None = None
        self._state: tuple[Any, ...] | None = None
        self._refusal: str | None = None
        self._told: set[str] = set()

    def copied(self, memo: dict[int, Any]) -> Any:
        other = copy.deepcopy(self.bounded, memo)
        return shard(other, self._strategy, self._comm, own_relaxations=self._own, allowance=self._ulps)

    # --- a call ----------------------------------------------------------------------------------------------------

    def compute_bounds(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = self._signature.bind(self.bounded, *args, **kwargs)
        call.apply_defaults()
        given = dict(call.arguments)
        try:
            request = understand(self.bounded, given, self._defaults, lirpa().module.PerturbationLpNorm)
            state, changed = self._changes()
            del given["self"]
            given["x"] = (input_of(self.bounded, given["x"]),)  # as it is now, for a backward pass that comes later
            self._set_input(given["x"])
            divided = self._network(request, state, changed())
        except UndividedError as reason:
            return self._theirs(str(reason), args, kwargs)
        if request.method == "alpha-crown":
            alphas_move()
        found = divided.bounds(request)
        self._leave(divided, request, found)
        found.agreed()
        if request.method == "alpha-crown" or not torch.is_grad_enabled():
            return found.lower, found.upper
        return self._differentiable(request, found, given)

    def _theirs(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call as auto_LiRPA runs it, on every rank."""
        if reason not in self._told and self._comm.rank == 0:
            _LOG.warning("not divided, runs in auto_LiRPA on every rank: %s", reason)
        self._told.add(reason)
        call = self._signature.bind(self.bounded, *args, **kwargs)
        try:
            if method_of(call.arguments) == "alpha-crown":
                alphas_move()
        except UndividedError:
            pass  # a method that has no alphas
        return self.bounded.compute_bounds(*args, **kwargs)

    # --- the network -----------------------------------------------------------------------------------------------

    def _changes(self) -> tuple[tuple[Any, ...], Callable[[], bool]]:
        """The state of the weights, and whether any rank's has changed since they were divided.

        All ranks are asked; what is returned waits for their answers, so that other work can be done until then.
        """
        state = self._fingerprint()
        mine = torch.tensor([state != self._state])
        everywhere = mine.new_empty(self._comm.size)
        pending = self._comm.all_gather(everywhere, mine)

        def answers() -> bool:
            pending.wait()
            return bool(everywhere.any())

        return state, answers

    def _network(self, request: Request, state: tuple[Any, ...], changed: bool) -> Divided:
        """The network as its weights are now, divided.

        Args:
            request: what is asked for.
            state: of this rank's weights.
            changed: whether a weight has changed on any rank.

        Raises:
            UndividedError: it can't be recorded, or its relaxations are not those of auto_LiRPA.
        """
        if changed:
            self._divided, self._refusal = None, None
            try:
                graph = from_bounded_module(self.bounded)
                self._divided = Divided(graph, self.bounded, self._strategy, self._comm, self._ulps)
            except ModelError as error:
                self._refusal = str(error)
            self._state = state
        if self._divided is None:
            raise UndividedError(self._refusal or "the network")
        if request.shape != self._divided.graph.input.shape[1:]:
            raise UndividedError(f"input of shape {list(request.shape)}")
        if not self._own:
            self._check_relaxations(self._divided, request.method)
        return self._divided

    def _fingerprint(self) -> tuple[Any, ...]:
        """Changes when a weight does."""
        with torch.no_grad():
            return tuple((t.data_ptr(), t._version, _sum_of_bits(t)) for t in _tensors(self.bounded))

    @staticmethod
    def _check_relaxations(divided: Divided, method: str) -> None:
        kinds = {node.source.rpartition(" ")[2] for node in divided.graph.nonlinear}
        other = sorted(kind for kind in kinds if method not in ALIKE.get(kind, ()))
        if other:
            raise UndividedError(f"{method} of {', '.join(other)} is another one in parverify (own_relaxations=True)")

    # --- what a call leaves behind ---------------------------------------------------------------------------------

    def _set_input(self, x: tuple[Tensor, ...]) -> None:
        """Make `x` the module's input, as a call of auto_LiRPA does."""
        setter = getattr(self.bounded, "set_input", None) or self.bounded._set_input
        setter(*x)

    def _leave(self, divided: Divided, request: Request, found: Found) -> None:
        """Bounds where auto_LiRPA's users look for them: on its nodes."""
        bounded = self.bounded
        final = bounded[bounded.final_name]
        if request.method == "ibp":
            bounded.ibp_lower, bounded.ibp_upper = found.lower, found.upper
        if request.C is None or request.method != "ibp":
            final.lower, final.upper = found.lower, found.upper
        for node in divided.graph.nonlinear:
            name = node.source.rpartition(" ")[0]
            theirs = bounded._modules.get(name)
            box = found.boxes[node.inputs[0]]
            if theirs is None or type(theirs).__name__ not in ALIKE or len(theirs.inputs) != 1:
                continue
            before = theirs.inputs[0]
            shape = tuple(getattr(before, "output_shape", None) or ())[1:]
            if torch.Size(shape).numel() == box[0][0].numel():
                before.lower, before.upper = (side.reshape(-1, *shape) for side in box)
                before.interval = (before.lower, before.upper)

    def _differentiable(
        self, request: Request, found: Found, given: dict[str, Any]
    ) -> tuple[Tensor | None, Tensor | None]:
        """The bounds, with auto_LiRPA's gradients."""
        holders = [node for node in self.bounded._modules.values() if isinstance(getattr(node, "param", None), Tensor)]
        for node in holders:
            node.forward()  # decides whether its weight trains
        leaves = (*(node.param for node in holders if node.param.requires_grad), *request.differentiable)
        if not leaves:
            return found.lower, found.upper
        sides = [side for side in (found.lower, found.upper) if side is not None]
        attached = _Attached.apply(self, given, sides, *leaves)
        lower = attached[0] if request.lower else None
        return lower, attached[-1] if request.upper else None

    def gradients(self, given: dict[str, Any], leaves: list[Tensor], incoming: list[Tensor | None]) -> list[Any]:
        """Gradients of the bounds by the leaves, from a call of auto_LiRPA on every rank."""
        reason = "gradients of bounds"
        if reason not in self._told and self._comm.rank == 0:
            _LOG.warning("not divided, runs in auto_LiRPA on every rank: %s", reason)
        self._told.add(reason)
        with torch.enable_grad():
            sides = [side for side in self.bounded.compute_bounds(**given) if side is not None]
            pairs = [(s, g) for s, g in zip(sides, incoming, strict=True) if g is not None and s.requires_grad]
            if not pairs:
                return [None] * len(leaves)
            outputs, wanted = zip(*pairs, strict=True)
            return list(torch.autograd.grad(outputs, leaves, wanted, allow_unused=True))


def _tensors(module: Any) -> Iterator[Tensor]:
    """Parameters and buffers, in a tenth of the time that `Module.parameters` takes."""
    for some in (module._parameters, module._buffers):
        yield from (tensor for tensor in some.values() if tensor is not None)
    for inner in module._modules.values():
        if inner is not None:
            yield from _tensors(inner)


def _sum_of_bits(tensor: Tensor) -> float:
    """Changes with any entry: the sum of the bits as whole numbers, many times faster than one in float64."""
    plain = tensor.is_contiguous() and tensor.is_floating_point()
    size = tensor.element_size()
    if not plain or tensor.nbytes % 8 or tensor.storage_offset() * size % 8:
        return float(tensor.sum(dtype=torch.float64))
    return int(tensor.detach().reshape(-1).view(torch.int64).sum())


class _Attached(torch.autograd.Function):
    """Bounds that were computed without autograd; the backward pass lets auto_LiRPA differentiate them."""

    @staticmethod
    def forward(ctx: Any, engine: _Engine, given: dict[str, Any], sides: list[Tensor], *leaves: Tensor) -> Any:
        ctx.engine, ctx.given, ctx.leaves = engine, given, leaves
        return tuple(side.clone() for side in sides)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor | None) -> Any:
        return (None, None, None, *ctx.engine.gradients(ctx.given, list(ctx.leaves), list(incoming)))
