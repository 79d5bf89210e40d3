"""Every reachable state of one request: both machines, its writes, and a network that may do anything with messages.

The network is the set of messages ever sent: each may arrive at any time, any number of times, or never. So this covers
all orders, duplications and losses at once, for small requests; test_messenger_state.py draws larger ones by chance.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from fabric_kv.messenger.fetch import Fetch, FetchEffect, fetch_step
from fabric_kv.messenger.serve import Serve, ServeEffect, serve_step
from fabric_kv.messenger.state import (
    Accepted,
    AllPlanned,
    CancelAsked,
    CancelConfirmed,
    CancelExpired,
    CounterFired,
    CountExpired,
    DeadlinePassed,
    FailAsked,
    Failed,
    PeerLeft,
    PeerLost,
    Planned,
    Posted,
    Refused,
    Rejected,
    RequestState,
    Retired,
    ServeState,
    Stalled,
    Written,
)

REQUEST, CANCEL = "request", "cancel"


class World(msgspec.Struct, frozen=True):
    """Sets of writes are bit masks; ``unknown``: retired with an error although they may still land."""

    fetch: Fetch
    num_writes: int
    serve: Serve | None = None
    seen: bool = False
    ended_clean: bool = True
    left: bool = False
    planned: int = 0
    posted: int = 0
    flying: int = 0
    landed: int = 0
    unknown: int = 0
    sent: frozenset = frozenset([REQUEST])
    fetch_ends: int = 0
    serve_ends: int = 0


def replace(world: World, **changes: object) -> World:
    return msgspec.structs.replace(world, **changes)


def decode(world: World, event: object) -> World:
    fetch, effects = fetch_step(world.fetch, event)
    if world.fetch.phase.final:
        assert fetch == world.fetch, "a final state changed"
    sent = world.sent | {CANCEL} if FetchEffect.SEND_CANCEL in effects else world.sent
    return replace(world, fetch=fetch, sent=sent, fetch_ends=world.fetch_ends + effects.count(FetchEffect.END))


def prefill(world: World, event: object) -> World:
    assert world.serve is not None
    serve, effects = serve_step(world.serve, event)
    if world.serve.phase.final:
        assert serve == world.serve, "a final state changed"
    sent = set(world.sent)
    for effect in effects:
        if effect is ServeEffect.SEND_ACCEPT:
            sent.add(Accepted())
        elif effect is ServeEffect.SEND_REJECT:
            sent.add(Rejected("no"))
        elif effect is ServeEffect.SEND_FAIL:
            sent.add(Failed("failed", serve.pages_clean))
        elif effect is ServeEffect.SEND_CONFIRM:
            sent.add(CancelConfirmed(serve.pages_clean))
        elif effect is ServeEffect.SEND_STALLED:
            assert world.flying, "called stalled with nothing in flight"
            sent.add(Stalled("stuck"))
        elif effect is ServeEffect.TELL_WRITTEN:
            sent.add(Written())
    clean = serve.pages_clean if ServeEffect.END in effects else world.ended_clean
    ends = world.serve_ends + effects.count(ServeEffect.END)
    return replace(world, serve=serve, sent=frozenset(sent), ended_clean=clean, serve_ends=ends)


def successors(world: World) -> Iterator[World]:
    small = world.num_writes > 1  # Fewer kinds of events, to keep the number of states small.
    enders = (CancelAsked(),) if small else (CancelAsked(), DeadlinePassed("late"), PeerLost("lost"))
    yield from (decode(world, event) for event in enders)
    if world.fetch.phase is RequestState.CANCELLING or world.fetch.peer_quiescent is not None:
        yield decode(world, CancelExpired())
    if world.fetch.written:
        yield decode(world, CountExpired("some are missing"))
    yield from (decode(world, message) for message in world.sent if not isinstance(message, str))
    if not world.left:
        yield from from_messages_to_prefill(world)
        if not small:
            yield goodbye(world)
    if world.serve is not None:
        yield from from_prefill(
            world, world.serve, (FailAsked("why"),) if small else (FailAsked("why"), PeerLost("lost"))
        )
    yield from from_the_fabric(world)


def from_messages_to_prefill(world: World) -> Iterator[World]:
    if not world.seen:
        yield replace(world, seen=True, serve=Serve())
    if CANCEL in world.sent:
        if world.serve is not None and not world.serve.phase.final:
            yield prefill(world, CancelAsked())
        else:
            written = world.serve is not None and world.serve.phase is ServeState.RELEASED
            yield replace(world, seen=True, sent=world.sent | {CancelConfirmed(world.ended_clean, written)})


def goodbye(world: World) -> World:
    if world.serve is not None and world.serve.may_post:
        world = prefill(world, FailAsked("closing"))
    quiescent = not world.flying and not world.unknown
    return replace(world, left=True, sent=world.sent | {PeerLeft(quiescent)})


def from_prefill(world: World, serve: Serve, enders: tuple[object, ...]) -> Iterator[World]:
    for event in (Accepted(), Refused("no"), Stalled("stuck"), *enders):
        yield prefill(world, event)
    if world.planned < world.num_writes and serve.may_post:
        yield prefill(replace(world, planned=world.planned + 1), Planned(1))
    if world.planned == world.num_writes:
        yield prefill(world, AllPlanned())
    if world.posted < world.planned and serve.may_post:
        assert not world.fetch.pages_clean, "posted into pages that were said to be clean"
        yield prefill(replace(world, posted=world.posted + 1, flying=world.flying | 1 << world.posted), Posted())


def from_the_fabric(world: World) -> Iterator[World]:
    for write in range(world.num_writes):
        bit = 1 << write
        if (world.flying | world.unknown) & ~world.landed & bit:
            landed = replace(world, landed=world.landed | bit, unknown=world.unknown & ~bit)
            # One rank per write, so that its counter fires when the write lands.
            yield replace(landed, sent=landed.sent | {CounterFired(write)})
        if world.flying & bit:
            retired = replace(world, flying=world.flying & ~bit)
            if world.landed & bit:
                yield prefill(retired, Retired())
            else:
                yield prefill(retired, Retired("cancelled"))
                yield prefill(replace(retired, unknown=world.unknown | bit), Retired("broken", may_land=True))


def check(world: World) -> None:
    fetch, serve = world.fetch, world.serve
    everything = (1 << world.num_writes) - 1
    assert world.fetch_ends == fetch.phase.final, "decode ended twice, or not at all"
    assert (fetch.pages_clean is not None) == fetch.phase.final
    if fetch.pages_clean:
        assert not world.flying & ~world.landed, "clean, with writes in flight"
        assert not world.unknown, "clean, with writes of unknown outcome"
    if fetch.phase is RequestState.READY:
        assert world.landed == everything, "ready before the last byte"
    if serve is not None:
        assert world.serve_ends == serve.phase.final, "prefill ended twice, or not at all"
        if serve.phase.final:
            assert not world.flying, "source pages handed back while they are read"
        if serve.phase is ServeState.RELEASED:
            assert world.landed == everything


@pytest.mark.parametrize("num_writes", [1, 2])
def test_no_reachable_state_breaks_a_promise(num_writes):
    start = World(Fetch(waiting=(1 << num_writes) - 1), num_writes)
    found, todo = {start}, [start]
    phases = set()
    while todo:
        world = todo.pop()
        check(world)
        phases.add(world.fetch.phase)
        if world.fetch.phase.final and (world.serve is None or world.serve.phase.final) and world.seen:
            continue  # Both machines have ended, and check() has seen that they agree.
        for after in successors(world):
            if after not in found:
                found.add(after)
                todo.append(after)
    missing = {RequestState.CLOSED} | ({RequestState.TIMED_OUT, RequestState.PEER_LOST} if num_writes > 1 else set())
    assert phases == set(RequestState) - missing
    assert len(found) > 10_000  # Otherwise the walk itself is broken.
