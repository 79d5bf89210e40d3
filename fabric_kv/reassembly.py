"""Puts messages together from the frames that they were sent in, in any order, within fixed memory.

>>> reassembly = Reassembly(max_message_bytes=1 << 20, max_total_bytes=1 << 26)
>>> reassembly.add(sender, message_id, total=5, offset=3, payload=b"lo")     # None: not whole yet
>>> reassembly.add(sender, message_id, total=5, offset=0, payload=b"hel")    # b"hello"

Frames come from peers: a total is believed only as far as bytes have arrived, and what does not add up is dropped.
"""

from __future__ import annotations

__all__ = ["MESSAGE_OVERHEAD_BYTES", "Reassembly"]

# What keeping a message or a frame costs beside its bytes: objects, keys, table entries. Counted, so that many tiny
# ones are bounded like few large ones.
MESSAGE_OVERHEAD_BYTES = 256


class _Partial:
    """One message of which frames are missing."""

    __slots__ = ("frames", "num_bytes", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self.num_bytes = 0
        self.frames: dict[int, bytes] = {}

    @property
    def cost(self) -> int:
        return self.num_bytes + MESSAGE_OVERHEAD_BYTES * len(self.frames)

    def join(self) -> bytes | None:
        """The message, if its frames lie end to end."""
        end, parts = 0, []
        for start, frame in sorted(self.frames.items()):
            if start != end:
                return None
            end += len(frame)
            parts.append(frame)
        return b"".join(parts)


class Reassembly:
    """Half-received messages, keyed by (sender, message id)."""

    def __init__(self, max_message_bytes: int, max_total_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes
        # The part on top is what full frames cost, so that one message of max_total_bytes always fits.
        self._max_cost = max_total_bytes + max_total_bytes // 32
        self._partial: dict[tuple[bytes, int], _Partial] = {}  # oldest first
        self._cost = 0
        self.num_dropped = 0

    def add(self, sender: bytes, message_id: int, total: int, offset: int, payload: bytes) -> bytes | None:
        """Take one frame; return the message when it is whole."""
        if total > self._max_message_bytes:
            self.num_dropped += 1
            return None
        if len(payload) == total:
            return payload
        key = (sender, message_id)
        partial = self._partial.setdefault(key, _Partial(total))
        if partial.total != total or offset in partial.frames or not payload:
            self._drop(key)
            return None
        partial.frames[offset] = payload
        partial.num_bytes += len(payload)
        self._cost += len(payload) + MESSAGE_OVERHEAD_BYTES
        if partial.num_bytes < total:
            while self._cost > self._max_cost:
                self._drop(next(iter(self._partial)))  # the oldest: whoever left it unfinished
            return None
        del self._partial[key]
        self._cost -= partial.cost
        message = partial.join() if partial.num_bytes == total else None
        if message is None:
            self.num_dropped += 1
        return message

    def forget(self, sender: bytes) -> None:
        """Drop what a peer has left unfinished."""
        for key in [key for key in self._partial if key[0] == sender]:
            self._drop(key)

    def _drop(self, key: tuple[bytes, int]) -> None:
        self._cost -= self._partial.pop(key).cost
        self.num_dropped += 1
