"""Buffers of another process, mapped into this one, and word of their owner's end.

>>> with import_buffers("/run/kv/rank0", timeout_s=30) as rank, rank["layer0"].region(engine) as region:
...     rank.check()                                  # SharingError once the rank's process has died

The memory stays mapped when its owner dies, so that no NIC and no thread of ours can fall over it, and is marked.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from typing import Self, TypeVar

from ..errors import ConfigError, FabricKVError, SharingError, StuckError
from . import wire
from .buffer import Exported, SharedBuffer
from .device import DeviceBuffer
from .host import HostBuffer

_T = TypeVar("_T")
_Answer = TypeVar("_Answer", wire.Welcome, wire.Handles)

__all__ = ["ImportedBuffers", "import_buffers"]

_log = logging.getLogger("fabric_kv")

# The process is gone, as we shall see; or the kernel is older than 5.3, or a container's filter does not know the call.
_NO_PIDFD = {errno.ESRCH, errno.ENOSYS, errno.EPERM}
_RETRY_S = 0.01  # a rank that is not there yet is looked for so often
_JOIN_S = 5.0


class _Owner:
    """The connection to a server, watched by a thread that holds none of the buffers."""

    def __init__(self, connection: socket.socket, path: str, who: wire.Credentials) -> None:
        self.connection = connection
        self.path = path
        self.who = who
        self.label = ""
        self.buffers: dict[str, weakref.ref[SharedBuffer]] = {}
        self.lost: SharingError | None = None
        self._losing = False
        self.on_lost: Callable[[SharingError], None] | None = None
        self.withdrawn: dict[str, SharingError] = {}
        self.on_withdrawn: Callable[[str, SharingError], None] | None = None
        self.wake, self._wakes = socket.socketpair()
        # Before the server has answered: so it is the process that listens there, and not a later one with its number.
        # A connection alone would not do: a child of the owner may hold its other end.
        self.pidfd = -1
        if who.pid > 0:
            try:
                self.pidfd = os.pidfd_open(who.pid)
            except OSError as error:
                if error.errno not in _NO_PIDFD:
                    self.wake.close()
                    self._wakes.close()
                    raise
        self._lock = threading.Lock()
        self.thread: threading.Thread | None = None
        _owners.add(self)

    def __str__(self) -> str:
        return f"{self.label or 'the owner'} (process {self.who.pid}, {self.path})"

    def watch(self) -> None:
        self.connection.settimeout(None)
        thread = threading.Thread(target=self._run, name="fabric_kv-owner", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise SharingError(
                f"{self} cannot be watched: {error}. Hint: limits on threads (ulimit -u, pids.max)",
                path=self.path,
                reason="full",
            ) from None
        self.thread = thread

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._wakes, select.POLLIN)
        poll.register(self.connection, select.POLLIN)
        if self.pidfd >= 0:
            poll.register(self.pidfd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if self._wakes.fileno() in ready:
                return
            try:
                if self.connection.fileno() in ready:
                    frame, fds = wire.receive(self.connection, wire.FromServer, self.path)
                    for fd in fds:
                        os.close(fd)
                    if frame is not None and self.take(frame.body):
                        continue
                if self.lost is None:
                    self.lose("gone", "its process has ended")
            except (OSError, SharingError) as error:
                self.lose("gone", str(error))
            return

    def take(self, body: wire.FromServerBody) -> bool:
        """Obey what comes by itself; False if that is the end."""
        if isinstance(body, wire.Withdrawn):
            error = SharingError(f"{body.name!r} was withdrawn by {self}", path=self.path, reason="late")
            self.withdraw(body.name, error)
            return True
        if isinstance(body, wire.Closing):
            self.lose("late", "it has closed its server")
        else:
            self.lose("protocol", f"it sent {type(body).__name__} without being asked")
        return False

    def withdraw(self, name: str, error: SharingError) -> None:
        if name not in self.buffers or name in self.withdrawn:  # of one that was added under that name since
            return
        if (buffer := self.buffers[name]()) is not None:
            buffer._mark_lost(error)
        with self._lock:
            self.withdrawn[name], fn = error, self.on_withdrawn
        self.call(fn, name, error)

    def lose(self, reason: str, why: str) -> None:
        error = SharingError(f"{self} is lost: {why}", path=self.path, reason=reason)
        with self._lock:
            if self._losing:
                return
            self._losing = True
        for ref in list(self.buffers.values()):
            if (buffer := ref()) is not None:
                buffer._mark_lost(error)
        with self._lock:  # not before: whoever is told, or sees it, finds all of them marked
            self.lost, fn = error, self.on_lost  # whoever sets on_lost from now on sees that it is too late
        _log.warning("%s", error)
        self.call(fn, error)

    @staticmethod
    def call(fn: Callable[..., None] | None, *args: object) -> None:
        if fn is None:
            return
        try:
            fn(*args)
        except Exception:  # noqa: BLE001  the user's; must not take our thread along
            _log.exception("on_lost or on_withdrawn raised")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.wake.send(b"x")
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(_JOIN_S)
        self.abandon()

    def abandon(self) -> None:
        """Close our ends; in a forked child that is all that must be done."""
        self.connection.close()
        self.wake.close()
        self._wakes.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


_owners: weakref.WeakSet[_Owner] = weakref.WeakSet()


class _Lease:
    """Held by all that was imported from one owner: with the last of it the owner is watched no more."""

    def __init__(self, owner: _Owner) -> None:
        self.end = weakref.finalize(self, owner.close)


def _abandon_in_child() -> None:
    for owner in _owners:
        owner.abandon()


os.register_at_fork(after_in_child=_abandon_in_child)


class ImportedBuffers(Mapping[str, SharedBuffer]):
    """The buffers of one owner, by name. Made by :func:`import_buffers`; a context manager that closes.

    The owner is watched, and knows of us, until :meth:`close` or until this, the last buffer and the last region are
    dropped. Arrays and tensors alone keep the memory mapped, and nothing else.

    Attributes
    ----------
    path : str
        Where they were imported.
    epoch : bytes, 16
        The owner's life.
    label : str
        What the owner calls itself.
    pid : int
        Its process; 0 if this pid namespace does not show it.
    """

    def __init__(self, owner: _Owner, epoch: bytes, buffers: dict[str, SharedBuffer]) -> None:
        self.path = owner.path
        self.epoch = epoch
        self.label = owner.label
        self.pid = owner.who.pid
        self._owner = owner
        self._buffers = buffers
        self._lease = _Lease(owner)
        for buffer in buffers.values():
            buffer._lease = self._lease  # regions hold their buffers

    def __getitem__(self, name: str) -> SharedBuffer:
        try:
            return self._buffers[name]
        except KeyError:
            raise KeyError(f"{self._owner} has no buffer {name!r}; it has {sorted(self._buffers)[:20]}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._buffers)

    def __len__(self) -> int:
        return len(self._buffers)

    @property
    def lost(self) -> SharingError | None:
        """Why the owner is lost; None: it is there. Its buffers and their regions are marked with the same."""
        return self._owner.lost

    def check(self) -> None:
        """Raise :attr:`lost`, if the owner is lost."""
        if self._owner.lost is not None:
            raise copy(self._owner.lost)

    def on_lost(self, fn: Callable[[SharingError], None] | None) -> None:
        """Call ``fn(error)`` once when the owner is lost, on the thread that watches it, or now if it is lost."""
        with self._owner._lock:
            self._owner.on_lost = fn
            late = self._owner.lost
        if late is not None:
            self._owner.call(fn, late)

    def on_withdrawn(self, fn: Callable[[str, SharingError], None] | None) -> None:
        """Call ``fn(name, error)`` once for each buffer that its owner withdraws, which is marked with the same error.

        On the thread that watches the owner; for those that are withdrawn already, now. What is left when the owner is
        lost is :meth:`on_lost`'s.
        """
        with self._owner._lock:
            self._owner.on_withdrawn = fn
            late = dict(self._owner.withdrawn)
        for name, error in late.items():
            self._owner.call(fn, name, error)

    def close(self) -> None:
        """Unmap all of them and take leave of the owner. Calling it twice is fine.

        Raises
        ------
        ConfigError
            If some are in use by regions, arrays or tensors; the others are unmapped then, and it can be called again.
        """
        used = []
        for buffer in self._buffers.values():
            try:
                buffer.close()
            except (ConfigError, StuckError) as error:
                used.append(str(error))
        if used:
            raise ConfigError(f"{len(used)} of {len(self)} buffers of {self._owner} are in use: {used[0]}")
        self._lease.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is None:
            self.close()
            return
        with contextlib.suppress(ConfigError, StuckError):
            self.close()

    def __repr__(self) -> str:
        return f"ImportedBuffers({len(self)} buffers of {self._owner}{', lost' if self.lost else ''})"


def import_buffers(
    path: str | os.PathLike[str],
    *,
    timeout_s: float = 30.0,
    epoch: bytes | None = None,
    pid: int | None = None,
    users: Iterable[int] | None = None,
) -> ImportedBuffers:
    """Map every buffer that a :class:`BufferServer` serves now.

    Parameters
    ----------
    path : str
        The server's; it is waited for.
    timeout_s : float
        For all of it, in seconds.
    epoch : bytes, 16, optional
        Take this life of the server and no other.
    pid : int, optional
        Take them from this process and no other.
    users : iterable of int, optional
        User ids whose buffers are taken; by default this process's own.

    Raises
    ------
    SharingError
        Nothing is mapped then. Its ``reason`` is ``absent`` (nobody served there in time), ``foreign`` (we, or the
        server, are of another user, or it is another process), ``late`` (another epoch, or a buffer was withdrawn
        meanwhile), ``size`` (there is less memory than announced), ``unreachable`` (device memory that NICs
        cannot reach), ``full`` (a limit on importers, descriptors or threads), ``timeout``, ``gone`` (the owner has
        died meanwhile), or ``protocol``.
    ConfigError
        If an argument is out of range.
    AllocationError, DeviceError
        If a buffer cannot be mapped, or is on a device that this process does not see.
    """
    path = wire.check_path(path)
    if not 0 < timeout_s <= 86400:
        raise ConfigError(f"timeout_s={timeout_s} must lie in (0, 86400]")
    deadline = time.monotonic() + timeout_s
    allowed = frozenset([os.geteuid()] if users is None else users)
    connection = _connect(path, deadline)
    try:
        owner = _Owner(connection, path, wire.credentials(connection))
    except OSError as error:
        connection.close()
        raise _no_descriptors(path, error) from None
    with contextlib.ExitStack() as undo:
        undo.callback(owner.close)
        if owner.who.uid not in allowed:
            raise SharingError(
                f"{owner} is of user {owner.who.uid}; allowed is {sorted(allowed)}", path=path, reason="foreign"
            )
        if pid not in (None, owner.who.pid):
            raise SharingError(f"{owner} is not process {pid}", path=path, reason="foreign")
        buffers: dict[str, SharedBuffer] = {}
        undo.callback(_close_all, buffers)
        conversation = _Conversation(owner, deadline)
        welcome, fds = conversation.ask(wire.Hello(epoch), wire.Welcome)
        wire.no_descriptors(fds, path)
        owner.label = welcome.label
        for index in range(welcome.num_buffers):
            name, buffer = conversation.fetch(index)
            if name in buffers:
                buffer.close()
                raise SharingError(f"{owner} has two buffers {name!r}", path=path, reason="protocol")
            buffers[name] = buffer
            owner.buffers[name] = weakref.ref(buffer)
        conversation.say(wire.Done())
        if conversation.passed:
            raise SharingError(f"{owner} withdrew buffers meanwhile", path=path, reason="late")
        owner.watch()
        undo.pop_all()
    return ImportedBuffers(owner, welcome.epoch, buffers)


def _no_descriptors(path: str, error: OSError) -> SharingError:
    return SharingError(
        f"buffers of {path!r} cannot be imported: {error.strerror}. Hint: raise the limit on open files (ulimit -n)",
        path=path,
        reason="full",
    )


def _close_all(buffers: dict[str, SharedBuffer]) -> None:
    for buffer in buffers.values():
        with contextlib.suppress(FabricKVError):
            buffer.close()


def _connect(path: str, deadline: float) -> socket.socket:
    while True:
        try:
            connection = wire.new_socket()
        except OSError as error:
            raise _no_descriptors(path, error) from None
        try:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            connection.connect(wire.address_of(path))
        except OSError as error:
            connection.close()
            if isinstance(error, PermissionError):
                raise SharingError(
                    f"{path!r} belongs to another user: {error.strerror}", path=path, reason="foreign"
                ) from None
            waits = isinstance(error, FileNotFoundError | ConnectionRefusedError | BlockingIOError)
            if not waits or time.monotonic() + _RETRY_S > deadline:
                raise SharingError(
                    f"nobody serves buffers at {path!r}: {error.strerror or error}. Hint: the owner's BufferServer "
                    "must be at the same path, in the same mount namespace",
                    path=path,
                    reason="absent",
                ) from None
            time.sleep(_RETRY_S)
        else:
            return connection


class _Conversation:
    """Our questions to a server and its answers, all of them before the deadline."""

    def __init__(self, owner: _Owner, deadline: float) -> None:
        self.owner = owner
        self.deadline = deadline
        self.passed = False  # whether something was withdrawn meanwhile

    def say(self, frame: wire.Hello | wire.Fetch | wire.Done) -> None:
        self._bounded(lambda connection: wire.send(connection, frame))

    def ask(self, frame: wire.Hello | wire.Fetch, kind: type[_Answer]) -> tuple[_Answer, list[int]]:
        self.say(frame)
        while True:
            answer, fds = self._bounded(lambda connection: wire.receive(connection, wire.FromServer, self.owner.path))
            if answer is None:
                raise self._error("gone", "it has ended the connection")
            if isinstance(answer.body, kind):
                return answer.body, fds
            for fd in fds:
                os.close(fd)
            if isinstance(answer.body, wire.Refused):
                raise self._error(answer.body.reason, answer.body.text)
            if isinstance(answer.body, wire.Withdrawn | wire.Closing):
                self.passed = True
            else:
                raise self._error("protocol", f"it answered with {type(answer.body).__name__}")

    def fetch(self, index: int) -> tuple[str, SharedBuffer]:
        answer, fds = self.ask(wire.Fetch(index, 0), wire.Handles)
        with Exported(answer.info, fds) as exported:
            while len(exported.fds) < len(answer.info.handle_bytes):
                more, fds = self.ask(wire.Fetch(index, len(exported.fds)), wire.Handles)
                exported.fds += fds
                if more != answer or not fds:
                    raise self._error("protocol", f"handles of {answer.name!r} are missing")
            if len(exported.fds) != len(answer.info.handle_bytes):
                raise self._error("protocol", f"{answer.name!r} came with {len(exported.fds)} handles")
            kind = HostBuffer if answer.info.kind == "host" else DeviceBuffer
            try:
                return answer.name, kind.import_(exported)
            except SharingError as error:
                raise self._error(error.reason, f"{answer.name!r}: {error}") from None
            except ConfigError as error:
                raise self._error("protocol", f"{answer.name!r}: {error}") from None

    def _bounded(self, call: Callable[[socket.socket], _T]) -> _T:
        try:
            left = self.deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self.owner.connection.settimeout(left)
            return call(self.owner.connection)
        except SharingError:
            raise
        except TimeoutError:
            raise self._error("timeout", "it has not answered in time") from None
        except OSError as error:
            if wire.is_gone(error):
                # What it said before it closed explains it.
                raise self._last_words() from None
            raise self._error("gone", str(error)) from None

    def _last_words(self) -> SharingError:
        with contextlib.suppress(OSError, SharingError):
            self.owner.connection.setblocking(False)
            answer, fds = wire.receive(self.owner.connection, wire.FromServer, self.owner.path)
            for fd in fds:
                os.close(fd)
            if answer is not None and isinstance(answer.body, wire.Refused):
                return self._error(answer.body.reason, answer.body.text)
        return self._error("gone", "it has ended the connection")

    def _error(self, reason: str, why: str) -> SharingError:
        return SharingError(f"buffers of {self.owner} cannot be imported: {why}", path=self.owner.path, reason=reason)
