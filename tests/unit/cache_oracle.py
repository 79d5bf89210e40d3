"""An oracle for transfer plans that knows nothing of fragments: stamps in every byte, moved by NumPy.

>>> Simulation(plan, [Request(num_tokens=100, cached=32, cuts=(40,))], seed=1).run()    # or AssertionError

Every byte of a cache is one int64 that names what it holds: (request, group, layer, part, head, row, byte). Expected
destinations are written cell by cell from the layout's meaning; a plan must reproduce them, writing each once.

With ``cell_bytes=8`` a cell is eight bytes of the cache instead: the arenas are then memory that an engine can move.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from fabric_kv.sharding import CacheSpec, PageWrite, TransferPlan

Cells = NDArray[np.int64]
CANARY = -1
JUNK = -2  # source bytes that belong to nobody


@dataclass
class Request:
    num_tokens: int
    cached: int = 0
    cuts: tuple[int, ...] = ()  # ends of the chunks before the last
    source_set: int = 0
    src_dp: int = 0
    dst_dp: int = 0
    extra_pages: int = 1  # page lists are longer than needed
    src_pages: list[Cells] = field(default_factory=list)
    dst_pages: list[Cells] = field(default_factory=list)


def stamp(request: int, group: int, layer: int, part: int, heads: Cells, rows: Cells, nbytes: int) -> Cells:
    """Stamps of shape [heads, rows, nbytes]; ``rows`` counts from the start of the request."""
    prefix = ((request * 32 + group) * 4096 + layer) * 16 + part
    cell = (prefix * 4096 + heads[:, None, None]) * (1 << 14) + rows[None, :, None]
    return np.asarray(cell * (1 << 6) + np.arange(nbytes))


def needed_rows(plan: TransferPlan, group_index: int, request: Request) -> tuple[int, int]:
    """Tokens [begin, end) of a group that must arrive: whole pieces, from the first that decode lacks and looks at."""
    src, dst = plan.src.layout.groups[group_index], plan.dst.layout.groups[group_index]
    total = request.num_tokens
    first = request.cached
    if src.window:
        first = max(first, total - src.window + 1)
    if first >= total:
        return 0, 0
    sizes = (src.page_tokens, dst.page_tokens)
    end = min(math.ceil(total / size) * size for size in sizes)
    return max(first // size * size for size in sizes), end


class Simulation:
    """Runs requests through a plan, on arenas for every rank of both sides."""

    def __init__(self, plan: TransferPlan, requests: list[Request], seed: int = 0, cell_bytes: int = 1) -> None:
        self.plan = plan
        self.requests = requests
        self.cell_bytes = cell_bytes  # 1 or 8
        rng = np.random.default_rng(seed)
        self.src = self.arenas(plan.src, JUNK)
        self.dst = self.arenas(plan.dst, CANARY)
        self.counts = self.arenas(plan.dst, 0)
        self.num_writes = 0
        for side, spec in (("src_pages", plan.src), ("dst_pages", plan.dst)):
            self._allot(side, spec, rng)
        for number, request in enumerate(requests):
            self._fill_source(number, request)

    def arenas(self, spec: CacheSpec, fill: int) -> list[list[Cells]]:
        """For every rank, its regions."""
        return [[np.full(size // self.cell_bytes, fill) for size in rank.region_bytes] for rank in spec.memory]

    def _allot(self, side: str, spec: CacheSpec, rng: np.random.Generator) -> None:
        """Give every request scattered pages of its own."""
        for group_index, group in enumerate(spec.layout.groups):
            num_pages = max(rank.num_pages[group_index] for rank in spec.memory)
            free = rng.permutation(num_pages)
            for request in self.requests:
                size = group.page_tokens
                count = math.ceil(request.num_tokens / size) + request.extra_pages if size else 1
                assert count <= free.size, "the test's pools are too small"
                getattr(request, side).append(free[:count].astype(np.int64))
                free = free[count:]

    def views(self, spec: CacheSpec, arenas: list[list[Cells]], rank: int):
        """(group, layer, part number, global heads, cells of shape [pages, heads, rows, cells of a row])."""
        size = self.cell_bytes
        tp = spec.placement.coords(rank).tp
        for layer in spec.memory[rank].layers:
            group = spec.layout.groups[layer.group]
            for number, (part, place) in enumerate(zip(group.parts, layer.parts, strict=True)):
                heads = np.arange(*spec.placement.heads_of(tp, part.heads))
                shape = (
                    spec.memory[rank].num_pages[layer.group],
                    len(heads),
                    group.rows_of(part),
                    part.row_bytes // size,
                )
                strides = [8 // size * step for step in (place.page_stride, place.head_stride, place.row_stride, size)]
                cells = as_strided(arenas[rank][place.region][place.offset // size :], shape, strides)
                yield layer.group, layer.layer, number, heads, cells

    def _fill_source(self, number: int, request: Request) -> None:
        for rank in range(len(self.src)):
            if self.plan.src.placement.coords(rank).dp != request.src_dp:
                continue
            for group, layer, part, heads, cells in self.views(self.plan.src, self.src, rank):
                rows = cells.shape[2]
                for entry, page in enumerate(request.src_pages[group]):
                    at = np.arange(entry * rows, (entry + 1) * rows)
                    cells[page] = stamp(number, group, layer, part, heads, at, cells.shape[3])

    def expected(self, only: int | None = None) -> list[list[Cells]]:
        """The destination's arenas after all requests, or after ``only`` that one."""
        arenas = self.arenas(self.plan.dst, CANARY)
        for number, request in enumerate(self.requests):
            if only not in (None, number):
                continue
            for rank in range(len(arenas)):
                if self.plan.dst.placement.coords(rank).dp == request.dst_dp:
                    self._expect(arenas, number, request, rank)
        return arenas

    def _expect(self, arenas: list[list[Cells]], number: int, request: Request, rank: int) -> None:
        for group_index, layer, part, heads, cells in self.views(self.plan.dst, arenas, rank):
            group = self.plan.dst.layout.groups[group_index]
            rows = cells.shape[2]
            if group.kind == "state":
                begin, end = 0, rows if request.num_tokens > request.cached else 0
            else:
                begin, end = needed_rows(self.plan, group_index, request)
                if group.parts[part].rows:
                    begin, end = begin // group.page_tokens * rows, math.ceil(end / group.page_tokens) * rows
            for row in range(begin, end):
                page = request.dst_pages[group_index][row // rows]
                at = np.array([row])
                cells[page, :, row % rows] = stamp(number, group_index, layer, part, heads, at, cells.shape[3])[:, 0]

    def run(self) -> None:
        """Send every request in its chunks, then compare arenas, write counts and units."""
        units = [[0] * len(self.dst) for _ in self.requests]
        for number, request in enumerate(self.requests):
            ends = (0, *request.cuts, request.num_tokens)
            for index, (begin, end) in enumerate(itertools.pairwise(ends)):
                self._send_chunk(request, begin, end, index == len(request.cuts), units[number])
        expected = self.expected()
        for rank, regions in enumerate(expected):
            for region, cells in enumerate(regions):
                where = f"decode rank {rank}, region {region}"
                np.testing.assert_array_equal(self.dst[rank][region], cells, err_msg=where)
                np.testing.assert_array_equal(self.counts[rank][region], cells != CANARY, err_msg=f"{where}: writes")
        for number, request in enumerate(self.requests):
            for rank in range(len(self.dst)):
                if self.plan.dst.placement.coords(rank).dp == request.dst_dp:
                    want = self.plan.expected_units(rank, request.source_set, request.num_tokens, cached=request.cached)
                    assert units[number][rank] == want, f"request {number}, decode rank {rank}: units"
                else:
                    assert units[number][rank] == 0

    def _send_chunk(self, request: Request, begin: int, end: int, final: bool, units: list[int]) -> None:
        plan = self.plan
        pairs = plan.pairs(request.source_set, src_dp=request.src_dp, dst_dp=request.dst_dp)
        for group_index, group in enumerate(plan.src.layout.groups):
            page_map = plan.page_map(
                group_index, begin, end, cached=request.cached, final=final, num_tokens=request.num_tokens
            )
            src_pages, dst_pages = request.src_pages[group_index], request.dst_pages[group_index]
            for layer in group.layers:
                for src_rank, dst_rank in pairs:
                    for write in plan.writes(
                        src_rank, dst_rank, layer, page_map, src_pages, dst_pages, source_set=request.source_set
                    ):
                        self._apply(src_rank, dst_rank, write)
                        each = math.ceil(write.nbytes / plan.unit_bytes)
                        units[dst_rank] += each * write.rows * len(write.src_pages)

    def _apply(self, src_rank: int, dst_rank: int, write: PageWrite) -> None:
        self.num_writes += write.rows * len(write.src_pages)
        inner = np.arange(write.nbytes)
        rows = np.arange(write.rows)[:, None]
        src = write.src_offset + write.src_pages[:, None, None] * write.src_stride + rows * write.src_row_stride + inner
        dst = write.dst_offset + write.dst_pages[:, None, None] * write.dst_stride + rows * write.dst_row_stride + inner
        assert src.min() >= 0
        assert dst.min() >= 0
        self.dst[dst_rank][write.dst_region][dst] = self.src[src_rank][write.src_region][src]
        np.add.at(self.counts[dst_rank][write.dst_region], dst, 1)
