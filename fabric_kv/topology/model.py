"""What a machine has, as far as the choice of NICs needs it, whatever it was read from.

>>> machine = read_machine("p5.48xlarge.xml")
>>> machine.gpus[0].pci, machine.gpus[0].place.numa, machine.nics[0].label
('0000:53:00.0', 0, 'rdmap79s0')
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from ..errors import TopologyError

__all__ = ["Gpu", "Machine", "Nic", "Place", "is_gpu", "nic_kind", "pci_address", "pci_order"]

_PCI = re.compile(r"([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-7])")

Kind = Literal["efa", "connectx", "soft-rdma", "other-rdma", "unknown-rdma", "network"]
Port = Literal["up", "down", "unknown"]


# More than any machine has: beyond it a file is broken or hostile.
MAX_GPUS = 256
MAX_NICS = 1024

_EFA_DEVICES = ("1d0f:efa0", "1d0f:efa1", "1d0f:efa2", "1d0f:efa3")
_GPU_VENDORS = ("10de", "1002", "1d94")
_GPU_CLASSES = ("0300", "0302", "0380", "1200")


def nic_kind(vendor_device: str) -> Kind:
    """What an RDMA NIC is, by its PCI ids."""
    if vendor_device in _EFA_DEVICES:
        return "efa"
    if vendor_device.startswith("15b3:"):
        return "connectx"
    return "other-rdma" if vendor_device else "unknown-rdma"


def is_gpu(vendor_device: str, pci_class: str) -> bool:
    """Whether a PCI device is a GPU that computes; the VGA chips of BMCs and of AWS's console are none."""
    return vendor_device[:4] in _GPU_VENDORS and pci_class in _GPU_CLASSES


def pci_order(address: str | None) -> tuple[int, ...]:
    """Sort key of a PCI address: by number, since the text does not sort (domains have four to eight digits)."""
    match = _PCI.fullmatch(address or "")
    return tuple(int(part, 16) for part in match.groups()) if match else (1 << 32,)


def pci_address(text: str) -> str | None:
    """One spelling for all sources: ``00000000:0F:00.0`` becomes ``0000:0f:00.0``; None if it is no PCI address."""
    match = _PCI.fullmatch(text)
    if not match:
        return None
    domain, bus, device, function = (int(part, 16) for part in match.groups())
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function}"


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a device hangs.

    Attributes
    ----------
    bridges : tuple of str
        PCI-PCI bridges from the host bridge down to the device; a switch counts twice, as upstream and downstream port.
    host_bridge : str, optional
        What the first of them hangs from; None where the source does not tell.
    numa : int, optional
        The one NUMA node that is near; None (not 0) where the source does not tell or it would be more than one.
    package : int, optional
        CPU socket.
    cpus : str
        The cpus that are near, as ``0-47,96-143``; empty if unknown.
    """

    bridges: tuple[str, ...] = ()
    host_bridge: str | None = None
    numa: int | None = None
    package: int | None = None
    cpus: str = ""


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU, known by its PCI address: CUDA's indices mean something else in every process.

    ``usable``: False for a GPU that ``/sys`` shows, but that was not given to this container.
    """

    pci: str
    vendor_device: str
    place: Place
    model: str | None = None
    uuid: str | None = None
    usable: bool = True


class Nic(msgspec.Struct, frozen=True, kw_only=True):
    """A NIC.

    Attributes
    ----------
    name : str, optional
        The kernel's name (``mlx5_0``, ``rdmap79s0``, ``rxe0``; ``eth0`` for a software provider). Static NCCL files
        have none.
    pci : str, optional
        PCI address; of a Soft-RoCE device that of the network device beneath.
    kind : str
        ``efa``, ``connectx``, ``soft-rdma`` (Soft-RoCE, Soft-iWARP), ``other-rdma``, ``unknown-rdma`` (the source does
        not tell), or ``network`` (no RDMA).
    provider, fabric, domain : str, optional
        As libfabric offers it. None: libfabric offers nothing for it, or was not asked since the machine is a recorded
        one.
    link_gbps : float, optional
        Line rate of the network port in Gbit/s.
    pci_gbps : float, optional
        Rate of its PCI link in Gbit/s as it was when read; idle links are slow.
    port : {"up", "down", "unknown"}
    netdev : str, optional
        The network device of a Soft-RoCE or RoCE NIC.
    """

    name: str | None
    pci: str | None
    kind: Kind
    place: Place
    vendor_device: str | None = None
    provider: str | None = None
    fabric: str | None = None
    domain: str | None = None
    link_gbps: float | None = None
    pci_gbps: float | None = None
    port: Port = "unknown"
    netdev: str | None = None

    @property
    def label(self) -> str:
        """How messages and filters call it."""
        return self.name or self.pci or "?"

    @property
    def order(self) -> tuple[object, ...]:
        """PCI order; functions of one address by name, ``mlx5_2`` before ``mlx5_10``."""
        parts = re.split(r"(\d+)", self.name or "")
        return pci_order(self.pci), [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs and NICs in PCI order, NUMA nodes and cores.

    Attributes
    ----------
    source : str
        What it was read from.
    nodes : dict
        For each NUMA node with cpus its cpus; memory-only nodes (GPU memory on POWER9) are left out.
    cores : tuple of str
        The cpus of each physical core; empty if unknown.
    cpus : str
        All cpus that may be used, as far as the source knows.
    places : dict
        Places of all network devices and GPUs, by PCI address.
    libfabric : str, optional
        Which libfabric told what it offers for the NICs; None if it was not asked, for recorded machines above all.
    live : bool
        Whether it is the machine we run on.
    warnings : tuple of str
        What the source left open.
    """

    source: str
    gpus: tuple[Gpu, ...] = ()
    nics: tuple[Nic, ...] = ()
    nodes: dict[int, str] = {}
    cores: tuple[str, ...] = ()
    cpus: str = ""
    places: dict[str, Place] = {}
    libfabric: str | None = None
    live: bool = False
    warnings: tuple[str, ...] = ()

    def place_of(self, pci: str | None) -> Place:
        """Place of a network device by its PCI address; if unknown, that of a device that could be anywhere."""
        numa = next(iter(self.nodes)) if len(self.nodes) == 1 else None
        return self.places.get(pci or "") or Place(numa=numa, cpus=self.cpus)

    @property
    def devices(self) -> tuple[Gpu, ...]:
        """The GPUs that compute: where there are NVIDIA's, an AMD one is the display of a desktop's processor."""
        return tuple(gpu for gpu in self.gpus if gpu.vendor_device.startswith("10de:")) or self.gpus

    def gpu(self, address: str) -> Gpu:
        """The GPU with a PCI address; TopologyError names it and those there are."""
        for gpu in self.gpus:
            if gpu.pci == pci_address(address):
                return gpu
        known = ", ".join(gpu.pci for gpu in self.gpus) or "none"
        raise TopologyError(f"GPU {address!r} is not in {self.source}; its GPUs: {known}", device=address)
