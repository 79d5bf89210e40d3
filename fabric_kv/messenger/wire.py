"""The messages between the two sides: typed, size-limited, and with a version that is read before anything else.

>>> frame = encode(Accept(generation=7))
>>> decode(frame)
Accept(generation=7)

A frame is ``b"FKV"``, one version byte, and one msgpack map with a ``type`` tag. Within one version fields are only
ever added with defaults, and :class:`AnyHello` keeps its three fields in every version, so that a newer peer can be
told what is wrong.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import ArrayLike, NDArray

from ..errors import ConfigError, ProtocolError
from ..regions import CounterToken
from .layers import MAX_LAYER_GROUPS

__all__ = [
    "MAX_PARAMS_BYTES",
    "PROTOCOL_VERSION",
    "Accept",
    "AnyHello",
    "Cancel",
    "CancelConfirm",
    "Fail",
    "Goodbye",
    "Hello",
    "HelloReply",
    "Ints",
    "Message",
    "RefusalKind",
    "Reject",
    "RejectKind",
    "Request",
    "Stalled",
    "TailField",
    "TailGeometry",
    "VersionMismatch",
    "Written",
    "decode",
    "encode",
    "pack_ints",
    "unpack_ints",
]

PROTOCOL_VERSION = 4
_MAGIC = b"FKV"

# What one message may hold. Far above real use, and small enough that a hostile peer costs little memory; the number
# of bytes of a whole message is bounded by the engine (EngineOptions.max_message_bytes).
MAX_PARAMS_BYTES = 1 << 20
MAX_ID_CHARS = 256
MAX_REASON_CHARS = 16384
MAX_GROUPS = 256
MAX_RANKS = 1024
MAX_REGIONS = 16384
MAX_TAIL_FIELDS = 64
MAX_COUNTERS = 16384  # of a request
MAX_WRITTEN = 256  # requests of one message

Epoch = Annotated[bytes, Meta(min_length=16, max_length=16)]
U31 = Annotated[int, Meta(ge=0, lt=1 << 31)]
U63 = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Text = Annotated[str, Meta(max_length=MAX_REASON_CHARS)]
Address = Annotated[bytes, Meta(min_length=1, max_length=65536)]
RegionBytes = Annotated[bytes, Meta(min_length=1, max_length=65536)]
SpecBytes = Annotated[bytes, Meta(max_length=16 << 20)]
RejectKind = Literal["rejected", "no_capacity", "incompatible", "closing"]
RefusalKind = Literal["incompatible", "other_incarnation", "too_many_peers", "closing"]
Seconds = Annotated[float, Meta(gt=0, le=86400)]


class Ints(msgspec.Struct, frozen=True, array_like=True):
    """An integer array as raw little-endian bytes: ``bits`` is 32 (unsigned) or 64 (signed, never negative)."""

    bits: int
    data: bytes


class TailField(msgspec.Struct, frozen=True, array_like=True):
    """One array of a tail."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    dtype: Annotated[str, Meta(max_length=32)]
    shape: Annotated[list[U31], Meta(max_length=8)]


class TailGeometry(msgspec.Struct, frozen=True):
    """The decode side's tail pool: where its slots lie and what one holds."""

    region: RegionBytes
    num_slots: Annotated[int, Meta(ge=1, lt=1 << 31)]
    slot_bytes: Annotated[int, Meta(ge=1, lt=1 << 31)]
    fields: Annotated[list[TailField], Meta(min_length=1, max_length=MAX_TAIL_FIELDS)]


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Decode to prefill, once per pair: who I am and where you may write.

    ``session`` is also the number of the session's first request: generations count up from it without gaps.
    ``peer_epoch`` is who the sender means to talk to. ``regions``: RemoteRegion bytes per rank and region.
    ``layer_ends``: where the groups of layers end that are counted by themselves; empty: one for all.
    """

    session: U63
    address: Address
    peer_epoch: Epoch
    spec: SpecBytes
    regions: Annotated[
        list[Annotated[list[RegionBytes], Meta(max_length=MAX_REGIONS)]], Meta(min_length=1, max_length=MAX_RANKS)
    ]
    tail: TailGeometry | None = None
    layer_ends: Annotated[list[U31], Meta(max_length=MAX_LAYER_GROUPS)] = []


class HelloReply(msgspec.Struct, frozen=True, tag="hello_reply"):
    """Accepted, with prefill's CacheSpec; or refused, with a kind for programs and a reason that names the fields."""

    session: U63
    refusal: RefusalKind | None = None
    reason: Text = ""
    spec: SpecBytes = b""


class Request(msgspec.Struct, frozen=True, tag="request"):
    """One prompt to prefill and the decode pages that its cache goes to.

    ``pages``: one list per cache group, in token order, of the data-parallel replica ``dp``. ``counters``: one token
    per decode rank and layer group, rank by rank, None where nothing is received. ``tail_slot`` and ``tail_counter``
    come together or not at all. ``deadline_s`` is a duration from arrival, so clocks need not agree.
    """

    request_id: Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARS)]
    generation: U63
    tokens: Ints
    pages: Annotated[list[Ints], Meta(min_length=1, max_length=MAX_GROUPS)]
    source_set: U31
    cached: U63
    counters: Annotated[list[CounterToken | None], Meta(min_length=1, max_length=MAX_COUNTERS)]
    tail_slot: U31 | None
    deadline_s: Seconds
    params: Annotated[bytes, Meta(max_length=MAX_PARAMS_BYTES)] = b""
    dp: U31 = 0
    tail_counter: CounterToken | None = None


class Accept(msgspec.Struct, frozen=True, tag="accept"):
    """The scheduler has taken the request."""

    generation: U63


class Reject(msgspec.Struct, frozen=True, tag="reject"):
    """Refused before anything was written, with a kind for programs."""

    generation: U63
    reason: Text
    kind: RejectKind = "rejected"


class Fail(msgspec.Struct, frozen=True, tag="fail"):
    """Given up after Accept, sent when every posted write is retired; ``pages_clean`` if none can still land."""

    generation: U63
    reason: Text
    pages_clean: bool


class Stalled(msgspec.Struct, frozen=True, tag="stalled"):
    """Nothing more is posted, and what has been posted is not retired for too long: it may land at any time.

    Fail follows when it is retired.
    """

    generation: U63
    reason: Text


class Written(msgspec.Struct, frozen=True, tag="written"):
    """Every write of these requests has completed here. No signal, since each is counted where it lands."""

    generations: Annotated[list[U63], Meta(min_length=1, max_length=MAX_WRITTEN)]


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Stop, and confirm once nothing can land any more."""

    generation: U63


class CancelConfirm(msgspec.Struct, frozen=True, tag="cancel_confirm"):
    """Nothing is posted any more and every posted write is retired; ``pages_clean`` as in Fail.

    ``written``: there was nothing to cancel, as Written says or will say.
    """

    generation: U63
    pages_clean: bool
    written: bool = False


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """The last message of a side that closes; ``quiescent``: it has no write in flight and posts no more."""

    session: U63
    quiescent: bool


Message = Hello | HelloReply | Request | Accept | Reject | Fail | Stalled | Written | Cancel | CancelConfirm | Goodbye


class AnyHello(msgspec.Struct, frozen=True, tag="hello"):
    """The part of Hello that every version keeps."""

    session: U63
    address: Address
    peer_epoch: Epoch


class VersionMismatch(ProtocolError):
    """The frame is of another protocol version. ``hello``: who asks, if it is a Hello."""

    hello: AnyHello | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)
_any_hello = msgspec.msgpack.Decoder(AnyHello)


def encode(message: Message) -> bytes:
    """One frame."""
    return b"".join((_MAGIC, bytes((PROTOCOL_VERSION,)), _encoder.encode(message)))


def decode(frame: bytes) -> Message:
    """The message in a frame that came from a peer.

    Raises
    ------
    VersionMismatch
        If the peer speaks another version.
    ProtocolError
        If the frame is anything but one valid message.
    """
    if frame[:3] != _MAGIC or len(frame) < 5:
        raise ProtocolError(f"a message of {len(frame)} bytes does not start with {_MAGIC!r} and a version")
    try:
        if frame[3] != PROTOCOL_VERSION:
            reason = f"the peer speaks messenger protocol {frame[3]}, this side speaks {PROTOCOL_VERSION}"
            try:
                hello = _any_hello.decode(frame[4:])
            except msgspec.MsgspecError:
                hello = None
            mismatch = VersionMismatch(reason)
            mismatch.hello = hello
            raise mismatch
        message: Message = _decoder.decode(frame[4:])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise ProtocolError(f"malformed message of {len(frame)} bytes: {error}") from error
    return message


def pack_ints(values: ArrayLike) -> Ints:
    """An integer array of shape (n,) for the wire, four bytes each where they fit.

    Raises
    ------
    ConfigError
        If the values are not one-dimensional integers that are >= 0.
    """
    array: NDArray[Any] = np.asarray(values)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise ConfigError(f"a one-dimensional integer array is needed, not {array.dtype} of shape {array.shape}")
    least, most = _extremes(array)
    if least < 0 or most >= 1 << 63:
        raise ConfigError(f"values must lie in [0, 2**63), not in [{least}, {most}]")
    bits, dtype = (32, "<u4") if most < 1 << 32 else (64, "<i8")
    return Ints(bits, np.ascontiguousarray(array, dtype).tobytes())


def unpack_ints(ints: Ints) -> NDArray[np.int64]:
    """The array of shape (n,) behind :func:`pack_ints`.

    Raises
    ------
    ProtocolError
        If the bytes are no such array.
    """
    if ints.bits not in (32, 64) or len(ints.data) % (ints.bits // 8):
        raise ProtocolError(f"{len(ints.data)} bytes are no array of {ints.bits}-bit integers")
    raw: NDArray[Any] = np.frombuffer(ints.data, "<u4" if ints.bits == 32 else "<i8")
    array = raw.astype(np.int64)
    if _extremes(array)[0] < 0:
        raise ProtocolError(f"an array of page or token numbers holds {_extremes(array)[0]}")
    return array


def _extremes(array: NDArray[Any]) -> tuple[int, int]:
    return (int(np.min(array)), int(np.max(array))) if len(array) else (0, 0)
