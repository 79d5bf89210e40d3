"""A paged KV cache as one NumPy array per rank, and the allocator that hands out its pages.

>>> cache = PagedCache(config, tp_size=3, num_pages=64)  # one rank of three
>>> pages = PageAllocator(64, seed=1).allocate(4)  # page numbers in token order, scattered
>>> keys, values = cache.read(layer=0, pages=pages, num_tokens=50)
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .weights import F32, Config

Pages = NDArray[np.int64]  # page numbers of one sequence, in token order; the same list on every rank


class PagedCache:
    """The KV cache of one tensor-parallel rank.

    Parameters
    ----------
    config : Config
        Gives the layers, KV heads and head size.
    tp_size : int
        Number of ranks that share the KV heads evenly.
    num_pages, page_tokens : int
        Pages in the pool; tokens in a page.
    dtype : dtype, default float16
        What the cache stores; the arithmetic is float32 anyway.
    buffer : writable buffer, optional
        Memory to use instead of a new zeroed array; it must hold `nbytes_of(...)` bytes.

    Attributes
    ----------
    data : ndarray, shape (layers, 2, num_pages, kv_heads_of_rank, page_tokens, head_dim)
        Keys at ``[:, 0]``, values at ``[:, 1]``; HND inside a page: heads before tokens. C order.
    """

    def __init__(
        self,
        config: Config,
        tp_size: int,
        num_pages: int,
        *,
        page_tokens: int = 16,
        dtype: DTypeLike = np.float16,
        buffer: Any = None,
    ) -> None:
        config.check_tp(tp_size)
        heads = config.num_kv_heads // tp_size
        shape = (config.num_layers, 2, num_pages, heads, page_tokens, config.head_dim)
        self.page_tokens = page_tokens
        self.data: NDArray[Any]
        if buffer is None:
            self.data = np.zeros(shape, dtype)
            return
        needed = self.nbytes_of(config, tp_size, num_pages, page_tokens=page_tokens, dtype=dtype)
        view = memoryview(buffer).cast("B")
        if view.nbytes < needed or view.readonly:
            kind = "read-only" if view.readonly else "writable"
            raise ValueError(f"buffer has {view.nbytes} {kind} bytes, the cache needs {needed} writable ones")
        self.data = np.frombuffer(view[:needed], dtype).reshape(shape)

    @staticmethod
    def nbytes_of(
        config: Config, tp_size: int, num_pages: int, *, page_tokens: int = 16, dtype: DTypeLike = np.float16
    ) -> int:
        """Bytes that one rank's cache takes."""
        heads = config.num_kv_heads // tp_size
        elements = config.num_layers * 2 * num_pages * heads * page_tokens * config.head_dim
        return elements * np.dtype(dtype).itemsize

    def append(self, layer: int, pages: Pages, start: int, keys: F32, values: F32) -> None:
        """Store `keys` and `values`, each (kv_heads, tokens, head_dim), from position `start` on."""
        page, slot = np.divmod(np.arange(start, start + keys.shape[1]), self.page_tokens)
        for kind, new in enumerate((keys, values)):
            self.data[layer, kind][pages[page], :, slot] = new.swapaxes(0, 1)

    def read(self, layer: int, pages: Pages, num_tokens: int) -> tuple[F32, F32]:
        """Gather the keys and values of the first tokens, each (kv_heads, num_tokens, head_dim)."""
        used = pages[: -(-num_tokens // self.page_tokens)]
        _, _, _, heads, _, head_dim = self.data.shape
        gathered = self.data[layer][:, used].swapaxes(1, 2).reshape(2, heads, -1, head_dim)[:, :, :num_tokens]
        # Slots behind the last token hold what the page's last owner left: cut off before any arithmetic.
        keys, values = gathered.astype(np.float32)
        return keys, values


class PageAllocator:
    """Hands out scattered page numbers and takes them back; the same seed and calls give the same pages."""

    def __init__(self, num_pages: int, seed: int = 0) -> None:
        self.num_pages = num_pages
        self._rng = np.random.default_rng(seed)
        self._free = self._rng.permutation(num_pages)

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can still give."""
        return len(self._free)

    def allocate(self, count: int) -> Pages:
        """Give `count` pages, or raise MemoryError and give none."""
        if count > len(self._free):
            raise MemoryError(f"asked for {count} pages, {len(self._free)} of {self.num_pages} are free")
        taken, self._free = self._free[:count], self._free[count:]
        return taken.astype(np.int64)

    def release(self, pages: Pages) -> None:
        """Take pages back; ValueError if one is not handed out, and then none is taken."""
        returned = np.concatenate([self._free, pages])
        if len(np.unique(returned)) != len(returned) or not np.isin(pages, np.arange(self.num_pages)).all():
            raise ValueError(f"pages {pages.tolist()} are not all handed out exactly once")
        self._free = self._rng.permutation(returned)


def copy_pages(src: Sequence[PagedCache], src_pages: Pages, dst: Sequence[PagedCache], dst_pages: Pages) -> None:
    """Copy whole pages between the ranks of two engines in this process, joining or splitting their KV heads.

    The in-process stand-in for the transfer: `src` and `dst` hold one cache per rank, rank 0 the first heads.
    """
    heads = np.concatenate([cache.data[:, :, src_pages] for cache in src], axis=3)
    for cache, part in zip(dst, np.split(heads, len(dst), axis=3), strict=True):
        cache.data[:, :, dst_pages] = part


def checksums(caches: Sequence[PagedCache], pages: Pages, num_tokens: int) -> NDArray[np.uint32]:
    """Compute one CRC-32 per layer, K or V, page and KV head over the first tokens of a sequence.

    Returns
    -------
    ndarray of uint32, shape (layers, 2, pages used, all KV heads)
        Comparable between engines of different TP size: ranks are joined along the last axis.
    """
    size = caches[0].page_tokens
    filled = [min(size, num_tokens - begin) for begin in range(0, num_tokens, size)]
    used = pages[: len(filled)]
    heads = np.concatenate([cache.data[:, :, used] for cache in caches], axis=3)
    sums = np.empty(heads.shape[:4], np.uint32)
    for index in np.ndindex(sums.shape):
        sums[index] = zlib.crc32(heads[index][: filled[index[2]]])
    return sums
