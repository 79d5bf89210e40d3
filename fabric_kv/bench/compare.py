"""Two runs side by side: what differs in how they were made, and for each size that both have, the ratios.

>>> print(compare(read_report(before), read_report(after)))
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..errors import ConfigError
from ..tables import text_table
from .results import Report, Row

__all__ = ["compare"]

_COMPARED = (("GB/s", "gb_per_s", 3), ("t_p50", "t_p50_us", 1), ("t_p99", "t_p99_us", 1), ("cpu(%)", "cpu_percent", 0))


def compare(before: Report, after: Report) -> str:
    """A table for people; ratios are B over A.

    Raises
    ------
    ConfigError
        If no size was measured in both.
    """
    theirs = {_size(row): row for row in after.rows}
    pairs = [(row, theirs[_size(row)]) for row in before.rows if _size(row) in theirs]
    if not pairs:
        sizes = [sorted({_size(row) for row in report.rows}) for report in (before, after)]
        raise ConfigError(f"no size was measured in both: (page bytes, pages) {sizes[0]} and {sizes[1]}")
    lines = [f"# A: {before.started}  {' '.join(before.command)}", f"# B: {after.started}  {' '.join(after.command)}"]
    lines += [f"# {name}: {a} -> {b}" for name, a, b in differences(before, after)]
    for name, report in ("A", before), ("B", after):
        if not report.ok:
            lines.append(f"# {name} is no good: {report.error or f'{report.wrong_pages} wrong pages'}")
    header = ["page(B)", "pages"]
    for name, _, _ in _COMPARED:
        header += [f"{name} A", "B", "B/A"]
    table = [
        [
            str(a.page_bytes),
            str(a.num_pages),
            *(cell for _, field, digits in _COMPARED for cell in _cells(getattr(a, field), getattr(b, field), digits)),
        ]
        for a, b in pairs
    ]
    lines.append(text_table(header, table))
    left_out = len(before.rows) + len(after.rows) - 2 * len(pairs)
    if left_out:
        lines.append(f"# {left_out} rows of one run alone are left out")
    return "\n".join(lines)


def differences(before: Report, after: Report) -> list[tuple[str, Any, Any]]:
    """Versions, machine and settings that are not the same in both."""
    found = []
    for part in ("versions", "machine", "workload", "fabric"):
        a, b = (msgspec.to_builtins(getattr(report, part)) for report in (before, after))
        names = [name for name in {**a, **b} if name not in ("cases", "load")]
        found += [(name, a.get(name, "-"), b.get(name, "-")) for name in names if a.get(name) != b.get(name)]
    return found


def _size(row: Row) -> tuple[int, int]:
    return row.page_bytes, row.num_pages


def _cells(a: float, b: float, digits: int) -> tuple[str, str, str]:
    return f"{a:.{digits}f}", f"{b:.{digits}f}", f"{b / a:.2f}" if a else "-"
