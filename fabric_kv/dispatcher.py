"""Turns the C++ core's events into ended futures and callbacks, on one Python thread.

>>> dispatcher = Dispatcher(native, lock, options); dispatcher.start()
>>> dispatcher.transfers[transfer.id] = transfer        # under the lock, while submitting
>>> dispatcher.stop()                                   # everything that is still open ends in ClosedError

The thread holds no reference to the Engine, so that a forgotten engine is closed by the garbage collector.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .config import EngineOptions
from .errors import (
    ClosedError,
    ConfigError,
    FabricKVError,
    InternalError,
    ProtocolError,
    TransferCancelledError,
    TransferError,
    TransferTimeoutError,
    reason_of,
)
from .futures import is_interrupt
from .reassembly import MESSAGE_OVERHEAD_BYTES, Reassembly
from .transfers import Stall, Transfer

if TYPE_CHECKING:
    from . import _native
    from .transfers import Counter

__all__ = ["Dispatcher"]

_log = logging.getLogger("fabric_kv")

# Kinds and outcomes as in native/engine/event.h.
_TRANSFER, _COUNTER, _MESSAGE, _USER, _PEER_LOST, _FAULT, _STALLED, _HELD_UP = range(8)
_OK, _FAILED, _CANCELLED, _CLOSED, _EXPIRED = range(5)

# The thread wakes for events; this bounds how long a lost wake-up could hide them.
_POLL_S = 1.0

# How long close() waits for a callback that is running. A callback that waits for whoever closes must not stop it.
_STOP_S = 5.0


def _nothing(_group: int) -> None:
    pass


class Dispatcher:
    """Owns the tables of open transfers and counters."""

    def __init__(self, native: _native.Engine, options: EngineOptions) -> None:
        self._native = native
        # Submissions hold it until their handle is known, so that the thread cannot see the end first. Reentrant, since
        # the garbage collector may run stop() anywhere.
        self.lock = threading.RLock()
        self.stopped = False  # guarded by lock; from then on nothing is entered into the tables
        self._manual = options.dispatch == "manual"
        self.transfers: dict[int, Transfer] = {}  # guarded by lock
        self.counters: dict[tuple[int, int, int], Counter] = {}  # guarded by lock
        # Makes what has arrived in a group visible where it must be, before a counter or a read of that group ends.
        self.before_ready: Callable[[int], None] = _nothing
        self.on_peer_lost: Callable[[bytes, str], None] | None = None
        self.on_notify: Callable[[int, int], None] | None = None
        self.on_stalled: Callable[[Stall], None] | None = None
        self.on_held_up: Callable[[list[Transfer], str], None] | None = None
        self._on_message: Callable[[bytes, bytes], None] | None = None
        self._reassembly = Reassembly(options.max_message_bytes, options.max_inbox_bytes)
        self._waiting: deque[tuple[bytes, bytes]] = deque()  # messages that came before there was a callback
        self._waiting_bytes = 0
        self._max_waiting_bytes = options.max_inbox_bytes
        self._poll_lock = threading.RLock()  # one thread dispatches at a time; callbacks may poll again
        self._events: deque[tuple[Any, ...]] = deque()  # taken and not handled yet
        self._calls: deque[Callable[[], object]] = deque()  # to make before the next event
        self._interrupt: BaseException | None = None  # set by the main thread only
        self._stopping = False
        self._thread: threading.Thread | None = None
        self.num_callback_errors = 0
        self.num_dropped_messages = 0
        self.num_faults = 0
        self.num_stalls = 0

    def start(self) -> None:
        """Start the thread, unless the user polls."""
        if not self._manual:
            thread = threading.Thread(target=self._run, name="fabric_kv-dispatcher", daemon=True)
            thread.start()
            self._thread = thread

    def stop(self) -> None:
        """Deliver the last events and end everything that is still open."""
        self._stopping = True
        self._native.ring()
        try:
            self._take_last()
        finally:  # also if the wait was interrupted: nobody stops it again
            self._end_all()
        self._raise_interrupt()

    def abandon(self) -> None:
        """Take nothing any more, in a forked child: the thread is the parent's, and so is whoever holds the lock."""
        self.lock = threading.RLock()
        self.stopped = True

    def poll(self, timeout: float) -> int:
        """Wait up to ``timeout`` seconds for events, handle them, and return how many there were.

        A KeyboardInterrupt out of a callback on the main thread is raised once all have been handled.
        """
        num_events = self._take(timeout)
        self._raise_interrupt()
        return num_events

    def set_on_message(self, fn: Callable[[bytes, bytes], None] | None) -> None:
        """Set the callback; what was kept comes first."""
        self._on_message = fn
        self._soon(self._deliver_waiting)

    def forget(self, epoch: bytes) -> None:
        """Drop the half-received messages of a peer."""
        self._soon(lambda: self._reassembly.forget(epoch))

    def count_callback_error(self) -> None:
        """Note that a callback raised."""
        self.num_callback_errors += 1

    def describe(self) -> dict[str, Any]:
        """Figures for :meth:`Engine.describe`."""
        return {
            "transfers_open": len(self.transfers),
            "counters_open": len(self.counters),
            "callback_errors": self.num_callback_errors,
            "dropped_messages": self.num_dropped_messages + self._reassembly.num_dropped,
            "faults": self.num_faults,
            "stalls": self.num_stalls,
        }

    def _run(self) -> None:
        while not self._stopping:
            self.poll(_POLL_S)

    def _take(self, timeout: float) -> int:
        try:
            events = self._native.poll(timeout)
        except TypeError:
            raise ConfigError(f"timeout={timeout!r} must be a number of seconds") from None
        with self._poll_lock:
            # Through one queue, so that a callback that polls, or closes, sees them in order, and an interrupted poll
            # loses none.
            self._events.extend(events)
            try:
                while self._calls:
                    self._guarded(self._calls.popleft())
                while self._events:
                    self._guarded(self._handle, self._events.popleft())
            finally:
                if self._events:
                    self._native.ring()  # for whoever waits for the descriptor
        return len(events)

    def _take_last(self) -> None:
        deadline = time.monotonic() + _STOP_S
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_STOP_S)
        if self._poll_lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            try:
                self._take(0.0)
            finally:
                self._poll_lock.release()
        else:
            _log.error("close() goes on although a callback has not returned for %g s", _STOP_S)

    def _end_all(self) -> None:
        with self.lock:
            self.stopped = True
            open_: list[Transfer | Counter] = [*self.transfers.values(), *self.counters.values()]
            self.transfers.clear()
            self.counters.clear()
        for item in open_:
            if isinstance(item, Transfer):
                item._keep = None  # no NIC touches it any more; if one is stuck, close() has made others keep it
            self._guarded(item._fail, ClosedError(f"the engine was closed while {item!r} was open"))
        # Nothing is called any more, and what the callbacks hold must not be kept by a closed engine.
        self._on_message = self.on_peer_lost = self.on_notify = self.on_stalled = self.on_held_up = None
        self._waiting.clear()

    def _raise_interrupt(self) -> None:
        if self._interrupt is not None and threading.current_thread() is threading.main_thread():
            error, self._interrupt = self._interrupt, None
            raise error

    def _soon(self, call: Callable[[], object]) -> None:
        # Not at once under the poll lock: whoever calls may hold a lock that the callback now running waits for.
        self._calls.append(call)
        self._native.ring()

    def _guarded(self, fn: Callable[..., object], *args: Any) -> None:
        try:
            fn(*args)
        except BaseException as error:  # noqa: BLE001  whatever it is, it would end the thread, and waits never
            if is_interrupt(error):
                self._interrupt = error
                return
            self.count_callback_error()
            _log.exception("a callback raised")

    def _handle(self, event: tuple[Any, ...]) -> None:
        kind = event[0]
        if kind == _TRANSFER:
            self._end_transfer(*event[1:])
        elif kind == _COUNTER:
            self._end_counter(*event[1:])
        elif kind == _MESSAGE:
            payload = self._reassembly.add(*event[1:])
            if payload is not None:
                self._deliver(event[1], payload)
        elif kind == _PEER_LOST:
            self._reassembly.forget(event[1])
            _log.log(logging.INFO if event[3] else logging.WARNING, "peer %s lost: %s", event[1].hex()[:8], event[2])
            if (on_peer_lost := self.on_peer_lost) is not None:
                on_peer_lost(event[1], event[2])
        elif kind == _FAULT:
            self.num_faults += 1
            _log.error("group %d: %s", event[1], event[2][5])
        elif kind == _STALLED:
            self._stalled(*event[1:])
        elif kind == _HELD_UP:
            self._held_up(*event[1:])
        elif kind == _USER:
            if (on_notify := self.on_notify) is not None:
                on_notify(event[1], event[2])
        else:
            raise InternalError(f"unknown event {event!r}")

    def _deliver(self, sender: bytes, payload: bytes) -> None:
        on_message = self._on_message  # another thread may set it
        cost = len(payload) + MESSAGE_OVERHEAD_BYTES
        if on_message is not None:
            on_message(sender, payload)
        elif self._waiting_bytes + cost <= self._max_waiting_bytes:
            self._waiting.append((sender, payload))
            self._waiting_bytes += cost
        else:
            self.num_dropped_messages += 1
            _log.warning("a message of %d bytes was dropped: nobody has set on_message", len(payload))

    def _deliver_waiting(self) -> None:
        while self._waiting and (on_message := self._on_message) is not None:
            sender, payload = self._waiting.popleft()
            self._waiting_bytes -= len(payload) + MESSAGE_OVERHEAD_BYTES
            self._guarded(on_message, sender, payload)

    def _stalled(self, group: int, error: tuple[Any, ...], silent_s: float, outstanding_bytes: int) -> None:
        _, _, _, provider, nic, text = error
        self.num_stalls += 1
        _log.warning("group %d, %s NIC %s stalls: %s", group, provider, nic, text)
        if (on_stalled := self.on_stalled) is not None:
            on_stalled(Stall(group, provider, nic, silent_s, outstanding_bytes))

    def _held_up(self, peer: bytes, ids: list[int], text: str) -> None:
        with self.lock:
            transfers = [transfer for id_ in ids if (transfer := self.transfers.get(id_)) is not None]
        if not transfers:
            return  # They have ended meanwhile.
        _log.warning("%d transfers to peer %s are held up: %s", len(transfers), peer.hex()[:8], text)
        if (on_held_up := self.on_held_up) is not None:
            on_held_up(transfers, text)

    def _end_transfer(self, id_: int, *how: Any) -> None:
        with self.lock:
            transfer = self.transfers.pop(id_, None)
        if transfer is None:
            return
        transfer._keep = None
        try:
            self._end_as(transfer, *how)
        except BaseException as error:
            why = f"{transfer!r} has ended, but how was not understood: {type(error).__name__}: {error}"
            transfer._fail(InternalError(why))  # unless it has ended as it should, and a callback was interrupted
            raise

    def _end_as(
        self,
        transfer: Transfer,
        outcome: int,
        nbytes: int,
        peer: bytes,
        error: tuple[Any, ...],
        failed_pages: list[tuple[int, int, int]],
        unposted: tuple[int, int, int],
    ) -> None:
        if outcome == _OK:
            self._succeed_when_visible(transfer, transfer._reads_into)
            return
        about: dict[str, Any] = {
            "transfer_id": transfer.id,
            "peer": peer.hex(),
            "bytes_done": nbytes,
            "failed_pages": failed_pages,
            "unposted": unposted[:2] if unposted[2] else None,
        }
        fi_errno, _prov_errno, op, provider, nic, text = error
        if outcome == _FAILED:
            transfer._fail(
                TransferError(
                    f"{transfer!r} failed: {op or 'posting'} on {provider or '?'} NIC {nic or '?'}: {text}",
                    **about,
                    op=op,
                    fi_errno=fi_errno,
                    reason=reason_of(fi_errno),
                    provider=provider,
                    nic=nic,
                )
            )
        elif outcome == _EXPIRED:
            why = f"{transfer!r} was not posted by its deadline; {nbytes} bytes were written"
            transfer._fail(TransferTimeoutError(why, **about, reason="timeout"))
        elif outcome == _CANCELLED:
            transfer._fail(TransferCancelledError(f"{transfer!r} was cancelled after {nbytes} bytes", **about))
        else:
            transfer._fail(ClosedError(f"the engine was closed while {transfer!r} was open"))

    def _succeed_when_visible(self, item: Transfer | Counter, group: int | None) -> None:
        """End what has brought data into a group's memory; None: into nobody's here."""
        try:
            if group is not None:
                self.before_ready(group)
        except FabricKVError as error:
            item._fail(error)
        except BaseException as error:
            _log.exception("what has arrived in group %s could not be made visible", group)
            why = f"{item!r} has arrived, but may not be visible: {type(error).__name__}: {error}"
            item._fail(InternalError(why))
            if is_interrupt(error):
                raise
        else:
            item._succeed(None)

    def _end_counter(self, group: int, slot: int, generation: int, fired: bool) -> None:
        with self.lock:
            counter = self.counters.get((group, slot, generation))
        if counter is None:
            return
        if fired:
            self._succeed_when_visible(counter, group)
        else:
            counter._fail(ProtocolError(f"{counter!r}: more units arrived than were expected"))
