"""A row and the floor in turn, so that both see the same machine: the ratio is of pairs, the figures are medians.

>>> row = measure_against(floor, case, contiguity=0, depth=16, measure=lambda: initiator.measure(0))
>>> row.floor_ratio
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import msgspec

from ..errors import ConfigError
from .floor import MAX_PAGE_BYTES, Floor, pages_of_a_round
from .results import Row
from .workload import Case, Fabric, Workload

__all__ = ["check_comparable", "measure_against"]

TURNS = 3
_ROUNDS = 5


def check_comparable(workload: Workload, fabric: Fabric, *, loopback: bool, num_peers: int) -> None:
    """Refuse what the floor does not do.

    Raises
    ------
    ConfigError
        Says what it is.
    """
    for wrong, why in (
        (not loopback, "it runs on one machine: add --loopback"),
        (fabric.provider is None, "it needs the provider's name: add --provider"),
        (workload.op not in ("paged", "write"), f"it writes pages, and does not know --op {workload.op}"),
        (num_peers > 1 or workload.inwards, "it has one sender and one receiver: drop --peers, -R and --bidir"),
        (fabric.rails not in (None, 1) or len(fabric.nics) > 1, "it has one rail"),
        (fabric.on_gpu, "its pages are on the host: drop --mem"),
        (workload.contiguity not in (0, 100), "it knows --contiguity 0 and 100"),
        (
            fabric.progress == "spin",
            "our spinning engines would take its cores meanwhile: drop --progress spin (scripts/bench stops them)",
        ),
    ):
        if wrong:
            raise ConfigError(f"--floor: {why}")


def measure_against(floor: Floor, case: Case, *, contiguity: int, depth: int, measure: Callable[[], Row]) -> Row:
    """Three turns each: our median row, with the floor's median and the median of the ratios."""
    if case.page_bytes % 8 or case.page_bytes > MAX_PAGE_BYTES:
        return measure()  # no size of the floor's
    num_pages = pages_of_a_round(case.page_bytes, case.num_pages * depth)
    pattern = "contiguous" if contiguity else "random"
    rows, floors = [], []
    for _ in range(TURNS):
        floors.append(floor.pages(case.page_bytes, num_pages, pattern, _ROUNDS).pages_per_s * case.page_bytes / 1e9)
        rows.append(measure())
    median = sorted(rows, key=lambda row: row.gb_per_s)[TURNS // 2]
    return msgspec.structs.replace(
        median,
        wrong_pages=sum(row.wrong_pages for row in rows),
        floor_gb_per_s=statistics.median(floors),
        floor_ratio=statistics.median(row.gb_per_s / bare for row, bare in zip(rows, floors, strict=True)),
    )
