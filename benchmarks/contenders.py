"""What is compared: the bare loop of floor/ and our engine, as pairs of processes that rest while others measure.

>>> with open_floor("tcp") as floor, EnginePair("tcp", "spin") as engine:
...     rates = [(floor.pages(4096, 8192, "random", 4), engine.pages(4096, 8192, "random", 4)) for _ in range(5)]

Senders run on cpu 0, receivers on cpu 1.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import engine_side

from fabric_kv.bench.floor import Floor, FloorLatency, FloorRate

PATIENCE_S = 120.0
LATENCY = Path(__file__).parent / "latency" / "latency"
SENDER_CPU, RECEIVER_CPU = 0, 1


def open_floor(provider: str) -> Floor:
    """The bare loop, on the cpus that the engines use."""
    return Floor(provider, cpus=f"{SENDER_CPU},{RECEIVER_CPU}")


def engine_latency(provider: str, progress: str, nbytes: int, rounds: int, *, gap_us: int = 0) -> FloorLatency:
    """Half a ping-pong of two engines between C++ threads, by ``latency/latency``, with a gap before each.

    RuntimeError if it fails, with what it said.
    """
    command = [LATENCY, provider, progress, nbytes, rounds, gap_us, SENDER_CPU, RECEIVER_CPU]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} failed: {done.stderr.strip()}")
    answer = json.loads(done.stdout)
    return FloorLatency(answer["p50_us"], answer["p99_us"])


class EnginePair:
    """Two engines. They are stopped (SIGSTOP) while others measure: a spinning one would take half of a core."""

    def __init__(self, provider: str, progress: str) -> None:
        self.provider, self.name = provider, progress
        self.seeds = itertools.count(1)
        context = multiprocessing.get_context("spawn")
        ends = context.Pipe()
        self.pipes, self.processes = [], []
        for sends, cpu, link in ((True, SENDER_CPU, ends[0]), (False, RECEIVER_CPU, ends[1])):
            pipe, theirs = context.Pipe()
            process = context.Process(target=engine_side.main, args=(sends, provider, progress, cpu, theirs, link))
            process.start()
            theirs.close()
            link.close()
            self.pipes.append(pipe)
            self.processes.append(process)
        self.answers()
        self._stop()

    def _signal(self, number: int) -> None:
        for process in self.processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, number)

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._stop()

    def _stop(self) -> None:
        self._signal(signal.SIGSTOP)
        for process in self.processes:
            # A thread that is waiting for a cpu stops only when it gets one.
            for _ in range(1000):
                if (
                    not process.is_alive()
                    or Path(f"/proc/{process.pid}/stat").read_text().rsplit(")")[-1].split()[0] == "T"
                ):
                    break
                time.sleep(0.001)

    def answers(self) -> list[Any]:
        for pipe in self.pipes:
            if not pipe.poll(PATIENCE_S):
                raise TimeoutError(f"the engine over {self.provider} has not answered for {PATIENCE_S} s")
        return [pipe.recv() for pipe in self.pipes]

    def call(self, method: str, *arguments: object) -> list[list[float]]:
        """What sender and receiver measured, in nanoseconds."""
        with self.awake():
            for pipe in self.pipes:
                pipe.send((method, arguments))
            return self.answers()

    def pages(self, page_bytes: int, num_pages: int, pattern: str, rounds: int) -> FloorRate:
        _, times = self.call("pages", page_bytes, num_pages, pattern, rounds, next(self.seeds))
        return FloorRate(num_pages * 1e9 / statistics.median(times))

    def latency(self, nbytes: int, rounds: int) -> FloorLatency:
        times, _ = self.call("latency", nbytes, rounds)
        cuts = statistics.quantiles(times, n=100)
        return FloorLatency(cuts[49] / 1e3, cuts[98] / 1e3)

    def submit(self, num_pages: int, repetitions: int) -> float:
        """Microseconds until write_pages returns, the median."""
        times, _ = self.call("submit", num_pages, repetitions)
        return statistics.median(times) / 1e3

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._signal(signal.SIGCONT)
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join(10)
