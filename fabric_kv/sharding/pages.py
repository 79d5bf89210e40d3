"""Token arithmetic: which entries of the page lists a chunk of a request sends.

>>> pieces = Pieces.of_group(src_group, dst_group)          # pages of 16 tokens onto pages of 64
>>> page_map = pieces.page_map(0, begin=0, end=100, final=True)
>>> [(kind.tokens, kind.num) for kind in page_map.kinds]

A *piece* is a range of tokens that lies in one source page and in one destination page: the boundaries are the
multiples of both page sizes, so pieces repeat with their least common multiple. With equal page sizes a piece is a
page. Pieces are sent whole: what lies behind a request's last token in its last page travels with it, since those
bytes belong to the request anyway, and every piece of a kind then has the same size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, PlanError
from .layout import Group, check_range

__all__ = ["PageMap", "PieceKind", "PieceRun", "Pieces", "Selected"]

MAX_KINDS = 64
MAX_TOKENS = 1 << 40


class PieceKind(NamedTuple):
    """Pieces at one place of the repeating pattern: the k-th starts at token ``begin + k * period``."""

    begin: int
    tokens: int
    src_row: int  # row inside the source page
    dst_row: int
    src_entry: int  # entry of the page list for k = 0
    dst_entry: int
    src_step: int  # entries from k to k + 1
    dst_step: int


class PieceRun(NamedTuple):
    """The pieces k in [first, first + count) of one kind."""

    first: int
    num: int
    tokens: int
    src_entries: slice
    dst_entries: slice


class Selected(NamedTuple):
    """Page indices of one kind, checked and copied once for all layers, with their extremes."""

    src_pages: NDArray[np.int64]
    dst_pages: NDArray[np.int64]
    src_low: int
    src_high: int
    dst_low: int
    dst_high: int


class PageMap:
    """Which entries of a request's page lists one chunk sends, in one group. Made once, used for every layer.

    Attributes
    ----------
    group : int
    kinds : tuple of PieceRun
        One for each piece kind of the group; ``num`` may be 0.
    """

    __slots__ = ("_selected", "group", "kinds")

    def __init__(self, group: int, kinds: tuple[PieceRun, ...]) -> None:
        self.group = group
        self.kinds = kinds
        self._selected: tuple[object, object, tuple[Selected | None, ...]] | None = None

    @property
    def num_pieces(self) -> int:
        """Pieces of all kinds; with equal page sizes the number of pages."""
        return sum(kind.num for kind in self.kinds)

    def __bool__(self) -> bool:
        return self.num_pieces > 0

    def select(self, src_pages: NDArray[np.int64], dst_pages: NDArray[np.int64]) -> tuple[Selected | None, ...]:
        """The page indices that this chunk sends, for each kind; None where there are none.

        The same two list objects give the same arrays again, so all layers share one copy: the lists are read at the
        first call, and later changes in place are not seen.
        """
        memo = self._selected
        if memo is not None and memo[0] is src_pages and memo[1] is dst_pages:
            return memo[2]
        selected = tuple(self._select(run, src_pages, dst_pages) for run in self.kinds)
        self._selected = (src_pages, dst_pages, selected)
        return selected

    @staticmethod
    def _select(run: PieceRun, src_pages: NDArray[np.int64], dst_pages: NDArray[np.int64]) -> Selected | None:
        if not run.num:
            return None
        src = _take(src_pages, run.src_entries, "source")
        dst = _take(dst_pages, run.dst_entries, "destination")
        return Selected(src, dst, *_extremes(src), *_extremes(dst))


def _take(pages: NDArray[np.int64], entries: slice, side: str) -> NDArray[np.int64]:
    array = np.asarray(pages)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ConfigError(f"the {side} page list must be a 1-d integer array: got {array.dtype} of shape {array.shape}")
    if array.size < entries.stop:
        raise ConfigError(f"the {side} page list has {array.size} entries: this chunk needs entry {entries.stop - 1}")
    taken = array[entries].astype(np.int64)  # always a copy
    taken.flags.writeable = False
    return taken


def _extremes(pages: NDArray[np.int64]) -> tuple[int, int]:
    return int(np.min(pages)), int(np.max(pages))


class Pieces:
    """The repeating pattern of pieces of one group."""

    def __init__(self, kinds: tuple[PieceKind, ...], period: int, page_tokens: int, window: int) -> None:
        self.kinds = kinds
        self._period = period  # 0: a state, one slot per request
        self._page_tokens = page_tokens
        self._window = window

    @classmethod
    def of_group(cls, src: Group, dst: Group) -> Pieces:
        """The pattern for a pair of groups that differ in page size at most.

        Raises
        ------
        PlanError
            If the page sizes share so small a factor that the pattern has more than 64 kinds of pieces.
        """
        if src.kind == "state":
            return cls((PieceKind(0, 1, 0, 0, 0, 0, 0, 0),), 0, 0, 0)
        a, b = src.page_tokens, dst.page_tokens
        period = math.lcm(a, b)
        if period // a + period // b - 1 > MAX_KINDS:
            raise PlanError(
                f"group {src.name}: pages of {a} and of {b} tokens share too few boundaries ({period} tokens)"
            )
        cuts = sorted({*range(0, period + 1, a), *range(0, period + 1, b)})
        kinds = (
            PieceKind(t, end - t, t % a, t % b, t // a, t // b, period // a, period // b)
            for t, end in itertools.pairwise(cuts)
        )
        return cls(tuple(kinds), period, b, src.window)

    def page_map(
        self,
        group: int,
        begin: int,
        end: int,
        *,
        cached: int = 0,
        final: bool = False,
        num_tokens: int | None = None,
    ) -> PageMap:
        """See ``TransferPlan.page_map``."""
        check_range("begin", begin, 0, MAX_TOKENS, "tokens")
        check_range("end", end, begin, MAX_TOKENS, "tokens")
        if num_tokens is None and self._window and not final:
            raise ConfigError(
                "a chunk of a sliding-window group needs num_tokens: the request's length decides what is sent"
            )
        total = end if num_tokens is None else num_tokens
        check_range("num_tokens", total, end, end if final else MAX_TOKENS, "tokens")
        start = self._start(total, cached)
        if not self._period:
            num = int(final and total > start)
            return PageMap(group, (PieceRun(0, num, 1, slice(0, num, 1), slice(0, num, 1)),))
        final = final and total > start
        return PageMap(group, tuple(self._run(kind, max(begin, start), end, final) for kind in self.kinds))

    def counts(self, num_tokens: int, cached: int) -> tuple[int, ...]:
        """Pieces of each kind that a whole request sends."""
        check_range("num_tokens", num_tokens, 0, MAX_TOKENS, "tokens")
        start = self._start(num_tokens, cached)
        if not self._period:
            return (int(num_tokens > start),)
        if num_tokens <= start:
            return (0,) * len(self.kinds)
        return tuple(self._run(kind, start, num_tokens, True).num for kind in self.kinds)

    def _start(self, num_tokens: int, cached: int) -> int:
        """First token that decode lacks and still looks at."""
        check_range("cached", cached, 0, MAX_TOKENS, "tokens")
        if self._page_tokens and cached % self._page_tokens:
            raise ConfigError(
                f"cached={cached} tokens is no multiple of the destination's page of {self._page_tokens} tokens"
            )
        # The next query sits at position num_tokens and sees window positions, its own included (as in vLLM).
        return max(cached, num_tokens + 1 - self._window) if self._window else cached

    def _run(self, kind: PieceKind, start: int, end: int, final: bool) -> PieceRun:
        """Pieces whose end lies in (start, end]; with ``final`` also the one that ``end`` cuts."""
        period, stop = self._period, kind.begin + kind.tokens
        first = max(0, (start - stop) // period + 1)
        past = -((kind.begin - end) // period) if final else (end - stop) // period + 1
        num = max(0, past - first)
        return PieceRun(
            first,
            num,
            kind.tokens,
            _entries(kind.src_entry, kind.src_step, first, num),
            _entries(kind.dst_entry, kind.dst_step, first, num),
        )

    def __iter__(self) -> Iterator[PieceKind]:
        return iter(self.kinds)


def _entries(entry: int, step: int, first: int, num: int) -> slice:
    begin = entry + first * step
    return slice(begin, begin + (num - 1) * step + 1 if num else begin, step)
