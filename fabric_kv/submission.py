"""Checks what a caller wants to move and puts it into the form that the C++ core takes.

>>> pieces, lists, keep = encode_pieces(engine, [PagePiece(...)], token)
>>> as_pages("src_pages", [4, 7, 1])

What only the core can check (pages against their regions) it checks itself, before anything is posted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .config import check_integer
from .core import load_native
from .errors import ConfigError
from .futures import fresh
from .regions import CounterToken, RemoteRegion
from .transfers import Counter, MemoryRegion, PagePiece, Peer

if TYPE_CHECKING:
    from . import _native
    from .engine import Engine

    _Pages: TypeAlias = _native.PageList | NDArray[np.integer[Any]]

__all__ = [
    "NO_TOKEN",
    "PageList",
    "as_pages",
    "check_callback",
    "check_deadline",
    "check_peer",
    "check_remote",
    "check_source",
    "check_token",
    "encode_lists",
    "encode_piece",
    "encode_pieces",
    "explain_types",
    "native_remote",
    "unpack",
]


# Where nothing is counted: a unit of 0 bytes.
NO_TOKEN = (0, 0, 0)

# What most callers have, and the core takes as it is.
_PLAIN = {np.dtype(np.int64), np.dtype(np.int32)}


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
        self._native: _native.PageList = load_native().PageList(as_pages("pages", pages))
        self.array: NDArray[np.int64] = np.array(pages, np.int64)
        self.array.flags.writeable = False

    def __len__(self) -> int:
        return len(self.array)

    def __repr__(self) -> str:
        return f"PageList({len(self)} pages)"


def as_pages(name: str, pages: Any) -> _Pages:
    """Page indices as the core takes them: an array, which it copies, unless they are a PageList."""
    if type(pages) is PageList:
        return pages._native
    try:
        array = pages if type(pages) is np.ndarray else np.asarray(pages)
    except ValueError as error:  # lists of lists that are not of one length
        raise ConfigError(f"{name} must be one-dimensional: {error}") from None
    if array.ndim == 1 and array.dtype in _PLAIN:
        return array
    if array.ndim != 1:
        raise ConfigError(f"{name} must be one-dimensional, not of shape {array.shape}")
    if array.size and array.dtype.kind not in "iu":
        raise ConfigError(f"{name} must hold integers (page indices), not {array.dtype}")
    if array.dtype == np.uint64 and array.size and int(array.max()) >= 2**63:
        raise ConfigError(f"{name} holds {int(array.max())}, which is no page index")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def check_deadline(deadline_s: float | None) -> None:
    """Refuse a deadline that is none."""
    try:
        if deadline_s is None or 0 < deadline_s <= 86400:
            return
    except TypeError:
        raise ConfigError(f"deadline_s={deadline_s!r} must be a number of seconds in (0, 86400]") from None
    raise ConfigError(f"deadline_s={deadline_s} must lie in (0, 86400]")


def _wrong(name: str, value: object, wanted: str) -> ConfigError:
    return ConfigError(f"{name} is of type {type(value).__name__}: it must be {wanted}")


def check_callback(fn: object) -> None:
    """Refuse what could not be called when the time has come."""
    if fn is not None and not callable(fn):
        raise _wrong("fn", fn, "a function, or None")


def unpack(name: str, given: Iterable[Any], fields: str) -> list[Any]:
    """The tuples of a list, each with as many items as ``fields`` names."""
    num_fields = fields.count(",") + 1
    items = list(given)
    for index, item in enumerate(items):
        if not isinstance(item, Sequence) or len(item) != num_fields:
            raise _wrong(f"{name}[{index}]", item, f"a tuple ({fields})")
    return items


def check_peer(peer: object) -> None:
    """Refuse what Engine.add_peer has not made."""
    if not isinstance(peer, Peer):
        raise _wrong("peer", peer, "a Peer. Hint: Engine.add_peer(address) makes one of the other engine's address")


def _check_region(name: str, region: object) -> None:
    if isinstance(region, RemoteRegion):
        raise _wrong(name, region, "a MemoryRegion of this engine; a RemoteRegion is the peer's memory")
    if not isinstance(region, MemoryRegion):
        raise _wrong(name, region, "a MemoryRegion. Hint: Engine.register makes one of a buffer")


def check_remote(name: str, remote: object) -> None:
    """Refuse what is no peer's region."""
    if isinstance(remote, MemoryRegion):
        hint = "use region.remote of the peer's region, sent as bytes: region.remote.to_bytes()"
        raise _wrong(name, remote, f"a RemoteRegion. Hint: {hint}")
    if not isinstance(remote, RemoteRegion):
        raise _wrong(name, remote, "a RemoteRegion. Hint: RemoteRegion.from_bytes parses what the peer has sent")


def _check_token_type(token: object) -> None:
    if isinstance(token, Counter):
        raise _wrong("token", token, "a CounterToken. Hint: use counter.token")
    if token is not None and not isinstance(token, CounterToken):
        raise _wrong("token", token, "a CounterToken. Hint: CounterToken.from_bytes parses what the receiver has sent")


def explain_types(
    peer: object,
    pieces: Iterable[object] = (),
    token: object = None,
    *,
    watch: object = None,
    step: Any = 0,
    names: tuple[str, str] = ("src", "dst"),
) -> None:
    """Say what is wrong with a submission that a TypeError or an AttributeError has stopped.

    Afterwards only, so that it costs nothing where all is well. Returns if it finds nothing.

    Raises
    ------
    ConfigError
        Which argument is of a wrong type, what it should be, and where that comes from.
    """
    from .prepared import PreparedPiece, Watch

    check_peer(peer)
    for index, piece in enumerate(pieces):
        if not isinstance(piece, PagePiece | PreparedPiece):
            raise _wrong(f"pieces[{index}]", piece, "a PagePiece, or a PreparedPiece for Engine.prepare")
        _check_region(names[0], piece.src)
        check_remote(names[1], piece.dst)
    _check_token_type(token)
    if watch is not None and not isinstance(watch, Watch):
        raise _wrong("watch", watch, "a Watch. Hint: Engine.watch makes one")
    check_integer("step", step, 0, 2**48 - 1)


def check_token(token: CounterToken, dst: RemoteRegion) -> None:
    """Refuse a counter of another group than the region that is written to."""
    if token.group != dst.group:
        # The immediate would arrive over there, and count for whoever has that slot.
        raise ConfigError(
            f"the counter's token is of the peer's group {token.group}, the remote region of its group {dst.group}"
        )


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


def check_source(engine: Engine, region: MemoryRegion) -> None:
    """Refuse a region of another engine, or one whose memory is not to be used any more."""
    if region._engine is not engine:
        raise ConfigError(f"{region!r} was registered with another engine")
    if region._lost is not None:
        raise fresh(region._lost)  # the one that is kept would keep the frames that it passes


def encode_lists(piece: PagePiece) -> tuple[_Pages, _Pages]:
    """A piece's page lists for the core."""
    return as_pages("src_pages", piece.src_pages), as_pages("dst_pages", piece.dst_pages)


def encode_piece(engine: Engine, piece: PagePiece, token: CounterToken | None, index: int) -> _native._Piece:
    """A piece for the core, with page lists number ``index``."""
    src, src_offset, src_stride, dst, dst_offset, dst_stride, nbytes = piece[:7]
    check_source(engine, src)
    if token is not None:
        check_token(token, dst)
    remote = native_remote(dst)
    return src._native, src_offset, src_stride, remote, dst_offset, dst_stride, nbytes, *piece[9:], index


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
        key = (id(piece.src_pages), id(piece.dst_pages))
        index = index_of.get(key)
        if index is None:
            index = index_of[key] = len(lists)
            lists.append(encode_lists(piece))
        native.append(encode_piece(engine, piece, token, index))
        keep.append(piece.src)
    return native, lists, keep
