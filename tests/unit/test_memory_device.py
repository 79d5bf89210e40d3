"""Device memory on a stand-in for CUDA's driver, by the real cuda-bindings: every call, every failure, nothing left.

It proves nothing about hardware: tests/lab/test_device_memory.py runs the same on a GPU.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fabric_kv import ConfigError, DeviceError, FabricKVError, RegistrationError, SharingError
from fabric_kv.bench.memory import make_memory
from fabric_kv.bench.workload import Fabric
from fabric_kv.memory import BufferServer, DeviceBuffer, Exported, WatchWord, import_buffers, ranges, visibility
from fabric_kv.memory.driver import load_driver
from fabric_kv.memory.ranges import device_parts
from fabric_kv.memory.staging import Staging, StagingFigures
from fabric_kv.memory.words import _PTX

from ..cuda_standin import load_driver_standin

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed: pip install 'fabric_kv[cuda]'")
from ..cuda_standin.device_engine_suite import *  # noqa: F403
from ..cuda_standin.device_suite import *  # noqa: F403

ROOT = Path(__file__).parents[2]
ONCE = {"cuInit", "cuDevicePrimaryCtxRetain"}
OWNED_SOMEWHERE = "cuda-bindings has another libcuda.so.1 in this process already"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    gc.collect()  # what other modules have left must not go in the middle of a test
    if "libcuda.so" in Path("/proc/self/maps").read_text():
        pytest.skip(OWNED_SOMEWHERE)
    return load_driver_standin(tmp_path_factory.mktemp("cuda"))


@pytest.fixture(autouse=True)
def lib(library: ctypes.CDLL) -> Iterator[ctypes.CDLL]:
    gc.collect()  # what the test before has left
    for device in (0, 1):  # what is kept until the process ends: the bindings' own descriptors, and the contexts
        with load_driver().current(device):
            pass
    yield library
    library.standin_fail(b"", 0, 0)
    library.standin_set_rdma_capable(1)
    for number, value in ((102, 1), (103, 1), (110, 1), (124, 1), (118, 100), (117, 0)):
        library.standin_set_attribute(number, value)
    visibility._needs_flush.cache_clear()


def count(lib: ctypes.CDLL) -> tuple[list[int], int]:
    numbers = (ctypes.c_long * 6)()
    lib.standin_held(numbers)
    return list(numbers), len(os.listdir("/proc/self/fd"))


@pytest.fixture
def held(lib: ctypes.CDLL) -> Callable[[], object]:
    def collected() -> object:
        gc.collect()
        return count(lib)

    return collected


def use_all() -> None:
    """Everything that processes do with device memory."""
    with DeviceBuffer.allocate(1, 3 << 16, handle_bytes=1 << 16) as buffer:
        buffer.write(0, b"abc")
        with buffer.export() as exported, DeviceBuffer.import_(exported) as twin:
            assert twin.read(0, 3) == b"abc"
        path = f"@fabric_kv-test-{os.getpid()}-device"
        with BufferServer(path, {"kv": buffer}, timeout_s=60) as server, import_buffers(path, timeout_s=60) as imported:
            assert imported["kv"].info == buffer.info
            server.withdraw("kv")
        with device_parts(buffer.address, buffer.nbytes) as (device, parts):
            assert (device, len(parts)) == (1, 3)
        stage = Staging(buffer.address, buffer.nbytes, buffer, StagingFigures())
        with stage.arrivals:
            assert bytes(stage.arrivals.view[:3]) == b"abc"
            stage.to_device([(1, 2)])
    visibility._needs_flush.cache_clear()
    assert visibility.flush_remote_writes(1)
    with WatchWord(1) as word:
        word.set_step(3)
        word.bump()


def calls(lib: ctypes.CDLL) -> dict[str, int]:
    source = (ROOT / "tests/cuda_standin/not_a_gpu.c").read_text()
    names = [line.split("(")[0].split()[-1] for line in source.splitlines() if line.startswith("int cu")]
    return {name: lib.standin_calls(name.encode()) for name in names}


def calls_in_the_sources() -> set[str]:
    """All that fabric_kv calls, but for what it does once in a process, and for the memory of its bench."""
    sources = "".join(path.read_text() for path in (ROOT / "fabric_kv").rglob("*.py"))
    return set(re.findall(r'call(?:\(|,)\s*"(cu[A-Z]\w+)"', sources)) - ONCE - {"cuMemAlloc", "cuMemFree"}


def test_an_error_at_any_call_is_typed_and_leaves_nothing(lib: ctypes.CDLL) -> None:
    lib.standin_set_attribute(118, 0)
    lib.standin_set_attribute(117, 1)
    nothing = count(lib)
    before = calls(lib)
    use_all()
    gc.collect()
    assert count(lib) == nothing
    used = {name: n - before[name] for name, n in calls(lib).items() if n > before[name]}
    assert len(used) > 20
    assert set(used) >= calls_in_the_sources()
    num_failures = 0
    for name, times in used.items():
        for skip in range(times):
            lib.standin_fail(name.encode(), 999, skip)
            try:
                use_all()
            except FabricKVError as error:
                num_failures += 1
                assert isinstance(error, DeviceError | RegistrationError | SharingError), error  # noqa: PT017
                assert name in str(error), error  # noqa: PT017
            assert lib.standin_failed(), (name, skip)
            if (now := count(lib)) != nothing:  # what the error's frames hold goes with them
                gc.collect()
                now = count(lib)
            assert now == nothing, (name, skip, now)
    assert num_failures == sum(used.values())


@pytest.mark.parametrize(
    ("name", "skip"),
    [(name, skip) for name in ("cuCtxPushCurrent", "cuCtxPopCurrent") for skip in (0, 1)]
    + [(name, 0) for name in ("cuMemAlloc", "cuMemcpyHtoD", "cuCtxSynchronize")],
)
def test_an_error_while_the_bench_makes_its_memory_leaves_nothing(lib: ctypes.CDLL, name: str, skip: int) -> None:
    nothing = count(lib)
    lib.standin_fail(name.encode(), 999, skip)
    with pytest.raises(DeviceError, match=name):
        make_memory(Fabric(mem="cuda"), 100)
    gc.collect()
    assert count(lib) == nothing


def driver_memory_without_the_flag(nbytes: int) -> int:
    """The descriptor of such memory on device 0."""
    driver = load_driver()
    api = driver.api
    kind = api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    prop = api.CUmemAllocationProp()
    prop.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.requestedHandleTypes = kind
    prop.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    handle = driver.call("cuMemCreate", nbytes, prop, 0)
    fd = int(driver.call("cuMemExportToShareableHandle", handle, kind, 0))
    driver.call("cuMemRelease", handle)
    return fd


def test_flags_are_looked_at_when_memory_is_made_imported_and_registered(lib: ctypes.CDLL) -> None:
    nothing = count(lib)
    with DeviceBuffer.allocate(0, 100) as good, good.export():
        lib.standin_set_rdma_capable(0)
        with pytest.raises(DeviceError, match="not GPUDirect RDMA capable"):
            DeviceBuffer.allocate(0, 100)
        lib.standin_set_rdma_capable(1)
    assert count(lib) == nothing
    with DeviceBuffer.allocate(0, 100) as good:
        capable, bare = good.export(), driver_memory_without_the_flag(good.info.handle_bytes[0])
        with capable, Exported(good.info, [bare]) as exported:
            with pytest.raises(SharingError, match="not GPUDirect RDMA capable") as error:
                DeviceBuffer.import_(exported)
            assert error.value.reason == "unreachable"
        del error
    gc.collect()
    assert count(lib) == nothing
    for attribute, words in ((102, "virtual memory"), (103, "file descriptors"), (110, "GPUDirect RDMA")):
        lib.standin_set_attribute(attribute, 0)
        with pytest.raises(DeviceError, match=words):
            DeviceBuffer.allocate(0, 100)
        lib.standin_set_attribute(attribute, 1)


def test_foreign_memory_without_the_flag_is_refused_at_registration(lib: ctypes.CDLL) -> None:
    driver = load_driver()
    api = driver.api
    prop = api.CUmemAllocationProp()
    prop.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.requestedHandleTypes = api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    prop.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    handle = driver.call("cuMemCreate", 1 << 16, prop, 0)
    address = int(driver.call("cuMemAddressReserve", 1 << 16, 1 << 16, 0, 0))
    driver.call("cuMemMap", address, 1 << 16, 0, handle, 0)
    with pytest.raises(RegistrationError, match="were not allocated for GPUDirect RDMA"), device_parts(address, 100):
        pass
    driver.call("cuMemUnmap", address, 1 << 16)
    driver.call("cuMemAddressFree", address, 1 << 16)
    driver.call("cuMemRelease", handle)


def test_a_dmabuf_is_whole_pages_where_an_allocation_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with DeviceBuffer.allocate(0, 1 << 17) as buffer:
        start = buffer.address + 5 * 4096 + 512  # as of small allocations, which the driver cuts out of larger ones
        monkeypatch.setattr(ranges, "_allocation_of", lambda *_: (start, 5000))
        asked: list[tuple[int, int]] = []
        export = ranges._dmabuf
        monkeypatch.setattr(ranges, "_dmabuf", lambda *at: (asked.append(at[2:]), export(*at))[1])
        with device_parts(start + 100, 4900) as (_, parts):
            assert [(part[0], part[2]) for part in parts] == [(4900, 612)]
        assert asked == [(buffer.address + 5 * 4096, 2 * 4096)]


def test_without_dmabufs_parts_have_none(lib: ctypes.CDLL) -> None:
    lib.standin_set_attribute(124, 0)
    with DeviceBuffer.allocate(0, 100) as buffer, device_parts(buffer.address, 100) as (_, parts):
        assert parts == [(100, -1, 0)]


def test_a_thread_that_never_saw_cuda_has_the_context_it_needs(lib: ctypes.CDLL) -> None:
    done: list[bytes] = []

    def work() -> None:
        with DeviceBuffer.allocate(1, 100) as buffer:
            buffer.write(0, b"x")
            with device_parts(buffer.address, 100):
                done.append(buffer.read(0, 1))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert done == [b"x"]


def test_a_write_waits_until_the_bytes_are_there(lib: ctypes.CDLL) -> None:
    """By the driver's documentation a copy from pageable memory may return before."""
    with DeviceBuffer.allocate(1, 1 << 16) as buffer:
        before = lib.standin_calls(b"cuCtxSynchronize")
        buffer.write(0, b"abc")
        assert lib.standin_calls(b"cuCtxSynchronize") == before + 1


@pytest.mark.parametrize(("ordering", "options", "flushes"), [(0, 1, 1), (100, 1, 0), (200, 0, 0)])
def test_writes_are_flushed_only_where_their_order_is_not_granted(
    lib: ctypes.CDLL, ordering: int, options: int, flushes: int
) -> None:
    visibility._needs_flush.cache_clear()
    lib.standin_set_attribute(118, ordering)
    lib.standin_set_attribute(117, options)
    before = lib.standin_calls(b"cuFlushGPUDirectRDMAWrites")
    assert visibility.flush_remote_writes(0) == bool(flushes)
    assert lib.standin_calls(b"cuFlushGPUDirectRDMAWrites") == before + flushes


def test_a_device_without_order_and_without_flush_is_refused(lib: ctypes.CDLL) -> None:
    visibility._needs_flush.cache_clear()
    lib.standin_set_attribute(118, 0)
    lib.standin_set_attribute(117, 0)
    with pytest.raises(DeviceError, match="neither keeps GPUDirect writes in order"):
        visibility.flush_remote_writes(0)


def run_ptx(word: int, amount: int) -> int:
    """What a GPU's kernel makes of a word, instruction by instruction, since the stand-in runs none."""
    values = {"[word]": 0, "[amount]": amount, "65535": 65535}
    memory = [word]
    for line in _PTX.decode().split("{")[1].split("}")[0].split(";"):
        text = line.strip()
        if text.startswith("@"):
            condition, text = text[1:].split(None, 1)
            if not values[condition]:
                continue
        operation, *operands = text.replace(",", " ").split()
        if operation == "ret":
            return memory[0]
        kind = operation.split(".")[0]
        if operation == "ld.param.u64":
            values[operands[0]] = values[operands[1]]
        elif kind == "ld":
            values[operands[0]] = memory[values[operands[1][1:-1]]]
        elif kind == "st":
            memory[values[operands[0][1:-1]]] = values[operands[1]]
        elif kind in ("add", "and", "setp"):
            a, b = (values[name] for name in operands[1:])
            values[operands[0]] = {"add": (a + b) % 2**64, "and": a & b, "setp": a > b}[kind]
        else:
            assert operation in (".reg", "fence.acq_rel.sys"), operation
    raise AssertionError("it does not return")


@pytest.mark.parametrize("layers", [0, 1, 60, 65474, 65475, 65534, 65535])
@pytest.mark.parametrize("amount", [1, 2, 61, 65535])
def test_the_kernel_adds_layers_and_never_touches_the_step(layers: int, amount: int) -> None:
    for step in (0, 7, (1 << 48) - 1):
        word = step << 16 | layers
        assert run_ptx(word, amount) == (word + amount if layers + amount <= 65535 else word)


def test_tensors_that_are_taken_are_given_back_by_their_deleter(lib: ctypes.CDLL) -> None:
    buffer = DeviceBuffer.allocate(0, 100)
    capsule: Any = buffer.__dlpack__()
    api = ctypes.pythonapi
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    at = api.PyCapsule_GetPointer(ctypes.py_object(capsule), b"dltensor")
    api.PyCapsule_SetName(ctypes.py_object(capsule), used := ctypes.c_char_p(b"used_dltensor"))
    del capsule  # taken: its end is not the tensor's
    assert used.value
    with pytest.raises(ConfigError, match=r"1 tensor\(s\)"):
        buffer.close()
    deleter = ctypes.cast(ctypes.c_void_p.from_address(at + 56).value or 0, ctypes.CFUNCTYPE(None, ctypes.c_void_p))
    deleter(at)
    buffer.close()


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
        | environment,
    )


@pytest.mark.parametrize(
    ("hidden", "words"),
    [("cuda", "pip install 'fabric_kv[cuda]'"), ("libcuda", "NVIDIA's driver (libcuda.so.1)")],
)
def test_what_is_missing_is_said_at_use(hidden: str, words: str) -> None:
    if hidden == "libcuda" and run("import ctypes; ctypes.CDLL('libcuda.so.1')").returncode == 0:
        pytest.skip("this machine has NVIDIA's driver")
    done = run(
        "import sys\n"
        + ("sys.modules['cuda.bindings'] = None\n" if hidden == "cuda" else "")
        + "from fabric_kv import DeviceError\nfrom fabric_kv.memory import allocate\n"
        "try: allocate('cuda:0', 1)\nexcept DeviceError as error: print(error)"
    )
    assert words in done.stdout, done
