"""What holds for device memory, whether a GPU or the stand-in gives it; collected by those who say which of them.

A module that imports these tests has a fixture ``held``: a function that counts what the process holds.

On the stand-in pages really move, by the real providers; but no NIC reaches a GPU, streams and graphs do at once what
they are told, and the kernel is only known by its name. What these tests say of those, a GPU alone can show.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fabric_kv import ClosedError, ConfigError, DeviceError, RegistrationError, SharingError
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
