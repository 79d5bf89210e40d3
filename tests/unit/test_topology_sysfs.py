"""Folders that stand for /sys, and what libfabric offers on such machines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from fabric_kv.errors import TopologyError
from fabric_kv.topology import Machine, choose, discover, read_machine
from fabric_kv.topology.model import pci_address
from fabric_kv.topology.offers import Offer, match_offers
from fabric_kv.topology.sysfs import netdev_gbps, netdev_pci, netdev_port, nvidia_gpus, rdma_devices

from .topology_samples import Pci, needs_hwloc, soft_roce, sys_folder

ROOT_PORT, UPSTREAM, DOWN = "0000:10:00.0", "0000:11:00.0", "0000:12:0{}.0"


def two_nodes(root: Path) -> Path:
    """A switch with a GPU and a ConnectX on node 1; an Ethernet card on node 0, with Soft-RoCE over it."""
    sys_folder(
        root,
        [
            Pci("0000:01:00.0", "8086:1563", "0200", 0, net="eth0"),
            Pci("0000:13:00.0", "10de:2330", "0302", 1, (ROOT_PORT, UPSTREAM, DOWN.format(0))),
            Pci(
                "0000:14:00.0", "15b3:1021", "0207", 1, (ROOT_PORT, UPSTREAM, DOWN.format(1)), rdma="mlx5_0", net="ib0"
            ),
        ],
    )
    soft_roce(root, "rxe0", "eth0")
    return root


@needs_hwloc
def test_folder_that_stands_for_sys(tmp_path: Path) -> None:
    machine = read_machine(two_nodes(tmp_path))
    assert not machine.live
    assert machine.cpus == "0-7"
    assert machine.nodes == {0: "0-3", 1: "4-7"}
    (gpu,) = machine.gpus
    assert (gpu.pci, gpu.place.numa, gpu.place.cpus) == ("0000:13:00.0", 1, "4-7")
    rxe, mlx = machine.nics
    assert (mlx.name, mlx.pci, mlx.kind, mlx.link_gbps, mlx.port) == ("mlx5_0", "0000:14:00.0", "connectx", 400, "up")
    # Soft-RoCE has no PCI address of its own: it is where its network device is.
    assert (rxe.name, rxe.pci, rxe.kind, rxe.netdev) == ("rxe0", "0000:01:00.0", "soft-rdma", "eth0")
    assert (rxe.place.numa, rxe.link_gbps, rxe.port) == (0, 25, "up")
    topology = discover(tmp_path)
    (group,) = topology.groups
    assert group.distance is not None
    assert (group.distance.relation, [nic.name for nic in group.nics]) == ("PIX", ["mlx5_0"])
    assert [left.nic.name for left in topology.left_out] == ["rxe0"]


@needs_hwloc
def test_a_folder_with_sys_in_it_and_the_driver_s_view_of_a_container(tmp_path: Path) -> None:
    gpus = [Pci(f"0000:2{bus}:00.0", "10de:2330", "0302", 0) for bus in range(3)]
    sys_folder(tmp_path / "sys", gpus)
    folder = tmp_path / "proc/driver/nvidia/gpus/0000:22:00.0"
    folder.mkdir(parents=True)
    (folder / "information").write_text("Model: \t\t NVIDIA H200\nGPU UUID: \t GPU-0123abcd-0000\n")
    machine = read_machine(tmp_path)
    assert [gpu.usable for gpu in machine.gpus] == [False, False, True]
    assert machine.gpus[2].uuid == "GPU-0123abcd-0000"
    # Device 0 of the container is the machine's third GPU.
    for gpus_text in (None, "0", "GPU-0123"):
        (group,) = choose(machine, gpus=gpus_text).groups
        assert (group.gpu, group.gpu_index) == ("0000:22:00.0", 0)


@needs_hwloc
def test_ports_that_are_down_and_vfs(tmp_path: Path) -> None:
    sys_folder(
        tmp_path,
        [
            Pci("0000:20:00.0", "10de:2330", "0302", 0),
            Pci("0000:21:00.0", "15b3:1021", "0207", 0, rdma="mlx5_0", state="1: DOWN"),
            Pci("0000:22:00.0", "15b3:1021", "0207", 0, rdma="mlx5_1", state="2: INIT"),
            Pci("0000:23:00.0", "15b3:101e", "0207", 1, rdma="mlx5_2", rate="200 Gb/sec (4X HDR)"),
        ],
    )
    topology = discover(tmp_path)
    assert [(nic.name, nic.link_gbps, nic.numa) for nic in topology.groups[0].nics] == [("mlx5_2", 200, 1)]
    assert {left.nic.name: left.reason for left in topology.left_out} == {
        "mlx5_0": "its port is not active",
        "mlx5_1": "its port is not active",
    }


@needs_hwloc
def test_numa_minus_one_is_unknown(tmp_path: Path) -> None:
    sys_folder(
        tmp_path,
        [Pci("0000:20:00.0", "10de:2330", "0302", -1), Pci("0000:31:00.0", "15b3:1021", "0207", -1, rdma="mlx5_0")],
    )
    (group,) = discover(tmp_path).groups
    assert group.numa is None
    assert group.cpus == "0-7"
    assert [nic.numa for nic in group.nics] == [None]


@needs_hwloc
def test_gpu_without_a_near_nic_takes_a_far_one(tmp_path: Path) -> None:
    sys_folder(
        tmp_path,
        [Pci("0000:20:00.0", "10de:2330", "0302", 0), Pci("0000:31:00.0", "1d0f:efa1", "0200", 1, rdma="rdmap49s0")],
    )
    (group,) = discover(tmp_path).groups
    assert group.distance is not None
    assert (group.distance.relation, [nic.name for nic in group.nics]) == ("SYS", ["rdmap49s0"])


@needs_hwloc
def test_empty_folders_are_said_to_be_empty(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match="does not stand for /sys"):
        read_machine(tmp_path)
    sys_folder(tmp_path / "no devices", [])
    topology = discover(tmp_path / "no devices")
    assert any("no PCI device is visible" in warning for warning in topology.warnings)
    (tmp_path / "hollow/sys/bus/pci/devices").mkdir(parents=True)
    try:
        hollow = discover(tmp_path / "hollow")
    except TopologyError:
        pass
    else:
        assert any("no PCI device is visible" in warning for warning in hollow.warnings)


# -- network devices ---------------------------------------------------------------------------------------------------


def test_network_devices(tmp_path: Path) -> None:
    root = two_nodes(tmp_path)
    assert netdev_pci(root, "eth0") == "0000:01:00.0"
    assert netdev_pci(root, "none") is None
    assert (netdev_gbps(root, "eth0"), netdev_gbps(root, "none")) == (25.0, None)
    assert (netdev_port(root, "eth0"), netdev_port(root, "none")) == ("up", "unknown")
    for name, lower in (("bond0", ["eth0"]), ("bond1", ["eth0", "ib0"]), ("veth0", [])):
        folder = root / "class/net" / name
        folder.mkdir()
        for other in lower:
            (folder / f"lower_{other}").symlink_to(f"../{other}")
    assert [netdev_pci(root, name) for name in ("bond0", "bond1", "veth0")] == ["0000:01:00.0", None, None]
    (root / "class/net/bond0/speed").write_text("-1\n")
    assert netdev_gbps(root, "bond0") is None


def test_links_that_lead_out_of_the_folder_are_not_followed(tmp_path: Path) -> None:
    outside = sys_folder(tmp_path / "outside", [Pci("0000:01:00.0", "8086:1563", "0200", 0, net="eth0")])
    inside = tmp_path / "inside/class/net/eth0"
    inside.mkdir(parents=True)
    (inside / "device").symlink_to(outside / "bus/pci/devices/0000:01:00.0")
    assert netdev_pci(tmp_path / "inside", "eth0") is None


def test_rdma_devices_with_little_to_read(tmp_path: Path) -> None:
    assert rdma_devices(tmp_path) == []
    (tmp_path / "class/infiniband/odd0").mkdir(parents=True)
    (device,) = rdma_devices(tmp_path)
    assert device._asdict() == {
        "name": "odd0",
        "pci": None,
        "vendor_device": "",
        "netdev": None,
        "software": True,
        "port": "unknown",
        "link_gbps": None,
    }
    assert nvidia_gpus(tmp_path) is None


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("0000:0C:00.0", "0000:0c:00.0"),
        ("00000000:0c:00.0", "0000:0c:00.0"),
        ("10000:e1:00.0", "10000:e1:00.0"),
        ("0c:00.0", None),
        ("0000:0c:00.8", None),
        ("0000:0c:00.0\n", None),
        ("", None),
    ],
)
def test_pci_addresses(text: str, address: str | None) -> None:
    assert pci_address(text) == address


# -- libfabric ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    pytest.importorskip("pyhwloc")
    return read_machine(two_nodes(tmp_path))


def offered(machine: Machine, root: Path, offers: list[dict[str, Any]], provider: str | None = None) -> Machine:
    asked = msgspec.structs.replace(machine, libfabric="libfabric 1.17 (libfabric.so.1)")
    return match_offers(asked, [msgspec.convert(offer, Offer) for offer in offers], provider=provider, root=root)


@needs_hwloc
def test_offers_are_matched_by_pci_address_whatever_the_names_say(machine: Machine, tmp_path: Path) -> None:
    offers = [
        {"provider": "tcp", "domain": "eth0", "fabric": "192.0.2.0/24"},
        {"provider": "verbs;ofi_rxm", "domain": "mlx5_0", "rdma": True, "pci": "0000:99:00.0", "device": "mlx5_0"},
        {
            "provider": "verbs;ofi_rxm",
            "domain": "mlx5_renamed",
            "fabric": "IB-0xfe80",
            "rdma": True,
            "pci": "0000:14:00.0",
            "device": "mlx5_renamed",
            "link_bps": 100_000_000_000,
        },
        {"provider": "verbs;ofi_rxm", "domain": "rxe0", "rdma": True, "device": "rxe0"},
    ]
    rxe, mlx = offered(machine, tmp_path, offers).nics
    assert (mlx.domain, mlx.fabric, mlx.link_gbps) == ("mlx5_renamed", "IB-0xfe80", 400)
    assert (rxe.domain, rxe.place.numa) == ("rxe0", 0)


@needs_hwloc
def test_efa_domains_are_named_after_the_device(machine: Machine, tmp_path: Path) -> None:
    offer = {"provider": "efa", "domain": "mlx5_0-rdm", "rdma": True, "port": "down"}
    _, mlx = offered(machine, tmp_path, [offer]).nics
    assert (mlx.provider, mlx.domain, mlx.port) == ("efa", "mlx5_0-rdm", "up")


@needs_hwloc
def test_two_devices_at_one_address_are_told_apart_by_name(machine: Machine, tmp_path: Path) -> None:
    twin = msgspec.structs.replace(machine.nics[1], name="mlx5_1")
    both = msgspec.structs.replace(machine, nics=(*machine.nics, twin))
    offers = [{"provider": "verbs", "domain": f"mlx5_{n}", "rdma": True, "pci": "0000:14:00.0"} for n in (1, 0)]
    assert [nic.domain for nic in offered(both, tmp_path, offers).nics] == [None, "mlx5_0", "mlx5_1"]


@needs_hwloc
def test_nics_without_an_offer_are_left_out_by_name(machine: Machine, tmp_path: Path) -> None:
    topology = choose(offered(machine, tmp_path, []))
    assert topology.groups[0].nics == ()
    assert {left.reason for left in topology.left_out} == {
        "libfabric 1.17 (libfabric.so.1) offers nothing for it",
    }
    named = choose(offered(machine, tmp_path, [], "efa"), provider="efa")
    assert {left.reason for left in named.left_out} == {
        "libfabric 1.17 (libfabric.so.1) offers nothing for it with provider efa",
    }


@needs_hwloc
def test_software_providers_use_network_devices(machine: Machine, tmp_path: Path) -> None:
    offers = [{"provider": "tcp", "domain": name} for name in ("docker0", "eth0", "eth0", "lo")]
    (tmp_path / "class/net/docker0").mkdir()
    topology = choose(offered(machine, tmp_path, offers, "tcp"), provider="tcp")
    (group,) = topology.groups
    (nic,) = group.nics
    assert (nic.name, nic.pci, nic.numa, nic.link_gbps, nic.port) == ("eth0", "0000:01:00.0", 0, 25, "up")
    assert {left.nic.name for left in topology.left_out} == {"docker0", "lo"}
    only = choose(offered(machine, tmp_path, offers[-1:], "tcp"), provider="tcp")
    assert [each.name for each in only.groups[0].nics] == ["lo"]
    shm = choose(offered(machine, tmp_path, [{"provider": "shm", "domain": "shm"}], "shm"), provider="shm")
    assert shm.engine_arguments()["groups"] == [["shm"]]
