"""auto_LiRPA, extended over many devices: its `BoundedModule` through parverify's engine, or its own over shards.

Nothing here imports auto_LiRPA before it is used; see docs/auto_lirpa.md.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parverify.lirpa.apply import apply_fsdp, apply_tp
    from parverify.lirpa.back import to_bounded_module
    from parverify.lirpa.graphs import from_bounded_module
    from parverify.lirpa.module import shard
    from parverify.lirpa.probe import alphas_move

_HOMES = {
    "alphas_move": "parverify.lirpa.probe",
    "apply_fsdp": "parverify.lirpa.apply",
    "apply_tp": "parverify.lirpa.apply",
    "from_bounded_module": "parverify.lirpa.graphs",
    "shard": "parverify.lirpa.module",
    "to_bounded_module": "parverify.lirpa.back",
}

__all__ = ["alphas_move", "apply_fsdp", "apply_tp", "from_bounded_module", "shard", "to_bounded_module"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name.startswith(("FSDPBound", "TPBound")):
        operators = import_module("parverify.lirpa.operators")
        if name in operators.KINDS:
            return operators.operator(name)
    raise AttributeError(f"module 'parverify.lirpa' has no attribute {name!r}")
