"""A pass that replaces products with nearly empty weights by picking their few entries (`parverify.ops.sparse`).

Networks that were built rather than trained (lattices of minima and maxima, selections, sums of pairs) have layers of
which a thousandth is not zero. A dense product spends its time on the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from parverify.graph.ir import BoundGraph, Const, Node, check, prune
from parverify.ops.sparse import dense, tables

LEAST = 1 << 16  # entries of a weight below which a product costs next to nothing
GAIN = 40  # multiplications that a dense product makes in the time of one pick


Change = Callable[[Node, dict[str, Const]], Node]


def sparsify(graph: BoundGraph) -> BoundGraph:
    """The graph with `sparse` nodes where they are cheaper; weights that depend on parameters stay as they are."""
    return _changed(graph, _sparse)


def densify(graph: BoundGraph) -> BoundGraph:
    """The graph with `linear` nodes in the place of `sparse` ones."""
    return _changed(graph, _dense)


def _changed(graph: BoundGraph, change: Change) -> BoundGraph:
    """The graph of nodes that `change` gives, which may add constants."""
    constants = dict(graph.constants)
    nodes = tuple(change(node, constants) for node in graph.nodes)
    return prune(check(BoundGraph(nodes, graph.output, constants)))


def _sparse(node: Node, constants: dict[str, Const]) -> Node:
    if node.op != "linear":
        return node
    const = constants[node.consts["weight"]]
    weight = const.value
    if const.trainable or weight.numel() < LEAST:
        return node
    filled = weight != 0
    into, back = int(filled.sum(1).max()), int(filled.sum(0).max())
    outs, ins = weight.shape
    if GAIN * max(into, 1) > ins or GAIN * max(back, 1) > outs:
        return node
    (places, factors), (back_places, back_factors) = tables(weight), tables(weight.T)
    made = {"factors": factors, "back_factors": back_factors}
    roles = {role: f"{node.name}.{role}.{len(constants)}" for role in made}
    constants.update({roles[role]: Const(value) for role, value in made.items()})
    if "bias" in node.consts:
        roles["bias"] = node.consts["bias"]
    attrs = {**node.attrs, "places": places.to(torch.int64), "back_places": back_places.to(torch.int64)}
    return replace(node, op="sparse", consts=roles, attrs=attrs)


def _dense(node: Node, constants: dict[str, Const]) -> Node:
    if node.op != "sparse":
        return node
    weight = f"{node.name}.weight.{len(constants)}"
    constants[weight] = Const(dense(node, {"factors": constants[node.consts["factors"]].value}))
    roles = {"weight": weight} | ({"bias": node.consts["bias"]} if "bias" in node.consts else {})
    attrs = {key: value for key, value in node.attrs.items() if key not in ("places", "back_places")}
    return replace(node, op="linear", consts=roles, attrs=attrs)
