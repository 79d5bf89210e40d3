"""What a request may do next on the decode side, as a pure function.

>>> fetch = Fetch(waiting=0b11)                              # two counters have still to fire
>>> fetch, effects = fetch_step(fetch, CounterFired(0))
>>> fetch, effects = fetch_step(fetch, CancelAsked())        # effects: send a Cancel, start the cancel timer

Three things hold in every run: a final phase never changes; a request ends exactly once; and ``pages_clean`` is only
said where nothing can land in the pages any more.
"""

from __future__ import annotations

import enum

import msgspec

from .state import (
    Accepted,
    CancelAsked,
    CancelConfirmed,
    CancelExpired,
    Closing,
    CounterBroken,
    CounterFired,
    CountExpired,
    DeadlinePassed,
    EngineClosed,
    Failed,
    PeerLeft,
    PeerLost,
    Rejected,
    RequestState,
    Stalled,
    Written,
)

__all__ = ["Fetch", "FetchEffect", "FetchEvent", "fetch_step"]


class FetchEffect(enum.Enum):
    """What the owner of the machine has to do."""

    SEND_CANCEL = enum.auto()
    START_CANCEL_TIMER = enum.auto()
    START_COUNT_TIMER = enum.auto()
    END = enum.auto()
    LATE = enum.auto()  # Count it: the message came after the end, twice, or out of turn.


class Fetch(msgspec.Struct, frozen=True):
    """One request as the decode side sees it.

    Attributes
    ----------
    waiting : int
        Bit mask of the counters that have not fired.
    started : bool
        A counter has fired, or the peer accepted: a later Reject cannot be true.
    cause, reason
        How the request will end once the peer has answered the Cancel, and why.
    reject_kind : str
        Of a request that ended as rejected.
    tainted : bool
        More was written than announced: no answer of the peer can prove the pages clean.
    written : bool
        The peer says that all is written. What is not counted then is somewhere on the way, or lost: no word of the
        peer, for which all that it posted has landed, proves the pages clean any more.
    peer_quiescent : bool or None
        What the peer's Goodbye said; None before one.
    pages_clean : bool or None
        Whether nothing can land in the pages any more; None until the end.
    """

    waiting: int
    phase: RequestState = RequestState.SENT
    started: bool = False
    cause: RequestState | None = None
    reason: str = ""
    reject_kind: str = "rejected"
    tainted: bool = False
    written: bool = False
    peer_quiescent: bool | None = None
    pages_clean: bool | None = None


FetchEvent = (
    Accepted
    | Rejected
    | Failed
    | CancelConfirmed
    | CounterFired
    | CounterBroken
    | CancelAsked
    | DeadlinePassed
    | CancelExpired
    | EngineClosed
    | PeerLost
    | PeerLeft
    | Stalled
    | Written
    | CountExpired
    | Closing
)
FetchResult = tuple[Fetch, tuple[FetchEffect, ...]]
_LATE = (FetchEffect.LATE,)


def fetch_step(fetch: Fetch, event: FetchEvent) -> FetchResult:
    """The decode side's next state, and what has to be done about it.

    Notes
    -----
    Only the counters lead to READY: Accept may come late or never, and no message says "done".
    """
    if fetch.phase.final:
        return fetch, _LATE
    cancelling = fetch.phase is RequestState.CANCELLING
    match event:
        case Accepted():
            if fetch.phase is not RequestState.SENT:
                return fetch, _LATE
            return msgspec.structs.replace(fetch, phase=RequestState.ACCEPTED, started=True), ()
        case Rejected(reason, kind):
            if cancelling:
                # A Reject after data is a lie; the cancel that is under way still decides.
                return (fetch, _LATE) if fetch.started else _end(fetch, None, fetch.reason, clean=True)
            if fetch.started:
                return _cancel(fetch, RequestState.FAILED, f"rejected after it had been accepted: {reason}")
            fetch = msgspec.structs.replace(fetch, reject_kind=kind)
            return _end(fetch, RequestState.REJECTED, reason, clean=True)
        case Failed(reason, pages_clean):
            if cancelling:
                return _end(fetch, None, fetch.reason, clean=pages_clean and not fetch.written)
            return _end(fetch, RequestState.FAILED, reason, clean=pages_clean and not fetch.written)
        case CancelConfirmed(pages_clean, written):
            if not cancelling:
                return fetch, _LATE
            if fetch.written:
                return fetch, ()  # The last counters may be a moment behind, and nothing else proves anything.
            if written:  # It has overtaken Written.
                return msgspec.structs.replace(fetch, written=True), (FetchEffect.START_COUNT_TIMER,)
            return _end(fetch, None, fetch.reason, clean=pages_clean)
        case CounterFired(index):
            fetch = msgspec.structs.replace(fetch, waiting=fetch.waiting & ~(1 << index), started=True)
            if fetch.waiting:
                return fetch, ()
            # Every byte is written once and all are here: nothing can land any more, cancelled or not.
            return _end(fetch, None if cancelling else RequestState.READY, fetch.reason, clean=True)
        case CounterBroken(reason):
            fetch = msgspec.structs.replace(fetch, tainted=True)
            return (fetch, ()) if cancelling else _cancel(fetch, RequestState.FAILED, reason)
        case CancelAsked():
            return (fetch, ()) if cancelling else _cancel(fetch, RequestState.CANCELLED, "cancelled by the caller")
        case DeadlinePassed(reason):
            return (fetch, ()) if cancelling else _cancel(fetch, RequestState.TIMED_OUT, reason)
        case Stalled(reason):
            if cancelling:
                return fetch, _LATE
            # What is in flight may land at any time: only the peer's answer to the Cancel, or its Fail, says it cannot.
            return _cancel(msgspec.structs.replace(fetch, started=True), RequestState.STALLED, reason)
        case Written():
            if fetch.written:
                return fetch, _LATE
            # It may overtake what is still on its way here.
            return msgspec.structs.replace(fetch, written=True, started=True), (FetchEffect.START_COUNT_TIMER,)
        case CountExpired(reason):
            if cancelling:
                return _end(fetch, None, f"{fetch.reason}; {reason}", clean=False)
            return _end(fetch, RequestState.STALLED, reason, clean=False)
        case Closing():
            return (fetch, ()) if cancelling else _cancel(fetch, RequestState.CLOSED, "closed by the caller")
        case CancelExpired():
            if cancelling:
                reason = f"{fetch.reason}; the peer did not confirm the cancel in time"
                return _end(fetch, None, reason, clean=_left_quiet(fetch))
            if fetch.peer_quiescent is not None:
                return _end(fetch, RequestState.PEER_LOST, "peer closed", clean=_left_quiet(fetch))
            return fetch, ()
        case EngineClosed():
            fetch = msgspec.structs.replace(fetch, tainted=False)
            return _end(fetch, RequestState.CLOSED, "the engine was closed", clean=True)
        case PeerLost(reason, fenced):
            return _end(fetch, RequestState.PEER_LOST, reason, clean=fenced or _left_quiet(fetch))
        case PeerLeft(quiescent):
            if fetch.peer_quiescent is not None:
                return fetch, _LATE
            fetch = msgspec.structs.replace(fetch, peer_quiescent=quiescent)
            if cancelling:
                # Its confirm may be lost with it, but a quiescent Goodbye proves as much.
                return _end(fetch, None, fetch.reason, clean=True) if _left_quiet(fetch) else (fetch, ())
            # The Fail that explains this, or the last counters, may be a moment behind.
            return fetch, (FetchEffect.START_CANCEL_TIMER,)


def _left_quiet(fetch: Fetch) -> bool:
    """Whether the peer has said goodbye, and that proves that nothing can land."""
    return bool(fetch.peer_quiescent) and not fetch.written


def _cancel(fetch: Fetch, cause: RequestState, reason: str) -> FetchResult:
    fetch = msgspec.structs.replace(fetch, phase=RequestState.CANCELLING, cause=cause, reason=reason)
    if _left_quiet(fetch):
        return _end(fetch, None, reason, clean=True)
    return fetch, (FetchEffect.SEND_CANCEL, FetchEffect.START_CANCEL_TIMER)


def _end(fetch: Fetch, phase: RequestState | None, reason: str, *, clean: bool) -> FetchResult:
    phase = fetch.cause if phase is None else phase
    assert phase is not None
    clean = clean and not fetch.tainted
    return msgspec.structs.replace(fetch, phase=phase, reason=reason, pages_clean=clean), (FetchEffect.END,)
