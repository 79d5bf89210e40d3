"""Pages that are being written, and those that something may still write into, and how these come back.

>>> book.add(PoisonEntry(PoisonedPages("a", peer.epoch, 0, (pages,)), 7, tail_slot, True, ()), peer)
>>> book.find(0, 0, pages)               # the first page that must not be used
>>> book.redeem(peer.epoch, 7)           # the peer says, late, that nothing can land any more
>>> book.redeem(peer.epoch, 7, counted=True)       # all of it has come, late
>>> book.take_redeemed()
>>> book.take(peer.epoch)                # the peer has been fenced: the pages are clean
>>> claims.claim("a", 0, [pages])        # nobody else may submit them until release()
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ..transfers import Counter, Peer

__all__ = ["PageClaims", "PoisonBook", "PoisonEntry", "PoisonedPages"]


class PoisonedPages(msgspec.Struct, frozen=True, eq=False):
    """Pages that something may still write into, until ``reclaim`` says otherwise or the engine is closed.

    Attributes
    ----------
    request_id : str
    peer : bytes
        Epoch of the prefill engine.
    dp : int
        The data-parallel replica whose pages they are.
    pages : tuple of ndarray of int64
        One list per cache group.
    exceeded : bool
        More was written than had been announced, so that nobody knows by whom: only closing the engine helps.
    """

    request_id: str
    peer: bytes
    dp: int
    pages: tuple[NDArray[np.int64], ...]
    exceeded: bool = False


class PageClaims:
    """Which pages open requests have written. Threads: any.

    Pages that are only read, those of cached tokens, may be shared and are not claimed.
    """

    def __init__(self, dp_size: int, num_groups: int) -> None:
        self._lock = threading.Lock()
        self._owners: list[list[dict[int, str]]] = [[{} for _ in range(num_groups)] for _ in range(dp_size)]

    def claim(self, request_id: str, dp: int, pages: Sequence[NDArray[np.int64]]) -> tuple[int, int, str] | None:
        """Claim pages of each group; else (group, page, who has it), and nothing is claimed."""
        lists = [array.tolist() for array in pages]
        with self._lock:
            owners = self._owners[dp]
            for group, (own, numbers) in enumerate(zip(owners, lists, strict=True)):
                if taken := own.keys() & numbers:
                    page = min(taken)
                    return group, page, own[page]
            for own, numbers in zip(owners, lists, strict=True):
                own.update(dict.fromkeys(numbers, request_id))
        return None

    def release(self, dp: int, pages: Sequence[NDArray[np.int64]]) -> None:
        """Let claimed pages go."""
        with self._lock:
            for own, array in zip(self._owners[dp], pages, strict=True):
                for page in array.tolist():
                    del own[page]


class PoisonEntry(NamedTuple):
    """What is set aside of one request.

    ``redeemable``: the peer's word may yet prove it clean. ``counters``: those that go on counting, where it may not.
    """

    item: PoisonedPages
    generation: int
    tail_slot: int | None
    redeemable: bool
    counters: tuple[Counter, ...]


class PoisonBook:
    """All poisoned pages of a decode side. Threads: any."""

    def __init__(self, dp_size: int, num_groups: int) -> None:
        self._lock = threading.Lock()  # guards all of these
        self._entries: list[PoisonEntry] = []
        self._redeemed: set[tuple[bytes, int]] = set()  # peer and generation of entries
        self._by_group: list[list[set[int]]] = [[set() for _ in range(num_groups)] for _ in range(dp_size)]
        self._peers: dict[bytes, Peer] = {}

    @property
    def items(self) -> list[PoisonedPages]:
        """Of all requests, oldest first."""
        with self._lock:
            return [entry.item for entry in self._entries]

    @property
    def peers(self) -> list[Peer]:
        """Whom to fence to get pages back."""
        with self._lock:
            epochs = {entry.item.peer for entry in self._entries if not entry.item.exceeded}
            return [peer for epoch, peer in self._peers.items() if epoch in epochs]

    def add(self, entry: PoisonEntry, peer: Peer) -> None:
        """Set a request's pages aside, and its tail slot."""
        item = entry.item
        with self._lock:
            self._entries.append(entry)
            self._peers[item.peer] = peer
            for pages, poisoned in zip(item.pages, self._by_group[item.dp], strict=True):
                poisoned.update(pages.tolist())

    def redeem(self, epoch: bytes, generation: int, *, counted: bool = False) -> None:
        """Note that nothing can land any more in a request's pages; they stay set aside until they are taken.

        ``counted``: since all of it has come, and not because the peer says so.
        """
        with self._lock:
            if any(
                entry.generation == generation and entry.item.peer == epoch and (entry.redeemable or counted)
                for entry in self._entries
            ):
                self._redeemed.add((epoch, generation))

    def take_redeemed(self) -> list[PoisonEntry]:
        """Take back what was redeemed."""
        with self._lock:
            return self._take(lambda entry: (entry.item.peer, entry.generation) in self._redeemed)

    def take(self, epoch: bytes) -> list[PoisonEntry]:
        """Take back what a peer might have written into, which it cannot any more."""
        with self._lock:
            return self._take(lambda entry: entry.item.peer == epoch and not entry.item.exceeded)

    def _take(self, wanted: Callable[[PoisonEntry], bool]) -> list[PoisonEntry]:
        taken = [entry for entry in self._entries if wanted(entry)]
        if taken:
            self._entries = [entry for entry in self._entries if not wanted(entry)]
            self._redeemed.difference_update((entry.item.peer, entry.generation) for entry in taken)
            left_peers = {entry.item.peer for entry in self._entries}
            self._peers = {epoch: peer for epoch, peer in self._peers.items() if epoch in left_peers}
            for dp, groups in enumerate(self._by_group):
                left = [entry.item for entry in self._entries if entry.item.dp == dp]
                for group, poisoned in enumerate(groups):
                    poisoned.clear()
                    poisoned.update(*(item.pages[group].tolist() for item in left))
        return taken

    def find(self, dp: int, group: int, pages: NDArray[np.int64]) -> int | None:
        """The smallest of these pages of a replica that is poisoned."""
        with self._lock:
            poisoned = self._by_group[dp][group]
            return min(poisoned.intersection(pages.tolist()), default=None) if poisoned else None
