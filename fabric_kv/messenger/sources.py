"""Whether source pages keep what the model wrote until they are sent; for debugging, since it reads all of it.

>>> check = SourceCheck(regions)               # PrefillMessenger(..., check_sources=True)
>>> check.open(step, submissions)
>>> check.layer_done(step, layer=0)            # remembers checksums of what is written for the layer
>>> check.changed(submission)                  # at its end: None, or the first page that holds something else

A scheduler that reuses a page before ``on_released`` sends another request's cache, and nothing else would notice.
"""

from __future__ import annotations

import ctypes
import threading
import zlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..buffers import locate
from ..errors import ConfigError

if TYPE_CHECKING:
    from ..prepared import PreparedPiece
    from ..transfers import MemoryRegion
    from .posting import Submission

__all__ = ["SourceCheck", "SourcesChangedError"]

# Steps whose layers may still be reported; older ones were given up.
MAX_STEPS = 256


class SourcesChangedError(Exception):
    """A page was changed between the end of its layer and the end of its writes. For the poster, which reports it."""


class SourceCheck:
    """Checksums of what is on its way. Threads: any.

    Parameters
    ----------
    regions : sequence of sequence of MemoryRegion
        Of each rank; their memory must be readable by this process, byte by byte.

    Raises
    ------
    ConfigError
        If it is not.
    """

    def __init__(self, regions: Sequence[Sequence[MemoryRegion]]) -> None:
        self._bytes = {region: _bytes_of(region) for rank in regions for region in rank}
        self._lock = threading.Lock()  # Guards the next one.
        self._steps: dict[int, list[Submission]] = {}  # what waits for layers

    def open(self, step: int, submissions: Iterable[Submission]) -> None:
        """Before anything of a step is posted: what waits for no layer is complete."""
        waiting = []
        for submission in submissions:
            if submission.layers:
                waiting.append(submission)
            else:
                self._note(submission, None)
        with self._lock:
            self._steps[step] = waiting
            if len(self._steps) > MAX_STEPS:
                del self._steps[next(iter(self._steps))]

    def layer_done(self, step: int, layer: int) -> None:
        """Before a layer's writes are let go."""
        with self._lock:
            submissions = [each for each in self._steps.get(step, ()) if layer in each.layers]
        for submission in submissions:
            if submission.outflow.may_post:
                self._note(submission, layer)

    def changed(self, submission: Submission) -> str | None:
        """Where the sources differ from what they were, now that all is written."""
        for index, before in submission.sums.items():
            piece = submission.writes.pieces[index]
            pages = submission.lists[piece.lists][0].tolist()
            for page, was, now in zip(pages, before, self._sums_of(submission, piece), strict=True):
                if was != now:
                    return f"source page {page} was changed in layer {piece.layer - 1} before it had been sent"
        return None

    def _note(self, submission: Submission, layer: int | None) -> None:
        for index, piece in enumerate(submission.writes.pieces):
            # A layer that is reported again has been let go before.
            if (layer is None or piece.layer == layer + 1) and index not in submission.sums:
                submission.sums[index] = self._sums_of(submission, piece)

    def _sums_of(self, submission: Submission, piece: PreparedPiece) -> list[int]:
        memory, sums = self._bytes[piece.src], []
        for page in submission.lists[piece.lists][0].tolist():
            total = 0
            for row in range(piece.rows):
                begin = piece.src_offset + page * piece.src_stride + row * piece.src_row_stride
                total = zlib.crc32(memory[begin : begin + piece.nbytes], total)
            sums.append(total)
        return sums


def _bytes_of(region: MemoryRegion) -> NDArray[np.uint8]:
    owner = region._owner
    if isinstance(owner, tuple):  # what holds the memory, and what was registered: see buffers.py
        owner = owner[1]
    try:
        found = locate(owner)
    except ConfigError as error:
        raise ConfigError(f"check_sources cannot read {region!r}: {error}") from None
    if found.device != "cpu" or found.nbytes != region.nbytes:
        raise ConfigError(f"check_sources cannot read {region!r} on {found.device}: it needs memory of the host")
    # The region keeps the memory alive, and the check its regions.
    return np.ctypeslib.as_array((ctypes.c_uint8 * found.nbytes).from_address(found.address))
