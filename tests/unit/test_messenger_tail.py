"""Tail pools: slots, headers, and what does not fit."""

import numpy as np
import pytest

from fabric_kv.errors import ConfigError, ProtocolError, WouldBlockError
from fabric_kv.messenger import TailPool
from fabric_kv.messenger.tail import HEADER_BYTES
from fabric_kv.testing import MemoryFabric

EPOCH = bytes(range(16))


@pytest.fixture
def engine():
    return MemoryFabric().engine()


def test_a_tail_comes_back_as_it_went_in(engine):
    pool = TailPool(engine, "float32", (2, 3), num_slots=2)
    assert (pool.write_bytes, pool.slot_bytes) == (HEADER_BYTES + 24, 128)
    tail = np.arange(6, dtype=np.float32).reshape(2, 3)
    header = pool.header("r", 7, EPOCH)
    slot = pool.acquire()
    pool.fill(slot, header, pool.to_payload(tail))
    taken = pool.take(slot, header)
    assert (taken == tail).all()
    assert taken.dtype == np.float32
    pool.acquire()
    pool.release(slot)
    pool._bytes[:] = 0
    assert (taken == tail).all(), "the result must be a copy"


@pytest.mark.parametrize(
    "other",
    [("r", 8, EPOCH), ("q", 7, EPOCH), ("r", 7, bytes(16))],
    ids=["another submission", "another request", "another writer"],
)
def test_a_tail_of_anything_else_is_refused(engine, other):
    pool = TailPool(engine, "float32", (3,))
    slot = pool.acquire()
    pool.fill(slot, pool.header(*other), pool.to_payload(np.zeros(3, np.float32)))
    with pytest.raises(ProtocolError, match=f"tail slot {slot} holds magic b'FKVT', 12 bytes"):
        pool.take(slot, pool.header("r", 7, EPOCH))


def test_a_slot_is_blank_before_anyone_knows_of_it(engine):
    pool = TailPool(engine, "float32", (3,), num_slots=1)
    header = pool.header("r", 7, EPOCH)
    slot = pool.acquire()
    pool.fill(slot, header, pool.to_payload(np.zeros(3, np.float32)))
    pool.release(slot)
    assert pool.acquire() == slot
    with pytest.raises(ProtocolError):
        pool.take(slot, header)


def test_slots_rest_and_poisoned_ones_never_come_back(engine):
    pool = TailPool(engine, "uint8", num_slots=3)
    slots = [pool.acquire() for _ in range(3)]
    with pytest.raises(WouldBlockError, match="all 3 tail slots are in use"):
        pool.acquire()
    pool.release(slots[1])
    pool.release(slots[0], clean=False)
    pool.release(slots[2])
    assert [pool.acquire(), pool.acquire()] == [slots[1], slots[2]]
    assert (pool.num_free, pool.num_poisoned) == (0, 1)


@pytest.mark.parametrize(
    ("dtype", "shape", "changes", "message"),
    [
        (object, (3,), {}, "cannot travel"),
        ("V0", (3,), {}, "cannot travel"),
        ([("a", "f4")], (3,), {}, "cannot travel"),
        ("f4", (0,), {}, "is 0 bytes"),
        ("f4", (-1,), {}, "a tail has 1 to"),
        ("f4", (1 << 30,), {}, "a tail has 1 to"),
        ("f4", (1,) * 9, {}, "at most 8 axes"),
        ("f4", (3,), {"num_slots": 0}, "num_slots=0 is out of range"),
    ],
    ids=str,
)
def test_what_cannot_be_a_pool_is_refused(engine, dtype, shape, changes, message):
    with pytest.raises(ConfigError, match=message):
        TailPool(engine, dtype, shape, **changes)
