"""auto_LiRPA, extended over many devices: its `BoundedModule` through parverify's engine, or its own over shards.

Nothing here imports auto_LiRPA before it is used; see docs/auto_lirpa.md.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parverify.lirpa.back import to_bounded_module
    from parverify.lirpa.graphs import from_bounded_module
    from parverify.lirpa.module import shard
    from parverify.lirpa.probe import alphas_move

_HOMES = {
    "alphas_move": "parverify.lirpa.probe",
    "from_bounded_module": "parverify.lirpa.graphs",
    "shard": "parverify.lirpa.module",
    "to_bounded_module": "parverify.lirpa.back",
}

__all__ = ["alphas_move", "from_bounded_module", "shard", "to_bounded_module"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'parverify.lirpa' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
