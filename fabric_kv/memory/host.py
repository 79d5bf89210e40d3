"""Host memory that other processes can map: a memfd, on huge pages and on a NUMA node where asked for.

>>> buffer = HostBuffer.allocate(1 << 20, numa_node=0)        # hugepages=True: where some are reserved
>>> keys = buffer.array.view("f2").reshape(2, -1, 16, 64)     # torch.from_dlpack(buffer): the same bytes
>>> del keys; buffer.close()                                  # in this order: it is not unmapped under its users

The file is sealed against shrinking: whoever maps it can never be struck by SIGBUS because somebody truncates it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np

from ..errors import AllocationError, ClosedError, ConfigError, SharingError
from .buffer import BufferInfo, Exported, SharedBuffer, check_nbytes
from .numa import bind
from .room import room

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["HostBuffer"]

_log = logging.getLogger("fabric_kv")

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MFD_HUGETLB = 0x0004  # <linux/memfd.h>
_MAP_HUGETLB = 0x40000  # <asm-generic/mman-common.h>
_MAP_NORESERVE = 0x4000
_MAP_FIXED = 0x10
_HUGE_SHIFT = 26  # of the size's logarithm, in both kinds of flags
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_HUGEPAGES = Path("/sys/kernel/mm/hugepages")


def _default_hugepage_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Hugepagesize:"):
            return int(line.split()[1]) << 10
    raise ConfigError("this kernel has no huge pages (/proc/meminfo has no Hugepagesize)")


def _failed(
    op: str, nbytes: int, error: OSError, hugepage_bytes: int = 0, numa_node: int | None = None
) -> AllocationError:
    hint = ""
    if hugepage_bytes and error.errno in (errno.ENOMEM, errno.ENOSPC, errno.EFAULT):
        count = -(-nbytes // hugepage_bytes)
        folder = _HUGEPAGES if numa_node is None else Path(f"/sys/devices/system/node/node{numa_node}/hugepages")
        where = "" if numa_node is None else f" on NUMA node {numa_node}"
        hint = (
            f". Hint: it takes {count} free huge pages of {hugepage_bytes} bytes{where}: "
            f"{folder}/hugepages-{hugepage_bytes >> 10}kB/nr_hugepages"
        )
    elif hugepage_bytes and error.errno in (errno.ENODEV, errno.EINVAL):
        there = sorted(int(path.name[10:-2]) << 10 for path in _HUGEPAGES.glob("hugepages-*kB"))
        hint = f". Hint: this kernel's huge pages have {there or 'no'} bytes"
    elif error.errno in (errno.ENOMEM, errno.ENOSPC):
        hint = ". Hint: what /dev/shm or the control group has left does not suffice"
    elif error.errno in (errno.EMFILE, errno.ENFILE):
        hint = ". Hint: raise the limit on open files (ulimit -n)"
    return AllocationError(
        f"{op} failed for {nbytes} bytes of host memory: {error.strerror} ({error.errno}){hint}",
        op=op,
        device="cpu",
        nbytes=nbytes,
        code=error.errno,
    )


class HostBuffer(SharedBuffer):
    """Host memory, made by :meth:`allocate` or :meth:`import_`.

    It has the buffer protocol (from Python 3.12 on; :attr:`view` everywhere), DLPack, and becomes an array in
    ``numpy.asarray``. All of these keep it mapped: it cannot be closed while one of them is there.
    """

    def __init__(self, info: BufferInfo, mapping: mmap.mmap, *, fd: int = -1, numa_node: int | None = None) -> None:
        super().__init__(info, imported=fd < 0)
        self._mapping = mapping
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self._fd = fd
        self._close_fd = weakref.finalize(self, os.close, fd) if fd >= 0 else None
        #: The NUMA node that its pages are bound to; None: they come from anywhere.
        self.numa_node = numa_node

    @classmethod
    def allocate(
        cls,
        nbytes: SupportsIndex,
        *,
        hugepages: bool | int = False,
        numa_node: int | None = None,
        populate: bool = True,
    ) -> HostBuffer:
        """Allocate zeroed memory.

        Parameters
        ----------
        nbytes : int
            Any positive number; whole pages are taken.
        hugepages : bool or int
            True: on huge pages of the system's default size; or their size in bytes, a power of 2. They must be
            reserved beforehand.
        numa_node : int, optional
            Take the pages from this node alone. Where the system does not let a process say so, as in many containers,
            a warning is logged and :attr:`numa_node` is None.
        populate : bool
            Take all pages now, so that a lack of memory is an error here. Otherwise pages are taken when they are first
            touched, and a process that finds none is killed. Huge pages of one node must be taken now.

        Raises
        ------
        ConfigError
            If ``nbytes``, the size of the pages or the node is out of range.
        AllocationError
            If there is not so much memory, or not so many huge pages.
        """
        nbytes = check_nbytes(nbytes)
        huge = (_default_hugepage_bytes() if hugepages is True else int(hugepages)) if hugepages else 0
        if huge and (huge & (huge - 1) or huge <= mmap.PAGESIZE):
            raise ConfigError(f"hugepages={hugepages} is no size of a huge page: it must be a power of 2 in bytes")
        if huge and numa_node is not None and not populate:
            raise ConfigError("populate=False: huge pages that are taken later come from any node, not from numa_node")
        page = huge or mmap.PAGESIZE
        total = -(-nbytes // page) * page
        info = BufferInfo("host", nbytes, (total,), page)
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        if huge:
            flags |= _MFD_HUGETLB | (huge.bit_length() - 1) << _HUGE_SHIFT
        with contextlib.ExitStack() as undo:
            op = "memfd_create"
            try:
                fd = os.memfd_create("fabric_kv", flags)
                undo.callback(os.close, fd)
                op = "ftruncate"
                os.ftruncate(fd, total)
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
                op = "mmap"
                mapping = _map(fd, total, huge)
                undo.callback(mapping.close)
                if numa_node is not None:
                    reason = bind(ctypes.addressof(ctypes.c_char.from_buffer(mapping)), total, numa_node)
                    if reason is not None:
                        _log.warning("%d bytes are not bound to NUMA node %d: %s", nbytes, numa_node, reason)
                        numa_node = None
                if populate and huge and numa_node is not None:
                    op = "madvise"
                    numa_node = _populate_bound(mapping, numa_node)
                if populate:
                    op = "fallocate"
                    if not huge:  # these are reserved since they were mapped
                        _check_room(nbytes, total, numa_node)
                    os.posix_fallocate(fd, 0, total)
            except OSError as error:
                raise _failed(op, nbytes, error, huge, numa_node) from None
            buffer = cls(info, mapping, fd=fd, numa_node=numa_node)
            undo.pop_all()
        return buffer

    @classmethod
    def import_(cls, exported: Exported) -> HostBuffer:
        """Map what another process exported. The descriptors stay the caller's, and are not needed any more.

        Raises
        ------
        SharingError
            If the descriptor is not sealed host memory of the announced size: whoever maps less than there should be
            is killed when it touches the rest.
        AllocationError
            If it cannot be mapped.
        ConfigError
            If it is device memory.
        """
        info = exported.info
        if info.kind != "host" or len(exported.fds) != 1 or len(info.handle_bytes) != 1:
            raise ConfigError(f"{exported!r} is no host memory in one piece")
        fd, total = exported.fds[0], info.handle_bytes[0]
        try:
            there = os.fstat(fd).st_size
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError as error:
            raise SharingError(f"a descriptor for host memory is no memfd: {error.strerror}", reason="size") from None
        if there != total or not seals & fcntl.F_SEAL_SHRINK:
            sealed = "sealed" if seals & fcntl.F_SEAL_SHRINK else "not sealed against shrinking"
            raise SharingError(
                f"host memory was announced with {total} bytes and has {there}, {sealed}: it is not mapped",
                reason="size",
            )
        huge = info.page_bytes if info.page_bytes > mmap.PAGESIZE else 0
        try:
            mapping = _map(fd, total, huge)
        except OSError as error:
            raise _failed("mmap", info.nbytes, error) from None
        return cls(info, mapping)

    @property
    def device(self) -> str:
        """``cpu``."""
        return "cpu"

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._mapping.closed

    @property
    def address(self) -> int:
        """Where it is mapped."""
        if self.closed:
            raise ClosedError(f"{self!r} is closed")
        return self._address

    @property
    def view(self) -> memoryview:
        """Its bytes, writable, shape (nbytes,)."""
        if self.closed:
            raise ClosedError(f"{self!r} is closed")
        return memoryview(self._mapping)[: self.nbytes]

    @property
    def array(self) -> NDArray[np.uint8]:
        """Its bytes as an array, shape (nbytes,)."""
        return np.frombuffer(self.view, np.uint8)

    def __buffer__(self, flags: int) -> memoryview:
        return self.view

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        array = self.array
        if (dtype is not None and np.dtype(dtype) != array.dtype) or copy:
            if copy is False:
                raise ValueError(f"{self!r} is of bytes: another type needs a copy; see ndarray.view")
            return array.astype(dtype or array.dtype)
        return array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # kDLCPU

    def _export_handles(self, first: int, most: int) -> list[int]:
        with self._lock:
            self._check_exportable()
            try:
                return [os.dup(self._fd)][first : first + most]
            except OSError as error:
                raise _failed("dup", self.nbytes, error) from None

    def _unmap(self) -> None:
        try:
            self._mapping.close()
        except BufferError:
            raise ConfigError(f"{self!r} is in use by arrays, tensors, views or regions: delete these first") from None
        if self._close_fd is not None:
            self._close_fd()


def _map(fd: int, nbytes: int, hugepage_bytes: int) -> mmap.mmap:
    # Python's mmap keeps a copy of the descriptor (until 3.13 there is no other way), and one for each buffer of an
    # engine's ranks would be a thousand. So it gets anonymous pages, which the file's are laid over. What makes it
    # worth while: it counts who uses the memory and cannot be unmapped under them.
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    if hugepage_bytes:
        flags |= _MAP_HUGETLB | (hugepage_bytes.bit_length() - 1) << _HUGE_SHIFT
    mapping = mmap.mmap(-1, nbytes, flags=flags)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    found = libc.mmap(
        ctypes.c_void_p(address),
        ctypes.c_size_t(nbytes),
        mmap.PROT_READ | mmap.PROT_WRITE,
        mmap.MAP_SHARED | _MAP_FIXED,
        fd,
        ctypes.c_long(0),
    )
    if found != address:
        code = ctypes.get_errno()
        mapping.close()
        raise OSError(code, os.strerror(code))
    return mapping


def _check_room(nbytes: int, total: int, numa_node: int | None) -> None:
    left, whose = room(numa_node)
    if total > left:
        raise AllocationError(
            f"{nbytes} bytes of host memory are not there: {whose} has {left} left, and for more the kernel would kill "
            "a process",
            op="fallocate",
            device="cpu",
            nbytes=nbytes,
            code=errno.ENOMEM,
        )


def _populate_bound(mapping: mmap.mmap, numa_node: int) -> int | None:
    """Take huge pages by the mapping's policy; None if this kernel cannot.

    The files that they are in have none of their own, so that fallocate would take any node's: Linux's
    Documentation/admin-guide/mm/numa_memory_policy.rst, "Shared Policy".
    """
    try:
        mapping.madvise(_MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        _log.warning("huge pages are not bound to NUMA node %d: MADV_POPULATE_WRITE takes Linux 5.14", numa_node)
        return None
    return numa_node
