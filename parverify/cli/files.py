"""The files that a command is given: looked at before anything heavy is loaded, and never overwritten by an answer."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from parverify.errors import ModelError, SpecError, UsageError


def check_files(model: str, spec: str) -> None:
    """Raise at once if a file is not there; it may exist as `.gz` only.

    Raises:
        ModelError, SpecError: naming the file.
    """
    check_model(model)
    problem = _problem(spec)
    if problem:
        raise SpecError(problem, hint="SPEC names a VNN-LIB file, itself or as .gz")


def check_model(model: str) -> None:
    """Raise `ModelError` if the network's file is not there."""
    several_networks = "=" in model and not Path(model).exists()  # f=first.onnx;g=second.onnx
    problem = "" if several_networks else _problem(model)
    if problem:
        raise ModelError(problem, "MODEL names an ONNX file, itself or as .gz")


def _problem(path: str) -> str:
    """What is wrong with a file, or nothing."""
    if not path:
        return "an empty text is no file name"
    if any(Path(path + ending).is_file() for ending in ("", ".gz")):
        return ""
    return f"{path} is a folder, not a file" if Path(path).is_dir() else f"no such file: {path}"


def keep_inputs(inputs: Sequence[str | None], outputs: Mapping[str, str | None]) -> None:
    """Raise `UsageError` if an output would overwrite an input, or two outputs are one file.

    Args:
        inputs: files that are read; each may stand for its `.gz`.
        outputs: the option that names a file -> the file.
    """
    taken = {os.path.realpath(path + ending): path for path in inputs if path for ending in ("", ".gz")}
    for option, path in outputs.items():
        if path in (None, "", "-"):
            continue
        place = os.path.realpath(str(path))
        if place in taken:
            raise UsageError(f"{option}: {path} is the same file as {taken[place]}", "name another file")
        taken[place] = f"{option} {path}"
