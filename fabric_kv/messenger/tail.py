"""Tails: small typed arrays of a request that travel beside its pages: hidden state, logits, state of a draft model.

>>> tails = TailPool(engine, {"hidden": ("float32", (576,)), "sampler": ("int64", (4,))})   # the same on both sides
>>> prefill.finish(request.key, {"hidden": hidden_state, "sampler": sampler_state})
>>> decode.submit(peer, request).result().tail["hidden"].shape
(576,)

All arrays of a request travel in one write. A slot starts with a header that names the request, so that a stale or
misdirected tail is noticed.
"""

from __future__ import annotations

import hashlib
import math
import struct
import threading
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from ..errors import ConfigError, ProtocolError, WouldBlockError
from .wire import MAX_TAIL_FIELDS, TailField, TailGeometry

if TYPE_CHECKING:
    from ..engine import Engine
    from ..regions import RemoteRegion

__all__ = ["TailPool"]

# magic, bytes in all, generation, digest of the request id, epoch of the prefill engine that writes it
_HEADER = struct.Struct("<4sIQ8s16s")
_MAGIC = b"FKVT"
HEADER_BYTES = 64  # A cache line, so that the payload behind it is aligned.
MAX_TAIL_BYTES = 1 << 30
MAX_NAME_CHARS = 64


class _Place(NamedTuple):
    """Where in a slot one array lies."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int
    end: int


class TailPool:
    """Registered slots for tails; each side owns one.

    Parameters
    ----------
    engine : Engine
        Registers the pool's memory.
    fields : mapping of str to (dtype, shape)
        What one tail consists of, by name; NumPy dtypes without Python objects. Compared at handshake, in any order.
    num_slots : int
        Tails at a time. Decode: requests in flight; one more makes ``submit`` raise WouldBlockError. Prefill: tails
        being written; one more waits.
    group : int
        Device group that moves the tails.

    Notes
    -----
    Threads: any. A decode slot whose request ended with ``pages_clean`` False is set aside like its pages.
    """

    def __init__(
        self,
        engine: Engine,
        fields: Mapping[str, tuple[DTypeLike, tuple[int, ...]]],
        *,
        num_slots: int = 64,
        group: int = 0,
    ) -> None:
        if not 1 <= len(fields) <= MAX_TAIL_FIELDS:
            raise ConfigError(f"{len(fields)} fields were given: a tail has 1 to {MAX_TAIL_FIELDS}")
        if not 1 <= num_slots < 1 << 31:
            raise ConfigError(f"num_slots={num_slots} is out of range: it must lie in [1, 2**31)")
        self._places: dict[str, _Place] = {}
        end = HEADER_BYTES
        for name in sorted(fields):
            dtype, shape = fields[name]
            begin = _round_up(end)
            self._places[name] = _make_place(name, np.dtype(dtype), tuple(int(n) for n in shape), begin)
            end = self._places[name].end
        if end > MAX_TAIL_BYTES:
            raise ConfigError(f"a tail has {end} bytes: the limit is {MAX_TAIL_BYTES}")
        self.num_slots = num_slots
        self.write_bytes = end
        self.slot_bytes = _round_up(end)
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

    @property
    def fields(self) -> list[TailField]:
        """What a tail consists of, in the order of names."""
        return [TailField(name, place.dtype.str, list(place.shape)) for name, place in self._places.items()]

    def geometry(self, remote: RemoteRegion) -> TailGeometry:
        """What a prefill engine must know to write here, into ``region`` by the keys of ``remote``."""
        return TailGeometry(remote.to_bytes(), self.num_slots, self.slot_bytes, self.fields)

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

    def to_payload(self, tail: Mapping[str, ArrayLike]) -> NDArray[np.uint8]:
        """A copy of the tail's bytes, after a check of names, dtypes and shapes."""
        if not isinstance(tail, Mapping):
            raise ConfigError(f"a tail is a mapping of names to arrays, not {type(tail).__name__}")
        if tail.keys() != self._places.keys():
            raise ConfigError(f"the tail has fields {sorted(tail)}: the pool holds {sorted(self._places)}")
        payload = np.zeros(self.write_bytes - HEADER_BYTES, np.uint8)
        for name, (dtype, shape, begin, end) in self._places.items():
            array = np.asarray(tail[name])
            if array.dtype != dtype or array.shape != shape:
                raise ConfigError(
                    f"tail {name!r} is {array.dtype} of shape {array.shape}: the pool holds {dtype} of shape {shape}"
                )
            payload[begin - HEADER_BYTES : end - HEADER_BYTES] = np.frombuffer(array.tobytes(), np.uint8)
        return payload

    def fill(self, slot: int, header: bytes, payload: NDArray[np.uint8]) -> None:
        """Prefill: write header and payload into a slot of this side."""
        row = self._bytes[slot]
        row[:HEADER_BYTES] = np.frombuffer(header, np.uint8)
        row[HEADER_BYTES : self.write_bytes] = payload

    def take(self, slot: int, header: bytes) -> dict[str, NDArray[Any]]:
        """Decode: a copy of the tail in a slot, by name.

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
                f" that is not this request's tail of {self.write_bytes} bytes"
            )
        return {
            name: row[place.begin : place.end].copy().view(place.dtype).reshape(place.shape)
            for name, place in self._places.items()
        }

    def header(self, request_id: str, generation: int, prefill_epoch: bytes) -> bytes:
        """The 64 bytes that must stand before the tail of one request."""
        digest = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
        return _HEADER.pack(_MAGIC, self.write_bytes, generation, digest, prefill_epoch).ljust(HEADER_BYTES, b"\0")


def _round_up(nbytes: int) -> int:
    return -(-nbytes // HEADER_BYTES) * HEADER_BYTES


def _make_place(name: str, dtype: np.dtype[Any], shape: tuple[int, ...], begin: int) -> _Place:
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME_CHARS or not name.isprintable():
        raise ConfigError(f"tail {name!r}: a name is a printable string of 1 to {MAX_NAME_CHARS} characters")
    if dtype.hasobject or dtype.itemsize == 0 or dtype.kind == "V":
        raise ConfigError(
            f"tail {name!r}: {dtype} cannot travel: it needs a dtype of NumPy's own, of fixed size. Hint: view bfloat16"
            " as uint16, float8 as uint8"
        )
    nbytes = math.prod(shape) * dtype.itemsize
    if min(shape, default=1) < 0 or len(shape) > 8 or not 1 <= nbytes <= MAX_TAIL_BYTES:
        raise ConfigError(
            f"tail {name!r}: shape {shape} of {dtype} is {nbytes} bytes: it must have 1 to {MAX_TAIL_BYTES} bytes and"
            " at most 8 axes"
        )
    return _Place(dtype, shape, begin, begin + nbytes)
