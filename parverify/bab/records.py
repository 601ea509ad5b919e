"""Records of a journal: how tensors become bytes, and how a file of records tells what of it is sound.

A record is its payload's length (8 bytes), its kind (1), the payload, and a checksum (16) of all this and of the
checksum before it. Because checksums are chained, a record is valid only in its place behind those before it: a byte
that changed, a record that is torn, missing, doubled or left over from another file ends the valid part of the file.
A payload is JSON (names, types and shapes of arrays, and figures) followed by the arrays' little-endian bytes; nothing
is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from parverify.errors import ParverifyError

HEAD = struct.Struct("<QB")
DIGEST = 16
FIRST = b"parverify journal 1"  # what the first checksum is chained to
DTYPES = {
    name: getattr(torch, name)
    for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
}
_ALIGNED = 8
_LENGTH = struct.Struct("<Q")


class Kind(IntEnum):
    """What a record says; see `parverify.bab.journal`."""

    HEADER = 1
    START = 2
    SPLIT = 3
    CLOSED = 4
    SENT = 5
    RECEIVED = 6
    VERDICT = 7
    OPEN = 8
    COMMIT = 9


class RecordError(ParverifyError):
    """A payload that is not what its kind of record holds."""


def encode(meta: Mapping[str, Any], arrays: Mapping[str, Tensor] | None = None) -> bytes:
    """A payload.

    Args:
        meta: what JSON can hold.
        arrays: name -> tensor of any shape, of one of `DTYPES`.

    Raises:
        RecordError: for a tensor of another type.
    """
    listed, bodies = [], []
    for name, tensor in (arrays or {}).items():
        kind = str(tensor.dtype).removeprefix("torch.")
        if kind not in DTYPES:
            raise RecordError(f"a journal can't hold {name}, a tensor of {kind}; allowed: {', '.join(DTYPES)}")
        listed.append([name, kind, list(tensor.shape)])
        bodies.append(_padded(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()))
    text = _padded(json.dumps({"meta": meta, "arrays": listed}).encode(), b" ")
    return b"".join([_LENGTH.pack(len(text)), text, *bodies])


def _padded(body: bytes, filler: bytes = b"\0") -> bytes:
    return body + filler * (-len(body) % _ALIGNED)


def decode(payload: bytearray) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The inverse of `encode`; the tensors share the payload's memory.

    Raises:
        RecordError: if the payload is malformed.
    """
    try:
        (length,) = _LENGTH.unpack_from(payload)
        at = _LENGTH.size + length
        head = json.loads(payload[_LENGTH.size : at])
        arrays = {}
        for name, kind, shape in head["arrays"]:
            count = 1
            for size in shape:
                count *= size
            dtype = DTYPES[kind]
            flat = torch.frombuffer(payload, dtype=dtype, count=count, offset=at) if count else torch.empty(0).to(dtype)
            arrays[name] = flat.reshape(shape)
            at += len(flat) * dtype.itemsize
            at += -at % _ALIGNED
        return head["meta"], arrays
    except (struct.error, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise RecordError(f"a record of the journal is malformed: {error}") from error


def checksum(chain: bytes, head: bytes, payload: bytes | bytearray) -> bytes:
    """The checksum of a record behind one whose checksum is `chain`."""
    found = hashlib.blake2b(chain, digest_size=DIGEST)
    found.update(head)
    found.update(payload)
    return found.digest()


class Disk:
    """What a journal does to a file system, in one place, so that tests can let each step fail."""

    def create(self, path: Path) -> BinaryIO:
        """A new, empty file, written without a buffer."""
        return open(path, "xb", buffering=0)

    def lock(self, path: Path) -> BinaryIO | None:
        """An open file that no other process can lock until it is closed; None where the system has no such locks.

        Raises:
            BlockingIOError: another process has it.
        """
        try:
            import fcntl
        except ImportError:
            return None
        handle = open(path, "ab", buffering=0)  # noqa: SIM115 - it is held as long as the lock
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.close()
            raise
        except OSError:  # a file system without locks
            handle.close()
            return None
        return handle

    def sync(self, handle: BinaryIO) -> None:
        """Return when what was written is on the disk."""
        os.fsync(handle.fileno())

    def replace(self, source: Path, target: Path) -> None:
        """Give `source` the name `target`, whatever had it before, in one step."""
        os.replace(source, target)

    def sync_folder(self, folder: Path) -> None:
        """Return when the names in `folder` are on the disk."""
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


class Writer:
    """Appends records to a new file.

    Args:
        path: of the file, which must not exist.
        disk: does it.

    Raises:
        OSError: as every other method that writes.
    """

    def __init__(self, path: Path, disk: Disk) -> None:
        self._disk, self._chain = disk, FIRST
        self._handle = disk.create(path)
        self.path, self.size = path, 0

    def append(self, kind: Kind, payload: bytes) -> None:
        """Write one record behind the others."""
        head = HEAD.pack(len(payload), kind)
        chain = checksum(self._chain, head, payload)
        left = memoryview(b"".join([head, payload, chain]))
        size = self.size + len(left)
        while len(left):  # a file without a buffer may take a part only
            left = left[self._handle.write(left) :]
        self._chain, self.size = chain, size

    def sync(self) -> None:
        """Return when all records are on the disk."""
        self._disk.sync(self._handle)

    def close(self) -> None:
        """Give the file back."""
        self._handle.close()


@dataclass(frozen=True)
class Record:
    """One valid record."""

    kind: Kind
    payload: bytearray


class Reader:
    """The valid records of a file, in order.

    Args:
        path: of the file.

    Attributes:
        flaw: what ended the valid part before the file's end, once all records were read; else empty.
        end: how many bytes were valid so far.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.flaw, self.end = path, "", 0

    def __iter__(self) -> Iterator[Record]:
        chain, self.flaw, self.end = FIRST, "", 0
        try:
            with open(self.path, "rb") as handle:
                size = os.fstat(handle.fileno()).st_size
                while self.end < size:
                    record, chain = self._next(handle, size, chain)
                    if record is None:
                        self.flaw = f"{self.path.name} is damaged or torn at byte {self.end} of {size}"
                        return
                    yield record
        except OSError as error:
            self.flaw = f"{self.path.name}: {error.strerror or error}"

    def _next(self, handle: BinaryIO, size: int, chain: bytes) -> tuple[Record | None, bytes]:
        handle.seek(self.end)
        head = handle.read(HEAD.size)
        if len(head) < HEAD.size:
            return None, chain
        length, kind = HEAD.unpack(head)
        stop = self.end + HEAD.size + length + DIGEST
        if stop > size or kind not in tuple(Kind):
            return None, chain
        payload = bytearray(length)
        if handle.readinto(payload) < length:  # type: ignore[attr-defined]
            return None, chain
        found = handle.read(DIGEST)
        if found != checksum(chain, head, payload):
            return None, chain
        self.end = stop
        return Record(Kind(kind), payload), found


def require_byte_order() -> None:
    """Raise where the machine's numbers are not those of the file format.

    Raises:
        RecordError: on a big-endian machine.
    """
    if sys.byteorder != "little":
        raise RecordError("a journal needs a little-endian machine", "run without a journal")
