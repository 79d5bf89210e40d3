"""Throughput and latency against size, as a picture; needs matplotlib (the extra ``plot``).

>>> check_plottable(Path("out.png")); plot([("now", report)], Path("out.png"))
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..errors import ConfigError
from .results import Report
from .sizes import size_text

__all__ = ["check_plottable", "plot"]

_FORMATS = (".png", ".svg", ".pdf")


def check_plottable(path: Path) -> None:
    """Find out before measuring.

    Raises
    ------
    ConfigError
        If matplotlib is missing, or the file's name says no format that is known.
    """
    if path.suffix.lower() not in _FORMATS:
        raise ConfigError(f"--plot {path}: the name must end in one of {', '.join(_FORMATS)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"--plot needs matplotlib: pip install 'fabric_kv[plot]' ({error})") from error


def plot(reports: Sequence[tuple[str, Report]], path: Path) -> None:
    """Draw the rows of each report, and where there is one the floor.

    Parameters
    ----------
    reports : sequence of (label, Report)
    path : Path
        Its suffix says the format.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    throughput, latency = figure.subplots(1, 2)
    rows = [row for _, report in reports for row in report.rows]
    # With a fixed page the bytes of an iteration are what was swept.
    by_page = len({row.page_bytes for row in rows}) > 1
    for label, report in reports:
        sizes = [row.page_bytes if by_page else row.bytes for row in report.rows]
        throughput.plot(sizes, [row.gb_per_s for row in report.rows], marker="o", label=label)
        floors = [
            (size, row.floor_gb_per_s)
            for size, row in zip(sizes, report.rows, strict=True)
            if row.floor_gb_per_s is not None
        ]
        if floors:
            throughput.plot(*zip(*floors, strict=True), linestyle="--", color="grey", label=f"{label}: bare libfabric")
        for name, style in ("t_p50_us", "-"), ("t_p99_us", ":"):
            values = [getattr(row, name) for row in report.rows]
            latency.plot(sizes, values, marker="o", linestyle=style, label=f"{label}: {name[2:5]}")
    for axes, what in (throughput, "GB/s"), (latency, "us from submission to the transfer's end"):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("bytes of a page" if by_page else "bytes of an iteration")
        ticks = sorted({row.page_bytes if by_page else row.bytes for row in rows})
        axes.set_xticks(ticks, [size_text(tick) for tick in ticks], rotation=45)
        axes.set_ylabel(what)
        axes.grid(alpha=0.3)
        axes.legend()
    throughput.set_ylim(bottom=0)
    latency.set_yscale("log")
    workload = reports[0][1].workload
    figure.suptitle(f"fabric-kv-bench --op {workload.op} --depth {workload.depth}, {reports[0][1].rails_text}")
    figure.savefig(path, dpi=120)
