"""The disaggregated run's reference: the same prefill and decode in one process, pages copied in memory.

>>> run = reference_run(model, prompt, 40, prefill_tp=3, decode_tp=1, stop=tokenizer.stop_token)
>>> run.tokens == tokens_of_the_disaggregated_run
True
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .cache import PageAllocator, PagedCache, Pages, checksums, copy_pages
from .model import Llama, argmax
from .weights import F32


def chunk_ranges(num_tokens: int, chunk_tokens: int) -> list[tuple[int, int]]:
    """Split a prompt into (begin, end) token ranges of at most `chunk_tokens`."""
    return [(begin, min(begin + chunk_tokens, num_tokens)) for begin in range(0, num_tokens, chunk_tokens)]


def generate(
    model: Llama,
    token: int,
    start: int,
    caches: Sequence[PagedCache],
    pages: Pages,
    count: int,
    *,
    stop: int = -1,
) -> Iterator[int]:
    """Run `token` at position `start` and yield up to `count` greedy tokens, `stop` being the last."""
    for position in range(start, start + count):
        token = argmax(model.logits(model.forward([token], position, caches, pages)[-1]))
        yield token
        if token == stop:
            return


class ReferenceRun(NamedTuple):
    """What a disaggregated run has to reproduce bit for bit."""

    tokens: list[int]  # generated, the stop token included
    hidden: F32  # (hidden,) of the last token that prefill ran, the one before the withheld token
    checksums: NDArray[np.uint32]  # of the prefilled pages, see cache.checksums


def reference_run(
    model: Llama,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    prefill_tp: int = 1,
    decode_tp: int = 1,
    chunk_tokens: int = 128,
    page_tokens: int = 16,
    dtype: DTypeLike = np.float16,
    stop: int = -1,
) -> ReferenceRun:
    """Prefill all but the last prompt token under one TP size, copy the pages, decode under the other."""
    num_prefilled = len(prompt) - 1
    if num_prefilled < 1:
        raise ValueError(f"the prompt has {len(prompt)} tokens; prefill needs one and decode the last")
    num_pages = -(-(len(prompt) + max_new_tokens) // page_tokens)

    def engine(tp: int, seed: int) -> tuple[list[PagedCache], Pages]:
        cfg = model.config
        caches = [PagedCache(cfg, tp, num_pages, page_tokens=page_tokens, dtype=dtype) for _ in range(tp)]
        return caches, PageAllocator(num_pages, seed).allocate(num_pages)

    (src, src_pages), (dst, dst_pages) = engine(prefill_tp, 0), engine(decode_tp, 1)
    for begin, end in chunk_ranges(num_prefilled, chunk_tokens):
        hidden = model.forward(prompt[begin:end], begin, src, src_pages)
    copy_pages(src, src_pages, dst, dst_pages)
    sums = checksums(dst, dst_pages, num_prefilled)
    tokens = list(generate(model, prompt[-1], num_prefilled, dst, dst_pages, max_new_tokens, stop=stop))
    return ReferenceRun(tokens, hidden[-1], sums)
