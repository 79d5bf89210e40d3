"""What single calls cost in Python: the pytest-benchmark suites, run short, beside their targets and the bare thing.

>>> results = measure(short=True)
>>> print_tables(tables(results), describe_run(1))

A part of ``scripts/bench``. A benchmark may name another one of its file in ``extra_info["bare"]``: what nobody can do
without for the same end, such as the copies that a plan consists of, or waking a thread. The ratio says what we add.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench_tables import Table

__all__ = ["SUITES", "measure", "read", "tables"]

HERE = Path(__file__).parent
SUITES = {
    "bench_planning": "Planning",
    "bench_engine": "Submissions, counters and watches",
    "bench_messenger": "Messenger",
}
_PATIENCE_S = 900.0
_SHORT = ["--benchmark-max-time=0.2", "--benchmark-min-rounds=3"]


def measure(*, short: bool) -> list[dict[str, Any]]:
    """Run the suites.

    SystemExit if a benchmark fails; what it said has been printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--benchmark-json={out}"]
        command += [str(HERE / f"{suite}.py") for suite in SUITES]
        command += ["--benchmark-disable-gc", "--benchmark-quiet", *(_SHORT if short else [])]
        done = subprocess.run(command, stdout=sys.stderr, timeout=_PATIENCE_S, check=False)
        if done.returncode:
            raise SystemExit(f"the benchmarks have failed: {' '.join(command)}")
        return read(json.loads(out.read_text()))


def read(data: dict[str, Any]) -> list[dict[str, Any]]:
    """The results in a file of pytest-benchmark's.

    Times are in microseconds, of one call where a round makes several (``extra_info["calls"]``). ``ratio``: the median
    over that of the bare thing with the same parameters, or else without any; None where none is named. KeyError if one
    is named that was not measured.
    """
    medians = {(_suite(found), found["name"]): _us_of_a_call(found, "median") for found in data["benchmarks"]}
    results = []
    for found in data["benchmarks"]:
        suite, info = _suite(found), found["extra_info"]
        bare, ratio = info.get("bare"), None
        if bare is not None:
            _, bracket, parameters = found["name"].partition("[")
            with_parameters = (suite, f"{bare}{bracket}{parameters}")
            name = with_parameters if with_parameters in medians else (suite, bare)
            ratio = medians[suite, found["name"]] / medians[name]
        results.append(
            {
                "what": "call",
                "suite": suite,
                "name": found["name"],
                "median_us": _us_of_a_call(found, "median"),
                "q1_us": _us_of_a_call(found, "q1"),
                "q3_us": _us_of_a_call(found, "q3"),
                "rounds": found["stats"]["rounds"],
                "target_us": info.get("target_us"),
                "bare": bare,
                "ratio": ratio,
            }
        )
    return results


def _us_of_a_call(found: dict[str, Any], which: str) -> float:
    return float(found["stats"][which] * 1e6 / found["extra_info"].get("calls", 1))


def _suite(found: dict[str, Any]) -> str:
    return Path(found["fullname"].partition("::")[0]).stem


def tables(results: Sequence[dict[str, Any]]) -> Iterator[Table]:
    """One for each suite."""
    header = ["what", "µs, median (quartiles)", "target µs", "", "bare", "times that"]
    for suite, title in SUITES.items():
        rows = [_row(result) for result in results if result["suite"] == suite]
        if rows:
            yield Table(title, header, rows)


def _row(result: dict[str, Any]) -> list[str]:
    target, ratio = result["target_us"], result["ratio"]
    met = "" if target is None else "hit" if result["median_us"] <= target else "**missed**"
    return [
        _words(result["name"]),
        f"{_us(result['median_us'])} ({_us(result['q1_us'])}–{_us(result['q3_us'])})",
        "–" if target is None else f"≤ {target:g}",
        met,
        "–" if ratio is None else _words(result["bare"]),
        "–" if ratio is None else f"{ratio:.2f}",
    ]


def _words(name: str) -> str:
    test, bracket, parameters = name.removeprefix("test_").partition("[")
    return f"{test.replace('_', ' ')} {bracket}{parameters}".rstrip()


def _us(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"
