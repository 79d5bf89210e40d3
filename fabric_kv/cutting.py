"""Fragments of one layer between two ranks, and the unit in which a plan counts them.

>>> cutter = Cutter(prefill_spec, decode_spec, pieces)
>>> cutter.fragments(src_rank=0, dst_rank=1, group=0, layer=7, active=(True, True))
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .cache import CacheSpec
from .errors import PlanError
from .fragments import Box, Fragment, fragments_of
from .pages import Pieces
from .placement import Coords
from .places import LayerMemory

__all__ = ["Cutter"]

MAX_FRAGMENTS = 8192  # of one layer between two ranks, for each page
MAX_SHAPES = 64  # different memory shapes of one rank's layers in one group
MAX_BOXES = 1 << 16  # parts x kinds of pieces, over all different pairs of shapes

# A unit is not larger than this unless a fragment needs it, so that a large fragment can be split over rails.
UNIT_BYTES = 65536
# A write's weight is at most 1023 units: with this, 63 of the largest fragments can be merged into one write.
UNITS_PER_FRAGMENT = 16

# Strides of each part, and where it starts relative to the first part if it is near enough to touch it.
Shape = tuple[tuple[int, int, int, int | None], ...]


class _Overlap(NamedTuple):
    """Common heads of two ranks, for one part, as local indices."""

    heads: int
    src_head: int
    dst_head: int


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
        self._memory = tuple(
            [{(layer.group, layer.layer): layer for layer in rank.layers} for rank in spec.memory]
            for spec in (src, dst)
        )
        self._cache: dict[tuple[int, int, int, int, tuple[bool, ...]], tuple[Fragment, ...]] = {}
        self._overlap_cache: dict[tuple[int, int, int], tuple[_Overlap, ...]] = {}
        self._check_replicas()

    def source_layers(self, src_rank: int) -> Iterable[tuple[int, int]]:
        """(group, layer) pairs that a source rank holds."""
        return self._memory[0][src_rank]

    def fragments(
        self, src_rank: int, dst_rank: int, group: int, layer: int, active: tuple[bool, ...]
    ) -> tuple[Fragment, ...]:
        """Fragments of the ``active`` parts; none where either rank lacks the layer."""
        key = (src_rank, dst_rank, group, layer, active)
        found = self._cache.get(key)
        if found is None:
            src = self._memory[0][src_rank].get((group, layer))
            dst = self._memory[1][dst_rank].get((group, layer))
            found = ()
            if src is not None and dst is not None:
                found = self._cut(src, dst, self._overlaps(src_rank, dst_rank, group), active)
            self._cache[key] = found
        return found

    def choose_unit(self, pairs: Iterable[tuple[int, int]]) -> int:
        """The smallest fragment between ``pairs``, within bounds that keep weights and the cost of splitting small."""
        shapes = [[self._shapes(spec, rank) for rank in range(len(spec.memory))] for spec in (self._src, self._dst)]
        sizes: set[int] = set()
        seen = set()
        boxes = 0
        for src_rank, dst_rank in pairs:
            for group in shapes[0][src_rank].keys() & shapes[1][dst_rank].keys():
                overlaps = self._overlaps(src_rank, dst_rank, group)
                active = tuple(overlap.heads > 0 for overlap in overlaps)
                for src_shape, src_layers in shapes[0][src_rank][group].items():
                    for dst_shape, dst_layers in shapes[1][dst_rank][group].items():
                        key = (group, src_shape, dst_shape, overlaps)
                        if key in seen or src_layers.keys().isdisjoint(dst_layers):
                            continue
                        seen.add(key)
                        boxes += len(overlaps) * len(self._pieces[group].kinds)
                        if boxes > MAX_BOXES:
                            raise PlanError(
                                f"layers differ in so many ways that more than {MAX_BOXES} boxes must be cut"
                            )
                        layer = min(src_layers.keys() & dst_layers.keys())
                        cut = self._cut(src_layers[layer], dst_layers[layer], overlaps, active)
                        sizes.update(fragment.nbytes for fragment in cut)
        smallest, largest = min(sizes, default=1), max(sizes, default=1)
        share = -(-smallest // UNIT_BYTES)  # even shares of the smallest fragment, so that its last unit is a full one
        return max(-(-smallest // share), -(-largest // UNITS_PER_FRAGMENT))

    def _overlaps(self, src_rank: int, dst_rank: int, group: int) -> tuple[_Overlap, ...]:
        src_tp, dst_tp = self._src.placement.coords(src_rank).tp, self._dst.placement.coords(dst_rank).tp
        found = self._overlap_cache.get((src_tp, dst_tp, group))
        if found is not None:
            return found
        out = []
        for part in self._src.layout.groups[group].parts:
            src_begin, src_end = self._src.placement.heads_of(src_tp, part.heads)
            dst_begin, dst_end = self._dst.placement.heads_of(dst_tp, part.heads)
            begin, end = max(src_begin, dst_begin), min(src_end, dst_end)
            out.append(_Overlap(max(0, end - begin), begin - src_begin, begin - dst_begin))
        found = self._overlap_cache[src_tp, dst_tp, group] = tuple(out)
        return found

    def _cut(
        self, src: LayerMemory, dst: LayerMemory, overlaps: tuple[_Overlap, ...], active: tuple[bool, ...]
    ) -> tuple[Fragment, ...]:
        """Intersect two ranks' boxes of one layer, for each kind of piece."""
        group = self._src.layout.groups[src.group]
        out: list[Fragment] = []
        for index, kind in enumerate(self._pieces[src.group].kinds):
            boxes = []
            for part, a, b, overlap, used in zip(group.parts, src.parts, dst.parts, overlaps, active, strict=True):
                if not used or not overlap.heads:
                    continue
                rows, src_row, dst_row = (part.rows, 0, 0) if part.rows else (kind.tokens, kind.src_row, kind.dst_row)
                boxes.append(
                    Box(
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
            out += fragments_of(index, boxes)
            if len(out) > MAX_FRAGMENTS:
                raise PlanError(
                    f"group {group.name}: more than {MAX_FRAGMENTS} fragments per page: too few shared bytes"
                )
        return tuple(out)

    def _check_replicas(self) -> None:
        """Decode counts without knowing which data-parallel replica computes: all must be cut the same way."""
        placement = self._src.placement
        for rank, layers in enumerate(self._memory[0]):
            coords = placement.coords(rank)
            first = self._memory[0][placement.rank_of(Coords(0, coords.pp, coords.tp))]
            for key, layer in layers.items():
                mine, other = self._shape(self._src, rank, layer), self._shape(self._src, rank, first[key])
                if mine != other:
                    raise PlanError(
                        f"prefill rank {rank} is a data-parallel replica whose layer {layer.layer} has other strides"
                        f" than in replica 0: {mine} and {other}"
                    )

    @staticmethod
    def _shape(spec: CacheSpec, rank: int, layer: LayerMemory) -> Shape:
        """What decides how a layer is cut: everything but its absolute place."""
        group = spec.layout.groups[layer.group]
        tp = spec.placement.coords(rank).tp
        reach = 0  # parts further away than this cannot touch, wherever they are
        for part, place in zip(group.parts, layer.parts, strict=True):
            begin, end = spec.placement.heads_of(tp, part.heads)
            reach += part.row_bytes + (end - begin - 1) * place.head_stride
            reach += (group.rows_of(part) - 1) * place.row_stride
        origin = layer.parts[0]
        out = []
        for place in layer.parts:
            distance = place.offset - origin.offset
            near = place.region == origin.region and abs(distance) <= reach
            out.append((place.page_stride, place.head_stride, place.row_stride, distance if near else None))
        return tuple(out)

    def _shapes(self, spec: CacheSpec, rank: int) -> dict[int, dict[Shape, dict[int, LayerMemory]]]:
        """Layers of a rank by group and shape."""
        out: dict[int, dict[Shape, dict[int, LayerMemory]]] = {}
        for layer in spec.memory[rank].layers:
            shapes = out.setdefault(layer.group, {})
            shapes.setdefault(self._shape(spec, rank, layer), {})[layer.layer] = layer
            if len(shapes) > MAX_SHAPES:
                name = spec.layout.groups[layer.group].name
                raise PlanError(f"group {name} has more than {MAX_SHAPES} different strides on rank {rank}")
        return out
