"""Many requests, and everything that can go wrong with them, by seed: nothing lost, nothing spoilt, nothing kept."""

import contextlib
import random

import pytest

from fabric_kv.config import EngineOptions
from fabric_kv.errors import PeerLostError, WouldBlockError
from fabric_kv.messenger import RequestState

from .messenger_sim import Sim

NUM_REQUESTS = 12


def make_sim(seed, **changes):
    chooser = random.Random(seed)
    options = EngineOptions(max_transfers=chooser.choice([2, 3, 5, 1000]))
    return Sim(
        seed,
        prefill_tp=chooser.choice([1, 3]),
        decode_tp=chooser.choice([1, 3]),
        src_page_tokens=chooser.choice([4, 8]),
        dst_page_tokens=chooser.choice([4, 8]),
        layers_per_group=chooser.choice([None, 1]),
        prefill_dp=chooser.choice([1, 1, 2]),
        decode_dp=chooser.choice([1, 1, 3]),
        tails=chooser.random() < 0.7,
        options=options,
        num_pages=24,
        prove_fences=chooser.choice([0.0, 0.5, 1.0]),
        preempts=chooser.choice([0.0, 0.02, 0.1]),
        **changes,
    )


def submit_some(sim):
    """Up to NUM_REQUESTS in all, as pages and slots allow."""
    if len(sim.fetches) < NUM_REQUESTS and len(sim.dst_free) >= 6:
        with contextlib.suppress(WouldBlockError):
            sim.submit(sim.random.randint(1, 22), deadline_s=sim.random.choice([None, 4.0, 20.0]))


def disturb(sim):
    dice = sim.random.random()
    pending = [fetch for fetch in sim.fetches if not fetch.handle.done()]
    if dice < 0.25 and pending:
        sim.random.choice(pending).handle.cancel()
    elif dice < 0.45:
        sim.fabric.fail_writes += sim.random.randint(1, 3)
    elif dice < 0.55 and sim.scheduler.jobs:
        sim.prefill.fail(sim.random.choice(list(sim.scheduler.jobs)), "on a whim")
    elif dice < 0.7:
        sim.scheduler.pause = not sim.scheduler.pause
    elif dice < 0.8:
        sim.fabric.hold_writes = not sim.fabric.hold_writes
    elif dice < 0.85:
        sim.fabric.hold_up(sim.prefill_engine)
    elif dice < 0.93:
        sim.scheduler.refuse = None if sim.scheduler.refuse else "not now"
    elif dice < 0.97:
        sim.fabric.lose_counts += sim.random.randint(1, 3)


def calm(sim):
    sim.fabric.fail_writes = sim.fabric.lose_counts = 0
    sim.fabric.hold_writes = sim.scheduler.pause = False
    sim.scheduler.refuse = None
    sim.fabric.drop_messages = 0.0


@pytest.mark.parametrize("run", range(8))
def test_any_mix_of_trouble(seed, run):
    sim = make_sim(seed + run)
    sim.fabric.duplicate_messages = 0.2
    while len(sim.fetches) < NUM_REQUESTS:
        submit_some(sim)
        for _ in range(sim.random.randint(1, 60)):
            sim.step()
        if sim.random.random() < 0.4:
            disturb(sim)
        if len(sim.dst_free) < 6 and not sim.fabric.hold_writes:
            sim.run(lambda: len(sim.dst_free) >= 6 or all(fetch.handle.done() for fetch in sim.fetches))
            if len(sim.dst_free) < 6:
                break  # All that is left is poisoned.
        if sim.random.random() < 0.3:
            calm(sim)
    calm(sim)
    sim.run(lambda: all(fetch.handle.done() for fetch in sim.fetches))
    sim.run(lambda: not sim.scheduler.jobs)
    sim.check_all()
    sim.check_nothing_left()


@pytest.mark.parametrize("run", range(8))
def test_lost_messages_end_in_time_and_never_in_wrong_pages(seed, run):
    sim = make_sim(seed + 100 + run)
    sim.fabric.drop_messages, sim.fabric.duplicate_messages = 0.25, 0.1
    for _ in range(6):
        submit_some(sim)
        for _ in range(sim.random.randint(1, 60)):
            sim.step()
        if sim.random.random() < 0.3:
            disturb(sim)
    sim.scheduler.pause = sim.fabric.hold_writes = False
    begun = sim.clock[0]
    sim.run(lambda: all(fetch.handle.done() for fetch in sim.fetches))
    assert sim.clock[0] - begun <= sim.bounds.request_s + sim.bounds.cancel_s
    sim.run(lambda: not sim.scheduler.jobs)
    sim.check_all()
    assert sorted(sim.src_free) == list(range(sim.num_pages))


@pytest.mark.parametrize("run", range(6))
def test_death_of_either_side_at_any_moment(seed, run):
    sim = make_sim(seed + 200 + run)
    for _ in range(4):
        submit_some(sim)
    for _ in range(sim.random.randint(0, 300)):
        sim.step()
    if run % 2:
        sim.fabric.kill(sim.prefill_engine)
        sim.actors.remove(sim.prefill_actor)
        sim.scheduler.pause = True
        sim.run(lambda: all(fetch.handle.done() for fetch in sim.fetches))
        assert sim.clock[0] < sim.bounds.handshake_s
        for fetch in sim.fetches:
            assert fetch.handle.poll() in (RequestState.READY, RequestState.PEER_LOST)
            assert fetch.error is None or isinstance(fetch.error, PeerLostError)
            if fetch.error is not None and fetch.error.pages_clean:
                assert sim.fabric.prove_fences > 0
        for _ in range(20):
            for item in sim.decode.reclaim():
                (fetch,) = (fetch for fetch in sim.fetches if f"request {fetch.number}" == item.request_id)
                fetch.take_back()
        assert not sim.fabric.prove_fences or not sim.decode.poisoned
        sim.check_all()
        return
    sim.fabric.kill(sim.decode_engine)
    sim.actors.remove(sim.decode_actor)
    sim.run(lambda: not sim.scheduler.jobs and not sim.fabric._events)
    assert sorted(sim.src_free) == list(range(sim.num_pages))
    assert sim.prefill.state()["requests"] == []
