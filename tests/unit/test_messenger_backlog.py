"""Submissions that the engine has no room for: kept in order, and thrown out in a few sweeps however many end."""

from types import SimpleNamespace

import pytest

from fabric_kv.errors import WouldBlockError
from fabric_kv.messenger.actor import ManualActor
from fabric_kv.messenger.posting import Outflow, Poster, Submission
from fabric_kv.messenger.serve import serve_step
from fabric_kv.messenger.state import Accepted
from fabric_kv.messenger.steps import Steps


class Looked(Outflow):
    """A request that counts how often somebody looks whether it was stopped."""

    looks = 0

    @property
    def stopped(self):
        Looked.looks += 1
        return self._stopped

    @stopped.setter
    def stopped(self, value):
        self._stopped = value


class Posted:
    """A transfer that does not end."""

    def add_done_callback(self, fn):
        pass

    def cancel(self):
        pass


class Full:
    """An engine without room, until ``room`` is more than 0."""

    options = SimpleNamespace(max_transfers=1 << 20)
    room = 0

    def __init__(self):
        self.posted = []

    def submit(self, engine, peer, lists, *_):
        if not self.room:
            raise WouldBlockError("full")
        self.room -= 1
        self.posted.append(lists)
        return Posted()


def outflow():
    made = Looked(None)
    made.serve, _ = serve_step(made.serve, Accepted())
    return made


@pytest.fixture
def full():
    Looked.looks = 0
    return Full()


@pytest.fixture
def poster(full):
    return Poster(ManualActor(), full, None, None, None)


def wait(poster, full, request, *names):
    assert not poster.post([Submission(request, full, name, frozenset(), None) for name in names])


def test_what_is_left_when_some_have_ended_goes_in_order(poster, full):
    requests = [outflow() for _ in range(6)]
    for number, request in enumerate(requests):
        wait(poster, full, request, number, number + 10)
    for number in (3, 0, 3, 4, 1):
        poster.stop(requests[number])
    assert poster.num_waiting == 4
    poster.post([Submission(requests[0], full, "late", frozenset(), None)])
    assert poster.num_waiting == 4
    full.room = 3
    poster.retry()
    assert (full.posted, poster.num_waiting) == ([2, 12, 5], 1)
    poster.stop(requests[5])
    assert poster.num_waiting == 0
    assert poster.retry()


def test_the_end_of_many_requests_costs_their_number_not_its_square(poster, full):
    requests = [outflow() for _ in range(1000)]
    for request in requests:
        wait(poster, full, request, "x")
    Looked.looks = 0
    for request in requests:
        poster.stop(request)
        assert len(poster._ready_backlog) <= 2 * poster.num_waiting + 1
    assert poster.num_waiting == 0
    assert Looked.looks < 10 * len(requests)


def test_steps_forget_requests_without_a_look_at_the_others():
    steps, words = Steps(), []
    watch = SimpleNamespace(set=lambda *word: words.append(word))
    requests = [object() for _ in range(50)]
    for step in (1, 2):
        steps.open(step, watch, [SimpleNamespace(outflow=request, layers={0, 1}) for request in requests[step:]])
    assert steps.layer_done(1, 0)
    for request in requests[:-1]:
        steps.forget(request)
    assert steps.num_open == 2
    assert set(words) == {(1, 1), (2, 0)}
    steps.forget(requests[-1])
    assert (steps.num_open, steps._steps_of) == (0, {})
    assert not steps.layer_done(1, 1)
