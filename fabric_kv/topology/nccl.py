"""Machines from NCCL's topology XML: dumps (``NCCL_TOPO_DUMP_FILE``) and the static files of cloud vendors.

>>> machine = read_nccl(Path("ndv4-topo.xml").read_bytes(), source="ndv4-topo.xml")
>>> machine.gpus[0].place.numa, machine.nics[0].pci
(0, '0103:00:00.0')

Such a file knows neither host bridges nor cores, shows each switch as one bridge, and may name devices without saying
what they are.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any
from xml.parsers import expat

from ..errors import ConfigError, TopologyError
from .cpus import CORES_UNKNOWN, format_cpus, parse_cpus
from .model import MAX_GPUS, MAX_NICS, Gpu, Machine, Nic, Place, is_gpu, nic_kind, pci_address, pci_order

__all__ = ["read_nccl"]

MAX_DEPTH = 64
MAX_ELEMENTS = 100_000


def read_nccl(data: bytes, source: str) -> Machine:
    """Read NCCL's XML.

    Raises
    ------
    TopologyError
        If it is no such file, is cut off, or holds what no such file has: a DTD, entities, 64 levels.
    """
    builder = _Builder()
    parser = expat.ParserCreate()
    parser.StartElementHandler = builder.start
    parser.EndElementHandler = builder.end
    # Without a DTD there are no entities, hence none that grow.
    parser.StartDoctypeDeclHandler = builder.doctype
    try:
        parser.Parse(data, True)
        return builder.machine(source)
    except (expat.ExpatError, ConfigError, ValueError) as error:
        raise TopologyError(f"{source}: cannot be read as NCCL's topology XML: {error}", device=source) from error


def _mask(text: str) -> str:
    """Cpus of a mask: 32-bit hexadecimal words, the most significant first."""
    bits = 0
    words = text.split(",") if text else []
    if len(words) > 512:
        raise ConfigError(f"an affinity of {len(words)} words is more than any machine has")
    for word in words:
        if not re.fullmatch(r"[0-9a-fA-F]{1,8}", word):
            raise ConfigError(f"affinity {text[:80]!r} is no list of 32-bit hexadecimal words")
        bits = bits << 32 | int(word, 16)
    return format_cpus(cpu for cpu, bit in enumerate(reversed(f"{bits:b}")) if bit == "1")


def _number(text: str | None) -> int | None:
    """A count of the file; -1 and nonsense are unknown."""
    return int(text) if text and re.fullmatch(r"\d{1,9}", text) else None


def _address(attributes: dict[str, str]) -> str:
    """Address of a <pci>. Vendors invent ones such as ffff:ff:01.0 for switches that a virtual machine hides."""
    text = attributes.get("busid", "")
    address = pci_address(text)
    if address is None:
        raise ConfigError(f"busid {text[:80]!r} is no PCI address")
    return address


class _Builder:
    """Follows the elements; only the path to the current one is kept."""

    def __init__(self) -> None:
        self.path: list[tuple[str, dict[str, str]]] = []
        self.num_elements = 0
        self.num_cpus = 0
        self.gpus: dict[str, Gpu] = {}
        self.nics: list[Nic] = []
        self.named: set[str] = set()
        self.nodes: dict[int, str] = {}
        self.cpu = Place()
        self.unknown = 0

    def doctype(self, *_: Any) -> None:
        raise ConfigError("it has a document type, which NCCL never writes")

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        self.num_elements += 1
        if not self.path and tag != "system":
            raise ConfigError(f"its root is <{tag[:80]}>, not <system>")
        if len(self.path) >= MAX_DEPTH or self.num_elements > MAX_ELEMENTS:
            raise ConfigError(f"it has more than {MAX_DEPTH} levels or {MAX_ELEMENTS} elements")
        if len(self.gpus) > MAX_GPUS or len(self.nics) > MAX_NICS:
            raise ConfigError(f"it has more than {MAX_GPUS} GPUs or {MAX_NICS} NICs")
        self.path.append((tag, attributes))
        if tag == "cpu":
            self.start_cpu(attributes)
        elif tag == "pci":
            self.start_pci(attributes)
        elif tag == "net":
            self.start_net(attributes)

    def end(self, tag: str) -> None:
        self.path.pop()
        if tag == "cpu":
            self.cpu = Place()

    def start_cpu(self, attributes: dict[str, str]) -> None:
        numa = _number(attributes.get("numaid"))
        self.cpu = Place(numa=numa, package=self.num_cpus, cpus=_mask(attributes.get("affinity", "")))
        self.num_cpus += 1
        if numa is not None:
            self.nodes[numa] = format_cpus(parse_cpus(self.nodes.get(numa, "")) | parse_cpus(self.cpu.cpus))

    def start_pci(self, attributes: dict[str, str]) -> None:
        pci = _address(attributes)
        pci_class = attributes.get("class", "")
        if not pci_class:
            self.unknown += 1
        vendor = attributes.get("vendor", "").removeprefix("0x").lower()
        device = attributes.get("device", "").removeprefix("0x").lower()
        ids = f"{vendor}:{device}" if vendor else ""
        code = pci_class.removeprefix("0x")[:4]
        # Static files often leave out the vendor: then the class alone tells.
        if is_gpu(ids or "10de:", code):
            self.gpus[pci] = Gpu(pci=pci, vendor_device=ids, place=self.place(pci))
        elif code[:2] == "02":
            nic = Nic(name=None, pci=pci, kind=nic_kind(ids), vendor_device=ids or None, place=self.place(pci))
            self.nics.append(nic)

    def start_net(self, attributes: dict[str, str]) -> None:
        pci = next((_address(of) for tag, of in reversed(self.path[:-1]) if tag == "pci"), None)
        card = next((nic for nic in self.nics if pci and nic.pci == pci), None)
        speed = _number(attributes.get("speed"))
        # A net that cannot do GPUDirect and belongs to no PCI device is NCCL's socket transport.
        is_rdma = card is not None or attributes.get("gdr") == "1"
        self.named.add(pci or "")
        self.nics.append(
            Nic(
                name=attributes.get("name"),
                pci=pci,
                kind=(card.kind if card else "unknown-rdma") if is_rdma else "network",
                vendor_device=card.vendor_device if card else None,
                place=self.place(pci),
                link_gbps=speed / 1000 if speed else None,
            )
        )

    def place(self, pci: str | None) -> Place:
        """Place of a device: each switch is written as hwloc shows it, with an upstream and a downstream port."""
        above = [_address(of) for tag, of in self.path if tag == "pci"]
        above = [*(address for address in above if address != pci), pci or ""]
        ports = [port for switch, below in pairwise(above) for port in (f"{switch} up", f"{switch} to {below}")]
        return Place(bridges=tuple(ports), numa=self.cpu.numa, package=self.cpu.package, cpus=self.cpu.cpus)

    def machine(self, source: str) -> Machine:
        # A card that lists its ports by name is those ports.
        nics = [nic for nic in self.nics if nic.name is not None or nic.pci not in self.named]
        warnings = []
        if self.unknown and not self.gpus and not nics:
            warnings.append(f"{self.unknown} PCI devices have no class: which of them are GPUs or NICs is not told")
        return Machine(
            source=source,
            gpus=tuple(sorted(self.gpus.values(), key=lambda gpu: pci_order(gpu.pci))),
            nics=tuple(sorted(nics, key=lambda nic: nic.order)),
            nodes=dict(sorted(self.nodes.items())),
            cpus=format_cpus(cpu for cpus in self.nodes.values() for cpu in parse_cpus(cpus)),
            warnings=(*warnings, CORES_UNKNOWN),
        )
