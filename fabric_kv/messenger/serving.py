"""One accepted request on the prefill side, and the writes that its chunks turn into.

>>> serving.check_chunk(chunk, serving.next_token, serving.src_dp)
>>> for submission in serving.plan_chunk(chunk): ...
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import (
    ClosedError,
    ConfigError,
    FabricKVError,
    PeerLostError,
    RequestCancelledError,
    RequestFailedError,
    RequestStalledError,
    RequestTimeoutError,
)
from .actor import Timer
from .posting import Outflow, Submission
from .scheduler import Chunk, PrefillRequest
from .state import ServeState
from .timeline import Timeline

if TYPE_CHECKING:
    from ..regions import CounterToken
    from .sessions import Session

__all__ = ["Serving", "TailPlace", "error_of"]


class TailPlace(NamedTuple):
    """Where decode wants the tail, and what counts it."""

    slot: int
    counter: CounterToken


class Serving(Outflow):
    """A request, where its pages go, and how far it is.

    What its chunks change is guarded by the poster's lock, like the rest of Outflow; other fields do not change, or
    belong to the actor.
    """

    def __init__(
        self,
        session: Session,
        request: PrefillRequest,
        dst_dp: int,
        dst_pages: list[NDArray[np.int64]],
        tokens: list[CounterToken | None],
        tail: TailPlace | None,
        nbytes: int,
    ) -> None:
        super().__init__(session.link.peer)
        self.session = session
        self.request = request
        self.tokens = tokens
        self.tail = tail
        self.nbytes = nbytes  # in whole units, of all ranks
        self.dst_dp = dst_dp
        self.dst_pages = dst_pages
        self.timeline = Timeline(math.nan)  # from its arrival
        self.next_token: int | None = None
        self.src_dp = 0  # where the chunks since the first one, or a preemption, are computed
        # Tokens that are written or will be. More than `next_token` while a preempted request is computed again.
        self.planned_tokens = 0
        self.num_preemptions = 0
        self.on_quiet: Callable[[], object] | None = None  # It was preempted, and its writes are not retired yet.
        self.last_chunk_seen = False
        self.finished = False
        self.deadline: Timer | None = None

    @property
    def key_text(self) -> str:
        """For messages."""
        return f"request {self.request.key}"

    def snapshot(self) -> dict[str, Any]:
        """For ``state()``."""
        key, serve = self.request.key, self.serve
        return {
            "request_id": key.request_id,
            "state": serve.phase.name,
            "peer": key.epoch.hex(),
            "generation": key.generation,
            "tokens": self.request.num_tokens,
            "tokens_planned": self.planned_tokens,
            "writes_in_flight": serve.in_flight,
            "writes_waiting": serve.planned - serve.posted,
            "events_ms": self.timeline.text(),
        }

    def check_chunk(self, chunk: Chunk, next_token: int | None, src_dp: int) -> None:
        """Raise ConfigError unless the chunk follows the one that ended at ``next_token`` (None: there was none)."""
        begin, end, total = chunk.begin, chunk.end, self.request.num_tokens
        if self.on_quiet is not None:
            raise ConfigError(f"{self.key_text}: it was preempted, and what was written for it is in flight still")
        if next_token is None:
            # Decode has these, or will have.
            limit = max(self.request.cached_tokens, self.planned_tokens)
            if not 0 <= begin <= limit:
                raise ConfigError(
                    f"{self.key_text}: the first chunk begins at token {begin}, it must begin in [0, {limit}]"
                )
        elif chunk.dp != src_dp:
            raise ConfigError(
                f"{self.key_text}: dp={chunk.dp}, but the chunks before were computed by replica {src_dp}"
            )
        elif begin != next_token:
            raise ConfigError(f"{self.key_text}: the chunk begins at token {begin}: the last one ended at {next_token}")
        placement = self.session.plan.src.placement
        if not 0 <= chunk.dp < placement.dp_size:
            raise ConfigError(f"{self.key_text}: dp={chunk.dp} is out of range: there are {placement.dp_size} replicas")
        if not begin < end <= total:
            raise ConfigError(f"{self.key_text}: the chunk ends at token {end}, it must end in ({begin}, {total}]")
        if chunk.final != (end == total):
            raise ConfigError(f"{self.key_text}: final={chunk.final}, but the chunk ends at token {end} of {total}")
        groups = self.session.plan.src.layout.groups
        if len(chunk.src_pages) != len(groups):
            raise ConfigError(f"{self.key_text}: {len(chunk.src_pages)} page lists, the cache has {len(groups)} groups")

    def plan_chunk(self, chunk: Chunk) -> list[Submission]:
        """The submissions of a chunk, one per counter of decode and device group here.

        None where all of it was planned before the request was preempted.

        Raises
        ------
        ConfigError
            If a source page list is too short or holds a page that does not exist.
        """
        plan, request = self.session.plan, self.request
        begin = max(int(chunk.begin), self.planned_tokens)
        if begin >= chunk.end:
            return []
        src_pages = [np.asarray(pages) for pages in chunk.src_pages]
        maps = [
            plan.page_map(
                group,
                begin,
                int(chunk.end),
                cached=request.cached_tokens,
                final=bool(chunk.final),
                num_tokens=request.num_tokens,
            )
            for group in range(len(src_pages))
        ]
        submissions = []
        for rank, lists, layers in self.session.writes.of_chunk(
            maps, src_pages, self.dst_pages, source_set=request.source_set, src_dp=chunk.dp, dst_dp=self.dst_dp
        ):
            token = self.tokens[rank.counter]
            assert token is not None  # read_request checked that every rank that receives has one
            submissions.append(Submission(self, rank, lists, frozenset() if chunk.computed else layers, token))
        return submissions


_ERROR_TYPES: dict[ServeState, Callable[..., FabricKVError]] = {
    ServeState.FAILED: RequestFailedError,
    ServeState.TIMED_OUT: RequestTimeoutError,
    ServeState.CANCELLED: RequestCancelledError,
    ServeState.PEER_LOST: PeerLostError,
    ServeState.STALLED: RequestStalledError,
}


def error_of(serving: Serving) -> FabricKVError:
    """What the scheduler is told about a request that ended early."""
    key, serve = serving.request.key, serving.serve
    message = f"{serving.key_text} ended early: {serve.reason}"
    if serve.phase is ServeState.CLOSED:
        return ClosedError(message)
    # Of the source pages, which nothing reads any more.
    return _ERROR_TYPES[serve.phase](
        message, request_id=key.request_id, peer=key.epoch.hex(), pages_clean=True, reason=serve.phase.name.lower()
    )
