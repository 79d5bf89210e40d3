"""The division of NICs and cores: by generated machines, and case by case."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric_kv.errors import ConfigError, TopologyError
from fabric_kv.topology import Gpu, Machine, Nic, Place, Topology, choose, distance, nearest
from fabric_kv.topology.cpus import Want, format_cpus, guess_cores, parse_cpus, spread
from fabric_kv.topology.model import Kind, pci_order
from fabric_kv.topology.nccl import read_nccl

# -- machines ----------------------------------------------------------------------------------------------------------


def gpu(
    bus: int, *, numa: int | None = 0, bridges: tuple[str, ...] = (), host: str | None = None, cpus: str = ""
) -> Gpu:
    place = Place(numa=numa, bridges=bridges, host_bridge=host, cpus=cpus)
    return Gpu(pci=f"0000:{bus:02x}:00.0", vendor_device="10de:2330", place=place)


def nic(
    name: str, bus: int, *, numa: int | None = 0, bridges: tuple[str, ...] = (), host: str | None = None, **more: object
) -> Nic:
    fields: dict[str, object] = {"kind": "connectx", "port": "up", **more}
    place = Place(numa=numa, bridges=bridges, host_bridge=host)
    return msgspec.convert({"name": name, "pci": f"0000:{bus:02x}:00.0", "place": place, **fields}, Nic)


def machine(gpus: list[Gpu], nics: list[Nic], *, nodes: int = 2, cores_per_node: int = 8) -> Machine:
    count = nodes * cores_per_node
    return Machine(
        source="made up",
        gpus=tuple(gpus),
        nics=tuple(nics),
        nodes={node: f"{node * cores_per_node}-{(node + 1) * cores_per_node - 1}" for node in range(nodes)},
        cores=tuple(str(cpu) for cpu in range(count)),
        cpus=f"0-{count - 1}",
    )


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    """Trees: nodes, host bridges, up to two levels of switches, devices anywhere, some places unknown."""
    num_nodes = draw(st.integers(1, 4))
    cores_per_node = draw(st.integers(1, 6))
    switches: list[Place] = []
    for root in range(draw(st.integers(1, 6))):
        node = draw(st.integers(0, num_nodes - 1))
        near = f"{node * cores_per_node}-{(node + 1) * cores_per_node - 1}"
        if draw(st.booleans()):
            place = Place(host_bridge=f"root{root}", numa=node, package=node // 2, cpus=near)
        else:
            place = Place(host_bridge=f"root{root}", cpus=f"0-{num_nodes * cores_per_node - 1}")
        switches.append(place)
        if draw(st.booleans()):
            upper = msgspec.structs.replace(place, bridges=(f"r{root}u", f"r{root}d"))
            switches.append(upper)
            switches.append(msgspec.structs.replace(place, bridges=(*upper.bridges, f"r{root}uu", f"r{root}dd")))
    addresses = iter(draw(st.permutations([f"{d:04x}:{b:02x}:00.0" for d in (0, 1, 0x10000) for b in range(1, 12)])))

    def place() -> Place:
        chosen = draw(st.sampled_from(switches))
        if chosen.bridges and draw(st.booleans()):
            return msgspec.structs.replace(chosen, bridges=(*chosen.bridges, f"port {draw(st.integers(0, 999))}"))
        return chosen

    kinds: st.SearchStrategy[Kind] = st.sampled_from(["connectx", "connectx", "efa", "soft-rdma", "other-rdma"])
    gpus = [Gpu(pci=next(addresses), vendor_device="10de:2330", place=place()) for _ in range(draw(st.integers(0, 8)))]
    nics = [
        Nic(
            name=f"nic{index}",
            pci=next(addresses),
            kind=draw(kinds),
            place=place(),
            port=draw(st.sampled_from(["up", "up", "down", "unknown"])),
        )
        for index in range(draw(st.integers(0, 10)))
    ]
    made = machine([], [], nodes=num_nodes, cores_per_node=cores_per_node)
    return msgspec.structs.replace(
        made,
        gpus=tuple(sorted(gpus, key=lambda gpu: pci_order(gpu.pci))),
        nics=tuple(sorted(nics, key=lambda nic: nic.order)),
    )


@given(machines())
def test_every_gpu_gets_its_share_of_what_is_nearest(machine: Machine) -> None:
    topology = choose(machine)
    out = {left.nic.name for left in topology.left_out if left.reason != "no GPU is nearest to it"}
    usable = [nic for nic in machine.nics if nic.name not in out]
    used = [{nic.name for nic in group.nics} for group in topology.groups]
    idle = {left.nic.name for left in topology.left_out}
    assert set().union(*used) | idle == {nic.name for nic in machine.nics}
    assert not set().union(*used) & idle
    assert not [nic for nic in usable if nic.port == "down"]
    if not machine.gpus:
        (host,) = topology.groups
        assert [nic.name for nic in host.nics] == [nic.name for nic in usable]
        return
    assert [group.gpu for group in topology.groups] == [gpu.pci for gpu in machine.gpus]
    sharing: dict[tuple[str | None, ...], list[list[str | None]]] = {}
    for group, gpu in zip(topology.groups, machine.gpus, strict=True):
        away, near = nearest(gpu.place, usable)
        assert group.distance == away
        names = tuple(nic.name for nic in near)
        own = [nic.name for nic in group.nics]
        assert bool(own) == bool(usable)
        assert set(own) <= set(names)
        sharing.setdefault(names, []).append(own)
    for near_names, shares in sharing.items():
        taken = list(itertools.chain(*shares))
        if len(near_names) >= len(shares):
            # All are used, none twice, nobody has two more than another.
            assert sorted(taken) == sorted(near_names)
            assert max(map(len, shares)) - min(map(len, shares)) <= 1
        else:
            assert all(tuple(share) == near_names for share in shares)


@given(machines(), st.data())
def test_the_answer_does_not_depend_on_which_gpus_a_process_sees(machine: Machine, data: st.DataObject) -> None:
    whole = choose(machine)
    assert whole == choose(machine)
    if machine.gpus:
        seen = data.draw(st.lists(st.sampled_from(range(len(machine.gpus))), min_size=1, unique=True))
        part = choose(machine, gpus=",".join(map(str, seen)))
        assert [group.gpu for group in part.groups] == [machine.gpus[index].pci for index in seen]
        assert [group.nics for group in part.groups] == [whole.groups[index].nics for index in seen]
        assert [group.gpu_index for group in part.groups] == list(range(len(seen)))


@given(machines(), st.sets(st.integers(0, 23), min_size=1))
def test_progress_threads_get_cores_of_their_own_if_they_can(machine: Machine, asked: set[int]) -> None:
    allowed = parse_cpus(machine.cpus) & asked
    if not allowed:
        with pytest.raises(ConfigError):
            choose(machine, cpus=asked)
        return
    topology = choose(machine, cpus=asked)
    workers = [parse_cpus(group.worker_cpus) for group in topology.groups]
    assert all(worker and worker <= allowed for worker in workers)
    near = [parse_cpus(group.cpus) for group in topology.groups]
    assert all(cpus <= allowed for cpus in near)
    gpus = machine.gpus
    if gpus:
        for gpu, worker in zip(gpus, workers, strict=True):
            local = parse_cpus(gpu.place.cpus) & allowed
            assert not local or worker <= local
    # Hall's theorem: there are enough cores for all exactly if there are enough for every subset.
    wanted = [parse_cpus(gpu.place.cpus) & allowed for gpu in gpus]
    if all(wanted):
        enough = all(
            len(frozenset().union(*subset)) >= len(subset)
            for size in range(1, len(wanted) + 1)
            for subset in itertools.combinations(wanted, size)
        )
        assert enough == (len(set(workers)) == len(workers)) or not gpus


@given(machines())
def test_json_of_a_choice_is_an_override_that_gives_it_again(machine: Machine) -> None:
    topology = choose(machine)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "groups.json"
        path.write_text(topology.to_json())
        again = choose(machine, override=path)
    assert [strip(group) for group in again.groups] == [strip(group) for group in topology.groups]
    assert msgspec.json.decode(topology.to_json(), type=Topology) == topology


def strip(group: object) -> dict[str, object]:
    return {name: value for name, value in msgspec.to_builtins(group).items() if name not in ("reason", "distance")}


@given(st.lists(st.lists(st.tuples(st.booleans(), st.integers(0, 2)), max_size=5), min_size=1, max_size=4))
def test_generated_nccl_files_are_read_as_written(cpus: list[list[tuple[bool, int]]]) -> None:
    text, gpus, nics, bus = "<system version='1'>", [], [], 0
    for numa, devices in enumerate(cpus):
        text += f"<cpu numaid='{numa}' affinity='{1 << numa:x}'>"
        for is_gpu, depth in devices:
            above = [f"{numa:04x}:f{level}:00.0" for level in range(depth)]
            text += "".join(f"<pci busid='{address}' class='0x060400'>" for address in above)
            bus += 1
            pci = f"{numa:04x}:{bus:02x}:00.0"
            kind = "class='0x030200' vendor='0x10de' device='0x2330'" if is_gpu else "class='0x020700' vendor='0x15b3'"
            text += f"<pci busid='{pci.upper()}' {kind}/>" + "</pci>" * depth
            (gpus if is_gpu else nics).append((pci, numa, depth))
        text += "</cpu>"
    machine = read_nccl(f"{text}</system>".encode(), "made up")
    assert [(gpu.pci, gpu.place.numa, len(gpu.place.bridges) // 2) for gpu in machine.gpus] == sorted(gpus)
    assert [(nic.pci, nic.place.numa, len(nic.place.bridges) // 2) for nic in machine.nics] == sorted(nics)
    assert {nic.kind for nic in machine.nics} <= {"connectx"}


# -- distances ---------------------------------------------------------------------------------------------------------


def place(*bridges: str, host: str | None = "h", numa: int | None = None, package: int | None = None) -> Place:
    return Place(bridges=bridges, host_bridge=host, numa=numa, package=package)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (place("up", "d1"), place("up", "d2"), ("PIX", 1, 3)),
        (place("up"), place("up"), ("PIX", 1, 1)),
        (place("up", "d1", "up2", "d3"), place("up", "d2"), ("PXB", 2, 5)),
        (place("r1", "u1", "d1"), place("r2", "u2", "d2"), ("PHB", 2, 6)),
        (place("up", "d1"), place("up", "d2", host="other"), ("SYS", 2, 4)),
        (place(host="a", numa=1), place(host="b", numa=1), ("NODE", 0, 0)),
        (place(host=None, numa=None), place(host=None, numa=None), ("SYS", 0, 0)),
        (place(host="a", numa=0, package=0), place(host="b", numa=1, package=0), ("SOCKET", 0, 0)),
    ],
)
def test_distance(a: Place, b: Place, expected: tuple[str, int, int]) -> None:
    for left, right in ((a, b), (b, a)):
        away = distance(left, right)
        assert (away.relation, away.switches, away.bridges) == expected


def test_addresses_sort_by_number() -> None:
    in_order = ["0000:0a:00.0", "0000:9a:00.0", "0000:9a:00.1", "0001:00:00.0", "9000:00:00.0", "10000:e1:00.0"]
    assert sorted(in_order[3:] + in_order[:3], key=pci_order) == in_order
    assert sorted(in_order) != in_order
    names = [nic("mlx5_10", 1), nic("mlx5_2", 1), nic("mlx5_1", 2)]
    assert [each.name for each in sorted(names, key=lambda each: each.order)] == ["mlx5_2", "mlx5_10", "mlx5_1"]


# -- rules -------------------------------------------------------------------------------------------------------------


def test_remainders_are_used() -> None:
    made = machine([gpu(1), gpu(2)], [nic(f"mlx5_{index}", 16 + index) for index in range(3)])
    assert [[nic.name for nic in group.nics] for group in choose(made).groups] == [["mlx5_0", "mlx5_1"], ["mlx5_2"]]


def test_fewer_nics_than_gpus_are_shared() -> None:
    made = machine([gpu(1), gpu(2), gpu(3)], [nic("mlx5_0", 16), nic("mlx5_1", 17)])
    assert [[nic.name for nic in group.nics] for group in choose(made).groups] == [["mlx5_0", "mlx5_1"]] * 3


def test_idle_nics_are_no_riddle() -> None:
    near = machine([gpu(1, numa=0), gpu(2, numa=1)], [nic("a", 16, numa=0), nic("b", 17, numa=1), nic("c", 18, numa=3)])
    reasons = {left.nic.name: left.reason for left in choose(near, gpus="0").left_out}
    assert reasons == {"b": "it serves GPUs that this process does not use", "c": "no GPU is nearest to it"}


def test_unknown_numa_is_not_node_zero() -> None:
    near, far = nic("far", 16, numa=0), nic("near", 17, numa=1)
    unknown = choose(machine([gpu(1, numa=None)], [near, far])).groups[0]
    assert unknown.numa is None
    assert len(unknown.nics) == 2  # equally far, for all that is known


@pytest.mark.parametrize(
    ("nics", "used", "reason"),
    [
        ([nic("a", 1, kind="efa"), nic("b", 2)], ["a"], "NVLink"),
        ([nic("a", 1), nic("b", 2, port="down")], ["a"], "port is not active"),
        ([nic("a", 1), nic("b", 2, kind="soft-rdma")], ["a"], "software RDMA"),
        ([nic("a", 1), nic("b", 2, kind="other-rdma")], ["a"], "neither EFA nor ConnectX"),
        ([nic("a", 1), nic("b", 2, kind="network")], ["a"], "no RDMA NIC"),
        ([nic("a", 1, kind="unknown-rdma", port="unknown")], ["a"], None),
        ([nic("a", 1, kind="soft-rdma")], ["a"], None),
    ],
    ids=["efa", "down", "soft", "other", "network", "unknown", "soft alone"],
)
def test_rules_leave_out(nics: list[Nic], used: list[str], reason: str | None) -> None:
    topology = choose(machine([gpu(8)], nics))
    assert [nic.name for nic in topology.groups[0].nics] == used
    assert [left.nic.name for left in topology.left_out] == [nic.name for nic in nics if nic.name not in used]
    for left in topology.left_out:
        assert reason is not None
        assert reason in left.reason


def test_vfs_are_a_data_path() -> None:
    made = machine([gpu(8)], [nic("mlx5_0", 1, vendor_device="15b3:101e")])
    assert [nic.name for nic in choose(made).groups[0].nics] == ["mlx5_0"]


def test_no_gpu_and_no_nic_is_an_answer_but_opens_nothing() -> None:
    topology = choose(machine([], []))
    assert topology.groups[0].nics == ()
    with pytest.raises(TopologyError, match=r"(?s)no usable NIC for host.*Hint") as caught:
        topology.engine_arguments()
    assert caught.value.device is None
    down = choose(machine([gpu(1)], [nic("mlx5_0", 2, port="down")]))
    with pytest.raises(TopologyError, match=r"(?s)GPU0 0000:01:00.0.*mlx5_0: its port is not active"):
        down.engine_arguments()


def test_engine_arguments_name_domains_and_cores() -> None:
    nics = [nic("rdmap79s0", 1, kind="efa", provider="efa", domain="rdmap79s0-rdm")]
    arguments = choose(machine([gpu(8, cpus="0-7")], nics)).engine_arguments()
    assert arguments == {"provider": "efa", "groups": [["rdmap79s0-rdm"]], "cpus": [[4]]}


# -- cores -------------------------------------------------------------------------------------------------------------


@given(st.sets(st.integers(0, 300)))
def test_cpu_lists_round_trip(cpus: set[int]) -> None:
    assert parse_cpus(format_cpus(cpus)) == cpus


@pytest.mark.parametrize("text", ["3-1", "a", "0-", "-1", "1,,2", "0-99999999", "16384", "0x3"])
def test_malformed_cpu_lists(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_cpus(text)


def test_one_physical_core_each_spread_and_not_shared() -> None:
    cores = [(core, core + 48) for core in range(48)]
    node = frozenset(range(96))
    wants = [Want((node,), rank, 4) for rank in range(4)]
    workers = spread(wants, cores, node)
    assert [worker.cpus for worker in workers] == [(6, 54), (18, 66), (30, 78), (42, 90)]
    assert not any(worker.shared or worker.remote for worker in workers)
    # A process that sees the third GPU alone takes the same core as a process that sees all.
    assert spread(wants[2:3], cores, node) == workers[2:3]


def test_a_core_is_never_left_in_part() -> None:
    (worker,) = spread([Want((frozenset({0, 1}),))], [(0, 2), (1, 3)], frozenset({0, 3}))
    assert worker.cpus in ((0,), (3,))


def test_cores_of_another_node_are_taken_only_where_none_is_near() -> None:
    near, far = frozenset({0}), frozenset({8, 9})
    crowded = spread([Want((near,)), Want((near,))], [], near | far)
    assert [worker.cpus for worker in crowded] == [(0,), (0,)]
    assert all(worker.shared for worker in crowded)
    (worker,) = spread([Want(())], [], far)
    assert worker.remote
    assert set(worker.cpus) <= far


def test_cores_move_on_for_who_has_less_choice() -> None:
    wants = [Want((frozenset({1, 2}),)), Want((frozenset({2}),))]
    assert [worker.cpus for worker in spread(wants, [], frozenset({1, 2}))] == [(1,), (2,)]


def test_cores_are_guessed_from_equal_runs() -> None:
    assert guess_cores(["0-1,4-5", "2-3,6-7"]) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert guess_cores(["0-7"]) == guess_cores(["0-3,8-9"]) == []
