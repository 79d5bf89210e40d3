"""What a request costs beside its bytes: ``pytest benchmarks/bench_messenger.py``. No targets here; see docs/bench.md.

Both sides are in this process, over tcp; models of few bytes, so that what is left is the messenger.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest

from fabric_kv import CacheSpec, Engine, KVLayout, Placement
from fabric_kv.errors import FabricKVError
from fabric_kv.messenger import (
    Chunk,
    DecodeMessenger,
    PrefillMessenger,
    PrefillPeer,
    PrefillRequest,
    Request,
    RequestKey,
)

pytest.importorskip("pytest_benchmark")

PAGE_TOKENS = 16
NUM_PAGES = 64
LONG = 30.0


class Queue:
    """A scheduler that computes nothing."""

    def __init__(self) -> None:
        self.requests: queue.SimpleQueue[PrefillRequest] = queue.SimpleQueue()

    def on_request(self, request: PrefillRequest) -> None:
        self.requests.put(request)

    def on_released(self, key: RequestKey) -> None:
        pass

    def on_failed(self, key: RequestKey, error: FabricKVError) -> None:
        raise error


class Sides(NamedTuple):
    scheduler: Queue
    prefill: PrefillMessenger
    decode: DecodeMessenger
    peer: PrefillPeer
    num_layers: int


@pytest.fixture(params=[1, 32], ids=lambda layers: f"{layers} layers")
def sides(request: pytest.FixtureRequest) -> Iterator[Sides]:
    layout = KVLayout.attention(
        num_layers=request.param, kv_heads=1, head_dim=16, page_tokens=PAGE_TOKENS, dtype="float16"
    )
    spec = CacheSpec.dense(layout, Placement(), NUM_PAGES)
    with Engine("tcp", nics=["127.0.0.1"]) as ours, Engine("tcp", nics=["127.0.0.1"]) as theirs:
        memory = [np.zeros(spec.memory[0].region_bytes[0], np.uint8) for _ in "ab"]
        scheduler = Queue()
        with (
            PrefillMessenger(ours, spec, [[ours.register(memory[0])]], scheduler) as prefill,
            DecodeMessenger(theirs, spec, [[theirs.register(memory[1])]]) as decode,
        ):
            yield Sides(scheduler, prefill, decode, decode.connect(ours.address), request.param)


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


def test_a_layer_done_returns(benchmark, sides: Sides) -> None:
    """On the model's thread: what each layer waits for."""
    pages = np.arange(NUM_PAGES)
    tokens = np.zeros(NUM_PAGES * PAGE_TOKENS, np.int64)
    step, key, handles, layers = 0, None, [], iter(())

    def begin() -> None:
        nonlocal step, key, layers
        if (layer := next(layers, None)) is not None:
            layers = iter([layer, *layers])
            return
        if key is not None:
            sides.prefill.finish(key)
            handles.pop().result(LONG)
        handles.append(sides.decode.submit(sides.peer, Request(request_id="r", tokens=tokens, pages=[pages])))
        key = sides.scheduler.requests.get(timeout=LONG).key
        step = sides.prefill.begin_step([Chunk(key, 0, len(tokens), [pages], final=True)])
        layers = iter(range(sides.num_layers))

    benchmark.pedantic(lambda: sides.prefill.layer_done(step, next(layers)), setup=begin, rounds=160)
