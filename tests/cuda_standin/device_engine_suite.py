"""What holds for device memory and an engine, whether a GPU or the stand-in gives it; collected with ``device_suite``.

It needs the same fixture ``held``. On the stand-in pages really move, by the real providers.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fabric_kv import Engine, EngineOptions, FabricError, PagePiece, RegistrationError, SharingError
from fabric_kv.memory import DeviceBuffer, WatchWord, import_buffers
from fabric_kv.memory.driver import load_driver

from .device_suite import LONG, Held


def an_engine(provider: str, *, device_memory: bool = False) -> Engine:
    nics = ["127.0.0.1"] if provider == "tcp" else []
    return Engine(provider, nics=nics, options=EngineOptions(device_memory=device_memory))


def pattern(nbytes: int, seed: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8).tobytes()


@pytest.mark.parametrize("provider", ["tcp", "shm"])
def test_an_engine_that_was_not_asked_for_device_memory_refuses_it_by_name(provider: str) -> None:
    with an_engine(provider) as engine, DeviceBuffer.allocate(0, 1000) as buffer:
        with pytest.raises(
            RegistrationError, match=r"memory on cuda:0 cannot be registered: .*device_memory=True"
        ) as error:
            buffer.region(engine)
        assert provider in (error.value.provider or "")
        assert engine.describe()["groups"][0]["registrations"] == 0


@pytest.mark.parametrize("provider", ["tcp", "shm"])
def test_device_memory_is_registered_or_the_provider_and_the_device_are_named(provider: str) -> None:
    """By a dma-buf or by FI_HMEM, whichever is there; what came of it is printed (-s)."""
    try:
        engine = an_engine(provider, device_memory=True)
    except FabricError as error:
        print("refused:", error)
        assert f"provider {provider!r}" in str(error)  # noqa: PT017
        assert "FI_HMEM" in str(error)  # noqa: PT017
        return
    page = DeviceBuffer.allocate(0, 1).info.page_bytes
    with engine, DeviceBuffer.allocate(0, 3 * page, handle_bytes=page) as buffer:
        try:
            region = buffer.region(engine)
        except RegistrationError as error:
            print("refused:", error)
            assert provider in (error.provider or "")  # noqa: PT017
            assert "cuda:0" in str(error)  # noqa: PT017
            assert engine.describe()["groups"][0]["registrations"] == 0
            return
        print("registered:", engine.describe()["groups"][0]["rails"][0])
        assert region.remote.segment_ends == (page, 2 * page, 3 * page)
        peer = engine.add_peer(engine.address)
        own = region.remote_for(peer)
        assert own.segment_ends == region.remote.segment_ends
        assert own.rails != region.remote.rails
        data = pattern(page, 1)
        source = engine.register(bytearray(data))
        for at, remote in ((0, region.remote), (page + page // 2, own)):  # the latter across a seam
            counter = engine.counter(unit_bytes=page, expected_units=1)
            engine.write(peer, source, 0, remote, at, page, token=counter.token).result(LONG)
            counter.result(LONG)
            assert buffer.read(at, page) == data
        region.close()
        source.close()


@pytest.mark.parametrize("provider", ["tcp", "shm"])
def test_pages_are_counted_into_staged_device_memory(provider: str, held: Held) -> None:
    page, pages = 5000, 12
    an_engine(provider).close()  # what the provider keeps until the process ends
    before = held()
    data, old = pattern(page * pages, 2), pattern(page * pages, 3)
    with an_engine(provider) as here, an_engine(provider) as there:
        source, target = (DeviceBuffer.allocate(0, page * pages) for _ in range(2))
        source.write(0, data)
        target.write(0, old)
        src, dst = source.region(here, staging="host"), target.region(there, staging="host")
        peer = here.add_peer(there.address)
        for remote, order in ((dst.remote, [3, 0, 11]), (dst.remote_for(there.add_peer(here.address)), [7])):
            counter = there.counter(unit_bytes=page, expected_units=len(order))
            here.write_pages(peer, src, remote, order, order, page_bytes=page, token=counter.token).result(LONG)
            counter.result(LONG)
            assert target.read(0, page * pages) == old
            for index in order:
                dst.unstage(index * page, page)
            old = b"".join(
                (data if index in order else old)[index * page : (index + 1) * page] for index in range(pages)
            )
            assert target.read(0, page * pages) == old
        # The other way, of what the device has computed since.
        target.write(0, b"new" * 100)
        back = here.counter(unit_bytes=page, expected_units=1)
        there.write(there.add_peer(here.address), dst, 0, src.remote, 0, page, token=back.token).result(LONG)
        back.result(LONG)
        src.unstage(0, page)
        assert source.read(0, page) == target.read(0, page)
        assert source.read(0, 300) == b"new" * 100
        assert there.describe()["staging"]["copies"] == 6
        src.close()
        dst.close()
        source.close()
        target.close()
    del here, there, src, dst, source, target, peer, counter, back
    assert held() == before


OWNER = """
import ctypes, os, sys
ctypes.CDLL(sys.argv[2], mode=ctypes.RTLD_GLOBAL)
from fabric_kv.memory import BufferServer, DeviceBuffer
page = DeviceBuffer.allocate(0, 1).info.page_bytes
buffer = DeviceBuffer.allocate(0, 3 * page, handle_bytes=page)
for at in range(3):
    buffer.write(at * page, bytes([at + 1]) * page)
server = BufferServer(sys.argv[1], {"kv": buffer}, label="rank 0")
print("up", flush=True)
for line in sys.stdin:
    at, nbytes = map(int, line.split())
    print(buffer.read(at, nbytes).hex(), flush=True)
"""


@contextlib.contextmanager
def an_owner(path: str) -> Iterator[subprocess.Popen[str]]:
    load_driver()
    maps = Path("/proc/self/maps").read_text().split()
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, path, next(name for name in maps if "/libcuda.so" in name)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    deadline = threading.Timer(2 * LONG, process.kill)  # ends each wait for its words
    deadline.start()
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield process
    finally:
        deadline.cancel()
        deadline.join()
        process.kill()
        process.communicate(timeout=LONG)


def test_another_process_owns_the_memory_and_is_killed(tmp_path: Path, held: Held) -> None:
    an_engine("tcp").close()  # what the provider keeps until the process ends
    before = held()
    with an_engine("tcp") as engine, an_owner(f"{tmp_path}/s") as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        imported = import_buffers(f"{tmp_path}/s", timeout_s=LONG, pid=owner.pid)
        twin = imported["kv"]
        assert isinstance(twin, DeviceBuffer)
        page = twin.info.page_bytes
        assert twin.read(page - 2, 4) == b"\1\1\2\2"
        region = twin.region(engine, staging="host")
        peer = engine.add_peer(engine.address)
        data = pattern(page, 4)
        source = engine.register(bytearray(data))
        counter = engine.counter(unit_bytes=page, expected_units=1)
        engine.write(peer, source, 0, region.remote, page + 100, page, token=counter.token).result(LONG)
        counter.result(LONG)
        region.unstage(page + 100, page)
        owner.stdin.write(f"{page + 98} {page + 4}\n")
        owner.stdin.flush()
        assert bytes.fromhex(owner.stdout.readline()) == b"\2\2" + data + b"\3\3"
        owner.kill()
        deadline = time.monotonic() + LONG
        while imported.lost is None:
            assert time.monotonic() < deadline, "nobody noticed"
            time.sleep(0.005)
        assert isinstance(region.lost, SharingError)
        with pytest.raises(SharingError, match="rank 0"):
            engine.write(peer, region, 0, source.remote, 0, 8)
        assert twin.read(page + 98, 4) == b"\2\2" + data[:2]  # the memory stays as long as it is mapped
        region.close()
        source.close()
        imported.close()
    del engine, owner, imported, twin, region, source, counter, peer
    assert held() == before


def test_a_captured_graph_bumps_the_word_that_submissions_wait_for(held: Held) -> None:
    """On a GPU a graph of kernels; on the stand-in the calls that make one, and nothing of what a driver captures."""
    driver = load_driver()
    api = driver.api
    page, layers = 4096, 5
    an_engine("tcp").close()  # what the provider keeps until the process ends
    before = held()
    with WatchWord(0) as word, an_engine("tcp") as engine, contextlib.ExitStack() as undo:
        with driver.current(0):
            stream = driver.call("cuStreamCreate", int(api.CUstream_flags.CU_STREAM_NON_BLOCKING))
            undo.callback(driver.call, "cuStreamDestroy", stream)
            driver.call("cuStreamBeginCapture", stream, api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
            for _ in range(layers):
                word.bump(stream)
            graph = driver.call("cuStreamEndCapture", stream)
            undo.callback(driver.call, "cuGraphDestroy", graph)
            executable = driver.call("cuGraphInstantiate", graph, 0)
            undo.callback(driver.call, "cuGraphExecDestroy", executable)
        assert word.array.tolist() == [0], "capturing runs nothing"
        source, target = bytearray(pattern(page * layers, 5)), bytearray(page * layers)
        src, dst = engine.register(source), engine.register(target)
        peer, watch = engine.add_peer(engine.address), engine.watch(word.array)
        counter = engine.counter(unit_bytes=page, expected_units=layers)
        pieces = [PagePiece(src, 0, page, dst.remote, 0, page, page, [at], [at], layer=at + 1) for at in range(layers)]
        transfer = engine.submit(peer, pieces, token=counter.token, watch=watch, step=1)
        assert not transfer.done()

        def replay() -> None:
            with driver.current(0):
                driver.call("cuGraphLaunch", executable, stream)
                driver.call("cuStreamSynchronize", stream)

        word.set_step(1, stream)
        replay()
        transfer.result(LONG)
        counter.result(LONG)
        assert target == source
        assert word.array.tolist() == [1 << 16 | layers]
        # Replays of which nobody has told the step: what waits for the next one goes on waiting.
        word.set_step(1, stream, layers=65535 - layers)
        later = engine.submit(peer, pieces, watch=watch, step=2)
        for _ in range(3):
            replay()
        assert word.array.tolist() == [1 << 16 | 65535]
        assert not later.done()
        word.set_step(2, stream)
        replay()
        later.result(LONG)
        src.close()
        dst.close()
        with driver.current(0):
            undo.close()
        del watch
    del engine, word, transfer, later, pieces, src, dst, counter, peer
    assert held() == before
