"""Host memory as most machines do not have it: huge pages, several NUMA nodes, and limits that are really met.

>>> scripts/rdma-lab run --numa 2 --memory 1536 -- .venv/bin/python -m pytest tests/lab/test_host_memory.py \
...     --require hugepages --require numa --require rdma
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from fabric_kv import AllocationError, Engine
from fabric_kv.memory import BufferServer, HostBuffer
from fabric_kv.memory.room import room

from ..integration.fabrics import SLOWER, nics_of, rdma_devices, with_rdma

ROOT = Path(__file__).parents[2]
NODES = sorted(int(path.name[4:]) for path in Path("/sys/devices/system/node").glob("node[0-9]*"))
IN_THE_LAB = "RDMA_LAB" in os.environ
LONG = 30.0 * SLOWER
MIB = 1 << 20
NOBODY = 65534

in_the_lab = pytest.mark.skipif(not IN_THE_LAB, reason="takes all memory: only in the guest of scripts/rdma-lab")


class Pool(NamedTuple):
    """The huge pages of the default size."""

    nbytes: int  # of one page

    def folder(self, node: int | None = None) -> Path:
        base = Path("/sys/kernel/mm" if node is None else f"/sys/devices/system/node/node{node}")
        return base / f"hugepages/hugepages-{self.nbytes >> 10}kB"

    def free(self, node: int | None = None) -> int:
        return int((self.folder(node) / "free_hugepages").read_text())


@pytest.fixture(scope="module")
def reserved() -> Iterator[Pool]:
    lines = Path("/proc/meminfo").read_text().splitlines()
    found = [int(line.split()[1]) << 10 for line in lines if line.startswith("Hugepagesize:")]
    if not found:
        pytest.skip("this kernel has no huge pages")
    pool = Pool(found[0])
    number = pool.folder() / "nr_hugepages"
    before = number.read_text()
    if IN_THE_LAB:  # a machine of ours alone
        number.write_text(str(32 * len(NODES)))
    if pool.free() < 8:
        pytest.skip(f"{pool.free()} free huge pages, 8 are needed: echo 64 >{number}")
    yield pool
    if IN_THE_LAB:
        number.write_text(before)


@pytest.fixture(scope="module", params=with_rdma("tcp"))
def opened(request: pytest.FixtureRequest) -> str:
    """A provider that has opened what it keeps."""
    Engine(request.param, nics=nics_of(request.param)).close()
    name: str = request.param
    return name


@pytest.fixture
def pool(reserved: Pool) -> Iterator[Pool]:
    """Nothing of it is left in use, nor descriptors or mappings."""
    gc.collect()

    def held() -> tuple[int, int, int]:
        return reserved.free(), len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("memfd:")

    before = held()
    yield reserved
    gc.collect()
    assert held() == before


def pages_of(buffer: HostBuffer) -> tuple[dict[int, int], int]:
    """Pages that are mapped by node, and their size, once all were touched here."""
    buffer.array[:: os.sysconf("SC_PAGESIZE")] = 1
    for line in Path("/proc/self/numa_maps").read_text().splitlines():
        address, *words = line.split()
        if int(address, 16) == buffer.address:
            fields = dict(word.split("=", 1) for word in words if "=" in word)
            counts = {int(name[1:]): int(count) for name, count in fields.items() if name[1:].isdecimal()}
            return counts, int(fields["kernelpagesize_kB"]) << 10
    raise AssertionError("it is not mapped")


IMPORTER = """
import sys
import numpy as np
from fabric_kv.memory import import_buffers
with import_buffers(sys.argv[1], timeout_s=float(sys.argv[2])) as buffers:
    for buffer in buffers.values():
        np.asarray(buffer)[:] += 1
        print(buffer.info.page_bytes)
"""


def import_elsewhere(path: str) -> list[str]:
    """Another process maps what is served there and adds 1 to each byte; the sizes of pages that it was told."""
    command = [sys.executable, "-c", IMPORTER, path, str(LONG)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG, env=environment())
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}


# -- huge pages --------------------------------------------------------------------------------------------------------


@pytest.mark.hugepages
@pytest.mark.parametrize("by_size", [False, True])
def test_huge_pages_are_taken_at_once_shared_and_given_back(pool: Pool, tmp_path: Path, by_size: bool) -> None:
    free = pool.free()
    with HostBuffer.allocate(2 * pool.nbytes + 1, hugepages=pool.nbytes if by_size else True) as buffer:
        assert buffer.info.handle_bytes == (3 * pool.nbytes,)
        assert pool.free() == free - 3
        counts, page_bytes = pages_of(buffer)
        assert (sum(counts.values()), page_bytes) == (3, pool.nbytes)
        buffer.array[:] = 6
        with buffer.export() as exported, HostBuffer.import_(exported) as twin:
            assert twin.address % pool.nbytes == 0
            assert (twin.array == 6).all()
            assert pages_of(twin) == (counts, page_bytes)
        buffer.array[:] = 6
        with BufferServer(str(tmp_path / "s"), {"kv": buffer}, timeout_s=LONG):
            assert import_elsewhere(str(tmp_path / "s")) == [str(pool.nbytes)]
        assert (buffer.array == 7).all()
        assert pool.free() == free - 3
    assert pool.free() == free


@pytest.mark.hugepages
def test_more_huge_pages_than_there_are_is_an_error_that_says_how_many(pool: Pool) -> None:
    count = pool.free() + 1
    with pytest.raises(AllocationError, match=rf"it takes {count} free huge pages of {pool.nbytes} bytes: .*nr_huge"):
        HostBuffer.allocate(count * pool.nbytes, hugepages=True)


@pytest.mark.hugepages
def test_a_size_that_the_kernel_does_not_have_is_named_with_those_that_it_has(pool: Pool) -> None:
    with pytest.raises(AllocationError, match=rf"huge pages have \[.*{pool.nbytes}.*\] bytes"):
        HostBuffer.allocate(1, hugepages=2 * pool.nbytes)


@pytest.mark.hugepages
@pytest.mark.usefixtures("pool")
def test_pages_move_between_buffers_on_huge_pages(opened: str) -> None:
    page, count = 40_000, 50
    with (
        Engine(opened, nics=nics_of(opened)) as engine,
        HostBuffer.allocate(page * count, hugepages=True) as source,
        HostBuffer.allocate(page * count, hugepages=True) as target,
    ):
        source.array[:] = np.random.default_rng(7).integers(0, 256, page * count, np.uint8)
        src, dst = source.region(engine), target.region(engine)
        counter = engine.counter(unit_bytes=page, expected_units=count)
        order = list(range(count))
        engine.write_pages(
            engine.add_peer(engine.address), src, dst.remote, order[::-1], order, page_bytes=page, token=counter.token
        ).result(LONG)
        counter.result(LONG)
        assert (target.array.reshape(count, page)[::-1] == source.array.reshape(count, page)).all()
        src.close()
        dst.close()


# -- NUMA nodes --------------------------------------------------------------------------------------------------------


@pytest.fixture
def bound() -> None:
    with HostBuffer.allocate(1, numa_node=NODES[0]) as buffer:
        if buffer.numa_node is None:
            pytest.skip("mbind is forbidden here")


@pytest.mark.numa
@pytest.mark.skipif(len(NODES) < 2, reason=f"several NUMA nodes are needed, there is {NODES or 'none'}")
@pytest.mark.usefixtures("bound")
@pytest.mark.parametrize("node", NODES[:4])
class TestNodes:
    """On each of them."""

    def test_all_pages_come_from_it(self, node: int) -> None:
        with HostBuffer.allocate(3 * MIB, numa_node=node) as buffer:
            assert buffer.numa_node == node
            counts, page_bytes = pages_of(buffer)
            assert counts == {node: 3 * MIB // page_bytes}

    def test_whoever_touches_them_first(self, node: int) -> None:
        """The policy goes with the memory: an importer of what is not populated has pages of the same node."""
        with (
            HostBuffer.allocate(3 * MIB, numa_node=node, populate=False) as buffer,
            buffer.export() as exported,
            HostBuffer.import_(exported) as twin,
        ):
            counts, page_bytes = pages_of(twin)
            assert counts == {node: 3 * MIB // page_bytes}

    @pytest.mark.hugepages
    def test_huge_pages_come_from_it(self, pool: Pool, node: int) -> None:
        free = {each: pool.free(each) for each in NODES}
        if free[node] < 3:
            pytest.skip(f"{free[node]} free huge pages on node {node}, 3 are needed: {pool.folder(node)}/nr_hugepages")
        with HostBuffer.allocate(2 * pool.nbytes + 1, hugepages=True, numa_node=node) as buffer:
            assert buffer.numa_node == node
            assert {each: pool.free(each) for each in NODES} == free | {node: free[node] - 3}
            assert pages_of(buffer) == ({node: 3}, pool.nbytes)
            assert not buffer.array[1 :: os.sysconf("SC_PAGESIZE")].any()

    @pytest.mark.hugepages
    def test_huge_pages_that_only_other_nodes_have_are_not_taken(self, pool: Pool, node: int) -> None:
        count = pool.free(node) + 1
        if count > pool.free():
            pytest.skip("no other node has free huge pages")
        with pytest.raises(AllocationError, match=rf"on NUMA node {node}: .*/node{node}/hugepages/.*nr_hugepages"):
            HostBuffer.allocate(count * pool.nbytes, hugepages=True, numa_node=node)

    @in_the_lab
    def test_what_a_node_has_can_be_taken_and_no_more(self, node: int) -> None:
        left, whose = room(node)
        assert whose == f"NUMA node {node}"
        with pytest.raises(AllocationError, match=rf"NUMA node {node} has \d+ left"):
            HostBuffer.allocate(left + 64 * MIB, numa_node=node)
        with HostBuffer.allocate(left - 64 * MIB, numa_node=node) as buffer:
            assert buffer.numa_node == node


# -- what there is -----------------------------------------------------------------------------------------------------


@in_the_lab
def test_more_than_the_machine_has_is_an_error_and_nobody_is_killed() -> None:
    with pytest.raises(AllocationError, match=r"this machine has \d+ left"):
        HostBuffer.allocate(room()[0] + 64 * MIB)


IN_A_GROUP = """
import sys
from pathlib import Path
from fabric_kv import AllocationError
from fabric_kv.memory import HostBuffer
(Path(sys.argv[1]) / "cgroup.procs").write_text("0")
HostBuffer.allocate(64 << 20).close()
try:
    HostBuffer.allocate(300 << 20)
except AllocationError as error:
    print(error)
"""


@contextmanager
def control_groups(version: int) -> Iterator[tuple[Path, str]]:
    """A hierarchy of control groups, where our library looks for it, and the name of the limit on their memory."""
    root = Path("/sys/fs/cgroup")
    if version == 2:
        kind, folder, limit = ["-t", "cgroup2"], root, "memory.max"
    else:
        mount("-t", "tmpfs", "none", str(root))
        kind, folder, limit = ["-t", "cgroup", "-o", "memory"], root / "memory", "memory.limit_in_bytes"
        folder.mkdir()
    mount(*kind, "none", str(folder))
    try:
        if version == 2:
            (folder / "cgroup.subtree_control").write_text("+memory")
        yield folder, limit
    finally:
        if version == 2:  # or version 1 could not have it
            (folder / "cgroup.subtree_control").write_text("-memory")
        for path in [folder] if version == 2 else [folder, root]:
            subprocess.run(["umount", str(path)], check=True, timeout=LONG)


def mount(*words: str) -> None:
    """Mount it. The other version keeps the memory controller until pages of its former groups have been dropped."""
    deadline = time.monotonic() + LONG
    while True:
        Path("/proc/sys/vm/drop_caches").write_text("3")
        if not (status := subprocess.run(["mount", *words], timeout=LONG).returncode):
            return
        assert time.monotonic() < deadline, f"mount {' '.join(words)}: exit status {status}"
        time.sleep(0.2)


@in_the_lab
@pytest.mark.parametrize("version", [2, 1])
def test_more_than_a_control_group_may_have_is_an_error_and_nobody_is_killed(version: int) -> None:
    with control_groups(version) as (root, limit):
        group = root / "fabric_kv"
        group.mkdir()
        try:
            (group / limit).write_text(str(256 * MIB))
            command = [sys.executable, "-c", IN_A_GROUP, str(group)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=LONG, env=environment())
        finally:
            group.rmdir()
    assert done.returncode == 0, done
    assert f"the control group {group} ({limit}={256 * MIB}) has" in done.stdout


# -- locked memory -----------------------------------------------------------------------------------------------------

# Without privileges: a limit on locked memory is none for whoever has CAP_IPC_LOCK. setuid(2) drops all capabilities.
LOCKED = """
import json, os, resource, sys
from pathlib import Path
from fabric_kv import Engine, FabricKVError
from fabric_kv.memory import HostBuffer

def pinned():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmPin:"))

def limit(nbytes):
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (nbytes, resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]))

def attempt(what, call):
    try:
        result = call()
        said[what] = "done"
        return result
    except FabricKVError as error:
        said[what] = [type(error).__name__, str(error)]

if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(int(sys.argv[2]))
    os.setuid(int(sys.argv[2]))
said = {}
_, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
limit(65536)
attempt("opened with 64 KiB", lambda: Engine("verbs", nics=[sys.argv[1]]))
limit(hard)
with Engine("verbs", nics=[sys.argv[1]]) as engine:
    def held():
        return [pinned(), engine.describe()["groups"][0]["registrations"]]
    small, large = HostBuffer.allocate(1 << 20), HostBuffer.allocate(64 << 20)
    said["before"] = held()
    limit(said["before"][0] + (8 << 20))
    said["limit"] = said["before"][0] + (8 << 20)
    attempt("small", lambda: small.region(engine).close())
    attempt("large", lambda: large.region(engine))
    said["after"] = held()
    kept = attempt("many", lambda: [small.region(engine, group=0) for _ in range(100)])  # one registration
    said["kept"] = held()
    del kept
    limit(hard)
    attempt("raised", lambda: large.region(engine).close())
print(json.dumps(said))
"""


@pytest.mark.rdma
@pytest.mark.skipif(not rdma_devices(), reason="no RDMA device with a port that is up: others pin no memory")
def test_a_limit_on_locked_memory_is_named_with_what_was_asked_and_the_fix() -> None:
    command = [sys.executable, "-c", LOCKED, rdma_devices()[0], str(NOBODY)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=4 * LONG, env=environment())
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    assert said["small"] == said["many"] == said["raised"] == "done"
    assert said["after"] == said["before"]
    assert said["kept"] == [said["before"][0] + MIB, said["before"][1] + 1]
    kind, words = said["large"]
    assert kind == "RegistrationError"
    for expected in (
        f"{64 * MIB} bytes were to be locked",
        f"(RLIMIT_MEMLOCK) is {said['limit']} bytes",
        f"{said['before'][0]} are pinned already",
        "ulimit -l unlimited",
    ):
        assert expected in words, said
    kind, words = said["opened with 64 KiB"]
    assert kind in ("FabricError", "RegistrationError")
    assert "RLIMIT_MEMLOCK) is 65536 bytes" in words, said
