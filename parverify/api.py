"""The library: `verify` for verdicts, `compute_bounds` for bounds, and what the command line needs besides.

Torch modules and ONNX paths are taken alike. An ONNX network is compared with onnxruntime before anything is concluded
from it, and witnesses are replayed there; a torch module is its own original.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from parverify.bounds.alpha import AlphaOptions, optimize
from parverify.bounds.joint import joint_bounds
from parverify.bounds.layers import BoundOptions, LayerBounds, bound_layers
from parverify.bounds.region import BallRegion, BoxRegion, Region, outward_box
from parverify.budget import make_budget
from parverify.clock import Clock
from parverify.config import METHODS, Settings, make_settings
from parverify.engine import Subject, shared_replay
from parverify.errors import OutOfTimeError, ParverifyError, SpecError, UsageError
from parverify.frontend.query import Query
from parverify.graph.ir import BoundGraph
from parverify.graph.trace import trace
from parverify.ops.kernel import Box
from parverify.ops.places import Counts, counting
from parverify.ops.rounding import ULPS, allowance
from parverify.parallel.shared import from_first, from_rank
from parverify.parallel.world import World
from parverify.program.division import Division, divide
from parverify.program.executor import Executor
from parverify.program.rows import Dense, Tiled, both_signs
from parverify.program.steps import Placement
from parverify.progress import NullProgress, Progress
from parverify.verdict import Result, Verdict
from parverify.verifier import Verifier

GAP_POINTS = 32
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
    try:
        subject, query = _shared(
            world, settings, lambda: load_subject(model, spec, own, progress, settings, input_shape)
        )
        if not any(not part.empty_box for part in query):
            return Result(Verdict.UNSAT, reason="the unsafe region is empty")
        with allowance(max(ULPS, settings.bounds.allowance)):
            return _decide(subject, query, settings, own, progress, world)
    except OutOfTimeError as error:
        return Result(Verdict.TIMEOUT, reason=error.message)


def _decide(
    subject: Subject, query: Query, settings: Settings, clock: Clock, progress: Progress, world: World
) -> Result:
    """A verdict in the dtype of the settings; in float64 where float32 is too coarse for the query or its bounds."""
    if settings.dtype == "float32" and not _representable(query):
        progress.log("the property's coefficients are no float32 numbers: bounding in float64")
        settings = replace(settings, dtype="float64")
    result = Verifier(subject, query, settings, clock, progress, world=world).run()
    if result.verdict is Verdict.UNKNOWN and settings.dtype == "float32" and settings.method in ("auto", "beta-crown"):
        progress.log(f"float32 does not decide ({result.reason}): once more in float64")
        first = dict(result.stats)
        result = Verifier(subject, query, replace(settings, dtype="float64"), clock, progress, world=world).run()
        result = replace(result, stats={**result.stats, "float32": first})
    return result


def _representable(query: Query) -> bool:
    """Whether all coefficients on outputs and inputs are float32 numbers."""
    tables = (table for part in query for table in (part.C_y, part.C_x) if table is not None)
    return all(bool((table.astype(np.float32) == table).all()) for table in tables)


def _with(settings: Settings | None, options: dict[str, Any]) -> Settings:
    if not options:
        return settings or Settings()
    if settings is not None:
        raise UsageError("give either settings or single options, not both")
    return make_settings({key.replace("__", "."): value for key, value in options.items()})


def load_subject(
    model: str | Path | nn.Module,
    spec: str | Path | Query,
    clock: Clock,
    progress: Progress,
    settings: Settings,
    input_shape: Sequence[int] | None,
) -> tuple[Subject, Query]:
    if isinstance(model, nn.Module):
        if not isinstance(spec, Query):
            raise UsageError("a torch module needs a Query, not a file", "pass parverify.Query, or an ONNX path")
        return _module_subject(model, spec, input_shape), spec
    from parverify.frontend.network import check_against_original, load_network, rounding_gap, sample_points

    progress.phase("loading the network")
    network = load_network(Path(model), clock=clock)
    if isinstance(spec, Query):
        query = spec
    else:
        from parverify.frontend.vnnlib import read_query

        progress.phase("parsing the property")
        query = _read(read_query, Path(spec), network.n_in, network.n_out, clock)
    if (query.n_in, query.n_out) != (network.n_in, network.n_out):
        raise SpecError(
            f"the property has {query.n_in} inputs and {query.n_out} outputs, the network "
            f"{network.n_in} and {network.n_out}"
        )
    gap = 0.0
    if any(not part.empty_box for part in query):
        progress.phase("checking the conversion")
        lower, upper = query.hull()
        check_against_original(network, lower, upper, seed=settings.seed)
        gap = rounding_gap(network, sample_points(lower, upper, seed=settings.seed + 1))
    clock.check("loading")
    graph = trace(network.module, network.input_shape, dtype=network.dtype)
    return Subject(Division.whole(graph), network.replay, network.dtype, gap), query


def _shared(world: World, settings: Settings, load: Callable[[], tuple[Subject, Query]]) -> tuple[Subject, Query]:
    """What rank 0 has loaded, divided over the ranks; the others get their share and ask rank 0 for replays."""
    if world.size == 1 and settings.parallel.strategy == "auto":
        return load()
    from parverify.strategy.compile import check_all, compile_placement
    from parverify.strategy.directives import choose_strategy

    chosen, comm = choose_strategy(settings.parallel, world.size), world.comm
    loaded = load() if world.rank == 0 else None
    graph = None if loaded is None else loaded[0].graph

    def compile_for(skeleton: BoundGraph, rank: int, size: int) -> Placement:
        return compile_placement(skeleton, chosen, rank, size)

    network = divide(graph, compile_for, comm)
    check_all(network.graph, network.placements)
    rest = from_first(comm, lambda: None if loaded is None else (loaded[0].input_dtype, loaded[0].gap, loaded[1]))
    if rest is None:
        raise ParverifyError("rank 0 has loaded nothing")
    source = None if loaded is None else loaded[0].replay
    return Subject(network, shared_replay(source, comm), rest[0], rest[1], source, compile_for), rest[2]


def _read(read: Callable[..., Query], path: Path, n_in: int, n_out: int, clock: Clock) -> Query:
    """The property of a file, whose name belongs to the place that an error names."""
    try:
        return read(path, n_in=n_in, n_out=n_out, clock=clock)
    except SpecError as error:
        if str(path) not in error.message:
            error.message = f"{path}: {error.message}"
        raise


def _module_subject(module: nn.Module, query: Query, input_shape: Sequence[int] | None) -> Subject:
    shape = tuple(input_shape) if input_shape is not None else (1, query.n_in)
    tensors = [t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()]
    dtype = tensors[0].dtype if tensors else torch.get_default_dtype()
    graph = trace(module, shape, dtype=dtype)

    replay = _ModuleReplay(module, shape, dtype)
    return Subject(Division.whole(graph), replay, dtype, _module_gap(graph, replay, dtype, query))


@dataclass(frozen=True)
class _ModuleReplay:
    """A torch module as its own original."""

    module: nn.Module
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __call__(self, x: np.ndarray) -> np.ndarray:
        device = next((t.device for t in (*self.module.parameters(), *self.module.buffers())), torch.device("cpu"))
        point = torch.from_numpy(np.asarray(x, dtype=np.float64)).to(self.dtype).reshape(self.shape)
        with torch.no_grad():
            return self.module(point.to(device)).double().cpu().numpy().ravel()


def _module_gap(
    graph: BoundGraph, replay: Callable[[np.ndarray], np.ndarray], dtype: torch.dtype, query: Query
) -> float:
    """How far a module's rounding moves its outputs: the largest difference to float64 seen at some points."""
    fits = (query.n_in, query.n_out) == (graph.input.numel, graph[graph.output].numel)
    if dtype == torch.float64 or not fits or all(part.empty_box for part in query):
        return 0.0
    lower, upper = query.hull()
    rng = np.random.default_rng(0)
    share = rng.random((GAP_POINTS, query.n_in))
    share[::2] = share[::2].round()  # every other one is a corner
    points = torch.from_numpy(lower + share * (upper - lower)).to(dtype).double()
    exact = Executor(graph, dtype=torch.float64).evaluate(points).flatten(1).numpy()
    gaps = np.abs(np.stack([replay(x) for x in points.numpy()]) - exact)
    return float(gaps[np.isfinite(gaps)].max(initial=0.0))


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
        low, high = _output_bounds(executor, region, found, chosen, C)
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


def _output_bounds(
    executor: Executor, region: Region, found: LayerBounds, options: BoundOptions, C: Tensor | None
) -> Box:
    """(D, rows) bounds of C times the output; (D, *output shape) without C."""
    output = executor.graph[executor.graph.output]
    domains = region.domains
    if options.method == "ibp":
        return _interval_rows(found.intervals[output.name], C)
    if C is None:
        index = torch.arange(output.numel, device=executor.device).repeat(domains)
        owner = torch.arange(domains, device=executor.device).repeat_interleave(output.numel)
        rows: Tiled = both_signs(index, owner if domains > 1 else None, executor.dtype)
    else:
        rows = _functionals(C.to(executor.device, executor.dtype), domains, output.shape)
    alpha = options.alpha if options.method == "alpha-crown" else AlphaOptions(iterations=0)

    def bound(part: slice) -> Tensor:
        some = rows.take(part)
        if torch.is_grad_enabled():
            return executor.sweep(output.name, some, found.relaxed, region).lower
        return optimize(
            executor, output.name, some, found.relaxed, region, options=alpha, replicated=not executor.splits_rows
        )

    low, high = executor.deal(len(rows), options.tile, bound).chunk(2)
    low, high = low.reshape(domains, -1), -high.reshape(domains, -1)
    if options.intersect:
        box = _interval_rows(found.intervals[output.name], C)
        low, high = torch.maximum(low, box[0].reshape(low.shape)), torch.minimum(high, box[1].reshape(low.shape))
    return (low, high) if C is not None else (low.reshape(domains, *output.shape), high.reshape(domains, *output.shape))


def _functionals(C: Tensor, domains: int, shape: tuple[int, ...]) -> Dense:
    C = C.expand(domains, -1, -1) if C.dim() == 2 else C
    owner = torch.arange(domains, device=C.device).repeat_interleave(C.shape[1])
    A = C.reshape(-1, *shape)
    return Dense(torch.cat([A, -A]), None, torch.cat([owner, owner]) if domains > 1 else None)


def _interval_rows(box: Box, C: Tensor | None) -> Box:
    low, high = box
    if C is None:
        return low, high
    low, high = low.flatten(1), high.flatten(1)
    C = C.to(low.dtype).expand(low.shape[0], -1, -1) if C.dim() == 2 else C.to(low.dtype)
    plus, minus = C.clamp(min=0), C.clamp(max=0)
    return (
        (plus @ low[..., None] + minus @ high[..., None])[..., 0],
        (plus @ high[..., None] + minus @ low[..., None])[..., 0],
    )


# --- the command `bounds` ---------------------------------------------------------------------------------------------


def bounds_report(
    model: str | Path, spec: str | Path, *, settings: Settings, clock: Clock, world: World | None = None
) -> dict[str, Any]:
    """Bounds of the outputs over the property's input box, with what they cost: the JSON of `parverify bounds`."""
    world = world or World()
    subject, query = _shared(world, settings, lambda: load_subject(model, spec, clock, NullProgress(), settings, None))
    dtype = getattr(torch, settings.dtype)
    executor = subject.network.executor(dtype=dtype, device=settings.device)
    if all(part.empty_box for part in query):
        raise SpecError("no input satisfies the property's input constraints, so there is no box to bound over")
    if settings.alpha.joint and executor.splits_rows:
        raise UsageError("alpha.joint needs all rows on every rank", "use --strategy fsdp, tp or single")
    lower, upper = query.hull()
    region = outward_box(torch.from_numpy(lower), torch.from_numpy(upper), dtype, settings.device)
    itemsize = torch.finfo(dtype).bits // 8
    budget = from_first(world.comm, lambda: make_budget(subject.graph, memory=settings.memory, itemsize=itemsize))
    options = BoundOptions(
        settings.method,
        AlphaOptions(settings.alpha.iterations, settings.alpha.lr),
        tile=budget.tile(settings.bounds.tile or executor.placement.tile),
        intersect=settings.bounds.intersect,
    )
    from parverify.parallel.meter import MemoryMeter

    world.comm.meter.clear()
    started = time.monotonic()
    with allowance(settings.bounds.allowance), counting(Counts()) as counts, MemoryMeter(executor.resident()) as meter:
        found, (low, high) = bound_everything(executor, region, options, settings, clock)
    seconds = time.monotonic() - started
    collectives = world.comm.meter.figures()
    boxes = {**found.boxes, "the output": (low, high)}
    executor.agree({f"{side} bounds of {name}": box[i] for name, box in boxes.items() for i, side in enumerate(SIDES)})
    layers = [_layer(subject.graph, name, box) for name, box in found.boxes.items()]
    from parverify.program.cost import on_meta, predict

    predicted = predict(
        subject.graph,
        executor.placement,
        lambda dry: bound_everything(dry, on_meta(region), options, settings, Clock()),
        dtype=dtype,
        counts=counts,
    )
    figures = {
        "peak_bytes": meter.peak_bytes,
        "resident_bytes": executor.resident_bytes(),
        "collectives": collectives,
        "predicted": predicted,
    }
    return {
        "method": settings.method,
        "strategy": executor.placement.strategy,
        "world_size": world.size,
        "dtype": settings.dtype,
        "lower": low.flatten().tolist(),
        "upper": high.flatten().tolist(),
        "layers": layers,
        "digest": digest(boxes.values()),
        "seconds": seconds,
        "ranks": [from_rank(world.comm, rank, figures) for rank in range(world.size)],
    }


SIDES = ("lower", "upper")


def bound_everything(
    executor: Executor, region: Region, options: BoundOptions, settings: Settings, clock: Clock
) -> tuple[LayerBounds, Box]:
    """Layer and output bounds; what a dry run repeats."""
    with torch.no_grad():
        if settings.alpha.joint and settings.method == "alpha-crown":
            return joint_bounds(executor, region, options, clock=clock)
        found = bound_layers(executor, region, options, clock=clock)
        return found, _output_bounds(executor, region, found, options, None)


def _layer(graph: BoundGraph, name: str, box: Box) -> dict[str, Any]:
    low, high = box
    unstable = int(((low < 0) & (high > 0)).sum())
    return {
        "name": name,
        "op": graph[name].source or graph[name].op,
        "neurons": low.numel(),
        "unstable": unstable,
        "lower": low.flatten().tolist(),
        "upper": high.flatten().tolist(),
    }


def digest(boxes: Iterable[Box]) -> str:
    """sha256 over the bytes of all bounds, in order."""
    state = hashlib.sha256()
    for low, high in boxes:
        for part in (low, high):
            state.update(part.detach().cpu().contiguous().numpy().tobytes())
    return state.hexdigest()


def supported_operators() -> list[str]:
    """Names of the ONNX operators that can be verified."""
    from parverify.frontend.network import OPERATORS

    return sorted(OPERATORS)
