"""Who gets a target: the first that says Hello, whoever else has connected before and after it."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Iterator

import pytest

from fabric_kv.bench import greeting
from fabric_kv.bench.channel import Channel, listen
from fabric_kv.bench.greeting import await_initiator, our_hello
from fabric_kv.bench.wire import MAGIC, VERSION, Go, Hello, encode
from fabric_kv.errors import PeerUnreachableError

NEVER = 3600.0
LONG = 30.0


class Door:
    """A target's port, and those who knock there."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self.server = stack.enter_context(listen("127.0.0.1", 0))
        self.said: list[str] = []

    def knock(self, data: bytes = b"") -> socket.socket:
        guest = self._stack.enter_context(socket.create_connection(self.server.getsockname()[:2], LONG))
        guest.sendall(data)
        return guest

    def open(self, hello_s: float = NEVER) -> Channel:
        return self._stack.enter_context(
            contextlib.closing(await_initiator(self.server, self.said.append, hello_s=hello_s))
        )


@pytest.fixture
def door() -> Iterator[Door]:
    with contextlib.ExitStack() as stack:
        yield Door(stack)


def frame(data: bytes) -> bytes:
    return struct.pack("!I", len(data)) + data


HELLO = frame(encode(our_hello()))


def port_of(guest: socket.socket) -> str:
    return f"127.0.0.1:{guest.getsockname()[1]}"


def test_a_silent_stranger_holds_nobody_up(door: Door) -> None:
    strangers = [door.knock(), door.knock(HELLO[:3])]
    real = door.knock(HELLO)
    late = door.knock()
    channel = door.open()
    assert channel.who == f"initiator {port_of(real)}"
    assert door.said == []
    # It was told who we are, and what it says from now on may be long.
    answer = Channel(real, "the target")
    assert answer.expect(Hello, LONG) == our_hello()
    answer.send(Go())
    assert channel.expect(Go, LONG) == Go()
    assert channel.max_frame_bytes > 1 << 20
    for stranger in strangers:
        with pytest.raises(PeerUnreachableError, match="takes part in another initiator's run"):
            Channel(stranger, "the target").expect(Hello, LONG)
    door.server.close()  # as the target does: those who were not admitted yet are refused as well
    with pytest.raises(PeerUnreachableError):
        Channel(late, "the target").expect(Hello, LONG)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "does not speak fabric-kv-bench"),
        (struct.pack("!I", 1 << 20), "announces a message of 1048576 bytes"),
        (frame(b"\xc1"), "no message of fabric-kv-bench"),
        (frame(encode(Go())), "sent Go where Hello was due"),
        (frame(encode(Hello(MAGIC, VERSION + 1, "9.9", 1))), "install the same version"),
        (frame(encode(Hello("other", VERSION, "9.9", 1))), "does not speak"),
    ],
    ids=["http", "long", "no message", "another message", "version", "magic"],
)
def test_one_that_is_none_is_reported_and_told(door: Door, data: bytes, why: str) -> None:
    stranger, gone = door.knock(data), door.knock()
    gone.close()
    real: list[socket.socket] = []

    def say(text: str) -> None:
        door.said.append(text)
        if len(door.said) == 2:  # both have been dealt with
            real.append(door.knock(HELLO))

    with contextlib.closing(await_initiator(door.server, say, NEVER)) as channel:
        assert channel.who == f"initiator {port_of(real[0])}"
    reports = " | ".join(door.said)
    assert why in reports
    assert port_of(stranger) in reports
    assert "has gone without a word" in reports
    with pytest.raises(PeerUnreachableError, match="gave up"):
        Channel(stranger, "the target").expect(Hello, LONG)


def test_nobody_may_say_nothing_for_ever(door: Door) -> None:
    stranger = door.knock()
    real: list[socket.socket] = []

    def say(text: str) -> None:
        door.said.append(text)
        real.append(door.knock(HELLO))  # one that is late itself, on a busy machine, makes room for the next

    with contextlib.closing(await_initiator(door.server, say, hello_s=0.05)) as channel:
        assert channel.who in {f"initiator {port_of(guest)}" for guest in real}
    assert door.said[0] == f"initiator {port_of(stranger)} has not said Hello for 0.05 s"
    with pytest.raises(PeerUnreachableError, match="has not said Hello"):
        Channel(stranger, "the target").expect(Hello, LONG)


def test_a_crowd_pushes_out_those_who_waited_longest(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greeting, "_MAX_GUESTS", 2)
    strangers = [door.knock() for _ in range(4)]
    real = door.knock(HELLO)
    channel = door.open()
    assert channel.who == f"initiator {port_of(real)}"
    for stranger, text in zip(strangers[:3], door.said, strict=True):
        assert port_of(stranger) in text
        with pytest.raises(PeerUnreachableError, match="too many connections"):
            Channel(stranger, "the target").expect(Hello, LONG)


def test_a_process_out_of_descriptors_says_so(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    door.knock()
    error = OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def refuse(_: socket.socket) -> None:
        raise error

    monkeypatch.setattr(socket.socket, "accept", refuse)
    with pytest.raises(PeerUnreachableError, match="Too many open files"):
        door.open()
