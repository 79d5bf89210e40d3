"""Which allocations a range of device memory consists of, whoever made them, and their dma-bufs for registration.

>>> with device_parts(address, nbytes) as (device, parts):
...     native.register_device(address, device, parts, group)

A range may span several: PyTorch's expandable segments and every large cuMem reservation consist of handles that are
mapped side by side, and a registration must not cross their borders.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator

from ..errors import DeviceError, RegistrationError
from .buffer import MAX_HANDLES
from .driver import Driver, load_driver

__all__ = ["device_of", "device_parts"]

# Pages of the largest size that Linux has on machines with GPUs: dma-bufs of parts of an allocation start at these.
_DMABUF_ALIGN = 65536


@contextlib.contextmanager
def device_parts(address: int, nbytes: int) -> Iterator[tuple[int, list[tuple[int, int, int]]]]:
    """Yield the device's number and (nbytes, dmabuf_fd, dmabuf_offset) of each part; the descriptors are closed after.

    ``dmabuf_fd`` is -1 where the driver has no dma-bufs. The range's device need not be current, nor any other.

    Raises
    ------
    RegistrationError
        If the range is not all device memory of one device, or was not allocated for GPUDirect RDMA.
    DeviceError
        If the driver cannot be asked.
    """
    driver = load_driver()
    device = device_of(driver, address)
    with contextlib.ExitStack() as undo:
        parts: list[tuple[int, int, int]] = []
        undo.enter_context(driver.current(device))
        has_dmabuf = driver.attribute("DMA_BUF_SUPPORTED", device) == 1
        begin, end = address, address + nbytes
        while begin < end:
            if len(parts) >= MAX_HANDLES:
                raise RegistrationError(
                    f"{nbytes} bytes on cuda:{device} consist of more than {MAX_HANDLES} allocations", op="register"
                )
            start, size = _allocation_of(driver, device, begin, address, nbytes)
            stop = min(end, start + size)
            fd, offset = -1, 0
            if has_dmabuf:
                # Whole pages of the host's, as the driver wants them, also where an allocation (cudaMalloc of 1000
                # bytes) has only a part of the last one.
                first = max(_down(start, mmap.PAGESIZE), _down(begin, _DMABUF_ALIGN))
                last = min(-_down(-(start + size), mmap.PAGESIZE), -_down(-stop, _DMABUF_ALIGN))
                fd, offset = _dmabuf(driver, device, first, last - first), begin - first
                undo.callback(os.close, fd)
            parts.append((stop - begin, fd, offset))
            begin = stop
        yield device, parts


def device_of(driver: Driver, address: int) -> int:
    """The number of the device that this address belongs to.

    Raises
    ------
    RegistrationError
        If it is no device memory of this process.
    """
    which = driver.api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    try:
        return int(driver.call("cuPointerGetAttribute", which, address))
    except DeviceError as error:
        raise RegistrationError(
            f"{address:#x} is no memory of a CUDA device that this process has mapped: {error}", op="register"
        ) from None


def _allocation_of(driver: Driver, device: int, at: int, address: int, nbytes: int) -> tuple[int, int]:
    what = f"{nbytes} bytes at {address:#x} on cuda:{device}"
    if device_of(driver, at) != device:
        raise RegistrationError(f"{what} reach into another device from byte {at - address} on", op="register")
    try:
        start, size = driver.call("cuMemGetAddressRange", at, device=device)
    except DeviceError as error:
        raise RegistrationError(
            f"{what} are not all mapped: from byte {at - address} on: {error}", op="register"
        ) from None
    capable = driver.api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE
    if not driver.call("cuPointerGetAttribute", capable, at, device=device):
        raise RegistrationError(
            f"{what} were not allocated for GPUDirect RDMA, from byte {at - address} on. Hint: allocate with "
            "fabric_kv.memory.allocate, with cudaMalloc, or by cuMemCreate with allocFlags.gpuDirectRDMACapable; "
            "the device must support it",
            op="register",
        )
    return int(start), int(size)


def _down(number: int, step: int) -> int:
    return number // step * step


def _dmabuf(driver: Driver, device: int, address: int, nbytes: int) -> int:
    kind = driver.api.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
    return int(driver.call("cuMemGetHandleForAddressRange", address, nbytes, kind, 0, device=device, nbytes=nbytes))
