"""A lost prefill side is fenced: pages come back clean where that is proven, and not a moment before."""

import itertools
import random

import numpy as np
import pytest

from fabric_kv.errors import ConfigError, PeerLostError
from fabric_kv.messenger.poison import PoisonBook, PoisonedPages, PoisonEntry
from fabric_kv.transfers import Peer

from .messenger_sim import Sim


def lose_halfway(sim, steps=40):
    """A request whose peer is lost while it writes; what it has posted stays in flight."""
    fetch = sim.submit(24)
    sim.fabric.hold_writes = True
    for _ in range(steps):
        sim.step()
    sim.scheduler.pause = True
    sim.fabric.lose(sim.prefill_engine)
    sim.run(fetch.handle.done)
    assert isinstance(fetch.error, PeerLostError)
    return fetch


def test_proven_nothing_lands_afterwards_and_the_pages_are_clean(seed):
    sim = Sim(seed, prefill_tp=3, prove_fences=1.0)
    fetch = lose_halfway(sim)
    assert fetch.error.pages_clean
    assert "fenced" in str(fetch.error)
    assert sim.decode.state()["counts"]["fenced_peers"] == 1
    sim.fabric.hold_writes = False  # What was in flight comes now, to keys that are no more.
    sim.settle()
    sim.check_all()
    assert not sim.decode.poisoned


def test_a_fence_closes_the_keys_of_the_session_and_not_those_of_the_next(seed):
    sim = Sim(seed, prove_fences=1.0)
    lose_halfway(sim)
    sim.fabric.hold_writes = sim.scheduler.pause = False
    sim.peer = sim.connect()
    again = sim.submit(24)
    sim.run(again.handle.done)
    assert again.error is None
    sim.check_all()


def test_not_proven_the_pages_wait_until_a_later_fence_is(seed):
    sim = Sim(seed, prefill_tp=3, prove_fences=1e-9)
    fetch = lose_halfway(sim)
    assert not fetch.error.pages_clean
    assert "not fenced" in str(fetch.error)
    assert sim.decode_tails.num_poisoned == 1
    assert sim.decode.reclaim() == []
    sim.dst_free += fetch.pages.tolist()
    with pytest.raises(PeerLostError):
        sim.submit(4)
    del sim.dst_free[-len(fetch.pages) :]
    sim.fabric.prove_fences = 1.0
    (item,) = sim.decode.reclaim()
    assert (item.request_id, item.pages[0].tolist()) == ("request 0", fetch.pages.tolist())
    assert sim.decode.poisoned == sim.decode.reclaim() == []
    assert sim.decode_tails.num_poisoned == 0
    fetch.take_back()
    sim.fabric.hold_writes = False
    sim.settle()
    sim.check_all()


def test_a_peer_that_is_connected_again_is_not_fenced_again(seed):
    sim = Sim(seed, prove_fences=1e-9)
    fetch = lose_halfway(sim)
    sim.fabric.hold_writes = sim.scheduler.pause = False
    sim.peer = sim.connect()
    sim.fabric.prove_fences = 1.0
    assert sim.decode.reclaim() == []
    assert fetch.poisoned
    again = sim.submit(8)
    sim.run(again.handle.done)
    assert again.error is None
    sim.dst_free += fetch.pages.tolist()
    with pytest.raises(ConfigError, match="set aside until reclaim"):
        sim.submit(4)


def test_nobody_connects_while_a_fence_is_under_way(seed):
    sim = Sim(seed, prove_fences=1.0)
    seen = []

    def fence(peer, **kwargs):
        seen.append(sim.decode._begin_connect(sim.prefill_engine.address, 1.0))
        sim.decode_actor.run()
        return type(sim.decode_engine).fence(sim.decode_engine, peer, **kwargs)

    sim.decode_engine.fence = fence
    lose_halfway(sim)
    assert not seen[0].done(), "it would lose its keys to the fence"
    sim.fabric.hold_writes = False
    sim.run(seen[0].done)
    assert seen[0].result(0).alive


def test_a_peer_that_leaves_gives_its_keys_back(seed):
    sim = Sim(seed, prove_fences=1.0)
    fetch = sim.submit(8)
    sim.run(fetch.handle.done)
    assert sim.decode_engine._memory._keys_of
    sim.prefill._begin_close(0.0)
    sim.run(lambda: not sim.peer.alive)
    sim.settle()
    assert not sim.decode_engine._memory._keys_of
    assert not sim.decode._fencing


@pytest.mark.parametrize("run", range(4))
def test_the_book_agrees_with_a_plain_list(seed, run):
    dice = random.Random(seed + run)
    book, plain, believed = PoisonBook(3, 2), [], set()
    for number in range(60):
        if dice.random() < 0.7:
            pages = tuple(np.array(dice.sample(range(40), dice.randint(0, 3)), np.int64) for _ in range(2))
            epoch = bytes([dice.randrange(4)])
            item = PoisonedPages(str(number), epoch, dice.randrange(3), pages, dice.random() < 0.2)
            redeemable = not item.exceeded and dice.random() < 0.7  # by the peer's word
            book.add(PoisonEntry(item, number, number, redeemable, ()), Peer(None, epoch))
            plain.append(item)
            if redeemable:
                believed.add(item.request_id)
        elif dice.random() < 0.5:
            redeemed, counted = dice.sample(plain, min(len(plain), 2)), dice.random() < 0.3
            for item in redeemed:
                book.redeem(item.peer, int(item.request_id), counted=counted and not item.exceeded)
                book.redeem(bytes([9]), int(item.request_id))  # another peer's of the same number
            assert book.items == plain
            clean = [item for item in redeemed if item.request_id in believed or (counted and not item.exceeded)]
            clean = [item for item in plain if item in clean]
            assert [entry.item for entry in book.take_redeemed()] == clean
            plain = [item for item in plain if item not in clean]
        else:
            epoch = bytes([dice.randrange(4)])
            taken = book.take(epoch)
            assert [entry.item for entry in taken] == [i for i in plain if i.peer == epoch and not i.exceeded]
            assert [str(entry.tail_slot) for entry in taken] == [entry.item.request_id for entry in taken]
            plain = [i for i in plain if i.peer != epoch or i.exceeded]
        assert book.items == plain
        assert {peer.epoch for peer in book.peers} == {item.peer for item in plain if not item.exceeded}
        for dp, group in itertools.product(range(3), range(2)):
            poisoned = {page for item in plain if item.dp == dp for page in item.pages[group].tolist()}
            wanted = np.array(dice.sample(range(40), 5))
            assert book.find(dp, group, wanted) == min(poisoned.intersection(wanted.tolist()), default=None)
