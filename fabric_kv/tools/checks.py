"""The single checks of ``fabric-kv-doctor``: each looks at one thing and says what is wrong and how to mend it.

>>> for finding in memlock(rdma=True): print(finding.level, finding.text, finding.fix)
>>> hugepages(Path("snapshot"))          # of a copied /proc and /sys
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from ..errors import FabricKVError
from ..topology import Machine, Nic, Topology, nearest
from ..topology.cpus import format_cpus, parse_cpus
from ..topology.sysfs import read_text

__all__ = [
    "Finding",
    "cpu_set",
    "environment",
    "gpu_direct",
    "hugepages",
    "libfabric",
    "memlock",
    "nics",
    "ptrace_scope",
    "rdma_devices",
    "versions",
]

ROOT = Path("/")
_CAP_IPC_LOCK = 14
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "OMP_NUM_THREADS")


class Finding(NamedTuple):
    """One line of the report. ``fix``: what to do about it; every problem has one."""

    level: Literal["ok", "note", "problem"]
    what: str
    text: str
    fix: str = ""


def versions() -> Iterator[Finding]:
    """Versions of the package, of Python, of the kernel, and of what it needs."""
    from .. import __version__

    yield Finding("ok", "fabric_kv", f"{__version__}, Python {platform.python_version()}, Linux {platform.release()}")
    for name, needed in (("numpy", True), ("msgspec", True), ("pyhwloc", False)):
        try:
            yield Finding("ok", name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            fix = f"pip install {name}" if needed else "pip install 'fabric_kv[topology]', with Python 3.12 or newer"
            yield Finding("problem", name, "not installed", fix)


def libfabric() -> Iterator[Finding]:
    """Which libfabric is loaded, and its providers that have what fabric_kv needs."""
    try:
        from .. import _native

        path, version = _native.library()
        providers = dict.fromkeys(str(offer["provider"]) for offer in _native.list_offers(""))
    except ImportError as error:
        yield Finding(
            "problem", "C++ core", str(error), "pip install fabric_kv, or pip install -e . in its source folder"
        )
    except FabricKVError as error:
        fix = "apt-get install libfabric1, or set FABRIC_KV_LIBFABRIC_HOME (on AWS: /opt/amazon/efa)"
        yield Finding("problem", "libfabric", str(error), fix)
    else:
        yield Finding("ok", "libfabric", f"{version}, {path}")
        yield Finding("ok", "providers", ", ".join(providers) or "none")


def nics(machine: Machine, topology: Topology | None) -> Iterator[Finding]:
    """Each NIC; a port that is down is a problem where it would be nearer than what is used instead."""
    reasons = {(left.nic.name, left.nic.pci): left.reason for left in topology.left_out} if topology else {}
    used = [nic for nic in machine.nics if (nic.name, nic.pci) not in reasons]
    for nic in machine.nics:
        reason = reasons.get((nic.name, nic.pci))
        numa = "unknown" if nic.place.numa is None else nic.place.numa
        speed = f"{nic.link_gbps:g} Gbit/s" if nic.link_gbps else "speed unknown"
        text = f"{nic.pci or 'no PCI address'}, {nic.kind}, {speed}, port {nic.port}, NUMA node {numa}"
        text += f", {nic.provider} {nic.domain} in {nic.fabric}" if nic.provider else ""
        if not reason:
            yield Finding("ok", f"NIC {nic.label}", text)
        elif nic.port == "down" and nic.kind in ("efa", "connectx") and _missed(machine, used, nic):
            fix = f"bring its port up (ibstat {nic.name}; ip link set {nic.netdev or 'DEVICE'} up), or take the NIC out"
            yield Finding("problem", f"NIC {nic.label}", f"{text}; not used, though nearest to a GPU: {reason}", fix)
        else:
            yield Finding("note", f"NIC {nic.label}", f"{text}; not used: {reason}")
    if not machine.nics:
        yield Finding("note", "NICs", "none is visible under /sys/class/infiniband")


def _missed(machine: Machine, used: list[Nic], nic: Nic) -> bool:
    """Whether a GPU is nearer to this NIC than to all that are used."""
    for gpu in machine.gpus:
        best, _ = nearest(gpu.place, used)
        own, _ = nearest(gpu.place, [nic])
        if own and (best is None or own.order < best.order):
            return True
    return not machine.gpus and not used


def memlock(root: Path = ROOT, *, rdma: bool) -> Iterator[Finding]:
    """Locked memory: every registered page counts."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    status = read_text(root / "proc/self/status") or ""
    match = re.search(r"CapEff:\s*([0-9a-f]+)", status)
    privileged = bool(match and int(match[1], 16) >> _CAP_IPC_LOCK & 1)
    unlimited = limit == resource.RLIM_INFINITY
    text = "unlimited" if unlimited else f"{limit >> 10} KiB{' (but CAP_IPC_LOCK lifts it)' if privileged else ''}"
    if unlimited or privileged or not rdma:
        yield Finding("ok", "memlock", text)
    else:
        fix = "ulimit -l unlimited; docker run --ulimit memlock=-1; LimitMEMLOCK=infinity in a systemd unit"
        yield Finding("problem", "memlock", f"{text}: registering a KV cache will fail", fix)


def hugepages(root: Path = ROOT) -> Iterator[Finding]:
    """Huge pages: EFA takes its bounce buffers from them."""
    info = dict(re.findall(r"^(\w+):\s+(\d+)", read_text(root / "proc/meminfo") or "", re.MULTILINE))
    total, free, size = (int(info.get(key, 0)) for key in ("HugePages_Total", "HugePages_Free", "Hugepagesize"))
    always = read_text(root / "sys/kernel/mm/transparent_hugepage/enabled") or "unknown"
    mode = next(iter(re.findall(r"\[(\w+)\]", always)), "unknown")
    yield Finding("ok", "huge pages", f"{free} of {total} free, {size} KiB each; transparent: {mode}")


def gpu_direct(machine: Machine, root: Path = ROOT) -> Iterator[Finding]:
    """Whether a NIC can reach GPU memory: by nvidia_peermem, or by dma-buf with the open driver."""
    if not any(gpu.vendor_device.startswith("10de:") for gpu in machine.gpus):
        yield Finding(
            "ok", "GPUDirect", "no NVIDIA GPU" if not machine.gpus else "no NVIDIA GPU; not examined for others"
        )
        return
    peermem = [name for name in ("nvidia_peermem", "efa_nv_peermem") if (root / "sys/module" / name).is_dir()]
    driver = read_text(root / "proc/driver/nvidia/version") or ""
    is_open = "Open Kernel Module" in driver
    kernel = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
    if peermem:
        yield Finding("ok", "GPUDirect", f"{', '.join(peermem)} is loaded")
    elif is_open and kernel >= (5, 12):
        yield Finding("ok", "GPUDirect", f"dma-buf: open NVIDIA driver, Linux {platform.release()}")
    elif not driver:
        yield Finding(
            "problem", "GPUDirect", "the NVIDIA driver is not loaded here", "install it, or run with --gpus all"
        )
    else:
        fix = "modprobe nvidia_peermem, or use the open kernel modules of the driver with Linux 5.12 or newer"
        yield Finding("problem", "GPUDirect", "neither nvidia_peermem nor dma-buf: NICs cannot reach GPU memory", fix)


def rdma_devices(root: Path = ROOT) -> Iterator[Finding]:
    """Device files by which a process reaches RDMA NICs; containers often lack them."""
    files = sorted((root / "dev/infiniband").glob("uverbs*")) if (root / "dev/infiniband").is_dir() else []
    denied = [path.name for path in files if not os.access(path, os.R_OK | os.W_OK)]
    if files and not denied:
        yield Finding("ok", "/dev/infiniband", ", ".join(path.name for path in files))
    else:
        text = (
            f"no access to {', '.join(denied)}" if denied else "has no uverbs devices, though the kernel has RDMA NICs"
        )
        fix = (
            "docker run --device=/dev/infiniband; in Kubernetes the NIC's device plugin; on a host: modprobe ib_uverbs"
        )
        yield Finding("problem", "/dev/infiniband", text, fix)


def ptrace_scope(root: Path = ROOT, *, needed: bool) -> Iterator[Finding]:
    """Whether processes may read each other's memory, as the shm provider does."""
    value = read_text(root / "proc/sys/kernel/yama/ptrace_scope")
    if value in (None, "0"):
        yield Finding("ok", "ptrace scope", value or "not restricted by Yama")
    else:
        text = f"{value}: libfabric's shm cannot copy between processes directly, and is slow"
        yield Finding("problem" if needed else "note", "ptrace scope", text, "sysctl kernel.yama.ptrace_scope=0")


def cpu_set(topology: Topology | None) -> Iterator[Finding]:
    """Cpus of this process, and whether each progress thread gets a core of its own."""
    allowed = os.sched_getaffinity(0)
    text = f"{format_cpus(allowed)} ({len(allowed)} of {os.cpu_count()})"
    groups = topology.groups if topology else ()
    workers = [parse_cpus(group.worker_cpus) for group in groups if group.worker_cpus]
    if len(allowed) <= len(groups) or len(set(workers)) < len(workers):
        fix = "allow more cpus: taskset, docker run --cpuset-cpus, Kubernetes' CPU manager"
        yield Finding("problem", "cpus", f"{text}: too few for {len(groups)} progress threads beside the engine", fix)
    else:
        yield Finding("ok", "cpus", text)


def environment() -> Iterator[Finding]:
    """Variables that change what is found or how libfabric behaves."""
    for name, value in sorted(os.environ.items()):
        if name.startswith(("FABRIC_KV_", "FI_", "RDMAV_", "HWLOC_")) or name in _VARIABLES:
            yield Finding("ok", name, value)
