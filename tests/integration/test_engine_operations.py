"""Reads, flushes, scatter, signals, barriers, notifications and deadlines, over every provider."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import numpy as np
import pytest

from fabric_kv import ConfigError, Engine, EngineOptions, PagePiece, RemoteRegion, TransferError, TransferTimeoutError

from .fabrics import LONG, nics_of, with_rdma

PAGE = 10_000
NUM_PAGES = 40


def open_engine(provider: str, num_nics: int = 1, **options: int) -> Engine:
    return Engine(provider, nics=nics_of(provider, num_nics), options=EngineOptions(**options))  # type: ignore[arg-type]


def stamped(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (NUM_PAGES, PAGE), np.uint8)


@pytest.fixture(params=with_rdma("tcp", "net", "shm"))
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Engine, Engine]]:
    with open_engine(request.param) as a, open_engine(request.param) as b:
        yield a, b


def test_reads_fetch_pages_and_ranges(pair: tuple[Engine, Engine], seed: int) -> None:
    here, there = pair
    source, target = stamped(seed), np.zeros((NUM_PAGES, PAGE), np.uint8)
    region, local = there.register(source), here.register(target)
    remote = region.remote
    peer = here.add_peer(there.address)
    order = np.random.default_rng(seed).permutation(NUM_PAGES)
    here.read_pages(peer, local, remote, np.arange(NUM_PAGES), order, page_bytes=PAGE, deadline_s=20).result()
    assert (target == source[order]).all()
    here.read(peer, local, 5, remote, 17, 100).result(10)
    assert (target.reshape(-1)[5:105] == source.reshape(-1)[17:117]).all()
    assert (target.reshape(-1)[105:PAGE] == source[order[0]][105:]).all()
    with pytest.raises(ConfigError, match="out of range"):
        here.read(peer, local, 0, remote, NUM_PAGES * PAGE - 5, 6)


def test_reads_and_writes_cross_borders_of_registrations_on_any_rails(seed: int) -> None:
    """Regions of several registrations on both sides, 3 NICs against 2: every byte and every unit once."""
    with (
        open_engine("tcp", 3, max_registration_bytes=65_536) as a,
        open_engine("tcp", 2, max_registration_bytes=40_000) as b,
    ):
        source, target = stamped(seed), np.zeros((NUM_PAGES, PAGE), np.uint8)
        src, dst = a.register(source), b.register(target)
        remote = RemoteRegion.from_bytes(dst.remote.to_bytes())
        assert len(remote.segment_ends) == 10
        peer = a.add_peer(b.address)
        order = np.random.default_rng(seed).permutation(NUM_PAGES)
        counter = b.counter(unit_bytes=4096, expected_units=NUM_PAGES * 3)
        a.write_pages(peer, src, remote, order, np.arange(NUM_PAGES), page_bytes=PAGE, token=counter.token).result(20)
        counter.result(20)
        assert (target == source[order]).all()
        source[:] = 0
        a.read_pages(peer, src, remote, order, np.arange(NUM_PAGES), page_bytes=PAGE).result(20)
        assert (source[order] == target).all()
        used = [rail["ops"] for rail in a.describe()["groups"][0]["rails"]]
        assert sum(ops > 0 for ops in used) >= 2, used  # the third is for when these are busy
        assert b.describe()["groups"][0]["violations"] == 0


def test_flush_ends_when_earlier_writes_are_in_memory(pair: tuple[Engine, Engine], seed: int) -> None:
    here, there = pair
    source, target = stamped(seed), np.zeros((NUM_PAGES, PAGE), np.uint8)
    src, dst = here.register(source), there.register(target)
    remote = dst.remote
    peer = here.add_peer(there.address)
    if not here.describe()["groups"][0]["rails"][0]["ordered_writes"]:
        with pytest.raises(TransferError, match="keep writes in order"):
            here.flush(peer, remote).result(20)
        return
    for _ in range(20):
        target[:] = 0
        pages = np.arange(NUM_PAGES)
        here.write_pages(peer, src, remote, pages, pages, page_bytes=PAGE).result(20)
        here.flush(peer, remote).result(20)
        assert (target == source).all()


def test_scatter_reaches_every_peer_or_none(seed: int) -> None:
    with open_engine("tcp") as here, open_engine("tcp") as b, open_engine("tcp") as c:
        source = stamped(seed)
        src = here.register(source)
        parts, checks = [], []
        for number, there in enumerate((b, c)):
            target = np.zeros((NUM_PAGES, PAGE), np.uint8)
            dst = there.register(target)
            counter = there.counter(unit_bytes=PAGE, expected_units=2)
            piece = PagePiece(src, 0, PAGE, dst.remote, 0, PAGE, PAGE, [number, number + 2], [7, 3])
            parts.append((here.add_peer(there.address), [piece], counter.token))
            checks.append((counter, target, number, dst))
        bad = (parts[1][0], [parts[1][1][0]._replace(dst_pages=[0, NUM_PAGES])], parts[1][2])
        with pytest.raises(ConfigError, match=f"= {NUM_PAGES} "):
            here.scatter([parts[0], bad])
        for transfer in here.scatter(parts):
            transfer.result(10)
        for counter, target, number, _ in checks:
            counter.result(10)
            assert (target[[7, 3]] == source[[number, number + 2]]).all()
            assert counter.received == 2, "the refused submission left nothing behind"


def test_signals_barriers_and_notifications_carry_no_data(pair: tuple[Engine, Engine]) -> None:
    here, there = pair
    target = np.full(64, 7, np.uint8)
    dst = there.register(target)
    remote = dst.remote
    peer = here.add_peer(there.address)
    many = there.counter(unit_bytes=1, expected_units=5_000)  # more than one immediate can carry
    here.signal(peer, remote, many.token, 5_000).result(10)
    many.result(10)
    both = there.counter(unit_bytes=1, expected_units=2)
    for _ in range(2):
        for transfer in here.barrier([(peer, remote, both.token)]):
            transfer.result(10)
    both.result(10)
    heard: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    there.on_notify(lambda group, value: heard.put((group, value)))
    for value in (0, 1, 0x7FFF):
        here.notify(peer, remote, value).result(10)
        assert heard.get(timeout=LONG) == (0, value)
    with pytest.raises(ConfigError, match="32768"):
        here.notify(peer, remote, 1 << 15)
    assert (target == 7).all()


def test_a_deadline_that_passes_before_posting_ends_in_timeout_with_what_was_not_posted(seed: int) -> None:
    with open_engine("tcp") as here, open_engine("tcp") as there:
        src, dst = here.register(stamped(seed)), there.register(stamped(0))
        peer = here.add_peer(there.address)
        transfer = here.submit(
            peer, [PagePiece(src, 0, PAGE, dst.remote, 0, PAGE, PAGE, [1, 5], [1, 5])], deadline_s=1e-9
        )
        with pytest.raises(TransferTimeoutError) as caught:
            transfer.result(10)
        assert transfer.done()
        assert transfer.state == "failed"
        assert caught.value.unposted == (0, 0)
        assert caught.value.bytes_done == 0
        with pytest.raises(ConfigError, match="deadline_s"):
            here.submit(peer, [], deadline_s=0)
