"""Engines with several RDMA devices that close while writes are under way, between processes: nobody crashes.

scripts/rdma-lab run --nic veth --nics 3 -- python -m pytest tests/lab/test_closing.py
"""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from ..integration.engine_peer import PeerProcess
from ..integration.fabrics import patient, rdma_devices

DEVICES = rdma_devices()
MIB = 1 << 20
LARGE = 4 * MIB
WAYS = ["there", "back", "both"]
WATCHFUL = patient(heartbeat_interval_s=0.1, heartbeat_misses=10, connect_s=2.0)

pytestmark = [
    pytest.mark.rdma,
    pytest.mark.skipif(len(DEVICES) < 2, reason="several RDMA devices are needed: scripts/rdma-lab run --nics 3"),
]


def close_under_writes(peers: list[PeerProcess], ways: str, known: bool, first: int) -> list[set[str]]:
    """A new engine in each process; writes of 16 MiB, then one closes after the other. How the writes ended."""
    addresses = [peer.call("open", "verbs", DEVICES, **WATCHFUL) for peer in peers]
    for peer, other in zip(peers, reversed(addresses), strict=True):
        peer.call("add_peer", other, True)
    memory = [peer.call("register", LARGE) for peer in peers]
    if known:  # else connections come up under the writes
        for peer in peers:
            peer.call("send", b"hello")
        for peer in peers:
            peer.call("wait_messages", 1)
    writers = {"there": [0], "back": [1], "both": [0, 1]}[ways]
    for k in writers:
        peers[k].call("flood", memory[1 - k], LARGE, 4)
    peers[first].call("close")
    peers[1 - first].call("close")
    ends = [set(peer.call("ends")) for peer in peers]
    for peer in peers:
        peer.call("reset")
    return ends


@pytest.mark.parametrize("known", [True, False], ids=["connected", "connecting"])
@pytest.mark.parametrize("ways", WAYS)
def test_whoever_closes_under_writes_harms_nobody(ways: str, known: bool) -> None:
    first = (WAYS.index(ways) + known) % 2  # each way, either end
    with ExitStack() as stack:
        peers = [stack.enter_context(PeerProcess()) for _ in range(2)]
        for ends in close_under_writes(peers, ways, known, first):
            assert ends <= {"done", "TransferError", "ClosedError"}
