"""A toy continuous-batching scheduler, with and without disaggregation: what prefill in decode's steps costs.

    python examples/custom_scheduler.py --requests 24 --rate 4

Mixed, one process runs a chunk of a waiting prompt in the same step as all decoding sequences. Disaggregated, another
process prefills and writes each layer's pages into the decode process as soon as it is done. Both must give the same
tokens. The model is no model: it burns time for each token, and every token depends on the whole cache before it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import queue
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy: one core a process, or they fight for both

import numpy as np
from toy_model import PAGE, Sequence, Toy, arrivals, report

from fabric_kv import Engine
from fabric_kv.messenger import Chunk, DecodeMessenger, PrefillMessenger, PrefillRequest, Request, RequestKey

CHUNK = 128  # tokens of a prompt in one step


def run_mixed(toy: Toy, arriving: list[Sequence]) -> None:
    waiting: list[Sequence] = []
    running: list[Sequence] = []
    while arriving or waiting or running:
        while arriving and arriving[0].arrival_s <= time.monotonic():
            waiting.append(arriving.pop(0))
            waiting[-1].pages = toy.take_pages(waiting[-1].until)
        prefill = []
        if waiting:
            first, total = waiting[0], len(waiting[0].tokens) - 1
            end = min(first.length + CHUNK, total)
            prefill = [(first.tokens[first.length : end], first.length, first.pages)]
        toy.step(running, prefill)
        if waiting:
            first.length = end
            if end == total:
                running.append(waiting.pop(0))


def run_disaggregated(toy: Toy, arriving: list[Sequence], decode: DecodeMessenger, peer: Any) -> None:
    fetching: list[tuple[Sequence, Any]] = []
    running: list[Sequence] = []
    while arriving or fetching or running:
        while arriving and arriving[0].arrival_s <= time.monotonic():
            s = arriving.pop(0)
            s.pages = toy.take_pages(s.until)
            prompt = np.array(s.tokens[:-1])  # decode runs the last token itself
            pages = s.pages[: -(-len(prompt) // PAGE)]
            fetching.append((s, decode.submit(peer, Request(request_id=str(s.number), tokens=prompt, pages=[pages]))))
        for s, handle in [entry for entry in fetching if entry[1].done()]:
            handle.result(0)
            fetching.remove((s, handle))
            s.length = len(s.tokens) - 1
            running.append(s)
        if running:
            toy.step(running, [])
        else:
            time.sleep(0.0005)


class PrefillNode:
    """The scheduler of the other process: first come, first served."""

    def __init__(self) -> None:
        self.toy, self.pages = Toy(), dict[RequestKey, Any]()
        self.requests: queue.SimpleQueue[PrefillRequest | None] = queue.SimpleQueue()

    def on_request(self, request: PrefillRequest) -> None:
        self.pages[request.key] = self.toy.take_pages(request.num_tokens)
        self.requests.put(request)

    def on_released(self, key: RequestKey) -> None:
        self.toy.free += self.pages.pop(key).tolist()

    def on_failed(self, key: RequestKey, error: Exception) -> None:
        self.on_released(key)

    def serve(self, messenger: PrefillMessenger) -> None:
        while (request := self.requests.get()) is not None:
            key, pages = request.key, self.pages[request.key]
            for begin in range(0, request.num_tokens, CHUNK):
                end = min(begin + CHUNK, request.num_tokens)
                step = messenger.begin_step([Chunk(key, begin, end, [pages], final=end == request.num_tokens)])
                part = request.tokens[begin:end], begin, pages
                self.toy.forward([part], lambda layer, step=step: messenger.layer_done(step, layer))
            messenger.finish(key)


def serve_prefill(pipe: Connection, provider: str, nics: list[str]) -> None:
    node = PrefillNode()
    with Engine(provider, nics=nics) as engine:
        region = engine.register(node.toy.cache)
        with PrefillMessenger(engine, node.toy.spec, [[region]], node) as messenger:
            pipe.send(engine.address)
            # Ends with the other process, however that ends.
            threading.Thread(target=lambda: (pipe.poll(None), node.requests.put(None)), daemon=True).start()
            node.serve(messenger)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--provider", default="tcp")
    parser.add_argument("--nics", nargs="*", default=["127.0.0.1"], help="of the provider; none for shm")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second, Poisson")
    parser.add_argument("--prompt", type=int, default=600, help="longest prompt in tokens")
    parser.add_argument("--new-tokens", type=int, default=40)
    args = parser.parse_args()
    nics = [] if args.provider == "shm" else args.nics
    work = args.requests, args.rate, args.prompt, args.new_tokens

    toy, mixed = Toy(), arrivals(*work)
    run_mixed(toy, list(mixed))

    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve_prefill, args=(theirs, args.provider, nics))
    process.start()
    with Engine(args.provider, nics=nics) as engine:
        region = engine.register(toy.cache)
        with DecodeMessenger(engine, toy.spec, [[region]]) as decode:
            peer = decode.connect(ours.recv())
            toy.cache[:] = 0
            apart = arrivals(*work)
            run_disaggregated(toy, list(apart), decode, peer)
    ours.close()
    theirs.close()
    process.join(10)
    report("mixed", mixed)
    report("disaggregated", apart)
    same = all(a.tokens == b.tokens for a, b in zip(mixed, apart, strict=True))
    print("OK  both gave the same tokens" if same else "ERROR  the tokens differ")
    raise SystemExit(0 if same else 1)


if __name__ == "__main__":
    main()
