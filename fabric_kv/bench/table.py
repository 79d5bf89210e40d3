"""What is printed: header, a line for each row, footer. Lines that are no row begin with ``#``.

>>> print(header(report)); print(columns()); print(line(row)); print(footer(report))
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

from .results import Report, Row
from .sizes import size_text

__all__ = ["COLUMNS", "columns", "footer", "header", "line"]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


#: Heading, width, and how it is written.
COLUMNS: tuple[tuple[str, int, Callable[[Row], str]], ...] = (
    ("page(B)", 9, lambda row: str(row.page_bytes)),
    ("pages", 7, lambda row: str(row.num_pages)),
    ("bytes", 11, lambda row: str(row.bytes)),
    ("iters", 8, lambda row: str(row.iterations)),
    ("GB/s", 8, lambda row: f"{row.gb_per_s:.3f}"),
    ("Gb/s", 8, lambda row: f"{row.gbit_per_s:.2f}"),
    ("%link", 6, lambda row: _percent(row.link_percent)),
    ("Mpps", 8, lambda row: f"{row.mpages_per_s:.4f}"),
    ("post_avg(us)", 12, lambda row: f"{row.post_avg_us:.2f}"),
    ("t_avg", 9, lambda row: f"{row.t_avg_us:.1f}"),
    ("t_p50", 9, lambda row: f"{row.t_p50_us:.1f}"),
    ("t_p99", 9, lambda row: f"{row.t_p99_us:.1f}"),
    ("t_p99.9", 9, lambda row: f"{row.t_p999_us:.1f}"),
    ("t_max", 9, lambda row: f"{row.t_max_us:.1f}"),
    ("cpu(%)", 6, lambda row: f"{row.cpu_percent:.0f}"),
    ("B/write", 9, lambda row: f"{row.bytes_per_write:.0f}"),
    ("#wrong", 6, lambda row: str(row.wrong_pages)),
)
_FLOOR = ("/floor", 6, lambda row: _ratio(row.floor_ratio))


def header(report: Report) -> str:
    """Versions, what was opened and why, where it is, and every setting."""
    lines = [
        shlex.join(report.command),
        ", ".join(f"{name} {version}" for name, version in report.versions.items()),
        ", ".join(f"{name} {value}" for name, value in report.machine.items()),
    ]
    for whose, rails in (("initiator", report.rails), ("target", report.target_rails)):
        for number, rail in enumerate(rails):
            speed = f", {rail['link_gbps']:g} Gbit/s" if rail["link_gbps"] else ""
            lines.append(
                f"{whose} rail {number}: provider {rail['provider']}, fabric {rail['fabric']}, "
                f"domain {rail['domain']}{speed}"
            )
            lines.append(f"  {rail['mode']}, since {rail['mode_why']}")
    lines += [f"topology: {place}" for place in report.topology]
    lines.append(f"settings: {settings(report)}")
    lines.append("GB/s and Gb/s are decimal (10^9), times are in us; t_* from submission to the end of a transfer here")
    return "\n".join(f"# {text}" for text in lines)


def settings(report: Report) -> str:
    """Every setting, as name=value."""
    workload, fabric = report.workload, report.fabric
    direction = {(True, False): "outwards", (False, True): "reverse", (True, True): "bidir"}
    values: dict[str, Any] = {
        "op": workload.op,
        "direction": direction[workload.outwards, workload.inwards],
        "peers": report.num_peers,
        "depth": workload.depth,
        "batch": workload.batch,
        "contiguity": f"{workload.contiguity}%",
        "iterations": workload.iterations if workload.duration_s is None else f"{workload.duration_s:g}s",
        "warmup": workload.warmup,
        "progress": fabric.progress,
        "provider": fabric.provider or "any-rdma",
        "nics": ",".join(fabric.nics) or "auto",
        "rails": len(report.rails) or fabric.rails or "auto",
        "cpus": ",".join(map(str, fabric.cpus)) or "any",
        "mem": "host",
        "memory": size_text(workload.memory_bytes),
        "verify": "on" if workload.verify else "off",
        "seed": workload.seed,
        "timeout": f"{workload.timeout_s:g}s",
    }
    return " ".join(f"{name}={value}" for name, value in values.items())


def columns(*, floor: bool = False) -> str:
    """The line above the rows; with ``floor`` they end in the share of the floor that was reached."""
    shown = (*COLUMNS, _FLOOR) if floor else COLUMNS
    return "".join(f"{name:>{width + 1}}" for name, width, _ in shown)


def line(row: Row, *, floor: bool = False) -> str:
    """A row."""
    shown = (*COLUMNS, _FLOOR) if floor else COLUMNS
    return "".join(f"{write(row):>{width + 1}}" for _, width, write in shown)


def footer(report: Report) -> str:
    """Whether all is right."""
    if report.error is not None:
        return f"# Ended early: {report.error}"
    if report.workload.verify:
        return f"# Wrong pages : {report.wrong_pages} {'OK' if not report.wrong_pages else 'FAILED'}"
    return "# Wrong pages : not looked at (--verify)"
