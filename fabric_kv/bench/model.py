"""A model's cache at both ends: page sets for requests, what they hold, and what one layer of a chunk moves.

>>> work = ModelWork(layout=layout, prefill_tp=4, decode_tp=4, isl=16384, chunk=4096)
>>> cache = Cache(engine, work, fabric, prefills=False)
>>> cache.stamp(iteration=1); cache.count_wrong(iteration=1)

Every row of every head is a function of seed, iteration, layer, part, head and token, so that a wrong mapping between
shards is seen as well as late data.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from ..engine import Engine
from ..errors import ConfigError
from ..sharding import CacheSpec, KVLayout, Placement, TransferPlan
from ..sharding.layout import Group, Part
from ..sharding.pages import Pieces
from ..sharding.plan import PageWrite
from .memory import make_memory
from .stamps import page_words
from .workload import Fabric

__all__ = ["Cache", "ModelWork", "RankMove", "bare_moves", "page_sets"]

_Tp = Annotated[int, Meta(ge=1, le=64)]
_Tokens = Annotated[int, Meta(ge=1, le=1 << 24)]
MAX_CACHE_BYTES = 1 << 40
NO_PAGE = 1 << 40  # out of any range: who looks at it fails


class ModelWork(msgspec.Struct, frozen=True, kw_only=True):
    """What requests look like.

    Attributes
    ----------
    layout : KVLayout
    seed : int
        Of page lists and contents.
    prefill_tp, decode_tp : int
    isl, chunk : int
        Tokens of a prompt, and of a forward step.
    layerwise : bool
        Send each layer as it is done; else everything once the prompt is through.
    compute_ms : float
        For a layer of a chunk.
    requests : int
        Of each decode side.
    slots : int
        Requests that a side has pages for at once.
    timeout_s : float
        How long nothing may happen.
    """

    layout: KVLayout
    seed: Annotated[int, Meta(ge=0, lt=2**32)] = 1
    prefill_tp: _Tp = 1
    decode_tp: _Tp = 1
    isl: _Tokens = 1024
    chunk: _Tokens = 1024
    layerwise: bool = False
    compute_ms: Annotated[float, Meta(ge=0, le=60_000)] = 0.0
    requests: Annotated[int, Meta(ge=1, le=100_000)] = 8
    slots: Annotated[int, Meta(ge=1, le=256)] = 2
    timeout_s: Annotated[float, Meta(gt=0, le=3600)] = 20.0

    def __post_init__(self) -> None:
        for tp_size in (self.prefill_tp, self.decode_tp):
            if self.cache_bytes(tp_size) > MAX_CACHE_BYTES:
                raise ConfigError(f"caches of {self.cache_bytes(tp_size)} bytes are above the limit of 1 TiB")

    def sent(self, group: Group) -> range:
        """Entries of a request's page list that are sent: in a window those that decode sees, of a state its slot."""
        (run,) = Pieces.of_group(group, group).page_map(0, 0, self.isl, final=True, num_tokens=self.isl).kinds
        return range(run.dst_entries.start, run.dst_entries.stop)

    def spec(self, tp_size: int) -> CacheSpec:
        """The whole cache of one side."""
        return CacheSpec.dense(
            self.layout,
            Placement(tp_size=tp_size),
            [len(self.sent(group)) * self.slots for group in self.layout.groups],
        )

    def cache_bytes(self, tp_size: int) -> int:
        """Of one side; heads that several ranks hold count for each."""
        placement, total = Placement(tp_size=tp_size), 0
        for group in self.layout.groups:
            for part in group.parts:
                heads = sum(end - begin for begin, end in (placement.heads_of(tp, part.heads) for tp in range(tp_size)))
                page_bytes = heads * group.rows_of(part) * part.row_bytes
                total += page_bytes * len(self.sent(group)) * self.slots * len(group.layers)
        return total

    def chunks(self) -> list[tuple[int, int]]:
        """Token ranges of the forward steps."""
        return [(begin, min(begin + self.chunk, self.isl)) for begin in range(0, self.isl, self.chunk)]


def page_sets(work: ModelWork, *, prefills: bool) -> list[list[NDArray[np.int64]]]:
    """Of each slot the page list of each group: at random, as an allocator leaves them, and known to both ends.

    Entries for tokens that have left a sliding window are :data:`NO_PAGE`: such pages exist at neither end.
    """
    random = np.random.default_rng((work.seed, int(prefills)))
    sets: list[list[NDArray[np.int64]]] = [[] for _ in range(work.slots)]
    for group in work.layout.groups:
        sent = work.sent(group)
        shuffled = random.permutation(len(sent) * work.slots).reshape(work.slots, -1)
        for pages, taken in zip(sets, shuffled, strict=True):
            pages.append(np.concatenate([np.full(sent.start, NO_PAGE), taken]).astype(np.int64))
    return sets


class _Cell(NamedTuple):
    """A part of a layer on a rank: a view of shape (pages, heads, rows, row bytes), and which heads these are."""

    group: int
    number: int  # of (layer, part), the same at both ends
    part: Part
    first_head: int
    view: NDArray[np.uint8]


class Cache:
    """Registered memory for the ranks of one side.

    Parameters
    ----------
    engine : Engine
    work : ModelWork
    fabric : Fabric
        Says where the memory is.
    prefills : bool
        Which side.
    """

    def __init__(self, engine: Engine, work: ModelWork, fabric: Fabric, *, prefills: bool) -> None:
        self.work = work
        self.spec = work.spec(work.prefill_tp if prefills else work.decode_tp)
        self._seed = work.seed
        self._memory = [[make_memory(fabric, nbytes) for nbytes in rank.region_bytes] for rank in self.spec.memory]
        self.regions = [[memory.register(engine) for memory in rank] for rank in self._memory]
        self.pages = page_sets(work, prefills=prefills)

    def stamp(self, iteration: int) -> None:
        """Fill all page sets."""
        for cell in self._cells():
            for pages in self.pages:
                cell.view[self._sent(pages, cell)] = self._contents(cell, iteration)
        for rank in self._memory:
            for memory in rank:
                memory.push()

    def count_wrong(self, iteration: int, slots: int) -> int:
        """Pages of a layer and part, of the first ``slots`` sets, that are not as :meth:`stamp` makes them."""
        wrong = 0
        for rank in self._memory:
            for memory in rank:
                memory.pull()
        for cell in self._cells():
            group = self.work.layout.groups[cell.group]
            rows = group.rows_of(cell.part)
            expected = self._contents(cell, iteration)
            for pages in self.pages[:slots]:
                differs = (cell.view[self._sent(pages, cell)] != expected).any(axis=(1, 3))  # (pages, rows)
                if not cell.part.rows and self.work.isl % rows:
                    differs[-1, self.work.isl % rows :] = False  # no tokens there
                wrong += int(differs.any(axis=1).sum())
        return wrong

    def _contents(self, cell: _Cell, iteration: int) -> NDArray[np.uint8]:
        group = self.work.layout.groups[cell.group]
        sent, rows = self.work.sent(group), group.rows_of(cell.part)
        heads = cell.first_head + np.arange(cell.view.shape[1])
        row = np.array(sent)[:, None, None] * rows + np.arange(rows)
        numbers = (cell.number * cell.part.heads + heads[:, None]) * (sent.stop * rows) + row
        words = page_words(numbers.reshape(-1), cell.part.row_bytes, self._seed, iteration)
        return words.reshape(len(sent), len(heads), rows, cell.part.row_bytes)

    def _sent(self, pages: list[NDArray[np.int64]], cell: _Cell) -> NDArray[np.int64]:
        return pages[cell.group][self.work.sent(self.work.layout.groups[cell.group]).start :]

    def _cells(self) -> Iterator[_Cell]:
        for rank, memory in enumerate(self.spec.memory):
            tp = self.spec.placement.coords(rank).tp
            for layer in memory.layers:
                group = self.work.layout.groups[layer.group]
                for index, (part, place) in enumerate(zip(group.parts, layer.parts, strict=True)):
                    begin, end = self.spec.placement.heads_of(tp, part.heads)
                    view = np.lib.stride_tricks.as_strided(
                        self._memory[rank][place.region].array[place.offset :],
                        (memory.num_pages[layer.group], end - begin, group.rows_of(part), part.row_bytes),
                        (place.page_stride, place.head_stride, place.row_stride, 1),
                    )
                    number = (layer.layer * len(self.work.layout.groups) + layer.group) * 64 + index
                    yield _Cell(layer.group, number, part, begin, view)


class RankMove(NamedTuple):
    """What the last layer of the last chunk of a request brings to one decode rank."""

    dst_rank: int
    units: int
    nbytes: int
    writes: list[tuple[int, PageWrite]]  # source rank, what it writes


def bare_moves(work: ModelWork, plan: TransferPlan) -> list[RankMove]:
    """What the messenger is held against, of the first page set: the last layer of the last chunk, which is all that
    remains when compute ends; where nothing is computed, the whole request. Both ends work it out alike.
    """  # noqa: D205
    src, dst = (page_sets(work, prefills=prefills)[0] for prefills in (True, False))
    layers = sorted({layer for group in work.layout.groups for layer in group.layers})
    chunks = work.chunks()
    if work.compute_ms > 0:
        layers, chunks = layers[-1:], chunks[-1:]
    maps = [
        [plan.page_map(group, begin, end, final=end == work.isl, num_tokens=work.isl) for group in range(len(src))]
        for begin, end in chunks
    ]
    moves = []
    for dst_rank in range(work.decode_tp):
        writes, units, nbytes = [], 0, 0
        for chunk, layer, src_rank in itertools.product(maps, layers, range(work.prefill_tp)):
            for group in plan.groups_of_layer(layer):
                for write in plan.writes(src_rank, dst_rank, layer, chunk[group], src[group], dst[group], source_set=0):
                    writes.append((src_rank, write))
                    count = len(write.src_pages) * write.rows
                    units += count * -(-write.nbytes // plan.unit_bytes)
                    nbytes += count * write.nbytes
        if units:
            moves.append(RankMove(dst_rank, units, nbytes, writes))
    return moves
