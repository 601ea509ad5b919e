"""Witnesses confirmed by onnxruntime on networks written with onnx.helper."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from parverify.attack import Replay
from parverify.frontend.query import Query
from tests.attack.helpers import Net, check, disjunct, search


def two_layers(seed: int, n_in: int, hidden: int) -> tuple[Net, Replay]:
    """A ReLU network as a torch function and as onnxruntime replays it."""
    generator = np.random.default_rng(seed)
    arrays = {
        "W": generator.normal(size=(n_in, hidden)).astype(np.float32),
        "b": generator.normal(size=hidden).astype(np.float32),
        "V": generator.normal(size=(hidden, 2)).astype(np.float32),
    }
    graph = helper.make_graph(
        [
            helper.make_node("Gemm", ["x", "W", "b"], ["h"]),
            helper.make_node("Relu", ["h"], ["r"]),
            helper.make_node("MatMul", ["r", "V"], ["y"]),
        ],
        "two_layers",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, n_in])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 2])],
        [numpy_helper.from_array(value, name) for name, value in arrays.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.checker.check_model(model)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    W, b, V = (torch.from_numpy(value) for value in arrays.values())

    def net(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ W.to(x.dtype) + b.to(x.dtype)) @ V.to(x.dtype)

    def replay(x: np.ndarray) -> np.ndarray:
        (y,) = session.run(None, {"x": x.astype(np.float32)[None]})
        return y.astype(np.float64).reshape(-1)

    return net, replay


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_conjunction_close_to_its_optimum(dtype: torch.dtype) -> None:
    net, replay = two_layers(seed=0, n_in=6, hidden=20)
    grid = torch.rand(20000, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 2 - 1
    y = net(grid)
    gap = (y[:, 0] - y[:, 1]).max().item()
    # More than any of 20000 samples reaches, and a decimal pin that no float32 equals.
    part = disjunct([-1] * 5 + [0.1], [1] * 5 + [0.1], [[-1, 1], [-1, 0]], [-0.9 * gap, 100])
    query = Query(6, 2, (part,))
    witness = search(net, query, replay=replay, dtype=dtype).pgd(restarts=20, steps=100, seconds=20)
    check(witness, query, replay)
    assert witness.x[5] == 0.1


def test_the_value_at_a_vertex_is_decided_by_the_runtime() -> None:
    # The exact float32 result at a point as right-hand side: only the runtime's own arithmetic can tell.
    net, replay = two_layers(seed=3, n_in=40, hidden=200)
    point = np.float32(np.linspace(-1, 1, 40)).astype(np.float64)
    value = replay(point)[0]
    for strict in (False, True):
        for bound in (value, np.nextafter(value, -np.inf), np.nextafter(value, np.inf)):
            query = Query(40, 2, (disjunct(point, point, [[1, 0]], [bound], strict=[strict]),))
            witness = search(net, query, replay=replay).pgd(restarts=2, steps=5, seconds=5)
            assert (witness is not None) == (value < bound if strict else value <= bound)
