"""Arguments of the wrong type give a ConfigError that says what they are and what they should be, and take nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import numpy as np
import pytest

from fabric_kv import (
    ConfigError,
    CounterToken,
    Engine,
    EngineOptions,
    MemoryRegion,
    PageList,
    PreparedPiece,
    RemoteRegion,
)
from fabric_kv.transfers import PagePiece, Peer

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


def writes(pair: Pair, **changes: Any) -> list[Callable[[], object]]:
    """Everything that moves data here from there, with some arguments of another type."""
    given: dict[str, Any] = {"peer": pair.peer, "src": pair.src, "dst": pair.dst, "token": CounterToken(0, 0, KIB)}
    peer, src, dst, token = (given | changes).values()
    piece = PagePiece(src, 0, KIB, dst, 0, KIB, KIB, [0], [1])
    return [
        lambda: pair.engine.write(peer, src, 0, dst, 0, KIB, token=token),
        lambda: pair.engine.write_pages(peer, src, dst, [0], [1], page_bytes=KIB, token=token),
        lambda: pair.engine.submit(peer, [piece], token=token),
        lambda: pair.engine.scatter([(peer, [piece], token)]),
        lambda: pair.engine.prepare(peer, [PreparedPiece(src, 0, KIB, dst, 0, KIB, KIB)]).submit(
            [([0], [1])], token=token
        ),
    ]


@pytest.mark.parametrize("token", [True, False])
def test_a_region_in_place_of_what_its_owner_sends_is_told_how_to_send_it(pair: Pair, token: bool) -> None:
    arguments = {} if token else {"token": None}
    for call in writes(pair, dst=pair.target, **arguments):
        with pytest.raises(ConfigError, match=r"dst is of type MemoryRegion: .* use region\.remote .* sent as bytes"):
            call()
    for call in writes(pair, dst=pair.dst.to_bytes(), **arguments):
        with pytest.raises(ConfigError, match=r"dst is of type bytes: .* RemoteRegion\.from_bytes"):
            call()


def test_sources_that_are_none(pair: Pair) -> None:
    for call in writes(pair, src=np.zeros(KIB, np.uint8)):
        with pytest.raises(ConfigError, match=r"src is of type ndarray: it must be a MemoryRegion.*Engine\.register"):
            call()
    for call in writes(pair, src=pair.dst):
        with pytest.raises(ConfigError, match="src is of type RemoteRegion: it must be a MemoryRegion of this engine"):
            call()


def test_peers_that_are_none(pair: Pair) -> None:
    for peer in (pair.other.address, pair.src, None):
        calls = [
            *writes(pair, peer=peer, token=None),
            lambda peer=peer: pair.engine.read(peer, pair.src, 0, pair.dst, 0, KIB),
            lambda peer=peer: pair.engine.read_pages(peer, pair.src, pair.dst, [0], [0], page_bytes=KIB),
            lambda peer=peer: pair.engine.signal(peer, pair.dst, CounterToken(0, 0, 1)),
            lambda peer=peer: pair.engine.flush(peer, pair.dst),
            lambda peer=peer: pair.engine.connect_rails(peer, pair.dst),
            lambda peer=peer: pair.engine.notify(peer, pair.dst, 1),
            lambda peer=peer: pair.engine.send(peer, b"x"),
            lambda peer=peer: pair.engine.remove_peer(peer),
            lambda peer=peer: pair.engine.fence(peer),
            lambda peer=peer: pair.src.remote_for(peer),
        ]
        for call in calls:
            with pytest.raises(ConfigError, match=r"peer is of type .*: it must be a Peer. Hint: Engine\.add_peer"):
                call()


def test_tokens_that_are_none(pair: Pair) -> None:
    with pair.other.counter(unit_bytes=KIB) as counter:
        for token, words in (
            (counter, r"token is of type Counter: .* use counter\.token"),
            (counter.token.to_bytes(), r"token is of type bytes: .* CounterToken\.from_bytes"),
        ):
            bad: Any = token
            for call in (*writes(pair, token=bad), lambda bad=bad: pair.engine.signal(pair.peer, pair.dst, bad)):
                with pytest.raises(ConfigError, match=words):
                    call()


def test_reads_name_their_own_sides(pair: Pair) -> None:
    here, there = pair.src, pair.target
    bad: Any
    for bad, words in ((np.zeros(KIB), "dst is of type ndarray"), (pair.dst, "dst is of type RemoteRegion")):
        with pytest.raises(ConfigError, match=words):
            pair.engine.read(pair.peer, bad, 0, pair.dst, 0, KIB)
    for bad, words in ((there, r"src is of type MemoryRegion: .*region\.remote"), (b"", "src is of type bytes")):
        with pytest.raises(ConfigError, match=words):
            pair.engine.read(pair.peer, here, 0, bad, 0, KIB)
        with pytest.raises(ConfigError, match=words.replace("src", "dst")):
            pair.engine.flush(pair.peer, bad)


def test_pieces_that_are_none(pair: Pair) -> None:
    piece = PagePiece(pair.src, 0, KIB, pair.dst, 0, KIB, KIB, [0], [1])
    bad: Any
    for bad in (piece, [None], [tuple(piece)], [(pair.src, pair.dst)]):
        for call in (pair.engine.submit, pair.engine.prepare):
            with pytest.raises(ConfigError, match=r"pieces\[0\] is of type .*: it must be a PagePiece"):
                call(pair.peer, bad)


def test_watches_and_steps_that_are_none(pair: Pair) -> None:
    watch = pair.engine.watch()
    piece = PagePiece(pair.src, 0, KIB, pair.dst, 0, KIB, KIB, [0], [1], layer=1)
    prepared = pair.engine.prepare(pair.peer, [PreparedPiece(pair.src, 0, KIB, pair.dst, 0, KIB, KIB, layer=1)])
    calls: list[Callable[..., object]] = [
        lambda **how: pair.engine.submit(pair.peer, [piece], **how),
        lambda **how: prepared.submit([([0], [1])], **how),
    ]
    for call in calls:
        for step in (-1, 1.5, "1"):
            with pytest.raises(ConfigError, match="step="):
                call(watch=watch, step=step)
        with pytest.raises(ConfigError, match=r"watch is of type ndarray: .*Engine\.watch"):
            call(watch=watch.array, step=1)
        with pytest.raises(ConfigError, match="deadline_s='soon' must be a number of seconds"):
            call(deadline_s="soon")
    for step, layers, words in ((-1, 0, "step=-1 "), (0, -1, "layers=-1 "), (1.5, 0, "step=1.5 "), (0, "1", "layers=")):
        bad: Any = step, layers
        with pytest.raises(ConfigError, match=words):
            watch.set(*bad)
    assert (watch.step, watch.layers) == (0, 0)


def test_page_lists_of_lists(pair: Pair) -> None:
    for pages in ([[1], [2, 3]], [[1, 2], [3, 4]], [(1,), 2]):
        bad: Any = pages
        with pytest.raises(ConfigError, match="src_pages must be one-dimensional"):
            pair.engine.write_pages(pair.peer, pair.src, pair.dst, bad, [0], page_bytes=KIB)
        with pytest.raises(ConfigError, match="pages must be one-dimensional"):
            PageList(bad)


def test_numbers_that_are_none(pair: Pair) -> None:
    with pair.other.counter(unit_bytes=1) as counter:
        bad: Any
        for bad in (1.5, "1", None):
            calls: list[tuple[str, Callable[[], object]]] = [
                ("units", lambda bad=bad: pair.engine.signal(pair.peer, pair.dst, counter.token, bad)),
                ("group", lambda bad=bad: pair.engine.signal(pair.peer, pair.dst, counter.token, group=bad)),
                ("group", lambda bad=bad: pair.engine.flush(pair.peer, pair.dst, group=bad)),
                ("group", lambda bad=bad: pair.engine.connect_rails(pair.peer, pair.dst, group=bad)),
                ("group", lambda bad=bad: pair.engine.register(bytearray(8), group=bad)),
                ("value", lambda bad=bad: pair.engine.notify(pair.peer, pair.dst, bad)),
            ]
            for name, call in calls:
                with pytest.raises(ConfigError, match=f"{name}=.* must be an integer"):
                    call()
        with pytest.raises(ConfigError, match=r"offset=.* must be an integer"):
            pair.src.unstage(bad, 1)
    for bad in ("1", None):
        with pytest.raises(ConfigError, match=r"timeout_s=.* must be a number of seconds"):
            pair.engine.fence(pair.peer, timeout_s=bad)
        with pytest.raises(ConfigError, match=r"timeout=.* must be a number of seconds"):
            pair.engine.poll(bad)


def test_tuples_that_are_none(pair: Pair) -> None:
    piece = PagePiece(pair.src, 0, KIB, pair.dst, 0, KIB, KIB, [0], [1])
    prepared = pair.engine.prepare(pair.peer, [PreparedPiece(pair.src, 0, KIB, pair.dst, 0, KIB, KIB)])
    bad: Any
    for bad in ((pair.peer, [piece], None), [(pair.peer, [piece])]):
        with pytest.raises(ConfigError, match=r"parts\[0\] is of type .*: it must be a tuple \(peer, pieces, token\)"):
            pair.engine.scatter(bad)
    for bad in ((pair.peer, pair.dst, None), [(pair.peer, pair.dst)]):
        with pytest.raises(ConfigError, match=r"parts\[0\] is of type .*: it must be a tuple \(peer, dst, token\)"):
            pair.engine.barrier(bad)
    for bad in (([0], [1]), [[0]], [0], [None]):
        with pytest.raises(ConfigError, match=r"lists\[0\] is of type .*: it must be a tuple \(src_pages, dst_pages\)"):
            prepared.submit(bad)


def test_callbacks_that_are_none(pair: Pair) -> None:
    engine, bad = pair.engine, cast("Any", 5)
    for setter in (
        engine.on_message,
        engine.on_notify,
        engine.on_peer_lost,
        engine.on_stalled,
        engine.on_held_up,
    ):
        with pytest.raises(ConfigError, match="fn is of type int: it must be a function, or None"):
            setter(bad)
    with pytest.raises(ConfigError, match="monitor='no' must be True or False"):
        engine.add_peer(pair.other.address, monitor=cast("Any", "no"))


def test_an_error_of_the_callers_own_iterator_is_left_alone(pair: Pair) -> None:
    def pieces() -> Iterator[PagePiece]:
        yield PagePiece(pair.src, 0, KIB, pair.dst, 0, KIB, KIB, [0], [1])
        raise AttributeError("a bug over there")

    with pytest.raises(AttributeError, match="a bug over there"):
        pair.engine.submit(pair.peer, pieces())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"nics": [1]}, r"nics=\[1\] must be names or addresses: 1 is of type int"),
        ({"groups": [["127.0.0.1"], [None]]}, "None is of type NoneType"),
        ({"groups": [b"lo"]}, "is of type int"),
        ({"nics": 7}, "nics=7 must be a list of names"),
        ({"groups": 7}, "groups=7 must be a list of lists"),
        ({"groups": [7]}, "nics=7 must be a list of names"),
        ({"cpus": 7}, "cpus=7 must be a list of lists"),
        ({"cpus": [7]}, r"cpus=\[7\] must be a list of lists"),
        ({"provider": 7}, "provider=7 must be the name"),
        ({"cpus": [["0"]]}, "cpus='0' is of type str: it must be an integer"),
        ({"cpus": [[2**70]]}, "cpus=1180591620717411303424"),
        ({"cpus": [[0.5]]}, r"cpus=0\.5 is of type float"),
        ({"options": {"strict": False}}, r"options={'strict': False} must be EngineOptions"),
    ],
)
def test_engines_of_other_types(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Engine(**{"provider": "tcp"} | arguments)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        *((name, [1.5, "3", None]) for name in ("max_transfers", "num_counters", "heartbeat_misses")),
        *((name, [1e9, "9999", None]) for name in ("max_registration_bytes", "max_inbox_bytes")),
        *(
            (name, ["x", None, 1j, float("nan")])
            for name in ("stall_s", "close_s", "connect_s", "heartbeat_interval_s")
        ),
        *((name, ["no", 1, None]) for name in ("strict", "device_memory")),
        ("advertise", [[1], "a", None, {1: "a"}]),
        *((name, [3, None, ["spin"]]) for name in ("progress", "progress_threads", "dispatch")),
    ],
)
def test_options_of_other_types(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=f"{name}="):
            EngineOptions(**{name: value})


def test_options_take_numbers_of_numpy() -> None:
    options: Any = {"max_transfers": np.int32(7), "stall_s": np.float32(2.5), "connect_s": 3}
    with Engine("tcp", nics=["127.0.0.1"], options=EngineOptions(**options)) as engine:
        assert not engine.closed
