"""Discovery on a machine with RDMA devices, hardware or Soft-RoCE: place, offers, and that the groups open."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fabric_kv.topology import Topology, discover

from ..integration.fabrics import LONG

DEVICES = Path("/sys/class/infiniband")
pytestmark = [
    pytest.mark.rdma,
    pytest.mark.skipif(not DEVICES.is_dir() or not list(DEVICES.iterdir()), reason="no RDMA device under /sys"),
    pytest.mark.skipif(sys.version_info < (3, 12), reason="pyhwloc needs Python 3.12"),
]


@pytest.fixture(scope="module")
def topology() -> Topology:
    return discover(environ={})


def test_every_device_is_used_or_left_out_with_a_reason(topology: Topology) -> None:
    used = {nic.name for group in topology.groups for nic in group.nics}
    out = {left.nic.name for left in topology.left_out}
    assert not used & out
    assert {device.name for device in DEVICES.iterdir()} == used | out


def test_nics_are_where_the_kernel_says(topology: Topology) -> None:
    for group in topology.groups:
        for nic in group.nics:
            assert nic.domain
            assert nic.name
            folder = DEVICES / nic.name
            if not (folder / "device").exists():
                netdev = (folder / "ports/1/gid_attrs/ndevs/0").read_text().strip()
                folder = Path("/sys/class/net") / netdev
            if not (folder / "device/numa_node").exists():
                continue
            assert nic.pci in (folder / "device").resolve().parts
            node = int((folder / "device/numa_node").read_text())
            assert node == nic.numa or node == -1


@pytest.mark.skipif("RDMA_LAB" not in os.environ, reason="knows the place of the NICs of scripts/rdma-lab only")
def test_the_labs_nics_are_spread_over_its_nodes(topology: Topology) -> None:
    """``--nics N --numa M`` gives each node its share of the PCI devices, in order."""
    nodes = sorted(int(path.name.removeprefix("node")) for path in Path("/sys/devices/system/node").glob("node[0-9]*"))
    devices = sorted(DEVICES.iterdir())
    expected = {device.name: nodes[i * len(nodes) // len(devices)] for i, device in enumerate(devices)}
    if not (Path("/sys/class/net/nic0") / "device").exists():
        pytest.skip("virtual NICs have no place: scripts/rdma-lab run without --nic veth")
    found = [nic for group in topology.groups for nic in group.nics] + [left.nic for left in topology.left_out]
    assert {nic.name: nic.numa for nic in found} == expected
    shown = subprocess.run(
        [sys.executable, "-m", "fabric_kv.tools.topo"], capture_output=True, text=True, timeout=LONG, check=True
    ).stdout
    assert all(name in shown for name in expected)


def test_groups_open(topology: Topology) -> None:
    program = (
        "from fabric_kv import Engine\n"
        "with Engine.from_topology() as engine:\n"
        "    print(*[rail['domain'] for group in engine.describe()['groups'] for rail in group['rails']])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LONG)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [nic.domain for group in topology.groups for nic in group.nics]
