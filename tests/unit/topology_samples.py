"""Recorded machines and their right answers, a small /sys made up in a folder, and machines made up in memory.

>>> for sample in HWLOC: sample.path(), sample.expected
>>> sys_folder(tmp_path, [Pci("0000:11:00.0", "10de:2330", "0302", numa=1)])
"""

from __future__ import annotations

import json
import os
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fabric_kv.topology import Machine, read_machine

REPOSITORY = Path(__file__).parents[2]
COPIED = REPOSITORY / "tests/data/topologies"
# Recordings whose licence does not let us copy them; FABRIC_KV_TOPOLOGIES names the folder that has them.
ELSEWHERE = Path(os.environ.get("FABRIC_KV_TOPOLOGIES") or REPOSITORY.parent / "shared/data/topologies")
NOT_COPIED = {
    "hwloc/juwels-booster-4a100.xml": "QPL-1.0",
    "hwloc-from-v1/deep-dam-v100-extoll-roce25.xml": "QPL-1.0",
    "hwloc-from-v1/jureca-dc-4a100-2ports-down.xml": "QPL-1.0",
    "hwloc-from-v1/jusuf-v100-eth-and-ib-ports.xml": "QPL-1.0",
    "hwloc-from-v1/juwels-4v100-2nic.xml": "QPL-1.0",
    "hwloc-from-v1/meluxina-4a100-2nic-1down.xml": "QPL-1.0",
    "hwloc-from-v1/sierra-power9-gpu-numa.xml": "LGPL-3.0",
    "hwloc-derived/h200-cx7x4-baremetal.xml": "no licence stated",
    "hwloc-derived/h200-cx7x4-vm.xml": "no licence stated",
    "hwloc-derived/h200-cx7x8-vm-flat-nonuma.xml": "no licence stated",
    "hwloc-derived/hygon-dcu-cx7-2port.xml": "no licence stated",
    "hwloc-derived/ibm-gx3d-h100-vf.xml": "no licence stated",
    "hwloc-derived/mi355x-thor2.xml": "no licence stated",
    "nccl/ibm-gx3d-160x1792x8h100.xml": "no licence stated",
    "nccl/rccl-issue1185-hygon-dcu.xml": "no licence stated",
    "nccl/rccl-mi355x-thor2.xml": "no licence stated",
}

needs_hwloc = pytest.mark.skipif(
    sys.version_info < (3, 12) or find_spec("pyhwloc") is None, reason="pyhwloc is missing, or Python older than 3.12"
)


class Sample(NamedTuple):
    name: str

    def path(self) -> Path:
        """The file; skips the test if it is not here."""
        if self.name not in NOT_COPIED:
            return COPIED / self.name
        path = ELSEWHERE / self.name
        if not path.is_file():
            pytest.skip(f"{self.name} may not be copied ({NOT_COPIED[self.name]}), and {ELSEWHERE} does not have it")
        return path

    def machine(self) -> Machine:
        return _machine(self.path())

    def expected(self) -> dict[str, Any]:
        self.path()
        folder = ELSEWHERE if self.name in NOT_COPIED else COPIED
        kind = "expected-nccl.json" if self.name.startswith("nccl/") else "expected.json"
        answers: dict[str, dict[str, Any]] = json.loads((folder / kind).read_text())
        return answers[self.name]


@cache
def _machine(path: Path) -> Machine:
    return read_machine(path)


def _samples(pattern: str) -> list[Sample]:
    copied = [path.relative_to(COPIED).as_posix() for path in COPIED.glob(pattern)]
    return [Sample(name) for name in sorted({*copied, *(name for name in NOT_COPIED if Path(name).match(pattern))})]


HWLOC = _samples("hwloc*/*.xml")
NCCL = _samples("nccl/*.xml")


class Pci(NamedTuple):
    """A PCI device: ``path`` are the bridges above it, ``rdma`` and ``net`` the kernel's names for what it is."""

    address: str
    ids: str
    pci_class: str
    numa: int = -1
    path: tuple[str, ...] = ()
    rdma: str = ""
    net: str = ""
    state: str = "4: ACTIVE"
    rate: str = "400 Gb/sec (4X NDR)"
    operstate: str = "up"


def _write(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else f"{content}\n".encode())


def _link(link: Path, to: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(os.path.relpath(to, link.parent))


def sys_folder(root: Path, devices: list[Pci], *, num_nodes: int = 2, cpus_per_node: int = 4) -> Path:
    """Make a folder that stands for /sys: nodes of single-thread cores, and PCI devices with what hangs from them."""
    num_cpus = num_nodes * cpus_per_node
    cpus = root / "devices/system/cpu"
    for name in ("online", "possible", "present"):
        _write(cpus / name, f"0-{num_cpus - 1}")
    for cpu in range(num_cpus):
        node = cpu // cpus_per_node
        topology = cpus / f"cpu{cpu}/topology"
        mask = f"{((1 << cpus_per_node) - 1) << (node * cpus_per_node):x}"
        for name, text in (
            ("physical_package_id", node),
            ("core_id", cpu % cpus_per_node),
            ("core_cpus", f"{1 << cpu:x}"),
            ("thread_siblings", f"{1 << cpu:x}"),
            ("package_cpus", mask),
            ("core_siblings", mask),
        ):
            _write(topology / name, str(text))
    for node in range(num_nodes):
        folder = root / f"devices/system/node/node{node}"
        first = node * cpus_per_node
        _write(folder / "cpumap", f"{((1 << cpus_per_node) - 1) << first:x}")
        _write(folder / "cpulist", f"{first}-{first + cpus_per_node - 1}")
        _write(folder / "meminfo", f"Node {node} MemTotal: 1000 kB")
    _write(root / "devices/system/node/online", f"0-{num_nodes - 1}")
    _write(root / "devices/system/node/possible", f"0-{num_nodes - 1}")
    bridges: set[tuple[str, ...]] = set()
    for device in devices:
        for depth in range(1, len(device.path) + 1):
            if device.path[:depth] not in bridges:
                bridges.add(device.path[:depth])
                _bridge(root, device.path[:depth], device, cpus_per_node)
        _device(root, device, cpus_per_node)
    return root


def _bridge(root: Path, path: tuple[str, ...], below: Pci, cpus_per_node: int) -> None:
    """A bridge; its secondary bus is that of the next one, or of the device."""
    following = below.path[len(path)] if len(below.path) > len(path) else below.address
    config = bytearray(64)
    config[:4] = bytes.fromhex("00100ac0")
    config[0x0A:0x0C] = bytes.fromhex("0406")
    config[0x0E] = 1
    config[0x18:0x1B] = bytes([_bus(path[-1]), _bus(following), 0xFF])
    bridge = Pci(path[-1], "1000:c00a", "0604", below.numa, path[:-1])
    _device(root, bridge, cpus_per_node, bytes(config))


def _bus(address: str) -> int:
    return int(address.split(":")[1], 16)


def _device(root: Path, device: Pci, cpus_per_node: int, config: bytes | None = None) -> None:
    top = (device.path or (device.address,))[0]
    folder = root / f"devices/pci{top[:7]}".rstrip(":") / Path(*device.path, device.address)
    vendor, number = device.ids.split(":")
    if config is None:
        header = bytearray(64)
        header[:4] = int(vendor, 16).to_bytes(2, "little") + int(number, 16).to_bytes(2, "little")
        header[0x0A:0x0C] = int(device.pci_class, 16).to_bytes(2, "little")
        config = bytes(header)
    node_cpus = (1 << cpus_per_node) - 1
    for name, content in (
        ("vendor", f"0x{vendor}"),
        ("device", f"0x{number}"),
        ("class", f"0x{device.pci_class}00"),
        ("revision", "0x00"),
        ("subsystem_vendor", "0x0000"),
        ("subsystem_device", "0x0000"),
        ("numa_node", str(device.numa)),
        ("local_cpus", f"{node_cpus << (device.numa * cpus_per_node):x}" if device.numa >= 0 else "ffff"),
        ("config", config),
    ):
        _write(folder / name, content)
    _link(root / "bus/pci/devices" / device.address, folder)
    if device.rdma:
        rdma = folder / "infiniband" / device.rdma
        _write(rdma / "node_guid", "0000:0000:0000:0001")
        _write(rdma / "ports/1/state", device.state)
        _write(rdma / "ports/1/rate", device.rate)
        _link(rdma / "device", folder)
        _link(root / "class/infiniband" / device.rdma, rdma)
    if device.net:
        net = folder / "net" / device.net
        _write(net / "operstate", device.operstate)
        _write(net / "speed", "25000")
        _write(net / "address", "02:00:00:00:00:01")
        _link(net / "device", folder)
        _link(root / "class/net" / device.net, net)


def soft_roce(root: Path, name: str, netdev: str) -> None:
    """A Soft-RoCE device over a network device: it has no device of its own."""
    rdma = root / "devices/virtual/infiniband" / name
    _write(rdma / "parent", netdev)
    _write(rdma / "ports/1/state", "4: ACTIVE")
    _write(rdma / "ports/1/rate", "10 Gb/sec (4X SDR)")
    _write(rdma / "ports/1/gid_attrs/ndevs/0", netdev)
    _link(root / "class/infiniband" / name, rdma)
