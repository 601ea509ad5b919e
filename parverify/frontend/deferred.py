"""onnx2torch without torchvision, until somebody needs it.

onnx2torch imports torchvision for two operators, and torchvision imports torch's compiler: two seconds at the start of
every run, for networks that have neither operator.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

NAME = "torchvision"


class _OnCall(ModuleType):
    """A module whose functions import the real one when they are called."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def function(*args: Any, **kwargs: Any) -> Any:
            return getattr(importlib.import_module(self.__name__), name)(*args, **kwargs)

        return function


@contextlib.contextmanager
def torchvision_on_call() -> Iterator[None]:
    """Within this context an import of torchvision gets a stand-in, unless it or onnx2torch was imported before."""
    if NAME in sys.modules or "onnx2torch" in sys.modules:
        yield
        return
    whole, ops = ModuleType(NAME), _OnCall(f"{NAME}.ops")
    whole.ops = ops  # type: ignore[attr-defined]
    stand_ins = {NAME: whole, ops.__name__: ops}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name, module in stand_ins.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
