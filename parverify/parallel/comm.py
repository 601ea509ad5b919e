"""Communication of one rank with the others of its group, behind one small protocol, with everything counted.

Three implementations: `GroupComm` moves data through torch.distributed, `DryComm` moves nothing and only counts (the
cost model runs a program on meta tensors with it), `Alone` is a group of one. All three count in `_Counted`, before
anything moves, so what is predicted is what is measured.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from parverify.errors import DisagreementError, LostRankError, ParverifyError
from parverify.parallel.traffic import CommMeter, received

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

OBJECTS = "objects"
_WORD = 8  # bytes of a number that is agreed on, of a length, of a hash
FOREVER = timedelta(days=30)  # a rank may work alone for long; the launcher, not a timeout, notices the dead


# --- the protocol -----------------------------------------------------------------------------------------------------


class Pending(Protocol):
    """A collective under way. Its tensors must not be touched before `wait` has returned."""

    def wait(self) -> None:
        """Return once it has ended (on an accelerator: once what is queued from here on comes after it)."""


class Comm(Protocol):
    """Communication within one group; every rank of it must make the same calls in the same order.

    Tensors are contiguous. Methods that return `Pending` may return before anything has moved. `broadcast_bytes` needs
    the data on every rank of a dry run, because nothing comes from elsewhere there.
    """

    rank: int
    size: int
    meter: CommMeter

    def all_gather(self, out: Tensor, shard: Tensor) -> Pending:
        """Concatenate the ranks' shards (n, ...) along dim 0 into out (size * n, ...)."""

    def broadcast(self, tensor: Tensor, source: int) -> Pending:
        """Fill the tensor with that of rank `source`."""

    def shift(self, send: Tensor, recv: Tensor, *, back: bool = False) -> Pending:
        """Send to rank - 1 and receive from rank + 1, around the ring; `back` the other way round."""

    def all_reduce(self, tensor: Tensor) -> Pending:
        """Replace the tensor by the sum over all ranks."""

    def reduce_scatter(self, out: Tensor, full: Tensor) -> Pending:
        """Sum full (size * n, ...) over all ranks; out (n, ...) is this rank's piece along dim 0."""

    def send(self, tensor: Tensor, to: int) -> Pending:
        """Send a tensor to one rank, which calls `recv`."""

    def recv(self, tensor: Tensor, source: int) -> Pending:
        """Fill the tensor with what rank `source` sends."""

    def instead(
        self, name: str, nbytes: int, copies: Iterable[tuple[Tensor, Tensor]], *, source: bool = False
    ) -> Pending:
        """Copy what a collective would bring from memory that this rank can read; it is counted as that collective.

        Args:
            name, nbytes, source: as for `received`.
            copies: pairs of what is filled and what it is filled with.
        """

    def all_max(self, value: int) -> int:
        """The largest of all ranks' numbers."""

    def broadcast_bytes(self, data: bytes | None, source: int) -> bytes:
        """The data of rank `source`; the others give None."""

    def barrier(self) -> None:
        """Return once every rank has called it."""


@dataclass(frozen=True)
class _Done:
    """A collective that has ended, or never took place."""

    def wait(self) -> None:
        return


class _Counted:
    """What all implementations share: the checks and the counting, and nothing that moves."""

    def __init__(self, rank: int, size: int, meter: CommMeter | None) -> None:
        if not 0 <= rank < size:
            raise ParverifyError(f"rank {rank} is not in a group of {size}")
        self.rank, self.size = rank, size
        self.meter = meter if meter is not None else CommMeter()

    def all_gather(self, out: Tensor, shard: Tensor) -> Pending:
        """Concatenate the ranks' shards along dim 0."""
        self._whole("all_gather", out, shard)
        self._count("all_gather", shard.nbytes)
        return self._all_gather(out.detach(), shard.detach())

    def broadcast(self, tensor: Tensor, source: int) -> Pending:
        """Fill the tensor with that of rank `source`."""
        self._plain("broadcast", tensor)
        self._count("broadcast", tensor.nbytes, source=source == self.rank)
        return self._broadcast(tensor.detach(), source)

    def shift(self, send: Tensor, recv: Tensor, *, back: bool = False) -> Pending:
        """Send to rank - 1 and receive from rank + 1; `back` the other way round."""
        self._plain("shift", send, recv)
        self._count("shift", recv.nbytes)
        return self._shift(send.detach(), recv.detach(), 1 if back else -1)

    def all_reduce(self, tensor: Tensor) -> Pending:
        """Replace the tensor by the sum over all ranks."""
        self._plain("all_reduce", tensor)
        self._count("all_reduce", tensor.nbytes)
        return self._all_reduce(tensor.detach())

    def reduce_scatter(self, out: Tensor, full: Tensor) -> Pending:
        """Sum over all ranks, keep this rank's piece along dim 0."""
        self._whole("reduce_scatter", full, out)
        self._count("reduce_scatter", out.nbytes)
        return self._reduce_scatter(out.detach(), full.detach())

    def send(self, tensor: Tensor, to: int) -> Pending:
        """Send a tensor to one rank."""
        self._plain("send", tensor)
        self._count("send", tensor.nbytes)
        return self._send(tensor.detach(), to)

    def recv(self, tensor: Tensor, source: int) -> Pending:
        """Fill the tensor with what rank `source` sends."""
        self._plain("recv", tensor)
        self._count("recv", tensor.nbytes)
        return self._recv(tensor.detach(), source)

    def instead(
        self, name: str, nbytes: int, copies: Iterable[tuple[Tensor, Tensor]], *, source: bool = False
    ) -> Pending:
        """Copy what a collective would bring."""
        self._count(name, nbytes, source=source)
        started = time.perf_counter()
        for target, given in copies:
            target.copy_(given)
        self.meter.spend(name, time.perf_counter() - started)
        return _Done()

    def all_max(self, value: int) -> int:
        """The largest of all ranks' numbers."""
        self._count("all_max", _WORD)
        return self._all_max(value)

    def broadcast_bytes(self, data: bytes | None, source: int) -> bytes:
        """The data of rank `source`."""
        if data is None and source == self.rank:
            raise ParverifyError("the source of a broadcast has no data to send")
        found = self._broadcast_bytes(data, source)
        self._count(OBJECTS, _WORD + len(found), source=source == self.rank)
        return found

    def barrier(self) -> None:
        """Return once every rank has called it."""
        self._count("barrier", 0)
        self._barrier()

    def _count(self, name: str, nbytes: int, *, source: bool = False) -> None:
        self.meter.record(name, received(name, nbytes, self.size, source=source))

    def _plain(self, name: str, *tensors: Tensor) -> None:
        for tensor in tensors:
            if not tensor.is_contiguous():
                raise ParverifyError(f"{name} needs contiguous tensors, not strides {tensor.stride()}")

    def _whole(self, name: str, full: Tensor, shard: Tensor) -> None:
        self._plain(name, full, shard)
        if full.dtype != shard.dtype or full.numel() != self.size * shard.numel():
            raise ParverifyError(
                f"{name} between {list(full.shape)} {full.dtype} and {self.size} x {list(shard.shape)} {shard.dtype}"
            )

    def _all_gather(self, out: Tensor, shard: Tensor) -> Pending:
        return _Done()

    def _broadcast(self, tensor: Tensor, source: int) -> Pending:
        return _Done()

    def _shift(self, send: Tensor, recv: Tensor, by: int) -> Pending:
        return _Done()

    def _all_reduce(self, tensor: Tensor) -> Pending:
        return _Done()

    def _reduce_scatter(self, out: Tensor, full: Tensor) -> Pending:
        return _Done()

    def _send(self, tensor: Tensor, to: int) -> Pending:
        return _Done()

    def _recv(self, tensor: Tensor, source: int) -> Pending:
        return _Done()

    def _all_max(self, value: int) -> int:
        return value

    def _broadcast_bytes(self, data: bytes | None, source: int) -> bytes:
        if data is None:
            raise ParverifyError("no rank can send the data that this rank waits for")
        return data

    def _barrier(self) -> None:
        return


class DryComm(_Counted):
    """Any rank of any group, without the others: moves nothing, leaves outputs as they are, counts everything.

    Args:
        rank, size: which rank of how many.
        meter: one to count into; a new one if None.
    """

    def __init__(self, rank: int, size: int, meter: CommMeter | None = None) -> None:
        super().__init__(rank, size, meter)


class Alone(_Counted):
    """A group of one: results are copies, calls are counted with 0 bytes."""

    def __init__(self, meter: CommMeter | None = None) -> None:
        super().__init__(0, 1, meter)

    def _all_gather(self, out: Tensor, shard: Tensor) -> Pending:
        return self._copy(out, shard)

    def _shift(self, send: Tensor, recv: Tensor, by: int) -> Pending:
        return self._copy(recv, send)

    def _reduce_scatter(self, out: Tensor, full: Tensor) -> Pending:
        return self._copy(out, full)

    def _send(self, tensor: Tensor, to: int) -> Pending:
        raise ParverifyError("a group of one has nobody to send to")

    def _recv(self, tensor: Tensor, source: int) -> Pending:
        raise ParverifyError("a group of one has nobody to receive from")

    @staticmethod
    def _copy(out: Tensor, given: Tensor) -> Pending:
        if out.data_ptr() != given.data_ptr() or out.is_meta:
            out.copy_(given.reshape(out.shape))
        return _Done()


# --- over torch.distributed -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _losing(name: str) -> Iterator[None]:
    """Turn what torch.distributed raises into `LostRankError`; memory that runs out stays what it is."""
    try:
        yield
    except RuntimeError as error:
        if type(error).__name__ == "OutOfMemoryError" or "allocate memory" in str(error):
            raise
        raise LostRankError(f"{name} failed, another rank is gone or does something else: {_brief(error)}") from error


def _brief(error: RuntimeError) -> str:
    """The first sentence, without the place in the backend's source that stands before it."""
    return re.sub(r"^\[[^\]]*\]\s*", "", str(error)).partition(". ")[0]


class _Works:
    """Works of torch.distributed; keeps their tensors alive until they have ended."""

    def __init__(self, name: str, meter: CommMeter, works: Sequence[Any], held: Sequence[Tensor]) -> None:
        self._name, self._meter, self._works, self._held = name, meter, works, held

    def wait(self) -> None:
        """Wait for all of them; a second call returns at once."""
        started = time.perf_counter()
        with _losing(self._name):
            for work in self._works:
                work.wait()
        if self._works:
            self._meter.spend(self._name, time.perf_counter() - started)
        self._works, self._held = (), ()


class GroupComm(_Counted):
    """A torch.distributed group: gloo for tensors on the CPU (and for bytes and numbers), NCCL on CUDA.

    Args:
        group: this process belongs to it; the whole world if None. It must have a backend for the CPU.
        meter: one to count into; a new one if None.
    """

    def __init__(self, group: ProcessGroup | None = None, meter: CommMeter | None = None) -> None:
        import torch.distributed as dist

        super().__init__(dist.get_rank(group), dist.get_world_size(group), meter)
        self.group = group if group is not None else dist.group.WORLD
        self._ranks = dist.get_process_group_ranks(self.group)
        # Newer torch renames both, and warns of the old names.
        self._gather_whole = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self._scatter_whole = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def _start(self, name: str, held: Sequence[Tensor], start: Callable[[], Any]) -> Pending:
        """Start an operation; the time counts that the call takes, and later the wait."""
        started = time.perf_counter()
        with _losing(name):
            works = start()
        self.meter.spend(name, time.perf_counter() - started)
        listed = works if isinstance(works, list) else [works]
        return _Works(name, self.meter, [work for work in listed if work is not None], held)

    def _all_gather(self, out: Tensor, shard: Tensor) -> Pending:
        flat, piece = out.reshape(-1), shard.reshape(-1)
        return self._start(
            "all_gather", (flat, piece), lambda: self._gather_whole(flat, piece, group=self.group, async_op=True)
        )

    def _broadcast(self, tensor: Tensor, source: int) -> Pending:
        import torch.distributed as dist

        rank = self._ranks[source]
        return self._start("broadcast", (tensor,), lambda: dist.broadcast(tensor, rank, self.group, async_op=True))

    def _shift(self, send: Tensor, recv: Tensor, by: int) -> Pending:
        import torch.distributed as dist

        if self.size == 1:
            recv.copy_(send)
            return _Done()
        to, source = (self._ranks[(self.rank + step) % self.size] for step in (by, -by))
        both = [dist.P2POp(dist.isend, send, to, self.group), dist.P2POp(dist.irecv, recv, source, self.group)]
        return self._start("shift", (send, recv), lambda: dist.batch_isend_irecv(both))

    def _all_reduce(self, tensor: Tensor) -> Pending:
        import torch.distributed as dist

        return self._start("all_reduce", (tensor,), lambda: dist.all_reduce(tensor, group=self.group, async_op=True))

    def _reduce_scatter(self, out: Tensor, full: Tensor) -> Pending:
        piece, flat = out.reshape(-1), full.reshape(-1)
        return self._start(
            "reduce_scatter",
            (piece, flat),
            lambda: self._scatter_whole(piece, flat, group=self.group, async_op=True),
        )

    def _send(self, tensor: Tensor, to: int) -> Pending:
        import torch.distributed as dist

        return self._start("send", (tensor,), lambda: dist.isend(tensor, self._ranks[to], self.group))

    def _recv(self, tensor: Tensor, source: int) -> Pending:
        import torch.distributed as dist

        return self._start("recv", (tensor,), lambda: dist.irecv(tensor, self._ranks[source], self.group))

    def _all_max(self, value: int) -> int:
        import torch.distributed as dist

        number = torch.tensor([value])
        self._start(
            "all_max", (), lambda: dist.all_reduce(number, dist.ReduceOp.MAX, group=self.group, async_op=True)
        ).wait()
        return int(number)

    def _broadcast_bytes(self, data: bytes | None, source: int) -> bytes:
        length = torch.tensor([len(data or b"")])
        self._send_all(length, source)
        content = torch.empty(int(length), dtype=torch.uint8)
        if self.rank == source and data:
            content = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if len(content):
            self._send_all(content, source)
        return content.numpy().tobytes()

    def _send_all(self, tensor: Tensor, source: int) -> None:
        import torch.distributed as dist

        rank = self._ranks[source]
        self._start(OBJECTS, (), lambda: dist.broadcast(tensor, rank, self.group, async_op=True)).wait()

    def _barrier(self) -> None:
        import torch.distributed as dist

        # A sum on the CPU: the barrier of torch.distributed picks a device by itself.
        number = torch.zeros(1)
        self._start("barrier", (), lambda: dist.all_reduce(number, group=self.group, async_op=True)).wait()


# --- agreement --------------------------------------------------------------------------------------------------------


def agree(comm: Comm, tensors: Mapping[str, Tensor]) -> None:
    """Check that every rank holds the same tensors, bit for bit; one all_gather of 8 bytes a tensor.

    Args:
        comm: the group; every rank calls this with the same names in the same order.
        tensors: what must be equal. In a dry run, or where one is on the meta device, nothing is compared.

    Raises:
        DisagreementError: naming the first tensor that differs, and the ranks that differ from rank 0.
    """
    agreeing(comm, tensors)()


def agreeing(comm: Comm, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
    """As `agree`, but it returns when this rank has told the others; what it returns waits for them, and may raise."""
    hashes = torch.zeros(len(tensors), dtype=torch.int64)
    dry = isinstance(comm, DryComm) or any(tensor.is_meta for tensor in tensors.values())
    if comm.size > 1 and not dry:
        hashes = torch.tensor([_hash(name, tensor) for name, tensor in tensors.items()], dtype=torch.int64)
    gathered = hashes.new_zeros(comm.size * len(hashes))
    pending, names = comm.all_gather(gathered, hashes), list(tensors)

    def answers() -> None:
        pending.wait()
        table = gathered.reshape(comm.size, -1)
        differs = table != table[0]
        if not dry and differs.any():
            place = int(differs.any(0).nonzero()[0])
            raise DisagreementError(names[place], differs[:, place].nonzero().flatten().tolist())

    return answers


def _hash(name: str, tensor: Tensor) -> int:
    """64 bits over a tensor's name, dtype, shape and bytes."""
    state = hashlib.blake2b(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=_WORD)
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.numel():
        state.update(flat.view(torch.uint8).numpy().data)
    return int.from_bytes(state.digest(), "little", signed=True)
