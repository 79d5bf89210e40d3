"""A request on the decode side: what the caller fills in, what comes back, and the record in between.

>>> request = Request(request_id="a", tokens=prompt[:-1], pages=[pages], deadline_s=30.0)
>>> handle = decode.submit(peer, request)
>>> handle.result().tail
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import (
    ClosedError,
    ConfigError,
    FabricKVError,
    PeerLostError,
    RequestCancelledError,
    RequestFailedError,
    RequestRejectedError,
    RequestStalledError,
    RequestTimeoutError,
)
from . import wire
from .actor import Timer
from .fetch import Fetch
from .handle import RequestHandle
from .state import RequestState
from .timeline import Timeline

if TYPE_CHECKING:
    from ..transfers import Counter
    from .prefill_peer import PrefillPeer

__all__ = ["Fetching", "Request", "error_of"]


class Request(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A prompt to prefill, and the pages that its cache goes to.

    Attributes
    ----------
    request_id : str
        The caller's name for it, 1 to 256 characters; it may be used again for another attempt.
    tokens : array_like of int, shape (num_tokens,)
        The prompt without its last token: decode runs one step on that one when the pages are here.
    pages : sequence of array_like of int, each of shape (num_pages,)
        This side's pages, one list per cache group, in token order from token 0. The same on every rank of the replica.
        They belong to the messenger until the handle is done.
    cached_tokens : int
        Tokens at the start whose pages hold the cache already; a multiple of this side's page size.
    deadline_s : float, optional
        Seconds from now to the last byte; ``Bounds.request_s`` by default.
    params : bytes
        Opaque, for the prefill scheduler.
    dp : int
        The data-parallel replica of this side that the request lives on.
    """

    request_id: str
    tokens: ArrayLike
    pages: Sequence[ArrayLike]
    cached_tokens: int = 0
    deadline_s: float | None = None
    params: bytes = b""
    dp: int = 0


class Fetching:
    """One open request. ``submit`` fills it in; afterwards it is state of the actor."""

    def __init__(self, peer: PrefillPeer, request: Request, bounds_s: float) -> None:
        self.peer = peer
        self.request_id = request.request_id
        self.params = request.params
        self.cached_tokens = operator.index(request.cached_tokens)
        self.deadline_s = bounds_s if request.deadline_s is None else float(request.deadline_s)
        self.tokens = wire.pack_ints(request.tokens)
        self.packed_pages = [wire.pack_ints(pages) for pages in request.pages]
        self.pages = [wire.unpack_ints(packed) for packed in self.packed_pages]
        self.written: list[NDArray[np.int64]] = []  # of each group, the pages that will be
        self.claimed = False  # nobody else may have these written
        self.handle: RequestHandle
        self.source_set = 0
        self.dp = operator.index(request.dp)
        self.counters: list[Counter | None] = []  # of each rank and layer group, and of the tail
        self.expected_units = 0  # of all counters
        self.tail_slot: int | None = None
        self.fetch = Fetch(waiting=0)
        self.missing = 0  # mask of the counters that go on counting although it has ended
        self.fenced = False  # The peer was lost, and what it has posted can land no more.
        self.generation = -1
        self.timers: list[Timer] = []
        self.submitted_s = math.nan
        self.timeline = Timeline(math.nan)  # from ``submit``
        self.accepted_s = math.nan
        if not isinstance(self.request_id, str) or not 1 <= len(self.request_id) <= wire.MAX_ID_CHARS:
            raise ConfigError(f"request_id must be a string of 1 to {wire.MAX_ID_CHARS} characters")
        if not self.request_id.isprintable():  # Surrogates, for one, have no encoding.
            raise ConfigError(f"request_id={self.request_id!r} must be printable")
        if not isinstance(self.params, bytes):
            raise ConfigError(f"params must be bytes, not {type(self.params).__name__}")
        if not 0 < self.deadline_s <= 86400:
            raise ConfigError(f"deadline_s={self.deadline_s!r} is out of range: it must lie in (0, 86400]")
        if len(self.params) > wire.MAX_PARAMS_BYTES:
            raise ConfigError(f"params has {len(self.params)} bytes: the limit is {wire.MAX_PARAMS_BYTES}")
        if not self.num_tokens:
            raise ConfigError("tokens is empty: there is nothing to prefill")

    @property
    def num_tokens(self) -> int:
        """Tokens to prefill."""
        return len(self.tokens.data) * 8 // self.tokens.bits

    def received_units(self) -> int:
        """Of all counters, so far; nothing once they were released."""
        return sum(counter.received for counter in self.counters if counter is not None)

    @property
    def message_bytes(self) -> int:
        """Size of its Request message, rounded up."""
        arrays = sum(len(ints.data) + 16 for ints in (self.tokens, *self.packed_pages))
        return 4096 + 64 * len(self.counters) + len(self.params) + arrays

    def message(self) -> wire.Request:
        """What the prefill side is asked."""
        tokens = [None if counter is None else counter.token for counter in self.counters]
        return wire.Request(
            request_id=self.request_id,
            generation=self.generation,
            tokens=self.tokens,
            pages=self.packed_pages,
            source_set=self.source_set,
            cached=self.cached_tokens,
            counters=tokens[:-1],
            tail_slot=self.tail_slot,
            tail_counter=tokens[-1],
            dp=self.dp,
            deadline_s=self.deadline_s,
            params=self.params,
        )

    def snapshot(self) -> dict[str, Any]:
        """For ``state()``."""
        return {
            "request_id": self.request_id,
            "state": self.fetch.phase.name,
            "peer": self.peer.epoch.hex(),
            "generation": self.generation,
            "tokens": self.num_tokens,
            "events_ms": self.timeline.text(),
            "units": [None if counter is None else counter.received for counter in self.counters],
        }


_ERRORS: dict[RequestState, Callable[..., FabricKVError]] = {
    RequestState.REJECTED: RequestRejectedError,
    RequestState.FAILED: RequestFailedError,
    RequestState.TIMED_OUT: RequestTimeoutError,
    RequestState.CANCELLED: RequestCancelledError,
    RequestState.PEER_LOST: PeerLostError,
    RequestState.STALLED: RequestStalledError,
    RequestState.CLOSED: ClosedError,
}


def error_of(fetching: Fetching) -> FabricKVError:
    """The exception of a request that ended without its pages."""
    fetch, peer = fetching.fetch, fetching.peer.epoch.hex()
    word = fetch.phase.name.lower()
    message = f"request {fetching.request_id!r} to {peer[:8]} ended as {word}: {fetch.reason}"
    if not fetch.pages_clean:
        message += "; its pages may still be written and stay set aside"
    if fetch.phase is RequestState.CLOSED:
        return ClosedError(message, pages_clean=fetch.pages_clean)
    reason = fetch.reject_kind if fetch.phase is RequestState.REJECTED else word
    if fetch.phase is RequestState.STALLED and fetch.written:
        reason = "uncounted"
    return _ERRORS[fetch.phase](
        message, request_id=fetching.request_id, peer=peer, pages_clean=fetch.pages_clean, reason=reason
    )
