"""Two runs side by side, pictures, and the floor: what is compared with what, and what is refused."""

from __future__ import annotations

import importlib.util
import stat
import sys
from pathlib import Path

import msgspec
import pytest

from fabric_kv.bench.against import measure_against
from fabric_kv.bench.compare import compare, differences
from fabric_kv.bench.files import write_json
from fabric_kv.bench.floor import Floor, FloorRate, build_floor, pages_of_a_round
from fabric_kv.bench.main import main
from fabric_kv.bench.model import ModelWork
from fabric_kv.bench.plot import plot
from fabric_kv.bench.results import Report, Row
from fabric_kv.bench.workload import Case, Fabric, Workload
from fabric_kv.errors import ConfigError, FabricError
from fabric_kv.sharding import KVLayout


def make_row(page_bytes: int, gb_per_s: float, **changes: object) -> Row:
    numbers = dict.fromkeys(Row.__struct_fields__[:-2], 1.0)
    counts = {"page_bytes": page_bytes, "num_pages": 64, "bytes": 64 * page_bytes, "iterations": 1, "wrong_pages": 0}
    return Row(**{**numbers, **counts, "gb_per_s": gb_per_s, **changes})  # type: ignore[arg-type]


def make_report(*rows: Row, depth: int = 16, error: str | None = None) -> Report:
    workload = Workload(op="paged", cases=(Case(4096, 64),), depth=depth)
    return Report(
        command=["fabric-kv-bench"],
        started="2026-01-01T00:00:00+00:00",
        versions={"fabric_kv": "1"},
        machine={"cpu": "some", "load": str(depth)},
        workload=workload,
        fabric=Fabric(provider="tcp"),
        rails=[{"provider": "tcp", "domain": "lo"}],
        rows=list(rows),
        error=error,
    )


def test_sizes_in_both_are_compared_and_the_others_named() -> None:
    before = make_report(make_row(4096, 2.0), make_row(8192, 3.0))
    after = make_report(make_row(8192, 4.5, t_p50_us=0.5), make_row(16384, 9.0), depth=4, error="killed")
    lines = compare(before, after).splitlines()
    (row,) = [line.split() for line in lines if line.split()[0].isdigit()]
    assert row[:8] == ["8192", "64", "3.000", "4.500", "1.50", "1.0", "0.5", "0.50"]
    assert "# depth: 16 -> 4" in lines
    assert "# B is no good: killed" in lines
    assert lines[-1] == "# 2 rows of one run alone are left out"


def test_what_differs_is_settings_and_versions_and_not_the_load() -> None:
    assert differences(make_report(), make_report(depth=8)) == [("depth", 16, 8)]


def test_the_floor_is_compared_where_both_have_it() -> None:
    beside = make_report(make_row(4096, 2.0, floor_gb_per_s=4.0, floor_ratio=0.5))
    better = make_report(make_row(4096, 3.0, floor_gb_per_s=4.0, floor_ratio=0.75))
    assert compare(beside, better).splitlines()[-1].split()[-3:] == ["0.50", "0.75", "1.50"]
    assert "/floor" not in compare(beside, make_report(make_row(4096, 2.0)))


def make_requests(efficiency: float | None, p50: float, **changes: object) -> Report:
    layout = KVLayout.attention(num_layers=2, kv_heads=1, head_dim=4, page_tokens=4, model="small")
    spread = {"p50": p50, "p99": 2 * p50}
    figures: dict[str, object] = dict.fromkeys(("prefill_to_ready_ms", "ttft_penalty_ms", "latency_ms"), spread)
    figures |= {"bare_us": 100.0, "tail_us": 125.0, "hidden_share": 0.5, "gb_per_s_while_writing": 1.0}
    report = make_report()
    report.model, report.messenger = ModelWork(layout=layout, isl=8, chunk=8), {**figures, "efficiency": efficiency}
    for name, value in changes.items():
        setattr(report, name, value)
    return report


def cells(text: str) -> dict[str, list[str]]:
    return {line[:30].strip(): line.split()[-3:] for line in text.splitlines() if not line.startswith("#")}


def test_requests_are_compared_line_by_line() -> None:
    text = compare(make_requests(0.8, 2.0), make_requests(0.4, 3.0, num_peers=3, qps=5.0))
    assert {"# peers: 1 -> 3", "# qps: None -> 5.0"} <= set(text.splitlines())
    assert cells(text)["TTFT penalty (ms) p50"] == ["2.000", "3.000", "1.50"]
    assert cells(text)["messenger efficiency"] == ["0.800", "0.400", "0.50"]
    assert cells(compare(make_requests(None, 1), make_requests(0.4, 1)))["messenger efficiency"] == ["-", "0.400", "-"]


def test_requests_and_rows_are_not_compared() -> None:
    with pytest.raises(ConfigError, match="no figure in common"):
        compare(make_requests(0.8, 2.0), make_report(make_row(4096, 1.0)))
    with pytest.raises(ConfigError, match="B ended before"):
        compare(make_requests(0.8, 2.0), make_requests(0.8, 2.0, messenger=None))


def test_nothing_in_common_is_refused() -> None:
    with pytest.raises(ConfigError, match="no size was measured in both"):
        compare(make_report(make_row(4096, 1.0)), make_report(make_row(8192, 1.0)))


def test_compare_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, rate in zip(paths, (1.0, 3.0), strict=True):
        write_json(make_report(make_row(4096, rate)), path)
    assert main(["--compare", *map(str, paths)]) == 0
    assert "3.00" in capsys.readouterr().out
    assert main(["--compare", str(paths[0]), str(tmp_path / "none.json")]) == 2
    assert "cannot read" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_pictures_are_drawn(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is missing: pip install fabric_kv[plot]")
    path = tmp_path / f"out.{suffix}"
    with_floor = make_row(8192, 3.0, floor_gb_per_s=4.0, floor_ratio=0.75)
    plot([("now", make_report(make_row(4096, 2.0), with_floor)), ("then", make_report(make_row(4096, 1.0)))], path)
    data = path.read_bytes()
    if suffix == "png":
        assert data.startswith(b"\x89PNG")
    else:
        text = data.decode()
        for label in "now: bare libfabric", "then: p50", "GB/s", "bytes of a page":
            assert f"<!-- {label} -->" in text


def test_pictures_are_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--loopback", "--plot", str(tmp_path / "out.txt")]) == 2
    assert "must end in one of" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["--loopback", "--plot", str(tmp_path / "out.png")]) == 2
    assert "pip install 'fabric_kv[plot]'" in capsys.readouterr().err
    assert importlib.util.find_spec("fabric_kv.bench.plot")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ([], "--loopback"),
        (["--loopback"], "--provider"),
        (["--loopback", "--provider", "tcp", "--op", "read"], "--op read"),
        (["--loopback", "--provider", "tcp", "--peers", "2"], "one receiver"),
        (["--loopback", "--provider", "tcp", "--bidir"], "one receiver"),
        (["--loopback", "--provider", "tcp", "--rails", "2"], "one rail"),
        (["--loopback", "--provider", "tcp", "--mem", "cumem"], "drop --mem"),
        (["--loopback", "--provider", "tcp", "--contiguity", "50"], "0 and 100"),
        (["--loopback", "--provider", "tcp", "--progress", "spin"], "scripts/bench"),
    ],
)
def test_what_the_floor_cannot_do_is_refused(options: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--floor", *options]) == 2
    assert why in capsys.readouterr().err


def test_ratios_are_of_pairs_and_wrong_pages_of_all_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    bare = iter([1e6, 2e6, 4e6])
    ours = iter([(2.0, 1), (1.0, 0), (8.0, 2)])

    def pages(_self: Floor, *case: object) -> FloorRate:
        asked.append(case)
        return FloorRate(next(bare))

    def measure() -> Row:
        rate, wrong = next(ours)
        return make_row(1000, rate, wrong_pages=wrong)

    monkeypatch.setattr(Floor, "pages", pages)
    row = measure_against(Floor.__new__(Floor), Case(1000, 64), contiguity=100, depth=4, measure=measure)
    assert asked == [(1000, 256, "contiguous", 5)] * 3
    assert (row.gb_per_s, row.floor_gb_per_s, row.floor_ratio, row.wrong_pages) == (2.0, 2.0, 2.0, 3)


def test_sizes_that_are_not_the_floors_are_measured_alone() -> None:
    for page_bytes in 12, 2 << 20:
        row = measure_against(
            Floor.__new__(Floor),
            Case(page_bytes, 1),
            contiguity=0,
            depth=1,
            measure=lambda: make_row(4, 1.0),
        )
        assert row.floor_ratio is None
    assert pages_of_a_round(4096, 10**6) == 8192
    assert pages_of_a_round(1 << 20, 10**6) == 32
    assert pages_of_a_round(1 << 20, 3) == 3


def make_program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_a_floor_that_cannot_be_built_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="part of the source tree"):
        build_floor(tmp_path)
    (tmp_path / "floor.cc").touch()
    make_program(tmp_path / "build", "echo no compiler here >&2; exit 1")
    with pytest.raises(ConfigError, match=r"no compiler here.*apt-get install"):
        build_floor(tmp_path)
    make_program(tmp_path / "build", 'touch "$(dirname "$0")/floor"')
    assert build_floor(tmp_path).is_file()
    (tmp_path / "build").unlink()
    assert build_floor(tmp_path).is_file()  # it is newer than its source


def test_a_floor_that_gives_up_is_an_error(tmp_path: Path) -> None:
    binary = make_program(tmp_path / "floor", "read line; exit 1")
    with Floor("tcp", binary=binary) as floor, pytest.raises(FabricError, match="gave up at 'pages"):
        floor.pages(4096, 1, "random", 1)
    answers = make_program(
        tmp_path / "floor",
        """while read line; do echo '{"places": 4, "window": 16, "inject": 1, "pages_per_s": 7}'; done""",
    )
    with Floor("tcp", binary=answers) as floor:
        assert floor.pages(4096, 1, "random", 1).pages_per_s == 7
        assert floor.forms == {(4096, 1, "random"): "4 16 1"}


def test_reports_are_plain_data() -> None:
    report = make_report(make_row(4096, 1.0, floor_ratio=0.5))
    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report
