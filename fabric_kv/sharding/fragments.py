"""Boxes of bytes cut out of source pages and put into destination pages, as few contiguous fragments as possible.

>>> box = Box(0, 0, 0, 4096, 0, 0, 8192, 128, ((16, 128, 128), (2, 2048, 2048)))   # 16 tokens x 2 heads of 128 bytes
>>> simplify([box])[0].run
4096

Both sides run this on the same numbers, so the sender's fragments are the ones that the receiver counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["Box", "Cut", "Fragment", "cut_boxes", "simplify"]

Axis = tuple[int, int, int]  # count, source stride, destination stride


class Box(NamedTuple):
    """``run`` contiguous bytes at every point of a grid, inside each page."""

    part: int  # that it begins with
    src_region: int
    src_offset: int
    src_stride: int  # from page to page
    dst_region: int
    dst_offset: int
    dst_stride: int
    run: int
    axes: tuple[Axis, ...]


class Cut(NamedTuple):
    """A fragment before it has its place: offsets count from where part number ``part`` starts."""

    part: int
    kind: int  # index of the piece kind
    src_offset: int
    dst_offset: int
    nbytes: int
    rows: int
    src_row_stride: int
    dst_row_stride: int


class Fragment(NamedTuple):
    """What one ``PageWrite`` moves for each page: ``rows`` fragments of ``nbytes`` bytes."""

    kind: int  # index of the piece kind
    src_region: int
    src_offset: int
    src_stride: int
    dst_region: int
    dst_offset: int
    dst_stride: int
    nbytes: int
    rows: int
    src_row_stride: int
    dst_row_stride: int


def _collapse(box: Box) -> Box:
    """Grow the run over axes that continue it on both sides, then fuse axes that continue each other."""
    run = box.run
    axes = sorted((axis for axis in box.axes if axis[0] > 1), key=lambda axis: (axis[2], axis[1]))
    fused: list[Axis] = []
    for count, src, dst in axes:
        if not fused and src == dst == run:
            run *= count
        elif fused and fused[-1][1] * fused[-1][0] == src and fused[-1][2] * fused[-1][0] == dst:
            fused[-1] = (fused[-1][0] * count, *fused[-1][1:])
        else:
            fused.append((count, src, dst))
    return box._replace(run=run, axes=tuple(fused))


def simplify(boxes: Iterable[Box]) -> list[Box]:
    """Join whatever is contiguous on both sides: heads, rows, and neighbouring parts such as K and V."""
    work = [_collapse(box) for box in boxes]
    while True:
        work.sort(key=lambda box: (box.dst_region, box.dst_offset))
        joined: list[Box] = []
        for box in work:
            last = joined[-1] if joined else None
            if last is not None and box == last._replace(
                part=box.part, src_offset=last.src_offset + last.run, dst_offset=last.dst_offset + last.run, run=box.run
            ):
                joined[-1] = last._replace(run=last.run + box.run)
            else:
                joined.append(box)
        if len(joined) == len(work):
            return joined
        work = [_collapse(box) for box in joined]


def cut_boxes(kind: int, boxes: Iterable[Box]) -> list[Cut]:
    """Fragments with at most one row axis, the longest one; shorter axes become fragments of their own.

    Offsets are those of the boxes: not yet relative to a part.
    """
    out = []
    for box in simplify(boxes):
        axes = sorted(box.axes, key=lambda axis: axis[0])
        rows, src_row, dst_row = axes.pop() if axes else (1, 0, 0)
        for point in itertools.product(*(range(count) for count, _, _ in axes)):
            src = box.src_offset + sum(i * axis[1] for i, axis in zip(point, axes, strict=True))
            dst = box.dst_offset + sum(i * axis[2] for i, axis in zip(point, axes, strict=True))
            out.append(Cut(box.part, kind, src, dst, box.run, rows, src_row, dst_row))
    return out
