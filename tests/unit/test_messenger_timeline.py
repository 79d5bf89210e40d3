"""One line a request, on both sides, with what happened and when."""

import logging
import re

import pytest

from fabric_kv.messenger.timeline import MAX_EVENTS, Timeline

from .messenger_sim import Sim

LINE = re.compile(
    r"side=(\w+) request=(.+) generation=\d+ peer=\w{8} outcome=(\w+) pages_clean=(\w+) tokens=(\d+) total_ms="
)


def lines(caplog):
    return [LINE.match(record.getMessage()).groups() for record in caplog.records if record.name.endswith(".requests")]


def test_a_request_that_works_leaves_one_line_on_each_side(seed, caplog):
    caplog.set_level(logging.INFO, "fabric_kv.messenger.requests")
    sim = Sim(seed, prefill_tp=3, decode_tp=3)
    fetch = sim.submit(13)
    sim.run(fetch.handle.done)
    sim.run(lambda: not sim.scheduler.jobs)
    expected = [("decode", "request 0", "READY", "True", "13"), ("prefill", "request 0", "RELEASED", "True", "13")]
    assert sorted(lines(caplog)) == expected
    decode, prefill = sorted(record.getMessage() for record in caplog.records if record.name.endswith(".requests"))
    assert decode.count("CounterFired+") == 4
    assert re.search(r"events_ms=Sent\+0.000,", decode)
    for event in ("Accepted+", "Step+", "Finish+", "AllPlanned+", "Retired+"):
        assert event in prefill


def test_a_failure_is_a_warning_where_pages_are_not_clean(seed, caplog):
    sim = Sim(seed)
    sim.scheduler.pause = True
    fetch = sim.submit(8)
    sim.settle()
    assert re.search(r"Sent\+.*Accepted\+", sim.decode.state()["requests"][0]["events_ms"])
    assert "Accepted+" in sim.prefill.state()["requests"][0]["events_ms"]
    sim.fabric.lose(sim.prefill_engine)
    sim.run(fetch.handle.done)
    assert lines(caplog) == [("decode", "request 0", "PEER_LOST", "False", "8")]


def test_nothing_is_written_when_nobody_listens(seed, caplog):
    caplog.set_level(logging.WARNING, "fabric_kv.messenger.requests")
    sim = Sim(seed)
    fetch = sim.submit(8)
    sim.run(fetch.handle.done)
    assert lines(caplog) == []


@pytest.mark.parametrize("count", [0, 1, MAX_EVENTS, MAX_EVENTS + 1, 1000])
def test_the_last_events_are_kept(count):
    timeline = Timeline(10.0)
    for number in range(count):
        timeline.note(f"e{number}", 10.0 + number / 1000)
    text = timeline.text().split(",") if count else []
    kept = [f"e{number}+{number:.3f}" for number in range(count)][-MAX_EVENTS:]
    assert text == (["..."] if count > MAX_EVENTS else []) + kept
    assert timeline.total_ms(10.5) == pytest.approx(500.0)
