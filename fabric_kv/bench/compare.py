"""Two runs side by side: what differs in how they were made, and ratios for each size that both have, or of requests.

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
_FLOOR = ("/floor", "floor_ratio", 2)

# Of --op messenger: line, figure, and of which of its values.
_OF_REQUESTS = (
    ("prefill begun to ready (ms)", "prefill_to_ready_ms", ("p50", "p99")),
    ("TTFT penalty (ms)", "ttft_penalty_ms", ("p50", "p99")),
    ("arrival to ready (ms)", "latency_ms", ("p50", "p99")),
    ("transfer without the messenger (us)", "bare_us", ()),
    ("last layer to ready (us)", "tail_us", ()),
    ("messenger efficiency", "efficiency", ()),
    ("hidden share", "hidden_share", ()),
    ("while writing (GB/s)", "gb_per_s_while_writing", ()),
)


def compare(before: Report, after: Report) -> str:
    """A table for people; ratios are B over A.

    Raises
    ------
    ConfigError
        If no size was measured in both, or requests in one alone.
    """
    lines = [f"# A: {before.started}  {' '.join(before.command)}", f"# B: {after.started}  {' '.join(after.command)}"]
    lines += [f"# {name}: {a} -> {b}" for name, a, b in differences(before, after)]
    for name, report in ("A", before), ("B", after):
        if not report.ok:
            lines.append(f"# {name} is no good: {report.error or f'{report.wrong_pages} wrong pages'}")
    if (before.model is None) != (after.model is None):
        raise ConfigError("one of the runs is of --op messenger, and the other is not: they have no figure in common")
    table = _compare_rows if before.model is None else _compare_requests
    return "\n".join([*lines, *table(before, after)])


def _compare_requests(before: Report, after: Report) -> list[str]:
    a, b = before.messenger, after.messenger
    if a is None or b is None:
        raise ConfigError(f"{'A' if a is None else 'B'} ended before its requests were measured")
    table = []
    for name, figure, parts in _OF_REQUESTS:
        for part in parts or ("",):
            one, other = (figures[figure][part] if part else figures[figure] for figures in (a, b))
            table.append([f"{name}{f' {part}' if part else ''}", *_cells(one, other, 3)])
    return [text_table(["", "A", "B", "B/A"], table)]


def _compare_rows(before: Report, after: Report) -> list[str]:
    theirs = {_size(row): row for row in after.rows}
    pairs = [(row, theirs[_size(row)]) for row in before.rows if _size(row) in theirs]
    if not pairs:
        sizes = [sorted({_size(row) for row in report.rows}) for report in (before, after)]
        raise ConfigError(f"no size was measured in both: (page bytes, pages) {sizes[0]} and {sizes[1]}")
    with_floor = all(row.floor_ratio is not None for pair in pairs for row in pair)
    compared = (*_COMPARED, _FLOOR) if with_floor else _COMPARED
    header = ["page(B)", "pages"]
    for name, _, _ in compared:
        header += [f"{name} A", "B", "B/A"]
    table = [
        [
            str(a.page_bytes),
            str(a.num_pages),
            *(cell for _, field, digits in compared for cell in _cells(getattr(a, field), getattr(b, field), digits)),
        ]
        for a, b in pairs
    ]
    lines = [text_table(header, table)]
    left_out = len(before.rows) + len(after.rows) - 2 * len(pairs)
    if left_out:
        lines.append(f"# {left_out} rows of one run alone are left out")
    return lines


def differences(before: Report, after: Report) -> list[tuple[str, Any, Any]]:
    """Versions, machine and settings that are not the same in both."""
    a, b = _settings(before), _settings(after)
    return [(name, a.get(name, "-"), b.get(name, "-")) for name in {**a, **b} if a.get(name) != b.get(name)]


def _settings(report: Report) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in (report.versions, report.machine, report.workload, report.fabric, report.model or {}):
        found |= msgspec.to_builtins(part)
    for name in ("cases", "load", "layout"):
        found.pop(name, None)
    if report.model is not None:
        found["model"] = report.model.layout.model
    opened = {"opened": report.rails_text, "peers": report.num_peers, "qps": report.qps, "link_gbps": report.link_gbps}
    return found | opened


def _size(row: Row) -> tuple[int, int]:
    return row.page_bytes, row.num_pages


def _cells(a: float | None, b: float | None, digits: int) -> tuple[str, str, str]:
    texts = ["-" if value is None else f"{value:.{digits}f}" for value in (a, b)]
    return texts[0], texts[1], f"{b / a:.2f}" if a and b is not None else "-"
