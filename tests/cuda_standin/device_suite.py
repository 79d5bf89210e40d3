"""What holds for device memory, whether a GPU or the stand-in gives it; collected by those who say which of them.

A module that imports these tests has a fixture ``held``: a function that counts what the process holds.

On the stand-in pages really move, by the real providers; but no NIC reaches a GPU, streams and graphs do at once what
they are told, and the kernel is only known by its name. What these tests say of those, a GPU alone can show.
"""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from fabric_kv import (
    ClosedError,
    ConfigError,
    DeviceError,
    Engine,
    EngineOptions,
    FabricError,
    PagePiece,
    RegistrationError,
    SharingError,
)
from fabric_kv.bench.memory import make_memory
from fabric_kv.bench.stamps import POISON
from fabric_kv.bench.workload import Fabric, Mem
from fabric_kv.buffers import locate
from fabric_kv.memory import BufferServer, DeviceBuffer, Exported, HostBuffer, WatchWord, allocate, import_buffers
from fabric_kv.memory.buffer import BufferInfo
from fabric_kv.memory.driver import load_driver
from fabric_kv.memory.ranges import device_parts
from fabric_kv.memory.visibility import flush_remote_writes

Held = Callable[[], object]
LONG = 60.0  # nothing takes that long unless it hangs


@pytest.mark.parametrize("nbytes", [1, 4097, 100_001, 3 << 20])
def test_any_size_is_whole_pages_and_comes_back(nbytes: int, held: Held) -> None:
    before = held()
    with allocate("cuda:0", nbytes) as buffer:
        assert isinstance(buffer, DeviceBuffer)
        assert (buffer.nbytes, buffer.device) == (nbytes, "cuda:0")
        assert sum(buffer.info.handle_bytes) % buffer.info.page_bytes == 0
        buffer.write(nbytes - 1, b"\x5a")
        assert buffer.read(nbytes - 1, 1) == b"\x5a"
        for offset, count in ((nbytes, 1), (-1, 1), (0, nbytes + 1), (0, 0)):
            with pytest.raises(ConfigError, match="not within"):
                buffer.read(offset, count)
    assert held() == before
    buffer.close()
    with pytest.raises(ClosedError):
        _ = buffer.address


def test_items_of_any_size_are_written_by_their_bytes() -> None:
    with DeviceBuffer.allocate("cuda", 100) as buffer:
        with pytest.raises(ConfigError, match="800 bytes from 0 on are not within"):
            buffer.write(0, np.zeros(100))  # type: ignore[arg-type]
        buffer.write(4, np.arange(12.0))  # type: ignore[arg-type]
        assert buffer.read(4, 96) == np.arange(12.0).tobytes()


def test_what_is_dropped_is_given_back(held: Held) -> None:
    before = held()
    DeviceBuffer.allocate(0, 1000)
    gc.collect()
    assert held() == before


@pytest.mark.parametrize("mem", ["cuda", "cumem"])
def test_memory_of_the_bench_is_carried_and_comes_back(mem: Mem, held: Held) -> None:
    before = held()
    memory = make_memory(Fabric(mem=mem), 100_001)
    memory.array[:] = np.arange(100_001) % 251
    memory.push(50_000)
    memory.array[:] = 0
    memory.pull()
    assert (memory.array[:50_000] == np.arange(50_000) % 251).all()
    assert (memory.array[50_000:] == POISON).all()
    del memory
    gc.collect()
    assert held() == before


def test_memory_of_several_handles_is_one_range(held: Held) -> None:
    before = held()
    page = DeviceBuffer.allocate(0, 1).info.page_bytes
    with DeviceBuffer.allocate(0, 5 * page + 1, handle_bytes=2 * page) as buffer:
        assert buffer.info.handle_bytes == (2 * page, 2 * page, 2 * page)
        data = bytes(range(256)) * 16
        buffer.write(2 * page - 1000, data)
        assert buffer.read(2 * page - 1000, len(data)) == data
        # A registration gets a piece of each handle, from any byte on.
        with device_parts(buffer.address + 5, 5 * page - 10) as (device, parts):
            assert device == 0
            assert [part[0] for part in parts] == [2 * page - 5, 2 * page, page - 5]
            if load_driver().attribute("DMA_BUF_SUPPORTED", 0):
                assert [part[2] for part in parts] == [5, 0, 0]
                assert all(os.fstat(part[1]) for part in parts)
            else:
                assert all(part[1] == -1 for part in parts)
    gc.collect()
    assert held() == before


def test_a_range_that_is_not_all_there_is_refused(held: Held) -> None:
    before = held()
    with DeviceBuffer.allocate(0, 1000) as buffer:
        total = sum(buffer.info.handle_bytes)
        with (
            pytest.raises(RegistrationError, match=r"no memory of a CUDA device|not all mapped"),
            device_parts(buffer.address, 64 * total),
        ):
            pass
    with pytest.raises(RegistrationError, match="no memory of a CUDA device"), device_parts(1 << 12, 100):
        pass
    assert held() == before


def test_exported_and_imported_memory_is_the_same(held: Held) -> None:
    before = held()
    page = DeviceBuffer.allocate(0, 1).info.page_bytes
    with DeviceBuffer.allocate(0, 3 * page, handle_bytes=page) as buffer:
        with buffer.export() as exported:
            assert len(exported.fds) == 3
            twin = DeviceBuffer.import_(exported)
        twin.write(page - 2, b"seam")
        assert buffer.read(page - 2, 4) == b"seam"
        assert twin.info == buffer.info
        with pytest.raises(ConfigError, match="only its owner"):
            twin.export()
        buffer.close()
        assert twin.read(page - 2, 4) == b"seam"
        twin.close()
    gc.collect()
    assert held() == before


def test_less_than_announced_and_what_is_no_handle_are_refused(held: Held) -> None:
    before = held()
    with DeviceBuffer.allocate(0, 1000) as buffer, buffer.export() as exported:
        info = exported.info
        page = info.page_bytes
        bigger = BufferInfo("device", 1000, (info.handle_bytes[0] + page,), page, info.device)
        with pytest.raises(SharingError, match="holds less") as error:
            DeviceBuffer.import_(Exported(bigger, exported.fds))
        assert error.value.reason == "size"
        with pytest.raises(DeviceError, match="UUID 00 is none of"):
            DeviceBuffer.import_(Exported(BufferInfo("device", 1000, (page,), page, "00"), exported.fds))
        with pytest.raises(ConfigError, match="descriptor for each handle"):
            DeviceBuffer.import_(Exported(info, []))
    with HostBuffer.allocate(100) as host, host.export() as exported:
        with pytest.raises(ConfigError):
            DeviceBuffer.import_(exported)
        with pytest.raises(DeviceError):
            DeviceBuffer.import_(Exported(info, exported.fds))
    del exported
    gc.collect()
    assert held() == before


def test_a_server_gives_device_and_host_memory(tmp_path: object, held: Held) -> None:
    before = held()
    page = DeviceBuffer.allocate(0, 1).info.page_bytes
    many = DeviceBuffer.allocate(0, 150 * page, handle_bytes=page)  # more handles than a frame has descriptors
    host = HostBuffer.allocate(100)
    with (
        BufferServer(f"{tmp_path}/s", {"many": many, "host": host}),
        import_buffers(f"{tmp_path}/s", timeout_s=60) as imported,
    ):
        twin = imported["many"]
        assert isinstance(twin, DeviceBuffer)
        for at in (0, 64 * page - 1, 128 * page - 1, 150 * page - 2):
            many.write(at, b"ab")
            assert twin.read(at, 2) == b"ab"
        assert isinstance(imported["host"], HostBuffer)
        del twin
    del imported
    many.close()
    host.close()
    gc.collect()
    assert held() == before


def test_tensors_hold_the_memory(held: Held) -> None:
    before = held()
    buffer = DeviceBuffer.allocate(0, 1000)
    interface = buffer.__cuda_array_interface__
    assert interface["data"] == (buffer.address, False)
    found = locate(buffer)
    assert (found.address, found.nbytes) == (buffer.address, 1000)
    del found
    assert buffer.__dlpack_device__() == (2, 0)
    for impossible in ({"copy": True}, {"dl_device": (1, 0)}):
        with pytest.raises(BufferError, match="neither copied nor moved"):
            buffer.__dlpack__(**impossible)
    capsule = buffer.__dlpack__(max_version=(1, 0), dl_device=(2, 0), copy=False)
    assert "dltensor" in repr(capsule)
    with pytest.raises(ConfigError, match=r"1 tensor\(s\)"):
        buffer.close()
    del capsule
    buffer.close()
    assert held() == before


@pytest.mark.parametrize("device", ["cuda:4095", "cuda:x", "cuda:", "cuda0", ":1", "1", "", "gpu", -1, 1.0, True])
def test_no_such_device(device: str | int) -> None:
    with pytest.raises(ConfigError, match="device="):
        DeviceBuffer.allocate(device, 10)


@pytest.mark.parametrize(
    "arguments", [{"nbytes": 0}, {"nbytes": -5}, {"nbytes": 10, "handle_bytes": 0}, {"nbytes": 10, "handle_bytes": 1.5}]
)
def test_sizes_out_of_range(arguments: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        DeviceBuffer.allocate(0, **arguments)


def test_sizes_may_be_numpys() -> None:
    page = DeviceBuffer.allocate(0, 1).info.page_bytes
    with (
        DeviceBuffer.allocate(0, np.int64(2 * page), handle_bytes=np.int64(page)) as buffer,
        buffer.export() as exported,
    ):
        assert [type(size) for size in (buffer.nbytes, *exported.info.handle_bytes)] == [int, int, int]


def test_more_than_there_is() -> None:
    with pytest.raises(DeviceError, match=r"for \d+ bytes on cuda:0: CUDA_ERROR_OUT_OF_MEMORY") as error:
        DeviceBuffer.allocate(0, 1 << 50)
    assert isinstance(error.value, MemoryError)


def test_remote_writes_are_flushed_where_order_is_not_granted() -> None:
    assert flush_remote_writes(0) in (True, False)  # whether it was needed


def test_no_context_is_left_current() -> None:
    driver = load_driver()
    before = int(driver.call("cuCtxGetCurrent"))
    with DeviceBuffer.allocate(0, 100) as buffer:
        buffer.write(0, np.arange(4, dtype=np.uint8).tobytes())
    assert int(driver.call("cuCtxGetCurrent")) == before


def synchronize() -> None:
    """Wait for the default stream; the stand-in has none, and does everything at once."""
    driver = load_driver()
    with driver.current(0):
        if Path("/dev/nvidiactl").exists():
            driver.call("cuCtxSynchronize")


def test_a_stream_and_a_kernel_write_a_watchs_word(held: Held) -> None:
    before = held()
    with WatchWord(0) as word:
        array = word.array
        assert array.tolist() == [0]
        assert locate(word.buffer).address == array.ctypes.data
        word.set_step(7)
        word.bump()
        word.bump(layers=2)
        synchronize()
        assert array.tolist() == [7 << 16 | 3]
        word.set_step((1 << 48) - 1, layers=5)
        synchronize()
        assert array.tolist() == [((1 << 48) - 1) << 16 | 5]
        # Replays of a graph that nobody has told a new step of: layers that do not fit stay out of the step.
        word.set_step(6)
        for _ in range(1080):
            word.bump(layers=61)
        synchronize()
        assert array.tolist() == [6 << 16 | 61 * (65535 // 61)]
        word.bump(layers=65535 % 61)
        word.bump()
        synchronize()
        assert array.tolist() == [6 << 16 | 65535]
        for wrong in ((1 << 48, 0), (-1, 0), (0, 1 << 16), (0, -1)):
            with pytest.raises(ConfigError):
                word.set_step(wrong[0], layers=wrong[1])
        for layers in (0, -1, 1 << 16):
            with pytest.raises(ConfigError):
                word.bump(layers=layers)
        del array
    word.close()
    with pytest.raises(ClosedError):
        word.bump()
    del word
    gc.collect()
    assert held() == before


# -- with an engine ----------------------------------------------------------------------------------------------------


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
