"""What ``hwloc_child.py`` prints, and the machine that it means.

>>> to_machine(b'{"devices": [], ...}', "p5.xml", live=False, said="")
Machine(source='p5.xml', ...)
"""

from __future__ import annotations

import msgspec

from ..errors import ConfigError
from .cpus import CORES_UNKNOWN, MAX_CPUS, format_cpus, parse_cpus
from .model import MAX_GPUS, MAX_NICS, Gpu, Machine, Nic, Place, is_gpu, nic_kind, pci_order

__all__ = ["to_machine"]


class _Rdma(msgspec.Struct):
    name: str
    ports: list[str]


class _Device(msgspec.Struct):
    pci: str
    pci_class: str
    vendor_device: str
    link: float
    rdma: list[_Rdma]
    infos: dict[str, str]
    bridges: tuple[str, ...]
    host_bridge: str | None
    anchor: int


class _Anchor(msgspec.Struct):
    cpus: str
    nodes: str
    package: int | None


class _Node(msgspec.Struct):
    index: int
    cpus: str


class _Output(msgspec.Struct):
    devices: list[_Device]
    anchors: dict[str, _Anchor]
    nodes: list[_Node]
    cores: list[str]
    cpus: str
    num_pci: int


def to_machine(data: bytes, source: str, *, live: bool, said: str) -> Machine:
    """The machine that the child describes.

    Parameters
    ----------
    data : bytes
        What it printed.
    said : str
        What hwloc said on stderr; becomes a warning.

    Raises
    ------
    ConfigError, msgspec.MsgspecError
        If it contradicts itself: a broken file can make hwloc say so.
    """
    output = msgspec.json.decode(data, type=_Output)
    nodes = {node.index: node.cpus for node in output.nodes if node.cpus}
    places = {int(key): _place(anchor, nodes) for key, anchor in output.anchors.items()}
    gpus: list[Gpu] = []
    nics: list[Nic] = []
    devices: dict[str, Place] = {}
    for device in output.devices:
        place = msgspec.structs.replace(places[device.anchor], bridges=device.bridges, host_bridge=device.host_bridge)
        devices[device.pci] = place
        if is_gpu(device.vendor_device, device.pci_class):
            uuid = device.infos.get("NVIDIAUUID") or device.infos.get("AMDUUID")
            model = device.infos.get("GPUModel")
            gpus.append(Gpu(pci=device.pci, vendor_device=device.vendor_device, place=place, model=model, uuid=uuid))
        nics.extend(
            Nic(
                name=rdma.name,
                pci=device.pci,
                kind=nic_kind(device.vendor_device),
                vendor_device=device.vendor_device,
                place=place,
                pci_gbps=round(device.link * 8, 1) or None,
                port="up" if "4" in rdma.ports else "down" if rdma.ports else "unknown",
            )
            for rdma in device.rdma
        )
    if len(gpus) > MAX_GPUS or len(nics) > MAX_NICS or len(output.cores) > MAX_CPUS:
        raise ConfigError(
            f"{len(gpus)} GPUs, {len(nics)} NICs and {len(output.cores)} cores are more than any machine has"
        )
    warnings = [f"hwloc says: {said}"] if said else []
    if not output.num_pci:
        warnings.append("no PCI device is visible. Hint: is /sys mounted (in a container), is the folder complete?")
    if not output.cores:
        warnings.append(CORES_UNKNOWN)
    return Machine(
        source=source,
        gpus=tuple(sorted(gpus, key=lambda gpu: pci_order(gpu.pci))),
        nics=tuple(sorted(nics, key=lambda nic: nic.order)),
        nodes={index: format_cpus(parse_cpus(cpus)) for index, cpus in sorted(nodes.items())},
        cores=tuple(output.cores),
        cpus=format_cpus(parse_cpus(output.cpus)),
        places=devices,
        live=live,
        warnings=tuple(warnings),
    )


def _place(anchor: _Anchor, nodes: dict[int, str]) -> Place:
    near = [index for index in parse_cpus(anchor.nodes) if index in nodes]
    return Place(
        numa=near[0] if len(near) == 1 else None, package=anchor.package, cpus=format_cpus(parse_cpus(anchor.cpus))
    )
