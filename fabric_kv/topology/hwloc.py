"""Machines as hwloc sees them: this one, a folder that stands for ``/sys``, or a recorded XML file.

>>> machine = Reader.live().finish()
>>> machine = Reader.xml(data, source="p5.xml").finish()
>>> with Reader.live() as reader: ...; machine = reader.finish()      # hwloc works meanwhile

hwloc runs in a process of its own, ``hwloc_child.py``, bounded in time and memory; that file says why.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import msgspec

from ..errors import ConfigError, TopologyError
from .hwloc_output import to_machine
from .model import Machine

__all__ = ["Reader", "strip_comments"]

TIMEOUT_S = 20.0
BY_HAND = (
    "Hint: without it, give groups by hand: Engine(groups=[['mlx5_0'], ['mlx5_1']], cpus=[[2], [4]]), or "
    "Engine.from_topology(discover('FILE.json')) with a file that fabric-kv-topo --json wrote elsewhere"
)


class Reader:
    """A child that is reading; made by :meth:`live`, :meth:`folder` or :meth:`xml`."""

    def __init__(self, source: str, *, data: bytes | None, root: Path | None = None, live: bool = False) -> None:
        self.source = source
        self._live = live
        self._data = data
        self._stack = ExitStack()
        arguments = [sys.executable, "-P", "-S", str(Path(__file__).with_name("hwloc_child.py")), _site_packages()]
        env = {name: value for name, value in os.environ.items() if not name.startswith("HWLOC_")}
        # CUDA would be initialised, which takes seconds and GPU memory. Our own CPU says nothing about a folder's.
        env["HWLOC_COMPONENTS"] = "-cuda,-nvml" if live else "-cuda,-nvml,-x86"
        env["HWLOC_PLUGINS_BLACKLIST"] = "hwloc_cuda.so,hwloc_nvml.so"
        if root is not None:
            env["HWLOC_FSROOT"] = str(root)
        if data is None:
            arguments.append("--live")
        # Files in memory take what the child prints, so that neither waits for the other; /tmp may be read-only.
        self._stdin, self._stdout, self._stderr = (
            self._stack.enter_context(os.fdopen(os.memfd_create(name), "w+b")) for name in ("stdin", "stdout", "stderr")
        )
        self._stdin.write(data or b"")
        self._stdin.seek(0)
        try:
            self._child = subprocess.Popen(
                arguments, stdin=self._stdin, stdout=self._stdout, stderr=self._stderr, env=env
            )
        except OSError as error:
            self._stack.close()
            raise TopologyError(f"cannot start {sys.executable!r} to run hwloc: {error}", device=source) from error

    @classmethod
    def live(cls) -> Reader:
        """Read this machine."""
        return cls("this machine", data=None, live=True)

    @classmethod
    def xml(cls, data: bytes, source: str) -> Reader:
        """Read hwloc's XML, format 2 or 3."""
        return cls(source, data=_readable(data, source))

    @classmethod
    def folder(cls, sys_folder: Path) -> Reader:
        """Read a folder that stands for ``/sys``."""
        with ExitStack() as stack:
            try:
                # hwloc wants the root of a file system.
                root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fabric_kv_")))
                (root / "sys").symlink_to(sys_folder.resolve())
            except OSError as error:
                raise TopologyError(f"{sys_folder}: cannot be prepared: {error}", device=str(sys_folder)) from error
            reader = cls(str(sys_folder), data=None, root=root)
            reader._stack.push(stack.pop_all())
            return reader

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        # Also after KeyboardInterrupt: no child stays behind.
        if self._child.poll() is None:
            self._child.kill()
            self._child.wait()
        self._stack.close()

    def finish(self) -> Machine:
        """Wait for the child and return what it found.

        Raises
        ------
        TopologyError
            If hwloc refuses the file, crashes on it, or takes longer than 20 s.
        """
        with self:
            try:
                code = self._child.wait(TIMEOUT_S)
            except subprocess.TimeoutExpired:
                code = None
            self._stdout.seek(0)
            output = self._stdout.read()
            size = self._stderr.seek(0, os.SEEK_END)
            self._stderr.seek(max(0, size - 1000))
            said = self._stderr.read().decode("utf-8", "replace").strip()
        if code is None:
            raise TopologyError(f"{self.source}: hwloc did not finish within {TIMEOUT_S:g} s", device=self.source)
        if code != 0:
            how = "cannot read it"
            if code < 0:
                how = "took too much cpu time" if -code == signal.SIGXCPU else "crashed"
                how += f" ({signal.Signals(-code).name})"
            raise TopologyError(f"{self.source}: hwloc {how}: {said or 'it gives no reason'}", device=self.source)
        try:
            return to_machine(output, self.source, live=self._live, said=said)
        except (msgspec.MsgspecError, ConfigError, KeyError) as error:
            raise TopologyError(f"{self.source}: hwloc's answer makes no sense: {error}", device=self.source) from error


def _site_packages() -> str:
    """Where pyhwloc is; found without importing it."""
    version = tuple(sys.version_info[:2])
    if version < (3, 12):
        text = ".".join(map(str, version))
        raise TopologyError(f"discovery uses pyhwloc, which needs Python 3.12 or newer; this is {text}. {BY_HAND}")
    spec = importlib.util.find_spec("pyhwloc")
    if spec is None or spec.origin is None:
        raise TopologyError(f"discovery needs pyhwloc: pip install 'fabric_kv[topology]'. {BY_HAND}")
    if not sys.executable:
        raise TopologyError(f"discovery runs hwloc in a Python process, but sys.executable is empty. {BY_HAND}")
    return str(Path(spec.origin).parents[1])


def strip_comments(data: bytes, source: str) -> bytes:
    """The XML without its comments, which hwloc 3 does not understand."""
    parts = []
    position = 0
    while (start := data.find(b"<!--", position)) >= 0:
        parts.append(data[position:start])
        end = data.find(b"-->", start + 4)
        if end < 0:
            raise TopologyError(f"{source}: a comment of the XML does not end; is it cut off?", device=source)
        position = end + 3
    parts.append(data[position:])
    return b"".join(parts)


def _readable(data: bytes, source: str) -> bytes:
    """What hwloc 3 can read: no comments, no blank lines; a version 1 file is named rather than called invalid."""
    lines = strip_comments(data, source).split(b"\n")
    text = b"\n".join(line for line in lines if line.strip())
    root = re.search(rb"<topology\b([^>]*)>", text[:4096])
    version = re.search(rb"version=\"(\d{1,4})", root[1]) if root else None
    if root and (version is None or int(version[1]) < 2):
        raise TopologyError(
            f"{source}: hwloc's XML format 1 is not supported. Hint: hwloc 2 converts it: "
            "lstopo-no-graphics -i OLD.xml --if xml --filter io:all --of xml NEW.xml",
            device=source,
        )
    return text
