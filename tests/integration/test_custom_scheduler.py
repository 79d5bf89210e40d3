"""The example with a scheduler of its own, in a short form: the same tokens with and without disaggregation."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHORT = ["--requests", "4", "--rate", "20", "--prompt", "200", "--new-tokens", "6"]


@pytest.mark.parametrize("provider", ["tcp", "shm"])
def test_both_ways_give_the_same_tokens(provider: str) -> None:
    command = [sys.executable, str(ROOT / "examples" / "custom_scheduler.py"), "--provider", provider, *SHORT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("OK  both gave the same tokens\n")
    assert len(re.findall(r"p50 +\d+\.\d+ ms, p99 +\d+\.\d+ ms", done.stdout)) == 4
