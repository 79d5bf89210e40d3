"""What both messengers refuse at once, as a mistake of their caller, and that nothing is changed by it."""

import pytest

from fabric_kv.errors import ConfigError, WouldBlockError
from fabric_kv.messenger import Chunk, Request, RequestKey

from .messenger_sim import Sim


@pytest.mark.parametrize("size", [0, -1])
def test_groups_of_no_layers_are_refused(seed, size):
    with pytest.raises(ConfigError, match=f"layers_per_group={size} is out of range"):
        Sim(seed, layers_per_group=size)


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
