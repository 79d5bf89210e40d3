"""What a figure depends on, beside the settings: versions, processor, system, load, and where the NICs are.

>>> describe_machine()["cpu"]
"""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import numpy as np

from .. import __version__
from ..errors import FabricKVError

__all__ = ["describe_machine", "describe_topology", "describe_versions"]


def describe_versions() -> dict[str, str]:
    """Of everything between the caller and the NIC."""
    from .. import _native

    path, version = _native.library()
    return {
        "fabric_kv": __version__,
        "libfabric": f"{version} ({path})",
        "Python": platform.python_version(),
        "NumPy": np.__version__,
        "Linux": platform.release(),
    }


def describe_machine() -> dict[str, str]:
    """Host, processor, cores, and how busy it is."""
    try:
        found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return {
        "host": platform.node(),
        "cpu": f"{found[1] if found else platform.machine()} × {os.cpu_count()}",
        "load": f"{os.getloadavg()[0]:.1f}",
    }


def describe_topology(provider: str | None) -> list[str]:
    """Which NICs are near what, a line each; why not, where nothing is known."""
    from ..topology import discover

    try:
        topology = discover(provider=provider)
    except FabricKVError as error:
        return [str(error).partition("\n")[0]]
    lines = []
    for group in topology.groups:
        nics = ", ".join(
            f"{nic.label}{f' ({nic.pci})' if nic.pci else ''}{f' NUMA {nic.numa}' if nic.numa is not None else ''}"
            for nic in group.nics
        )
        lines.append(f"{group.label}: {nics or 'no NIC'}; {group.reason}")
    return lines
