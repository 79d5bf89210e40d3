"""Things that end later: transfers, counters, requests. One class for threads, asyncio and callbacks.

>>> transfer.result(timeout=1.0)          # a thread waits
>>> await transfer                        # a coroutine waits
>>> transfer.add_done_callback(print)     # on the engine's dispatcher thread

An object ends exactly once; whoever ends it second is told so.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Callable, Generator
from copy import copy
from typing import Any, ClassVar, Generic, Self, TypeVar

from .errors import ConfigError

__all__ = ["Completion", "fresh", "is_interrupt"]

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)

_log = logging.getLogger("fabric_kv")


class Completion(Generic[T]):
    """Base of everything that can be waited for.

    Waiting never ends the thing itself: a wait that times out raises what :meth:`_timeout_error` makes, and the
    transfer, counter or request goes on.
    """

    # One for all, held for moments: a lock for each would be a good part of what a transfer costs here. Reentrant, and
    # nothing is allocated under it, since the garbage collector may end transfers anywhere.
    _lock: ClassVar[threading.RLock] = threading.RLock()

    # Of the class until they are set: most transfers end without anybody having waited.
    _outcome: tuple[T, None] | tuple[None, BaseException] | None = None
    _waited_for: concurrent.futures.Future[T] | None = None  # made when somebody waits
    _awaited_in: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] | None = None
    _interrupt: BaseException | None = None  # of the main thread, until the other callbacks have been called

    @staticmethod
    def abandon_lock() -> None:
        """In a forked child: whoever holds the lock is not there."""
        Completion._lock = threading.RLock()

    def done(self) -> bool:
        """Whether it has ended, well or badly."""
        return self._outcome is not None

    def result(self, timeout: float | None = None) -> T:
        """Wait for the end and return its value.

        Parameters
        ----------
        timeout : float, optional
            Seconds; None waits until the end, which every transfer and request has.

        Raises
        ------
        TimeoutError
            The subclass's own kind of it, when ``timeout`` passes first.
        FabricKVError
            What went wrong, if it did; each call raises an object of its own.
        """
        self._wait(timeout)
        outcome = self._outcome
        if outcome is not None and outcome[1] is not None:
            raise fresh(outcome[1])
        return outcome[0] if outcome else None  # type: ignore[return-value]

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end and return what went wrong, or None; each call an object of its own."""
        self._wait(timeout)
        outcome = self._outcome
        return None if outcome is None or outcome[1] is None else fresh(outcome[1])

    def add_done_callback(self, fn: Callable[[Self], object]) -> None:
        """Call ``fn(self)`` once it has ended; at once if it has already.

        What it raises is logged and counted, but for a KeyboardInterrupt on the main thread, which goes on after all
        other callbacks.
        """
        self._future().add_done_callback(lambda _: self._call(fn))
        self._raise_interrupt()

    def __await__(self) -> Generator[Any, None, T]:
        # Not asyncio.wrap_future, which costs twice as much, and keeps what it made for each wait until the end.
        if self._outcome is None:
            loop = asyncio.get_running_loop()
            waiter: asyncio.Future[None] = loop.create_future()
            entry = (loop, waiter)
            # Atomic, both; whoever ends it looks here afterwards, and we look once more at the end.
            awaited_in = self.__dict__.setdefault("_awaited_in", [])
            awaited_in.append(entry)
            try:
                if self._outcome is None:
                    yield from waiter
            finally:
                awaited_in.remove(entry)
        return self.result(0)

    def _call(self, fn: Callable[[Self], object]) -> None:
        try:
            fn(self)
        except BaseException as error:  # noqa: BLE001  whatever it is, it would end the thread, and waits never
            if is_interrupt(error):
                self._interrupt = error
                return
            _log.exception("a callback of %r raised", self)
            self._count_callback_error()

    def _raise_interrupt(self) -> None:
        if self._interrupt is not None and threading.current_thread() is threading.main_thread():
            error, self._interrupt = self._interrupt, None
            raise error

    def _future(self) -> concurrent.futures.Future[T]:
        existing = self._waited_for
        if existing is not None:
            return existing
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        # From here on nobody can cancel it, for example by cancelling a task that awaits it.
        future.set_running_or_notify_cancel()
        with Completion._lock:
            existing, outcome = self._waited_for, self._outcome
            if existing is None:
                self._waited_for = future
        if existing is not None:
            return existing
        if outcome is not None:
            self._settle(future, *outcome)
        return future

    @staticmethod
    def _settle(future: concurrent.futures.Future[Any], value: object, error: BaseException | None) -> None:
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def _wait(self, timeout: float | None) -> None:
        if self._outcome is not None:
            return
        try:
            self._future().exception(timeout)
        except concurrent.futures.TimeoutError:
            if self._outcome is None:
                raise self._timeout_error(timeout) from None
        except TypeError:
            raise ConfigError(f"timeout={timeout!r} must be a number of seconds, or None") from None

    def _count_callback_error(self) -> None:
        """A callback has raised; for whoever counts these."""

    def _timeout_error(self, timeout: float | None) -> Exception:
        return TimeoutError(f"{self!r} has not ended after {timeout} s")

    def _succeed(self, value: T) -> bool:
        """End well. False if it had ended before."""
        return self._conclude(value, None)

    def _fail(self, error: BaseException) -> bool:
        """End badly. False if it had ended before."""
        return self._conclude(None, error)

    def _conclude(self, value: T | None, error: BaseException | None) -> bool:
        outcome: Any = (value, error)
        with Completion._lock:
            if self._outcome is not None:
                return False
            self._outcome = outcome
            future = self._waited_for
        if future is not None:
            self._settle(future, value, error)  # without the lock: it runs callbacks
        for loop, waiter in tuple(self._awaited_in or ()):  # a copy: waits may end meanwhile
            if _is_running_here(loop):
                _wake(waiter)
                continue
            with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits there.
                loop.call_soon_threadsafe(_wake, waiter)
        self._raise_interrupt()
        return True


def is_interrupt(error: BaseException) -> bool:
    """Whether it is the user's Ctrl-C, which Python raises on the main thread wherever that is."""
    return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def fresh(error: E) -> E:
    """A copy of an error that is kept, to be raised in its place, with all that it says and where it came from.

    An exception keeps the frames that it passes, and all that is named there: arrays would be in use for as long as a
    transfer that failed is. Threads that raise the same one would also write into each other's traceback.
    """
    try:
        made = copy(error)
    except Exception:  # noqa: BLE001  somebody's subclass that cannot be made of its args
        made = type(error).__new__(type(error), *error.args)
        made.args = error.args
    # Notes and whatever else was set, which our own copies do not take along.
    made.__dict__.update(error.__dict__)
    made.__cause__, made.__context__ = error.__cause__, error.__context__
    made.__suppress_context__ = error.__suppress_context__
    return made.with_traceback(error.__traceback__)


def _is_running_here(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether this is a callback of the loop, of one that polls an engine for itself."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
