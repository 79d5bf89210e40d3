"""A watch's word that a GPU bumps: host memory that its streams, kernels and graphs write.

>>> word = WatchWord("cuda:0")
>>> watch = engine.watch(word.array)                     # submissions wait for it, layer by layer
>>> word.set_step(7, stream)                             # before the forward pass, outside the graph
>>> word.bump(stream)                                    # after each layer; may be captured in a graph

The word is ``step << 16 | layers done`` (:class:`fabric_kv.Watch`) and has one writer: one stream at a time.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref
from typing import TYPE_CHECKING, Any, Self

from ..errors import ClosedError, ConfigError, DeviceError
from .device import release_on_device
from .driver import device_index, load_driver
from .host import HostBuffer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["WatchWord"]

_LAYER_BITS = 16  # as native/engine/watch.h has them
_DEVICEMAP = 2  # CU_MEMHOSTREGISTER_DEVICEMAP
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE
_KERNEL = b"fabric_kv_bump"

# The store releases at system scope whatever was written before it: PTX ISA, "Memory Consistency Model". A load and a
# store instead of an atomic: those do not work on host memory behind every PCIe root, and the word has one writer.
_PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry fabric_kv_bump(.param .u64 word, .param .u64 amount)
{
    .reg .b64 %rd<5>;
    ld.param.u64 %rd1, [word];
    ld.param.u64 %rd2, [amount];
    ld.relaxed.sys.global.u64 %rd3, [%rd1];
    add.u64 %rd4, %rd3, %rd2;
    fence.acq_rel.sys;
    st.release.sys.global.u64 [%rd1], %rd4;
    ret;
}
\0"""


class WatchWord:
    """A 64-bit word in host memory that a CUDA device writes. A context manager that closes.

    Parameters
    ----------
    device : str or int
        ``"cuda:N"`` or N: the one whose streams bump it.

    Raises
    ------
    DeviceError
        If CUDA cannot be used, or the device has no 64-bit stream memory operations (from Volta on they do).
    ConfigError
        If there is no such device.
    """

    def __init__(self, device: str | int) -> None:
        index = device_index(device)
        driver = load_driver()
        if not driver.attribute("CAN_USE_64_BIT_STREAM_MEM_OPS", index):
            raise DeviceError(
                f"cuda:{index} cannot write 64-bit words from streams: CAN_USE_64_BIT_STREAM_MEM_OPS is 0",
                op="cuStreamWriteValue64",
                device=f"cuda:{index}",
            )
        self._driver, self._index = driver, index
        self._buffer = HostBuffer.allocate(mmap.PAGESIZE)
        address = self._buffer.address
        with driver.current(index), contextlib.ExitStack() as owned:
            owned.callback(_close_if_unused, self._buffer)
            driver.call("cuMemHostRegister", address, mmap.PAGESIZE, _DEVICEMAP | _PORTABLE, device=index)
            owned.callback(driver.call, "cuMemHostUnregister", address, device=index)
            self._device_address = int(driver.call("cuMemHostGetDevicePointer", address, 0, device=index))
            module = driver.call("cuModuleLoadData", _PTX, device=index)
            owned.callback(driver.call, "cuModuleUnload", module, device=index)
            self._kernel = driver.call("cuModuleGetFunction", module, _KERNEL, device=index)
            self._finalizer = weakref.finalize(self, release_on_device, driver, index, owned.pop_all())
            self._finalizer.atexit = False  # an engine may be closed after us; the process's end frees it

    @property
    def array(self) -> NDArray[np.uint64]:
        """The word, shape (1,), for :meth:`fabric_kv.Engine.watch`."""
        self._check()
        return self._buffer.array[:8].view("u8")

    @property
    def device_address(self) -> int:
        """Where kernels of the device find it."""
        self._check()
        return self._device_address

    def set_step(self, step: int, stream: Any = 0, *, layers: int = 0) -> None:
        """Let a stream say, when it gets there, that ``layers`` layers of ``step`` are done.

        A captured graph would say the same at each replay: call it before the graph, not within.

        Parameters
        ----------
        step : int
            48 bits.
        stream : int or CUstream
            ``torch.cuda.current_stream().cuda_stream`` for example; by default the legacy default stream.
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
        # The default flag fences what the stream has written before, for the whole system: CUstreamWriteValue_flags.
        value = self._driver.api.cuuint64_t(step << _LAYER_BITS | layers)
        with self._driver.current(self._index):
            self._driver.call("cuStreamWriteValue64", stream, self._device_address, value, 0, device=self._index)

    def bump(self, stream: Any = 0, *, layers: int = 1) -> None:
        """Let a stream say, when it gets there, that ``layers`` more layers are done, by a kernel of one thread.

        It may be captured in a graph, which adds them at each replay.

        Raises
        ------
        ConfigError
            If ``layers`` is out of range.
        DeviceError
            If the driver refuses.
        """
        self._check()
        if not 0 < layers < 1 << _LAYER_BITS:
            raise ConfigError(f"layers={layers} must lie in [1, {(1 << _LAYER_BITS) - 1}]")
        arguments = ((self._device_address, layers), (ctypes.c_uint64, ctypes.c_uint64))
        with self._driver.current(self._index):
            self._driver.call("cuLaunchKernel", self._kernel, *(1,) * 6, 0, stream, arguments, 0, device=self._index)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return not self._finalizer.alive

    def close(self) -> None:
        """Give the word back. No stream may have work left that writes it. Calling it twice is fine."""
        self._finalizer()

    def _check(self) -> None:
        if self.closed:
            raise ClosedError("the watch word is closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _close_if_unused(buffer: HostBuffer) -> None:
    with contextlib.suppress(ConfigError):  # a watch has it still: the memory goes with that
        buffer.close()
