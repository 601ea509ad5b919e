"""Slots: what is packed comes out alike, and nothing that was changed comes out at all."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
import torch

from parverify.bab.domains import Domains
from parverify.errors import ParverifyError
from parverify.parallel.slots import HEADER, Kind, Message, decode_domains, encode_domains, pack, unpack

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int64, torch.bool]


def domains(count: int = 3) -> Domains:
    """Columns of every dtype, with odd sizes, an empty dim, and a column that is not contiguous."""
    columns = {str(dtype): torch.arange(count * 5).reshape(count, 5).to(dtype) for dtype in DTYPES}
    more = {
        "part": torch.arange(count),
        "lower": -torch.arange(count).double(),
        "none": torch.zeros(count, 0, 2),
        "strided": torch.arange(2.0 * count).reshape(2, count).T,
        "odd": torch.arange(count, dtype=torch.int8),
        "nan": torch.tensor([torch.nan, -torch.inf, -0.0] * count)[:count],
    }
    return Domains({**more, **columns})


def same(a: Domains, b: Domains) -> bool:
    """Whether two batches are equal bit for bit, in the order of columns too."""
    return list(a.columns) == list(b.columns) and all(
        x.dtype == y.dtype and x.shape == y.shape and torch.equal(raw(x), raw(y))
        for x, y in zip(a.columns.values(), b.columns.values(), strict=True)
    )


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_domains_come_out_alike(count: int) -> None:
    given = domains(count)
    message = Message(Kind.GRANT, 2, 5, 7, count, 1 << 40, given)
    found = unpack(pack(message, run=9), run=9)
    assert found is not None and same(found.payload, given)
    assert (found.kind, found.sender, found.receiver, found.epoch, found.count, found.credit) == (
        Kind.GRANT, 2, 5, 7, count, 1 << 40,
    )  # fmt: skip
    for column in found.payload.columns.values():
        column.zero_()  # writable, and its own


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.GRANT])
def test_other_messages_come_out_alike(kind: Kind) -> None:
    for payload in (None, b"a witness"):
        message = Message(kind, 0, 1, 3, 4, 5, payload)
        assert unpack(pack(message)) == message


def test_every_flipped_bit_and_every_torn_slot_is_noticed() -> None:
    slot = pack(Message(Kind.GRANT, 0, 1, 0, 2, 1, domains(2)))
    assert unpack(slot) is not None
    for place in range(len(slot)):
        changed = bytearray(slot)
        changed[place] ^= 1 << place % 8
        assert unpack(changed) is None
        assert unpack(slot[:place]) is None
    assert unpack(slot + b"\0") is None


def test_a_slot_of_another_run_is_stale() -> None:
    slot = pack(Message(Kind.ACK, 0, 1, 3), run=1)
    assert unpack(slot, run=1) is not None
    assert unpack(slot, run=2) is None


def test_a_grant_has_as_many_domains_as_it_says() -> None:
    assert unpack(pack(Message(Kind.GRANT, 0, 1, 0, 4, 1, domains(3)))) is None
    assert unpack(pack(Message(Kind.GRANT, 0, 1, 0, 4, 1, None))) is None


def table(entries: Any, content: bytes = b"", length: int | None = None) -> bytes:
    head = json.dumps(entries).encode()
    return struct.pack("<I", len(head) if length is None else length) + head + content


PART = ["part", "int64", [1]]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\1\0",
        table([PART], bytes(8), length=1 << 31),
        struct.pack("<I", 3) + b"\xff\xfe[",
        table({"part": 1}),
        table([]),
        table([PART], bytes(7)),
        table([PART], bytes(9)),
        table([PART, PART], bytes(16)),
        table([["lower", "float64", [1]]], bytes(8)),
        table([PART, ["x", "float64", [2]]], bytes(24)),
        table([["part", "complex64", [1]]], bytes(8)),
        table([["part", "int64", []]], bytes(8)),
        table([["part", "int64", [-1, -1]]], bytes(8)),
        table([["part", "int64", [True]]], bytes(8)),
        table([["part", "int64", [1.0]]], bytes(8)),
        table([["part", "int64", [1] * 17]], bytes(8)),
        table([["part", "int64"]], bytes(8)),
        table([[["part"], "int64", [1]]], bytes(8)),
    ],
)  # fmt: skip
def test_what_is_no_table_of_columns_gives_nothing(data: bytes) -> None:
    assert decode_domains(data) is None


def test_the_cases_above_are_near_to_one_that_is_right() -> None:
    found = decode_domains(table([PART, ["x", "float64", [1, 2]]], bytes(24)))
    assert found is not None and found["x"].shape == (1, 2)


def test_what_does_not_travel_is_named() -> None:
    bad = Domains({"part": torch.zeros(1), "phase": torch.zeros(1, dtype=torch.complex64)})
    with pytest.raises(ParverifyError, match="column phase"):
        encode_domains(bad)
    with pytest.raises(ParverifyError, match="CREDIT does not fit"):
        pack(Message(Kind.CREDIT, 0, 1, 0, credit=1 << 64))


def test_a_message_without_payload_is_short() -> None:
    assert len(pack(Message(Kind.REQUEST, 0, 1, 1))) == HEADER < 128
