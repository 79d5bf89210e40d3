"""Pages between two processes: the right bytes, nothing beside them, and the counter not a byte too early."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from fabric_kv.regions import RemoteRegion
from fabric_kv.transfers import Counter, PagePiece

from .engine_peer import CANARY, LONG, Node, PeerProcess, WriteOrder, stamp
from .fabrics import SLOWER

NUM_ROUNDS = 1500 // SLOWER


class Rounds:
    """Orders pages from the peer, checks all memory in the callback of the counter, orders the next, and so on."""

    def __init__(self, node: Node, source: random.Random, num_rounds: int) -> None:
        self.node, self.source, self.left = node, source, num_rounds
        self.num_pages = 48
        self.remote = node.register(self.num_pages * 1500, CANARY)
        self.expected = node.memory["memory"].copy()
        self.ended = threading.Event()
        self.error: BaseException | None = None

    def begin(self) -> None:
        source = self.source
        page_bytes = source.choice([1, 7, 64, 500, 1024, 1500])
        # Pages end to end or with a gap; now and then neighbours, so that some are merged.
        stride = source.choice([page_bytes, 1500])
        count = source.randrange(1, 17)
        src_pages = [source.randrange(32) for _ in range(count)]
        dst_pages = source.sample(range(self.num_pages * 1500 // stride if stride > 64 else self.num_pages), count)
        if source.random() < 0.5:
            src_pages = list(range(count))
            dst_pages = list(range(dst_pages[0] % (self.num_pages - 16), self.num_pages))[:count]
        unit = source.choice([1, 3, 64, 1000, 4096]) if page_bytes > 64 else source.choice([1, 64])
        units = count * -(-page_bytes // unit)
        for src, dst in zip(src_pages, dst_pages, strict=True):
            data = stamp(self.left * 1000 + src, page_bytes)
            self.expected[dst * stride : dst * stride + page_bytes] = data
        counter = self.node.engine.counter(unit_bytes=unit, expected_units=units)
        counter.add_done_callback(self.check)
        order = WriteOrder(self.left, self.remote, src_pages, dst_pages, page_bytes, 1500, stride, counter.token)
        self.node.engine.send(self.node.peer, msgspec.msgpack.encode(order))

    def check(self, counter: Counter) -> None:
        try:
            counter.result(0)
            np.testing.assert_array_equal(self.node.memory["memory"], self.expected)
            counter.release()
            self.left -= 1
            if self.left > 0:
                return self.begin()
        except BaseException as error:  # noqa: BLE001  raised in the test's thread
            self.error = error
        return self.ended.set()


def test_every_byte_is_there_when_the_counter_fires(node: Node, peer: PeerProcess, seed: int) -> None:
    peer.call("register", 32 * 1500)
    peer.call("obey")
    rounds = Rounds(node, random.Random(seed), NUM_ROUNDS)
    rounds.begin()
    assert rounds.ended.wait(LONG), f"stuck with {rounds.left} rounds to go"
    if rounds.error is not None:
        raise rounds.error
    figures = node.describe()
    assert figures["groups"][0]["stale_imms"] == figures["groups"][0]["violations"] == 0
    assert figures["groups"][0]["counters_in_use"] == figures["callback_errors"] == 0
    assert peer.call("describe")["callback_errors"] == 0


@pytest.mark.parametrize(
    ("page_bytes", "count", "unit"),
    [
        (4096, 1, 4096),
        (5000, 9, 4096),  # odd pages round up one by one, merged or not
        (64, 3000, 64),  # a run of more units than one immediate can say
        (1, 2500, 1),
        (3 * (1 << 20) + 5, 2, 3000),  # larger than any single write, cut at odd units
        (1 << 21, 3, 1 << 20),
        (5 << 20, 1, 1),  # millions of units: thousands of immediates
    ],
)
def test_units_add_up_however_pages_are_merged_and_cut(
    node: Node, peer: PeerProcess, page_bytes: int, count: int, unit: int
) -> None:
    nbytes = page_bytes * count
    remote = peer.call("register", nbytes + 64, CANARY)
    node.register(nbytes)
    node.memory["memory"][:] = stamp(1, nbytes)
    units = count * -(-page_bytes // unit)
    token = peer.call("count", unit, units)
    pages = list(range(count))
    node.write_pages(remote, pages, pages, page_bytes=page_bytes, token=token)
    assert peer.call("wait_counter") == units
    assert peer.call("get", 0, nbytes) == node.memory["memory"].tobytes()
    assert peer.call("get", nbytes, 64) == bytes([CANARY]) * 64


def test_scattered_pages_go_to_their_places(node: Node, peer: PeerProcess, seed: int) -> None:
    source = random.Random(seed)
    remote = peer.call("register", 512 * 700, CANARY)
    node.register(512 * 512)
    node.memory["memory"][:] = stamp(2, 512 * 512)
    src_pages, dst_pages = source.sample(range(512), 300), source.sample(range(512), 300)
    token = peer.call("count", 512, 300)
    node.write_pages(remote, src_pages, dst_pages, page_bytes=512, dst_stride=700, token=token)
    peer.call("wait_counter")
    expected = np.full(512 * 700, CANARY, np.uint8)
    for src, dst in zip(src_pages, dst_pages, strict=True):
        expected[dst * 700 : dst * 700 + 512] = node.memory["memory"][src * 512 : src * 512 + 512]
    assert peer.call("get", 0, 512 * 700) == expected.tobytes()


def test_rows_of_pages_are_strided_on_both_sides(node: Node, peer: PeerProcess) -> None:
    """Half of the heads of NHD pages: 16 rows of 96 bytes out of 192, into pages of a cache of another width."""
    remote = RemoteRegion.from_bytes(peer.call("register", 8 * 16 * 128, CANARY))
    node.register(10 * 16 * 192)
    node.memory["memory"][:] = stamp(3, 10 * 16 * 192)
    src_pages, dst_pages = np.array([9, 0, 4], np.int32), np.array([7, 3, 2], np.uint16)
    piece = PagePiece(
        node.regions["memory"], 96, 16 * 192, remote, 32, 16 * 128, 96, src_pages, dst_pages, 16, 192, 128
    )
    token = peer.call("count", 96, 48)
    node.engine.submit(node.peer, [piece], token=token).result(LONG)
    peer.call("wait_counter")
    expected = np.full((8, 16, 128), CANARY, np.uint8)
    expected[dst_pages, :, 32:] = node.memory["memory"].reshape(10, 16, 192)[src_pages, :, 96:]
    assert peer.call("get", 0, expected.size) == expected.tobytes()


def test_pieces_of_several_regions_in_one_submission(node: Node, peer: PeerProcess) -> None:
    remotes = [RemoteRegion.from_bytes(peer.call("register", 4096, CANARY, name)) for name in ("a", "b")]
    pieces: list[PagePiece] = []
    for index, name in enumerate(("k", "v")):
        node.register(4096, index + 1, name)
        pieces.append(PagePiece(node.regions[name], 0, 1024, remotes[index], 512, 1024, 100, [0, 3], [1, 2]))
        pieces.append(PagePiece(node.regions[name], 0, 0, remotes[1 - index], 0, 0, 10, [0], [0]))
        pieces.append(PagePiece(node.regions[name], 0, 0, remotes[1 - index], 0, 0, 0, [0], [0]))
    token = peer.call("count", 50, 2 * (2 * 2 + 1))
    node.engine.submit(node.peer, pieces, token=token).result(LONG)
    peer.call("wait_counter")
    for index, name in enumerate(("a", "b")):
        expected = np.full(4096, CANARY, np.uint8)
        for page in (1, 2):
            expected[512 + page * 1024 : 512 + page * 1024 + 100] = index + 1
        expected[:10] = 2 - index
        assert peer.call("get", 0, 4096, name) == expected.tobytes()


def test_several_writers_of_one_counter(make_node: Callable[..., Node], make_peer: Callable[..., PeerProcess]) -> None:
    """Two processes write parts of one transfer; others' counters are not touched."""
    node = make_node()
    node.register(8 * 4096, CANARY)
    writers = [make_peer(node) for _ in range(2)]
    other = node.engine.counter(unit_bytes=4096, expected_units=1)
    with node.engine.counter(unit_bytes=4096, expected_units=8) as counter:
        for index, writer in enumerate(writers):
            writer.call("register", 4 * 4096, index + 1)
            pages = [index, index + 2, index + 4, index + 6]
            remote = node.regions["memory"].remote.to_bytes()
            writer.call("write_pages", remote, [0, 1, 2, 3], pages, page_bytes=4096, token=counter.token)
        counter.result(LONG)
    assert node.memory["memory"].reshape(4, 2, 4096).min(axis=(0, 2)).tolist() == [1, 2]
    assert other.received == 0
    other.release(quiescent=True)


def test_more_than_expected_is_an_error_and_not_at_least(node: Node, peer: PeerProcess) -> None:
    from fabric_kv.errors import ProtocolError

    remote = peer.call("register", 4096)
    node.register(4096)
    token = peer.call("count", 1024, 3)
    node.write_pages(remote, [0], [0], page_bytes=4096, token=token)
    with pytest.raises(ProtocolError, match="more units arrived than were expected"):
        peer.call("wait_counter")


def test_a_released_token_counts_for_nobody(node: Node, peer: PeerProcess) -> None:
    node.register(4096)
    peer.call("register", 4096)
    remote = node.regions["memory"].remote.to_bytes()
    first = node.engine.counter(unit_bytes=4096)
    first.release(quiescent=True)
    with node.engine.counter(unit_bytes=4096, expected_units=1) as after:
        peer.call("write_pages", remote, [0], [0], page_bytes=4096, token=first.token)
        peer.call("write_pages", remote, [0], [0], page_bytes=4096, token=after.token)
        after.result(LONG)
    assert first.received == 0
    assert node.describe()["groups"][0]["stale_imms"] == 1


def test_nothing_to_write_ends_at_once(node: Node, peer: PeerProcess) -> None:
    remote = peer.call("register", 4096, CANARY)
    node.register(4096)
    node.write_pages(remote, [], [], page_bytes=4096)
    node.write_pages(remote, [0], [0], page_bytes=0)
    node.engine.submit(node.peer, []).result(LONG)
    node.engine.write(node.peer, node.regions["memory"], 0, RemoteRegion.from_bytes(remote), 4096, 0).result(LONG)
    assert node.engine.counter(unit_bytes=1, expected_units=0).result(LONG) is None
    assert peer.call("get", 0, 4096) == bytes([CANARY]) * 4096


@pytest.mark.parametrize("provider", ["tcp", "net"], indirect=True)
def test_offsets_beyond_4_gib(node: Node, peer: PeerProcess) -> None:
    nbytes, page = 6 << 30, 1 << 16
    remote = peer.call("register", nbytes)
    node.register(nbytes)
    src_pages = [0, 65_536, 70_001, 98_303]  # 4 GiB starts at page 65536
    dst_pages = [98_303, 65_535, 65_537, 1]
    for index, src in enumerate(src_pages):
        node.put(src * page, stamp(10 + index, page).tobytes())
    token = peer.call("count", 4096, 4 * page // 4096)
    node.write_pages(remote, src_pages, dst_pages, page_bytes=page, token=token)
    peer.call("wait_counter")
    for index, dst in enumerate(dst_pages):
        assert peer.call("get", dst * page, page) == stamp(10 + index, page).tobytes()
    # What would be hit if offsets were cut to 32 bits.
    for dst in (98_303 - 65_536, 0):
        assert peer.call("get", dst * page, page) == bytes(page)


@pytest.mark.parametrize("provider", ["tcp", "net"], indirect=True)
def test_ipv6(provider: Any) -> None:
    node = Node()
    address = node.open(provider.name, ["::1"])
    try:
        assert node.describe()["groups"][0]["rails"][0]["source"] == "[::1]"
        with PeerProcess() as peer:  # with an address that the fixtures do not know
            node.add_peer(peer.call("open", provider.name, ["::1"]))
            peer.call("add_peer", address)
            remote = peer.call("register", 4096)
            node.register(4096, 6)
            token = peer.call("count", 4096, 1)
            node.write_pages(remote, [0], [0], page_bytes=4096, token=token)
            peer.call("wait_counter")
            assert peer.call("get", 0, 4096) == b"\x06" * 4096
    finally:
        node.close()


def test_an_engine_writes_to_itself(node: Node) -> None:
    node.add_peer(node.engine.address)
    remote = node.register(8192)
    node.put(0, stamp(5, 4096).tobytes())
    with node.engine.counter(unit_bytes=4096, expected_units=1) as counter:
        node.write_pages(remote, [0], [1], page_bytes=4096, token=counter.token)
        counter.result(LONG)
    assert node.get(4096, 4096) == stamp(5, 4096).tobytes()
