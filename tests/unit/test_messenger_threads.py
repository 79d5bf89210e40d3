"""The parts with real threads: the actor, handles, and both messengers with a fabric that runs by itself."""

import asyncio
import threading

import numpy as np
import pytest

from fabric_kv.config import Bounds
from fabric_kv.errors import ConfigError, InternalError, RequestCancelledError, TransferTimeoutError
from fabric_kv.messenger import Chunk, DecodeMessenger, PrefillMessenger, Request, RequestState, TailPool
from fabric_kv.messenger.actor import Actor, ManualActor
from fabric_kv.testing import MemoryFabric

from .messenger_sim import CANARY, LAYERS, make_cache

LONG = 30.0  # No test waits that long unless something hangs.


@pytest.fixture
def actor():
    actor = Actor("test")
    actor.start()
    yield actor
    actor.stop(LONG)


def test_commands_run_in_order_on_one_thread(actor):
    seen = []
    for number in range(100):
        actor.post(lambda n=number: seen.append((n, threading.current_thread().name)))
    assert actor.call(lambda: len(seen), LONG) == 100
    assert seen == [(number, "test") for number in range(100)]


def test_a_command_that_raises_is_counted_and_the_thread_lives(actor, caplog):
    actor.post(lambda: 1 / 0)
    assert actor.call(lambda: "alive", LONG) == "alive"
    assert actor.num_errors == 1
    assert "ZeroDivisionError" in caplog.text


def test_call_raises_what_the_function_raises(actor):
    with pytest.raises(ZeroDivisionError):
        actor.call(lambda: 1 / 0, LONG)


def test_call_does_not_wait_for_ever(actor):
    gate = threading.Event()
    actor.post(lambda: gate.wait(LONG))
    with pytest.raises(InternalError, match="did not answer within"):
        actor.call(lambda: None, 0.001)
    gate.set()


def test_commands_after_the_end_still_run_one_at_a_time(actor):
    actor.stop(LONG)
    seen = []
    actor.post(lambda: (actor.post(lambda: seen.append("inner")), seen.append("outer")))
    assert seen == ["outer", "inner"]


def test_a_command_runs_at_once_where_nothing_else_does(actor):
    seen = []
    actor.post_now(lambda: seen.append((threading.current_thread().name, actor.is_current)))
    assert seen[0][1]
    assert not actor.is_current
    assert seen[0][0] in ("test", threading.current_thread().name)  # the former if it was about to rest


def test_a_command_that_finds_another_at_work_is_left_to_that_one(actor):
    begun, gate, seen = threading.Event(), threading.Event(), []
    actor.post(lambda: (begun.set(), gate.wait(LONG), seen.append("first")))
    assert begun.wait(LONG)
    actor.post_now(lambda: seen.append(threading.current_thread().name))
    assert not seen
    gate.set()
    assert actor.call(lambda: seen, LONG) == ["first", "test"]


def test_a_command_within_a_command_waits_for_its_end(actor):
    seen = []

    def outer():
        actor.post_now(lambda: seen.append("inner"))
        seen.append("outer")

    actor.post_now(outer)
    assert actor.call(lambda: seen, LONG) == ["outer", "inner"]


def test_a_timer_set_elsewhere_wakes_the_thread(actor):
    fired = threading.Event()
    actor.call(lambda: None, LONG)
    actor.post_now(lambda: actor.after(0.001, fired.set))
    assert fired.wait(LONG)


def test_many_threads_lose_no_command_and_never_run_two_at_once(actor):
    busy, total, orders = threading.Lock(), 0, {}

    def command(thread, number):
        nonlocal total
        assert busy.acquire(blocking=False)
        total += 1
        orders.setdefault(thread, []).append(number)
        busy.release()

    def work(thread):
        for number in range(500):
            (actor.post_now if (number + thread) % 3 else actor.post)(lambda n=number: command(thread, n))

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert actor.call(lambda: total, LONG) == 2000
    assert all(order == list(range(500)) for order in orders.values())
    assert actor.num_errors == 0


class Unwound(BaseException):
    """As trio's Cancelled and gevent's GreenletExit are: none of the builtin kinds."""


@pytest.mark.parametrize("error", [SystemExit, asyncio.CancelledError, KeyboardInterrupt, Unwound])
def test_a_command_that_raises_no_exception_does_not_end_the_thread(actor, error):
    def command():
        raise error

    actor.post(command)
    assert actor.call(lambda: "alive", LONG) == "alive"


def test_the_own_thread_is_not_waited_for(actor):
    errors = []

    def stop():
        try:
            actor.stop(LONG)
        except ConfigError as error:
            errors.append(error)

    actor.post(stop)
    actor.call(lambda: None, LONG)
    assert "cannot wait for its own end" in str(errors[0])


def test_timers_fire_in_order_and_cancelled_ones_do_not():
    actor = ManualActor()
    seen = []
    timers = [actor.after(delay, lambda d=delay: seen.append(d)) for delay in (3.0, 1.0, 2.0)]
    timers[2].cancel()
    timers[2].cancel()
    assert actor.next_timer == 1.0
    actor._clock[0] = 10.0
    actor.run()
    assert seen == [1.0, 3.0]
    assert actor.next_timer is None


def test_cancelled_timers_do_not_pile_up():
    actor = ManualActor()
    for _ in range(10_000):
        actor.after(1000.0, lambda: None).cancel()
    assert len(actor._timers) < 200


class Worker:
    """A scheduler that computes each request on a thread of its own."""

    def __init__(self):
        self.prefill = None
        self.hold = threading.Event()
        self.hold.set()
        self.ends = []
        self.ended = threading.Condition()

    def on_request(self, request):
        threading.Thread(target=self.compute, args=(request,), daemon=True).start()

    def compute(self, request):
        assert self.hold.wait(LONG)
        total = request.num_tokens
        for begin in range(0, total, 5):
            end = min(total, begin + 5)
            step = self.prefill.begin_step([Chunk(request.key, begin, end, [np.arange(8)], end == total)])
            for layer in range(LAYERS):
                self.prefill.layer_done(step, layer)
        self.prefill.finish(request.key, {"hidden": np.float32([1, 2, 3])})

    def on_released(self, key):
        self.end(key)

    def on_failed(self, key, error):
        self.end(key)

    def end(self, key):
        with self.ended:
            self.ends.append(key.request_id)
            self.ended.notify_all()


@pytest.fixture
def pair(seed):
    fabric = MemoryFabric(seed)
    fabric.start()
    prefill_engine, decode_engine = fabric.engine(), fabric.engine()
    src_spec, src = make_cache(1, 8, 4, 5.0)
    dst_spec, dst = make_cache(1, 64, 4, CANARY)
    worker = Worker()
    tails = [TailPool(engine, {"hidden": ("float32", (3,))}, num_slots=8) for engine in (prefill_engine, decode_engine)]
    regions = [[prefill_engine.register(src[0])]]
    bounds = Bounds(drain_s=0.05)
    with PrefillMessenger(prefill_engine, src_spec, regions, worker, bounds, tail=tails[0]) as prefill:
        worker.prefill = prefill
        regions = [[decode_engine.register(dst[0])]]
        with DecodeMessenger(decode_engine, dst_spec, regions, tails[1], bounds) as decode:
            decode.peer = decode.connect(prefill_engine.address)
            yield decode, worker
            worker.hold.set()
    fabric.stop()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("fabric_kv-", "memory-fabric"))]


def ask(decode, name="a", page=0, num_tokens=12):
    pages = [np.arange(page, page + 3)]
    return decode.submit(decode.peer, Request(request_id=name, tokens=np.arange(num_tokens), pages=pages))


def test_threads_coroutines_and_callbacks_all_get_the_result(pair):
    decode, worker = pair
    seen = []
    first = ask(decode)
    first.add_done_callback(lambda handle: seen.append((handle, threading.current_thread().name)))
    assert first.result(LONG).tail["hidden"].tolist() == [1, 2, 3]
    assert first.exception(0) is None

    async def both():
        return await asyncio.gather(*(ask(decode, f"b{n}", 3 * n + 3) for n in range(2)))

    assert [result.request_id for result in asyncio.run(both())] == ["b0", "b1"]
    ((handle, thread),) = decode._actor.call(lambda: seen, LONG)
    assert handle is first
    assert thread in ("fabric_kv-decode", "memory-fabric")  # the latter stands for the engine's dispatcher
    with worker.ended:
        assert worker.ended.wait_for(lambda: sorted(worker.ends) == ["a", "b0", "b1"], LONG)


@pytest.mark.parametrize("error", [SystemExit, asyncio.CancelledError, KeyboardInterrupt, Unwound])
def test_whatever_the_scheduler_raises_ends_one_request(pair, error, monkeypatch):
    decode, worker = pair

    def fail(*args):
        raise error

    def fail_at_end(key):
        Worker.end(worker, key)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(worker, "on_request", fail)
        assert f"the scheduler failed: {error.__name__}" in str(ask(decode).exception(LONG))
    with monkeypatch.context() as patch:
        patch.setattr(worker, "end", fail_at_end)
        ask(decode, "b").result(LONG)
        with worker.ended:
            assert worker.ended.wait_for(lambda: worker.ends == ["b"], LONG)
        assert worker.prefill.state()["counts"]["callback_errors"] == 2
    assert ask(decode, "c").result(LONG)


def test_a_wait_that_times_out_leaves_the_request_alone(pair):
    decode, worker = pair
    worker.hold.clear()
    handle = ask(decode)
    with pytest.raises(TransferTimeoutError, match="goes on"):
        handle.result(0.001)
    with pytest.raises(TransferTimeoutError):
        handle.exception(0.001)
    assert not handle.poll().final
    worker.hold.set()
    assert handle.result(LONG)
    assert handle.poll() is RequestState.READY


def test_cancelling_a_task_leaves_the_request_alone(pair):
    decode, worker = pair
    worker.hold.clear()
    handle = ask(decode)

    async def give_up():
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.ensure_future(wait()), 0.001)

    async def wait():
        return await handle

    asyncio.run(give_up())
    assert not handle.done()
    worker.hold.set()
    assert handle.result(LONG)


def test_cancel_reaches_a_busy_scheduler(pair):
    decode, worker = pair
    worker.hold.clear()
    handle = ask(decode)
    handle.cancel()
    error = handle.exception(LONG)
    assert isinstance(error, RequestCancelledError)
    assert error.pages_clean
    worker.hold.set()
    assert ask(decode, "b").result(LONG)


def test_callbacks_may_submit_but_not_wait(pair):
    decode, _ = pair
    errors, handles = [], []

    def callback(_):
        handles.append(ask(decode, "b", 3))
        for wait in (handles[0].result, decode.close, lambda: decode.connect(decode._engine.address)):
            try:
                wait()
            except ConfigError as error:
                errors.append(str(error))
        raise RuntimeError("a bug in a callback")

    ask(decode).add_done_callback(callback)
    decode._actor.call(lambda: None, LONG)
    while not handles:
        decode._actor.call(lambda: None, LONG)
    assert handles[0].result(LONG)
    assert decode.state()["counts"]["callback_errors"] == 1
    assert len(errors) == 3
    assert all("own thread" in error for error in errors)


def test_many_threads_submit_at_once(pair):
    decode, _ = pair
    results = []

    def run(worker):
        for turn in range(4):
            handle = ask(decode, f"{worker}/{turn}", page=3 * worker, num_tokens=9)
            results.append(handle.result(LONG).request_id)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert sorted(results) == [f"{worker}/{turn}" for worker in range(6) for turn in range(4)]


def test_close_twice_and_state_afterwards(pair):
    decode, worker = pair
    assert ask(decode).result(LONG)
    decode.close()
    decode.close()
    worker.prefill.close(0.0)
    assert decode.state()["counts"]["ready"] == 1
    assert worker.prefill.state()["peers"] == {}
