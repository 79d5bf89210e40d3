"""The decode side: asks a prefill engine for a prompt's pages and knows by its own counters when they are here.

>>> decode = DecodeMessenger(engine, spec, [[region]], tail=TailPool(engine, "float32", (576,)))
>>> peer = decode.connect(prefill_address)
>>> result = await decode.submit(peer, Request(request_id="a", tokens=prompt[:-1], pages=[pages]))
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ..cache import CacheSpec
from ..config import Bounds
from ..errors import (
    ClosedError,
    ConfigError,
    FabricKVError,
    PeerLostError,
    PeerUnreachableError,
    ProtocolError,
    RequestFailedError,
    WouldBlockError,
)
from . import wire
from .actor import Actor
from .fetch import Fetch, FetchEffect, FetchEvent, fetch_step
from .handle import RequestHandle, RequestResult
from .peers import check_page_lists
from .prefill_peer import DecodePeers, PrefillPeer
from .requests import Fetching, PoisonedPages, Request, error_of
from .state import (
    Accepted,
    CancelAsked,
    CancelConfirmed,
    CancelExpired,
    Closing,
    CounterBroken,
    CounterFired,
    DeadlinePassed,
    EngineClosed,
    Failed,
    PeerLeft,
    PeerLost,
    Rejected,
    RequestState,
)

if TYPE_CHECKING:
    from ..engine import Engine
    from ..transfers import Counter, MemoryRegion
    from .tail import TailPool

__all__ = ["DecodeMessenger"]

_log = logging.getLogger("fabric_kv.messenger")

# Open requests of one messenger; one more is back-pressure (WouldBlockError).
MAX_OPEN_REQUESTS = 65536


class DecodeMessenger(DecodePeers):
    """Fetches pages from any number of prefill engines.

    Parameters
    ----------
    engine : Engine
        Its message and peer-lost callbacks are taken over.
    spec : CacheSpec
        This side's cache: layout, placement, and where each rank keeps its pages.
    regions : sequence of sequence of MemoryRegion
        The registered regions of each rank, in the order of ``spec.memory[rank].region_bytes``.
    tail : TailPool, optional
        If given, every request carries a tail.
    bounds : Bounds

    Notes
    -----
    Threads: any. ``connect`` and ``close`` wait, within bounds; ``submit`` does not.
    """

    def __init__(
        self,
        engine: Engine,
        spec: CacheSpec,
        regions: Sequence[Sequence[MemoryRegion]],
        tail: TailPool | None = None,
        bounds: Bounds = Bounds(),
        *,
        actor: Actor | None = None,
    ) -> None:
        super().__init__(engine, spec, regions, tail, bounds, actor)
        self._lock = threading.Lock()  # Guards the next three, which submit() looks at.
        self._num_requests = 0
        self._poisoned: list[PoisonedPages] = []
        self._poisoned_pages: list[set[int]] = [set() for _ in spec.layout.groups]
        if tail is not None and tail.region.remote.group != self._group_of(0):
            raise ConfigError(
                f"tails arrive in device group {tail.region.remote.group}, rank 0 in {self._group_of(0)}: they share a"
                " counter, so they must share the group"
            )
        self._start()

    def submit(self, peer: PrefillPeer, request: Request) -> RequestHandle:
        """Ask for a prompt's pages. Returns at once.

        Parameters
        ----------
        peer : PrefillPeer
            From ``connect``.
        request : Request
            Its pages belong to the messenger until the handle is done.

        Raises
        ------
        ConfigError
            If a value of the request is out of range; names it and the limit.
        PeerLostError, ClosedError
            If the peer is gone, or the messenger is closing; the pages are clean.
        WouldBlockError
            If all tail slots or counters, or the number of open requests, are used up. Try again when one has ended.
            Nothing was sent in any of these cases.
        """
        fetching = Fetching(peer, request, self._bounds.request_s)
        if self._closing:
            raise ClosedError("the messenger is closing", pages_clean=True)
        if not isinstance(peer, PrefillPeer) or peer._owner is not self:
            raise ConfigError(f"request {request.request_id!r}: {peer!r} was not connected by this messenger")
        if not peer.alive:
            raise PeerLostError(
                f"request {request.request_id!r}: {peer!r}",
                request_id=request.request_id,
                peer=peer.epoch.hex(),
                pages_clean=True,
                reason="peer_lost",
            )
        check_page_lists(peer.plan, fetching.num_tokens, fetching.cached_tokens, fetching.pages)
        with self._lock:
            self._check_not_poisoned(fetching)
            if self._num_requests >= MAX_OPEN_REQUESTS:
                raise WouldBlockError(f"{MAX_OPEN_REQUESTS} requests are open", limit=MAX_OPEN_REQUESTS)
            self._num_requests += 1
            fetching.source_set = peer._picker.pick()
        try:
            self._take_counters(fetching)
        except BaseException:
            self._give_back(fetching, clean=True)
            raise
        fetching.submitted_s = self._actor.now()
        fetching.handle = RequestHandle(
            request.request_id,
            self._actor,
            lambda: self._actor.post(partial(self._apply, fetching, CancelAsked())),
            fetching.received_units,
            fetching.expected_units,
        )
        fetching.handle._count_callback_error = lambda: self._actor.post(self._count_callback_error)
        self._actor.post(partial(self._send_request, fetching))
        return fetching.handle

    @property
    def poisoned(self) -> list[PoisonedPages]:
        """Pages of requests that ended with ``pages_clean`` False, until the engine is closed."""
        with self._lock:
            return list(self._poisoned)

    def _check_not_poisoned(self, fetching: Fetching) -> None:
        for index, (pages, poisoned) in enumerate(zip(fetching.pages, self._poisoned_pages, strict=True)):
            if poisoned:
                hit = poisoned.intersection(pages.tolist())
                if hit:
                    raise ConfigError(
                        f"group {self._spec.layout.groups[index].name}: page {min(hit)} may still be written for an"
                        " earlier request; it is set aside until the engine is closed"
                    )

    def _take_counters(self, fetching: Fetching) -> None:
        """Counters and a tail slot: all that must exist before the peer is told."""
        plan, tails = fetching.peer.plan, self._tails
        if tails is not None:
            fetching.tail_slot = tails.acquire()
        waiting = 0
        for rank in range(len(self._spec.memory)):
            units = plan.expected_units(rank, fetching.source_set, fetching.num_tokens, cached=fetching.cached_tokens)
            if rank == 0 and tails is not None:
                units += -(-tails.write_bytes // plan.unit_bytes)
            counter = None
            if units:
                group = self._group_of(rank)
                counter = self._engine.counter(unit_bytes=plan.unit_bytes, expected_units=units, group=group)
                fetching.expected_units += units
                waiting |= 1 << rank
            fetching.counters.append(counter)
        if not waiting:
            raise ConfigError("there is nothing to fetch: every token is cached, and no tail is wanted")
        fetching.fetch = Fetch(waiting=waiting)
        limit = self._engine.options.max_message_bytes
        if fetching.message_bytes > limit:
            raise ConfigError(
                f"the request's message would have up to {fetching.message_bytes} bytes:"
                f" max_message_bytes of this engine is {limit}"
            )

    def _group_of(self, rank: int) -> int:
        """The device group that a rank's pages, and with rank 0 the tails, arrive in."""
        return self._regions[rank][0].remote.group if self._regions[rank] else 0

    def _give_back(self, fetching: Fetching, *, clean: bool) -> None:
        """Counters and tail slot of a request that has ended."""
        for counter in fetching.counters:
            try:
                if counter is not None:
                    counter.release(quiescent=clean)
            except ClosedError:
                pass  # The engine took its counters back when it was closed.
        if fetching.tail_slot is not None and self._tails is not None:
            self._tails.release(fetching.tail_slot, clean=clean)
        with self._lock:
            self._num_requests -= 1
            if not clean:
                self._poisoned.append(PoisonedPages(fetching.request_id, fetching.peer.epoch, tuple(fetching.pages)))
                for pages, poisoned in zip(fetching.pages, self._poisoned_pages, strict=True):
                    poisoned.update(pages.tolist())

    # --- On the actor's thread ----------------------------------------------------------------------------------------

    def _send_request(self, fetching: Fetching) -> None:
        peer = fetching.peer
        if self._closing or not peer.alive:
            # Never sent, so nothing can land.
            fetching.fetch = Fetch(
                waiting=0,
                phase=RequestState.CLOSED if self._closing else RequestState.PEER_LOST,
                reason="the messenger is closing" if self._closing else f"{peer._gone}, before it was sent",
                pages_clean=True,
            )
            self._end(fetching)
            return
        fetching.generation = peer._next_generation
        peer._next_generation += 1
        self._last_number = max(self._last_number, fetching.generation)
        peer._open[fetching.generation] = fetching
        self._after(fetching, self._bounds.accept_s, self._on_accept_expired)
        self._after(fetching, fetching.deadline_s, self._on_deadline)
        peer._link.send(fetching.message())
        for rank, counter in enumerate(fetching.counters):
            if counter is not None:
                counter.add_done_callback(partial(self._on_counter_done, fetching, rank))

    def _count_callback_error(self) -> None:
        self._counts["callback_errors"] += 1

    def _after(self, fetching: Fetching, delay_s: float, command: Any) -> None:
        fetching.timers.append(self._actor.after(delay_s, partial(command, fetching)))

    def _on_accept_expired(self, fetching: Fetching) -> None:
        if fetching.fetch.phase is RequestState.SENT:
            self._apply(fetching, DeadlinePassed(f"neither accepted nor rejected within {self._bounds.accept_s:g} s"))

    def _on_deadline(self, fetching: Fetching) -> None:
        self._apply(fetching, DeadlinePassed(f"its deadline of {fetching.deadline_s:g} s passed"))

    def _on_counter_done(self, fetching: Fetching, rank: int, counter: Counter) -> None:
        """On the engine's dispatcher thread."""
        error = counter.exception(0)
        event: FetchEvent
        if error is None:
            event = CounterFired(rank)
        elif isinstance(error, ClosedError):
            event = EngineClosed()
        else:
            event = CounterBroken(str(error))
        self._actor.post(partial(self._on_counter, fetching, event))

    def _on_counter(self, fetching: Fetching, event: FetchEvent) -> None:
        if not fetching.fetch.phase.final:  # Otherwise it was us who released the counter.
            self._apply(fetching, event)

    def _on_message(self, epoch: bytes, message: wire.Message) -> None:
        peer = self._peers.get(epoch)
        if peer is None:
            self._counts["unknown_peer"] += 1
            return
        match message:
            case wire.HelloReply():
                self._on_reply(peer, message)
            case wire.Goodbye(session, quiescent):
                if session == peer._session:
                    self._on_goodbye(peer, quiescent)
            case wire.Accept(generation):
                self._on_answer(peer, generation, Accepted())
            case wire.Reject(generation, reason):
                self._on_answer(peer, generation, Rejected(reason))
            case wire.Fail(generation, reason, pages_clean):
                self._on_answer(peer, generation, Failed(reason, pages_clean))
            case wire.CancelConfirm(generation, pages_clean):
                self._on_answer(peer, generation, CancelConfirmed(pages_clean))
            case _:
                self._counts["misdirected"] += 1

    def _on_answer(self, peer: PrefillPeer, generation: int, event: FetchEvent) -> None:
        fetching = peer._open.get(generation)
        if fetching is None:
            self._counts["late"] += 1
            return
        if isinstance(event, Accepted) and math.isnan(fetching.accepted_s):
            fetching.accepted_s = self._actor.now()
        self._apply(fetching, event)

    def _apply(self, fetching: Fetching, event: FetchEvent) -> None:
        if fetching.generation < 0:
            return  # It ended before it was sent.
        fetching.fetch, effects = fetch_step(fetching.fetch, event)
        for effect in effects:
            match effect:
                case FetchEffect.SEND_CANCEL:
                    fetching.peer._link.send(wire.Cancel(fetching.generation))
                case FetchEffect.START_CANCEL_TIMER:
                    self._after(fetching, self._bounds.cancel_s, lambda f: self._apply(f, CancelExpired()))
                case FetchEffect.LATE:
                    self._counts["late"] += 1
                case FetchEffect.END:
                    self._end(fetching)
        if not fetching.fetch.phase.final:
            fetching.handle._set_state(fetching.fetch.phase)

    def _end(self, fetching: Fetching) -> None:
        peer, fetch = fetching.peer, fetching.fetch
        for timer in fetching.timers:
            timer.cancel()
        peer._open.pop(fetching.generation, None)
        phase = fetch.phase
        outcome = self._result(fetching) if phase is RequestState.READY else error_of(fetching)
        if phase is RequestState.READY and isinstance(outcome, FabricKVError):
            phase = RequestState.FAILED
        clean = bool(fetch.pages_clean)
        self._give_back(fetching, clean=clean)
        self._counts[phase.name.lower()] += 1
        self._counts["poisoned_requests"] += not clean
        fetching.handle._end(phase, outcome)
        if peer._gone is not None and not peer._open:
            self._drop(peer, peer._gone)
        self._advance_close()

    def _result(self, fetching: Fetching) -> RequestResult | FabricKVError:
        """What the caller gets when every counter has fired."""
        tail = None
        if fetching.tail_slot is not None and self._tails is not None:
            header = self._tails.header(fetching.request_id, fetching.generation, fetching.peer.epoch)
            try:
                tail = self._tails.take(fetching.tail_slot, header)
            except ProtocolError as error:
                return RequestFailedError(
                    f"request {fetching.request_id!r}: {error}",
                    request_id=fetching.request_id,
                    peer=fetching.peer.epoch.hex(),
                    pages_clean=True,
                    reason="wrong_tail",
                )
        return RequestResult(
            request_id=fetching.request_id,
            tail=tail,
            source_set=fetching.source_set,
            submitted_s=fetching.submitted_s,
            accepted_s=fetching.accepted_s,
            ready_s=self._actor.now(),
        )

    def _on_goodbye(self, peer: PrefillPeer, quiescent: bool) -> None:
        self._give_up(peer, PeerUnreachableError("the prefill side closed during the handshake", peer=peer.epoch.hex()))
        peer._gone = peer._gone or "the prefill side said goodbye"
        for fetching in list(peer._open.values()):
            self._apply(fetching, PeerLeft(quiescent))
        if not peer._open:
            self._drop(peer, peer._gone)
        self._advance_close()

    def _on_peer_lost(self, epoch: bytes, reason: str) -> None:
        peer = self._peers.get(epoch)
        if peer is None:
            return
        self._counts["peers_lost"] += 1
        self._give_up(peer, PeerUnreachableError(f"the prefill side was lost: {reason}", peer=epoch.hex()))
        self._drop(peer, reason)
        for fetching in list(peer._open.values()):
            self._apply(fetching, PeerLost(reason))
        self._advance_close()

    # --- The end ------------------------------------------------------------------------------------------------------

    def _open_requests(self) -> list[Fetching]:
        return [fetching for peer in self._peers.values() for fetching in peer._open.values()]

    def _num_open(self) -> int:
        return len(self._open_requests())

    def _close_requests(self) -> None:
        for fetching in self._open_requests():
            self._apply(fetching, Closing())

    def _end_requests(self) -> None:
        """The backstop: whatever is still open ends now, and its pages are not clean."""
        for fetching in self._open_requests():
            self._apply(fetching, Closing())
            self._apply(fetching, CancelExpired())

    def _snapshot(self) -> dict[str, Any]:
        with self._lock:
            poisoned = sum(pages.size for item in self._poisoned for pages in item.pages)
        return {
            "peers": {
                epoch.hex(): {"alive": peer.alive, "session": peer._session, "requests": len(peer._open)}
                for epoch, peer in self._peers.items()
            },
            "requests": [fetching.snapshot() for fetching in self._open_requests()],
            "poisoned_pages": poisoned,
            "counts": dict(self._counts),
        }
