"""Products with a weight, part by part: what `linear` and `conv` do to rows and to values.

A weighted node is one linear map W and a bias. `push` carries rows from its value to its input (A -> A W, contracting
output channels), `pull` carries values from its input to its value (x -> W x, contracting input channels); each is the
adjoint of the other, so a sweep's gradient pulls and a value's gradient pushes. W is cut into `Part`s, ranges of output
and of input channels whose sizes follow from the node alone. Every placement of W, one process included, multiplies the
same parts in the same order, so that sums are rounded alike wherever the parts lie.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from parverify.graph.ir import Node
from parverify.ops.convolution import transpose_conv2d

WEIGHTED = ("linear", "conv")

LEAST_CHANNELS, MOST_CHANNELS, SHARE = 64, 512, 8  # a part is an eighth of the output channels within these limits
LEAST_ENTRIES = 1 << 15  # parts smaller than this cost more calls than they save memory


@dataclass(frozen=True)
class Part:
    """A rectangle of a weight, in channels.

    Args:
        out: range of output channels, [first, behind the last).
        into: range of input channels.
    """

    out: tuple[int, int]
    into: tuple[int, int]

    def __str__(self) -> str:
        return f"[{self.out[0]}:{self.out[1]}, {self.into[0]}:{self.into[1]}]"


@dataclass(frozen=True)
class Piece:
    """A rectangle of the stored weight tensor: ranges of its dims 0 and 1."""

    rows: tuple[int, int]
    columns: tuple[int, int]

    def of(self, weight: Tensor) -> Tensor:
        """The view."""
        view = weight.narrow(0, self.rows[0], self.rows[1] - self.rows[0])
        return view.narrow(1, self.columns[0], self.columns[1] - self.columns[0])

    def covers(self, other: Piece) -> bool:
        """Whether the other one lies in it."""
        pairs = ((self.rows, other.rows), (self.columns, other.columns))
        return all(mine[0] <= theirs[0] and theirs[1] <= mine[1] for mine, theirs in pairs)

    def meet(self, other: Piece) -> Piece | None:
        """What both have; None where that is nothing."""
        rows = max(self.rows[0], other.rows[0]), min(self.rows[1], other.rows[1])
        columns = max(self.columns[0], other.columns[0]), min(self.columns[1], other.columns[1])
        return Piece(rows, columns) if rows[0] < rows[1] and columns[0] < columns[1] else None

    def within(self, other: Piece) -> Piece:
        """The same entries in the coordinates of a piece that covers it."""
        return Piece(
            (self.rows[0] - other.rows[0], self.rows[1] - other.rows[0]),
            (self.columns[0] - other.columns[0], self.columns[1] - other.columns[0]),
        )

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Of the piece, for a weight of shape `whole`."""
        return (self.rows[1] - self.rows[0], self.columns[1] - self.columns[0], *whole[2:])


def channel_dim(node: Node) -> int:
    """The dim of the node's value (and of its input) that holds channels; of one instance, without leading dims."""
    return 1 if node.op == "conv" else len(node.shape) - 1


def out_channels(node: Node) -> int:
    """Output channels."""
    return node.shape[channel_dim(node)]


def in_channels(node: Node) -> int:
    """Input channels."""
    in_shape = node.attrs["in_shapes"][0]
    return int(in_shape[-1] if node.op == "linear" else in_shape[1])


def whole(node: Node) -> Part:
    """All of the weight."""
    return Part((0, out_channels(node)), (0, in_channels(node)))


def multiplications(node: Node, weight_shape: Sequence[int]) -> int:
    """By the weight, for one value; as many for one row."""
    if node.op == "linear":
        return math.prod(weight_shape) * (node.numel // out_channels(node))
    places = node.attrs["in_shapes"][0] if _transposed(node) else node.shape
    return math.prod(weight_shape) * math.prod(places[2:])


def _transposed(node: Node) -> bool:
    return node.op == "conv" and bool(node.attrs["transposed"])


def _groups(node: Node) -> int:
    return int(node.attrs["groups"]) if node.op == "conv" else 1


def piece_of(node: Node, part: Part) -> Piece:
    """Where a part lies in the stored weight: (out, in), (in, out) for a transposed convolution."""
    if _groups(node) > 1:
        # dim 1 counts within a group, and parts are made of whole groups
        first, second = (part.into, out_channels(node)) if _transposed(node) else (part.out, in_channels(node))
        return Piece(first, (0, second // _groups(node)))
    return Piece(part.into, part.out) if _transposed(node) else Piece(part.out, part.into)


def channels(node: Node, first: int, last: int) -> Part:
    """The part of some output channels, with the input channels that they read."""
    groups = _groups(node)
    if groups == 1:
        return Part((first, last), (0, in_channels(node)))
    wide, narrow = out_channels(node) // groups, in_channels(node) // groups
    return Part((first, last), (first // wide * narrow, last // wide * narrow))


def parts(node: Node, weight_shape: Sequence[int]) -> tuple[Part, ...]:
    """The parts that every placement multiplies one by one: ranges of output channels of a fixed size."""
    count = out_channels(node)
    each = max(1, math.prod(weight_shape) // count)
    size = min(MOST_CHANNELS, max(LEAST_CHANNELS, count // SHARE))
    size = max(size, -(-LEAST_ENTRIES // each))
    unit = count // _groups(node) if _groups(node) > 1 else 1
    size = max(unit, size // unit * unit)
    return tuple(channels(node, first, min(first + size, count)) for first in range(0, count, size))


# --- the two maps -----------------------------------------------------------------------------------------------------


def push(node: Node, weight: Tensor, A: Tensor) -> Tensor:
    """Rows (N, *shape) with the output channels of a part -> rows (N, *in_shape) with its input channels.

    Args:
        node: the weighted node; gives geometry only.
        weight: the part's piece of the weight.
        A: the rows.
    """
    if node.op == "linear":
        return A @ weight
    a, in_shape = node.attrs, node.attrs["in_shapes"][0]
    flat = A.reshape(-1, *A.shape[2:])
    groups = _groups_in(node, weight, A.shape[2])
    plain = len(a["stride"]) == 2 and not a["transposed"] and groups == 1 and set(a["dilation"]) == {1}
    if plain and not weight.requires_grad:
        out = transpose_conv2d(flat, weight, a["stride"], a["padding"], in_shape[2:])
        return out.reshape(A.shape[0], in_shape[0], *out.shape[1:])
    extra = [0] * len(a["stride"])
    if not a["transposed"]:
        for i, (stride, padding, dilation) in enumerate(zip(a["stride"], a["padding"], a["dilation"], strict=True)):
            size = (node.shape[2 + i] - 1) * stride - 2 * padding + dilation * (weight.shape[2 + i] - 1) + 1
            extra[i] = in_shape[2 + i] - size
    out = torch.convolution(
        flat, weight, None, a["stride"], a["padding"], a["dilation"], not a["transposed"], extra, groups
    )
    for i, size in enumerate(in_shape[2:]):
        # Output padding of a stride or more looks like further places of the input.
        out = out.narrow(2 + i, 0, size)
    return out.reshape(A.shape[0], in_shape[0], *out.shape[1:])


def pull(node: Node, weight: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Values (B, *in_shape) with the input channels of a part -> values (B, *shape) with its output channels."""
    if node.op == "linear":
        return F.linear(x, weight, bias)
    a = node.attrs
    flat = x.reshape(-1, *x.shape[2:])
    groups = 1 if _groups(node) == 1 else x.shape[2] // (in_channels(node) // _groups(node))
    out = torch.convolution(
        flat, weight, bias, a["stride"], a["padding"], a["dilation"], a["transposed"], a["output_padding"], groups
    )
    return out.reshape(x.shape[0], node.shape[0], *out.shape[1:])


def _groups_in(node: Node, weight: Tensor, channels_given: int) -> int:
    """How many groups a part with so many output channels has."""
    return 1 if _groups(node) == 1 else channels_given // (out_channels(node) // _groups(node))


def pick(node: Node, weight: Tensor, index: Tensor, sign: Tensor, first: int = 0) -> Tensor:
    """`push` of rows `sign * value.flatten()[index]` whose channels all lie in a part: slices of the weight.

    Args:
        node: the weighted node.
        weight: the part's piece.
        index, sign: (N,).
        first: the part's first output channel.

    Returns:
        (N, *in_shape), with the input channels of the part.
    """
    if node.op == "linear":
        return _pick_linear(node, weight, index, sign, first)
    if node.attrs["transposed"]:
        width = math.prod(node.shape[2:])
        count = weight.shape[1] if _groups(node) == 1 else out_channels(node)
        image, place = index // (width * node.shape[1]), index % width
        channel = index // width % node.shape[1] - first
        one = sign.new_zeros(len(index), node.shape[0] * count * width)
        at = (image * count + channel) * width + place
        one = one.scatter(1, at[:, None], sign[:, None])
        return push(node, weight, one.reshape(len(index), node.shape[0], count, *node.shape[2:]))
    return _pick_conv(node, weight, index, sign, first)


def _pick_linear(node: Node, weight: Tensor, index: Tensor, sign: Tensor, first: int) -> Tensor:
    width = node.shape[-1]
    feature, place = index % width - first, index // width
    rows = weight.index_select(0, feature) * sign[:, None]
    positions = node.numel // width
    if positions > 1:
        out = rows.new_zeros(rows.shape[0], positions, rows.shape[1])
        rows = out.index_put((torch.arange(len(index), device=index.device), place), rows)
    return rows.reshape(len(index), *node.attrs["in_shapes"][0][:-1], weight.shape[1])


def _pick_conv(node: Node, weight: Tensor, index: Tensor, sign: Tensor, first: int) -> Tensor:
    """Rows of a convolution: each holds one filter at one place of the image."""
    a, in_shape = node.attrs, node.attrs["in_shapes"][0]
    space, count = node.shape[2:], len(index)
    place: list[Tensor] = []
    rest = index
    for size in reversed(space):
        place.insert(0, rest % size)
        rest = rest // size
    channel, image = rest % node.shape[1] - first, rest // node.shape[1]
    rank, width = len(space), weight.shape[1]
    groups = _groups_in(node, weight, weight.shape[0])
    padded = [size + 2 * p for size, p in zip(in_shape[2:], a["padding"], strict=True)]
    rows = weight.new_zeros(count, in_shape[0], width * groups, *padded)
    start = torch.div(channel, weight.shape[0] // groups, rounding_mode="floor") * width
    view = [-1] + [1] * (1 + rank)
    at: list[Tensor] = [
        torch.arange(count, device=index.device).reshape(view),
        image.reshape(view),
        (start[:, None] + torch.arange(width, device=index.device)).reshape(-1, width, *[1] * rank),
    ]
    for i in range(rank):
        offsets = torch.arange(weight.shape[2 + i], device=index.device) * a["dilation"][i]
        where = (place[i] * a["stride"][i])[:, None] + offsets
        at.append(where.reshape(count, 1, *[1] * i, -1, *[1] * (rank - 1 - i)))
    filters = weight.index_select(0, channel) * sign.reshape(view)
    rows = rows.index_put_(tuple(at), filters)
    for i, (size, p) in enumerate(zip(in_shape[2:], a["padding"], strict=True)):
        if p:
            rows = rows.narrow(3 + i, p, size)
    return rows


def channel_of(node: Node, index: Tensor) -> Tensor:
    """(N,) the output channel of flat positions in the node's value."""
    dim = channel_dim(node)
    inner = math.prod(node.shape[dim + 1 :])
    return index // inner % node.shape[dim]


def bias_rows(node: Node, bias: Tensor, A: Tensor) -> Tensor:
    """(N,) what a bias over output channels adds to rows (N, *shape)."""
    if node.op != "conv":
        if A.numel() == A.shape[0] * A.shape[-1]:
            return A.reshape(A.shape[0], A.shape[-1]) @ bias
        return A.reshape(A.shape[0], -1, A.shape[-1]).sum(1) @ bias
    return A.transpose(1, 2).flatten(2).sum(2) @ bias


def per_channel(node: Node, vector: Tensor) -> Tensor:
    """A vector over output channels, shaped to broadcast against the node's value."""
    return vector.reshape(-1, *[1] * (len(node.shape) - 1 - channel_dim(node)))
