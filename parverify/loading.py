"""From what a user gives to a subject and a query, on one rank or on many.

Rank 0 alone reads files; the others get their share of the network from it and ask it for replays. An ONNX network is
compared with onnxruntime before anything is concluded from it; a torch module is its own original.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from parverify.clock import Clock
from parverify.config import Settings
from parverify.engine import Subject, shared_replay
from parverify.errors import ParverifyError, SpecError, UsageError
from parverify.frontend.query import Query
from parverify.graph.ir import BoundGraph
from parverify.graph.trace import trace
from parverify.parallel.shared import from_first
from parverify.parallel.world import World
from parverify.program.division import Division, divide
from parverify.program.executor import Executor
from parverify.program.steps import Placement
from parverify.progress import Progress

if TYPE_CHECKING:
    from parverify.frontend.network import Network

GAP_POINTS = 32


def warm_up() -> None:
    """Import what reading a network takes: before ranks are forked, each of which would load it anew."""
    from parverify.frontend.deferred import torchvision_on_call

    with warnings.catch_warnings(), torchvision_on_call():
        warnings.simplefilter("ignore")  # the libraries' own, about each other
        for name in ("onnx", "onnx2torch", "onnxruntime", "parverify.frontend.network", "parverify.frontend.vnnlib"):
            importlib.import_module(name)


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
    return file_subject(load_file(model, clock, progress), spec, clock, progress, settings)


@dataclass(frozen=True)
class Loaded:
    """A network's file, read and traced; it serves any number of properties.

    Args:
        network: with the original that witnesses are replayed on.
        graph: what is bounded.
    """

    network: Network
    graph: BoundGraph


def load_file(model: str | Path, clock: Clock, progress: Progress) -> Loaded:
    """Read an ONNX network.

    Raises:
        ModelError: it can't be read.
        OutOfTimeError: the clock ran out.
    """
    from parverify.frontend.network import load_network

    progress.phase("loading the network")
    network = load_network(Path(model), clock=clock)
    clock.check("loading")
    return Loaded(network, trace(network.module, network.input_shape, dtype=network.dtype))


def file_subject(
    loaded: Loaded, spec: str | Path | Query, clock: Clock, progress: Progress, settings: Settings
) -> tuple[Subject, Query]:
    """The subject and the query for a network that has been read, which is compared with its original on the query.

    Raises:
        SpecError: the property can't be read or does not fit the network.
        ModelError: what was read does not equal the original.
        OutOfTimeError: the clock ran out.
    """
    from parverify.frontend.network import check_against_original, rounding_gap, sample_points

    network = loaded.network
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
    return Subject(Division.whole(loaded.graph), network.replay, network.dtype, gap), query


def share_subject(world: World, settings: Settings, load: Callable[[], tuple[Subject, Query]]) -> tuple[Subject, Query]:
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

    network = divide(graph, compile_for, comm, near=settings.device == "cpu" and settings.parallel.shared_memory)
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
