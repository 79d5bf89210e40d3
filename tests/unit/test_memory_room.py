"""What memory there is: by the machine's, a node's and the control groups' own figures, and the tightest counts."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from fabric_kv import AllocationError, ConfigError
from fabric_kv.memory import HostBuffer, host, room

KIB = 1 << 10


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders in place of /proc and /sys."""
    for name, folder in (("_PROC", "proc"), ("_NODES", "nodes"), ("_CONTROL_GROUPS", "groups")):
        (tmp_path / folder).mkdir()
        monkeypatch.setattr(room, name, tmp_path / folder)
    write(tmp_path / "proc/meminfo", "MemTotal: 9000 kB", "MemAvailable:    5000 kB", "HugePages_Total: 4")
    write(tmp_path / "proc/self/cgroup", "3:cpu:/elsewhere", "0::/pod/rank")
    return tmp_path


def write(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def group(path: Path, limit: str, used: int = 0, inactive_file: int = 0) -> None:
    write(path / "memory.max", limit)
    write(path / "memory.current", str(used))
    write(path / "memory.stat", "anon 7", f"inactive_file {inactive_file}", "active_file 5", "shmem 3")


def test_the_machine(machine: Path) -> None:
    assert room.room() == (5000 * KIB, "this machine")
    write(machine / "proc/meminfo", "MemTotal: 9000 kB")
    assert room.room()[0] >= 1 << 62, "nothing is known, and nothing refused"


def test_a_node_counts_its_page_cache_but_for_a_reserve(machine: Path) -> None:
    figures = {"MemTotal": 3200, "MemFree": 1000, "Active(file)": 30, "Inactive(file)": 4, "Shmem": 900}
    write(machine / "nodes/node1/meminfo", *(f"Node 1 {name}:  {value} kB" for name, value in figures.items()))
    assert room.room(1) == ((1000 + 34 - 100) * KIB, "NUMA node 1")
    assert room.room(0) == room.room() == (5000 * KIB, "this machine")


def test_every_control_group_above_counts(machine: Path) -> None:
    groups = machine / "groups"
    group(groups / "pod/rank", "max")
    assert room.room() == (5000 * KIB, "this machine")
    group(groups / "pod", "4096000", used=1000, inactive_file=95)
    found, who = room.room()
    assert found == 4096000 - 1000 + 95 + 5
    assert str(groups / "pod") in who
    assert "memory.max=4096000" in who
    group(groups / "pod/rank", "5000", used=9000)
    assert room.room()[0] == 0
    write(machine / "proc/self/cgroup", "0::/../other")  # as from outside of a namespace
    assert room.room() == (5000 * KIB, "this machine")
    (machine / "proc/self/cgroup").unlink()
    assert room.room() == (5000 * KIB, "this machine")


def old_group(path: Path, limit: int, used: int = 0, total_inactive_file: int = 0) -> None:
    write(path / "memory.limit_in_bytes", str(limit))
    write(path / "memory.usage_in_bytes", str(used))
    write(path / "memory.stat", "inactive_file 1", f"total_inactive_file {total_inactive_file}", "total_active_file 5")


def test_control_groups_of_version_1_count_as_well(machine: Path) -> None:
    write(machine / "proc/self/cgroup", "7:hugetlb,memory:/docker/0123", "3:cpu:/elsewhere", "0::/pod")
    old = machine / "groups/memory"
    old_group(old, 0x7FFFFFFFFFFFF000)
    assert room.room() == (5000 * KIB, "this machine")
    old_group(old, 4096000, used=1000, total_inactive_file=95)  # a container's own group is its root
    found, who = room.room()
    assert found == 4096000 - 1000 + 95 + 5
    assert f"{old} (memory.limit_in_bytes=4096000)" in who
    old_group(old / "docker/0123", 8192, used=192)
    assert room.room()[0] == 8000 + 5
    group(machine / "groups/pod", "7000", used=1)
    assert room.room()[0] == 6999 + 5
    write(machine / "proc/self/cgroup", "7:memory:/../other")
    assert room.room() == (5000 * KIB, "this machine")


def test_what_is_not_there_is_refused_before_any_page_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    fds = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(host, "room", lambda node: (8191, f"node {node} of the test"))
    with pytest.raises(AllocationError, match=r"5000 bytes .* not there: node None of .* 8191 left") as no:
        HostBuffer.allocate(5000)
    assert (no.value.code, no.value.device, no.value.nbytes) == (errno.ENOMEM, "cpu", 5000)
    assert len(os.listdir("/proc/self/fd")) == fds
    HostBuffer.allocate(5000, populate=False).close()
    HostBuffer.allocate(4096).close()


def test_huge_pages_of_a_node_are_taken_at_once_or_not_at_all() -> None:
    with pytest.raises(ConfigError, match="from any node"):
        HostBuffer.allocate(1, hugepages=2 << 20, numa_node=0, populate=False)
