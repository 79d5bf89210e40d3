"""What both sides share about a peer: the ordered-out queue of messages to it, and the checks of a handshake.

>>> link = Link(actor, engine, engine.add_peer(address, monitor=True), on_broken=print, on_idle=print)
>>> link.send(wire.Accept(generation=7))           # on the actor's thread; never blocks
>>> check_page_lists(plan, 0, 100, 0, pages)          # ConfigError names group, value and limit
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, FabricKVError, WouldBlockError
from ..sharding import CacheSpec, TransferPlan
from . import wire
from .actor import Actor, Timer

if TYPE_CHECKING:
    from ..engine import Engine
    from ..transfers import MemoryRegion, Peer, Transfer
    from .tail import TailPool

__all__ = ["RETRY_S", "Link", "check_page_lists", "check_regions", "check_setup", "tail_difference"]

# How long a full queue of the engine is left alone if nothing of ours ends there; ends wake us at once.
RETRY_S = 0.002
# More than any number of open requests needs; a peer that far behind is treated as lost.
MAX_UNSENT = 1 << 17


class Link:
    """Control messages to one peer, kept here while the engine's queue is full.

    A message that cannot be delivered breaks the link: the two sides would disagree from then on, so the owner treats
    the peer as lost. Threads: the actor's only.
    """

    def __init__(
        self,
        actor: Actor,
        engine: Engine,
        peer: Peer,
        *,
        on_broken: Callable[[Link, str], None],
        on_idle: Callable[[Link], None],
    ) -> None:
        self.peer = peer
        self._actor = actor
        self._engine = engine
        self._on_broken = on_broken
        self._on_idle = on_idle
        self._unsent: deque[bytes] = deque()
        self._num_in_flight = 0
        self._retry: Timer | None = None
        self._closed = False

    @property
    def idle(self) -> bool:
        """Whether everything has left, as far as it ever will."""
        return self._closed or not (self._unsent or self._num_in_flight)

    def send(self, message: wire.Message) -> None:
        """Queue a message; after ``close`` it is dropped."""
        if self._closed:
            return
        if len(self._unsent) >= MAX_UNSENT:
            self._break(f"{MAX_UNSENT} control messages to it could not be sent")
            return
        self._unsent.append(wire.encode(message))
        self._flush()

    def close(self) -> None:
        """Drop what is left; no callback afterwards."""
        self._closed = True
        self._unsent.clear()
        if self._retry is not None:
            self._retry.cancel()

    def _flush(self) -> None:
        while self._unsent and not self._closed:
            try:
                transfer = self._engine.send(self.peer, self._unsent[0])
            except WouldBlockError:
                if self._retry is None:
                    self._retry = self._actor.after(RETRY_S, self._on_retry)
                return
            except FabricKVError as error:
                self._break(f"a control message to it was refused: {error}")
                return
            self._unsent.popleft()
            self._num_in_flight += 1
            transfer.add_done_callback(lambda ended: self._actor.post(partial(self._on_sent, ended)))

    def _on_retry(self) -> None:
        self._retry = None
        self._flush()

    def _on_sent(self, transfer: Transfer) -> None:
        self._num_in_flight -= 1
        error = transfer.exception(0)
        if error is not None and not self._closed:
            self._break(f"a control message to it was lost: {error}")
            return
        self._flush()
        if self.idle:
            self._on_idle(self)

    def _break(self, reason: str) -> None:
        # Told later: whoever calls send() is in the middle of a step.
        self.close()
        self._actor.post(partial(self._on_broken, self, reason))


def check_setup(
    engine: Engine, spec: CacheSpec, regions: Sequence[Sequence[MemoryRegion]], tails: TailPool | None
) -> None:
    """Raise ConfigError unless regions and tails belong to ``engine`` and are what ``spec`` describes."""
    check_regions(spec, [[region.nbytes for region in rank] for rank in regions], "this side")
    for index, rank in enumerate(regions):
        groups = {region.remote.group for region in rank}
        if len(groups) > 1:
            raise ConfigError(f"rank {index}: its regions lie in device groups {sorted(groups)}, they must share one")
    registered = [region for rank in regions for region in rank] + ([] if tails is None else [tails.region])
    for region in registered:
        if region.remote.epoch != engine.epoch:
            raise ConfigError(f"{region!r} was registered with another engine")
        if region._staging is not None:
            raise ConfigError(
                f"{region!r} is staged in host memory: a messenger's writes wait for layers, which it cannot"
            )


def check_regions(spec: CacheSpec, sizes: Sequence[Sequence[int]], side: str) -> None:
    """Raise ConfigError unless regions of ``sizes`` bytes hold what ``spec`` says about them."""
    if len(sizes) != len(spec.memory):
        raise ConfigError(f"{side} gave regions for {len(sizes)} ranks: its spec has {len(spec.memory)}")
    for rank, (memory, given) in enumerate(zip(spec.memory, sizes, strict=True)):
        if len(given) != len(memory.region_bytes):
            raise ConfigError(f"{side}, rank {rank}: {len(given)} regions, its spec has {len(memory.region_bytes)}")
        for index, (wanted, nbytes) in enumerate(zip(memory.region_bytes, given, strict=True)):
            if nbytes < wanted:
                raise ConfigError(f"{side}, rank {rank}, region {index}: {nbytes} bytes, its spec needs {wanted}")


def check_page_lists(
    plan: TransferPlan, dp: int, num_tokens: int, cached: int, pages: Sequence[NDArray[np.int64]]
) -> list[NDArray[np.int64]]:
    """The pages of each group that will be written; ConfigError unless they serve a request of ``num_tokens``.

    ``dp`` is the decode side's data-parallel replica that the pages are of.
    Only entries that will be written are looked at: those of cached or forgotten tokens may hold anything.
    """
    if not 0 <= cached <= num_tokens:
        raise ConfigError(f"cached_tokens={cached} is out of range: it must lie in [0, {num_tokens}]")
    placement = plan.dst.placement
    if not 0 <= dp < placement.dp_size:
        raise ConfigError(f"dp={dp} is out of range: the decode side has {placement.dp_size} data-parallel replicas")
    replica = [memory for rank, memory in enumerate(plan.dst.memory) if placement.coords(rank).dp == dp]
    groups, all_written = plan.dst.layout.groups, []
    if len(pages) != len(groups):
        raise ConfigError(f"{len(pages)} page lists were given: the cache has {len(groups)} groups")
    for index, (group, array) in enumerate(zip(groups, pages, strict=True)):
        holders = [memory for memory in replica if any(layer.group == index for layer in memory.layers)]
        limit = min((memory.num_pages[index] for memory in holders), default=0)
        page_map = plan.page_map(index, cached, num_tokens, cached=cached, final=True, num_tokens=num_tokens)
        entries: list[NDArray[np.int64]] = []
        for run in page_map.kinds:
            if not run.num:
                continue
            if run.dst_entries.stop > array.size:
                raise ConfigError(
                    f"group {group.name}: {array.size} pages were given, {num_tokens} tokens need"
                    f" {run.dst_entries.stop} pages of {group.page_tokens} tokens"
                )
            entries.append(array[run.dst_entries])
        written = np.unique(np.concatenate(entries)) if entries else np.empty(0, np.int64)
        all_written.append(written)
        if not entries:
            continue
        if written[0] < 0 or written[-1] >= limit:
            wrong = int(written[0] if written[0] < 0 else written[-1])
            raise ConfigError(f"group {group.name}: page {wrong} is out of range, the decode side has {limit} pages")
        span = -(-num_tokens // group.page_tokens) if group.page_tokens else 1
        first = min(run.dst_entries.start for run in page_map.kinds if run.num)
        if np.unique(array[first:span]).size != span - first:
            raise ConfigError(f"group {group.name}: a page is listed twice, so that one write would spoil another")
    return all_written


def tail_difference(prefill: TailPool | None, decode: wire.TailGeometry | None) -> str:
    """What keeps the tails of two sides apart, field by field; empty if nothing does."""
    if decode is None:
        return ""  # Decode wants no tails: prefill sends none.

    def describe(fields: list[wire.TailField]) -> dict[str, str]:
        return {field.name: f"{field.dtype} {tuple(field.shape)}" for field in fields}

    wanted, offered = describe(decode.fields), describe([] if prefill is None else prefill.fields)
    differences = [
        f"tail {name!r}: prefill {offered.get(name, 'none')}, decode {wanted.get(name, 'none')}"
        for name in sorted(wanted.keys() | offered.keys())
        if wanted.get(name) != offered.get(name)
    ]
    if prefill is None or differences:
        return "; ".join(differences)
    if decode.slot_bytes < prefill.write_bytes:
        return f"tail slot: prefill writes {prefill.write_bytes} bytes, decode has {decode.slot_bytes}"
    return ""
