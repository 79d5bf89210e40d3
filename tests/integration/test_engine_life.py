"""Engines come and go: at once, many times, forgotten, forked, at the interpreter's end; nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fabric_kv.config import EngineOptions
from fabric_kv.engine import Engine
from fabric_kv.errors import ClosedError, ConfigError, TransferError, WouldBlockError

from .engine_peer import LONG, PeerProcess, left_open, wait_for
from .fabrics import nics_of, with_rdma


def open_engine(provider: Any, **options: Any) -> Engine:
    return Engine(provider.name, nics=provider.nics, options=EngineOptions(**options))


def exchange(a: Engine, b: Engine) -> None:
    """One counted page and one message."""
    target = np.zeros(4096, np.uint8)
    source, remote = a.register(np.full(4096, 7, np.uint8)), b.register(target)  # deregistered when they are dropped
    peer = a.add_peer(b.address)
    with b.counter(unit_bytes=4096, expected_units=1) as counter:
        a.write(peer, source, 0, remote.remote, 0, 4096, token=counter.token)
        counter.result(LONG)
    assert target.min() == 7
    a.send(peer, b"hello").result(LONG)


def survives(module: str, *arguments: str, cwd: Path) -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", f"{__package__}.{module}", *arguments],
        capture_output=True,
        text=True,
        timeout=LONG,
        env={**os.environ, "PYTHONPATH": str(root)},
        cwd=cwd,
    )
    assert done.returncode == 0, f"{arguments}: {done.stderr[-2000:]}"


@pytest.mark.parametrize("turn", range(4))
def test_engines_of_one_process_close_over_shm_while_they_still_talk(turn: int, seed: int, tmp_path: Path) -> None:
    """What one has posted and answered is in the others' queues still: whoever took that out crashed."""
    survives("shm_neighbours", str(seed + turn), "6", cwd=tmp_path)


def test_an_engine_closes_over_shm_while_its_answer_waits_behind_a_stopped_process(tmp_path: Path) -> None:
    survives("shm_leavers", cwd=tmp_path)


def test_eight_engines_at_once(provider: Any, spare_peers: list[PeerProcess]) -> None:
    peer = spare_peers.pop() if spare_peers else PeerProcess()
    peer.start("open", provider.name, provider.nics)
    barrier = threading.Barrier(8)

    def make(_: int) -> Engine:
        barrier.wait()
        return open_engine(provider)

    try:
        with ThreadPoolExecutor(8) as pool:
            engines = list(pool.map(make, range(8)))
            assert len({engine.address for engine in engines} | {peer.finish()}) == 9
            exchange(engines[0], engines[7])
            list(pool.map(Engine.close, engines))
    finally:
        if peer.recycle():
            spare_peers.append(peer)
        else:
            peer.close()


def test_fifty_engines_one_after_the_other_leave_nothing(provider: Any) -> None:
    def cycle() -> None:
        with open_engine(provider) as a, open_engine(provider) as b:
            exchange(a, b)

    cycle()  # what libfabric opens once
    before = left_open()
    for _ in range(50):
        cycle()
    assert wait_for(lambda: left_open() <= before), (before, left_open())


@pytest.mark.parametrize("provider", ["tcp"], indirect=True)
def test_an_engine_that_gets_no_thread_is_closed_at_once(provider: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    open_engine(provider).close()  # what libfabric starts once
    _, before = left_open()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start") as caught:
            open_engine(provider)
    assert caught.value.__traceback__ is not None  # which holds the frames, and they hold the engine
    assert wait_for(lambda: left_open()[1] <= before), (before, left_open())


def test_a_forgotten_engine_is_closed(provider: Any) -> None:
    open_engine(provider).close()
    before = left_open()
    engine = open_engine(provider)
    region = engine.register(bytearray(4096))
    peer = engine.add_peer(engine.address)
    counter = engine.counter(unit_bytes=1)  # never released
    engine.send(peer, b"x").result(LONG)
    engine.on_message(lambda _sender, _payload: None)
    del engine, region, peer
    gc.collect()
    assert isinstance(counter.exception(LONG), ClosedError)
    with pytest.raises(ClosedError, match="gone"):
        counter.arm(1)
    counter.release()
    del counter
    assert wait_for(lambda: left_open() <= before), (before, left_open())


def test_an_engine_that_is_forgotten_with_work_in_flight_ends_it_first(provider: Any) -> None:
    open_engine(provider).close()
    before = left_open()
    a, b = open_engine(provider), open_engine(provider)
    target = np.zeros(32 << 20, np.uint8)
    source = a.register(np.full(32 << 20, 5, np.uint8))
    remote = b.register(target)
    transfers = [a.write(a.add_peer(b.address), source, 0, remote.remote, 0, 32 << 20) for _ in range(4)]
    counter = b.counter(unit_bytes=1, expected_units=1)
    a.write(a.add_peer(b.address), source, 0, remote.remote, 0, 1, token=counter.token)
    ended = [threading.Event() for _ in transfers]
    for transfer, event in zip(transfers, ended, strict=True):
        transfer.add_done_callback(lambda _, event=event: event.set())
    del a, source, transfers, transfer
    for event in ended:
        assert event.wait(LONG)
    counter.result(LONG)
    del b, remote, counter
    assert wait_for(lambda: left_open() <= before), (before, left_open())


def test_an_engine_closes_while_its_neighbour_writes_to_it(provider: Any) -> None:
    """The neighbour lives on. (shm within one process: the closed one's queue is unmapped under it.)"""
    # On verbs rxm crashes of messages to one that closes and does not know who sends them: docs/providers.md.
    acquainted = provider.name == "verbs"
    with open_engine(provider) as b:
        source = b.register(np.ones(1 << 20, np.uint8))
        for _ in range(10):
            a = open_engine(provider)
            peer = b.add_peer(a.address, monitor=acquainted)
            if acquainted:
                a.add_peer(b.address, monitor=True)
            memory = a.register(np.zeros(1 << 20, np.uint8))
            transfers = [b.write(peer, source, 0, memory.remote, 0, 1 << 20)]
            closing = threading.Thread(target=a.close)
            closing.start()
            while closing.is_alive():
                with contextlib.suppress(WouldBlockError):  # a close that takes long on a busy machine
                    transfers.append(b.write(peer, source, 0, memory.remote, 0, 1 << 20))
                    b.send(peer, b"ping")
            transfers += [b.write(peer, source, 0, memory.remote, 0, 1 << 20) for _ in range(4)]
            b.remove_peer(peer)
            for transfer in transfers:
                assert isinstance(transfer.exception(LONG), None | TransferError)


def test_who_closes_is_lost_after_all_that_it_wrote_and_sent_has_come(provider: Any) -> None:
    patient = {"heartbeat_interval_s": 2.0}  # silence alone would tell after 10 s
    nbytes = 4 << 20
    with open_engine(provider, **patient) as b:
        memory = b.register(np.zeros(nbytes, np.uint8))
        for _ in range(4):
            seen: list[str] = []
            b.on_message(lambda _sender, payload, seen=seen: seen.append(payload.decode()))
            b.on_peer_lost(lambda _epoch, reason, seen=seen: seen.append(reason))
            with open_engine(provider, **patient) as a, b.counter(unit_bytes=1 << 20, expected_units=4) as counter:
                counter.add_done_callback(lambda _, seen=seen: seen.append("counted"))
                b.add_peer(a.address, monitor=True)
                peer = a.add_peer(b.address, monitor=True)
                source = a.register(np.ones(nbytes, np.uint8))
                written = a.write(peer, source, 0, memory.remote, 0, nbytes, token=counter.token)
                sent = a.send(peer, b"sent")
                written.result(LONG)
                sent.result(LONG)
                a.close()
                assert wait_for(lambda seen=seen: "it has closed its engine" in seen), seen
                assert sorted(seen[:-1]) == ["counted", "sent"], seen


def test_a_closed_engine_keeps_nothing_of_its_callbacks(provider: Any) -> None:
    class Owner:
        pass

    owner = Owner()
    engine = open_engine(provider)
    before = sys.getrefcount(owner)
    engine.on_message(lambda _sender, _payload, owner=owner: None)
    engine.on_peer_lost(lambda _epoch, _reason, owner=owner: None)
    engine.on_notify(lambda _group, _value, owner=owner: None)
    engine.on_stalled(lambda _stall, owner=owner: None)
    assert sys.getrefcount(owner) == before + 4
    engine.close()
    assert sys.getrefcount(owner) == before


def test_regions_hold_their_buffers_until_they_are_closed(provider: Any) -> None:
    with open_engine(provider) as engine:
        buffer = bytearray(4096)
        region = engine.register(buffer)
        with pytest.raises(BufferError):
            buffer.extend(b"x")
        region.close()
        del region
        gc.collect()
        buffer.extend(b"x")


@pytest.mark.parametrize("provider", with_rdma("tcp", "net"), indirect=True)  # shm has one NIC a name
def test_two_groups_are_two_sets_of_counters_and_memory(provider: Any) -> None:
    first, *others = nics_of(provider.name, 3)
    rails = [[first], others]
    with Engine(provider.name, groups=rails) as a, Engine(provider.name, groups=rails) as b:
        peer = a.add_peer(b.address)
        source = [a.register(np.full(1 << 20, 1 + group, np.uint8), group=group) for group in range(2)]
        arrays = [np.zeros(1 << 20, np.uint8) for _ in range(2)]
        target = [b.register(array, group=group) for group, array in enumerate(arrays)]
        for group in range(2):
            with b.counter(unit_bytes=1024, expected_units=1024, group=group) as counter:
                a.write(peer, source[1 - group], 0, target[group].remote, 0, 1 << 20, token=counter.token)
                counter.result(LONG)
            assert arrays[group].min() == arrays[group].max() == 2 - group
        counter = b.counter(unit_bytes=1024, expected_units=1, group=1)
        with pytest.raises(ConfigError, match="group 1, the remote region of its group 0"):
            a.write(peer, source[0], 0, target[0].remote, 0, 1024, token=counter.token)
        with pytest.raises(ConfigError, match="group 1, the remote region of its group 0"):
            a.signal(peer, target[0].remote, counter.token)
        a.signal(peer, target[1].remote, counter.token).result(LONG)
        counter.result(LONG)


def test_a_name_that_a_killed_process_left_behind_is_no_obstacle() -> None:
    """Its id is ours now, as in a container that was started again."""
    from fabric_kv import _native

    if not _native.list_offers("shm"):
        pytest.skip("libfabric offers no provider shm")
    shared = Path("/dev/shm")
    engine = Engine("shm")
    (name,) = shared.glob(f"{os.getpid()}-*")
    memory = name.read_bytes()[: 1 << 20]
    engine.close()
    left = [shared / f"{os.getpid()}:{os.getuid()}:{index}" for index in range(4)]
    try:
        for path in left:
            path.write_bytes(memory)
        with Engine("shm") as a, Engine("shm") as b:
            exchange(a, b)
    finally:
        for path in left:
            path.unlink(missing_ok=True)


@pytest.mark.parametrize("progress", ["spin", "adaptive"])
def test_progress_modes_and_pinning(provider: Any, progress: str) -> None:
    cpus = [sorted(os.sched_getaffinity(0))[:1]]
    options = EngineOptions(progress=progress)
    with (
        Engine(provider.name, nics=provider.nics, cpus=cpus, options=options) as a,
        Engine(provider.name, nics=provider.nics, options=options) as b,
    ):
        exchange(a, b)
        names = {}
        for task in Path("/proc/self/task").iterdir():
            names[task.name] = (task / "comm").read_text().strip()
        ours = [int(task) for task, name in names.items() if name == "fabric_kv"]
        assert len(ours) == 2
        assert [set(cpus[0])] == [mask for task in ours if len(mask := os.sched_getaffinity(task)) == 1][:1]


def test_an_idle_engine_costs_almost_nothing(provider: Any, record_property: Callable[[str, object], None]) -> None:
    """A figure for the reader, and a bound that only spinning would break."""
    with open_engine(provider) as a, open_engine(provider) as b:
        exchange(a, b)
        time.sleep(0.2)  # it spins a moment after work
        cpu, wall = time.process_time(), time.perf_counter()
        time.sleep(0.5)
        share = (time.process_time() - cpu) / (time.perf_counter() - wall) / 2
    record_property("idle_cpu_percent", round(100 * share, 2))
    print(f"{provider.name}: {100 * share:.2f} % of a core per idle engine")
    assert share < 0.5


# -- processes ---------------------------------------------------------------------------------------------------------

PRELUDE = """
import os, sys, gc, threading, numpy as np
from fabric_kv.engine import Engine
from fabric_kv.errors import ClosedError
provider, nics = sys.argv[1], sys.argv[2:]
a, b = Engine(provider, nics=nics), Engine(provider, nics=nics)
target = np.zeros(32 << 20, np.uint8)
source, remote = a.register(np.ones(32 << 20, np.uint8)), b.register(target)
peer = a.add_peer(b.address, monitor=True)
b.add_peer(a.address, monitor=True)
def write(token=None): return a.write(peer, source, 0, remote.remote, 0, 32 << 20, token=token)
"""


def run(provider: Any, code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PRELUDE + code, provider.name, *provider.nics],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    return done.stdout + done.stderr


def test_the_interpreter_ends_with_work_in_flight(provider: Any) -> None:
    out = run(
        provider,
        """
transfers = [write() for _ in range(8)]
transfers[-1].add_done_callback(lambda t: print("ended", type(t.exception()).__name__))
print("exits")
""",
    )
    assert out.split()[:2] == ["exits", "ended"]
    assert out.split()[2:] in (["NoneType"], ["ClosedError"], ["TransferError"])


def test_a_thread_that_still_waits_does_not_keep_the_interpreter(provider: Any) -> None:
    out = run(
        provider,
        """
counter = b.counter(unit_bytes=1, expected_units=1)
def wait():
    try: counter.result()
    except ClosedError: os.write(1, b"closed")
threading.Thread(target=wait, daemon=True).start()
""",
    )
    assert out in ("closed", "")


def test_a_forked_child_is_refused_and_harms_nobody(provider: Any) -> None:
    out = run(
        provider,
        """
transfers = [write() for _ in range(4)]
child = os.fork()
if child == 0:
    assert a.closed and b.closed
    calls = [write, lambda: a.send(peer, b""), lambda: a.register(bytearray(8)), lambda: a.counter(unit_bytes=1),
             lambda: a.add_peer(b.address)]
    for call in calls:
        try: call()
        except ClosedError: pass
        else: os._exit(3)
    a.close(); source.close()
    del transfers, peer, source, remote, a, b
    gc.collect()
    sys.exit(0)  # with all that runs at exit
_, status = os.waitpid(child, 0)
assert status == 0, status
for transfer in transfers: transfer.result(30)
with b.counter(unit_bytes=1 << 20, expected_units=32) as counter:
    write(counter.token).result(30); counter.result(30)
assert target.min() == 1
assert not a.closed
for transfer in transfers: transfer.result(30)
a.close(); b.close()
print("fine")
""",
    )
    assert out.strip() == "fine", out


def test_a_forked_child_may_open_an_engine_of_its_own(provider: Any) -> None:
    out = run(
        provider,
        """
child = os.fork()
if child == 0:
    try:
        with Engine(provider, nics=nics) as c:
            c.on_message(lambda sender, payload: came.set())
            came = threading.Event()
            c.send(c.add_peer(c.address), b"x").result(30)
            os._exit(0 if came.wait(30) else 4)
    except BaseException as error:
        print(repr(error)); os._exit(5)
_, status = os.waitpid(child, 0)
write().result(30)
print("fine", status)
""",
    )
    if provider.name == "verbs":  # libfabric keeps the parent's devices: docs/providers.md
        assert re.match(r"FabricError\(.*cannot be opened.*forked after process", out)
        assert out.split()[-2:] == ["fine", str(5 << 8)]
    else:
        assert out.strip() == "fine 0", out
