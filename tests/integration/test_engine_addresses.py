"""Ports of one's own, and engines that peers reach by other addresses than they are bound to."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from fabric_kv import Engine, EngineOptions, _native
from fabric_kv.errors import ConfigError, FabricError
from fabric_kv.regions import EngineAddress

from .engine_peer import LONG
from .forwarder import Forwarder

HOST = "127.0.0.1"


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        return int(taken.getsockname()[1])


def at_free_port(provider: str, options: EngineOptions, host: str = HOST) -> tuple[Engine, int]:
    """An engine at a port that was named; tried again where somebody else was given it meanwhile."""
    for _ in range(20):
        port = free_port()
        try:
            return Engine(provider, nics=[f"{host}:{port}"], options=options), port
        except FabricError as error:
            if "Address already in use" not in str(error):
                raise
    raise AssertionError("no port was free")


@contextlib.contextmanager
def hidden_engine(provider: str) -> Iterator[tuple[Engine, Forwarder]]:
    """An engine that tells peers the forwarder's address."""
    forwarder = Forwarder()
    try:
        options = EngineOptions(advertise={HOST: forwarder.address})
        engine, port = at_free_port(provider, options)
        forwarder.target = (HOST, port)
        with engine:
            rail = engine.describe()["groups"][0]["rails"][0]
            assert rail["address"] == f"{HOST}:{port}"
            assert rail["advertised"] == forwarder.address
            yield engine, forwarder
    finally:
        forwarder.close()


@pytest.fixture(params=["tcp", "net"])
def by_ip(request: pytest.FixtureRequest) -> str:
    if not _native.list_offers(request.param):
        pytest.skip(f"libfabric {_native.library()[1]} offers no provider {request.param}")
    return str(request.param)


def test_peers_meet_at_the_advertised_address(by_ip: str) -> None:
    with hidden_engine(by_ip) as (ours, near), hidden_engine(by_ip) as (theirs, far):
        memory = np.zeros((8, 4096), np.uint8)
        source = ours.register(np.arange(8 * 4096, dtype=np.uint32).astype(np.uint8).reshape(8, 4096))
        sink = theirs.register(memory)
        heard = threading.Event()
        ours.on_message(lambda _sender, payload: heard.set() if payload == b"arrived" else None)
        counter = theirs.counter(unit_bytes=4096, expected_units=8)
        to_them, to_us = ours.add_peer(theirs.address, monitor=True), theirs.add_peer(ours.address, monitor=True)
        pages = np.arange(8)
        ours.write_pages(to_them, source, sink.remote, pages, pages[::-1], page_bytes=4096, token=counter.token).result(
            LONG
        )
        counter.result(LONG)
        theirs.send(to_us, b"arrived").result(LONG)
        assert heard.wait(LONG)
        assert (memory[::-1] == np.arange(8 * 4096, dtype=np.uint32).astype(np.uint8).reshape(8, 4096)).all()
        assert near.num_connections + far.num_connections > 0


def test_a_port_that_is_taken_is_refused_with_its_reason(by_ip: str) -> None:
    with Engine(by_ip, nics=[HOST]) as engine:
        address = engine.describe()["groups"][0]["rails"][0]["address"]
        assert address.startswith(f"{HOST}:")
        with pytest.raises(FabricError, match="Address already in use"):
            Engine(by_ip, nics=[address])
    with Engine(by_ip, nics=[address]) as engine:
        assert engine.describe()["groups"][0]["rails"][0]["address"] == address


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
@pytest.mark.parametrize("nic", ["::1", "[::1]", "[::1]:{port}"])
def test_ipv6_addresses_may_be_written_either_way(by_ip: str, nic: str) -> None:
    options = EngineOptions(advertise={"::1": "2001:db8::7"})
    wanted = 0
    if "{port}" in nic:
        engine, wanted = at_free_port(by_ip, options, "[::1]")
    else:
        engine = Engine(by_ip, nics=[nic], options=options)
    with engine as e:
        rail = e.describe()["groups"][0]["rails"][0]
        port = rail["address"].rpartition(":")[2]
        assert rail["address"] == f"[::1]:{port}"
        assert rail["advertised"] == f"[2001:db8::7]:{port}"
        assert wanted in (0, int(port))


@pytest.mark.parametrize(
    ("advertise", "message"),
    [
        ({"10.0.0.1": "203.0.113.7"}, r"advertise names \['10.0.0.1'\], but the NICs have \['127.0.0.1:\d+'\]"),
        ({HOST: "nonsense"}, "'nonsense': it is neither an IP address nor address:port"),
        ({HOST: "203.0.113.7:70000"}, "port 70000 is out of range"),
        ({HOST: "203.0.113.7:0"}, "port 0 is out of range"),
        ({HOST: "[203.0.113.7"}, "neither an IP address"),
        ({HOST: "fe80::1%nosuch"}, "there is no interface 'nosuch'"),
    ],
)
def test_addresses_that_cannot_be_advertised_are_refused(by_ip: str, advertise: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Engine(by_ip, nics=[HOST], options=EngineOptions(advertise=advertise))


@pytest.mark.parametrize(
    "nic",
    [
        "127.0.0.1:x",
        "127.0.0.1:",
        "127.0.0.1:123456",
        "127.0.0.1:65536",
        "127.0.0.1:99999",
        "[::1",
        "[127.0.0.1]x",
        ":7000",
    ],
)
def test_what_is_no_address_is_looked_for_among_names(by_ip: str, nic: str) -> None:
    with pytest.raises(ConfigError, match="matches nothing that provider"):
        Engine(by_ip, nics=[nic])


@pytest.mark.parametrize("advertise", [{HOST: 5}, {HOST: None}, {5: HOST}])
def test_what_is_no_text_is_refused(advertise: Any) -> None:
    with pytest.raises(ConfigError, match="must map strings to strings"):
        EngineOptions(advertise=advertise)


def test_options_can_be_compared_and_hashed() -> None:
    a, b = (EngineOptions(advertise={HOST: name}) for name in ("203.0.113.7", "203.0.113.8"))
    assert len({a, b, EngineOptions(advertise={HOST: "203.0.113.7"}), EngineOptions()}) == 3


def test_a_lenient_engine_says_which_names_no_nic_has(by_ip: str, caplog: pytest.LogCaptureFixture) -> None:
    options = EngineOptions(advertise={"10.0.0.1": "203.0.113.7"}, strict=False)
    with Engine(by_ip, nics=[HOST], options=options):
        assert "advertise names ['10.0.0.1']" in caplog.text


def test_shared_memory_has_no_other_address() -> None:
    with pytest.raises(ConfigError, match="no IP address"):
        Engine("shm", options=EngineOptions(advertise={"fi_shm": "203.0.113.7"}))


def test_one_port_of_several_rails_may_be_mapped(by_ip: str) -> None:
    mapped, port = at_free_port(by_ip, EngineOptions())
    mapped.close()
    options = EngineOptions(advertise={f"{HOST}:{port}": "203.0.113.7:7001"})
    with Engine(by_ip, nics=[HOST, f"{HOST}:{port}"], options=options) as engine:
        rails = engine.describe()["groups"][0]["rails"]
        assert [rail["advertised"] for rail in rails] == [rails[0]["address"], "203.0.113.7:7001"]
        assert len(EngineAddress.from_bytes(engine.address).groups[0]) == 2
