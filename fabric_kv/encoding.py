"""Bytes that peers exchange: a magic word, a version, then msgpack checked against a type. Never pickle.

>>> data = encode(b"FKVR", 1, struct)
>>> decode(b"FKVR", 1, RegionRecord, data, what="remote region", limit=4096)
>>> decode(b"FKVR", 1, RegionRecord, b"garbage", what="remote region", limit=4096)   # ProtocolError

Whatever comes from a peer is untrusted: length is checked before parsing, types and ranges while parsing.
"""

from __future__ import annotations

import operator
from typing import TypeVar

import msgspec

from .errors import ConfigError, ProtocolError

__all__ = ["decode", "encode"]

T = TypeVar("T")

_HEADER_BYTES = 6  # 4 magic, 2 version (little-endian)


def encode(magic: bytes, version: int, record: msgspec.Struct) -> bytes:
    """Serialise ``record`` behind ``magic`` (4 bytes) and ``version`` (16 bits); NumPy's integers are integers.

    Raises
    ------
    ConfigError
        If the record holds what has no such form.
    """
    try:
        return magic + version.to_bytes(2, "little") + msgspec.msgpack.encode(record, enc_hook=operator.index)
    except (TypeError, OverflowError) as error:
        raise ConfigError(f"this {type(record).__name__} has no bytes: {error}") from None


def decode(magic: bytes, version: int, type_: type[T], data: bytes, *, what: str, limit: int) -> T:
    """Parse bytes made by :func:`encode`.

    Raises
    ------
    ProtocolError
        If ``data`` is longer than ``limit`` bytes, is something else, speaks another version, or does not fit
        ``type_``.
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        raise ProtocolError(f"{what}: expected bytes, got {type(data).__name__}")
    data = bytes(data)
    if len(data) > limit:
        raise ProtocolError(f"{what}: {len(data)} bytes are above the limit of {limit}")
    if len(data) < _HEADER_BYTES or data[:4] != magic:
        raise ProtocolError(f"{what}: {len(data)} bytes that start with {data[:4]!r} instead of {magic!r}")
    theirs = int.from_bytes(data[4:6], "little")
    if theirs != version:
        raise ProtocolError(f"{what}: the peer speaks version {theirs}, this side speaks {version}")
    try:
        return msgspec.msgpack.decode(data[_HEADER_BYTES:], type=type_)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:  # the last: nested deeper than the stack
        raise ProtocolError(f"{what}: {error}") from None
