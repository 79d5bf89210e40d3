"""The prefill side of the sharding tests as a process of its own, and the caches that both sides make from a name.

>>> simulate("TP 3 -> 1").requests[0].dst_pages    # the same in both processes
>>> child.do(do="open", case="TP 3 -> 1")["address"]

A source cell gets its stamp right before ``layer_done`` of the step that computes it, on the ranks that send it, and
loses it when the request is released; before and after it holds junk.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import traceback
from typing import NamedTuple

import numpy as np

from fabric_kv import Bounds, CacheSpec, Engine, KVLayout, Placement, RankMemory, layout_from_config, plan_transfer
from fabric_kv.messenger import Chunk, PrefillMessenger
from fabric_kv.sharding import PRESETS, Group, Part

from ..unit.cache_oracle import JUNK, Request, Simulation

BOUNDS = Bounds(handshake_s=20.0, accept_s=30.0, request_s=40.0)
NUM_PAGES = 48


class Case(NamedTuple):
    src: CacheSpec
    dst: CacheSpec
    # num_tokens, cached, ends of the chunks before the last
    requests: tuple[tuple[int, int, tuple[int, ...]], ...]


def _gqa(heads, order="HND", page_tokens=16, num_layers=3):
    layout = KVLayout.attention(
        num_layers=num_layers, kv_heads=heads, head_dim=8, page_tokens=page_tokens, dtype="float16"
    )
    return layout.with_order(order)


def _case(layout, src, dst, *, dst_page=None, packing=("adjacent", "adjacent")):
    other = layout if dst_page is None else layout.with_page_tokens(dst_page)
    page = max(group.page_tokens for group in other.groups)
    cached = page * max(1, 32 // page)
    requests = (
        (150, cached, (53, 100, 131)),  # a chunk boundary at 53 may lie inside what decode holds
        (150 - cached, 0, (7, 16, 50)),
        (1, 0, ()),
        (cached + 17, cached, (cached + 5,)),
        (47, 0, (20,)),
    )
    specs = [
        CacheSpec.dense(*side) for side in ((layout, src, NUM_PAGES, packing[0]), (other, dst, NUM_PAGES, packing[1]))
    ]
    return Case(*specs, requests)


def _narrow(preset, num_layers=6, window=40):
    """A few layers of a model, with rows of 8 bytes."""
    groups = []
    for group in layout_from_config(PRESETS[preset], page_tokens=16).groups:
        layers = tuple(layer for layer in group.layers if layer < num_layers)
        parts = tuple(Part(part.name, min(part.heads, 8), 8, "uint8", min(part.rows, 5)) for part in group.parts)
        groups.append(
            Group(group.name, group.kind, layers, group.page_tokens, parts, group.order, min(group.window, window))
        )
    return KVLayout(num_layers, tuple(groups), model=preset)


def _per_layer(layout, placement):
    """vLLM's way: a tensor ``[2, blocks, page, heads, dim]`` for every layer, each a region of its own."""
    heads = layout.groups[0].parts[0].heads
    memory = []
    for rank in range(placement.num_ranks):
        begin, end = placement.heads_of(placement.coords(rank).tp, heads)
        arrays = [np.zeros((2, NUM_PAGES, 16, end - begin, 8), np.float16) for _ in range(layout.num_layers)]
        memory.append(RankMemory.from_layer_arrays(arrays, "vllm", layout=layout, placement=placement, rank=rank))
    return CacheSpec(layout, placement, tuple(memory))


def _tp(size):
    return Placement(tp_size=size)


_MLA = KVLayout(3, (Group("latent", "mla", (0, 1, 2), 16, (Part("latent", 1, 24, "float16"),)),))
_NHD = _gqa(4, "NHD")
_PP = _gqa(2, num_layers=5)

CASES = {
    "TP 3 -> 1": _case(_gqa(3), _tp(3), _tp(1)),
    "TP 1 -> 3": _case(_gqa(3), _tp(1), _tp(3)),
    "TP 4 -> 2": _case(_gqa(8), _tp(4), _tp(2)),
    "TP 2 -> 4": _case(_gqa(8), _tp(2), _tp(4), packing=("cross_layer", "separate")),
    "TP 3 -> 2, uneven": _case(_gqa(5), _tp(3), _tp(2)),
    "TP 4 -> 2, replicated": _case(_gqa(2), _tp(4), _tp(2)),
    "MLA 4 -> 1": _case(_MLA, _tp(4), _tp(1)),
    "MLA 4 -> 4": _case(_MLA, _tp(4), _tp(4)),
    "page 16 -> 64": _case(_gqa(2), _tp(1), _tp(1), dst_page=64),
    "page 64 -> 16": _case(_gqa(2, page_tokens=64), _tp(1), _tp(1), dst_page=16),
    "page 16 -> 24, TP 2 -> 1": _case(_gqa(2), _tp(2), _tp(1), dst_page=24),
    "NHD 2 -> 1": _case(_NHD, _tp(2), _tp(1)),
    "NHD 2 -> 1, page 64 -> 16": _case(_gqa(4, "NHD", 64), _tp(2), _tp(1), dst_page=16),
    "NHD 1 -> 2, one tensor a layer": _case(_NHD, _tp(1), _tp(2))._replace(
        src=_per_layer(_NHD, _tp(1)), dst=_per_layer(_NHD, _tp(2))
    ),
    "PP 2 -> 1": _case(_PP, Placement(pp_layers=(2, 3)), _tp(1)),
    "PP 2 -> 3, TP 1 -> 2": _case(_PP, Placement(pp_layers=(1, 4)), Placement(tp_size=2, pp_layers=(2, 0, 3))),
    "gemma-3: sliding and full": _case(_narrow("gemma-3-27b"), _tp(4), _tp(2)),
    "gpt-oss: sliding and full, page 16 -> 64": _case(_narrow("gpt-oss-20b"), _tp(2), _tp(1), dst_page=64),
    "qwen3-next: attention and states": _case(_narrow("qwen3-next-80b"), _tp(4), _tp(2)),
    "deepseek-v3.2: latent and indexer": _case(_narrow("deepseek-v3.2"), _tp(2), _tp(1)),
    "a target and its draft model, TP 4 -> 2": _case(
        _gqa(8).with_draft(_gqa(4, page_tokens=32, num_layers=2)), _tp(4), _tp(2)
    ),
}


def simulate(name):
    """The case's plan and requests, with the stamps that source and destination should hold."""
    case = CASES[name]
    requests = [Request(num_tokens, cached, cuts) for num_tokens, cached, cuts in case.requests]
    return Simulation(plan_transfer(case.src, case.dst), requests, seed=1, cell_bytes=8)


class PrefillNode:
    """Computes the chunks of all requests side by side, on a thread of its own."""

    def __init__(self, name):
        self.simulation = simulate(name)
        self.spec = self.simulation.plan.src
        self.arenas = self.simulation.arenas(self.spec, JUNK)
        self.cells = {}  # of each layer: group, rank, cells with stamps, cells to send
        for rank in range(len(self.arenas)):
            stamped = self.simulation.views(self.spec, self.simulation.src, rank)
            sent = self.simulation.views(self.spec, self.arenas, rank)
            for (group, layer, _, _, full), (_, _, _, _, live) in zip(stamped, sent, strict=True):
                self.cells.setdefault(layer, []).append((group, rank, full, live))
        self.lock = threading.Condition()
        self.queue, self.running, self.stopping, self.senders = [], [], False, {}
        self.engine = Engine("tcp", nics=["127.0.0.1"])
        regions = [[self.engine.register(region) for region in rank] for rank in self.arenas]
        self.messenger = PrefillMessenger(self.engine, self.spec, regions, self, BOUNDS)
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def on_request(self, request):
        with self.lock:
            self.queue.append(request)
            self.lock.notify_all()

    def on_released(self, key):
        for group, _, _, live in itertools.chain.from_iterable(self.cells.values()):
            live[self.simulation.requests[self.number(key)].src_pages[group]] = JUNK

    def on_failed(self, key, error):
        crash(error)

    @staticmethod
    def number(key):
        return int(key.request_id)

    def chunks_of(self, request):
        number = self.number(request.key)
        wanted = self.simulation.requests[number]
        first = request.cached_tokens if min(wanted.cuts, default=0) > request.cached_tokens else 0
        self.senders[request.key] = {src for src, _ in self.simulation.plan.pairs(request.source_set)}
        for begin, end in itertools.pairwise((first, *wanted.cuts, wanted.num_tokens)):
            yield Chunk(request.key, begin, end, wanted.src_pages, end == wanted.num_tokens)

    def run(self):
        try:
            while self.wait_for_work():
                self.compute_step()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the test shall hear of it
            crash(error)

    def wait_for_work(self):
        with self.lock:
            self.lock.wait_for(lambda: self.queue or self.running or self.stopping)
            self.running += [self.chunks_of(request) for request in self.queue]
            self.queue.clear()
            return not self.stopping

    def compute_step(self):
        chunks = [next(request) for request in self.running]
        step = self.messenger.begin_step(chunks)
        for layer in range(self.spec.layout.num_layers):
            for chunk in chunks:
                self.append(chunk, layer)
            self.messenger.layer_done(step, layer)
        for chunk in chunks:
            if chunk.final:
                self.messenger.finish(chunk.key)
        self.running = [request for request, chunk in zip(self.running, chunks, strict=True) if not chunk.final]

    def append(self, chunk, layer):
        """What the model does: stamps of the chunk's tokens, and of whole pages behind the last one."""
        for group_index, rank, full, live in self.cells.get(layer, ()):
            if rank not in self.senders[chunk.key]:
                continue
            pages, size = chunk.src_pages[group_index], self.spec.layout.groups[group_index].page_tokens
            if not size:
                if chunk.final:
                    live[pages] = full[pages]
                continue
            for entry, page in enumerate(pages):
                begin = max(chunk.begin - entry * size, 0)
                end = size if chunk.final else min(chunk.end - entry * size, size)
                if begin < end:
                    live[page, :, begin:end] = full[page, :, begin:end]

    def close(self):
        with self.lock:
            self.stopping = True
            self.lock.notify_all()
        self.thread.join()
        self.messenger.close()
        counts, (group,) = self.messenger.state()["counts"], self.engine.describe()["groups"]
        self.engine.close()
        return {"counts": counts, "violations": group["violations"], "stale": group["stale_imms"]}


def crash(error):
    print(json.dumps({"event": "crash", "error": repr(error)}), flush=True)
    traceback.print_exception(error)
    os._exit(1)


def main():
    node = None
    for line in sys.stdin:
        command = json.loads(line)
        answer = {}
        match command["do"]:
            case "open":
                node = PrefillNode(command["case"])
                answer = {"address": node.engine.address.hex()}
            case "close":
                answer = node.close()
        print(json.dumps({"event": "did", **answer}), flush=True)


if __name__ == "__main__":
    main()
