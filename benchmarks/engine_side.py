"""One end of an engine's transfers, in a process of its own: started by :mod:`contenders`, obeys what comes by a pipe.

>>> context = multiprocessing.get_context("spawn")
>>> context.Process(target=engine_side.main, args=(True, "tcp", "spin", 0, pipe, link))    # the sender, on cpu 0

``pipe`` leads to whoever measures, ``link`` to the other end.
"""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection

import numpy as np
from numpy.typing import NDArray

from fabric_kv.bench.memory import allocate
from fabric_kv.bench.stamps import count_wrong, stamp

ARENA_BYTES = 128 << 20  # as the floor's
PATIENCE_S = 30.0


def choose_pages(
    page_bytes: int, num_pages: int, pattern: str, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Source and destination pages, the same at both ends."""
    if pattern == "contiguous":
        return np.arange(num_pages), np.arange(num_pages)
    random = np.random.default_rng(seed)
    src, dst = (random.permutation(ARENA_BYTES // page_bytes)[:num_pages] for _ in range(2))
    return src, dst


class Side:
    """An engine with an arena, connected to the other end."""

    def __init__(self, sends: bool, provider: str, progress: str, cpu: int | None, link: Connection) -> None:
        from fabric_kv import Engine, EngineOptions, RemoteRegion

        self.sends, self.link = sends, link
        self.arena = allocate(ARENA_BYTES)
        self.engine = Engine(
            provider,
            nics=[] if provider == "shm" else ["127.0.0.1"],  # the loopback
            cpus=[] if cpu is None else [[cpu]],
            options=EngineOptions(progress=progress),
        )
        self.region = self.engine.register(self.arena)
        link.send((self.engine.address, self.region.remote.to_bytes()))
        address, remote = link.recv()
        self.peer = self.engine.add_peer(address)
        self.remote = RemoteRegion.from_bytes(remote)

    def pages(self, page_bytes: int, num_pages: int, pattern: str, rounds: int, seed: int) -> list[float]:
        """Nanoseconds from the call of write_pages to the end of the counter; the first round is left out."""
        src, dst = choose_pages(page_bytes, num_pages, pattern, seed)
        if self.sends:
            stamp(self.arena, src, page_bytes=page_bytes, seed=seed, iteration=0)
        else:
            self.arena[:] = 0
        times = []
        for _ in range(rounds + 1):
            if self.sends:
                token = self.link.recv()
                start = time.monotonic_ns()
                self.engine.write_pages(
                    self.peer, self.region, self.remote, src, dst, page_bytes=page_bytes, token=token
                ).result(PATIENCE_S)
                self.link.send(start)
            else:
                with self.engine.counter(unit_bytes=page_bytes, expected_units=num_pages) as counter:
                    self.link.send(counter.token)
                    counter.result(PATIENCE_S)
                    end = time.monotonic_ns()
                times.append(float(end - self.link.recv()))
        if not self.sends and (wrong := count_wrong(self.arena, dst, page_bytes=page_bytes, seed=seed, iteration=0)):
            raise AssertionError(f"{wrong} pages hold wrong data: {page_bytes} bytes, {pattern}")
        return times[1:]

    def latency(self, nbytes: int, rounds: int) -> list[float]:
        """Nanoseconds of half a ping-pong between two Python threads; the first tenth is left out."""
        num = rounds + rounds // 10
        counters = [self.engine.counter(unit_bytes=nbytes, expected_units=1) for _ in range(num)]
        self.link.send([counter.token for counter in counters])
        times = []
        for counter, token in zip(counters, self.link.recv(), strict=True):
            if not self.sends:
                counter.result(PATIENCE_S)
            start = time.monotonic_ns()
            transfer = self.engine.write(self.peer, self.region, 0, self.remote, 0, nbytes, token=token)
            if self.sends:
                counter.result(PATIENCE_S)
                times.append((time.monotonic_ns() - start) / 2)
            transfer.result(PATIENCE_S)
            counter.release()
        return times[rounds // 10 :]

    def submit(self, num_pages: int, repetitions: int) -> list[float]:
        """Nanoseconds until write_pages of pages of 64 bytes returns, at the sender; the transfer is then cancelled."""
        times: list[float] = []
        src, dst = choose_pages(64, num_pages, "random", 1)
        for _ in range(repetitions if self.sends else 0):
            start = time.perf_counter_ns()
            transfer = self.engine.write_pages(self.peer, self.region, self.remote, src, dst, page_bytes=64)
            times.append(float(time.perf_counter_ns() - start))
            transfer.cancel()
            transfer.exception(PATIENCE_S)
        return times


def main(sends: bool, provider: str, progress: str, cpu: int | None, pipe: Connection, link: Connection) -> None:
    """Obey (method, arguments) until the pipe says None."""
    if cpu is not None:
        os.sched_setaffinity(0, [cpu])
    side = Side(sends, provider, progress, cpu, link)
    pipe.send("ready")
    while (command := pipe.recv()) is not None:
        method, arguments = command
        pipe.send(getattr(side, method)(*arguments))
    side.engine.close()
