"""What buffers of every kind have in common: a size, an owner, regions, and one end.

>>> with buffer.export() as exported:        # its descriptors go through a unix socket, see server.py
...     twin = HostBuffer.import_(exported)  # or DeviceBuffer

The memory lives as long as any process has it mapped, whoever allocated it.
"""

from __future__ import annotations

import contextlib
import operator
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Literal, Self, SupportsIndex

import msgspec
from msgspec import Meta

from ..errors import ClosedError, ConfigError

if TYPE_CHECKING:
    from ..engine import Engine
    from ..transfers import MemoryRegion

__all__ = ["MAX_HANDLES", "BufferInfo", "Exported", "SharedBuffer", "check_nbytes"]

# Descriptors travel by the frame; so many sizes of handles still fit into one.
MAX_HANDLES = 8192
_Size = Annotated[int, Meta(ge=1, le=2**62)]


class BufferInfo(msgspec.Struct, frozen=True, array_like=True):
    """What another process must know of a buffer beside its descriptors.

    Attributes
    ----------
    kind : {"host", "device"}
    nbytes : int
        As it was asked for.
    handle_bytes : tuple of int
        What each descriptor stands for, in bytes and in the order of the addresses: whole pages, at least ``nbytes`` in
        sum.
    page_bytes : int
        Size of the pages: of a huge one where the memory consists of such, of CUDA's granularity on a device.
    device : str
        ``cpu``, or a CUDA device's UUID in hexadecimal digits: its number differs between processes.
    """

    kind: Literal["host", "device"]
    nbytes: _Size
    handle_bytes: Annotated[tuple[_Size, ...], Meta(min_length=1, max_length=MAX_HANDLES)]
    page_bytes: _Size
    device: Annotated[str, Meta(max_length=64)] = "cpu"

    def __post_init__(self) -> None:
        total = sum(self.handle_bytes)
        if not self.nbytes <= total < 2**63:
            raise ConfigError(f"nbytes={self.nbytes} do not fit into handles of {total} bytes")
        if any(size % self.page_bytes for size in self.handle_bytes):
            raise ConfigError(f"handles of {self.handle_bytes[:8]} bytes are not whole pages of {self.page_bytes}")


def check_nbytes(nbytes: SupportsIndex, name: str = "nbytes") -> int:
    """A size that a user gave, NumPy's integers among them.

    Raises
    ------
    ConfigError
        If it is none.
    """
    try:
        size = operator.index(nbytes)
    except TypeError:
        size = 0
    if not 0 < size <= 2**62:
        raise ConfigError(f"{name}={nbytes!r} must be an integer in [1, 2^62]")
    return size


class Exported:
    """Descriptors of a buffer, for another process. A context manager that closes them.

    Attributes
    ----------
    info : BufferInfo
    fds : list of int
        One for each of ``info.handle_bytes``; ours to close.
    """

    def __init__(self, info: BufferInfo, fds: Sequence[int]) -> None:
        self.info = info
        self.fds = list(fds)

    def close(self) -> None:
        """Close what is left of the descriptors. Calling it twice is fine."""
        while self.fds:
            os.close(self.fds.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Exported({self.info.kind}, {self.info.nbytes} bytes, {len(self.fds)} descriptors)"


class SharedBuffer(ABC):
    """Memory of this process or, imported, of another one. A context manager that closes.

    Every method may be called from any thread.
    """

    def __init__(self, info: BufferInfo, *, imported: bool) -> None:
        self._info = info
        self._imported = imported
        self._regions: weakref.WeakSet[MemoryRegion] = weakref.WeakSet()
        self._lost: Exception | None = None
        self._lease: object = None  # of an imported one: what keeps its owner watched
        self._num_registering = 0
        self._lock = threading.Lock()

    # -- facts -----------------------------------------------------------------------------------------------------

    @property
    def info(self) -> BufferInfo:
        """Size and pages, as another process is told."""
        return self._info

    @property
    def nbytes(self) -> int:
        """Length in bytes, as it was asked for."""
        return self._info.nbytes

    @property
    def imported(self) -> bool:
        """Whether another process has allocated it."""
        return self._imported

    @property
    def lost(self) -> Exception | None:
        """Why it is not to be used any more: its owner, another process, is gone or has withdrawn it. None: it is."""
        return self._lost

    @property
    @abstractmethod
    def device(self) -> str:
        """``cpu``, or ``cuda:N`` as this process counts devices."""

    @property
    @abstractmethod
    def address(self) -> int:
        """Where it is mapped; ClosedError once it is not."""

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""

    # -- use -------------------------------------------------------------------------------------------------------

    def region(self, engine: Engine, *, group: int = 0, staging: Literal["host"] | None = None) -> MemoryRegion:
        """Register it with the NICs of an engine's device group; see :meth:`fabric_kv.Engine.register`.

        Raises
        ------
        SharingError
            If its owner is gone or has withdrawn it. A region from before then says so in
            :attr:`~fabric_kv.MemoryRegion.lost`, and no submission from it is taken any more.
        ClosedError
            If the buffer or the engine is closed.
        RegistrationError, DeviceError
            As :meth:`fabric_kv.Engine.register`.
        """
        return engine.register(self, group=group, staging=staging)

    def export(self) -> Exported:
        """Descriptors for another process's ``import_``; the caller closes them.

        Raises
        ------
        ConfigError
            If the buffer is imported itself: only its owner can tell when it ends.
        ClosedError
            If it is closed.
        AllocationError
            If there are no more descriptors.
        """
        return Exported(self._info, self._export_handles(0, MAX_HANDLES))

    @abstractmethod
    def _export_handles(self, first: int, most: int) -> list[int]:
        """New descriptors of up to ``most`` handles from ``first`` on; as :meth:`export`."""

    # -- end -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Unmap it. Other processes that have it mapped keep the memory. Calling it twice is fine.

        Raises
        ------
        ConfigError
            If regions, arrays, tensors or views of it are still there. Nothing has changed then.
        """
        with self._lock:
            regions = list(self._regions)
        for region in regions:
            region._forget_if_engine_closed()
        with self._lock:
            if self.closed:
                return
            if self._num_registering:
                raise ConfigError(f"{self!r} is being registered")
            if open_regions := [region for region in self._regions if not region.closed]:
                raise ConfigError(
                    f"{self!r} is registered by {len(open_regions)} region(s): close these, or their engine, first"
                )
            self._unmap()
            lease, self._lease = self._lease, None
        del lease  # its end may wait for a thread that takes our lock

    @abstractmethod
    def _unmap(self) -> None: ...

    @contextlib.contextmanager
    def _registering(self) -> Iterator[Callable[[MemoryRegion], None]]:
        """Keeps it from being closed meanwhile; what is yielded takes the region that came of it."""
        with self._lock:
            self._check()
            self._num_registering += 1

        def adopt(region: MemoryRegion) -> None:
            with self._lock:
                self._regions.add(region)
                region._lost = self._lost

        try:
            yield adopt
        finally:
            with self._lock:
                self._num_registering -= 1

    def _mark_lost(self, error: Exception) -> None:
        """Say once and for all why it must not be used, also to its regions."""
        with self._lock:
            if self._lost is None:
                self._lost = error
                for region in self._regions:
                    region._lost = error

    def _check(self) -> None:
        if self._lost is not None:
            raise copy(self._lost)
        if self.closed:
            raise ClosedError(f"{self!r} is closed")

    def _check_exportable(self) -> None:
        self._check()
        if self._imported:
            raise ConfigError(f"{self!r} is another process's: only its owner exports it")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        # The frames of what was raised hold arrays and regions: then it is closed when these go.
        with contextlib.suppress(ConfigError):
            self.close()

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ", lost" if self._lost is not None else ""
        return f"{type(self).__name__}({self.nbytes} bytes{', imported' if self._imported else ''}{state})"
