"""Requests that are preempted: when their source pages are the scheduler's again, and how they go on in others."""

import pytest

from fabric_kv.errors import ConfigError
from fabric_kv.messenger import Chunk
from fabric_kv.messenger.serving import Serving

from .messenger_sim import Sim


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
