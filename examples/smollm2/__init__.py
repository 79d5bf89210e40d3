"""SmolLM2-135M-Instruct in NumPy: a small engine whose KV cache is paged and tensor-parallel.

>>> checkpoint = load_checkpoint()
>>> model, tokenizer = Llama(checkpoint.config, checkpoint.weights), Tokenizer(checkpoint.metadata)
>>> run = reference_run(model, tokenizer.encode_chat("What is RDMA?"), 40, prefill_tp=3, decode_tp=1)
"""

from .cache import PageAllocator, PagedCache, checksums, copy_pages
from .group import RankGroup, RankLostError
from .model import Llama, argmax
from .reference import ReferenceRun, chunk_ranges, generate, reference_run
from .tokenizer import Tokenizer
from .weights import (
    Checkpoint,
    Config,
    MissingWeightsError,
    Weights,
    find_gguf,
    load_checkpoint,
    random_weights,
)

__all__ = [
    "Checkpoint",
    "Config",
    "Llama",
    "MissingWeightsError",
    "PageAllocator",
    "PagedCache",
    "RankGroup",
    "RankLostError",
    "ReferenceRun",
    "Tokenizer",
    "Weights",
    "argmax",
    "checksums",
    "chunk_ranges",
    "copy_pages",
    "find_gguf",
    "generate",
    "load_checkpoint",
    "random_weights",
    "reference_run",
]
