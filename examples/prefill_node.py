"""The prefill side of the demo: a scheduler that gives each request a chunk in turn, wired to fabric_kv.

>>> with child("prefill", serve, options) as (pid, pipe): ...

A scheduler of your own does the same five things: take requests in ``on_request``, announce each forward step with
``begin_step``, let the model bump a word after each layer (or call ``layer_done``), ``finish`` with the tail, and free
pages in ``on_released``.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
from ranks import ANSWER_S, NUM_PAGES, PAGE_TOKENS, Ranks
from smollm2 import Config, PageAllocator, chunk_ranges
from smollm2.cache import Pages
from smollm2.weights import F32

from fabric_kv import Engine, FabricKVError, SharingError, Watch
from fabric_kv.messenger import Chunk, PrefillMessenger, PrefillRequest, RequestKey, TailPool


class Options(NamedTuple):
    """What both sides must know."""

    config: Config
    weights_path: str
    provider: str
    nics: Sequence[str]
    prefill_tp: int
    decode_tp: int
    chunk_tokens: int
    num_requests: int
    poison: bool


class Scheduler:
    """Takes everything; the messenger calls it on its own thread."""

    def __init__(self) -> None:
        self.requests: queue.SimpleQueue[PrefillRequest | None] = queue.SimpleQueue()
        self.ends: queue.SimpleQueue[tuple[RequestKey, FabricKVError | None]] = queue.SimpleQueue()

    def on_request(self, request: PrefillRequest) -> None:
        self.requests.put(request)

    def on_released(self, key: RequestKey) -> None:
        self.ends.put((key, None))

    def on_failed(self, key: RequestKey, error: FabricKVError) -> None:
        self.ends.put((key, error))


class Job:
    """A request that is being prefilled."""

    def __init__(self, request: PrefillRequest, pages: Pages, chunk_tokens: int) -> None:
        self.request = request
        self.pages = pages
        self.chunks = deque(chunk_ranges(request.num_tokens, chunk_tokens))
        self.hidden: F32
        self.last_layer_s = 0.0


def rail_figures(engine: Engine) -> dict[str, Any]:
    """What the engine's one NIC has done so far."""
    rail: dict[str, Any] = engine.describe()["groups"][0]["rails"][0]
    return rail


def serve(pipe: Connection, options: Options) -> None:
    """Serve the requests of the process at the other end of ``pipe``, then report what was sent."""
    with suppress(BrokenPipeError):  # that process is gone: nobody is left to tell
        try:
            with Ranks("prefill", options.prefill_tp, options.config, options.weights_path) as ranks:
                report = serve_requests(pipe, ranks, options)
        except FabricKVError as error:
            report = {"error": f"{type(error).__name__}: {error}"}
        pipe.send(report)


def serve_requests(pipe: Connection, ranks: Ranks, options: Options) -> dict[str, Any] | None:
    scheduler = Scheduler()
    with Engine(options.provider, nics=options.nics) as engine:
        tails = TailPool(engine, {"hidden": ("float32", (options.config.hidden,))}, num_slots=4)
        # --poison registers zeros where the caches should be: the transfer works, and every check must fail.
        sources = [np.zeros(cache.nbytes, np.uint8) if options.poison else cache for cache in ranks.caches]
        regions = [[engine.register(source)] for source in sources]
        with PrefillMessenger(engine, ranks.spec, regions, scheduler, tail=tails) as messenger:
            pipe.send((engine.address, ranks.pids))
            pipe_watch(pipe, scheduler)
            allocator, jobs = PageAllocator(NUM_PAGES, seed=7), list[Job]()
            while len(jobs) < options.num_requests:
                if (request := scheduler.requests.get()) is None:
                    return None
                pages = allocator.allocate(-(-request.num_tokens // PAGE_TOKENS))
                jobs.append(Job(request, pages, options.chunk_tokens))
            return run(ranks, engine.watch(ranks.word), messenger, engine, scheduler, jobs)


def pipe_watch(pipe: Connection, scheduler: Scheduler) -> None:
    """End when the decode process does, also before its first request."""

    def watch() -> None:
        pipe.poll(None)
        scheduler.requests.put(None)

    threading.Thread(target=watch, daemon=True).start()


def run(
    ranks: Ranks,
    watch: Watch,
    messenger: PrefillMessenger,
    engine: Engine,
    scheduler: Scheduler,
    jobs: Sequence[Job],
) -> dict[str, Any]:
    """Prefill all requests, a chunk of each in turn; each layer's pages leave while the next one computes."""
    before, started = rail_figures(engine), time.monotonic()
    open_ = {job.request.key for job in jobs}

    def wait_for_end(timeout: float | None = None) -> None:
        key, failure = scheduler.ends.get(timeout=timeout)
        open_.discard(key)
        if failure is not None:
            raise failure  # decode has given it up, or is gone

    try:
        while working := [job for job in jobs if job.chunks]:
            for job in working:
                while not scheduler.ends.empty():
                    wait_for_end()
                request, (begin, end) = job.request, job.chunks.popleft()
                chunk = Chunk(request.key, begin, end, [job.pages], final=end == request.num_tokens)
                step = messenger.begin_step([chunk], watch=watch)
                job.hidden, job.last_layer_s = ranks.forward(step, request.tokens[begin:end], begin, job.pages)
                if chunk.final:
                    messenger.finish(request.key, {"hidden": job.hidden})
    except SharingError as error:
        for key in open_:
            messenger.fail(key, str(error))
        while open_:
            with suppress(FabricKVError):
                wait_for_end(ANSWER_S)  # decode has been told
        raise
    computed, busy_at_end_ns = time.monotonic(), rail_figures(engine)["busy_ns"]
    while open_:
        wait_for_end()
    after = rail_figures(engine)
    return {
        "requests": {
            job.request.key.request_id: {
                "checksums": ranks.checksums(job.pages, job.request.num_tokens),
                "hidden": job.hidden,
                "last_layer_s": job.last_layer_s,
            }
            for job in jobs
        },
        "compute_s": computed - started,
        "hidden_busy_ns": busy_at_end_ns - before["busy_ns"],
        **{name: after[name] - before[name] for name in ("ops", "bytes", "busy_ns")},
    }
