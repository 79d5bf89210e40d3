"""Discovery on the machine that runs the tests, and the two commands."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fabric_kv
from fabric_kv.errors import ConfigError, TopologyError
from fabric_kv.tools import checks, doctor
from fabric_kv.tools import topo as topo_cli
from fabric_kv.topology import Machine, Topology, discover, read_machine
from fabric_kv.topology.cpus import parse_cpus

from .topology_samples import COPIED, needs_hwloc

MI300X = COPIED / "nccl/rccl-mi300x-cx7.xml"
VARIABLES = ("FABRIC_KV_NICS", "FABRIC_KV_TOPOLOGY", "CUDA_VISIBLE_DEVICES")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def tcp() -> Topology:
    return discover(provider="tcp", environ={})


@needs_hwloc
def test_this_machine_over_tcp(tcp: Topology) -> None:
    allowed = os.sched_getaffinity(0)
    for group in tcp.groups:
        assert group.nics
        assert parse_cpus(group.worker_cpus) <= allowed
        assert parse_cpus(group.cpus) <= allowed
        for nic in group.nics:
            assert nic.domain
            assert nic.provider is not None
            assert "tcp" in nic.provider
    assert discover(provider="tcp", environ={}) == tcp


@needs_hwloc
def test_affinity_of_the_process_is_never_left() -> None:
    first = min(os.sched_getaffinity(0))
    program = (
        f"import os; os.sched_setaffinity(0, {{{first}}}); from fabric_kv.topology import discover\n"
        "print({group.worker_cpus for group in discover(provider='tcp', environ={}).groups})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == str({str(first)})
    with pytest.raises(ConfigError, match="none is among the allowed ones"):
        discover(environ={}, cpus="16000")


@needs_hwloc
def test_without_a_provider_software_is_never_chosen() -> None:
    topology = discover(environ={})
    if any(group.nics for group in topology.groups):
        assert all(nic.provider and "tcp" not in nic.provider for group in topology.groups for nic in group.nics)
        return
    with pytest.raises(TopologyError, match='provider="tcp"'):
        topology.engine_arguments()


@needs_hwloc
def test_a_typo_in_the_environment_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FABRIC_KV_NICS", "=mlx5_nonsense")
    with pytest.raises(TopologyError, match="mlx5_nonsense"):
        discover()


@needs_hwloc
def test_engine_from_topology(tcp: Topology, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="fabric_kv"), fabric_kv.Engine.from_topology(tcp) as engine:
        groups = engine.describe()["groups"]
    assert [[rail["domain"] for rail in group["rails"]] for group in groups] == [
        [nic.domain for nic in group.nics] for group in tcp.groups
    ]
    assert [group["cpus"] for group in groups] == [sorted(parse_cpus(group.worker_cpus)) for group in tcp.groups]
    assert tcp.groups[0].reason in caplog.text
    with pytest.raises(ConfigError, match="not both"):
        fabric_kv.Engine.from_topology(tcp, provider="tcp")
    with pytest.raises(TopologyError, match="no usable NIC"):
        fabric_kv.Engine.from_topology(Topology())


@needs_hwloc
def test_engine_from_topology_of_this_machine() -> None:
    with fabric_kv.Engine.from_topology(provider="tcp") as engine:
        assert "tcp" in engine.describe()["groups"][0]["rails"][0]["provider"]


def test_the_core_links_no_hwloc() -> None:
    """It would meet pyhwloc's, of another version, in one process."""
    core = importlib.util.find_spec("fabric_kv._native")
    if core is None or core.origin is None:
        pytest.skip("the C++ core is not built for this Python")
    assert b"libhwloc" not in Path(core.origin).read_bytes()


def test_importing_topology_loads_neither_hwloc_nor_numpy() -> None:
    program = "import sys, fabric_kv.topology; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert not {"pyhwloc", "numpy", "rich", "_native"} & set(done.stdout.split())


def test_the_example_of_the_document_runs() -> None:
    root = Path(__file__).parents[2]
    (example,) = re.findall(r"```python\n(.*?)```", (root / "docs/topology.md").read_text(), re.DOTALL)
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, timeout=60, cwd=root)
    assert done.stdout.startswith("GPU0 0000:0c:00.0 ['mlx5_0'] 0 "), done.stderr


def test_tables_of_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    assert topo_cli.main(["--from", str(MI300X)]) == 0
    assert "mlx5_7" in capsys.readouterr().out


# -- fabric-kv-topo ----------------------------------------------------------------------------------------------------


def test_topo_prints_the_table_of_nvidia_smi(capsys: pytest.CaptureFixture[str]) -> None:
    assert topo_cli.main(["--from", str(COPIED / "nccl/azure-ndv4.xml")]) == 0
    text = capsys.readouterr().out
    lines = [line.split() for line in text.splitlines()]
    header = next(line for line in lines if line[:2] == ["GPU0", "GPU1"])
    assert header == [*(f"GPU{i}" for i in range(8)), *(f"NIC{i}" for i in range(8)), "CPU", "affinity", "NUMA"]
    row = next(line for line in lines if line[:2] == ["GPU0", "X"])
    assert row[1:3] == ["X", "PIX"]
    assert row[9:13] == ["PIX", "PIX", "SYS", "SYS"]
    assert row[-2:] == ["24-47", "1"]
    assert "divided among 2 GPUs" in text
    for name in ("PIX", "PXB", "PHB", "NODE", "SYS"):
        assert f"  {name}" in text


def test_topo_json_is_an_override(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert topo_cli.main(["--from", str(MI300X), "--json"]) == 0
    path = tmp_path / "groups.json"
    path.write_text(capsys.readouterr().out)
    assert topo_cli.main(["--from", str(MI300X), "--override", str(path), "--json", "--gpus", "2"]) == 0
    (group,) = json.loads(capsys.readouterr().out)["groups"]
    assert (group["gpu"], [nic["name"] for nic in group["nics"]]) == ("0000:1e:00.0", ["mlx5_2"])
    assert topo_cli.main(["--from", str(path)]) == 0
    assert "mlx5_7" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--from", "/nonsense"], "/nonsense: No such file"),
        (["--from", str(MI300X), "--nics", "=mlx5_99"], "matches no NIC"),
        (["--from", str(MI300X), "--nics", "=="], "must be a list"),
        (["--from", str(MI300X), "--override", "/nonsense"], "No such file"),
        (["--from", str(MI300X), "--cpus", "9999"], "none is among the allowed ones"),
    ],
)
def test_topo_says_what_is_wrong(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert topo_cli.main(arguments) == 2
    assert said in capsys.readouterr().err


def test_topo_of_every_copied_nccl_file(capsys: pytest.CaptureFixture[str]) -> None:
    for path in sorted((COPIED / "nccl").glob("*.xml")):
        assert topo_cli.main(["--from", str(path)]) == 0
        assert "Groups" in capsys.readouterr().out


@needs_hwloc
def test_topo_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert topo_cli.main(["--provider", "tcp"]) == 0
    assert "Groups" in capsys.readouterr().out


# -- fabric-kv-doctor --------------------------------------------------------------------------------------------------


@needs_hwloc
def test_doctor_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    code = doctor.main(["--json", "--provider", "tcp"])
    report = json.loads(capsys.readouterr().out)
    assert code == (0 if report["ok"] else 1)
    names = {finding["what"] for finding in report["findings"]}
    assert names >= {
        "fabric_kv",
        "libfabric",
        "providers",
        "memlock",
        "huge pages",
        "GPUDirect",
        "ptrace scope",
        "cpus",
    }
    opening = next(finding for finding in report["findings"] if finding["what"] == "opening")
    assert opening["level"] == "ok", opening


@needs_hwloc
def test_doctor_fails_where_no_nic_is_usable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = Machine(source="made up", cpus="0-3", libfabric="libfabric")
    monkeypatch.setattr(doctor, "read_machine", lambda provider: empty)
    assert doctor.main([]) == 1
    text = capsys.readouterr().out
    assert "PROBLEM  opening" in text
    assert "no usable NIC for host in made up" in text
    assert "fix: software providers are used only when named" in text


def test_doctor_reports_what_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FABRIC_KV_NICS", "=nonsense")
    findings = doctor.examine("tcp")
    (finding,) = [finding for finding in findings if finding.what == "topology" and finding.level == "problem"]
    assert finding.fix


def test_every_problem_has_a_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = read_machine(COPIED / "nccl/rccl-mi300x-cx7.xml")
    nvidia = read_machine(COPIED / "nccl/aws-p4d-24xl.xml")
    monkeypatch.setattr("resource.getrlimit", lambda which: (8192 << 10, 8192 << 10))
    findings = [
        *checks.memlock(tmp_path, rdma=True),
        *checks.gpu_direct(nvidia, tmp_path),
        *checks.gpu_direct(machine, tmp_path),
        *checks.rdma_devices(tmp_path),
        *checks.hugepages(tmp_path),
    ]
    (tmp_path / "proc/sys/kernel/yama").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/yama/ptrace_scope").write_text("1\n")
    findings += [*checks.ptrace_scope(tmp_path, needed=True), *checks.ptrace_scope(tmp_path, needed=False)]
    problems = [finding.what for finding in findings if finding.level == "problem"]
    assert problems == ["memlock", "GPUDirect", "/dev/infiniband", "ptrace scope"]
    assert all(finding.fix for finding in findings if finding.level == "problem")


def test_doctor_finds_gpu_direct(tmp_path: Path) -> None:
    nvidia = read_machine(COPIED / "nccl/aws-p4d-24xl.xml")
    driver = tmp_path / "proc/driver/nvidia/version"
    driver.parent.mkdir(parents=True)
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54\n")
    (closed,) = checks.gpu_direct(nvidia, tmp_path)
    assert closed.level == "problem"
    assert "modprobe nvidia_peermem" in closed.fix
    driver.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.1\n")
    assert [finding.level for finding in checks.gpu_direct(nvidia, tmp_path)] == ["ok"]
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54\n")
    (tmp_path / "sys/module/nvidia_peermem").mkdir(parents=True)
    assert [finding.text for finding in checks.gpu_direct(nvidia, tmp_path)] == ["nvidia_peermem is loaded"]


def test_version_is_reported() -> None:
    assert any(fabric_kv.__version__ in finding.text for finding in checks.versions())
