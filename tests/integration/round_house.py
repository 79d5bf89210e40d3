"""The engine that outlives all victims of a round, the peer beside them, and a book of everything that has ended.

>>> house = House(provider, nursery, seed)
>>> house.serve()                       # a page to the other peer, and one back
>>> house.check_ends(); house.left()    # each end once; what is open, in use, registered
"""

from __future__ import annotations

import collections
import ctypes
import gc
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fabric_kv.config import EngineOptions
from fabric_kv.engine import Engine
from fabric_kv.regions import RemoteRegion
from fabric_kv.transfers import MemoryRegion, Peer, Transfer

from .engine_peer import CANARY, LONG, stamp
from .fabrics import patient
from .round_peer import PAGE, ForkedPeer, Nursery

# Lost after so long a silence. Before the first sign of life a little later.
WATCHFUL = patient(heartbeat_interval_s=0.05, heartbeat_misses=10, connect_s=1.0)
SILENCE_S = WATCHFUL["heartbeat_interval_s"] * WATCHFUL["heartbeat_misses"]
CONNECT_S = WATCHFUL["connect_s"]
# The other peer is more patient: on shm it may have to wait for a lock that the victim was stopped with.
PATIENT = patient(heartbeat_interval_s=0.05, heartbeat_misses=200, connect_s=10.0)


def settles(condition: Callable[[], bool], within_s: float = 0.5) -> bool:
    """Whether it comes true in time."""
    end = time.monotonic() + within_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.0005)
    return condition()


class House:
    """The engine that outlives them all, the peer that must not notice, and a book of everything that ended."""

    def __init__(self, provider: Any, nursery: Nursery, seed: int) -> None:
        self.provider, self.nursery, self.seed = provider, nursery, seed
        self.events: collections.Counter[tuple[Any, ...]] = collections.Counter()
        self.callbacks: collections.Counter[tuple[Any, ...]] = collections.Counter()
        self.lost: dict[bytes, float] = {}
        self.messages: list[tuple[bytes, bytes]] = []
        self.unended: set[Transfer] = set()
        self.regions: weakref.WeakSet[MemoryRegion] = weakref.WeakSet()
        self.in_use: list[MemoryRegion] = []  # by operations that the provider does not give back
        self.other_errors: list[BaseException] = []
        self.num_served = 0
        self.longest_s = 0.0
        self.other = nursery.peer()
        self.open("open")

    def open(self, command: str = "reopen") -> None:
        """Open the engine, and let the other peer know it; by default in another life of both."""
        self.engine = Engine(self.provider.name, nics=self.provider.nics, options=EngineOptions(**WATCHFUL))
        self.events.clear()  # transfers are numbered anew
        self.callbacks.clear()
        self._record_events()
        self.engine.on_peer_lost(self._on_lost)
        self.engine.on_message(lambda sender, payload: self.messages.append((sender, payload)))
        address = self.other.call(command, self.provider.name, self.provider.peer_nics, **PATIENT)
        self.other_peer = self.engine.add_peer(address, monitor=True)
        self.other.call("add_peer", self.engine.address, True)
        self.other_sink = RemoteRegion.from_bytes(self.other.call("prepare", 0)[1])
        self.greet(self.other, self.other_peer)
        self.memory = np.full(3 * PAGE, CANARY, np.uint8)
        self.region = self.engine.register(self.memory)
        self.regions.add(self.region)

    def close(self) -> None:
        """Close the engine: what the provider has never given back ends now, and all of it once."""
        self.engine.close()
        self.check_ends()
        assert not self.unended
        assert not self.engine.describe()["transfers_open"]
        for region in self.in_use:
            region.close()
        self.in_use.clear()

    def greet(self, process: ForkedPeer, peer: Peer) -> None:
        """A word each way, more than once: `net` 1.17 drops what is sent while both sides connect at the same time."""
        for _ in range(20):
            process.call("send", b"hello")
            if settles(lambda: (peer.epoch, b"hello") in self.messages):
                break
        for _ in range(20):
            self.engine.send(peer, b"hello").result(LONG)
            if settles(lambda: process.call("heard")):
                return
        raise TimeoutError(f"{peer} and we do not hear each other")

    def _record_events(self) -> None:
        # Futures hide a second end, so the events behind them are counted.
        dispatcher = self.engine._dispatcher
        handle = dispatcher._handle
        length = {0: 2, 1: 4, 4: 2}  # what names the transfer, the counter, the lost peer

        def record(event: tuple[Any, ...]) -> None:
            if event[0] in length:
                self.events[event[: length[event[0]]]] += 1
            handle(event)

        dispatcher._handle = record  # type: ignore[method-assign]

    def _on_lost(self, epoch: bytes, _reason: str) -> None:
        self.callbacks["lost", epoch] += 1
        self.lost[epoch] = time.monotonic()

    def _on_ended(self, transfer: Transfer) -> None:
        self.callbacks["transfer", transfer.id] += 1
        # On shm a peer that dies fails whatever is under way, to whomever it is (docs/engine.md).
        if transfer.peer is self.other_peer and self.provider.name != "shm":
            self.other_errors += [error] if (error := transfer.exception(0)) else []
        self.unended.discard(transfer)

    def track(self, *transfers: Transfer) -> None:
        for transfer in transfers:
            self.unended.add(transfer)
            transfer.add_done_callback(self._on_ended)

    def serve(self) -> None:
        """A page to the other peer, and one back."""
        began = time.monotonic()
        self.num_served += 1
        number = 2 * self.num_served
        token = self.other.call("expect_page")
        self.memory[:PAGE] = stamp(number, PAGE)
        self.track(self.engine.write(self.other_peer, self.region, 0, self.other_sink, 0, PAGE, token=token))
        with self.engine.counter(unit_bytes=4096, expected_units=PAGE // 4096) as counter:
            self.other.call("exchange_page", number, self.region.remote.to_bytes(), counter.token)
            counter.result(LONG)
        assert np.array_equal(self.memory[PAGE : 2 * PAGE], stamp(number + 1, PAGE))
        self.longest_s = max(self.longest_s, time.monotonic() - began)

    def check_ends(self) -> None:
        """Every end so far was one, and nobody else was hurt."""
        books = (self.events, self.callbacks)  # copied at once, since callbacks go on
        again = {key: times for book in books for key, times in list(book.items()) if times != 1}
        assert not again, f"ended more than once: {again}"
        assert self.other_peer.epoch not in self.lost, "the other peer was given up"
        assert not self.other_errors
        assert not self.other.call("given_up"), "the other peer has given us up"
        figures = self.engine.describe()
        assert figures["callback_errors"] == 0
        for group in figures["groups"]:
            assert group["violations"] == group["malformed_frames"] == 0

    def left(self) -> dict[str, int]:
        """What must not grow from round to round."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        figures = self.engine.describe()
        group = figures["groups"][0]
        return {
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "regions": len(self.regions),
            "transfers": group["transfers_in_flight"],
            "open": figures["transfers_open"],
            "counters": group["counters_in_use"],
            "rss": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        }
