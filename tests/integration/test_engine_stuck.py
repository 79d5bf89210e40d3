"""A provider that never returns from a call: said, bounded, and nothing that the NIC may touch is given back."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from fabric_kv.config import EngineOptions
from fabric_kv.engine import Engine
from fabric_kv.errors import ClosedError, StuckError
from fabric_kv.registry import _kept

from .engine_peer import LONG, wait_for
from .shm_queue import held_lock, knows_locks


def open_shm(**options: Any) -> tuple[Engine, str]:
    """An engine and the name of its queue in /dev/shm."""
    before = set(os.listdir("/dev/shm"))
    engine = Engine(provider="shm", options=EngineOptions(stall_s=0.2, close_s=0.5, **options))
    if not knows_locks():
        engine.close()
        pytest.skip(f"knows where the lock is in libfabric 1.17 on x86_64; this is {engine.describe()['libfabric']}")
    (name,) = {name for name in set(os.listdir("/dev/shm")) - before if name.startswith(f"{os.getpid()}-")}
    return engine, name


def closes(engine: Engine) -> bool:
    try:
        engine.close()
    except StuckError:
        return False
    return True


def test_a_peer_that_died_with_the_lock_of_our_queue_does_not_hold_close() -> None:
    engine, name = open_shm()
    stalls: list[Any] = []
    engine.on_stalled(stalls.append)
    region = engine.register(np.zeros(4096, np.uint8))
    with held_lock(name):
        assert wait_for(lambda: bool(stalls))
        assert (stalls[0].provider, stalls[0].outstanding_bytes) == ("shm", 0)
        counter = engine.counter(unit_bytes=1, expected_units=1)
        with pytest.raises(StuckError, match="has not returned") as caught:
            engine.close()
        assert caught.value.provider == "shm"
        with pytest.raises(ClosedError):
            counter.result(LONG)
        assert region._owner is not None
        with pytest.raises(StuckError):
            engine.close()
        with pytest.raises(StuckError):
            region.close()

    # The lock is free again, which nobody could hope for.
    assert wait_for(lambda: closes(engine))
    region.close()
    assert engine._native not in _kept


def test_other_engines_of_the_process_go_on_beside_one_that_is_stuck() -> None:
    engine, name = open_shm()
    other, a, b = (open_shm()[0] for _ in range(3))
    target = np.zeros(4096, np.uint8)
    source, remote = a.register(np.full(4096, 7, np.uint8)), b.register(target)
    peer = a.add_peer(b.address)
    stalls: list[Any] = []
    engine.on_stalled(stalls.append)
    with held_lock(name):
        assert wait_for(lambda: bool(stalls))
        for _ in range(20):
            with b.counter(unit_bytes=4096, expected_units=1) as counter:
                a.write(peer, source, 0, remote.remote, 0, 4096, token=counter.token)
                counter.result(LONG)
        assert closes(other)
    for one in (engine, a, b):
        assert wait_for(lambda one=one: closes(one))
