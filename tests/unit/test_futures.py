"""Completions: end once, tell everyone, and survive whatever waits for them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import sys
import threading
import weakref
from typing import Any

import pytest

from fabric_kv import errors
from fabric_kv.errors import (
    ConfigError,
    FabricKVError,
    SharingError,
    TransferError,
    TransferTimeoutError,
    WouldBlockError,
)
from fabric_kv.futures import Completion, fresh


class OwnTimeoutError(TimeoutError):
    pass


class Thing(Completion[int]):
    def _timeout_error(self, timeout: float | None) -> Exception:
        return OwnTimeoutError(f"after {timeout} s")


def test_ends_once() -> None:
    thing = Thing()
    assert not thing.done()
    assert thing._succeed(1)
    assert not thing._succeed(2)
    assert not thing._fail(ValueError())
    assert thing.done()
    assert thing.result() == 1
    assert thing.exception() is None


def test_fails_once() -> None:
    thing = Thing()
    error = TransferError("broken", transfer_id=7)
    assert thing._fail(error)
    assert not thing._succeed(1)
    kept = thing.exception()
    assert (type(kept), str(kept)) == (TransferError, "broken")
    with pytest.raises(TransferError, match="broken"):
        thing.result()


class Held:
    """Something that a frame refers to."""


def test_a_handled_error_keeps_nothing_of_whoever_handled_it() -> None:
    thing = Thing()
    thing._fail(TransferError("broken"))

    def handle(wait: Any) -> weakref.ref[Held]:
        held = Held()
        with contextlib.suppress(TransferError):
            wait(held)
        return weakref.ref(held)

    def raise_it(_: Held) -> None:
        error = thing.exception()
        assert error is not None
        try:
            raise error
        finally:
            del error

    async def await_it() -> None:
        await thing

    assert handle(lambda _: thing.result())() is None
    assert handle(raise_it)() is None
    awaited = handle(lambda _: asyncio.run(await_it()))
    gc.collect()  # what asyncio leaves behind
    assert awaited() is None


def test_each_wait_raises_an_error_of_its_own() -> None:
    thing = Thing()
    thing._fail(TransferError("broken"))
    lengths: list[int] = []
    for _ in range(3):
        with pytest.raises(TransferError) as caught:
            thing.result()
        lengths.append(len(caught.traceback))
    assert len(set(lengths)) == 1, "each has only its own frames"


@pytest.mark.parametrize(
    "error",
    [
        TransferError("broken", transfer_id=7, peer="ab", failed_pages=[(0, 1, 2)]),
        TransferTimeoutError("late", reason="timeout"),
        SharingError("gone", path="/run/x", reason="gone"),
        WouldBlockError("full", limit=3),
        *(getattr(errors, name)("text") for name in errors.__all__),
        ValueError("a", 2),
        FileNotFoundError(2, "no such file", "/x"),
        asyncio.CancelledError("stopped"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_copy_has_all_that_the_error_has(error: BaseException) -> None:
    error.add_note("seen at the peer")
    error.extra = 5  # type: ignore[attr-defined]
    error.__cause__, error.__context__ = ValueError("cause"), KeyError("context")
    copied = fresh(error)
    assert copied is not error
    assert type(copied) is type(error)
    assert str(copied) == str(error)
    assert copied.args == error.args
    assert vars(copied) == vars(error)
    assert (copied.__cause__, copied.__context__) == (error.__cause__, error.__context__)
    assert copied.__suppress_context__
    if isinstance(error, FabricKVError):
        assert all(getattr(copied, name) == getattr(error, name) for name in error._fields)
    if isinstance(error, OSError):
        assert (copied.errno, copied.filename) == (error.errno, error.filename)  # type: ignore[attr-defined]


class OddError(FabricKVError):
    """One that cannot be made of its args, as a user's subclass may be."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


def test_subclasses_that_are_made_otherwise_are_copied_too() -> None:
    error = OddError(code=3)
    copied = fresh(error)
    assert copied is not error
    assert (type(copied), str(copied), copied.args, copied.code) == (OddError, "code 3", ("code 3",), 3)


def test_a_timeout_that_is_no_number() -> None:
    thing = Thing()
    for wait in (thing.result, thing.exception):
        with pytest.raises(ConfigError, match="timeout='1' must be a number of seconds"):
            wait("1")  # type: ignore[arg-type]
    thing._succeed(1)


def test_a_copy_says_where_the_error_came_from() -> None:
    try:
        raise ValueError
    except ValueError as raised:
        error = raised
    assert fresh(error).__traceback__ is error.__traceback__


@pytest.mark.parametrize("timeout", [0, 0.001, -1.0])
def test_a_wait_that_ends_first_raises_the_things_own_timeout(timeout: float) -> None:
    thing = Thing()
    for wait in (thing.result, thing.exception):
        with pytest.raises(OwnTimeoutError):
            wait(timeout)
    thing._succeed(3)
    assert thing.result(timeout) == 3


def test_a_timeout_error_as_result_is_no_timeout_of_the_wait() -> None:
    thing = Thing()
    thing._fail(TimeoutError("the thing's own"))
    with pytest.raises(TimeoutError, match="the thing's own"):
        thing.result(0)
    assert isinstance(thing.exception(0), TimeoutError)


def test_threads_that_race_to_end_it_agree() -> None:
    for _ in range(50):
        thing = Thing()
        barrier = threading.Barrier(4)
        won: list[int] = []

        def race(number: int, thing: Thing = thing, barrier: Any = barrier, won: list[int] = won) -> None:
            barrier.wait()
            if thing._succeed(number) if number % 2 else thing._fail(ValueError(number)):
                won.append(number)

        threads = [threading.Thread(target=race, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert thing.done()


def test_callbacks_get_the_thing_each_once() -> None:
    thing = Thing()
    got: list[Any] = []
    thing.add_done_callback(got.append)
    thing.add_done_callback(got.append)
    thing._succeed(1)
    thing.add_done_callback(got.append)
    assert got == [thing] * 3


class Unwound(BaseException):
    """As trio's Cancelled, gevent's GreenletExit and pytest's Failed are: none of the builtin kinds."""


@pytest.mark.parametrize(
    "error", [ValueError("bug"), SystemExit(3), asyncio.CancelledError(), GeneratorExit(), Unwound()]
)
@pytest.mark.parametrize("late", [False, True])
def test_a_callback_that_raises_is_logged_counted_and_stops_nothing(
    error: BaseException, late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: Thing) -> None:
        raise error

    thing = Thing()
    counted: list[int] = []
    thing._count_callback_error = lambda: counted.append(1)
    got: list[Any] = []
    if late:
        thing._succeed(1)
    with caplog.at_level(logging.ERROR, "fabric_kv"):
        thing.add_done_callback(broken)
        thing.add_done_callback(got.append)
        thing._succeed(1)
    assert got == [thing]
    assert counted == [1]
    assert "a callback of" in caplog.text
    assert caplog.records[0].name == "fabric_kv"


@pytest.mark.parametrize("late", [False, True])
def test_ctrl_c_in_a_callback_comes_through_when_all_others_know(late: bool) -> None:
    thing = Thing()
    counted: list[int] = []
    thing._count_callback_error = lambda: counted.append(1)
    got: list[Any] = []

    def interrupt(_: Thing) -> None:
        raise KeyboardInterrupt

    if late:
        thing._succeed(1)
        with pytest.raises(KeyboardInterrupt):
            thing.add_done_callback(interrupt)
        thing.add_done_callback(got.append)
    else:
        thing.add_done_callback(interrupt)
        thing.add_done_callback(got.append)
        with pytest.raises(KeyboardInterrupt):
            thing._succeed(1)
    assert got == [thing]
    assert thing.result(0) == 1
    assert not counted


def test_a_keyboard_interrupt_that_is_not_the_users_is_a_callback_error() -> None:
    thing = Thing()
    counted: list[int] = []
    thing._count_callback_error = lambda: counted.append(1)

    def interrupt(_: Thing) -> None:
        raise KeyboardInterrupt

    thing.add_done_callback(interrupt)
    thread = threading.Thread(target=thing._succeed, args=(1,))
    thread.start()
    thread.join()
    assert thing.result(0) == 1
    assert counted == [1]


def test_await() -> None:
    async def main() -> int:
        thing = Thing()
        threading.Timer(0, thing._succeed, [5]).start()
        return await asyncio.wait_for(thing, 10)

    assert asyncio.run(main()) == 5


def test_waits_that_give_up_leave_nothing_behind() -> None:
    async def main() -> int:
        thing = Thing()
        for _ in range(100):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(thing, 0)
            waiting = asyncio.ensure_future(asyncio.wait_for(thing, 10))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        assert not thing._awaited_in
        asyncio.get_running_loop().call_soon(thing._succeed, 6)
        return await thing

    assert asyncio.run(main()) == 6


def test_await_raises_what_it_ended_with() -> None:
    async def main() -> None:
        thing = Thing()
        asyncio.get_running_loop().call_soon(thing._fail, TransferError("broken"))
        await thing

    with pytest.raises(TransferError, match="broken"):
        asyncio.run(main())


def test_many_coroutines_and_threads_wait_for_the_same_thing() -> None:
    thing = Thing()
    results: list[int] = []
    threads = [threading.Thread(target=lambda: results.append(thing.result(10))) for _ in range(4)]
    for thread in threads:
        thread.start()

    async def wait() -> int:
        return await thing

    async def main() -> list[int]:
        waits = [asyncio.ensure_future(wait()) for _ in range(4)]
        await asyncio.sleep(0)
        thing._succeed(9)
        return await asyncio.gather(*waits)

    assert asyncio.run(main()) == [9] * 4
    for thread in threads:
        thread.join()
    assert results == [9] * 4


def test_cancelling_a_task_does_not_cancel_the_thing() -> None:
    async def main() -> int:
        thing = Thing()

        async def wait() -> int:
            return await thing

        task = asyncio.ensure_future(wait())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not thing.done()
        thing._succeed(4)
        return await thing

    assert asyncio.run(main()) == 4


def test_a_loop_that_was_closed_meanwhile_harms_nobody() -> None:
    thing = Thing()

    async def main() -> None:
        async def wait() -> None:
            await thing

        asyncio.ensure_future(wait())  # noqa: RUF006  the loop ends with it pending, and cancels it
        await asyncio.sleep(0)

    asyncio.run(main())
    got: list[Any] = []
    thing.add_done_callback(got.append)
    assert thing._succeed(1)
    assert got == [thing]


def test_no_reference_cycle_keeps_it_alive() -> None:
    thing = Thing()
    thing.add_done_callback(lambda _: None)
    before = sys.getrefcount(thing)
    thing._succeed(1)
    assert sys.getrefcount(thing) <= before
