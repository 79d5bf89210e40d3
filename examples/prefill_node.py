"""The prefill side of the demo: a first-come-first-served scheduler, wired to fabric_kv.

>>> multiprocessing.get_context("spawn").Process(target=serve, args=(pipe, options)).start()

A scheduler of your own does the same five things: take requests in ``on_request``, announce each forward step with
``begin_step``, call ``layer_done`` from the model, ``finish`` with the tail, and free pages in ``on_released``.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
from smollm2 import Llama, PageAllocator, PagedCache, checksums, chunk_ranges, load_checkpoint

from fabric_kv import CacheSpec, Engine, FabricKVError, KVLayout, Placement
from fabric_kv.messenger import Chunk, PrefillMessenger, PrefillRequest, RequestKey, TailPool

PAGE_TOKENS = 16
NUM_PAGES = 256


class Options(NamedTuple):
    """What both processes must know."""

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


def make_caches(model: Llama, tp_size: int) -> tuple[CacheSpec, list[PagedCache]]:
    """One paged cache per tensor-parallel rank, and what a peer must know of them."""
    config = model.config
    caches = [PagedCache(config, tp_size, NUM_PAGES, page_tokens=PAGE_TOKENS) for _ in range(tp_size)]
    layout = KVLayout.attention(
        num_layers=config.num_layers,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_tokens=PAGE_TOKENS,
        dtype="float16",
        model="SmolLM2-135M-Instruct",
    )
    return CacheSpec.from_arrays(layout, Placement(tp_size=tp_size), [cache.data for cache in caches]), caches


def rail_figures(engine: Engine) -> dict[str, Any]:
    """What the engine's one NIC has done so far."""
    rail: dict[str, Any] = engine.describe()["groups"][0]["rails"][0]
    return rail


def serve(pipe: Connection, options: Options) -> None:
    """Serve one request of the process at the other end of ``pipe``, then report what was sent."""
    checkpoint = load_checkpoint()
    model = Llama(checkpoint.config, checkpoint.weights)
    spec, caches = make_caches(model, options.prefill_tp)
    # --poison registers zeros where the caches should be: the transfer works, and every check must fail.
    sources = [np.zeros_like(cache.data) if options.poison else cache.data for cache in caches]
    scheduler = Scheduler()
    with Engine(options.provider, nics=options.nics) as engine:
        tails = TailPool(engine, {"hidden": ("float32", (model.config.hidden,))}, num_slots=4)
        regions = [[engine.register(source)] for source in sources]
        with PrefillMessenger(engine, spec, regions, scheduler, tail=tails) as messenger:
            pipe.send(engine.address)
            pipe_watch(pipe, scheduler)
            request = scheduler.requests.get()
            if request is not None:
                pipe.send(run(model, caches, messenger, engine, scheduler, request, options))
                pipe.poll(10.0)  # stay until the decode side has read the report


def pipe_watch(pipe: Connection, scheduler: Scheduler) -> None:
    """End when the decode process does, also before its first request."""
    import threading

    def watch() -> None:
        pipe.poll(None)
        scheduler.requests.put(None)

    threading.Thread(target=watch, daemon=True).start()


def run(
    model: Llama,
    caches: list[PagedCache],
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
    for begin, end in chunk_ranges(num_tokens, options.chunk_tokens):
        step = messenger.begin_step([Chunk(request.key, begin, end, [pages], final=end == num_tokens)])
        last_layer_s = 0.0

        def layer_done(layer: int, step: int = step) -> None:
            nonlocal last_layer_s
            messenger.layer_done(step, layer)
            last_layer_s = time.monotonic()

        hidden = model.forward(request.tokens[begin:end], begin, caches, pages, layer_done)
    computed, busy_at_end_ns = time.monotonic(), rail_figures(engine)["busy_ns"]
    messenger.finish(request.key, {"hidden": hidden[-1]})
    error = scheduler.ends.get()
    after = rail_figures(engine)
    if error is not None:
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "checksums": checksums(caches, pages, num_tokens),
        "hidden": hidden[-1],
        "compute_s": computed - started,
        "last_layer_s": last_layer_s,
        "hidden_busy_ns": busy_at_end_ns - before["busy_ns"],
        **{name: after[name] - before[name] for name in ("ops", "bytes", "busy_ns")},
    }
