"""A device that is removed while engines use it.

Linux lets it go once no process has it open, and libfabric opens all devices that it finds and keeps them: so this
needs a pytest process of its own, which has not used libfabric.

>>> scripts/rdma-lab run --nic veth -- .venv/bin/python -m pytest tests/lab/test_removal.py --require rdma
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from ..integration.engine_peer import PeerProcess, wait_for
from ..integration.fabrics import LONG, patient, rdma_devices

DEVICES = rdma_devices()
pytestmark = [
    pytest.mark.rdma,
    pytest.mark.skipif(len(DEVICES) < 2, reason="two RDMA devices are needed"),
    pytest.mark.skipif("RDMA_LAB" not in os.environ, reason="removes a device: only in the guest of scripts/rdma-lab"),
]
MIB = 1 << 20
WATCHFUL = patient(heartbeat_interval_s=0.05) | {"heartbeat_misses": 10}


def has_libfabric() -> bool:
    return "libfabric" in Path("/proc/self/maps").read_text()


def test_a_device_that_is_removed_under_load() -> None:
    """The engines' writes end, they close, and the device is gone soon after their processes."""
    if has_libfabric():
        pytest.skip("this process has used libfabric, which keeps the device open: run this file by itself")
    here, there = DEVICES[0], DEVICES[-1]
    with PeerProcess() as first, PeerProcess() as second:
        addresses = [peer.call("open", "verbs", [nic], **WATCHFUL) for peer, nic in ((first, here), (second, there))]
        for peer, address in zip((first, second), reversed(addresses), strict=True):
            peer.call("add_peer", address, True)
        memory = [peer.call("register", 4 * MIB) for peer in (first, second)]
        first.call("flood", memory[1], 4 * MIB, 16)
        second.call("flood", memory[0], 4 * MIB, 16)
        removal = subprocess.Popen(["rdma", "link", "delete", there])
        try:
            for peer in (first, second):
                peer.call("close")
                ends = peer.call("ends")
                assert set(ends) <= {"done", "TransferError", "ClosedError"}, ends
            first.close()
            second.close()
            assert removal.wait(LONG) == 0
        finally:
            removal.kill()
    assert wait_for(lambda: there not in rdma_devices())
