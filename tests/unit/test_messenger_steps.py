"""Steps under way: which layers go when, whatever the order in which they finish and whoever ends meanwhile."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric_kv.errors import ConfigError
from fabric_kv.messenger.steps import Steps

STEP = 7


class Word:
    """What layer a word lets go, and that it never goes back."""

    def __init__(self):
        self.word = STEP << 16

    def set(self, step, layers):
        assert (step << 16 | layers) >= self.word
        self.word = step << 16 | layers

    def lets_go(self, layer):
        return self.word >= STEP << 16 | layer + 1


def submission(outflow, layers):
    return SimpleNamespace(outflow=outflow, layers=frozenset(layers))


def open_step(*outflows):
    steps, word = Steps(), Word()
    steps.open(STEP, word, [submission(*outflow) for outflow in outflows])
    return steps, word


layers_of_requests = st.lists(st.sets(st.integers(0, 9), min_size=1), min_size=1, max_size=4)


@given(layers_of_requests, st.randoms(use_true_random=False))
def test_a_layer_goes_when_it_and_all_before_it_are_done(requests, random):
    steps, word = open_step(*((number, sorted(layers)) for number, layers in enumerate(requests)))
    order = sorted(set().union(*requests))
    random.shuffle(order)
    done = set()
    for layer in order:
        assert steps.num_open == 1
        assert steps.layer_done(STEP, layer)
        assert not steps.layer_done(STEP, layer), "again"
        done.add(layer)
        for other in order:
            assert word.lets_go(other) == all(before in done for before in order if before <= other)
    assert steps.num_open == 0


@given(layers_of_requests, st.randoms(use_true_random=False))
def test_nobody_waits_for_layers_that_only_an_ended_request_had(requests, random):
    steps, word = open_step(*((number, sorted(layers)) for number, layers in enumerate(requests)))
    ended = random.randrange(len(requests))
    steps.forget(ended)
    steps.forget(ended)
    left = set().union(*(layers for number, layers in enumerate(requests) if number != ended))
    for layer in sorted(left):
        assert not word.lets_go(layer)
        assert steps.layer_done(STEP, layer)
        assert word.lets_go(layer)
    assert steps.num_open == 0


def test_what_was_computed_before_waits_for_nothing():
    steps = Steps()
    steps.open(STEP, Word(), [SimpleNamespace(outflow="a", layers=frozenset())])
    assert steps.num_open == 0
    assert not steps.layer_done(STEP, 0)


def test_a_watch_of_another_engine_is_refused(seed):
    from .messenger_sim import Sim

    sim = Sim(seed)
    with pytest.raises(ConfigError, match="another engine"):
        sim.prefill.begin_step([], watch=SimpleNamespace(_engine=object()))


def test_a_word_that_is_ahead_is_refused(seed):
    from .messenger_sim import Sim

    sim = Sim(seed)
    for ahead in (1, 1000):
        with pytest.raises(ConfigError, match="set the word to 0"):
            sim.prefill.begin_step([], watch=SimpleNamespace(_engine=sim.prefill_engine, step=ahead))
    assert sim.prefill.begin_step([], watch=SimpleNamespace(_engine=sim.prefill_engine, step=0)) == 1
    assert sim.prefill.begin_step([], watch=SimpleNamespace(_engine=sim.prefill_engine, step=1)) == 2
