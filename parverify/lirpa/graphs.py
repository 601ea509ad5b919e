"""From auto_LiRPA's graph of operators to a `BoundGraph`, and back.

A `BoundedModule` is run node by node on one instance, by its own operators, while the recorder of
`parverify.graph.trace` writes kernel nodes; so whatever its versions call their operators, and however they turned the
network into them, what is recorded is what they compute. Every kernel node's `source` names the operator that it came
from. What can't be recorded is listed all at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from parverify.errors import ModelError
from parverify.graph.ir import BoundGraph
from parverify.graph.sparsify import densify
from parverify.graph.trace import trace
from parverify.lirpa.operators import gathered


def from_bounded_module(bounded: Any) -> BoundGraph:
    """The network of an auto_LiRPA `BoundedModule`, for one instance (a batch axis of 1 in front).

    The module itself stays as it was.

    Args:
        bounded: with one input that bounds are taken over.

    Raises:
        UnsupportedOperatorError: all operators that have no importer, with the names of their nodes.
        ModelError: it has several inputs, or an output that needs a batch of another size.
    """
    order = _order(bounded)
    inputs = [node for node in order if type(node).__name__ == "BoundInput"]
    if len(inputs) != 1:
        raise ModelError(f"the module has {len(inputs)} inputs; allowed: 1")
    value = inputs[0].value
    if not isinstance(value, Tensor):
        raise ModelError(f"the input is a {type(value).__name__}, not a tensor")
    shape = (1, *value.shape[1:])
    with _untouched(bounded), gathered():  # the graph keeps weights
        return densify(trace(_Replay(order, inputs[0]), shape, dtype=value.dtype))  # weights that may change


def _order(bounded: Any) -> list[Any]:
    """The nodes that the output depends on, each behind its inputs."""
    found: dict[str, Any] = {}
    stack = [(bounded[bounded.final_name], False)]
    while stack:
        node, ready = stack.pop()
        if node.name in found:
            continue
        if ready:
            found[node.name] = node
        else:
            stack.append((node, True))
            stack += [(before, False) for before in node.inputs]
    return list(found.values())


class _Replay(nn.Module):
    """The operators one after the other, on plain tensors."""

    def __init__(self, order: Sequence[Any], entry: Any) -> None:
        super().__init__()
        self._order, self._entry = list(order), entry
        for node in order:
            self._modules[node.name] = node  # add_module refuses the dots in their names

    def forward(self, x: Tensor) -> Tensor:
        values: dict[str, Any] = {self._entry.name: x}
        for node in self._order:
            if node is self._entry:
                continue
            value = node(*(values[before.name] for before in node.inputs))
            values[node.name] = torch.tensor(value) if isinstance(value, (torch.Size, tuple)) else value
        return values[self._order[-1].name]


@contextmanager
def _untouched(bounded: Any) -> Iterator[None]:
    """Put back whatever running the operators leaves on them: shapes of the last value, whether weights train."""
    nodes = list(bounded._modules.values())
    before = [dict(vars(node)) for node in nodes]
    training = [(parameter, parameter.requires_grad) for parameter in bounded.parameters()]
    for parameter, _ in training:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for node, state in zip(nodes, before, strict=True):
            vars(node).clear()
            vars(node).update(state)
        for parameter, flag in training:
            parameter.requires_grad_(flag)
