"""Files that are no topology, broken ones, and ones made to harm: a typed error, no crash, in bounded time."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fabric_kv.errors import TopologyError
from fabric_kv.topology import hwloc, read_machine
from fabric_kv.topology.nccl import read_nccl

from .topology_samples import COPIED, ELSEWHERE, HWLOC, needs_hwloc

P5 = COPIED / "hwloc/aws-p5.48xlarge.xml"
HEAD = '<?xml version="1.0" encoding="UTF-8"?>\n<!DOCTYPE topology SYSTEM "hwloc2.dtd">\n<topology version="2.0">'
MACHINE = (
    '<object type="Machine" os_index="0" cpuset="0x1" complete_cpuset="0x1" allowed_cpuset="0x1" nodeset="0x1" '
    'complete_nodeset="0x1" allowed_nodeset="0x1" gp_index="1"><object type="NUMANode" os_index="0" cpuset="0x1" '
    'complete_cpuset="0x1" nodeset="0x1" complete_nodeset="0x1" gp_index="2"/><object type="PU" os_index="0" '
    'cpuset="0x1" complete_cpuset="0x1" nodeset="0x1" complete_nodeset="0x1" gp_index="3"/>{}</object></topology>'
)
PCI = (
    '<object type="PCIDev" gp_index="{0}" pci_busid="0000:{1:02x}:{2:02x}.{3}" pci_type="0302 [10de:2330] [0:0] 00" '
    'pci_link_speed="0.0"></object>'
)


def read(tmp_path: Path, content: str | bytes) -> None:
    path = tmp_path / "file.xml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    read_machine(path)


@pytest.mark.parametrize(
    "content",
    [
        "",
        " ",
        "hello",
        "\0" * 100,
        "<",
        "<a",
        "<!-- only a comment -->",
        "<?xml version='1.0'?>",
        "<html></html>",
        "[]",
    ],
)
def test_what_is_no_topology(tmp_path: Path, content: str) -> None:
    with pytest.raises(TopologyError) as caught:
        read(tmp_path, content)
    assert caught.value.device == str(tmp_path / "file.xml")
    assert str(tmp_path / "file.xml") in str(caught.value)


def test_missing_unreadable_and_huge_files(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match="No such file"):
        read_machine(tmp_path / "nothing.xml")
    huge = tmp_path / "huge.xml"
    with huge.open("wb") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(TopologyError, match="larger than 8 MiB"):
        read_machine(huge)
    with pytest.raises(TopologyError, match="a comment of the XML does not end"):
        read(tmp_path, b"<!--" * 1_000_000)
    assert b"".join([b"a", b"b"]) == hwloc.strip_comments(b"a<!-- x --><!---->b<!-- <topology> -->", "x")


# -- hwloc -------------------------------------------------------------------------------------------------------------


@needs_hwloc
@pytest.mark.parametrize(
    "content",
    [
        HEAD,
        f"{HEAD}</topology>",
        f"{HEAD}<object></object></topology>",
        f"{HEAD}<object type='Machine'/></topology>",
        HEAD + MACHINE.format("")[:-30],
        f'{HEAD}<distances2 type="NUMANode" nbobjs="4000000000" kind="5"/></topology>',
        HEAD + "<object type='Group'>" * 50_000,
        HEAD + MACHINE.format("").replace("0x1", "0x" + "f" * 300_000),
        HEAD.encode() + b"\xff\xfe\x00" * 1000,
        '<topology version="9.9">' + MACHINE.format(""),
    ],
    ids=lambda content: f"{len(content)} bytes",
)
def test_broken_hwloc_files(tmp_path: Path, content: str | bytes) -> None:
    with pytest.raises(TopologyError, match=r"file\.xml: hwloc"):
        read(tmp_path, content)


@needs_hwloc
@pytest.mark.parametrize("device", ['<object type="PCIDev" pci_busid="zz"/>', '<object type="OSDev" osdev_type="99"/>'])
def test_devices_that_hwloc_passes_over(tmp_path: Path, device: str) -> None:
    read(tmp_path, HEAD + MACHINE.format(device))


@needs_hwloc
def test_deep_and_wide_hwloc_files(tmp_path: Path) -> None:
    bridges = "".join(
        f'<object type="Bridge" gp_index="{100 + i}" bridge_type="{"1-1" if i else "0-1"}" depth="{i}" '
        f'bridge_pci="0000:[00-ff]" pci_busid="0000:00:00.0" pci_type="0604 [1:1] [0:0] 00" pci_link_speed="0.0">'
        for i in range(500)
    )
    deep = bridges + PCI.format(9999, 1, 0, 0) + "</object>" * 500
    with pytest.raises(TopologyError, match="more than 64 bridges"):
        read(tmp_path, HEAD + MACHINE.format(deep))
    wide = "".join(PCI.format(100 + i, i >> 8, i >> 3 & 31, i & 7) for i in range(2000))
    with pytest.raises(TopologyError, match=r"2000 GPUs, .* more than any machine has"):
        read(tmp_path, HEAD + MACHINE.format(wide))


@needs_hwloc
def test_truncated_and_corrupted_hwloc_files(tmp_path: Path, seed: int) -> None:
    """Either a typed error or an answer, whatever is wrong with the bytes."""
    rng = random.Random(seed)
    whole = P5.read_bytes()
    for _ in range(8):
        data = bytearray(whole[: rng.randrange(1500, len(whole))] if rng.random() < 0.5 else whole)
        for _ in range(rng.randrange(1, 40)):
            data[rng.randrange(1500, len(data))] = rng.randrange(256)
        with contextlib.suppress(TopologyError):
            read(tmp_path, bytes(data))


@needs_hwloc
def test_distances_without_a_name_do_not_crash_the_reader(tmp_path: Path) -> None:
    distances = (
        '<distances2 type="NUMANode" nbobjs="2" kind="5" indexing="os"><indexes length="4">0 1 </indexes>'
        '<u64values length="12">10 20 20 10 </u64values></distances2>'
    )
    data = P5.read_bytes().replace(b"</topology>", distances.encode() + b"</topology>")
    assert b"NUMALatency" not in data
    read(tmp_path, data)


@needs_hwloc
@pytest.mark.parametrize("root", ["<topology>", '<topology version="1.0">', "<topology foo='x'>"])
def test_format_1_is_named(tmp_path: Path, root: str) -> None:
    with pytest.raises(TopologyError, match=r"format 1 is not supported.*lstopo-no-graphics -i OLD.xml"):
        read(tmp_path, f"<?xml version='1.0'?>\n<!-- c -->\n{root}<object type='Machine'/></topology>")


def test_recorded_format_1_is_named() -> None:
    path = ELSEWHERE / "hwloc-v1/deep-esb-v100-v1format.xml"
    if not path.is_file():
        pytest.skip(f"{path.name} may not be copied (QPL-1.0), and {ELSEWHERE} does not have it")
    with pytest.raises(TopologyError, match="format 1 is not supported"):
        read_machine(path)


@needs_hwloc
def test_comments_and_blank_lines_are_no_obstacle(tmp_path: Path) -> None:
    path = tmp_path / "file.xml"
    path.write_bytes(b"\n\n<!-- <system> -->\n\n" + P5.read_bytes().partition(b"\n")[2])
    assert len(read_machine(path).gpus) == 8


def children() -> set[str]:
    """Processes that this one has started and not yet waited for; other tests' too."""
    return {pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


@needs_hwloc
@pytest.mark.parametrize(
    ("program", "match"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGXCPU)", r"hwloc took too much cpu time \(SIGXCPU\)"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", r"hwloc crashed \(SIGSEGV\)"),
        ("import sys; sys.exit('no way')", "hwloc cannot read it: no way"),
        ("print('{}')", "hwloc's answer makes no sense"),
        ("print('x' * 1000)", "hwloc's answer makes no sense"),
        ("import time; time.sleep(60)", "did not finish within 0.2 s"),
    ],
)
def test_whatever_the_reading_process_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, match: str
) -> None:
    (tmp_path / "hwloc_child.py").write_text(program)
    monkeypatch.setattr(hwloc, "__file__", str(tmp_path / "hwloc.py"))
    if "sleep" in program:
        monkeypatch.setattr(hwloc, "TIMEOUT_S", 0.2)
    before = children()
    with pytest.raises(TopologyError, match=match):
        read_machine(P5)
    assert children() == before


@needs_hwloc
def test_nothing_of_hwloc_or_cuda_enters_this_process() -> None:
    program = (
        "import sys; from fabric_kv.topology import read_machine; read_machine(sys.argv[1])\n"
        "maps = open('/proc/self/maps').read(); print(*[m for m in sys.modules if 'hwloc' in m.split('.')[0]])\n"
        "print(*[name for name in ('hwloc', 'cudart', 'nvidia') if 'lib' + name in maps])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(P5)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == []
    assert signal.getsignal(signal.SIGCHLD) in (signal.SIG_DFL, None)


@needs_hwloc
@pytest.mark.parametrize(
    ("name", "value"),
    [("HWLOC_SYNTHETIC", "node:1 pu:1"), ("HWLOC_XMLFILE", "/nonsense"), ("HWLOC_FSROOT", "/nonsense")],
)
def test_hwloc_variables_of_the_user_do_not_change_the_answer(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    expected = read_machine()
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("HWLOC_COMPONENTS", "synthetic")
    assert read_machine() == expected


# -- NCCL --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("<system>", "no element found"),
        ("<system><cpu></system>", "mismatched tag"),
        ("<systems></systems>", "<systems>"),
        ("<system><cpu numaid='0'><pci/></cpu></system>", "busid '' is no PCI address"),
        ("<system><pci busid='0000:00:20.9'/></system>", "is no PCI address"),
        ("<system><cpu affinity='xyz'/></system>", "no list of 32-bit hexadecimal words"),
        ("<system><cpu affinity='{}'/></system>".format(",".join(["ffffffff"] * 4000)), "more than any machine has"),
        ("<system>" + "<pci busid='0000:01:00.0'>" * 1000, "more than 64 levels"),
        ("<system>" + "<x/>" * 200_000 + "</system>", "100000 elements"),
        (
            "<system>"
            + "".join(f"<pci busid='0000:{i >> 5:02x}:{i & 31:02x}.0' class='0x030200'/>" for i in range(400))
            + "</system>",
            "more than 256 GPUs",
        ),
        ("<!DOCTYPE system [<!ENTITY a 'aaaa'>]><system>&a;</system>", "document type"),
        ("<!DOCTYPE system SYSTEM 'http://192.0.2.1/x.dtd'><system/>", "document type"),
        ("<system>&undefined;</system>", "undefined entity"),
        ("<system a='1' a='2'/>", "duplicate attribute"),
    ],
)
def test_broken_nccl_files(tmp_path: Path, content: str, match: str) -> None:
    with pytest.raises(TopologyError, match=match):
        read(tmp_path, content)


def test_entities_that_grow_are_refused_before_they_do() -> None:
    laughs = "".join(f"<!ENTITY a{i} '{f'&a{i - 1};' * 10}'>" for i in range(1, 30))
    with pytest.raises(TopologyError, match="document type"):
        read_nccl(f"<!DOCTYPE system [<!ENTITY a0 'ha'>{laughs}]><system>&a29;</system>".encode(), "laughs.xml")


def test_unknown_numa_node_of_nccl_is_unknown() -> None:
    text = "<system><cpu numaid='-1'><pci busid='0000:01:00.0' class='0x030200'/></cpu></system>"
    machine = read_nccl(text.encode(), "x")
    assert machine.gpus[0].place.numa is None
    assert machine.nodes == {}


def test_truncated_and_corrupted_nccl_files(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    for sample in sorted((COPIED / "nccl").glob("*.xml")):
        whole = sample.read_bytes()
        for _ in range(20):
            data = bytearray(whole[: rng.randrange(1, len(whole))] if rng.random() < 0.5 else whole)
            for _ in range(rng.randrange(1, 10)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            with contextlib.suppress(TopologyError):
                read_nccl(bytes(data), sample.name)


def test_all_copied_hwloc_files_keep_their_licence_comments() -> None:
    for sample in HWLOC:
        if sample.name.startswith("hwloc/aws") and (COPIED / sample.name).exists() and "g4dn" not in sample.name:
            assert b"SPDX-License-Identifier: Apache-2.0" in (COPIED / sample.name).read_bytes()
