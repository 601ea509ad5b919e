"""Slots: the messages between groups of ranks as bytes that are checked before anything believes them.

A slot is a fixed header and a payload. The header says who sends what to whom in which run, and ends with a checksum
over all of it; a slot that is torn, changed on its way, or from another run is `None` to the receiver, as if it had
never come. Domains travel as the struct of arrays they are: a small JSON table of columns, then their raw bytes.
"""

from __future__ import annotations

import enum
import hashlib
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parverify.bab.domains import Domains
from parverify.errors import ParverifyError

_MAGIC = b"pvsl"
_VERSION = 1
# magic, version, kind, sender, receiver, run, epoch, count, credit, length of the payload
_FIELDS = struct.Struct("<4sBBIIQQQQQ")
_DIGEST = 16
HEADER = _FIELDS.size + _DIGEST
_TABLE = struct.Struct("<I")
_MOST_DIMS = 16

_DTYPES: Mapping[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float16, torch.bfloat16, torch.float32, torch.float64,
        torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool,
    )
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Kind(enum.IntEnum):
    """What a message is; see `parverify.bab.stealing` for what each does."""

    REQUEST = 1
    DENY = 2
    GRANT = 3
    CREDIT = 4
    MORE = 5
    ACK = 6
    STOP = 7
    DONE = 8
    END = 9


class Why(enum.IntEnum):
    """Why a search is stopped, the most important last."""

    PAUSE = 0
    WITNESS = 1
    ERROR = 2


@dataclass(frozen=True)
class Message:
    """One message between two groups.

    Args:
        kind: what it is.
        sender, receiver: numbers of the groups.
        epoch: the sender's counter; what it counts depends on the kind.
        count: domains granted, or (in a request) open at the sender; in a `STOP` the `Why`.
        credit: see `parverify.bab.stealing`.
        payload: `Domains` of a grant, bytes of a `STOP` or `END`, else None.
    """

    kind: Kind
    sender: int
    receiver: int
    epoch: int
    count: int = 0
    credit: int = 0
    payload: Any = None


def pack(message: Message, run: int = 0) -> bytes:
    """The message as a slot.

    Args:
        message: its payload is `Domains`, bytes or None.
        run: a number (64 bits) that all groups of one search share; slots of another run are not taken.

    Raises:
        ParverifyError: a column has a dtype that does not travel, or a number does not fit.
    """
    payload = message.payload
    body = encode_domains(payload) if isinstance(payload, Domains) else payload or b""
    try:
        fields = _FIELDS.pack(
            _MAGIC, _VERSION, message.kind, message.sender, message.receiver,
            run, message.epoch, message.count, message.credit, len(body),
        )  # fmt: skip
    except struct.error as error:
        raise ParverifyError(f"a message {message.kind.name} does not fit its header: {error}") from error
    return b"".join((fields, _digest(fields, body), body))


def unpack(slot: bytes | bytearray | memoryview, run: int = 0) -> Message | None:
    """The message in a slot; None if it is torn, changed, of another run, or not a slot at all."""
    view = memoryview(slot)
    if len(view) < HEADER:
        return None
    fields, digest, body = view[: _FIELDS.size], view[_FIELDS.size : HEADER], view[HEADER:]
    magic, version, kind, sender, receiver, its_run, epoch, count, credit, length = _FIELDS.unpack(fields)
    if (magic, version, its_run, length) != (_MAGIC, _VERSION, run, len(body)) or digest != _digest(fields, body):
        return None
    if kind not in Kind.__members__.values():
        return None
    payload: Domains | bytes | None = bytes(body) if kind != Kind.GRANT and len(body) else None
    if kind == Kind.GRANT:
        payload = decode_domains(body)
        if payload is None or len(payload) != count:
            return None
    return Message(Kind(kind), sender, receiver, epoch, count, credit, payload)


def _digest(fields: bytes | memoryview, body: bytes | memoryview) -> bytes:
    found = hashlib.blake2b(fields, digest_size=_DIGEST)
    found.update(body)
    return found.digest()


# --- domains ----------------------------------------------------------------------------------------------------------


def encode_domains(domains: Domains) -> bytes:
    """The columns as bytes: length of the table, the table (JSON: name, dtype, shape), and their contents in turn.

    Raises:
        ParverifyError: a column's dtype does not travel.
    """
    table = []
    contents = []
    for name, column in domains.columns.items():
        if column.dtype not in _NAMES:
            raise ParverifyError(
                f"column {name} of the domains has dtype {column.dtype}, allowed: {', '.join(_DTYPES)}"
            )
        table.append([name, _NAMES[column.dtype], list(column.shape)])
        flat = column.detach().cpu().contiguous().reshape(-1)
        contents.append(flat.view(torch.uint8).numpy().tobytes())
    head = json.dumps(table).encode()
    return b"".join((_TABLE.pack(len(head)), head, *contents))


def decode_domains(data: bytes | memoryview) -> Domains | None:
    """The domains in `encode_domains`' bytes; None unless every size fits exactly."""
    view = memoryview(data)
    if len(view) < _TABLE.size:
        return None
    (length,) = _TABLE.unpack(view[: _TABLE.size])
    head, body = view[_TABLE.size : _TABLE.size + length], view[_TABLE.size + length :]
    try:
        table = json.loads(bytes(head))
    except ValueError:  # what is no JSON, and what is no text
        return None
    if len(head) != length or not _plausible(table, len(body)):
        return None
    columns: dict[str, Tensor] = {}
    start = 0
    for name, kind, shape in table:
        size = math.prod(shape) * _DTYPES[kind].itemsize
        columns[name] = _tensor(body[start : start + size], _DTYPES[kind], shape)
        start += size
    return Domains(columns)


def _tensor(content: memoryview, dtype: torch.dtype, shape: list[int]) -> Tensor:
    """A tensor of its own, aligned, from raw bytes."""
    if not len(content):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=dtype).reshape(shape)


def _plausible(table: Any, size: int) -> bool:
    """Whether a table names distinct columns of equally many domains whose contents take `size` bytes."""
    if not isinstance(table, list) or not all(_is_column(entry) for entry in table):
        return False
    names = {name for name, _, _ in table}
    lengths = {shape[0] for _, _, shape in table}
    total = sum(math.prod(shape) * _DTYPES[kind].itemsize for _, kind, shape in table)
    return "part" in names and len(names) == len(table) and len(lengths) == 1 and total == size


def _is_column(entry: Any) -> bool:
    """Whether an entry of the table is a name, a dtype and a shape with the domain as its first dim."""
    if not (isinstance(entry, list) and len(entry) == 3):
        return False
    name, kind, shape = entry
    if not (isinstance(name, str) and isinstance(kind, str) and kind in _DTYPES and isinstance(shape, list)):
        return False
    return 1 <= len(shape) <= _MOST_DIMS and all(type(length) is int and length >= 0 for length in shape)
