"""Engines for integration tests: over each provider, in this process and in another, all gone afterwards.

>>> def test_something(provider, node, peer): ...      # tcp, net, shm, and verbs where there is a device; two processes
>>> @pytest.mark.parametrize("provider", ["tcp"], indirect=True)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from .engine_peer import Node, PeerProcess
from .fabrics import rdma_devices, with_rdma


class Provider(NamedTuple):
    name: str
    nics: list[str]
    peer_nics: list[str]


PROVIDERS = {
    "tcp": Provider("tcp", ["127.0.0.1"], ["127.0.0.1"]),
    "net": Provider("net", ["127.0.0.1"], ["127.0.0.1"]),  # on libfabric 1.17 what newer ones call tcp
    "shm": Provider("shm", [], []),
}
if devices := rdma_devices():
    PROVIDERS["verbs"] = Provider("verbs", devices[:1], devices[-1:])


@pytest.fixture(params=with_rdma("tcp", "net", "shm"))
def provider(request: pytest.FixtureRequest) -> Provider:
    from fabric_kv import _native

    if not _native.list_offers(request.param):
        pytest.skip(f"libfabric {_native.library()[1]} offers no provider {request.param}")
    return PROVIDERS[request.param]


@pytest.fixture
def make_node(provider: Provider) -> Iterator[Callable[..., Node]]:
    """Make engines in this process; keywords are engine options."""
    nodes: list[Node] = []

    def make(**options: Any) -> Node:
        node = Node()
        node.open(provider.name, provider.nics, **options)
        nodes.append(node)
        return node

    yield make
    for node in nodes:
        node.close()


@pytest.fixture(scope="session")
def spare_peers() -> Iterator[list[PeerProcess]]:
    """Processes that a test has left as new; starting one takes longer than most tests."""
    spare: list[PeerProcess] = []
    yield spare
    for peer in spare:
        peer.close()


@pytest.fixture
def make_peer(provider: Provider, spare_peers: list[PeerProcess]) -> Iterator[Callable[..., PeerProcess]]:
    """Make engines in processes of their own, and let them know ``node`` and be known by it."""
    peers: list[PeerProcess] = []

    def make(node: Node, *, monitor: bool = False, **options: Any) -> PeerProcess:
        peer = spare_peers.pop() if spare_peers else PeerProcess()
        peers.append(peer)
        node.add_peer(peer.call("open", provider.name, provider.peer_nics, **options), monitor)
        peer.call("add_peer", node.engine.address, monitor)
        return peer

    yield make
    for peer in peers:
        if peer.recycle():
            spare_peers.append(peer)
        else:
            peer.close()


@pytest.fixture
def node(make_node: Callable[..., Node]) -> Node:
    return make_node()


@pytest.fixture
def peer(make_peer: Callable[..., PeerProcess], node: Node) -> PeerProcess:
    return make_peer(node)


@pytest.fixture
def shm_of() -> Callable[..., set[str]]:
    """Files in /dev/shm of these processes; an earlier test's process may have had the same number."""
    before = set(os.listdir("/dev/shm"))
    return lambda *pids: {path.name for pid in pids for path in Path("/dev/shm").glob(f"{pid}[-:]*")} - before
