"""The bare libfabric loop of ``benchmarks/floor``: what a provider gives, measured in the same minute.

>>> with Floor("tcp") as floor:
...     floor.pages(4096, 8192, "random", 5).pages_per_s

It is a program of its own in the source tree, and compiled when it is first needed. It polls only while it measures,
and waits for its next command without using a core.
"""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
from pathlib import Path
from typing import Any, NamedTuple, Self

from ..errors import ConfigError, FabricError

__all__ = ["Floor", "FloorLatency", "FloorRate", "build_floor", "pages_of_a_round"]

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "floor"
MAX_PAGE_BYTES = 1 << 20
_ROUND_BYTES = 32 << 20
_ROUND_PAGES = 8192
_PATIENCE_S = 120.0
_END_S = 10.0


class FloorRate(NamedTuple):
    """Median of its rounds."""

    pages_per_s: float


class FloorLatency(NamedTuple):
    """Half a ping-pong."""

    p50_us: float
    p99_us: float


def pages_of_a_round(page_bytes: int, at_most: int) -> int:
    """So many pages, but no more than fit into a round."""
    return max(1, min(at_most, _ROUND_PAGES, _ROUND_BYTES // page_bytes))


def build_floor(folder: Path = FOLDER) -> Path:
    """Path of the program, compiled if it is missing or older than its source.

    Raises
    ------
    ConfigError
        If it cannot be: the message says what is missing.
    """
    source, binary = folder / "floor.cc", folder / "floor"
    if not source.is_file():
        raise ConfigError(
            f"the floor is built from {source}, which is not there: it is part of the source tree, not of the "
            "package that is installed. Hint: pip install -e a checkout"
        )
    if binary.is_file() and binary.stat().st_mtime >= source.stat().st_mtime:
        return binary
    try:
        subprocess.run([folder / "build"], check=True, capture_output=True, text=True, timeout=_PATIENCE_S)
    except (OSError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", "") or error).strip()
        raise ConfigError(
            f"the floor cannot be built by {folder / 'build'}: {said}. Hint: it needs a C++20 compiler and libfabric's "
            "headers (apt-get install g++ libfabric-dev pkg-config)"
        ) from error
    return binary


class Floor:
    """Two processes of it; a context manager.

    Parameters
    ----------
    provider : str
    cpus : str
        ``SENDER,RECEIVER`` or ``none``.
    source : str
        Address that providers over sockets use.
    binary : Path, optional
        From :func:`build_floor` by default.
    """

    name = "floor"

    def __init__(
        self, provider: str, *, cpus: str = "none", source: str = "127.0.0.1", binary: Path | None = None
    ) -> None:
        self.provider = provider
        self.forms: dict[tuple[int, int, str], str] = {}  # the best one of each case, found by the first run
        self._process = subprocess.Popen(
            [binary or build_floor(), provider, "--cpus", cpus, "--source", source],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,  # a terminal's Ctrl-C is ours; it ends when its stdin does
        )

    def pages(self, page_bytes: int, num_pages: int, pattern: str, rounds: int) -> FloorRate:
        """Move pages, ``random`` or ``contiguous``; the first call of a case also finds its best form.

        Raises
        ------
        FabricError
            If it fails or does not answer.
        """
        case = (page_bytes, num_pages, pattern)
        if case not in self.forms:
            found = self._command(f"pages {page_bytes} {num_pages} {pattern} 1")
            self.forms[case] = " ".join(str(found[field]) for field in ("places", "window", "inject"))
        answer = self._command(f"pages {page_bytes} {num_pages} {pattern} {rounds} {self.forms[case]}")
        return FloorRate(answer["pages_per_s"])

    def latency(self, nbytes: int, rounds: int) -> FloorLatency:
        """Of a write and its immediate.

        Raises
        ------
        FabricError
            As for :meth:`pages`.
        """
        answer = self._command(f"latency {nbytes} {rounds}")
        return FloorLatency(answer["p50_us"], answer["p99_us"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._process.stdin
        assert self._process.stdout
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._kill()
        self._process.stdout.close()

    def _command(self, line: str) -> dict[str, Any]:
        assert self._process.stdin
        assert self._process.stdout
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # what it said on stderr stands above; the answer below will be missing
        if not select.select([self._process.stdout], [], [], _PATIENCE_S)[0]:
            raise FabricError(
                f"the floor has not answered to {line!r} for {_PATIENCE_S:g} s", op="floor", provider=self.provider
            )
        answer = self._process.stdout.readline()
        if not answer:
            raise FabricError(
                f"the floor over {self.provider} gave up at {line!r}; why, it has printed",
                op="floor",
                provider=self.provider,
            )
        parsed: dict[str, Any] = json.loads(answer)
        return parsed

    def _kill(self) -> None:
        pid = self._process.pid
        pids = [pid]
        with contextlib.suppress(OSError):
            pids += [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        self._process.kill()  # its child goes with it: PR_SET_PDEATHSIG
        self._process.wait(_END_S)
        for path in (path for pid in pids for path in Path("/dev/shm").glob(f"{pid}:*")):
            path.unlink(missing_ok=True)
