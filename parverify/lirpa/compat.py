"""Finds auto_LiRPA, of whatever version, and makes it run where its surroundings have moved on.

Releases stop at 0.3, whose imports no current numpy or torch satisfies; a checkout may be any later version. What is
missing is supplied only to the version that misses it, only while it is imported or, where it calls what is gone, in
its own modules: torch and numpy stay as they are. Nothing happens before the first call of `lirpa`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from importlib.machinery import ModuleSpec
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from parverify.errors import UsageError

VARIABLE = "AUTO_LIRPA"
"""Names a checkout to use instead of what is installed: the folder with auto_LiRPA/ in it."""

OLDEST, NEWEST = (0, 3), (0, 7)

OPSET = 12
"""The version of ONNX that 0.3 reads."""


@dataclass(frozen=True)
class Lirpa:
    """auto_LiRPA as it was found.

    Args:
        module: the package.
        version: as it says itself.
        shims: what had to be supplied, for the log.
    """

    module: ModuleType
    version: str
    shims: tuple[str, ...] = ()

    @property
    def bounded_module(self) -> Any:
        """The class `BoundedModule`."""
        return self.module.BoundedModule

    def part(self, name: str) -> ModuleType:
        """A submodule, such as `perturbations`."""
        return importlib.import_module(f"{self.module.__name__}.{name}")

    def operator(self, name: str) -> Any:
        """An operator class such as `BoundLinear`, or None where this version has none of that name."""
        return getattr(self.part("bound_ops"), name, None)


@functools.cache
def lirpa() -> Lirpa:
    """The package, imported once.

    Raises:
        UsageError: it is not there, can't be imported, or is of a version that nobody has tried.
    """
    place = os.environ.get(VARIABLE)
    if place and "auto_LiRPA" not in sys.modules:
        if not (Path(place) / "auto_LiRPA").is_dir():
            raise UsageError(f"{VARIABLE}={place} is no folder with auto_LiRPA/ in it")
        sys.path.insert(0, place)
    if "auto_LiRPA" not in sys.modules and importlib.util.find_spec("auto_LiRPA") is None:
        raise UsageError(
            "auto_LiRPA is not installed",
            f"pip install --no-deps auto-lirpa==0.3, or let {VARIABLE} name a checkout of a later version",
        )
    version = _version()
    numbers = tuple(int(part) for part in version.split(".") if part.isdigit())
    if not OLDEST <= numbers[:2] <= NEWEST:
        raise UsageError(f"auto_LiRPA {version} is not supported; allowed: 0.3 to 0.7")
    with _supplied(numbers) as supplied:
        try:
            module = importlib.import_module("auto_LiRPA")
        except (ImportError, AttributeError) as error:
            raise UsageError(f"auto_LiRPA {version} can't be imported here: {error}") from error
    return Lirpa(module, version, (*supplied, *_repaired(module, numbers)))


def is_there() -> bool:
    """Whether `lirpa` would succeed."""
    try:
        lirpa()
    except UsageError:
        return False
    return True


def _version() -> str:
    """What the package's own text says, because importing may need the version; else what was installed."""
    spec = importlib.util.find_spec("auto_LiRPA")
    said = None
    if spec is not None and spec.origin is not None:
        said = re.search(r"^__version__\s*=\s*['\"]([0-9.]+)", Path(spec.origin).read_text(), re.MULTILINE)
    try:
        return said[1] if said else metadata.version("auto-lirpa")
    except metadata.PackageNotFoundError as error:
        raise UsageError("this auto_LiRPA does not say which version it is") from error


# --- while it is imported ---------------------------------------------------------------------------------------------


def _stand_ins(version: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    """Modules that a version imports, and what it takes from them; none matters for bounds."""
    found: dict[str, dict[str, Any]] = {
        "appdirs": {"user_data_dir": lambda *names: str(Path.home().joinpath(".cache", *map(str, names)))},
        "tqdm": {"tqdm": lambda items, *_, **__: items},
    }
    if version < (0, 4):
        found["numpy.lib.arraysetops"] = {"isin": np.isin}
    else:
        found["graphviz"] = {"Digraph": object}
    return found


@contextmanager
def _supplied(version: tuple[int, ...]) -> Iterator[list[str]]:
    """While active, what the import misses exists; gives the names of what had to be supplied."""
    names: list[str] = []
    helper = importlib.import_module("torch.onnx.symbolic_helper")
    for name, members in _stand_ins(version).items():
        if name not in sys.modules and not _exists(name):
            module = ModuleType(name)
            vars(module).update(members, __spec__=ModuleSpec(name, None))
            sys.modules[name] = module
            names.append(name)
    added = tuple(names)
    opset = version < (0, 4) and not hasattr(helper, "_set_opset_version")
    if opset:
        vars(helper)["_set_opset_version"] = _keep_opset
        names.append("_set_opset_version")
    try:
        with warnings.catch_warnings(record=True):  # its imports warn, after setting filters of their own
            yield names
    finally:
        for name in added:
            del sys.modules[name]
        if opset:
            del vars(helper)["_set_opset_version"]


def _exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # not even the package around it
        return False


def _keep_opset(_version: int) -> None:
    """What it asks for is set around the whole of its parsing, see `_repaired`."""


# --- in its own modules -----------------------------------------------------------------------------------------------


class _Subscripted:
    """A node of torch's tracing graph whose attributes are items, as they once were."""

    def __init__(self, node: Any) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    def __getitem__(self, name: str) -> Any:
        return getattr(self._node, self._node.kindOf(name))(name)


class _Graph:
    """A tracing graph whose nodes have items."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph

    def __getattr__(self, name: str) -> Any:
        return getattr(self._graph, name)

    def nodes(self) -> list[_Subscripted]:
        return [_Subscripted(node) for node in self._graph.nodes()]


@contextmanager
def _opset(version: int) -> Iterator[None]:
    """While active, exporting writes operators as that version of ONNX has them."""
    try:
        found = importlib.import_module("torch.onnx._internal.torchscript_exporter._globals").GLOBALS
    except ModuleNotFoundError:  # torch before 2.9
        found = importlib.import_module("torch.onnx._globals").GLOBALS
    before = found.export_onnx_opset_version
    found.export_onnx_opset_version = version
    try:
        yield
    finally:
        found.export_onnx_opset_version = before


def _repaired(module: ModuleType, version: tuple[int, ...]) -> list[str]:
    """Put right what a version calls and torch no longer has; gives what was done."""
    if version >= (0, 4):
        return []
    done = []
    parser = importlib.import_module(f"{module.__name__}.parse_graph")
    if not hasattr(torch._C.Node, "__getitem__"):
        parse_graph = parser.parse_graph
        vars(parser)["parse_graph"] = lambda graph, *rest: parse_graph(_Graph(graph), *rest)
        done.append("items of tracing nodes")
    if parser._set_opset_version is _keep_opset:
        parse_module = parser.parse_module

        def in_opset(*args: Any, **kwargs: Any) -> Any:
            with _opset(OPSET):
                return parse_module(*args, **kwargs)

        vars(importlib.import_module(f"{module.__name__}.bound_general"))["parse_module"] = in_opset
    kind = module.BoundedModule
    if not hasattr(torch, "_six"):
        kind.register_parameter = nn.Module.register_parameter
        done.append("torch._six")
    if "remove_duplicate" in signature(nn.Module._named_members).parameters:
        members = kind._named_members

        def _named_members(self: nn.Module, get: Any, prefix: str = "", recurse: bool = True, **_: Any) -> Any:
            return members(self, get, prefix, recurse)

        kind._named_members = _named_members
        done.append("remove_duplicate")
    return done
