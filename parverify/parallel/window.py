"""Memory that the ranks of one machine read from each other.

gloo takes a tensor from one process to another through the loopback interface: the kernel copies every byte twice, on
the cores that are to multiply. Weights don't change while they are divided, so they need not be sent again and again.
Every rank lays its pieces into an anonymous file, which the others map; a piece then costs one copy, and nobody waits
for anybody. Or all lay their parts of a tensor into one file, behind each other, and each has the whole. Where ranks
are on several machines, or the system allows no such file, they send as ever.
"""

from __future__ import annotations

import logging
import mmap
import os
import pickle
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from parverify.parallel.comm import Comm, GroupComm

_LOG = logging.getLogger(__name__)
_ALIGNED = 64  # bytes, a cache line
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class _Place:
    """Where one tensor lies in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    def of(self, memory: mmap.mmap) -> Tensor:
        count = torch.Size(self.shape).numel()
        return torch.frombuffer(memory, dtype=self.dtype, count=count, offset=self.offset).view(self.shape)


@dataclass(frozen=True)
class _Offer:
    """What a rank tells the others: which machine it is on, and how they open its file there.

    Args:
        machine: what only processes that can open each other's files have in common.
        path: of the file; None if the rank has none to show.
        length: of the file in bytes; 0 where nothing lies in it.
        places: key -> where it lies.
    """

    machine: tuple[str, str]
    path: str | None
    length: int
    places: Mapping[Hashable, _Place]

    def map(self) -> dict[Hashable, Tensor]:
        """The tensors, in memory of the rank that offers them; nothing written to them here reaches it."""
        if self.path is None or not self.length:
            return {}
        file = os.open(self.path, os.O_RDONLY)
        try:
            memory = mmap.mmap(file, self.length, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(file)
        return {key: place.of(memory) for key, place in self.places.items()}


class _File:
    """An anonymous file with places for tensors."""

    def __init__(self, tensors: Mapping[Key, Tensor]) -> None:
        self.places: dict[Hashable, _Place] = {}
        self.length = 0
        for key, tensor in tensors.items():
            if tensor.numel():
                self.places[key] = _Place(tensor.dtype, tuple(tensor.shape), self.length)
                self.length += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
        self.descriptor = os.memfd_create("parverify")
        try:
            if self.length:
                os.ftruncate(self.descriptor, self.length)
                self._memory = mmap.mmap(self.descriptor, self.length)
        except BaseException:
            os.close(self.descriptor)
            raise

    def keep(self, key: Key, tensor: Tensor) -> Tensor:
        """The tensor as it lies in the file, where it has a place there.

        Raises:
            OSError: there is no room.
        """
        if key not in self.places:
            return tensor
        place = self.places[key]
        os.posix_fallocate(self.descriptor, place.offset, tensor.nbytes)  # fails here, not when a page is written
        return place.of(self._memory).copy_(tensor)


def open_window(comm: Comm, tensors: dict[Key, Tensor]) -> dict[Key, Tensor] | None:
    """Let the ranks of a group read each other's tensors, which must not change from here on; all ranks call this.

    Args:
        comm: the group.
        tensors: of this rank, on the CPU. They are replaced, one by one, by equal ones that the others can read.

    Returns:
        The tensors of all ranks by their keys, a key of several ranks once; None, on all ranks, if they can't be read.
    """
    if comm.size == 1 or not isinstance(comm, GroupComm):
        return None
    file, reason, offer = None, "", _Offer(_machine(), None, 0, {})
    try:
        file = _File(tensors)
        for key in list(tensors):
            tensors[key] = file.keep(key, tensors[key])
        offer = _Offer(offer.machine, f"/proc/{os.getpid()}/fd/{file.descriptor}", file.length, file.places)
    except (OSError, ValueError, AttributeError) as error:  # no room, or no such system call
        reason = str(error)
    sent = pickle.dumps(offer)
    found: dict[Key, Tensor] = {}
    for rank in range(comm.size):
        # from one of our own ranks
        other: _Offer = pickle.loads(comm.broadcast_bytes(sent if rank == comm.rank else None, rank))
        try:
            if other.machine != offer.machine:
                reason = reason or "they are on different machines"
            elif other.path is None:
                reason = reason or f"rank {rank} has no file to show"
            elif not reason:
                found |= tensors if rank == comm.rank else other.map()  # type: ignore[arg-type]
        except (OSError, ValueError) as error:  # the latter from mmap, for a file that is shorter than it should be
            reason = str(error)
    return found if _succeeded(comm, reason, None if file is None else file.descriptor) else None


def _succeeded(comm: Comm, reason: str, descriptor: int | None) -> bool:
    """Whether no rank has a reason to send weights instead; this rank's file is closed, as nobody opens it any more."""
    failed = comm.all_max(int(bool(reason)))
    if descriptor is not None:
        os.close(descriptor)
    if failed:
        _LOG.info("weights are sent from rank to rank: %s", reason or "another rank can't read those of all others")
    return not failed


@dataclass(frozen=True)
class Together:
    """A tensor that the ranks of a machine hold together, each its part: what one writes all see.

    Args:
        part: (n,) this rank's.
        whole: (P n,) all ranks', in order.
    """

    part: Tensor
    whole: Tensor


def hold_together(comm: Comm, parts: Sequence[Tensor]) -> list[Together] | None:
    """Lay the ranks' parts of tensors into memory that all of them have; all ranks call this.

    Args:
        comm: the group.
        parts: of this rank, (n,) on the CPU, each as long and of the same dtype on every rank.

    Returns:
        What holds copies of the parts; None, on all ranks, if there can be no such memory.
    """
    if comm.size == 1 or not isinstance(comm, GroupComm):
        return None
    offsets, length = [], 0
    for part in parts:
        offsets.append(length)
        length += -(-comm.size * part.nbytes // _ALIGNED) * _ALIGNED
    file, reason, found = None, "", []
    machine, path = _machine(), ""
    if comm.rank == 0:
        try:
            file = os.memfd_create("parverify")
            os.ftruncate(file, length)
            path = f"/proc/{os.getpid()}/fd/{file}"
        except (OSError, AttributeError) as error:
            reason = str(error)
    first = pickle.loads(comm.broadcast_bytes(pickle.dumps((machine, path)) if comm.rank == 0 else None, 0))
    try:
        if first[0] != machine:
            reason = "they are on different machines"
        elif first[1] and length:
            found = _parts_in(first[1], length, offsets, parts, comm)
        elif not first[1]:
            reason = reason or "rank 0 has no file to show"
    except (OSError, ValueError) as error:
        reason = str(error)
    return found if _succeeded(comm, reason, file) else None


def _parts_in(path: str, length: int, offsets: Sequence[int], parts: Sequence[Tensor], comm: Comm) -> list[Together]:
    """Tensors in a file of that length, at these offsets, with this rank's parts copied into them."""
    file = os.open(path, os.O_RDWR)
    try:
        for offset, part in zip(offsets, parts, strict=True):
            if part.numel():  # fails here, not when a page is written
                os.posix_fallocate(file, offset + comm.rank * part.nbytes, part.nbytes)
        memory = mmap.mmap(file, length)
    finally:
        os.close(file)
    found = []
    for offset, part in zip(offsets, parts, strict=True):
        if not part.numel():
            found.append(Together(part, part))
            continue
        mine = _Place(part.dtype, tuple(part.shape), offset + comm.rank * part.nbytes).of(memory).copy_(part)
        whole = _Place(part.dtype, (comm.size * part.numel(),), offset).of(memory)
        found.append(Together(mine, whole))
    return found


def _machine() -> tuple[str, str]:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip(), os.readlink("/proc/self/ns/pid")
    except OSError:
        return "", str(os.getpid())  # nobody else's
