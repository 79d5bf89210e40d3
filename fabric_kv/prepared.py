"""Submissions that are worked out once and posted many times, and words that say when their parts may go.

>>> prepared = engine.prepare(peer, [PreparedPiece(k, 0, STRIDE, their_k, 0, STRIDE, PAGE, layer=1), ...])
>>> prepared.submit([(src_pages, dst_pages)], token=token).result(5)
>>> watch = engine.watch()
>>> transfer = prepared.submit([(src_pages, dst_pages)], token=token, watch=watch, step=7)
>>> watch.set(7, 1)         # layer 1 of step 7 is computed: its pieces go, without any Python in between

What does not change from one step to the next (regions, strides, layers, the peer) is checked and converted when it is
prepared; what is left for a submission is to look at its page lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .config import check_integer
from .core import load_native
from .errors import ConfigError
from .futures import fresh
from .submission import (
    NO_TOKEN,
    PageList,
    as_pages,
    check_deadline,
    check_source,
    check_token,
    explain_types,
    native_remote,
    unpack,
)
from .transfers import MemoryRegion, Peer, Transfer

if TYPE_CHECKING:
    from . import _native
    from .engine import Engine
    from .regions import CounterToken, RemoteRegion

__all__ = ["Prepared", "PreparedPiece", "Watch"]

_Pages = Sequence[int] | NDArray[np.integer[Any]] | PageList


class PreparedPiece(NamedTuple):
    """A :class:`PagePiece` without its pages: ``lists`` says which pair of page lists of a submission it uses.

    ``layer`` is how many layers must be done before it may go, where the submission has a watch; 0: none.
    """

    src: MemoryRegion
    src_offset: int
    src_stride: int
    dst: RemoteRegion
    dst_offset: int
    dst_stride: int
    nbytes: int
    rows: int = 1
    src_row_stride: int = 0
    dst_row_stride: int = 0
    layer: int = 0
    lists: int = 0


class Watch:
    """A 64-bit word ``step << 16 | layers done`` that transfers wait for. Made by :meth:`Engine.watch`.

    Whatever computes bumps it: a CPU thread through :meth:`set`, or, where it was made of somebody's memory, anything
    that can write that, with release semantics: the engine looks at it itself, all the time where it spins, else every
    50 µs while a transfer waits.

    The word is a level: who waits for what is done already goes at once, and a step that has begun says that all
    earlier ones are done. Steps that nobody waits for are nothing.
    """

    def __init__(self, engine: Engine, array: NDArray[np.uint64], is_polled: bool) -> None:
        self._engine = engine
        self.array = array
        self._native: _native.Watch = load_native().Watch(array.ctypes.data, is_polled)

    def set(self, step: int, layers: int) -> None:
        """Say that ``layers`` layers of ``step`` are done, from any thread.

        Raises
        ------
        ConfigError
            If the step does not fit into 48 bits or the layers do not into 16, or the word is of read-only memory.
        """
        if not self.array.flags.writeable:
            raise ConfigError(
                f"{self!r} is of read-only memory: it can be waited for, but whoever may write the memory sets it"
            )
        try:
            self._engine._native.set_watch(self._native, step, layers)
        except TypeError:
            check_integer("step", step, 0, 2**48 - 1)
            check_integer("layers", layers, 0, 2**16 - 1)
            raise

    @property
    def step(self) -> int:
        """The step that the word is in."""
        return self._native.word >> 16

    @property
    def layers(self) -> int:
        """How many of its layers are done."""
        return self._native.word & 0xFFFF

    def __repr__(self) -> str:
        return f"Watch(step {self.step}, {self.layers} layers)"


class Prepared:
    """A submission to one peer but for its page lists, token and step. Made by :meth:`Engine.prepare`."""

    def __init__(self, engine: Engine, peer: Peer, pieces: Iterable[PreparedPiece]) -> None:
        self._engine = engine
        self.peer = peer
        native: list[_native._Piece] = []
        regions: list[MemoryRegion] = []
        self._dst: dict[int, RemoteRegion] = {}  # one of each group
        pieces = list(pieces)
        try:
            for piece in pieces:
                check_source(engine, piece.src)
                if piece.src._staging is not None:
                    raise ConfigError(
                        f"{piece.src!r} is staged in host memory: what is submitted from it cannot be prepared"
                    )
                self._dst[piece.dst.group] = piece.dst
                native.append((piece.src._native, *piece[1:3], native_remote(piece.dst), *piece[4:]))
                regions.append(piece.src)
            self._native: _native.Prepared = load_native().Prepared(peer._native, native)
        except (AttributeError, TypeError):
            explain_types(peer, pieces)
            raise
        self._keep = list(dict.fromkeys(regions))

    def submit(
        self,
        lists: Sequence[tuple[_Pages, _Pages]],
        *,
        token: CounterToken | None = None,
        deadline_s: float | None = None,
        watch: Watch | None = None,
        step: int = 0,
    ) -> Transfer:
        """Post it with new page lists; as :meth:`Engine.submit` in all else.

        Parameters
        ----------
        lists : sequence of (src_pages, dst_pages)
            Integers of any width, shape (num_pages,). They are copied; a :class:`PageList` is shared instead.
        token : CounterToken, optional
        deadline_s : float, optional
        watch : Watch, optional
            Each piece waits until its ``layer`` layers of ``step`` are done; pieces are in the order of their layers.
        step : int

        Raises
        ------
        ConfigError
            If a page leaves its region, or there are fewer page lists than the pieces use. Nothing has been posted.
        WouldBlockError, ClosedError
            As :meth:`Engine.submit`.
        """
        for region in self._keep:
            if region._lost is not None:
                raise fresh(region._lost)
        if deadline_s is not None:
            check_deadline(deadline_s)
        try:
            if token is not None:
                for dst in self._dst.values():
                    check_token(token, dst)
            native = [(as_pages("src_pages", src), as_pages("dst_pages", dst)) for src, dst in lists]
            engine = self._engine
            transfer = Transfer(engine, self.peer, (self._keep, watch), deadline_s)
            return engine._start(
                transfer,
                engine._native.submit_prepared,
                self._native,
                native,
                NO_TOKEN if token is None else token.native(),
                deadline_s or 0.0,
                None if watch is None else watch._native,
                step,
            )
        except (AttributeError, TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            unpack("lists", lists, "src_pages, dst_pages")
            explain_types(self.peer, (), token, watch=watch, step=step)
            raise
