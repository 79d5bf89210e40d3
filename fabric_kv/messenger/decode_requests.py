"""What becomes of a submitted request on the decode side: messages, counters and timers drive its machine.

>>> DecodeMessenger(engine, spec, regions).state()["requests"]       # DecodeMessenger builds on this

The machine itself is a pure function, :func:`fabric_kv.messenger.fetch.fetch_step`.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from ..config import Bounds
from ..errors import ClosedError, FabricKVError, PeerUnreachableError, ProtocolError, RequestFailedError
from ..sharding import CacheSpec
from ..transfers import Fence
from . import wire
from .actor import Actor
from .fetch import FetchEffect, FetchEvent, fetch_step
from .handle import RequestResult
from .layers import LayerGroups
from .poison import PageClaims, PoisonBook, PoisonedPages, PoisonEntry
from .prefill_peer import DecodePeers, PrefillPeer
from .requests import Fetching, error_of
from .state import (
    Accepted,
    CancelConfirmed,
    CancelExpired,
    Closing,
    CounterBroken,
    CounterFired,
    CountExpired,
    DeadlinePassed,
    EngineClosed,
    Failed,
    PeerLeft,
    PeerLost,
    Rejected,
    RequestState,
    Stalled,
    Written,
)
from .timeline import log_end

if TYPE_CHECKING:
    from ..engine import Engine
    from ..transfers import Counter, MemoryRegion
    from .tail import TailPool

__all__ = ["DecodeRequests"]


class DecodeRequests(DecodePeers):
    """The part of the decode messenger that sees requests to their end."""

    def __init__(
        self,
        engine: Engine,
        spec: CacheSpec,
        regions: Sequence[Sequence[MemoryRegion]],
        tail: TailPool | None,
        bounds: Bounds,
        layers: LayerGroups,
        actor: Actor | None,
    ) -> None:
        super().__init__(engine, spec, regions, tail, bounds, layers, actor)
        self._lock = threading.Lock()  # Guards the next one, which submit() looks at.
        self._num_requests = 0
        self._claims = PageClaims(spec.placement.dp_size, len(spec.layout.groups))
        self._poison = PoisonBook(spec.placement.dp_size, len(spec.layout.groups))

    def _give_back(self, fetching: Fetching, *, clean: bool) -> None:
        """Counters, tail slot and claims of a request that has ended."""
        # A fence by keys speaks of memory: immediates may still come.
        quiescent = clean and not (fetching.fenced and self._engine.fence_means == "registrations")
        fetch = fetching.fetch
        if fetch.written and not clean and not fetch.tainted:
            fetching.missing = fetch.waiting  # What comes after all proves as much as if it had come in time.
        kept = []
        for index, counter in enumerate(fetching.counters):
            try:
                if counter is not None and fetching.missing >> index & 1:
                    kept.append(counter)
                elif counter is not None:
                    counter.release(quiescent=quiescent)
            except ClosedError:
                pass  # The engine took its counters back when it was closed.
        if fetching.tail_slot is not None and self._tails is not None:
            self._tails.release(fetching.tail_slot, clean=clean)
        with self._lock:
            self._num_requests -= 1
        if not clean:
            peer, redeemable = fetching.peer, not (fetch.written or fetch.tainted)
            item = PoisonedPages(fetching.request_id, peer.epoch, fetching.dp, tuple(fetching.pages), fetch.tainted)
            entry = PoisonEntry(item, fetching.generation, fetching.tail_slot, redeemable, tuple(kept))
            self._poison.add(entry, peer._link.peer)
        if fetching.claimed:
            self._claims.release(fetching.dp, fetching.written)
            fetching.claimed = False

    # --- On the actor's thread ----------------------------------------------------------------------------------------

    def _send_request(self, fetching: Fetching) -> None:
        peer = fetching.peer
        if self._closing or not peer.alive:
            # Never sent, so nothing can land.
            fetching.fetch = msgspec.structs.replace(
                fetching.fetch,
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
        fetching.timeline.note("Sent", self._actor.now())
        peer._link.send(fetching.message())
        for index, counter in enumerate(fetching.counters):
            if counter is not None:
                counter.add_done_callback(partial(self._on_counter_done, fetching, index))

    def _count_callback_error(self) -> None:
        self._counts["callback_errors"] += 1

    def _after(self, fetching: Fetching, delay_s: float, command: Any) -> None:
        fetching.timers.append(self._actor.after(delay_s, partial(command, fetching)))

    def _on_accept_expired(self, fetching: Fetching) -> None:
        if fetching.fetch.phase is RequestState.SENT:
            self._apply(fetching, DeadlinePassed(f"neither accepted nor rejected within {self._bounds.accept_s:g} s"))

    def _on_deadline(self, fetching: Fetching) -> None:
        self._apply(fetching, DeadlinePassed(f"its deadline of {fetching.deadline_s:g} s passed"))

    def _on_counter_done(self, fetching: Fetching, index: int, counter: Counter) -> None:
        """On the engine's dispatcher thread."""
        error = counter.exception(0)
        event: FetchEvent
        if error is None:
            event = CounterFired(index)
        elif isinstance(error, ClosedError):
            event = EngineClosed()
        else:
            event = CounterBroken(str(error))
        # Here, if nothing else happens to the messenger: to wake its thread takes longer than to end a request.
        self._actor.post_now(partial(self._on_counter, fetching, event))

    def _on_counter(self, fetching: Fetching, event: FetchEvent) -> None:
        if not fetching.fetch.phase.final:  # Otherwise it was us who released the counter, or it comes too late.
            self._apply(fetching, event)
        elif isinstance(event, CounterFired) and fetching.missing >> event.index & 1:
            fetching.missing &= ~(1 << event.index)
            if not fetching.missing:
                self._poison.redeem(fetching.peer.epoch, fetching.generation, counted=True)

    def _on_message(self, epoch: bytes, message: wire.Message) -> None:
        if isinstance(message, wire.HelloReply) and message.refusal == "other_incarnation":
            self._on_other_incarnation(message)
            return
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
            case wire.Reject(generation, reason, kind):
                self._on_answer(peer, generation, Rejected(reason, kind))
            case wire.Fail(generation, reason, pages_clean):
                self._on_answer(peer, generation, Failed(reason, pages_clean))
            case wire.Stalled(generation, reason):
                self._on_answer(peer, generation, Stalled(reason))
            case wire.Written(generations):
                for generation in generations:  # of which most have long ended here
                    if (fetching := peer._open.get(generation)) is not None:
                        self._apply(fetching, Written())
            case wire.CancelConfirm(generation, pages_clean, written):
                self._on_answer(peer, generation, CancelConfirmed(pages_clean, written))
            case _:
                self._counts["misdirected"] += 1

    def _on_answer(self, peer: PrefillPeer, generation: int, event: FetchEvent) -> None:
        fetching = peer._open.get(generation)
        if fetching is None:
            self._counts["late"] += 1
            match event:
                case Failed(pages_clean=True) | CancelConfirmed(pages_clean=True, written=False):
                    # It ended when its bound on this had passed. As good a proof as it would have been in time.
                    self._poison.redeem(peer.epoch, generation)
            return
        if isinstance(event, Accepted) and math.isnan(fetching.accepted_s):
            fetching.accepted_s = self._actor.now()
        self._apply(fetching, event)

    def _apply(self, fetching: Fetching, event: FetchEvent) -> None:
        if fetching.generation < 0:
            return  # It ended before it was sent.
        if not fetching.fetch.phase.final:
            fetching.timeline.note(type(event).__name__, self._actor.now())
        fetching.fetch, effects = fetch_step(fetching.fetch, event)
        for effect in effects:
            match effect:
                case FetchEffect.SEND_CANCEL:
                    fetching.peer._link.send(wire.Cancel(fetching.generation))
                case FetchEffect.START_CANCEL_TIMER:
                    self._after(fetching, self._bounds.cancel_s, lambda f: self._apply(f, CancelExpired()))
                case FetchEffect.START_COUNT_TIMER:
                    self._await_units(fetching, fetching.received_units())
                case FetchEffect.LATE:
                    self._counts["late"] += 1
                case FetchEffect.END:
                    self._end(fetching)
        if not fetching.fetch.phase.final:
            fetching.handle._set_state(fetching.fetch.phase)

    def _await_units(self, fetching: Fetching, num_before: int) -> None:
        """All is written: as long as it comes in, wait for the rest."""

        def look(fetching: Fetching) -> None:
            received = fetching.received_units()
            if received > num_before:
                self._await_units(fetching, received)
                return
            reason = (
                f"the prefill side has written all of it, and {received} of {fetching.expected_units} units have come:"
                f" none within the last {self._bounds.count_s:g} s"
            )
            self._apply(fetching, CountExpired(reason))

        self._after(fetching, self._bounds.count_s, look)

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
        if phase is RequestState.READY:
            peer.degraded = None
        elif phase in (RequestState.TIMED_OUT, RequestState.STALLED) or (phase is RequestState.FAILED and not clean):
            peer.degraded = f"{phase.name.lower()}: {fetch.reason}"
        self._give_back(fetching, clean=clean)
        self._counts[phase.name.lower()] += 1
        self._counts["poisoned_requests"] += not clean
        log_end(
            fetching.timeline,
            self._actor.now(),
            logging.INFO if clean else logging.WARNING,
            side="decode",
            request=fetching.request_id,
            generation=fetching.generation,
            peer=peer.epoch.hex()[:8],
            outcome=phase.name,
            pages_clean=clean,
            tokens=fetching.num_tokens,
        )
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
        if peer._open and self._engine.fence_means != "none":
            # The requests end when it is known whether their pages are clean.
            self._fencing[epoch] = peer
            fence = partial(self._engine.fence, peer._link.peer, timeout_s=self._bounds.fence_s)
            self._actor.aside(fence, partial(self._on_fenced, peer, reason))
        else:
            self._end_lost(peer, PeerLost(reason))

    def _on_fenced(self, peer: PrefillPeer, reason: str, outcome: Fence | BaseException) -> None:
        self._fencing.pop(peer.epoch, None)
        fenced = isinstance(outcome, Fence) and outcome.proven
        why = outcome.why if isinstance(outcome, Fence) else str(outcome)
        for fetching in peer._open.values():
            fetching.fenced = fenced
        self._counts["fenced_peers"] += fenced
        self._end_lost(peer, PeerLost(f"{reason}; {'fenced' if fenced else 'not fenced'}: {why}", fenced))

    def _end_lost(self, peer: PrefillPeer, event: PeerLost) -> None:
        for fetching in list(peer._open.values()):
            self._apply(fetching, event)
        self._advance_close()

    # --- The end ------------------------------------------------------------------------------------------------------

    def _all_peers(self) -> list[PrefillPeer]:
        return [*self._peers.values(), *(peer for peer in self._fencing.values() if peer is not None)]

    def _open_requests(self) -> list[Fetching]:
        return [fetching for peer in self._all_peers() for fetching in peer._open.values()]

    def _num_open(self) -> int:
        return sum(len(peer._open) for peer in self._all_peers())

    def _close_requests(self) -> None:
        for fetching in self._open_requests():
            self._apply(fetching, Closing())

    def _end_requests(self) -> None:
        """The backstop: whatever is still open ends now, and its pages are not clean."""
        for fetching in self._open_requests():
            self._apply(fetching, Closing())
            self._apply(fetching, CancelExpired())

    def _snapshot(self) -> dict[str, Any]:
        poisoned = sum(pages.size for item in self._poison.items for pages in item.pages)
        return {
            "peers": {
                epoch.hex(): {
                    "alive": peer.alive,
                    "degraded": peer.degraded,
                    "session": peer._session,
                    "requests": len(peer._open),
                }
                for epoch, peer in self._peers.items()
            },
            "requests": [fetching.snapshot() for fetching in self._open_requests()],
            "poisoned_pages": poisoned,
            "counts": dict(self._counts),
        }
