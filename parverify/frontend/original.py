"""Networks in onnxruntime: the original that witnesses are replayed on, and parts of a model that are computed once."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from parverify.errors import ModelError


class Original:
    """The original file in onnxruntime; the session is made at the first run.

    Args:
        data: bytes of a self-contained ONNX file.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._session: Any = None

    def __getstate__(self) -> dict[str, Any]:
        # A session can't be copied to another process; a new one is made there.
        return {"_data": self._data, "_session": None}

    def run(self, x: np.ndarray) -> np.ndarray:
        """The output for one input of the network's shape and type."""
        if self._session is None:
            self._session = _session(self._data)
        return _run(self._session, x)[0]


def run_model(model: Any, x: np.ndarray, dtype: torch.dtype) -> list[np.ndarray]:
    """All outputs of a `ModelProto` for one input.

    Args:
        x: in the shape of the model's input.
        dtype: of the model's input, float32 or float64.
    """
    with np.errstate(over="ignore"):
        given = x.astype(np.float32 if dtype == torch.float32 else np.float64)
    return _run(_session(model.SerializeToString()), given)


def _run(session: Any, x: np.ndarray) -> list[np.ndarray]:
    given = session.get_inputs()
    try:
        return session.run(None, {given[0].name: x} if given else {})
    except _onnxruntime_errors() as error:
        raise ModelError(f"onnxruntime can't evaluate the network: {' '.join(str(error).split())}") from error


def _session(data: bytes) -> Any:
    import onnxruntime

    # Graph optimizations stay at their default: whoever checks a witness runs a default session.
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    try:
        return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    except _onnxruntime_errors() as error:
        raise ModelError(f"onnxruntime can't load the network: {' '.join(str(error).split())}") from error


def _onnxruntime_errors() -> tuple[type[Exception], ...]:
    """The exceptions that onnxruntime raises; they share no base class of their own."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    return (
        state.Fail,
        state.EPFail,
        state.InvalidArgument,
        state.InvalidGraph,
        state.InvalidProtobuf,
        state.NotImplemented,
        state.RuntimeException,
    )
