"""Sharing between processes without any privilege, and what the kernel says of those of other users."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LONG = 60.0
OWNER, STRANGER = 65534, 65533  # users that own nothing

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become other users")

# The package is loaded before: not every user may read it. Nothing of ptrace's is allowed, nor anything else.
BECOME = """
import os, sys
import numpy as np
from fabric_kv import SharingError
from fabric_kv.memory import BufferServer, HostBuffer, import_buffers

path, user = sys.argv[1], int(sys.argv[2])
if user:
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == 0
"""
SERVE = """
with HostBuffer.allocate(5000) as buffer, BufferServer(path, {"kv": buffer}, label="rank 1", timeout_s=60) as server:
    print("up", flush=True)
    sys.stdin.readline()
    print(buffer.array.sum(), server.importers)
"""
IMPORT = """
try:
    with import_buffers(path, timeout_s=30, users=map(int, sys.argv[3:]) if sys.argv[3:] else None) as imported:
        np.asarray(imported["kv"])[:] = 1
        print("imported")
except SharingError as error:
    print(error.reason, error)
"""


def start(program: str, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", BECOME + program, *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])},
    )


@pytest.fixture(params=["file", "abstract"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A rank of another user, and its path."""
    folder = tmp_path
    while folder != Path(folder.root) and not folder.stat().st_mode & 0o001:
        folder.chmod(0o711)  # pytest's are root's alone
        folder = folder.parent
    tmp_path.chmod(0o777)
    path = str(tmp_path / "rank") if request.param == "file" else f"@fabric_kv-test-{os.getpid()}-users"
    process = start(SERVE, path, str(OWNER))
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield process, path
    finally:
        process.kill()
        process.communicate(timeout=LONG)


def import_as(user: int, path: str, *users: int) -> str:
    process = start(IMPORT, path, str(user), *map(str, users))
    out, _ = process.communicate(timeout=LONG)
    assert process.returncode == 0
    return out


def test_processes_of_a_user_without_capabilities_share(server: tuple[subprocess.Popen[str], str]) -> None:
    process, path = server
    assert import_as(OWNER, path) == "imported\n"
    out, _ = process.communicate("\n", timeout=LONG)
    assert out.startswith("5000 ")


def test_a_process_of_another_user_is_refused(server: tuple[subprocess.Popen[str], str]) -> None:
    process, path = server
    out = import_as(STRANGER, path, OWNER)
    assert out.startswith("foreign "), out
    assert ("belongs to another user" if path.startswith("/") else f"user {STRANGER} may not import") in out
    assert process.poll() is None


def test_root_takes_no_strangers_buffers_unless_it_says_so(server: tuple[subprocess.Popen[str], str]) -> None:
    """And the owner lets not even root in, whom a file's permissions do not stop."""
    _, path = server
    out = import_as(0, path)
    assert out.startswith("foreign "), out
    assert f"is of user {OWNER}; allowed is [0]" in out
    out = import_as(0, path, OWNER)
    assert out.startswith("foreign "), out
    assert "user 0 may not import" in out
