"""Bad input gives a typed error that names the value and the limit, and leaves both sides usable."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from fabric_kv.config import EngineOptions
from fabric_kv.engine import Engine
from fabric_kv.errors import (
    ClosedError,
    ConfigError,
    FabricError,
    PeerUnreachableError,
    ProtocolError,
    RegistrationError,
    TransferError,
    WouldBlockError,
)
from fabric_kv.regions import CounterToken, EngineAddress, RemoteRegion
from fabric_kv.transfers import PagePiece

from .engine_peer import LONG, Node, PeerProcess
from .fabrics import with_rdma

KIB = 1024


@pytest.fixture
def remote(node: Node, peer: PeerProcess) -> Iterator[RemoteRegion]:
    """The peer's 64 KiB; whatever the test has tried, both sides must still work afterwards."""
    node.register(64 * KIB, 1)
    data = peer.call("register", 64 * KIB)
    yield RemoteRegion.from_bytes(data)
    peer.call("fill", 0)
    token = peer.call("count", KIB, 64)
    node.write_pages(data, [0], [0], page_bytes=64 * KIB, token=token)
    peer.call("wait_counter")
    assert peer.call("get", 0, 64 * KIB) == b"\x01" * 64 * KIB
    back = node.regions["memory"].remote.to_bytes()
    with node.engine.counter(unit_bytes=KIB, expected_units=1) as counter:
        peer.call("write_pages", back, [3], [3], page_bytes=KIB, token=counter.token)
        counter.result(LONG)


def refuse(node: Node, remote: RemoteRegion, words: str, **changes: Any) -> None:
    arguments = {"src_pages": [0], "dst_pages": [0], "page_bytes": KIB} | changes
    with pytest.raises(ConfigError, match=words):
        node.engine.write_pages(node.peer, node.regions["memory"], remote, **arguments)


def test_pages_out_of_range_name_index_and_limit(node: Node, remote: RemoteRegion) -> None:
    fits = "the largest page index that fits is 63"
    refuse(node, remote, rf"src_pages\[1\] = 64 .*65536 bytes, {fits}", src_pages=[0, 64], dst_pages=[0, 1])
    refuse(node, remote, rf"dst_pages\[0\] = 900 .*{fits}", dst_pages=[900])
    refuse(node, remote, r"dst_pages\[0\] = 9223372036854775807 ", dst_pages=[2**63 - 1])
    refuse(node, remote, r"src_pages\[0\] = -1 is negative", src_pages=[-1])
    refuse(node, remote, "2 entries, dst_pages has 1", src_pages=[0, 1])
    refuse(node, remote, "offset 65000.*no page fits", src_offset=65000)
    refuse(node, remote, "largest page index that fits is 62", dst_offset=1, dst_pages=[63])
    refuse(node, remote, "largest page index that fits is 31", src_stride=2048, src_pages=[32])
    refuse(node, remote, "no page fits", page_bytes=64 * KIB + 1)


def test_lists_that_are_no_page_lists(node: Node, remote: RemoteRegion) -> None:
    refuse(node, remote, "not float64", src_pages=[0.5])
    refuse(node, remote, "not bool", src_pages=[True])
    refuse(node, remote, "one-dimensional", src_pages=[[0]])
    refuse(node, remote, "18446744073709551615", src_pages=np.array([2**64 - 1], np.uint64))
    refuse(node, remote, "integers", src_pages=[2**70])
    refuse(node, remote, "integers", src_pages=["0"])


def test_sizes_that_are_no_sizes(node: Node, remote: RemoteRegion) -> None:
    for name in ("src_offset", "dst_offset", "src_stride", "dst_stride", "page_bytes"):
        refuse(node, remote, r"\[0, 2\^63\)", **{name: -1})
        refuse(node, remote, r"\[0, 2\^63\)", **{name: 2**63})
    region = node.regions["memory"]
    for rows, stride in ((2**32, 0), (1, 2**64), (2, 2**63)):
        with pytest.raises(ConfigError):
            node.engine.submit(node.peer, [PagePiece(region, 0, 0, remote, 0, 0, 1, [0], [0], rows, stride, 0)])
    with pytest.raises(ConfigError, match="type or is out of range"):
        node.engine.submit(node.peer, [PagePiece(region, 0.5, 0, remote, 0, 0, 1, [0], [0])])  # type: ignore[arg-type]


def test_regions_of_others(
    node: Node, remote: RemoteRegion, make_node: Callable[..., Node], make_peer: Callable[..., PeerProcess]
) -> None:
    other = make_node()
    other.register(KIB)
    with pytest.raises(ConfigError, match="another engine"):
        node.engine.write_pages(node.peer, other.regions["memory"], remote, [0], [0], page_bytes=KIB)
    foreign = other.regions["memory"].remote
    refuse(node, foreign, "belongs to another engine")
    refuse(node, structs.replace(remote, group=5), "group 5")
    refuse(node, structs.replace(remote, rails=remote.rails * 2), "2 rails")
    with pytest.raises(ConfigError, match="must ascend to nbytes"):
        structs.replace(remote, nbytes=remote.nbytes + 1)
    with pytest.raises(ConfigError, match="must have 1 keys"):
        structs.replace(remote, rails=(remote.rails[0] * 2,))


@pytest.mark.parametrize("provider", with_rdma("tcp", "net"), indirect=True)  # shm has no keys that mean anything
def test_a_key_that_nobody_gave_out_writes_nothing_and_harms_no_third(
    node: Node, remote: RemoteRegion, peer: PeerProcess, make_node: Callable[..., Node]
) -> None:
    """What the forger sees differs: tcp reports success, and may drop the connection with all that follows."""
    forger = make_node()
    forger.add_peer(peer.call("address"))
    forger.register(64 * KIB, 7)
    ((base, rkey),) = remote.rails[0]
    forged = structs.replace(remote, rails=(((base, rkey ^ 1),),))
    for _ in range(3):
        forger.engine.write(forger.peer, forger.regions["memory"], 0, forged, 0, 64 * KIB)
        token = peer.call("count", KIB, 1)
        node.write_pages(remote.to_bytes(), [0], [1], page_bytes=KIB, token=token)
        peer.call("wait_counter")
    forger.close()
    assert peer.call("get", 0, 3 * KIB) == bytes(KIB) + b"\x01" * KIB + bytes(KIB)


def test_tokens_that_nobody_gave_out(node: Node, remote: RemoteRegion) -> None:
    refuse(node, remote, "slot 131071 .limit 131070", token=CounterToken(131071, 0, KIB))
    refuse(node, remote, "generation 32 .limit 31", token=CounterToken(0, 32, KIB))
    refuse(node, remote, "out of range", token=CounterToken(-1, 0, KIB))
    refuse(node, remote, "token is of the peer's group 1", token=CounterToken(0, 0, KIB, 1))
    refuse(node, remote, "unit_bytes=2097152 is above the largest write of", token=CounterToken(0, 0, 2 << 20))


def test_memory_that_cannot_be_registered(node: Node, remote: RemoteRegion) -> None:
    read_only = np.zeros(8)
    read_only.flags.writeable = False
    for buffer, words in (
        (b"constant", "read-only"),
        (read_only, "read-only"),
        (np.zeros((4, 4))[:, 1], "not contiguous"),
        (np.zeros(0), "empty"),
        ("text", "not a buffer"),
    ):
        with pytest.raises(ConfigError, match=words):
            node.engine.register(buffer)
    with pytest.raises(ConfigError, match="group 1 does not exist: the engine has 1"):
        node.engine.register(bytearray(8), group=1)
    with pytest.raises(RegistrationError, match=r"memory on cuda:0 cannot be registered: provider .* without device"):
        node.engine.register((1 << 40, 8, "cuda:0"))


def test_a_deregistered_region(node: Node, remote: RemoteRegion) -> None:
    region = node.engine.register(bytearray(KIB))
    region.close()
    region.close()
    with pytest.raises(ClosedError, match="deregistered"):
        node.engine.write_pages(node.peer, region, remote, [0], [0], page_bytes=KIB)


def test_addresses_that_are_none(node: Node, remote: RemoteRegion) -> None:
    good = node.engine.address
    for address, words in (
        (b"", "0 bytes"),
        (b"noise" * 10, "instead of b'FKVA'"),
        (good[:-1], "engine address"),
        (good + b"x", "trailing"),
        (good[:4] + b"\x63\x00" + good[6:], "speaks version 99, this side speaks 2"),
        (good[:6] + bytes(1 << 20), "above the limit of 1048576"),
        (remote.to_bytes(), "FKVR"),
        (None, "expected bytes"),
    ):
        with pytest.raises(ProtocolError, match=words):
            node.engine.add_peer(address)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="cannot monitor itself"):
        node.engine.add_peer(good, monitor=True)


@pytest.mark.parametrize(
    "nic_address",
    [
        b"\x00",
        b"\xff" * 15,
        b"\xff" * 16,
        bytes(16),
        b"\x0a\x00" + b"\xff" * 14,
        b"fi_shm://none:1\x00",
        b"fi_shm://\x00",
        b"x" * 1024,
    ],
)
def test_an_address_of_no_nic_fails_the_transfer_alone(
    provider: Any, make_node: Callable[..., Node], nic_address: bytes
) -> None:
    """Well-formed, but nobody's: the transfer fails or never ends; the engine lives and closes."""
    node = make_node()
    epoch = b"nobody".ljust(16)
    peer = node.engine.add_peer(EngineAddress(epoch, ((nic_address,),)).to_bytes())
    node.register(KIB)
    remote = RemoteRegion(epoch, 0, KIB, (KIB,), (((0, 1),),))
    transfers = [
        node.engine.write_pages(peer, node.regions["memory"], remote, [0], [0], page_bytes=KIB),
        node.engine.send(peer, b"hello"),
    ]
    node.add_peer(node.engine.address)
    node.engine.send(node.peer, b"still here").result(LONG)
    assert node.wait_messages(1) == [b"still here"]
    for transfer in transfers:
        if transfer.done():
            assert isinstance(transfer.exception(0), TransferError)
    node.close()
    for transfer in transfers:
        assert isinstance(transfer.exception(0), TransferError | ClosedError)


@pytest.mark.parametrize("provider", ["tcp"], indirect=True)
def test_a_port_where_nobody_listens_is_reported_within_the_connect_bound(make_node: Callable[..., Node]) -> None:
    node = make_node(connect_s=0.5)
    nobody = b"\x02\x00\x00\x01\x7f\x00\x00\x01" + bytes(8)  # 127.0.0.1 port 1
    node.engine.add_peer(EngineAddress(b"x" * 16, ((nobody,),)).to_bytes(), monitor=True)
    ((epoch, reason),) = node.wait_lost()
    assert epoch == b"x" * 16
    assert "nothing was heard" in reason


def test_messages_that_are_too_large_or_no_bytes(node: Node, remote: RemoteRegion) -> None:
    limit = node.engine.options.max_message_bytes
    with pytest.raises(ConfigError, match=f"{limit + 1} bytes is above the limit max_message_bytes={limit}"):
        node.engine.send(node.peer, bytes(limit + 1))
    with pytest.raises(TypeError):
        node.engine.send(node.peer, "text")  # type: ignore[arg-type]
    node.engine.send(node.peer, bytearray(b"fine")).result(LONG)


def test_counters_that_cannot_be(node: Node, remote: RemoteRegion) -> None:
    for unit in (0, -1, 2**63):
        with pytest.raises(ConfigError, match="unit_bytes"):
            node.engine.counter(unit_bytes=unit)
    for units in (-1, 2**57):
        with pytest.raises(ConfigError, match="expected_units"):
            node.engine.counter(unit_bytes=1, expected_units=units)
    with pytest.raises(ConfigError, match="group 7 does not exist"):
        node.engine.counter(unit_bytes=1, group=7)
    counter = node.engine.counter(unit_bytes=1, expected_units=5)
    with pytest.raises(ConfigError, match="armed already, with 5 units"):
        counter.arm(5)
    counter.release()
    with pytest.raises(ConfigError, match="released"):
        counter.arm(5)
    assert isinstance(counter.exception(0), ClosedError)


def test_more_counters_than_there_are(make_node: Callable[..., Node]) -> None:
    node = make_node(num_counters=3)
    counters = [node.engine.counter(unit_bytes=1) for _ in range(3)]
    with pytest.raises(WouldBlockError, match="all 3 counters are in use"):
        node.engine.counter(unit_bytes=1)
    counters[0].release()  # not quiescent: poisoned
    with pytest.raises(WouldBlockError, match="1 of them poisoned"):
        node.engine.counter(unit_bytes=1)
    counters[1].release(quiescent=True)
    node.engine.counter(unit_bytes=1)


def test_more_transfers_than_fit_are_an_answer_and_not_a_wait(
    make_node: Callable[..., Node], make_peer: Callable[..., PeerProcess]
) -> None:
    node = make_node(max_transfers=4)
    peer = make_peer(node)
    remote = RemoteRegion.from_bytes(peer.call("register", KIB))
    node.register(KIB)
    num_refused, transfers = 0, []
    deadline = time.monotonic() + LONG
    while num_refused == 0 and time.monotonic() < deadline:
        try:
            transfers.append(
                node.engine.write_pages(node.peer, node.regions["memory"], remote, [0], [0], page_bytes=KIB)
            )
        except WouldBlockError as error:
            assert "4" in str(error)  # noqa: PT017
            num_refused += 1
    assert num_refused
    for transfer in transfers:
        transfer.result(LONG)
    node.engine.write_pages(node.peer, node.regions["memory"], remote, [0], [0], page_bytes=KIB).result(LONG)


def test_a_closed_engine_says_so(node: Node, peer: PeerProcess) -> None:
    remote = RemoteRegion.from_bytes(peer.call("register", KIB))
    node.register(KIB)
    region, counter = node.regions["memory"], node.engine.counter(unit_bytes=1)
    engine, address = node.engine, node.engine.address
    engine.close()
    engine.close()
    calls: list[Callable[[], object]] = [
        lambda: engine.register(bytearray(8)),
        lambda: engine.add_peer(address),
        lambda: engine.write_pages(node.peer, region, remote, [0], [0], page_bytes=8),
        lambda: engine.send(node.peer, b""),
        lambda: engine.counter(unit_bytes=1),
    ]
    for call in calls:
        with pytest.raises(ClosedError):
            call()
    assert isinstance(counter.exception(0), ClosedError)
    counter.release()
    region.close()
    engine.remove_peer(node.peer)
    engine.on_message(None)
    assert engine.poll() == 0
    assert engine.closed
    assert engine.describe()["closed"]


def test_a_removed_peer_gets_nothing_and_may_come_back(node: Node, remote: RemoteRegion, peer: PeerProcess) -> None:
    address = peer.call("address")
    node.engine.remove_peer(node.peer)
    node.engine.remove_peer(node.peer)
    with pytest.raises(ClosedError, match="the peer was removed"):
        node.engine.send(node.peer, b"")
    with pytest.raises(ClosedError, match="the peer was removed"):
        node.engine.write_pages(node.peer, node.regions["memory"], remote, [0], [0], page_bytes=KIB)
    node.add_peer(address)
    node.send(b"again")
    assert peer.call("wait_messages", 1) == [b"again"]


# -- opening -----------------------------------------------------------------------------------------------------------


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).parents[2])
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": root} | env,
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )


@pytest.mark.skipif(any(Path("/sys/class/infiniband").glob("*")), reason="this machine has an RDMA NIC")
def test_without_an_rdma_nic_the_default_provider_is_refused_with_what_there_is() -> None:
    with pytest.raises(
        FabricError, match=r"(?s)no RDMA NIC is usable.*provider=(tcp|net).*software providers"
    ) as caught:
        Engine()
    assert "Hint" in str(caught.value)
    assert 'provider="tcp"' in str(caught.value)


@pytest.mark.parametrize(
    ("provider_name", "nics", "words"),
    [
        ("no_such_thing", [], "offers no reliable-datagram endpoint .*it offers:"),
        ("tcp", ["no_such_nic"], "NIC 'no_such_nic' matches nothing that provider 'tcp' offers:"),
        ("tcp", ["127.0.0.1", "no_such_nic"], "no_such_nic"),
        ("tcp", [""], "NIC ''"),
    ],
)
def test_what_is_not_there_is_refused_with_what_is(provider_name: str, nics: list[str], words: str) -> None:
    with pytest.raises((FabricError, ConfigError), match=words):
        Engine(provider_name, nics=nics)


def test_an_address_of_another_host_is_refused() -> None:
    with pytest.raises((FabricError, ConfigError)):
        Engine("tcp", nics=["203.0.113.1"])


def test_nics_that_fail_may_be_left_out_when_asked_to() -> None:
    with pytest.raises((FabricError, ConfigError)):
        Engine("tcp", nics=["127.0.0.1", "203.0.113.1"])
    with Engine("tcp", nics=["127.0.0.1", "203.0.113.1"], options=EngineOptions(strict=False)) as engine:
        figures = engine.describe()
        assert len(figures["groups"][0]["rails"]) == 1
        assert len(figures["left_out"]) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"nics": "lo"}, "a list of names"),
        ({"nics": ["a"], "groups": [["b"]]}, "not both"),
        ({"groups": []}, "0 groups"),
        ({"groups": ["lo"]}, "a list of names"),
        ({"nics": ["127.0.0.1"], "cpus": [[0], [1]]}, "1 groups, but cpus for 2"),
        ({"nics": ["127.0.0.1"], "cpus": [[100_000]]}, "cpu 100000 is not among"),
        ({"nics": ["127.0.0.1"], "cpus": [[-1]]}, "cpu -1 is not among"),
    ],
)
def test_arguments_that_contradict_each_other(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Engine("tcp", **arguments)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"progress": "lazy"}, "progress='lazy'"),
        ({"progress_threads": "many"}, "progress_threads='many'"),
        ({"dispatch": "never"}, "dispatch='never'"),
        ({"max_transfers": 0}, r"max_transfers=0 .*\[1, 1048576\]"),
        ({"heartbeat_interval_s": 0.0}, "heartbeat_interval_s=0.0"),
        ({"heartbeat_misses": 1}, r"\[2, 1000\]"),
        ({"num_counters": 1 << 17}, r"num_counters=131072 .*131071"),
        ({"max_message_bytes": 1 << 30}, "max_message_bytes=1073741824 is above max_inbox_bytes"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineOptions(**options)


def test_no_libfabric_is_a_clear_error_and_can_be_mended(tmp_path: Path) -> None:
    done = python(
        "import os, fabric_kv\n"
        "try: fabric_kv.Engine('tcp', nics=['127.0.0.1'])\n"
        "except fabric_kv.FabricError as error: print(error)\n"
        "del os.environ['FABRIC_KV_LIBFABRIC_HOME']\n"
        "fabric_kv.Engine('tcp', nics=['127.0.0.1']).close(); print('mended')",
        FABRIC_KV_LIBFABRIC_HOME=str(tmp_path),
    )
    assert "libfabric could not be loaded; tried:" in done.stdout, done.stderr
    assert str(tmp_path / "lib" / "libfabric.so.1") in done.stdout
    assert "Hint: install it" in done.stdout
    assert "mended" in done.stdout


def test_a_libfabric_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libfabric.so.1").write_bytes(b"not a library")
    done = python(
        "import fabric_kv\ntry: fabric_kv.Engine('tcp')\nexcept fabric_kv.FabricError as error: print(error)",
        FABRIC_KV_LIBFABRIC_HOME=str(tmp_path),
    )
    assert "libfabric.so.1" in done.stdout, done.stderr


def test_unreachable_is_a_connection_error() -> None:
    assert issubclass(PeerUnreachableError, ConnectionError)
