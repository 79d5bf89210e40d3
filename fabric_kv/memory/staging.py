"""Device memory for NICs that cannot reach it: copies of it in host memory, and what they cost.

>>> region = engine.register(tensor, staging="host")
>>> engine.write_pages(peer, region, ...)         # copies the pages to the host first
>>> counter.result(5); region.unstage(0, 65536)   # copies what has arrived there to the device
>>> engine.describe()["staging"]                  # {'regions': 1, 'copies': 9, 'bytes': 589824, 'seconds': 0.002}

What arrives and what is sent lie apart: a page that has arrived stays until it is unstaged, whatever is sent meanwhile.
Copies are made on the calling thread, by the driver's default stream: whoever has computed the pages on another stream
waits for that first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from .driver import load_driver
from .host import HostBuffer
from .ranges import device_of

if TYPE_CHECKING:
    from ..engine import Engine
    from ..transfers import MemoryRegion, PagePiece

__all__ = ["Staging", "StagingFigures", "stage_pieces"]


class StagingFigures:
    """What staging has cost an engine. Its methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._figures: dict[str, float] = {"regions": 0, "copies": 0, "bytes": 0, "seconds": 0.0}

    def add(self, **more: float) -> None:
        """Count what was done."""
        with self._lock:
            for name, value in more.items():
                self._figures[name] += value

    def describe(self) -> dict[str, float]:
        """Regions that were staged, copies either way, their bytes and the time that callers spent in them."""
        with self._lock:
            return dict(self._figures)


class Staging:
    """The host's copies of a range of device memory.

    Attributes
    ----------
    device : int
        The CUDA device that the range is on.
    arrivals : HostBuffer
        What peers reach: the device's bytes at the time of registration, and what has been written since.

    Raises
    ------
    RegistrationError
        If the address is no device memory of this process.
    DeviceError, AllocationError
        If CUDA cannot be used, or the host has no room.
    """

    def __init__(self, address: int, nbytes: int, owner: object, figures: StagingFigures) -> None:
        self._driver = load_driver()
        self.device = device_of(self._driver, address)
        self._address = address
        self._owner = owner
        self._figures = figures
        self._nbytes = nbytes
        self._lock = threading.Lock()
        self._outgoing: tuple[HostBuffer, MemoryRegion] | None = None  # guarded by _lock; made by the first send
        self.arrivals = HostBuffer.allocate(nbytes)
        self._copy(self.arrivals, [(0, nbytes)], to_host=True)
        figures.add(regions=1)

    def to_host(self, engine: Engine, group: int, ranges: Sequence[tuple[int, int]]) -> MemoryRegion:
        """Copy (offset, nbytes) ranges from the device, and return the region that they can be sent from."""
        with self._lock:
            if self._outgoing is None or self._outgoing[1].closed:
                buffer = HostBuffer.allocate(self._nbytes)
                self._outgoing = buffer, buffer.region(engine, group=group)
            buffer, region = self._outgoing
        self._copy(buffer, ranges, to_host=True)
        return region

    def to_device(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Copy (offset, nbytes) ranges of what has arrived to the device."""
        self._copy(self.arrivals, ranges, to_host=False)

    def close(self) -> None:
        """Give up what is sent from; the next send would make it again.

        Raises
        ------
        ConfigError
            If a transfer still reads it.
        """
        with self._lock:
            if self._outgoing is not None:
                self._outgoing[1].close()
                self._outgoing = None

    def _copy(self, buffer: HostBuffer, ranges: Sequence[tuple[int, int]], *, to_host: bool) -> None:
        begun = time.perf_counter()
        host, device = buffer.address, self._address
        with self._driver.current(self.device):
            for at, nbytes in ranges:
                if to_host:
                    self._driver.call("cuMemcpyDtoH", host + at, device + at, nbytes, device=self.device, nbytes=nbytes)
                else:
                    self._driver.call("cuMemcpyHtoD", device + at, host + at, nbytes, device=self.device, nbytes=nbytes)
            if not to_host:
                # From pageable memory a copy returns when the bytes have been taken, not when they are there.
                self._driver.call("cuCtxSynchronize", device=self.device)
        total = sum(nbytes for _, nbytes in ranges)
        self._figures.add(copies=len(ranges), bytes=total, seconds=time.perf_counter() - begun)


def stage_pieces(pieces: list[PagePiece], *, waits: bool) -> list[PagePiece]:
    """Copy what these pieces read to the host, where their regions are staged.

    Returns
    -------
    list of PagePiece
        The same that read these copies instead; the list itself if no region is staged.

    Raises
    ------
    ConfigError
        If they wait for a watch: what they read is not computed yet.
    """
    if all(piece.src._staging is None for piece in pieces):
        return pieces
    staged = []
    for piece in pieces:
        staging = piece.src._staging
        if staging is None:
            staged.append(piece)
            continue
        if waits and piece.layer > 0:
            raise ConfigError(
                f"{piece.src!r} is staged in host memory, and cannot wait for a watch: submit when the layer is done"
            )
        ranges = _ranges(piece)
        # What leaves the region is refused by the core, with the page that does.
        if not all(at >= 0 and at + nbytes <= piece.src.nbytes for at, nbytes in ranges):
            ranges = []
        staged.append(piece._replace(src=staging.to_host(piece.src._engine, piece.src.remote.group, ranges)))
    return staged


def _ranges(piece: PagePiece) -> list[tuple[int, int]]:
    """What a piece reads, in order and without overlaps."""
    pages: Any = getattr(piece.src_pages, "array", piece.src_pages)
    index: NDArray[np.int64] = np.unique(np.asarray(pages, np.int64))
    rows = np.arange(piece.rows, dtype=np.int64) * piece.src_row_stride
    starts = np.unique(piece.src_offset + index[:, None] * piece.src_stride + rows[None, :])
    merged: list[tuple[int, int]] = []
    for start in starts.tolist():
        if merged and start <= sum(merged[-1]):
            merged[-1] = merged[-1][0], max(sum(merged[-1]), start + piece.nbytes) - merged[-1][0]
        elif piece.nbytes:
            merged.append((start, piece.nbytes))
    return merged
