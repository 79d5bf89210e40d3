"""Checks what a caller wants to move and puts it into the form that the C++ core takes.

>>> native, keep, nbytes = encode_pieces(engine, [PagePiece(...)], token)
>>> as_pages("src_pages", [4, 7, 1])
array([4, 7, 1])

What only the core can check (pages against their regions) it checks itself, before anything is posted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .errors import ConfigError
from .regions import CounterToken, RemoteRegion
from .transfers import MemoryRegion, PagePiece

if TYPE_CHECKING:
    from . import _native
    from .engine import Engine

__all__ = ["as_pages", "check_token", "encode_pieces"]


def as_pages(name: str, pages: Any) -> NDArray[np.int64]:
    """Page indices as a contiguous array of int64, shape (num_pages,)."""
    array = np.asarray(pages)
    if array.ndim != 1:
        raise ConfigError(f"{name} must be one-dimensional, not of shape {array.shape}")
    if array.size == 0:
        return np.empty(0, np.int64)
    if not np.issubdtype(array.dtype, np.integer):
        raise ConfigError(f"{name} must hold integers (page indices), not {array.dtype}")
    if array.dtype == np.uint64 and int(array.max()) >= 2**63:
        raise ConfigError(f"{name} holds {int(array.max())}, which is no page index")
    return np.ascontiguousarray(array, dtype=np.int64)


def check_token(token: CounterToken, dst: RemoteRegion) -> None:
    """Refuse a counter of another group than the region that is written to."""
    if token.group != dst.group:
        # The immediate would arrive over there, and count for whoever has that slot.
        raise ConfigError(
            f"the counter's token is of the peer's group {token.group}, the remote region of its group {dst.group}"
        )


def encode_pieces(
    engine: Engine, pieces: Iterable[PagePiece], token: CounterToken | None
) -> tuple[list[_native._Piece], list[MemoryRegion], int]:
    """The pieces for the core, the regions to keep alive meanwhile, and the bytes in total."""
    native: list[_native._Piece] = []
    keep, nbytes = [], 0
    for piece in pieces:
        if piece.src._engine is not engine:
            raise ConfigError(f"{piece.src!r} was registered with another engine")
        if token is not None:
            check_token(token, piece.dst)
        src_pages, dst_pages = as_pages("src_pages", piece.src_pages), as_pages("dst_pages", piece.dst_pages)
        sizes = (piece.src_offset, piece.src_stride, piece.dst_offset, piece.dst_stride, piece.nbytes)
        row_sizes = (piece.rows, piece.src_row_stride, piece.dst_row_stride)
        if min(*sizes, *row_sizes) < 0 or max(*sizes, *row_sizes) >= 2**63:
            raise ConfigError(f"offsets, strides and sizes must lie in [0, 2^63): {sizes}, rows {row_sizes}")
        if piece.rows >= 2**32:
            raise ConfigError(f"rows={piece.rows} is above the limit of {2**32 - 1}")
        native.append(
            (
                piece.src._native,
                piece.src_offset,
                piece.src_stride,
                piece.dst.native(),
                piece.dst_offset,
                piece.dst_stride,
                piece.nbytes,
                src_pages,
                dst_pages,
                *row_sizes,
            )
        )
        keep.append(piece.src)
        nbytes += piece.nbytes * piece.rows * len(src_pages)
    return native, keep, nbytes
