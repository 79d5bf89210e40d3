"""One end of the bench: an engine, memory to give and to take, and its links to the other end or ends.

>>> side = Side(engine, workload, None, 1, HostMemory)
>>> link = side.link(channel, index=0); side.connect(link, opened)
"""

from __future__ import annotations

from collections.abc import Callable

from ..engine import Engine
from ..regions import RemoteRegion
from ..transfers import MemoryRegion, Peer
from .channel import Channel
from .memory import Memory
from .opened import describe_rails, shm_names
from .places import Places, lanes_for
from .stamps import stamp
from .wire import Finished, Opened
from .workload import Workload

__all__ = ["Link", "Side"]


class Link:
    """One other end.

    Attributes
    ----------
    sink : Memory
        Where we take what comes from there.
    their_seed : int
        Of what they stamp.
    """

    def __init__(self, channel: Channel, sink: Memory, region: MemoryRegion, their_seed: int) -> None:
        self.channel = channel
        self.sink = sink
        self.sink_region = region
        self.their_seed = their_seed
        self.peer: Peer
        self.remote_source: RemoteRegion
        self.remote_sink: RemoteRegion
        self.opened: Opened
        self.finished: Finished | None = None  # what the target said at the end of the phase


class Side:
    """What both ends have.

    Parameters
    ----------
    engine : Engine
        With ``dispatch="manual"``: the phases poll.
    workload : Workload
    index : int, optional
        Which target this is; None: the initiator.
    num_targets : int
        Of the run: both ends of a link must lay out as many iterations as the end with the most links has memory for.
    make_memory : callable
        Gives so many bytes.
    """

    def __init__(
        self,
        engine: Engine,
        workload: Workload,
        index: int | None,
        num_targets: int,
        make_memory: Callable[[int], Memory],
    ) -> None:
        self.engine = engine
        self.workload = workload
        self.posts = workload.outwards if index is None else workload.inwards
        self.receives = workload.inwards if index is None else workload.outwards
        reads = workload.op == "read"
        self.gives = (self.posts and not reads) or (self.receives and reads)
        self.takes = (self.receives and not reads) or (self.posts and reads)
        self.seed = seed_of(workload.seed, index)
        self.links: list[Link] = []
        self._index = index
        self._make_memory = make_memory
        self._lanes = [
            lanes_for(case, workload.contiguity, workload.depth, workload.memory_bytes // num_targets)
            for case in workload.cases
        ]
        largest = max(self.places(case).nbytes for case in range(len(workload.cases)))
        # Immediates need some region of the peer to be addressed to, even where no data goes there.
        self._sink_bytes = largest if self.takes else 64
        self.source = make_memory(largest if self.gives else 64)
        self.source_region = self.source.register(engine)
        self._stamped: tuple[int, int] | None = None

    def places(self, case: int) -> Places:
        """The page lists of a row."""
        workload = self.workload
        return Places(workload.cases[case], workload.contiguity, self._lanes[case], workload.seed)

    def link(self, channel: Channel, index: int) -> Link:
        """Make memory for another end; ``index`` as the target's."""
        sink = self._make_memory(self._sink_bytes)
        their_seed = seed_of(self.workload.seed, index if self._index is None else None)
        link = Link(channel, sink, sink.register(self.engine), their_seed)
        self.links.append(link)
        return link

    def opened(self, link: Link) -> Opened:
        """What the other end must know."""
        rails = describe_rails(self.engine)
        return Opened(
            address=self.engine.address,
            source=self.source_region.remote.to_bytes(),
            sink=link.sink_region.remote.to_bytes(),
            provider=rails[0]["provider"],
            rails=rails,
            shm_names=shm_names(self.engine),
        )

    def connect(self, link: Link, opened: Opened) -> None:
        """Learn what the other end has."""
        link.opened = opened
        link.remote_source = RemoteRegion.from_bytes(opened.source)
        link.remote_sink = RemoteRegion.from_bytes(opened.sink)
        link.peer = self.engine.add_peer(opened.address)

    def stamp_source(self, case: int, places: Places, iteration: int) -> None:
        """Fill what will be given, unless it holds that already."""
        if not self.gives or self.workload.op in ("imm", "send") or self._stamped == (case, iteration):
            return
        for lane in range(places.lanes):
            stamp(
                self.source.array,
                places.src[lane],
                page_bytes=places.case.page_bytes,
                seed=self.seed,
                iteration=iteration + lane,
            )
        self.source.push(places.nbytes)
        self._stamped = (case, iteration)


def seed_of(seed: int, index: int | None) -> int:
    """Seed of what the initiator (None) or a target stamps: two of them never stamp the same."""
    return (seed + 7919 * (0 if index is None else index + 1)) % 2**32
