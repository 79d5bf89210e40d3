"""Messages from frames: any order, several senders, and no way to make memory or time grow without limit."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from fabric_kv.reassembly import MESSAGE_OVERHEAD_BYTES, Reassembly

A, B = b"a" * 16, b"b" * 16


def frames_of(message: bytes, frame_bytes: int) -> list[tuple[int, bytes]]:
    return [(at, message[at : at + frame_bytes]) for at in range(0, max(len(message), 1), frame_bytes)]


def make(max_message_bytes: int = 1 << 20, max_total_bytes: int = 1 << 22) -> Reassembly:
    return Reassembly(max_message_bytes, max_total_bytes)


@given(st.binary(min_size=0, max_size=500), st.integers(1, 100), st.randoms())
def test_any_order_of_frames_gives_the_message_once(message: bytes, frame_bytes: int, source: random.Random) -> None:
    reassembly = make()
    frames = frames_of(message, frame_bytes)
    source.shuffle(frames)
    results = [reassembly.add(A, 1, len(message), offset, payload) for offset, payload in frames]
    assert results[:-1] == [None] * (len(frames) - 1)
    assert results[-1] == message
    assert reassembly.num_dropped == 0
    assert not reassembly._partial
    assert reassembly._cost == 0


@given(st.lists(st.tuples(st.sampled_from([A, B]), st.binary(max_size=200)), max_size=8), st.randoms())
def test_interleaved_messages_do_not_mix(messages: list[tuple[bytes, bytes]], source: random.Random) -> None:
    reassembly = make()
    frames = [
        (sender, number, len(message), offset, payload)
        for number, (sender, message) in enumerate(messages)
        for offset, payload in frames_of(message, 17)
    ]
    source.shuffle(frames)
    got = [(frame[0], frame[1], whole) for frame in frames if (whole := reassembly.add(*frame)) is not None]
    assert sorted(got) == sorted((sender, number, message) for number, (sender, message) in enumerate(messages))
    assert reassembly._cost == 0


def test_an_empty_message_is_whole_at_once() -> None:
    assert make().add(A, 1, 0, 0, b"") == b""


def test_a_message_above_the_limit_is_dropped() -> None:
    reassembly = make(max_message_bytes=100)
    assert reassembly.add(A, 1, 101, 0, bytes(50)) is None
    assert reassembly.num_dropped == 1
    assert not reassembly._partial


def test_what_does_not_add_up_is_dropped() -> None:
    cases = [
        [(4, 0, b"ab"), (5, 2, b"cd")],  # another total
        [(4, 0, b"ab"), (4, 0, b"ab")],  # the same frame twice
        [(4, 0, b"ab"), (4, 2, b"")],  # a frame of nothing
        [(4, 0, b"abc"), (4, 1, b"bcd")],  # overlap
        [(6, 0, b"ab"), (6, 1, b"bc"), (6, 4, b"ef")],  # overlap and gap, as many bytes as announced
    ]
    for frames in cases:
        reassembly = make()
        assert [reassembly.add(A, 1, *frame) for frame in frames] == [None] * len(frames)
        assert reassembly.num_dropped == 1
        assert reassembly._cost == 0


def test_a_lost_peer_leaves_nothing_behind() -> None:
    reassembly = make()
    for number in range(10):
        reassembly.add(A, number, 10, 0, b"half")
        reassembly.add(B, number, 10, 0, b"half")
    reassembly.forget(A)
    assert reassembly.num_dropped == 10
    assert len(reassembly._partial) == 10
    assert reassembly.add(B, 3, 10, 4, b"theend") == b"halftheend"


def test_unfinished_messages_are_bounded_and_the_oldest_go_first() -> None:
    reassembly = make(max_message_bytes=1000, max_total_bytes=10_000)
    for number in range(100):
        reassembly.add(A, number, 1000, 0, bytes(900))
        assert reassembly._cost <= 11_000
    assert reassembly.num_dropped > 80
    assert reassembly.add(A, 99, 1000, 900, bytes(100)) == bytes(1000)
    assert reassembly.add(A, 0, 1000, 900, bytes(100)) is None


def test_many_tiny_frames_count_for_what_they_cost() -> None:
    reassembly = make(max_message_bytes=1 << 20, max_total_bytes=1 << 16)
    for number in range(2000):
        reassembly.add(A, number, 1 << 20, 7, b"x")
    assert len(reassembly._partial) <= (1 << 16) * 33 // 32 // MESSAGE_OVERHEAD_BYTES
    one = make(max_message_bytes=1 << 20, max_total_bytes=1 << 16)
    for offset in range(2000):
        one.add(A, 1, 1 << 20, 2 * offset, b"x")
    assert sum(len(partial.frames) for partial in one._partial.values()) <= 1 << 9


def test_the_largest_message_fits_in_full_frames() -> None:
    frame = 16384 - 40
    reassembly = make(max_message_bytes=1 << 22, max_total_bytes=1 << 22)
    message = bytes(1 << 22)
    whole = [reassembly.add(A, 1, len(message), offset, payload) for offset, payload in frames_of(message, frame)]
    assert whole[-1] == message


def test_time_per_frame_does_not_grow() -> None:
    """Counts what a frame touches rather than seconds: a sum over all frames would make this quadratic."""

    class Counted(bytes):
        num_lens = 0

        def __len__(self) -> int:
            Counted.num_lens += 1
            return super().__len__()

    reassembly = make(max_total_bytes=1 << 30)
    for offset in range(2000):
        reassembly.add(A, 1, 1 << 20, offset, Counted(b"x"))
    assert Counted.num_lens <= 10 * 2000


def test_random_frames_keep_the_books_straight(seed: int) -> None:
    source = random.Random(seed)
    reassembly = make(max_message_bytes=64, max_total_bytes=4096)
    for _ in range(20_000):
        total = source.randrange(70)
        offset = source.randrange(total + 1)
        payload = bytes(source.randrange(total - offset + 1))
        reassembly.add(source.choice([A, B]), source.randrange(20), total, offset, payload)
        if source.random() < 0.01:
            reassembly.forget(A)
        assert reassembly._cost == sum(partial.cost for partial in reassembly._partial.values()) <= 4096 * 33 // 32
