"""The bench's command line: sizes, rows, roles, and what is refused before anything is opened."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from fabric_kv.bench.args import parse, peer_command
from fabric_kv.bench.channel import format_address, parse_address, plain_host
from fabric_kv.bench.main import main
from fabric_kv.bench.opened import open_engine, same_provider
from fabric_kv.bench.sizes import parse_size, size_text, sweep
from fabric_kv.bench.target import combine
from fabric_kv.bench.workload import OPS, Case, Fabric, Workload
from fabric_kv.errors import ConfigError, DeviceError, FabricError

RUNNABLE = [op for op in OPS if op != "messenger"]


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("1", 1), ("4096", 4096), ("4K", 4096), ("4k", 4096), ("64KiB", 65536), ("1M", 1 << 20), ("2G", 2 << 30)],
)
def test_sizes_are_powers_of_1024(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "0", "-4K", "4.5K", "4T", "K", "1024G", "٤", "4 K", "1e3"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="no size"):
        parse_size(text)


@pytest.mark.parametrize("nbytes", [1, 1023, 1024, 1536, 1 << 20, 3 << 30])
def test_sizes_survive_printing(nbytes: int) -> None:
    assert parse_size(size_text(nbytes)) == nbytes


def test_sweeps_end_where_the_factor_leaves_the_range() -> None:
    assert sweep(4096, 70000, 4) == (4096, 16384, 65536)
    assert sweep(4096, 4096, 2) == (4096,)
    with pytest.raises(ConfigError, match="above"):
        sweep(2, 1, 2)
    with pytest.raises(ConfigError, match="2 or more"):
        sweep(1, 2, 1)


@pytest.mark.parametrize("op", RUNNABLE)
def test_every_operation_has_defaults(op: str) -> None:
    run = parse(["--loopback", "--op", op])
    assert run.workload.op == op
    assert run.workload.verify
    assert all((case.page_bytes == 0) == (op == "imm") for case in run.workload.cases)


def test_pages_are_swept_by_size_or_by_number() -> None:
    by_size = parse(["--loopback", "-b", "4K", "-e", "16K", "-f", "2", "--pages", "8"]).workload.cases
    assert by_size == (Case(4096, 8), Case(8192, 8), Case(16384, 8))
    by_number = parse(["--loopback", "--page-size", "4K", "-b", "64K", "-e", "1M", "-f", "16"]).workload.cases
    assert by_number == (Case(4096, 16), Case(4096, 256))
    assert parse(["--loopback", "--page-size", "2K", "--pages", "3"]).workload.cases == (Case(2048, 3),)
    assert parse(["--loopback", "-b", "8K"]).workload.cases == (Case(8192, 64),)


def test_batches_are_lists_of_one_submission() -> None:
    workload = parse(["--loopback", "--op", "write", "-b", "4K", "--batch", "8"]).workload
    assert (workload.batch, workload.cases) == (8, (Case(4096, 8),))


def test_directions() -> None:
    for options, expected in ([], (True, False)), (["-R"], (False, True)), (["--bidir"], (True, True)):
        workload = parse(["--loopback", *options]).workload
        assert (workload.outwards, workload.inwards) == expected


def test_long_runs_are_verified_only_when_asked() -> None:
    assert not parse(["--loopback", "-D", "1"]).workload.verify
    assert parse(["--loopback", "-D", "1", "--verify"]).workload.verify
    assert not parse(["--loopback", "-b", "1M", "-n", "1000000"]).workload.verify
    assert not parse(["--loopback", "--no-verify"]).workload.verify


def test_roles() -> None:
    assert parse([]).is_target
    assert not parse(["--loopback"]).is_target
    assert parse(["--loopback", "--peers", "3"]).num_peers == 3
    assert parse(["a", "b:1", "[::1]:2"]).num_peers == 3


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--loopback", "host"], "drop it"),
        (["--peers", "2"], "start a target on each host"),
        (["a", "b", "--peers", "3"], "3, but 2 addresses"),
        (["--loopback", "--peers", "0"], "must lie in"),
        (["--loopback", "--bidir", "-R"], "drop --reverse"),
        (["a:b"], "no address"),
        (["[::1"], "no address"),
        (["a:70000"], "no address"),
        (["--port", "0"], "--port 0"),
        (["--loopback", "--op", "imm", "-b", "4K"], "bring no bytes"),
        (["--loopback", "--pages", "0"], "must lie in"),
        (["--loopback", "--page-size", "4K", "-b", "6K"], "no multiple"),
        (["--loopback", "--page-size", "4K", "-b", "8K", "--pages", "2"], "drop --pages"),
        (["--loopback", "--op", "send", "-b", "32M"], "limit of 16M"),
        (["--loopback", "-b", "1G", "--pages", "1000"], "the limit is 64G"),
        (["--loopback", "--contiguity", "101"], "contiguity"),
        (["--loopback", "--depth", "0"], "depth"),
        (["--loopback", "-D", "-1"], "duration_s"),
        (["--loopback", "--timeout", "nan"], "out of range"),
        (["--loopback", "--rails", "0"], "rails"),
        (["--loopback", "--link-gbps", "-1"], "--link-gbps"),
        (["--target-cpus", "1"], "--loopback"),
        (["--loopback", "--gpu", "-1"], "gpu"),
        (["--loopback", "--json", "-", "--csv", "-"], "both write to stdout"),
    ],
)
def test_what_does_not_go_together_is_refused(options: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(options) == 2
    captured = capsys.readouterr()
    assert why in captured.err
    assert not captured.out


def test_unknown_options_end_as_argparse_says(capsys: pytest.CaptureFixture[str]) -> None:
    for options, why in (["--opp", "paged"], "--opp"), (["--op", "rm"], "'rm'"), (["-b", "4Q"], "'4Q' is no size"):
        with pytest.raises(SystemExit) as caught:
            main(["--loopback", *options])
        assert caught.value.code == 2
        assert why in capsys.readouterr().err


def test_a_target_is_not_asked_for_more_than_the_limits() -> None:
    """A workload comes from whoever connects: its limits hold when it is decoded."""
    good = msgspec.msgpack.encode(Workload(op="write", cases=(Case(4096, 1),)))
    assert msgspec.msgpack.decode(good, type=Workload).cases[0].nbytes == 4096
    for name, value in ("depth", 10**6), ("cases", [[1 << 60, 1]]), ("cases", []), ("contiguity", -1), ("op", "rm"):
        plain = {**msgspec.to_builtins(Workload(op="write", cases=(Case(4096, 1),))), name: value}
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(plain, Workload)


def test_a_target_keeps_what_it_was_told_and_refuses_another_provider() -> None:
    asked = Fabric(provider="tcp", rails=2, progress="spin")
    assert combine(Fabric(), asked) == Fabric(provider="tcp", rails=2)
    assert combine(Fabric(nics=("eth1",)), asked) == Fabric(provider="tcp", nics=("eth1",))
    assert combine(Fabric(provider="tcp", rails=1), Fabric()) == Fabric(provider="tcp", rails=1)
    with pytest.raises(FabricError, match="this target was started with --provider shm"):
        combine(Fabric(provider="shm"), asked)


def test_the_initiator_says_where_pages_are_unless_a_target_knows_better() -> None:
    assert parse([]).fabric.mem is None
    assert parse(["--loopback"]).fabric.mem == parse(["host"]).fabric.mem == "host"
    asked = parse(["host", "--mem", "cumem", "--gpu", "3"]).fabric
    assert asked.on_gpu
    assert combine(Fabric(gpu=1), asked) == Fabric(mem="cumem", gpu=1)
    assert combine(Fabric(mem="host"), asked).mem == "host"


@pytest.mark.parametrize("mem", ["cuda", "cumem"])
def test_without_cuda_it_is_said_what_to_install(
    mem: Literal["cuda", "cumem"], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise DeviceError(
            "CUDA needs the Python package cuda-bindings. Hint: pip install 'fabric_kv[cuda]'", op="import"
        )

    monkeypatch.setattr("fabric_kv.bench.memory.load_driver", missing)
    with pytest.raises(DeviceError, match=f"--mem {mem} finds no GPU .*pip install 'fabric_kv\\[cuda\\]'") as caught:
        open_engine(Fabric(provider="tcp", mem=mem), "", max_transfers=16)
    assert caught.value.op == "import"


@pytest.mark.parametrize(
    ("provider", "opened", "same"),
    [("tcp", "tcp;ofi_rxm", True), ("net", "net", True), ("tcp", "net", False), ("net", "net;ofi_rxm", True)],
)
def test_an_opened_provider_is_the_one_asked_for_or_not(provider: str, opened: str, same: bool) -> None:
    assert same_provider(provider, opened) == same


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("host", ("host", 18600)),
        ("host:1", ("host", 1)),
        ("::1", ("::1", 18600)),
        ("[::1]", ("::1", 18600)),
        ("[fe80::1%eth0]:77", ("fe80::1%eth0", 77)),
    ],
)
def test_addresses(text: str, expected: tuple[str, int]) -> None:
    assert parse_address(text) == expected
    assert parse_address(format_address(*expected)) == expected


def test_mapped_addresses_lose_their_clothes() -> None:
    assert plain_host("::ffff:10.0.0.5") == "10.0.0.5"
    assert plain_host("fe80::1") == "fe80::1"


def test_a_target_prints_what_to_type_at_the_other_end() -> None:
    command = peer_command(
        ["--op", "write", "--nics", "eth1", "-p", "7", "--cpus=1", "--gpu", "2", "--json", "o.json", "-b", "4K"],
        "10.0.0.5",
        7,
    )
    assert command == "fabric-kv-bench 10.0.0.5:7 --op write -b 4K"
    run = parse(command.split()[1:])
    assert run.addresses == ("10.0.0.5:7",)
    assert peer_command([], "10.0.0.5", 18600) == "fabric-kv-bench 10.0.0.5"


def test_the_command_is_installed() -> None:
    scripts = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts["fabric-kv-bench"].partition(":")
    assert getattr(importlib.import_module(module), name) is main
