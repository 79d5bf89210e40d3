"""Where a buffer's bytes are, and what is refused: read-only, not contiguous, empty, Python objects, no buffer."""

from __future__ import annotations

import array
import ctypes
import gc
import subprocess
import sys
import weakref
from typing import Any

import numpy as np
import pytest

from fabric_kv.buffers import locate
from fabric_kv.dlpack import device_capsule
from fabric_kv.errors import ConfigError


class Dlpack:
    """Exports an array as a framework would: before DLPack 1.0, or since."""

    def __init__(self, exported: np.ndarray[Any, Any], *, versioned: bool) -> None:
        self.exported = exported
        self.versioned = versioned

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.exported.__dlpack_device__()

    def __dlpack__(self, **keywords: Any) -> Any:
        if not self.versioned and keywords.keys() - {"stream"}:
            raise TypeError("unexpected keyword")
        return self.exported.__dlpack__(**keywords)


class OnDevice:
    """Whose bytes nobody may touch."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.released = 0

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device, 0

    def __dlpack__(self, **keywords: Any) -> Any:
        assert keywords.pop("stream") == -1, "no stream is to wait"
        if keywords:
            raise TypeError("from before DLPack 1.0")
        return device_capsule(0x7F0000000000, 100, 0, self.release)

    def release(self) -> None:
        self.released += 1


class CudaArray:
    def __init__(self, **changes: Any) -> None:
        self.__cuda_array_interface__ = {
            "shape": (4, 8),
            "typestr": "<f2",
            "data": (0x7F0000000000, False),
            "version": 3,
        } | changes


OUTLIVES = """
import builtins, json, sys
from fabric_kv.dlpack import device_capsule
capsule = device_capsule(0x1000, 16, 0, lambda: print("released", flush=True))
class Cycle: pass
if sys.argv[1] == "cycle":
    cycle = Cycle()
    cycle.itself, cycle.capsule, cycle.sys = cycle, capsule, sys
    sys.kept = cycle
elif sys.argv[1] == "builtins":
    builtins.kept = capsule
elif sys.argv[1] == "json":
    json.kept = capsule
del capsule
"""


@pytest.mark.parametrize("where", ["cycle", "builtins", "json", "nowhere"])
def test_a_capsule_may_outlive_our_modules(where: str) -> None:
    done = subprocess.run([sys.executable, "-c", OUTLIVES, where], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "released\n" or where == "cycle"  # which ends last of all, when print has nowhere to write


@pytest.mark.parametrize("dtype", ["u1", "f2", "f8", "c16", "V7", [("a", "u1"), ("b", "i8")]])
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_of_any_dtype_and_order(dtype: Any, order: Any) -> None:
    values = np.zeros((3, 4, 5), dtype, order=order)
    found = locate(values)
    assert (found.address, found.nbytes, found.device) == (values.ctypes.data, values.nbytes, "cpu")


@pytest.mark.parametrize(
    "make",
    [
        lambda: bytearray(100),
        lambda: memoryview(bytearray(100)),
        lambda: array.array("d", [0.0] * 4),
        lambda: (ctypes.c_char * 64)(),
        lambda: np.zeros(8, "f4"),
        lambda: np.zeros(()),
        lambda: memoryview(np.zeros((2, 3))),
    ],
)
def test_anything_with_a_writable_buffer(make: Any) -> None:
    buffer = make()
    found = locate(buffer)
    assert found.nbytes == memoryview(buffer).nbytes
    ctypes.memset(found.address, 0x5A, found.nbytes)
    assert memoryview(buffer).tobytes() == b"\x5a" * found.nbytes


@pytest.mark.parametrize("versioned", [False, True], ids=["before 1.0", "since 1.0"])
def test_dlpack(versioned: bool) -> None:
    values = np.zeros((4, 8), "f4")
    found = locate(Dlpack(values, versioned=versioned))
    assert (found.address, found.nbytes, found.device) == (values.ctypes.data, values.nbytes, "cpu")


class Pinned(Dlpack):
    """As torch announces CPU tensors after pin_memory()."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 3, 0


def test_pinned_host_memory_is_host_memory() -> None:
    values = np.zeros((4, 8), "f4")
    found = locate(Pinned(values, versioned=True))
    assert (found.address, found.nbytes, found.device) == (values.ctypes.data, values.nbytes, "cpu")


def test_dlpack_that_says_read_only_is_refused() -> None:
    values = np.zeros(8)
    values.flags.writeable = False
    with pytest.raises(ConfigError, match="read-only"):
        locate(Dlpack(values, versioned=True))


def test_dlpack_that_cannot_be_exported_is_refused() -> None:
    values = np.zeros(8)
    values.flags.writeable = False
    with pytest.raises(ConfigError, match="DLPack"):
        locate(Dlpack(values, versioned=False))


def test_dlpack_on_a_cuda_device_is_held_by_its_capsule() -> None:
    tensor = OnDevice(2)
    found = locate(tensor)
    assert (found.address, found.nbytes, found.device) == (0x7F0000000000, 100, "cuda")
    assert tensor.released == 0
    del found
    gc.collect()
    assert tensor.released == 1


def test_dlpack_on_another_device_is_refused_by_its_type() -> None:
    with pytest.raises(ConfigError, match=r"device type 8: 1 and 3, the host, and 2, CUDA, .* Hint: "):
        locate(OnDevice(8))


class Retyped(Dlpack):
    """With a dtype that NumPy does not have: the struct's code, bits and lanes, by dlpack.h."""

    def __init__(self, exported: np.ndarray[Any, Any], dtype: tuple[int, int, int], *, versioned: bool) -> None:
        super().__init__(exported, versioned=versioned)
        self.dtype = dtype

    def __dlpack__(self, **keywords: Any) -> Any:
        capsule = super().__dlpack__(**keywords)
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype = ctypes.c_void_p
        at = get(ctypes.py_object(capsule), repr(capsule).split('"')[1].encode())
        at += (32 if "versioned" in repr(capsule) else 0) + 20
        code, bits, lanes = self.dtype
        ctypes.memmove(at, bytes([code, bits, *lanes.to_bytes(2, "little")]), 4)
        return capsule


@pytest.mark.parametrize("versioned", [False, True], ids=["before 1.0", "since 1.0"])
def test_dlpack_of_types_that_numpy_does_not_have(versioned: bool) -> None:
    values = np.zeros((4, 8), "f2")
    bfloat16, four_bits, two_of_four_bits = (4, 16, 1), (17, 4, 1), (17, 4, 2)
    assert locate(Retyped(values, bfloat16, versioned=versioned))[:2] == (values.ctypes.data, 64)
    assert locate(Retyped(values, two_of_four_bits, versioned=versioned)).nbytes == 32
    with pytest.raises(ConfigError, match="no whole bytes"):
        locate(Retyped(values, four_bits, versioned=versioned))


def test_dlpack_of_an_unknown_version_or_of_something_else_is_refused() -> None:
    class Other(Dlpack):
        def __dlpack__(self, **keywords: Any) -> Any:
            capsule = super().__dlpack__(**keywords)
            get = ctypes.pythonapi.PyCapsule_GetPointer
            get.restype = ctypes.c_void_p
            ctypes.c_uint32.from_address(get(ctypes.py_object(capsule), b"dltensor_versioned")).value = 2
            return capsule

    class No(Dlpack):
        def __dlpack__(self, **keywords: Any) -> Any:
            return 5

    values = np.zeros(8)
    with pytest.raises(ConfigError, match=r"5 is no DLPack tensor"):
        locate(No(values, versioned=True))
    if "versioned" in repr(Dlpack(values, versioned=True).__dlpack__(max_version=(1, 0))):
        with pytest.raises(ConfigError, match=r"DLPack 2\.\d+ is not known"):
            locate(Other(values, versioned=True))


def test_the_order_of_axes_does_not_matter() -> None:
    values = np.zeros((3, 1, 4, 5), "f4")
    for order in (values.transpose(2, 0, 3, 1), values[:, ::-1], Dlpack(values.transpose(3, 1, 0, 2), versioned=True)):
        assert locate(order)[:2] == (values.ctypes.data, values.nbytes)
    for order in (values[::-1], values[::2], values[:, :, 1:].transpose(2, 0, 1, 3)):
        with pytest.raises(ConfigError, match="not contiguous"):
            locate(order)


def test_cuda_arrays() -> None:
    found = locate(CudaArray())
    assert (found.address, found.nbytes, found.device) == (0x7F0000000000, 64, "cuda")
    assert locate(CudaArray(strides=(16, 2))).nbytes == 64
    for changes, words in (
        ({"strides": (32, 2)}, "not contiguous"),
        ({"data": (1, True)}, "read-only"),
        ({"shape": (0,)}, "empty"),
    ):
        with pytest.raises(ConfigError, match=words):
            locate(CudaArray(**changes))


def test_bare_addresses() -> None:
    for device in ("cuda:1", "cuda:77", "cuda", "cpu"):
        assert locate((4096, 100, device))[:3] == (4096, 100, device)
    found = locate((np.uint64(4096), np.int64(100), "cpu"))
    assert [type(number) for number in found[:2]] == [int, int]


@pytest.mark.parametrize(
    ("buffer", "words"),
    [
        (b"constant", "bytes of 8 bytes is read-only"),
        (memoryview(bytearray(8))[::2], "not contiguous"),
        (np.zeros((4, 4))[:, 1], r"strides \(32,\) is not contiguous"),
        (np.zeros((4, 4))[:, :2], "not contiguous"),
        (np.zeros(0), r"shape \(0,\).*empty"),
        (bytearray(), "empty"),
        (np.array([object()]), "Python objects"),
        (np.zeros(2, [("a", "O")]), "Python objects"),
        (np.broadcast_to(np.zeros(1), (4,)), "read-only|not contiguous"),
        ("text", "str is not a buffer"),
        (None, "NoneType is not a buffer"),
        ([1, 2], "list is not a buffer"),
        ((1, 2), "not 2 items"),
        ((1, 2, 3), "must be"),
        (("1", 2, "cpu"), "must be"),
        ((4096, 2.0, "cpu"), "must be"),
        *[
            ((4096, 100, device), "'cpu', 'cuda' or 'cuda:N'")
            for device in ("banana", "cuda:x", "cuda:", "cuda:-1", "")
        ],
        ((0, 1, "cpu"), "not a range"),
        ((1, 0, "cpu"), "not a range"),
        ((1, -5, "cpu"), "not a range"),
        ((2**64 - 10, 11, "cpu"), "not a range"),
        ((2**64, 1, "cpu"), "not a range"),
    ],
)
def test_refusals_say_why(buffer: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        locate(buffer)


def test_a_read_only_array_is_refused() -> None:
    values = np.zeros(8)
    values.flags.writeable = False
    with pytest.raises(ConfigError, match="read-only"):
        locate(values)


def test_the_owner_keeps_the_memory() -> None:
    values = np.zeros(64, "u1")
    gone = weakref.ref(values)
    found = locate(values)
    del values
    gc.collect()
    assert gone() is not None
    del found
    gc.collect()
    assert gone() is None


def test_a_bytearray_cannot_be_resized_while_it_is_held() -> None:
    buffer = bytearray(64)
    found = locate(buffer)
    with pytest.raises(BufferError):
        buffer.extend(bytes(1000))
    del found
    buffer.extend(bytes(1000))
