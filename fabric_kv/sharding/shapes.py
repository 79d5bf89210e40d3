"""Layers whose memory has the same shape, so that they are cut once and the result is moved to each one's place.

>>> shapes = Shapes(spec)
>>> shapes.number[0][0, 7] == shapes.number[0][0, 8]        # rank 0, group 0: layers 7 and 8 differ only in place
True
"""

from __future__ import annotations

from ..errors import PlanError
from .cache import CacheSpec
from .layout import Group
from .places import LayerMemory

__all__ = ["Shape", "Shapes"]

MAX_SHAPES = 64  # of one rank's layers in one group

# For each part: strides of page, head and row; and the distances to earlier parts that it might touch.
Shape = tuple[tuple[int, int, int, tuple[tuple[int, int], ...]], ...]


class Shapes:
    """The shapes of one side.

    Attributes
    ----------
    memory : list of dict
        For each rank, its LayerMemory by (group, layer).
    number : list of dict
        For each rank, the number of the shape by (group, layer); equal numbers are equal shapes, on all ranks.
    layers : list of dict
        For each rank, by group and by shape number, the layers.
    """

    def __init__(self, spec: CacheSpec) -> None:
        self.memory = [{(layer.group, layer.layer): layer for layer in rank.layers} for rank in spec.memory]
        self.number: list[dict[tuple[int, int], int]] = []
        self.layers: list[dict[int, dict[int, set[int]]]] = []
        numbers: dict[Shape, int] = {}
        for rank, layers in enumerate(self.memory):
            tp = spec.placement.coords(rank).tp
            heads = [
                [end - begin for begin, end in (spec.placement.heads_of(tp, part.heads) for part in group.parts)]
                for group in spec.layout.groups
            ]
            mine: dict[tuple[int, int], int] = {}
            by_group: dict[int, dict[int, set[int]]] = {}
            for (group, layer), place in layers.items():
                shape = _shape(spec.layout.groups[group], heads[group], place)
                number = mine[group, layer] = numbers.setdefault(shape, len(numbers))
                alike = by_group.setdefault(group, {})
                alike.setdefault(number, set()).add(layer)
                if len(alike) > MAX_SHAPES:
                    name = spec.layout.groups[group].name
                    raise PlanError(
                        f"group {name} has more than {MAX_SHAPES} different shapes of memory on rank {rank}"
                    )
            self.number.append(mine)
            self.layers.append(by_group)


def _shape(group: Group, heads: list[int], layer: LayerMemory) -> Shape:
    """What decides how a layer is cut: everything but its absolute place."""
    extents = [
        part.row_bytes + (count - 1) * place.head_stride + (group.rows_of(part) - 1) * place.row_stride
        for part, count, place in zip(group.parts, heads, layer.parts, strict=True)
    ]
    reach = sum(extents)  # parts further away than this cannot touch
    out = []
    for index, place in enumerate(layer.parts):
        near = tuple(
            (earlier, place.offset - other.offset)
            for earlier, other in enumerate(layer.parts[:index])
            if other.region == place.region and abs(place.offset - other.offset) <= reach
        )
        out.append((place.page_stride, place.head_stride, place.row_stride, near))
    return tuple(out)
