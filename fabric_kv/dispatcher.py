"""Turns the C++ core's events into ended futures and callbacks, on one Python thread.

>>> dispatcher = Dispatcher(native, lock, options); dispatcher.start()
>>> dispatcher.transfers[transfer.id] = transfer        # under the lock, while submitting
>>> dispatcher.stop()                                   # everything that is still open ends in ClosedError

The thread holds no reference to the Engine, so that a forgotten engine is closed by the garbage collector.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .config import EngineOptions
from .errors import ClosedError, InternalError, ProtocolError, TransferCancelledError, TransferError
from .reassembly import Reassembly

if TYPE_CHECKING:
    from . import _native
    from .transfers import Counter, Transfer

__all__ = ["Dispatcher"]

_log = logging.getLogger("fabric_kv")

# Kinds and outcomes as in native/engine/event.h.
_TRANSFER, _COUNTER, _MESSAGE, _USER, _PEER_LOST, _FAULT = range(6)
_OK, _FAILED, _CANCELLED, _CLOSED = range(4)

# The thread wakes for events; this bounds how long a lost wake-up could hide them.
_POLL_S = 1.0


class Dispatcher:
    """Owns the tables of open transfers and counters."""

    def __init__(self, native: _native.Engine, lock: threading.Lock, options: EngineOptions) -> None:
        self._native = native
        self._lock = lock
        self._manual = options.dispatch == "manual"
        self.transfers: dict[int, Transfer] = {}  # guarded by _lock
        self.counters: dict[tuple[int, int, int], Counter] = {}
        self.on_peer_lost: Callable[[bytes, str], None] | None = None
        self._on_message: Callable[[bytes, bytes], None] | None = None
        self._reassembly = Reassembly(options.max_message_bytes, options.max_inbox_bytes)
        self._waiting: deque[tuple[bytes, bytes]] = deque()  # messages that came before there was a callback
        self._waiting_bytes = 0
        self._max_waiting_bytes = options.max_inbox_bytes
        self._poll_lock = threading.RLock()  # one thread dispatches at a time; callbacks may poll again
        self._stopping = False
        self._thread: threading.Thread | None = None
        self.num_callback_errors = 0
        self.num_dropped_messages = 0
        self.num_faults = 0

    def start(self) -> None:
        """Start the thread, unless the user polls."""
        if not self._manual:
            self._thread = threading.Thread(target=self._run, name="fabric_kv-dispatcher", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Deliver the last events and end everything that is still open."""
        self._stopping = True
        self._native.ring()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self.poll(0.0)
        with self._lock:
            open_: list[Transfer | Counter] = [*self.transfers.values(), *self.counters.values()]
            self.transfers.clear()
            self.counters.clear()
        for item in open_:
            item._fail(ClosedError(f"the engine was closed while {item!r} was open"))

    def poll(self, timeout: float) -> int:
        """Wait up to ``timeout`` seconds for events, handle them, and return how many there were."""
        events = self._native.poll(timeout)
        with self._poll_lock:
            for event in events:
                self._guarded(self._handle, event)
        return len(events)

    def set_on_message(self, fn: Callable[[bytes, bytes], None] | None) -> None:
        """Set the callback and give it what was kept."""
        with self._poll_lock:
            self._on_message = fn
            while fn is not None and self._waiting:
                sender, payload = self._waiting.popleft()
                self._waiting_bytes -= len(payload)
                self._guarded(fn, sender, payload)

    def forget(self, epoch: bytes) -> None:
        """Drop the half-received messages of a peer."""
        with self._poll_lock:
            self._reassembly.forget(epoch)

    def describe(self) -> dict[str, Any]:
        """Figures for :meth:`Engine.describe`."""
        return {
            "transfers_open": len(self.transfers),
            "counters_open": len(self.counters),
            "callback_errors": self.num_callback_errors,
            "dropped_messages": self.num_dropped_messages + self._reassembly.num_dropped,
            "faults": self.num_faults,
        }

    def _run(self) -> None:
        while not self._stopping:
            self.poll(_POLL_S)

    def _guarded(self, fn: Callable[..., object], *args: Any) -> None:
        try:
            fn(*args)
        except Exception:  # noqa: BLE001  a callback's bug must not stop the others
            self.num_callback_errors += 1
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
            _log.warning("peer %s lost: %s", event[1].hex()[:8], event[2])
            if self.on_peer_lost is not None:
                self.on_peer_lost(event[1], event[2])
        elif kind == _FAULT:
            self.num_faults += 1
            _log.error("group %d: %s", event[1], event[2][5])
        elif kind != _USER:
            raise InternalError(f"unknown event {event!r}")

    def _deliver(self, sender: bytes, payload: bytes) -> None:
        if self._on_message is not None:
            self._on_message(sender, payload)
        elif self._waiting_bytes + len(payload) <= self._max_waiting_bytes:
            self._waiting.append((sender, payload))
            self._waiting_bytes += len(payload)
        else:
            self.num_dropped_messages += 1
            _log.warning("a message of %d bytes was dropped: nobody has set on_message", len(payload))

    def _end_transfer(self, id_: int, outcome: int, nbytes: int, peer: bytes, error: tuple[Any, ...]) -> None:
        with self._lock:
            transfer = self.transfers.pop(id_, None)
        if transfer is None:
            return
        transfer._keep = None
        if outcome == _OK:
            transfer._succeed(None)
            return
        about = {"transfer_id": id_, "peer": peer.hex(), "bytes_done": nbytes}
        fi_errno, _prov_errno, op, provider, nic, text = error
        if outcome == _FAILED:
            transfer._fail(
                TransferError(
                    f"{transfer!r} failed: {op or 'posting'} on {provider or '?'} NIC {nic or '?'}: {text}",
                    **about,
                    op=op,
                    fi_errno=fi_errno,
                    provider=provider,
                    nic=nic,
                )
            )
        elif outcome == _CANCELLED:
            transfer._fail(TransferCancelledError(f"{transfer!r} was cancelled after {nbytes} bytes", **about))
        else:
            transfer._fail(ClosedError(f"the engine was closed while {transfer!r} was open"))

    def _end_counter(self, group: int, slot: int, generation: int, fired: bool) -> None:
        counter = self.counters.get((group, slot, generation))
        if counter is None:
            return
        if fired:
            counter._succeed(None)
        else:
            counter._fail(ProtocolError(f"{counter!r}: more units arrived than were expected"))
