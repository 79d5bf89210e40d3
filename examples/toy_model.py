"""What custom_scheduler.py schedules: a model that is none (it burns time and fills a paged cache), load, and figures.

>>> toy = Toy(); toy.forward([(tokens, 0, pages)], layer_done=print)

Every token depends on the whole cache before it, exactly: two runs agree if and only if their caches do.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from fabric_kv import CacheSpec, KVLayout, Placement

LAYERS, HEADS, PAGE, DIM, NUM_PAGES, WIDTH = 8, 2, 16, 64, 512, 768
LAYOUT = KVLayout.attention(num_layers=LAYERS, kv_heads=HEADS, head_dim=DIM, page_tokens=PAGE, dtype="float16")


class Sequence:
    def __init__(self, number: int, arrival_s: float, prompt: Any, new_tokens: int) -> None:
        self.number, self.arrival_s, self.tokens, self.length = number, arrival_s, list(prompt), 0
        self.until = len(self.tokens) + new_tokens  # tokens in all; `length` of them are in the cache
        self.pages = np.zeros(0, np.int64)
        self.last_s = self.ttft_s = 0.0
        self.gaps_s: list[float] = []


class Toy:
    """A paged cache, and a forward pass that fills it."""

    def __init__(self) -> None:
        self.cache = np.zeros((LAYERS, 2, NUM_PAGES, HEADS, PAGE, DIM), np.float16)
        self.spec = CacheSpec.from_arrays(LAYOUT, Placement(), [self.cache])
        self.weights = np.eye(WIDTH, dtype=np.float32)
        self.free = list(range(NUM_PAGES))

    def take_pages(self, num_tokens: int) -> Any:
        return np.array([self.free.pop() for _ in range(-(-num_tokens // PAGE))])

    def forward(self, parts: list[tuple[Any, int, Any]], layer_done: Any = lambda layer: None) -> None:
        """Append tokens to sequences: (tokens, begin, pages) each."""
        x = np.ones((sum(len(tokens) for tokens, _, _ in parts), WIDTH), np.float32)
        for layer in range(LAYERS):
            x = x @ self.weights
            for tokens, begin, pages in parts:
                at = np.arange(begin, begin + len(tokens))
                values = (np.asarray(tokens)[:, None] * (layer + 3) + np.arange(DIM)) % 251
                self.cache[layer, :, pages[at // PAGE], :, at % PAGE] = values[:, None, None, :]
            layer_done(layer)

    def next_token(self, sequence: Sequence) -> int:
        at = np.arange(sequence.length)
        return int(self.cache[:, :, sequence.pages[at // PAGE], :, at % PAGE].sum(dtype=np.float64)) % 50021

    def step(self, running: list[Sequence], prefill: list[tuple[Any, int, Any]]) -> None:
        """One step of continuous batching: a token for each running sequence, beside what is prefilled."""
        self.forward([(s.tokens[-1:], s.length, s.pages) for s in running] + prefill)
        for s in list(running):
            s.length += 1
            s.tokens.append(self.next_token(s))
            now = time.monotonic()
            if s.last_s:
                s.gaps_s.append(now - s.last_s)
            s.last_s, s.ttft_s = now, s.ttft_s or now - s.arrival_s
            if len(s.tokens) == s.until:
                running.remove(s)
                self.free += s.pages.tolist()


def arrivals(count: int, rate: float, prompt: int, new_tokens: int) -> list[Sequence]:
    dice, at = np.random.default_rng(7), time.monotonic()
    made = []
    for number in range(count):
        at += dice.exponential(1 / rate)
        made.append(Sequence(number, at, dice.integers(0, 50000, dice.integers(prompt // 2, prompt)), new_tokens))
    return made


def report(name: str, sequences: list[Sequence]) -> None:
    gaps = np.concatenate([s.gaps_s for s in sequences]) * 1e3
    ttft = np.array([s.ttft_s for s in sequences]) * 1e3
    print(
        f"{name:14s} gap between tokens p50 {np.median(gaps):7.2f} ms, p99 {np.percentile(gaps, 99):7.2f} ms"
        f"   time to first token p50 {np.median(ttft):7.1f} ms, p99 {np.percentile(ttft, 99):7.1f} ms"
    )
