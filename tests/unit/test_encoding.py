"""Bytes from peers: taken when they hold together, refused with ProtocolError otherwise, never anything else."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric_kv.encoding import decode, encode
from fabric_kv.errors import ConfigError, ProtocolError


class Record(msgspec.Struct, frozen=True, array_like=True):
    name: str
    data: bytes
    numbers: tuple[int, ...] = ()


def read(data: bytes, *, version: int = 1, limit: int = 4096) -> Record:
    return decode(b"TEST", version, Record, data, what="record", limit=limit)


records = st.builds(
    Record, st.text("abc\u00e9\u4e16", max_size=20), st.binary(max_size=200), st.tuples(st.integers(0, 2**64 - 1))
)


@given(records)
def test_round_trip(record: Record) -> None:
    assert read(encode(b"TEST", 1, record)) == record


def test_integers_of_numpy_are_integers() -> None:
    numbers = (np.int64(5), np.uint8(6))
    assert read(encode(b"TEST", 1, Record("a", b"", numbers))).numbers == (5, 6)


@pytest.mark.parametrize("number", [object(), 2**64, np.float32(1.0)])
def test_what_has_no_bytes_is_refused_by_its_maker(number: Any) -> None:
    with pytest.raises(ConfigError, match="this Record has no bytes: "):
        encode(b"TEST", 1, Record("a", b"", (number,)))


@given(records, st.data())
def test_truncated_bytes_are_refused(record: Record, data: st.DataObject) -> None:
    whole = encode(b"TEST", 1, record)
    with pytest.raises(ProtocolError, match="record"):
        read(whole[: data.draw(st.integers(0, len(whole) - 1))])


@given(records, st.data())
def test_flipped_bits_never_raise_anything_else(record: Record, data: st.DataObject) -> None:
    whole = bytearray(encode(b"TEST", 1, record))
    for _ in range(data.draw(st.integers(1, 4))):
        bit = data.draw(st.integers(0, 8 * len(whole) - 1))
        whole[bit // 8] ^= 1 << bit % 8
    with contextlib.suppress(ProtocolError):
        read(bytes(whole))


@given(st.binary(max_size=300))
def test_noise_never_raises_anything_else(noise: bytes) -> None:
    for data in (noise, b"TEST\x01\x00" + noise):
        with contextlib.suppress(ProtocolError):
            read(data)


def test_trailing_bytes_are_refused() -> None:
    with pytest.raises(ProtocolError, match="trailing"):
        read(encode(b"TEST", 1, Record("a", b"")) + b"\x00")


def test_another_version_is_named() -> None:
    with pytest.raises(ProtocolError, match="the peer speaks version 2, this side speaks 1"):
        read(encode(b"TEST", 2, Record("a", b"")))


def test_another_kind_is_named() -> None:
    with pytest.raises(ProtocolError, match=r"b'ELSE' instead of b'TEST'"):
        read(encode(b"ELSE", 1, Record("a", b"")))


def test_size_is_checked_before_parsing() -> None:
    with pytest.raises(ProtocolError, match="5000 bytes are above the limit of 4096"):
        read(b"TEST\x01\x00" + bytes(4994))


@pytest.mark.parametrize("data", [None, "TEST", 7, ["TEST"]])
def test_what_is_no_bytes_is_refused(data: object) -> None:
    with pytest.raises(ProtocolError, match="expected bytes"):
        read(data)  # type: ignore[arg-type]


def test_bytearray_and_memoryview_are_bytes() -> None:
    data = encode(b"TEST", 1, Record("a", b"b"))
    assert read(bytearray(data)) == read(memoryview(data)) == Record("a", b"b")


def test_deep_nesting_is_a_protocol_error() -> None:
    # An item beyond the known fields is skipped whatever it holds, and skipping recurses.
    deep = b"TEST\x01\x00" + b"\x94\xa1a\xc4\x00\x90" + b"\x91" * 500_000
    with pytest.raises(ProtocolError):
        read(deep, limit=1 << 20)


@pytest.mark.parametrize(
    "head",
    [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"],
    ids=["array32", "map32", "bin32", "str32"],
)
def test_an_announced_size_allocates_nothing(head: bytes) -> None:
    for prefix in (b"", b"\x93", b"\x93\xa1a\xc4\x00"):
        with pytest.raises(ProtocolError):
            read(b"TEST\x01\x00" + prefix + head)


def test_ten_thousand_mutations(seed: int) -> None:
    source = random.Random(seed)
    whole = encode(b"TEST", 1, Record("name", bytes(range(64)), (1, 2**40, 2**63)))
    for _ in range(10_000):
        data = bytearray(whole)
        for _ in range(source.randrange(1, 5)):
            match source.randrange(3):
                case 0:
                    data[source.randrange(len(data))] = source.randrange(256)
                case 1:
                    del data[source.randrange(len(data)) :]
                    data += b"\xc1"
                case 2:
                    data.insert(source.randrange(len(data)), source.randrange(256))
        with contextlib.suppress(ProtocolError):
            read(bytes(data))
