"""What the engine's calls cost in Python: ``pytest benchmarks/bench_engine.py``; a part of ``scripts/bench``.

Targets, not assertions. Submitting 16 pages: under 5 us, prepared under 3; a million pages from a ``PageList``: 1 ms.
Adaptive engines; both ends are in this process and providers move the data in software, so that what follows competes
with the call for the cores: bench_pages.py measures throughput.
"""

from __future__ import annotations

import os
import queue
import select
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest

from fabric_kv import Counter, Engine, EngineOptions, MemoryRegion, PageList, PreparedPiece, RemoteRegion
from fabric_kv.transfers import Peer, Transfer

pytest.importorskip("pytest_benchmark")

PAGE_BYTES = 64
LONG = 30.0


class Ends(NamedTuple):
    """Two engines; the first writes to the second."""

    ours: Engine
    theirs: Engine
    peer: Peer
    source: MemoryRegion
    sink: RemoteRegion

    def counter(self, units: int) -> Counter:
        return self.theirs.counter(unit_bytes=PAGE_BYTES, expected_units=units)


@pytest.fixture(params=["tcp", "shm"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    nics = [] if request.param == "shm" else ["127.0.0.1"]
    with Engine(request.param, nics=nics) as theirs, Engine(request.param, nics=nics) as ours:
        memory = [np.zeros((1_000_000, PAGE_BYTES), np.uint8) for _ in "ab"]
        source, sink = ours.register(memory[0]), theirs.register(memory[1])
        peer = ours.add_peer(theirs.address)
        ours.write(peer, source, 0, sink.remote, 0, PAGE_BYTES).result(LONG)  # connects
        yield Ends(ours, theirs, peer, source, sink.remote)


@pytest.mark.parametrize("as_list", [False, True], ids=["array", "PageList"])
@pytest.mark.parametrize("num_pages", [16, 1_000_000])
def test_write_pages_returns(benchmark, ends: Ends, num_pages: int, as_list: bool) -> None:
    """Until the call returns; the transfer is then cancelled."""
    pages = np.random.default_rng(1).permutation(num_pages)
    given = PageList(pages) if as_list else pages
    transfers = []

    def submit() -> None:
        transfers.append(ends.ours.write_pages(ends.peer, ends.source, ends.sink, given, given, page_bytes=PAGE_BYTES))

    def settle() -> None:
        while transfers:
            transfers[-1].cancel()
            transfers.pop().exception(LONG)

    benchmark.pedantic(submit, setup=settle, rounds=20 if num_pages > 16 else 500, warmup_rounds=5)
    settle()
    # A copy of a million indices has 2 ns each on top.
    benchmark.extra_info["target_us"] = 5 if num_pages == 16 else 1000 if as_list else 3000
    benchmark.extra_info["bare"] = "test_a_sleeping_thread_is_rung"


def test_prepared_submission_returns(benchmark, ends: Ends) -> None:
    piece = PreparedPiece(ends.source, 0, PAGE_BYTES, ends.sink, 0, PAGE_BYTES, PAGE_BYTES)
    prepared = ends.ours.prepare(ends.peer, [piece])
    pages = PageList(np.random.default_rng(1).permutation(16))
    transfers = []

    def submit() -> None:
        transfers.append(prepared.submit([(pages, pages)]))

    def settle() -> None:
        while transfers:
            transfers.pop().result(LONG)

    benchmark.pedantic(submit, setup=settle, rounds=500, warmup_rounds=5)
    settle()
    benchmark.extra_info["target_us"] = 3
    benchmark.extra_info["bare"] = "test_a_sleeping_thread_is_rung"


@pytest.mark.parametrize("how", ["write_pages-array", "write_pages-PageList", "prepared-PageList"])
def test_sixteen_pages_back_to_back(benchmark, ends: Ends, how: str) -> None:
    """One of many calls in a row: the first one has woken the engine's thread."""
    pages = np.random.default_rng(1).permutation(16)
    given = pages if how.endswith("array") else PageList(pages)
    piece = PreparedPiece(ends.source, 0, PAGE_BYTES, ends.sink, 0, PAGE_BYTES, PAGE_BYTES)
    prepared = ends.ours.prepare(ends.peer, [piece])
    row = range(100)
    transfers: list[Transfer] = []

    def write_pages() -> None:
        write = ends.ours.write_pages
        transfers[:] = [write(ends.peer, ends.source, ends.sink, given, given, page_bytes=PAGE_BYTES) for _ in row]

    def submit() -> None:
        transfers[:] = [prepared.submit([(given, given)]) for _ in row]

    def settle() -> None:
        while transfers:
            transfers.pop().result(LONG)

    benchmark.pedantic(submit if how.startswith("prepared") else write_pages, setup=settle, rounds=50, warmup_rounds=2)
    settle()
    benchmark.extra_info["calls"] = len(row)
    benchmark.extra_info["target_us"] = 3 if how.startswith("prepared") else 5


def test_a_sleeping_thread_is_rung(benchmark) -> None:
    """What waking a thread costs whoever wakes it: a submission to an engine that sleeps has that on top."""
    bell, over = os.eventfd(0, os.EFD_NONBLOCK), threading.Event()

    def sleep() -> None:
        waiting = select.poll()
        waiting.register(bell, select.POLLIN)
        while not over.is_set():
            if waiting.poll(LONG * 1000):
                os.eventfd_read(bell)

    thread = threading.Thread(target=sleep)
    thread.start()
    try:
        benchmark.pedantic(
            lambda: os.eventfd_write(bell, 1), setup=lambda: time.sleep(0.0005), rounds=500, warmup_rounds=5
        )
    finally:
        over.set()
        os.eventfd_write(bell, 1)
        thread.join(LONG)
        os.close(bell)


def test_counters_are_taken_and_given_back(benchmark, ends: Ends) -> None:
    benchmark(lambda: ends.counter(1).release(quiescent=True))


def test_a_thread_answers(benchmark) -> None:
    """What any word from another thread costs that waits for nothing but us: waking it, and being woken."""
    there: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    back: queue.SimpleQueue[int] = queue.SimpleQueue()

    def answer() -> None:
        while (item := there.get()) is not None:
            back.put(item)

    thread = threading.Thread(target=answer)
    thread.start()

    def ask() -> None:
        there.put(1)
        back.get(timeout=LONG)

    try:
        benchmark.pedantic(ask, rounds=500, warmup_rounds=20)
    finally:
        there.put(None)
        thread.join(LONG)


def test_a_write_is_counted(benchmark, ends: Ends) -> None:
    """From ``write`` to the end of the counter at the other end: submission, provider, dispatcher, wake-up."""

    def write_and_count() -> None:
        with ends.counter(1) as counter:
            ends.ours.write(ends.peer, ends.source, 0, ends.sink, 0, PAGE_BYTES, token=counter.token)
            counter.result(LONG)

    benchmark.pedantic(write_and_count, rounds=500, warmup_rounds=20)
    benchmark.extra_info["bare"] = "test_a_thread_answers"


def test_an_immediate_is_counted(benchmark, ends: Ends) -> None:
    def signal_and_count() -> None:
        with ends.counter(1) as counter:
            ends.ours.signal(ends.peer, ends.sink, counter.token)
            counter.result(LONG)

    benchmark.pedantic(signal_and_count, rounds=500, warmup_rounds=20)
    benchmark.extra_info["bare"] = "test_a_thread_answers"


@pytest.mark.parametrize("progress", ["adaptive", "spin"])
def test_a_watched_layer_leaves_by_itself(benchmark, progress: str) -> None:
    """From ``Watch.set`` to the end of the counter over there, with the write submitted before."""
    options = EngineOptions(progress=progress)
    with Engine("shm") as theirs, Engine("shm", options=options) as ours:
        memory = [np.zeros((16, PAGE_BYTES), np.uint8) for _ in "ab"]
        source, sink = ours.register(memory[0]), theirs.register(memory[1])
        peer = ours.add_peer(theirs.address)
        pages, watch = PageList(np.arange(16)), ours.watch()
        prepared = ours.prepare(
            peer, [PreparedPiece(source, 0, PAGE_BYTES, sink.remote, 0, PAGE_BYTES, PAGE_BYTES, layer=1)]
        )
        steps: list[int] = [0]
        counters: list[Counter] = []

        def arm() -> None:
            for counter in counters:
                counter.release()
            counters[:] = [theirs.counter(unit_bytes=PAGE_BYTES, expected_units=16)]
            steps[0] += 1
            watch.set(steps[0], 0)
            prepared.submit([(pages, pages)], token=counters[0].token, watch=watch, step=steps[0])

        def bump() -> None:
            watch.set(steps[0], 1)
            counters[0].result(LONG)

        benchmark.pedantic(bump, setup=arm, rounds=300, warmup_rounds=20)
        benchmark.extra_info["bare"] = "test_a_thread_answers"
