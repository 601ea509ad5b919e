"""The library: `verify` for verdicts, `compute_bounds` for bounds, and what the command line needs besides.

Torch modules and ONNX paths are taken alike. An ONNX network is compared with onnxruntime before anything is concluded
from it, and witnesses are replayed there; a torch module is its own original.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from parverify.bab.books import Books
from parverify.bab.identity import Keep, identify
from parverify.bounding import bounds_report
from parverify.bounds.layers import BoundOptions, bound_layers
from parverify.bounds.outputs import output_bounds
from parverify.bounds.region import BallRegion, BoxRegion, Region
from parverify.clock import Clock
from parverify.config import METHODS, Settings, make_settings
from parverify.errors import OutOfTimeError, UsageError
from parverify.frontend.query import Query
from parverify.graph.trace import trace
from parverify.loading import load_subject, share_subject
from parverify.ops.kernel import Box
from parverify.parallel.groups import check_groups
from parverify.parallel.world import World
from parverify.program.executor import Executor
from parverify.progress import NullProgress, Progress
from parverify.stages import Stages
from parverify.verdict import Result, Verdict
from parverify.verifier import Run

__all__ = ["BOUND_METHODS", "Bounds", "bounds_report", "compute_bounds", "supported_operators", "verify"]

BOUND_METHODS = tuple(method for method in METHODS if method not in ("auto", "beta-crown"))


# --- verify -----------------------------------------------------------------------------------------------------------


def verify(
    model: str | Path | nn.Module,
    spec: str | Path | Query,
    *,
    timeout: float | None = None,
    settings: Settings | None = None,
    clock: Clock | None = None,
    progress: Progress | None = None,
    input_shape: Sequence[int] | None = None,
    world: World | None = None,
    journal: str | Path | Keep | None = None,
    resume: str | Path | None = None,
    **options: Any,
) -> Result:
    """Decide whether the unsafe region of `spec` can be reached.

    Args:
        model: an ONNX file, or a torch module that maps one tensor to one tensor.
        spec: a VNN-LIB file, or a query.
        timeout: seconds from now; ignored where `clock` is given.
        settings: all settings; default ones if None.
        clock: the deadline.
        progress: who is told about the run.
        input_shape: of one instance, for a torch module; default (1, n_in).
        world: the ranks that work on it together; all of them call this with the same arguments, and only rank 0 reads
            the files. None for one process.
        journal: a new folder in which branch and bound is written down, so that it can be resumed; or all of a `Keep`.
        resume: a journal to go on from, and to go on writing.
        **options: single settings by dotted key with `__` for the dot, such as `alpha__iterations=50`,
            `method="crown"`.

    Returns:
        The verdict, with a witness exactly when it is `sat`.

    Raises:
        ParverifyError: the network, the property or a setting can't be used. Running out of time is a verdict.
    """
    settings = _with(settings, options)
    own = clock or Clock(float("inf") if timeout is None else float(timeout))
    progress, world = progress or NullProgress(), world or World()
    if settings.parallel.groups:
        check_groups(settings.parallel.groups, world.size)  # before any work, not when the search begins
    books = Books(world, _keep(journal, resume), lambda: identify(model, spec, settings), progress)
    try:
        subject, query = share_subject(
            world, settings, lambda: load_subject(model, spec, own, progress, settings, input_shape)
        )
        if not any(not part.empty_box for part in query):
            return Result(Verdict.UNSAT, reason="the unsafe region is empty")
        return Stages(Run(subject, query, settings, own, progress, world, books)).run()
    except OutOfTimeError as error:
        return Result(Verdict.TIMEOUT, reason=error.message)
    finally:
        books.close()


def _keep(journal: str | Path | Keep | None, resume: str | Path | None) -> Keep | None:
    if journal is not None and resume is not None:
        raise UsageError("give either a new journal or one to resume", "a journal that is resumed is also written")
    if resume is not None:
        return Keep(str(resume), resume=True)
    return journal if journal is None or isinstance(journal, Keep) else Keep(str(journal))


def _with(settings: Settings | None, options: dict[str, Any]) -> Settings:
    if not options:
        return settings or Settings()
    if settings is not None:
        raise UsageError("give either settings or single options, not both")
    return make_settings({key.replace("__", "."): value for key, value in options.items()})


# --- bounds -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bounds:
    """Bounds of a network's outputs over a region.

    Args:
        lower, upper: (D, *output shape), or (D, rows) with `C`; without the leading dimension if one region was given
            without it.
        layers: pre-activation bounds, node name -> (lower, upper), (D, *shape).
    """

    lower: Tensor
    upper: Tensor
    layers: dict[str, Box] = field(default_factory=dict)


def compute_bounds(
    model: str | Path | nn.Module | Executor,
    lower: Tensor | None = None,
    upper: Tensor | None = None,
    *,
    center: Tensor | None = None,
    eps: float | Tensor | None = None,
    norm: float = float("inf"),
    method: str = "crown",
    C: Tensor | None = None,
    differentiable: bool = False,
    input_shape: Sequence[int] | None = None,
    options: BoundOptions | None = None,
) -> Bounds:
    """Bounds of the outputs, or of the linear functionals `C` of them, over a box or a ball.

    Args:
        model: a torch module, an ONNX file, or an executor over a graph that was traced before.
        lower, upper: the box; the shape of the network's input, or (D, *input shape) for D boxes.
        center, eps, norm: a ball instead: radius `eps` around `center` in the L-infinity, L2 or L1 norm.
        method: "ibp", "crown-ibp", "crown" or "alpha-crown".
        C: (rows, n_out) or (D, rows, n_out) functionals of the flat output.
        differentiable: keep the autograd graph to the box (or centre) and to the module's parameters; not for
            alpha-crown, whose bounds come out of an optimization of their own.
        input_shape: of one instance; default: the shape of `lower` or `center`, with its first dimension as the batch
            axis if the module was written for batches.
        options: tile sizes and such; `method` wins over what they say.

    Returns:
        Sound bounds, with an allowance for rounding.
    """
    if method not in BOUND_METHODS:
        raise UsageError(f"unknown method {method!r}; allowed: {', '.join(BOUND_METHODS)}")
    if differentiable and method == "alpha-crown":
        raise UsageError("alpha-crown bounds are not differentiable", "use crown, crown-ibp or ibp for training")
    given = center if center is not None else lower
    if given is None or (center is None) == (lower is None) or (lower is not None and upper is None):
        raise UsageError("give either lower and upper, or center and eps")
    for name, value in (("lower", lower), ("upper", upper), ("center", center), ("C", C)):
        if value is not None and not (isinstance(value, Tensor) and value.is_floating_point()):
            raise UsageError(f"{name} must be a floating-point tensor", "torch.as_tensor(..., dtype=torch.float32)")
    executor = _executor(model, given, input_shape, differentiable)
    region, single = _region(executor, lower, upper, center, eps, norm)
    chosen = options or BoundOptions()
    chosen = BoundOptions(method, chosen.alpha, chosen.tile, chosen.intersect)
    n_out = executor.graph[executor.graph.output].numel
    if C is not None and (C.dim() not in (2, 3) or C.shape[-1] != n_out):
        raise UsageError(f"C must have shape (rows, {n_out}) or (domains, rows, {n_out}), not {list(C.shape)}")
    with torch.set_grad_enabled(differentiable):
        found = bound_layers(executor, region, chosen)
        low, high = output_bounds(executor, region, found, chosen, C)
    if single:
        low, high = low[0], high[0]
    return Bounds(low, high, dict(found.boxes))


def _executor(
    model: str | Path | nn.Module | Executor, given: Tensor, input_shape: Sequence[int] | None, live: bool
) -> Executor:
    if isinstance(model, Executor):
        return model
    if isinstance(model, nn.Module):
        shape = tuple(input_shape) if input_shape is not None else (1, *given.shape[1:])
        graph = trace(model, shape)
        return Executor(graph, dtype=given.dtype, device=given.device, live=live)
    from parverify.frontend.network import load_network

    network = load_network(Path(model))
    graph = trace(network.module, network.input_shape, dtype=network.dtype)
    return Executor(graph, dtype=given.dtype, device=given.device, live=live)


def _region(
    executor: Executor,
    lower: Tensor | None,
    upper: Tensor | None,
    center: Tensor | None,
    eps: float | Tensor | None,
    norm: float,
) -> tuple[Region, bool]:
    size = executor.graph.input.numel
    given = center if center is not None else lower
    if given is None:
        raise UsageError("a region is needed")
    if not given.numel() or given.numel() % size:
        raise UsageError(
            f"a region of shape {list(given.shape)} does not fit the network's input of shape "
            f"{list(executor.graph.input.shape)}"
        )
    single = given.numel() == size and given.dim() <= len(executor.graph.input.shape)
    if center is None:
        if lower is None or upper is None or lower.shape != upper.shape:
            raise UsageError("lower and upper must have the same shape")
        if not bool((lower <= upper).all()):
            raise UsageError("lower must not exceed upper anywhere, and neither may be NaN")
        return BoxRegion(lower.reshape(-1, size), upper.reshape(-1, size)), single
    if eps is None:
        raise UsageError("a ball needs eps")
    flat = center.reshape(-1, size)
    radius = torch.as_tensor(eps, dtype=flat.dtype, device=flat.device).expand(flat.shape[0])
    if not bool((radius >= 0).all()):
        raise UsageError("eps must not be negative")
    if norm == float("inf"):
        return BoxRegion(flat - radius[:, None], flat + radius[:, None]), single
    return BallRegion(flat, radius, norm), single


def supported_operators() -> list[str]:
    """Names of the ONNX operators that can be verified."""
    from parverify.frontend.network import OPERATORS

    return sorted(OPERATORS)
