"""What pages hold, so that a wrong one is known for what it is: every word depends on seed, iteration, page and place.

>>> stamp(memory, pages, page_bytes=4096, seed=1, iteration=7)         # before it is sent
>>> count_wrong(memory, pages, page_bytes=4096, seed=1, iteration=7)   # after it has arrived
0

A page that is late holds another iteration's words, one in the wrong place another page's.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

__all__ = ["POISON", "count_touched", "count_wrong", "page_words", "stamp"]

#: What memory holds that nothing has been written to.
POISON = 0xA5

_CHUNK_BYTES = 4 << 20  # temporaries stay small, whatever is checked
_ODD = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014): neighbouring inputs give unrelated words."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def page_words(numbers: NDArray[np.int64], page_bytes: int, seed: int, iteration: int) -> NDArray[np.uint8]:
    """Contents of the pages with these numbers in an iteration, shape (len(numbers), page_bytes)."""
    of_run = _mix(np.array([(seed << 32) ^ iteration], np.uint64))
    of_page = _mix(of_run + (numbers.astype(np.uint64) + np.uint64(1)) * _ODD)
    words = of_page[:, None] + np.arange(-(-page_bytes // 8), dtype=np.uint64) * _ODD
    return words.view(np.uint8)[:, :page_bytes]


def _chunks(num_pages: int, page_bytes: int) -> Iterator[slice]:
    step = max(1, _CHUNK_BYTES // max(page_bytes, 1))
    for begin in range(0, num_pages, step):
        yield slice(begin, min(begin + step, num_pages))


def _as_pages(memory: NDArray[np.uint8], page_bytes: int) -> NDArray[np.uint8]:
    return memory[: len(memory) // page_bytes * page_bytes].reshape(-1, page_bytes)


def stamp(memory: NDArray[np.uint8], pages: NDArray[np.int64], *, page_bytes: int, seed: int, iteration: int) -> None:
    """Fill ``pages`` of ``memory`` with what they hold in this iteration; ``pages[i]`` is page number i of it."""
    view = _as_pages(memory, page_bytes)
    for part in _chunks(len(pages), page_bytes):
        view[pages[part]] = page_words(np.arange(part.start, part.stop), page_bytes, seed, iteration)


def count_wrong(
    memory: NDArray[np.uint8], pages: NDArray[np.int64], *, page_bytes: int, seed: int, iteration: int
) -> int:
    """How many of ``pages`` do not hold what :func:`stamp` would put there."""
    view, wrong = _as_pages(memory, page_bytes), 0
    for part in _chunks(len(pages), page_bytes):
        expected = page_words(np.arange(part.start, part.stop), page_bytes, seed, iteration)
        wrong += int((view[pages[part]] != expected).any(axis=1).sum())
    return wrong


def count_touched(memory: NDArray[np.uint8], pages: NDArray[np.int64], page_bytes: int) -> int:
    """How many of ``pages``, which held :data:`POISON`, hold something else."""
    view, touched = _as_pages(memory, page_bytes), 0
    for part in _chunks(len(pages), page_bytes):
        touched += int((view[pages[part]] != POISON).any(axis=1).sum())
    return touched
