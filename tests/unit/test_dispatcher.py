"""The thread between the C++ core and Python, over a core that the test plays: order, locks, callbacks' bugs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fabric_kv import dispatcher as module
from fabric_kv.config import EngineOptions
from fabric_kv.dispatcher import Dispatcher
from fabric_kv.errors import (
    ClosedError,
    DeviceError,
    InternalError,
    ProtocolError,
    TransferCancelledError,
    TransferError,
)
from fabric_kv.regions import CounterToken
from fabric_kv.transfers import Counter, Peer, Transfer

A, B = b"a" * 16, b"b" * 16
TRANSFER, COUNTER, MESSAGE, USER, PEER_LOST, FAULT, STALLED, HELD_UP = range(8)
NO_ERROR = (0, 0, "", "", "", "")


class Core:
    """What Dispatcher uses of _native.Engine."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.events: list[tuple[Any, ...]] = []
        self.rung = False

    def post(self, *events: tuple[Any, ...]) -> None:
        with self.condition:
            self.events += events
            self.condition.notify()

    def ring(self) -> None:
        with self.condition:
            self.rung = True
            self.condition.notify()

    def poll(self, timeout_s: float) -> list[tuple[Any, ...]]:
        with self.condition:
            self.condition.wait_for(lambda: self.events or self.rung, timeout_s)
            self.rung = False
            events, self.events = self.events, []
            return events


class Submission:
    def __init__(self, number: int) -> None:
        self.id = number
        self.nbytes = 100


def make(**options: Any) -> tuple[Core, Dispatcher]:
    core = Core()
    return core, Dispatcher(cast("Any", core), EngineOptions(**{"dispatch": "manual"} | options))


def open_transfer(dispatcher: Dispatcher, number: int) -> Transfer:
    engine = SimpleNamespace(_dispatcher=dispatcher)
    transfer = Transfer(cast("Any", engine), Peer(cast("Any", None), A), None)
    transfer._native = cast("Any", Submission(number))
    dispatcher.transfers[number] = transfer
    return transfer


class Owner:
    """Stands for the Engine: what a counter keeps a weak reference to."""


OWNER = Owner()


def open_counter(dispatcher: Dispatcher, slot: int, generation: int) -> Counter:
    counter = Counter(cast("Any", OWNER), CounterToken(slot, generation, 1))
    dispatcher.counters[0, slot, generation] = counter
    return counter


def message(payload: bytes, sender: bytes = A, number: int = 1) -> tuple[Any, ...]:
    return MESSAGE, sender, number, len(payload), 0, payload


def ended(number: int, outcome: int = 0) -> tuple[Any, ...]:
    failed = outcome == 1
    error = (5, 1, "write", "tcp", "lo", "broken") if failed else NO_ERROR
    return TRANSFER, number, outcome, 40, A, error, [(0, 2, 1)] if failed else [], (0, 3, 1) if outcome else (0, 0, 0)


def test_transfers_end_as_the_core_says() -> None:
    core, dispatcher = make()
    transfers = [open_transfer(dispatcher, number) for number in range(4)]
    core.post(*(ended(number, number) for number in range(4)))
    assert dispatcher.poll(0) == 4
    assert transfers[0].result(0) is None
    error = transfers[1].exception(0)
    assert isinstance(error, TransferError)
    assert (error.fi_errno, error.op, error.provider, error.nic, error.bytes_done) == (5, "write", "tcp", "lo", 40)
    assert "broken" in str(error)
    assert isinstance(transfers[2].exception(0), TransferCancelledError)
    assert isinstance(transfers[3].exception(0), ClosedError)
    assert not dispatcher.transfers


def test_counters_end_as_the_core_says() -> None:
    core, dispatcher = make()
    fired, overrun, other = (open_counter(dispatcher, slot, 3) for slot in range(3))
    core.post((COUNTER, 0, 0, 3, True), (COUNTER, 0, 1, 3, False), (COUNTER, 0, 2, 2, True), (COUNTER, 1, 2, 3, True))
    dispatcher.poll(0)
    assert fired.result(0) is None
    assert isinstance(overrun.exception(0), ProtocolError)
    assert not other.done()


@pytest.mark.parametrize("error", [OSError(5, "the driver broke"), DeviceError("lost"), SystemExit(1)])
def test_what_cannot_be_made_visible_ends_in_a_typed_error(error: BaseException) -> None:
    def broken(_group: int) -> None:
        raise error

    core, dispatcher = make()
    dispatcher.before_ready = broken
    read, counter, write = open_transfer(dispatcher, 1), open_counter(dispatcher, 0, 0), open_transfer(dispatcher, 2)
    read._reads_into = 0
    core.post(ended(1), (COUNTER, 0, 0, 0, True), ended(2))
    dispatcher.poll(0)
    for item in (read, counter):
        kind = DeviceError if isinstance(error, DeviceError) else InternalError
        with pytest.raises(kind, match=str(error.args[-1])):
            item.result(0)
    assert write.result(0) is None
    assert dispatcher.num_callback_errors == 0, "no callback of the user's"


def test_ctrl_c_while_data_is_made_visible_ends_the_read_too() -> None:
    def interrupt(_group: int) -> None:
        raise KeyboardInterrupt

    core, dispatcher = make()
    dispatcher.before_ready = interrupt
    read = open_transfer(dispatcher, 1)
    read._reads_into = 0
    core.post(ended(1))
    with pytest.raises(KeyboardInterrupt):
        dispatcher.poll(0)
    assert isinstance(read.exception(0), InternalError)


def test_an_end_that_is_not_understood_is_an_end() -> None:
    core, dispatcher = make()
    transfers = [open_transfer(dispatcher, number) for number in range(2)]
    core.post((*ended(0, 1)[:5], (), [], (0, 0, 0)), ended(1))
    dispatcher.poll(0)
    with pytest.raises(InternalError, match="not understood: ValueError"):
        transfers[0].result(0)
    assert transfers[1].result(0) is None


def test_what_was_open_at_the_end_keeps_no_memory() -> None:
    _, dispatcher = make()
    transfer = open_transfer(dispatcher, 1)
    transfer._keep = bytearray(8)
    dispatcher.stop()
    assert isinstance(transfer.exception(0), ClosedError)
    assert transfer._keep is None


def test_what_nobody_knows_is_ignored() -> None:
    core, dispatcher = make()
    core.post(ended(77), (COUNTER, 9, 9, 9, True), (USER, 0, 5), (PEER_LOST, B, "silent", False))
    assert dispatcher.poll(0) == 4
    assert dispatcher.num_callback_errors == 0


def test_messages_wait_for_a_callback_and_come_first() -> None:
    core, dispatcher = make()
    core.post(message(b"one"), message(b"two", B))
    dispatcher.poll(0)
    got: list[tuple[bytes, bytes]] = []
    dispatcher.set_on_message(lambda sender, payload: got.append((sender, payload)))
    assert not got, "called back by the thread that dispatches, not by the one that sets the callback"
    core.post(message(b"three"))
    dispatcher.poll(0)
    assert got == [(A, b"one"), (B, b"two"), (A, b"three")]


def test_setting_the_callback_wakes_the_thread() -> None:
    core, dispatcher = make(dispatch="thread")
    came = threading.Event()
    core.post(message(b"early"))
    dispatcher.start()
    dispatcher.set_on_message(lambda _sender, _payload: came.set())
    assert came.wait(10)
    dispatcher.stop()


def test_kept_messages_are_bounded_also_empty_ones() -> None:
    core, dispatcher = make(max_inbox_bytes=1 << 16, max_message_bytes=1 << 16)
    core.post(*(message(b"") for _ in range(2000)))
    dispatcher.poll(0)
    assert 0 < len(dispatcher._waiting) <= (1 << 16) // 256
    assert dispatcher.num_dropped_messages == 2000 - len(dispatcher._waiting)
    dispatcher.set_on_message(lambda _sender, _payload: None)
    dispatcher.poll(0)
    assert not dispatcher._waiting
    assert dispatcher._waiting_bytes == 0


class Unwound(BaseException):
    """As trio's Cancelled, gevent's GreenletExit and pytest's Failed are: none of the builtin kinds."""


@pytest.mark.parametrize("error", [ValueError("bug"), SystemExit(1), Unwound(), KeyboardInterrupt()])
def test_a_callback_that_raises_is_counted_and_the_rest_goes_on(error: BaseException) -> None:
    core, dispatcher = make(dispatch="thread")
    dispatcher.start()
    last = threading.Event()

    def on_message(_: bytes, payload: bytes) -> None:
        if payload == b"last":
            last.set()
        raise error

    dispatcher.set_on_message(on_message)
    transfer = open_transfer(dispatcher, 1)
    transfer.add_done_callback(lambda _: on_message(A, b"done"))
    core.post(message(b"first"), ended(1), message(b"last"))
    assert last.wait(10)
    assert transfer.result(10) is None
    dispatcher.stop()
    assert dispatcher.num_callback_errors == 3


def test_a_callback_that_polls_sees_the_order_of_events() -> None:
    core, dispatcher = make()
    got: list[bytes] = []

    def on_message(_: bytes, payload: bytes) -> None:
        got.append(payload)
        if payload == b"1":
            core.post(message(b"3"))
            dispatcher.poll(0)

    dispatcher.set_on_message(on_message)
    core.post(message(b"1"), message(b"2"))
    dispatcher.poll(0)
    assert got == [b"1", b"2", b"3"]


def test_an_interrupted_poll_loses_nothing() -> None:
    core, dispatcher = make()
    transfer = open_transfer(dispatcher, 1)

    def interrupt(_sender: bytes, _payload: bytes) -> None:
        raise KeyboardInterrupt

    dispatcher.set_on_message(interrupt)
    core.post(message(b""), ended(1))
    with pytest.raises(KeyboardInterrupt):
        dispatcher.poll(0)
    assert transfer.done()
    assert dispatcher.num_callback_errors == 0
    dispatcher.poll(0)


@pytest.mark.parametrize("error", [SystemExit(1), Unwound(), KeyboardInterrupt()])
def test_close_ends_everything_whatever_the_callbacks_raise(error: BaseException) -> None:
    _, dispatcher = make()
    transfers = [open_transfer(dispatcher, number) for number in range(3)]

    def broken(_: object) -> None:
        raise error

    transfers[0].add_done_callback(broken)
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            dispatcher.stop()
    else:
        dispatcher.stop()
    assert all(isinstance(transfer.exception(0), ClosedError) for transfer in transfers)


def test_a_close_that_is_interrupted_ends_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    _, dispatcher = make(dispatch="thread")
    dispatcher.start()
    transfer = open_transfer(dispatcher, 1)
    thread = dispatcher._thread
    assert thread is not None

    def interrupt(_timeout: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(thread, "join", interrupt)
        with pytest.raises(KeyboardInterrupt):
            dispatcher.stop()
    assert isinstance(transfer.exception(0), ClosedError)
    thread.join(10)
    assert not thread.is_alive()


def test_a_close_from_a_callback_keeps_what_had_ended_before() -> None:
    core, dispatcher = make(dispatch="thread")
    dispatcher.start()
    good, never = open_transfer(dispatcher, 1), open_transfer(dispatcher, 2)
    dispatcher.set_on_message(lambda _sender, _payload: dispatcher.stop())
    core.post(message(b"close now"), ended(1))
    assert good.result(10) is None, "its end was known when close was called"
    assert isinstance(never.exception(10), ClosedError)
    assert dispatcher._thread is not None
    dispatcher._thread.join(10)
    assert not dispatcher._thread.is_alive()


def test_without_a_thread_it_stops_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    _, dispatcher = make(dispatch="thread")
    transfer = open_transfer(dispatcher, 1)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            dispatcher.start()
    dispatcher.stop()
    assert isinstance(transfer.exception(0), ClosedError)


def test_a_stuck_callback_does_not_stop_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STOP_S", 0.05)
    core, dispatcher = make(dispatch="thread")
    dispatcher.start()
    let_go, entered = threading.Event(), threading.Event()

    def stuck(_sender: bytes, _payload: bytes) -> None:
        entered.set()
        let_go.wait(30)

    dispatcher.set_on_message(stuck)
    transfer = open_transfer(dispatcher, 1)
    core.post(message(b""))
    assert entered.wait(10)
    dispatcher.stop()
    assert isinstance(transfer.exception(0), ClosedError)
    let_go.set()
    assert dispatcher._thread is not None
    dispatcher._thread.join(10)
    assert not dispatcher._thread.is_alive()


def test_callers_with_locks_of_their_own_do_not_meet_a_running_callback() -> None:
    """The callback waits for a lock whose holder sets callbacks and removes peers: neither may wait for it."""
    core, dispatcher = make(dispatch="thread")
    dispatcher.start()
    lock, entered, done = threading.Lock(), threading.Event(), threading.Event()

    def on_message(_sender: bytes, _payload: bytes) -> None:
        entered.set()
        with lock:
            done.set()

    dispatcher.set_on_message(on_message)
    calls: list[Callable[[], None]] = [
        lambda: dispatcher.set_on_message(None),
        lambda: dispatcher.forget(A),
        lambda: setattr(dispatcher, "on_peer_lost", None),
    ]

    def caller() -> None:
        for call in calls:
            call()
        lock.release()

    lock.acquire()
    core.post(message(b""))
    assert entered.wait(10)
    thread = threading.Thread(target=caller, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive(), "deadlock"
    assert done.wait(10)
    dispatcher.stop()


def test_a_lost_peer_is_told_and_its_half_messages_dropped() -> None:
    core, dispatcher = make()
    lost: list[tuple[bytes, str]] = []
    dispatcher.on_peer_lost = lambda epoch, reason: lost.append((epoch, reason))
    core.post((MESSAGE, A, 1, 10, 0, b"half"), (PEER_LOST, A, "silent", False))
    dispatcher.poll(0)
    assert lost == [(A, "silent")]
    assert dispatcher.describe()["dropped_messages"] == 1


@pytest.mark.parametrize(("closed", "level"), [(False, logging.WARNING), (True, logging.INFO)])
def test_a_peer_that_closes_is_no_reason_to_warn(closed: bool, level: int, caplog: pytest.LogCaptureFixture) -> None:
    core, dispatcher = make()
    core.post((PEER_LOST, A, "gone", closed))
    with caplog.at_level(logging.INFO, "fabric_kv"):
        dispatcher.poll(0)
    assert [record.levelno for record in caplog.records] == [level]


def test_of_the_transfers_that_are_held_up_those_that_have_not_ended_are_named() -> None:
    core, dispatcher = make()
    transfers = [open_transfer(dispatcher, number) for number in range(3)]
    told: list[tuple[list[Transfer], str]] = []
    dispatcher.on_held_up = lambda *report: told.append(report)
    core.post(ended(1), (HELD_UP, A, [0, 1, 2], "nothing"), ended(0), ended(2), (HELD_UP, A, [0, 1, 2], "nothing"))
    dispatcher.poll(0.0)
    assert told == [([transfers[0], transfers[2]], "nothing")]


def test_faults_are_counted() -> None:
    core, dispatcher = make()
    core.post((FAULT, 0, (5, 0, "poll", "tcp", "lo", "the completion queue broke")))
    dispatcher.poll(0)
    assert dispatcher.describe()["faults"] == 1


def test_after_stop_nothing_is_kept() -> None:
    _, dispatcher = make()
    counter = open_counter(dispatcher, 0, 0)
    dispatcher.set_on_message(lambda _sender, _payload: None)
    dispatcher.on_peer_lost = lambda _epoch, _reason: None
    dispatcher.stop()
    assert isinstance(counter.exception(0), ClosedError)
    assert dispatcher._on_message is None
    assert dispatcher.on_peer_lost is None
    assert dispatcher.stopped
