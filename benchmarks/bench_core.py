"""What the C++ core costs by the clock, over a NIC that completes everything at once and moves nothing.

>>> results = measure(repetitions=3)
>>> print_tables(tables(results), describe_run(3))

A part of ``scripts/bench``; ``cost/engine_cost`` does the work. Instructions repeat exactly and these times do not:
``scripts/bench --check``.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench_tables import Table, range_text, summary

__all__ = ["measure", "tables"]

PROGRAM = Path(__file__).parent / "cost" / "engine_cost"
_PATIENCE_S = 300.0

# Issue 5's, of the medians. Beside a hog the median is to be what it is without.
TARGETS = {
    "ns an immediate": 30.0,
    "trigger to first post, us, p50": 2.0,
    "trigger to first post, beside a hog, us, p50": 2.0,
}


def measure(*, repetitions: int) -> list[dict[str, Any]]:
    """Each figure of each repetition, summed up."""
    found: dict[str, list[float]] = {}
    for _ in range(repetitions):
        run = subprocess.run([PROGRAM, "times"], capture_output=True, text=True, timeout=_PATIENCE_S, check=True)
        for line in run.stdout.splitlines():
            figure = json.loads(line)
            found.setdefault(figure["what"], []).append(figure["value"])
    return [{"what": "core", "name": name, "value": summary(values)} for name, values in found.items()]


def tables(results: Sequence[dict[str, Any]]) -> Iterator[Table]:
    """One."""
    rows = []
    for result in results:
        target, value = TARGETS.get(result["name"]), result["value"]
        met = "–" if target is None else "hit" if value["median"] <= target else "**missed**"
        rows.append([result["name"], range_text(value), "–" if target is None else f"≤ {target:g}", met])
    if rows:
        yield Table("The core over a NIC that moves nothing", ["what", "median (least–greatest)", "target", ""], rows)
