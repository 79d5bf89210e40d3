"""The decode side of ``--op messenger``: submits requests as they arrive, and says when each was ready.

>>> DecodeEnd(stack, channel, setup, fabric, []).obey()      # until the initiator has measured enough
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections import deque

import msgspec
import numpy as np

from ..config import Bounds
from ..engine import Engine
from ..errors import PeerUnreachableError, ProtocolError
from ..messenger import DecodeMessenger, PrefillPeer, Request, RequestHandle
from ..sharding import plan_transfer
from .channel import Channel
from .model import Cache, RankMove, bare_moves
from .opened import describe_rails, open_engine, shm_names
from .wire import (
    BareAsk,
    BareReady,
    Bye,
    Clock,
    MessengerSetup,
    Opened,
    Regions,
    RequestsAsk,
    RequestTimes,
    Served,
)
from .workload import Fabric

__all__ = ["DecodeEnd", "make_opened", "request_bound"]

#: Memory goes with the process, so nobody waits long for a proof that it is quiet.
CANCEL_S = 1.0
_SETUP_S = 60.0
_IDLE_S = 600.0
_TICK_S = 0.05


class DecodeEnd:
    """An engine, its cache and its messenger, closed with the stack.

    Parameters
    ----------
    stack : ExitStack
    channel : Channel
    setup : MessengerSetup
    fabric : Fabric
        What this end opens.
    peers : list of Opened
        The prefill side is added once it is known.
    """

    def __init__(
        self,
        stack: contextlib.ExitStack,
        channel: Channel,
        setup: MessengerSetup,
        fabric: Fabric,
        peers: list[Opened],
    ) -> None:
        work = setup.work
        self._channel, self._work = channel, work
        self._engine = open_engine(fabric, channel.local_host, max_transfers=16384, dispatch="thread")
        stack.callback(self._engine.close)
        self._cache = Cache(self._engine, work, fabric, prefills=False)
        opened = channel.expect(Opened, _SETUP_S)
        peers.append(opened)
        channel.send(make_opened(self._engine))
        channel.send(Regions([[region.remote.to_bytes() for region in rank] for rank in self._cache.regions]))
        default = Bounds()
        bounds = Bounds(
            handshake_s=max(default.handshake_s, work.timeout_s),
            accept_s=max(default.accept_s, work.timeout_s),
            request_s=request_bound(setup),
            cancel_s=CANCEL_S,
        )
        decode = DecodeMessenger(self._engine, self._cache.spec, self._cache.regions, bounds=bounds)
        stack.callback(decode.close, drain_s=0.0)
        self._decode = decode
        self._peer: PrefillPeer = decode.connect(opened.address)
        self._moves: list[RankMove] = bare_moves(
            work, plan_transfer(work.spec(work.prefill_tp), work.spec(work.decode_tp))
        )

    def obey(self) -> int | None:
        """Do as the initiator says; returns the wrong pages that it has counted in all, None if nobody looked."""
        while True:
            message = self._channel.expect(msgspec.Struct, _IDLE_S)
            if isinstance(message, Bye):
                return message.wrong_pages
            if isinstance(message, Clock):
                self._channel.send(Clock(time.monotonic_ns()))
            elif isinstance(message, BareAsk):
                self._take_bare()
            elif isinstance(message, RequestsAsk):
                self._request(message)
            else:
                raise ProtocolError(f"{self._channel.who} sent {type(message).__name__} to a decode side")

    def _take_bare(self) -> None:
        with contextlib.ExitStack() as stack:
            unit_bytes = self._peer.plan.unit_bytes
            counters = [
                stack.enter_context(self._engine.counter(unit_bytes=unit_bytes, expected_units=move.units))
                for move in self._moves
            ]
            self._channel.send(BareReady([counter.token for counter in counters]))
            for counter in counters:
                counter.result(self._work.timeout_s)
            self._channel.send(Clock(time.monotonic_ns()))

    def _request(self, ask: RequestsAsk) -> None:
        start = time.monotonic()
        arrivals = ask.arrivals_s
        free = deque(range(self._work.slots))
        ended: queue.SimpleQueue[RequestHandle] = queue.SimpleQueue()
        flying: dict[str, tuple[int, float, float]] = {}  # slot, arrived, submitted
        times: list[RequestTimes] = []
        submitted = 0
        tokens = np.zeros(self._work.isl, np.int64)
        quiet_until = start + self._work.timeout_s
        while len(times) < ask.count:
            now = time.monotonic()
            if arrivals is None:
                due = now if not flying and submitted < ask.count else np.inf
            else:
                due = start + arrivals[submitted] if submitted < ask.count else np.inf
            if now >= due and free:
                slot, request_id = free.popleft(), f"{ask.name}.{submitted}"
                handle = self._decode.submit(
                    self._peer, Request(request_id=request_id, tokens=tokens, pages=self._cache.pages[slot])
                )
                flying[request_id] = slot, due, now
                handle.add_done_callback(ended.put)
                submitted += 1
                quiet_until = now + self._work.timeout_s
                continue
            if flying and now > quiet_until:
                raise PeerUnreachableError(
                    f"no request has become ready for {self._work.timeout_s:g} s; {len(flying)} are open"
                )
            try:
                wait_s = max(min(due - now, _TICK_S), 0.0) if free else _TICK_S
                handle = ended.get(timeout=wait_s)
            except queue.Empty:
                self._look_for_end()
                continue
            result = handle.result(0)
            slot, arrived, sent = flying.pop(handle.request_id)
            free.append(slot)
            times.append(RequestTimes(handle.request_id, _ns(arrived), _ns(sent), _ns(result.ready_s)))
            quiet_until = time.monotonic() + self._work.timeout_s
        wrong = self._cache.count_wrong(ask.iteration, min(ask.count, self._work.slots)) if ask.check else 0
        self._channel.send(Served(times, wrong))

    def _look_for_end(self) -> None:
        if (message := self._channel.take()) is not None:
            raise ProtocolError(f"{self._channel.who} sent {type(message).__name__} while requests were open")


def make_opened(engine: Engine) -> Opened:
    """What the other end must know of an engine."""
    rails = describe_rails(engine)
    return Opened(engine.address, b"", b"", rails[0]["provider"], rails, shm_names(engine))


def request_bound(setup: MessengerSetup) -> float:
    """A request may wait behind all others: longer than all of them compute, and then some."""
    work = setup.work
    compute_s = work.compute_ms * 1e-3 * work.layout.num_layers * len(work.chunks())
    return min(work.timeout_s + compute_s * (1 + work.slots * 64), 86400.0)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
