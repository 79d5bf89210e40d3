"""How much memory there is to take: of the machine, of a NUMA node, of the control groups that this process is in.

>>> room(numa_node=1)
(1012408320, 'NUMA node 1')

A memfd reserves nothing. Where its pages run out half way, in fallocate as in a page fault, there is no error: the
kernel kills whichever process it thinks best. So whoever takes many pages at once looks before.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["room"]

_PROC = Path("/proc")
_NODES = Path("/sys/devices/system/node")
_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_UNKNOWN = 1 << 63
_NO_LIMIT = 1 << 62  # what version 1 of control groups says in place of "max" is more: LONG_MAX, in whole pages
_KEPT_BACK = 32  # of a node's memory the part that is never counted on: watermarks, and what drops no pages at once


class _GroupFiles(NamedTuple):
    limit: str
    used: str
    cache: tuple[str, str]  # in memory.stat, of the group and those below


_VERSION_2 = _GroupFiles("memory.max", "memory.current", ("active_file", "inactive_file"))
_VERSION_1 = _GroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))


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
    """By Linux's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst."""
    try:
        lines = (_PROC / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, own = line.split(":", 2)
        if ".." in Path(own).parts:  # as seen from outside of our namespace
            continue
        if not controllers:
            yield from _of_hierarchy(_CONTROL_GROUPS, own, _VERSION_2)
        elif "memory" in controllers.split(","):
            yield from _of_hierarchy(_CONTROL_GROUPS / "memory", own, _VERSION_1)


def _of_hierarchy(root: Path, own: str, files: _GroupFiles) -> Iterator[tuple[int, str]]:
    folder = root / own.lstrip("/")
    for group in (folder, *folder.parents):
        if not group.is_relative_to(root):
            return
        try:
            limit, used = ((group / name).read_text().strip() for name in (files.limit, files.used))
            stat = (line.split() for line in (group / "memory.stat").read_text().splitlines())
        except OSError:
            continue  # version 2's root has none, and a container may not show those above its own
        if limit != "max" and int(limit) < _NO_LIMIT:
            cache = sum(int(value) for name, value in stat if name in files.cache)
            yield max(int(limit) - int(used) + cache, 0), f"the control group {group} ({files.limit}={limit})"


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
