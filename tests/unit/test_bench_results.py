"""What the bench writes: rows from figures, JSON that reads back, CSV, and the table's columns."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import msgspec
import pytest

from fabric_kv.bench.files import check_writable, read_report, write_csv, write_json
from fabric_kv.bench.latency import Latencies
from fabric_kv.bench.results import Report, Row, make_row
from fabric_kv.bench.table import COLUMNS, columns, footer, header, line
from fabric_kv.bench.wire import Finished, FlowFigures
from fabric_kv.bench.workload import Case, Fabric, Workload
from fabric_kv.errors import ConfigError


def flow(iterations: int, elapsed_ns: int) -> FlowFigures:
    latencies = Latencies()
    for _ in range(iterations):
        latencies.add(2000)
    return FlowFigures(
        iterations=iterations, elapsed_ns=elapsed_ns, post_ns=iterations * 1500, latencies=latencies.counts()
    )


def end(figures: FlowFigures | None, ops: int = 0, op_bytes: int = 0) -> Finished:
    return Finished(flow=figures, wrong_pages=0, cpu_ns=500_000, ops=ops, op_bytes=op_bytes)


def make_report(**changes: object) -> Report:
    case = Case(4096, 64)
    ours = end(flow(10, 1_000_000), ops=160, op_bytes=10 * case.nbytes)
    row = make_row(case, ours, [end(None)], link_gbps=100.0, duplex=False, wrong_pages=0)
    rail = {
        "provider": "tcp",
        "fabric": "127.0.0.1/32",
        "domain": "lo",
        "source": "127.0.0.1",
        "link_gbps": None,
        "mode": "a mode",
        "mode_why": "a reason",
    }
    values: dict[str, object] = {
        "command": ["fabric-kv-bench", "--loopback"],
        "started": "2026-01-01T00:00:00+00:00",
        "versions": {"fabric_kv": "0"},
        "machine": {"cpu": "some"},
        "workload": Workload(op="paged", cases=(case,)),
        "fabric": Fabric(provider="tcp"),
        "rails": [rail],
        "target_rails": [rail],
        "topology": ["host: eth0"],
        "rows": [row],
    }
    return Report(**{**values, **changes})  # type: ignore[arg-type]


def test_a_row_is_what_was_moved_over_the_time_it_took() -> None:
    row = make_report().rows[0]
    assert row.gb_per_s == pytest.approx(10 * 64 * 4096 / 1e6)
    assert row.gbit_per_s == pytest.approx(8 * row.gb_per_s)
    assert row.link_percent == pytest.approx(row.gbit_per_s)  # of 100 Gbit/s
    assert row.mpages_per_s == pytest.approx(0.64)
    assert row.post_avg_us == pytest.approx(1.5)
    assert row.t_max_us == 2.0
    assert row.cpu_percent == pytest.approx(50.0)
    assert row.bytes_per_write == 4096 * 4


def test_directions_and_peers_add_up_over_the_longest_time() -> None:
    case = Case(1000, 1)
    both = make_row(case, end(flow(10, 1000)), [end(flow(10, 2000))], link_gbps=100.0, duplex=True, wrong_pages=0)
    assert both.gb_per_s == pytest.approx(20 * 1000 / 2000)
    assert both.link_percent == pytest.approx(both.gbit_per_s / 2)
    scattered = make_row(case, end(flow(10, 1000)), [end(None)] * 3, link_gbps=None, duplex=False, wrong_pages=0)
    assert scattered.gb_per_s == pytest.approx(30 * 1000 / 1000)
    assert scattered.link_percent is None
    gathered = make_row(case, end(None), [end(flow(10, 1000))] * 3, link_gbps=None, duplex=False, wrong_pages=0)
    assert gathered.gb_per_s == pytest.approx(30 * 1000 / 1000)


def test_json_reads_back_and_follows_its_schema(tmp_path: Path) -> None:
    report = make_report()
    path = tmp_path / "out.json"
    write_json(report, path)
    assert read_report(path) == report
    plain = json.loads(path.read_text())
    schema = msgspec.json.schema(Report)["$defs"]
    assert set(plain) == set(schema["Report"]["properties"])
    assert set(plain["rows"][0]) == set(schema["Row"]["properties"]) == set(Row.__struct_fields__)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 99}', '{"schema": 1}', "\x00"])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "out.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"out\.json"):
        read_report(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_report(tmp_path / "none.json")


def test_csv_has_a_line_for_each_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.csv"
    report = make_report()
    write_csv(report, path)
    write_csv(report, Path("-"))
    assert capsys.readouterr().out.splitlines() == path.read_text().splitlines()
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 1
    assert int(rows[0]["page_bytes"]) == 4096
    assert float(rows[0]["gb_per_s"]) == report.rows[0].gb_per_s


def test_places_that_cannot_be_written_are_found_out_first(tmp_path: Path) -> None:
    check_writable(None, Path("-"), tmp_path / "new.json")
    with pytest.raises(ConfigError, match="cannot write"):
        check_writable(tmp_path / "no" / "such" / "folder.json")


def test_the_table_has_the_columns_that_people_quote() -> None:
    report = make_report()
    assert columns().split() == [
        *("page(B)", "pages", "bytes", "iters", "GB/s", "Gb/s", "%link", "Mpps", "post_avg(us)"),
        *("t_avg", "t_p50", "t_p99", "t_p99.9", "t_max", "cpu(%)", "B/write", "#wrong"),
    ]
    assert len(line(report.rows[0]).split()) == len(COLUMNS)
    text = header(report)
    assert all(part.startswith("# ") for part in text.splitlines())
    for needed in ("fabric_kv 0", "provider tcp, fabric 127.0.0.1/32, domain lo", "since a reason", "depth=16"):
        assert needed in text


def test_the_footer_says_whether_all_is_right() -> None:
    assert footer(make_report()) == "# Wrong pages : 0 OK"
    assert footer(make_report(wrong_pages=3)) == "# Wrong pages : 3 FAILED"
    assert not make_report(wrong_pages=3).ok
    unchecked = make_report(workload=Workload(op="paged", cases=(Case(4096, 64),), verify=False))
    assert "not looked at" in footer(unchecked)
    failed = make_report(error="the target is gone")
    assert footer(failed) == "# Ended early: the target is gone"
    assert not failed.ok
