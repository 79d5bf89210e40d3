"""An interface that is set down and up, and a device that is removed, while RDMA writes go over them.

The device is made anew afterwards, so no process may have it open, and libfabric opens all: this needs a pytest process
of its own, which has not used libfabric.

>>> scripts/rdma-lab run --nic veth -- .venv/bin/python -m pytest tests/lab/test_interface.py --require rdma
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from ipaddress import IPv6Address
from pathlib import Path

import pytest

from ..integration.engine_peer import PeerProcess, stamp, wait_for
from ..integration.fabrics import LONG, rdma_devices

DEVICES = rdma_devices()
pytestmark = [
    pytest.mark.rdma,
    pytest.mark.skipif(len(DEVICES) < 2, reason="two RDMA devices are needed"),
    pytest.mark.skipif("RDMA_LAB" not in os.environ, reason="sets NICs down: only in the guest of scripts/rdma-lab"),
]
MIB = 1 << 20
WATCHFUL = {"heartbeat_interval_s": 0.5, "heartbeat_misses": 10, "connect_s": 40.0}
INFINIBAND = Path("/sys/class/infiniband")


def command(*argv: str) -> None:
    subprocess.run(argv, check=True, timeout=LONG)


def netdev(device: str) -> str:
    return (INFINIBAND / device / "ports/1/gid_attrs/ndevs/0").read_text().strip()


def address(device: str, kind: str) -> str:
    """The lab's."""
    number = device.removeprefix("rxe")
    return f"10.77.{number}.1" if kind == "IPv4" else f"fd77:{number}::1"


def gids(device: str) -> set[IPv6Address]:
    """Under which it can be reached; they follow the interface's addresses, a little later."""
    return {IPv6Address(path.read_text().strip()) for path in (INFINIBAND / device / "ports/1/gids").iterdir()}


def is_reachable(device: str) -> bool:
    four, six = address(device, "IPv4"), address(device, "IPv6")
    return device in rdma_devices() and {IPv6Address(f"::ffff:{four}"), IPv6Address(six)} <= gids(device)


def set_up(nic: str) -> None:
    """With the addresses, routes and neighbours that the kernel forgets with an interface that is down."""
    command("ip", "link", "set", nic, "up")
    command("ip", "-batch", f"/run/lab/{nic}.ipv4")
    command("ip", "-6", "-batch", f"/run/lab/{nic}.ipv6")


def make_anew(device: str, nic: str) -> None:
    command("rdma", "link", "delete", device)
    command("rdma", "link", "add", device, "type", "rxe", "netdev", nic)


@contextmanager
def two_engines(addresses: list[str]) -> Iterator[tuple[list[PeerProcess], list[bytes]]]:
    """In a process each, on these NICs, which have heard each other; and their memory."""
    with ExitStack() as stack:
        peers = [PeerProcess() for _ in addresses]
        for peer in peers:
            stack.callback(peer.close)
        names = [peer.call("open", "verbs", [nic], **WATCHFUL) for peer, nic in zip(peers, addresses, strict=True)]
        for peer, name in zip(peers, reversed(names), strict=True):
            peer.call("add_peer", name, True)
        for peer in peers:
            peer.call("send", b"hello")
        for peer in peers:
            peer.call("wait_messages", 1)
        yield peers, [peer.call("register", 4 * MIB) for peer in peers]


@pytest.mark.parametrize("kind", ["IPv4", "IPv6"])
def test_an_interface_that_is_set_down_under_load_and_up_again(kind: str) -> None:
    """Both ends lose each other, their writes end, and new engines reach each other afterwards."""
    here, there = DEVICES[0], DEVICES[-1]
    addresses, nic = [address(device, kind) for device in (here, there)], netdev(there)
    with two_engines(addresses) as (peers, memory):
        for peer, target in zip(peers, reversed(memory), strict=True):
            peer.call("flood", target, 4 * MIB, 16)
        command("ip", "link", "set", nic, "down")
        try:
            for peer in peers:
                assert peer.call("wait_lost")
            for peer in peers:
                peer.call("close")
            ends = [peer.call("ends") for peer in peers]
            assert {*ends[0], *ends[1]} <= {"done", "TransferError", "ClosedError"}
            assert set(ends[0]) != {"done"}
            assert set(ends[1]) != {"done"}
        finally:
            set_up(nic)
    # Until then no connection comes up on it: docs/lab.md.
    make_anew(there, nic)
    check_reachable(there, addresses)


@pytest.mark.parametrize("whose", ["the_writer's", "the_target's"])
def test_a_device_that_is_removed_under_load(whose: str) -> None:
    """Both ends lose each other and their writes end; the device is gone when they are, and can be made anew.

    Writes go one way: under those of both sides rxm may crash (docs/providers.md).
    """
    here, there = DEVICES[0], DEVICES[-1]
    removed = here if whose == "the_writer's" else there
    addresses, nic = [address(device, "IPv4") for device in (here, there)], netdev(removed)
    with two_engines(addresses) as (peers, memory):
        peers[0].call("flood", memory[1], 4 * MIB, 16)
        removal = subprocess.Popen(["rdma", "link", "delete", removed])
        for peer in peers:
            assert peer.call("wait_lost")
        for peer in peers:
            peer.call("close")
        ends = set(peers[0].call("ends"))
        assert ends <= {"done", "TransferError", "ClosedError"}
        assert ends != {"done"}
        assert removal.poll() is None  # it waits for whoever has the device open
    assert removal.wait(LONG) == 0
    command("rdma", "link", "add", removed, "type", "rxe", "netdev", nic)
    check_reachable(removed, addresses)


def check_reachable(device: str, addresses: list[str]) -> None:
    """A device that was made anew carries pages again."""
    assert wait_for(lambda: is_reachable(device))
    with two_engines(addresses) as (peers, memory):
        peers[0].call("put", 0, stamp(1, 4096).tobytes())
        token = peers[1].call("count", 4096, 1)
        peers[0].call("write_pages", memory[1], [0], [0], page_bytes=4096, token=token)
        peers[1].call("wait_counter")
        assert peers[1].call("get", 0, 4096) == stamp(1, 4096).tobytes()
