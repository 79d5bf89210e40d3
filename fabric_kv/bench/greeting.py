"""Who may conduct: the first that connects to a target and says Hello. Others neither hold it up nor end it.

>>> channel = await_initiator(server, say=print)

All that have connected are listened to at once. A stranger who says something else, or nothing, is told, reported and
forgotten; so are those who come behind the one that is taken.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections.abc import Callable

from .. import __version__
from ..errors import PeerUnreachableError, ProtocolError
from .channel import Channel, format_address, plain_host
from .wire import MAGIC, MAX_FRAME_BYTES, VERSION, Hello, Message

__all__ = ["HELLO_S", "await_initiator", "check_hello", "exchange_hellos", "our_hello"]

#: From the connection to the Hello.
HELLO_S = 10.0
_START_S = 60.0  # where the other end is a process that we have just started, on a machine that may be busy
_MAX_GUESTS = 64  # then the one that has waited longest goes: a real initiator says Hello at once
_MAX_HELLO_BYTES = 64 << 10

# accept(2): of this process or host; all others are of the connection that was about to be accepted.
_OUT_OF = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def our_hello() -> Hello:
    """What both ends begin with."""
    return Hello(MAGIC, VERSION, __version__, os.getpid())


def check_hello(message: Message, who: str) -> None:
    """Make sure that the other end is a bench that we understand.

    Raises
    ------
    ProtocolError
        If it is not.
    """
    if not isinstance(message, Hello):
        raise ProtocolError(f"{who} sent {type(message).__name__} where Hello was due")
    if message.magic != MAGIC:
        raise ProtocolError(f"{who} does not speak {MAGIC}")
    if message.version != VERSION:
        raise ProtocolError(
            f"{who} speaks version {message.version} (fabric_kv {message.package}), and we speak {VERSION} "
            f"(fabric_kv {__version__}). Hint: install the same version at both ends"
        )


def exchange_hellos(channel: Channel) -> None:
    """Greet an end that is there for us alone.

    Raises
    ------
    PeerUnreachableError
        If it is gone, or says nothing for :data:`HELLO_S`, or a minute if it has to start first.
    ProtocolError
        As for :func:`check_hello`.
    """
    channel.send(our_hello())
    check_hello(channel.expect(Hello, HELLO_S if channel.local_host else _START_S), channel.who)


def await_initiator(server: socket.socket, say: Callable[[str], None], hello_s: float = HELLO_S) -> Channel:
    """Wait until somebody has connected and said Hello, for as long as it takes.

    Parameters
    ----------
    server : socket.socket
        Listens.
    say : callable
        Told of each one that was none.
    hello_s : float
        How long one that has connected may say nothing.

    Returns
    -------
    Channel
        After both Hellos.

    Raises
    ------
    PeerUnreachableError
        If no connections can be taken any more.
    """
    guests: dict[int, tuple[Channel, float]] = {}  # by descriptor, in the order in which they came; until when
    poll = select.poll()
    poll.register(server, select.POLLIN)

    def dismiss(fd: int, why: str) -> None:
        poll.unregister(fd)
        channel, _ = guests.pop(fd)
        channel.abort(why)
        channel.close()

    server.setblocking(False)
    try:
        while True:
            until = min((deadline for _, deadline in guests.values()), default=None)
            for fd, _ in poll.poll(None if until is None else max(0.0, until - time.monotonic()) * 1e3):
                if fd == server.fileno():
                    if (channel := _admit(server)) is None:
                        continue
                    guests[channel.fileno()] = channel, time.monotonic() + hello_s
                    poll.register(channel, select.POLLIN)
                    if len(guests) > _MAX_GUESTS:
                        oldest = next(iter(guests))
                        say(f"{guests[oldest][0].who} has said nothing, and {_MAX_GUESTS} others have come since")
                        dismiss(oldest, "too many connections that say nothing")
                    continue
                if fd not in guests:  # dismissed in this round
                    continue
                channel, _ = guests[fd]
                try:
                    if (message := channel.take()) is None:
                        continue
                    check_hello(message, channel.who)
                    channel.send(our_hello())
                except (ProtocolError, PeerUnreachableError) as error:
                    say(str(error))
                    dismiss(fd, str(error))
                    continue
                del guests[fd]
                channel.max_frame_bytes = MAX_FRAME_BYTES
                return channel
            now = time.monotonic()
            for fd in [fd for fd, (_, deadline) in guests.items() if deadline <= now]:
                why = f"{guests[fd][0].who} has not said Hello for {hello_s:g} s"
                say(why)
                dismiss(fd, why)
    finally:
        for fd in list(guests):
            dismiss(fd, "this target takes part in another initiator's run")


def _admit(server: socket.socket) -> Channel | None:
    try:
        sock, address = server.accept()
    except OSError as error:
        if error.errno in _OUT_OF:
            raise PeerUnreachableError(f"no connection can be accepted: {error}", op="accept") from error
        return None  # it has gone again
    channel = Channel(sock, f"initiator {format_address(plain_host(address[0]), address[1])}")
    channel.max_frame_bytes = _MAX_HELLO_BYTES
    return channel
