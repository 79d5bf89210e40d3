"""Where the pages of each iteration lie, at both ends: the same seed gives the same places.

>>> places = Places(Case(4096, 64), contiguity=50, lanes=4, seed=1)
>>> places.src[lane], places.dst[lane]         # page indices of the iterations of that lane, shape (64,) each
>>> places.gaps                                # pages in between, which nothing may touch

Iteration i uses lane ``i % lanes``; lanes share no page. Runs of neighbouring pages, as long as the contiguity says,
lie in an order of their own at each end, and a page between any two is left free, so that chance makes no neighbours.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .workload import Case

__all__ = ["Places", "lanes_for"]


def _runs(num_pages: int, contiguity: int, random: np.random.Generator) -> NDArray[np.int64]:
    """Lengths of the runs; they add up to the pages."""
    num_breaks = round((num_pages - 1) * (100 - contiguity) / 100)
    breaks = np.sort(random.permutation(num_pages - 1)[:num_breaks]) + 1
    return np.diff(np.concatenate([[0], breaks, [num_pages]])).astype(np.int64)


def _lay_out(lengths: NDArray[np.int64], random: np.random.Generator) -> NDArray[np.int64]:
    """The page of each page of the runs, with one free page before each run."""
    order = random.permutation(len(lengths))
    starts = np.empty(len(lengths), np.int64)
    starts[order] = np.cumsum(np.concatenate([[0], lengths[order][:-1]])) + np.arange(1, len(lengths) + 1)
    first = np.cumsum(lengths) - lengths
    return np.repeat(starts - first, lengths) + np.arange(lengths.sum())


def _area(num_pages: int, contiguity: int) -> int:
    """Pages that a lane occupies, the free ones included."""
    return num_pages + round((num_pages - 1) * (100 - contiguity) / 100) + 2


def lanes_for(case: Case, contiguity: int, depth: int, memory_bytes: int) -> int:
    """How many iterations get places of their own: all in flight, as far as the memory goes."""
    lane_bytes = max(_area(case.num_pages, contiguity) * case.page_bytes, 1)
    return max(1, min(depth, memory_bytes // lane_bytes))


class Places:
    """The page lists of one row.

    Parameters
    ----------
    case : Case
    contiguity : int
        Percent.
    lanes : int
        From :func:`lanes_for`.
    seed : int
    """

    def __init__(self, case: Case, contiguity: int, lanes: int, seed: int) -> None:
        random = np.random.default_rng((seed, case.page_bytes, case.num_pages))
        lengths = _runs(case.num_pages, contiguity, random)
        self.case = case
        self.lanes = lanes
        self.area = _area(case.num_pages, contiguity)
        src, dst = _lay_out(lengths, random), _lay_out(lengths, random)
        bases = np.arange(lanes)[:, None] * self.area
        self.src: NDArray[np.int64] = bases + src
        self.dst: NDArray[np.int64] = bases + dst

    @property
    def num_pages(self) -> int:
        """Of all lanes, the free ones included."""
        return self.lanes * self.area

    @property
    def nbytes(self) -> int:
        """What they need at each end; at least one byte, since there must be something to register."""
        return max(self.num_pages * self.case.page_bytes, 64)

    @property
    def gaps(self) -> NDArray[np.int64]:
        """Pages of the receiving end that nothing is written to."""
        free = np.ones(self.num_pages, bool)
        free[self.dst] = False
        return np.flatnonzero(free)
