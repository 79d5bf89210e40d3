"""``fabric-kv-bench --mem``: pages on a GPU, over stand-ins for CUDA's driver and for a libfabric that reaches it.

It proves nothing about hardware: what is looked at is that all ends use such memory, that it is registered as such, and
that what is verified is what arrived there and not the copies on the host.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fabric_kv import _native
from fabric_kv.bench.files import read_report

from ..cuda_standin import build, build_fabric_standin
from .conftest import Provider

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed: pip install 'fabric_kv[cuda]'")
ROOT = Path(__file__).parents[2]
LONG = 100.0
LOOPBACK = ["--loopback", "--provider", "tcp"]

tcp_only = pytest.mark.parametrize("provider", ["tcp"], indirect=True)

# Python runs it at its start, if it finds it on the path. What an engine is given to register is written down.
SITE = """
import os
from fabric_kv import engine

register = engine.Engine.register

def writing_down(self, buffer, **options):
    device = buffer[2] if isinstance(buffer, tuple) else getattr(buffer, "device", "")
    with open(os.environ["REGISTERED"], "a") as file:
        print(type(buffer).__name__, device, file=file)
    return register(self, buffer, **options)

engine.Engine.register = writing_down
"""

# A driver that loses what is copied to the device, but for what fills it at first.
LOSES = """
from fabric_kv.bench import memory

push, filled = memory.DeviceMemory.push, set()

def losing(self, nbytes=None):
    if id(self) not in filled:
        filled.add(id(self))
        push(self, nbytes)

memory.DeviceMemory.push = losing
"""


def bench(folder: Path, *options: str, site: str = SITE, fabric: bool = True) -> subprocess.CompletedProcess[str]:
    """A bench whose processes find the stand-ins where they look for the driver and for libfabric."""
    build("not_a_gpu.c", "libcuda.so.1", folder)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder), "REGISTERED": str(folder / "registered")}
    (folder / "sitecustomize.py").write_text(site)
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), str(ROOT)])
    if fabric:
        build_fabric_standin(folder)
        environment |= {"FABRIC_KV_LIBFABRIC_HOME": str(folder), "REAL_LIBFABRIC": _native.library()[0]}
    return subprocess.run(
        [sys.executable, "-m", "fabric_kv.bench", *options],
        capture_output=True,
        text=True,
        timeout=LONG,
        env=environment,
    )


@tcp_only
@pytest.mark.parametrize(
    ("mem", "registered"), [("cuda", "tuple cuda:1"), ("cumem", "DeviceBuffer cuda:1")], ids=["cuda", "cumem"]
)
@pytest.mark.parametrize(
    "work",
    [
        ["--op", "paged", "-b", "4K", "--pages", "8", "-n", "20", "--bidir"],
        ["--op", "read", "-b", "64K", "-n", "20"],
        ["--model", "smollm2-135m", "--isl", "40", "-n", "2", "--prefill-tp", "3", "--layerwise"],
    ],
    ids=["paged", "read", "messenger"],
)
def test_pages_are_on_the_gpu_at_all_ends(
    provider: Provider, tmp_path: Path, mem: str, registered: str, work: list[str]
) -> None:
    out = tmp_path / "out.json"
    done = bench(tmp_path, *LOOPBACK, "--mem", mem, "--gpu", "1", *work, "--json", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# Wrong pages : 0 OK" in done.stdout
    assert f"mem={mem} gpu=1" in done.stdout
    report = read_report(out)
    assert (report.fabric.mem, report.fabric.gpu) == (mem, 1)
    found = (tmp_path / "registered").read_text().splitlines()
    assert set(found) == {registered}
    assert len(found) == 4  # a source and a sink at both ends, or three ranks that prefill and one that decodes


@tcp_only
def test_what_is_verified_is_on_the_gpu(provider: Provider, tmp_path: Path) -> None:
    work = ["--op", "paged", "-b", "4K", "--pages", "8", "-n", "4", "--depth", "2"]
    done = bench(tmp_path, *LOOPBACK, "--mem", "cumem", *work, site=LOSES)
    assert done.returncode == 1, done.stdout + done.stderr
    # Two lanes of 8 pages each, of what was timed and in three rounds with fresh bytes.
    assert "# Wrong pages : 64 FAILED" in done.stdout


@tcp_only
def test_a_provider_that_does_not_reach_the_gpu_is_refused(provider: Provider, tmp_path: Path) -> None:
    done = bench(tmp_path, *LOOPBACK, "--mem", "cumem", "-b", "4K", fabric=False)
    assert done.returncode == 1, done.stdout
    assert "device_memory=True" in done.stderr
    assert "needs a libfabric that was built with CUDA" in done.stderr


@tcp_only
def test_a_gpu_that_is_not_there_is_said(provider: Provider, tmp_path: Path) -> None:
    done = bench(tmp_path, *LOOPBACK, "--mem", "cuda", "--gpu", "2", "-b", "4K")
    assert done.returncode == 2, done.stdout
    assert "--gpu 2: this process sees 2 GPU(s)" in done.stderr
