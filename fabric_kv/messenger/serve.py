"""What a request may do next on the prefill side, as a pure function.

>>> serve, effects = serve_step(Serve(), Accepted())         # effects: send an Accept
>>> serve, effects = serve_step(serve, Retired(error="the connection is gone", may_land=True))

Whatever ends a request, the end waits until nothing that was posted for it is in flight; it comes exactly once.
"""

from __future__ import annotations

import enum

import msgspec

from .state import (
    Accepted,
    AllPlanned,
    CancelAsked,
    Closing,
    DeadlinePassed,
    FailAsked,
    PeerLost,
    Planned,
    Posted,
    PostFailed,
    Refused,
    Retired,
    ServeState,
    Stalled,
)

__all__ = ["Serve", "ServeEffect", "ServeEvent", "serve_step"]


class ServeEffect(enum.Enum):
    """What the owner of the machine has to do, in this order."""

    SEND_ACCEPT = enum.auto()
    STOP_POSTING = enum.auto()
    TELL_WRITTEN = enum.auto()  # some time soon; a Goodbye that the end brings about comes after it
    SEND_STALLED = enum.auto()
    END = enum.auto()
    SEND_REJECT = enum.auto()
    SEND_FAIL = enum.auto()
    SEND_CONFIRM = enum.auto()


class Serve(msgspec.Struct, frozen=True):
    """One request as the prefill side sees it.

    Attributes
    ----------
    planned, posted, retired : int
        Submissions prepared, taken by the engine, and ended; posted - retired are in flight.
    all_planned : bool
        Nothing will be prepared any more.
    pages_clean : bool
        No operation ended with an unknown outcome.
    reachable, confirm_owed : bool
        Whether the peer still hears us; whether it asked for a cancel.
    stalled : str or None
        Why nothing is retired; the peer has been told.
    """

    phase: ServeState = ServeState.OFFERED
    planned: int = 0
    posted: int = 0
    retired: int = 0
    all_planned: bool = False
    pages_clean: bool = True
    reachable: bool = True
    confirm_owed: bool = False
    stalled: str | None = None
    cause: ServeState | None = None
    reason: str = ""
    reject_kind: str = "rejected"

    @property
    def in_flight(self) -> int:
        """Submissions that the engine has taken and not retired."""
        return self.posted - self.retired

    @property
    def quiet(self) -> bool:
        """Whether all that was prepared has been posted and is retired."""
        return self.retired == self.planned

    @property
    def may_post(self) -> bool:
        """Whether anything may still be posted."""
        return self.phase <= ServeState.SERVING


ServeEvent = (
    Accepted
    | Refused
    | FailAsked
    | Planned
    | AllPlanned
    | Posted
    | PostFailed
    | Retired
    | CancelAsked
    | DeadlinePassed
    | PeerLost
    | Stalled
    | Closing
)
ServeResult = tuple[Serve, tuple[ServeEffect, ...]]


def serve_step(serve: Serve, event: ServeEvent) -> ServeResult:
    """The prefill side's next state, and what has to be done about it.

    Notes
    -----
    Whatever ends a request, the end waits until its posted submissions are retired. Callers ask ``may_post`` before
    they post.
    """
    if serve.phase.final:
        # Nothing is in flight here, so a repeated Cancel can be answered again.
        confirm = isinstance(event, CancelAsked) and serve.reachable
        return serve, (ServeEffect.SEND_CONFIRM,) if confirm else ()
    replace = msgspec.structs.replace
    match event:
        case Accepted():
            if serve.phase is not ServeState.OFFERED:
                return serve, ()
            serve, effects = _settle(replace(serve, phase=ServeState.SERVING))
            return serve, (ServeEffect.SEND_ACCEPT, *effects)
        case Refused(reason, kind):
            if serve.phase is ServeState.OFFERED and not serve.posted:
                end = (ServeEffect.END, ServeEffect.SEND_REJECT) if serve.reachable else (ServeEffect.END,)
                return replace(serve, phase=ServeState.REJECTED, reason=reason, reject_kind=kind), end
            # Refused, yet posting has begun: "nothing was written" would be untrue.
            return _stop(serve, ServeState.FAILED, reason)
        case Planned(count):
            return replace(serve, planned=serve.planned + count), ()
        case AllPlanned():
            return _settle(replace(serve, all_planned=True))
        case Posted():
            return replace(serve, posted=serve.posted + 1), ()
        case PostFailed(reason):
            return _stop(serve, ServeState.FAILED, reason)
        case Retired(error, may_land):
            serve = replace(serve, retired=serve.retired + 1, pages_clean=serve.pages_clean and not may_land)
            return _settle(serve) if error is None else _stop(serve, ServeState.FAILED, error)
        case FailAsked(reason):
            return _stop(serve, ServeState.FAILED, reason)
        case DeadlinePassed(reason):
            return _stop(serve, ServeState.TIMED_OUT, reason)
        case CancelAsked():
            return _stop(replace(serve, confirm_owed=True), ServeState.CANCELLED, "cancelled by the decode side")
        case PeerLost(reason):
            return _stop(replace(serve, reachable=False), ServeState.PEER_LOST, reason)
        case Stalled(reason):
            if not serve.in_flight or serve.stalled is not None:
                return serve, ()  # It was retired meanwhile, or has been told.
            serve, effects = _stop(replace(serve, stalled=reason), ServeState.STALLED, reason)
            # Fail and CancelConfirm wait until all is retired, which may be never: decode hears now why.
            return serve, (*effects, ServeEffect.SEND_STALLED) if serve.reachable else effects
        case Closing():
            return _stop(serve, ServeState.CLOSED, "the prefill side is closing")


def _stop(serve: Serve, cause: ServeState, reason: str) -> ServeResult:
    if serve.phase is ServeState.STOPPING:
        return _settle(serve)  # The first cause stands.
    serve, effects = _settle(msgspec.structs.replace(serve, phase=ServeState.STOPPING, cause=cause, reason=reason))
    return serve, (ServeEffect.STOP_POSTING, *effects)


def _settle(serve: Serve) -> ServeResult:
    """End the request if nothing of it is in flight and nothing more will be."""
    if serve.in_flight:
        return serve, ()
    replace = msgspec.structs.replace
    if serve.phase is ServeState.STOPPING:
        assert serve.cause is not None
        effects = [ServeEffect.END]
        if serve.reachable and serve.cause is not ServeState.CANCELLED:
            effects.append(ServeEffect.SEND_FAIL)
        if serve.reachable and serve.confirm_owed:
            effects.append(ServeEffect.SEND_CONFIRM)
        return replace(serve, phase=serve.cause), tuple(effects)
    if serve.phase is ServeState.SERVING and serve.all_planned and serve.posted == serve.planned:
        # Decode knows better, unless something has been lost on the way: it then knows that it waits for nothing.
        end = (ServeEffect.TELL_WRITTEN, ServeEffect.END) if serve.reachable else (ServeEffect.END,)
        return replace(serve, phase=ServeState.RELEASED), end
    return serve, ()
