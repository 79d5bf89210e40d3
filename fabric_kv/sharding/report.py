"""What a plan costs, and who sends what to whom, for people.

>>> print(plan.explain())
>>> plan.cost(num_tokens=4096).mean_bytes
4096.0
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from ..tables import text_table
from .compat import describe_placement, format_ranges
from .fragments import Fragment

if TYPE_CHECKING:
    from .plan import TransferPlan

__all__ = ["PairCost", "PlanCost", "cost_of", "explain"]


class PairCost(NamedTuple):
    """What one rank sends to another for one request."""

    src_rank: int
    dst_rank: int
    num_bytes: int
    max_writes: int  # every fragment by itself: page numbers scattered on either side
    min_writes: int  # neighbouring pages merged: page numbers ascending without gaps on both sides


class PlanCost(NamedTuple):
    """What one request costs.

    Attributes
    ----------
    pairs : tuple of PairCost
    num_bytes : int
    max_writes, min_writes : int
        Writes with scattered page numbers, and with page numbers that ascend without gaps on both sides.
    units : dict of int to int
        Units that each destination rank expects.
    """

    pairs: tuple[PairCost, ...]
    num_bytes: int
    max_writes: int
    min_writes: int
    units: dict[int, int]

    @property
    def mean_bytes(self) -> float:
        """Bytes per write with scattered page numbers: what a NIC sees at worst."""
        return self.num_bytes / self.max_writes if self.max_writes else 0.0


def cost_of(
    plan: TransferPlan, num_tokens: int, *, cached: int = 0, source_set: int = 0, src_dp: int = 0, dst_dp: int = 0
) -> PlanCost:
    """See ``TransferPlan.cost``."""
    counts = [plan.piece_counts(group, num_tokens, cached=cached) for group in range(len(plan.src.layout.groups))]
    pairs = []
    for src_rank, dst_rank in plan.pairs(source_set, src_dp=src_dp, dst_dp=dst_dp):
        num_bytes = most = least = 0
        for group, _, fragment in _fragments(plan, src_rank, dst_rank, source_set):
            pieces = counts[group][fragment.kind]
            writes = pieces * fragment.rows
            num_bytes += writes * fragment.nbytes
            most += writes
            joined = fragment.rows == 1 and fragment.nbytes == fragment.src_stride == fragment.dst_stride
            # With unequal page sizes the pieces of one kind are never neighbours on both sides.
            joined = joined and len(counts[group]) == 1
            least += min(pieces, 1) if joined else writes
        pairs.append(PairCost(src_rank, dst_rank, num_bytes, most, least))
    ranks = sorted({pair.dst_rank for pair in pairs})
    return PlanCost(
        tuple(pairs),
        sum(pair.num_bytes for pair in pairs),
        sum(pair.max_writes for pair in pairs),
        sum(pair.min_writes for pair in pairs),
        {rank: plan.expected_units(rank, source_set, num_tokens, cached=cached) for rank in ranks},
    )


def explain(plan: TransferPlan, source_set: int = 0, src_dp: int = 0, dst_dp: int = 0) -> str:
    """See ``TransferPlan.explain``."""
    src, dst = plan.src.placement, plan.dst.placement
    head = (
        f"prefill {describe_placement(src)} -> decode {describe_placement(dst)}: source set {source_set} of"
        f" {plan.num_source_sets}, unit {plan.unit_bytes} bytes"
    )
    rows = []
    for src_rank, dst_rank in plan.pairs(source_set, src_dp=src_dp, dst_dp=dst_dp):
        layers: dict[tuple[int, tuple[tuple[int, int], ...]], set[int]] = {}
        for group in range(len(plan.src.layout.groups)):
            for layer in plan.src.layout.groups[group].layers:
                found = plan.fragments(src_rank, dst_rank, group, layer, source_set)
                if found:
                    shape = tuple((fragment.rows, fragment.nbytes) for fragment in found)
                    layers.setdefault((group, shape), set()).add(layer)
        for (group, shape), members in layers.items():
            rows.append(
                [
                    _rank(src_rank, plan.src.placement.coords(src_rank)),
                    _rank(dst_rank, plan.dst.placement.coords(dst_rank)),
                    plan.src.layout.groups[group].name,
                    format_ranges(sorted(members)),
                    _heads(plan, src_rank, dst_rank, group),
                    _sizes(shape),
                ]
            )
    header = ["prefill rank", "decode rank", "group", "layers", "heads", "writes per page and layer"]
    return head + "\n" + text_table(header, rows)


def _fragments(
    plan: TransferPlan, src_rank: int, dst_rank: int, source_set: int
) -> Iterator[tuple[int, int, Fragment]]:
    for index, group in enumerate(plan.src.layout.groups):
        for layer in group.layers:
            for fragment in plan.fragments(src_rank, dst_rank, index, layer, source_set):
                yield index, layer, fragment


def _rank(rank: int, coords: tuple[int, int, int]) -> str:
    return f"{rank} (dp{coords[0]} pp{coords[1]} tp{coords[2]})"


def _heads(plan: TransferPlan, src_rank: int, dst_rank: int, group: int) -> str:
    """Common heads, for each number of heads among the group's parts."""
    spans: dict[int, str] = {}
    for part in plan.src.layout.groups[group].parts:
        a = plan.src.placement.heads_of(plan.src.placement.coords(src_rank).tp, part.heads)
        b = plan.dst.placement.heads_of(plan.dst.placement.coords(dst_rank).tp, part.heads)
        spans[part.heads] = format_ranges(range(max(a[0], b[0]), min(a[1], b[1]))) or "none"
    return " / ".join(f"{span} of {heads}" for heads, span in spans.items())


def _sizes(shape: tuple[tuple[int, int], ...]) -> str:
    """``2 x 4096 B``: fragments of equal size counted together."""
    counts: dict[int, int] = {}
    for rows, nbytes in shape:
        counts[nbytes] = counts.get(nbytes, 0) + rows
    return ", ".join(f"{count} x {nbytes} B" for nbytes, count in sorted(counts.items(), reverse=True))
