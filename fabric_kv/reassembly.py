"""Puts messages together from the frames that they were sent in, in any order, within fixed memory.

>>> reassembly = Reassembly(max_message_bytes=1 << 20, max_total_bytes=1 << 26)
>>> reassembly.add(sender, message_id, total=5, offset=3, payload=b"lo")     # None: not whole yet
>>> reassembly.add(sender, message_id, total=5, offset=0, payload=b"hel")    # b"hello"

Frames come from peers: a total is believed only as far as bytes have arrived, and what does not add up is dropped.
"""

from __future__ import annotations

__all__ = ["Reassembly"]


class Reassembly:
    """Half-received messages, keyed by (sender, message id)."""

    def __init__(self, max_message_bytes: int, max_total_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes
        self._max_total_bytes = max_total_bytes
        self._partial: dict[tuple[bytes, int], tuple[int, dict[int, bytes]]] = {}
        self._num_bytes = 0
        self.num_dropped = 0

    def add(self, sender: bytes, message_id: int, total: int, offset: int, payload: bytes) -> bytes | None:
        """Take one frame; return the message when it is whole."""
        if total > self._max_message_bytes:
            self.num_dropped += 1
            return None
        if len(payload) == total:
            return payload
        key = (sender, message_id)
        known_total, frames = self._partial.setdefault(key, (total, {}))
        if known_total != total or offset in frames or not payload:
            self._drop(key)
            return None
        frames[offset] = payload
        self._num_bytes += len(payload)
        if sum(map(len, frames.values())) < total:
            while self._num_bytes > self._max_total_bytes:
                self._drop(next(iter(self._partial)))  # the oldest: whoever left it unfinished
            return None
        del self._partial[key]
        self._num_bytes -= sum(map(len, frames.values()))
        message = b"".join(frames[start] for start in sorted(frames))
        starts_fit = all(start == end for start, end in zip(sorted(frames), _ends(frames), strict=True))
        if len(message) != total or not starts_fit:
            self.num_dropped += 1
            return None
        return message

    def forget(self, sender: bytes) -> None:
        """Drop what a peer has left unfinished."""
        for key in [key for key in self._partial if key[0] == sender]:
            self._drop(key)

    def _drop(self, key: tuple[bytes, int]) -> None:
        _, frames = self._partial.pop(key)
        self._num_bytes -= sum(map(len, frames.values()))
        self.num_dropped += 1


def _ends(frames: dict[int, bytes]) -> list[int]:
    """Where each frame should start: at the end of the one before."""
    ends, at = [], 0
    for start in sorted(frames):
        ends.append(at)
        at += len(frames[start])
    return ends
