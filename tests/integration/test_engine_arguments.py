"""Arguments of the wrong type give a ConfigError that says what they are and what they should be, and take nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from fabric_kv import ConfigError, Engine, MemoryRegion, RemoteRegion
from fabric_kv.transfers import Peer

KIB = 1024
LONG = 60.0


class Pair(NamedTuple):
    """An engine that knows another one, in this process."""

    engine: Engine
    other: Engine
    peer: Peer
    src: MemoryRegion
    target: MemoryRegion

    @property
    def dst(self) -> RemoteRegion:
        return self.target.remote


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Whatever the test has tried, a write must still work afterwards, and nothing be left in use."""
    with Engine("tcp", nics=["127.0.0.1"]) as engine, Engine("tcp", nics=["127.0.0.1"]) as other:
        src, target = engine.register(np.ones(4 * KIB, np.uint8)), other.register(np.zeros(4 * KIB, np.uint8))
        pair = Pair(engine, other, engine.add_peer(other.address), src, target)
        yield pair
        with other.counter(unit_bytes=KIB, expected_units=4) as counter:
            engine.write(pair.peer, src, 0, target.remote, 0, 4 * KIB, token=counter.token).result(LONG)
            counter.result(LONG)
        figures = [each.describe() for each in (engine, other)]
        assert [each["transfers_open"] for each in figures] == [0, 0]
        assert [each["counters_open"] for each in figures] == [0, 0]
        assert [each["groups"][0]["counters_in_use"] for each in figures] == [0, 0]


@pytest.mark.parametrize(
    "arguments",
    [
        {"unit_bytes": 1.5},
        {"unit_bytes": "4096"},
        {"unit_bytes": None},
        {"unit_bytes": 4096, "expected_units": 1.5},
        {"unit_bytes": 4096, "expected_units": "1"},
        {"unit_bytes": 4096, "expected_units": -1},
        {"unit_bytes": 4096, "expected_units": 2**57},
        {"unit_bytes": 4096, "group": 0.0},
        {"unit_bytes": 4096, "group": "0"},
    ],
)
def test_a_counter_that_is_refused_takes_none(pair: Pair, arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{list(arguments)[-1]}=.*(integer|must lie in)"):
        pair.engine.counter(**arguments)


def test_a_counter_whose_arming_fails_is_given_back(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(pair.engine, "_arm", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pair.engine.counter(unit_bytes=4096, expected_units=1)


def test_arming_with_no_number_leaves_the_counter_as_it_was(pair: Pair) -> None:
    with pair.other.counter(unit_bytes=KIB) as counter:
        with pytest.raises(ConfigError, match=r"expected_units=1\.5 is of type float: it must be an integer"):
            counter.arm(1.5)  # type: ignore[arg-type]
        counter.arm(1)
        pair.engine.write(pair.peer, pair.src, 0, pair.dst, 0, KIB, token=counter.token)
        counter.result(LONG)


def test_integers_of_numpy_are_integers(pair: Pair) -> None:
    sizes: Any = np.int64(KIB), np.uint8(1), np.int32(0)
    with pair.other.counter(unit_bytes=sizes[0], expected_units=sizes[1], group=sizes[2]) as counter:
        assert {type(value) for value in (counter.token.unit_bytes, counter.token.group)} == {int}
        pair.engine.write(pair.peer, pair.src, 0, pair.dst, 0, KIB, token=counter.token)
        counter.result(LONG)
