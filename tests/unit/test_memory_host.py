"""Host buffers: their bytes in every form, what keeps them mapped, export and import, and that nothing is left."""

from __future__ import annotations

import errno
import fcntl
import gc
import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fabric_kv import AllocationError, ClosedError, ConfigError, SharingError
from fabric_kv.buffers import locate
from fabric_kv.memory import (
    BufferInfo,
    BufferServer,
    Exported,
    HostBuffer,
    WatchWord,
    allocate,
    host,
    import_buffers,
    numa,
)


def held() -> tuple[int, int]:
    """Descriptors, and mappings of our memfds."""
    maps = Path("/proc/self/maps").read_text()
    return len(os.listdir("/proc/self/fd")), maps.count("memfd:fabric_kv")


@pytest.fixture(autouse=True, scope="module")
def _nothing_of_others() -> None:
    gc.collect()  # what other modules have left must not go in the middle of a test


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = held()
    yield
    if held() != before:
        gc.collect()
    assert held() == before


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, 10_001, 1 << 20])
def test_any_size_reads_and_writes_as_array_view_and_dlpack(nbytes: int) -> None:
    with allocate("cpu", nbytes) as buffer:
        assert isinstance(buffer, HostBuffer)
        assert (buffer.nbytes, buffer.device) == (nbytes, "cpu")
        assert buffer.array.shape == (nbytes,)
        assert not buffer.array.any()
        buffer.array[:] = 7
        assert bytes(buffer.view) == b"\7" * nbytes
        assert np.from_dlpack(buffer).ctypes.data == buffer.address
        assert np.asarray(buffer).ctypes.data == buffer.address
        found = locate(buffer)
        assert (found.address, found.nbytes, found.device) == (buffer.address, nbytes, "cpu")
        del found


def test_sizes_may_be_numpys() -> None:
    with HostBuffer.allocate(np.int64(5000)) as buffer:
        assert type(buffer.nbytes) is int
        assert buffer.nbytes == 5000
    for wrong in (5000.0, "5000", np.float64(1), None, np.int64(0), 2**63):
        with pytest.raises(ConfigError, match="nbytes="):
            allocate("cpu", wrong)  # type: ignore[arg-type]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="classes have the buffer protocol from Python 3.12 on")
def test_the_buffer_protocol() -> None:
    with HostBuffer.allocate(100) as buffer:
        view = memoryview(buffer)
        view[3] = 9
        assert buffer.array[3] == 9
        view.release()


def test_other_dtypes_are_views_or_said_to_be_copies() -> None:
    with HostBuffer.allocate(64) as buffer:
        assert np.asarray(buffer, "f4").shape == (64,)
        assert not np.shares_memory(np.array(buffer), buffer.array)
        assert buffer.array.view("f2").shape == (32,)
        with pytest.raises(ValueError, match="copy"):
            np.asarray(buffer, "f4", copy=False) if np.__version__ >= "2" else buffer.__array__("f4", copy=False)


def test_it_is_not_unmapped_under_its_users() -> None:
    buffer = HostBuffer.allocate(5000)
    array = buffer.array[10:20].view("u2")
    with pytest.raises(ConfigError, match="in use"):
        buffer.close()
    assert not buffer.closed
    array[:] = 3
    del array
    buffer.close()
    buffer.close()
    for use in (lambda: buffer.array, lambda: buffer.view, lambda: buffer.address, buffer.export):
        with pytest.raises(ClosedError):
            use()


def test_arrays_outlive_the_object() -> None:
    array = HostBuffer.allocate(5000).array
    gc.collect()
    array[:] = 1
    assert array.sum() == 5000


def test_an_error_in_its_context_is_not_covered_up() -> None:
    buffer = HostBuffer.allocate(10)
    kept = buffer.array

    def use() -> None:
        with buffer:
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        use()
    assert not buffer.closed
    del kept
    buffer.close()


def test_exported_and_imported_memory_is_the_same() -> None:
    with HostBuffer.allocate(10_001) as buffer:
        with buffer.export() as exported:
            twin = HostBuffer.import_(exported)
        assert twin.imported
        twin.array[10_000] = 5
        assert buffer.array[10_000] == 5
        with pytest.raises(ConfigError, match="only its owner"):
            twin.export()
        buffer.close()
        assert twin.array[10_000] == 5, "memory lives as long as somebody has it mapped"
        twin.close()


def test_a_mapping_costs_no_descriptor() -> None:
    with HostBuffer.allocate(4096) as buffer, buffer.export() as exported:
        before = len(os.listdir("/proc/self/fd"))
        twins = [HostBuffer.import_(exported) for _ in range(50)]
        assert len(os.listdir("/proc/self/fd")) == before
        for twin in twins:
            twin.close()


def refused(info: BufferInfo, fd: int, words: str) -> None:
    with Exported(info, [fd]) as exported, pytest.raises(SharingError, match=words) as error:
        HostBuffer.import_(exported)
    assert error.value.reason == "size"


def test_less_than_announced_or_unsealed_is_refused() -> None:
    fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 8192)
    refused(BufferInfo("host", 5000, (8192,), 4096), os.dup(fd), "not sealed")
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    refused(BufferInfo("host", 9000, (12288,), 4096), os.dup(fd), "announced with 12288 bytes and has 8192")
    refused(BufferInfo("host", 9000, (12288,), 4096), os.open("/dev/null", os.O_RDWR), "no memfd")
    with Exported(BufferInfo("host", 5000, (8192,), 4096), [fd]) as exported:
        HostBuffer.import_(exported).close()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"nbytes": 0}, "nbytes=0"),
        ({"nbytes": -1}, "nbytes=-1"),
        ({"nbytes": 1.5}, "nbytes=1.5"),
        ({"nbytes": 10, "hugepages": 12345}, "no size of a huge page"),
        ({"nbytes": 10, "numa_node": 4095}, "numa_node=4095 does not exist"),
        ({"nbytes": 10, "numa_node": -1}, "numa_node=-1 does not exist"),
    ],
)
def test_arguments_out_of_range(arguments: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        HostBuffer.allocate(**arguments)


def test_no_such_device() -> None:
    with pytest.raises(ConfigError, match="neither 'cpu' nor a CUDA device"):
        allocate("tpu:0", 1)


def test_what_does_not_fit_is_an_error_now() -> None:
    with pytest.raises(AllocationError, match=r"for \d+ bytes of host memory") as error:
        HostBuffer.allocate(1 << 60)
    assert (error.value.device, error.value.nbytes) == ("cpu", 1 << 60)
    assert isinstance(error.value, MemoryError)


@pytest.mark.parametrize("step", ["memfd_create", "ftruncate", "posix_fallocate", "mmap", "dup"])
def test_a_failure_at_any_step_leaves_nothing(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "injected")

    if step == "dup":
        with HostBuffer.allocate(4096) as buffer:
            monkeypatch.setattr(os, "dup", fail)
            with pytest.raises(AllocationError, match=r"dup failed.*injected"):
                buffer.export()
        return
    monkeypatch.setattr(host, "_map", fail) if step == "mmap" else monkeypatch.setattr(os, step, fail)
    with pytest.raises(AllocationError, match="injected") as error:
        HostBuffer.allocate(4096)
    assert error.value.op in (step, "fallocate")
    assert error.value.code == errno.ENOMEM


def test_huge_pages_or_what_they_take() -> None:
    try:
        buffer = HostBuffer.allocate(5 << 20, hugepages=True)
    except AllocationError as error:
        refusal = str(error)
    else:
        with buffer:
            assert buffer.info.page_bytes > mmap.PAGESIZE
            buffer.array[:] = 1
        return
    assert "nr_hugepages" in refusal


def test_a_numa_node_that_is_there(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    if not Path("/sys/devices/system/node/node0").is_dir():
        pytest.skip("no NUMA nodes under /sys")
    with HostBuffer.allocate(10_000, numa_node=0) as buffer:
        assert buffer.numa_node in (0, None)  # None: in a container that forbids it
        assert (buffer.numa_node is None) == ("not bound" in caplog.text)
    monkeypatch.setattr(numa, "_NUMBERS", {})
    with HostBuffer.allocate(10_000, numa_node=0) as buffer:
        assert buffer.numa_node is None
    assert "not bound to NUMA node 0" in caplog.text


def test_buffer_info_that_does_not_add_up() -> None:
    for sizes, page in (((4096,), 4096), ((8191,), 4096)):
        with pytest.raises(ConfigError):
            BufferInfo("host", 5000, sizes, page)


def test_a_word_that_this_process_bumps_is_seen_where_it_is_imported() -> None:
    with (
        WatchWord("cpu") as word,
        BufferServer(f"@fabric_kv-test-{os.getpid()}", {"word": word.buffer}) as server,
        import_buffers(server.path, timeout_s=60) as rank,
    ):
        seen = np.asarray(rank["word"])[:8].view("u8")
        word.set_step(7)
        assert seen.tolist() == word.array.tolist() == [7 << 16]
        word.bump()
        word.bump(layers=2)
        assert seen.tolist() == [7 << 16 | 3]
        word.set_step((1 << 48) - 1, layers=65535)
        assert seen.tolist() == [(1 << 64) - 1]
        with pytest.raises(ConfigError, match="do not fit"):
            word.bump()
        word.set_step(0)
        for step, layers in ((1 << 48, 0), (-1, 0), (0, 1 << 16)):
            with pytest.raises(ConfigError, match="must fit"):
                word.set_step(step, layers=layers)
        with pytest.raises(ConfigError, match="no device"):
            _ = word.device_address
        assert seen.tolist() == [0]
        del seen
    with pytest.raises(ClosedError):
        word.bump()
