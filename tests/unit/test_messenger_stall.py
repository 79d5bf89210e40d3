"""Writes that are posted and never completed: who is called stalled, who is not, and what becomes of the pages."""

import pytest

from fabric_kv.errors import RequestStalledError
from fabric_kv.messenger import RequestState

from .messenger_sim import Sim


def begin(seed, num_tokens=10, **changes):
    """A request whose first writes are posted and stay in flight."""
    sim = Sim(seed, **changes)
    sim.fabric.hold_writes = True
    fetch = sim.submit(num_tokens)
    sim.settle()
    assert sim.prefill.state()["requests"][0]["writes_in_flight"] > 0
    return sim, fetch


def counts(messenger):
    return messenger.state()["counts"]


def test_a_stalled_request_ends_long_before_its_deadline_and_its_pages_are_set_aside(seed):
    sim, fetch = begin(seed)
    begun = sim.clock[0]
    sim.fabric.hold_up(sim.prefill_engine)
    sim.run(fetch.handle.done)
    assert sim.clock[0] - begun <= sim.bounds.cancel_s
    assert fetch.handle.poll() is RequestState.STALLED
    assert isinstance(fetch.error, RequestStalledError)
    assert (fetch.error.pages_clean, fetch.error.reason) == (False, "stalled")
    assert "nothing completes" in str(fetch.error)
    # What the NIC may still read is not the scheduler's yet.
    assert not sim.scheduler.failed
    assert sim.prefill.state()["requests"][0]["state"] == "STOPPING"
    sim.fabric.hold_writes = False
    sim.run(lambda: bool(sim.scheduler.failed))
    assert isinstance(sim.scheduler.failed[0][1], RequestStalledError)
    assert (counts(sim.decode)["stalled"], counts(sim.prefill)["stalled"]) == (1, 1)
    sim.check_all()
    sim.check_nothing_left()


def test_pages_that_are_confirmed_too_late_can_be_reclaimed(seed):
    sim, fetch = begin(seed)
    sim.fabric.hold_up(sim.prefill_engine)
    sim.run(fetch.handle.done)
    assert sim.decode.reclaim() == []
    assert sim.decode_tails.num_poisoned == 1
    sim.fabric.hold_writes = False
    sim.settle()
    assert counts(sim.decode)["late"] > 0
    # Until the caller is told, they are not to be used.
    assert [item.request_id for item in sim.decode.poisoned] == ["request 0"]
    (item,) = sim.decode.reclaim()
    assert item.pages[0].tolist() == fetch.pages.tolist()
    assert (sim.decode.poisoned, sim.decode.reclaim(), sim.decode_tails.num_poisoned) == ([], [], 0)
    fetch.take_back()
    again = sim.submit(10)
    sim.run(again.handle.done)
    assert again.result
    sim.check_all()


def test_writes_that_come_loose_in_time_give_clean_pages_back(seed):
    sim, fetch = begin(seed)
    sim.fabric.hold_up(sim.prefill_engine)
    for _ in range(20):
        sim.step()
    sim.fabric.hold_writes = False
    sim.settle()
    assert fetch.handle.poll() is RequestState.STALLED
    assert fetch.error.pages_clean
    sim.check_all()
    sim.check_nothing_left()


def test_a_stall_that_is_reported_again_and_again_is_told_once(seed):
    sim, fetch = begin(seed)
    for _ in range(3):
        sim.fabric.hold_up(sim.prefill_engine)
        sim.settle()
    assert counts(sim.prefill)["stalls"] == 1
    sim.run(fetch.handle.done)
    sim.fabric.hold_writes = False
    sim.run(lambda: not sim.scheduler.jobs)
    sim.check_all()


def test_who_waits_for_the_scheduler_or_for_a_layer_is_not_stalled(seed):
    sim = Sim(seed, hits=0)
    sim.scheduler.pause = True
    waits = sim.submit(6)  # accepted, and nothing is begun
    sim.settle()
    (job,) = sim.scheduler.jobs.values()
    computes = sim.submit(6)
    sim.settle()
    (computing,) = (other for other in sim.scheduler.jobs.values() if other is not job)
    computing.work()  # its writes are in the engine, and wait for a layer
    sim.fabric.hold_up(sim.prefill_engine)
    sim.settle()
    assert "stalls" not in counts(sim.prefill)
    assert {waits.handle.poll(), computes.handle.poll()} == {RequestState.ACCEPTED}
    sim.scheduler.pause = False
    sim.run(lambda: waits.handle.done() and computes.handle.done())
    assert {waits.handle.poll(), computes.handle.poll()} == {RequestState.READY}
    sim.check_all()


def test_a_report_that_comes_after_the_writes_have_ended_is_ignored(seed):
    sim, fetch = begin(seed)
    reported = []
    told = sim.prefill_engine._on_held_up
    sim.prefill_engine.on_held_up(lambda *report: reported.append(report))
    sim.fabric.hold_up(sim.prefill_engine)
    sim.fabric.step()
    sim.fabric.hold_writes = False
    while sim.fabric.step():
        pass  # all have ended, and the messenger has not looked yet
    told(*reported[0])
    sim.run(fetch.handle.done)
    assert fetch.handle.poll() is RequestState.READY
    assert "stalls" not in counts(sim.prefill)
    sim.check_all()


@pytest.mark.parametrize("asked", ["before", "after"])
def test_a_cancel_beside_a_stall_ends_once(seed, asked):
    sim, fetch = begin(seed)
    if asked == "before":
        fetch.handle.cancel()
        sim.settle()
    sim.fabric.hold_up(sim.prefill_engine)
    sim.settle()
    if asked == "after":
        fetch.handle.cancel()
    sim.run(fetch.handle.done)
    assert fetch.handle.poll() is (RequestState.CANCELLED if asked == "before" else RequestState.STALLED)
    sim.fabric.hold_writes = False
    sim.run(lambda: not sim.scheduler.jobs)
    sim.check_all()
    sim.check_nothing_left()


def test_a_lost_peer_is_not_told(seed):
    sim, fetch = begin(seed)
    sim.fabric.kill(sim.decode_engine)
    sim.actors.remove(sim.decode_actor)
    sim.settle()
    sim.fabric.hold_up(sim.prefill_engine)
    sim.settle()
    assert "stalls" not in counts(sim.prefill)
    sim.fabric.hold_writes = False
    sim.run(lambda: not sim.scheduler.jobs)
    assert not fetch.handle.done()
    assert sorted(sim.src_free) == list(range(sim.num_pages))
