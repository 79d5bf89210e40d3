"""What an engine without a network hands out where the originals need the C++ core: transfers, submissions, watches.

>>> watch = MemoryWatch(fabric)
>>> watch.set(7, 1)                                 # what waits for layer 1 of step 7 is in flight from now on
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..transfers import PagePiece, Peer, Transfer

if TYPE_CHECKING:
    from ..engine import Engine
    from ..prepared import PreparedPiece
    from .engine import MemoryEngine
    from .fabric import Event, MemoryFabric

__all__ = ["MemoryPrepared", "MemoryTransfer", "MemoryWatch", "word_of"]


class MemoryTransfer(Transfer):
    """A Transfer that knows its size by itself."""

    def __init__(self, engine: Engine, peer: Peer, nbytes: int) -> None:
        super().__init__(engine, peer, None)
        self._nbytes = nbytes

    @property
    def id(self) -> int:
        """The same for all."""
        return 0

    @property
    def nbytes(self) -> int:
        """As Transfer.nbytes."""
        return self._nbytes


class MemoryPrepared(NamedTuple):
    """A submission but for its page lists."""

    engine: MemoryEngine
    peer: Peer
    pieces: list[PreparedPiece]

    def submit(self, lists: Sequence[tuple[Any, Any]], **options: Any) -> Transfer:
        """As Prepared.submit."""
        pieces = [PagePiece(*piece[:7], *lists[piece.lists], *piece[7:11]) for piece in self.pieces]
        return self.engine.submit(self.peer, pieces, **options)


class MemoryWatch:
    """A word, and what waits for it to get as far as it wants."""

    def __init__(self, fabric: MemoryFabric) -> None:
        self.fabric = fabric
        self.word = 0
        self.waiting: list[tuple[int, Event]] = []

    @property
    def step(self) -> int:
        """As Watch.step."""
        return self.word >> 16

    def set(self, step: int, layers: int) -> None:
        """As Watch.set."""
        with self.fabric._changed:
            self.word = word_of(step, layers)
            ready = [go for wanted, go in self.waiting if wanted <= self.word]
            self.waiting = [(wanted, go) for wanted, go in self.waiting if wanted > self.word]
            for go in ready:
                go()


def word_of(step: int, layers: int) -> int:
    """The word that says so, as a watch has it."""
    return step << 16 | layers
