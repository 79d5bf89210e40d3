"""The bench's control channel: whole messages, limits, and an answer to every way in which the other end may end."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import pytest

from fabric_kv.bench.channel import Channel, connect, listen
from fabric_kv.bench.greeting import exchange_hellos
from fabric_kv.bench.wire import MAGIC, MAX_FRAME_BYTES, VERSION, Abort, Bye, Go, Hello, Sent, encode
from fabric_kv.errors import ConfigError, PeerUnreachableError, ProtocolError


@pytest.fixture
def pair() -> Iterator[tuple[Channel, socket.socket]]:
    """A channel, and the bare socket at the other end."""
    ours, theirs = socket.socketpair()
    channel = Channel(ours, "the other end")
    yield channel, theirs
    channel.close()
    theirs.close()


def frame(data: bytes) -> bytes:
    return struct.pack("!I", len(data)) + data


def test_messages_arrive_whole_and_in_order(pair: tuple[Channel, socket.socket]) -> None:
    channel, theirs = pair
    data = frame(encode(Sent(7))) + frame(encode(Go()))
    for byte in data[:-1]:
        theirs.sendall(bytes([byte]))
    assert channel.take() == Sent(7)
    assert channel.take() is None
    theirs.sendall(data[-1:])
    assert channel.expect(Go, 5.0) == Go()
    channel.send(Bye(0))
    assert theirs.recv(100) == frame(encode(Bye(0)))


def test_a_wait_is_bounded(pair: tuple[Channel, socket.socket]) -> None:
    with pytest.raises(PeerUnreachableError, match="the other end has not answered"):
        pair[0].expect(Go, 0.0)


def test_another_message_than_due_is_refused(pair: tuple[Channel, socket.socket]) -> None:
    pair[1].sendall(frame(encode(Sent(1))))
    with pytest.raises(ProtocolError, match="Sent where Go was due"):
        pair[0].expect(Go, 5.0)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n",
        struct.pack("!I", MAX_FRAME_BYTES + 1),
        frame(b""),
        frame(b"\xff" * 40),
        frame(b"\x81\xa4type\xa2Rm"),
        frame(encode(Sent(1)) + b"\x00"),
        frame(encode(Sent(1)).replace(b"\x01", b"\xff")),
    ],
)
def test_what_is_no_message_is_refused(pair: tuple[Channel, socket.socket], data: bytes) -> None:
    pair[1].sendall(data)
    with pytest.raises(ProtocolError, match="the other end"):
        pair[0].take()


def test_an_end_without_a_word_and_one_with(pair: tuple[Channel, socket.socket]) -> None:
    channel, theirs = pair
    theirs.sendall(frame(encode(Abort("it was interrupted"))))
    theirs.close()
    with pytest.raises(PeerUnreachableError, match="gave up: it was interrupted"):
        channel.take()
    with pytest.raises(PeerUnreachableError, match="without a word"):
        channel.take()


def test_a_send_to_who_has_left_says_what_it_said_last(pair: tuple[Channel, socket.socket]) -> None:
    channel, theirs = pair
    theirs.sendall(frame(encode(Abort("no memory"))))
    theirs.close()
    with pytest.raises(PeerUnreachableError, match="gave up: no memory"):
        channel.send(Go())
    channel.abort("too late")  # nobody listens; no error


def test_versions_must_agree() -> None:
    for magic, version, why in (MAGIC, VERSION + 1, "same version"), ("other", VERSION, "does not speak"):
        ours, theirs = socket.socketpair()
        with theirs:
            channel = Channel(ours, "the other end")
            theirs.sendall(frame(encode(Hello(magic, version, "9.9", 1))))
            with pytest.raises(ProtocolError, match=why):
                exchange_hellos(channel)
            channel.close()


def test_nobody_there_and_port_taken() -> None:
    with listen("127.0.0.1", 0) as server:
        port = server.getsockname()[1]
        with pytest.raises(PeerUnreachableError, match="choose another --port"):
            listen("127.0.0.1", port)
    with pytest.raises(PeerUnreachableError, match="start fabric-kv-bench there first"):
        connect("127.0.0.1", port, 5.0)
    with pytest.raises(ConfigError, match="no address"):
        connect(":1", port, 5.0)
