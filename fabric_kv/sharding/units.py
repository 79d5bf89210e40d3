"""What counters have to expect: units by decode rank and group of layers, from one table for all requests.

>>> tables = UnitTables(...)                                          # TransferPlan.expected_by_group builds on this
>>> tables.expected(source_set=0, dst_dp=0, ends=(61,), counts=(7, 7, 0))       # pieces of each kind that are sent

Both sides work it out for every request, from what a peer asks for: so it is a product of a table and a vector, and the
tables that are kept are few.
"""

from __future__ import annotations

import bisect
import collections
import itertools
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..errors import PlanError
from .cutting import Cutter

__all__ = ["MAX_PIECES", "UnitTables"]

# (source rank, decode rank, group, layer) that one request may touch. Above deployments that exist: TP 64 to TP 64 of a
# model with 126 layers has 8064.
MAX_PIECES = 16384
# Tables that are kept: of a source set, a data-parallel replica, and layer groups.
MAX_TABLES = 64


class UnitTables:
    """Units per piece of each kind.

    Parameters
    ----------
    cutter : Cutter
    pairs : callable (source_set, dst_dp)
        Who sends to whom.
    active_parts : callable (src_rank, dst_rank, group, source_set)
        Which parts of a group they send.
    num_ranks : int
        Of the decode side.
    num_kinds : sequence of int
        Kinds of pieces of each cache group.
    unit_bytes : int
    """

    def __init__(
        self,
        cutter: Cutter,
        pairs: Callable[[int, int], Sequence[tuple[int, int]]],
        active_parts: Callable[[int, int, int, int], tuple[bool, ...]],
        num_ranks: int,
        num_kinds: Sequence[int],
        unit_bytes: int,
    ) -> None:
        self._cutter = cutter
        self._pairs = pairs
        self._active_parts = active_parts
        self._num_ranks = num_ranks
        self._first_kind = list(itertools.accumulate(num_kinds, initial=0))
        self._unit_bytes = unit_bytes
        self._tables: dict[tuple[int, int, tuple[int, ...]], NDArray[np.int64]] = {}

    def expected(self, source_set: int, dst_dp: int, ends: tuple[int, ...], counts: Sequence[int]) -> NDArray[np.int64]:
        """Units by decode rank and layer group, shape (num_ranks, num_groups).

        Raises
        ------
        PlanError
            If a request would consist of more than 16384 pieces.
        """
        key = source_set, dst_dp, ends
        table = self._tables.get(key)
        if table is None:
            table = self._make_table(source_set, dst_dp, ends)
            while len(self._tables) >= MAX_TABLES:
                self._tables.pop(next(iter(self._tables)), None)  # another thread may have been first
            self._tables[key] = table
        expected: NDArray[np.int64] = table @ np.asarray(counts, np.int64)
        return expected

    def _make_table(self, source_set: int, dst_dp: int, ends: tuple[int, ...]) -> NDArray[np.int64]:
        # Layers of the same shape bring the same: they are counted before anything is added up.
        seen: collections.Counter[tuple[int, int, int, tuple[int, ...]]] = collections.Counter()
        num_pieces = 0
        for src_rank, dst_rank in self._pairs(source_set, dst_dp):
            active: dict[int, tuple[bool, ...]] = {}
            for group, layer in self._cutter.source_layers(src_rank):
                if group not in active:
                    active[group] = self._active_parts(src_rank, dst_rank, group, source_set)
                units = self._cutter.units(src_rank, dst_rank, group, layer, active[group], self._unit_bytes)
                if units:
                    seen[dst_rank, bisect.bisect_right(ends, layer), group, units] += 1
                    num_pieces += 1
            if num_pieces > MAX_PIECES:
                raise PlanError(f"a request would be cut into more than {MAX_PIECES} pieces (ranks, groups and layers)")
        table = np.zeros((self._num_ranks, len(ends), self._first_kind[-1]), np.int64)
        for (dst_rank, layer_group, group, units), count in seen.items():
            begin, end = self._first_kind[group : group + 2]
            table[dst_rank, layer_group, begin:end] += np.multiply(units, count)
        return table
