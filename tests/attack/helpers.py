"""Small networks with planted witnesses, and replays that compute in float32 as a runtime would."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from parverify.attack import Replay, WitnessSearch
from parverify.clock import Clock
from parverify.frontend.query import Disjunct, Query
from parverify.verdict import Witness

Net = Callable[[Tensor], Tensor]


def disjunct(lower, upper, C_y, d, *, strict=None, C_x=None) -> Disjunct:
    """A disjunct from nested lists."""
    d = np.asarray(d, dtype=np.float64)
    return Disjunct(
        np.asarray(lower, dtype=np.float64),
        np.asarray(upper, dtype=np.float64),
        np.atleast_2d(np.asarray(C_y, dtype=np.float64)),
        d,
        np.zeros(d.size, dtype=bool) if strict is None else np.asarray(strict, dtype=bool),
        None if C_x is None else np.atleast_2d(np.asarray(C_x, dtype=np.float64)),
    )


def single(net: Net, dtype: torch.dtype = torch.float32) -> Replay:
    """The network replayed in `dtype`, as onnxruntime would."""

    def replay(x: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return net(torch.as_tensor(x[None]).to(dtype))[0].double().numpy()

    return replay


def search(
    net: Net,
    query: Query,
    *,
    replay: Replay | None = None,
    seed: int = 0,
    timeout: float = math.inf,
    dtype: torch.dtype = torch.float64,
    input_dtype: torch.dtype = torch.float32,
) -> WitnessSearch:
    """A search with an engine in float64 and a replay in float32, unless told otherwise."""
    return WitnessSearch(
        net,
        single(net) if replay is None else replay,
        query,
        input_dtype=input_dtype,
        dtype=dtype,
        device="cpu",
        seed=seed,
        clock=Clock(timeout),
    )


def check(witness: Witness | None, query: Query, replay: Replay) -> None:
    """What a reader of the printed witness checks, computed here anew."""
    assert witness is not None
    printed = np.array([float(f"{value:.17g}") for value in witness.x])
    np.testing.assert_array_equal(printed, witness.x)
    y = replay(printed.astype(np.float32).astype(np.float64))
    np.testing.assert_array_equal(y, witness.y)
    assert query.holds(printed, y)


def spike(centre: list[float], radius: float) -> Net:
    """(B, n) -> (B, 1): 1 - distance / radius near the centre in the maximum norm, 0 elsewhere: flat far away."""
    middle = torch.tensor(centre, dtype=torch.float64)

    def net(x: Tensor) -> Tensor:
        distance = (x - middle.to(x.dtype)).abs().amax(-1, keepdim=True)
        return torch.relu(1 - distance / radius)

    return net


def mlp(sizes: list[int], seed: int) -> Net:
    """A random ReLU network that follows the dtype of its input."""
    generator = torch.Generator().manual_seed(seed)
    weights = [
        (
            torch.randn(m, n, generator=generator, dtype=torch.float64) / math.sqrt(n),
            0.1 * torch.randn(m, generator=generator, dtype=torch.float64),
        )
        for n, m in itertools.pairwise(sizes)
    ]

    def net(x: Tensor) -> Tensor:
        for at, (weight, bias) in enumerate(weights):
            x = x if at == 0 else torch.relu(x)
            x = x @ weight.to(x.dtype).T + bias.to(x.dtype)
        return x

    return net
