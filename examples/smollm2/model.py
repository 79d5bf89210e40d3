"""A Llama forward pass in NumPy float32 with a paged KV cache and tensor parallelism over the KV heads.

>>> model, caches = Llama(config, weights), [PagedCache(config, 3, num_pages=64) for _ in range(3)]
>>> hidden = model.forward(tokens, 0, caches, pages, on_layer_done=send_layer)  # one cache per rank
>>> next_token = argmax(model.logits(hidden[-1]))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, reduce

import numpy as np
from numpy.typing import NDArray

from .cache import PagedCache, Pages
from .group import RankGroup
from .weights import F32, Config, Layer, Weights


class Llama:
    """A model whose ranks run one after the other in this process, or each in one of its own.

    The number of caches given to `forward` is the TP size, unless it is given a group. A rank holds some KV heads, the
    query heads that use them, and its slice of the FFN. Partial sums are added in rank order, so that two runs with the
    same TP size, chunks and number of BLAS threads give the same bits, in whichever processes they run.
    """

    def __init__(self, config: Config, weights: Weights) -> None:
        self.config = config
        self.weights = weights
        self._shards = cache(self._make_shards)

    def _make_shards(self, tp_size: int) -> list[list[Layer]]:
        self.config.check_tp(tp_size)
        return [[layer.shard(rank, tp_size) for rank in range(tp_size)] for layer in self.weights.layers]

    def forward(
        self,
        tokens: Sequence[int] | NDArray[np.int64],
        start: int,
        caches: Sequence[PagedCache],
        pages: Pages,
        on_layer_done: Callable[[int], None] | None = None,
        group: RankGroup | None = None,
    ) -> F32:
        """Run one chunk of a sequence and append its keys and values to the caches.

        Parameters
        ----------
        tokens : sequence of int, shape (n,)
            The chunk, at positions `start` … `start` + n - 1; the tokens before are in the caches already.
        caches : sequence of PagedCache
            One per TP rank, rank 0 first; with a group that of this process's rank alone.
        pages : ndarray of int, shape (>= pages needed,)
            The sequence's page numbers in token order, the same on every rank.
        on_layer_done : callable, optional
            Called with the layer's index once every rank has appended this layer's keys and values and the
            attention's output is projected. The layer's FFN and all later layers are still to come.
        group : RankGroup, optional
            The ranks, where each is a process: all of them call this with the same arguments, but for the caches.

        Returns
        -------
        ndarray of float32, shape (n, hidden)
            Hidden states after the final norm, ready for `logits`.

        Raises
        ------
        ValueError
            If `pages` is too short for the chunk or the TP size does not divide the model.
        RankLostError
            If another rank of the group has ended.
        """
        end = start + len(tokens)
        if end > len(pages) * caches[0].page_tokens:
            raise ValueError(f"{end} tokens do not fit in {len(pages)} pages of {caches[0].page_tokens}")
        cfg, positions = self.config, np.arange(start, end)
        rotation = rope_rotation(positions, cfg.head_dim, cfg.rope_base)
        mask = np.where(np.arange(end) > positions[:, None], np.float32(-np.inf), np.float32(0))

        def all_reduce(parts: Iterable[F32]) -> F32:
            # In the ranks' order: float addition is not associative, and runs must agree bitwise.
            total = reduce(np.add, parts)
            return total if group is None else group.all_reduce(total)

        x = self.weights.embedding[np.asarray(tokens)]
        for index, all_shards in enumerate(self._shards(len(caches) if group is None else group.size)):
            shards = all_shards if group is None else [all_shards[group.rank]]
            h = rms_norm(x, shards[0].attn_norm, cfg.rms_eps)
            x = x + all_reduce(
                self._attention(shard, index, h, rank_cache, pages, start, rotation, mask)
                for shard, rank_cache in zip(shards, caches, strict=True)
            )
            if on_layer_done is not None:
                on_layer_done(index)
            h = rms_norm(x, shards[0].ffn_norm, cfg.rms_eps)
            x = x + all_reduce(swiglu(shard, h) for shard in shards)
        return rms_norm(x, self.weights.norm, cfg.rms_eps)

    def _attention(
        self,
        shard: Layer,
        index: int,
        h: F32,
        kv: PagedCache,
        pages: Pages,
        start: int,
        rotation: tuple[F32, F32],
        mask: F32,
    ) -> F32:
        """Compute one rank's part of the attention output, (n, hidden); to be summed over ranks."""
        n, d = len(h), self.config.head_dim

        def heads(w: F32) -> F32:  # (heads of this rank, n, d)
            return (h @ w.T).reshape(n, -1, d).swapaxes(0, 1)

        kv.append(index, pages, start, rope(heads(shard.k), rotation), heads(shard.v))
        keys, values = kv.read(index, pages, start + n)
        # GQA: the query heads of a KV head become extra rows of one matrix product.
        q = rope(heads(shard.q), rotation).reshape(len(keys), -1, d)
        scores = (q @ keys.swapaxes(1, 2)).reshape(-1, n, start + n) * np.float32(d**-0.5) + mask
        mixed: F32 = softmax(scores).reshape(len(keys), -1, start + n) @ values
        return mixed.reshape(-1, n, d).swapaxes(0, 1).reshape(n, -1) @ shard.o.T

    def logits(self, hidden: F32) -> F32:
        """Map hidden states (..., hidden) to scores over the vocabulary (..., vocab)."""
        return hidden @ self.weights.embedding.T


def rms_norm(x: F32, weight: F32, eps: float) -> F32:
    rms: F32 = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps))
    return x / rms * weight


def softmax(x: F32) -> F32:
    e: F32 = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def swiglu(shard: Layer, h: F32) -> F32:
    gate = h @ shard.gate.T
    sigmoid = 0.5 + 0.5 * np.tanh(0.5 * gate)  # the form that cannot overflow
    return (gate * sigmoid * (h @ shard.up.T)) @ shard.down.T


def rope_rotation(positions: NDArray[np.int64], head_dim: int, base: float) -> tuple[F32, F32]:
    angles = positions[:, None] * base ** (-np.arange(0, head_dim, 2) / head_dim)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rope(x: F32, rotation: tuple[F32, F32]) -> F32:
    """Rotate neighbouring pairs (0, 1), (2, 3), …, the order in which GGUF stores Wq and Wk; not halves."""
    (cos, sin), (even, odd) = rotation, (x[..., 0::2], x[..., 1::2])
    return np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape)


def argmax(logits: F32) -> int:
    return int(np.argmax(logits))
