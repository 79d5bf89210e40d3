"""Recorded machines give the answers that people read off them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fabric_kv.topology import Machine, choose, discover, distance, nearest

from .topology_samples import COPIED, ELSEWHERE, HWLOC, NCCL, NOT_COPIED, Sample, needs_hwloc

IDS = {"ids": lambda sample: sample.name}


def found(place: Any, machine: Machine) -> dict[str, Any] | None:
    away, nics = nearest(place, machine.nics)
    if away is None:
        return None
    return {
        "class": away.relation,
        "switches": away.switches,
        "bridges": away.bridges,
        "nics": [[nic.name, nic.pci] for nic in nics],
    }


def test_all_recordings_are_tested() -> None:
    assert len(HWLOC) == 33
    assert len(NCCL) == 19
    assert not [name for name in NOT_COPIED if (COPIED / name).exists()]
    missing = {path.relative_to(ELSEWHERE).as_posix() for path in ELSEWHERE.glob("[hn]*/*.xml")}
    assert missing - {sample.name for sample in (*HWLOC, *NCCL)} <= {"hwloc-v1/deep-esb-v100-v1format.xml"}


@needs_hwloc
@pytest.mark.parametrize("sample", HWLOC, **IDS)
def test_hwloc_devices(sample: Sample) -> None:
    machine, expected = sample.machine(), sample.expected()
    assert [(gpu.pci, gpu.vendor_device) for gpu in machine.gpus] == [
        (gpu["pci"], gpu["vendor_device"]) for gpu in expected["gpus"]
    ]
    ports = {4: "up", 1: "down", None: "unknown"}
    assert sorted((nic.name, nic.pci, nic.vendor_device, nic.place.numa, nic.port) for nic in machine.nics) == sorted(
        (nic["name"], nic["pci"], nic["vendor_device"], nic["numa"], ports[nic["port1_state"]])
        for nic in expected["rdma_nics"]
    )
    speeds = {nic.name: nic.pci_gbps for nic in machine.nics}
    for nic in expected["rdma_nics"]:
        assert (speeds[nic["name"]] or 0) / 8 == pytest.approx(nic["link_gbs"], abs=0.1)


@needs_hwloc
@pytest.mark.parametrize("sample", HWLOC, **IDS)
def test_hwloc_nearest_numa_and_cpus(sample: Sample) -> None:
    machine = sample.machine()
    for gpu, expected in zip(machine.gpus, sample.expected()["gpus"], strict=True):
        assert (gpu.place.numa, gpu.place.cpus) == (expected["numa"], expected["cpus"])
        answer = found(gpu.place, machine)
        assert (answer is None) == (expected["nearest_any"] is None)
        if answer:
            assert sorted(answer.pop("nics")) == sorted(expected["nearest_any"].pop("nics"))
            assert answer == expected["nearest_any"]


@needs_hwloc
@pytest.mark.parametrize("sample", HWLOC, **IDS)
def test_hwloc_groups(sample: Sample) -> None:
    expected = sample.expected()
    topology = choose(sample.machine())
    idle = "no GPU is nearest to it"
    out = {left.nic.name: left.reason for left in topology.left_out if left.reason != idle}
    assert sorted(out) == sorted(nic["name"] for nic in expected["rdma_nics"] if nic["exclude"])
    groups = [group for group in topology.groups if group.gpu is not None]
    assert len(groups) == len(expected["gpus"])
    for index, (group, answer) in enumerate(zip(groups, expected["gpus"], strict=True)):
        assert (group.gpu, group.gpu_index, group.numa, group.cpus) == (
            answer["pci"],
            index,
            answer["numa"],
            answer["cpus"],
        )
        assert [nic.name for nic in group.nics] == (answer["share"] or [])
        assert (group.distance is None) == (answer["nearest"] is None)
        if group.distance is not None:
            shown = (group.distance.relation, group.distance.switches, group.distance.bridges)
            assert shown == tuple(answer["nearest"][key] for key in ("class", "switches", "bridges"))
            assert {nic.name for nic in group.nics} <= {name for name, _ in answer["nearest"]["nics"]}
    if not expected["gpus"]:
        (group,) = topology.groups
        assert group.gpu is None
        assert [nic.name for nic in group.nics] == [nic["name"] for nic in expected["rdma_nics"] if not nic["exclude"]]


@pytest.mark.parametrize("sample", NCCL, **IDS)
def test_nccl_devices(sample: Sample) -> None:
    machine, expected = sample.machine(), sample.expected()
    assert sorted((gpu.pci, gpu.place.numa, gpu.place.cpus) for gpu in machine.gpus) == sorted(
        (gpu["pci"], gpu["numa"], gpu["cpus"]) for gpu in expected["gpus"]
    )
    key = str
    assert sorted(((nic.name, nic.pci, nic.place.numa, nic.link_gbps) for nic in machine.nics), key=key) == sorted(
        (
            (nic["name"], nic["pci"], nic["numa"], nic["speed_mbps"] and nic["speed_mbps"] / 1000)
            for nic in expected["nics"]
        ),
        key=key,
    )


@pytest.mark.parametrize("sample", NCCL, **IDS)
def test_nccl_nearest(sample: Sample) -> None:
    machine = sample.machine()
    answers = {answer["pci"]: answer for answer in sample.expected()["gpus"]}
    relations = {"PIX": "switch", "PXB": "switch", "NODE": "cpu", "SOCKET": "cpu", "SYS": "system"}
    for gpu in machine.gpus:
        answer = answers[gpu.pci]
        away, nics = nearest(gpu.place, machine.nics)
        assert away is not None
        assert relations[away.relation] == answer["relation"]
        # NCCL shows each switch as one bridge, so one bridge between is one more switch.
        assert answer["bridges"] == (away.switches - 1 if answer["relation"] == "switch" else None)
        assert sorted(([nic.name, nic.pci] for nic in nics), key=str) == sorted(answer["nics"], key=str)


@pytest.mark.parametrize("sample", NCCL, **IDS)
def test_nccl_groups(sample: Sample) -> None:
    """The division follows the policy: contiguous, in PCI order, all used; only RDMA NICs that are EFA or ConnectX."""
    expected = {answer["pci"]: answer for answer in sample.expected()["gpus"]}
    topology = choose(sample.machine())
    out = {left.nic.label: left.reason for left in topology.left_out if "no GPU is nearest" not in left.reason}
    used: dict[str, list[str]] = {}
    for group in topology.groups:
        if group.gpu is None:
            continue
        near = [name or pci for name, pci in expected[group.gpu]["nics"]]
        assert {nic.label for nic in group.nics} <= set(near)
        assert bool(group.nics) == bool(set(near) - set(out))
        used.setdefault(str(sorted(near)), []).extend(nic.label for nic in group.nics)
    for near, nics in used.items():
        assert {name for name in re.findall(r"'([^']+)'", near) if name not in out} == set(nics)


def test_static_files_that_name_no_classes_say_so() -> None:
    for name in ("nccl/aws-g5.48xl.xml", "nccl/aws-p5.48xl.xml"):
        topology = discover(COPIED / name)
        assert any("no class" in warning for warning in topology.warnings)
        assert topology.groups[0].nics == ()


def test_sockets_of_nccl_are_no_rdma_nics() -> None:
    topology = discover(COPIED / "nccl/azure-ncv4.xml")
    assert [(left.nic.name, left.reason) for left in topology.left_out] == [("eth0", "it is no RDMA NIC")]
    assert all(not group.nics for group in topology.groups)


@needs_hwloc
def test_management_nics_of_efa_machines_are_left_out_unless_named() -> None:
    path = COPIED / "hwloc/aws-p6-b200.48xlarge.xml"
    assert {left.nic.name for left in discover(path).left_out} == {"ibp115s0f0", "ibp116s0f0"}
    named = discover(path, nics="rdmap*,ibp115s0f0")
    assert {left.nic.name for left in named.left_out} == {"ibp116s0f0"}
    assert {nic.name for group in named.groups for nic in group.nics} >= {"ibp115s0f0"}


@needs_hwloc
def test_cpus_of_a_cgroup_are_kept() -> None:
    topology = discover(COPIED / "hwloc/nvidia-dgx2-no-nic.xml")
    assert {group.cpus for group in topology.groups} == {"0-1", "24-25"}
    for group in topology.groups:
        # Two cores for eight GPUs: shared on the GPU's node, rather than taken from the other one.
        assert group.worker_cpus in (["0", "1"] if group.numa == 0 else ["24", "25"])
    assert sum("shares core" in warning for warning in topology.warnings) == 16


# -- what nvidia-smi printed on such machines -------------------------------------------------------------------------


def matrix(name: str) -> dict[tuple[str, str], str]:
    """Cells of the table in a recorded text, by row and column."""
    path = ELSEWHERE / "matrix" / name
    if not path.is_file():
        pytest.skip(f"{name} may not be copied (no licence stated), and {ELSEWHERE} does not have it")
    lines = [line.split() for line in path.read_text().splitlines()]
    header = next(line for line in lines if line[:2] == ["GPU0", "GPU1"])
    columns = [name for name in header if re.fullmatch(r"(GPU|NIC)\d+", name)]
    names = {line[0].rstrip(":"): line[1] for line in lines if len(line) == 2 and line[0].startswith("NIC")}
    return {
        (line[0], names.get(column, column)): cell
        for line in lines
        if line and line != header and re.fullmatch(r"GPU\d+", line[0])
        for column, cell in zip(columns, line[1:], strict=False)
    }


def printed(relation: str) -> str:
    return "SYS" if relation == "SOCKET" else relation


@needs_hwloc
@pytest.mark.parametrize("kind", ["baremetal", "vm"])
def test_relations_are_those_that_nvidia_smi_prints(kind: str) -> None:
    cells = matrix(f"nccl-tests-380-h200-4nic-{kind}.txt")
    machine = Sample(f"hwloc-derived/h200-cx7x4-{kind}.xml").machine()
    answers = {
        (f"GPU{index}", nic.name): printed(distance(gpu.place, nic.place).relation)
        for index, gpu in enumerate(machine.gpus)
        for nic in machine.nics
    }
    assert len(answers) == 32
    assert answers == {key: cells[key] for key in answers}


@needs_hwloc
def test_relations_of_a_dgx2_are_those_that_nvidia_smi_prints() -> None:
    cells = matrix("dgx2-gds-guide-topo-mp.txt")
    machine = Sample("hwloc/nvidia-dgx2-no-nic.xml").machine()
    answers = {
        (f"GPU{row}", f"GPU{column}"): printed(distance(gpu.place, other.place).relation)
        for row, gpu in enumerate(machine.gpus)
        for column, other in enumerate(machine.gpus[:8])
        if row != column
    }
    assert len(answers) == 120
    assert answers == {key: cells[key] for key in answers}


def test_readme_names_every_recording() -> None:
    text = (COPIED / "README.md").read_text()
    for path in COPIED.glob("*/*.xml"):
        assert f"`{path.relative_to(COPIED).as_posix()}`" in text
    for licence in re.findall(r"`([\w.-]+\.txt)`", text):
        assert (Path(COPIED) / "LICENSES" / licence).is_file()
