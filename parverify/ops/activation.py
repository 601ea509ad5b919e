"""The table of activations, by name."""

from __future__ import annotations

import torch

from parverify.ops.elementwise import Activation
from parverify.ops.relu import Relu

ACTIVATIONS: dict[str, Activation] = {"relu": Relu("relu", torch.relu, True)}

__all__ = ["ACTIVATIONS", "Activation"]
