"""Byte addresses of cache pages, taken from arrays' shapes and strides.

>>> keys, values = numpy.zeros((2, 1000, 16, 8, 128), numpy.float16)        # blocks, tokens, heads, dim
>>> placed = [Placed(keys, "PNHD", parts=["K"]), Placed(values, "PNHD", parts=["V"], region=1)]
>>> RankMemory.build(placed, layout=layout)

Axes are named by letters, outermost first: L layer, K part (K or V), P page or slot, H head, N token, D element.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from ..errors import ConfigError
from .layout import DTYPE_BYTES, Group, KVLayout, Order, Part, check_range
from .placement import Placement

__all__ = ["AXES", "LayerMemory", "PartMemory", "Placed", "Strided", "local_layers", "offset_in"]

MAX_REGIONS = 16384
MAX_REGION_BYTES = 1 << 48

AXES = {
    "vllm": "KPNHD",  # [2, blocks, page, heads, dim], one tensor a layer: FlashAttention
    "vllm_flashinfer": "PKNHD",  # [blocks, 2, page, heads, dim]; the strides say whether it is stored HND
    "vllm_mla": "PND",  # [blocks, page, latent]
    "vllm_cross_layer": "PLKHND",  # [blocks, layers, 2, heads, page, dim]: one page holds all layers
    "flashinfer_nhd": "PKNHD",  # [pages, 2, page_size, heads, dim]
    "flashinfer_hnd": "PKHND",  # [pages, 2, heads, page_size, dim]
}


class PartMemory(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Place of one part of one layer, in bytes of region number ``region``.

    Page p, local head h, row r starts at ``offset + p * page_stride + h * head_stride + r * row_stride``.
    """

    region: int
    offset: int
    page_stride: int
    head_stride: int
    row_stride: int


class LayerMemory(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One layer of one group on one rank; ``parts`` in the order of the group's parts."""

    layer: int
    group: int
    parts: tuple[PartMemory, ...]


class Strided(NamedTuple):
    """Shape and strides (bytes) of memory that is no array here: a tensor of another process, or a plan for one."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int


class Placed(NamedTuple):
    """An array that holds (a share of) a rank's cache.

    Attributes
    ----------
    array : NumPy array, torch tensor, or Strided
        Only shape, strides and element size are read. The last axis D must be contiguous.
    axes : str
        One letter an axis, or a key of ``AXES``.
    group : int
    layers : sequence of int, or None
        Global layers in the order of axis L; without an L axis, the one layer. None: all of the rank and group.
    parts : sequence of str, or None
        Names along axis K; without a K axis, the one part. None: all of the group.
    region, offset : int
        Region that the array lies in and the byte where it starts (``offset_in``).
    """

    array: Any
    axes: str
    group: int = 0
    layers: Sequence[int] | None = None
    parts: Sequence[str] | None = None
    region: int = 0
    offset: int = 0

    def view(self) -> tuple[str, dict[str, int], dict[str, int], int]:
        """Axes, size and stride of each axis by letter, element size."""
        axes = AXES.get(self.axes, self.axes)
        strided = _strided(self.array)
        shape = strided.shape
        if len(axes) != len(shape) or len(set(axes)) != len(axes) or not {"P", "D"} <= set(axes) <= set("LKPHND"):
            raise ConfigError(
                f"axes={axes!r} does not name the {len(shape)} axes of shape {shape} by letters of LKPHND"
            )
        sizes = dict(zip(axes, shape, strict=True))
        strides = dict(zip(axes, strided.strides, strict=True))
        if strides["D"] != strided.itemsize and sizes["D"] > 1:
            raise ConfigError(f"axis D must be contiguous: its stride is {strides['D']} bytes")
        return axes, sizes, strides, strided.itemsize


def _strided(array: Any) -> Strided:
    """Read NumPy's ``strides`` in bytes or torch's ``stride()`` in elements."""
    if hasattr(array, "strides"):
        return Strided(tuple(array.shape), tuple(array.strides), int(array.itemsize))
    if hasattr(array, "stride") and hasattr(array, "element_size"):
        itemsize = int(array.element_size())
        return Strided(tuple(array.shape), tuple(step * itemsize for step in array.stride()), itemsize)
    raise ConfigError(
        f"cannot read shape and strides of {type(array).__name__}: give a NumPy array, a tensor or Strided"
    )


def offset_in(view: Any, base: Any) -> int:
    """Bytes from the start of ``base`` to the start of ``view``, two NumPy arrays on the same memory."""
    offset = int(view.__array_interface__["data"][0]) - int(base.__array_interface__["data"][0])
    check_range("offset of the view in its base", offset, 0, MAX_REGION_BYTES, "bytes")
    return offset


def local_layers(layout: KVLayout, placement: Placement, rank: int, group: int) -> tuple[int, ...]:
    """Global layers of a group that a rank holds."""
    return layers_in(layout.groups[group], placement.stages(layout.num_layers)[placement.coords(rank).pp])


def layers_in(group: Group, stage: range) -> tuple[int, ...]:
    """Layers of a group that a pipeline stage holds."""
    return group.layers[bisect_left(group.layers, stage.start) : bisect_left(group.layers, stage.stop)]


def place_arrays(
    placed: Sequence[Placed], layout: KVLayout, placement: Placement, rank: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[LayerMemory, ...]]:
    """Bytes per region, pages per group, and the place of every layer, from a rank's arrays."""
    found: dict[tuple[int, int], dict[str, PartMemory]] = {}
    ends: dict[int, int] = {}
    pages: dict[int, int] = {}
    for item in placed:
        check_range("group", item.group, 0, len(layout.groups) - 1)
        check_range("region", item.region, 0, MAX_REGIONS - 1)
        group = layout.groups[item.group]
        axes, sizes, strides, itemsize = item.view()
        if pages.setdefault(item.group, sizes["P"]) != sizes["P"]:
            raise ConfigError(f"group {group.name}: arrays of {pages[item.group]} and of {sizes['P']} pages")
        if all(sizes.values()):
            span = itemsize + sum((sizes[letter] - 1) * strides[letter] for letter in axes)
            ends[item.region] = max(ends.get(item.region, 0), item.offset + span)
        layers = local_layers(layout, placement, rank, item.group) if item.layers is None else tuple(item.layers)
        parts = _check_axes(item, group, layers, sizes, itemsize, placement, rank)
        for row, layer in enumerate(layers):
            for column, part in enumerate(parts):
                offset = item.offset + row * strides.get("L", 0) + column * strides.get("K", 0)
                place = PartMemory(item.region, offset, strides["P"], strides.get("H", 0), strides.get("N", 0))
                names = found.setdefault((item.group, layer), {})
                if names.setdefault(part.name, place) is not place:
                    raise ConfigError(f"layer {layer}, part {part.name} was given twice")
    memory = []
    for (index, layer), names in sorted(found.items()):
        wanted = [part.name for part in layout.groups[index].parts]
        if len(names) != len(wanted):
            raise ConfigError(f"rank {rank}, layer {layer}: no array holds {sorted(set(wanted) - set(names))}")
        memory.append(LayerMemory(layer, index, tuple(names[name] for name in wanted)))
    regions = tuple(ends.get(region, 0) for region in range(max(ends, default=-1) + 1))
    return regions, tuple(pages.get(index, 0) for index in range(len(layout.groups))), tuple(memory)


def _check_axes(
    item: Placed,
    group: Group,
    layers: Sequence[int],
    sizes: dict[str, int],
    itemsize: int,
    placement: Placement,
    rank: int,
) -> list[Part]:
    """Compare an array's axes with the layout; returns the parts along its K axis."""
    known = {part.name: part for part in group.parts}
    names = list(known) if item.parts is None else list(item.parts)
    for name in names:
        if name not in known:
            raise ConfigError(f"group {group.name} has no part {name!r}; it has {sorted(known)}")
    parts = [known[name] for name in names]
    tp = placement.coords(rank).tp
    for part in parts:
        begin, end = placement.heads_of(tp, part.heads)
        wanted = {"L": len(layers), "K": len(parts), "H": end - begin, "N": group.rows_of(part), "D": part.dim}
        for letter, count in wanted.items():
            if sizes.get(letter, 1) != count:
                shape = tuple(sizes.values())
                raise ConfigError(
                    f"axis {letter} of shape {shape} ({''.join(sizes)}) has {sizes.get(letter, 1)} entries: part"
                    f" {part.name} of group {group.name} on rank {rank} needs {count}"
                )
        if itemsize != DTYPE_BYTES[part.dtype]:
            raise ConfigError(f"elements of {itemsize} bytes: part {part.name} of group {group.name} is {part.dtype}")
    return parts


def dense_layer(
    group: Group, heads: Sequence[int], num_pages: int, offset: int, page_stride: int, adjacent: bool
) -> tuple[tuple[PartMemory, ...], int]:
    """Places of a layer's parts from ``offset`` on without gaps, and the byte behind them.

    ``adjacent``: a page holds all parts one behind the other; else each part has an array of pages of its own.
    """
    places = []
    for part, count in zip(group.parts, heads, strict=True):
        rows = group.rows_of(part)
        size = count * rows * part.row_bytes
        inner = (
            (rows * part.row_bytes, part.row_bytes)
            if group.order == "HND"
            else (part.row_bytes, count * part.row_bytes)
        )
        places.append(PartMemory(0, offset, page_stride if adjacent else size, *inner))
        offset += size if adjacent else size * num_pages
    return tuple(places), offset


def check_place(
    name: str, group: Group, part: Part, heads: int, pages: int, place: PartMemory, region_bytes: tuple[int, ...]
) -> None:
    """Raise ConfigError unless a part lies in its region, has the group's axis order, and no two rows share a byte."""
    for field in ("offset", "page_stride", "head_stride", "row_stride"):
        check_range(name + field, getattr(place, field), 0, MAX_REGION_BYTES, "bytes")
    check_range(name + "region", place.region, 0, len(region_bytes) - 1)
    rows = group.rows_of(part)
    axes = [(place.row_stride, rows), (place.head_stride, heads), (place.page_stride, pages)]
    extent = part.row_bytes
    for stride, count in sorted(axis for axis in axes if axis[1] > 1):
        if stride < extent:
            raise ConfigError(f"{name}rows share bytes: a stride of {stride} bytes steps over {extent} bytes")
        extent += (count - 1) * stride
    size = region_bytes[place.region]
    if pages and place.offset + extent > size:
        raise ConfigError(f"{name}ends at byte {place.offset + extent}: region {place.region} has {size} bytes")
    if heads > 1 and rows > 1:
        order: Order = "HND" if place.head_stride > place.row_stride else "NHD"
        if order != group.order:
            raise ConfigError(f"{name}strides say {order}: group {group.name} says {group.order}")
