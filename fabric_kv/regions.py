"""Plain data that describes memory and engines to a peer: remote regions, engine addresses, counter tokens.

>>> token, region = counter.token.to_bytes(), memory.remote.to_bytes()          # send both to the peer, by any means
>>> remote = RemoteRegion.from_bytes(region)
>>> engine.write(peer, ours, 0, remote, 0, remote.nbytes, token=CounterToken.from_bytes(token))

All of it travels as versioned, length-checked bytes; see :mod:`fabric_kv.encoding`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec
from msgspec import Meta

from .encoding import decode, encode
from .errors import ConfigError

if TYPE_CHECKING:
    from . import _native

__all__ = ["CounterToken", "EngineAddress", "ProcessIdentity", "RemoteRegion"]

Epoch = Annotated[bytes, Meta(min_length=16, max_length=16)]
U17 = Annotated[int, Meta(ge=0, lt=2**17 - 1)]
U63 = Annotated[int, Meta(ge=0, le=2**63 - 1)]

MAX_GROUPS = 64
MAX_RAILS = 64
MAX_SEGMENTS = 65536
_GroupIndex = Annotated[int, Meta(ge=0, lt=MAX_GROUPS)]
_Key = tuple[Annotated[int, Meta(ge=0)], Annotated[int, Meta(ge=0)]]  # (base, rkey)


class CounterToken(msgspec.Struct, frozen=True, array_like=True):
    """What a sender needs to be counted: given out by the receiver, valid for one transfer.

    Attributes
    ----------
    slot, generation : int
        Which counter of the receiver, and which of its lives.
    unit_bytes : int
        A write of n bytes counts as ceil(n / unit_bytes) units.
    group : int
        The receiver's device group that counts.
    """

    MAGIC: ClassVar[bytes] = b"FKVC"
    VERSION: ClassVar[int] = 1
    MAX_BYTES: ClassVar[int] = 64

    slot: U17
    generation: Annotated[int, Meta(ge=0, lt=32)]
    unit_bytes: Annotated[int, Meta(ge=1, le=2**63 - 1)]
    group: _GroupIndex = 0

    def to_bytes(self) -> bytes:
        """Versioned bytes for the peer."""
        return encode(self.MAGIC, self.VERSION, self)

    @classmethod
    def from_bytes(cls, data: bytes) -> CounterToken:
        """Parse a peer's bytes; ProtocolError if they are anything else."""
        return decode(cls.MAGIC, cls.VERSION, cls, data, what="counter token", limit=cls.MAX_BYTES)

    def native(self) -> tuple[int, int, int]:
        """The part that the C++ core takes."""
        return self.slot, self.generation, self.unit_bytes


class RemoteRegion(msgspec.Struct, frozen=True, array_like=True):
    """A peer's registered memory: enough to write into it, and no more.

    Attributes
    ----------
    epoch : bytes, 16
        The life of the engine that registered it.
    group : int
        Its device group there.
    nbytes : int
        Length in bytes.
    segment_ends : tuple of int
        Where its registrations end, ascending, in bytes; one unless a NIC's limit or the memory itself made several.
    rails : tuple of tuple of (base, rkey)
        ``rails[k][i]`` is for NIC k of that group and segment i; offsets into the segment are added to ``base``.
    """

    MAGIC: ClassVar[bytes] = b"FKVR"
    VERSION: ClassVar[int] = 1
    MAX_BYTES: ClassVar[int] = 64 << 20

    epoch: Epoch
    group: _GroupIndex
    nbytes: U63
    segment_ends: Annotated[tuple[U63, ...], Meta(min_length=1, max_length=MAX_SEGMENTS)]
    rails: Annotated[
        tuple[Annotated[tuple[_Key, ...], Meta(min_length=1, max_length=MAX_SEGMENTS)], ...],
        Meta(min_length=1, max_length=MAX_RAILS),
    ]

    def __post_init__(self) -> None:
        ends = (0, *self.segment_ends)
        if ends[-1] != self.nbytes or any(a >= b for a, b in pairwise(ends)):
            raise ConfigError(f"segment_ends={self.segment_ends[:8]} must ascend to nbytes={self.nbytes}")
        if any(len(rail) != len(self.segment_ends) for rail in self.rails):
            raise ConfigError(f"every rail must have {len(self.segment_ends)} keys, one a segment")

    def to_bytes(self) -> bytes:
        """Versioned bytes for the peer."""
        return encode(self.MAGIC, self.VERSION, self)

    @classmethod
    def from_bytes(cls, data: bytes) -> RemoteRegion:
        """Parse a peer's bytes; ProtocolError if they are anything else."""
        return decode(cls.MAGIC, cls.VERSION, cls, data, what="remote region", limit=cls.MAX_BYTES)

    def native(self) -> _native.RemoteRegion:
        """The object that the C++ core takes."""
        from . import _native

        return _native.RemoteRegion(
            self.epoch, self.group, self.nbytes, list(self.segment_ends), [list(rail) for rail in self.rails]
        )


class ProcessIdentity(msgspec.Struct, frozen=True, array_like=True):
    """Which process an engine lives in, so that others on its host can see it end.

    Attributes
    ----------
    host : bytes, 16
        The machine since it was last started, and the pid namespace; ``pid`` means something only there.
    pid : int
    start_ticks : int
        When the process began, in clock ticks after the machine: proc_pid_stat(5), field 22.
    """

    host: Epoch
    pid: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    start_ticks: U63


class EngineAddress(msgspec.Struct, frozen=True, array_like=True):
    """Where an engine can be reached, and which life of it.

    Attributes
    ----------
    epoch : bytes, 16
    groups : tuple of tuple of bytes
        ``groups[g][k]`` is the libfabric address (fi_getname(3)) of rail k of device group g.
    process : ProcessIdentity, optional
        None where the system does not tell; such an engine cannot be fenced by its process's exit.
    """

    MAGIC: ClassVar[bytes] = b"FKVA"
    VERSION: ClassVar[int] = 2
    MAX_BYTES: ClassVar[int] = 1 << 20

    epoch: Epoch
    groups: Annotated[
        tuple[
            Annotated[
                tuple[Annotated[bytes, Meta(min_length=1, max_length=1024)], ...],
                Meta(min_length=1, max_length=MAX_RAILS),
            ],
            ...,
        ],
        Meta(min_length=1, max_length=MAX_GROUPS),
    ]
    process: ProcessIdentity | None = None

    def to_bytes(self) -> bytes:
        """Versioned bytes for the peer."""
        return encode(self.MAGIC, self.VERSION, self)

    @classmethod
    def from_bytes(cls, data: bytes) -> EngineAddress:
        """Parse a peer's bytes; ProtocolError if they are anything else."""
        return decode(cls.MAGIC, cls.VERSION, cls, data, what="engine address", limit=cls.MAX_BYTES)
