"""Requests that end early: cancelled, failed, too late, or with either side gone; whose pages are clean then."""

import pytest

from fabric_kv.errors import ConfigError, PeerLostError, RequestCancelledError, RequestFailedError, RequestTimeoutError
from fabric_kv.messenger import Chunk, RequestState

from .messenger_sim import Sim


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
