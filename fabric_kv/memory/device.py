"""Memory of a CUDA device that NICs reach and other processes can map: cuMem allocations with both flags set.

>>> buffer = DeviceBuffer.allocate("cuda:0", 1 << 30)
>>> cache = torch.from_dlpack(buffer).view(torch.float16)
>>> region = buffer.region(engine)                   # EngineOptions(device_memory=True)
>>> region.close(); del cache; buffer.close()        # in this order: it is not unmapped under its users

Not zeroed. Driver calls run with the device's primary context current, which is the one that frameworks use, and the
thread's own is put back.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Sequence
from typing import Any, SupportsIndex

from ..dlpack import CUDA, device_capsule
from ..errors import AllocationError, ClosedError, ConfigError, DeviceError, SharingError
from .buffer import MAX_HANDLES, BufferInfo, Exported, SharedBuffer, check_nbytes
from .driver import Driver, device_index, load_driver

__all__ = ["DeviceBuffer", "release_on_device"]

_NEEDED = {
    "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": "virtual memory management (cuMemCreate)",
    "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": "memory handles that are file descriptors",
    "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED": "GPUDirect RDMA on such memory",
}


class DeviceBuffer(SharedBuffer):
    """Device memory, made by :meth:`allocate` or :meth:`import_`.

    It has DLPack, which keeps it mapped, and ``__cuda_array_interface__``, which cannot: whoever uses that must not
    close it meanwhile.
    """

    def __init__(
        self, info: BufferInfo, driver: Driver, index: int, address: int, handles: Sequence[Any], *, imported: bool
    ) -> None:
        super().__init__(info, imported=imported)
        self._driver = driver
        self._index = index
        self._address = address
        self._handles = handles
        self._num_tensors = 0
        self._finalizer: weakref.finalize[..., Any]

    @classmethod
    def allocate(
        cls, device: str | int, nbytes: SupportsIndex, *, handle_bytes: SupportsIndex | None = None
    ) -> DeviceBuffer:
        """Allocate memory on a device.

        Parameters
        ----------
        device : str or int
            ``"cuda:N"`` or N, as this process counts its devices.
        nbytes : int
            Any positive number; a multiple of the device's granularity (2 MiB at present) is taken.
        handle_bytes : int, optional
            Make the memory of several allocations of at most so many bytes, side by side; by default it is one. A
            registration ends where an allocation does.

        Raises
        ------
        ConfigError
            If there is no such device, or a number is out of range.
        DeviceError
            If cuda-bindings or the driver is missing, the device lacks what is needed, or there is not so much memory.
        """
        nbytes = check_nbytes(nbytes)
        index = device_index(device)
        driver = load_driver()
        for attribute, what in _NEEDED.items():
            if not driver.attribute(attribute, index):
                raise DeviceError(
                    f"cuda:{index} has no {what}: {attribute} is 0", op="cuDeviceGetAttribute", device=f"cuda:{index}"
                )
        api = driver.api
        prop = api.CUmemAllocationProp()
        prop.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.requestedHandleTypes = api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        prop.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = index
        prop.allocFlags.gpuDirectRDMACapable = 1
        which = api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        page = int(driver.call("cuMemGetAllocationGranularity", prop, which, device=index))
        sizes = _cut(nbytes, page, handle_bytes)
        with contextlib.ExitStack() as undo:
            undo.enter_context(driver.current(index))
            info = BufferInfo("device", nbytes, sizes, page, driver.uuid(index))
            owned = undo.enter_context(contextlib.ExitStack())
            handles = []
            for size in sizes:
                handles.append(driver.call("cuMemCreate", size, prop, 0, device=index, nbytes=size))
                owned.callback(driver.call, "cuMemRelease", handles[-1], device=index)
                _check_flag(driver, index, handles[-1])
            return cls._map(info, driver, index, handles, owned, imported=False)

    @classmethod
    def import_(cls, exported: Exported) -> DeviceBuffer:
        """Map what another process exported, on the same device. The descriptors stay the caller's.

        Raises
        ------
        SharingError
            If a handle holds less memory than announced, or is of memory that NICs cannot reach.
        DeviceError
            If this process does not see the device, or the driver refuses a handle.
        ConfigError
            If it is host memory.
        """
        info = exported.info
        if info.kind != "device" or len(exported.fds) != len(info.handle_bytes):
            raise ConfigError(f"{exported!r} is no device memory with a descriptor for each handle")
        driver = load_driver()
        index = driver.index_of(info.device)
        kind = driver.api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        with contextlib.ExitStack() as undo:
            undo.enter_context(driver.current(index))
            owned = undo.enter_context(contextlib.ExitStack())
            handles = []
            for fd in exported.fds:
                handles.append(driver.call("cuMemImportFromShareableHandle", fd, kind, device=index))
                owned.callback(driver.call, "cuMemRelease", handles[-1], device=index)
                try:
                    _check_flag(driver, index, handles[-1])
                except AllocationError as error:
                    if error.code is None:
                        raise SharingError(
                            f"a handle of {info.nbytes} bytes is refused: {error}", reason="unreachable"
                        ) from None
                    raise
            return cls._map(info, driver, index, handles, owned, imported=True)

    @classmethod
    def _map(
        cls,
        info: BufferInfo,
        driver: Driver,
        index: int,
        handles: Sequence[Any],
        owned: contextlib.ExitStack,
        *,
        imported: bool,
    ) -> DeviceBuffer:
        """Map the handles side by side; takes over what ``owned`` undoes, if it succeeds."""
        api, total = driver.api, sum(info.handle_bytes)
        address = int(driver.call("cuMemAddressReserve", total, info.page_bytes, 0, 0, device=index, nbytes=total))
        owned.callback(driver.call, "cuMemAddressFree", address, total, device=index)
        offset = 0
        for handle, size in zip(handles, info.handle_bytes, strict=True):
            try:
                driver.call("cuMemMap", address + offset, size, 0, handle, 0, device=index, nbytes=size)
            except DeviceError as error:
                if imported and error.code == int(api.CUresult.CUDA_ERROR_INVALID_VALUE):
                    raise SharingError(
                        f"a handle that was announced with {size} bytes holds less: {error}", reason="size"
                    ) from None
                raise
            owned.callback(driver.call, "cuMemUnmap", address + offset, size, device=index)
            offset += size
        access = api.CUmemAccessDesc()
        access.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = index
        access.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        driver.call("cuMemSetAccess", address, total, [access], 1, device=index, nbytes=total)
        buffer = cls(info, driver, index, address, handles, imported=imported)
        buffer._finalizer = weakref.finalize(buffer, release_on_device, driver, index, owned.pop_all())
        buffer._finalizer.atexit = False  # an engine may be closed after us; the process's end frees it
        return buffer

    # -- facts -----------------------------------------------------------------------------------------------------

    @property
    def device(self) -> str:
        """``cuda:N``, as this process counts devices."""
        return f"cuda:{self._index}"

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return not self._finalizer.alive

    @property
    def address(self) -> int:
        """Where it is mapped, in this process's addresses of the device."""
        if self.closed:
            raise ClosedError(f"{self!r} is closed")
        return self._address

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        if copy or dl_device not in (None, self.__dlpack_device__()):
            raise BufferError(f"{self!r} on {self.device} is exported as it is: neither copied nor moved")
        with self._lock:
            address = self.address
            self._num_tensors += 1
        return device_capsule(address, self.nbytes, self._index, self._tensor_is_gone)

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, self._index

    def _tensor_is_gone(self) -> None:
        # Without the lock: a garbage collection may end a tensor on a thread that holds it.
        self._num_tensors -= 1

    # -- bytes -----------------------------------------------------------------------------------------------------

    def read(self, offset: int, nbytes: int) -> bytes:
        """Copy bytes to the host, and wait for it; for tests and checksums."""
        self._check_range(offset, nbytes)
        out = bytearray(nbytes)
        with self._driver.current(self._index):
            self._driver.call("cuMemcpyDtoH", out, self.address + offset, nbytes, device=self._index, nbytes=nbytes)
        return bytes(out)

    def write(self, offset: int, data: bytes) -> None:
        """Copy bytes, or what any contiguous buffer holds, to the device, and wait for it; for tests."""
        data = bytes(data)
        self._check_range(offset, len(data))
        with self._driver.current(self._index):
            self._driver.call("cuMemcpyHtoD", self.address + offset, data, len(data), device=self._index)
            # It returns when the bytes have been taken, not when they are there.
            self._driver.call("cuCtxSynchronize", device=self._index)

    def _check_range(self, offset: int, nbytes: int) -> None:
        if offset < 0 or nbytes <= 0 or offset + nbytes > self.nbytes:
            raise ConfigError(f"{nbytes} bytes from {offset} on are not within {self!r}")

    # -- sharing and end ---------------------------------------------------------------------------------------------

    def _export_handles(self, first: int, most: int) -> list[int]:
        kind = self._driver.api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        with self._lock, contextlib.ExitStack() as undo:
            self._check_exportable()
            fds = []
            with self._driver.current(self._index):
                for handle in self._handles[first : first + most]:
                    fd = int(self._driver.call("cuMemExportToShareableHandle", handle, kind, 0, device=self._index))
                    fds.append(fd)
                    undo.callback(os.close, fd)
            undo.pop_all()
        return fds

    def _unmap(self) -> None:
        if self._num_tensors:
            raise ConfigError(f"{self!r} is in use by {self._num_tensors} tensor(s): delete these first")
        self._finalizer()


def _cut(nbytes: int, page: int, handle_bytes: SupportsIndex | None) -> tuple[int, ...]:
    total = -(-nbytes // page) * page
    if handle_bytes is None:
        return (total,)
    most = -(-check_nbytes(handle_bytes, "handle_bytes") // page) * page
    if -(-total // most) > MAX_HANDLES:
        raise ConfigError(f"{nbytes} bytes in handles of {most} are more than {MAX_HANDLES} handles")
    return tuple(min(most, total - begin) for begin in range(0, total, most))


def _check_flag(driver: Driver, index: int, handle: Any) -> None:
    prop = driver.call("cuMemGetAllocationPropertiesFromHandle", handle, device=index)
    if not prop.allocFlags.gpuDirectRDMACapable or prop.location.id != index:
        raise DeviceError(
            f"memory on cuda:{prop.location.id} is not GPUDirect RDMA capable on cuda:{index}: NICs could not reach it",
            op="cuMemGetAllocationPropertiesFromHandle",
            device=f"cuda:{index}",
        )


def release_on_device(driver: Driver, index: int, owned: contextlib.ExitStack) -> None:
    """Undo what ``owned`` holds, with the device's context current; nothing in a forked child."""
    if os.getpid() != driver.pid:  # the memory is the parent's, and CUDA does not work in a forked child
        owned.pop_all()
        return
    with contextlib.ExitStack() as undo:
        try:
            undo.enter_context(driver.current(index))
        except DeviceError:
            # Any call may report an earlier error of somebody else's instead of its own.
            with driver.current(index):
                owned.close()
            raise
        owned.close()
