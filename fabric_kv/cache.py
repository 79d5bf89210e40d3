"""Where each rank keeps its pages: regions, offsets and strides in bytes.

>>> array = numpy.zeros((30, 2, 256, 3, 16, 64), numpy.float16)      # layers, K/V, pages, heads, tokens, dim
>>> spec = CacheSpec.from_arrays(layout, Placement(), [array], axes="LKPHND")
>>> CacheSpec.from_bytes(spec.to_bytes()) == spec
True
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from .errors import ConfigError
from .layout import DTYPE_BYTES, Group, KVLayout, Part, check_range
from .placement import Placement

__all__ = ["CacheSpec", "LayerMemory", "PartMemory", "Placed", "RankMemory"]

MAX_REGIONS = 16384
MAX_PLACES = 1 << 18  # (rank, layer, part) triples of one spec
MAX_SPEC_BYTES = 16 << 20
MAX_REGION_BYTES = 1 << 48
_VERSION = b"FKVC\x01"


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


class Placed(NamedTuple):
    """An array that holds (a share of) a rank's cache.

    Attributes
    ----------
    array : object with ``shape``, ``strides`` (bytes) and ``itemsize``, such as a NumPy array
    axes : str
        One letter an axis: L local layer, K part, P page or slot, H local head, N token or row, D element.
    group : int
    layers : sequence of int, or None
        Global layers in the order of axis L; without an L axis, the one layer. None: all of the rank and group.
    parts : sequence of str, or None
        Names along axis K; without a K axis, the one part. None: all of the group.
    region, offset : int
        Region that the array lies in and the byte where it starts.
    """

    array: Any
    axes: str
    group: int = 0
    layers: Sequence[int] | None = None
    parts: Sequence[str] | None = None
    region: int = 0
    offset: int = 0


class RankMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where one rank keeps its share of the cache.

    Attributes
    ----------
    region_bytes : tuple of int
        Size of each region, in the order in which the rank registers them.
    num_pages : tuple of int
        Pages (or slots) of each group.
    layers : tuple of LayerMemory
        One for each local layer of each group.
    """

    region_bytes: tuple[int, ...]
    num_pages: tuple[int, ...]
    layers: tuple[LayerMemory, ...]

    @classmethod
    def from_array(
        cls, array: Any, axes: str, *, layout: KVLayout, placement: Placement = Placement(), rank: int = 0
    ) -> RankMemory:
        """One array, registered as one region, that holds everything of a rank (a layout of one group).

        Parameters
        ----------
        array : object with ``shape``, ``strides`` in bytes and ``itemsize``
            Dense views are fine as long as the last axis D is contiguous.
        axes : str
            One letter an axis, outermost first: ``"LKPHND"``; see ``Placed``.

        Raises
        ------
        ConfigError
            If shape, strides or element size do not fit layout and rank; names the axis and both numbers.
        """
        return cls.build([Placed(array, axes)], layout=layout, placement=placement, rank=rank)

    @classmethod
    def from_layer_arrays(
        cls,
        arrays: Sequence[Any],
        axes: str,
        *,
        layout: KVLayout,
        placement: Placement = Placement(),
        rank: int = 0,
    ) -> RankMemory:
        """One array per local layer (a layout of one group), each registered as a region of its own, in layer order."""
        local = _local_layers(layout, placement, rank, 0)
        if len(arrays) != len(local):
            raise ConfigError(f"rank {rank} holds {len(local)} layers: {len(arrays)} arrays were given")
        placed = [
            Placed(array, axes, layers=(layer,), region=region)
            for region, (layer, array) in enumerate(zip(local, arrays, strict=True))
        ]
        return cls.build(placed, layout=layout, placement=placement, rank=rank)

    @classmethod
    def build(
        cls,
        placed: Sequence[Placed],
        *,
        layout: KVLayout,
        placement: Placement = Placement(),
        rank: int = 0,
        region_bytes: Sequence[int] | None = None,
    ) -> RankMemory:
        """From any set of arrays; the general form of the constructors above.

        ``region_bytes`` may be left out where every region ends with the last byte of an array in it.
        """
        tp = placement.coords(rank).tp
        found: dict[tuple[int, int], dict[str, PartMemory]] = {}
        ends: dict[int, int] = {}
        num_pages = [0] * len(layout.groups)
        for item in placed:
            check_range("group", item.group, 0, len(layout.groups) - 1)
            check_range("region", item.region, 0, MAX_REGIONS - 1)
            group = layout.groups[item.group]
            layers = _local_layers(layout, placement, rank, item.group) if item.layers is None else tuple(item.layers)
            names = [part.name for part in group.parts] if item.parts is None else list(item.parts)
            pages = _add_array(item, group, layers, names, placement, tp, found, ends)
            if num_pages[item.group] not in (0, pages):
                raise ConfigError(f"group {group.name}: arrays of {num_pages[item.group]} and of {pages} pages")
            num_pages[item.group] = pages
        memory = []
        for (group_index, layer), parts in sorted(found.items()):
            wanted = [part.name for part in layout.groups[group_index].parts]
            if set(parts) != set(wanted):
                raise ConfigError(f"rank {rank}, layer {layer}: no memory for parts {sorted(set(wanted) - set(parts))}")
            memory.append(LayerMemory(layer, group_index, tuple(parts[name] for name in wanted)))
        sizes = region_bytes or [ends.get(region, 0) for region in range(max(ends, default=-1) + 1)]
        return cls(tuple(sizes), tuple(num_pages), tuple(memory))


class CacheSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that a peer must know about one engine's cache; plain data that travels in the handshake.

    Attributes
    ----------
    layout : KVLayout
    placement : Placement
    memory : tuple of RankMemory
        One for each rank.

    Raises
    ------
    ConfigError
        On construction, if the three do not fit together or exceed a limit; decoding one from untrusted bytes with
        msgspec raises ``msgspec.ValidationError`` for the same reasons.
    """

    layout: KVLayout
    placement: Placement
    memory: tuple[RankMemory, ...]

    def __post_init__(self) -> None:
        num_ranks = self.placement.num_ranks
        if len(self.memory) != num_ranks:
            raise ConfigError(f"memory describes {len(self.memory)} ranks: the placement has {num_ranks}")
        places = sum(len(layer.parts) for memory in self.memory for layer in memory.layers)
        check_range("number of (rank, layer, part) places", places, 0, MAX_PLACES)
        for rank, memory in enumerate(self.memory):
            _check_memory(self.layout, self.placement, rank, memory)

    @classmethod
    def from_arrays(
        cls, layout: KVLayout, placement: Placement, arrays: Sequence[Any], axes: str = "LKPHND"
    ) -> CacheSpec:
        """One array per rank, each registered as one region; see ``RankMemory.from_array``."""
        if len(arrays) != placement.num_ranks:
            raise ConfigError(f"{len(arrays)} arrays were given: the placement has {placement.num_ranks} ranks")
        memory = (
            RankMemory.from_array(array, axes, layout=layout, placement=placement, rank=rank)
            for rank, array in enumerate(arrays)
        )
        return cls(layout, placement, tuple(memory))

    def to_bytes(self) -> bytes:
        """Versioned bytes for a peer."""
        return _VERSION + msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> CacheSpec:
        """Read what ``to_bytes`` wrote; anything else raises ConfigError, whatever the bytes."""
        if len(data) > MAX_SPEC_BYTES:
            raise ConfigError(f"a cache spec of {len(data)} bytes is over the limit of {MAX_SPEC_BYTES} bytes")
        if data[: len(_VERSION)] != _VERSION:
            raise ConfigError(f"not a cache spec of version {_VERSION[-1]}: it starts with {data[:5].hex()}")
        try:
            return msgspec.msgpack.decode(data[len(_VERSION) :], type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"malformed cache spec: {error}") from error


def _local_layers(layout: KVLayout, placement: Placement, rank: int, group: int) -> tuple[int, ...]:
    stage = placement.layers_of(placement.coords(rank).pp, layout.num_layers)
    return tuple(layer for layer in layout.groups[group].layers if layer in stage)


def _add_array(
    item: Placed,
    group: Group,
    layers: Sequence[int],
    names: Sequence[str],
    placement: Placement,
    tp: int,
    found: dict[tuple[int, int], dict[str, PartMemory]],
    ends: dict[int, int],
) -> int:
    """Record the parts that an array holds; returns its number of pages."""
    shape, strides = tuple(item.array.shape), tuple(item.array.strides)
    axes = item.axes
    if len(axes) != len(shape) or len(set(axes)) != len(axes) or not {"P", "D"} <= set(axes) <= set("LKPHND"):
        raise ConfigError(f"axes={axes!r} does not name the {len(shape)} axes of shape {shape} by letters of LKPHND")
    size = dict(zip(axes, shape, strict=True))
    stride = dict(zip(axes, strides, strict=True))
    known = {part.name: part for part in group.parts}
    for name in names:
        if name not in known:
            raise ConfigError(f"group {group.name} has no part {name!r}; it has {sorted(known)}")
    for letter, count in (("L", len(layers)), ("K", len(names))):
        if size.get(letter, 1) != count:
            raise ConfigError(
                f"axis {letter} of shape {shape} ({axes}) has {size.get(letter, 1)} entries: expected {count}"
            )
    span = item.array.itemsize + sum((n - 1) * step for n, step in zip(shape, strides, strict=True) if n)
    ends[item.region] = max(ends.get(item.region, 0), item.offset + (span if all(shape) else 0))
    for at, name in enumerate(names):
        part = known[name]
        begin, end = placement.heads_of(tp, part.heads)
        wanted = {"H": end - begin, "N": group.rows_of(part), "D": part.dim}
        for letter, count in wanted.items():
            if size.get(letter, 1) != count:
                raise ConfigError(
                    f"axis {letter} of shape {shape} ({axes}) has {size.get(letter, 1)} entries: part {name} of group"
                    f" {group.name} has {count} on TP rank {tp} of {placement.tp_size}"
                )
        if item.array.itemsize != DTYPE_BYTES[part.dtype]:
            raise ConfigError(f"elements of {item.array.itemsize} bytes: part {name} is {part.dtype}")
        if stride["D"] != item.array.itemsize and size["D"] > 1:
            raise ConfigError(f"axis D must be contiguous: its stride is {stride['D']} bytes")
        for row, layer in enumerate(layers):
            place = PartMemory(
                item.region,
                item.offset + row * stride.get("L", 0) + at * stride.get("K", 0),
                stride["P"],
                stride.get("H", 0),
                stride.get("N", 0),
            )
            if found.setdefault((item.group, layer), {}).setdefault(name, place) is not place:
                raise ConfigError(f"layer {layer}, part {name} was given twice")
    return int(size["P"])


def _check_memory(layout: KVLayout, placement: Placement, rank: int, memory: RankMemory) -> None:
    where = f"rank {rank}: "
    check_range(f"{where}number of regions", len(memory.region_bytes), 0, MAX_REGIONS)
    check_range(f"{where}number of page counts", len(memory.num_pages), len(layout.groups), len(layout.groups))
    for size in memory.region_bytes:
        check_range(f"{where}region size", size, 0, MAX_REGION_BYTES, "bytes")
    for count in memory.num_pages:
        check_range(f"{where}number of pages", count, 0, MAX_REGION_BYTES)
    expected = {
        (group, layer) for group in range(len(layout.groups)) for layer in _local_layers(layout, placement, rank, group)
    }
    given = [(layer.group, layer.layer) for layer in memory.layers]
    if len(given) != len(expected) or set(given) != expected:
        odd = sorted(expected.symmetric_difference(given))[:4] or "repeats"
        raise ConfigError(f"{where}memory does not list exactly its (group, layer) pairs; look at {odd}")
    tp = placement.coords(rank).tp
    starts: set[tuple[int, int]] = set()
    for layer in memory.layers:
        group = layout.groups[layer.group]
        check_range(
            f"{where}layer {layer.layer}: number of parts",
            len(layer.parts),
            len(group.parts),
            len(group.parts),
        )
        for part, place in zip(group.parts, layer.parts, strict=True):
            begin, end = placement.heads_of(tp, part.heads)
            pages = memory.num_pages[layer.group]
            name = f"{where}layer {layer.layer}, part {part.name}: "
            _check_place(name, group, part, end - begin, pages, place, memory.region_bytes)
            if pages and (place.region, place.offset) in starts:
                raise ConfigError(f"{name}starts where another part starts: region {place.region}, byte {place.offset}")
            starts.add((place.region, place.offset))


def _check_place(
    name: str,
    group: Group,
    part: Part,
    heads: int,
    pages: int,
    place: PartMemory,
    region_bytes: tuple[int, ...],
) -> None:
    """Bounds, axis order, and that no two rows share a byte."""
    for field in ("offset", "page_stride", "head_stride", "row_stride"):
        check_range(name + field, getattr(place, field), 0, MAX_REGION_BYTES, "bytes")
    check_range(name + "region", place.region, 0, len(region_bytes) - 1)
    rows = group.rows_of(part)
    axes = [(rows, place.row_stride), (heads, place.head_stride), (pages, place.page_stride)]
    extent = part.row_bytes
    for stride, count in sorted((stride, count) for count, stride in axes if count > 1):
        if stride < extent:
            raise ConfigError(f"{name}rows share bytes: a stride of {stride} bytes steps over {extent} bytes")
        extent += (count - 1) * stride
    size = region_bytes[place.region]
    if pages and place.offset + extent > size:
        raise ConfigError(f"{name}ends at byte {place.offset + extent}: region {place.region} has {size} bytes")
    if heads > 1 and rows > 1:
        order = "HND" if place.head_stride > place.row_stride else "NHD"
        if order != group.order:
            raise ConfigError(f"{name}strides say {order}: group {group.name} says {group.order}")
