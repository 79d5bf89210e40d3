"""What initiator and target say to each other beside the fabric: msgpack checked against these types.

>>> encode(Go()); decode(data)

An exchange: Hello ↔ Hello, Setup → Opened ↔ Opened, then for each phase Phase → Ready → Go (→ Sent, in either
direction, if only the clock says how much there will be) → Finished; at the end Bye. Abort may come at any time.
With the messenger: MessengerSetup → Opened ↔ Opened, Regions, then Clock ↔ Clock, BareAsk → BareReady → Clock, and
RequestsAsk → Served as often as the initiator likes; at the end Bye.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from ..errors import ProtocolError
from ..regions import CounterToken
from .latency import LatencyCounts
from .model import ModelWork
from .workload import Fabric, Workload

__all__ = [
    "MAGIC",
    "MAX_FRAME_BYTES",
    "VERSION",
    "Abort",
    "BareAsk",
    "BareReady",
    "Bye",
    "Clock",
    "Finished",
    "FlowFigures",
    "Go",
    "Hello",
    "Message",
    "MessengerSetup",
    "Opened",
    "Phase",
    "Ready",
    "Regions",
    "RequestTimes",
    "RequestsAsk",
    "Sent",
    "Served",
    "Setup",
    "decode",
    "encode",
]

MAGIC = "fabric-kv-bench"
VERSION = 2
MAX_FRAME_BYTES = 16 << 20

_Text = Annotated[str, Meta(max_length=4096)]
_Count = Annotated[int, Meta(ge=0, lt=2**62)]


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First, from both: who speaks, and in which version."""

    magic: _Text
    version: int
    package: _Text  # version of fabric_kv
    pid: int


class Setup(msgspec.Struct, frozen=True, tag=True):
    """Initiator to target: what will be measured, and with what unless the target was told otherwise.

    ``index``: which of the targets it is; what they stamp differs from one to the next. ``num_targets``: the initiator
    has to share its memory among so many, and no end may use more places than the other.
    """

    workload: Workload
    fabric: Fabric
    index: Annotated[int, Meta(ge=0, lt=1024)]
    num_targets: Annotated[int, Meta(ge=1, le=1024)]


class Opened(msgspec.Struct, frozen=True, tag=True):
    """From both: the engine and its memory.

    ``shm_names`` are the files in /dev/shm by which this engine can be reached there: whoever survives removes them.
    """

    address: bytes
    source: bytes
    sink: bytes
    provider: _Text
    rails: Annotated[list[dict[str, _Text | float | None]], Meta(max_length=64)]
    shm_names: Annotated[list[_Text], Meta(max_length=64)]


class Phase(msgspec.Struct, frozen=True, tag=True):
    """Initiator to target: prepare. ``token`` is the initiator's counter for what the target will write.

    ``iteration``: what the stamps of lane 0 say. ``clear``: the sink is poisoned first. ``check``: it is looked at
    afterwards.
    """

    case: Annotated[int, Meta(ge=0, lt=256)]
    iterations: _Count | None
    seconds: float | None
    iteration: _Count
    clear: bool
    check: bool
    token: CounterToken | None
    done_token: CounterToken | None  # the initiator's: signalled when all it wrote is here


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Target to initiator: the same, of the target's counters."""

    token: CounterToken | None
    done_token: CounterToken | None


class MessengerSetup(msgspec.Struct, frozen=True, tag=True):
    """Initiator to target, in place of Setup: be a decode side."""

    work: ModelWork
    fabric: Fabric
    index: Annotated[int, Meta(ge=0, lt=1024)]


class Regions(msgspec.Struct, frozen=True, tag=True):
    """Target to initiator: its registered memory, by rank, for what is measured without the messenger."""

    ranks: Annotated[list[Annotated[list[bytes], Meta(max_length=64)]], Meta(max_length=64)]


class Clock(msgspec.Struct, frozen=True, tag=True):
    """From both: what time it is there, ``time.monotonic_ns()``."""

    ns: int


class BareAsk(msgspec.Struct, frozen=True, tag=True):
    """Initiator to target: take one layer, as a plain paged write."""


class BareReady(msgspec.Struct, frozen=True, tag=True):
    """Target to initiator: the counters of its ranks."""

    tokens: Annotated[list[CounterToken], Meta(max_length=64)]


class RequestsAsk(msgspec.Struct, frozen=True, tag=True):
    """Initiator to target: submit requests.

    ``arrivals_s``: when each arrives, from now on; None: each when the one before is ready. ``iteration``: what the
    pages hold. ``check``: compare the pages of all sets that were used afterwards.
    """

    name: _Text
    count: Annotated[int, Meta(ge=1, le=100_000)]
    arrivals_s: Annotated[list[Annotated[float, Meta(ge=0, le=1e6)]], Meta(max_length=100_000)] | None
    iteration: _Count
    check: bool


class RequestTimes(msgspec.Struct, frozen=True, array_like=True):
    """Of one request, on the target's clock: when it arrived, was submitted, and was ready; in ns."""

    request_id: _Text
    arrived_ns: int
    submitted_ns: int
    ready_ns: int


class Served(msgspec.Struct, frozen=True, tag=True):
    """Target to initiator: all requests are ready."""

    requests: Annotated[list[RequestTimes], Meta(max_length=100_000)]
    wrong_pages: _Count


class Go(msgspec.Struct, frozen=True, tag=True):
    """Initiator to target: post, or count."""


class Sent(msgspec.Struct, frozen=True, tag=True):
    """From whoever posts by the clock: how many iterations it has been."""

    iterations: _Count


class FlowFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What one end has measured of what it posted in a phase.

    Attributes
    ----------
    iterations : int
    elapsed_ns : int
        From before the first post until the receiver's word that everything has arrived was here.
    post_ns : int
        In calls that submit, all together.
    latencies : LatencyCounts
        From before a submission until its transfers had ended.
    """

    iterations: _Count
    elapsed_ns: _Count
    post_ns: _Count
    latencies: LatencyCounts


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Target to initiator: the phase is over here.

    Attributes
    ----------
    flow : FlowFigures, optional
        If it posted.
    wrong_pages : int
    cpu_ns : int
        Of the target's process during the phase.
    ops, op_bytes : int
        Operations that its NICs were given, and their bytes.
    """

    flow: FlowFigures | None
    wrong_pages: _Count
    cpu_ns: _Count
    ops: _Count
    op_bytes: _Count


class Abort(msgspec.Struct, frozen=True, tag=True):
    """From either: it is over, and why."""

    why: _Text


class Bye(msgspec.Struct, frozen=True, tag=True):
    """Initiator to target: everything has been measured; ``wrong_pages`` in all, None if nobody looked."""

    wrong_pages: _Count | None


Message = (
    Hello
    | Setup
    | Opened
    | Phase
    | Ready
    | Go
    | Sent
    | Finished
    | Abort
    | Bye
    | MessengerSetup
    | Regions
    | Clock
    | BareAsk
    | BareReady
    | RequestsAsk
    | Served
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Bytes of a frame."""
    return _encoder.encode(message)


def decode(data: bytes, who: str) -> Message:
    """The message in a frame of ``who``; ProtocolError if it is none."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, ValueError) as error:
        raise ProtocolError(f"{who} sent {len(data)} bytes that are no message of {MAGIC}: {error}") from error
