"""Graphs whose weights have several parts, or several readers."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from parverify.graph.ir import BoundGraph, prune
from parverify.graph.trace import trace
from parverify.program.steps import weighted_nodes


def wide() -> BoundGraph:
    """Weights of several parts each, some of fewer parts than ranks."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(2, 300, 12), nn.ReLU(), nn.ConvTranspose2d(300, 3, 12), nn.ReLU(), nn.Flatten(),
                           nn.Linear(3 * 144, 520), nn.ReLU(), nn.Linear(520, 3))  # fmt: skip
    return trace(module, (1, 2, 12, 12))


def shared() -> BoundGraph:
    """Two nodes that read one weight."""
    torch.manual_seed(0)
    layers = (nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 2))
    graph = trace(nn.Sequential(*layers), (1, 200))
    first, second, _ = weighted_nodes(graph)
    same = replace(second, consts={**second.consts, "weight": first.consts["weight"]})
    return prune(replace(graph, nodes=tuple(same if node is second else node for node in graph.nodes)))
