"""Tail pools: slots, headers, and what does not fit."""

import numpy as np
import pytest

from fabric_kv.errors import ConfigError, ProtocolError, WouldBlockError
from fabric_kv.messenger import TailPool
from fabric_kv.messenger.tail import HEADER_BYTES
from fabric_kv.testing import MemoryFabric

EPOCH = bytes(range(16))
HIDDEN = {"hidden": ("float32", (3,))}


@pytest.fixture
def engine():
    return MemoryFabric().engine()


def test_a_tail_comes_back_as_it_went_in(engine):
    pool = TailPool(engine, {"logits": ("float32", (2, 3)), "accepted": ("uint8", ())}, num_slots=2)
    assert (pool.write_bytes, pool.slot_bytes) == (HEADER_BYTES + 64 + 24, 192)
    tail = {"logits": np.arange(6, dtype=np.float32).reshape(2, 3), "accepted": np.uint8(5)}
    header = pool.header("r", 7, EPOCH)
    slot = pool.acquire()
    pool.fill(slot, header, pool.to_payload(tail))
    taken = pool.take(slot, header)
    assert taken.keys() == tail.keys()
    for name, array in taken.items():
        assert (array == tail[name]).all()
        assert (array.dtype, array.shape) == (tail[name].dtype, tail[name].shape)
    pool.acquire()
    pool.release(slot)
    pool._bytes[:] = 0
    assert (taken["logits"] == tail["logits"]).all(), "the result must be a copy"


def test_the_order_of_fields_means_nothing(engine):
    names = [("a", ("float32", (2,))), ("b", ("int64", (3,)))]
    pools = [TailPool(engine, dict(order)) for order in (names, names[::-1])]
    assert pools[0].fields == pools[1].fields
    values = {"b": np.arange(3), "a": np.float32([1, 2])}
    assert pools[0].to_payload(values).tolist() == pools[1].to_payload(dict(reversed(values.items()))).tolist()


@pytest.mark.parametrize(
    ("tail", "message"),
    [
        ({"a": np.float32([1, 2])}, r"the tail has fields \['a'\]: the pool holds \['a', 'b'\]"),
        ({"a": np.float32([1, 2]), "b": np.zeros(3, np.int64), "c": 1}, "has fields"),
        ({"a": np.float64([1, 2]), "b": np.zeros(3, np.int64)}, "tail 'a' is float64 of shape"),
        ({"a": np.float32([1, 2]), "b": np.zeros(4, np.int64)}, r"tail 'b' is int64 of shape \(4,\): the pool holds"),
        (np.float32([1, 2]), "a tail is a mapping of names to arrays, not ndarray"),
    ],
    ids=["missing", "unknown", "dtype", "shape", "bare array"],
)
def test_a_tail_that_does_not_fit_the_pool_is_refused(engine, tail, message):
    pool = TailPool(engine, {"a": ("float32", (2,)), "b": ("int64", (3,))})
    with pytest.raises(ConfigError, match=message):
        pool.to_payload(tail)


@pytest.mark.parametrize(
    "other",
    [("r", 8, EPOCH), ("q", 7, EPOCH), ("r", 7, bytes(16))],
    ids=["another submission", "another request", "another writer"],
)
def test_a_tail_of_anything_else_is_refused(engine, other):
    pool = TailPool(engine, HIDDEN)
    slot = pool.acquire()
    pool.fill(slot, pool.header(*other), pool.to_payload({"hidden": np.zeros(3, np.float32)}))
    with pytest.raises(ProtocolError, match=f"tail slot {slot} holds magic b'FKVT', {HEADER_BYTES + 12} bytes"):
        pool.take(slot, pool.header("r", 7, EPOCH))


def test_a_slot_is_blank_before_anyone_knows_of_it(engine):
    pool = TailPool(engine, HIDDEN, num_slots=1)
    header = pool.header("r", 7, EPOCH)
    slot = pool.acquire()
    pool.fill(slot, header, pool.to_payload({"hidden": np.zeros(3, np.float32)}))
    pool.release(slot)
    assert pool.acquire() == slot
    with pytest.raises(ProtocolError):
        pool.take(slot, header)


def test_slots_rest_and_poisoned_ones_never_come_back(engine):
    pool = TailPool(engine, {"flag": ("uint8", ())}, num_slots=3)
    slots = [pool.acquire() for _ in range(3)]
    with pytest.raises(WouldBlockError, match="all 3 tail slots are in use"):
        pool.acquire()
    pool.release(slots[1])
    pool.release(slots[0], clean=False)
    pool.release(slots[2])
    assert [pool.acquire(), pool.acquire()] == [slots[1], slots[2]]
    assert (pool.num_free, pool.num_poisoned) == (0, 1)


@pytest.mark.parametrize(
    ("fields", "changes", "message"),
    [
        ({"a": (object, (3,))}, {}, "tail 'a': object cannot travel"),
        ({"a": ("V0", (3,))}, {}, "cannot travel"),
        ({"a": ("V2", (3,))}, {}, "view bfloat16 as uint16"),
        ({"a": ([("a", "f4")], (3,))}, {}, "cannot travel"),
        ({"a": ("f4", (0,))}, {}, "is 0 bytes"),
        ({"a": ("f4", (-1,))}, {}, "must have 1 to"),
        ({"a": ("f4", (1 << 30,))}, {}, "must have 1 to"),
        ({"a": ("f4", (1 << 27,)), "b": ("f4", (1 << 27,))}, {}, "a tail has 1073741888 bytes"),
        ({"a": ("f4", (1,) * 9)}, {}, "at most 8 axes"),
        ({"": ("f4", ())}, {}, "a name is a printable string"),
        ({"a\n": ("f4", ())}, {}, "a name is a printable string"),
        ({}, {}, "0 fields were given: a tail has 1 to 64"),
        ({str(n): ("f4", ()) for n in range(65)}, {}, "65 fields were given"),
        (HIDDEN, {"num_slots": 0}, "num_slots=0 is out of range"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_a_pool_is_refused(engine, fields, changes, message):
    with pytest.raises(ConfigError, match=message):
        TailPool(engine, fields, **changes)
