"""What users say: NIC filters, CUDA_VISIBLE_DEVICES, override files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fabric_kv.errors import ConfigError, TopologyError
from fabric_kv.topology import Machine, NicFilter, choose, discover

from .test_topology_choice import gpu, machine, nic
from .topology_samples import COPIED

P4D = COPIED / "nccl/aws-p4d-24xl.xml"
MI300X = COPIED / "nccl/rccl-mi300x-cx7.xml"
NAMES = [f"mlx5_{index}" for index in range(12)] + ["mlx5_bond_0"]


@pytest.fixture
def made() -> Machine:
    return machine([gpu(1)], [nic(name, 16 + index, domain=f"{name}-rdm") for index, name in enumerate(NAMES)])


def used(topology: Any) -> list[str]:
    return [nic.name for group in topology.groups for nic in group.nics]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (None, NAMES),
        ("", NAMES),
        ("  ", NAMES),
        ("=mlx5_1", ["mlx5_1"]),
        ("mlx5_1", ["mlx5_1"]),
        ("=mlx5_0, mlx5_1", ["mlx5_0", "mlx5_1"]),
        ("=mlx5_1*", ["mlx5_1", "mlx5_10", "mlx5_11"]),
        ("^mlx5_bond_0", NAMES[:-1]),
        ("^mlx5_1,mlx5_b*", [name for name in NAMES if name not in ("mlx5_1", "mlx5_bond_0")]),
        ("=*", NAMES),
        ("=0000:10:00.0", ["mlx5_0"]),
        ("=00000000:10:00.0", ["mlx5_0"]),
        ("=mlx5_3-rdm", ["mlx5_3"]),
    ],
)
def test_filter(made: Machine, text: str | None, kept: list[str]) -> None:
    topology = choose(made, nics=text)
    assert used(topology) == kept
    assert {left.nic.name for left in topology.left_out} == set(NAMES) - set(kept)
    for left in topology.left_out:
        assert "filter" in left.reason


@pytest.mark.parametrize("text", ["=mlx5_99", "mlx5_0,mlx5_O", "^mlx5_99", "=mlx6_*", "MLX5_0", "mlx5_", "=mlx5_?"])
def test_filter_items_that_match_nothing_are_errors(made: Machine, text: str) -> None:
    with pytest.raises(TopologyError, match=r"matches no NIC of made up; its NICs: mlx5_0, mlx5_1") as caught:
        choose(made, nics=text)
    assert caught.value.device in text


@pytest.mark.parametrize("text", ["=", "^", "=a,", ",", "^=a", "==a", "a,,b"])
def test_malformed_filters_are_refused(made: Machine, text: str) -> None:
    with pytest.raises(ConfigError, match="must be a list"):
        choose(made, nics=text)


def test_filter_from_the_environment(made: Machine) -> None:
    assert used(choose(made, environ={"FABRIC_KV_NICS": "=mlx5_2"})) == ["mlx5_2"]
    assert used(choose(made, nics="=mlx5_3", environ={"FABRIC_KV_NICS": "=mlx5_2"})) == ["mlx5_3"]
    assert str(NicFilter.parse(" ^a , b ")) == "^a,b"


def test_environment_of_this_process_says_nothing_about_recorded_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FABRIC_KV_NICS", "=nonsense")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("FABRIC_KV_TOPOLOGY", "/nonsense")
    assert len(discover(MI300X).groups) == 8


def test_naming_a_nic_outweighs_rules_but_not_facts() -> None:
    nics = [nic("a", 1, kind="efa"), nic("b", 2, kind="connectx"), nic("c", 3, port="down")]
    made = machine([gpu(9)], nics)
    assert used(choose(made, nics="a,b")) == ["a", "b"]
    assert used(choose(made, nics="*")) == ["a"]
    topology = choose(made, nics="a,c")
    assert used(topology) == ["a"]
    assert "c is asked for, but its port is not active" in topology.warnings


# -- CUDA_VISIBLE_DEVICES ----------------------------------------------------------------------------------------------


def test_device_zero_of_a_process_is_not_gpu_zero_of_the_machine() -> None:
    whole = discover(MI300X)
    third = discover(MI300X, environ={"CUDA_VISIBLE_DEVICES": "3"})
    (group,) = third.groups
    assert (group.gpu, group.gpu_index) == ("0000:69:00.0", 0)
    assert group.nics == whole.groups[3].nics
    assert [nic.name for nic in group.nics] == ["mlx5_3"]


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("0", ["0c"]),
        ("3,1", ["69", "15"]),
        (" 1 , 0 ", ["15", "0c"]),
        ("", []),
        ("-1", []),
        ("2,-1,0", ["1e"]),
        ("NoDevFiles", []),
    ],
)
def test_visible_devices(text: str, gpus: list[str]) -> None:
    topology = discover(MI300X, gpus=text)
    assert [group.gpu for group in topology.groups if group.gpu] == [f"0000:{bus}:00.0" for bus in gpus]
    if not gpus:
        assert topology.groups[0].gpu is None
        assert "no GPU is visible" in topology.groups[0].reason


@pytest.mark.parametrize("text", ["1,8,0", "1,x", "1,1", "1,99999999999999"])
def test_visible_devices_end_at_the_first_that_is_none_as_in_cuda(text: str) -> None:
    topology = discover(MI300X, gpus=text)
    assert [group.gpu for group in topology.groups] == ["0000:15:00.0"]
    assert any("CUDA ignores it and what follows" in warning for warning in topology.warnings)


def test_visible_devices_by_uuid() -> None:
    gpus = [gpu(1), gpu(2)]
    named = [msgspec.structs.replace(each, uuid=f"GPU-{index}0000000-aaaa") for index, each in enumerate(gpus)]
    made = machine(named, [nic("mlx5_0", 9)])
    assert choose(made, gpus="GPU-1000").groups[0].gpu == "0000:02:00.0"
    assert choose(made, gpus="MIG-GPU-10000000-aaaa/1/0").groups[0].gpu == "0000:02:00.0"
    for text in ("GPU-7", "GPU-", "MIG-0abc"):
        with pytest.raises(TopologyError, match="CUDA_VISIBLE_DEVICES names"):
            choose(made, gpus=text)


def test_the_display_of_a_desktop_s_processor_is_no_device() -> None:
    made = machine(
        [msgspec.structs.replace(gpu(1), vendor_device="1002:164e"), gpu(2)], [nic("mlx5_0", 9), nic("mlx5_1", 10)]
    )
    (group,) = choose(made).groups
    assert (group.gpu, group.gpu_index, len(group.nics)) == ("0000:02:00.0", 0, 2)
    assert choose(made, gpus="0").groups == (group,)


def test_unlike_gpus_are_warned_of() -> None:
    made = machine([gpu(1), msgspec.structs.replace(gpu(2), vendor_device="10de:1111")], [nic("mlx5_0", 9)])
    assert any("CUDA_DEVICE_ORDER" in warning for warning in choose(made, gpus="0").warnings)
    ordered = choose(made, environ={"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert ordered.warnings == ()


def test_gpus_that_a_container_was_not_given_do_not_count_but_keep_their_share() -> None:
    gpus = [msgspec.structs.replace(gpu(1), usable=False), gpu(2)]
    made = machine(gpus, [nic("mlx5_0", 9), nic("mlx5_1", 10)])
    (group,) = choose(made).groups
    assert (group.gpu, group.gpu_index) == ("0000:02:00.0", 0)
    assert [each.name for each in group.nics] == ["mlx5_1"]
    assert choose(made, gpus="0").groups == (group,)


# -- overrides ---------------------------------------------------------------------------------------------------------


def write(path: Path, value: object) -> Path:
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_override_wins(tmp_path: Path) -> None:
    path = write(
        tmp_path / "groups.json",
        {
            "groups": [
                {"gpu": "0000:15:00.0", "nics": ["mlx5_7", "0000:07:00.0"], "numa": 1, "worker_cpus": "60"},
                {"gpu": "0000:0C:00.0", "nics": [{"name": "mlx5_5"}]},
            ]
        },
    )
    topology = discover(MI300X, override=path)
    first, second = topology.groups
    assert (first.gpu, [nic.name for nic in first.nics]) == ("0000:0c:00.0", ["mlx5_5"])
    assert first.numa == 0
    assert (second.gpu, [nic.name for nic in second.nics]) == ("0000:15:00.0", ["mlx5_7", "mlx5_0"])
    assert (second.numa, second.worker_cpus) == (1, "60")
    assert str(path) in second.reason
    assert any("has no group for GPU 0000:1e:00.0" in warning for warning in topology.warnings)
    assert discover(MI300X, environ={"FABRIC_KV_TOPOLOGY": str(path)}) == topology
    (alone,) = discover(MI300X, override=path, gpus="1").groups
    assert (alone.gpu, alone.gpu_index, alone.nics) == ("0000:15:00.0", 0, second.nics)


@pytest.mark.parametrize(
    ("groups", "match"),
    [
        ([{"gpu": "0000:99:00.0", "nics": []}], "GPU '0000:99:00.0' is not in .* its GPUs: 0000:0c:00.0"),
        ([{"gpu": "0000:0c:00.0", "nics": ["mlx5_9"]}], "names NIC mlx5_9, which .* lacks; its NICs: mlx5_0 0000:07"),
        ([{"gpu": None, "nics": [{"name": "mlx5_0", "pci": "0000:10:00.0"}]}], "names NIC mlx5_0 0000:10:00.0"),
        ([{"gpu": None, "nics": [{}]}], "without name and address"),
        ([{"gpu": None, "nics": [], "numa": 7}], "names NUMA node 7; .* has: 0, 1"),
        ([{"gpu": None, "nics": [], "worker_cpus": "999"}], "cpus 999, but only 0-223 are allowed"),
        ([{"gpu": None, "nics": [], "worker_cpus": "x"}], "is no list of cpus"),
        ([{"gpu": None, "nicks": []}], "unknown field `nicks`"),
        ([{"gpu": None}], "missing required field `nics`"),
        ([{"gpu": "GPU0", "nics": []}], "'GPU0' is no PCI address"),
        ([{"gpu": None, "nics": []}, {"gpu": None, "nics": []}], "the host has 2 groups"),
        ([{"gpu": "0000:0c:00.0", "nics": []}, {"gpu": "0000:0C:00.0", "nics": []}], "0000:0c:00.0 has 2 groups"),
        ([{"gpu": None, "nics": 3}], "Expected `array`"),
        ([{"gpu": None, "nics": ["mlx5_0", "0000:07:00.0"]}], "names NIC mlx5_0 twice in the group of the host"),
        ([{"gpu": None, "nics": ["mlx5_0"] * 2000}], "a group has 2000 NICs"),
    ],
)
def test_mistakes_in_an_override_are_named(tmp_path: Path, groups: list[object], match: str) -> None:
    path = write(tmp_path / "groups.json", {"groups": groups})
    with pytest.raises(TopologyError, match=match):
        discover(MI300X, override=path)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"groups": [], "version": 9}', "[" * 100_000, '{"grups": []}']
)
def test_malformed_overrides(tmp_path: Path, text: str) -> None:
    with pytest.raises(TopologyError, match="cannot be read as a topology"):
        discover(MI300X, override=write(tmp_path / "groups.json", text))


def test_missing_override() -> None:
    with pytest.raises(TopologyError, match="/nonsense: No such file"):
        discover(MI300X, override="/nonsense")


def test_json_is_a_source_of_its_own(tmp_path: Path) -> None:
    topology = discover(MI300X)
    path = write(tmp_path / "groups.json", topology.to_json())
    again = discover(path)
    assert again == topology
    assert again.to_json() == topology.to_json()
    with pytest.raises(ConfigError, match="already gives the groups"):
        discover(path, gpus="0")


def test_groups_by_hand_need_no_hwloc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.version_info", (3, 11, 9, "final", 0))
    with pytest.raises(TopologyError, match=r"needs Python 3.12 or newer; this is 3.11.*Engine\(groups="):
        discover()
    path = write(tmp_path / "groups.json", {"groups": [{"nics": ["eth0"], "worker_cpus": "1"}]})
    assert discover(path, provider="tcp").engine_arguments() == {
        "provider": "tcp",
        "groups": [["eth0"]],
        "cpus": [[1]],
    }


def test_without_pyhwloc_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.version_info", (3, 12, 1, "final", 0))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(TopologyError, match=r"pip install 'fabric_kv\[topology\]'"):
        discover()


def test_named_nic_that_is_down_is_taken_from_an_override_with_a_warning(tmp_path: Path) -> None:
    made = machine([gpu(1)], [nic("a", 9), nic("b", 10, port="down")])
    path = write(tmp_path / "groups.json", {"groups": [{"gpu": "0000:01:00.0", "nics": ["b"]}]})
    topology = choose(made, override=path)
    assert used(topology) == ["b"]
    assert any("names b, but its port is not active" in warning for warning in topology.warnings)
    assert [left.nic.name for left in topology.left_out] == ["a"]
