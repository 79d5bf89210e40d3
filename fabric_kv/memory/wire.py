"""What a BufferServer and those who import from it say to each other, over a unix socket that keeps frames apart.

>>> send(connection, Hello(epoch=None))
>>> answer, fds = receive(connection, FromServer, path)

The importer asks and the server answers, one frame each, so that nothing piles up on the way: the kernel counts
descriptors in flight against a user's limit. Only ``Withdrawn`` and ``Closing`` come by themselves.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import socket
import struct
from collections.abc import Sequence
from typing import Annotated, ClassVar, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from ..encoding import decode, encode
from ..errors import ConfigError, ProtocolError, SharingError
from ..regions import Epoch
from .buffer import BufferInfo

__all__ = [
    "FDS_A_FRAME",
    "MAX_BUFFERS",
    "Closing",
    "Credentials",
    "Done",
    "Fetch",
    "FromServer",
    "FromServerBody",
    "Handles",
    "Hello",
    "Name",
    "Refused",
    "ToServer",
    "ToServerBody",
    "Welcome",
    "Withdrawn",
    "address_of",
    "check_path",
    "credentials",
    "is_gone",
    "new_socket",
    "receive",
    "send",
    "shut",
]

_MAGIC, _VERSION = b"FKVB", 1
_MAX_FRAME = 128 << 10
FDS_A_FRAME = 64  # the kernel takes 253: SCM_MAX_FD
MAX_BUFFERS = 16384

Name = Annotated[str, Meta(min_length=1, max_length=255)]
_Text = Annotated[str, Meta(max_length=4096)]
_Index = Annotated[int, Meta(ge=0, lt=MAX_BUFFERS)]


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """The importer's first words; with an epoch it wants that life of the server and no other."""

    epoch: Epoch | None


class Fetch(msgspec.Struct, frozen=True, array_like=True, tag="fetch"):
    """Asks for a buffer's description and its descriptors from ``first`` on."""

    index: _Index
    first: Annotated[int, Meta(ge=0, lt=65536)]


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """The importer has mapped everything."""


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """The server's life, what it calls itself, and how many buffers it has."""

    epoch: Epoch
    label: Annotated[str, Meta(max_length=255)]
    num_buffers: Annotated[int, Meta(ge=0, le=MAX_BUFFERS)]


class Handles(msgspec.Struct, frozen=True, array_like=True, tag="handles"):
    """A buffer; the frame brings its next descriptors."""

    name: Name
    info: BufferInfo


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The last frame of a connection that the server wants nothing of: SharingError's reason, and words."""

    reason: Annotated[str, Meta(max_length=32)]
    text: _Text


class Withdrawn(msgspec.Struct, frozen=True, array_like=True, tag="withdrawn"):
    """This buffer is not to be used any more."""

    name: Name


class Closing(msgspec.Struct, frozen=True, array_like=True, tag="closing"):
    """None of them is to be used any more: the owner closes its server, and lives."""


ToServerBody = Hello | Fetch | Done


class ToServer(msgspec.Struct, frozen=True, array_like=True):
    """A frame from an importer."""

    body: ToServerBody
    WHAT: ClassVar[str] = "an importer's frame"


FromServerBody = Welcome | Handles | Refused | Withdrawn | Closing


class FromServer(msgspec.Struct, frozen=True, array_like=True):
    """A frame from the server."""

    body: FromServerBody
    WHAT: ClassVar[str] = "a buffer server's frame"


_Frame = TypeVar("_Frame", ToServer, FromServer)


class Credentials(NamedTuple):
    """Who is at the other end, as the kernel saw it; pid 0: a process that this pid namespace does not show."""

    pid: int
    uid: int
    gid: int


def credentials(connection: socket.socket) -> Credentials:
    """SO_PEERCRED of a connected socket: unix(7)."""
    layout = "iII"  # struct ucred
    return Credentials(
        *struct.unpack(layout, connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(layout)))
    )


def check_path(path: str | os.PathLike[str]) -> str:
    """A server's path as the user gave it.

    Raises
    ------
    ConfigError
        If it is empty, to which the kernel would give a name that nobody knows, or has a NUL.
    """
    text = os.fsdecode(path)
    if text in ("", "@") or "\0" in text:
        raise ConfigError(f"path={path!r} must be a file's, or '@' and a name, without NUL")
    return text


def address_of(path: str) -> str:
    """The address of a server's path; ``@name`` is one without a file, in the network namespace's own names."""
    return "\0" + path[1:] if path.startswith("@") else path


def new_socket() -> socket.socket:
    """A socket of the kind that both sides use."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(
    connection: socket.socket, frame: ToServerBody | FromServerBody, fds: Sequence[int] = (), flags: int = 0
) -> None:
    """Send one frame, with descriptors; OSError as of sendmsg(2)."""
    wrapped: ToServer | FromServer
    wrapped = ToServer(frame) if isinstance(frame, Hello | Fetch | Done) else FromServer(frame)
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    connection.sendmsg([encode(_MAGIC, _VERSION, wrapped)], ancillary, flags | socket.MSG_NOSIGNAL)


def receive(connection: socket.socket, kind: type[_Frame], path: str) -> tuple[_Frame | None, list[int]]:
    """Receive one frame and its descriptors, which are the caller's to close; None at the end of the connection.

    Raises
    ------
    SharingError
        If the frame makes no sense, or descriptors were lost because this process may have no more. None is left open.
    OSError
        As of recvmsg(2); TimeoutError by the socket's timeout.
    """
    fds = array.array("i")
    room = socket.CMSG_SPACE(FDS_A_FRAME * fds.itemsize)
    data, ancillary, flags, _ = connection.recvmsg(_MAX_FRAME + 1, room, socket.MSG_CMSG_CLOEXEC)
    for level, type_, payload in ancillary:
        if level == socket.SOL_SOCKET and type_ == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    got = list(fds)
    try:
        if flags & socket.MSG_CTRUNC:
            raise SharingError(
                f"descriptors from {path} were lost: this process may have no more of them. Hint: raise the limit on "
                "open files (ulimit -n)",
                path=path,
                reason="full",
            )
        if not data:
            if got:
                raise SharingError(f"{kind.WHAT} is empty, with descriptors", path=path, reason="protocol")
            return None, []
        try:
            return decode(_MAGIC, _VERSION, kind, data, what=kind.WHAT, limit=_MAX_FRAME), got
        except ProtocolError as error:
            raise SharingError(str(error), path=path, reason="protocol") from None
    except SharingError:
        for fd in got:
            os.close(fd)
        raise


def no_descriptors(fds: Sequence[int], path: str) -> None:
    """Close descriptors that came where none belong.

    Raises
    ------
    SharingError
        If there are any.
    """
    for fd in fds:
        os.close(fd)
    if fds:
        raise SharingError(f"{len(fds)} descriptors came with a frame that has none", path=path, reason="protocol")


def is_gone(error: OSError) -> bool:
    """Whether it says that the other end has closed or died."""
    return error.errno in (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.EBADF)


def shut(connection: socket.socket) -> None:
    """End a connection for both sides, also for a thread that waits in it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
