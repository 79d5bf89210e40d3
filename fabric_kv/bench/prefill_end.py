"""The prefill side of ``--op messenger``, which conducts: serves what decode sides submit; its compute only sleeps.

>>> with PrefillEnd(channels, work, fabric, fabric) as prefill:
...     figures = prefill.measure(qps=None, warmup=1)
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

from ..config import Bounds
from ..errors import FabricError, FabricKVError, PeerUnreachableError, ProtocolError
from ..messenger import Chunk, PrefillMessenger, PrefillRequest, RequestKey
from ..regions import RemoteRegion
from ..sharding import plan_transfer
from ..transfers import PagePiece, Peer
from .channel import Channel
from .decode_end import CANCEL_S, make_opened
from .greeting import exchange_hellos
from .initiator import part
from .model import Cache, ModelWork, bare_moves
from .opened import describe_rails, open_engine, remove_shm_names
from .request_figures import PrefillTimes, hidden_share, poisson_arrivals, request_figures
from .wire import BareAsk, BareReady, Clock, MessengerSetup, Opened, Regions, RequestsAsk, Served
from .workload import Fabric

__all__ = ["PrefillEnd"]

_SETUP_S = 60.0
_TICK_S = 0.05
_PINGS = 32
_BARE_ROUNDS = 5  # before the requests, and after
CHECKED_ASKS = 2


class _Queue:
    """The scheduler: takes everything, in turn."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[PrefillRequest | FabricKVError] = queue.SimpleQueue()
        self.released: queue.SimpleQueue[RequestKey] = queue.SimpleQueue()

    def on_request(self, request: PrefillRequest) -> None:
        self.events.put(request)

    def on_released(self, key: RequestKey) -> None:
        self.released.put(key)

    def on_failed(self, key: RequestKey, error: FabricKVError) -> None:
        self.events.put(error)


class _Decoder(NamedTuple):
    channel: Channel
    opened: Opened
    peer: Peer
    regions: list[list[RemoteRegion]]
    offset_ns: int  # its clock less ours
    error_ns: int  # at most


class PrefillEnd:
    """Conducts; a context manager that tells the decode sides how it ended.

    Parameters
    ----------
    channels : sequence of Channel
        To each decode side.
    work : ModelWork
    fabric, target_fabric : Fabric
        What this end opens, and the others unless they were told otherwise.
    """

    def __init__(self, channels: Sequence[Channel], work: ModelWork, fabric: Fabric, target_fabric: Fabric) -> None:
        self._channels, self._work = channels, work
        self._stack = contextlib.ExitStack()
        self._decoders: list[_Decoder] = []
        self._wrong_pages: int | None = None
        self._plan = plan_transfer(work.spec(work.prefill_tp), work.spec(work.decode_tp))
        try:
            for index, channel in enumerate(channels):
                exchange_hellos(channel)
                channel.send(MessengerSetup(work, target_fabric, index))
            self.engine = open_engine(fabric, channels[0].local_host, max_transfers=16384, dispatch="thread")
            self._stack.callback(self.engine.close)
            self.rails: list[dict[str, Any]] = describe_rails(self.engine)
            self._cache = Cache(self.engine, work, fabric, prefills=True)
            self._cache.stamp(0)
            self._scheduler = _Queue()
            self._messenger = PrefillMessenger(
                self.engine, self._cache.spec, self._cache.regions, self._scheduler, Bounds(cancel_s=CANCEL_S)
            )
            self._stack.callback(self._messenger.close, drain_s=0.0)
            for channel in channels:
                channel.send(make_opened(self.engine))
            for channel in channels:
                self._decoders.append(self._meet(channel))
        except BaseException as error:
            self._end(error)
            raise
        self._free = list(range(work.slots))
        self._held: dict[RequestKey, int] = {}
        self._times: dict[str, PrefillTimes] = {}

    @property
    def target_rails(self) -> list[dict[str, Any]]:
        """What the first decode side has opened."""
        return self._decoders[0].opened.rails

    def measure(
        self, *, qps: float | None, warmup: int, verify: bool, on_progress: Callable[[int], None] | None = None
    ) -> dict[str, Any]:
        """Serve warm-up requests, those that count, and with ``verify`` some with fresh bytes.

        Returns
        -------
        dict
            Figures by name; times in ms, but for those that end in ``_us``.

        Raises
        ------
        FabricKVError
            If anything fails at any end.
        """
        work = self._work
        if warmup:
            self._serve("warm", warmup, None, 0, check=False)
        bare_ns = self._time_bare_rounds()
        arrivals = poisson_arrivals(qps, work.requests, len(self._decoders), work.seed) if qps else None
        before = self._counted()
        start_ns = time.monotonic_ns()
        served = self._serve("timed", work.requests, arrivals, 0, check=verify, on_progress=on_progress)
        elapsed_s = (time.monotonic_ns() - start_ns) / 1e9
        after = self._counted()
        bare_ns += self._time_bare_rounds()  # on either side of the requests, lest the machine drifts
        wrong = sum(answer.wrong_pages for answer in served)
        figures = request_figures(
            work,
            sum(move.nbytes for move in bare_moves(work, self._plan)),
            served,
            [decoder.offset_ns for decoder in self._decoders],
            self._times,
            bare_ns,
        )
        timed = [times for name, times in self._times.items() if name.startswith("timed-")]
        figures["hidden_share"] = hidden_share(timed, after[2])
        if verify:
            for iteration in range(1, CHECKED_ASKS + 1):
                self._cache.stamp(iteration)
                answers = self._serve(f"checked{iteration}", work.slots, None, iteration, check=True)
                wrong += sum(answer.wrong_pages for answer in answers)
            self._wrong_pages = wrong
        ops, nbytes, busy_ns = (now - then for now, then in zip(after, before, strict=True))
        return {
            "requests": work.requests * len(self._decoders),
            "elapsed_s": elapsed_s,
            "bytes_per_request": nbytes / (work.requests * len(self._decoders)),
            "bytes_per_write": nbytes / ops if ops else 0.0,
            "gb_per_s_while_writing": nbytes / busy_ns if busy_ns else 0.0,
            **figures,
            "clock_error_us": max(decoder.error_ns for decoder in self._decoders) / 1e3,
            "wrong_pages": wrong,
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _type: object, error: BaseException | None, _trace: object) -> None:
        self._end(error)

    # -- set-up --------------------------------------------------------------------------------------------------------

    def _meet(self, channel: Channel) -> _Decoder:
        opened = channel.expect(Opened, _SETUP_S)
        if opened.provider != self.rails[0]["provider"]:
            raise FabricError(
                f"{channel.who} has opened provider {opened.provider}, and we have opened "
                f"{self.rails[0]['provider']}: they cannot reach each other, or not as was asked",
                op="open",
                provider=opened.provider,
            )
        ranks = channel.expect(Regions, _SETUP_S).ranks
        regions = [[RemoteRegion.from_bytes(data) for data in rank] for rank in ranks]
        # By the shortest of many exchanges, as NTP does: the error is at most half of it.
        best, offset = 2**62, 0
        for _ in range(_PINGS):
            sent = time.monotonic_ns()
            channel.send(Clock(sent))
            theirs = channel.expect(Clock, _SETUP_S).ns
            received = time.monotonic_ns()
            if received - sent < best:
                best, offset = received - sent, theirs - (sent + received) // 2
        return _Decoder(channel, opened, self.engine.add_peer(opened.address), regions, offset, best // 2)

    def _end(self, error: BaseException | None) -> None:
        part(self._channels, error, self._wrong_pages)
        self._stack.close()
        if error is not None:
            for decoder in self._decoders:
                remove_shm_names(decoder.opened.shm_names)

    # -- the same pages, without the messenger -------------------------------------------------------------------------

    def _time_bare_rounds(self) -> list[int]:
        return [self._time_bare(decoder) for _ in range(_BARE_ROUNDS) for decoder in self._decoders]

    def _time_bare(self, decoder: _Decoder) -> int:
        """Nanoseconds from submission until the decode side's counters have fired."""
        work = self._work
        decoder.channel.send(BareAsk())
        moves = bare_moves(work, self._plan)
        tokens = decoder.channel.expect(BareReady, work.timeout_s).tokens
        if len(tokens) != len(moves):
            raise ProtocolError(f"{decoder.channel.who} sent {len(tokens)} counters for {len(moves)} ranks")
        parts = []
        for move, token in zip(moves, tokens, strict=True):
            pieces = [
                PagePiece(
                    self._cache.regions[src_rank][write.src_region],
                    write.src_offset,
                    write.src_stride,
                    decoder.regions[move.dst_rank][write.dst_region],
                    write.dst_offset,
                    write.dst_stride,
                    write.nbytes,
                    write.src_pages,
                    write.dst_pages,
                    write.rows,
                    write.src_row_stride,
                    write.dst_row_stride,
                )
                for src_rank, write in move.writes
            ]
            parts.append((decoder.peer, pieces, token))
        start = time.monotonic_ns()
        transfers = self.engine.scatter(parts)
        arrived = decoder.channel.expect(Clock, work.timeout_s).ns - decoder.offset_ns
        for transfer in transfers:
            transfer.result(work.timeout_s)
        return max(arrived - start, 1)

    # -- requests ------------------------------------------------------------------------------------------------------

    def _serve(
        self,
        name: str,
        count: int,
        arrivals: list[list[float]] | None,
        iteration: int,
        *,
        check: bool,
        on_progress: Callable[[int], None] | None = None,
    ) -> list[Served]:
        """Have each decode side submit ``count`` requests, and prefill them in the order in which they come."""
        for index, decoder in enumerate(self._decoders):
            offsets = arrivals[index] if arrivals is not None else None
            decoder.channel.send(RequestsAsk(f"{name}-{index}", count, offsets, iteration, check))
        last_s = max((offsets[-1] for offsets in arrivals), default=0.0) if arrivals else 0.0
        deadline = time.monotonic() + last_s + self._work.timeout_s
        for done in range(count * len(self._decoders)):
            self._prefill(self._next(deadline))
            deadline = max(deadline, time.monotonic() + self._work.timeout_s)
            if on_progress is not None:
                on_progress(done + 1)
        answers = [decoder.channel.expect(Served, self._work.timeout_s + _SETUP_S) for decoder in self._decoders]
        for decoder, answer in zip(self._decoders, answers, strict=True):
            ids = {times.request_id for times in answer.requests}
            if len(ids) != count or not ids <= self._times.keys():
                raise ProtocolError(
                    f"{decoder.channel.who} tells of {len(ids)} requests that are not the {count} served"
                )
        return answers

    def _next(self, deadline: float) -> PrefillRequest:
        while True:
            try:
                event = self._scheduler.events.get(timeout=_TICK_S)
            except queue.Empty:
                self._look_for_end()
                if time.monotonic() > deadline:
                    raise PeerUnreachableError(
                        f"no request has come for {self._work.timeout_s:g} s, and some are due"
                    ) from None
                continue
            if isinstance(event, FabricKVError):
                raise event
            return event

    def _look_for_end(self) -> None:
        """Raise if a decode side has gone; its answers stay where they are."""
        for channel in self._channels:
            channel.look()

    def _prefill(self, request: PrefillRequest) -> None:
        slot = self._slot()
        self._held[request.key] = slot
        pages, work = self._cache.pages[slot], self._work
        layers, chunks = work.layout.num_layers, work.chunks()
        busy_before, started = self._counted()[2], time.monotonic_ns()
        clock = time.monotonic()
        first_layer = last_layer = started
        if work.layerwise:
            for begin, end in chunks:
                final = end == work.isl
                step = self._messenger.begin_step([Chunk(request.key, begin, end, pages, final=final)])
                for layer in range(layers):
                    clock = _compute(clock, work.compute_ms)
                    last_layer = time.monotonic_ns()
                    if begin == 0 and layer == 0:
                        first_layer = last_layer
                    self._messenger.layer_done(step, layer)
            busy_at_end = self._counted()[2]
        else:
            _compute(clock, work.compute_ms * layers * len(chunks))
            last_layer, busy_at_end = time.monotonic_ns(), self._counted()[2]
            step = self._messenger.begin_step([Chunk(request.key, 0, work.isl, pages, final=True)])
            for layer in range(layers):
                self._messenger.layer_done(step, layer)
        self._messenger.finish(request.key)
        self._times[request.key.request_id] = PrefillTimes(started, first_layer, last_layer, busy_before, busy_at_end)

    def _slot(self) -> int:
        """A page set that no write reads any more."""
        deadline = time.monotonic() + self._work.timeout_s
        while True:
            with contextlib.suppress(queue.Empty):
                while True:
                    key = self._scheduler.released.get_nowait()
                    self._free.append(self._held.pop(key))
            if self._free:
                return self._free.pop(0)
            if time.monotonic() > deadline:
                raise PeerUnreachableError(f"no request has been delivered for {self._work.timeout_s:g} s")
            with contextlib.suppress(queue.Empty):
                self._free.append(self._held.pop(self._scheduler.released.get(timeout=_TICK_S)))
            self._look_for_end()

    def _counted(self) -> tuple[int, int, int]:
        rails = self.engine.describe()["groups"][0]["rails"]
        return tuple(sum(rail[name] for rail in rails) for name in ("ops", "bytes", "busy_ns"))


def _compute(since: float, ms: float) -> float:
    """Sleep until ``ms`` after ``since``; late sleeps do not add up. Returns when it should have ended."""
    until = since + ms * 1e-3
    now = time.monotonic()
    if until > now:
        time.sleep(until - now)
        return until
    return now if ms == 0 else until
