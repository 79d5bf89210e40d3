"""The decode side of the demo: asks for a prompt's pages, waits for its counter, and generates.

>>> with DecodeNode(options) as node:
...     fetched = node.fetch(prefill_address, prompt[:-1], room=64, on_progress=print)
...     tokens = list(node.generate(prompt[-1], fetched, count=64))
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple, Self

from prefill_node import Options, rail_figures
from ranks import NUM_PAGES, PAGE_TOKENS, Ranks
from smollm2 import PageAllocator
from smollm2.cache import Pages

from fabric_kv import Engine
from fabric_kv.messenger import DecodeMessenger, Request, RequestResult, TailPool


class Fetched(NamedTuple):
    """A prompt's cache, here."""

    result: RequestResult
    pages: Pages
    num_tokens: int
    sums: Any  # of every page, at the moment of ``ready``


class DecodeNode:
    """Its ranks, an engine over their caches, and its messenger; a context manager."""

    def __init__(self, options: Options) -> None:
        with ExitStack() as stack:
            self.ranks = stack.enter_context(Ranks("decode", options.decode_tp, options.config, options.weights_path))
            self.engine = stack.enter_context(Engine(options.provider, nics=options.nics))
            regions = [[cache.region(self.engine)] for cache in self.ranks.caches]
            tails = TailPool(self.engine, {"hidden": ("float32", (options.config.hidden,))}, num_slots=4)
            self._messenger = stack.enter_context(DecodeMessenger(self.engine, self.ranks.spec, regions, tails))
            self._stack = stack.pop_all()
        self._allocator = PageAllocator(NUM_PAGES, seed=42)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stack.__exit__(*exc)

    def fetch(
        self, address: bytes, tokens: list[int], room: int, on_progress: Callable[[int, int], None] | None = None
    ) -> Fetched:
        """Have ``tokens`` prefilled elsewhere; ``room`` more tokens fit into the pages."""
        pages = self._allocator.allocate(-(-(len(tokens) + room) // PAGE_TOKENS))
        used = pages[: -(-len(tokens) // PAGE_TOKENS)]
        peer = self._messenger.connect(address)
        handle = self._messenger.submit(peer, Request(request_id="demo", tokens=tokens, pages=[used]))
        while not handle.done():
            self.ranks.check()
            if on_progress is not None:
                on_progress(*handle.progress())
            time.sleep(0.02)  # paces the drawing only: the pages arrive whether or not anyone looks
        result = handle.result()
        if on_progress is not None:
            on_progress(*handle.progress())
        return Fetched(result, pages, len(tokens), self.ranks.checksums(used, len(tokens)))

    def generate(self, token: int, fetched: Fetched, count: int, stop: int = -1) -> Iterator[int]:
        """Run the withheld token, then go on greedily."""
        for position in range(fetched.num_tokens, fetched.num_tokens + count):
            token = self.ranks.next_token(token, position, fetched.pages)
            yield token
            if token == stop:
                return

    def opened(self) -> dict[str, Any]:
        """Provider, fabric and domain in use."""
        return rail_figures(self.engine)
