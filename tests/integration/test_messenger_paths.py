"""One of several ways between two engines breaks, or stands still, under a running messenger, and the others go on."""

import contextlib
import queue
import socket

import msgspec
import numpy as np
import pytest

from fabric_kv import Engine
from fabric_kv.errors import FabricError, RequestFailedError, RequestStalledError, TransferCancelledError
from fabric_kv.messenger import RequestState

from .child import LONG
from .engine_peer import wait_for
from .fabrics import nics_of, patient
from .forwarder import Forwarder
from .messenger_node import BOUNDS, CANARY, NUM_PAGES, OPTIONS, DecodeNode, PrefillNode

NUM_NICS = 3
HOSTS = nics_of("tcp", NUM_NICS)
# No way is waited for that long, nor does a test: what is held stays so until the request has ended.
QUICK = msgspec.structs.replace(OPTIONS, stall_s=patient(stall_s=1.0)["stall_s"])
QUICK_BOUNDS = msgspec.structs.replace(BOUNDS, **patient(count_s=1.0, cancel_s=1.0))


def free_port(host):
    with socket.socket() as taken:
        taken.bind((host, 0))
        return taken.getsockname()[1]


def engine_behind(forwarders, *, apart=False):
    """An engine whose NICs are reached through these, where they are not None; apart: each NIC is a device group."""
    for _ in range(20):
        ports = [free_port(host) for host in HOSTS[: len(forwarders)]]
        nics = [f"{host}:{port}" for host, port in zip(HOSTS, ports, strict=False)]
        hidden = [(nic, port, each) for nic, port, each in zip(nics, ports, forwarders, strict=True) if each]
        options = msgspec.structs.replace(QUICK, advertise={nic: each.address for nic, _, each in hidden})
        with contextlib.suppress(FabricError):  # A port was taken meanwhile.
            engine = Engine("tcp", groups=[[nic] for nic in nics] if apart else [nics], options=options)
            for _, port, each in hidden:
                each.target = each.host, port
            return engine
    raise AssertionError("no ports were free")


class Ways:
    """A prefill and a decode side with several NICs each, of which one of decode's is reached by a way of ours.

    ``held``: never open. ``apart``: it alone leads to the pages; messages have a device group of their own.
    """

    def __init__(self, *, held=False, apart=False):
        # No longer than it must, for a connection that will never be there.
        bounds = msgspec.structs.replace(QUICK_BOUNDS, **(patient(connect_rails_s=0.5) if held else {}))
        groups = [[HOSTS[0]], [HOSTS[1]]] if apart else [HOSTS]
        self.prefill = PrefillNode(
            1, engine=Engine("tcp", groups=groups, options=QUICK), group=len(groups) - 1, bounds=bounds
        )
        # A pair of NICs that carries no messages: those go by the first one, which differs from peer to peer (see
        # Poster::links_to). Where both sides connect at once, each by its own address, rxm does not cope with a third.
        num_nics = len(HOSTS[:2] if apart else HOSTS)
        self.number = 1 if apart else (self.prefill.engine.epoch[0] + 1) % num_nics
        self.victim = Forwarder(HOSTS[self.number])
        while True:
            engine = engine_behind([self.victim if i == self.number else None for i in range(num_nics)], apart=apart)
            if apart or engine.epoch[0] % num_nics != self.number:
                break
            engine.close()
        self.decode = DecodeNode(1, engine=engine, group=len(groups) - 1, bounds=QUICK_BOUNDS)
        self.num_submitted = 0
        if held:
            self.victim.hold()
        self.peer = self.decode.messenger.connect(self.prefill.engine.address)

    def fetch(self, num_tokens=40):
        """One request to its end, which is bounded and is no timeout."""
        handle = self.submit(num_tokens)
        error = handle.exception(LONG)
        assert handle.checked.wait(LONG)
        assert error is not None or handle.wrong is None, handle.wrong
        assert isinstance(error, RequestStalledError | RequestFailedError | None), error
        return handle

    def submit(self, num_tokens=40):
        self.num_submitted += 1
        return self.decode.submit(self.peer, self.num_submitted, num_tokens, deadline_s=LONG)

    def fetch_until_ready(self):
        assert wait_for(lambda: self.fetch().poll() is RequestState.READY)

    def start(self):
        """Until requests are ready, and some go by the way that is to break."""

        def is_taken():
            rails = self.prefill.engine.describe()["groups"][0]["rails"]
            return self.fetch().poll() is RequestState.READY and rails[self.number]["ops"] > 0

        assert wait_for(is_taken)

    def take_back(self):
        """Pages that have come back too late."""
        for item in self.decode.messenger.reclaim():
            (pages,) = item.pages
            for array in self.decode.arrays:
                array[:, :, pages] = CANARY
            self.decode.free += pages.tolist()
        return NUM_PAGES - len(self.decode.free)

    def check_all(self):
        """Every request has ended once on either side, and every page is accounted for."""
        assert wait_for(lambda: len(self.prefill.free) == NUM_PAGES), "source pages are kept for ever"
        counts = self.decode.messenger.state()["counts"]
        assert counts["ready"] + counts.get("stalled", 0) + counts.get("failed", 0) == self.num_submitted
        poisoned = {page for item in self.decode.messenger.poisoned for page in item.pages[0].tolist()}
        assert sorted([*self.decode.free, *poisoned]) == list(range(NUM_PAGES))
        assert self.decode.canaries_intact()
        assert self.peer.alive, "its messages go another way"

    def close(self):
        self.victim.carry()
        self.decode.close()
        self.prefill.close()
        self.victim.close()


@pytest.fixture
def make_ways():
    made = []
    yield lambda **how: made.append(Ways(**how)) or made[-1]
    for ways in made:
        ways.close()


@pytest.fixture
def ways(make_ways):
    return make_ways()


def test_a_way_that_is_cut_fails_what_it_carries_and_the_others_go_on(ways):
    ways.start()
    open_ = [ways.submit(100) for _ in range(3)]
    ways.victim.cut()
    ends = [handle.exception(LONG) for handle in open_]
    assert all(isinstance(error, RequestStalledError | RequestFailedError | None) for error in ends), ends
    ways.fetch_until_ready()
    assert ways.peer.degraded is None
    for _ in range(3):
        ways.fetch(200)
    ways.take_back()
    ways.check_all()


def test_a_way_that_stands_still_ends_requests_typed_and_in_time(ways):
    """Small writes are done for tcp as soon as the kernel has them: only the counters know that they are not here."""
    ways.start()
    ways.victim.hold()
    ends = (ways.fetch() for _ in range(40))
    stuck = next(handle for handle in ends if handle.poll() is not RequestState.READY)
    assert stuck.poll() is RequestState.STALLED
    error = stuck.exception(0)
    assert error.reason in ("uncounted", "stalled")
    assert not error.pages_clean
    assert ways.peer.degraded.startswith("stalled: ")
    assert ways.decode.messenger.state()["peers"][ways.peer.epoch.hex()]["degraded"] == ways.peer.degraded
    assert ways.take_back() == 3, "what is on its way may land at any time"
    ways.victim.carry()
    # All that was written comes now, and is counted: that is as good as if it had come in time.
    assert wait_for(lambda: ways.take_back() == 0)
    ways.fetch_until_ready()
    assert ways.peer.degraded is None
    ways.check_all()


def test_a_way_that_was_never_open_is_left_out(make_ways):
    """A NIC that cannot connect says "again" for ever, and completes nothing that anybody could miss."""
    ways = make_ways(held=True)
    for _ in range(3):
        ways.fetch_until_ready()
    assert ways.victim.num_connections == 0
    ways.check_all()


def test_requests_that_no_nic_can_take_end_as_stalled(make_ways):
    ways = make_ways(held=True, apart=True)
    handle = ways.fetch()
    assert handle.poll() is RequestState.STALLED
    error = handle.exception(0)
    assert error.reason == "stalled"
    assert "takes nothing for the peer, as if it could not connect" in str(error)
    assert ways.peer.degraded.startswith("stalled: ")
    ways.victim.carry()
    assert wait_for(lambda: ways.take_back() == 0)
    ways.fetch_until_ready()
    ways.check_all()


def test_what_waits_for_a_connection_for_ever_is_named():
    with contextlib.ExitStack() as stack:
        forwarders = [Forwarder(host) for host in HOSTS[:2]]
        for forwarder in forwarders:
            stack.callback(forwarder.close)
        # Two groups of one NIC each: no other way leads into the second one.
        there = stack.enter_context(engine_behind(forwarders, apart=True))
        here = stack.enter_context(Engine("tcp", groups=[[host] for host in HOSTS[:2]], options=QUICK))
        forwarders[1].hold()
        source = here.register(np.arange(4096, dtype=np.uint8), group=1)
        memory = np.zeros(4096, np.uint8)
        target = there.register(memory, group=1)
        held = queue.SimpleQueue()
        here.on_held_up(lambda transfers, why: held.put((transfers, why)))
        peer = here.add_peer(there.address)
        here.send(peer, b"the first group's way is open").result(LONG)
        stuck = here.write(peer, source, 0, target.remote, 0, 4096)
        transfers, why = held.get(timeout=LONG)
        assert transfers == [stuck]
        assert "takes nothing for the peer, as if it could not connect" in why
        other = here.write(peer, source, 0, target.remote, 0, 4096)
        stuck.cancel()
        with pytest.raises(TransferCancelledError):
            stuck.result(LONG)
        forwarders[1].carry()
        other.result(LONG)
        assert wait_for(lambda: memory.any())


def test_pages_hold_what_was_written_whichever_way_it_went_and_when(ways):
    ways.start()
    for _ in range(3):
        ways.victim.hold()
        open_ = [ways.submit(100), ways.submit(7)]
        ways.fetch(50)
        ways.victim.carry()
        ways.fetch(30)
        for handle in open_:
            assert handle.exception(LONG) is None or handle.poll() is RequestState.STALLED
            assert handle.checked.wait(LONG)
            assert handle.poll() is RequestState.STALLED or handle.wrong is None, handle.wrong
    assert wait_for(lambda: ways.take_back() == 0)
    ways.fetch_until_ready()
    ways.check_all()
