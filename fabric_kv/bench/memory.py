"""Memory to move pages in: on the host, or on a GPU with a copy here in which pages are stamped and compared.

>>> memory = make_memory(Fabric(provider="tcp"), 1 << 20)
>>> memory.array[:4]
array([165, 165, 165, 165], dtype=uint8)
>>> region = memory.register(engine); memory.push(); memory.pull()     # nothing to carry where it is on the host
"""

from __future__ import annotations

import contextlib
import mmap
import weakref

import numpy as np
from numpy.typing import NDArray

from ..engine import Engine
from ..errors import ConfigError, DeviceError
from ..memory.device import DeviceBuffer, release_on_device
from ..memory.driver import Driver, device_index, load_driver
from ..transfers import MemoryRegion
from .stamps import POISON
from .workload import Fabric

__all__ = ["DeviceMemory", "HostMemory", "Memory", "allocate", "check_memory", "make_memory"]


def allocate(nbytes: int) -> NDArray[np.uint8]:
    """Memory of its own, in huge pages where the system gives them, filled with :data:`~.stamps.POISON`."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    array[:] = POISON
    return array


class Memory:
    """Some bytes.

    Attributes
    ----------
    array : ndarray of uint8
        On the host. What is written there is where NICs read only after :meth:`push`, and what they write is there only
        after :meth:`pull`.
    """

    def __init__(self, nbytes: int) -> None:
        self.array = allocate(nbytes)

    def register(self, engine: Engine) -> MemoryRegion:
        """With all NICs of the engine, which must be closed before the memory goes."""
        raise NotImplementedError

    def push(self, nbytes: int | None = None) -> None:
        """Carry the first bytes, or all, from the array to where NICs read them; they are there when it returns."""
        raise NotImplementedError

    def pull(self, nbytes: int | None = None) -> None:
        """Carry the first bytes, or all, to the array."""
        raise NotImplementedError


class HostMemory(Memory):
    """The array itself."""

    def register(self, engine: Engine) -> MemoryRegion:  # noqa: D102
        return engine.register(self.array)

    def push(self, nbytes: int | None = None) -> None:  # noqa: D102
        pass

    def pull(self, nbytes: int | None = None) -> None:  # noqa: D102
        pass


class DeviceMemory(Memory):
    """On a GPU; the array is a copy.

    Parameters
    ----------
    nbytes : int
    gpu : int
        As this process counts them.
    shareable : bool
        True: a :class:`~fabric_kv.memory.DeviceBuffer`. False: cuMemAlloc, which cudaMalloc and most frameworks use.

    Raises
    ------
    ConfigError
        If there is no such GPU.
    DeviceError
        If CUDA cannot be used, or there is not so much memory.
    """

    def __init__(self, nbytes: int, gpu: int, *, shareable: bool) -> None:
        super().__init__(nbytes)
        self._gpu = device_index(gpu)
        self._driver = load_driver()
        self._buffer: DeviceBuffer | None = None
        if shareable:
            self._buffer = DeviceBuffer.allocate(self._gpu, nbytes)
            self._address = self._buffer.address
        else:
            self._address = self._allocate_plain(nbytes)
        self.push()

    def register(self, engine: Engine) -> MemoryRegion:  # noqa: D102
        return engine.register(self._buffer or (self._address, len(self.array), f"cuda:{self._gpu}"))

    def push(self, nbytes: int | None = None) -> None:  # noqa: D102
        count, driver = len(self.array) if nbytes is None else nbytes, self._driver
        with driver.current(self._gpu):
            driver.call("cuMemcpyHtoD", self._address, self.array.ctypes.data, count, device=self._gpu, nbytes=count)
            # From pageable memory that call may return before the bytes are on the device ("API synchronization
            # behavior" in CUDA's driver API), and a NIC does not wait for streams.
            driver.call("cuCtxSynchronize", device=self._gpu)

    def pull(self, nbytes: int | None = None) -> None:  # noqa: D102
        count, driver = len(self.array) if nbytes is None else nbytes, self._driver
        with driver.current(self._gpu):
            driver.call("cuMemcpyDtoH", self.array.ctypes.data, self._address, count, device=self._gpu, nbytes=count)

    def _allocate_plain(self, nbytes: int) -> int:
        driver, owned = self._driver, contextlib.ExitStack()
        with driver.current(self._gpu):
            address = int(driver.call("cuMemAlloc", nbytes, device=self._gpu, nbytes=nbytes))
            # Here, since the context's end may fail, too.
            owned.callback(_free, driver, self._gpu, address)
            weakref.finalize(self, release_on_device, driver, self._gpu, owned).atexit = False
        return address


def _free(driver: Driver, gpu: int, address: int) -> None:
    driver.call("cuMemFree", address, device=gpu)


def make_memory(fabric: Fabric, nbytes: int) -> Memory:
    """Memory of the kind that this end is to use.

    Raises
    ------
    ConfigError, DeviceError
        As for :class:`DeviceMemory`.
    """
    if not fabric.on_gpu:
        return HostMemory(nbytes)
    return DeviceMemory(nbytes, fabric.gpu, shareable=fabric.mem == "cumem")


def check_memory(fabric: Fabric) -> None:
    """Find out whether there is such memory, before anything is opened.

    Raises
    ------
    ConfigError
        If there is no GPU of that number.
    DeviceError
        If CUDA cannot be used: what is missing, and what to install.
    """
    if not fabric.on_gpu:
        return
    try:
        count = load_driver().num_devices()
    except DeviceError as error:
        raise DeviceError(
            f"--mem {fabric.mem} finds no GPU that it can use: {error}. With --mem host none is needed",
            op=error.op,
            device=error.device,
            code=error.code,
        ) from error
    if fabric.gpu >= count:
        raise ConfigError(f"--gpu {fabric.gpu}: this process sees {count} GPU(s), numbered from 0")
