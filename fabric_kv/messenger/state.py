"""States and events of a request, on both sides, and which requests have been seen.

>>> fetch, effects = fetch_step(Fetch(waiting=0b11), CounterFired(0))      # see fetch.py, serve.py
>>> RequestState.READY.final
True

The machines in :mod:`.fetch` and :mod:`.serve` are pure functions of these: they know no clock, thread or network, so
that tests can try every order, duplication and loss of messages.
"""

from __future__ import annotations

import enum

import msgspec

__all__ = [
    "Accepted",
    "AllPlanned",
    "CancelAsked",
    "CancelConfirmed",
    "CancelExpired",
    "Closing",
    "CountExpired",
    "CounterBroken",
    "CounterFired",
    "DeadlinePassed",
    "EngineClosed",
    "FailAsked",
    "Failed",
    "PeerLeft",
    "PeerLost",
    "Planned",
    "PostFailed",
    "Posted",
    "Refused",
    "Rejected",
    "RequestState",
    "Retired",
    "SeenWindow",
    "ServeState",
    "Stalled",
    "Written",
]


class RequestState(enum.IntEnum):
    """What ``RequestHandle.poll()`` returns; values from READY on are final."""

    SENT = 0
    ACCEPTED = 1
    CANCELLING = 2
    READY = 3
    REJECTED = 4
    FAILED = 5
    TIMED_OUT = 6
    CANCELLED = 7
    PEER_LOST = 8
    CLOSED = 9
    STALLED = 10

    @property
    def final(self) -> bool:
        """Whether the request has ended."""
        return self >= RequestState.READY


class ServeState(enum.IntEnum):
    """A request on the prefill side; values from RELEASED on are final."""

    OFFERED = 0
    SERVING = 1
    STOPPING = 2
    RELEASED = 3
    REJECTED = 4
    FAILED = 5
    TIMED_OUT = 6
    CANCELLED = 7
    PEER_LOST = 8
    CLOSED = 9
    STALLED = 10

    @property
    def final(self) -> bool:
        """Whether the request has ended."""
        return self >= ServeState.RELEASED


class _Event(msgspec.Struct, frozen=True):
    """Base of all events: plain data."""


# --- Events of both sides --------------------------------------------------------------------------------------------


class Accepted(_Event, frozen=True):
    """Decode: an Accept message arrived. Prefill: the scheduler said yes."""


class CancelAsked(_Event, frozen=True):
    """Decode: the caller wants out. Prefill: a Cancel message arrived."""


class DeadlinePassed(_Event, frozen=True):
    """The request took too long; ``reason`` says which bound passed."""

    reason: str = "deadline"


class PeerLost(_Event, frozen=True):
    """The other process was silent for too long, or a control message to it failed.

    ``fenced``: it is proven that nothing which it has posted can land any more.
    """

    reason: str = "peer lost"
    fenced: bool = False


class Stalled(_Event, frozen=True):
    """Prefill: writes of the request are posted, and none is retired for too long. Decode: the peer says so.

    Only the side that posts can tell this from a request that waits to be computed.
    """

    reason: str


class Closing(_Event, frozen=True):
    """This side is closing and no longer waits for the request."""


# --- Events of the decode side ---------------------------------------------------------------------------------------


class Rejected(_Event, frozen=True):
    """A Reject message arrived; ``kind`` as in the message."""

    reason: str
    kind: str = "rejected"


class Failed(_Event, frozen=True):
    """A Fail message arrived."""

    reason: str
    pages_clean: bool


class CancelConfirmed(_Event, frozen=True):
    """A CancelConfirm message arrived."""

    pages_clean: bool
    written: bool = False


class CounterFired(_Event, frozen=True):
    """Every unit that one of the request's counters expects has been counted."""

    index: int


class CounterBroken(_Event, frozen=True):
    """More was counted than was announced."""

    reason: str


class CancelExpired(_Event, frozen=True):
    """The bound on the peer's answer has passed."""


class Written(_Event, frozen=True):
    """The peer says that all writes of the request have completed there. Only the counters say that they are here."""


class CountExpired(_Event, frozen=True):
    """All is written, the peer says, and nothing was counted for too long; ``reason`` says how much was."""

    reason: str


class EngineClosed(_Event, frozen=True):
    """This side's engine was closed: no NIC touches the pages any more."""


class PeerLeft(_Event, frozen=True):
    """A Goodbye arrived; ``quiescent``: everything that the peer ever posted has been retired."""

    quiescent: bool


# --- Events of the prefill side --------------------------------------------------------------------------------------


class Refused(_Event, frozen=True):
    """The scheduler said no; ``kind`` as in the Reject message."""

    reason: str
    kind: str = "rejected"


class FailAsked(_Event, frozen=True):
    """The scheduler gives an accepted request up."""

    reason: str


class Planned(_Event, frozen=True):
    """``count`` more submissions have been prepared."""

    count: int


class AllPlanned(_Event, frozen=True):
    """``finish`` was called: nothing more will be prepared."""


class Posted(_Event, frozen=True):
    """One prepared submission was taken by the engine."""


class PostFailed(_Event, frozen=True):
    """One prepared submission was refused by the engine; nothing of it was posted."""

    reason: str


class Retired(_Event, frozen=True):
    """Every operation of one submission is retired.

    ``error``: None if all of it has landed. ``may_land``: the outcome of a failed operation is unknown, so its bytes
    may still arrive.
    """

    error: str | None = None
    may_land: bool = False


class SeenWindow:
    """Which requests of a session have been seen, in bounded memory, whatever order they come in.

    Numbers are dense from ``first`` on, so all below a watermark plus a few above it is everything there is to keep. A
    Cancel that overtakes its request marks the number too: the request is then never served.

    Parameters
    ----------
    first : int
        First number of the session; smaller ones belong to an earlier session.
    span : int
        How far above the watermark a number may be.
    """

    def __init__(self, first: int, span: int = 65536) -> None:
        self._first = first
        self._low = first  # Every number below has been seen.
        self._above: set[int] = set()
        self._span = span

    def in_range(self, number: int) -> bool:
        """Whether the number can belong to this session at all."""
        return self._first <= number < self._low + self._span

    @property
    def highest(self) -> int:
        """The highest number that was seen; one less than the first if there was none."""
        return max(self._above, default=self._low - 1)

    def __contains__(self, number: int) -> bool:
        return self._first <= number < self._low or number in self._above

    def add(self, number: int) -> bool:
        """Mark as seen; False if it was already, or is out of range (then nothing changes)."""
        if number in self or not self.in_range(number):
            return False
        self._above.add(number)
        while self._low in self._above:
            self._above.remove(self._low)
            self._low += 1
        return True
