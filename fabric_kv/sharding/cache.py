"""What a peer must know about an engine's cache: geometry, placement, and where each rank keeps its pages.

>>> array = numpy.zeros((30, 2, 256, 3, 16, 64), numpy.float16)      # layers, K/V, pages, heads, tokens, dim
>>> spec = CacheSpec.from_arrays(layout, Placement(), [array], axes="LKPHND")
>>> CacheSpec.from_bytes(spec.to_bytes()) == spec
True
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from ..errors import ConfigError
from .layout import KVLayout, check_range
from .placement import Placement
from .places import (
    MAX_REGION_BYTES,
    MAX_REGIONS,
    LayerMemory,
    PartMemory,
    Placed,
    check_place,
    dense_layer,
    layers_in,
    local_layers,
    place_arrays,
)

__all__ = ["CacheSpec", "LayerMemory", "Packing", "PartMemory", "Placed", "RankMemory"]

Packing = Literal["adjacent", "separate", "cross_layer"]

MAX_PLACES = 1 << 18  # (rank, layer, part) triples of one spec
MAX_SPEC_BYTES = 8 << 20
_VERSION = b"FKVC\x01"


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
        cls, array: Any, axes: str = "LKPHND", *, layout: KVLayout, placement: Placement = Placement(), rank: int = 0
    ) -> RankMemory:
        """One array, registered as one region, that holds everything of a rank (a layout of one group).

        Parameters
        ----------
        array : NumPy array, torch tensor, or Strided
            Only shape, strides and element size are read.
        axes : str
            One letter an axis, outermost first, or a key of ``AXES``; see ``Placed``.

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
        group: int = 0,
    ) -> RankMemory:
        """One array for each local layer of the only group, in layer order, each registered as a region of its own."""
        local = local_layers(layout, placement, rank, group)
        if len(arrays) != len(local):
            raise ConfigError(
                f"rank {rank} holds {len(local)} layers of group {group}: {len(arrays)} arrays were given"
            )
        placed = [
            Placed(array, axes, group=group, layers=(layer,), region=region)
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
        sizes, num_pages, layers = place_arrays(placed, layout, placement, rank)
        return cls(sizes if region_bytes is None else tuple(region_bytes), num_pages, layers)

    @classmethod
    def dense(
        cls,
        num_pages: int | Sequence[int],
        *,
        layout: KVLayout,
        placement: Placement = Placement(),
        rank: int = 0,
        packing: Packing = "adjacent",
    ) -> RankMemory:
        """One region without gaps, for engines that let us choose.

        Parameters
        ----------
        num_pages : int or sequence of int
            Pages of every group, or of each.
        packing : {"adjacent", "separate", "cross_layer"}
            A page of a layer holds all parts (``[layers, pages, 2, ...]``); each part has its own array of pages
            (``[layers, 2, pages, ...]``); one page holds all layers (``[pages, layers, 2, ...]``).
        """
        tp = placement.coords(rank).tp
        pages = [num_pages] * len(layout.groups) if isinstance(num_pages, int) else list(num_pages)
        check_range("number of page counts", len(pages), len(layout.groups), len(layout.groups))
        layers: list[LayerMemory] = []
        offset = 0
        for index, group in enumerate(layout.groups):
            local = local_layers(layout, placement, rank, index)
            heads = [end - begin for begin, end in (placement.heads_of(tp, part.heads) for part in group.parts)]
            layer_bytes = sum(
                count * group.rows_of(part) * part.row_bytes for count, part in zip(heads, group.parts, strict=True)
            )
            cross = packing == "cross_layer"
            for row, layer in enumerate(local):
                start = offset + row * layer_bytes * (1 if cross else pages[index])
                stride = layer_bytes * (len(local) if cross else 1)
                parts, _ = dense_layer(group, heads, pages[index], start, stride, packing != "separate")
                layers.append(LayerMemory(layer, index, parts))
            offset += len(local) * layer_bytes * pages[index]
        # A stage without layers has no region: there is no memory to register.
        return cls((offset,) if layers else (), tuple(pages), tuple(layers))


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
        for group in self.layout.groups:
            for part in group.parts:
                self.placement.check_heads(part.heads)
        stages = self.placement.stages(self.layout.num_layers)
        for rank, memory in enumerate(self.memory):
            _check_memory(self.layout, self.placement, stages, rank, memory)

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

    @classmethod
    def dense(
        cls,
        layout: KVLayout,
        placement: Placement = Placement(),
        num_pages: int | Sequence[int] = 1024,
        packing: Packing = "adjacent",
    ) -> CacheSpec:
        """Every rank dense, in one region; see ``RankMemory.dense``."""
        memory = (
            RankMemory.dense(num_pages, layout=layout, placement=placement, rank=rank, packing=packing)
            for rank in range(placement.num_ranks)
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


def _check_memory(layout: KVLayout, placement: Placement, stages: list[range], rank: int, memory: RankMemory) -> None:
    """Raise ConfigError unless a rank's memory has every local layer once, in bounds, with parts apart."""
    where = f"rank {rank}: "
    check_range(f"{where}number of regions", len(memory.region_bytes), 0, MAX_REGIONS)
    check_range(f"{where}number of page counts", len(memory.num_pages), len(layout.groups), len(layout.groups))
    for size in memory.region_bytes:
        check_range(f"{where}region size", size, 0, MAX_REGION_BYTES, "bytes")
    for count in memory.num_pages:
        check_range(f"{where}number of pages", count, 0, MAX_REGION_BYTES)
    at = placement.coords(rank)
    local = [layers_in(group, stages[at.pp]) for group in layout.groups]
    num_local = sum(map(len, local))
    if num_local != len(memory.layers):
        raise ConfigError(f"{where}memory lists {len(memory.layers)} (group, layer) pairs: the rank holds {num_local}")
    expected = {(index, layer) for index, layers in enumerate(local) for layer in layers}
    odd = expected.symmetric_difference((layer.group, layer.layer) for layer in memory.layers)
    if odd:
        raise ConfigError(f"{where}memory does not list exactly its (group, layer) pairs; look at {sorted(odd)[:4]}")
    starts: set[tuple[int, int]] = set()
    for layer in memory.layers:
        group = layout.groups[layer.group]
        name = f"{where}layer {layer.layer}"
        check_range(f"{name}: number of parts", len(layer.parts), len(group.parts), len(group.parts))
        for part, place in zip(group.parts, layer.parts, strict=True):
            begin, end = placement.heads_of(at.tp, part.heads)
            pages = memory.num_pages[layer.group]
            check_place(f"{name}, part {part.name}: ", group, part, end - begin, pages, place, memory.region_bytes)
            if pages and (place.region, place.offset) in starts:
                raise ConfigError(f"{name}, part {part.name} starts where another does: byte {place.offset}")
            starts.add((place.region, place.offset))
