"""Peers to be killed by the dozen: forked, in a few milliseconds, by a process that has imported everything.

>>> with Nursery("tcp") as nursery:
...     peer = nursery.peer()                        # a PeerProcess whose node is a RoundNode
...     remote = peer.call("prepare", seed=7)
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from fabric_kv import _native
from fabric_kv.regions import CounterToken, RemoteRegion

from .engine_peer import LONG, Node, PeerProcess, serve, stamp

PAGE = 64 << 10
NUM_PAGES = 256
NBYTES = PAGE * NUM_PAGES


class RoundNode(Node):
    """What a peer does in a round."""

    def prepare(self, seed: int) -> tuple[bytes, bytes]:
        """Memory to be read by the other side and written from, and some to be written to and read into."""
        self.register(NBYTES)
        self.memory["memory"][:] = stamp(seed, NBYTES)
        self.register(NBYTES, name="sink")
        return self.regions["memory"].remote.to_bytes(), self.regions["sink"].remote.to_bytes()

    def write_all(self, dst: bytes, dst_offset: int, token: CounterToken) -> None:
        pages = np.arange(NUM_PAGES)
        self.transfers.append(
            self.engine.write_pages(
                self.peer,
                self.regions["memory"],
                RemoteRegion.from_bytes(dst),
                pages,
                pages,
                page_bytes=PAGE,
                dst_offset=dst_offset,
                token=token,
            )
        )

    def read_all(self, src: bytes) -> None:
        sink, remote = self.regions["sink"], RemoteRegion.from_bytes(src)
        self.transfers.append(self.engine.read(self.peer, sink, 0, remote, 0, NBYTES))

    def heard(self) -> bool:
        return bool(self.messages)

    def reopen(self, *args: Any, **kwargs: Any) -> bytes:
        """Another life of the same process."""
        self.reset()
        return self.open(*args, **kwargs)

    # -- the one that must not notice

    def given_up(self) -> list[tuple[bytes, str]]:
        return [(epoch, reason) for epoch, reason in self.lost if "closed its engine" not in reason]

    def expect_page(self) -> CounterToken:
        return self.count(4096, PAGE // 4096)

    def exchange_page(self, seed: int, dst: bytes, token: CounterToken) -> None:
        """Wait for a page, check it, and send another one."""
        with self.counters.pop() as counter:
            counter.result(LONG)
        if not np.array_equal(self.memory["sink"][:PAGE], stamp(seed, PAGE)):
            raise AssertionError(f"the page with seed {seed} is not what was written")
        self.put(0, stamp(seed + 1, PAGE).tobytes())
        region, remote = self.regions["memory"], RemoteRegion.from_bytes(dst)
        self.transfers.append(self.engine.write(self.peer, region, 0, remote, PAGE, PAGE, token=token))
        self.transfers = [transfer for transfer in self.transfers if not transfer.done()]


class ForkedPeer(PeerProcess):
    """A RoundNode in a child of the nursery. It is found by a descriptor, since numbers of processes come again."""

    def __init__(self, pid: int, pipe: Connection) -> None:
        self.harmed = False
        self._pid = pid
        self._process = os.pidfd_open(pid)
        self._pipe = pipe
        self._pending = 0

    @property
    def pid(self) -> int:
        return self._pid

    def signal(self, number: int) -> None:
        self.harmed = True
        signal.pidfd_send_signal(self._process, signal.Signals(number))

    def alive(self) -> bool:
        return not select.select([self._process], [], [], 0)[0]

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone. What it leaves in /dev/shm stays until ``close()``."""
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        if not select.select([self._process], [], [], LONG)[0]:
            raise TimeoutError(f"process {self.pid} survives SIGKILL")

    def close(self) -> None:
        self.kill()
        self._pipe.close()
        os.close(self._process)
        for left in Path("/dev/shm").glob(f"{self.pid}-*"):
            left.unlink(missing_ok=True)


class Nursery:
    """The process that forks them. It has no engine."""

    def __init__(self, provider: str) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __spec__.name, str(theirs.fileno()), provider],
                pass_fds=[theirs.fileno()],
                cwd=Path(__file__).parents[2],
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OPENBLAS_NUM_THREADS": "1"},
            )
        self._socket.settimeout(LONG)

    def peer(self) -> ForkedPeer:
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._socket, [b"fork"], [theirs.fileno()])
            pid = int(self._socket.recv(16))
        return ForkedPeer(pid, Connection(ours.detach()))

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *exc: object) -> None:
        self._socket.close()
        self._process.wait(LONG)


def main() -> None:
    requests = socket.socket(fileno=int(sys.argv[1]))
    if sys.argv[2] != "verbs":  # of which the children would get nothing: docs/providers.md
        _native.list_offers("tcp")  # libfabric looks for its providers once, for 0.4 s
    children: set[int] = set()
    while True:
        _, descriptors, _, _ = socket.recv_fds(requests, 16, 1)
        # Those that are gone; the others' numbers stay theirs, whatever happens.
        children = {pid for pid in children if os.waitpid(pid, os.WNOHANG) == (0, 0)}
        if not descriptors:
            break
        pid = os.fork()
        if pid == 0:
            requests.close()
            serve(Connection(descriptors[0]), RoundNode())
        os.close(descriptors[0])
        children.add(pid)
        requests.send(str(pid).encode())
    for pid in children:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
