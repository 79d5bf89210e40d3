"""How each operation posts an iteration, how the other end knows that it is there, and whether it is right.

>>> post = make_post(side, places, tokens, iteration=0)     # what a Flow calls
>>> sink = make_sink(side, link, places, ...)               # what the other end waits for

``write`` and ``paged`` are counted by the receiver, ``imm`` too; messages are counted as they are delivered; ``read``
is the reader's affair, and the other end waits for its word.
"""

from __future__ import annotations

from collections import Counter as Multiset
from collections.abc import Callable, Sequence

import numpy as np

from ..errors import ProtocolError
from ..regions import CounterToken
from ..submission import PageList
from ..transfers import Counter, PagePiece, Transfer
from .places import Places
from .side import Link, Side
from .stamps import count_touched, count_wrong, page_words

__all__ = [
    "CountedSink",
    "MessageSink",
    "Sink",
    "ToldSink",
    "count_wrong_pages",
    "make_post",
    "make_sink",
    "max_transfers",
]

# Large pages are split into writes at multiples of the unit, so it must not be above what a NIC takes in one.
_UNIT_BYTES = 64 << 10

Post = Callable[[int], Sequence[Transfer]]


def max_transfers(op: str, depth: int, num_pages: int, num_links: int) -> int:
    """How many may be in flight at once."""
    return depth * num_links * (num_pages if op in ("imm", "send") else 1)


def make_post(side: Side, places: Places, tokens: Sequence[CounterToken | None], iteration: int) -> Post:
    """What submits iteration i of a phase to every link; ``tokens`` as the links are."""
    engine, links, op = side.engine, side.links, side.workload.op
    case, lanes = places.case, places.lanes
    if op == "imm":
        parts = [
            (link.peer, link.remote_sink, token) for link, token in zip(links, tokens, strict=True) if token is not None
        ] * case.num_pages
        return lambda _: engine.barrier(parts)
    if op == "send":
        payloads = [message_payloads(side.seed, places, iteration + lane) for lane in range(lanes)]
        return lambda i: [engine.send(link.peer, payload) for link in links for payload in payloads[i % lanes]]
    lists = [
        list(zip(_split(places.src[lane], side), _split(places.dst[lane], side), strict=True)) for lane in range(lanes)
    ]
    if op == "read":
        src, dst = places.src, places.dst
        return lambda i: [
            engine.read_pages(
                link.peer,
                link.sink_region,
                link.remote_source,
                dst[i % lanes],
                src[i % lanes],
                page_bytes=case.page_bytes,
            )
            for link in links
        ]
    # Made once: what is measured is the engine, not how quickly Python makes tuples.
    submissions = [
        [
            (
                link.peer,
                [
                    PagePiece(
                        side.source_region,
                        0,
                        case.page_bytes,
                        link.remote_sink,
                        0,
                        case.page_bytes,
                        case.page_bytes,
                        src_pages,
                        dst_pages,
                    )
                    for src_pages, dst_pages in lists[lane]
                ],
                token,
            )
            for link, token in zip(links, tokens, strict=True)
        ]
        for lane in range(lanes)
    ]
    if len(links) == 1:
        singles = [submission[0] for submission in submissions]

        def post_one(i: int) -> Sequence[Transfer]:
            peer, pieces, token = singles[i % lanes]
            return [engine.submit(peer, pieces, token=token)]

        return post_one
    return lambda i: engine.scatter(submissions[i % lanes])


def _split(pages: np.ndarray[tuple[int, ...], np.dtype[np.int64]], side: Side) -> list[PageList]:
    return [PageList(part) for part in np.split(pages, side.workload.batch)]


def message_payloads(seed: int, places: Places, iteration: int) -> list[bytes]:
    """The messages of one iteration."""
    case = places.case
    words = page_words(np.arange(case.num_pages), case.page_bytes, seed, iteration)
    return [row.tobytes() for row in words]


class Sink:
    """Waits for what one link brings in a phase."""

    #: Goes to the other end.
    token: CounterToken | None = None

    def arm(self, iterations: int) -> None:
        """Say how much there will be."""
        raise NotImplementedError

    def received(self) -> int:
        """A number that grows while something arrives."""
        raise NotImplementedError

    def complete(self) -> bool:
        """Whether all is here; raises if it cannot be any more."""
        raise NotImplementedError

    def close(self) -> None:
        """Give back what it holds."""


class CountedSink(Sink):
    """A completion counter of the engine."""

    def __init__(self, side: Side, places: Places) -> None:
        page_bytes = max(places.case.page_bytes, 1)
        unit_bytes = min(page_bytes, _UNIT_BYTES)
        self._units = places.case.num_pages * -(-page_bytes // unit_bytes)
        self._counter: Counter = side.engine.counter(unit_bytes=unit_bytes)
        self.token = self._counter.token

    def arm(self, iterations: int) -> None:  # noqa: D102
        self._counter.arm(iterations * self._units)

    def received(self) -> int:  # noqa: D102
        return self._counter.received

    def complete(self) -> bool:  # noqa: D102
        if not self._counter.done():
            return False
        self._counter.result(0)
        return True

    def close(self) -> None:  # noqa: D102
        self._counter.release()


class MessageSink(Sink):
    """Messages of one peer; they are kept while they are to be checked."""

    def __init__(self, places: Places, keep: bool) -> None:
        self._case = places.case
        self._expected: int | None = None
        self._count = 0
        self._wrong = 0
        self._keep = keep
        self._kept: Multiset[bytes] = Multiset()

    def deliver(self, payload: bytes) -> None:
        """One that has come."""
        self._count += 1
        if len(payload) != self._case.page_bytes:
            self._wrong += 1
        elif self._keep:
            self._kept[payload] += 1

    def arm(self, iterations: int) -> None:  # noqa: D102
        self._expected = iterations * self._case.num_pages

    def received(self) -> int:  # noqa: D102
        return self._count

    def complete(self) -> bool:  # noqa: D102
        if self._expected is not None and self._count > self._expected:
            raise ProtocolError(f"{self._count} messages arrived, and {self._expected} were sent")
        return self._count == self._expected

    def wrong(self, expected: Multiset[bytes]) -> int:
        """How many of the expected messages did not come as they were sent."""
        return self._wrong + (expected - self._kept).total() if self._keep else self._wrong


class ToldSink(Sink):
    """Nothing arrives that could be counted: done when the other end says so."""

    def __init__(self) -> None:
        self._told = False

    def arm(self, iterations: int) -> None:  # noqa: D102
        self._told = True

    def received(self) -> int:  # noqa: D102
        return 0

    def complete(self) -> bool:  # noqa: D102
        return self._told


def make_sink(side: Side, places: Places, keep: bool) -> Sink:
    """What one link's data is waited for with."""
    if side.workload.op == "read":
        return ToldSink()
    return MessageSink(places, keep) if side.workload.op == "send" else CountedSink(side, places)


def count_wrong_pages(side: Side, link: Link, places: Places, sink: Sink | None, iteration: int, used: int) -> int:
    """Pages of a link that are not what they should be, and free ones that were touched.

    ``used`` is how many iterations there were; of each lane the last one is looked at, which held the same.
    """
    page_bytes = places.case.page_bytes
    lanes = range(min(used, places.lanes))
    if isinstance(sink, MessageSink):
        expected: Multiset[bytes] = Multiset()
        for lane in lanes:
            repeated = -(-(used - lane) // places.lanes)
            for payload in message_payloads(link.their_seed, places, iteration + lane):
                expected[payload] += repeated
        return sink.wrong(expected)
    if not side.takes or side.workload.op == "imm":
        return 0
    link.sink.pull(places.nbytes)
    wrong = count_touched(link.sink.array, places.gaps, page_bytes)
    for lane in lanes:
        wrong += count_wrong(
            link.sink.array, places.dst[lane], page_bytes=page_bytes, seed=link.their_seed, iteration=iteration + lane
        )
    return wrong
