"""The model's byte-level BPE and chat template, built from the metadata of its GGUF file.

>>> tokenizer = Tokenizer(load_checkpoint().metadata)
>>> prompt = tokenizer.encode_chat("What is RDMA?")
>>> print(tokenizer.decode(prompt))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .weights import INSTALL, MissingWeightsError

CONTROL = 3  # token type of <|im_start|> and its kind: llama.cpp, LLAMA_TOKEN_TYPE_CONTROL
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"  # the template's own default


class Tokenizer:
    """Text to token ids and back.

    The vocabulary lacks 21 of the 256 byte values, most of which UTF-8 never uses; they vanish when encoded.

    Parameters
    ----------
    metadata : mapping
        `Checkpoint.metadata`.

    Raises
    ------
    MissingWeightsError
        If the package ``tokenizers`` is not installed.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        try:
            from tokenizers import AddedToken, decoders, models, pre_tokenizers
            from tokenizers import Tokenizer as Backend
        except ImportError as error:
            raise MissingWeightsError(f"package tokenizers is not installed. Hint: {INSTALL}") from error
        tokens: list[str] = metadata["tokenizer.ggml.tokens"]
        merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
        self._backend = Backend(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
        # The "smollm" splitting rule of the file: every digit alone, then GPT-2's pattern over bytes.
        self._backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        self._backend.decoder = decoders.ByteLevel()
        kinds = zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True)
        control = [AddedToken(token, special=True) for token, kind in kinds if kind == CONTROL]
        self._backend.add_special_tokens(control)
        self.stop_token: int = metadata["tokenizer.ggml.eos_token_id"]  # <|im_end|>

    def encode(self, text: str) -> list[int]:
        """Give the token ids of `text`; control tokens written out in it become their single id."""
        return list(self._backend.encode(text).ids)

    def encode_chat(self, user: str, system: str = SYSTEM) -> list[int]:
        """Give the ids of a one-turn conversation in ChatML, up to where the assistant begins to speak."""
        turns = (("system", system), ("user", user))
        text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
        return self.encode(text + "<|im_start|>assistant\n")

    def decode(self, tokens: Sequence[int]) -> str:
        """Give the text of `tokens` without control tokens; bytes that are not UTF-8 become U+FFFD."""
        return str(self._backend.decode(list(tokens), skip_special_tokens=True))
