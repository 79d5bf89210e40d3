"""A process's buffers, for others to import: descriptors over a unix socket, to whom the kernel says is allowed.

>>> server = BufferServer("/run/kv/rank0", {"layer0": cache}, label="rank 0")
>>> server.wait_importers(1, timeout_s=30)      # the process with the engine is there
>>> server.withdraw("layer0"); server.close()

No privilege is needed: no ptrace, no root. ``"@name"`` in place of a path is an address without a file, which leaves
nothing behind.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import socket
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Self

from ..errors import ClosedError, ConfigError, FabricKVError, SharingError
from . import wire
from .buffer import SharedBuffer

__all__ = ["BufferServer"]

_log = logging.getLogger("fabric_kv")

_BACKLOG = 64
_JOIN_S = 5.0  # a thread that was told to end does so at once, unless a callback of the user's holds it


class BufferServer:
    """Serves buffers of this process to processes of the same user. A context manager that closes.

    Parameters
    ----------
    path : str
        Where importers find it: a path of up to 107 bytes in an existing folder, or ``@name``. What a killed server has
        left at the path is replaced; a server that lives is not.
    buffers : mapping of str to buffer, optional
        What there is at the start; :meth:`add` adds more. An importer gets what is there when it comes.
    label : str
        What importers call this process in messages, ``rank 3`` for example.
    epoch : bytes, 16, optional
        This life of the owner, by which an importer can ask for no other; random by default.
    users : iterable of int, optional
        User ids that may import; by default this process's own.
    max_importers : int
        Importers at a time; one more is refused.
    timeout_s : float
        How long an importer may take from one frame to the next until it has everything.

    Raises
    ------
    ConfigError
        If an argument is out of range.
    SharingError
        If a server that lives is at the path or there are no more threads (reason ``full``), or the path cannot be used
        (``absent``).

    Notes
    -----
    Every method may be called from any thread. A forked child has no server.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        buffers: Mapping[str, SharedBuffer] | None = None,
        *,
        label: str = "",
        epoch: bytes | None = None,
        users: Iterable[int] | None = None,
        max_importers: int = 8,
        timeout_s: float = 5.0,
    ) -> None:
        self.path = wire.check_path(path)
        self.label = label
        self.epoch = secrets.token_bytes(16) if epoch is None else bytes(epoch)
        if len(self.epoch) != 16:
            raise ConfigError(f"epoch must have 16 bytes, not {len(self.epoch)}")
        _check_text("label", label, 0)
        if not 1 <= max_importers <= 4096 or not 0 < timeout_s <= 3600:
            raise ConfigError(f"max_importers={max_importers} or timeout_s={timeout_s} is out of range")
        self._users = frozenset([os.geteuid()] if users is None else users)
        self._max_importers = max_importers
        self._timeout_s = timeout_s
        self._changed = threading.Condition()  # guards all below
        self._buffers: dict[str, SharedBuffer] = {}
        self._connections: dict[socket.socket, wire.Credentials | None] = {}  # None until it has imported everything
        self._threads: set[threading.Thread] = set()
        self._closed = False
        #: Called with the process id of an importer that has closed or died, on a thread of the server.
        self.on_importer_gone: Callable[[int], None] | None = None
        for name, buffer in (buffers or {}).items():
            self.add(name, buffer)
        self._listener = _listen(self.path)
        self._inode = _inode(self.path)
        _servers.add(self)
        self._accepting = threading.Thread(target=self._accept, name="fabric_kv-buffers", daemon=True)
        try:
            self._accepting.start()
        except RuntimeError as error:
            self._closed = True
            self._end_listening()
            raise SharingError(
                f"buffers cannot be served at {self.path!r}: {error}. Hint: limits on threads (ulimit -u, pids.max)",
                path=self.path,
                reason="full",
            ) from None

    # -- buffers ---------------------------------------------------------------------------------------------------

    def add(self, name: str, buffer: SharedBuffer) -> None:
        """Serve one more buffer, to importers that come from now on.

        Raises
        ------
        ConfigError
            If the name is taken or no name, the buffer is an imported one, or there are too many.
        ClosedError
            If the buffer or the server is closed.
        """
        _check_text("name", name, 1)
        buffer._check_exportable()
        with self._changed:
            if self._closed:
                raise ClosedError(f"{self!r} is closed")
            if name in self._buffers:
                raise ConfigError(f"{name!r} is served already: withdraw it first")
            if len(self._buffers) >= wire.MAX_BUFFERS:
                raise ConfigError(f"a server has at most {wire.MAX_BUFFERS} buffers")
            self._buffers[name] = buffer

    def withdraw(self, name: str) -> None:
        """Serve a buffer no more, and tell those who have it: they mark it and its regions.

        What their NICs do with it ends with their regions: wait for the importer before the pages are used for
        something else, by whatever means its engine has.

        Raises
        ------
        ConfigError
            If there is no such buffer.
        """
        with self._changed:
            if self._buffers.pop(name, None) is None:
                raise ConfigError(f"{name!r} is not served")
            self._tell(wire.Withdrawn(name))

    # -- importers -------------------------------------------------------------------------------------------------

    @property
    def importers(self) -> list[int]:
        """Process ids of those who have imported everything and live; 0: in another pid namespace."""
        with self._changed:
            return sorted(peer.pid for peer in self._connections.values() if peer is not None)

    def wait_importers(self, count: int, timeout_s: float) -> None:
        """Wait until exactly ``count`` importers have everything; 0: until the last one is gone.

        Raises
        ------
        SharingError
            If that takes longer than ``timeout_s`` seconds; reason ``timeout``.
        ClosedError
            If the server is closed meanwhile.
        """

        def there() -> bool:
            return self._closed or sum(peer is not None for peer in self._connections.values()) == count

        with self._changed:
            if not self._changed.wait_for(there, timeout_s):
                raise SharingError(
                    f"{self!r} has not had {count} importer(s) within {timeout_s} s", path=self.path, reason="timeout"
                )
            if self._closed:
                raise ClosedError(f"{self!r} is closed")

    # -- end -------------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    def close(self) -> None:
        """Serve no more and tell the importers, who mark what they have. Buffers stay. Calling it twice is fine."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._tell(wire.Closing())
            wire.shut(self._listener)
            for connection in self._connections:
                wire.shut(connection)
            threads = [self._accepting, *self._threads]
            self._changed.notify_all()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)
        self._end_listening()

    def _end_listening(self) -> None:
        self._listener.close()
        if self._inode is not None and _inode(self.path) == self._inode:
            with contextlib.suppress(OSError):
                os.unlink(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"BufferServer({self.path!r}, {self.label!r}, {len(self._buffers)} buffers)"

    # -- threads ---------------------------------------------------------------------------------------------------

    def _tell(self, frame: wire.Withdrawn | wire.Closing) -> None:
        """Tell everybody, with the lock held. Whoever does not read is dropped, and marks everything by that."""
        for connection in self._connections:
            try:
                wire.send(connection, frame, flags=socket.MSG_DONTWAIT)
            except OSError:
                wire.shut(connection)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._closed or error.errno in (errno.EINVAL, errno.EBADF):
                    return
                _log.warning("%r cannot accept an importer: %s", self, error)  # no descriptors left, for example
                time.sleep(0.05)
                continue
            with self._changed:
                if self._closed:
                    connection.close()
                    return
                full = self._take(connection)
            if full:
                with connection, contextlib.suppress(OSError):
                    wire.send(connection, wire.Refused("full", full), flags=socket.MSG_DONTWAIT)

    def _take(self, connection: socket.socket) -> str:
        """Give an importer a thread, with the lock held, which it waits for before it ends; why not, if not."""
        if len(self._connections) >= self._max_importers:
            return f"it has max_importers={self._max_importers} already"
        thread = threading.Thread(target=self._serve, args=(connection,), name="fabric_kv-importer", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            _log.warning("%r cannot serve an importer: %s", self, error)
            return f"it has no thread left for it: {error}. Hint: limits on threads (ulimit -u, pids.max)"
        self._connections[connection] = None
        self._threads.add(thread)
        return ""

    def _serve(self, connection: socket.socket) -> None:
        peer = None
        try:
            connection.settimeout(self._timeout_s)
            who = wire.credentials(connection)
            try:
                self._check_user(who)
                if self._give(connection):
                    with self._changed:
                        peer = self._connections[connection] = who
                        self._changed.notify_all()
                    connection.settimeout(None)
                    wire.receive(connection, wire.ToServer, self.path)  # nothing more comes: until the end
            except SharingError as error:
                _log.warning("%r refuses process %d of user %d: %s", self, who.pid, who.uid, error)
                text = str(error)[:2048].encode(errors="replace").decode()  # a path may have lone surrogates
                wire.send(connection, wire.Refused(error.reason, text))
        except OSError as error:
            if not wire.is_gone(error):
                _log.warning("%r drops an importer: %s", self, error)
        finally:
            with self._changed:
                self._connections.pop(connection, None)
                self._threads.discard(threading.current_thread())
                self._changed.notify_all()
            connection.close()
            if peer is not None:
                self._say_gone(peer.pid)

    def _say_gone(self, pid: int) -> None:
        fn = self.on_importer_gone
        if fn is None or self._closed:
            return
        try:
            fn(pid)
        except Exception:  # noqa: BLE001  the user's; must not take our thread along
            _log.exception("on_importer_gone raised")

    def _check_user(self, who: wire.Credentials) -> None:
        if who.uid not in self._users:
            raise SharingError(
                f"user {who.uid} may not import: allowed is {sorted(self._users)}", path=self.path, reason="foreign"
            )

    def _give(self, connection: socket.socket) -> bool:
        """Answer until the importer has everything; False if it goes before."""
        with self._changed:
            offered = list(self._buffers.items())
        welcomed = False
        while True:
            frame, fds = wire.receive(connection, wire.ToServer, self.path)
            wire.no_descriptors(fds, self.path)
            if frame is None:
                return False
            body = frame.body
            if isinstance(body, wire.Hello) and not welcomed:
                if body.epoch not in (None, self.epoch):
                    raise SharingError(
                        "it is in another life than the one asked for: its process was started again",
                        path=self.path,
                        reason="late",
                    )
                wire.send(connection, wire.Welcome(self.epoch, self.label, len(offered)))
                welcomed = True
            elif isinstance(body, wire.Fetch) and welcomed and body.index < len(offered):
                self._send_handles(connection, *offered[body.index], body.first)
            elif isinstance(body, wire.Done) and welcomed:
                return True
            else:
                raise SharingError(f"{type(body).__name__} does not belong here", path=self.path, reason="protocol")

    def _send_handles(self, connection: socket.socket, name: str, buffer: SharedBuffer, first: int) -> None:
        with self._changed:
            served = self._buffers.get(name) is buffer
        if not served:
            raise SharingError(f"{name!r} was withdrawn", path=self.path, reason="late")
        if first >= len(buffer.info.handle_bytes):
            raise SharingError(f"{name!r} has no handle {first}", path=self.path, reason="protocol")
        fds: list[int] = []
        try:
            fds = buffer._export_handles(first, wire.FDS_A_FRAME)
            wire.send(connection, wire.Handles(name, buffer.info), fds)
        except ClosedError:
            raise SharingError(f"{name!r} was closed", path=self.path, reason="late") from None
        except FabricKVError as error:
            raise SharingError(f"{name!r} cannot be exported: {error}", path=self.path, reason="full") from None
        finally:
            for fd in fds:
                os.close(fd)

    def _abandon(self) -> None:
        """In a forked child: the connections are the parent's, and must end with it."""
        self._closed = True
        self._changed = threading.Condition()
        self._listener.close()
        for connection in self._connections:
            connection.close()


_servers: weakref.WeakSet[BufferServer] = weakref.WeakSet()


def _abandon_in_child() -> None:
    for server in _servers:
        server._abandon()


os.register_at_fork(after_in_child=_abandon_in_child)


def _check_text(what: str, text: str, least: int) -> None:
    """Refuse what no frame can carry."""
    try:
        fits = least <= len(text) <= 255
        text.encode()
    except (AttributeError, TypeError, UnicodeEncodeError) as error:
        raise ConfigError(f"{what}={text!r} is no text that can be sent: {error}") from None
    if not fits:
        raise ConfigError(f"{what}={text!r} must have {least} to 255 characters")


def _inode(path: str) -> tuple[int, int] | None:
    if path.startswith("@"):
        return None
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _listen(path: str) -> socket.socket:
    listener = wire.new_socket()
    try:
        # The file gets these permissions with its first breath; a later chmod would leave a moment for others.
        os.fchmod(listener.fileno(), stat.S_IRUSR | stat.S_IWUSR)
        try:
            listener.bind(wire.address_of(path))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            _remove_left_over(path)
            listener.bind(wire.address_of(path))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        taken = error.errno == errno.EADDRINUSE
        raise SharingError(
            f"buffers cannot be served at {path!r}: {error.strerror or error}"
            + (". Hint: another process serves there" if taken else ""),
            path=path,
            reason="full" if taken else "absent",
        ) from None
    return listener


def _remove_left_over(path: str) -> None:
    """Remove the socket of a server that was killed; leave one alone that answers, and whatever is no socket."""
    if path.startswith("@") or not stat.S_ISSOCK(os.lstat(path).st_mode):
        return
    with wire.new_socket() as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        except OSError:
            pass
