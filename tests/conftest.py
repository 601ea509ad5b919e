"""Shared fixtures: where the optional shared data is, and one thread for torch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


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
