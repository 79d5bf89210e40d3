"""Writes in flight: each page and row of one lands, vanishes or fails on its own, at the mercy of the seed.

>>> write = Write(engine, transfer, expand(piece), token)
>>> write.start(watch=None, step=0)                 # its copies are in the fabric's pool
>>> write.cancel()                                  # what had been posted by then may land all the same

Whoever calls holds the fabric's lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..errors import ConfigError, TransferCancelledError, TransferError
from ..regions import CounterToken, RemoteRegion
from ..transfers import MemoryRegion, PagePiece, Transfer
from .handles import MemoryWatch, word_of

if TYPE_CHECKING:
    from .engine import MemoryEngine
    from .fabric import Event

__all__ = ["Copy", "Write", "expand"]


class Copy(NamedTuple):
    """One row of one page."""

    src: MemoryRegion
    src_at: int
    dst: RemoteRegion
    dst_at: int
    nbytes: int
    layer: int  # how many must be done before it may go

    def check(self) -> None:
        """Refuse what leaves its regions."""
        src, src_at, dst, dst_at, nbytes, _ = self
        if src_at < 0 or src_at + nbytes > src.nbytes or dst_at < 0 or dst_at + nbytes > dst.nbytes:
            raise ConfigError(f"bytes [{src_at}, +{nbytes}) to [{dst_at}, +{nbytes}) leave their regions")


def expand(piece: PagePiece) -> list[Copy]:
    """Each page and row on its own."""
    pages: Sequence[tuple[int, int]] = list(
        zip(np.asarray(piece.src_pages).tolist(), np.asarray(piece.dst_pages).tolist(), strict=True)
    )
    return [
        Copy(
            piece.src,
            piece.src_offset + src * piece.src_stride + row * piece.src_row_stride,
            piece.dst,
            piece.dst_offset + dst * piece.dst_stride + row * piece.dst_row_stride,
            piece.nbytes,
            piece.layer,
        )
        for src, dst in pages
        for row in range(piece.rows)
    ]


class Write:
    """One submission; it retires once none of its copies is in flight any more.

    Parameters
    ----------
    engine : MemoryEngine
        Whose write it is.
    transfer : Transfer
        What ends with it.
    copies : sequence of Copy
    token : CounterToken, optional
        The receiver's counter.
    """

    def __init__(
        self, engine: MemoryEngine, transfer: Transfer, copies: Sequence[Copy], token: CounterToken | None
    ) -> None:
        self.transfer = transfer
        self.cancelled = False
        self._engine = engine
        self._fabric = engine.fabric
        self._copies = copies
        self._token = token
        self._waiting = set(range(len(copies)))  # copies that have not reached their end
        self._parked: set[int] = set()  # of these: not posted, since their layers are not done
        self._num_dropped = 0
        self._error: TransferError | None = None
        self._num_bytes = 0

    @property
    def is_in_flight(self) -> bool:
        """Whether any of it has been posted and has not reached its end."""
        return bool(self._waiting - self._parked)

    def start(self, watch: MemoryWatch | None = None, step: int = 0) -> None:
        """Put it in flight, but what waits for layers of ``step``."""
        for index, copy in enumerate(self._copies):
            move = partial(self._move, index)
            wanted = word_of(step, copy.layer) if copy.layer else 0
            if watch is not None and watch.word < wanted:
                self._parked.add(index)
                watch.waiting.append((wanted, partial(self._unpark, index, move)))
            else:
                self._fabric.add(move, write=True)
        if not self._copies:
            self._fabric.add(self._retire)

    def cancel(self) -> None:
        """Post nothing more."""
        self.cancelled = True
        if self._parked:
            self._num_dropped += len(self._parked)
            self._drop_parked()
            self._retire_at_end()

    def _move(self, index: int) -> None:
        """One copy reaches its end: it lands, or was never posted, or fails."""
        if self._engine.closed or index not in self._waiting:
            return
        fabric = self._fabric
        src, src_at, dst, dst_at, nbytes, _ = self._copies[index]
        target = fabric.engines.get(dst.epoch)
        stopped = self.cancelled or self._error is not None or self._engine.dead
        if stopped and fabric.coin(0.5):  # Whether it had been posted before the cancel, the error or the death.
            self._num_dropped += 1
        elif target is None or target.closed or target.dead:
            self._fail("the peer is gone", dst)
        elif not target._memory.opens(dst):
            self._fail("the key is good no more", dst)
        elif fabric.fail_writes > 0:
            fabric.fail_writes -= 1
            self._fail("an injected error", dst)
            if fabric.coin(0.5):
                # The sender is told of a failure, yet the bytes are on their way.
                data = self._engine._memory.of(src.remote)[src_at : src_at + nbytes].copy()
                fabric.add(partial(target._land, dst, dst_at, data, self._token))
        else:
            data = self._engine._memory.of(src.remote)[src_at : src_at + nbytes]
            if fabric.early_writes > 0:
                fabric.early_writes -= 1
                fabric._early.append(partial(target._land, dst, dst_at, data.copy(), self._token))
            else:
                target._land(dst, dst_at, data, self._token)
            self._num_bytes += nbytes
        self._waiting.discard(index)
        if self._error is not None:
            self._drop_parked()
        self._retire_at_end()

    def _fail(self, why: str, dst: RemoteRegion) -> None:
        self._error = self._error or TransferError(why, peer=dst.epoch.hex())

    def _unpark(self, index: int, move: Event) -> None:
        if index in self._parked:
            self._parked.discard(index)
            self._fabric.add(move, write=True)

    def _drop_parked(self) -> None:
        """What waits for a layer is not posted after a cancel or an error."""
        self._waiting -= self._parked
        self._parked.clear()

    def _retire_at_end(self) -> None:
        if not self._waiting:
            self._fabric.add(self._retire)

    def _retire(self) -> None:
        error = self._error
        if error is None and self._num_dropped:
            error = TransferCancelledError("cancelled", bytes_done=self._num_bytes)
        self._engine._end(self.transfer, error)
