"""The prefill side of the demo: a first-come-first-served scheduler, wired to fabric_kv.

>>> with child("prefill", serve, options) as (pid, pipe): ...

A scheduler of your own does the same five things: take requests in ``on_request``, announce each forward step with
``begin_step``, let the model bump a word after each layer (or call ``layer_done``), ``finish`` with the tail, and free
pages in ``on_released``.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
from ranks import ANSWER_S, NUM_PAGES, PAGE_TOKENS, Ranks
from smollm2 import Config, PageAllocator, chunk_ranges

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
    poison: bool


class Scheduler:
    """Serves one request after the other; the messenger calls it on its own thread."""

    def __init__(self) -> None:
        self.requests: queue.SimpleQueue[PrefillRequest | None] = queue.SimpleQueue()
        self.ends: queue.SimpleQueue[FabricKVError | None] = queue.SimpleQueue()

    def on_request(self, request: PrefillRequest) -> None:
        self.requests.put(request)

    def on_released(self, key: RequestKey) -> None:
        self.ends.put(None)

    def on_failed(self, key: RequestKey, error: FabricKVError) -> None:
        self.ends.put(error)


def rail_figures(engine: Engine) -> dict[str, Any]:
    """What the engine's one NIC has done so far."""
    rail: dict[str, Any] = engine.describe()["groups"][0]["rails"][0]
    return rail


def serve(pipe: Connection, options: Options) -> None:
    """Serve one request of the process at the other end of ``pipe``, then report what was sent."""
    with suppress(BrokenPipeError):  # that process is gone: nobody is left to tell
        try:
            with Ranks("prefill", options.prefill_tp, options.config, options.weights_path) as ranks:
                report = serve_request(pipe, ranks, options)
        except FabricKVError as error:
            report = {"error": f"{type(error).__name__}: {error}"}
        pipe.send(report)


def serve_request(pipe: Connection, ranks: Ranks, options: Options) -> dict[str, Any] | None:
    scheduler = Scheduler()
    with Engine(options.provider, nics=options.nics) as engine:
        tails = TailPool(engine, {"hidden": ("float32", (options.config.hidden,))}, num_slots=4)
        # --poison registers zeros where the caches should be: the transfer works, and every check must fail.
        sources = [np.zeros(cache.nbytes, np.uint8) if options.poison else cache for cache in ranks.caches]
        regions = [[engine.register(source)] for source in sources]
        with PrefillMessenger(engine, ranks.spec, regions, scheduler, tail=tails) as messenger:
            pipe.send((engine.address, ranks.pids))
            pipe_watch(pipe, scheduler)
            request = scheduler.requests.get()
            if request is None:
                return None
            return run(ranks, engine.watch(ranks.word), messenger, engine, scheduler, request, options)


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
    request: PrefillRequest,
    options: Options,
) -> dict[str, Any]:
    """Prefill one request chunk by chunk; each layer's pages leave while the next one computes."""
    num_tokens = request.num_tokens
    pages = PageAllocator(NUM_PAGES, seed=7).allocate(-(-num_tokens // PAGE_TOKENS))
    before, started = rail_figures(engine), time.monotonic()
    try:
        for begin, end in chunk_ranges(num_tokens, options.chunk_tokens):
            if not scheduler.ends.empty() and (early := scheduler.ends.get()) is not None:
                raise early  # decode has given it up, or is gone
            chunk = Chunk(request.key, begin, end, [pages], final=end == num_tokens)
            step = messenger.begin_step([chunk], watch=watch)
            hidden, last_layer_s = ranks.forward(step, request.tokens[begin:end], begin, pages)
    except SharingError as error:
        messenger.fail(request.key, str(error))
        scheduler.ends.get(timeout=ANSWER_S)  # decode has been told
        raise
    computed, busy_at_end_ns = time.monotonic(), rail_figures(engine)["busy_ns"]
    messenger.finish(request.key, {"hidden": hidden})
    if (failure := scheduler.ends.get()) is not None:
        raise failure
    after = rail_figures(engine)
    return {
        "checksums": ranks.checksums(pages, num_tokens),
        "hidden": hidden,
        "compute_s": computed - started,
        "last_layer_s": last_layer_s,
        "hidden_busy_ns": busy_at_end_ns - before["busy_ns"],
        **{name: after[name] - before[name] for name in ("ops", "bytes", "busy_ns")},
    }
