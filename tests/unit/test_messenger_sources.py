"""Schedulers that take source pages away before they are sent, and the check that notices it."""

import random

import numpy as np
import pytest

from fabric_kv.config import EngineOptions
from fabric_kv.errors import ConfigError, RequestFailedError
from fabric_kv.messenger import PrefillMessenger, RequestState
from fabric_kv.messenger.actor import ManualActor

from .messenger_sim import LAYERS, Sim, make_cache


@pytest.mark.parametrize("run", range(4))
def test_an_honest_scheduler_is_never_blamed(seed, run):
    dice = random.Random(seed + run)
    sim = Sim(
        seed + run,
        prefill_tp=dice.choice([1, 3]),
        decode_tp=dice.choice([1, 3]),
        src_page_tokens=dice.choice([4, 8]),
        dst_page_tokens=dice.choice([4, 8]),
        prefill_dp=dice.choice([1, 2]),
        layers_per_group=dice.choice([None, 1]),
        preempts=dice.choice([0.0, 0.1]),
        options=EngineOptions(max_transfers=dice.choice([3, 1000])),
        check_sources=True,
    )
    fetches = [sim.submit(dice.randint(1, 20)) for _ in range(6)]
    for _ in range(dice.randint(0, 300)):
        sim.step()
    fetches[0].handle.cancel()
    sim.run(lambda: all(fetch.handle.done() for fetch in fetches))
    sim.run(lambda: not sim.scheduler.jobs)
    assert all(fetch.result for fetch in fetches[1:])
    assert "changed_sources" not in sim.prefill.state()["counts"]
    sim.check_all()
    sim.check_nothing_left()


def spoil_one(sim):
    """A page of a layer that was done is written again before it has been sent; which one."""
    (job,) = sim.scheduler.jobs.values()
    sim.run(lambda: job.chunk[1] == 8 and not job.layers_left)
    page, layer = sim.random.choice(job.pages[:2].tolist()), sim.random.randrange(LAYERS)
    sim.src[0][layer, :, page] += 1
    return page, layer


@pytest.mark.parametrize("checks", [True, False])
def test_a_page_that_is_reused_too_early_fails_its_request_by_name(seed, checks):
    sim = Sim(seed, check_sources=checks, tails=False)
    sim.fabric.hold_writes = True
    fetch = sim.submit(8)
    sim.run(lambda: sim.scheduler.jobs)
    page, layer = spoil_one(sim)
    fetch.check_pages = lambda: None  # What is sent is not what was computed.
    sim.fabric.hold_writes = False
    sim.run(lambda: fetch.handle.done() and not sim.scheduler.jobs)
    if not checks:
        assert fetch.handle.poll() is RequestState.READY
        assert sim.scheduler.released
        return
    ((_, error),) = sim.scheduler.failed
    assert isinstance(error, RequestFailedError)
    assert f"source page {page} was changed in layer {layer} before it had been sent" in str(error)
    assert sim.prefill.state()["counts"]["changed_sources"] >= 1
    # Decode may have counted all of it before.
    assert fetch.handle.poll() in (RequestState.READY, RequestState.FAILED)
    assert fetch.error is None or fetch.error.pages_clean
    sim.check_all()


def test_memory_that_cannot_be_read_is_refused_when_the_check_is_asked_for(seed):
    sim = Sim(seed, connect=False)
    spec, arrays = make_cache(1, 8, 4, 0.0)
    region = sim.fabric.engine().register(arrays[0])
    region._owner = object()
    with pytest.raises(ConfigError, match="check_sources cannot read MemoryRegion"):
        PrefillMessenger(
            sim.fabric.engine(), spec, [[region]], sim.scheduler, check_sources=True, actor=ManualActor("x")
        )
    region._owner = np.zeros(3)
    with pytest.raises(ConfigError, match="needs memory of the host"):
        PrefillMessenger(
            sim.fabric.engine(), spec, [[region]], sim.scheduler, check_sources=True, actor=ManualActor("x")
        )
