"""What becomes of a request on the prefill side: messages, ended writes and timers drive its machine.

>>> PrefillMessenger(engine, spec, regions, scheduler).state()["requests"]     # PrefillMessenger builds on this

The machine itself is a pure function, :func:`fabric_kv.messenger.serve.serve_step`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from ..config import Admission, Bounds
from ..errors import ConfigError, FabricKVError, ProtocolError
from ..sharding import CacheSpec
from . import wire
from .actor import Actor
from .posting import Outflow, Poster, may_still_land
from .prefill_sessions import PrefillSessions
from .scheduler import Reject, RequestKey, Scheduler
from .serve import ServeEffect, ServeEvent
from .serving import Serving, error_of
from .sessions import Session
from .sources import SourceCheck, SourcesChangedError
from .state import Accepted, CancelAsked, Closing, DeadlinePassed, PostFailed, Refused, Retired, ServeState, Stalled
from .steps import Steps
from .timeline import Timeline, log_end

if TYPE_CHECKING:
    from ..engine import Engine
    from ..transfers import MemoryRegion, Transfer
    from .tail import TailPool

__all__ = ["PrefillRequests"]

_log = logging.getLogger("fabric_kv.messenger")

# Keys of requests that ended, so that a step which races with the end is told apart from a wrong key.
MAX_ENDED_KEYS = 65536
# How long it takes to tell decode that requests are written: one message for many of them. It waits for none.
WRITTEN_S = 0.25


class _Rejection(ConfigError):
    """A request that is refused although nothing is wrong with it."""

    def __init__(self, message: str, kind: wire.RejectKind = "no_capacity") -> None:
        super().__init__(message)
        self.kind: wire.RejectKind = kind


class PrefillRequests(PrefillSessions):
    """The part of the prefill messenger that sees requests to their end; all on the actor's thread."""

    def __init__(
        self,
        engine: Engine,
        spec: CacheSpec,
        regions: Sequence[Sequence[MemoryRegion]],
        scheduler: Scheduler,
        tail: TailPool | None,
        bounds: Bounds,
        admission: Admission,
        actor: Actor | None,
        sources: SourceCheck | None,
    ) -> None:
        super().__init__(engine, spec, regions, tail, bounds, admission, actor)
        self._scheduler = scheduler
        self._sources = sources
        self._poster = Poster(self._actor, engine, tail, self._on_retired, self._on_refused_post, sources)
        # The next three are guarded by the poster's lock.
        self._serving: dict[RequestKey, Serving] = {}
        self._ended: dict[RequestKey, None] = {}  # In order of their end.
        self._steps = Steps()
        self._open_bytes = 0  # of all in `_serving`

    def _on_message(self, epoch: bytes, message: wire.Message) -> None:
        if isinstance(message, wire.Hello):
            self._on_hello(epoch, message)
            return
        session = self._sessions.get(epoch)
        if session is None:
            self._counts["unknown_peer"] += 1
            return
        match message:
            case wire.Request():
                self._on_request(session, message)
            case wire.Cancel():
                self._on_cancel(session, message)
            case wire.Goodbye():
                if message.session == session.number:
                    self._lose(session, "the decode side closed")
            case _:
                self._counts["misdirected"] += 1

    def _on_request(self, session: Session, message: wire.Request) -> None:
        generation = message.generation
        if not session.seen.add(generation):
            self._counts["late"] += 1
            return
        try:
            if self._closing:
                raise _Rejection("the prefill side is closing", "closing")
            self._check_room(session)
            serving = session.read_request(message)
            self._check_room(session, serving.nbytes)
            if serving.request.key in self._serving:
                raise ProtocolError("the same submission of an earlier session has not ended yet")
        except FabricKVError as error:
            self._counts["rejected"] += 1
            kind = error.kind if isinstance(error, _Rejection) else "incompatible"
            session.link.send(wire.Reject(generation, str(error)[: wire.MAX_REASON_CHARS], kind))
            return
        serving.timeline = Timeline(self._actor.now())
        session.open[generation] = serving
        self._open_bytes += serving.nbytes
        with self._poster.lock:
            self._serving[serving.request.key] = serving
        expired = DeadlinePassed(f"the deadline of {message.deadline_s:g} s passed on the prefill side")
        serving.deadline = self._actor.after(message.deadline_s, partial(self._apply, serving, expired))
        self._apply(serving, self._ask_scheduler(serving))

    def _check_room(self, session: Session, nbytes: int = 0) -> None:
        limits, num_theirs = self._admission, len(session.open)
        if len(self._serving) >= limits.max_requests:
            raise _Rejection(f"{limits.max_requests} requests are open already (max_requests)")
        if num_theirs >= limits.max_requests_per_peer:
            raise _Rejection(f"{num_theirs} requests of this decode engine are open already (max_requests_per_peer)")
        if self._open_bytes + nbytes > limits.max_bytes:
            raise _Rejection(
                f"the request has {nbytes} bytes, those that are open {self._open_bytes}: the limit is"
                f" {limits.max_bytes} (max_bytes)"
            )

    def _ask_scheduler(self, serving: Serving) -> ServeEvent:
        try:
            answer = self._scheduler.on_request(serving.request)
        except Reject as reject:
            answer = reject
        except BaseException as error:  # noqa: BLE001  one request fails, the thread lives
            self._survive(error, "on_request failed for %s", serving)
            answer = Reject(f"the scheduler failed: {type(error).__name__}")
        if answer is None:
            return Accepted()
        kind = getattr(answer, "kind", "rejected")
        return Refused(str(getattr(answer, "reason", answer))[: wire.MAX_REASON_CHARS], kind)

    def _on_cancel(self, session: Session, message: wire.Cancel) -> None:
        generation = message.generation
        if not session.seen.in_range(generation):
            self._counts["late"] += 1
            return
        serving = session.open.get(generation)
        if serving is not None:
            self._apply(serving, CancelAsked())
            return
        # Ended before, or the Cancel overtook its request, which then never starts.
        session.seen.add(generation)
        written = session.was_written(generation)
        self._say_clean(
            session,
            session.was_clean(generation),
            lambda clean: session.link.send(wire.CancelConfirm(generation, clean, written)),
        )

    # --- The life of a request ----------------------------------------------------------------------------------------

    def _apply(self, serving: Serving, event: ServeEvent) -> None:
        if not serving.serve.phase.final:
            serving.timeline.note(type(event).__name__, self._actor.now())
        for effect in self._poster.apply(serving, event):
            self._perform(serving, effect)

    def _perform(self, serving: Serving, effect: ServeEffect) -> None:
        session, serve = serving.session, serving.serve
        generation, link = serving.request.key.generation, session.link
        match effect:
            case ServeEffect.SEND_ACCEPT:
                link.send(wire.Accept(generation))
            case ServeEffect.SEND_REJECT:
                link.send(wire.Reject(generation, serve.reason, cast("wire.RejectKind", serve.reject_kind)))
            case ServeEffect.SEND_FAIL:
                self._say_clean(
                    session, serve.pages_clean, lambda clean: link.send(wire.Fail(generation, serve.reason, clean))
                )
            case ServeEffect.SEND_STALLED:
                self._counts["stalls"] += 1
                link.send(wire.Stalled(generation, serve.stalled or ""))
            case ServeEffect.SEND_CONFIRM:
                written = serve.phase is ServeState.RELEASED
                self._say_clean(
                    session, serve.pages_clean, lambda clean: link.send(wire.CancelConfirm(generation, clean, written))
                )
            case ServeEffect.TELL_WRITTEN:
                if session.note_written(generation):
                    self._actor.after(WRITTEN_S, partial(self._tell_written, session))
            case ServeEffect.STOP_POSTING:
                self._poster.stop(serving)
            case ServeEffect.END:
                self._end(serving)

    def _on_retired(self, outflow: Outflow, error: BaseException | None) -> None:
        assert isinstance(outflow, Serving)
        if error is None:
            self._apply(outflow, Retired())
        else:
            if isinstance(error, SourcesChangedError):
                self._counts["changed_sources"] += 1
                _log.error("%s: %s", outflow.key_text, error)
            self._apply(outflow, Retired(str(error)[: wire.MAX_REASON_CHARS], may_still_land(error)))
        self._tell_if_quiet(outflow)

    def _on_held_up(self, transfers: Sequence[Transfer], why: str) -> None:
        """Writes that the engine has posted are not retired."""
        held = {transfer for transfer in transfers if not transfer.done()}
        for serving in list(self._serving.values()):
            # It waits for its NIC. Whatever else a request waits for, a step of the scheduler's or room in the engine,
            # has nothing in flight, and is not held up.
            with self._poster.lock:
                stalled = not held.isdisjoint(serving.open)
            if stalled:
                self._apply(serving, Stalled(why[: wire.MAX_REASON_CHARS]))

    def _on_refused_post(self, outflow: Outflow, error: BaseException) -> None:
        assert isinstance(outflow, Serving)
        self._apply(outflow, PostFailed(str(error)[: wire.MAX_REASON_CHARS]))

    def _end(self, serving: Serving) -> None:
        key, session, serve = serving.request.key, serving.session, serving.serve
        if serving.deadline is not None:
            serving.deadline.cancel()
        session.open.pop(key.generation, None)
        self._open_bytes -= serving.nbytes
        session.remember(key.generation, pages_clean=serve.pages_clean)
        with self._poster.lock:
            self._serving.pop(key, None)
            self._ended[key] = None
            if len(self._ended) > MAX_ENDED_KEYS:
                del self._ended[next(iter(self._ended))]
            if serve.phase is not ServeState.RELEASED:
                self._steps.forget(serving)
        self._counts[serve.phase.name.lower()] += 1
        log_end(
            serving.timeline,
            self._actor.now(),
            side="prefill",
            request=key.request_id,
            generation=key.generation,
            peer=key.epoch.hex()[:8],
            outcome=serve.phase.name,
            pages_clean=serve.pages_clean,
            tokens=serving.request.num_tokens,
        )
        if serve.phase is not ServeState.REJECTED:
            self._tell_scheduler(serving)
        self._advance_close()

    def _tell_scheduler(self, serving: Serving) -> None:
        key, phase = serving.request.key, serving.serve.phase
        try:
            if phase is ServeState.RELEASED:
                self._scheduler.on_released(key)
            else:
                self._scheduler.on_failed(key, error_of(serving))
        except BaseException as error:  # noqa: BLE001  as above
            self._survive(error, "the scheduler failed at the end of %s", serving)

    def _tell_if_quiet(self, serving: Serving) -> None:
        """Give a preempted request's source pages back, if nothing reads them any more."""
        with self._poster.lock:
            on_quiet = serving.on_quiet
            if on_quiet is None or not serving.may_post or not serving.serve.quiet:
                return
            serving.on_quiet = None
        self._counts["preempted"] += 1
        try:
            on_quiet()
        except BaseException as error:  # noqa: BLE001  as above
            self._survive(error, "on_quiet failed for %s", serving)

    def _survive(self, error: BaseException, what: str, serving: Serving) -> None:
        """Count and log what the scheduler has raised."""
        if not self._actor.survives(error):
            raise error
        self._counts["callback_errors"] += 1
        _log.exception(what, serving.key_text)

    # --- The end ------------------------------------------------------------------------------------------------------

    def _num_open(self) -> int:
        return len(self._serving)

    def _close_requests(self) -> None:
        for serving in list(self._serving.values()):
            self._apply(serving, Closing())

    def _end_requests(self) -> None:
        """Nothing to do: a request whose writes are still in flight ends when the engine retires them."""

    def _snapshot(self) -> dict[str, Any]:
        with self._poster.lock:
            return {
                "peers": {
                    epoch.hex(): {"session": session.number, "requests": len(session.open)}
                    for epoch, session in self._sessions.items()
                },
                "requests": [serving.snapshot() for serving in self._serving.values()],
                "open_bytes": self._open_bytes,
                "open_steps": self._steps.num_open,
                "backlog": self._poster.num_waiting,
                "counts": dict(self._counts),
            }
