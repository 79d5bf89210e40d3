"""Reads a machine from wherever it is described.

>>> read_machine()                          # this one
>>> read_machine("p5.48xlarge.xml")         # hwloc's XML, or NCCL's
>>> read_machine("snapshot/sys")            # a folder that stands for /sys, or for / with /sys in it
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from ..errors import TopologyError
from .hwloc import Reader, strip_comments
from .model import Machine, Nic, nic_kind
from .nccl import read_nccl
from .offers import ask_libfabric, match_offers
from .sysfs import nvidia_gpus, rdma_devices

__all__ = ["read_bytes", "read_machine"]

# The largest recordings, with every cache of every core, stay below 1 MiB.
MAX_BYTES = 8 << 20


def read_machine(source: str | Path | None = None, *, provider: str | None = None) -> Machine:
    """Read a machine.

    Parameters
    ----------
    source : str or Path, optional
        A file of hwloc's XML (format 2 or 3) or NCCL's topology XML, or a folder that stands for ``/sys``; by default
        this machine.
    provider : str, optional
        On this machine: the libfabric provider to look for. A software provider such as ``tcp`` makes network devices
        the NICs.

    Raises
    ------
    TopologyError
        If it cannot be read; names the file and says why.
    """
    if source is None:
        return _this_machine(provider)
    path = Path(source)
    if path.is_dir():
        return _folder(path)
    data = read_bytes(path)
    root = re.search(rb"<([A-Za-z]\w*)", strip_comments(data, str(path)))
    if root and root[1] == b"topology":
        return Reader.xml(data, str(path)).finish()
    if root and root[1] == b"system":
        return read_nccl(data, str(path))
    what = f"its root is <{root[1][:80].decode()}>" if root else "it is no XML"
    raise TopologyError(f"{path}: neither hwloc's XML nor NCCL's topology XML: {what}", device=str(path))


def read_bytes(path: Path) -> bytes:
    """A file of at most 8 MiB; TopologyError otherwise."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise TopologyError(f"{path}: {error.strerror or error}", device=str(path)) from error
    if len(data) > MAX_BYTES:
        raise TopologyError(f"{path}: larger than {MAX_BYTES >> 20} MiB, which no topology is", device=str(path))
    return data


def _this_machine(provider: str | None) -> Machine:
    root = Path("/sys")
    with Reader.live() as reader:
        # While hwloc works in its process.
        libfabric, offers, warnings = ask_libfabric(provider)
        machine = _with_sysfs(reader.finish(), root, Path("/proc"))
    machine = msgspec.structs.replace(machine, warnings=(*machine.warnings, *warnings))
    if offers is None:
        return machine
    machine = msgspec.structs.replace(machine, libfabric=libfabric)
    return match_offers(machine, offers, provider=provider, root=root)


def _folder(folder: Path) -> Machine:
    root, proc = (folder / "sys", folder / "proc") if (folder / "sys").is_dir() else (folder, folder / "no proc")
    if not (root / "bus/pci/devices").is_dir() and not (root / "devices/system/cpu").is_dir():
        raise TopologyError(
            f"{folder}: holds neither bus/pci/devices nor devices/system/cpu, so it does not stand for /sys",
            device=str(folder),
        )
    return _with_sysfs(Reader.folder(root).finish(), root, proc)


def _with_sysfs(machine: Machine, root: Path, proc: Path) -> Machine:
    """Add RDMA devices that hwloc does not show (Soft-RoCE), port states and rates, and the driver's view of GPUs."""
    nics = {nic.name: nic for nic in machine.nics}
    for device in rdma_devices(root):
        known = nics.get(device.name)
        ids = device.vendor_device or (known.vendor_device if known else None)
        nics[device.name] = Nic(
            name=device.name,
            pci=known.pci if known else device.pci,
            kind="soft-rdma" if device.software else nic_kind(ids or ""),
            vendor_device=ids,
            place=known.place if known else machine.place_of(device.pci),
            link_gbps=device.link_gbps,
            pci_gbps=known.pci_gbps if known else None,
            port=device.port,
            netdev=device.netdev,
        )
    driver = nvidia_gpus(proc)
    gpus = machine.gpus
    if driver is not None:
        gpus = tuple(
            msgspec.structs.replace(
                gpu,
                uuid=gpu.uuid or driver.get(gpu.pci),
                usable=gpu.pci in driver or not gpu.vendor_device.startswith("10de:"),
            )
            for gpu in gpus
        )
    return msgspec.structs.replace(machine, gpus=gpus, nics=tuple(sorted(nics.values(), key=lambda nic: nic.order)))
