"""Writes that have completed where they were posted, and are not counted where they should have landed."""

import contextlib
from unittest import mock

import pytest

from fabric_kv.errors import RequestCancelledError, RequestStalledError, RequestTimeoutError, WouldBlockError
from fabric_kv.messenger import DecodeMessenger, RequestState, sessions, wire
from fabric_kv.messenger.prefill_requests import WRITTEN_S

from .messenger_sim import Sim


def counts(messenger):
    return messenger.state()["counts"]


def lose_one(sim, num_tokens=10, **changes):
    """A request of which one piece is not counted, up to where nothing happens any more without the passing of time."""
    sim.fabric.lose_counts = 1
    fetch = sim.submit(num_tokens, **changes)
    sim.settle()
    assert not fetch.handle.done()
    assert len(sim.scheduler.released) == 1
    return fetch


def test_a_lost_count_ends_the_request_long_before_its_deadline(seed):
    sim = Sim(seed)
    begun = sim.clock[0]
    fetch = lose_one(sim)
    units, total = fetch.handle.progress()
    assert 0 < units < total
    sim.run(fetch.handle.done)
    assert sim.clock[0] - begun == pytest.approx(WRITTEN_S + sim.bounds.count_s)
    assert fetch.handle.poll() is RequestState.STALLED
    assert isinstance(fetch.error, RequestStalledError)
    assert (fetch.error.pages_clean, fetch.error.reason) == (False, "uncounted")
    assert f"{units} of {total} units have come: none within the last {sim.bounds.count_s:g} s" in str(fetch.error)
    assert sim.peer.degraded.startswith("stalled: the prefill side has written all of it")
    assert (counts(sim.decode)["stalled"], counts(sim.decode)["poisoned_requests"]) == (1, 1)
    # It is this request that is lost, not the peer.
    again = sim.submit(10)
    sim.run(again.handle.done)
    assert again.result
    assert sim.peer.degraded is None
    sim.check_all()
    sim.check_nothing_left()


def test_a_tail_that_is_not_counted_is_missed_like_a_page(seed):
    sim = Sim(seed)
    fetch = sim.submit(10)
    sim.run(lambda: any(job.at == 10 and not job.layers_left for job in sim.scheduler.jobs.values()))
    sim.scheduler.pause = True
    sim.settle()  # All pages are here.
    sim.fabric.lose_counts, sim.scheduler.pause = 1, False
    sim.run(fetch.handle.done)
    assert (fetch.handle.poll(), fetch.error.reason) == (RequestState.STALLED, "uncounted")
    sim.check_all()
    sim.check_nothing_left()


def test_what_was_called_done_too_early_lands_in_pages_that_nobody_uses(seed):
    """The sender heard of success for bytes that are still on their way: its word proves nothing of the pages."""
    sim = Sim(seed)
    sim.fabric.early_writes = 3
    fetch = sim.submit(10)
    sim.run(fetch.handle.done)
    assert (fetch.handle.poll(), fetch.error.pages_clean) == (RequestState.STALLED, False)
    assert sim.decode.reclaim() == []
    # Nor is the confirm of a cancel: it would say the same.
    sim.prefill._on_cancel(next(iter(sim.prefill._sessions.values())), wire.Cancel(sim.peer._session))
    sim.settle()
    assert sim.decode.reclaim() == []
    others = [sim.submit(9) for _ in range(3)]
    sim.run(lambda: all(other.handle.done() for other in others))
    sim.settle()
    sim.check_nothing_left()
    # All is here, once it has been counted after all.
    sim.fabric.land_early()
    sim.settle()
    assert [item.request_id for item in sim.decode.reclaim()] == ["request 0"]
    fetch.check_pages(tail=False)
    fetch.take_back()
    sim.check_all()
    sim.check_nothing_left()
    assert sim.decode_engine.counters_in_use == 0


def test_a_fence_gives_the_pages_back(seed):
    sim = Sim(seed, prove_fences=1.0)
    fetch = lose_one(sim)
    sim.run(fetch.handle.done)
    assert not fetch.error.pages_clean
    assert sim.decode.reclaim() == [], "the peer is alive, and its other requests are not to be stopped for this"
    sim.fabric.lose(sim.prefill_engine)
    sim.run(lambda: not sim.decode.state()["peers"])
    sim.settle()
    assert [item.request_id for item in sim.decode.reclaim()] == ["request 0"]
    assert sim.decode_engine.counters_in_use == 0
    fetch.take_back()
    sim.check_all()


@pytest.mark.parametrize("early", [False, True])
def test_a_cancel_of_what_is_written_and_not_counted_is_never_clean(seed, early):
    """Whether decode has heard before that all is written, or hears it with the answer."""
    sim = Sim(seed)
    fetch = lose_one(sim)
    if not early:
        sim.run(lambda: sim.clock[0] >= WRITTEN_S)
        sim.settle()
    fetch.handle.cancel()
    sim.run(fetch.handle.done)
    assert isinstance(fetch.error, RequestCancelledError)
    assert not fetch.error.pages_clean
    sim.check_all()
    sim.check_nothing_left()


def test_a_deadline_between_the_last_write_and_the_bound_is_a_timeout_and_not_clean(seed):
    sim = Sim(seed)
    fetch = lose_one(sim, deadline_s=WRITTEN_S + sim.bounds.count_s / 2)
    sim.run(fetch.handle.done)
    assert isinstance(fetch.error, RequestTimeoutError)
    assert not fetch.error.pages_clean
    sim.check_all()
    sim.check_nothing_left()


def test_news_that_are_forgotten_leave_the_peers_word(seed):
    """What was told long ago is not remembered for ever: the word of such a peer is as good as it was before."""
    sim = Sim(seed)
    with mock.patch.object(sessions, "MAX_WRITTEN_KEPT", 1):
        fetches = [sim.submit(3) for _ in range(3)]
        sim.run(lambda: all(fetch.handle.done() for fetch in fetches) and len(sim.scheduler.released) == 3)
        sim.settle()
    (session,) = sim.prefill._sessions.values()
    assert sum(session.was_written(session.number + number) for number in range(3)) == 1


def test_a_peer_that_lies_about_what_it_has_written_does_not_get_pages_back(seed):
    sim = Sim(seed)
    sim.scheduler.pause = True
    fetch = sim.submit(10)
    sim.settle()
    for generations in ([sim.peer._session], [sim.peer._session] * 3, [0, 1 << 62]):
        lie = wire.encode(wire.Written(generations))
        sim.decode_engine.take_message(sim.prefill_engine.epoch, lie)
        sim.settle()
    sim.run(fetch.handle.done)
    assert (fetch.error.reason, fetch.error.pages_clean) == ("uncounted", False)
    assert "0 of" in str(fetch.error)
    # It writes after all: into pages that nobody uses, until all of it has come.
    sim.scheduler.pause = False
    sim.run(lambda: not sim.scheduler.jobs)
    sim.settle()
    (item,) = sim.decode.reclaim()
    assert item.pages[0].tolist() == fetch.pages.tolist()
    fetch.check_pages(tail=False)
    fetch.take_back()
    sim.check_all()
    sim.check_nothing_left()


def test_units_that_still_come_are_waited_for(seed):
    """The news overtakes data that takes longer than the bound in all, and never stands still for so long."""
    sim = Sim(seed)
    num_early = sim.fabric.early_writes = 4
    fetch = sim.submit(10)
    sim.run(lambda: fetch.handle.done() or sim.clock[0] >= WRITTEN_S)
    sim.settle()
    early, sim.fabric._early = sim.fabric._early, []
    assert len(early) == num_early
    for event in early:
        wake_up = sim.clock[0] + 0.75 * sim.bounds.count_s
        sim.decode_actor.after(0.75 * sim.bounds.count_s, lambda: None)
        sim.run(lambda wake_up=wake_up: sim.clock[0] >= wake_up)
        assert not fetch.handle.done()
        sim.fabric.add(event)
        sim.settle()
    assert sim.clock[0] > 2 * sim.bounds.count_s
    assert fetch.result
    sim.check_all()
    sim.check_nothing_left()


@pytest.mark.parametrize(("limit", "num_messages"), [(256, 1), (4, 2)])
def test_news_of_many_requests_is_one_message(seed, limit, num_messages):
    with mock.patch.object(wire, "MAX_WRITTEN", limit):
        check_news(Sim(seed), num_messages)


def check_news(sim, num_messages):
    sent = []
    send = sim.prefill_engine.send
    sim.prefill_engine.send = lambda peer, payload: sent.append(payload) or send(peer, payload)
    fetches = [sim.submit(3) for _ in range(6)]
    sim.settle()
    assert all(fetch.result for fetch in fetches)
    assert not any(b"written" in payload for payload in sent)
    late = counts(sim.decode).get("late", 0)
    sim.run()
    assert sum(b"written" in payload for payload in sent) == num_messages
    assert counts(sim.decode).get("late", 0) == late, "it is no news where all has come"


def test_what_is_written_while_prefill_drains_is_told_before_its_goodbye(seed):
    sim, sent = Sim(seed), []
    send = sim.prefill_engine.send
    sim.prefill_engine.send = lambda peer, payload: sent.append(wire.decode(payload)) or send(peer, payload)
    sim.fabric.lose_counts = 1
    fetch = sim.submit(10)
    sim.run(lambda: any(job.finished for job in sim.scheduler.jobs.values()))
    sim.prefill._begin_close(100.0)
    sim.settle()
    number = sim.peer._session
    assert sent[-2:] == [wire.Written([number]), wire.Goodbye(number, quiescent=True)]
    sim.run(fetch.handle.done)
    assert not fetch.error.pages_clean


def test_who_closes_says_before_what_is_written(seed):
    sim = Sim(seed)
    fetch = lose_one(sim)
    sim.prefill._begin_close(0.0)
    sim.run(fetch.handle.done)
    # Its Goodbye says that nothing is in flight, which is not believed.
    assert not fetch.error.pages_clean
    assert fetch.handle.poll() in (RequestState.STALLED, RequestState.PEER_LOST)


@pytest.mark.parametrize("run", range(6))
def test_any_number_of_lost_counts_among_many_requests(seed, run):
    """Each ends once, READY only if all of it was counted, and nothing lands in pages that were handed back."""
    sim = Sim(seed + run, decode_tp=(1, 3)[run % 2], layers_per_group=(None, 1)[run % 2], src_page_tokens=8)
    # The answer to a Cancel in the middle relies on completions that are none too early.
    cancels = run >= 3
    for _ in range(10):
        if sim.random.random() < 0.5:
            sim.fabric.lose_counts += sim.random.randint(1, 3)
        if not cancels and sim.random.random() < 0.5:
            sim.fabric.early_writes += sim.random.randint(1, 3)
        if len(sim.dst_free) >= 4:
            with contextlib.suppress(WouldBlockError):  # The slots of tails that are set aside are, too.
                sim.submit(sim.random.randint(1, 14), deadline_s=sim.random.choice([None, 1.0]))
        for _ in range(sim.random.randint(1, 200)):
            sim.step()
        if cancels and sim.fetches and sim.random.random() < 0.5:
            sim.random.choice(sim.fetches).handle.cancel()
        if sim.random.random() < 0.2:
            sim.fabric.land_early()
    sim.run(lambda: all(fetch.handle.done() for fetch in sim.fetches))
    sim.run(lambda: not sim.scheduler.jobs)
    sim.fabric.land_early()
    sim.check_all()
    sim.check_nothing_left()
    for item in sim.decode.reclaim():
        (fetch,) = (fetch for fetch in sim.fetches if f"request {fetch.number}" == item.request_id)
        fetch.check_pages(tail=False)
        fetch.take_back()
    sim.check_all()
    sim.check_nothing_left()
    assert {type(fetch.error) for fetch in sim.fetches} <= {
        type(None),
        RequestStalledError,
        RequestTimeoutError,
        RequestCancelledError,
    }


def test_the_bound_is_in_the_table():
    assert "count_s" in DecodeMessenger.__init__.__defaults__[1].table()
