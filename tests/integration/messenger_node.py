"""One side of the messenger tests as a process of its own: commands come in on stdin, events go out on stdout.

Every cell of the prefill side's cache is computed from (request, layer, K or V, token, head, element), right before
``layer_done``, and spoilt when the pages are handed back; see ``stamp``.
"""

from __future__ import annotations

import collections
import json
import random
import sys
import threading
import time

import msgspec
import numpy as np

from fabric_kv.config import Bounds, EngineOptions
from fabric_kv.engine import Engine
from fabric_kv.errors import FabricKVError, PeerLostError, PeerUnreachableError
from fabric_kv.messenger import Chunk, DecodeMessenger, PrefillMessenger, Reject, Request, TailPool
from fabric_kv.sharding import CacheSpec, KVLayout, Placement

from .fabrics import nics_of, patient

LAYERS, HEADS, DIM, PAGE_TOKENS, NUM_PAGES = 4, 3, 8, 16, 128
CANARY, SPOILT = -1.0, -2.0
BOUNDS = Bounds(
    **patient(
        handshake_s=10.0, connect_rails_s=5.0, accept_s=10.0, request_s=30.0, cancel_s=3.0, count_s=5.0, drain_s=0.5
    )
)
# Two seconds: a process that only waits for a core is not to be called lost.
OPTIONS = EngineOptions(**patient(heartbeat_interval_s=0.1, heartbeat_misses=20))


def make_cache(tp_size, fill, heads=HEADS):
    layout = KVLayout.attention(
        num_layers=LAYERS, kv_heads=heads, head_dim=DIM, page_tokens=PAGE_TOKENS, dtype="float32"
    )
    placement = Placement(tp_size=tp_size)
    arrays = []
    for rank in range(tp_size):
        begin, end = placement.heads_of(rank, heads)
        arrays.append(np.full((LAYERS, 2, NUM_PAGES, end - begin, PAGE_TOKENS, DIM), fill, np.float32))
    return CacheSpec.from_arrays(layout, placement, arrays), arrays


def stamp(number, num_tokens):
    """Axes: layer, K/V, token, head, element."""
    shape = (LAYERS, 2, num_tokens, HEADS, DIM)
    return (np.arange(np.prod(shape), dtype=np.float32) % 65536 + 65536 * (number % 128)).reshape(shape)


def tail_of(number):
    return np.arange(5, dtype=np.float32) + number


def pages_of(values):
    """From tokens to whole pages: [layer, K/V, page, head, row, element], zeros behind the last token."""
    num_pages = -(-values.shape[2] // PAGE_TOKENS)
    padded = np.zeros((LAYERS, 2, num_pages * PAGE_TOKENS, HEADS, DIM), np.float32)
    padded[:, :, : values.shape[2]] = values
    return padded.reshape(LAYERS, 2, num_pages, PAGE_TOKENS, HEADS, DIM).transpose(0, 1, 2, 4, 3, 5)


class PrefillNode:
    """Computes requests one after the other on a thread of its own."""

    def __init__(
        self, tp_size, tell=lambda event: None, num_nics=1, provider="tcp", engine=None, group=0, bounds=BOUNDS, **more
    ):
        self.tell = tell
        self.spec, self.arrays = make_cache(tp_size, SPOILT)
        self.free = list(np.random.default_rng(5).permutation(NUM_PAGES))
        self.lock = threading.Condition()
        self.pages, self.queue = {}, []
        self.refuse, self.chunks_allowed, self.stopping = None, 1 << 30, False
        self.word = None  # to bump it, as a GPU would, instead of calling layer_done
        self.engine = engine or Engine(provider, nics=nics_of(provider, num_nics), options=OPTIONS)
        tails = TailPool(self.engine, {"values": ("float32", (5,))})
        regions = [[self.engine.register(array, group=group)] for array in self.arrays]
        self.messenger = PrefillMessenger(self.engine, self.spec, regions, self, bounds, tail=tails, **more)
        self.thread = threading.Thread(target=self.compute, daemon=True)
        self.thread.start()

    def on_request(self, request):
        if self.refuse:
            return Reject(self.refuse)
        with self.lock:
            count = -(-request.num_tokens // PAGE_TOKENS)
            if count > len(self.free):
                return Reject(f"{count} pages are needed, {len(self.free)} are free")
            self.pages[request.key] = np.array([self.free.pop() for _ in range(count)])
            self.queue.append(request)
            self.lock.notify_all()
        self.tell({"event": "offered", "id": request.key.request_id})
        return None

    def on_released(self, key):
        self.give_back(key)
        self.tell({"event": "released", "id": key.request_id})

    def on_failed(self, key, error):
        self.give_back(key)
        self.tell({"event": "failed", "id": key.request_id, "error": type(error).__name__})

    def give_back(self, key):
        with self.lock:
            pages = self.pages.pop(key)
            for array in self.arrays:
                array[:, :, pages] = SPOILT
            self.free += pages.tolist()

    def allow(self, chunks):
        """How many more chunks may be computed."""
        with self.lock:
            self.chunks_allowed = chunks
            self.lock.notify_all()

    def compute(self):
        while True:
            with self.lock:
                self.lock.wait_for(lambda: self.queue or self.stopping)
                if self.stopping:
                    return
                request = self.queue.pop(0)
            self.compute_request(request)

    def compute_request(self, request):
        number, total = int(request.params), request.num_tokens
        values = pages_of(stamp(number, total))
        for begin in range(0, total, 40):
            end = min(total, begin + 40)
            with self.lock:
                self.lock.wait_for(lambda: self.chunks_allowed > 0 or self.stopping)
                self.chunks_allowed -= 1
                pages = self.pages.get(request.key)
            if pages is None or self.stopping:
                return
            watch = None if self.word is None else self.engine.watch(self.word)
            step = self.messenger.begin_step([Chunk(request.key, begin, end, [pages], end == total)], watch=watch)
            if self.word is not None:
                self.word[0] = step << 16
            for layer in range(LAYERS):
                with self.lock:
                    if request.key in self.pages:  # Not handed back meanwhile.
                        self.append(layer, pages, values, begin, end)
                if self.word is None:
                    self.messenger.layer_done(step, layer)
                else:
                    self.word[0] += np.uint64(1)
            self.tell({"event": "chunk", "id": request.key.request_id, "end": end})
        self.messenger.finish(request.key, {"values": tail_of(number)})

    def append(self, layer, pages, values, begin, end):
        first, last = begin // PAGE_TOKENS, -(-end // PAGE_TOKENS)
        for rank, array in enumerate(self.arrays):
            low, high = self.spec.placement.heads_of(rank, HEADS)
            array[layer][:, pages[first:last]] = values[layer, :, first:last, low:high]

    def close(self):
        with self.lock:
            self.stopping = True
            self.lock.notify_all()
        self.messenger.close()
        self.thread.join(10)
        self.engine.close()


class DecodeNode:
    """Submits requests and checks every byte at the moment they are ready."""

    def __init__(
        self, tp_size, heads=HEADS, num_nics=1, provider="tcp", bounds=BOUNDS, dispatch="thread", engine=None, group=0
    ):
        self.spec, self.arrays = make_cache(tp_size, CANARY, heads)
        self.free = list(np.random.default_rng(6).permutation(NUM_PAGES))
        options = msgspec.structs.replace(OPTIONS, dispatch=dispatch)
        self.engine = engine or Engine(provider, nics=nics_of(provider, num_nics), options=options)
        self.tails = TailPool(self.engine, {"values": ("float32", (5,))})
        regions = [[self.engine.register(array, group=group)] for array in self.arrays]
        self.messenger = DecodeMessenger(self.engine, self.spec, regions, self.tails, bounds)
        self.addresses = []
        self.lock = threading.Lock()

    def submit(self, peer, number, num_tokens, deadline_s=None):
        with self.lock:
            pages = np.array([self.free.pop() for _ in range(-(-num_tokens // PAGE_TOKENS))])
        try:
            return self.submit_with(pages, peer, number, num_tokens, deadline_s)
        except FabricKVError:
            with self.lock:
                self.free += pages.tolist()
            raise

    def submit_with(self, pages, peer, number, num_tokens, deadline_s):
        request = Request(
            request_id=f"r{number}",
            tokens=np.arange(num_tokens),
            pages=[pages],
            deadline_s=deadline_s,
            params=str(number).encode(),
        )
        handle = self.messenger.submit(peer, request)
        handle.wrong, handle.checked = "not checked", threading.Event()
        handle.add_done_callback(lambda handle: self.on_done(handle, number, num_tokens, pages))
        return handle

    def on_done(self, handle, number, num_tokens, pages):
        error = handle.exception(0)
        if error is None:
            handle.wrong = self.compare(handle.result(0), number, num_tokens, pages)
        if error is None or error.pages_clean:
            self.take_back(pages)
        handle.checked.set()

    def take_back(self, pages):
        for array in self.arrays:
            array[:, :, pages] = CANARY
        with self.lock:
            self.free += pages.tolist()

    def check(self, handle, timeout):
        """Wait for a request that must succeed; result() may return before on_done has run."""
        handle.result(timeout)
        assert handle.checked.wait(timeout)
        assert handle.wrong is None, handle.wrong

    def compare(self, result, number, num_tokens, pages):
        """What is wrong with the pages; None if nothing is."""
        values = pages_of(stamp(number, num_tokens))
        in_last = num_tokens - (len(pages) - 1) * PAGE_TOKENS
        for rank, array in enumerate(self.arrays):
            low, high = self.spec.placement.heads_of(rank, HEADS)
            found, expected = array[:, :, pages], values[:, :, :, low:high]
            if not (found[:, :, :-1] == expected[:, :, :-1]).all():
                return f"whole pages of rank {rank}"
            if not (found[:, :, -1, :, :in_last] == expected[:, :, -1, :, :in_last]).all():
                return f"the last page of rank {rank}"
        return None if (result.tail["values"] == tail_of(number)).all() else f"tail {result.tail}"

    def storm(self, seed, count, width):
        """Submit ``count`` requests, up to ``width`` at once, to any of ``addresses``; cancel some. How they ended."""
        dice, open_, ends, wrong = random.Random(seed), [], collections.Counter(), []
        submitted = 0
        while submitted < count or open_:
            for handle in [handle for handle in open_ if handle.checked.is_set()]:
                open_.remove(handle)
                error = handle.exception(0)
                ends[type(error).__name__] += 1
                if error is None and handle.wrong is not None:
                    wrong.append(f"{handle.request_id}: {handle.wrong}")
            # Later proven clean: something may have been written before, and nothing may be from now on.
            for item in self.messenger.reclaim():
                self.take_back(item.pages[0])
            for handle in open_:
                if dice.random() < 0.002:
                    handle.cancel()
            if submitted < count and len(open_) < width and len(self.free) >= 4:
                try:
                    peer = self.messenger.connect(dice.choice(self.addresses), timeout=1.0)
                    open_.append(
                        self.submit(peer, submitted, dice.randint(1, 64), deadline_s=dice.choice([None, 10.0]))
                    )
                    submitted += 1
                except (PeerUnreachableError, PeerLostError):
                    time.sleep(0.02)  # until it is replaced, or goes on
            else:
                time.sleep(0.001)
        for item in self.messenger.reclaim():
            self.take_back(item.pages[0])
        return {"ends": ends, "wrong": wrong, "intact": self.canaries_intact()}

    def canaries_intact(self):
        return all((array[:, :, self.free] == CANARY).all() for array in self.arrays)

    def close(self):
        self.messenger.close()
        self.engine.close()


def poisoned(node):
    return sum(item.pages[0].size for item in node.messenger.poisoned)


def main():
    role, tp_size, num_nics, provider = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    lock = threading.Lock()

    def tell(event):
        with lock:
            print(json.dumps(event), flush=True)

    if role == "prefill":
        node = PrefillNode(tp_size, tell, num_nics, provider)
    else:
        node = DecodeNode(tp_size, num_nics=num_nics, provider=provider)
    tell({"event": "up", "address": node.engine.address.hex()})
    peer = None
    for line in sys.stdin:
        command = json.loads(line)
        match command["do"]:
            case "refuse":
                node.refuse = command["reason"]
            case "allow":
                node.allow(command["chunks"])
            case "bump_a_word":
                node.word = np.zeros(1, np.uint64)
            case "fail":
                node.messenger.fail(next(iter(node.pages)), command["reason"])
            case "addresses":
                node.addresses = [bytes.fromhex(address) for address in command["addresses"]]
            case "storm":
                args = command["seed"], command["count"], command["width"]

                def storm(args=args):
                    tell({"event": "stormed", **node.storm(*args), "poisoned": poisoned(node), "free": len(node.free)})

                threading.Thread(target=storm, daemon=True).start()
            case "connect":
                peer = node.messenger.connect(bytes.fromhex(command["address"]))
            case "submit":
                handle = node.submit(peer, command["number"], command["tokens"])
                handle.add_done_callback(
                    lambda h: tell({"event": "done", "error": type(h.exception(0)).__name__, "wrong": h.wrong})
                )
            case "close":
                node.close()
        state = node.messenger.state()
        rails = [rail for group in node.engine.describe()["groups"] for rail in group["rails"]]
        tell(
            {
                "event": "did",
                "free": len(node.free),
                "requests": len(state["requests"]),
                "counts": state["counts"],
                "rail_ops": [rail["ops"] for rail in rails],
            }
        )


if __name__ == "__main__":
    try:
        main()
    except FabricKVError as error:
        print(json.dumps({"event": "crash", "error": repr(error)}), flush=True)
        raise
