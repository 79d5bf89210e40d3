"""What ``/sys`` knows of NICs beyond hwloc: RDMA devices without a PCI device, ports, rates, network devices.

>>> for device in rdma_devices(Path("/sys")): print(device.name, device.pci, device.netdev, device.port)
mlx5_0 0000:0c:00.0 ens1np0 up
rxe0 0000:01:00.0 eth0 up
>>> netdev_pci(Path("/sys"), "eth0")
'0000:01:00.0'

Every function takes the folder that stands for ``/sys``, and answers None for what it does not find.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from .model import Port, pci_address

__all__ = ["RdmaDevice", "netdev_gbps", "netdev_pci", "netdev_port", "nvidia_gpus", "rdma_devices"]

_MAX_BYTES = 4096
_PORT_ACTIVE = "4"


class RdmaDevice(NamedTuple):
    """An RDMA device of the kernel. ``software``: it has no device of its own (Soft-RoCE, Soft-iWARP)."""

    name: str
    pci: str | None
    vendor_device: str
    netdev: str | None
    software: bool
    port: Port
    link_gbps: float | None


def read_text(path: Path) -> str | None:
    """The text of a small file; None if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(_MAX_BYTES).decode("utf-8", "replace").strip()
    except OSError:
        return None


def _names(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return []


def rdma_devices(root: Path) -> list[RdmaDevice]:
    """Every RDMA device, by name."""
    return [_rdma_device(root, name) for name in _names(root / "class/infiniband")]


def _rdma_device(root: Path, name: str) -> RdmaDevice:
    folder = root / "class/infiniband" / name
    software = not (folder / "device").exists()
    netdev = _rdma_netdev(root, folder)
    pci = _pci_above(root, folder / "device")
    if software and netdev:
        pci = netdev_pci(root, netdev)
    ports = [folder / "ports" / port for port in _names(folder / "ports")]
    states = [(read_text(port / "state") or "").partition(":")[0] for port in ports]
    known = [state for state in states if state]
    active = [port for port, state in zip(ports, states, strict=True) if state == _PORT_ACTIVE]
    rates = [rate for port in active or ports if (rate := _rate(read_text(port / "rate"))) is not None]
    port: Port = "up" if _PORT_ACTIVE in known else "down" if known else "unknown"
    if software and netdev:
        # Soft-RoCE claims 10 Gbit/s or so, whatever carries it.
        rates = [gbps] if (gbps := netdev_gbps(root, netdev)) else []
    ids = [(read_text(folder / "device" / file) or "").removeprefix("0x") for file in ("vendor", "device")]
    vendor_device = ":".join(ids) if all(ids) else ""
    return RdmaDevice(name, pci, vendor_device, netdev, software, port, max(rates, default=None))


def _rate(text: str | None) -> float | None:
    match = re.match(r"(\d{1,7}(?:\.\d+)?) Gb/sec", text or "")
    return float(match[1]) if match else None


def _rdma_netdev(root: Path, folder: Path) -> str | None:
    """Network device of an RDMA device: of the GIDs of its ports, or the parent that Soft-RoCE names."""
    for port in _names(folder / "ports"):
        for index in _names(folder / "ports" / port / "gid_attrs/ndevs"):
            name = read_text(folder / "ports" / port / "gid_attrs/ndevs" / index)
            if name and (root / "class/net" / name).exists():
                return name
    name = read_text(folder / "parent")
    return name if name and (root / "class/net" / name).exists() else None


def _pci_above(root: Path, path: Path) -> str | None:
    """The PCI device at or above a device's folder."""
    try:
        real, top = path.resolve(strict=True), root.resolve(strict=True)
    except (OSError, RuntimeError):
        return None
    # A copied folder may hold links that lead out of it, into the /sys of this machine.
    if not real.is_relative_to(top):
        return None
    return next((address for part in reversed(real.relative_to(top).parts) if (address := pci_address(part))), None)


def netdev_pci(root: Path, name: str) -> str | None:
    """PCI address of a network device; of a bond or VLAN that of what lies beneath, if all of it is one device."""
    folder = root / "class/net" / name
    own = _pci_above(root, folder / "device")
    if own is not None:
        return own
    lower = {entry.removeprefix("lower_") for entry in _names(folder) if entry.startswith("lower_")}
    beneath = {_pci_above(root, root / "class/net" / other / "device") for other in lower}
    return beneath.pop() if len(beneath) == 1 else None


def netdev_gbps(root: Path, name: str) -> float | None:
    """Speed of a network device in Gbit/s; virtual ones often tell none."""
    text = read_text(root / "class/net" / name / "speed")
    mbps = int(text) if text and re.fullmatch(r"\d{1,8}", text) else 0
    return mbps / 1000 or None


def netdev_port(root: Path, name: str) -> Port:
    """Whether a network device carries data."""
    state = read_text(root / "class/net" / name / "operstate")
    return "up" if state == "up" else "down" if state in ("down", "lowerlayerdown", "notpresent") else "unknown"


def nvidia_gpus(proc: Path) -> dict[str, str | None] | None:
    """UUID of each GPU that NVIDIA's driver shows here, by PCI address; None without the driver.

    In a container ``/sys`` shows all GPUs of the machine, but this folder only those that the container was given.
    """
    folder = proc / "driver/nvidia/gpus"
    found: dict[str, str | None] = {}
    for name in _names(folder):
        address = pci_address(name)
        if address:
            match = re.search(r"GPU UUID:\s*(GPU-[0-9a-f-]+)", read_text(folder / name / "information") or "")
            found[address] = match[1] if match else None
    return found or None
