"""What a prefill engine's scheduler sees: requests that come in, chunks that go out, and how each request ended.

>>> class Mine:                                                     # see Scheduler
...     def on_request(self, request): queue.append(request)        # or: return Reject("no free pages")
...     def on_released(self, key): free_pages_of(key)
...     def on_failed(self, key, error): free_pages_of(key)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, FabricKVError

__all__ = ["Chunk", "PrefillRequest", "Reject", "RequestKey", "Scheduler"]


class RequestKey(NamedTuple):
    """Which request: the decode engine's incarnation, its name for the request, and the submission.

    ``generation`` tells two submissions of the same ``request_id`` apart.
    """

    epoch: bytes
    request_id: str
    generation: int

    def __str__(self) -> str:
        return f"{self.request_id} (generation {self.generation} of {self.epoch.hex()[:8]})"


class PrefillRequest(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A request as the scheduler gets it.

    Attributes
    ----------
    key : RequestKey
        Names the request in every later call.
    tokens : ndarray of int64, shape (num_tokens,)
        What to prefill: the prompt without its last token.
    cached_tokens : int
        Tokens at the start whose pages decode already has: nothing is sent for them.
    source_set : int
        The replica set whose pages are sent.
    wants_tail : bool
        Whether ``finish`` must be given a tail.
    deadline_s : float
        Seconds from arrival after which the request is given up.
    params : bytes
        Opaque, from the decode side's caller.
    """

    key: RequestKey
    tokens: NDArray[np.int64]
    cached_tokens: int
    source_set: int
    wants_tail: bool
    deadline_s: float
    params: bytes

    @property
    def num_tokens(self) -> int:
        """Tokens to prefill."""
        return int(self.tokens.size)


class Reject(Exception):
    """Returned or raised by ``on_request``: the request is refused, and decode is told why.

    Parameters
    ----------
    reason : str
        For people.
    kind : {"rejected", "no_capacity"}
        For programs: ``no_capacity`` says that the same request may be taken later, or elsewhere. It becomes the
        ``reason`` of decode's RequestRejectedError.
    """

    def __init__(self, reason: str, kind: Literal["rejected", "no_capacity"] = "rejected") -> None:
        super().__init__(reason)
        if kind not in ("rejected", "no_capacity"):
            raise ConfigError(f"kind={kind!r} is neither 'rejected' nor 'no_capacity'")
        self.reason = reason
        self.kind = kind


class Chunk(NamedTuple):
    """A part of a request that one forward step computes.

    Attributes
    ----------
    key : RequestKey
    begin, end : int
        Token positions [begin, end); the first chunk begins at ``cached_tokens`` or before, each other where the last
        one ended, the first one after ``preempt`` there or before.
    src_pages : sequence of integer arrays, each of shape (num_pages,)
        The request's own pages here, one list per cache group, in token order from token 0; at least those up to
        ``end``. Borrowed until ``on_released`` or ``on_failed``.
    final : bool
        ``end`` is the end of the request.
    computed : bool
        The pages hold these tokens already, in all layers: a hit of the prefix cache. They are written at once.
    dp : int
        The data-parallel replica of this side that computes it and has the pages; the same for all chunks, unless the
        request is preempted in between.
    """

    key: RequestKey
    begin: int
    end: int
    src_pages: Sequence[NDArray[Any]]
    final: bool = False
    computed: bool = False
    dp: int = 0


class Scheduler(Protocol):
    """The prefill engine's side of the bargain.

    All three are called on the messenger's thread and must not block: queue what takes time. Every accepted request
    ends with exactly one of ``on_released`` and ``on_failed``, when none of its writes is in flight any more; until
    then its source pages must keep what the model wrote into them.
    """

    def on_request(self, request: PrefillRequest) -> Reject | None:
        """Take a request (return None) or refuse it (return or raise ``Reject``)."""

    def on_released(self, key: RequestKey) -> None:
        """Everything has been delivered; the source pages are the scheduler's again."""

    def on_failed(self, key: RequestKey, error: FabricKVError) -> None:
        """The request ended early: ``error`` says how. The source pages are the scheduler's again.

        A forward step that still computes the request may go on; its ``layer_done`` calls are ignored.
        """
