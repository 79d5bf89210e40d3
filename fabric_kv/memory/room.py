"""How much memory there is to take: of the machine, of a NUMA node, of the control groups that this process is in.

>>> room(numa_node=1)
(1012408320, 'NUMA node 1')

A memfd reserves nothing. Where its pages run out half way, in fallocate as in a page fault, there is no error: the
kernel kills whichever process it thinks best. So whoever takes many pages at once looks before.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

__all__ = ["room"]

_PROC = Path("/proc")
_NODES = Path("/sys/devices/system/node")
_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_UNKNOWN = 1 << 63
_KEPT_BACK = 32  # of a node's memory the part that is never counted on: watermarks, and what drops no pages at once


def room(numa_node: int | None = None) -> tuple[int, str]:
    """Bytes that can be taken now, page cache that would be dropped for them included, and who has no more of them.

    Parameters
    ----------
    numa_node : int, optional
        Where the pages are to come from; None: from anywhere.
    """
    return min([*_of_machine(), *_of_node(numa_node), *_of_control_groups()], default=(_UNKNOWN, "this machine"))


def _of_machine() -> Iterator[tuple[int, str]]:
    available = _figures(_PROC / "meminfo").get("MemAvailable")
    if available is not None:
        yield available, "this machine"


def _of_node(node: int | None) -> Iterator[tuple[int, str]]:
    figures = {} if node is None else _figures(_NODES / f"node{node}" / "meminfo")
    if "MemFree" in figures and "MemTotal" in figures:
        cache = figures.get("Active(file)", 0) + figures.get("Inactive(file)", 0)
        yield max(figures["MemFree"] + cache - figures["MemTotal"] // _KEPT_BACK, 0), f"NUMA node {node}"


def _of_control_groups() -> Iterator[tuple[int, str]]:
    """By Linux's Documentation/admin-guide/cgroup-v2.rst; those of version 1 are not looked at."""
    try:
        lines = (_PROC / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
    if own is None or ".." in Path(own).parts:  # as seen from outside of our namespace
        return
    folder = _CONTROL_GROUPS / own
    for group in (folder, *folder.parents):
        if not group.is_relative_to(_CONTROL_GROUPS):
            return
        try:
            limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
            stat = (line.split() for line in (group / "memory.stat").read_text().splitlines())
        except OSError:
            continue  # the root has none, and a container may not show them
        if limit != "max":
            cache = sum(int(value) for name, value in stat if name in ("active_file", "inactive_file"))
            yield max(int(limit) - int(used) + cache, 0), f"the control group {group} (memory.max={limit})"


def _figures(path: Path) -> dict[str, int]:
    """In bytes, by name; ``Node 0 MemFree: 5 kB`` is ``MemFree``."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    found = {}
    for line in lines:
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            found[name.split()[-1]] = int(value.removesuffix(" kB")) << 10
    return found
