"""The prefill side of handshakes: who may send requests, and where their pages may be written.

>>> session = Session.greet(hello, link, spec=spec, ours=regions, tails=tails)     # Refusal, with a reason, if not

One session per decode engine and ``connect``; the requests it serves are numbered without gaps from ``number`` on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ..errors import ConfigError, FabricKVError, ProtocolError
from ..regions import RemoteRegion
from ..sharding import CacheSpec, TransferPlan, plan_transfer
from . import wire
from .layers import LayerGroups
from .peers import Link, check_page_lists, check_regions, tail_difference
from .scheduler import PrefillRequest, RequestKey
from .serving import Serving, TailPlace
from .state import SeenWindow
from .writes import SessionWrites

if TYPE_CHECKING:
    from ..transfers import MemoryRegion
    from .tail import TailPool

__all__ = ["Refusal", "Session"]

# Requests that ended while bytes may still land are remembered one by one up to here; beyond, all count as such.
MAX_UNCLEAN = 65536
# Requests whose news, that all is written, may still be on its way.
MAX_WRITTEN_KEPT = 4096


class Refusal(Exception):
    """A Hello or a Request that is answered with no; ``kind`` as in HelloReply."""

    def __init__(self, kind: wire.RefusalKind, reason: str) -> None:
        super().__init__(reason)
        self.kind: wire.RefusalKind = kind


class Session:
    """One decode engine as this side knows it; state of the actor."""

    def __init__(
        self,
        hello: wire.Hello,
        link: Link,
        plan: TransferPlan,
        regions: list[list[RemoteRegion]],
        tail_region: RemoteRegion | None,
        layers: LayerGroups,
        ours: Sequence[Sequence[MemoryRegion]],
    ) -> None:
        self.epoch: bytes = link.peer.epoch
        self.number = hello.session
        self.link = link
        self.plan = plan
        self.regions = regions
        self.layers = layers
        self.writes = SessionWrites(plan, ours, regions, layers)
        self.tail = hello.tail
        self.tail_region = tail_region
        self.seen = SeenWindow(hello.session)
        self.open: dict[int, Serving] = {}
        self._written: dict[int, None] = {}  # the last that ended with all of it written, in order ...
        self._untold: list[int] = []  # ... and those of which decode does not know it
        # All ways that writes may take: (group of ours, region of theirs).
        self.ways: list[tuple[int, RemoteRegion]] = []
        # Of these, what to flush before a message may say that all writes have landed. Nothing where one NIC on each
        # side carries both: the message follows the writes.
        self.flushes: list[tuple[int, RemoteRegion]] = []
        self._unclean: set[int] = set()

    @classmethod
    def greet(
        cls,
        hello: wire.Hello,
        link: Link,
        *,
        spec: CacheSpec,
        ours: Sequence[Sequence[MemoryRegion]],
        tails: TailPool | None,
    ) -> Session:
        """Check a Hello and open a session, with ``ours`` the regions of this side's ranks.

        Raises
        ------
        Refusal
            With the differing fields, if the two sides do not fit together.
        """
        try:
            theirs = CacheSpec.from_bytes(hello.spec)
            plan = plan_transfer(spec, theirs)
            regions = [[RemoteRegion.from_bytes(data) for data in rank] for rank in hello.regions]
            check_regions(theirs, [[region.nbytes for region in rank] for rank in regions], "the decode side")
            num_layers = theirs.layout.num_layers
            layers = LayerGroups(hello.layer_ends or [num_layers], num_layers)
            plan.expected_by_group(0, 0, 1, layer_ends=layers.ends)  # now, or refused
            tail_region = None if hello.tail is None else RemoteRegion.from_bytes(hello.tail.region)
            for region in (*(r for rank in regions for r in rank), *(() if tail_region is None else (tail_region,))):
                if region.epoch != link.peer.epoch:
                    raise ConfigError(
                        f"a region belongs to engine {region.epoch.hex()}, not to {link.peer.epoch.hex()}"
                    )
            if hello.tail is not None and tail_region is not None:
                needed = hello.tail.num_slots * hello.tail.slot_bytes
                if tail_region.nbytes < needed:
                    raise ConfigError(f"the tail region has {tail_region.nbytes} bytes, its slots need {needed}")
        except FabricKVError as error:
            raise Refusal("incompatible", str(error)) from error
        difference = tail_difference(tails, hello.tail)
        if difference:
            raise Refusal("incompatible", difference)
        return cls(hello, link, plan, regions, tail_region, layers, ours)

    def read_request(self, message: wire.Request) -> Serving:
        """Check a request against the plan.

        Raises
        ------
        ConfigError, ProtocolError
            With the value and the limit, if it asks for what cannot be.
        """
        tokens = wire.unpack_ints(message.tokens)
        pages = [wire.unpack_ints(ints) for ints in message.pages]
        if not tokens.size:
            raise ConfigError("the request has no tokens")
        if message.source_set >= self.plan.num_source_sets:
            raise ConfigError(f"source_set={message.source_set}: there are {self.plan.num_source_sets}")
        check_page_lists(self.plan, message.dp, int(tokens.size), message.cached, pages)
        wants_tail = self.tail is not None
        if (message.tail_slot is not None, message.tail_counter is not None) != (wants_tail, wants_tail):
            raise ProtocolError(
                "a tail slot and its counter must be named if and only if the handshake named a tail pool"
            )
        if self.tail is not None and message.tail_slot is not None and message.tail_slot >= self.tail.num_slots:
            raise ProtocolError(f"tail slot {message.tail_slot} is out of range: there are {self.tail.num_slots}")
        counters = message.counters
        num_ranks, num_groups = self.plan.dst.placement.num_ranks, len(self.layers)
        if len(counters) != num_ranks * num_groups:
            raise ProtocolError(f"{len(counters)} counters for {num_ranks} decode ranks and {num_groups} layer groups")
        expected = self.plan.expected_by_group(
            message.source_set, message.dp, int(tokens.size), cached=message.cached, layer_ends=self.layers.ends
        )
        total_units = int(expected.sum())
        for index, (token, units) in enumerate(zip(counters, expected.ravel().tolist(), strict=True)):
            rank, group = divmod(index, num_groups)
            if (token is not None) != (units > 0):
                raise ProtocolError(
                    f"decode rank {rank} must {'' if units else 'not '}have a counter for layer group {group}"
                )
        for token in (*counters, message.tail_counter):
            if token is not None and token.unit_bytes != self.plan.unit_bytes:
                raise ProtocolError(f"a unit of {token.unit_bytes} bytes: the plan says {self.plan.unit_bytes}")
        request = PrefillRequest(
            key=RequestKey(self.epoch, message.request_id, message.generation),
            tokens=tokens,
            cached_tokens=message.cached,
            source_set=message.source_set,
            wants_tail=wants_tail,
            deadline_s=message.deadline_s,
            params=message.params,
        )
        nbytes = total_units * self.plan.unit_bytes
        tail = None
        if message.tail_slot is not None and message.tail_counter is not None:
            tail = TailPlace(message.tail_slot, message.tail_counter)
        return Serving(self, request, message.dp, pages, counters, tail, nbytes)

    def find_ways(self, ours: Iterable[RemoteRegion]) -> None:
        """Find out :attr:`ways` and :attr:`flushes`, from the regions that this side writes from."""
        theirs = {region.group: region for rank in self.regions for region in rank}
        if self.tail_region is not None:
            theirs.setdefault(self.tail_region.group, self.tail_region)
        num_rails = {region.group: len(region.rails) for region in ours}
        self.ways = [(group, region) for group in num_rails for region in theirs.values()]
        if num_rails.keys() | theirs.keys() == {0} and num_rails[0] == len(theirs[0].rails) == 1:
            return
        self.flushes = self.ways

    def remember(self, generation: int, *, pages_clean: bool) -> None:
        """Keep what a later Cancel of an ended request must be told."""
        if not pages_clean and len(self._unclean) < MAX_UNCLEAN:
            self._unclean.add(generation)

    def note_written(self, generation: int) -> bool:
        """Keep that all writes of a request have completed; whether it is the first of which decode has to be told."""
        self._written[generation] = None
        if len(self._written) > MAX_WRITTEN_KEPT:
            del self._written[next(iter(self._written))]
        self._untold.append(generation)
        return len(self._untold) == 1

    def take_written(self) -> list[int]:
        """The requests of which decode has to be told now."""
        untold, self._untold = self._untold, []
        return untold

    def was_written(self, generation: int) -> bool:
        """Whether all writes of a request that ended not long ago had completed."""
        return generation in self._written

    @property
    def quiescent(self) -> bool:
        """Whether nothing that was ever posted for the session can still land."""
        return not self.open and not self._unclean

    def was_clean(self, generation: int) -> bool:
        """Whether nothing of an ended (or never served) request can still land."""
        return generation not in self._unclean and len(self._unclean) < MAX_UNCLEAN
