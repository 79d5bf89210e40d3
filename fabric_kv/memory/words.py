"""A watch's word that something else than the engine's process bumps: a rank's CPU, or a GPU's streams and graphs.

>>> word = WatchWord("cuda:0")
>>> watch = engine.watch(word.array)                     # submissions wait for it, layer by layer
>>> word.set_step(7, stream)                             # before the forward pass, outside the graph
>>> word.bump(stream)                                    # after each layer; may be captured in a graph
>>> BufferServer(path, {"cache": cache, "word": word.buffer})   # where the engine is another process's ...
>>> watch = engine.watch(rank["word"].array[:8].view("u8"))     # ... which imports it: rank = import_buffers(path)

The word is ``step << 16 | layers done`` (:class:`fabric_kv.Watch`) and has one writer: one stream, or one thread, at a
time.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref
from typing import TYPE_CHECKING, Any, Self

from ..core import load_native
from ..errors import ClosedError, ConfigError, DeviceError
from .device import release_on_device
from .driver import device_index, load_driver
from .host import HostBuffer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .. import _native

__all__ = ["WatchWord"]

_LAYER_BITS = 16  # as native/engine/watch.h has them
_DEVICEMAP = 2  # CU_MEMHOSTREGISTER_DEVICEMAP
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE
_KERNEL = b"fabric_kv_bump"

# The store releases at system scope whatever was written before it: PTX ISA, "Memory Consistency Model". A load and a
# store instead of an atomic: those do not work on host memory behind every PCIe root, and the word has one writer.
# Layers that do not fit into 16 bits are not stored: they would be carried into the step, and what waits for a later
# one would go although nothing of it is computed.
_PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry fabric_kv_bump(.param .u64 word, .param .u64 amount)
{
    .reg .pred %p<2>;
    .reg .b64 %rd<7>;
    ld.param.u64 %rd1, [word];
    ld.param.u64 %rd2, [amount];
    ld.relaxed.sys.global.u64 %rd3, [%rd1];
    and.b64 %rd4, %rd3, 65535;
    add.u64 %rd5, %rd4, %rd2;
    setp.gt.u64 %p1, %rd5, 65535;
    @%p1 ret;
    add.u64 %rd6, %rd3, %rd2;
    fence.acq_rel.sys;
    st.release.sys.global.u64 [%rd1], %rd6;
    ret;
}
\0"""


class WatchWord:
    """A 64-bit word in host memory that a CUDA device or this process writes. A context manager that closes.

    Parameters
    ----------
    device : str or int
        ``"cuda:N"`` or N: the one whose streams bump it. ``"cpu"``: this process bumps it.

    Raises
    ------
    DeviceError
        If CUDA cannot be used, or the device has no 64-bit stream memory operations (from Volta on they do).
    ConfigError
        If there is no such device.
    AllocationError
        If there is no memory.
    """

    def __init__(self, device: str | int) -> None:
        self._writer: _HostWriter | _DeviceWriter
        if device == "cpu":
            self._writer = _HostWriter()
        else:
            self._writer = _DeviceWriter(device_index(device))

    @property
    def array(self) -> NDArray[np.uint64]:
        """The word, shape (1,), for :meth:`fabric_kv.Engine.watch`."""
        return self.buffer.array[:8].view("u8")

    @property
    def buffer(self) -> HostBuffer:
        """What it lies in, at the start: for a :class:`BufferServer`, where another process has the engine."""
        self._check()
        return self._writer.buffer

    @property
    def device_address(self) -> int:
        """Where kernels of the device find it.

        Raises
        ------
        ConfigError
            If no device writes it.
        """
        self._check()
        return self._writer.device_address

    def set_step(self, step: int, stream: Any = 0, *, layers: int = 0) -> None:
        """Say that ``layers`` layers of ``step`` are done: when a stream gets there, or, on the CPU, now.

        A captured graph would say the same at each replay: call it before the graph, not within.

        Parameters
        ----------
        step : int
            48 bits.
        stream : int or CUstream
            ``torch.cuda.current_stream().cuda_stream`` for example; by default the legacy default stream. Not looked
            at on the CPU.
        layers : int
            16 bits.

        Raises
        ------
        ConfigError
            If a number does not fit.
        DeviceError
            If the driver refuses.
        """
        self._check()
        if not 0 <= step < 1 << (64 - _LAYER_BITS) or not 0 <= layers < 1 << _LAYER_BITS:
            raise ConfigError(f"step={step} must fit into 48 bits and layers={layers} into 16")
        self._writer.set(step, layers, stream)

    def bump(self, stream: Any = 0, *, layers: int = 1) -> None:
        """Say that ``layers`` more layers are done: when a stream gets there, by a kernel of one thread, or now.

        It may be captured in a graph, which adds them at each replay. Whatever was written before it, by the stream or
        by this thread, is seen by whoever sees the word.

        A step has at most 65535 layers. What does not fit is an error on the CPU; a device leaves the word as it is, so
        that a graph that is replayed without :meth:`set_step` never begins a later step.

        Raises
        ------
        ConfigError
            If ``layers`` is out of range; on the CPU also if the step would have more than 65535.
        DeviceError
            If the driver refuses.
        """
        self._check()
        if not 0 < layers < 1 << _LAYER_BITS:
            raise ConfigError(f"layers={layers} must lie in [1, {(1 << _LAYER_BITS) - 1}]")
        self._writer.bump(layers, stream)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._writer.closed

    def close(self) -> None:
        """Give the word back. No stream may have work left that writes it. Calling it twice is fine."""
        self._writer.close()

    def _check(self) -> None:
        if self.closed:
            raise ClosedError("the watch word is closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _HostWriter:
    """Stores by the core's atomics: a plain store of Python's would release nothing."""

    def __init__(self) -> None:
        native = load_native()
        self.buffer = HostBuffer.allocate(mmap.PAGESIZE)
        self._word: _native.Watch = native.Watch(self.buffer.address, False)
        self.closed = False

    @property
    def device_address(self) -> int:
        raise ConfigError("no device writes this word: it was made for the CPU")

    def set(self, step: int, layers: int, _stream: Any) -> None:
        self._word.set(step, layers)

    def bump(self, more: int, _stream: Any) -> None:
        step, layers = divmod(self._word.word, 1 << _LAYER_BITS)
        if layers + more >= 1 << _LAYER_BITS:
            raise ConfigError(f"step {step} has {layers} layers done: {more} more do not fit into 16 bits")
        self._word.set(step, layers + more)

    def close(self) -> None:
        self.closed = True
        _close_if_unused(self.buffer)


class _DeviceWriter:
    """Writes by a device's streams, into memory that is registered with CUDA."""

    def __init__(self, index: int) -> None:
        driver = load_driver()
        if not driver.attribute("CAN_USE_64_BIT_STREAM_MEM_OPS", index):
            raise DeviceError(
                f"cuda:{index} cannot write 64-bit words from streams: CAN_USE_64_BIT_STREAM_MEM_OPS is 0",
                op="cuStreamWriteValue64",
                device=f"cuda:{index}",
            )
        self._driver, self._index = driver, index
        self.buffer = HostBuffer.allocate(mmap.PAGESIZE)
        address = self.buffer.address
        with driver.current(index), contextlib.ExitStack() as owned:
            owned.callback(_close_if_unused, self.buffer)
            driver.call("cuMemHostRegister", address, mmap.PAGESIZE, _DEVICEMAP | _PORTABLE, device=index)
            owned.callback(driver.call, "cuMemHostUnregister", address, device=index)
            self.device_address = int(driver.call("cuMemHostGetDevicePointer", address, 0, device=index))
            module = driver.call("cuModuleLoadData", _PTX, device=index)
            owned.callback(driver.call, "cuModuleUnload", module, device=index)
            self._kernel = driver.call("cuModuleGetFunction", module, _KERNEL, device=index)
            self._finalizer = weakref.finalize(self, release_on_device, driver, index, owned.pop_all())
            self._finalizer.atexit = False  # an engine may be closed after us; the process's end frees it

    def set(self, step: int, layers: int, stream: Any) -> None:
        # The default flag fences what the stream has written before, for the whole system: CUstreamWriteValue_flags.
        value = self._driver.api.cuuint64_t(step << _LAYER_BITS | layers)
        with self._driver.current(self._index):
            self._driver.call("cuStreamWriteValue64", stream, self.device_address, value, 0, device=self._index)

    def bump(self, more: int, stream: Any) -> None:
        arguments = ((self.device_address, more), (ctypes.c_uint64, ctypes.c_uint64))
        with self._driver.current(self._index):
            self._driver.call("cuLaunchKernel", self._kernel, *(1,) * 6, 0, stream, arguments, 0, device=self._index)

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    def close(self) -> None:
        self._finalizer()


def _close_if_unused(buffer: HostBuffer) -> None:
    with contextlib.suppress(ConfigError):  # a watch has it still: the memory goes with that
        buffer.close()
