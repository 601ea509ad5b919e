"""Layers' bounds that are kept beside a search, so that it can go on later from the same ones.

What domains of split neurons mean does not change with the bounds of their layers, but which slopes they have does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from parverify.bounds.layers import BoundOptions, LayerBounds, bound_layers
from parverify.bounds.region import Region
from parverify.errors import ParverifyError
from parverify.program.executor import Executor


def layers_kept(found: LayerBounds) -> dict[str, Tensor]:
    """The boxes as plain tensors: `low/NODE` and `high/NODE`, (D, *shape)."""
    sides = {"low": 0, "high": 1}
    return {f"{side}/{name}": box[at] for name, box in found.boxes.items() for side, at in sides.items()}


def layers_again(executor: Executor, region: Region, kept: Mapping[str, Tensor]) -> LayerBounds:
    """The same boxes, with what else follows from them and from intervals.

    Raises:
        ParverifyError: they are of another network.
    """
    names = [name.removeprefix("low/") for name in kept if name.startswith("low/")]
    if sorted(names) != sorted(executor.graph.bounded):
        raise ParverifyError("the bounds kept beside a search are of other layers", "start the run anew")
    device = executor.device
    known = {name: (kept[f"low/{name}"].to(device), kept[f"high/{name}"].to(device)) for name in names}
    with torch.no_grad():
        found = bound_layers(executor, region, BoundOptions("ibp"), known=known)
    return replace(found, boxes=known)
