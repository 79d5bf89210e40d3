"""Checks what a caller wants to move and puts it into the form that the C++ core takes.

>>> pieces, lists, keep = encode_pieces(engine, [PagePiece(...)], token)
>>> as_pages("src_pages", [4, 7, 1])

What only the core can check (pages against their regions) it checks itself, before anything is posted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .core import load_native
from .errors import ConfigError
from .regions import CounterToken, RemoteRegion
from .transfers import MemoryRegion, PagePiece

if TYPE_CHECKING:
    from . import _native
    from .engine import Engine
    from .prepared import PreparedPiece

__all__ = ["PageList", "as_pages", "check_deadline", "check_sizes", "check_token", "encode_pieces", "native_remote"]


_to_native: Callable[[NDArray[np.integer[Any]]], _native.PageList] | None = None  # once it was needed
# What most callers have, and the core takes as it is.
_INT64, _INT32 = np.dtype(np.int64), np.dtype(np.int32)


class PageList:
    """Page indices that are checked and copied once, for any number of pieces and submissions.

    Parameters
    ----------
    pages : integers, shape (num_pages,)

    Raises
    ------
    ConfigError
        If they are no page indices.
    """

    __slots__ = ("_native", "array")

    def __init__(self, pages: Sequence[int] | NDArray[np.integer[Any]]) -> None:
        self._native = as_pages("pages", pages)
        self.array: NDArray[np.int64] = np.array(pages, np.int64)
        self.array.flags.writeable = False

    def __len__(self) -> int:
        return len(self.array)

    def __repr__(self) -> str:
        return f"PageList({len(self)} pages)"


def as_pages(name: str, pages: Any) -> _native.PageList:
    """Page indices as the core takes them: a copy, unless they are a PageList."""
    global _to_native
    if type(pages) is PageList:
        return pages._native
    if _to_native is None:
        _to_native = load_native().PageList
    array = pages if type(pages) is np.ndarray else np.asarray(pages)
    if (array.dtype is _INT64 or array.dtype is _INT32) and array.ndim == 1 and array.flags.aligned:
        return _to_native(array)
    if array.ndim != 1:
        raise ConfigError(f"{name} must be one-dimensional, not of shape {array.shape}")
    if array.size and array.dtype.kind not in "iu":
        raise ConfigError(f"{name} must hold integers (page indices), not {array.dtype}")
    if array.dtype == np.uint64 and array.size and int(array.max()) >= 2**63:
        raise ConfigError(f"{name} holds {int(array.max())}, which is no page index")
    if not (array.dtype.isnative and array.flags.aligned):
        array = np.require(array, array.dtype.newbyteorder("="), "A")
    return _to_native(array)


def check_deadline(deadline_s: float | None) -> None:
    """Refuse a deadline that is none."""
    if deadline_s is not None and not 0 < deadline_s <= 86400:
        raise ConfigError(f"deadline_s={deadline_s} must lie in (0, 86400]")


def check_token(token: CounterToken, dst: RemoteRegion) -> None:
    """Refuse a counter of another group than the region that is written to."""
    if token.group != dst.group:
        # The immediate would arrive over there, and count for whoever has that slot.
        raise ConfigError(
            f"the counter's token is of the peer's group {token.group}, the remote region of its group {dst.group}"
        )


_TOO_LARGE = 2**63
_MAX_REMOTES = 4096
_remotes: dict[int, tuple[RemoteRegion, _native.RemoteRegion]] = {}


def native_remote(region: RemoteRegion) -> _native.RemoteRegion:
    """As ``region.native()``, which takes longer than posting a few pages: converted once while it is in use."""
    found = _remotes.get(id(region))
    if found is not None:
        return found[1]
    if len(_remotes) >= _MAX_REMOTES:
        _remotes.clear()
    native = region.native()
    _remotes[id(region)] = region, native  # holds the region, so that nobody else gets its id
    return native


def check_sizes(engine: Engine, piece: PagePiece | PreparedPiece) -> None:
    """Refuse a region of another engine and numbers that no copy can have."""
    if piece.src._engine is not engine:
        raise ConfigError(f"{piece.src!r} was registered with another engine")
    if piece.src._lost is not None:
        raise copy(piece.src._lost)  # the one that is kept would keep the frames that it passes
    if not (
        0 <= piece.src_offset < _TOO_LARGE
        and 0 <= piece.src_stride < _TOO_LARGE
        and 0 <= piece.dst_offset < _TOO_LARGE
        and 0 <= piece.dst_stride < _TOO_LARGE
        and 0 <= piece.nbytes < _TOO_LARGE
        and 0 <= piece.rows < _TOO_LARGE
        and 0 <= piece.src_row_stride < _TOO_LARGE
        and 0 <= piece.dst_row_stride < _TOO_LARGE
    ):
        sizes = (piece.src_offset, piece.src_stride, piece.dst_offset, piece.dst_stride, piece.nbytes)
        row_sizes = (piece.rows, piece.src_row_stride, piece.dst_row_stride)
        raise ConfigError(f"offsets, strides and sizes must lie in [0, 2^63): {sizes}, rows {row_sizes}")
    if piece.rows >= 2**32:
        raise ConfigError(f"rows={piece.rows} is above the limit of {2**32 - 1}")
    if not 0 <= piece.layer < 2**16:
        raise ConfigError(f"layer={piece.layer} must lie in [0, 65536)")


def encode_pieces(
    engine: Engine, pieces: Sequence[PagePiece], token: CounterToken | None
) -> tuple[list[_native._Piece], _native._PageLists, list[MemoryRegion]]:
    """The pieces and page lists for the core, and the regions to keep alive meanwhile."""
    native: list[_native._Piece] = []
    lists: _native._PageLists = []
    # Pieces of one submission often share lists: each is converted once. `pieces` keeps what the keys name alive.
    index_of: dict[tuple[int, int], int] = {}
    keep = []
    for piece in pieces:
        check_sizes(engine, piece)
        if token is not None:
            check_token(token, piece.dst)
        key = (id(piece.src_pages), id(piece.dst_pages))
        if key not in index_of:
            index_of[key] = len(lists)
            lists.append((as_pages("src_pages", piece.src_pages), as_pages("dst_pages", piece.dst_pages)))
        native.append(
            (
                piece.src._native,
                piece.src_offset,
                piece.src_stride,
                native_remote(piece.dst),
                piece.dst_offset,
                piece.dst_stride,
                piece.nbytes,
                piece.rows,
                piece.src_row_stride,
                piece.dst_row_stride,
                piece.layer,
                index_of[key],
            )
        )
        keep.append(piece.src)
    return native, lists, keep
