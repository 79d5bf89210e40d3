"""Both messengers over the in-memory fabric: what arrives, layer by layer, on which replica and in which pages."""

import numpy as np
import pytest

from fabric_kv.config import EngineOptions
from fabric_kv.errors import ConfigError, SharingError
from fabric_kv.messenger import Chunk, Request, RequestState

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


def test_all_bounds_are_logged_at_the_start(seed, caplog):
    with caplog.at_level("INFO", logger="fabric_kv.messenger"):
        sim = Sim(seed)
    assert caplog.text.count("started with these bounds") == 2
    for name in (*sim.bounds.__struct_fields__, "heartbeats", "stall_s", "connect_s", "close_s"):
        assert caplog.text.count(f"{name} ") == 2


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


def test_numpy_integers_are_integers(seed):
    sim = Sim(seed)
    fetch = sim.submit(12, cached_tokens=np.int64(4), deadline_s=np.float32(9.0))
    sim.run(fetch.handle.done)
    assert fetch.result
