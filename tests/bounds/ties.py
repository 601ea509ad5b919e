"""Reference bounds of networks whose ReLUs have u = -l: which slope they get turns on the last bit of the processor."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from parverify.ops.lines import Lines, SlopeLine
from parverify.ops.relaxation import RelaxedActivation

SLOPES = {"tll_1": (1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0)}
"""Case -> slopes below that give the reference bounds, of the neurons of one layer that are tied to 1e-5."""


def break_ties(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """Give tied neurons the slopes that they had where the reference bounds were computed."""
    if case not in SLOPES:
        return
    chosen, slopes = RelaxedActivation.with_slopes_of, torch.tensor(SLOPES[case])

    def with_slopes_of(self: RelaxedActivation, low: Tensor, high: Tensor) -> RelaxedActivation:
        made = chosen(self, low, high)
        lower = made.lines.lower
        assert isinstance(lower, SlopeLine)
        tied = ((low + high).abs() <= 1e-5 * (high - low)) & (lower.free > 0)
        if not tied.any():
            return made
        slope = lower.slope.masked_scatter(tied, slopes.to(low.dtype))
        assert int(tied.sum()) == len(slopes)
        return replace(made, lines=Lines(SlopeLine(lower.free, slope), made.lines.upper))

    monkeypatch.setattr(RelaxedActivation, "with_slopes_of", with_slopes_of)
