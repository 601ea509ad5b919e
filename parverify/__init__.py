"""parverify: neural-network verification divided over devices.

The public names load on first use, so that `import parverify` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parverify.api import Bounds, compute_bounds, supported_operators, verify
    from parverify.config import Settings
    from parverify.errors import ParverifyError
    from parverify.frontend.query import Disjunct, Query
    from parverify.verdict import Result, Verdict, Witness

__version__ = "0.1.0"

_HOMES = {
    "Bounds": "parverify.api",
    "compute_bounds": "parverify.api",
    "supported_operators": "parverify.api",
    "verify": "parverify.api",
    "Settings": "parverify.config",
    "ParverifyError": "parverify.errors",
    "Disjunct": "parverify.frontend.query",
    "Query": "parverify.frontend.query",
    "Result": "parverify.verdict",
    "Verdict": "parverify.verdict",
    "Witness": "parverify.verdict",
}

__all__ = [
    "Bounds",
    "Disjunct",
    "ParverifyError",
    "Query",
    "Result",
    "Settings",
    "Verdict",
    "Witness",
    "__version__",
    "compute_bounds",
    "supported_operators",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'parverify' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
