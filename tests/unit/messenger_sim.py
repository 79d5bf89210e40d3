"""One prefill and one decode messenger on a MemoryFabric, on one thread and one clock, every choice from one seed.

Sources are written right before ``layer_done`` and spoilt as soon as they are handed back; destination pages are reset
to a canary as soon as they are handed back. So whatever is read too late, written too late, or put in the wrong place
shows up in the arrays.
"""

from __future__ import annotations

import random

import numpy as np

from fabric_kv.config import Admission, Bounds, EngineOptions
from fabric_kv.messenger import Chunk, DecodeMessenger, PrefillMessenger, Reject, Request, TailPool
from fabric_kv.messenger.actor import ManualActor
from fabric_kv.sharding import CacheSpec, KVLayout, Placement
from fabric_kv.testing import MemoryFabric

LAYERS, HEADS, DIM = 2, 3, 2
CANARY, SPOILT = -1.0, -2.0
TAIL = {"hidden": ("float32", (3,)), "drafts": ("int16", (2, 2))}
BOUNDS = Bounds(handshake_s=1.0, accept_s=5.0, request_s=30.0, cancel_s=1.0, count_s=1.0, drain_s=2.0)


def make_cache(tp_size, num_pages, page_tokens, fill, *, layers=LAYERS, heads=HEADS, dp_size=1):
    layout = KVLayout.attention(
        num_layers=layers, kv_heads=heads, head_dim=DIM, page_tokens=page_tokens, dtype="float32"
    )
    placement = Placement(tp_size=tp_size, dp_size=dp_size)
    shapes = []
    for rank in range(placement.num_ranks):
        begin, end = placement.heads_of(placement.coords(rank).tp, heads)
        shapes.append((layers, 2, num_pages, end - begin, page_tokens, DIM))
    arrays = [np.full(shape, fill, np.float32) for shape in shapes]
    return CacheSpec.from_arrays(layout, placement, arrays), arrays


def ranks_of(spec, dp):
    """Ranks of one replica, with the heads that each holds."""
    for rank in range(spec.placement.num_ranks):
        at = spec.placement.coords(rank)
        if at.dp == dp:
            yield rank, slice(*spec.placement.heads_of(at.tp, HEADS))


def stamp(number, num_tokens):
    """What the model would compute: every cell of every request differs. Axes: layer, K/V, token, head, element."""
    shape = (LAYERS, 2, num_tokens, HEADS, DIM)
    return (np.arange(np.prod(shape), dtype=np.float32) + 2000 * (number + 1)).reshape(shape)


class ToyScheduler:
    """Runs requests chunk by chunk and layer by layer, one small action at a time."""

    def __init__(self, sim):
        self.sim = sim
        self.refuse = None  # a reason
        self.pause = False
        self.jobs = {}
        self.offered, self.released, self.failed = [], [], []

    def on_request(self, request):
        self.offered.append(request.key)
        if self.refuse is not None:
            return Reject(self.refuse)
        needed = -(-request.num_tokens // self.sim.src_page_tokens)
        if needed > len(self.sim.src_free):
            raise Reject(f"{needed} pages are needed, {len(self.sim.src_free)} are free")
        pages = [self.sim.src_free.pop() for _ in range(needed)]
        self.jobs[request.key] = Job(self.sim, request, np.array(pages))
        return None

    def on_released(self, key):
        self.released.append(key)
        self.jobs.pop(key).give_back()

    def on_failed(self, key, error):
        self.failed.append((key, error))
        self.jobs.pop(key).give_back()

    def work(self):
        """One action of one request; False if there is none."""
        ready = [] if self.pause else [job for job in self.jobs.values() if job.can_work]
        if not ready:
            return False
        self.sim.random.choice(ready).work()
        return True


class Job:
    def __init__(self, sim, request, pages):
        self.sim, self.request, self.pages = sim, request, pages
        self.num_pages = len(pages)
        self.number = int.from_bytes(request.params, "little")
        self.values = stamp(self.number, request.num_tokens)
        self.dp = self.pick_replica()
        self.at = 0
        self.step = None
        self.layers_left = []
        self.chunk = (0, 0)
        self.finished = False
        self.preempted = 0  # 1: its pages are not ours yet, 2: they are, and it waits for others

    @property
    def can_work(self):
        if self.preempted == 2:
            return len(self.sim.src_free) >= self.num_pages
        return not self.finished and not (self.preempted and not self.layers_left)

    def work(self):
        total = self.request.num_tokens
        preempts = self.sim.preempts and not self.finished and not self.preempted
        if preempts and self.sim.random.random() < self.sim.preempts:
            self.preempted = 1
            self.sim.prefill.preempt(self.request.key, self.on_quiet)
        elif self.layers_left:
            layer = self.layers_left.pop(0)
            self.write_source(layer)
            self.sim.prefill.layer_done(self.step, layer)
        elif self.preempted:
            self.restart()
        elif self.at < total:
            end = min(total, self.at + self.sim.random.randint(1, 9))
            self.chunk = (self.at, end)
            computed = self.sim.random.random() < self.sim.hits
            chunk = Chunk(self.request.key, self.at, end, [self.pages], end == total, computed, self.dp)
            layers = list(range(LAYERS))
            if self.sim.random.random() < 0.3:
                self.sim.random.shuffle(layers)
            if computed:
                for layer in layers:
                    self.write_source(layer)
            self.step = self.sim.prefill.begin_step([chunk])
            self.layers_left = [] if computed else layers
            self.at = end
        else:
            self.finished = True
            self.sim.prefill.finish(
                self.request.key, self.sim.tail_of(self.number) if self.request.wants_tail else None
            )

    def write_source(self, layer):
        for token in range(*self.chunk):
            page, row = divmod(token, self.sim.src_page_tokens)
            for rank, heads in ranks_of(self.sim.src_spec, self.dp):
                self.sim.src[rank][layer, :, self.pages[page], :, row] = self.values[layer, :, token, heads]

    def pick_replica(self):
        return self.sim.random.randrange(self.sim.src_spec.placement.dp_size)

    def on_quiet(self):
        assert self.preempted == 1
        self.give_back()
        self.preempted, self.layers_left = 2, []

    def restart(self):
        """In other pages, from where a prefix cache helps out."""
        self.preempted = 0
        self.dp = self.pick_replica()
        self.pages = np.array([self.sim.src_free.pop() for _ in range(self.num_pages)])
        self.sim.num_restarts += 1
        cached = self.sim.random.randint(0, self.at)
        self.chunk = (0, cached)
        for layer in range(LAYERS):
            self.write_source(layer)
        self.at = cached

    def give_back(self):
        for array in self.sim.src:
            array[:, :, self.pages] = SPOILT
        self.sim.src_free += self.pages.tolist()
        self.pages = self.pages[:0]


class Sim:
    """Both sides, and the fabric between them."""

    def __init__(
        self,
        seed,
        *,
        prefill_tp=1,
        decode_tp=1,
        src_page_tokens=4,
        dst_page_tokens=4,
        tails=True,
        options=EngineOptions(),
        bounds=BOUNDS,
        connect=True,
        num_pages=48,
        prove_fences=0.0,
        preempts=0.0,
        hits=0.2,
        prefill_dp=1,
        decode_dp=1,
        layers_per_group=None,
        admission=Admission(),
        check_sources=False,
    ):
        print(f"seed {seed}")
        self.random = random.Random(seed)
        self.fabric = MemoryFabric(seed)
        self.fabric.prove_fences = prove_fences
        self.clock = [0.0]
        self.preempts = preempts  # how often, of the scheduler's actions
        self.hits = hits  # how many of the chunks are in the prefix cache
        self.num_restarts = 0
        self.bounds = bounds
        self.src_page_tokens, self.dst_page_tokens = src_page_tokens, dst_page_tokens
        self.src_spec, self.src = make_cache(prefill_tp, num_pages, src_page_tokens, SPOILT, dp_size=prefill_dp)
        self.dst_spec, self.dst = make_cache(decode_tp, num_pages, dst_page_tokens, CANARY, dp_size=decode_dp)
        self.src_free = self.random.sample(range(num_pages), num_pages)
        self.dst_free = self.random.sample(range(num_pages), num_pages)
        self.num_pages = num_pages
        self.prefill_engine, self.decode_engine = self.fabric.engine(options), self.fabric.engine(options)
        self.prefill_tails = TailPool(self.prefill_engine, TAIL, num_slots=2) if tails else None
        self.decode_tails = TailPool(self.decode_engine, TAIL, num_slots=8) if tails else None
        self.scheduler = ToyScheduler(self)
        self.prefill_actor, self.decode_actor = ManualActor("prefill", self.clock), ManualActor("decode", self.clock)
        self.prefill = PrefillMessenger(
            self.prefill_engine,
            self.src_spec,
            [[self.prefill_engine.register(array)] for array in self.src],
            self.scheduler,
            bounds,
            tail=self.prefill_tails,
            admission=admission,
            check_sources=check_sources,
            actor=self.prefill_actor,
        )
        self.decode = DecodeMessenger(
            self.decode_engine,
            self.dst_spec,
            [[self.decode_engine.register(array)] for array in self.dst],
            self.decode_tails,
            bounds,
            layers_per_group=layers_per_group,
            actor=self.decode_actor,
        )
        self.actors = [self.prefill_actor, self.decode_actor]
        self.fetches = []
        self.peer = self.connect() if connect else None

    # --- Time ---------------------------------------------------------------------------------------------------------

    def step(self):
        """One thing happens, somewhere; False if nothing can but the passing of time."""
        actions = [self.fabric.step, self.scheduler.work, *(lambda a=actor: a.run(1) for actor in self.actors)]
        self.random.shuffle(actions)
        return any(action() for action in actions)

    def run(self, until=lambda: False, limit=100_000):
        """Go on until the condition holds; time jumps to the next timer when nothing else happens."""
        for _ in range(limit):
            if until():
                return
            if self.step():
                continue
            timers = [actor.next_timer for actor in self.actors if actor.next_timer is not None]
            if not timers:
                return
            self.clock[0] = max(self.clock[0], min(timers))
            for actor in self.actors:
                actor.run(0)
        raise AssertionError(f"no end after {limit} steps")

    def settle(self):
        """Let everything happen that needs no passing of time."""
        while self.step():
            pass

    # --- The decode side's caller -------------------------------------------------------------------------------------

    def connect(self, address=None):
        future = self.decode._begin_connect(address or self.prefill_engine.address, self.bounds.handshake_s)
        self.run(future.done)
        return future.result(0)

    def tail_of(self, number):
        return {
            "hidden": np.array([number, number + 0.25, -number], np.float32),
            "drafts": np.array([[number, 1], [2, number + 3]], np.int16),
        }

    def submit(self, num_tokens, *, deadline_s=None, cached_tokens=0):
        return Fetch(self, num_tokens, deadline_s, cached_tokens)

    # --- What must hold at the end ------------------------------------------------------------------------------------

    def check_all(self):
        """Every request has ended, right or with its pages accounted for; nothing else was touched or kept."""
        self.settle()
        for fetch in self.fetches:
            assert fetch.handle.done(), fetch.handle
        set_aside = {page for fetch in self.fetches for page in fetch.pages.tolist() if fetch.poisoned}
        free = [page for page in range(self.num_pages) if page not in set_aside]
        assert sorted(self.dst_free) == free
        for array in self.dst:
            assert (array[:, :, free] == CANARY).all(), "a page was written after it had been handed back"
        ended = [*self.scheduler.released, *(key for key, _ in self.scheduler.failed)]
        assert len(set(ended)) == len(ended), "a request ended twice on the prefill side"

    def check_nothing_left(self):
        """Both sides are as they were at the start."""
        state = self.prefill.state()
        assert (state["requests"], state["open_steps"], state["backlog"]) == ([], 0, 0)
        assert self.decode.state()["requests"] == []
        assert sorted(self.src_free) == list(range(self.num_pages))
        for pool in (self.prefill_tails, self.decode_tails):
            assert pool is None or pool.num_free + pool.num_poisoned == pool.num_slots
        poisoned = sum(fetch.poisoned for fetch in self.fetches)
        # Those of a request whose writes are all done go on counting.
        assert self.decode_engine.counters_in_use == sum(
            not counter._released for entry in self.decode._poison._entries for counter in entry.counters
        )
        assert self.decode_tails is None or self.decode_tails.num_poisoned == poisoned
        assert len(self.decode.poisoned) == poisoned
        assert not any(owners for groups in self.decode._claims._owners for owners in groups)


class Fetch:
    """A submitted request, which is checked the moment it ends."""

    def __init__(self, sim, num_tokens, deadline_s, cached_tokens):
        self.sim, self.num_tokens, self.cached = sim, num_tokens, cached_tokens
        self.number = len(sim.fetches)
        needed = -(-num_tokens // sim.dst_page_tokens)
        self.pages = np.array([sim.dst_free.pop() for _ in range(needed)])
        self.dp = sim.random.randrange(sim.dst_spec.placement.dp_size)
        self.poisoned = False
        self.ends = 0
        self.result = self.error = None
        self.before_reset = lambda: None
        try:
            self.handle = sim.decode.submit(
                sim.peer,
                Request(
                    request_id=f"request {self.number}",
                    tokens=np.arange(num_tokens),
                    pages=[self.pages],
                    cached_tokens=cached_tokens,
                    deadline_s=deadline_s,
                    params=self.number.to_bytes(4, "little"),
                    dp=self.dp,
                ),
            )
        except Exception:
            sim.dst_free += self.pages.tolist()
            raise
        sim.fetches.append(self)
        self.handle.add_done_callback(self.on_done)

    def on_done(self, handle):
        self.ends += 1
        assert self.ends == 1
        self.error = handle.exception(0)
        if self.error is None:
            self.result = handle.result(0)
            self.check_pages()
        elif not self.error.pages_clean:
            self.poisoned = True
            return
        self.take_back()

    def take_back(self):
        self.poisoned = False
        self.before_reset()
        for array in self.sim.dst:
            array[:, :, self.pages] = CANARY
        self.sim.dst_free += self.pages.tolist()

    def check_pages(self, layers=LAYERS, *, tail=True):
        expected = stamp(self.number, self.num_tokens)[:layers]
        for token in range(self.cached, self.num_tokens):
            page, row = divmod(token, self.sim.dst_page_tokens)
            for rank, heads in ranks_of(self.sim.dst_spec, self.dp):
                found = self.sim.dst[rank][:layers, :, self.pages[page], :, row]
                assert (found == expected[:, :, token, heads]).all(), f"token {token} of rank {rank}"
        ours = {rank for rank, _ in ranks_of(self.sim.dst_spec, self.dp)}
        for rank, array in enumerate(self.sim.dst):
            assert rank in ours or (array[:, :, self.pages] == CANARY).all(), f"rank {rank} of another replica"
        if tail and self.sim.decode_tails is not None:
            tail = self.sim.tail_of(self.number)
            assert {name: array.tolist() for name, array in self.result.tail.items()} == {
                name: array.tolist() for name, array in tail.items()
            }
