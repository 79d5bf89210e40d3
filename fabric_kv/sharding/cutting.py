"""Fragments of one layer between two ranks, and the unit in which a plan counts them.

>>> cutter = Cutter(prefill_spec, decode_spec, pieces)
>>> cutter.fragments(src_rank=0, dst_rank=1, group=0, layer=7, active=(True, True))
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..errors import PlanError
from .cache import CacheSpec
from .fragments import Box, Cut, Fragment, cut_boxes
from .pages import Pieces
from .placement import Coords
from .places import LayerMemory
from .shapes import Shapes

__all__ = ["Cutter"]

MAX_CUTS = 8192  # fragments of one layer between two ranks, for each page
MAX_BOXES = 1 << 16  # parts x kinds of pieces, over all different pairs of shapes

# A unit is not larger than this unless a fragment needs it, so that a large fragment can be split over rails.
UNIT_BYTES = 65536
# A write's weight is at most 1023 units: with this, 63 of the largest fragments can be merged into one write.
UNITS_PER_FRAGMENT = 16


class _Overlap(NamedTuple):
    """Common heads of two ranks, for one part, as local indices."""

    heads: int
    src_head: int
    dst_head: int


_Overlaps = tuple[_Overlap, ...]
_Active = tuple[bool, ...]


class Cutter:
    """Cuts source pages into destination pages; remembers the result for every (pair, layer).

    Raises
    ------
    PlanError
        If a layer needs absurdly many fragments, or data-parallel replicas of the source differ in shape.
    """

    def __init__(self, src: CacheSpec, dst: CacheSpec, pieces: list[Pieces]) -> None:
        self._src = src
        self._dst = dst
        self._pieces = pieces
        self._src_shapes = Shapes(src)
        self._dst_shapes = Shapes(dst)
        self._placed: dict[tuple[int, int, int, int, _Active], tuple[Fragment, ...]] = {}
        self._cuts: dict[tuple[int, int, int, _Overlaps, _Active], list[Cut]] = {}
        self._units: dict[tuple[int, int, int, _Overlaps, _Active, int], tuple[int, ...]] = {}
        self._overlap_cache: dict[tuple[int, int, int], _Overlaps] = {}
        self._check_replicas()

    def source_layers(self, src_rank: int) -> Iterable[tuple[int, int]]:
        """(group, layer) pairs that a source rank holds."""
        return self._src_shapes.memory[src_rank]

    def fragments(self, src_rank: int, dst_rank: int, group: int, layer: int, active: _Active) -> tuple[Fragment, ...]:
        """Fragments of the ``active`` parts; none where either rank lacks the layer."""
        key = (src_rank, dst_rank, group, layer, active)
        found = self._placed.get(key)
        if found is None:
            src = self._src_shapes.memory[src_rank].get((group, layer))
            dst = self._dst_shapes.memory[dst_rank].get((group, layer))
            found = ()
            if src is not None and dst is not None:
                overlaps = self._overlaps(src_rank, dst_rank, group)
                shapes = (
                    self._src_shapes.number[src_rank][group, layer],
                    self._dst_shapes.number[dst_rank][group, layer],
                )
                cuts = self._cut(*shapes, src, dst, overlaps, active)
                found = tuple(_place(cut, src, dst) for cut in cuts)
            self._placed[key] = found
        return found

    def units(
        self, src_rank: int, dst_rank: int, group: int, layer: int, active: _Active, unit_bytes: int
    ) -> tuple[int, ...]:
        """Units that a piece of each kind brings; nothing where either rank lacks the layer."""
        src_shape = self._src_shapes.number[src_rank].get((group, layer))
        dst_shape = self._dst_shapes.number[dst_rank].get((group, layer))
        if src_shape is None or dst_shape is None:
            return ()
        overlaps = self._overlaps(src_rank, dst_rank, group)
        key = (group, src_shape, dst_shape, overlaps, active, unit_bytes)
        found = self._units.get(key)
        if found is None:
            src, dst = self._src_shapes.memory[src_rank][group, layer], self._dst_shapes.memory[dst_rank][group, layer]
            totals = [0] * len(self._pieces[group].kinds)
            for cut in self._cut(src_shape, dst_shape, src, dst, overlaps, active):
                totals[cut.kind] += cut.rows * -(-cut.nbytes // unit_bytes)
            found = self._units[key] = tuple(totals)
        return found

    def choose_unit(self, pairs: Iterable[tuple[int, int]]) -> int:
        """The smallest fragment between ``pairs``, within bounds that keep weights and the cost of splitting small."""
        sizes: set[int] = set()
        seen: set[tuple[int, int, int, _Overlaps]] = set()
        boxes = 0
        for src_rank, dst_rank in pairs:
            src_groups, dst_groups = self._src_shapes.layers[src_rank], self._dst_shapes.layers[dst_rank]
            for group in src_groups.keys() & dst_groups.keys():
                overlaps = self._overlaps(src_rank, dst_rank, group)
                for src_shape, src_layers in src_groups[group].items():
                    for dst_shape, dst_layers in dst_groups[group].items():
                        key = (group, src_shape, dst_shape, overlaps)
                        if key in seen or src_layers.isdisjoint(dst_layers):
                            continue
                        seen.add(key)
                        boxes += len(overlaps) * len(self._pieces[group].kinds)
                        if boxes > MAX_BOXES:
                            raise PlanError(f"layers differ in so many ways that over {MAX_BOXES} boxes must be cut")
                        at = (group, min(src_layers & dst_layers))
                        src, dst = self._src_shapes.memory[src_rank][at], self._dst_shapes.memory[dst_rank][at]
                        active = tuple(overlap.heads > 0 for overlap in overlaps)
                        cuts = self._cut(src_shape, dst_shape, src, dst, overlaps, active)
                        sizes.update(cut.nbytes for cut in cuts)
        smallest, largest = min(sizes, default=1), max(sizes, default=1)
        share = -(-smallest // UNIT_BYTES)  # even shares of the smallest fragment, so that its last unit is a full one
        return max(-(-smallest // share), -(-largest // UNITS_PER_FRAGMENT))

    def _overlaps(self, src_rank: int, dst_rank: int, group: int) -> _Overlaps:
        src_tp, dst_tp = self._src.placement.coords(src_rank).tp, self._dst.placement.coords(dst_rank).tp
        found = self._overlap_cache.get((src_tp, dst_tp, group))
        if found is None:
            out = []
            for part in self._src.layout.groups[group].parts:
                src_begin, src_end = self._src.placement.heads_of(src_tp, part.heads)
                dst_begin, dst_end = self._dst.placement.heads_of(dst_tp, part.heads)
                begin, end = max(src_begin, dst_begin), min(src_end, dst_end)
                out.append(_Overlap(max(0, end - begin), begin - src_begin, begin - dst_begin))
            found = self._overlap_cache[src_tp, dst_tp, group] = tuple(out)
        return found

    def _cut(
        self, src_shape: int, dst_shape: int, src: LayerMemory, dst: LayerMemory, overlaps: _Overlaps, active: _Active
    ) -> list[Cut]:
        """Intersect two ranks' boxes of one layer, for each kind of piece; the same for all layers of these shapes."""
        key = (src.group, src_shape, dst_shape, overlaps, active)
        found = self._cuts.get(key)
        if found is not None:
            return found
        found = []
        group = self._src.layout.groups[src.group]
        for index, kind in enumerate(self._pieces[src.group].kinds):
            boxes = []
            for number, (part, overlap) in enumerate(zip(group.parts, overlaps, strict=True)):
                if not active[number] or not overlap.heads:
                    continue
                a, b = src.parts[number], dst.parts[number]
                rows, src_row, dst_row = (part.rows, 0, 0) if part.rows else (kind.tokens, kind.src_row, kind.dst_row)
                boxes.append(
                    Box(
                        number,
                        a.region,
                        a.offset + overlap.src_head * a.head_stride + src_row * a.row_stride,
                        a.page_stride,
                        b.region,
                        b.offset + overlap.dst_head * b.head_stride + dst_row * b.row_stride,
                        b.page_stride,
                        part.row_bytes,
                        ((overlap.heads, a.head_stride, b.head_stride), (rows, a.row_stride, b.row_stride)),
                    )
                )
            for cut in cut_boxes(index, boxes):
                a, b = src.parts[cut.part], dst.parts[cut.part]
                found.append(cut._replace(src_offset=cut.src_offset - a.offset, dst_offset=cut.dst_offset - b.offset))
            if len(found) > MAX_CUTS:
                raise PlanError(f"group {group.name}: more than {MAX_CUTS} fragments per page: too few shared bytes")
        self._cuts[key] = found
        return found

    def _check_replicas(self) -> None:
        """Decode counts without knowing which data-parallel replica computes: all must be cut the same way."""
        placement = self._src.placement
        for rank, numbers in enumerate(self._src_shapes.number):
            coords = placement.coords(rank)
            first = placement.rank_of(Coords(0, coords.pp, coords.tp))
            for at, number in numbers.items():
                if number != self._src_shapes.number[first][at]:
                    raise PlanError(
                        f"prefill rank {rank} is a data-parallel replica of rank {first}, but its layer {at[1]} has"
                        f" other strides: {self._src_shapes.memory[rank][at]} and {self._src_shapes.memory[first][at]}"
                    )


def _place(cut: Cut, src: LayerMemory, dst: LayerMemory) -> Fragment:
    """Move a cut to the place of a layer."""
    a, b = src.parts[cut.part], dst.parts[cut.part]
    return Fragment(
        cut.kind,
        a.region,
        a.offset + cut.src_offset,
        a.page_stride,
        b.region,
        b.offset + cut.dst_offset,
        b.page_stride,
        cut.nbytes,
        cut.rows,
        cut.src_row_stride,
        cut.dst_row_stride,
    )
