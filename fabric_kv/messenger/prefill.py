"""The prefill side: takes requests in, writes pages as layers finish, and says when source pages are free again.

>>> prefill = PrefillMessenger(engine, spec, [[region] for region in regions], scheduler)
>>> step = prefill.begin_step([Chunk(key, 0, 512, [src_pages], final=True)])
>>> for layer in range(num_layers): run_layer(layer); prefill.layer_done(step, layer)
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from numpy.typing import ArrayLike

from ..config import Admission, Bounds
from ..errors import ConfigError
from ..sharding import CacheSpec
from . import wire
from .actor import Actor
from .posting import Submission, TailSubmission
from .prefill_requests import PrefillRequests
from .scheduler import Chunk, RequestKey, Scheduler
from .serving import Serving
from .sources import SourceCheck
from .state import AllPlanned, FailAsked, Planned

if TYPE_CHECKING:
    from ..engine import Engine
    from ..prepared import Watch
    from ..transfers import MemoryRegion
    from .tail import TailPool

__all__ = ["PrefillMessenger"]


class PrefillMessenger(PrefillRequests):
    """Serves requests of any number of decode engines.

    Parameters
    ----------
    engine : Engine
        Its ``on_message``, ``on_peer_lost`` and ``on_held_up`` are taken over.
    spec : CacheSpec
        This side's cache: layout, placement, and where each rank keeps its pages.
    regions : sequence of sequence of MemoryRegion
        The registered regions of each rank, in the order of ``spec.memory[rank].region_bytes``.
    scheduler : Scheduler
        Told of requests; called on the messenger's thread.
    bounds : Bounds
    tail : TailPool, optional
        Needed if decode engines want tails.
    admission : Admission
        How many requests, bytes and peers it takes on.
    check_sources : bool
        For debugging: check that source pages are not changed before they are sent. It reads all pages twice, and
        needs arrays on the host (ConfigError). Layers that a word of the caller's lets go are not checked.

    Notes
    -----
    Threads: ``begin_step``, ``layer_done``, ``finish``, ``preempt`` and ``fail`` from any, none of them blocks.
    Everything else happens on one thread of the messenger's own.
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
        admission: Admission = Admission(),
        check_sources: bool = False,
        actor: Actor | None = None,
    ) -> None:
        sources = SourceCheck(regions) if check_sources else None
        super().__init__(engine, spec, regions, scheduler, tail, bounds, admission, actor, sources)
        self._start()

    # --- The scheduler's calls; any thread ----------------------------------------------------------------------------

    def begin_step(self, chunks: Sequence[Chunk], *, watch: Watch | None = None) -> int:
        """Hand the writes of one forward step to the engine, before it runs; each waits there for its layer.

        Nothing of this blocks: what the engine has no room for follows by itself.

        Parameters
        ----------
        chunks : sequence of Chunk
            What the step computes, for any number of requests. Chunks of requests that ended meanwhile are skipped:
            the scheduler was told, or is about to be.
        watch : Watch, optional
            A word of ``engine.watch(word)`` that says how far the step is, instead of ``layer_done``: whatever
            computes, a GPU for example, writes ``step << 16`` when the step begins and adds 1 after each layer. Steps
            that share a word must run in the order of their numbers.

        Returns
        -------
        int
            The step's number, for ``layer_done`` or the word.

        Raises
        ------
        ConfigError
            If a chunk names a request that never was, or was preempted and is not quiet; does not follow the one
            before, or holds a page that does not exist; or the watch is another engine's. Nothing has been prepared
            then, of any chunk.
        """
        if watch is not None and watch._engine is not self._engine:
            raise ConfigError("the watch was made by another engine")
        if watch is not None and watch.step > self._steps.last_number:
            raise ConfigError(
                f"the word is at step {watch.step} already, and this is step {self._steps.last_number + 1}: its layers"
                " would go at once. Hint: set the word to 0"
            )
        with self._poster.lock:
            active = self._active_chunks(chunks)
            before = {serving: serving.num_preemptions for serving, _ in active}
        submissions: list[Submission] = []
        for serving, chunk in active:
            submissions += serving.plan_chunk(chunk)
        with self._poster.lock:
            # Again, since another thread may have been here meanwhile.
            active = self._active_chunks(chunks)
            for serving, _ in active:
                if serving.num_preemptions != before.get(serving):
                    raise ConfigError(f"{serving.key_text}: it was preempted while its step was begun")
            for serving, chunk in active:
                serving.next_token, serving.src_dp = chunk.end, chunk.dp
                serving.planned_tokens = max(serving.planned_tokens, chunk.end)
                serving.last_chunk_seen = chunk.final
            planned = collections.Counter(submission.outflow for submission in submissions)
            now = self._actor.now()
            for serving in {serving for serving, _ in active}:
                serving.timeline.note("Step", now)
                self._poster.apply(serving, Planned(planned.pop(serving, 0)))
            # What is left in `planned` ended meanwhile.
            submissions = [submission for submission in submissions if submission.outflow not in planned]
            step = self._steps.new_number()
            if submissions:
                word = watch or self._engine.watch()
                for submission in submissions:
                    if submission.layers:
                        submission.watch, submission.step = word, step
                if self._sources is not None:
                    self._sources.open(step, submissions)
                if watch is None:
                    self._steps.open(step, word, submissions)
        # One by one, so that others who want the lock do not wait for all of them.
        for submission in submissions:
            with self._poster.lock:
                if not self._poster.post([submission]):
                    self._counts["backlogged"] += 1
        return step

    def layer_done(self, step: int, layer: int) -> None:
        """Let a layer's pages go: the model has finished them for all chunks of the step. Never blocks.

        The engine's own thread posts them. A layer goes when all before it that hold something to write are done, too.
        A step or layer that holds nothing (more) to write is ignored: warm-up, a repeated call, a request that ended.

        Raises
        ------
        ConfigError
            If the model has no such layer.
        """
        if not 0 <= layer < self._spec.layout.num_layers:
            raise ConfigError(f"layer={layer} is out of range: it must lie in [0, {self._spec.layout.num_layers})")
        if self._sources is not None:
            self._sources.layer_done(step, layer)
        if not self._steps.layer_done(step, layer):
            with self._poster.lock:
                self._counts["idle_layers"] += 1

    def finish(self, key: RequestKey, tail: Mapping[str, ArrayLike] | None = None) -> None:
        """Write the tail and end the request once everything has been delivered. Never blocks.

        Call it after ``begin_step`` of the final chunk; ``layer_done`` calls may still follow.

        Parameters
        ----------
        key : RequestKey
        tail : mapping of str to array_like, optional
            Every field of the pool, in its dtype and shape; copied. Needed if the request ``wants_tail``, ignored
            otherwise.

        Raises
        ------
        ConfigError
            If the tail does not fit, or the final chunk or the request is unknown. The request goes on.
        """
        with self._poster.lock:
            serving = self._find(key)
            if serving is None or not serving.may_post:
                return  # It ended meanwhile, or is about to: the scheduler was told, or will be.
            if not serving.last_chunk_seen or serving.finished:
                wrong = "was finished before" if serving.finished else "has had no final chunk"
                raise ConfigError(f"cannot finish {serving.key_text}: it {wrong}")
            submission = self._tail_submission(serving, tail)
            serving.finished = True
            serving.timeline.note("Finish", self._actor.now())
            if submission is not None:
                self._poster.apply(serving, Planned(1))
                self._poster.post_tail(submission)
        self._actor.post(partial(self._apply, serving, AllPlanned()))

    def preempt(self, key: RequestKey, on_quiet: Callable[[], object]) -> None:
        """Take an accepted request's source pages away, to compute it again in others later. Never blocks.

        Nothing is sent twice: chunks that follow may begin at any token up to the end of the last one, compute again
        what they must, and what was sent already is skipped.

        Parameters
        ----------
        key : RequestKey
        on_quiet : callable ()
            Called once on the messenger's thread, as ``on_released`` is, when no write of the request is in flight:
            its source pages are the scheduler's again, and chunks may follow. If the request ends before,
            ``on_failed`` or ``on_released`` takes its place.

        Raises
        ------
        ConfigError
            If the request is unknown, or was preempted and is not quiet yet.

        Notes
        -----
        Steps that have begun run to their end: their layers must be reported (or the word go on) as always. For a
        step that will not be run there is ``fail``.
        """
        with self._poster.lock:
            serving = self._find(key)
            if serving is None or not serving.may_post:
                return
            if serving.on_quiet is not None:
                raise ConfigError(f"{serving.key_text} was preempted before, and is not quiet yet")
            serving.on_quiet = on_quiet
            serving.num_preemptions += 1
            serving.next_token = None
            serving.timeline.note("Preempt", self._actor.now())
        self._actor.post(partial(self._tell_if_quiet, serving))

    def fail(self, key: RequestKey, reason: str) -> None:
        """Give an accepted request up; decode is told why once its writes are retired. Never blocks.

        Ends in ``on_failed``, unless the request ended otherwise before. Where a word says how far steps are, call it
        before the word goes on to the next step: that one says that the layers of this one are done.
        """
        with self._poster.lock:
            serving = self._find(key)
        if serving is not None:
            self._actor.post(partial(self._apply, serving, FailAsked(reason[: wire.MAX_REASON_CHARS])))
            # At once: what waits for a word must not go by whatever the word says next.
            self._poster.stop(serving)

    def _active_chunks(self, chunks: Sequence[Chunk]) -> list[tuple[Serving, Chunk]]:
        """Chunks of requests that may still post, after a check of their order."""
        active = []
        reached: dict[RequestKey, tuple[int | None, int]] = {}
        for chunk in chunks:
            serving = self._find(chunk.key)
            if serving is None or not serving.may_post:
                continue
            serving.check_chunk(chunk, *reached.get(chunk.key, (serving.next_token, serving.src_dp)))
            reached[chunk.key] = chunk.end, chunk.dp
            active.append((serving, chunk))
        return active

    def _find(self, key: RequestKey) -> Serving | None:
        serving = self._serving.get(key)
        if serving is None and key not in self._ended:
            raise ConfigError(f"there is no request {RequestKey(*key)}")
        return serving

    def _tail_submission(self, serving: Serving, tail: Mapping[str, ArrayLike] | None) -> TailSubmission | None:
        session, place = serving.session, serving.tail
        if place is None or session.tail is None or session.tail_region is None:
            return None
        if tail is None or self._tails is None:
            raise ConfigError(f"cannot finish {serving.key_text}: its decode side wants a tail, and none was given")
        key = serving.request.key
        header = self._tails.header(key.request_id, key.generation, self._engine.epoch)
        payload = self._tails.to_payload(tail)
        offset = place.slot * session.tail.slot_bytes
        return TailSubmission(serving, header, payload, session.tail_region, offset, place.counter)
