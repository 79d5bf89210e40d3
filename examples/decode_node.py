"""The decode side of the demo: asks for the pages of prompts, waits for their counters, and generates.

>>> with DecodeNode(options) as node:
...     all_fetched = node.fetch(prefill_address, [prompt[:-1] for prompt in prompts], room=64, on_progress=print)
...     tokens = list(node.generate(prompts[0][-1], all_fetched[0], count=64))
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple, Self

import numpy as np
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


def used_of(pages: Pages, tokens: list[int]) -> Pages:
    """The pages that ``tokens`` fill; the others are for what is generated."""
    return pages[: -(-len(tokens) // PAGE_TOKENS)]


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
        self, address: bytes, prompts: list[list[int]], room: int, on_progress: Callable[[int, int], None] | None = None
    ) -> list[Fetched]:
        """Have prompts prefilled elsewhere, all at once; ``room`` more tokens fit into the pages of each."""
        peer = self._messenger.connect(address)
        handles, all_pages = [], []
        for number, tokens in enumerate(prompts):
            pages = self._allocator.allocate(-(-(len(tokens) + room) // PAGE_TOKENS))
            request = Request(request_id=str(number), tokens=tokens, pages=[used_of(pages, tokens)])
            handles.append(self._messenger.submit(peer, request))
            all_pages.append(pages)
        fetched: dict[int, Fetched] = {}
        while len(fetched) < len(prompts):
            self.ranks.check()
            for number, (handle, tokens, pages) in enumerate(zip(handles, prompts, all_pages, strict=True)):
                if number not in fetched and handle.done():
                    sums = self.ranks.checksums(used_of(pages, tokens), len(tokens))
                    fetched[number] = Fetched(handle.result(), pages, len(tokens), sums)
            if on_progress is not None:
                done, total = np.sum([handle.progress() for handle in handles], axis=0)
                on_progress(int(done), int(total))
            time.sleep(0.02)  # paces the drawing only: the pages arrive whether or not anyone looks
        return [fetched[number] for number in range(len(prompts))]

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
