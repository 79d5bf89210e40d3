"""The memory that one engine has registered, by the keys that its peers know it by.

>>> memory = Memory(epoch)
>>> remote = memory.register(array, group=0)
>>> memory.of(memory.share(remote, their_epoch))    # the same bytes, by a key of the peer's own
>>> memory.take_back(their_epoch)                   # which is good no more
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..regions import RemoteRegion

__all__ = ["Memory"]


class Memory:
    """One engine's keys. A key is the index of what it opens; addresses are offsets, from 0 on."""

    def __init__(self, epoch: bytes) -> None:
        self._epoch = epoch
        self._by_key: list[NDArray[np.uint8]] = []
        self._keys_of: dict[bytes, dict[int, int]] = {}  # by peer: region's key -> its own
        self._closed_keys: set[int] = set()

    def register(self, array: NDArray[np.uint8], group: int) -> RemoteRegion:
        """A region with a key of its own, for whoever is told."""
        self._by_key.append(array)
        return self._remote(group, array.nbytes, len(self._by_key) - 1)

    def share(self, remote: RemoteRegion, peer: bytes) -> RemoteRegion:
        """The region with the key that this peer alone has; the same each time."""
        original = _key_of(remote)
        keys = self._keys_of.setdefault(peer, {})
        if original not in keys:
            keys[original] = len(self._by_key)
            self._by_key.append(self._by_key[original])
        return self._remote(remote.group, remote.nbytes, keys[original])

    def take_back(self, peer: bytes) -> None:
        """Close the keys that this peer alone has."""
        self._closed_keys.update(self._keys_of.pop(peer, {}).values())

    def opens(self, remote: RemoteRegion) -> bool:
        """Whether the region's key is good still."""
        return _key_of(remote) not in self._closed_keys

    def of(self, remote: RemoteRegion) -> NDArray[np.uint8]:
        """The bytes of a region."""
        return self._by_key[_key_of(remote)]

    def _remote(self, group: int, nbytes: int, key: int) -> RemoteRegion:
        return RemoteRegion(self._epoch, group, nbytes, (nbytes,), (((0, key),),))


def _key_of(remote: RemoteRegion) -> int:
    return remote.rails[0][0][1]
