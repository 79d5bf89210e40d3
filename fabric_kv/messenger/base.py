"""What the two messengers have in common: the actor, incoming bytes, counts, and an orderly end.

>>> with DecodeMessenger(engine, spec, regions) as decode:       # or PrefillMessenger
...     print(decode.state()["counts"])
"""

from __future__ import annotations

import concurrent.futures
import logging
import threading
from collections import Counter as Tally
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ..config import Bounds
from ..errors import ClosedError, ConfigError, FabricKVError, InternalError, ProtocolError
from . import wire
from .actor import Actor, Timer
from .peers import Link

if TYPE_CHECKING:
    from ..engine import Engine
    from ..transfers import Transfer

__all__ = ["Messenger"]

_log = logging.getLogger("fabric_kv.messenger")

# Received bytes that wait for the actor. Only a callback that blocks it for long, or a flood, gets there.
MAX_INBOX_BYTES = 256 << 20
MAX_FLOODING = 1024
# How long the last messages may take to leave when everything else has ended, and calls to the actor to be answered.
FLUSH_S = 1.0
ANSWER_S = 10.0


class Messenger:
    """Base of both sides. An engine serves one messenger, which takes over three of its callbacks, see ``_start``."""

    def __init__(self, engine: Engine, bounds: Bounds, actor: Actor | None, name: str) -> None:
        self._name = name
        self._engine = engine
        self._bounds = bounds
        self._actor = Actor(f"fabric_kv-{name}") if actor is None else actor
        self._counts: Tally[str] = Tally()
        self._closing = False
        self._closed: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._close_lock = threading.Lock()
        self._stopped = False
        self._cancel_timer: Timer | None = None
        self._goodbye_said = False
        self._num_unsaid = 0  # Messages that wait for something before they may be sent.
        self._inbox_lock = threading.Lock()  # Guards the next two.
        self._inbox_bytes = 0
        self._flooding: set[bytes] = set()  # Peers whose messages did not fit, until the actor hears of it.

    def _start(self) -> None:
        _log.info("%s started with these bounds:\n%s", self._name, self._bounds.table(self._engine.options))
        self._actor.start()
        self._engine.on_message(self._receive)
        self._engine.on_peer_lost(lambda epoch, reason: self._actor.post(partial(self._on_peer_lost, epoch, reason)))
        self._engine.on_held_up(lambda transfers, why: self._actor.post(partial(self._on_held_up, transfers, why)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # --- Messages in; on the engine's dispatcher thread, then on the actor's ------------------------------------------

    def _receive(self, epoch: bytes, payload: bytes) -> None:
        with self._inbox_lock:
            fits = self._inbox_bytes + len(payload) <= MAX_INBOX_BYTES
            if fits:
                self._inbox_bytes += len(payload)
            known = epoch in self._flooding or len(self._flooding) >= MAX_FLOODING
            if not fits and not known:
                self._flooding.add(epoch)
        if fits:
            self._actor.post(partial(self._on_frame, epoch, payload))
        elif not known:
            self._actor.post(partial(self._on_flood, epoch))

    def _on_flood(self, epoch: bytes) -> None:
        with self._inbox_lock:
            self._flooding.discard(epoch)
        self._counts["floods"] += 1
        # One lost message makes the two sides disagree, so the sender counts as lost altogether.
        self._on_peer_lost(epoch, f"its messages came faster than they were handled, beyond {MAX_INBOX_BYTES} bytes")

    def _on_frame(self, epoch: bytes, payload: bytes) -> None:
        with self._inbox_lock:
            self._inbox_bytes -= len(payload)
        try:
            message = wire.decode(payload)
        except wire.VersionMismatch as error:
            self._counts["other_version"] += 1
            self._on_other_version(epoch, error)
        except ProtocolError as error:
            self._counts["malformed"] += 1
            _log.warning("dropped a message from %s: %s", epoch.hex(), error)
        else:
            self._on_message(epoch, message)

    def _on_message(self, epoch: bytes, message: wire.Message) -> None:
        raise NotImplementedError

    def _on_other_version(self, epoch: bytes, error: wire.VersionMismatch) -> None:
        raise NotImplementedError

    def _on_peer_lost(self, epoch: bytes, reason: str) -> None:
        raise NotImplementedError

    def _on_held_up(self, transfers: Sequence[Transfer], why: str) -> None:
        """A NIC completes nothing of these. Nobody else waits for a control message."""

    # --- The end ------------------------------------------------------------------------------------------------------

    def close(self, drain_s: float | None = None) -> None:
        """Finish or fail what is open, say goodbye to the peers, and end the thread. Idempotent.

        Close the messenger before its engine: it can then still tell the peers, and prove what is quiet.

        Parameters
        ----------
        drain_s : float, optional
            How long requests in flight may still finish by themselves; ``Bounds.drain_s`` by default. Those left are
            stopped, which takes up to ``Bounds.cancel_s`` more.

        Raises
        ------
        ConfigError
            On the messenger's own thread, which cannot wait for its own end.
        """
        if self._actor.is_current:
            raise ConfigError("close() was called on the messenger's own thread, which would wait for itself")
        drain = self._bounds.drain_s if drain_s is None else drain_s
        with self._close_lock:
            if self._stopped:
                return
            self._begin_close(drain)
            bound = drain + self._bounds.cancel_s + 2 * FLUSH_S + ANSWER_S
            try:
                self._closed.result(bound)
            except concurrent.futures.TimeoutError:
                raise InternalError(
                    f"the messenger did not end within {bound:g} s. Hint: a callback blocks it"
                ) from None
            finally:
                try:
                    self._engine.on_message(None)
                    self._engine.on_peer_lost(None)
                    self._engine.on_held_up(None)
                except ClosedError:
                    pass  # The engine was closed first.
                self._actor.stop(ANSWER_S)
                self._stopped = True

    def _begin_close(self, drain_s: float) -> None:
        self._actor.post(partial(self._start_drain, drain_s))

    def _start_drain(self, drain_s: float) -> None:
        if self._closing:
            return
        self._closing = True
        self._cancel_timer = self._actor.after(drain_s, self._stop_open_requests)
        self._advance_close()

    def _stop_open_requests(self) -> None:
        # Decode's requests end by cancel timers that start now; this one is later, and bounds the prefill side.
        self._cancel_timer = self._actor.after(self._bounds.cancel_s + FLUSH_S, self._say_goodbye)
        self._close_requests()

    def _advance_close(self) -> None:
        """Called whenever a request or a send has ended."""
        if not self._closing or self._closed.done():
            return
        if self._goodbye_said:
            if not self._num_unsaid and all(link.idle for link in self._links()):
                self._end_close()
        elif not self._num_open():
            self._say_goodbye()

    def _say_goodbye(self) -> None:
        if self._goodbye_said:
            return
        self._goodbye_said = True
        if self._cancel_timer is not None:
            self._cancel_timer.cancel()
        self._send_goodbyes()
        self._actor.after(FLUSH_S, self._end_close)
        self._advance_close()

    def _end_close(self) -> None:
        if self._closed.done():
            return
        for link in self._links():
            link.close()
            self._remove_peer(link)
        self._end_requests()
        self._closed.set_result(None)

    def _remove_peer(self, link: Link) -> None:
        try:
            self._engine.remove_peer(link.peer)
        except FabricKVError as error:
            _log.warning("could not remove peer %s: %s", link.peer.epoch.hex(), error)

    def _links(self) -> list[Link]:
        raise NotImplementedError

    def _num_open(self) -> int:
        raise NotImplementedError

    def _close_requests(self) -> None:
        raise NotImplementedError

    def _send_goodbyes(self) -> None:
        raise NotImplementedError

    def _end_requests(self) -> None:
        raise NotImplementedError

    # --- For people and dashboards ------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Peers, open requests and counts, as plain data."""
        if self._stopped:
            return self._snapshot()
        return self._actor.call(self._snapshot, ANSWER_S)

    def _snapshot(self) -> dict[str, Any]:
        raise NotImplementedError
