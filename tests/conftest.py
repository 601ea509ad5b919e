"""Shared fixtures: where the optional shared data is, and one thread for torch."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)

# Contracts that are checked over many networks, operators or settings: of each of their tests, one case in so many
# belongs to `make test-fast`, the others are marked slow. `make test` runs them all.
THINNED = {
    "test_faults.py": 3,
    "test_verify.py": 12,
    "bab/test_leaf.py": 4,
    "bab/test_planted.py": 8,
    "bab/test_spaces.py": 8,
    "bounds/test_alpha.py": 8,
    "bounds/test_layers.py": 8,
    "bounds/test_region.py": 4,
    "cli/test_ranks.py": 6,
    "distributed/test_divided.py": 5,
    "distributed/test_exchange.py": 3,
    "distributed/test_tp.py": 6,
    "distributed/test_verify.py": 4,
    "frontend/test_network.py": 6,
    "graph/test_trace.py": 2,
    "lirpa/test_golden.py": 8,
    "ops/test_kernel.py": 4,
    "ops/test_activation.py": 8,
}


# Files whose single tests take longest: begun first, so that no worker is left alone with one of them at the end.
LONGEST = ("examples/test_examples.py", "bab/test_stealing.py", "distributed/test_verify.py")


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what the fast run leaves out of the contracts in `THINNED`; the longest tests come first."""
    here = Path(__file__).parent
    seen: Counter[tuple[Path, str]] = Counter()
    for item in items:
        test = (item.path, item.name.partition("[")[0])
        step = THINNED.get(item.path.relative_to(here).as_posix(), 1) if here in item.path.parents else 1
        if seen[test] % step:
            item.add_marker(pytest.mark.slow)
        seen[test] += 1
    first = {here / name for name in LONGEST}
    items.sort(key=lambda item: item.path not in first)


def find_shared() -> Path | None:
    """The folder with reference data, or None where it is absent."""
    named = os.environ.get("PARVERIFY_SHARED")
    folder = Path(named) if named else Path(__file__).resolve().parents[2] / "shared"
    return folder if (folder / "vnncomp").is_dir() else None


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with reference data; skips the test where it is absent."""
    folder = find_shared()
    if folder is None:
        pytest.skip("reference data is absent: set PARVERIFY_SHARED to its folder")
    return folder
