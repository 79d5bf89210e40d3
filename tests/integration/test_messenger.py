"""Two processes over tcp, and verbs where there are devices: every kind of tensor parallelism, and every end."""

import asyncio
import functools
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fabric_kv.errors import (
    PeerLostError,
    PeerUnreachableError,
    PlanError,
    RequestCancelledError,
    RequestFailedError,
    RequestRejectedError,
    RequestTimeoutError,
)
from fabric_kv.messenger import Chunk, RequestState, wire
from fabric_kv.regions import EngineAddress

from .child import LONG, ChildProcess
from .engine_peer import wait_for
from .fabrics import SLOWER, nics_of, with_rdma
from .messenger_node import BOUNDS, LAYERS, DecodeNode, PrefillNode
from .shm_queue import stop_without_locks


class Child(ChildProcess):
    """A node in a process of its own."""

    def __init__(self, role, tp_size=1, num_nics=1, provider="tcp"):
        nics_of(provider, num_nics)  # where there are fewer the test is skipped, which a child cannot do
        super().__init__("messenger_node", role, str(tp_size), str(num_nics), provider)
        self.address = bytes.fromhex(self.wait_until_up()["address"])


HERE = {"here": DecodeNode, "prefill here": PrefillNode}  # in this process


@pytest.fixture
def start_over():
    """Make children and decode nodes that are gone after the test, over the provider that is named."""
    made = []

    def make(provider, kind, *args, **kwargs):
        kwargs["provider"] = provider
        made.append(HERE[kind](*args, **kwargs) if kind in HERE else Child(kind, *args, **kwargs))
        return made[-1]

    yield make
    for item in reversed(made):
        item.close()
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("fabric_kv-")]
    assert not left


@pytest.fixture(params=with_rdma("tcp"))
def start(start_over, request):
    """The same over any provider with addresses."""
    return functools.partial(start_over, request.param)


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (1, 3), (3, 1), (3, 3)])
def test_pages_arrive_whole_for_every_pair_of_tp(start, prefill_tp, decode_tp):
    prefill, decode = start("prefill", prefill_tp), start("here", decode_tp)
    peer = decode.messenger.connect(prefill.address)
    handles = [decode.submit(peer, number, tokens) for number, tokens in enumerate((1, 16, 100, 333, 47))]
    for handle in handles:
        decode.check(handle, LONG)
    assert {prefill.wait_for("released")["id"] for _ in handles} == {f"r{number}" for number in range(5)}
    assert prefill.do(do="state")["free"] == 128
    assert len(decode.free) == 128
    assert decode.canaries_intact()


@pytest.mark.parametrize("dispatch", ["thread", "manual"])
def test_many_requests_at_once_on_one_event_loop(start, seed, dispatch):
    prefill, decode = start("prefill", 3), start("here", 1, dispatch=dispatch)
    sizes = np.random.default_rng(seed).integers(1, 120, 80)

    async def one(peer, number, gate):
        async with gate:
            handle = decode.submit(peer, number, int(sizes[number]))
            await handle
            decode.check(handle, LONG)

    async def run():
        loop, gate = asyncio.get_running_loop(), asyncio.Semaphore(10)
        if dispatch == "manual":
            loop.add_reader(decode.engine.fileno(), decode.engine.poll)
        peer = await loop.run_in_executor(None, decode.messenger.connect, prefill.address)
        done = await asyncio.gather(*(one(peer, number, gate) for number in range(len(sizes))))
        await loop.run_in_executor(None, decode.messenger.close)
        return done

    assert asyncio.run(run()) == [None] * len(sizes)
    for _ in sizes:
        prefill.wait_for("released")
    assert prefill.do(do="state")["free"] == 128
    assert decode.canaries_intact()
    assert decode.messenger.state()["counts"]["ready"] == len(sizes)


def test_warmup_connects_all_nics_of_several_peers(start):
    prefills, decode = [start("prefill", 1, 3), start("prefill")], start("here", 1, num_nics=2)
    peers = decode.messenger.warmup([prefill.address for prefill in prefills], LONG)
    assert all(peer.alive for peer in peers)
    for prefill, peer in zip(prefills, peers, strict=True):
        assert decode.messenger.connect(prefill.address) is peer
        assert min(prefill.do(do="state")["rail_ops"]) > 0, "not all NICs were used before the first request"
        decode.check(decode.submit(peer, 0, 100), LONG)


def test_warmup_tells_of_the_one_that_fails_and_keeps_the_others(start):
    prefill, decode = start("prefill"), start("here", 1)
    nobody = msgspec.structs.replace(EngineAddress.from_bytes(prefill.address), epoch=bytes(16)).to_bytes()
    with pytest.raises(PeerUnreachableError, match="is no more"):
        decode.messenger.warmup([prefill.address, nobody], LONG)
    peer = decode.messenger.connect(prefill.address)
    first = decode.submit(peer, 0, 333)
    for order in [nobody, prefill.address], [prefill.address, nobody]:
        with pytest.raises(PeerUnreachableError, match="is no more"):
            decode.messenger.warmup(order, LONG)
    assert decode.messenger.connect(prefill.address) is peer, "its session was ended"
    decode.check(first, LONG)
    assert len(decode.messenger.state()["peers"]) == 1


def test_a_reject_brings_its_reason_and_leaves_both_sides_usable(start):
    prefill, decode = start("prefill"), start("here", 1)
    peer = decode.messenger.connect(prefill.address)
    prefill.do(do="refuse", reason="the queue is full")
    error = decode.submit(peer, 0, 50).exception(LONG)
    assert isinstance(error, RequestRejectedError)
    assert "the queue is full" in str(error)
    assert error.pages_clean
    prefill.do(do="refuse", reason=None)
    decode.check(decode.submit(peer, 1, 50), LONG)


def test_layers_follow_a_word_that_something_else_bumps(start):
    prefill, decode = start("prefill", 3), start("here", 1)
    peer = decode.messenger.connect(prefill.address)
    prefill.do(do="bump_a_word")
    for handle in [decode.submit(peer, number, tokens) for number, tokens in enumerate((1, 100, 333))]:
        decode.check(handle, LONG)
    for _ in range(3):
        prefill.wait_for("released")
    state = prefill.do(do="state")
    assert (state["free"], state["requests"]) == (128, 0)
    assert "idle_layers" not in state["counts"], "layer_done was called"
    assert decode.canaries_intact()


def test_a_step_that_failed_is_not_written_when_the_word_goes_on(start):
    """The next step's word says that all layers of this one are done, which they are not."""
    node, decode = start("prefill here", 1), start("here", 1)
    peer = decode.messenger.connect(node.engine.address)
    node.allow(0)
    word = np.zeros(1, np.uint64)
    watch = node.engine.watch(word)
    for number in range(40):
        handle = decode.submit(peer, number, 16)
        assert wait_for(lambda: node.pages)
        ((key, pages),) = node.pages.items()
        step = node.messenger.begin_step([Chunk(key, 0, 16, [pages], True)], watch=watch)
        word[0] = step << 16 | 1
        node.messenger.fail(key, "the model failed")
        word[0] = (step + 1) << 16
        assert isinstance(handle.exception(LONG), RequestFailedError)
        assert wait_for(lambda: not node.pages)
        word[0] = step << 16  # for the next step's number


def test_a_source_page_that_is_reused_too_early_is_noticed_where_that_is_asked_for(start):
    node, decode = start("prefill here", 1, check_sources=True), start("here", 1)
    peer = decode.messenger.connect(node.engine.address)
    for handle in [decode.submit(peer, number, 100) for number in range(3)]:
        decode.check(handle, LONG)
    node.allow(0)
    handle = decode.submit(peer, 3, 16)
    # Those of the requests before may not be released yet.
    assert wait_for(lambda: any(key.request_id == "r3" for key in list(node.pages)))
    ((key, pages),) = ((key, pages) for key, pages in list(node.pages.items()) if key.request_id == "r3")
    step = node.messenger.begin_step([Chunk(key, 0, 16, [pages], True)])
    node.messenger.layer_done(step, 0)
    node.arrays[0][0][0, pages[0], 0, 3] += 1
    for layer in range(1, LAYERS):
        node.messenger.layer_done(step, layer)
    error = handle.exception(LONG)
    assert isinstance(error, RequestFailedError)
    assert f"source page {pages[0]} was changed in layer 0 before it had been sent" in str(error)
    assert node.messenger.state()["counts"]["changed_sources"] == 1


@pytest.mark.parametrize(("prefill_nics", "decode_nics"), [(3, 3), (3, 1), (1, 2)])
def test_pages_arrive_whole_over_several_nics(start, prefill_nics, decode_nics):
    prefill, decode = start("prefill", 3, prefill_nics), start("here", 1, num_nics=decode_nics)
    peer = decode.messenger.connect(prefill.address)
    for handle in [decode.submit(peer, number, tokens) for number, tokens in enumerate((1, 100, 333))]:
        decode.check(handle, LONG)
    assert decode.canaries_intact()


@pytest.fixture(params=[1, 3], ids=["one-nic", "three-nics"])
def halfway(start, request):
    """A request of 200 tokens whose first chunk was sent, and no more will be."""
    prefill, decode = start("prefill", 3, request.param), start("here", 1, num_nics=request.param)
    prefill.do(do="allow", chunks=1)
    peer = decode.messenger.connect(prefill.address)
    handle = decode.submit(peer, 0, 200)
    prefill.wait_for("chunk")
    return prefill, decode, peer, handle


def keys_are_checked(node):
    """Whether closing a registration keeps a lost peer's writes out, so that its pages are clean."""
    return node.engine.describe()["groups"][0]["rails"][0]["nic_checks_keys"]


def next_one_works(prefill, decode, peer):
    prefill.do(do="allow", chunks=1000)
    decode.check(decode.submit(peer, 7, 150), LONG)
    assert decode.canaries_intact()


def test_a_failure_halfway_is_told_with_clean_pages(halfway):
    prefill, decode, peer, handle = halfway
    prefill.do(do="fail", reason="preempted")
    error = handle.exception(LONG)
    assert isinstance(error, RequestFailedError)
    assert "preempted" in str(error)
    assert error.pages_clean
    assert prefill.wait_for("failed")["error"] == "RequestFailedError"
    next_one_works(prefill, decode, peer)


def test_a_cancel_halfway_returns_clean_pages(halfway):
    prefill, decode, peer, handle = halfway
    assert handle.progress()[0] < handle.progress()[1]
    handle.cancel()
    error = handle.exception(LONG)
    assert isinstance(error, RequestCancelledError)
    assert error.pages_clean
    assert prefill.wait_for("failed")["error"] == "RequestCancelledError"
    next_one_works(prefill, decode, peer)


def test_a_deadline_ends_a_request_on_both_sides(start):
    prefill, decode = start("prefill"), start("here", 1)
    prefill.do(do="allow", chunks=0)
    peer = decode.messenger.connect(prefill.address)
    error = decode.submit(peer, 0, 50, deadline_s=0.3 * SLOWER).exception(LONG)
    assert isinstance(error, RequestTimeoutError | RequestFailedError)
    assert error.pages_clean
    assert prefill.wait_for("failed")["error"] in ("RequestCancelledError", "RequestTimeoutError")
    next_one_works(prefill, decode, peer)


def test_layouts_that_do_not_fit_are_refused_once_and_in_words(start):
    prefill, other, decode = start("prefill"), start("here", 1, heads=4), start("here", 1)
    with pytest.raises(PlanError, match=r"K\.heads +3 +4 +<- differs"):
        other.messenger.connect(prefill.address)
    peer = decode.messenger.connect(prefill.address)
    next_one_works(prefill, decode, peer)


def test_sigkill_of_prefill_halfway_ends_the_request_and_a_new_one_serves(halfway, start):
    prefill, decode, peer, handle = halfway
    prefill.signal(signal.SIGKILL)
    error = handle.exception(LONG)
    assert isinstance(error, PeerLostError)
    assert error.pages_clean is keys_are_checked(decode)
    assert handle.poll() is RequestState.PEER_LOST
    with pytest.raises(PeerLostError):
        decode.submit(peer, 1, 1)
    assert decode.messenger.state()["poisoned_pages"] == (0 if keys_are_checked(decode) else 13)
    with pytest.raises(PeerUnreachableError):
        decode.messenger.connect(prefill.address, timeout=1.0)
    again = start("prefill", 1)
    next_one_works(again, decode, decode.messenger.connect(again.address))


@pytest.fixture(params=[LONG])
def halfway_shm(start_over, request):
    """Over shared memory, where the end of a process proves that it writes no more; the parameter bounds the fence."""
    bounds = msgspec.structs.replace(BOUNDS, fence_s=request.param)
    prefill, decode = start_over("shm", "prefill", 3), start_over("shm", "here", 1, bounds=bounds)
    prefill.do(do="allow", chunks=1)
    handle = decode.submit(decode.messenger.connect(prefill.address), 0, 200)
    prefill.wait_for("chunk")
    yield prefill, decode, handle
    for left in Path("/dev/shm").glob(f"{prefill.process.pid}-*"):  # libfabric's; whoever is killed cannot tidy up
        left.unlink()


def test_sigkill_of_prefill_over_shm_hands_back_clean_pages(halfway_shm):
    prefill, decode, handle = halfway_shm
    stop_without_locks(prefill.process.pid, [os.getpid()])
    prefill.signal(signal.SIGKILL)
    error = handle.exception(LONG)
    assert isinstance(error, PeerLostError)
    assert error.pages_clean, str(error)
    assert "has exited" in str(error)
    assert handle.checked.wait(LONG)
    assert decode.messenger.poisoned == []
    assert len(decode.free) == 128
    assert decode.canaries_intact()


@pytest.mark.parametrize("halfway_shm", [0.2], indirect=True)
def test_a_stopped_prefill_over_shm_keeps_pages_until_it_is_dead(halfway_shm):
    prefill, decode, handle = halfway_shm
    stop_without_locks(prefill.process.pid, [os.getpid()])
    error = handle.exception(LONG)
    assert isinstance(error, PeerLostError)
    assert not error.pages_clean
    assert decode.messenger.reclaim() == []
    assert decode.messenger.state()["poisoned_pages"] == 13
    prefill.signal(signal.SIGKILL)
    prefill.process.wait(LONG)
    before = decode.engine.describe()["groups"][0]["counters_poisoned"]
    found = []
    assert wait_for(lambda: found.extend(decode.messenger.reclaim()) or found)
    assert [item.request_id for item in found] == ["r0"]
    assert decode.engine.describe()["groups"][0]["counters_poisoned"] == before, "the fence has used up a counter"
    assert decode.messenger.state()["poisoned_pages"] == 0


def test_a_stopped_prefill_is_noticed_and_welcome_when_it_wakes(halfway):
    prefill, decode, _, handle = halfway
    prefill.signal(signal.SIGSTOP)
    error = handle.exception(LONG)
    assert isinstance(error, PeerLostError)
    assert error.pages_clean is keys_are_checked(decode)
    prefill.signal(signal.SIGCONT)
    # It has noticed too, or will when it hears of the new session.
    peer = decode.messenger.connect(prefill.address)
    assert prefill.wait_for("failed")["error"] == "PeerLostError"
    next_one_works(prefill, decode, peer)


def test_sigkill_of_decode_halfway_frees_the_source_pages(start):
    prefill, decode = start("prefill"), start("decode")
    prefill.do(do="allow", chunks=1)
    decode.do(do="connect", address=prefill.address.hex())
    decode.do(do="submit", number=0, tokens=200)
    prefill.wait_for("chunk")
    decode.signal(signal.SIGKILL)
    assert prefill.wait_for("failed")["error"] == "PeerLostError"
    state = prefill.do(do="state")
    assert (state["free"], state["requests"]) == (128, 0)
    again = start("here", 3)
    next_one_works(prefill, again, again.messenger.connect(prefill.address))


def test_writing_to_a_decode_that_was_killed_ends(start):
    """The sender's completions do not say that anyone was there: released, failed and lost are all possible."""
    prefill, decode = start("prefill", 3), start("decode")
    prefill.do(do="allow", chunks=1)
    decode.do(do="connect", address=prefill.address.hex())
    decode.do(do="submit", number=0, tokens=1500)
    prefill.wait_for("chunk")
    decode.signal(signal.SIGKILL)
    prefill.do(do="allow", chunks=1000)
    prefill.wait_for("failed", "released")
    assert prefill.do(do="state")["free"] == 128


def test_a_stopped_decode_frees_the_source_pages(start):
    prefill, decode = start("prefill"), start("decode")
    prefill.do(do="allow", chunks=1)
    decode.do(do="connect", address=prefill.address.hex())
    decode.do(do="submit", number=0, tokens=200)
    prefill.wait_for("chunk")
    decode.signal(signal.SIGSTOP)
    assert prefill.wait_for("failed")["error"] == "PeerLostError"
    decode.signal(signal.SIGCONT)
    assert decode.wait_for("done")["error"] == "PeerLostError"
    decode.do(do="connect", address=prefill.address.hex())
    prefill.do(do="allow", chunks=1000)
    decode.do(do="submit", number=1, tokens=200)
    done = decode.wait_for("done")
    assert (done["error"], done["wrong"]) == ("NoneType", None)


def test_closing_prefill_tells_decode_and_the_other_way_round(halfway):
    prefill, _, peer, handle = halfway
    prefill.do(do="close")
    error = handle.exception(LONG)
    assert isinstance(error, RequestFailedError | PeerLostError)
    assert error.pages_clean
    assert not peer.alive


def test_closing_decode_frees_prefill(start):
    prefill, decode = start("prefill"), start("decode")
    prefill.do(do="allow", chunks=1)
    decode.do(do="connect", address=prefill.address.hex())
    decode.do(do="submit", number=0, tokens=200)
    prefill.wait_for("chunk")
    assert decode.do(do="close")["counts"]["closed"] == 1
    assert prefill.wait_for("failed")["error"] == "RequestCancelledError"
    assert prefill.do(do="state")["free"] == 128


def test_nobody_at_the_address_is_unreachable(start):
    gone, decode = start("prefill"), start("here", 1)
    gone.signal(signal.SIGKILL)
    gone.process.wait(LONG)
    with pytest.raises(PeerUnreachableError):
        decode.messenger.connect(gone.address, timeout=2.0)
    assert decode.messenger.state()["peers"] == {}


def test_random_bytes_on_the_control_path_change_nothing(start, seed):
    prefill, decode, liar = start("prefill"), start("here", 1), start("here", 1)
    dice = np.random.default_rng(seed)
    target = liar.engine.add_peer(prefill.address)
    for size in (0, 1, 4, 100, 20_000, 1 << 20):
        for prefix in (b"", b"FKV\x01", b"FKV" + bytes([wire.PROTOCOL_VERSION])):
            liar.engine.send(target, prefix + dice.bytes(size)).result(LONG)
    peer = decode.messenger.connect(prefill.address)
    next_one_works(prefill, decode, peer)
    counts = prefill.do(do="state")["counts"]
    assert counts["malformed"] + counts["other_version"] == 18


def test_the_example_in_the_documentation_runs_as_printed():
    text = (Path(__file__).parents[2] / "docs" / "messenger.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, timeout=LONG)
    assert done.returncode == 0, done.stderr
    # Two threads print, and each line in two pieces: the text and its end.
    lines = ["[0.5 2.5]", "source pages are free again"]
    assert done.stdout.replace("\n", "") in ("".join(lines), "".join(reversed(lines)))
