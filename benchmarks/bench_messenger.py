"""What a request costs beside its bytes: ``pytest benchmarks/bench_messenger.py``; a part of ``scripts/bench``.

Both sides are in this process, over tcp; models of few bytes, so that what is left is the messenger. No targets here;
see docs/bench.md.
"""

from __future__ import annotations

import itertools
import queue
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
from idle_scheduler import IdleScheduler

from fabric_kv import CacheSpec, Engine, KVLayout, PageList, Placement
from fabric_kv.messenger import (
    Chunk,
    DecodeMessenger,
    PrefillMessenger,
    PrefillPeer,
    Request,
)

pytest.importorskip("pytest_benchmark")

PAGE_TOKENS = 16
NUM_PAGES = 64
LONG = 30.0


class Sides(NamedTuple):
    scheduler: IdleScheduler
    prefill: PrefillMessenger
    decode: DecodeMessenger
    peer: PrefillPeer
    num_layers: int


layers = pytest.mark.parametrize("sides", [1, 32], ids=["1 layer", "32 layers"], indirect=True)


@pytest.fixture
def sides(request: pytest.FixtureRequest) -> Iterator[Sides]:
    layout = KVLayout.attention(
        num_layers=request.param, kv_heads=1, head_dim=16, page_tokens=PAGE_TOKENS, dtype="float16"
    )
    spec = CacheSpec.dense(layout, Placement(), NUM_PAGES)
    with Engine("tcp", nics=["127.0.0.1"]) as ours, Engine("tcp", nics=["127.0.0.1"]) as theirs:
        memory = [np.zeros(spec.memory[0].region_bytes[0], np.uint8) for _ in "ab"]
        scheduler = IdleScheduler()
        with (
            PrefillMessenger(ours, spec, [[ours.register(memory[0])]], scheduler) as prefill,
            DecodeMessenger(theirs, spec, [[theirs.register(memory[1])]]) as decode,
        ):
            yield Sides(scheduler, prefill, decode, decode.connect(ours.address), request.param)


@pytest.mark.parametrize("num_layers", [1, 32], ids=["1 layer", "32 layers"])
def test_the_same_without_a_messenger(benchmark, num_layers: int) -> None:
    """A message there, and a write of all pages to a counter: what such a request consists of, by hand."""
    page_bytes = PAGE_TOKENS * 2 * 16 * 2  # K and V of 16 elements of 2 bytes
    asked: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    pages = PageList(np.arange(4 * num_layers))
    with Engine("tcp", nics=["127.0.0.1"]) as ours, Engine("tcp", nics=["127.0.0.1"]) as theirs:
        memory = [np.zeros((NUM_PAGES * num_layers, page_bytes), np.uint8) for _ in "ab"]
        source, sink = ours.register(memory[0]), theirs.register(memory[1])
        ours.on_message(lambda _, payload: asked.put(payload))
        peer, back = ours.add_peer(theirs.address), theirs.add_peer(ours.address)

        def request() -> None:
            with theirs.counter(unit_bytes=page_bytes, expected_units=4 * num_layers) as counter:
                theirs.send(back, bytes(256))
                asked.get(timeout=LONG)
                ours.write_pages(
                    peer, source, sink.remote, pages, pages, page_bytes=page_bytes, token=counter.token
                ).result(LONG)
                counter.result(LONG)

        benchmark.pedantic(request, rounds=100, warmup_rounds=5)


@layers
def test_a_request_from_submit_to_ready(benchmark, sides: Sides) -> None:
    pages = np.arange(4)
    tokens = np.zeros(4 * PAGE_TOKENS, np.int64)

    def request() -> None:
        handle = sides.decode.submit(sides.peer, Request(request_id="r", tokens=tokens, pages=[pages]))
        taken = sides.scheduler.requests.get(timeout=LONG)
        step = sides.prefill.begin_step([Chunk(taken.key, 0, len(tokens), [pages], final=True)])
        for layer in range(sides.num_layers):
            sides.prefill.layer_done(step, layer)
        sides.prefill.finish(taken.key)
        handle.result(LONG)

    benchmark.pedantic(request, rounds=100, warmup_rounds=5)
    benchmark.extra_info["bare"] = "test_the_same_without_a_messenger"


def test_a_watch_is_set(benchmark) -> None:
    """The engine's part of ``layer_done``, with nothing that waits for it."""
    with Engine("tcp", nics=["127.0.0.1"]) as engine:
        watch, step = engine.watch(), itertools.count(1)
        benchmark.pedantic(lambda: watch.set(next(step), 1), rounds=160, warmup_rounds=5)


@layers
def test_a_layer_done_returns(benchmark, sides: Sides) -> None:
    """On the model's thread: what each layer waits for."""
    pages = np.arange(NUM_PAGES)
    tokens = np.zeros(NUM_PAGES * PAGE_TOKENS, np.int64)
    step, key, handles, left = 0, None, [], iter(())

    def begin() -> None:
        nonlocal step, key, left
        if (layer := next(left, None)) is not None:
            left = iter([layer, *left])
            return
        if key is not None:
            sides.prefill.finish(key)
            handles.pop().result(LONG)
        handles.append(sides.decode.submit(sides.peer, Request(request_id="r", tokens=tokens, pages=[pages])))
        key = sides.scheduler.requests.get(timeout=LONG).key
        step = sides.prefill.begin_step([Chunk(key, 0, len(tokens), [pages], final=True)])
        left = iter(range(sides.num_layers))

    benchmark.pedantic(lambda: sides.prefill.layer_done(step, next(left)), setup=begin, rounds=160)
    benchmark.extra_info["bare"] = "test_a_watch_is_set"
