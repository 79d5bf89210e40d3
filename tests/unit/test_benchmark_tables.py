"""What ``scripts/bench`` makes of its figures: ratios, tables, a document, a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bench_calls
import bench_scaling
import pytest
from bench_tables import Table, as_markdown, describe_run, update_document


def found(name: str, seconds: float, **info: Any) -> dict[str, Any]:
    """A benchmark, as pytest-benchmark writes it down."""
    stats = {"median": seconds, "q1": 0.9 * seconds, "q3": 1.2 * seconds, "rounds": 7}
    return {"name": name, "fullname": f"benchmarks/bench_engine.py::{name}", "extra_info": info, "stats": stats}


def test_calls_stand_beside_their_target_and_the_bare_thing() -> None:
    results = bench_calls.read(
        {
            "benchmarks": [
                found("test_one[tcp]", 6e-6, bare="test_bare", target_us=5),
                found("test_one[shm]", 4e-6, bare="test_bare", target_us=5),
                found("test_bare", 2e-6),
                found("test_bare[shm]", 1e-6),
            ]
        }
    )
    assert [result["ratio"] for result in results] == [pytest.approx(3), pytest.approx(4), None, None]
    (table,) = bench_calls.tables(results)
    assert table.rows[0] == ["one [tcp]", "6.0 (5.4–7.2)", "≤ 5", "**missed**", "bare", "3.00"]
    assert table.rows[1][3] == "hit"
    assert table.rows[2] == ["bare", "2.0 (1.8–2.4)", "–", "", "–", "–"]


def test_a_bare_thing_that_was_not_measured_is_noticed() -> None:
    with pytest.raises(KeyError):
        bench_calls.read({"benchmarks": [found("test_one", 6e-6, bare="test_nothing")]})


def scaled(axis: str, unit: str, points: dict[int, tuple[float, float]]) -> dict[str, Any]:
    def one(value: float) -> dict[str, float]:
        return {"median": value, "min": value, "max": value}

    return {
        "axis": axis,
        "measured": "a page",
        "unit": unit,
        "provider": "tcp",
        "points": [{"n": n, "value": one(value), "ratio": one(ratio)} for n, (value, ratio) in points.items()],
    }


RESULTS = [
    scaled("rails", "µs", {1: (8.0, 1.0), 4: (10.0, 1.25)}),
    scaled("rails", "instructions", {1: (300.0, 1.0), 2: (330.0, 1.1)}),
    scaled("peers", "µs", {1: (8.0, 1.0), 64: (16.0, 2.0)}),
]


def test_scaling_has_a_table_for_each_thing_that_grows() -> None:
    rails, peers = bench_scaling.tables(RESULTS)
    assert rails.header == ["what", "over", "unit", "1", "2", "4"]
    assert rails.rows == [
        ["a page", "tcp", "µs", "8.0 (1.00: 1.00–1.00)", "–", "10.0 (1.25: 1.25–1.25)"],
        ["a page", "tcp", "instructions", "300 (1.00)", "330 (1.10)", "–"],
    ]
    assert peers.rows == [["a page", "tcp", "µs", "8.0 (1.00: 1.00–1.00)", "16.0 (2.00: 2.00–2.00)"]]


def test_ratios_are_taken_within_a_turn() -> None:
    result = bench_scaling._result("peers", "a page", "µs", "tcp", [{1: 1.0, 4: 2.0}, {1: 10.0, 4: 10.0}, {1: 4, 4: 6}])
    assert result["points"][1]["ratio"] == {"median": 1.5, "min": 1.0, "max": 2.0}
    assert result["points"][1]["value"]["median"] == 6


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_the_same_figures_give_the_same_picture(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is missing: pip install fabric_kv[plot]")
    pictures = [tmp_path / f"{name}.{suffix}" for name in "ab"]
    for picture in pictures:
        bench_scaling.draw(RESULTS, "a machine", picture)
    assert pictures[0].read_bytes() == pictures[1].read_bytes()
    if suffix == "svg":
        assert "a machine" in pictures[0].read_text()
        assert "Rails of an engine" in pictures[0].read_text()


def test_a_part_of_a_document_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    document = tmp_path / "performance.md"
    text = "Before.\n<!-- figures: {0} -->\nold\n<!-- end of figures: {0} -->\nAfter.\n"
    document.write_text(text.format("pages") + text.format("calls"))
    update_document(document, "calls", as_markdown([Table("Title", ["a", "b"], [["1", "2"]])], describe_run(3)))
    first, second = document.read_text().split("After.\n")[:2]
    assert first == text.format("pages").removesuffix("After.\n")
    assert "old" not in second
    assert "**Title**\n\n| a | b |\n| --- | --- |\n| 1 | 2 |\n" in second
    assert "repetitions 3, cpu " in second
    before = document.read_text()
    with pytest.raises(SystemExit, match="no place for these figures"):
        update_document(document, "scaling", "new")
    assert document.read_text() == before
