"""``fabric-kv-bench`` as a user runs it: every operation, both roles, and whatever may happen to one of the ends."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from fabric_kv.bench import side as bench_side
from fabric_kv.bench.files import read_report
from fabric_kv.bench.floor import build_floor
from fabric_kv.bench.main import main
from fabric_kv.bench.stamps import stamp
from fabric_kv.errors import ConfigError

from .conftest import Provider
from .fabrics import LONG
from .shm_queue import stop_without_locks

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
COMMAND = [sys.executable, "-m", "fabric_kv.bench"]
LOOPBACK = ["--loopback", "--provider", "tcp"]
ENDLESS = ["-b", "64K", "-D", "600"]

tcp_only = pytest.mark.parametrize("provider", ["tcp"], indirect=True)


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *options], capture_output=True, text=True, timeout=LONG, env=ENVIRONMENT)


@contextlib.contextmanager
def started(*options: str) -> Iterator[subprocess.Popen[str]]:
    """A bench on its way; killed at the end if it is still there."""
    process = subprocess.Popen(
        [*COMMAND, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def read_until(process: subprocess.Popen[str], pattern: str) -> str:
    """The first line of stdout in which the pattern is found."""
    assert process.stdout
    for line in process.stdout:
        if re.search(pattern, line):
            return line
    assert process.stderr
    raise AssertionError(f"no {pattern!r}: {process.stderr.read()}")


def rows(output: str) -> list[list[str]]:
    """The table's rows, without header, headings and footer."""
    return [line.split() for line in output.splitlines() if line.split()[0].isdigit()]


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_until_gone(pid: int) -> None:
    """Until the process has ended, whoever its parent is."""
    deadline = time.monotonic() + LONG
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except FileNotFoundError:
            return
        time.sleep(0.02)
    raise AssertionError(f"process {pid} is still there after {LONG} s")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


# -- operations --------------------------------------------------------------------------------------------------------


PAGES = ["-b", "4K", "-e", "16K", "--pages", "32"]


@pytest.mark.parametrize(
    ("provider", "options"),
    [
        ("tcp", ["--op", "paged", *PAGES, "--contiguity", "50", "--batch", "2", "--peers", "3"]),
        # Memory for one iteration in flight to each of three, but for several to one: both ends must go by the former.
        ("tcp", ["--op", "paged", *PAGES, "--peers", "3", "--memory", "1M"]),
        ("tcp", ["--op", "write", "-b", "300", "-e", "3M", "-f", "10000", "--bidir", "--rails", "2"]),
        ("tcp", ["--op", "imm", "--batch", "8"]),
        ("tcp", ["--op", "read", "-b", "16K", "--pages", "4", "--bidir"]),
        ("tcp", ["--op", "send", "-b", "1K", "--batch", "4", "--peers", "2", "-R"]),
        ("shm", ["--op", "paged", *PAGES]),
        ("shm", ["--op", "read", "-b", "16K", "--progress", "spin"]),
    ],
    indirect=["provider"],
    ids=lambda value: value if isinstance(value, str) else value[1] + (" --memory" if "--memory" in value else ""),
)
def test_every_operation_is_measured_and_right(
    provider: Provider, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    work = ["-n", "40", "--depth", "4", "--verify", "--json", str(path)]
    status = main(["--loopback", "--provider", provider.name, *options, *work])
    captured = capsys.readouterr()
    assert status == 0, captured.out + captured.err
    assert captured.err == ""  # neither progress bars nor warnings in a pipe
    assert "# Wrong pages : 0 OK" in captured.out
    report = read_report(path)
    assert report.ok
    assert len(report.rails) == (2 if "--rails" in options else 1)
    assert len(rows(captured.out)) == len(report.rows) == (2 if "-e" in options else 1)
    ends = report.num_peers * (2 if "--bidir" in options else 1)
    for row in report.rows:
        assert row.iterations == 40
        assert row.mpages_per_s > 0
        # Nothing is counted twice and nothing left out: all peers, in both directions.
        assert row.gb_per_s * row.elapsed_s * 1e9 == pytest.approx(ends * 40 * row.bytes)


@tcp_only
def test_posting_for_a_time(provider: Provider, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    options = ["--op", "write", "-b", "4K", "-D", "0.2", "--bidir", "--verify", "--json", str(path)]
    assert main([*LOOPBACK, *options]) == 0
    (row,) = read_report(path).rows
    assert row.elapsed_s >= 0.2
    assert row.iterations > 0


@tcp_only
def test_output_for_programs_alone(provider: Provider, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.csv"
    options = ["-b", "4K", "-n", "20", "--link-gbps", "100", "--json", "-", "--csv", str(path)]
    assert main([*LOOPBACK, *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["rows"][0]["link_percent"] == pytest.approx(report["rows"][0]["gbit_per_s"])
    assert report["rails"][0]["mode_why"]
    assert path.read_text().count("\n") == 2


@tcp_only
def test_a_terminal_gets_a_progress_bar(provider: Provider) -> None:
    pytest.importorskip("rich", reason="rich is missing: pip install fabric_kv[cli]")
    ours, theirs = pty.openpty()
    environment = {**ENVIRONMENT, "TERM": "xterm", "COLUMNS": "100"}
    with open(ours, "rb", buffering=0) as terminal:
        command = [*COMMAND, *LOOPBACK, "-b", "4K", "-n", "20"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, text=True, env=environment)
        os.close(theirs)
        drawn: list[bytes] = []

        def read_terminal() -> None:
            with contextlib.suppress(OSError):  # EIO: the other end has closed
                while data := terminal.read(4096):
                    drawn.append(data)

        reader = threading.Thread(target=read_terminal)
        reader.start()  # beside the other pipe: a terminal that nobody reads is full soon
        with process:
            assert process.stdout
            output = process.stdout.read()
        reader.join(LONG)
    assert process.returncode == 0
    assert b"paged 4K x 64" in b"".join(drawn)
    assert len(rows(output)) == 1


@tcp_only
def test_rows_stand_beside_the_floor(provider: Provider, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        build_floor()
    except ConfigError as error:
        pytest.skip(str(error))
    path = tmp_path / "out.json"
    options = ["-b", "64K", "--pages", "4", "-n", "10", "--depth", "2", "--floor", "--json", str(path)]
    assert main([*LOOPBACK, *options]) == 0
    heading, row = (line.split() for line in capsys.readouterr().out.splitlines() if not line.startswith("#"))
    assert heading[-1] == "/floor"
    (measured,) = read_report(path).rows
    assert float(row[-1]) == pytest.approx(measured.floor_ratio, abs=0.006)
    assert measured.floor_gb_per_s


# -- what must be noticed ----------------------------------------------------------------------------------------------


@tcp_only
def test_wrong_bytes_are_counted_and_fail_the_run(
    provider: Provider, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def damaged(memory: np.ndarray, pages: np.ndarray, *, page_bytes: int, seed: int, iteration: int) -> None:
        stamp(memory, pages, page_bytes=page_bytes, seed=seed, iteration=iteration)
        memory[pages[0] * page_bytes] ^= 1

    monkeypatch.setattr(bench_side, "stamp", damaged)
    assert main([*LOOPBACK, "-b", "4K", "--pages", "8", "-n", "4", "--depth", "2"]) == 1
    # Of two lanes a page each: of what was timed, and in each of three rounds with fresh bytes.
    assert "# Wrong pages : 8 FAILED" in capsys.readouterr().out


@tcp_only
def test_stale_data_is_noticed(
    provider: Provider, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A source that is never written again: the right bytes, but of an iteration that is over."""

    def once(memory: np.ndarray, pages: np.ndarray, *, page_bytes: int, seed: int, iteration: int) -> None:
        if iteration < 2:
            stamp(memory, pages, page_bytes=page_bytes, seed=seed, iteration=iteration)

    monkeypatch.setattr(bench_side, "stamp", once)
    assert main([*LOOPBACK, "-b", "4K", "--pages", "8", "-n", "4", "--depth", "2"]) == 1
    assert "# Wrong pages : 48 FAILED" in capsys.readouterr().out


@tcp_only
@pytest.mark.parametrize(
    ("options", "status", "why"),
    [
        (["--provider", "nosuch"], 1, "'nosuch' offers no"),
        (["--provider", "tcp", "--nics", "nosuch0"], 2, "nosuch0"),
        (["--provider", "shm", "--rails", "2"], 2, "there is only 1"),
        (["--provider", "tcp", "--json", "/nosuch/out.json"], 2, "cannot write"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_opened_is_said(
    provider: Provider, options: list[str], status: int, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--loopback", *options]) == status
    captured = capsys.readouterr()
    assert why in captured.err
    assert rows(captured.out) == []


# -- two ends ----------------------------------------------------------------------------------------------------------


def initiator_words(target: subprocess.Popen[str], host: str) -> list[str]:
    """What the target says is to be typed, for a host that can be reached for certain."""
    words = read_until(target, r"^#   fabric-kv-bench").split()[2:]
    return [re.sub(r".*:", f"{host}:", words[0]), *words[1:]]


@tcp_only
def test_the_command_that_a_target_prints_works(provider: Provider) -> None:
    port = free_port()
    with started("-p", str(port), "--provider", "tcp", "--op", "write", "-b", "4K", "-n", "20") as target:
        words = initiator_words(target, "127.0.0.1")
        with (
            socket.create_connection(("127.0.0.1", port)),  # says nothing, and must hold nobody up
            socket.create_connection(("127.0.0.1", port)) as stranger,
        ):
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            read_until(target, "Not a run")
            done = bench(*words)
        assert done.returncode == 0, done.stdout + done.stderr
        assert [row[0] for row in rows(done.stdout)] == ["4096"]
        output, errors = target.communicate(timeout=LONG)
        assert (target.returncode, errors) == (0, "")
        assert "has connected\n# Wrong pages : 0 OK" in output


@tcp_only
def test_an_initiator_hears_that_its_target_has_ended(provider: Provider) -> None:
    port = free_port()
    with started("-p", str(port), "--provider", "tcp") as target:
        read_until(target, "At the other end")
        with started(f"127.0.0.1:{port}", "--provider", "tcp", *ENDLESS) as initiator:
            read_until(initiator, "page.B.")
            target.terminate()
            output, errors = initiator.communicate(timeout=LONG)
        assert initiator.returncode == 1
        assert f"target 127.0.0.1:{port} gave up: it was terminated" in errors
        assert "# Ended early" in output
        target.communicate(timeout=LONG)
        assert target.returncode == 143


@tcp_only
def test_a_stopped_target_is_given_up(provider: Provider) -> None:
    with started(*LOOPBACK, "--op", "write", *ENDLESS, "--timeout", "5") as initiator:
        read_until(initiator, "page.B.")
        (target,) = children(initiator.pid)
        os.kill(target, signal.SIGSTOP)
        _, errors = initiator.communicate(timeout=LONG)
        assert initiator.returncode == 1
        assert re.search(r"nothing has happened for|has not answered for", errors)
        wait_until_gone(target)


# -- nothing is left behind --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("provider", ["shm"], indirect=True)
@pytest.mark.parametrize(
    ("whom", "number", "status"),
    [
        ("initiator", signal.SIGINT, 130),
        ("initiator", signal.SIGKILL, -signal.SIGKILL),
        ("target", signal.SIGKILL, 1),
    ],
)
def test_nothing_is_left_behind(
    provider: Provider, whom: str, number: int, status: int, tmp_path: Path, shm_of: Callable[..., set[str]]
) -> None:
    path = tmp_path / "out.json"
    with started("--loopback", "--provider", "shm", *ENDLESS, "--json", str(path)) as initiator:
        read_until(initiator, "page.B.")
        (target,) = children(initiator.pid)
        assert shm_of(initiator.pid)
        assert shm_of(target)
        if number == signal.SIGKILL:
            ours, theirs = (target, initiator.pid) if whom == "target" else (initiator.pid, target)
            stop_without_locks(ours, [theirs])
        os.kill(target if whom == "target" else initiator.pid, number)
        output, errors = initiator.communicate(timeout=LONG)
        assert initiator.returncode == status, output + errors
        wait_until_gone(target)
        if number != signal.SIGKILL or whom == "target":
            assert "# Ended early" in output
            assert read_report(path).error
        if whom == "target":
            assert re.search(r"target 0 \(process \d+\) (gave up: it was terminated|has gone without a word)", errors)
        assert not shm_of(initiator.pid, target)
