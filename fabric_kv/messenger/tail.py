"""Tails: one small typed array per request that travels beside its pages, such as the last token's hidden state.

>>> tails = TailPool(engine, "float32", (576,), num_slots=64)        # the same dtype and shape on both sides
>>> prefill.finish(request.key, hidden_state)
>>> decode.submit(peer, request).result().tail.shape
(576,)

A slot starts with a header that names the request, so that a stale or misdirected tail is noticed.
"""

from __future__ import annotations

import hashlib
import math
import struct
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from ..errors import ConfigError, ProtocolError, WouldBlockError
from .wire import TailGeometry

if TYPE_CHECKING:
    from ..engine import Engine
    from ..regions import RemoteRegion

__all__ = ["TailPool"]

# magic, payload bytes, generation, digest of the request id, epoch of the prefill engine that writes it
_HEADER = struct.Struct("<4sIQ8s16s")
_MAGIC = b"FKVT"
HEADER_BYTES = 64  # A cache line, so that the payload behind it is aligned.
MAX_TAIL_BYTES = 1 << 30


class TailPool:
    """Registered slots for tails; each side owns one.

    Parameters
    ----------
    engine : Engine
        Registers the pool's memory.
    dtype, shape
        What one tail is; a NumPy dtype without Python objects. Compared at handshake.
    num_slots : int
        Tails at a time. Decode: requests in flight; one more makes ``submit`` raise WouldBlockError. Prefill: tails
        being written; one more waits.
    group : int
        Device group that moves the tails; on the decode side that of rank 0.

    Notes
    -----
    Threads: any. A decode slot whose request ended with ``pages_clean`` False is set aside like its pages.
    """

    def __init__(
        self, engine: Engine, dtype: DTypeLike, shape: tuple[int, ...] = (), *, num_slots: int = 64, group: int = 0
    ) -> None:
        self.dtype = np.dtype(dtype)
        self.shape = tuple(int(n) for n in shape)
        if self.dtype.hasobject or self.dtype.itemsize == 0 or self.dtype.names is not None:
            raise ConfigError(f"dtype={self.dtype} cannot travel: a tail needs a plain fixed-size dtype")
        if not 1 <= num_slots < 1 << 31:
            raise ConfigError(f"num_slots={num_slots} is out of range: it must lie in [1, 2**31)")
        self.payload_bytes = math.prod(self.shape) * self.dtype.itemsize
        if min(self.shape, default=1) < 0 or len(self.shape) > 8 or not 1 <= self.payload_bytes <= MAX_TAIL_BYTES:
            raise ConfigError(
                f"shape={self.shape} of {self.dtype} is {self.payload_bytes} bytes: a tail has 1 to {MAX_TAIL_BYTES}"
                " bytes and at most 8 axes"
            )
        self.num_slots = num_slots
        self.write_bytes = HEADER_BYTES + self.payload_bytes
        self.slot_bytes = -(-self.write_bytes // HEADER_BYTES) * HEADER_BYTES
        self._bytes = np.zeros((num_slots, self.slot_bytes), np.uint8)
        self.region = engine.register(self._bytes, group=group)
        self._lock = threading.Lock()  # Guards the two below.
        self._free = deque(range(num_slots))  # Oldest first: a slot rests as long as possible before its next use.
        self._num_poisoned = 0

    @property
    def num_free(self) -> int:
        """Slots that ``acquire`` can give out."""
        return len(self._free)

    @property
    def num_poisoned(self) -> int:
        """Slots that are set aside."""
        return self._num_poisoned

    def geometry(self, remote: RemoteRegion) -> TailGeometry:
        """What a prefill engine must know to write here, into ``region`` by the keys of ``remote``."""
        return TailGeometry(remote.to_bytes(), self.num_slots, self.slot_bytes, self.dtype.str, list(self.shape))

    def acquire(self) -> int:
        """A free slot, its header cleared before anyone is told of it."""
        with self._lock:
            if not self._free:
                raise WouldBlockError(f"all {self.num_slots} tail slots are in use", limit=self.num_slots)
            slot = self._free.popleft()
        self._bytes[slot, :HEADER_BYTES] = 0
        return slot

    def release(self, slot: int, *, clean: bool = True) -> None:
        """Give a slot back; ``clean=False``: something may still land in it, so it is set aside."""
        with self._lock:
            if clean:
                self._free.append(slot)
            else:
                self._num_poisoned += 1

    def reclaim(self, slot: int) -> None:
        """Use a slot again that was set aside: nothing can land in it any more."""
        with self._lock:
            self._num_poisoned -= 1
            self._free.append(slot)

    def to_payload(self, tail: ArrayLike) -> NDArray[np.uint8]:
        """A copy of the tail's bytes, after a check of dtype and shape."""
        array = np.asarray(tail)
        if array.dtype != self.dtype or array.shape != self.shape:
            raise ConfigError(
                f"the tail is {array.dtype} of shape {array.shape}: the pool holds {self.dtype} of shape {self.shape}"
            )
        return np.frombuffer(array.tobytes(), np.uint8)

    def fill(self, slot: int, header: bytes, payload: NDArray[np.uint8]) -> None:
        """Prefill: write header and payload into a slot of this side."""
        row = self._bytes[slot]
        row[:HEADER_BYTES] = np.frombuffer(header, np.uint8)
        row[HEADER_BYTES : self.write_bytes] = payload

    def take(self, slot: int, header: bytes) -> NDArray[Any]:
        """Decode: a copy of the tail in a slot.

        Raises
        ------
        ProtocolError
            If the slot holds anything but the tail of the request that ``header`` names.
        """
        row = self._bytes[slot]
        found = row[:HEADER_BYTES].tobytes()
        if found != header:
            magic, nbytes, generation, _, epoch = _HEADER.unpack(found[: _HEADER.size])
            raise ProtocolError(
                f"tail slot {slot} holds magic {magic!r}, {nbytes} bytes, generation {generation} from {epoch.hex()}:"
                f" that is not this request's tail of {self.payload_bytes} bytes"
            )
        tail: NDArray[Any] = row[HEADER_BYTES : self.write_bytes].copy().view(self.dtype)
        return tail.reshape(self.shape)

    def header(self, request_id: str, generation: int, prefill_epoch: bytes) -> bytes:
        """The 64 bytes that must stand before the tail of one request."""
        digest = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
        return _HEADER.pack(_MAGIC, self.payload_bytes, generation, digest, prefill_epoch).ljust(HEADER_BYTES, b"\0")
