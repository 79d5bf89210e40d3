"""Things that end later: transfers, counters, requests. One class for threads, asyncio and callbacks.

>>> transfer.result(timeout=1.0)          # a thread waits
>>> await transfer                        # a coroutine waits
>>> transfer.add_done_callback(print)     # on the engine's dispatcher thread

An object ends exactly once; whoever ends it second is told so.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from collections.abc import Callable, Generator
from typing import Any, Generic, Self, TypeVar

__all__ = ["CALLBACK_ERRORS", "Completion"]

T = TypeVar("T")

_log = logging.getLogger("fabric_kv")

# What a callback may raise without harm to the others. Some are no Exception, and would end the thread in silence.
CALLBACK_ERRORS = (Exception, SystemExit, asyncio.CancelledError)


class Completion(Generic[T]):
    """Base of everything that can be waited for.

    Waiting never ends the thing itself: a wait that times out raises what :meth:`_timeout_error` makes, and the
    transfer, counter or request goes on.
    """

    def __init__(self) -> None:
        self._future: concurrent.futures.Future[T] = concurrent.futures.Future()
        # From here on nobody can cancel the future itself, for example by cancelling a task that awaits it.
        self._future.set_running_or_notify_cancel()
        self._count_callback_error: Callable[[], object] | None = None

    def done(self) -> bool:
        """Whether it has ended, well or badly."""
        return self._future.done()

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
            What went wrong, if it did.
        """
        self._wait(timeout)
        return self._future.result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end and return what went wrong, or None."""
        self._wait(timeout)
        return self._future.exception(0)

    def add_done_callback(self, fn: Callable[[Self], object]) -> None:
        """Call ``fn(self)`` once it has ended; at once if it has already. What it raises is logged and counted."""
        self._future.add_done_callback(lambda _: self._call(fn))

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.wrap_future(self._future).__await__()

    def _call(self, fn: Callable[[Self], object]) -> None:
        try:
            fn(self)
        except CALLBACK_ERRORS:
            _log.exception("a callback of %r raised", self)
            if self._count_callback_error is not None:
                self._count_callback_error()

    def _wait(self, timeout: float | None) -> None:
        try:
            self._future.exception(timeout)
        except concurrent.futures.TimeoutError:
            if not self._future.done():
                raise self._timeout_error(timeout) from None

    def _timeout_error(self, timeout: float | None) -> Exception:
        return TimeoutError(f"{self!r} has not ended after {timeout} s")

    def _succeed(self, value: T) -> bool:
        """End well. False if it had ended before."""
        try:
            self._future.set_result(value)
        except concurrent.futures.InvalidStateError:
            return False
        return True

    def _fail(self, error: BaseException) -> bool:
        """End badly. False if it had ended before."""
        try:
            self._future.set_exception(error)
        except concurrent.futures.InvalidStateError:
            return False
        return True
