"""Messages of any size both ways, and every way to wait: threads, asyncio, callbacks, by hand; Python stuck."""

from __future__ import annotations

import asyncio
import logging
import select
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fabric_kv.errors import ClosedError, TransferCancelledError, TransferTimeoutError
from fabric_kv.regions import RemoteRegion
from fabric_kv.transfers import Counter, Transfer

from .engine_peer import LONG, Node, PeerProcess, stamp
from .fabrics import SLOWER, patient

FRAME = 16384 - 40
SIZES = [0, 1, FRAME - 1, FRAME, FRAME + 1, 10 * FRAME, (1 << 20) - 1, 1 << 20]


def test_messages_of_any_size_both_ways(node: Node, peer: PeerProcess) -> None:
    peer.call("echo")
    payloads = [stamp(size, size).tobytes() for size in SIZES]
    for payload in payloads:
        node.engine.send(node.peer, payload)
    assert sorted(node.wait_messages(len(SIZES)), key=len) == payloads
    assert node.describe()["groups"][0]["malformed_frames"] == 0


def test_many_messages_arrive_each_once(node: Node, peer: PeerProcess) -> None:
    payloads = [number.to_bytes(4, "little") * (number % 7 * 300) + bytes([number % 256]) for number in range(1000)]
    transfers = [node.engine.send(node.peer, payload) for payload in payloads]
    assert sorted(peer.call("wait_messages", 1000)) == sorted(payloads)
    for transfer in transfers:
        transfer.result(LONG)
    figures = peer.call("describe")
    assert figures["dropped_messages"] == figures["callback_errors"] == 0


def test_messages_that_come_before_a_callback_are_kept(node: Node, peer: PeerProcess) -> None:
    node.engine.on_message(None)
    for number in range(5):
        peer.call("send", bytes([number]) * 20_000)
    got: list[bytes] = []
    came = threading.Event()

    def on_message(sender: bytes, payload: bytes) -> None:
        assert sender == node.peer.epoch
        got.append(payload)
        if len(got) == 5:
            came.set()

    node.engine.on_message(on_message)
    assert came.wait(LONG)
    assert sorted(got) == [bytes([number]) * 20_000 for number in range(5)]


def test_a_full_inbox_holds_the_sender_and_loses_nothing(
    make_node: Callable[..., Node], make_peer: Callable[..., PeerProcess]
) -> None:
    """Python does not poll: the inbox fills up to its bound, then frames wait, then everything comes."""
    node = make_node(dispatch="manual", max_inbox_bytes=1 << 18, max_message_bytes=1 << 17)
    peer = make_peer(node)
    got: list[bytes] = []
    node.engine.on_message(lambda _sender, payload: got.append(payload))
    peer.call("post_numbered", 60, 50_000)
    select.select([node.engine.fileno()], [], [], LONG)
    deadline = time.monotonic() + LONG
    while len(got) < 60 and time.monotonic() < deadline:
        node.engine.poll(0.1)
    assert sorted(got) == [bytes([number]) * 50_000 for number in range(60)]
    peer.call("wait_transfers")


def test_a_full_inbox_is_not_held_against_the_peers(
    make_node: Callable[..., Node], make_peer: Callable[..., PeerProcess]
) -> None:
    """We take nothing for longer than a peer may be silent: their pings wait outside, and that is our doing."""
    options = patient(heartbeat_interval_s=0.02, heartbeat_misses=25)
    node = make_node(dispatch="manual", max_inbox_bytes=1 << 16, max_message_bytes=1 << 16, **options)
    peer = make_peer(node, monitor=True, **options)
    peer.call("post_numbered", 120, 20_000)
    held_back, deadline = num_frames(peer.call("describe")) + 60, time.monotonic() + LONG
    while num_frames(peer.call("describe")) < held_back and time.monotonic() < deadline:
        time.sleep(0.01)  # until that many of our own pings have got through
    while len(node.messages) < 120 and time.monotonic() < deadline:
        node.engine.poll(0.1)
    assert len(node.messages) == 120
    assert not node.lost


def num_frames(figures: dict[str, Any]) -> int:
    return int(figures["groups"][0]["rails"][0]["messages"])


# -- waiting -----------------------------------------------------------------------------------------------------------


def write_counted(node: Node, remote: bytes, token: Any, value: int = 1) -> Transfer:
    node.fill(value)
    dst = RemoteRegion.from_bytes(remote)
    return node.engine.write(node.peer, node.regions["memory"], 0, dst, 0, 4096, token=token)


def test_coroutines_wait_for_transfers_and_counters(node: Node, peer: PeerProcess) -> None:
    peer.call("register", 4096, 3)
    here = node.register(4096)

    async def main() -> None:
        for _ in range(50):
            counter = node.engine.counter(unit_bytes=1024, expected_units=4)
            peer.start("write_pages", here, [0], [0], page_bytes=4096, token=counter.token)
            await asyncio.wait_for(counter, LONG)
            counter.release()
            peer.finish()
            await asyncio.gather(*(node.engine.send(node.peer, b"x") for _ in range(5)))

    asyncio.run(main())
    assert node.get(0, 4096) == b"\x03" * 4096
    assert len(peer.call("wait_messages", 250)) == 250


def test_a_loop_polls_by_itself_when_the_descriptor_is_ready(
    make_node: Callable[..., Node], make_peer: Callable[..., PeerProcess]
) -> None:
    node = make_node(dispatch="manual")
    peer = make_peer(node)
    remote, here = peer.call("register", 4096, 4), node.register(4096)
    before = threading.active_count()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(node.engine.fileno(), node.engine.poll)
        came = asyncio.Event()
        node.engine.on_message(lambda _sender, _payload: came.set())
        for _ in range(20):
            counter = node.engine.counter(unit_bytes=4096, expected_units=1)
            peer.start("write_pages", here, [0], [0], page_bytes=4096, token=counter.token)
            await asyncio.wait_for(counter, LONG)
            counter.release()
            peer.finish()
            await asyncio.wait_for(write_counted(node, remote, None), LONG)
        peer.start("send", b"hello")
        await asyncio.wait_for(came.wait(), LONG)
        peer.finish()
        loop.remove_reader(node.engine.fileno())

    asyncio.run(main())
    assert threading.active_count() == before, "manual means: no thread of ours"


def test_cancelling_a_coroutine_leaves_the_transfer_alone(node: Node, peer: PeerProcess) -> None:
    remote = peer.call("register", 4096)
    node.register(4096)
    token = peer.call("count", 4096, 1)

    async def main() -> None:
        counter = node.engine.counter(unit_bytes=1, expected_units=1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(counter, 0.01)
        assert not counter.done()
        counter.release(quiescent=True)
        task = asyncio.ensure_future(asyncio.wait_for(write_counted(node, remote, token), LONG))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(main())
    assert peer.call("wait_counter") == 1


def test_a_wait_that_times_out_leaves_the_counter_alone(node: Node, peer: PeerProcess) -> None:
    peer.call("register", 4096, 1)
    here = node.register(4096)
    with node.engine.counter(unit_bytes=4096) as counter:
        with pytest.raises(TimeoutError):
            counter.result(0.01)
        peer.call("write_pages", here, [0], [0], page_bytes=4096, token=counter.token)
        counter.arm(1)
        counter.result(LONG)
        assert counter.received == 1


def test_cancel_ends_a_transfer_when_nothing_of_it_is_under_way(node: Node, peer: PeerProcess) -> None:
    nbytes = 64 << 20
    remote = RemoteRegion.from_bytes(peer.call("register", nbytes))
    node.register(nbytes)
    transfers = [node.engine.write(node.peer, node.regions["memory"], 0, remote, 0, nbytes) for _ in range(8)]
    for transfer in transfers[1:]:
        transfer.cancel()
        transfer.cancel()
    outcomes = [transfer.exception(LONG) for transfer in transfers]
    assert outcomes[0] is None
    cancelled = [outcome for outcome in outcomes if outcome is not None]
    assert cancelled, "64 MiB each: some must have been caught"
    for outcome in cancelled:
        assert isinstance(outcome, TransferCancelledError)
        assert outcome.bytes_done < nbytes
    # Nobody reads the region any more: it can go.
    node.deregister()


def test_a_region_in_use_is_not_deregistered(node: Node, peer: PeerProcess) -> None:
    from fabric_kv.errors import ConfigError

    peer.call("register", 64 << 20)
    remote = RemoteRegion.from_bytes(peer.call("register", 64 << 20))
    node.register(64 << 20)
    region = node.regions["memory"]
    transfers = [node.engine.write(node.peer, region, 0, remote, 0, 64 << 20) for _ in range(4)]
    refused = False
    try:
        region.close()
    except ConfigError as error:
        refused = True
        assert "in use by" in str(error)  # noqa: PT017
    assert refused or all(transfer.done() for transfer in transfers)
    for transfer in transfers:
        transfer.result(LONG)
    region.close()


def test_a_wait_for_a_transfer_times_out_with_its_number(node: Node, peer: PeerProcess) -> None:
    nbytes = (256 << 20) // SLOWER
    remote = RemoteRegion.from_bytes(peer.call("register", nbytes))
    node.register(nbytes)
    transfer = node.engine.write(node.peer, node.regions["memory"], 0, remote, 0, nbytes)
    with pytest.raises(TransferTimeoutError, match="its memory is still in use") as caught:
        transfer.result(0)
    assert caught.value.transfer_id == transfer.id
    transfer.result(LONG)


# -- callbacks ---------------------------------------------------------------------------------------------------------


def test_a_callback_that_raises_is_logged_counted_and_stops_nothing(
    node: Node, peer: PeerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    came = threading.Event()

    def broken(_sender: bytes, payload: bytes) -> None:
        if payload == b"last":
            came.set()
        raise ValueError("a bug in a callback")

    node.engine.on_message(broken)
    with caplog.at_level(logging.ERROR, "fabric_kv"):
        for payload in (b"first", b"second", b"last"):
            peer.call("send", payload)
        assert came.wait(LONG)
        transfer = node.engine.send(node.peer, b"x")
        ended = threading.Event()

        def broken_too(_: Transfer) -> None:
            ended.set()
            raise KeyError("another")

        transfer.add_done_callback(broken_too)
        assert ended.wait(LONG)
    deadline = time.monotonic() + LONG
    while node.describe()["callback_errors"] < 4 and time.monotonic() < deadline:
        node.engine.send(node.peer, b"x").result(LONG)
    assert node.describe()["callback_errors"] == 4
    assert "a bug in a callback" in caplog.text


def test_callbacks_may_use_the_whole_engine(node: Node, peer: PeerProcess) -> None:
    """From a message's callback: register, count, send, write; from the write's: deregister, send again."""
    peer.call("register", 4096, 9)
    peer.call("obey")
    done = threading.Event()
    problems: list[BaseException] = []
    buffer = np.zeros(4096, np.uint8)

    def first(_: Transfer) -> None:
        try:
            region = node.engine.register(buffer)
            counter = node.engine.counter(unit_bytes=4096, expected_units=1)
            import msgspec

            from .engine_peer import WriteOrder

            order = WriteOrder(0, region.remote.to_bytes(), [0], [0], 4096, 4096, 4096, counter.token)
            node.engine.send(node.peer, msgspec.msgpack.encode(order))

            def second(counter: Counter) -> None:
                counter.release()
                region.close()
                node.engine.describe()
                node.engine.poll()
                done.set()

            counter.add_done_callback(second)
        except BaseException as error:  # noqa: BLE001  shown below
            problems.append(error)
            done.set()

    node.engine.send(node.peer, b"\x98\x00").add_done_callback(first)  # which the peer cannot read: counted over there
    assert done.wait(LONG)
    assert not problems
    assert buffer.tobytes() == stamp(0, 4096).tobytes()
    assert peer.call("describe")["callback_errors"] == 1


def test_a_callback_may_close_the_engine(node: Node, peer: PeerProcess) -> None:
    closed = threading.Event()

    def close(_sender: bytes, _payload: bytes) -> None:
        node.engine.close()
        closed.set()

    node.engine.on_message(close)
    peer.call("post", b"close")
    assert closed.wait(LONG)
    assert node.engine.closed


def test_close_from_two_threads_and_a_callback_at_once(node: Node, peer: PeerProcess) -> None:
    remote = RemoteRegion.from_bytes(peer.call("register", 64 << 20))
    node.register(64 << 20)
    node.engine.on_message(lambda _sender, _payload: node.engine.close())
    transfers = [node.engine.write(node.peer, node.regions["memory"], 0, remote, 0, 64 << 20) for _ in range(8)]
    peer.call("post", b"close")
    threads = [threading.Thread(target=node.engine.close) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
        assert not thread.is_alive()
    for transfer in transfers:
        assert isinstance(transfer.exception(LONG), ClosedError | None)


# -- Python does nothing -----------------------------------------------------------------------------------------------


@pytest.fixture
def shared_file(tmp_path: Path) -> Path:
    path = tmp_path / "memory"
    path.write_bytes(bytes(1 << 20))
    return path


def wait_for_bytes(view: np.ndarray[Any, Any], expected: bytes) -> bool:
    deadline = time.monotonic() + LONG
    while time.monotonic() < deadline:
        if view[: len(expected)].tobytes() == expected:
            return True
        time.sleep(0.001)
    return False


def test_data_lands_while_the_receivers_python_holds_the_gil(node: Node, peer: PeerProcess, shared_file: Path) -> None:
    """We see it arrive in memory that both processes map."""
    view = np.memmap(shared_file, np.uint8, "r")
    remote = RemoteRegion.from_bytes(peer.call("register", 1 << 20, file=str(shared_file)))
    node.register(1 << 20)
    node.put(0, stamp(1, 1 << 20).tobytes())
    token = peer.call("count", 4096, 256)
    with peer.holding_gil():
        transfer = node.engine.write(node.peer, node.regions["memory"], 0, remote, 0, 1 << 20, token=token)
        assert wait_for_bytes(view, stamp(1, 1 << 20).tobytes())
        transfer.result(LONG)
    assert peer.call("wait_counter") == 256


def test_transfers_go_on_while_the_senders_python_holds_the_gil(node: Node, peer: PeerProcess) -> None:
    nbytes = 32 << 20
    here = node.register(nbytes)
    peer.call("register", nbytes, 7)
    with (
        node.engine.counter(unit_bytes=1 << 16, expected_units=nbytes >> 16) as counter,
        peer.holding_gil("write_and_hold_gil", here, nbytes, counter.token),
    ):
        counter.result(LONG)
        assert node.memory["memory"].min() == 7


def test_heartbeats_go_on_while_python_holds_the_gil(
    make_node: Callable[..., Node], make_peer: Callable[..., PeerProcess]
) -> None:
    options = patient(heartbeat_interval_s=0.05, heartbeat_misses=10)
    node = make_node(**options)
    peer = make_peer(node, monitor=True, **options)
    with peer.holding_gil():
        # More pings than the bound allows to miss, all sent while the peer's Python stands still.
        enough, deadline = num_frames(node.describe()) + 30, time.monotonic() + LONG
        while num_frames(node.describe()) < enough and time.monotonic() < deadline:
            time.sleep(0.01)
        assert num_frames(node.describe()) >= enough
        assert not node.lost


def test_data_lands_while_nobody_polls(
    make_node: Callable[..., Node], make_peer: Callable[..., PeerProcess], shared_file: Path
) -> None:
    node = make_node()
    peer = make_peer(node, dispatch="manual")
    view = np.memmap(shared_file, np.uint8, "r")
    remote = RemoteRegion.from_bytes(peer.call("register", 1 << 20, file=str(shared_file)))
    node.register(1 << 20)
    node.put(0, stamp(2, 1 << 20).tobytes())
    node.engine.write(node.peer, node.regions["memory"], 0, remote, 0, 1 << 20).result(LONG)
    assert wait_for_bytes(view, stamp(2, 1 << 20).tobytes())
