"""Plans: which bytes of which source page go where in which destination page, for any cache onto any cache.

>>> plan = plan_transfer(prefill_spec, decode_spec)
>>> page_map = plan.page_map(0, begin=0, end=512)
>>> writes = plan.writes(0, 1, layer, page_map, src_pages, dst_pages, source_set=0)

Pure functions of the two specs: both sides make the same plan, so that the decode side knows on its own how many
units must arrive.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from .cache import CacheSpec
from .compat import check_compatible
from .cutting import Cutter
from .fragments import Fragment
from .layout import check_range
from .pages import PageMap, Pieces, Selected
from .report import PlanCost, cost_of, explain
from .routes import Routes
from .units import UnitTables

__all__ = ["PageWrite", "TransferPlan", "plan_transfer"]


class PageWrite(NamedTuple):
    """``rows`` pieces of ``nbytes`` bytes for every page; offsets and strides in bytes, regions by their index.

    Row r of the i-th page goes from ``src_offset + src_pages[i] * src_stride + r * src_row_stride`` of the source's
    region to the same place with ``dst_`` of the destination's. The page arrays are read-only.
    """

    src_region: int
    src_offset: int
    src_stride: int
    dst_region: int
    dst_offset: int
    dst_stride: int
    nbytes: int
    src_pages: NDArray[np.int64]
    dst_pages: NDArray[np.int64]
    rows: int
    src_row_stride: int
    dst_row_stride: int


def plan_transfer(src: CacheSpec, dst: CacheSpec) -> TransferPlan:
    """Map the cache of the prefill side onto that of the decode side.

    Parameters
    ----------
    src, dst : CacheSpec
        Specs of the writer and of the receiver. They may differ in placement, memory and page size.

    Raises
    ------
    PlanError
        If they differ in anything else, or need what is not supported (context parallelism, HND to NHD); the message
        shows both sides field by field.
    """
    check_compatible(src.layout, dst.layout, src.placement, dst.placement)
    return TransferPlan(src, dst)


class TransferPlan:
    """The map between two caches; immutable, free of I/O, safe to share between threads.

    Attributes
    ----------
    src, dst : CacheSpec
    num_source_sets : int
        Replica sets of the source: the decode side picks one per request (``SourcePicker``).
    unit_bytes : int
        Size of a unit: a fragment of n bytes counts ceil(n / unit_bytes) units.
    """

    def __init__(self, src: CacheSpec, dst: CacheSpec) -> None:
        self.src = src
        self.dst = dst
        self._routes = Routes(src, dst)
        self.num_source_sets = self._routes.num_source_sets
        self._pieces = [Pieces.of_group(a, b) for a, b in zip(src.layout.groups, dst.layout.groups, strict=True)]
        self._cutter = Cutter(src, dst, self._pieces)
        self._groups_of_layer = [src.layout.groups_of_layer(layer) for layer in range(src.layout.num_layers)]
        self.unit_bytes = self._cutter.choose_unit(self._routes.all_pairs())
        self._units = UnitTables(
            self._cutter,
            lambda source_set, dst_dp: self.pairs(source_set, dst_dp=dst_dp),
            self._routes.active_parts,
            dst.placement.num_ranks,
            [len(pieces.kinds) for pieces in self._pieces],
            self.unit_bytes,
        )

    def group_of_layer(self, layer: int) -> int:
        """The group of a layer that is in exactly one; see ``groups_of_layer``."""
        groups = self.groups_of_layer(layer)
        if len(groups) != 1:
            raise ConfigError(f"layer {layer} is in {len(groups)} groups: ask groups_of_layer")
        return groups[0]

    def groups_of_layer(self, layer: int) -> tuple[int, ...]:
        """All groups of a layer: a latent and its indexer keys have page lists of their own."""
        check_range("layer", layer, 0, self.src.layout.num_layers - 1)
        return self._groups_of_layer[layer]

    def pairs(self, source_set: int, *, src_dp: int = 0, dst_dp: int = 0) -> tuple[tuple[int, int], ...]:
        """(src_rank, dst_rank) pairs with data between them, sorted.

        Parameters
        ----------
        source_set : int
            The replica set that the decode side picked for the request.
        src_dp, dst_dp : int
            Data-parallel replica that computes the request, and the one that receives it.
        """
        return self._routes.pairs(source_set, src_dp, dst_dp)

    def page_map(
        self,
        group: int,
        begin: int,
        end: int,
        *,
        cached: int = 0,
        final: bool = False,
        num_tokens: int | None = None,
    ) -> PageMap:
        """Which entries of the page lists a chunk sends. Compute it once and use it for all layers of the group.

        Parameters
        ----------
        group : int
        begin, end : int
            Token positions [begin, end) of the request that the chunk computes. Chunks of a request follow each other.
        cached : int
            Tokens at the start that the decode side already holds: a multiple of its page size.
        final : bool
            The request ends here: send the page that is left incomplete, and states.
        num_tokens : int, optional
            Length of the whole request; sliding-window groups need it, others do not.

        Returns
        -------
        PageMap
            A page that a chunk leaves incomplete is left for the chunk that completes it.
        """
        check_range("group", group, 0, len(self._pieces) - 1)
        return self._pieces[group].page_map(group, begin, end, cached=cached, final=final, num_tokens=num_tokens)

    def writes(
        self,
        src_rank: int,
        dst_rank: int,
        layer: int,
        page_map: PageMap,
        src_pages: NDArray[np.int64],
        dst_pages: NDArray[np.int64],
        *,
        source_set: int | None = None,
    ) -> list[PageWrite]:
        """What ``src_rank`` sends to ``dst_rank`` for one layer of one chunk.

        Parameters
        ----------
        layer : int
            Global layer index, a layer of ``page_map.group``.
        page_map : PageMap
        src_pages, dst_pages : ndarray of int64, shape (num_pages,)
            The request's whole page lists of that group, in token order, without repeats. Read once per page map.
        source_set : int, optional
            The request's source set. Needed only where groups have different numbers of replicas.

        Returns
        -------
        list of PageWrite
            Empty where the pair has nothing to move for this layer.

        Raises
        ------
        ConfigError
            If a page index is out of range, a list too short, or ``layer`` not in the group. Nothing was changed.
        """
        group = page_map.group
        fragments = self.fragments(src_rank, dst_rank, group, layer, source_set)
        if not fragments or not page_map:
            return []
        selected = page_map.select(src_pages, dst_pages)
        self.check_pages(src_rank, dst_rank, group, selected)
        out = []
        for kind, sr, so, ss, dr, do, ds, nbytes, rows, srs, drs in fragments:
            chosen = selected[kind]
            if chosen is not None:
                out.append(PageWrite(sr, so, ss, dr, do, ds, nbytes, chosen[0], chosen[1], rows, srs, drs))
        return out

    def check_pages(self, src_rank: int, dst_rank: int, group: int, selected: Iterable[Selected | None]) -> None:
        """Raise ConfigError if one of the pages that a chunk sends does not exist on either rank.

        ``selected`` is what ``PageMap.select`` has returned for the group.
        """
        num_src = self.src.memory[src_rank].num_pages[group]
        num_dst = self.dst.memory[dst_rank].num_pages[group]
        for chosen in selected:
            if chosen is None:
                continue
            if chosen.src_low < 0 or chosen.src_high >= num_src:
                self._refuse_page("prefill", src_rank, group, num_src, chosen.src_low, chosen.src_high)
            if chosen.dst_low < 0 or chosen.dst_high >= num_dst:
                self._refuse_page("decode", dst_rank, group, num_dst, chosen.dst_low, chosen.dst_high)

    def expected_units(self, dst_rank: int, source_set: int, num_tokens: int, *, cached: int = 0) -> int:
        """Units that arrive at ``dst_rank`` for a whole request: all layers, all sources, data only."""
        check_range("dst_rank", dst_rank, 0, self.dst.placement.num_ranks - 1)
        dp = self.dst.placement.coords(dst_rank).dp
        return int(self.expected_by_group(source_set, dp, num_tokens, cached=cached)[dst_rank, 0])

    def expected_by_group(
        self,
        source_set: int,
        dst_dp: int,
        num_tokens: int,
        *,
        cached: int = 0,
        layer_ends: tuple[int, ...] | None = None,
    ) -> NDArray[np.int64]:
        """Units that arrive for a whole request, by decode rank and group of layers: all sources, data only.

        Parameters
        ----------
        source_set : int
        dst_dp : int
            The data-parallel replica that receives it; nothing arrives at the others.
        num_tokens, cached : int
        layer_ends : tuple of int, optional
            Where groups of neighbouring layers end; by default there is one of all.

        Returns
        -------
        ndarray of int64, shape (num_ranks, num_groups)

        Raises
        ------
        PlanError
            If a request would be cut into absurdly many pieces.
        """
        counts = [count for pieces in self._pieces for count in pieces.counts(num_tokens, cached)]
        return self._units.expected(source_set, dst_dp, layer_ends or (self.src.layout.num_layers,), counts)

    def fragments(
        self, src_rank: int, dst_rank: int, group: int, layer: int, source_set: int | None = None
    ) -> tuple[Fragment, ...]:
        """What ``writes`` sends for each page, before page indices are known."""
        if group not in self.groups_of_layer(layer):
            raise ConfigError(f"layer {layer} is not in group {group}: it is in {self.groups_of_layer(layer)}")
        active = self._routes.active_parts(src_rank, dst_rank, group, source_set)
        return self._cutter.fragments(src_rank, dst_rank, group, layer, active)

    def piece_counts(self, group: int, num_tokens: int, *, cached: int = 0) -> tuple[int, ...]:
        """Pieces of each kind (pages, where page sizes are equal) that a whole request sends in a group."""
        check_range("group", group, 0, len(self._pieces) - 1)
        return self._pieces[group].counts(num_tokens, cached)

    def cost(
        self, num_tokens: int, *, cached: int = 0, source_set: int = 0, src_dp: int = 0, dst_dp: int = 0
    ) -> PlanCost:
        """Bytes, writes and units of one request, for every pair of ranks."""
        return cost_of(self, num_tokens, cached=cached, source_set=source_set, src_dp=src_dp, dst_dp=dst_dp)

    def explain(self, source_set: int = 0, *, src_dp: int = 0, dst_dp: int = 0) -> str:
        """A table of which source rank feeds which destination rank: layers, heads, writes per page."""
        return explain(self, source_set, src_dp, dst_dp)

    def _refuse_page(self, side: str, rank: int, group: int, num_pages: int, low: int, high: int) -> None:
        name = self.src.layout.groups[group].name
        raise ConfigError(
            f"page index {low if low < 0 else high} is out of range: group {name} on {side} rank {rank}"
            f" has {num_pages} pages"
        )
