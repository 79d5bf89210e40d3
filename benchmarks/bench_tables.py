"""What ``scripts/bench`` prints: tables of what was measured, on which machine, for a terminal or for a document.

>>> table = Table("Until write_pages returns", ["pages", "µs"], [["16", "9.0"]])
>>> update_document(Path("docs/performance.md"), "calls", as_markdown([table], describe_run(3)))
"""

from __future__ import annotations

import datetime
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table as RichTable

from fabric_kv.bench.machine import describe_machine, describe_versions

__all__ = ["Table", "as_markdown", "describe_run", "print_tables", "range_text", "summary", "update_document"]


class Table(NamedTuple):
    """Cells are Markdown."""

    title: str
    header: list[str]
    rows: list[list[str]]


def summary(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def range_text(values: dict[str, float]) -> str:
    return f"{values['median']:.2f} ({values['min']:.2f}–{values['max']:.2f})"


def describe_run(repetitions: int) -> dict[str, str]:
    """What figures depend on, beside the provider, which the tables name."""
    git = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    machine, versions = describe_machine(), describe_versions()
    return {
        "commit": git.stdout.strip() or "unknown",
        "date": datetime.date.today().isoformat(),
        "repetitions": str(repetitions),
        "cpu": machine["cpu"],
        "Linux": versions["Linux"],
        "libfabric": versions["libfabric"].split()[0],
        "Python": versions["Python"],
        "NumPy": versions["NumPy"],
        "load before": machine["load"],
    }


def _run_text(run: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in run.items())


def as_markdown(tables: Sequence[Table], run: dict[str, str]) -> str:
    lines = [_run_text(run) + ".", ""]
    for title, header, rows in tables:
        lines += [f"**{title}**", "", *(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)), ""]
    return "\n".join(lines)


def print_tables(tables: Sequence[Table], run: dict[str, str]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(_run_text(run))
    for title, header, rows in tables:
        table = RichTable(title=title, title_justify="left")
        for name in header:
            table.add_column(name, justify="right" if "/s" in name or "µs" in name else "left")
        for row in rows:
            table.add_row(*(cell.replace("**", "").replace("`", "") for cell in row))
        console.print(table)


def update_document(path: Path, part: str, markdown: str) -> None:
    """Put the tables of a part between the document's two markers for it.

    SystemExit if they are not there exactly once: nothing is written then.
    """
    text = path.read_text()
    begin, end = f"<!-- figures: {part} -->", f"<!-- end of figures: {part} -->"
    new, count = re.subn(
        f"({re.escape(begin)}\n).*?({re.escape(end)})", lambda m: f"{m[1]}{markdown}\n{m[2]}", text, flags=re.S
    )
    if count != 1:
        raise SystemExit(f"{path} has no place for these figures: {begin} ... {end}")
    path.write_text(new)


def machine_text(run: dict[str, Any]) -> str:
    """A line for pictures."""
    return f"{run['cpu']}, Linux {run['Linux']}, libfabric {run['libfabric']}, commit {run['commit']}, {run['date']}"
