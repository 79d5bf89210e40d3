"""What travels between the messengers: golden bytes, limits, and bytes that no honest peer would send."""

import contextlib

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric_kv.errors import ConfigError, ProtocolError
from fabric_kv.messenger import wire
from fabric_kv.regions import CounterToken

VERSION = b"FKV\x04"
REQUEST = wire.Request(
    request_id="r1",
    generation=5,
    tokens=wire.pack_ints([1, 2, 70000]),
    pages=[wire.pack_ints([9, 4]), wire.pack_ints([2**40])],
    source_set=1,
    cached=16,
    counters=[CounterToken(3, 1, 4096, 0), None],
    tail_slot=2,
    deadline_s=1.5,
    params=b"xyz",
    dp=2,
    tail_counter=CounterToken(3, 1, 4096, 1),
)
HELLO = wire.Hello(
    session=3,
    address=b"addr",
    peer_epoch=bytes(16),
    spec=b"spec",
    regions=[[b"r0"], [b"r1", b"r2"]],
    tail=wire.TailGeometry(b"t", 4, 128, [wire.TailField("hidden", "<f4", [5])]),
)
MESSAGES = [
    HELLO,
    wire.HelloReply(3, None, "", b"spec"),
    wire.HelloReply(3, "incompatible", "page_tokens"),
    REQUEST,
    wire.Accept(5),
    wire.Reject(5, "no room"),
    wire.Reject(5, "no room", "no_capacity"),
    wire.Fail(5, "broken", False),
    wire.Stalled(5, "stuck"),
    wire.Written([5, 1 << 62]),
    wire.Cancel(5),
    wire.CancelConfirm(5, True),
    wire.CancelConfirm(5, True, written=True),
    wire.Goodbye(3, True),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_survives_the_wire(message):
    assert wire.decode(wire.encode(message)) == message


def test_version_4_bytes_do_not_change():
    """A change here needs a new PROTOCOL_VERSION."""
    assert wire.encode(wire.Accept(5)).hex() == "464b560482a474797065a6616363657074aa67656e65726174696f6e05"
    assert wire.encode(wire.Fail(5, "x", True)).hex() == (
        "464b560484a474797065a46661696caa67656e65726174696f6e05a6726561736f6ea178ab70616765735f636c65616ec3"
    )
    assert wire.encode(REQUEST).hex() == (
        "464b56048da474797065a772657175657374aa726571756573745f6964a27231aa67656e65726174696f6e05a6746f6b656e"
        "739220c40c010000000200000070110100a57061676573929220c40809000000040000009240c4080000000000010000aa73"
        "6f757263655f73657401a663616368656410a8636f756e7465727392940301cd100000c0a97461696c5f736c6f7402aa6465"
        "61646c696e655f73cb3ff8000000000000a6706172616d73c40378797aa2647002ac7461696c5f636f756e746572940301cd"
        "100001"
    )


def test_a_hello_of_another_version_says_who_asks():
    frame = bytearray(wire.encode(HELLO))
    frame[3] = 3
    with pytest.raises(wire.VersionMismatch, match="peer speaks messenger protocol 3, this side speaks 4") as caught:
        wire.decode(bytes(frame))
    assert caught.value.hello == wire.AnyHello(3, b"addr", bytes(16))
    frame = bytearray(wire.encode(wire.Accept(1)))
    frame[3] = 9
    with pytest.raises(wire.VersionMismatch) as caught:
        wire.decode(bytes(frame))
    assert caught.value.hello is None


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_by_type(data):
    for frame in (data, b"FKV" + data, VERSION + data):
        try:
            wire.decode(frame)
        except ProtocolError:
            continue
        assert isinstance(wire.decode(frame), wire.Message)


@settings(max_examples=200)
@given(st.sampled_from(MESSAGES), st.data())
def test_damaged_messages_are_refused_by_type(message, data):
    frame = bytearray(wire.encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(4, len(frame) - 1))] = data.draw(st.integers(0, 255))
    frame = frame[: data.draw(st.integers(0, len(frame)))]
    with contextlib.suppress(ProtocolError):
        wire.decode(bytes(frame))


def body(**changes):
    fields = {"type": "request", **msgspec.to_builtins(REQUEST, builtin_types=(bytes,)), **changes}
    return VERSION + msgspec.msgpack.encode(fields)


@pytest.mark.parametrize(
    "changes",
    [
        {"generation": -1},
        {"generation": 2**63},
        {"generation": "5"},
        {"request_id": ""},
        {"request_id": "x" * 257},
        {"pages": []},
        {"pages": [[32, b""]] * 257},
        {"counters": [None] * (wire.MAX_COUNTERS + 1)},
        {"counters": [[1 << 17, 0, 1, 0]]},
        {"deadline_s": 0},
        {"deadline_s": float("nan")},
        {"deadline_s": float("inf")},
        {"params": b"x" * (wire.MAX_PARAMS_BYTES + 1)},
        {"tail_slot": 2**31},
        {"source_set": None},
        {"type": "shutdown"},
    ],
    ids=str,
)
def test_values_out_of_range_are_refused(changes):
    assert wire.decode(body()) == REQUEST
    with pytest.raises(ProtocolError, match="malformed message"):
        wire.decode(body(**changes))


def test_deep_nesting_is_refused():
    with pytest.raises(ProtocolError):
        wire.decode(VERSION + b"\x91" * 100_000)


def test_a_length_of_4_gib_costs_nothing():
    with pytest.raises(ProtocolError):
        wire.decode(VERSION + b"\x82\xa4type\xa6cancel\xaageneration\xc6\xff\xff\xff\xff")


@given(st.lists(st.integers(0, 2**63 - 1), max_size=20))
def test_integers_round_trip(values):
    packed = wire.pack_ints(np.array(values, np.uint64))
    assert wire.unpack_ints(packed).tolist() == values
    assert packed.bits == (32 if max(values, default=0) < 2**32 else 64)


@pytest.mark.parametrize("values", [[-1], [[1, 2]], [1.5], ["a"], np.array([2**63], np.uint64)], ids=str)
def test_what_is_no_page_list_is_refused(values):
    with pytest.raises(ConfigError):
        wire.pack_ints(values)


@pytest.mark.parametrize("ints", [wire.Ints(16, b"ab"), wire.Ints(32, b"abc"), wire.Ints(64, b"\xff" * 8)], ids=str)
def test_packed_integers_are_checked(ints):
    with pytest.raises(ProtocolError):
        wire.unpack_ints(ints)
