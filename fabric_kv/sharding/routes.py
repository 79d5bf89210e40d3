"""Who sends what to whom: source ranks and destination ranks whose layers and heads overlap, replicas resolved.

>>> routes = Routes(prefill_spec, decode_spec)
>>> routes.pairs(source_set=0, src_dp=0, dst_dp=0)
((0, 0), (1, 0), (2, 0))

Ranks with equal head ranges are *replicas*. The k-th replica of a range on the destination reads from source replica
(source_set + k) mod n: one request spreads over the source's replicas, and so do requests over source sets.
"""

from __future__ import annotations

import math

from ..errors import ConfigError, PlanError
from .cache import CacheSpec
from .layout import check_range
from .placement import Coords

__all__ = ["Routes"]

MAX_SOURCE_SETS = 65536
MAX_PAIRS = 1 << 16
MAX_REMEMBERED = 1024


class _HeadRoutes:
    """Routes of all parts with one number of heads, between tensor-parallel ranks."""

    def __init__(self, src: CacheSpec, dst: CacheSpec, heads: int) -> None:
        src_ranges = [src.placement.heads_of(tp, heads) for tp in range(src.placement.tp_size)]
        dst_ranges = [dst.placement.heads_of(tp, heads) for tp in range(dst.placement.tp_size)]
        holders: dict[tuple[int, int], list[int]] = {}
        self._src_replica = []  # of each source rank: its number among its replicas, and how many there are
        for tp, span in enumerate(src_ranges):
            holders.setdefault(span, []).append(tp)
            self._src_replica.append((len(holders[span]) - 1, span))
        self._num_holders = {span: len(tps) for span, tps in holders.items()}
        seen: dict[tuple[int, int], int] = {}
        self._dst_replica = []
        for span in dst_ranges:
            self._dst_replica.append(seen.get(span, 0))
            seen[span] = seen.get(span, 0) + 1
        self._src_ranges = src_ranges
        self._dst_ranges = dst_ranges
        self.num_sets = math.lcm(*self._num_holders.values())

    def overlap(self, src_tp: int, dst_tp: int) -> bool:
        """Whether the two ranks have a head in common."""
        a, b = self._src_ranges[src_tp], self._dst_ranges[dst_tp]
        return max(a[0], b[0]) < min(a[1], b[1])

    def active(self, src_tp: int, dst_tp: int, source_set: int) -> bool:
        """Whether ``src_tp`` is the one that sends their common heads in this source set."""
        if not self.overlap(src_tp, dst_tp):
            return False
        number, span = self._src_replica[src_tp]
        return (source_set + self._dst_replica[dst_tp]) % self._num_holders[span] == number


class Routes:
    """Routes between all ranks of two caches."""

    def __init__(self, src: CacheSpec, dst: CacheSpec) -> None:
        self._src = src.placement
        self._dst = dst.placement
        self._heads = [[part.heads for part in group.parts] for group in src.layout.groups]
        self._by_heads = {
            heads: _HeadRoutes(src, dst, heads) for heads in sorted({h for hs in self._heads for h in hs})
        }
        sets = math.lcm(*(routes.num_sets for routes in self._by_heads.values()))
        # Head ranges of one's own can make the exact number absurd; any number is correct, this one is less even.
        self.num_source_sets = sets if sets <= MAX_SOURCE_SETS else MAX_SOURCE_SETS
        self._stages = [
            (a, b)
            for a, mine in enumerate(self._src.stages(src.layout.num_layers))
            for b, other in enumerate(self._dst.stages(src.layout.num_layers))
            if max(mine.start, other.start) < min(mine.stop, other.stop)
        ]
        self._tps = [
            (a, b)
            for a in range(self._src.tp_size)
            for b in range(self._dst.tp_size)
            if any(routes.overlap(a, b) for routes in self._by_heads.values())
        ]
        self._pairs: dict[tuple[int, int, int], tuple[tuple[int, int], ...]] = {}

    def pairs(self, source_set: int, src_dp: int, dst_dp: int) -> tuple[tuple[int, int], ...]:
        """(src_rank, dst_rank) with something to send in this source set, sorted."""
        check_range("source_set", source_set, 0, self.num_source_sets - 1)
        check_range("src_dp", src_dp, 0, self._src.dp_size - 1)
        check_range("dst_dp", dst_dp, 0, self._dst.dp_size - 1)
        key = (source_set, src_dp, dst_dp)
        found = self._pairs.get(key)
        if found is None:
            by_heads = self._by_heads.values()
            tps = [(a, b) for a, b in self._tps if any(routes.active(a, b, source_set) for routes in by_heads)]
            if len(self._pairs) >= MAX_REMEMBERED:
                self._pairs.clear()
            found = self._pairs[key] = tuple(
                sorted(
                    (self._src.rank_of(Coords(src_dp, src_pp, a)), self._dst.rank_of(Coords(dst_dp, dst_pp, b)))
                    for src_pp, dst_pp in self._stages
                    for a, b in tps
                )
            )
        return found

    def all_pairs(self) -> list[tuple[int, int]]:
        """Every (src_rank, dst_rank) that sends something in any source set, between all data-parallel replicas."""
        count = len(self._tps) * len(self._stages) * self._src.dp_size * self._dst.dp_size
        if count > MAX_PAIRS:
            raise PlanError(f"{count} pairs of ranks would exchange data: the limit is {MAX_PAIRS}")
        return [
            (self._src.rank_of(Coords(src_dp, src_pp, a)), self._dst.rank_of(Coords(dst_dp, dst_pp, b)))
            for src_dp in range(self._src.dp_size)
            for dst_dp in range(self._dst.dp_size)
            for src_pp, dst_pp in self._stages
            for a, b in self._tps
        ]

    def overlapping_parts(self, src_rank: int, dst_rank: int, group: int) -> tuple[bool, ...]:
        """For each part of a group, whether the two ranks have heads in common."""
        src_tp, dst_tp = self._src.coords(src_rank).tp, self._dst.coords(dst_rank).tp
        return tuple(self._by_heads[heads].overlap(src_tp, dst_tp) for heads in self._heads[group])

    def active_parts(self, src_rank: int, dst_rank: int, group: int, source_set: int | None) -> tuple[bool, ...]:
        """For each part of a group, whether ``src_rank`` sends it to ``dst_rank`` in this source set."""
        src_tp, dst_tp = self._src.coords(src_rank).tp, self._dst.coords(dst_rank).tp
        if source_set is None:
            if self.num_source_sets > 1 and len(self._by_heads) > 1:
                raise ConfigError("parts of this cache have different numbers of replicas: writes needs source_set")
            return self.overlapping_parts(src_rank, dst_rank, group)
        check_range("source_set", source_set, 0, self.num_source_sets - 1)
        return tuple(self._by_heads[heads].active(src_tp, dst_tp, source_set) for heads in self._heads[group])
