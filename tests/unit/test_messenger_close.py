"""Messengers that close, and engines that are closed under them: what is finished first, what ends, what is said."""

import pytest

from fabric_kv.errors import ClosedError, PeerLostError, RequestFailedError, RequestRejectedError
from fabric_kv.messenger import wire

from .messenger_sim import Sim


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
