"""Handshakes, and peers that lie, repeat themselves, or send what nobody asked for."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric_kv.config import Admission, EngineOptions
from fabric_kv.errors import (
    ClosedError,
    ConfigError,
    PeerUnreachableError,
    PlanError,
    ProtocolError,
    TransferError,
    WouldBlockError,
)
from fabric_kv.messenger import Chunk, DecodeMessenger, PrefillMessenger, TailPool, base, prefill_sessions, wire
from fabric_kv.messenger.actor import ManualActor
from fabric_kv.messenger.peers import Link
from fabric_kv.regions import CounterToken, EngineAddress
from fabric_kv.sharding import units
from fabric_kv.testing import MemoryFabric

from .messenger_sim import BOUNDS, CANARY, LAYERS, SPOILT, TAIL, Sim, ToyScheduler, make_cache


def another_decode(sim, *, tails=True, heads=3, layers=2, page_tokens=4):
    """A second decode engine, for handshakes that go another way."""
    engine = sim.fabric.engine()
    spec, arrays = make_cache(1, 8, page_tokens, CANARY, heads=heads, layers=layers)
    fields = TAIL if tails is True else tails
    pool = TailPool(engine, fields, num_slots=2) if fields else None
    actor = ManualActor("other", sim.clock)
    sim.actors.append(actor)
    return DecodeMessenger(engine, spec, [[engine.register(array)] for array in arrays], pool, BOUNDS, actor=actor)


def connect(sim, messenger, address=None, bound=BOUNDS.handshake_s):
    future = messenger._begin_connect(sim.prefill_engine.address if address is None else address, bound)
    sim.run(future.done)
    return future.result(0)


def test_connect_is_idempotent_and_shared(seed):
    sim = Sim(seed, connect=False)
    futures = [sim.decode._begin_connect(sim.prefill_engine.address, 1.0) for _ in range(3)]
    sim.run(lambda: all(future.done() for future in futures))
    peers = {id(future.result(0)) for future in futures}
    assert len(peers) == 1
    assert sim.connect() is futures[0].result(0)
    assert len(sim.prefill.state()["peers"]) == 1
    fresh = {"alive": True, "degraded": None, "session": sim.connect()._session, "requests": 0}
    assert sim.decode.state()["peers"] == {sim.prefill_engine.epoch.hex(): fresh}


@pytest.mark.parametrize("trouble", ["silence", "error", "refusal"])
def test_nics_that_cannot_be_connected_beforehand_do_not_keep_peers_apart(seed, trouble, caplog):
    """The first write tries again; connect() must not fail for it, nor wait for ever."""
    sim = Sim(seed, connect=False)
    engine = sim.prefill_engine

    def connect_rails(peer, dst, *, group=0):
        if trouble == "refusal":
            raise WouldBlockError("no room")
        transfer = engine._open_transfer(peer, 0)
        if trouble == "error":
            sim.fabric.call_soon(lambda: transfer._fail(TransferError("the cable is out")))
        return transfer

    engine.connect_rails = connect_rails
    sim.peer = sim.connect()
    assert sim.clock[0] == (sim.bounds.connect_rails_s if trouble == "silence" else 0.0)
    assert any("beforehand" in record.message or "the cable is out" in record.message for record in caplog.records)
    still_works(sim)


@pytest.mark.parametrize("times", [1, 2])
def test_a_hello_that_is_lost_is_said_once_more(seed, times):
    """It may have gone by a connection to an earlier session, which nobody had looked at since."""
    sim = Sim(seed, connect=False)
    engine = sim.decode_engine
    send, lost = engine.send, []

    def lose(peer, payload):
        if len(lost) == times:
            return send(peer, payload)
        lost.append(engine._open_transfer(peer, len(payload)))
        sim.fabric.call_soon(lambda: lost[-1]._fail(TransferError("flushed")))
        return lost[-1]

    engine.send = lose
    if times == 1:
        sim.peer = sim.connect()
        assert sim.clock[0] == 0.0
        still_works(sim)
    else:
        with pytest.raises(PeerUnreachableError, match="flushed"):
            sim.connect()
        assert sim.decode.state()["peers"] == {}
        sim.peer = sim.connect()
        still_works(sim)


def test_a_peer_that_is_lost_while_nics_connect_is_not_answered(seed):
    sim = Sim(seed, connect=False)
    engine, transfers = sim.prefill_engine, []
    engine.connect_rails = lambda peer, dst, *, group=0: (
        transfers.append(engine._open_transfer(peer, 0)) or transfers[-1]
    )
    future = sim.decode._begin_connect(engine.address, 1.0)
    sim.run(lambda: transfers)
    sim.prefill._on_peer_lost(sim.decode_engine.epoch, "test")
    for transfer in transfers:
        transfer._fail(TransferError("gone"))
    sim.run(future.done)
    with pytest.raises(PeerUnreachableError, match="did not answer"):
        future.result(0)
    assert sim.prefill.state()["peers"] == {}


def test_caches_of_absurdly_many_pieces_are_refused(seed, monkeypatch):
    monkeypatch.setattr(units, "MAX_PIECES", LAYERS)
    Sim(seed)
    with pytest.raises(PlanError, match=f"cut into more than {LAYERS} pieces"):
        Sim(seed, prefill_tp=3)


def test_layouts_that_do_not_fit_are_refused_field_by_field(seed):
    sim = Sim(seed)
    other = another_decode(sim, heads=2)
    with pytest.raises(PlanError, match=r"K\.heads +3 +2 +<- differs"):
        connect(sim, other)
    sim.settle()
    assert sim.prefill.state()["counts"]["refused_hellos"] == 1
    assert len(sim.prefill.state()["peers"]) == 1
    assert other.state()["peers"] == {}
    assert other._engine.monitored == set()
    assert sim.prefill_engine.monitored == {sim.decode_engine.epoch}
    fetch = sim.submit(9)
    sim.run(fetch.handle.done)
    assert fetch.result


def test_tails_that_do_not_fit_are_refused(seed):
    sim = Sim(seed)
    differences = r"'hidden': prefill <f4 \(3,\), decode <f4 \(2, 2\); tail 'logits': prefill none, decode <f4 \(5,\)"
    with pytest.raises(PlanError, match=r"tail 'drafts': prefill <i2 \(2, 2\), decode none; tail " + differences):
        connect(sim, another_decode(sim, tails={"hidden": ("float32", (2, 2)), "logits": ("float32", (5,))}))
    bare = Sim(seed, tails=False)
    with pytest.raises(PlanError, match=r"tail 'hidden': prefill none, decode <f4 \(3,\)"):
        connect(bare, another_decode(bare))


def test_decode_may_do_without_tails(seed):
    sim = Sim(seed)
    sim.decode, sim.decode_tails = another_decode(sim, tails=False), None
    sim.dst, sim.dst_free = [sim.decode._regions[0][0]._owner], list(range(8))
    sim.peer = sim.connect()
    fetch = sim.submit(9)
    sim.run(fetch.handle.done)
    assert fetch.result.tail is None


@pytest.mark.parametrize("address", [b"", b"garbage", bytes(100)])
def test_wrong_address_bytes_are_refused_at_once(address):
    with pytest.raises(ProtocolError, match="engine address"):
        Sim(0, connect=False).decode.connect(address)


def test_the_own_address_is_refused():
    sim = Sim(0, connect=False)
    with pytest.raises(ConfigError, match="this engine's own"):
        sim.decode.connect(sim.decode_engine.address)


def test_nobody_there_is_bounded(seed):
    sim = Sim(seed, connect=False)
    sim.fabric.drop_messages = 1.0
    with pytest.raises(PeerUnreachableError, match="did not answer within 1 s"):
        sim.connect()
    assert sim.clock[0] == pytest.approx(1.0)
    assert sim.decode.state()["peers"] == {}
    sim.fabric.drop_messages = 0.0
    assert sim.connect().alive


def test_each_connect_has_its_own_bound(seed):
    sim = Sim(seed, connect=False)
    sim.fabric.drop_messages = 1.0
    futures = [sim.decode._begin_connect(sim.prefill_engine.address, bound) for bound in (0.5, 2.0, 1.0)]
    ends = []
    for future in futures:
        future.add_done_callback(lambda _: ends.append(sim.clock[0]))
    sim.run(lambda: all(future.done() for future in futures))
    assert ends == pytest.approx([0.5, 1.0, 2.0])
    assert sim.decode.state()["peers"] == {}


def test_an_unknown_engine_is_unreachable_soon(seed):
    sim = Sim(seed, connect=False)
    nobody = EngineAddress(bytes(16), ((b"nowhere",),)).to_bytes()
    with pytest.raises(PeerUnreachableError, match="a control message to it was lost"):
        sim.connect(nobody)
    assert sim.clock[0] == 0.0


def test_a_closing_prefill_side_refuses_peers_and_requests(seed):
    sim = Sim(seed)
    sim.scheduler.pause = True
    sim.submit(8)
    sim.settle()
    sim.prefill._begin_close(100.0)
    late = sim.submit(8)
    sim.run(late.handle.done)
    assert "the prefill side is closing" in str(late.error)
    with pytest.raises(PeerUnreachableError, match="closing"):
        connect(sim, another_decode(sim))


def test_a_closing_decode_side_does_not_connect(seed):
    sim = Sim(seed, connect=False)
    sim.decode._begin_close(0.0)
    with pytest.raises(ClosedError):
        sim.connect()


def test_a_peer_of_another_version_is_told(seed, monkeypatch):
    sim = Sim(seed, connect=False)
    other = another_decode(sim)
    encode = wire.encode

    def encode_a_newer_hello(message):
        frame = bytearray(encode(message))
        frame[3] = wire.PROTOCOL_VERSION + isinstance(message, wire.Hello)
        return bytes(frame)

    monkeypatch.setattr(wire, "encode", encode_a_newer_hello)
    with pytest.raises(PlanError, match="the peer speaks messenger protocol 5, this side speaks 4"):
        connect(sim, other)
    monkeypatch.setattr(wire, "encode", lambda message: encode(message)[:3] + b"\x07" + encode(message)[4:])
    with pytest.raises(ProtocolError, match="the peer speaks messenger protocol 7, this side speaks 4"):
        connect(sim, another_decode(sim))


def test_messages_wait_for_a_full_engine_and_all_arrive(seed):
    fabric = MemoryFabric(seed)
    sender, receiver = fabric.engine(EngineOptions(max_transfers=1)), fabric.engine()
    got, idle = [], []
    receiver.on_message(lambda epoch, payload: got.append(wire.decode(payload).generation))
    actor = ManualActor()
    link = Link(actor, sender, sender.add_peer(receiver.address), on_broken=pytest.fail, on_idle=idle.append)
    for number in range(5):
        link.send(wire.Cancel(number))
    assert not link.idle
    while fabric.step() or actor.run():
        pass
    assert sorted(got) == list(range(5))
    assert link.idle
    assert idle


class Liar:
    """Speaks to a prefill messenger without being one of ours."""

    def __init__(self, sim):
        self.sim = sim
        self.engine = sim.fabric.engine()
        self.heard = []
        self.engine.on_message(lambda epoch, payload: self.heard.append(wire.decode(payload)))
        self.spec, arrays = make_cache(1, 8, 4, CANARY)
        self.region = self.engine.register(arrays[0])
        self.tails = TailPool(self.engine, TAIL, num_slots=2)
        self.counter = None

    def say(self, message):
        self.say_bytes(message if isinstance(message, bytes) else wire.encode(message))

    def say_bytes(self, frame):
        self.sim.prefill_engine.take_message(self.engine.epoch, frame)
        self.sim.settle()

    def hello(self, **changes):
        fields = {
            "session": 10,
            "address": self.engine.address,
            "peer_epoch": self.sim.prefill_engine.epoch,
            "spec": self.spec.to_bytes(),
            "regions": [[self.region.remote.to_bytes()]],
            "tail": self.tails.geometry(self.tails.region.remote),
        }
        self.say(wire.Hello(**{**fields, **changes}))
        return self.heard[-1] if self.heard else None

    def request(self, **changes):
        unit = self.sim.peer.plan.unit_bytes
        fields = {
            "request_id": "lie",
            "generation": 10,
            "tokens": wire.pack_ints(range(8)),
            "pages": [wire.pack_ints([3, 5])],
            "source_set": 0,
            "cached": 0,
            "counters": [CounterToken(0, 0, unit, 0)],
            "tail_slot": 1,
            "tail_counter": CounterToken(0, 0, unit, 1),
            "deadline_s": 5.0,
        }
        self.say(wire.Request(**{**fields, **changes}))
        return self.heard[-1] if self.heard else None


@pytest.fixture
def sim(seed):
    return Sim(seed)


@pytest.fixture
def liar(sim):
    return Liar(sim)


def still_works(sim):
    fetch = sim.submit(9)
    sim.run(fetch.handle.done)
    assert fetch.result
    sim.check_all()


def test_a_hello_for_an_earlier_life_is_refused(sim, liar):
    reply = liar.hello(peer_epoch=b"x" * 16)
    assert (reply.refusal, reply.reason) == ("other_incarnation", "the address is that of an engine which is no more")
    assert sim.prefill_engine.monitored == {sim.decode_engine.epoch}


def test_a_hello_for_an_earlier_life_leaves_the_session_alone(sim, liar):
    """A decode engine that tries an old address of ours goes on with the requests that it has here."""
    assert liar.hello().refusal is None
    assert isinstance(liar.request(), wire.Accept)
    reply = liar.hello(peer_epoch=b"x" * 16, session=11)
    assert (reply.refusal, reply.session) == ("other_incarnation", 11)
    assert len(sim.prefill.state()["peers"]) == 2
    assert isinstance(liar.request(generation=11, request_id="another"), wire.Accept)


def test_who_has_the_address_now_refuses_for_the_engine_that_had_it(sim):
    gone = sim.fabric.engine()
    future = sim.decode._begin_connect(gone.address, 1.0)
    sim.settle()
    (asked,) = (peer for peer in sim.decode._peers.values() if peer.epoch == gone.epoch)
    for session in asked._session + 1, asked._session, asked._session:
        refusal = wire.HelloReply(session, "other_incarnation", "the address is that of an engine which is no more")
        sim.decode_engine.take_message(sim.prefill_engine.epoch, wire.encode(refusal))
        sim.settle()
    with pytest.raises(PeerUnreachableError, match="is no more"):
        future.result(0)
    assert sim.decode.state()["counts"]["late"] == 2
    still_works(sim)


def test_an_address_of_someone_else_is_not_used(sim, liar):
    assert liar.hello(address=sim.decode_engine.address) is None
    assert liar.hello(address=b"rubbish") is None
    assert sim.prefill.state()["counts"]["malformed"] == 2
    still_works(sim)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"spec": b"rubbish"}, "not a cache spec"),
        ({"regions": [[b"rubbish"]]}, "remote region"),
        ({"regions": [[], []]}, "2 ranks: its spec has 1"),
        ({"regions": [[]]}, "0 regions, its spec has 1"),
        ({"layer_ends": [1]}, "do not divide 2 layers"),
        ({"layer_ends": [1, 1, 2]}, "do not divide 2 layers"),
        ({"layer_ends": [0, 2]}, "do not divide 2 layers"),
        ({"layer_ends": [1, 3]}, "do not divide 2 layers"),
        ({"tail": wire.TailGeometry(b"rubbish", 2, 128, [wire.TailField("a", "<f4", [3])])}, "remote region"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_hello_that_does_not_add_up_is_refused(sim, liar, changes, reason):
    reply = liar.hello(**changes)
    assert reply.refusal == "incompatible"
    assert reason in reply.reason
    still_works(sim)


def test_regions_must_be_the_peers_own_and_large_enough(sim, liar):
    foreign = sim.decode._regions[0][0].remote
    assert "belongs to engine" in liar.hello(regions=[[foreign.to_bytes()]]).reason
    small = msgspec.structs.replace(liar.region.remote, nbytes=64, segment_ends=(64,))
    assert "64 bytes, its spec needs" in liar.hello(regions=[[small.to_bytes()]], session=11).reason
    tail = msgspec.structs.replace(liar.tails.geometry(liar.tails.region.remote), num_slots=1000)
    assert "its slots need" in liar.hello(tail=tail, session=12).reason


def test_a_repeated_hello_changes_nothing(sim, liar):
    sim.scheduler.pause = True
    assert liar.hello().refusal is None
    assert liar.request(generation=10) == wire.Accept(10)
    liar.hello()
    liar.hello(session=9)
    assert sorted(session["requests"] for session in sim.prefill.state()["peers"].values()) == [0, 1]
    assert sim.prefill.state()["counts"]["late"] == 2


def test_strangers_are_counted_and_dropped(sim, liar):
    for message in (wire.Cancel(1), wire.Goodbye(1, True), wire.Accept(3)):
        liar.say(message)
    liar.request()
    assert sim.prefill.state()["counts"]["unknown_peer"] == 4
    assert not liar.heard
    still_works(sim)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokens": wire.pack_ints([])}, "no tokens"),
        ({"tokens": wire.Ints(33, b"")}, "33-bit"),
        ({"pages": [wire.pack_ints([3])]}, "1 pages were given, 8 tokens need 2"),
        ({"pages": [wire.pack_ints([3, 8])]}, "page 8 is out of range, the decode side has 8 pages"),
        ({"pages": [wire.pack_ints([3, 2**62])]}, "out of range"),
        ({"pages": [wire.Ints(64, b"\xff" * 16)]}, "holds -1"),
        ({"pages": [wire.pack_ints([3, 3])]}, "listed twice"),
        ({"pages": [wire.pack_ints([3, 5])] * 2}, "2 page lists"),
        ({"source_set": 1}, "source_set=1: there are 1"),
        ({"cached": 3}, "no multiple"),
        ({"cached": 12}, "out of range"),
        ({"counters": [None]}, "decode rank 0 must have a counter for layer group 0"),
        ({"counters": [CounterToken(0, 0, 1, 0)]}, "a unit of 1 bytes: the plan says"),
        ({"counters": [CounterToken(0, 0, 1, 0)] * 2}, "2 counters for 1 decode ranks and 1 layer groups"),
        ({"tail_slot": 2}, "tail slot 2 is out of range: there are 2"),
        ({"tail_slot": None}, "a tail slot and its counter must be named"),
        ({"tail_counter": None}, "a tail slot and its counter must be named"),
        ({"tail_counter": CounterToken(0, 0, 1, 0)}, "a unit of 1 bytes: the plan says"),
        ({"dp": 1}, "dp=1 is out of range: the decode side has 1 data-parallel replicas"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_requests_that_cannot_be_are_rejected_with_value_and_limit(sim, liar, changes, reason):
    liar.hello()
    answer = liar.request(**changes)
    assert isinstance(answer, wire.Reject)
    assert reason in answer.reason
    assert not sim.scheduler.offered
    still_works(sim)


def test_numbers_of_a_session_only_grow(sim, liar):
    """Or the same submission would come again while the first one's writes are in flight."""
    liar.hello(session=10)
    sim.scheduler.pause = True
    assert liar.request(generation=11) == wire.Accept(11)
    sim.fabric.hold_writes = True
    (key,) = sim.scheduler.jobs
    pages = sim.scheduler.jobs[key].pages
    step = sim.prefill.begin_step([Chunk(key, 0, 8, [pages], final=True)])
    for layer in range(LAYERS):
        sim.prefill.layer_done(step, layer)
    liar.hello(session=11)
    assert sim.prefill.state()["counts"]["late"] == 1
    # A session that was lost is forgotten, its writes are not.
    sim.prefill._on_peer_lost(liar.engine.epoch, "test")
    liar.hello(session=11)
    answer = liar.request(generation=11)
    assert answer.reason == "the same submission of an earlier session has not ended yet"
    sim.fabric.hold_writes = False
    sim.settle()
    assert [failed for failed, _ in sim.scheduler.failed] == [key]
    assert len(sim.scheduler.offered) == 1
    sim.scheduler.pause = False
    still_works(sim)


def test_a_repeated_request_is_served_once(sim, liar):
    liar.hello()
    sim.scheduler.pause = True
    assert liar.request() == wire.Accept(10)
    liar.request()
    liar.request(request_id="another name")
    assert len(sim.scheduler.offered) == 1
    assert sim.prefill.state()["counts"]["late"] == 2


def test_a_cancel_that_overtakes_its_request_stops_it_for_good(sim, liar):
    liar.hello()
    liar.say(wire.Cancel(10))
    assert liar.heard[-1] == wire.CancelConfirm(10, True)
    liar.request()
    assert not sim.scheduler.offered
    liar.say(wire.Cancel(10))
    assert liar.heard[-1] == wire.CancelConfirm(10, True)


def test_a_late_cancel_is_told_what_the_fail_said(sim, liar):
    """Fail and CancelConfirm may overtake each other: the second must not claim more than the first."""
    liar.hello()
    sim.fabric.fail_writes = 1
    liar.request()
    fail = next(message for message in liar.heard if isinstance(message, wire.Fail))
    assert not fail.pages_clean
    liar.say(wire.Cancel(10))
    assert liar.heard[-1] == wire.CancelConfirm(10, False)


def test_numbers_outside_the_session_get_no_answer(sim, liar):
    liar.hello()
    heard = len(liar.heard)
    for generation in (0, 9, 10 + 65536, 2**63 - 1):
        liar.say(wire.Cancel(generation))
        liar.request(generation=generation)
    assert len(liar.heard) == heard
    assert sim.prefill.state()["counts"]["late"] == 8


def test_a_peer_that_vanishes_fails_only_its_own_request(sim, liar):
    liar.hello()
    sim.scheduler.pause = True
    liar.request()
    sim.fabric.engines.pop(liar.engine.epoch)
    sim.scheduler.pause = False
    sim.run(lambda: sim.scheduler.failed)
    assert "the peer is gone" in str(sim.scheduler.failed[0][1])
    still_works(sim)


def test_a_write_that_the_engine_refuses_fails_only_its_request(sim, liar):
    """Nothing of it was posted, so the pages are clean."""
    liar.hello()
    sim.scheduler.pause = True
    liar.request()
    session = sim.prefill._sessions[liar.engine.epoch]
    session.regions[0][0] = msgspec.structs.replace(session.regions[0][0], nbytes=8, segment_ends=(8,))
    sim.scheduler.pause = False
    sim.settle()
    assert liar.heard[-1] == wire.Fail(10, liar.heard[-1].reason, pages_clean=True)
    assert "leave their regions" in liar.heard[-1].reason
    still_works(sim)


@given(st.lists(st.one_of(st.binary(max_size=60), st.binary(max_size=60).map(lambda b: b"FKV\x03" + b)), max_size=5))
@settings(max_examples=30)
def test_random_bytes_change_nothing(frames):
    sim = Sim(1)
    liar = Liar(sim)
    for frame in frames:
        liar.say_bytes(frame)
        sim.decode_engine.take_message(sim.prefill_engine.epoch, frame)
        sim.decode_engine.take_message(liar.engine.epoch, frame)
    still_works(sim)
    counts = sim.prefill.state()["counts"]
    assert counts.get("malformed", 0) + counts.get("other_version", 0) == len(frames)
    assert sim.prefill_actor.num_errors == sim.decode_actor.num_errors == 0


def test_a_peer_too_many_is_refused_and_told_the_number(seed):
    sim = Sim(seed, admission=Admission(max_peers=1))
    refusal = Liar(sim).hello()
    assert refusal.refusal == "too_many_peers"
    assert "serves 1 decode engines already" in refusal.reason
    still_works(sim)


def test_refusals_that_nobody_reads_are_dropped_with_the_peer(sim, liar, monkeypatch):
    monkeypatch.setattr(prefill_sessions, "MAX_PARTING", 1)
    full = [sim.prefill_engine.send(sim.prefill._sessions[sim.decode_engine.epoch].link.peer, b"") for _ in range(3)]
    sim.prefill_engine.options = EngineOptions(max_transfers=len(full))
    sim.prefill._on_hello(liar.engine.epoch, wire.Hello(5, liar.engine.address, bytes(16), b"", [[]]))
    assert len(sim.prefill._parting) == 1
    sim.prefill._on_hello(b"?" * 16, wire.Hello(5, b"?", bytes(16), b"", [[]]))
    assert sim.prefill.state()["counts"]["dropped_hellos"] == 1
    sim.fabric.kill(liar.engine)
    sim.settle()
    assert not sim.prefill._parting
    assert sim.prefill_engine.monitored == {sim.decode_engine.epoch}


def test_an_old_link_that_breaks_leaves_the_new_session_alone(sim):
    old = sim.prefill._sessions[sim.decode_engine.epoch].link
    sim.decode._on_peer_lost(sim.prefill_engine.epoch, "test")
    sim.peer = sim.connect()
    sim.prefill._on_link_broken(old, "late news")
    still_works(sim)


def test_answers_to_nothing_are_counted(sim):
    for message in (wire.Accept(99), wire.Reject(99, ""), wire.CancelConfirm(99, True), wire.HelloReply(99)):
        sim.decode_engine.take_message(sim.prefill_engine.epoch, wire.encode(message))
    sim.decode_engine.take_message(sim.prefill_engine.epoch, wire.encode(wire.Cancel(1)))
    sim.decode_engine.take_message(b"?" * 16, wire.encode(wire.Accept(1)))
    sim.settle()
    counts = sim.decode.state()["counts"]
    assert (counts["late"], counts["misdirected"], counts["unknown_peer"]) == (4, 1, 1)


def test_a_flood_costs_bounded_memory_and_the_sender_its_session(sim, monkeypatch):
    monkeypatch.setattr(base, "MAX_INBOX_BYTES", 1000)
    for _ in range(100):
        sim.prefill_engine.take_message(sim.decode_engine.epoch, bytes(300))
    sim.fabric.run()
    assert sim.prefill._inbox_bytes <= 1000
    sim.settle()
    assert sim.prefill._inbox_bytes == 0
    assert sim.prefill.state()["peers"] == {}
    sim.decode._on_peer_lost(sim.prefill_engine.epoch, "test")
    sim.peer = sim.connect()
    still_works(sim)


def test_a_tail_of_another_request_is_noticed(sim):
    fetch = sim.submit(4)
    sim.scheduler.pause = True
    sim.settle()
    slot = next(iter(sim.peer._open.values())).tail_slot
    fetch.handle.add_done_callback(lambda handle: None)
    sim.decode_tails.take, take = (lambda slot, header: take(slot, b"\x00" * 64)), sim.decode_tails.take
    sim.scheduler.pause = False
    sim.run(fetch.handle.done)
    assert f"tail slot {slot} holds magic b'FKVT'" in str(fetch.error)
    assert fetch.error.pages_clean


def test_regions_that_do_not_match_the_spec_are_refused_at_construction():
    sim = Sim(0, connect=False)
    spec, arrays = make_cache(3, 8, 4, SPOILT)
    engine = sim.fabric.engine()
    with pytest.raises(ConfigError, match="this side gave regions for 1 ranks: its spec has 3"):
        PrefillMessenger(engine, spec, [[engine.register(arrays[0])]], ToyScheduler(sim))
    foreign = [[sim.prefill_engine.register(array)] for array in arrays]
    with pytest.raises(ConfigError, match="was registered with another engine"):
        DecodeMessenger(engine, spec, foreign)
    with pytest.raises(ConfigError, match="was registered with another engine"):
        DecodeMessenger(engine, spec, [[engine.register(array)] for array in arrays], sim.decode_tails)
    small = engine.register(np.zeros(10, np.uint8))
    with pytest.raises(ConfigError, match="rank 0, region 0: 10 bytes, its spec needs"):
        DecodeMessenger(engine, spec, [[small], [small], [small]])
