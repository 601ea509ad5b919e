"""Which rank of how many this process is, by its environment; imports nothing, for processes that never load torch."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """A process among those that a launcher has started.

    Args:
        rank, size: which of how many.
        local: its number on this machine.
    """

    rank: int
    size: int
    local: int


def restarts_done() -> int:
    """How often torchrun has started these ranks again."""
    return _number("TORCHELASTIC_RESTART_COUNT")


def restarts_possible() -> bool:
    """Whether torchrun would start ranks again, or has."""
    return _number("TORCHELASTIC_MAX_RESTARTS") > 0


def restarts_left() -> int:
    """How often torchrun would start them again if one failed."""
    return max(0, _number("TORCHELASTIC_MAX_RESTARTS") - restarts_done()) if place() is not None else 0


def _number(name: str) -> int:
    text = os.environ.get(name, "0")
    return int(text) if text.isdecimal() else 0


def place() -> Place | None:
    """What torchrun, or any launcher with its variables, says of this process; None where it was started alone."""
    size, rank = os.environ.get("WORLD_SIZE", "1"), os.environ.get("RANK", "")
    if not (size.isdecimal() and rank.isdecimal() and int(size) > 1):
        return None
    return Place(int(rank), int(size), int(os.environ.get("LOCAL_RANK", "0")))
