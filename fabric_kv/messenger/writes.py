"""What this side's ranks write to those of one decode engine: worked out once, and posted with the pages of each chunk.

>>> writes = SessionWrites(plan, our_regions, their_regions, layer_groups)
>>> for rank, lists, layers in writes.of_chunk(maps, src_pages, dst_pages, source_set=0, src_dp=0, dst_dp=0): ...
>>> rank.submit(engine, peer, lists, token, watch, step)

Which byte ranges go where in which layer depends on the two caches alone. To find out, and to tell the core, takes
10 us for each layer and pair of ranks: too long for a scheduler's thread to do it for each chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..prepared import PreparedPiece

if TYPE_CHECKING:
    from ..engine import Engine
    from ..prepared import Prepared, Watch
    from ..regions import CounterToken, RemoteRegion
    from ..sharding import PageMap, TransferPlan
    from ..transfers import MemoryRegion, Peer, Transfer
    from .layers import LayerGroups

__all__ = ["ChunkWrites", "PageLists", "RankWrites", "SessionWrites"]

# Pieces that a session remembers, of all combinations of source set and replicas; one combination is always kept.
MAX_REMEMBERED = 1 << 17

PageLists = list[tuple[NDArray[np.int64], NDArray[np.int64]]]
_NO_PAGES = (np.empty(0, np.int64), np.empty(0, np.int64))


class RankWrites:
    """What one decode rank gets from one device group of this side: the layers of a group, without pages.

    Attributes
    ----------
    dst_rank : int
    counter : int
        Which of a request's counters counts it.
    kinds : dict of (group, kind) to int
        Which page lists of a submission hold the pieces of that kind.
    layers : list of set of int
        For each of these page lists, the layers that have something to write.
    sources : set of (src_rank, group)
        Who has the pages.
    """

    def __init__(self, dst_rank: int, counter: int) -> None:
        self.dst_rank = dst_rank
        self.counter = counter
        self.kinds: dict[tuple[int, int], int] = {}
        self.layers: list[set[int]] = []
        self.sources: set[tuple[int, int]] = set()
        self._pieces: list[PreparedPiece] = []
        self._prepared: Prepared | None = None

    @property
    def pieces(self) -> list[PreparedPiece]:
        """Of all layers, in the order of ``add``."""
        return self._pieces

    @property
    def num_pieces(self) -> int:
        """How many there are."""
        return len(self._pieces)

    def add(self, layer: int, group: int, kind: int, src_rank: int, piece: PreparedPiece) -> None:
        """One more piece, of a layer that is not before that of the last one."""
        index = self.kinds.setdefault((group, kind), len(self.kinds))
        if index == len(self.layers):
            self.layers.append(set())
        self.layers[index].add(layer)
        self.sources.add((src_rank, group))
        self._pieces.append(piece._replace(layer=layer + 1, lists=index))

    def submit(
        self, engine: Engine, peer: Peer, lists: PageLists, token: CounterToken, watch: Watch | None, step: int
    ) -> Transfer:
        """Post it with a chunk's pages; without a watch all layers go at once. One thread at a time.

        Raises
        ------
        FabricKVError
            As ``Engine.prepare`` and ``Prepared.submit``.
        """
        if self._prepared is None:
            self._prepared = engine.prepare(peer, self._pieces)
        return self._prepared.submit(lists, token=token, watch=watch, step=step)


class ChunkWrites(NamedTuple):
    """What a chunk brings to one rank: the pages, and the layers that have something to write."""

    rank: RankWrites
    lists: PageLists
    layers: frozenset[int]


class SessionWrites:
    """All that may be written for requests of one session. Threads: any.

    Parameters
    ----------
    plan : TransferPlan
    here : sequence of sequence of MemoryRegion
        Of each rank of this side.
    there : sequence of sequence of RemoteRegion
        Of each decode rank.
    layer_groups : LayerGroups
        What decode counts by itself.
    """

    def __init__(
        self,
        plan: TransferPlan,
        here: Sequence[Sequence[MemoryRegion]],
        there: Sequence[Sequence[RemoteRegion]],
        layer_groups: LayerGroups,
    ) -> None:
        self._plan = plan
        self._layer_groups = layer_groups
        self._here = here
        self._there = there
        self._remembered: dict[tuple[int, int, int], list[RankWrites]] = {}

    def of_chunk(
        self,
        maps: Sequence[PageMap],
        src_pages: Sequence[NDArray[Any]],
        dst_pages: Sequence[NDArray[Any]],
        *,
        source_set: int,
        src_dp: int,
        dst_dp: int,
    ) -> Iterator[ChunkWrites]:
        """What a chunk brings to each rank; nothing for ranks that get nothing.

        Parameters
        ----------
        maps, src_pages, dst_pages
            Of each cache group: the chunk's page map, and the request's whole page lists on both sides.

        Raises
        ------
        ConfigError
            If a page list is too short or holds a page that does not exist.
        """
        selected = [each.select(src, dst) for each, src, dst in zip(maps, src_pages, dst_pages, strict=True)]
        for rank in self._of(source_set, src_dp, dst_dp):
            lists: PageLists = []
            layers: set[int] = set()
            for (group, kind), its_layers in zip(rank.kinds, rank.layers, strict=True):
                chosen = selected[group][kind]
                lists.append(_NO_PAGES if chosen is None else (chosen.src_pages, chosen.dst_pages))
                if chosen is not None:
                    layers |= its_layers
            for src_rank, group in rank.sources:
                self._plan.check_pages(src_rank, rank.dst_rank, group, selected[group])
            if layers:
                yield ChunkWrites(rank, lists, frozenset(layers))

    def _of(self, source_set: int, src_dp: int, dst_dp: int) -> list[RankWrites]:
        key = source_set, src_dp, dst_dp
        found = self._remembered.get(key)
        if found is None:
            found = self._work_out(*key)
            self._remembered[key] = found
            excess = sum(rank.num_pieces for each in list(self._remembered.values()) for rank in each) - MAX_REMEMBERED
            while excess > 0 and (oldest := next(iter(self._remembered))) != key:
                excess -= sum(rank.num_pieces for rank in self._remembered.pop(oldest, []))
        return found

    def _work_out(self, source_set: int, src_dp: int, dst_dp: int) -> list[RankWrites]:
        plan = self._plan
        pairs = plan.pairs(source_set, src_dp=src_dp, dst_dp=dst_dp)
        # By counter (decode rank and layer group), and by the device group that sends: a submission has one of each.
        found: dict[tuple[int, int], RankWrites] = {}
        for layer in range(plan.src.layout.num_layers):
            layer_group = self._layer_groups.group_of(layer)
            for group in plan.groups_of_layer(layer):
                for src_rank, dst_rank in pairs:
                    for each in plan.fragments(src_rank, dst_rank, group, layer, source_set):
                        src, dst = self._here[src_rank][each.src_region], self._there[dst_rank][each.dst_region]
                        piece = PreparedPiece(
                            src=src,
                            src_offset=each.src_offset,
                            src_stride=each.src_stride,
                            dst=dst,
                            dst_offset=each.dst_offset,
                            dst_stride=each.dst_stride,
                            nbytes=each.nbytes,
                            rows=each.rows,
                            src_row_stride=each.src_row_stride,
                            dst_row_stride=each.dst_row_stride,
                        )
                        counter = self._layer_groups.counter_of(dst_rank, layer_group)
                        key = counter, src.remote.group
                        if key not in found:
                            found[key] = RankWrites(dst_rank, counter)
                        found[key].add(layer, group, each.kind, src_rank, piece)
        return list(found.values())
