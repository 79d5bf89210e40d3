"""The control channel: whole messages over a stream socket, with a limit on their length and a bound on every wait.

>>> channel = connect("10.0.0.5", 18600, timeout_s=5); channel.send(Go()); channel.expect(Finished, timeout_s=20)

Whoever is killed, stopped or cut off is noticed: the socket closes, keepalive gives up after some seconds, or a wait
ends.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections import deque
from typing import TypeVar

from ..errors import ConfigError, FabricKVError, PeerUnreachableError, ProtocolError
from .wire import MAGIC, MAX_FRAME_BYTES, Abort, Message, decode, encode

__all__ = ["DEFAULT_PORT", "Channel", "connect", "format_address", "listen", "parse_address", "plain_host"]

DEFAULT_PORT = 18600

# A host that vanishes without a word: keepalive asks after 2 s of silence, and gives up after 3 further ones.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 3))
_UNACKNOWLEDGED_MS = 5000
_SEND_S = 5.0

_HEADER = struct.Struct("!I")
_M = TypeVar("_M")


class Channel:
    """One connection. Not for several threads.

    Parameters
    ----------
    sock : socket.socket
        Connected; of any stream family. The channel owns it.
    who : str
        The other end, as messages call it.

    Attributes
    ----------
    max_frame_bytes : int
        It may announce no longer message.
    """

    def __init__(self, sock: socket.socket, who: str) -> None:
        self.who = who
        self.max_frame_bytes = MAX_FRAME_BYTES
        self._socket = sock
        self._buffer = bytearray()
        self._waiting: deque[Message] = deque()  # seen by look(), not taken yet
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)
            for option, value in _KEEPALIVE:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)

    def fileno(self) -> int:
        """Readable when :meth:`take` may have something."""
        return self._socket.fileno()

    @property
    def local_host(self) -> str:
        """Our own address on this connection; empty if it is a pipe."""
        return plain_host(self._socket.getsockname()[0]) if self._socket.family != socket.AF_UNIX else ""

    def send(self, message: Message) -> None:
        """Send a message.

        Raises
        ------
        PeerUnreachableError
            If the other end is gone or takes nothing for 5 s.
        """
        data = encode(message)
        view = memoryview(_HEADER.pack(len(data)) + data)
        deadline = time.monotonic() + _SEND_S
        while view:
            try:
                view = view[self._socket.send(view) :]
            except BlockingIOError:
                if not self._wait(select.POLLOUT, deadline):
                    raise PeerUnreachableError(f"{self.who} takes no messages for {_SEND_S:g} s") from None
            except OSError as error:
                self._explain_end(error)

    def take(self) -> Message | None:
        """A message that has arrived, or None; never waits.

        Raises
        ------
        PeerUnreachableError
            If the other end is gone, or said that it gives up.
        ProtocolError
            If what it sent is no message.
        """
        if self._waiting:
            return self._waiting.popleft()
        while (message := self._parse()) is None:
            try:
                data = self._socket.recv(1 << 16)
            except BlockingIOError:
                return None
            except ConnectionResetError:
                data = b""
            except OSError as error:
                raise PeerUnreachableError(f"{self.who} cannot be reached any more: {error}") from error
            if not data:
                raise PeerUnreachableError(f"{self.who} has gone without a word: its process died or was killed")
            self._buffer += data
        if isinstance(message, Abort):
            raise PeerUnreachableError(f"{self.who} gave up: {message.why}")
        return message

    def look(self) -> None:
        """Raise as :meth:`take` would if the other end is gone; what has arrived stays to be taken."""
        arrived = deque(self._waiting)
        self._waiting.clear()
        while (message := self.take()) is not None:
            arrived.append(message)
        self._waiting = arrived

    def expect(self, kind: type[_M], timeout_s: float) -> _M:
        """The next message, which must be of this kind.

        Raises
        ------
        PeerUnreachableError
            As for :meth:`take`, and if nothing comes within ``timeout_s``.
        ProtocolError
            If something else comes.
        """
        deadline = time.monotonic() + timeout_s
        while (message := self.take()) is None:
            if not self._wait(select.POLLIN, deadline):
                raise PeerUnreachableError(f"{self.who} has not answered for {timeout_s:g} s")
        if not isinstance(message, kind):
            raise ProtocolError(f"{self.who} sent {type(message).__name__} where {kind.__name__} was due")
        return message

    def abort(self, why: str) -> None:
        """Tell the other end that we give up, if it still listens."""
        with contextlib.suppress(FabricKVError, OSError):
            self.send(Abort(why[:4000]))

    def close(self) -> None:
        """Close the connection; what was sent still arrives."""
        self._socket.close()

    def _wait(self, event: int, deadline: float) -> bool:
        poll = select.poll()  # with very many peers a descriptor may be above what select(2) takes
        poll.register(self, event)
        return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1e3))

    def _parse(self) -> Message | None:
        if len(self._buffer) < _HEADER.size:
            return None
        (nbytes,) = _HEADER.unpack_from(self._buffer)
        if nbytes > self.max_frame_bytes:
            raise ProtocolError(f"{self.who} announces a message of {nbytes} bytes: it does not speak {MAGIC}")
        if len(self._buffer) < _HEADER.size + nbytes:
            return None
        data = bytes(self._buffer[_HEADER.size : _HEADER.size + nbytes])
        del self._buffer[: _HEADER.size + nbytes]
        return decode(data, self.who)

    def _explain_end(self, error: OSError) -> None:
        # What it said before it went tells more than our failing send.
        with contextlib.suppress(ProtocolError):
            while self.take() is not None:
                pass
        raise PeerUnreachableError(f"{self.who} cannot be reached any more: {error}") from error


def parse_address(text: str, default_port: int = DEFAULT_PORT) -> tuple[str, int]:
    """``host``, ``host:port``, ``[::1]``, ``[::1]:port`` or a bare IPv6 address.

    Raises
    ------
    ConfigError
        If it is none of them.
    """
    host, port = text, str(default_port)
    if text.startswith("["):
        host, closed, rest = text[1:].partition("]")
        if not closed or (rest and not rest.startswith(":")):
            raise ConfigError(f"{text!r} is no address: write [IPv6 address]:port")
        port = rest[1:] or port
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"{text!r} is no address: write host, host:port or [IPv6 address]:port")
    return host, int(port)


def connect(address: str, port: int, timeout_s: float) -> Channel:
    """Connect to a target.

    Raises
    ------
    PeerUnreachableError
        If it is not there.
    """
    host, port = parse_address(address, port)
    who = f"target {format_address(host, port)}"
    try:
        return Channel(socket.create_connection((host, port), timeout_s), who)
    except OSError as error:
        raise PeerUnreachableError(
            f"cannot reach {who}: {error}. Hint: start fabric-kv-bench there first, without an address; it prints the "
            "command to use here",
            op="connect",
            fi_errno=error.errno,
            peer=address,
        ) from error


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; on all addresses of both families if no host is given.

    Raises
    ------
    PeerUnreachableError
        If the address cannot be used.
    """
    try:
        if not host and socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise PeerUnreachableError(
            f"cannot listen on {format_address(host or '*', port)}: {error}. Hint: another target may be running; "
            "choose another --port",
            op="listen",
            fi_errno=error.errno,
        ) from error


def plain_host(host: str) -> str:
    """An IPv4 address as such, also where a socket of both families has it in IPv6's clothes (RFC 4291, 2.5.5.2)."""
    return host.removeprefix("::ffff:") if "." in host else host


def format_address(host: str, port: int) -> str:
    """``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
