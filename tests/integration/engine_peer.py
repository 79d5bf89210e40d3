"""A second process with an engine, for tests: commands go in through a pipe, results and exceptions come back.

>>> with PeerProcess() as peer:
...     address = peer.call("open", "tcp", ["127.0.0.1"])
...     with peer.holding_gil(): ...
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fabric_kv.config import EngineOptions
from fabric_kv.engine import Engine
from fabric_kv.errors import FabricKVError
from fabric_kv.regions import CounterToken, RemoteRegion
from fabric_kv.transfers import Counter, MemoryRegion, PagePiece, Peer, Transfer

from .fabrics import LONG

CANARY = 0xA5


def stamp(seed: int, nbytes: int) -> NDArray[np.uint8]:
    """Bytes that tell which page of which round they belong to."""
    words = np.arange(-(-nbytes // 4), dtype=np.uint32) * np.uint32(2654435761) + np.uint32(seed * 40503 % 2**32)
    return words.view(np.uint8)[:nbytes]


def sparse(nbytes: int) -> NDArray[np.uint8]:
    """Memory that is only there where it is touched."""
    noreserve = 0x4000  # MAP_NORESERVE, which Python's mmap has only since 3.13
    return np.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | noreserve), np.uint8)


def wait_for(condition: Callable[[], bool]) -> bool:
    """Whether it comes true within ``LONG``."""
    deadline = time.monotonic() + LONG
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


def left_open() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


class WriteOrder(msgspec.Struct, array_like=True):
    """Asks the other side, in an engine message, to stamp pages and to write them."""

    round: int
    dst: bytes
    src_pages: list[int]
    dst_pages: list[int]
    page_bytes: int
    src_stride: int
    dst_stride: int
    token: CounterToken


class Node:
    """What the other process can do. Also of use in the test's own process."""

    def __init__(self) -> None:
        self.engine: Engine
        self.peer: Peer
        self.memory: dict[str, NDArray[np.uint8]] = {}
        self.regions: dict[str, MemoryRegion] = {}
        self.counters: list[Counter] = []
        self.transfers: list[Transfer] = []
        self.messages: list[bytes] = []
        self.lost: list[tuple[bytes, str]] = []
        self.changed = threading.Condition()

    # -- set-up

    def open(self, provider: str, nics: list[str] = [], **options: Any) -> bytes:  # noqa: B006  never changed
        self.engine = Engine(provider, nics=nics, options=EngineOptions(**options))
        self.engine.on_message(self._on_message)
        self.engine.on_peer_lost(self._on_lost)
        return self.engine.address

    def close(self) -> None:
        self.engine.close()

    def reset(self) -> None:
        """As new, for another test."""
        self.close()
        self.__init__()  # type: ignore[misc]
        gc.collect()

    def add_peer(self, address: bytes, monitor: bool = False) -> None:
        self.peer = self.engine.add_peer(address, monitor=monitor)

    def register(self, nbytes: int, fill: int = 0, name: str = "memory", file: str | None = None) -> bytes:
        if file is not None:
            memory = np.memmap(file, np.uint8, "r+", shape=(nbytes,))
        elif nbytes >= 1 << 32:
            memory = sparse(nbytes)
        else:
            memory = np.full(nbytes, fill, np.uint8)
        self.memory[name], self.regions[name] = memory, self.engine.register(memory)
        return self.regions[name].remote.to_bytes()

    def deregister(self, name: str = "memory") -> None:
        self.regions.pop(name).close()

    def address(self) -> bytes:
        return self.engine.address

    def describe(self) -> dict[str, Any]:
        return self.engine.describe()

    # -- memory

    def fill(self, value: int, name: str = "memory") -> None:
        self.memory[name][:] = value

    def put(self, offset: int, data: bytes, name: str = "memory") -> None:
        self.memory[name][offset : offset + len(data)] = np.frombuffer(data, np.uint8)

    def get(self, offset: int, nbytes: int, name: str = "memory") -> bytes:
        return self.memory[name][offset : offset + nbytes].tobytes()

    # -- counting and writing

    def count(self, unit_bytes: int, expected_units: int | None = None) -> CounterToken:
        self.counters.append(self.engine.counter(unit_bytes=unit_bytes, expected_units=expected_units))
        return self.counters[-1].token

    def wait_counter(self, timeout: float = LONG) -> int:
        self.counters[-1].result(timeout)
        return self.counters[-1].received

    def write_pages(self, dst: bytes, src_pages: list[int], dst_pages: list[int], **options: Any) -> None:
        remote = RemoteRegion.from_bytes(dst)
        region = self.regions[options.pop("name", "memory")]
        transfer = self.engine.write_pages(self.peer, region, remote, src_pages, dst_pages, **options)
        transfer.result(LONG)

    def flood(self, dst: bytes, nbytes: int, count: int, token: CounterToken | None = None) -> int:
        """Begin ``count`` writes of ``nbytes`` and leave them on their way."""
        remote = RemoteRegion.from_bytes(dst)
        piece = PagePiece(self.regions["memory"], 0, 0, remote, 0, 0, nbytes, [0], [0])
        self.transfers += [self.engine.submit(self.peer, [piece], token=token) for _ in range(count)]
        return len(self.transfers)

    def ends(self) -> list[str]:
        """How the transfers that were left on their way have ended: ``done``, or the name of the error."""
        errors = [transfer.exception(LONG) for transfer in self.transfers]
        return [type(error).__name__ if error else "done" for error in errors]

    def obey(self) -> None:
        """From now on messages are WriteOrders; the writes begin in the callback."""
        self.engine.on_message(self._obey)

    # -- messages

    def send(self, payload: bytes) -> None:
        self.engine.send(self.peer, payload).result(LONG)

    def post(self, payload: bytes) -> None:
        """Send it and do not wait."""
        self.transfers.append(self.engine.send(self.peer, payload))

    def post_numbered(self, count: int, nbytes: int) -> None:
        for number in range(count):
            self.post(bytes([number]) * nbytes)

    def wait_transfers(self) -> None:
        for transfer in self.transfers:
            transfer.result(LONG)

    def echo(self) -> None:
        """From now on every message goes back, from within the callback."""
        self.engine.on_message(lambda _sender, payload: self.transfers.append(self.engine.send(self.peer, payload)))

    def wait_messages(self, count: int) -> list[bytes]:
        with self.changed:
            if not self.changed.wait_for(lambda: len(self.messages) >= count, LONG):
                raise TimeoutError(f"{len(self.messages)} messages of {count} after {LONG} s")
            return list(self.messages)

    def wait_lost(self) -> list[tuple[bytes, str]]:
        with self.changed:
            if not self.changed.wait_for(lambda: self.lost, LONG):
                raise TimeoutError("nobody was lost")
            return list(self.lost)

    # -- misbehaviour

    def hold_gil(self) -> None:
        """Keep the GIL, in C, until the other side says so through the gate."""
        gate = int(sys.argv[2])
        os.write(gate, b"x")
        ctypes.PyDLL(None).read(gate, ctypes.create_string_buffer(1), ctypes.c_size_t(1))

    def write_and_hold_gil(self, dst: bytes, nbytes: int, token: CounterToken) -> None:
        remote = RemoteRegion.from_bytes(dst)
        transfer = self.engine.write(self.peer, self.regions["memory"], 0, remote, 0, nbytes, token=token)
        self.transfers.append(transfer)
        self.hold_gil()

    # -- callbacks

    def _on_message(self, _sender: bytes, payload: bytes) -> None:
        with self.changed:
            self.messages.append(payload)
            self.changed.notify_all()

    def _on_lost(self, epoch: bytes, reason: str) -> None:
        with self.changed:
            self.lost.append((epoch, reason))
            self.changed.notify_all()

    def _obey(self, _sender: bytes, payload: bytes) -> None:
        order = msgspec.msgpack.decode(payload, type=WriteOrder)
        for page in set(order.src_pages):
            self.put(page * order.src_stride, stamp(order.round * 1000 + page, order.page_bytes).tobytes())
        self.engine.write_pages(
            self.peer,
            self.regions["memory"],
            RemoteRegion.from_bytes(order.dst),
            order.src_pages,
            order.dst_pages,
            page_bytes=order.page_bytes,
            src_stride=order.src_stride,
            dst_stride=order.dst_stride,
            token=order.token,
        )


class PeerProcess:
    """A Node in a process of its own, gone at the latest with ``close()`` or with the test's process."""

    def __init__(self) -> None:
        self.harmed = False  # by a signal: not to be used by another test
        ours, theirs = socket.socketpair()
        self._gate, their_gate = socket.socketpair()
        with theirs, their_gate:
            self.process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.engine_peer", str(theirs.fileno()), str(their_gate.fileno())],
                pass_fds=[theirs.fileno(), their_gate.fileno()],
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            )
        self._pipe = Connection(ours.detach())
        self._pending = 0

    @property
    def pid(self) -> int:
        return self.process.pid

    def start(self, command: str, *args: Any, **kwargs: Any) -> None:
        """Give a command and do not wait for it."""
        self._pipe.send((command, args, kwargs))
        self._pending += 1

    def busy(self) -> bool:
        """Whether the oldest command has no result yet."""
        return self._pending > 0 and not self._pipe.poll(0)

    def finish(self, timeout: float = LONG) -> Any:
        """The result of the oldest command, or what it raised."""
        if not self._pipe.poll(timeout):
            raise TimeoutError(f"the peer process has not answered for {timeout} s")
        good, value = self._pipe.recv()
        self._pending -= 1
        if not good:
            raise value
        return value

    def call(self, command: str, *args: Any, **kwargs: Any) -> Any:
        """Give a command and wait for its result."""
        self.start(command, *args, **kwargs)
        return self.finish()

    @contextlib.contextmanager
    def holding_gil(self, command: str = "hold_gil", *args: Any) -> Iterator[None]:
        """The process keeps its GIL, in C, meanwhile: no Python runs there."""
        self.start(command, *args)
        self._gate.settimeout(LONG)
        self._gate.recv(1)
        yield
        assert self.busy()
        self._gate.send(b"x")
        self.finish()

    def signal(self, number: int) -> None:
        """Send a signal to the process."""
        self.harmed = True
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.harmed = True
        self.process.kill()
        self.process.wait(LONG)
        for left in Path("/dev/shm").glob(f"{self.pid}-*"):  # libfabric's; whoever is killed cannot tidy up
            left.unlink(missing_ok=True)

    def recycle(self) -> bool:
        """Make it as new, if that is possible."""
        if self.harmed or self._pending:
            return False
        self.call("reset")
        return True

    def close(self) -> None:
        """End the process, whatever state it is in."""
        self._pipe.close()
        self._gate.close()
        if not self.harmed:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10.0)  # it closes its engine and goes
        self.kill()

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def serve(pipe: Connection, node: Node) -> None:
    """Obey commands until the other end is gone."""
    while True:
        try:
            command, args, kwargs = pipe.recv()
        except (EOFError, OSError):
            with contextlib.suppress(AttributeError):  # it was never opened
                node.close()
            os._exit(0)
        try:
            pipe.send((True, getattr(node, command)(*args, **kwargs)))
        except (FabricKVError, OSError) as error:
            pipe.send((False, error))
        except Exception as error:  # noqa: BLE001  goes to the test
            pipe.send((False, RuntimeError(f"{error!r}\n{traceback.format_exc()}")))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), Node())
