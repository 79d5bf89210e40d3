"""A way to a port that can be cut, or stop, as a NIC, a cable or a switch does: connections go through our hands.

>>> forwarder = Forwarder()
>>> Engine("tcp", nics=[f"127.0.0.1:{port}"], options=EngineOptions(advertise={"127.0.0.1": forwarder.address}))
>>> forwarder.target = ("127.0.0.1", port)         # before anyone hears of the engine
>>> forwarder.hold(); forwarder.carry(); forwarder.cut()
"""

from __future__ import annotations

import contextlib
import queue
import selectors
import socket
import threading
from collections.abc import Callable

from .fabrics import LONG


class Forwarder:
    """What a NAT or a container's port map does: connections to our port go on to another."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.host = host
        self.target = (host, 0)
        self.num_connections = 0
        self._listener = socket.create_server((host, 0))
        self.port = int(self._listener.getsockname()[1])
        self.address = f"{host}:{self.port}"
        self._links: dict[socket.socket, socket.socket] = {}
        self._waiting = selectors.DefaultSelector()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake, self._bell = socket.socketpair()
        self._stopping = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def hold(self) -> None:
        """Carry nothing from now on, in either direction, and answer no connection; until ``carry``."""
        self._do(self._hold)

    def carry(self) -> None:
        """Carry what has come meanwhile, and what comes."""
        self._do(self._carry_on)

    def cut(self) -> None:
        """End all connections, and refuse others for good."""
        self._do(self._cut)

    def close(self) -> None:
        """End the thread, and all connections."""
        self._do(self._stop)
        self._thread.join(LONG)
        self._bell.close()

    def _do(self, command: Callable[[], None]) -> None:
        done = threading.Event()

        def run() -> None:
            command()
            done.set()

        self._commands.put(run)
        self._bell.send(b"x")
        assert done.wait(LONG)

    # On the thread.

    def _run(self) -> None:
        self._waiting.register(self._wake, selectors.EVENT_READ)
        self._carry_on()
        while not self._stopping:
            for key, _ in self._waiting.select():
                if key.fileobj is self._wake:
                    self._wake.recv(1)
                    self._commands.get()()
                    break  # It may have changed what we wait for.
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket):
                    self._carry(key.fileobj)
        self._cut()
        self._waiting.close()
        self._wake.close()

    def _accept(self) -> None:
        near = self._listener.accept()[0]
        try:
            far = socket.create_connection(self.target, LONG)
        except OSError:  # As when the engine has just closed: whoever came sees it end.
            near.close()
            return
        self.num_connections += 1
        self._links |= {near: far, far: near}
        self._waiting.register(near, selectors.EVENT_READ)
        self._waiting.register(far, selectors.EVENT_READ)

    def _carry(self, source: socket.socket) -> None:
        with contextlib.suppress(OSError):
            if data := source.recv(1 << 16):
                self._links[source].sendall(data)
                return
        self._waiting.unregister(source)
        with contextlib.suppress(OSError):
            self._links[source].shutdown(socket.SHUT_WR)

    def _hold(self) -> None:
        for item in (self._listener, *self._links):
            with contextlib.suppress(KeyError, ValueError):  # It has ended.
                self._waiting.unregister(item)

    def _carry_on(self) -> None:
        for item in (self._listener, *self._links):
            with contextlib.suppress(KeyError, ValueError):
                self._waiting.register(item, selectors.EVENT_READ)

    def _cut(self) -> None:
        self._hold()
        self._listener.close()
        for link in self._links:
            link.close()
        self._links.clear()

    def _stop(self) -> None:
        self._stopping = True
