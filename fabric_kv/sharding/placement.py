"""Which rank holds which layers and heads: tensor, pipeline and data parallelism.

>>> placement = Placement(tp_size=4, pp_layers=(47, 47))
>>> placement.num_ranks, placement.coords(5), placement.heads_of(1, heads=8)
(8, Coords(dp=0, pp=1, tp=1), (2, 4))

Ranks are numbered dp-major, then pp, then tp.
"""

from __future__ import annotations

import itertools
import random
from typing import NamedTuple

import msgspec

from ..errors import ConfigError
from .layout import MAX_HEADS, MAX_LAYERS, check_range

__all__ = ["Coords", "Placement", "SourcePicker", "even_stages"]

MAX_RANKS = 1024
MAX_TP = 256


class Coords(NamedTuple):
    """Place of a rank: data-parallel replica, pipeline stage, tensor-parallel rank."""

    dp: int
    pp: int
    tp: int


class Placement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the ranks of one engine share a cache.

    Attributes
    ----------
    tp_size : int
        Ranks that split the heads of a layer.
    pp_layers : tuple of int, or None
        Layers of each pipeline stage, in order; None: one stage with all layers. See ``even_stages``.
    dp_size : int
        Independent copies of the TP x PP grid; a request lives on one of them.
    cp_size : int
        Context parallelism; anything but 1 is refused when a plan is made.
    head_ranges : tuple of (begin, end), or None
        Heads of each TP rank where the default does not fit; it must cover every head of every part with more than
        one head, and the ranges of two ranks must be equal (replicas) or disjoint.

    Notes
    -----
    Default split of H heads: for ``tp_size <= H`` contiguous ranges, the first ``H % tp_size`` ranks one head longer,
    as ``numpy.array_split`` does; for ``tp_size > H`` rank t holds head ``t * H // tp_size``, which is what vLLM's
    ``QKVParallelLinear`` does where ``H`` divides ``tp_size``.
    """

    tp_size: int = 1
    pp_layers: tuple[int, ...] | None = None
    dp_size: int = 1
    cp_size: int = 1
    head_ranges: tuple[tuple[int, int], ...] | None = None

    def __post_init__(self) -> None:
        for name in ("tp_size", "dp_size", "cp_size"):
            check_range(name, getattr(self, name), 1, MAX_TP if name == "tp_size" else MAX_RANKS, "ranks")
        if self.pp_layers is not None:
            check_range("number of pipeline stages", len(self.pp_layers), 1, MAX_RANKS)
            for count in self.pp_layers:
                check_range("layers of a pipeline stage", count, 0, MAX_LAYERS, "layers")
        check_range("number of ranks", self.num_ranks, 1, MAX_RANKS)
        if self.head_ranges is not None:
            self._check_head_ranges(self.head_ranges)

    def _check_head_ranges(self, ranges: tuple[tuple[int, int], ...]) -> None:
        if len(ranges) != self.tp_size:
            raise ConfigError(
                f"head_ranges has {len(ranges)} entries: tp_size={self.tp_size} needs one for each TP rank"
            )
        for begin, end in ranges:
            check_range("begin of a head range", begin, 0, MAX_HEADS)
            check_range("end of a head range", end, begin + 1, MAX_HEADS)
        distinct = sorted(set(ranges))
        for (_, end), (begin, _) in itertools.pairwise(distinct):
            if begin != end:
                word = "overlap without being equal" if begin < end else "leave a gap"
                raise ConfigError(f"head_ranges={ranges}: two ranges {word} at head {min(begin, end)}")
        if distinct[0][0] != 0:
            raise ConfigError(f"head_ranges={ranges}: nobody holds head 0")

    @classmethod
    def dp_attention(cls, *, tp_size: int, dp_size: int) -> Placement:
        """DP-attention as SGLang counts it: ``tp_size`` GPUs in all, attention split into ``dp_size`` copies."""
        if dp_size < 1 or tp_size % dp_size:
            raise ConfigError(f"tp_size={tp_size} GPUs cannot be shared evenly by dp_size={dp_size} attention copies")
        return cls(tp_size=tp_size // dp_size, dp_size=dp_size)

    @property
    def pp_size(self) -> int:
        """Number of pipeline stages."""
        return 1 if self.pp_layers is None else len(self.pp_layers)

    @property
    def num_ranks(self) -> int:
        """Ranks in all."""
        return self.dp_size * self.pp_size * self.cp_size * self.tp_size

    def coords(self, rank: int) -> Coords:
        """Where a rank sits."""
        check_range("rank", rank, 0, self.num_ranks - 1)
        outer, tp = divmod(rank, self.tp_size)
        dp, pp = divmod(outer // self.cp_size, self.pp_size)
        return Coords(dp, pp, tp)

    def rank_of(self, coords: Coords) -> int:
        """The rank that sits there (``cp_size`` 1)."""
        return (coords.dp * self.pp_size + coords.pp) * self.tp_size + coords.tp

    def stages(self, num_layers: int) -> list[range]:
        """Global layer indices of each pipeline stage."""
        if self.pp_layers is None:
            return [range(num_layers)]
        ends = list(itertools.accumulate(self.pp_layers, initial=0))
        if ends[-1] != num_layers:
            raise ConfigError(f"pp_layers={self.pp_layers} sums to {ends[-1]}: the model has {num_layers} layers")
        return [range(begin, end) for begin, end in itertools.pairwise(ends)]

    def check_heads(self, heads: int) -> None:
        """Raise ConfigError unless a part with ``heads`` heads can be placed."""
        if self.head_ranges is not None and heads != 1:
            top = max(end for _, end in self.head_ranges)
            if top != heads:
                raise ConfigError(f"head_ranges covers {top} heads: a part has {heads}")

    def heads_of(self, tp: int, heads: int) -> tuple[int, int]:
        """Heads [begin, end) of a part with ``heads`` heads that TP rank ``tp`` holds."""
        if heads == 1:
            return 0, 1
        if self.head_ranges is not None:
            return self.head_ranges[tp]
        if self.tp_size > heads:
            head = tp * heads // self.tp_size
            return head, head + 1
        small, extra = divmod(heads, self.tp_size)
        begin = tp * small + min(tp, extra)
        return begin, begin + small + (tp < extra)


def even_stages(num_layers: int, pp_size: int) -> tuple[int, ...]:
    """Layers per stage, as evenly as possible; where they do not divide, stages before the last get one more.

    Notes
    -----
    vLLM's ``get_pp_indices``: the last stage stays short, since it also holds the output layers.
    """
    check_range("pp_size", pp_size, 1, MAX_RANKS)
    small, extra = divmod(num_layers, pp_size)
    stages = [small] * pp_size
    for index in range(extra):
        stages[-2 - index] += 1
    return tuple(stages)


class SourcePicker:
    """Chooses the source replica set of each request: a random start, then round robin.

    Over any run of requests no set is used more than once more often than another.

    Parameters
    ----------
    num_source_sets : int
        ``TransferPlan.num_source_sets``.
    seed : int, optional
        Fixes the start.
    """

    def __init__(self, num_source_sets: int, seed: int | None = None) -> None:
        check_range("num_source_sets", num_source_sets, 1, 1 << 20)
        self._num = num_source_sets
        self._next = random.Random(seed).randrange(num_source_sets)

    def pick(self) -> int:
        """The source set for the next request."""
        chosen = self._next
        self._next = (chosen + 1) % self._num
        return chosen
