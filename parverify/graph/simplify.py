"""Pure graph → graph passes that shorten a graph without changing what it computes.

Elementwise scales are folded into the linear or convolutional operator before them (batch norm), consecutive reshapes
and scales merge, and what nobody reads is dropped. Fewer nodes mean fewer steps in every backward sweep.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from parverify.graph.ir import BoundGraph, Const, Node, check, derive, prune, rename_inputs


def simplify(graph: BoundGraph) -> BoundGraph:
    """All passes, until nothing changes any more."""
    while True:
        before = len(graph.nodes)
        for step in (fold_scales, merge_reshapes):
            graph = prune(check(step(graph)))
        if len(graph.nodes) == before:
            return graph


def _readers(graph: BoundGraph) -> Counter[str]:
    readers = Counter(name for node in graph.nodes for name in node.inputs)
    readers[graph.output] += 1
    return readers


def merge_reshapes(graph: BoundGraph) -> BoundGraph:
    """reshape(reshape(x)) becomes one reshape, and a reshape to the same shape disappears."""
    alias: dict[str, str] = {}
    nodes: list[Node] = []
    by_name: dict[str, Node] = {}
    for node in graph.nodes:
        node = replace(node, inputs=rename_inputs(node.inputs, alias))
        if node.op == "reshape":
            source = by_name[node.inputs[0]]
            if source.op == "reshape":
                node = replace(node, inputs=source.inputs, attrs=source.attrs)
                source = by_name[node.inputs[0]]
            if source.shape == node.shape:
                alias[node.name] = source.name
                continue
        nodes.append(node)
        by_name[node.name] = node
    return BoundGraph(tuple(nodes), rename_inputs([graph.output], alias)[0], graph.constants)


def fold_scales(graph: BoundGraph) -> BoundGraph:
    """A `scale` after `linear`, `conv` or `scale` goes into its constants where the factor is per output channel."""
    readers = _readers(graph)
    constants = dict(graph.constants)
    alias: dict[str, str] = {}
    nodes: list[Node] = []
    place: dict[str, int] = {}
    for node in graph.nodes:
        node = replace(node, inputs=rename_inputs(node.inputs, alias))
        if node.op == "scale":
            at = place[node.inputs[0]]
            folded = _fold(nodes[at], node, constants) if readers[nodes[at].name] == 1 else None
            if folded is not None:
                nodes[at] = folded
                alias[node.name] = folded.name
                readers[folded.name] = readers[node.name]
                continue
        place[node.name] = len(nodes)
        nodes.append(node)
    return BoundGraph(tuple(nodes), rename_inputs([graph.output], alias)[0], constants)


def _fold(target: Node, scale: Node, constants: dict[str, Const]) -> Node | None:
    """`target` with `scale` folded in, or None where it does not fit; adds the new constants."""
    factor, shift = (constants[scale.consts[role]] if role in scale.consts else None for role in ("factor", "shift"))
    if target.op == "scale":
        old = {role: constants[name] for role, name in target.consts.items()}
        made = _fold_into_scale(old, factor, shift)
    elif target.op in ("linear", "conv"):
        flat = [_per_channel(const, target) for const in (factor, shift)]
        if any(value is None and const is not None for value, const in zip(flat, (factor, shift), strict=True)):
            return None
        old = {role: constants[name] for role, name in target.consts.items()}
        made = _fold_into_weight(target, old, flat[0], flat[1])
    else:
        return None
    roles = {}
    for role, const in made.items():
        name = f"{target.name}.{role}.{len(constants)}"
        constants[name] = const
        roles[role] = name
    return replace(target, consts=roles)


def _fold_into_scale(old: dict[str, Const], factor: Const | None, shift: Const | None) -> dict[str, Const]:
    made = dict(old)
    if factor is not None:
        made = {role: derive(torch.mul, const, factor) for role, const in old.items()}
        made.setdefault("factor", factor)
    if shift is not None:
        made["shift"] = derive(torch.add, made["shift"], shift) if "shift" in made else shift
    return made


def _per_channel(const: Const | None, target: Node) -> Const | None:
    """`const` as a vector over the output channels of `target`, or None where it varies along other dimensions."""
    if const is None:
        return None
    channels = target.shape[-1] if target.op == "linear" else target.shape[1]
    shape = tuple(const.value.shape)
    trailing = 0 if target.op == "linear" else len(target.shape) - 2
    if const.value.numel() == 1:
        return derive(lambda v: v.reshape(1).expand(channels), const)
    padded = (1,) * (len(target.shape) - len(shape)) + shape
    wanted = (1,) * (len(target.shape) - 1 - trailing) + (channels,) + (1,) * trailing
    return derive(torch.reshape, const, (channels,)) if padded == wanted else None


def _fold_into_weight(
    target: Node, old: dict[str, Const], factor: Const | None, shift: Const | None
) -> dict[str, Const]:
    weight, bias = old["weight"], old.get("bias")
    if factor is not None:
        weight = derive(_scaler(target), weight, factor)
        bias = None if bias is None else derive(torch.mul, bias, factor)
    if shift is not None:
        bias = shift if bias is None else derive(torch.add, bias, shift)
    return {"weight": weight} | ({} if bias is None else {"bias": bias})


def _scaler(target: Node) -> Callable[[Tensor, Tensor], Tensor]:
    """How a factor per output channel multiplies the weight."""
    if target.op == "conv" and target.attrs["transposed"]:
        groups = target.attrs["groups"]

        def transposed(weight: Tensor, factor: Tensor) -> Tensor:
            per_group = factor.reshape(groups, 1, -1).expand(-1, weight.shape[0] // groups, -1)
            return weight * per_group.reshape(weight.shape[0], -1, *[1] * (weight.dim() - 2))

        return transposed
    return lambda weight, factor: weight * factor.reshape(-1, *[1] * (weight.dim() - 1))
