"""Both messengers over the in-memory fabric: what arrives, what is handed back, and what is said about it."""

import numpy as np
import pytest

from fabric_kv.config import Admission, EngineOptions
from fabric_kv.errors import (
    ClosedError,
    ConfigError,
    PeerLostError,
    RequestCancelledError,
    RequestFailedError,
    RequestRejectedError,
    RequestTimeoutError,
    SharingError,
    WouldBlockError,
)
from fabric_kv.messenger import Chunk, Reject, Request, RequestKey, RequestState, wire
from fabric_kv.messenger.serving import Serving

from .messenger_sim import LAYERS, Sim


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (3, 1), (1, 3), (3, 3)])
@pytest.mark.parametrize("tails", [True, False], ids=["tail", "no tail"])
def test_every_byte_arrives_in_its_place(seed, prefill_tp, decode_tp, tails):
    sim = Sim(seed, prefill_tp=prefill_tp, decode_tp=decode_tp, tails=tails)
    fetches = [sim.submit(n) for n in (1, 4, 5, 19)]
    sim.run(lambda: all(fetch.handle.done() for fetch in fetches))
    assert [fetch.handle.poll() for fetch in fetches] == [RequestState.READY] * 4
    sim.check_all()
    sim.check_nothing_left()
    assert len(sim.scheduler.released) == 4


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (3, 1), (1, 3)])
def test_layers_that_are_ready_hold_what_they_should(seed, prefill_tp, decode_tp):
    sim = Sim(seed, prefill_tp=prefill_tp, decode_tp=decode_tp, layers_per_group=1)
    fetches = [sim.submit(n) for n in (11, 4, 19)]
    seen = {fetch: [0] for fetch in fetches}
    while not all(fetch.handle.done() for fetch in fetches):
        assert sim.step()
        for fetch in fetches:
            if not fetch.ends:
                seen[fetch].append(fetch.handle.layers_ready())
                fetch.check_pages(layers=seen[fetch][-1], tail=False)
    assert all(fetch.result for fetch in fetches)
    for fetch, counts in seen.items():
        assert counts == sorted(counts)
        assert fetch.handle.layers_ready() == LAYERS
    sim.run(lambda: not sim.scheduler.jobs)
    sim.check_all()
    sim.check_nothing_left()


def test_the_first_layer_is_ready_while_the_next_is_computed(seed):
    sim = Sim(seed, decode_tp=3, layers_per_group=1)
    fetch = sim.submit(8)
    sim.scheduler.pause = True
    sim.run(lambda: sim.scheduler.jobs)
    (job,) = sim.scheduler.jobs.values()
    job.chunk = (0, 8)
    job.step = sim.prefill.begin_step([Chunk(job.request.key, 0, 8, [job.pages], final=True)])
    job.layers_left, job.at = [1], 8
    assert fetch.handle.layers_ready() == 0
    job.write_source(0)
    sim.prefill.layer_done(job.step, 0)
    sim.settle()
    assert fetch.handle.layers_ready() == 1
    assert not fetch.handle.done()
    sim.scheduler.pause = False
    sim.run(fetch.handle.done)
    assert fetch.result
    sim.check_all()
    sim.check_nothing_left()


def test_one_group_of_layers_is_ready_at_once_or_not(seed):
    sim = Sim(seed)
    fetch, seen = sim.submit(20), set()
    while not fetch.handle.done():
        assert sim.step()
        seen.add(fetch.handle.layers_ready())
    assert seen == {0, LAYERS}


def test_no_layer_of_a_request_that_was_never_sent_is_ready(seed):
    sim = Sim(seed, layers_per_group=1)
    fetch = sim.submit(8)
    sim.peer._gone = "lost"
    sim.settle()
    assert fetch.handle.poll() is RequestState.PEER_LOST
    assert fetch.handle.layers_ready() == 0


def test_a_rank_that_is_gone_takes_its_own_replica_along(seed):
    sim = Sim(seed, decode_dp=3)
    sim.decode._regions[2][0]._lost = SharingError("rank 2 is gone")
    pages = [np.array([sim.dst_free.pop()])]
    with pytest.raises(SharingError, match="rank 2 is gone"):
        sim.decode.submit(sim.peer, Request(request_id="r", tokens=[1], pages=pages, dp=2))
    handles = [
        sim.decode.submit(sim.peer, Request(request_id="r", tokens=[1], pages=pages, dp=dp, params=bytes(4)))
        for dp in (0, 1)
    ]
    sim.run(lambda: all(handle.done() for handle in handles))
    assert [handle.poll() for handle in handles] == [RequestState.READY] * 2


def test_a_page_is_written_for_one_request_at_a_time(seed):
    sim = Sim(seed)
    sim.scheduler.pause = True
    fetch = sim.submit(9)
    taken = int(fetch.pages[1])
    other = sim.dst_free[:2]
    wrong = Request(request_id="r", tokens=range(10), pages=[[other[0], other[1], taken]])
    with pytest.raises(ConfigError, match=f"page {taken} is being written for request 'request 0'"):
        sim.decode.submit(sim.peer, wrong)
    # What is only read may be shared: a common prefix.
    shared = Request(request_id="s", tokens=range(8), pages=[[taken, other[0]]], cached_tokens=4, params=bytes(4))
    handle = sim.decode.submit(sim.peer, shared)
    with pytest.raises(ConfigError, match=f"page {other[0]} is being written for request 's'"):
        sim.decode.submit(sim.peer, Request(request_id="r", tokens=range(8), pages=[other]))
    sim.scheduler.pause = False
    sim.run(lambda: fetch.handle.done() and handle.done())
    assert fetch.result
    assert handle.poll() is RequestState.READY
    again = sim.decode.submit(sim.peer, Request(request_id="t", tokens=range(10), pages=wrong.pages, params=bytes(4)))
    sim.run(again.done)
    assert again.poll() is RequestState.READY
    assert not any(owners for groups in sim.decode._claims._owners for owners in groups)


@pytest.mark.parametrize("size", [0, -1])
def test_groups_of_no_layers_are_refused(seed, size):
    with pytest.raises(ConfigError, match=f"layers_per_group={size} is out of range"):
        Sim(seed, layers_per_group=size)


@pytest.mark.parametrize(("prefill_dp", "decode_dp"), [(2, 1), (1, 2), (3, 2)])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 3), (3, 1)])
def test_a_request_lives_on_one_replica_of_each_side(seed, prefill_dp, decode_dp, prefill_tp, decode_tp):
    sim = Sim(seed, prefill_tp=prefill_tp, decode_tp=decode_tp, prefill_dp=prefill_dp, decode_dp=decode_dp)
    for n in (1, 4, 5, 19, 11, 7):
        sim.submit(n)
    sim.run(lambda: all(fetch.handle.done() for fetch in sim.fetches))
    assert all(fetch.result for fetch in sim.fetches)
    sim.run(lambda: not sim.scheduler.jobs)
    sim.check_all()
    sim.check_nothing_left()


def test_replicas_that_do_not_exist_are_refused(seed):
    sim = Sim(seed, prefill_dp=2, decode_dp=2)
    sim.scheduler.pause = True
    with pytest.raises(ConfigError, match="dp=2 is out of range: the decode side has 2 data-parallel replicas"):
        sim.decode.submit(sim.peer, Request(request_id="r", tokens=[1], pages=[[0]], dp=2))
    fetch = sim.submit(8)
    sim.run(lambda: sim.scheduler.jobs)
    (job,) = sim.scheduler.jobs.values()
    key, pages = job.request.key, [job.pages]
    with pytest.raises(ConfigError, match="dp=2 is out of range: there are 2 replicas"):
        sim.prefill.begin_step([Chunk(key, 0, 4, pages, dp=2)])
    two = [Chunk(key, 0, 4, pages, dp=1), Chunk(key, 4, 8, pages, final=True)]
    with pytest.raises(ConfigError, match="dp=0, but the chunks before were computed by replica 1"):
        sim.prefill.begin_step(two)
    sim.scheduler.pause = False
    sim.run(fetch.handle.done)
    assert fetch.result


def test_pages_in_memory_whose_owner_is_gone_are_not_asked_for(seed):
    sim = Sim(seed, decode_tp=3)
    before = sim.submit(5)
    sim.run(before.handle.done)
    sim.decode._regions[2][0]._lost = SharingError("rank 2 is lost", reason="gone")  # as its BufferServer's end does
    with pytest.raises(SharingError, match="rank 2 is lost"):
        sim.submit(5)
    sim.run(lambda: len(sim.scheduler.released) == 1)
    sim.check_nothing_left()


@pytest.mark.parametrize(("src", "dst"), [(4, 8), (8, 4), (4, 6)])
def test_pages_of_other_sizes_are_reassembled(seed, src, dst):
    sim = Sim(seed, prefill_tp=3, src_page_tokens=src, dst_page_tokens=dst)
    sim.submit(21), sim.submit(8)
    sim.run(lambda: all(fetch.handle.done() for fetch in sim.fetches))
    assert all(fetch.result for fetch in sim.fetches)
    sim.check_all()


def test_cached_tokens_are_not_sent(seed):
    sim = Sim(seed)
    fetch = sim.submit(18, cached_tokens=8)
    cached = fetch.pages[:2]
    for array in sim.dst:
        array[:, :, cached] = 7.0
    kept = []
    fetch.before_reset = lambda: kept.extend((array[:, :, cached] == 7.0).all() for array in sim.dst)
    sim.run(fetch.handle.done)
    assert fetch.result
    assert kept == [True]
    sim.check_all()


@pytest.mark.parametrize("fixed_seed", [None, 3682832834], ids=["random", "only-messages-in-flight"])
def test_a_full_engine_delays_and_loses_nothing(seed, fixed_seed):
    """Two transfers at a time: messages and writes queue for them. With the second seed messages had both of them."""
    sim = Sim(fixed_seed or seed, prefill_tp=3, options=EngineOptions(max_transfers=2))
    for n in (9, 17, 3, 12):
        sim.submit(n)
    sim.run(lambda: all(fetch.handle.done() for fetch in sim.fetches))
    assert all(fetch.result for fetch in sim.fetches)
    assert sim.prefill.state()["counts"]["backlogged"] > 0
    sim.check_all()
    sim.check_nothing_left()


def test_more_tails_than_slots_wait_for_one_another(seed):
    sim = Sim(seed)
    sim.scheduler.pause = True
    fetches = [sim.submit(4) for _ in range(6)]
    sim.settle()
    sim.fabric.hold_writes = True
    sim.scheduler.pause = False
    sim.settle()
    assert sim.prefill_tails.num_free == 0
    sim.fabric.hold_writes = False
    sim.run(lambda: all(fetch.handle.done() for fetch in fetches))
    assert all(fetch.result for fetch in fetches)
    sim.check_all()
    sim.check_nothing_left()


def test_a_reject_carries_its_reason_and_nothing_was_written(seed):
    sim = Sim(seed)
    sim.scheduler.refuse = "no room at the inn"
    fetch = sim.submit(8)
    sim.run(fetch.handle.done)
    assert isinstance(fetch.error, RequestRejectedError)
    assert "no room at the inn" in str(fetch.error)
    assert (fetch.error.pages_clean, fetch.error.reason) == (True, "rejected")
    sim.check_all()
    sim.check_nothing_left()
    assert not sim.scheduler.failed


def test_a_program_can_tell_why_a_request_is_rejected(seed):
    sim = Sim(seed)
    sim.scheduler.refuse, answer = "x", sim.scheduler.on_request

    def ask(request):
        answer(request)
        return Reject("no free pages", kind="no_capacity")

    sim.scheduler.on_request = ask
    fetch = sim.submit(8)
    sim.run(fetch.handle.done)
    assert (fetch.error.reason, fetch.error.pages_clean) == ("no_capacity", True)
    wrong = sim.submit(8)
    sim.prefill._sessions[sim.decode_engine.epoch].tail = None  # as if the two had agreed on something else
    sim.run(wrong.handle.done)
    assert (wrong.error.reason, wrong.error.pages_clean) == ("incompatible", True)
    sim.prefill._closing = True
    late = sim.submit(8)
    sim.run(late.handle.done)
    assert (late.error.reason, late.error.pages_clean) == ("closing", True)
    with pytest.raises(ConfigError, match="kind='full' is neither"):
        Reject("x", kind="full")


def test_a_peer_that_lives_and_brings_no_pages_is_degraded(seed):
    sim = Sim(seed)
    assert sim.peer.degraded is None
    sim.scheduler.pause = True
    late = sim.submit(8, deadline_s=3.0)
    sim.run(late.handle.done)
    assert sim.peer.alive
    assert sim.peer.degraded == "timed_out: its deadline of 3 s passed"
    cancelled = sim.submit(8)
    cancelled.handle.cancel()
    sim.run(cancelled.handle.done)
    (peer,) = sim.decode.state()["peers"].values()
    assert peer["degraded"] == sim.peer.degraded
    sim.scheduler.pause = False
    fetch = sim.submit(8)
    sim.run(fetch.handle.done)
    assert sim.peer.degraded is None


def test_all_bounds_are_logged_at_the_start(seed, caplog):
    with caplog.at_level("INFO", logger="fabric_kv.messenger"):
        sim = Sim(seed)
    assert caplog.text.count("started with these bounds") == 2
    for name in (*sim.bounds.__struct_fields__, "heartbeats", "stall_s", "connect_s", "close_s"):
        assert caplog.text.count(f"{name} ") == 2


PAGE_BYTES = 2 * 2 * 4 * 3 * 2 * 4  # layers, K and V, tokens, heads, elements, bytes of each


@pytest.mark.parametrize(
    ("admission", "message"),
    [
        (Admission(max_requests=2), r"2 requests are open already \(max_requests\)"),
        (Admission(max_requests_per_peer=2), r"2 requests of this decode engine are open .*\(max_requests_per_peer\)"),
        (
            Admission(max_bytes=5 * PAGE_BYTES),
            rf"the request has {2 * PAGE_BYTES} bytes, those that are open {4 * PAGE_BYTES}: the limit is"
            rf" {5 * PAGE_BYTES} \(max_bytes\)",
        ),
    ],
    ids=["requests", "requests of a peer", "bytes"],
)
def test_what_is_too_much_is_rejected_before_the_scheduler_sees_it(seed, admission, message):
    sim = Sim(seed, tails=False, admission=admission)
    sim.scheduler.pause = True
    taken = [sim.submit(8), sim.submit(8)]
    sim.run(lambda: len(sim.scheduler.offered) == 2)
    assert sim.prefill.state()["open_bytes"] == 4 * PAGE_BYTES
    refused = sim.submit(8)
    sim.run(refused.handle.done)
    assert isinstance(refused.error, RequestRejectedError)
    assert (refused.error.pages_clean, refused.error.reason) == (True, "no_capacity")
    with pytest.raises(RequestRejectedError, match=message):
        refused.handle.result(0)
    assert len(sim.scheduler.offered) == 2
    sim.scheduler.pause = False
    sim.run(lambda: all(fetch.handle.done() for fetch in taken))
    sim.run(lambda: not sim.scheduler.jobs)
    again = sim.submit(8)
    sim.run(again.handle.done)
    assert again.result
    sim.run(lambda: not sim.scheduler.jobs)
    assert sim.prefill.state()["open_bytes"] == 0
    sim.check_all()
    sim.check_nothing_left()


@pytest.mark.parametrize("name", ["max_requests", "max_requests_per_peer", "max_bytes", "max_peers"])
@pytest.mark.parametrize("value", [0, -1, 2**63])
def test_limits_are_checked(name, value):
    with pytest.raises(ConfigError, match=f"{name}={value} is out of range"):
        Admission(**{name: value})


def test_a_scheduler_that_raises_rejects_and_the_next_request_works(seed):
    sim = Sim(seed)
    sim.scheduler.on_request, kept = None, sim.scheduler.on_request
    fetch = sim.submit(8)
    sim.run(fetch.handle.done)
    assert "the scheduler failed: TypeError" in str(fetch.error)
    sim.scheduler.on_request = kept
    fetch = sim.submit(8)
    sim.run(fetch.handle.done)
    assert fetch.result
    assert sim.prefill.state()["counts"]["callback_errors"] == 1


def test_a_reject_by_exception_is_a_reject(seed):
    sim = Sim(seed, num_pages=6)
    sim.src_free[:] = sim.src_free[:1]
    fetch = sim.submit(8)
    sim.run(fetch.handle.done)
    assert "2 pages are needed, 1 are free" in str(fetch.error)


def test_a_failed_write_is_told_after_its_siblings_have_ended(seed):
    sim = Sim(seed, prefill_tp=3)
    fetch = sim.submit(20)
    sim.fabric.hold_writes = True
    sim.settle()
    sim.fabric.hold_writes = False
    sim.fabric.fail_writes = 1
    while not sim.scheduler.failed:
        assert not fetch.handle.done()
        assert sim.step()
    assert not [write for write in sim.prefill_engine._open.values() if write is not None]
    sim.run(fetch.handle.done)
    if fetch.error is None:
        # The write that "failed" had landed, and every byte was counted before the news of it came: that is ready.
        assert fetch.handle.poll() is RequestState.READY
    else:
        assert isinstance(fetch.error, RequestFailedError)
        assert "an injected error" in str(fetch.error)
        # The outcome of the write that failed is unknown: its bytes may still be on the way.
        assert fetch.error.pages_clean is False
    sim.check_all()
    sim.check_nothing_left()
    assert [type(error) for _, error in sim.scheduler.failed] == [RequestFailedError]


def test_a_request_that_the_scheduler_gives_up_ends_clean(seed):
    sim = Sim(seed)
    fetch = sim.submit(20)
    sim.run(lambda: sim.scheduler.offered)
    sim.run(lambda: sim.scheduler.jobs[sim.scheduler.offered[0]].at > 8)
    sim.scheduler.pause = True
    sim.prefill.fail(sim.scheduler.offered[0], "preempted for good")
    sim.run(fetch.handle.done)
    assert isinstance(fetch.error, RequestFailedError)
    assert "preempted for good" in str(fetch.error)
    assert fetch.error.pages_clean
    sim.check_all()
    sim.check_nothing_left()


@pytest.mark.parametrize("steps", [0, 3, 20, 60, 120])
def test_cancel_at_any_time_hands_back_clean_pages(seed, steps):
    sim = Sim(seed + steps, prefill_tp=3)
    fetch = sim.submit(24)
    for _ in range(steps):
        sim.step()
    fetch.handle.cancel()
    fetch.handle.cancel()
    sim.run(fetch.handle.done)
    if fetch.error is not None:
        assert isinstance(fetch.error, RequestCancelledError)
        assert fetch.error.pages_clean
    sim.check_all()
    sim.check_nothing_left()


def test_a_cancel_stops_what_is_queued_in_the_engine(seed):
    sim = Sim(seed)
    fetch = sim.submit(24)
    sim.fabric.hold_writes = True
    sim.settle()
    writes = [write for write in sim.prefill_engine._open.values() if write is not None]
    assert writes
    fetch.handle.cancel()
    sim.settle()
    assert all(write.cancelled for write in writes)
    assert not fetch.handle.done()
    sim.fabric.hold_writes = False
    sim.run(fetch.handle.done)
    assert fetch.error is None or fetch.error.pages_clean
    sim.check_all()


def test_nothing_is_posted_once_a_request_is_to_stop(seed):
    """Its posted writes are still in flight, and the forward step that computes it goes on."""
    sim = Sim(seed)
    fetch = sim.submit(24)
    sim.run(lambda: sim.scheduler.offered)
    job = sim.scheduler.jobs[sim.scheduler.offered[0]]
    sim.fabric.hold_writes = True
    sim.run(lambda: job.at > 4 and len(job.layers_left) == 1)
    sim.scheduler.pause = True
    serving = sim.prefill._serving[job.request.key]
    posted = serving.serve.posted
    assert posted
    fetch.handle.cancel()
    sim.run(lambda: not serving.serve.may_post)
    job.work()
    assert serving.serve.posted == posted
    sim.scheduler.pause = sim.fabric.hold_writes = False
    sim.run(fetch.handle.done)
    assert fetch.error.pages_clean
    sim.check_all()
    sim.check_nothing_left()


def test_a_request_that_is_given_up_while_its_step_is_posted_posts_no_more(seed):
    """On another thread, between two of the step's submissions: the messenger's own thread hears of it later."""
    sim = Sim(seed, decode_tp=3)
    fetch = sim.submit(8)
    sim.scheduler.pause = True
    sim.run(lambda: sim.scheduler.jobs)
    (job,) = sim.scheduler.jobs.values()
    submit, submitted = sim.prefill_engine.submit, []

    def submit_and_give_up(*args, **kwargs):
        submitted.append(submit(*args, **kwargs))
        sim.prefill.fail(job.request.key, "preempted for good")
        return submitted[-1]

    sim.prefill_engine.submit = submit_and_give_up
    sim.prefill.begin_step([Chunk(job.request.key, 0, 8, [job.pages], final=True)])
    assert len(submitted) == 1
    sim.run(fetch.handle.done)
    assert fetch.error.pages_clean
    sim.check_all()
    sim.check_nothing_left()


@pytest.mark.parametrize(("prefill_tp", "decode_tp", "dst_page_tokens"), [(1, 1, 4), (3, 1, 8), (1, 3, 6)])
def test_a_preempted_request_goes_on_in_other_pages_and_sends_nothing_twice(
    seed, prefill_tp, decode_tp, dst_page_tokens
):
    """Every counter is exact: a page that is sent twice would fail the request."""
    sim = Sim(seed, prefill_tp=prefill_tp, decode_tp=decode_tp, dst_page_tokens=dst_page_tokens, preempts=0.08)
    for n in (40, 23, 8, 31):
        sim.submit(n)
    sim.run(lambda: all(fetch.handle.done() for fetch in sim.fetches))
    assert all(fetch.result for fetch in sim.fetches)
    sim.run(lambda: not sim.scheduler.jobs)
    assert sim.prefill.state()["counts"].get("preempted", 0) >= sim.num_restarts
    sim.check_all()
    sim.check_nothing_left()


def preempt_in_flight(sim):
    """A request with writes in flight, and what was said about it since."""
    fetch = sim.submit(24)
    sim.fabric.hold_writes = True
    sim.run(lambda: any(job.at > 8 and not job.layers_left for job in sim.scheduler.jobs.values()))
    sim.scheduler.pause = True
    (job,) = sim.scheduler.jobs.values()
    said = []
    sim.prefill.preempt(job.request.key, lambda: said.append("quiet"))
    return fetch, job, said


def test_source_pages_of_a_preempted_request_come_back_when_nothing_reads_them(seed):
    sim = Sim(seed)
    fetch, job, said = preempt_in_flight(sim)
    sim.settle()
    assert said == []
    with pytest.raises(ConfigError, match="preempted before"):
        sim.prefill.preempt(job.request.key, lambda: None)
    with pytest.raises(ConfigError, match="in flight still"):
        sim.prefill.begin_step([Chunk(job.request.key, 0, 4, [job.pages])])
    sim.fabric.hold_writes = False
    sim.settle()
    assert said == ["quiet"]
    with pytest.raises(ConfigError, match=rf"begins at token {job.at + 1}, it must begin in \[0, {job.at}\]"):
        sim.prefill.begin_step([Chunk(job.request.key, job.at + 1, 24, [job.pages], final=True)])
    sim.scheduler.pause = False
    sim.run(fetch.handle.done)
    assert fetch.result
    sim.check_all()
    sim.check_nothing_left()


@pytest.mark.parametrize("end", ["cancel", "fail"])
def test_a_preempted_request_that_ends_is_not_called_quiet(seed, end):
    sim = Sim(seed)
    fetch, job, said = preempt_in_flight(sim)
    if end == "cancel":
        fetch.handle.cancel()
        sim.settle()
    else:
        sim.prefill.fail(job.request.key, "for good")
    sim.fabric.hold_writes = False
    sim.run(fetch.handle.done)
    assert said == []
    assert [key for key, _ in sim.scheduler.failed] == [job.request.key]
    sim.prefill.preempt(job.request.key, lambda: said.append("quiet"))
    sim.settle()
    assert said == []
    sim.check_all()
    sim.check_nothing_left()


def test_a_step_that_is_begun_while_its_request_is_preempted_is_refused(seed, monkeypatch):
    """On another thread, while the step is worked out: its pages are the scheduler's again before it is posted."""
    sim = Sim(seed)
    fetch = sim.submit(8)
    sim.scheduler.pause = True
    sim.run(lambda: sim.scheduler.jobs)
    (job,) = sim.scheduler.jobs.values()
    key, said, plan_chunk = job.request.key, [], Serving.plan_chunk

    def plan_and_preempt(serving, chunk):
        submissions = plan_chunk(serving, chunk)
        sim.prefill.preempt(key, lambda: said.append("quiet"))
        sim.prefill_actor.run()
        return submissions

    monkeypatch.setattr(Serving, "plan_chunk", plan_and_preempt)
    with pytest.raises(ConfigError, match="was preempted while its step was begun"):
        sim.prefill.begin_step([Chunk(key, 0, 4, [job.pages])])
    monkeypatch.undo()
    assert said == ["quiet"]
    (state,) = sim.prefill.state()["requests"]
    assert (state["writes_in_flight"], state["writes_waiting"], state["tokens_planned"]) == (0, 0, 0)
    sim.scheduler.pause = False
    sim.run(fetch.handle.done)
    assert fetch.result
    sim.check_all()
    sim.check_nothing_left()


def test_a_callback_that_raises_when_its_request_is_quiet_is_counted(seed):
    sim = Sim(seed)
    fetch = sim.submit(8)
    sim.scheduler.pause = True
    sim.run(lambda: sim.scheduler.jobs)
    (job,) = sim.scheduler.jobs.values()
    sim.prefill.preempt(job.request.key, lambda: 1 / 0)
    sim.settle()
    assert sim.prefill.state()["counts"]["callback_errors"] == 1
    sim.scheduler.pause = False
    sim.run(fetch.handle.done)
    assert fetch.result


def test_a_deadline_cancels_first_and_then_reports(seed):
    sim = Sim(seed)
    sim.scheduler.pause = True
    fetch = sim.submit(8, deadline_s=3.0)
    sim.run(lambda: fetch.handle.poll() is RequestState.CANCELLING)
    assert sim.clock[0] == pytest.approx(3.0)
    sim.run(fetch.handle.done)
    assert isinstance(fetch.error, RequestTimeoutError)
    assert isinstance(fetch.error, TimeoutError)
    assert (fetch.error.pages_clean, fetch.error.reason) == (True, "timed_out")
    sim.check_all()
    sim.check_nothing_left()


def test_no_answer_at_all_is_bounded(seed):
    sim = Sim(seed)
    sim.fabric.drop_messages = 1.0
    fetch = sim.submit(8)
    sim.run(fetch.handle.done)
    assert sim.clock[0] == pytest.approx(sim.bounds.accept_s + sim.bounds.cancel_s)
    assert isinstance(fetch.error, RequestTimeoutError)
    assert "neither accepted nor rejected within 5 s" in str(fetch.error)
    # The Request may still arrive over there.
    assert fetch.error.pages_clean is False
    assert [slot.poisoned for slot in sim.decode_engine.slots] == [True, True]  # of the pages and of the tail
    assert sim.decode_tails.num_poisoned == 1
    sim.check_all()


def test_poisoned_pages_are_refused_until_the_engine_is_closed(seed):
    sim = Sim(seed)
    sim.fabric.drop_messages = 1.0
    fetch = sim.submit(8)
    sim.run(fetch.handle.done)
    sim.fabric.drop_messages = 0.0
    sim.dst_free += fetch.pages.tolist()[::-1]
    with pytest.raises(ConfigError, match=f"page {min(fetch.pages)} may still be written"):
        sim.submit(8)
    state = sim.decode.state()
    assert (state["poisoned_pages"], state["counts"]["poisoned_requests"]) == (2, 1)
    assert [item.request_id for item in sim.decode.poisoned] == ["request 0"]


def test_the_prefill_side_gives_up_on_its_own_deadline(seed):
    """Decode dies in silence: no heartbeat here, so only the deadline frees the source pages."""
    sim = Sim(seed)
    sim.scheduler.pause = True
    sim.submit(8, deadline_s=3.0)
    sim.settle()
    sim.fabric.engines[sim.decode_engine.epoch].dead = True
    sim.actors.remove(sim.decode_actor)
    sim.run(lambda: sim.scheduler.failed)
    assert isinstance(sim.scheduler.failed[0][1], RequestTimeoutError)
    assert sim.clock[0] == pytest.approx(3.0)
    assert len(sim.src_free) == sim.num_pages


@pytest.mark.parametrize("steps", [0, 10, 40, 90])
def test_a_dead_prefill_side_ends_requests_with_dirty_pages(seed, steps):
    sim = Sim(seed + steps, prefill_tp=3)
    fetch = sim.submit(24)
    for _ in range(steps):
        sim.step()
    sim.fabric.kill(sim.prefill_engine)
    sim.actors.remove(sim.prefill_actor)
    sim.scheduler.pause = True
    sim.run(fetch.handle.done)
    if fetch.error is not None:
        assert isinstance(fetch.error, PeerLostError)
        assert isinstance(fetch.error, ConnectionError)
        assert fetch.error.pages_clean is False
    assert not sim.peer.alive
    sim.dst_free += [0] * 9
    with pytest.raises(PeerLostError) as caught:
        sim.submit(4)
    assert caught.value.pages_clean
    del sim.dst_free[-9:]


@pytest.mark.parametrize("steps", [0, 10, 40, 90])
def test_a_dead_decode_side_frees_all_source_pages(seed, steps):
    sim = Sim(seed + steps, decode_tp=3)
    sim.submit(24), sim.submit(7)
    for _ in range(steps):
        sim.step()
    sim.fabric.kill(sim.decode_engine)
    sim.actors.remove(sim.decode_actor)
    sim.run(lambda: False)
    assert len(sim.src_free) == sim.num_pages
    assert not sim.scheduler.jobs
    assert all(isinstance(error, (PeerLostError, RequestFailedError)) for _, error in sim.scheduler.failed)
    assert sim.prefill.state()["peers"] == {}


def test_a_lost_peer_that_comes_back_gets_a_new_session(seed):
    """The same two engines, after a silence that only one of them, or both, took for death."""
    sim = Sim(seed)
    sim.scheduler.pause = True
    first = sim.submit(8)
    sim.settle()
    sim.fabric.lose(sim.prefill_engine)
    sim.run(first.handle.done)
    assert isinstance(first.error, PeerLostError)
    assert first.poisoned
    sim.peer = sim.connect()
    sim.settle()
    assert len(sim.scheduler.failed) == 1
    sim.scheduler.pause = False
    second = sim.submit(8)
    sim.run(second.handle.done)
    assert second.result
    sim.check_all()


def test_handles_report_progress(seed):
    sim = Sim(seed)
    fetch = sim.submit(20)
    done, total = fetch.handle.progress()
    assert done == 0
    seen = set()
    while not fetch.handle.done():
        sim.step()
        seen.add(fetch.handle.progress()[0])
    assert fetch.handle.progress() == (total, total)
    assert len(seen) > 3


class TestSubmitRefuses:
    @pytest.fixture
    def sim(self, seed):
        return Sim(seed)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"tokens": []}, "nothing to prefill"),
            ({"tokens": [1.5]}, "one-dimensional integer array"),
            ({"pages": [[0, 1], [2]]}, "2 page lists were given: the cache has 1 groups"),
            ({"pages": [[0]]}, "1 pages were given, 8 tokens need 2 pages of 4 tokens"),
            ({"pages": [[0, 48]]}, "page 48 is out of range, the decode side has 48 pages"),
            ({"pages": [[5, 5]]}, "listed twice"),
            ({"cached_tokens": 3}, "cached=3 tokens is no multiple"),
            ({"cached_tokens": 12}, r"cached_tokens=12 is out of range: it must lie in \[0, 8\]"),
            ({"deadline_s": 0.0}, "deadline_s=0.0 is out of range"),
            ({"request_id": ""}, "1 to 256 characters"),
            ({"request_id": 7}, "1 to 256 characters"),
            ({"request_id": "\ud800"}, "must be printable"),
            ({"params": "text"}, "params must be bytes, not str"),
            ({"params": bytes(1 << 21)}, "params has 2097152 bytes: the limit is 1048576"),
        ],
        ids=lambda value: str(value)[:40],
    )
    def test_bad_values(self, sim, changes, message):
        fields = {"request_id": "x", "tokens": list(range(8)), "pages": [[3, 9]], **changes}
        with pytest.raises(ConfigError, match=message):
            sim.decode.submit(sim.peer, Request(**fields))
        assert sim.decode_engine.counters_in_use == 0
        assert sim.decode_tails.num_free == 8

    def test_a_peer_of_another_messenger(self, sim, seed):
        other = Sim(seed + 1)
        other.peer = sim.peer
        with pytest.raises(ConfigError, match="was not connected by this messenger"):
            other.submit(4)

    def test_more_than_the_tail_pool_holds(self, sim):
        sim.scheduler.pause = True
        fetches = [sim.submit(4) for _ in range(8)]
        with pytest.raises(WouldBlockError, match="all 8 tail slots are in use"):
            sim.submit(4)
        sim.scheduler.pause = False
        sim.run(lambda: all(fetch.handle.done() for fetch in fetches))
        sim.check_all()
        sim.check_nothing_left()


class TestStepsRefuse:
    @pytest.fixture
    def sim(self, seed):
        sim = Sim(seed)
        sim.scheduler.pause = True
        sim.submit(10)
        sim.settle()
        return sim

    def chunk(self, sim, begin, end, final=False, **changes):
        key = sim.scheduler.offered[0]
        return Chunk(key, begin, end, [sim.scheduler.jobs[key].pages], final)._replace(**changes)

    @pytest.mark.parametrize(
        ("begin", "end", "final", "message"),
        [
            (2, 4, False, r"the first chunk begins at token 2, it must begin in \[0, 0\]"),
            (0, 11, True, r"the chunk ends at token 11, it must end in \(0, 10\]"),
            (0, 0, False, "the chunk ends at token 0"),
            (0, 10, False, "final=False, but the chunk ends at token 10 of 10"),
            (0, 9, True, "final=True, but the chunk ends at token 9 of 10"),
        ],
    )
    def test_chunks_out_of_order(self, sim, begin, end, final, message):
        with pytest.raises(ConfigError, match=message):
            sim.prefill.begin_step([self.chunk(sim, begin, end, final)])
        sim.prefill.begin_step([self.chunk(sim, 0, 10, True)])

    def test_bad_source_pages_prepare_nothing(self, sim):
        with pytest.raises(ConfigError, match="page index 99 is out of range"):
            sim.prefill.begin_step([self.chunk(sim, 0, 8, src_pages=[[1, 99, 3]])])
        with pytest.raises(ConfigError, match="needs entry 1"):
            sim.prefill.begin_step([self.chunk(sim, 0, 8, src_pages=[[1]])])
        assert sim.prefill.state()["open_steps"] == 0
        sim.prefill.begin_step([self.chunk(sim, 0, 8)])

    def test_unknown_requests_and_layers(self, sim):
        nobody = RequestKey(bytes(16), "nobody", 3)
        with pytest.raises(ConfigError, match="there is no request nobody"):
            sim.prefill.begin_step([self.chunk(sim, 0, 4, key=nobody)])
        with pytest.raises(ConfigError, match="there is no request"):
            sim.prefill.finish(nobody)
        with pytest.raises(ConfigError, match=r"layer=2 is out of range: it must lie in \[0, 2\)"):
            sim.prefill.layer_done(1, 2)
        sim.prefill.layer_done(12345, 0)
        assert sim.prefill.state()["counts"]["idle_layers"] == 1

    def test_finish_needs_the_last_chunk_and_the_right_tail(self, sim):
        key = sim.scheduler.offered[0]
        with pytest.raises(ConfigError, match="has had no final chunk"):
            sim.prefill.finish(key, sim.tail_of(0))
        sim.prefill.begin_step([self.chunk(sim, 0, 10, True)])
        with pytest.raises(ConfigError, match=r"float64 of shape \(2,\): the pool holds float32 of shape \(3,\)"):
            sim.prefill.finish(key, {**sim.tail_of(0), "hidden": [1.0, 2.0]})
        with pytest.raises(ConfigError, match="wants a tail"):
            sim.prefill.finish(key)
        sim.prefill.finish(key, sim.tail_of(0))
        with pytest.raises(ConfigError, match="was finished before"):
            sim.prefill.finish(key, sim.tail_of(0))

    def test_a_request_that_ended_is_skipped(self, sim):
        key = sim.scheduler.offered[0]
        chunk = self.chunk(sim, 0, 4)
        sim.fetches[0].handle.cancel()
        sim.run(sim.fetches[0].handle.done)
        step = sim.prefill.begin_step([chunk])
        sim.prefill.layer_done(step, 0)
        sim.prefill.finish(key)
        sim.prefill.fail(key, "too late")
        sim.check_all()


@pytest.mark.parametrize("steps", [0, 5, 30, 80, 200])
def test_either_side_may_close_first(seed, steps):
    for first in ("decode", "prefill"):
        sim = Sim(seed + steps)
        sim.submit(20), sim.submit(6)
        for _ in range(steps):
            sim.step()
        closing = [sim.decode, sim.prefill] if first == "decode" else [sim.prefill, sim.decode]
        sim.scheduler.pause = True  # Nothing finishes by itself any more.
        for messenger in closing:
            messenger._begin_close(sim.bounds.drain_s)
            sim.run(messenger._closed.done)
        sim.check_all()
        for fetch in sim.fetches:
            # A request may also reach a prefill side that is closing, or has closed.
            expected = (type(None), ClosedError, RequestFailedError, RequestRejectedError, PeerLostError)
            assert isinstance(fetch.error, expected)
            assert not fetch.poisoned
        assert sorted(sim.src_free) == list(range(sim.num_pages))


def test_a_goodbye_is_not_quiescent_after_a_write_of_unknown_outcome(seed):
    """Its bytes may still come, whatever happened to the Fail that said so."""
    sim = Sim(seed)
    heard = []
    sim.decode._on_message = lambda epoch, message: heard.append(message)
    sim.fabric.fail_writes = 1
    sim.submit(8)
    sim.run(lambda: sim.scheduler.failed)
    sim.prefill._begin_close(0.0)
    sim.run(sim.prefill._closed.done)
    sim.settle()
    (goodbye,) = (message for message in heard if isinstance(message, wire.Goodbye))
    assert not goodbye.quiescent


def test_numpy_integers_are_integers(seed):
    sim = Sim(seed)
    fetch = sim.submit(12, cached_tokens=np.int64(4), deadline_s=np.float32(9.0))
    sim.run(fetch.handle.done)
    assert fetch.result


def test_close_lets_requests_finish(seed):
    sim = Sim(seed)
    fetches = [sim.submit(20), sim.submit(6)]
    sim.run(lambda: len(sim.scheduler.offered) == 2)
    sim.decode._begin_close(sim.bounds.drain_s)
    sim.prefill._begin_close(sim.bounds.drain_s)
    sim.run(lambda: sim.decode._closed.done() and sim.prefill._closed.done())
    assert all(fetch.result for fetch in fetches)
    with pytest.raises(ClosedError):
        sim.submit(4)
    sim.check_all()
    sim.check_nothing_left()


def test_an_engine_closed_under_a_messenger_ends_everything(seed):
    sim = Sim(seed)
    fetch = sim.submit(20)
    for _ in range(40):
        sim.step()
    sim.decode_engine.close()
    sim.run(fetch.handle.done)
    if fetch.error is not None:
        assert isinstance(fetch.error, ClosedError)
        assert fetch.error.pages_clean
    sim.prefill_engine.close()
    sim.run(lambda: not sim.scheduler.jobs)
    assert sorted(sim.src_free) == list(range(sim.num_pages))


def test_rejects_are_answers_not_crashes():
    assert str(Reject("no room")) == "no room"
