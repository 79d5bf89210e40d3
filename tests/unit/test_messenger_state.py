"""The state machines of a request against each other, over a network that reorders, duplicates and loses messages."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fabric_kv.messenger.fetch import Fetch, FetchEffect, fetch_step
from fabric_kv.messenger.serve import Serve, ServeEffect, serve_step
from fabric_kv.messenger.state import (
    Accepted,
    AllPlanned,
    CancelAsked,
    CancelConfirmed,
    CancelExpired,
    Closing,
    CounterBroken,
    CounterFired,
    CountExpired,
    DeadlinePassed,
    EngineClosed,
    FailAsked,
    Failed,
    PeerLeft,
    PeerLost,
    Planned,
    Posted,
    PostFailed,
    Refused,
    Rejected,
    RequestState,
    Retired,
    SeenWindow,
    ServeState,
    Stalled,
    Written,
)

GENERATION = 7
FATE = st.sampled_from(["arrives", "arrives", "arrives", "arrives and stays", "is lost"])


class Pair(RuleBasedStateMachine):
    """Both sides of one request, every write of it, and the messages in between."""

    @initialize(ranks=st.integers(1, 3), writes=st.integers(1, 4), stage=st.integers(0, 5))
    def start(self, ranks, writes, stage):
        self.num_ranks = min(ranks, writes)
        self.fetch = Fetch(waiting=(1 << self.num_ranks) - 1)
        self.serve = None
        self.seen = SeenWindow(GENERATION)
        self.ended_clean = True  # what the prefill side remembers of a request that has ended
        self.stalls = 0
        self.prefill_left = False
        self.ends = {"fetch": 0, "serve": 0}
        self.finals = {}
        # Writes: not posted -> flying -> landed (in any order with being retired), or lost for good.
        self.unplanned, self.planned = list(range(writes)), []
        self.flying, self.landed, self.unknown = set(), set(), set()
        self.fired = set()
        self.num_writes = writes
        self.to_prefill, self.to_decode = ["request"], []
        # A good way into a normal run: chance alone would seldom get so far before something ends the request.
        if stage >= 1:
            self.to_prefill.clear()
            self.seen.add(GENERATION)
            self.serve = Serve()
        if stage >= 2:
            self.prefill(Accepted())
        for _ in range(writes if stage >= 3 else 0):
            self.plan_a_write()
        for _ in range(writes if stage >= 5 else stage >= 4):
            self.post_a_write()

    # --- The decode side ----------------------------------------------------------------------------------------------

    def decode(self, event):
        before = self.fetch
        self.fetch, effects = fetch_step(self.fetch, event)
        if before.phase.final:
            assert self.fetch == before
            assert effects == (FetchEffect.LATE,)
        self.ends["fetch"] += effects.count(FetchEffect.END)
        if FetchEffect.SEND_CANCEL in effects:
            self.to_prefill.append("cancel")

    @rule(event=st.sampled_from([CancelAsked(), DeadlinePassed("late"), Closing(), PeerLost("silent")]))
    def decode_gives_up(self, event):
        self.decode(event)

    @precondition(lambda self: self.fetch.phase is RequestState.CANCELLING or self.fetch.peer_quiescent is not None)
    @rule()
    def cancel_timer_fires(self):
        self.decode(CancelExpired())

    @precondition(lambda self: self.fetch.written)
    @rule()
    def count_timer_fires(self):
        self.decode(CountExpired("some are missing"))

    @precondition(lambda self: self.to_decode)
    @rule(pick=st.integers(0, 5), fate=FATE)
    def message_to_decode(self, pick, fate):
        index = pick % len(self.to_decode)
        message = self.to_decode[index]
        if fate != "arrives and stays":
            del self.to_decode[index]
        if fate != "is lost":
            self.decode(message)

    # --- The prefill side ---------------------------------------------------------------------------------------------

    def prefill(self, event):
        before = self.serve
        self.serve, effects = serve_step(self.serve, event)
        if before.phase.final:
            assert self.serve == before
        for effect in effects:
            match effect:
                case ServeEffect.SEND_ACCEPT:
                    self.to_decode.append(Accepted())
                case ServeEffect.SEND_REJECT:
                    self.to_decode.append(Rejected("no"))
                case ServeEffect.SEND_FAIL:
                    self.to_decode.append(Failed("failed", self.serve.pages_clean))
                case ServeEffect.SEND_CONFIRM:
                    self.to_decode.append(CancelConfirmed(self.serve.pages_clean))
                case ServeEffect.SEND_STALLED:
                    assert self.flying, "called stalled with nothing in flight"
                    self.stalls += 1
                    self.to_decode.append(Stalled("stuck"))
                case ServeEffect.TELL_WRITTEN:
                    self.to_decode.append(Written())
                case ServeEffect.END:
                    self.ends["serve"] += 1
                    assert not self.flying, "ended while writes were in flight"
                    self.ended_clean = self.serve.pages_clean

    @precondition(lambda self: self.to_prefill and not self.prefill_left)
    @rule(pick=st.integers(0, 5), fate=FATE)
    def message_to_prefill(self, pick, fate):
        index = pick % len(self.to_prefill)
        message = self.to_prefill[index]
        if fate != "arrives and stays":
            del self.to_prefill[index]
        if fate == "is lost":
            return
        if message == "request":
            if self.seen.add(GENERATION):
                self.serve = Serve()
        elif self.serve is not None and not self.serve.phase.final:
            self.prefill(CancelAsked())
        else:
            self.seen.add(GENERATION)
            written = self.serve is not None and self.serve.phase is ServeState.RELEASED
            self.to_decode.append(CancelConfirmed(self.ended_clean, written))

    @precondition(lambda self: self.serve is not None)
    @rule(event=st.sampled_from([Accepted(), Accepted(), Refused("no")]))
    def scheduler_answers(self, event):
        self.prefill(event)

    @precondition(lambda self: self.serve is not None)
    @rule(event=st.sampled_from([FailAsked("why"), DeadlinePassed("late"), PostFailed("no"), Closing(), PeerLost("x")]))
    def prefill_gives_up(self, event):
        self.prefill(event)

    @precondition(lambda self: self.serve is not None)
    @rule()
    def the_nic_stalls(self):
        self.prefill(Stalled("stuck"))

    @precondition(lambda self: self.serve is not None and self.unplanned)
    @rule()
    def plan_a_write(self):
        if self.serve.may_post:
            self.planned.append(self.unplanned.pop())
            self.prefill(Planned(1))

    @precondition(lambda self: self.serve is not None and not self.unplanned)
    @rule()
    def all_is_planned(self):
        self.prefill(AllPlanned())

    @precondition(lambda self: self.serve is not None and self.planned)
    @rule()
    def post_a_write(self):
        if self.serve.may_post:
            assert not self.fetch.pages_clean, "posted into pages that were said to be clean"
            self.flying.add(self.planned.pop())
            self.prefill(Posted())

    @precondition(lambda self: (self.flying | self.unknown) - self.landed)
    @rule(pick=st.integers(0, 3))
    def a_write_lands(self, pick):
        candidates = sorted((self.flying | self.unknown) - self.landed)
        write = candidates[pick % len(candidates)]
        assert not self.fetch.pages_clean, "landed in pages that were said to be clean"
        self.landed.add(write)
        self.unknown.discard(write)
        rank = write % self.num_ranks
        if all(w in self.landed for w in range(self.num_writes) if w % self.num_ranks == rank):
            self.to_decode.append(CounterFired(rank))

    @precondition(lambda self: self.serve is not None and self.flying)
    @rule(pick=st.integers(0, 3), known=st.booleans())
    def a_write_retires(self, pick, known):
        write = sorted(self.flying)[pick % len(self.flying)]
        self.flying.discard(write)
        if write in self.landed:
            self.prefill(Retired())
        elif known:
            self.prefill(Retired("cancelled"))  # Never posted to the wire: it cannot land.
        else:
            self.unknown.add(write)
            self.prefill(Retired("connection lost", may_land=True))

    @precondition(lambda self: not self.prefill_left)
    @rule()
    def prefill_says_goodbye(self):
        """The messenger's part: it takes no more requests, and says truthfully whether it is quiet."""
        if self.serve is not None and self.serve.may_post:
            self.prefill(Closing())
        self.prefill_left = True
        self.to_decode.append(PeerLeft(not self.flying and not self.unknown))

    # --- What must hold -----------------------------------------------------------------------------------------------

    @invariant()
    def clean_pages_stay_clean(self):
        if self.fetch.pages_clean:
            assert not self.flying - self.landed
            assert not self.unknown

    @invariant()
    def every_end_comes_once(self):
        assert self.ends["fetch"] == self.fetch.phase.final
        assert (self.fetch.pages_clean is not None) == self.fetch.phase.final
        if self.serve is not None:
            assert self.ends["serve"] == self.serve.phase.final
        assert self.stalls <= 1

    @invariant()
    def ready_means_everything_is_here(self):
        if self.fetch.phase is RequestState.READY:
            assert len(self.landed) == self.num_writes

    @invariant()
    def released_means_everything_has_landed(self):
        if self.serve is not None and self.serve.phase is ServeState.RELEASED:
            assert len(self.landed) == self.num_writes
            assert not self.flying


Pair.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestPair = Pair.TestCase


def run(machine, step, *events):
    effects = []
    for event in events:
        machine, new = step(machine, event)
        effects += new
    return machine, effects


def test_counters_alone_make_a_request_ready():
    fetch, effects = run(Fetch(waiting=0b11), fetch_step, CounterFired(1), CounterFired(1), CounterFired(0))
    assert (fetch.phase, fetch.pages_clean, effects) == (RequestState.READY, True, [FetchEffect.END])


def test_a_reject_after_data_is_not_believed():
    fetch, effects = run(Fetch(waiting=0b11), fetch_step, CounterFired(0), Rejected("no"))
    assert fetch.phase is RequestState.CANCELLING
    assert effects == [FetchEffect.SEND_CANCEL, FetchEffect.START_CANCEL_TIMER]
    fetch, _ = run(fetch, fetch_step, CancelConfirmed(True))
    assert (fetch.phase, fetch.pages_clean) == (RequestState.FAILED, True)


def test_an_unanswered_cancel_leaves_the_pages_dirty():
    fetch, _ = run(Fetch(waiting=1), fetch_step, Accepted(), CancelAsked(), CancelExpired())
    assert (fetch.phase, fetch.pages_clean) == (RequestState.CANCELLED, False)


def test_all_data_ends_a_cancel_early_and_clean():
    fetch, _ = run(Fetch(waiting=1), fetch_step, CancelAsked(), CounterFired(0))
    assert (fetch.phase, fetch.pages_clean) == (RequestState.CANCELLED, True)


@pytest.mark.parametrize(
    ("event", "phase"), [(CancelConfirmed(True), RequestState.FAILED), (PeerLost(), RequestState.PEER_LOST)]
)
def test_a_counter_that_overran_is_never_clean(event, phase):
    fetch, _ = run(Fetch(waiting=1), fetch_step, CounterBroken("too many"), event)
    assert (fetch.phase, fetch.pages_clean) == (phase, False)


def test_a_closed_engine_makes_all_pages_clean():
    fetch, _ = run(Fetch(waiting=1), fetch_step, CounterBroken("too many"), EngineClosed())
    assert (fetch.phase, fetch.pages_clean) == (RequestState.CLOSED, True)


def test_a_goodbye_waits_for_what_explains_it():
    fetch, effects = run(Fetch(waiting=1), fetch_step, Accepted(), PeerLeft(True))
    assert (fetch.phase, effects) == (RequestState.ACCEPTED, [FetchEffect.START_CANCEL_TIMER])
    assert run(fetch, fetch_step, Failed("closing", True))[0].phase is RequestState.FAILED
    assert run(fetch, fetch_step, CounterFired(0))[0].phase is RequestState.READY
    late = run(fetch, fetch_step, CancelExpired())[0]
    assert (late.phase, late.pages_clean) == (RequestState.PEER_LOST, True)


def test_a_failed_write_waits_for_its_siblings():
    serve, effects = run(Serve(), serve_step, Accepted(), Planned(3), Posted(), Posted(), Retired("broken", True))
    assert (serve.phase, serve.may_post) == (ServeState.STOPPING, False)
    assert effects == [ServeEffect.SEND_ACCEPT, ServeEffect.STOP_POSTING]
    serve, effects = run(serve, serve_step, Retired())
    assert (serve.phase, serve.reason, serve.pages_clean) == (ServeState.FAILED, "broken", False)
    assert effects == [ServeEffect.END, ServeEffect.SEND_FAIL]


def test_a_scheduler_that_refuses_after_posting_has_failed():
    serve, effects = run(Serve(), serve_step, Planned(1), Posted(), Refused("no"), Retired())
    assert serve.phase is ServeState.FAILED
    assert ServeEffect.SEND_REJECT not in effects
    assert effects[-1] is ServeEffect.SEND_FAIL


def test_only_what_is_in_flight_can_stall():
    computing = (Accepted(), Planned(1))
    serve, effects = run(Serve(), serve_step, Stalled("x"), *computing, Stalled("x"), Posted(), Retired(), Stalled("x"))
    assert (serve.phase, effects) == (ServeState.SERVING, [ServeEffect.SEND_ACCEPT])


def test_a_stalled_request_ends_when_nothing_is_in_flight_and_decode_hears_before():
    serve, effects = run(Serve(), serve_step, Accepted(), Planned(2), Posted(), Stalled("stuck"), Stalled("stuck"))
    assert effects[1:] == [ServeEffect.STOP_POSTING, ServeEffect.SEND_STALLED]
    serve, effects = run(serve, serve_step, CancelAsked(), Retired("cancelled"))
    assert (serve.phase, serve.reason) == (ServeState.STALLED, "stuck")
    assert effects[-3:] == [ServeEffect.END, ServeEffect.SEND_FAIL, ServeEffect.SEND_CONFIRM]


def test_a_failure_that_waits_for_a_stalled_sibling_is_told_as_a_stall():
    events = (Accepted(), Planned(2), Posted(), Posted(), Retired("broken", may_land=True), Stalled("stuck"))
    serve, effects = run(Serve(), serve_step, *events)
    assert (serve.cause, serve.stalled, effects[-1]) == (ServeState.FAILED, "stuck", ServeEffect.SEND_STALLED)


@pytest.mark.parametrize(
    ("answer", "clean"), [(Failed("stalled", True), True), (Failed("", False), False), (CancelExpired(), False)]
)
def test_a_stall_ends_with_what_the_peer_can_say_of_the_pages(answer, clean):
    fetch, effects = run(Fetch(waiting=1), fetch_step, Stalled("stuck"), Stalled("stuck"))
    assert fetch.phase is RequestState.CANCELLING
    assert effects == [FetchEffect.SEND_CANCEL, FetchEffect.START_CANCEL_TIMER, FetchEffect.LATE]
    assert run(fetch, fetch_step, Rejected("a lie"))[0] == fetch
    fetch, _ = run(fetch, fetch_step, answer)
    assert (fetch.phase, fetch.pages_clean) == (RequestState.STALLED, clean)


def test_what_is_written_and_not_counted_is_a_stall_of_its_own():
    fetch, effects = run(Fetch(waiting=1), fetch_step, Written(), Written(), Rejected("a lie"))
    assert effects[:2] == [FetchEffect.START_COUNT_TIMER, FetchEffect.LATE]
    assert fetch.phase is RequestState.CANCELLING, "a reject of what was written"
    fetch, _ = run(fetch, fetch_step, CountExpired("0 of 9"))
    assert (fetch.phase, fetch.pages_clean) == (RequestState.FAILED, False)
    fetch, effects = run(Fetch(waiting=1), fetch_step, Accepted(), Written(), CountExpired("0 of 9"))
    assert (fetch.phase, fetch.reason, fetch.pages_clean) == (RequestState.STALLED, "0 of 9", False)
    assert effects == [FetchEffect.START_COUNT_TIMER, FetchEffect.END]


def test_counters_that_are_behind_the_news_make_a_request_ready():
    fetch, _ = run(Fetch(waiting=0b11), fetch_step, Written(), CounterFired(1), CounterFired(0))
    assert (fetch.phase, fetch.pages_clean) == (RequestState.READY, True)


@pytest.mark.parametrize(
    "news",
    [(Written(), CancelConfirmed(True)), (CancelConfirmed(True, written=True), Written())],
    ids=["in order", "not"],
)
def test_a_confirmed_cancel_of_what_is_written_waits_for_the_counters(news):
    fetch, effects = run(Fetch(waiting=1), fetch_step, CancelAsked(), *news)
    assert (fetch.phase, effects.count(FetchEffect.START_COUNT_TIMER)) == (RequestState.CANCELLING, 1)
    counted = run(fetch, fetch_step, CounterFired(0))[0]
    assert (counted.phase, counted.pages_clean) == (RequestState.CANCELLED, True)
    for expired in (CancelExpired(), CountExpired("0 of 9")):
        lost = run(fetch, fetch_step, expired)[0]
        assert (lost.phase, lost.pages_clean) == (RequestState.CANCELLED, False)


def test_no_word_of_the_peer_proves_pages_clean_that_miss_what_it_has_written():
    """Whatever follows: the counters, a fence or the engine's end."""
    proofs = (CounterFired(0), PeerLost("lost", fenced=True), EngineClosed())
    events = (*proofs, Accepted(), Rejected("no"), Failed("x", True), CancelConfirmed(True), CancelAsked())
    events += (PeerLeft(True), PeerLost("lost"), CancelExpired(), CountExpired("0 of 9"), DeadlinePassed())
    num_clean = num_ended = 0
    for sequence in itertools.product(events, repeat=3):
        fetch, last = run(Fetch(waiting=1), fetch_step, Written())[0], None
        for event in sequence:
            if not fetch.phase.final:
                fetch, last = fetch_step(fetch, event)[0], event
        num_ended += fetch.phase.final
        num_clean += bool(fetch.pages_clean)
        assert not fetch.pages_clean or last in proofs, sequence
    assert 0 < num_clean < num_ended


def test_a_released_request_is_told_as_written_unless_nobody_listens():
    events = (Accepted(), Planned(1), Posted(), AllPlanned())
    assert run(Serve(), serve_step, *events, Retired())[1][-2:] == [ServeEffect.TELL_WRITTEN, ServeEffect.END]
    serve, effects = run(Serve(), serve_step, *events, Retired("cancelled"))
    assert (serve.phase, ServeEffect.TELL_WRITTEN in effects) == (ServeState.FAILED, False)


def test_an_ended_request_confirms_again():
    serve, _ = run(Serve(), serve_step, Accepted(), CancelAsked())
    assert serve.phase is ServeState.CANCELLED
    assert run(serve, serve_step, CancelAsked())[1] == [ServeEffect.SEND_CONFIRM]


def test_a_lost_peer_is_sent_nothing():
    serve, effects = run(Serve(), serve_step, Accepted(), Planned(1), Posted(), CancelAsked(), PeerLost(), Retired())
    assert (serve.phase, effects[-1]) == (ServeState.CANCELLED, ServeEffect.END)


@given(st.permutations(range(20)))
def test_seen_window_keeps_little_whatever_the_order(order):
    window = SeenWindow(first=100, span=64)
    for number in order:
        assert window.add(100 + number)
        assert not window.add(100 + number)
    assert not window._above
    assert window._low == 120


def test_seen_window_refuses_what_lies_outside():
    window = SeenWindow(first=100, span=4)
    assert not any(window.add(number) for number in (99, 104, 2**63))
    assert list(itertools.compress(range(98, 106), [window.in_range(n) for n in range(98, 106)])) == [
        100,
        101,
        102,
        103,
    ]
    assert 99 not in window
