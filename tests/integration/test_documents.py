"""What the documents print runs as printed, and so do the examples of modules that need no GPU."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import fabric_kv.memory
from fabric_kv import Engine
from fabric_kv.memory import BufferServer, HostBuffer, import_buffers

ROOT = Path(__file__).resolve().parents[2]


def test_readme_example_runs_as_printed() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(example.strip().splitlines()) <= 16
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_readme_links_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)", (ROOT / "README.md").read_text())
    assert links
    assert not [link for link in links if not (ROOT / link).exists()]


@pytest.mark.parametrize("name", ["", ".host", ".buffer", ".server", ".imports"])
def test_headers_of_memory_run_as_printed(name: str, tmp_path: Path) -> None:
    module = importlib.import_module(f"fabric_kv.memory{name}")
    examples = doctest.DocTestParser().get_examples(module.__doc__ or "")
    assert examples
    path = f"{tmp_path}/rank0"
    with (
        HostBuffer.allocate(1 << 16) as cache,
        Engine("tcp", nics=["127.0.0.1"]) as engine,
        ThreadPoolExecutor(1) as other_process,
        contextlib.ExitStack() as around,
    ):
        names = {key: getattr(fabric_kv.memory, key) for key in fabric_kv.memory.__all__}
        names |= {"Engine": Engine, "engine": engine, "cache": cache, "buffer": cache}
        importer = None
        if name == ".server":
            importer = other_process.submit(import_buffers, path, timeout_s=60)
        elif name == ".imports":
            around.enter_context(BufferServer(path, {"layer0": cache}))
        for example in examples:
            exec(example.source.replace("/run/kv", str(tmp_path)), names)
        if importer is not None:
            importer.result(60).close()
        names.clear()
