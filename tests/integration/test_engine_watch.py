"""Prepared submissions and transfers that wait for a word, between two processes."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from fabric_kv import ConfigError, PageList, PreparedPiece, RemoteRegion, TransferCancelledError
from fabric_kv.prepared import Prepared, Watch
from fabric_kv.transfers import PagePiece

from .engine_peer import LONG, Node, PeerProcess, stamp

PAGE = 1024
LAYERS = 4
NUM_PAGES = 16
LAYER_BYTES = PAGE * NUM_PAGES


@pytest.fixture
def remote(node: Node, peer: PeerProcess) -> RemoteRegion:
    node.register(LAYERS * LAYER_BYTES)
    node.put(0, stamp(3, LAYERS * LAYER_BYTES).tobytes())
    return RemoteRegion.from_bytes(peer.call("register", LAYERS * LAYER_BYTES))


@pytest.fixture
def prepared(node: Node, remote: RemoteRegion) -> Prepared:
    """Every layer's pages, from layer 1 on."""
    region = node.regions["memory"]
    at = [layer * LAYER_BYTES for layer in range(LAYERS)]
    return node.engine.prepare(
        node.peer,
        [PreparedPiece(region, at[i], PAGE, remote, at[i], PAGE, PAGE, layer=i + 1) for i in range(LAYERS)],
    )


def layer_of(peer: PeerProcess, layer: int) -> bytes:
    data: bytes = peer.call("get", layer * LAYER_BYTES, LAYER_BYTES)
    return data


def expected(layer: int, src: np.ndarray, dst: np.ndarray) -> bytes:
    pages = stamp(3, LAYERS * LAYER_BYTES)[layer * LAYER_BYTES :][:LAYER_BYTES].reshape(NUM_PAGES, PAGE)
    out = np.zeros_like(pages)
    out[dst] = pages[src]
    return out.tobytes()


@pytest.mark.parametrize("kind", ["i1", "u1", "i2", "<u4", ">i4", "i8", "u8", "list", "strided", "PageList"])
def test_page_lists_of_every_kind(node: Node, peer: PeerProcess, prepared: Prepared, kind: str) -> None:
    src, dst = np.arange(NUM_PAGES)[::-1], np.roll(np.arange(NUM_PAGES), 5)
    lists: list[object] = []
    for pages in (src, dst):
        if kind == "list":
            lists.append(pages.tolist())
        elif kind == "strided":
            lists.append(np.repeat(pages, 3)[::3])
        elif kind == "PageList":
            lists.append(PageList(pages))
        else:
            lists.append(pages.astype(kind))
    token = peer.call("count", PAGE, LAYERS * NUM_PAGES)
    transfer = prepared.submit([(lists[0], lists[1])], token=token)  # type: ignore[list-item]
    assert transfer.nbytes == LAYERS * LAYER_BYTES
    transfer.result(LONG)
    assert peer.call("wait_counter") == LAYERS * NUM_PAGES
    for layer in range(LAYERS):
        assert layer_of(peer, layer) == expected(layer, src, dst)


def test_each_layer_goes_when_it_is_done(node: Node, peer: PeerProcess, prepared: Prepared) -> None:
    watch = node.engine.watch()
    pages = np.arange(NUM_PAGES)
    for step in (1, 2):
        peer.call("fill", 0)
        token = peer.call("count", PAGE, LAYERS * NUM_PAGES)
        transfer = prepared.submit([(pages, pages)], token=token, watch=watch, step=step)
        node.fill(0xEE)  # what is sent too early shows
        for layer in range(LAYERS):
            begin = layer * LAYER_BYTES
            node.put(begin, stamp(3, LAYERS * LAYER_BYTES)[begin : begin + LAYER_BYTES].tobytes())
            watch.set(step, layer + 1)
        transfer.result(LONG)
        assert peer.call("wait_counter") == LAYERS * NUM_PAGES
        for layer in range(LAYERS):
            assert layer_of(peer, layer) == expected(layer, pages, pages)
    assert (watch.step, watch.layers) == (2, LAYERS)


def test_another_process_bumps_the_word(node: Node, peer: PeerProcess, prepared: Prepared, tmp_path: Path) -> None:
    """As a GPU would: it writes the word, tells nobody, and our Python is asleep with the GIL."""
    path = tmp_path / "word"
    path.write_bytes(bytes(8))
    watch = node.engine.watch(np.memmap(path, np.uint64, "r+", shape=(1,)))
    peer.call("register", 8, name="word", file=str(path))
    token = peer.call("count", PAGE, LAYERS * NUM_PAGES)
    pages = PageList(np.arange(NUM_PAGES))
    transfer = prepared.submit([(pages, pages)], token=token, watch=watch, step=5)
    assert not transfer.done()
    peer.start("put", 0, np.uint64(5 << 16 | LAYERS).tobytes(), name="word")
    peer.start("wait_counter")
    ctypes.PyDLL(None).usleep(100_000)  # no Python runs here meanwhile
    peer.finish()
    assert peer.finish(LONG) == LAYERS * NUM_PAGES
    transfer.result(LONG)


def test_a_transfer_that_waits_can_be_cancelled(node: Node, peer: PeerProcess, prepared: Prepared) -> None:
    watch = node.engine.watch()
    pages = np.arange(NUM_PAGES)
    transfer = prepared.submit([(pages, pages)], watch=watch, step=1)
    watch.set(1, 2)
    transfer.cancel()
    with pytest.raises(TransferCancelledError) as caught:
        transfer.result(LONG)
    assert caught.value.unposted is not None
    assert caught.value.unposted[0] in (0, 1, 2)
    watch.set(1, LAYERS)
    node.engine.write(node.peer, node.regions["memory"], 0, prepared._dst[0], 0, 1).result(LONG)
    assert layer_of(peer, LAYERS - 1) == bytes(LAYER_BYTES)


def test_submit_waits_too(node: Node, peer: PeerProcess, remote: RemoteRegion) -> None:
    watch: Watch = node.engine.watch()
    region = node.regions["memory"]
    pieces = [
        PagePiece(region, i * PAGE, 0, remote, i * PAGE, 0, PAGE, [0], [0], layer=layer)
        for i, layer in enumerate((0, 1))
    ]
    token = peer.call("count", PAGE, 2)
    transfer = node.engine.submit(node.peer, pieces, token=token, watch=watch, step=1)
    watch.set(1, 1)
    transfer.result(LONG)
    assert peer.call("wait_counter") == 2


def test_refusals(node: Node, prepared: Prepared, remote: RemoteRegion) -> None:
    watch = node.engine.watch()
    region = node.regions["memory"]
    with pytest.raises(ConfigError, match="page lists 0, but 0 pair"):
        prepared.submit([])
    with pytest.raises(ConfigError, match=r"dst_pages\[1\] = 99 \(page index\) is out of range"):
        prepared.submit([([0, 1], [0, 99])])
    with pytest.raises(ConfigError, match="must pair up"):
        prepared.submit([([0, 1], [0])])
    with pytest.raises(ConfigError, match="one-dimensional"):
        prepared.submit([([[0]], [[0]])])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="48 bits"):
        watch.set(1 << 48, 0)
    with pytest.raises(ConfigError, match="48 bits"):
        prepared.submit([([0], [0])], watch=watch, step=1 << 48)
    with pytest.raises(ConfigError, match="one uint64"):
        node.engine.watch(np.zeros(2, np.uint64))
    with pytest.raises(ConfigError, match="layer=65536"):
        node.engine.prepare(node.peer, [PreparedPiece(region, 0, 0, remote, 0, 0, 1, layer=65536)])
    later, earlier = (PagePiece(region, 0, 0, remote, 0, 0, 1, [0], [0], layer=layer) for layer in (2, 1))
    with pytest.raises(ConfigError, match="in the order of their layers"):
        node.engine.submit(node.peer, [later, earlier], watch=watch, step=1)


@pytest.mark.parametrize("provider", ["tcp"], indirect=True)
def test_read_only_memory_is_watched_and_never_written(node: Node, prepared: Prepared, peer: PeerProcess) -> None:
    constant = bytes(8)
    watch = node.engine.watch(np.frombuffer(constant, np.uint64))
    with pytest.raises(ConfigError, match="read-only memory"):
        watch.set(3, 1)
    assert constant == bytes(8)
    word = np.zeros(1, np.uint64)
    seen = word.view()
    seen.flags.writeable = False
    pages = np.arange(NUM_PAGES)
    transfer = prepared.submit([(pages, pages)], watch=node.engine.watch(seen), step=1)
    word[0] = 1 << 16 | LAYERS  # whoever owns it
    transfer.result(LONG)
