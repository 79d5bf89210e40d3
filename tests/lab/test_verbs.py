"""The engine on RDMA devices, hardware or Soft-RoCE: addresses, bursts, lost packets, and what only a NIC stack shows.

>>> scripts/rdma-lab run --nic veth -- .venv/bin/python -m pytest tests/lab/test_verbs.py --require rdma
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fabric_kv import Engine, RemoteRegion, _native
from fabric_kv.errors import ClosedError, TransferError
from fabric_kv.transfers import Transfer

from ..integration.engine_peer import LONG, Node, PeerProcess, stamp, wait_for
from ..integration.fabrics import rdma_devices

DEVICES = rdma_devices()
pytestmark = [pytest.mark.rdma, pytest.mark.skipif(not DEVICES, reason="no RDMA device with a port that is up")]
in_the_lab = pytest.mark.skipif(
    "RDMA_LAB" not in os.environ, reason="takes devices down: only in the guest of scripts/rdma-lab"
)
MIB = 1 << 20
MOST_UNITS = 1023  # that one immediate can carry: a write of so many cannot share one
WATCHFUL = {"heartbeat_interval_s": 0.5, "heartbeat_misses": 10, "connect_s": 20.0}
HERE, THERE = (DEVICES[0], DEVICES[-1]) if DEVICES else ("", "")


def counters(device: str) -> dict[str, int]:
    """What the device has counted: names are the driver's."""
    folder = Path("/sys/class/infiniband") / device / "ports/1/hw_counters"
    return {path.name: int(path.read_text()) for path in folder.iterdir() if path.name != "lifespan"}


def netdev(device: str) -> str:
    return (Path("/sys/class/infiniband") / device / "ports/1/gid_attrs/ndevs/0").read_text().strip()


def command(*argv: str) -> None:
    subprocess.run(argv, check=True, timeout=LONG)


@pytest.fixture
def pair() -> Iterator[Callable[..., tuple[Node, PeerProcess]]]:
    """Make an engine here and one in another process, on another device where there is one."""
    made: list[Node | PeerProcess] = []

    def make(here: str = HERE, there: str = THERE, **options: Any) -> tuple[Node, PeerProcess]:
        node, peer = Node(), PeerProcess()
        node.open("verbs", [here], **options)
        made.extend((node, peer))
        node.add_peer(peer.call("open", "verbs", [there], **options), True)
        peer.call("add_peer", node.engine.address, True)
        peer.call("send", b"hello")  # who has been heard is lost sooner
        node.wait_messages(1)
        node.send(b"hello")
        return node, peer

    yield make
    for item in made:
        item.close()


def sources(device: str) -> list[str]:
    """Addresses by which the device can be asked for, without those of a link."""
    found = {offer["source"].strip("[]") for offer in _native.list_offers("verbs") if offer["domain"] == device}
    return sorted(address for address in found if address and not address.startswith("fe80"))


def test_every_address_opens_its_own_device() -> None:
    for device in {HERE, THERE}:
        assert sources(device)
        for address in sources(device):
            with Engine("verbs", nics=[address]) as engine:
                (rail,) = engine.describe()["groups"][0]["rails"]
                assert (rail["domain"], rail["source"].strip("[]")) == (device, address)
                assert rail["provider"] == "verbs;ofi_rxm"


@pytest.mark.parametrize("kind", ["IPv4", "IPv6"])
def test_pages_arrive_by_either_kind_of_address(pair: Callable[..., tuple[Node, PeerProcess]], kind: str) -> None:
    by_kind = [[a for a in sources(device) if (":" in a) == (kind == "IPv6")] for device in (HERE, THERE)]
    if not all(by_kind):
        pytest.skip(f"a device has no {kind} address")
    node, peer = pair(by_kind[0][0], by_kind[1][0])
    remote = peer.call("register", MIB)
    node.register(MIB)
    node.put(0, stamp(3, MIB).tobytes())
    token = peer.call("count", 4096, 256)
    node.write_pages(remote, list(range(256)), list(range(256)), page_bytes=4096, token=token)
    peer.call("wait_counter")
    assert peer.call("get", 0, MIB) == stamp(3, MIB).tobytes()


def test_two_devices_are_two_rails() -> None:
    if HERE == THERE:
        pytest.skip("there is one RDMA device only")
    with Engine("verbs", nics=[HERE, THERE]) as a, Engine("verbs", nics=[HERE, THERE]) as b:
        source, target = stamp(5, 4 * MIB).copy(), np.zeros(4 * MIB, np.uint8)
        src, dst = a.register(source), b.register(target)
        peer = a.add_peer(b.address)
        pages = np.arange(64)
        shares: list[int] = []
        for _ in range(20):  # a rail takes part as soon as its connection stands
            target[:] = 0
            counter = b.counter(unit_bytes=64 << 10, expected_units=64)
            a.write_pages(peer, src, dst.remote, pages, pages[::-1], page_bytes=64 << 10, token=counter.token)
            counter.result(LONG)
            counter.release()
            assert (target.reshape(64, -1)[::-1] == source.reshape(64, -1)).all()
            shares = [rail["ops"] for rail in a.describe()["groups"][0]["rails"]]
            if all(shares):
                break
        assert all(shares), shares


@pytest.mark.parametrize("alone", [False, True], ids=["in_batches", "an_immediate_each"])
def test_ten_thousand_pages_at_once_find_their_receives(
    pair: Callable[..., tuple[Node, PeerProcess]], alone: bool
) -> None:
    """Receives are replenished in time: hardly any write has to be sent again for want of one."""
    count, page_bytes = 10_000, MOST_UNITS if alone else 64
    unit = 1 if alone else page_bytes
    node, peer = pair()
    remote = peer.call("register", count * page_bytes)
    node.register(count * page_bytes)
    node.put(0, stamp(11, count * page_bytes).tobytes())
    order = np.random.default_rng(1).permutation(count)
    before = {device: counters(device) for device in {HERE, THERE}}
    token = peer.call("count", unit, count * page_bytes // unit)
    node.write_pages(remote, order.tolist(), order[::-1].tolist(), page_bytes=page_bytes, token=token)
    assert peer.call("wait_counter") == count * page_bytes // unit
    arrived = np.frombuffer(peer.call("get", 0, count * page_bytes), np.uint8).reshape(count, page_bytes)
    assert (arrived[order[::-1]] == stamp(11, count * page_bytes).reshape(count, page_bytes)[order]).all()
    (rail,) = node.describe()["groups"][0]["rails"]
    (theirs,) = peer.call("describe")["groups"][0]["rails"]
    grown = {
        f"{device} {name}": value - before[device][name]
        for device in before
        for name, value in counters(device).items()
        if value != before[device][name]
    }
    print({name: rail[name] for name in ("ops", "completions", "again", "errors")}, {"imms": theirs["imms"]}, grown)
    if alone:
        assert rail["ops"] >= theirs["imms"] >= count // 2
    else:
        # Sixteen writes an immediate, fewer where a turn ended or there was no room for a whole batch.
        assert 1 <= theirs["imms"] <= rail["ops"] // 4
    assert sum(value for name, value in grown.items() if "rnr" in name) < count // 100


def test_a_receiver_that_is_stopped_holds_up_a_burst_and_loses_nothing(
    pair: Callable[..., tuple[Node, PeerProcess]],
) -> None:
    """More immediates than there are receives: the NIC sends again until the process goes on."""
    count, nbytes = 6000, 6000 * MOST_UNITS
    node, peer = pair()
    remote = peer.call("register", nbytes)
    node.register(nbytes)
    node.put(0, stamp(12, nbytes).tobytes())
    token = peer.call("count", 1, nbytes)
    pages = np.random.default_rng(2).permutation(count)
    peer.signal(signal.SIGSTOP)
    region = node.regions["memory"]
    transfer = node.engine.write_pages(
        node.peer, region, RemoteRegion.from_bytes(remote), pages, pages, page_bytes=MOST_UNITS, token=token
    )
    with pytest.raises(TimeoutError):
        transfer.result(1.0)
    peer.signal(signal.SIGCONT)
    transfer.result(LONG)
    assert peer.call("wait_counter") == nbytes
    assert peer.call("get", 0, nbytes) == stamp(12, nbytes).tobytes()


@in_the_lab
def test_lost_packets_are_sent_again(pair: Callable[..., tuple[Node, PeerProcess]]) -> None:
    if shutil.which("tc") is None:
        pytest.skip("there is no tc to lose packets with")
    node, peer = pair()
    remote = peer.call("register", MIB)
    node.register(MIB)
    node.put(0, stamp(4, MIB).tobytes())
    token = peer.call("count", 4096, 256)
    command("tc", "qdisc", "add", "dev", netdev(HERE), "root", "netem", "loss", "2%", "limit", "100000")
    try:
        node.write_pages(remote, list(range(256)), list(range(256)), page_bytes=4096, token=token)
        peer.call("wait_counter")
    finally:
        command("tc", "qdisc", "del", "dev", netdev(HERE), "root")
    assert peer.call("get", 0, MIB) == stamp(4, MIB).tobytes()


def flood(node: Node, remote: RemoteRegion, count: int = 16) -> list[Transfer]:
    region = node.regions["memory"]
    return [node.engine.write(node.peer, region, 0, remote, 0, 4 * MIB) for _ in range(count)]


def check_ends(transfers: list[Transfer], bound_s: float = LONG) -> list[BaseException | None]:
    """All end within the bound, failed ones with a typed error."""
    deadline = time.monotonic() + bound_s
    ends = [transfer.exception(max(deadline - time.monotonic(), 0.0)) for transfer in transfers]
    assert all(isinstance(end, None | TransferError | ClosedError) for end in ends)
    return ends


def writable_again(make: Callable[..., tuple[Node, PeerProcess]]) -> None:
    node, peer = make()
    remote = peer.call("register", 4096)
    node.register(4096, fill=7)
    token = peer.call("count", 4096, 1)
    node.write_pages(remote, [0], [0], page_bytes=4096, token=token)
    peer.call("wait_counter")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_that_is_gone_fails_the_writes_to_it(pair: Callable[..., tuple[Node, PeerProcess]], number: int) -> None:
    node, peer = pair(**WATCHFUL)
    remote = RemoteRegion.from_bytes(peer.call("register", 4 * MIB))
    node.register(4 * MIB)
    transfers = flood(node, remote)
    peer.signal(number)
    transfers += flood(node, remote)
    ((epoch, _reason),) = node.wait_lost()
    assert epoch == node.peer.epoch
    node.close()
    ends = check_ends(transfers)
    assert any(ends) or number == signal.SIGSTOP, "the NIC of a stopped process goes on taking writes"
    writable_again(pair)


@in_the_lab
def test_a_cable_that_is_pulled_and_put_back(pair: Callable[..., tuple[Node, PeerProcess]]) -> None:
    port = netdev(THERE).replace("nic", "port")
    if not (Path("/sys/class/net") / port).exists():
        pytest.skip("the lab's NICs have no cables: scripts/rdma-lab run --nic veth")
    node, peer = pair(**WATCHFUL)
    remote = RemoteRegion.from_bytes(peer.call("register", 4 * MIB))
    node.register(4 * MIB)
    transfers = flood(node, remote)
    command("ip", "link", "set", port, "down")
    try:
        transfers += flood(node, remote)
        assert [epoch for epoch, _ in node.wait_lost()] == [node.peer.epoch]
        assert peer.call("wait_lost")
        node.close()
        assert any(check_ends(transfers))
        peer.close()
    finally:
        command("ip", "link", "set", port, "up")
    assert wait_for(lambda: THERE in rdma_devices())
    writable_again(pair)
