"""The decode side: asks a prefill engine for a prompt's pages and knows by its own counters when they are here.

>>> decode = DecodeMessenger(engine, spec, [[region]], tail=TailPool(engine, {"hidden": ("float32", (576,))}))
>>> peer = decode.connect(prefill_address)
>>> result = await decode.submit(peer, Request(request_id="a", tokens=prompt[:-1], pages=[pages]))
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from copy import copy
from functools import partial
from typing import TYPE_CHECKING

from ..config import Bounds
from ..errors import ClosedError, ConfigError, PeerLostError, WouldBlockError
from ..sharding import CacheSpec
from . import wire
from .actor import Actor
from .base import ANSWER_S
from .decode_requests import DecodeRequests
from .fetch import Fetch
from .handle import RequestHandle
from .layers import LayerGroups
from .peers import check_page_lists
from .poison import PoisonedPages, PoisonEntry
from .prefill_peer import PrefillPeer
from .requests import Fetching, Request
from .state import CancelAsked
from .timeline import Timeline

if TYPE_CHECKING:
    from ..engine import Engine
    from ..transfers import MemoryRegion
    from .tail import TailPool

__all__ = ["DecodeMessenger"]

# Open requests of one messenger; one more is back-pressure (WouldBlockError).
MAX_OPEN_REQUESTS = 65536


class DecodeMessenger(DecodeRequests):
    """Fetches pages from any number of prefill engines.

    Parameters
    ----------
    engine : Engine
        Its ``on_message``, ``on_peer_lost`` and ``on_held_up`` are taken over.
    spec : CacheSpec
        This side's cache: layout, placement, and where each rank keeps its pages.
    regions : sequence of sequence of MemoryRegion
        The registered regions of each rank, in the order of ``spec.memory[rank].region_bytes``.
    tail : TailPool, optional
        If given, every request carries a tail.
    bounds : Bounds
    layers_per_group : int, optional
        Count groups of so many layers by themselves, so that ``RequestHandle.layers_ready`` says how far a request is.
        Each costs a counter for each rank and request, and on the prefill side a transfer for each chunk. By default
        all layers are one group.

    Notes
    -----
    Threads: any. ``connect`` and ``close`` wait, within bounds; ``submit`` does not.
    """

    def __init__(
        self,
        engine: Engine,
        spec: CacheSpec,
        regions: Sequence[Sequence[MemoryRegion]],
        tail: TailPool | None = None,
        bounds: Bounds = Bounds(),
        *,
        layers_per_group: int | None = None,
        actor: Actor | None = None,
    ) -> None:
        layers = LayerGroups.of_size(spec.layout.num_layers, layers_per_group)
        if len(layers) * spec.placement.num_ranks > wire.MAX_COUNTERS:
            raise ConfigError(
                f"layers_per_group={layers_per_group} makes {len(layers)} groups, for {spec.placement.num_ranks} ranks:"
                f" a request has at most {wire.MAX_COUNTERS} counters"
            )
        super().__init__(engine, spec, regions, tail, bounds, layers, actor)
        self._start()

    def submit(self, peer: PrefillPeer, request: Request) -> RequestHandle:
        """Ask for a prompt's pages. Returns at once.

        Parameters
        ----------
        peer : PrefillPeer
            From ``connect``.
        request : Request
            Its pages belong to the messenger until the handle is done.

        Raises
        ------
        ConfigError
            If a value of the request is out of range (names it and the limit), or a page to be written belongs to
            another request that is open, or is poisoned.
        PeerLostError, ClosedError
            If the peer is gone, or the messenger is closing; the pages are clean.
        WouldBlockError
            If all tail slots or counters, or the number of open requests, are used up. Try again when one has ended.
        SharingError
            If a rank's memory is another process's which is gone or has withdrawn it: :attr:`MemoryRegion.lost`.
            Nothing was sent in any of these cases.
        """
        fetching = Fetching(peer, request, self._bounds.request_s)
        if self._closing:
            raise ClosedError("the messenger is closing", pages_clean=True)
        if not isinstance(peer, PrefillPeer) or peer._owner is not self:
            raise ConfigError(f"request {request.request_id!r}: {peer!r} was not connected by this messenger")
        if not peer.alive:
            raise PeerLostError(
                f"request {request.request_id!r}: {peer!r}",
                request_id=request.request_id,
                peer=peer.epoch.hex(),
                pages_clean=True,
                reason="peer_lost",
            )
        fetching.written = check_page_lists(
            peer.plan, fetching.dp, fetching.num_tokens, fetching.cached_tokens, fetching.pages
        )
        for rank, regions in enumerate(self._regions):
            if self._spec.placement.coords(rank).dp != fetching.dp:
                continue
            for region in regions:
                if region.lost is not None:
                    raise copy(region.lost)
        with self._lock:
            if self._num_requests >= MAX_OPEN_REQUESTS:
                raise WouldBlockError(f"{MAX_OPEN_REQUESTS} requests are open", limit=MAX_OPEN_REQUESTS)
            self._num_requests += 1
            fetching.source_set = peer._picker.pick()
        try:
            self._claim_pages(fetching)
            self._check_not_poisoned(fetching)  # after it: whoever lets go of a page has poisoned it before
            self._take_counters(fetching)
        except BaseException:
            self._give_back(fetching, clean=True)
            raise
        fetching.submitted_s = self._actor.now()
        fetching.timeline = Timeline(fetching.submitted_s)
        fetching.handle = RequestHandle(
            request.request_id,
            self._actor,
            cancel=lambda: self._actor.post(partial(self._apply, fetching, CancelAsked())),
            received=fetching.received_units,
            layers_ready=partial(self._layers_ready, fetching),
            total=fetching.expected_units,
            on_callback_error=lambda: self._actor.post(self._count_callback_error),
        )
        self._actor.post(partial(self._send_request, fetching))
        return fetching.handle

    def _layers_ready(self, fetching: Fetching) -> int:
        return self._layers.num_ready(fetching.fetch.waiting, self._spec.placement.num_ranks)

    @property
    def poisoned(self) -> list[PoisonedPages]:
        """Pages of requests that ended with ``pages_clean`` False, until ``reclaim`` or the engine's end."""
        return self._poison.items

    def reclaim(self, timeout_s: float = 0.0) -> list[PoisonedPages]:
        """Take poisoned pages back where there is proof by now that nothing can land in them.

        A peer that did not confirm a cancel in time may have done so since, for one because a write was stalled that is
        retired now, and what was missing may have been counted since: that costs nothing to know. For lost peers proof
        is looked for again: a process that had only stopped may have exited. What proof there is depends on the
        provider, see "Fences" in docs/engine.md: over TCP there is none. Peers that are connected again are left alone.

        Parameters
        ----------
        timeout_s : float
            How long to wait for each peer, in seconds.

        Returns
        -------
        list of PoisonedPages
            What is clean now: these pages are the caller's again, and may be submitted.

        Raises
        ------
        ConfigError
            On the messenger's own thread.
        ClosedError
            If the engine is closed: then all pages are clean.
        """
        if self._actor.is_current:
            raise ConfigError("reclaim() was called on the messenger's own thread, which must not wait")
        clean = self._take_back(self._poison.take_redeemed())
        if self._engine.fence_means == "none":
            return clean
        for peer in self._poison.peers:
            if not self._actor.call(partial(self._begin_reclaim, peer.epoch), ANSWER_S):
                continue
            try:
                if not self._engine.fence(peer, timeout_s=timeout_s).proven:
                    continue
                # While nobody can connect to it: nothing that a new session poisons must be among these.
                clean += self._take_back(self._poison.take(peer.epoch))
            finally:
                self._actor.call(partial(self._end_reclaim, peer.epoch), ANSWER_S)
        return clean

    def _take_back(self, entries: list[PoisonEntry]) -> list[PoisonedPages]:
        for entry in entries:
            if entry.tail_slot is not None and self._tails is not None:
                self._tails.reclaim(entry.tail_slot)
            for counter in entry.counters:
                with contextlib.suppress(ClosedError):  # The engine took its counters back when it was closed.
                    counter.release()  # Used again where it has fired.
        return [entry.item for entry in entries]

    def _begin_reclaim(self, epoch: bytes) -> bool:
        """Whether the peer may be fenced; from then on nobody connects to it."""
        if epoch in self._peers or epoch in self._fencing:
            return False
        self._fencing[epoch] = None
        return True

    def _check_not_poisoned(self, fetching: Fetching) -> None:
        for index, pages in enumerate(fetching.pages):
            if (page := self._poison.find(fetching.dp, index, pages)) is not None:
                raise ConfigError(
                    f"group {self._spec.layout.groups[index].name}: page {page} may still be written for an earlier"
                    " request; it is set aside until reclaim() says otherwise or the engine is closed"
                )

    def _claim_pages(self, fetching: Fetching) -> None:
        taken = self._claims.claim(fetching.request_id, fetching.dp, fetching.written)
        if taken is not None:
            group, page, owner = taken
            raise ConfigError(
                f"group {self._spec.layout.groups[group].name}: page {page} is being written for request {owner!r}: it"
                " belongs to that one until its handle is done"
            )
        fetching.claimed = True

    def _take_counters(self, fetching: Fetching) -> None:
        """Counters and a tail slot: all that must exist before the peer is told."""
        plan, tails = fetching.peer.plan, self._tails
        if tails is not None:
            fetching.tail_slot = tails.acquire()
        expected: list[int] = (
            plan.expected_by_group(
                fetching.source_set,
                fetching.dp,
                fetching.num_tokens,
                cached=fetching.cached_tokens,
                layer_ends=self._layers.ends,
            )
            .ravel()
            .tolist()
        )
        expected.append(0 if tails is None else -(-tails.write_bytes // plan.unit_bytes))
        waiting = 0
        for index, units in enumerate(expected):
            counter = None
            if units:
                group = self._counting_group(index)
                counter = self._engine.counter(unit_bytes=plan.unit_bytes, expected_units=units, group=group)
                fetching.expected_units += units
                waiting |= 1 << index
            fetching.counters.append(counter)
        if not waiting:
            raise ConfigError("there is nothing to fetch: every token is cached, and no tail is wanted")
        fetching.fetch = Fetch(waiting=waiting)
        limit = self._engine.options.max_message_bytes
        if fetching.message_bytes > limit:
            raise ConfigError(
                f"the request's message would have up to {fetching.message_bytes} bytes:"
                f" max_message_bytes of this engine is {limit}"
            )

    def _counting_group(self, index: int) -> int:
        """The device group that a counter counts in: that of a rank's pages or, behind all ranks, of the tails."""
        rank = index // len(self._layers)
        if rank < len(self._regions):
            return self._regions[rank][0].remote.group
        assert self._tails is not None
        return self._tails.region.remote.group
