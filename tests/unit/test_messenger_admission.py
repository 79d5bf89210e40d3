"""Requests that the prefill side does not take on: why, what decode is told, and that nothing was written."""

import pytest

from fabric_kv.config import Admission
from fabric_kv.errors import ConfigError, RequestRejectedError
from fabric_kv.messenger import Reject

from .messenger_sim import Sim


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
    tail = sim.prefill._sessions[sim.decode_engine.epoch].tail
    sim.prefill._sessions[sim.decode_engine.epoch].tail = None  # as if the two had agreed on something else
    sim.run(wrong.handle.done)
    assert (wrong.error.reason, wrong.error.pages_clean) == ("incompatible", True)
    sim.scheduler.on_request, sim.scheduler.refuse, sim.scheduler.pause = answer, None, True
    sim.prefill._sessions[sim.decode_engine.epoch].tail = tail
    sim.submit(8)  # keeps the messenger from having closed
    sim.run(lambda: sim.scheduler.jobs)
    sim.prefill._closing = True
    late = sim.submit(8)
    sim.run(late.handle.done)
    assert (late.error.reason, late.error.pages_clean) == ("closing", True)
    with pytest.raises(ConfigError, match="kind='full' is neither"):
        Reject("x", kind="full")


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


def test_rejects_are_answers_not_crashes():
    assert str(Reject("no room")) == "no room"
