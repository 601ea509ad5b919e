"""Which weights pair up: a column node, whose output channels are divided, with the row nodes that read it.

Between a column and its rows every rank has some channels of everything, and nothing is communicated (Megatron-LM,
arXiv:1909.08053, section 3; for bounds arXiv:2606.09377). So all that reads the column must be elementwise, up to
weights that contract the divided channels again. Pairs are found greedily from the input; a weight left over is divided
alone where it has enough output channels, else it stays whole on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from parverify.graph.ir import BoundGraph, Node
from parverify.ops.weighted import WEIGHTED, channel_dim, in_channels, out_channels


@dataclass(frozen=True)
class Zone:
    """A column, the activations behind it, and the rows at its end.

    Args:
        column: weighted node whose output channels are divided.
        inside: the activations between, in topological order.
        rows: weighted nodes whose input channels are divided.
    """

    column: str
    inside: tuple[str, ...]
    rows: tuple[str, ...]


@dataclass(frozen=True)
class Zones:
    """What becomes of every weighted node.

    Args:
        pairs: the zones, from the input on.
        alone: nodes that are divided by output channels, with nothing divided around them.
        whole: node name -> why it stays whole on every rank.
    """

    pairs: tuple[Zone, ...] = ()
    alone: tuple[str, ...] = ()
    whole: Mapping[str, str] = field(default_factory=dict)


def find_zones(graph: BoundGraph, names: Iterable[str], size: int) -> Zones:
    """Pair up weighted nodes.

    Args:
        graph: the network.
        names: the weighted nodes that may be divided.
        size: ranks; a node with fewer output channels isn't divided by them.
    """
    wanted = set(names)
    readers: dict[str, list[Node]] = {node.name: [] for node in graph}
    for node in graph:
        for name in dict.fromkeys(node.inputs):
            readers[name].append(node)
    pairs: list[Zone] = []
    alone: list[str] = []
    kept: dict[str, str] = {}
    rows: set[str] = set()
    for node in graph:
        if node.op not in WEIGHTED or node.name not in wanted or node.name in rows:
            continue
        reason = _undivided(node, size)
        zone = _zone(graph, node, readers, wanted) if reason is None else None
        if reason is not None:
            kept[node.name] = reason
        elif zone is None:
            alone.append(node.name)
        else:
            pairs.append(zone)
            rows.update(zone.rows)
    return Zones(tuple(pairs), tuple(alone), kept)


def _undivided(node: Node, size: int) -> str | None:
    """Why a node's output channels can't be divided."""
    if node.op == "conv" and node.attrs["groups"] > 1:
        return f"a convolution in {node.attrs['groups']} groups"
    if out_channels(node) < size:
        return f"{out_channels(node)} output channels for {size} ranks"
    return None


def _fits(node: Node) -> bool:
    """Whether a node may begin or end a zone: the channels of its value are then one range of scalars each."""
    if node.op == "linear":
        return node.numel == out_channels(node)
    return node.attrs["groups"] == 1 and not node.attrs["transposed"] and node.shape[0] == 1


def _zone(graph: BoundGraph, column: Node, readers: Mapping[str, list[Node]], wanted: set[str]) -> Zone | None:
    """The zone that a node begins; None where something other than activations and weights reads it."""
    if not _fits(column):
        return None
    reached, inside, rows = [column.name], [], []
    for name in reached:
        if name == graph.output:
            return None
        for reader in readers[name]:
            if reader.op == "act":
                if reader.name not in reached:
                    reached.append(reader.name)
                    inside.append(reader.name)
            elif reader.op == column.op and reader.name in wanted and _fits(reader) and _reads(reader, column):
                rows.append(reader.name)
            else:
                return None
    return Zone(column.name, tuple(inside), tuple(rows)) if rows else None


def _reads(row: Node, column: Node) -> bool:
    """Whether the row contracts just the channels that the column gives."""
    return channel_dim(row) == channel_dim(column) and in_channels(row) == out_channels(column)
