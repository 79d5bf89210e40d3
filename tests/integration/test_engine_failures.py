"""A peer that is killed or stopped in the middle: told within the bound, nothing hangs, and the rest goes on."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from fabric_kv.errors import ClosedError, TransferError
from fabric_kv.regions import RemoteRegion
from fabric_kv.transfers import Transfer

from .engine_peer import LONG, Node, PeerProcess, stamp
from .fabrics import SLOWER, patient, with_rdma

MIB = 1 << 20
LARGE = 32 * MIB // SLOWER
# Lost after half a second of silence; before the first sign of life after two.
WATCHFUL = patient(heartbeat_interval_s=0.05, heartbeat_misses=10, connect_s=2.0)


def rail_busy_ns(node: Node) -> int:
    return int(node.engine.describe()["groups"][0]["rails"][0]["busy_ns"])


@pytest.fixture
def pair(make_node: Callable[..., Node], make_peer: Callable[..., PeerProcess]) -> tuple[Node, PeerProcess]:
    """Two engines that watch each other, and have exchanged something."""
    node = make_node(**WATCHFUL)
    peer = make_peer(node, monitor=True, **WATCHFUL)
    peer.call("send", b"hello")
    node.wait_messages(1)
    node.send(b"hello")
    return node, peer


def write_much(node: Node, remote: RemoteRegion, count: int = 8) -> list[Transfer]:
    region = node.regions["memory"]
    return [node.engine.write(node.peer, region, 0, remote, 0, LARGE) for _ in range(count)]


def close_within_bounds(node: Node) -> float:
    """close() gives posted operations a second; it must not take for ever."""
    thread = threading.Thread(target=node.close)
    began = time.monotonic()
    thread.start()
    thread.join(LONG)
    assert not thread.is_alive()
    return time.monotonic() - began


def check_ends(transfers: list[Transfer]) -> None:
    for transfer in transfers:
        assert isinstance(transfer.exception(0), None | TransferError | ClosedError)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_that_is_gone_in_the_middle_of_our_writes(pair: tuple[Node, PeerProcess], number: int) -> None:
    node, peer = pair
    remote = RemoteRegion.from_bytes(peer.call("register", LARGE))
    node.register(LARGE)
    transfers = write_much(node, remote)
    peer.signal(number)
    transfers += write_much(node, remote)
    ((epoch, reason),) = node.wait_lost()
    assert epoch == node.peer.epoch
    assert "nothing was heard for" in reason
    assert close_within_bounds(node) < 10
    check_ends(transfers)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_that_is_gone_in_the_middle_of_its_writes(pair: tuple[Node, PeerProcess], number: int) -> None:
    node, peer = pair
    here = node.register(LARGE)
    peer.call("register", LARGE)
    counter = node.engine.counter(unit_bytes=MIB, expected_units=1 << 40)
    peer.call("flood", here, LARGE, 64, counter.token)
    deadline = time.monotonic() + LONG
    while counter.received == 0 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert counter.received
    peer.signal(number)
    node.wait_lost()
    assert not counter.done(), "what did not arrive is not counted"
    counter.release()
    assert node.describe()["groups"][0]["counters_poisoned"] == 1
    assert close_within_bounds(node) < 10


def test_a_peer_that_is_stopped_and_goes_on_loses_nothing(
    make_node: Callable[..., Node], make_peer: Callable[..., PeerProcess]
) -> None:
    node = make_node(stall_s=0.1)
    held_up: list[list[Transfer]] = []
    node.engine.on_held_up(lambda transfers, _: held_up.append(transfers))
    peer = make_peer(node)
    remote = RemoteRegion.from_bytes(peer.call("register", LARGE))
    node.register(LARGE)
    node.put(0, stamp(7, LARGE).tobytes())
    token = peer.call("count", 1 << 16, 4 * LARGE >> 16)
    peer.call("wait_transfers")
    # A stopped peer answers no connection: what waits for one is not in flight yet.
    node.engine.connect_rails(node.peer, remote).result(LONG)
    peer.signal(signal.SIGSTOP)
    transfers = [node.engine.write(node.peer, node.regions["memory"], 0, remote, 0, LARGE, token=token) for _ in "1234"]
    with pytest.raises(TimeoutError):
        transfers[-1].result(0.1)
    # What is in flight counts as such while it is, and not only once it has ended.
    busy_ns = rail_busy_ns(node)
    deadline = time.monotonic() + LONG
    while rail_busy_ns(node) <= busy_ns or not held_up:
        assert time.monotonic() < deadline
    assert set(held_up[-1]) <= set(transfers)
    peer.signal(signal.SIGCONT)
    for transfer in transfers:
        transfer.result(LONG)
    peer.call("wait_counter")
    assert peer.call("get", 0, LARGE) == stamp(7, LARGE).tobytes()


@pytest.mark.parametrize("provider", with_rdma("tcp", "net"), indirect=True)  # shm completes in order, over all peers
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_others_do_not_notice(
    make_node: Callable[..., Node], make_peer: Callable[..., PeerProcess], number: int
) -> None:
    """One peer is gone with all it can take of messages and writes in flight; another is served meanwhile."""
    node = make_node(**WATCHFUL)
    victim = make_peer(node, monitor=True, **WATCHFUL)
    lost_peer = node.peer
    lost_remote = RemoteRegion.from_bytes(victim.call("register", LARGE))
    other = make_peer(node, monitor=True, **WATCHFUL)
    remote = other.call("register", MIB)
    other.call("echo")
    node.register(LARGE)
    region = node.regions["memory"]
    victim.signal(number)
    for _ in range(40):
        node.engine.write(lost_peer, region, 0, lost_remote, 0, LARGE)
        node.engine.send(lost_peer, bytes(MIB))
    for round_ in range(20):
        token = other.call("count", 4096, 256)
        node.put(0, stamp(round_, MIB).tobytes())
        node.write_pages(remote, [0], [0], page_bytes=MIB, token=token)
        other.call("wait_counter")
        assert other.call("get", 0, MIB) == stamp(round_, MIB).tobytes()
        node.engine.send(node.peer, b"ping")
    assert [epoch for epoch, _ in node.wait_lost()] == [lost_peer.epoch]
    assert len(node.wait_messages(20)) == 20
    assert close_within_bounds(node) < 10


def test_a_restarted_peer_is_another_one(make_node: Callable[..., Node], make_peer: Callable[..., PeerProcess]) -> None:
    """Memory of a former life is refused; the new one is served at once, many times over."""
    node = make_node()
    node.register(4096, 1)
    old: RemoteRegion | None = None
    for _ in range(5):
        peer = make_peer(node)
        remote = peer.call("register", 4096)
        if old is not None:
            from fabric_kv.errors import ConfigError

            with pytest.raises(ConfigError, match="earlier life"):
                node.engine.write_pages(node.peer, node.regions["memory"], old, [0], [0], page_bytes=4096)
        token = peer.call("count", 4096, 1)
        node.write_pages(remote, [0], [0], page_bytes=4096, token=token)
        peer.call("wait_counter")
        old = RemoteRegion.from_bytes(remote)
        node.engine.remove_peer(node.peer)
        peer.kill()


def test_close_with_work_in_flight_gives_the_memory_back(node: Node, peer: PeerProcess) -> None:
    """After close() nothing of ours is read any more: what arrives is what was there before."""
    remote = RemoteRegion.from_bytes(peer.call("register", LARGE))
    node.register(LARGE, 1)
    transfers = write_much(node, remote)
    node.close()
    node.fill(2)
    check_ends(transfers)
    # Whatever is still on its way has been read before.
    for _ in range(20):
        assert b"\x02" not in peer.call("get", 0, LARGE)


def test_a_peer_that_closes_leaves_us_able_to_close(node: Node, peer: PeerProcess) -> None:
    remote = RemoteRegion.from_bytes(peer.call("register", LARGE))
    node.register(LARGE)
    transfers = write_much(node, remote)
    peer.call("close")
    transfers += write_much(node, remote)
    assert close_within_bounds(node) < 10
    check_ends(transfers)


def test_both_close_at_once(node: Node, peer: PeerProcess) -> None:
    remote = RemoteRegion.from_bytes(peer.call("register", LARGE))
    here = node.register(LARGE)
    transfers = write_much(node, remote)
    peer.call("flood", here, LARGE, 8)
    peer.start("close")
    assert close_within_bounds(node) < 10
    peer.finish()
    check_ends(transfers)


def test_a_key_of_a_closed_region_writes_nothing(provider: Any, node: Node, peer: PeerProcess) -> None:
    if provider.name == "shm":
        pytest.skip("shm addresses memory directly: a closed region's key still works")
    remote = RemoteRegion.from_bytes(peer.call("register", 4096))
    node.register(4096, 9)
    peer.call("deregister")
    transfer = node.engine.write(node.peer, node.regions["memory"], 0, remote, 0, 4096)
    with contextlib.suppress(TransferError, TimeoutError):
        transfer.result(1.0)
    assert peer.call("get", 0, 4096) == bytes(4096)
