"""The decode side of the demo: asks for a prompt's pages, waits for its counter, and generates.

>>> with DecodeNode(model, options) as node:
...     fetched = node.fetch(prefill_address, prompt[:-1], room=64, on_progress=print)
...     tokens = list(node.generate(prompt[-1], fetched, count=64))
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple, Self

from prefill_node import NUM_PAGES, PAGE_TOKENS, Options, make_caches, rail_figures
from smollm2 import Llama, PageAllocator, checksums, generate
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
    """An engine, its caches and its messenger; a context manager."""

    def __init__(self, model: Llama, options: Options) -> None:
        self._model = model
        self._stack = ExitStack()
        self.engine = self._stack.enter_context(Engine(options.provider, nics=options.nics))
        spec, self.caches = make_caches(model, options.decode_tp)
        regions = [[self.engine.register(cache.data)] for cache in self.caches]
        tails = TailPool(self.engine, {"hidden": ("float32", (model.config.hidden,))}, num_slots=4)
        self._messenger = self._stack.enter_context(DecodeMessenger(self.engine, spec, regions, tails))
        self._allocator = PageAllocator(NUM_PAGES, seed=42)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def fetch(
        self, address: bytes, tokens: list[int], room: int, on_progress: Callable[[int, int], None] | None = None
    ) -> Fetched:
        """Have ``tokens`` prefilled elsewhere; ``room`` more tokens fit into the pages."""
        pages = self._allocator.allocate(-(-(len(tokens) + room) // PAGE_TOKENS))
        used = pages[: -(-len(tokens) // PAGE_TOKENS)]
        peer = self._messenger.connect(address)
        handle = self._messenger.submit(peer, Request(request_id="demo", tokens=tokens, pages=[used]))
        while not handle.done():
            if on_progress is not None:
                on_progress(*handle.progress())
            time.sleep(0.02)  # paces the drawing only: the pages arrive whether or not anyone looks
        result = handle.result()
        if on_progress is not None:
            on_progress(*handle.progress())
        return Fetched(result, pages, len(tokens), checksums(self.caches, used, len(tokens)))

    def generate(self, token: int, fetched: Fetched, count: int, stop: int = -1) -> Iterator[int]:
        """Run the withheld token, then go on greedily."""
        return generate(self._model, token, fetched.num_tokens, self.caches, fetched.pages, count, stop=stop)

    def opened(self) -> dict[str, Any]:
        """Provider, fabric and domain in use."""
        return rail_figures(self.engine)
