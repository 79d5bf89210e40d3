"""The measuring programs run: each benchmark once, and scaling with small numbers. Nothing is said about speed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import bench_calls
import bench_scaling
import pytest

from .conftest import Provider

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
LONG = 100.0


@pytest.mark.parametrize("provider", ["tcp"], indirect=True)
def test_every_benchmark_runs_and_names_a_bare_thing_that_is_there(provider: Provider, tmp_path: Path) -> None:
    pytest.importorskip("pytest_benchmark", reason="pytest-benchmark is missing: pip install fabric_kv[test]")
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--benchmark-json={out}"]
    command += ["--benchmark-max-time=0.001", "--benchmark-min-rounds=1", "--benchmark-calibration-precision=1"]
    done = subprocess.run(
        [*command, *(str(BENCHMARKS / f"{suite}.py") for suite in bench_calls.SUITES)],
        capture_output=True,
        text=True,
        timeout=LONG,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = bench_calls.read(json.loads(out.read_text()))
    assert {result["suite"] for result in results} == bench_calls.SUITES.keys()
    assert any(result["ratio"] for result in results)


@pytest.mark.parametrize("provider", ["tcp"], indirect=True)
@pytest.mark.parametrize("axis", list(bench_scaling.AXES))
def test_scaling_is_measured(provider: Provider, axis: str) -> None:
    results = list(
        bench_scaling.measure(repetitions=1, axes={axis: (1, 2)}, providers=("tcp",), count_instructions=False)
    )
    assert results
    for result in results:
        assert [point["n"] for point in result["points"]] == [1, 2]
        assert all(point["value"]["median"] > 0 for point in result["points"])
        assert result["points"][0]["ratio"]["median"] == 1.0
