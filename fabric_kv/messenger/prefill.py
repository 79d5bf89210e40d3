"""The prefill side: takes requests in, writes pages as layers finish, and says when source pages are free again.

>>> prefill = PrefillMessenger(engine, spec, [[region] for region in regions], scheduler)
>>> step = prefill.begin_step([Chunk(key, 0, 512, [src_pages], final=True)])
>>> for layer in range(num_layers): run_layer(layer); prefill.layer_done(step, layer)
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from numpy.typing import ArrayLike

from ..cache import CacheSpec
from ..config import Bounds
from ..errors import ConfigError, FabricKVError
from . import wire
from .actor import Actor
from .posting import Outflow, Poster, Submission, TailSubmission, may_still_land
from .prefill_sessions import PrefillSessions
from .scheduler import Chunk, Reject, RequestKey, Scheduler
from .serve import ServeEffect, ServeEvent
from .serving import Serving, error_of
from .sessions import Session
from .state import (
    Accepted,
    AllPlanned,
    CancelAsked,
    Closing,
    DeadlinePassed,
    FailAsked,
    Planned,
    PostFailed,
    Refused,
    Retired,
    ServeState,
)
from .steps import Steps

if TYPE_CHECKING:
    from ..engine import Engine
    from ..transfers import MemoryRegion
    from .tail import TailPool

__all__ = ["PrefillMessenger"]

_log = logging.getLogger("fabric_kv.messenger")

# Keeps what peers can make us hold bounded; beyond it a request is rejected with the number.
MAX_OPEN_REQUESTS = 65536
# Keys of requests that ended, so that a step which races with the end is told apart from a wrong key.
MAX_ENDED_KEYS = 65536


class PrefillMessenger(PrefillSessions):
    """Serves requests of any number of decode engines.

    Parameters
    ----------
    engine : Engine
        Its message and peer-lost callbacks are taken over.
    spec : CacheSpec
        This side's cache: layout, placement, and where each rank keeps its pages.
    regions : sequence of sequence of MemoryRegion
        The registered regions of each rank, in the order of ``spec.memory[rank].region_bytes``.
    scheduler : Scheduler
        Told of requests; called on the messenger's thread.
    bounds : Bounds
    tail : TailPool, optional
        Needed if decode engines want tails.

    Notes
    -----
    Threads: ``begin_step``, ``layer_done``, ``finish`` and ``fail`` from any, none of them blocks. Everything else
    happens on one thread of the messenger's own.
    """

    def __init__(
        self,
        engine: Engine,
        spec: CacheSpec,
        regions: Sequence[Sequence[MemoryRegion]],
        scheduler: Scheduler,
        bounds: Bounds = Bounds(),
        *,
        tail: TailPool | None = None,
        actor: Actor | None = None,
    ) -> None:
        super().__init__(engine, spec, regions, tail, bounds, actor)
        self._scheduler = scheduler
        self._poster = Poster(self._actor, engine, tail, self._on_retired, self._on_refused_post)
        # The next three are guarded by the poster's lock.
        self._serving: dict[RequestKey, Serving] = {}
        self._ended: dict[RequestKey, None] = {}  # In order of their end.
        self._steps = Steps()
        self._start()

    # --- The scheduler's calls; any thread ----------------------------------------------------------------------------

    def begin_step(self, chunks: Sequence[Chunk]) -> int:
        """Prepare the writes of one forward step, before it runs.

        Parameters
        ----------
        chunks : sequence of Chunk
            What the step computes, for any number of requests. Chunks of requests that ended meanwhile are skipped:
            the scheduler was told, or is about to be.

        Returns
        -------
        int
            The step's number, for ``layer_done``.

        Raises
        ------
        ConfigError
            If a chunk names a request that never was, does not follow the one before, or holds a page that does not
            exist. Nothing has been prepared then.
        """
        with self._poster.lock:
            active = self._active_chunks(chunks)
        layers: dict[int, list[Submission]] = {}
        planned: dict[Serving, int] = {}
        for serving, chunk in active:
            for layer, submission in serving.plan_chunk(chunk, self._regions):
                layers.setdefault(layer, []).append(submission)
                planned[serving] = planned.get(serving, 0) + 1
        with self._poster.lock:
            # Again, since another thread may have been here meanwhile.
            active = self._active_chunks(chunks)
            for serving, chunk in active:
                serving.next_token = chunk.end
                serving.last_chunk_seen = chunk.final
            for serving in {serving for serving, _ in active}:
                self._poster.apply(serving, Planned(planned.pop(serving, 0)))
            step = self._steps.add(layers)
            for serving in planned:
                self._steps.forget(serving)  # It ended meanwhile.
            return step

    def layer_done(self, step: int, layer: int) -> None:
        """Write a layer's pages: the model has finished them for all chunks of the step. Never blocks.

        The writes are posted on the caller's thread; what the engine has no room for follows by itself. A step or
        layer that holds nothing (more) to write is ignored: warm-up, a repeated call, a request that ended.

        Raises
        ------
        ConfigError
            If the model has no such layer.
        """
        if not 0 <= layer < self._spec.layout.num_layers:
            raise ConfigError(f"layer={layer} is out of range: it must lie in [0, {self._spec.layout.num_layers})")
        with self._poster.lock:
            submissions = self._steps.take(step, layer)
            if not submissions:
                self._counts["idle_layers"] += 1
            elif not self._poster.post(submissions):
                self._counts["backlogged"] += 1

    def finish(self, key: RequestKey, tail: ArrayLike | None = None) -> None:
        """Write the tail and end the request once everything has been delivered. Never blocks.

        Call it after ``begin_step`` of the final chunk; ``layer_done`` calls may still follow.

        Parameters
        ----------
        key : RequestKey
        tail : array_like, optional
            In the pool's dtype and shape; copied. Needed if the request ``wants_tail``, ignored otherwise.

        Raises
        ------
        ConfigError
            If the tail does not fit, or the final chunk or the request is unknown. The request goes on.
        """
        with self._poster.lock:
            serving = self._find(key)
            if serving is None or not serving.serve.may_post:
                return  # It ended meanwhile, or is about to: the scheduler was told, or will be.
            if not serving.last_chunk_seen or serving.finished:
                wrong = "was finished before" if serving.finished else "has had no final chunk"
                raise ConfigError(f"cannot finish {serving.key_text}: it {wrong}")
            submission = self._tail_submission(serving, tail)
            serving.finished = True
            if submission is not None:
                self._poster.apply(serving, Planned(1))
                self._poster.post_tail(submission)
        self._actor.post(partial(self._apply, serving, AllPlanned()))

    def fail(self, key: RequestKey, reason: str) -> None:
        """Give an accepted request up; decode is told why once its writes are retired. Never blocks.

        Ends in ``on_failed``, unless the request ended otherwise before.
        """
        with self._poster.lock:
            serving = self._find(key)
        if serving is not None:
            self._actor.post(partial(self._apply, serving, FailAsked(reason[: wire.MAX_REASON_CHARS])))

    def _active_chunks(self, chunks: Sequence[Chunk]) -> list[tuple[Serving, Chunk]]:
        """Chunks of requests that may still post, after a check of their order."""
        active = []
        reached: dict[RequestKey, int | None] = {}
        for chunk in chunks:
            serving = self._find(chunk.key)
            if serving is None or not serving.serve.may_post:
                continue
            serving.check_chunk(chunk, reached.get(chunk.key, serving.next_token))
            reached[chunk.key] = chunk.end
            active.append((serving, chunk))
        return active

    def _find(self, key: RequestKey) -> Serving | None:
        serving = self._serving.get(key)
        if serving is None and key not in self._ended:
            raise ConfigError(f"there is no request {RequestKey(*key)}")
        return serving

    def _tail_submission(self, serving: Serving, tail: ArrayLike | None) -> TailSubmission | None:
        session, slot = serving.session, serving.tail_slot
        if slot is None or session.tail is None or session.tail_region is None:
            return None
        if tail is None or self._tails is None:
            raise ConfigError(f"cannot finish {serving.key_text}: its decode side wants a tail, and none was given")
        token = serving.tokens[0]
        assert token is not None  # read_request checked it: the tail counts on rank 0.
        key = serving.request.key
        header = self._tails.header(key.request_id, key.generation, self._engine.epoch)
        payload = self._tails.to_payload(tail)
        return TailSubmission(serving, header, payload, session.tail_region, slot * session.tail.slot_bytes, token)

    # --- Messages; on the actor's thread, like everything below -------------------------------------------------------

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
                raise ConfigError("the prefill side is closing")
            if len(self._serving) >= MAX_OPEN_REQUESTS:
                raise ConfigError(f"{MAX_OPEN_REQUESTS} requests are open already")
            serving = session.read_request(message)
        except FabricKVError as error:
            self._counts["rejected"] += 1
            session.link.send(wire.Reject(generation, str(error)[: wire.MAX_REASON_CHARS]))
            return
        session.open[generation] = serving
        with self._poster.lock:
            self._serving[serving.request.key] = serving
        expired = DeadlinePassed(f"the deadline of {message.deadline_s:g} s passed on the prefill side")
        serving.deadline = self._actor.after(message.deadline_s, partial(self._apply, serving, expired))
        self._apply(serving, self._ask_scheduler(serving))

    def _ask_scheduler(self, serving: Serving) -> ServeEvent:
        try:
            answer = self._scheduler.on_request(serving.request)
        except Reject as reject:
            answer = reject
        except Exception as error:  # noqa: BLE001  (it is the user's code: one request fails, the thread lives)
            self._counts["callback_errors"] += 1
            _log.exception("on_request failed for %s", serving.key_text)
            answer = Reject(f"the scheduler failed: {type(error).__name__}")
        if answer is None:
            return Accepted()
        return Refused(str(getattr(answer, "reason", answer))[: wire.MAX_REASON_CHARS])

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
        session.link.send(wire.CancelConfirm(generation, session.was_clean(generation)))

    # --- The life of a request ----------------------------------------------------------------------------------------

    def _apply(self, serving: Serving, event: ServeEvent) -> None:
        for effect in self._poster.apply(serving, event):
            self._perform(serving, effect)

    def _perform(self, serving: Serving, effect: ServeEffect) -> None:
        generation, link, serve = serving.request.key.generation, serving.session.link, serving.serve
        match effect:
            case ServeEffect.SEND_ACCEPT:
                link.send(wire.Accept(generation))
            case ServeEffect.SEND_REJECT:
                link.send(wire.Reject(generation, serve.reason))
            case ServeEffect.SEND_FAIL:
                link.send(wire.Fail(generation, serve.reason, serve.pages_clean))
            case ServeEffect.SEND_CONFIRM:
                link.send(wire.CancelConfirm(generation, serve.pages_clean))
            case ServeEffect.STOP_POSTING:
                self._poster.stop(serving)
            case ServeEffect.END:
                self._end(serving)

    def _on_retired(self, outflow: Outflow, error: BaseException | None) -> None:
        assert isinstance(outflow, Serving)
        if error is None:
            self._apply(outflow, Retired())
        else:
            self._apply(outflow, Retired(str(error)[: wire.MAX_REASON_CHARS], may_still_land(error)))

    def _on_refused_post(self, outflow: Outflow, error: BaseException) -> None:
        assert isinstance(outflow, Serving)
        self._apply(outflow, PostFailed(str(error)[: wire.MAX_REASON_CHARS]))

    def _end(self, serving: Serving) -> None:
        key, session, serve = serving.request.key, serving.session, serving.serve
        if serving.deadline is not None:
            serving.deadline.cancel()
        session.open.pop(key.generation, None)
        session.remember(key.generation, pages_clean=serve.pages_clean)
        with self._poster.lock:
            self._serving.pop(key, None)
            self._ended[key] = None
            if len(self._ended) > MAX_ENDED_KEYS:
                del self._ended[next(iter(self._ended))]
            if serve.phase is not ServeState.RELEASED:
                self._steps.forget(serving)
        self._counts[serve.phase.name.lower()] += 1
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
        except Exception:  # noqa: BLE001  (as in _ask_scheduler)
            self._counts["callback_errors"] += 1
            _log.exception("the scheduler failed at the end of %s", serving.key_text)

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
                "open_steps": self._steps.num_open,
                "backlog": self._poster.num_waiting,
                "counts": dict(self._counts),
            }
