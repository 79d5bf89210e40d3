"""Durations as a histogram whose buckets are 1 % wide: constant memory, and figures of several processes add up.

>>> latencies = Latencies(); latencies.add(1500); latencies.summary().p50_us
1.5
"""

from __future__ import annotations

import math
from array import array
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

__all__ = ["Latencies", "LatencyCounts", "Summary"]

_GROWTH = 1.01
_NUM_BUCKETS = 3200  # 1.01^3200 ns is more than a day
_FOLD = 1 << 16  # kept one by one until then


class LatencyCounts(msgspec.Struct, frozen=True, array_like=True):
    """A histogram on its way to another process.

    Attributes
    ----------
    buckets : dict of int to int
        How many there are in each bucket that is not empty.
    sum_ns, min_ns, max_ns : int
        Exact.
    """

    buckets: dict[int, int]
    sum_ns: int
    min_ns: int
    max_ns: int


class Summary(NamedTuple):
    """In microseconds; quantiles within 0.5 %, the mean and the maximum exact. All 0 if nothing was counted."""

    avg_us: float
    p50_us: float
    p99_us: float
    p999_us: float
    max_us: float


class Latencies:
    """Counts durations."""

    def __init__(self) -> None:
        self._fresh = array("q")
        self._buckets: NDArray[np.int64] = np.zeros(_NUM_BUCKETS, np.int64)
        self._sum_ns = 0
        self._min_ns = 2**63 - 1
        self._max_ns = 0

    def add(self, ns: int) -> None:
        """One more, in nanoseconds."""
        self._fresh.append(ns)
        if len(self._fresh) >= _FOLD:
            self._fold()

    def merge(self, counts: LatencyCounts) -> None:
        """Add what another process has counted."""
        for bucket, count in counts.buckets.items():
            self._buckets[min(max(bucket, 0), _NUM_BUCKETS - 1)] += count
        self._sum_ns += counts.sum_ns
        self._min_ns = min(self._min_ns, counts.min_ns)
        self._max_ns = max(self._max_ns, counts.max_ns)

    def counts(self) -> LatencyCounts:
        """For another process."""
        self._fold()
        used = np.flatnonzero(self._buckets)
        buckets = dict(zip(used.tolist(), self._buckets[used].tolist(), strict=True))
        return LatencyCounts(buckets, self._sum_ns, self._min_ns, self._max_ns)

    def __len__(self) -> int:
        self._fold()
        return int(self._buckets.sum())

    def summary(self) -> Summary:
        """What tables show."""
        num = len(self)
        if not num:
            return Summary(0.0, 0.0, 0.0, 0.0, 0.0)
        p50, p99, p999 = (self._quantile_ns(num, q) / 1e3 for q in (0.5, 0.99, 0.999))
        return Summary(self._sum_ns / num / 1e3, p50, p99, p999, self._max_ns / 1e3)

    def _quantile_ns(self, num: int, q: float) -> float:
        rank = min(math.ceil(q * num), num)
        bucket = int(np.searchsorted(np.cumsum(self._buckets), rank))
        middle: float = _GROWTH ** (bucket + 0.5)
        return min(max(middle, self._min_ns), self._max_ns)

    def _fold(self) -> None:
        if not self._fresh:
            return
        fresh: NDArray[np.int64] = np.array(self._fresh, np.int64)
        index = np.log(np.maximum(fresh, 1)) / math.log(_GROWTH)
        np.add.at(self._buckets, np.minimum(index.astype(np.int64), _NUM_BUCKETS - 1), 1)
        self._sum_ns += int(fresh.sum())
        self._min_ns = min(self._min_ns, *self._fresh)
        self._max_ns = max(self._max_ns, *self._fresh)
        self._fresh = array("q")
