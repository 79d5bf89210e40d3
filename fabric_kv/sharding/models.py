"""Cache layouts of known model families, read from a Hugging Face ``config.json``.

>>> layout = layout_from_config(json.load(open("config.json")), page_tokens=16)
>>> layout_from_config(PRESETS["deepseek-r1"], page_tokens=64).groups[0].page_bytes
73728

A family that is not listed here is refused by name: describe it with ``KVLayout.attention`` or ``KVLayout`` itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..errors import ConfigError
from .layout import DTYPE_BYTES, MAX_LAYERS, Group, GroupKind, KVLayout, Order, Part

__all__ = ["PRESETS", "layout_from_config"]

Config = Mapping[str, Any]

# vLLM's names on the left.
_DTYPES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
# 512 fp8 latent values, 4 fp32 scales, 64 bf16 RoPE values per token: vLLM's and FlashMLA's sparse fp8 cache.
FP8_DS_MLA_BYTES = 656
INDEX_QUANT_BLOCK = 128  # elements per fp32 scale of DeepSeek-V3.2's indexer keys


class _Wanted(NamedTuple):
    page_tokens: int
    dtype: str
    state_dtype: str
    order: Order


def layout_from_config(
    config: Config,
    *,
    page_tokens: int,
    dtype: str = "auto",
    order: Order = "HND",
    mtp_layers: int = 0,
    model: str = "",
) -> KVLayout:
    """The cache of a model, from its ``config.json``.

    Parameters
    ----------
    config : mapping
        The parsed file; of a multimodal model the whole or its ``text_config``.
    page_tokens : int
        Tokens per page, the same in every group but recurrent states.
    dtype : str
        Of the cache: a key of ``DTYPE_BYTES``, vLLM's ``fp8``, ``fp8_e4m3``, ``fp8_e5m2``, for MLA ``fp8_ds_mla``, or
        ``auto``: the weights' type.
    order : {"HND", "NHD"}
    mtp_layers : int
        Layers of the model's own draft module to keep as well, after the others (DeepSeek's MTP).
    model : str
        Name for the handshake.

    Raises
    ------
    ConfigError
        If the family is unknown or a fact is missing; names it.

    Notes
    -----
    Window and linear-attention layers follow ``layer_types``, or else the family's rule in Hugging Face Transformers.
    """
    text = config.get("text_config")
    if isinstance(text, Mapping):
        config = {**config, **text}
    family = str(config.get("model_type", ""))
    if family not in _FAMILIES:
        raise ConfigError(f"model_type={family[:64]!r} is unknown; known are {', '.join(sorted(_FAMILIES))}")
    weights = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    cache_dtype = weights if dtype == "auto" else _DTYPES.get(dtype, dtype)
    state_dtype = str(config.get("mamba_ssm_dtype") or weights).removeprefix("torch.")
    num_layers = _number(config, "num_hidden_layers")
    if num_layers + mtp_layers > MAX_LAYERS:
        raise ConfigError(f"{num_layers} layers and {mtp_layers} MTP layers are more than {MAX_LAYERS}")
    wanted = _Wanted(page_tokens, cache_dtype, state_dtype, order)
    groups = _FAMILIES[family](config, num_layers, wanted)
    layers = range(num_layers, num_layers + mtp_layers)
    if mtp_layers:
        groups = [Group(g.name, g.kind, (*g.layers, *layers), *_rest(g)) if _full(g) else g for g in groups]
    return KVLayout(num_layers + mtp_layers, tuple(groups), model)


def _full(group: Group) -> bool:
    return group.kind in ("attention", "mla", "indexer")


def _rest(group: Group) -> tuple[int, tuple[Part, ...], Order, int]:
    return group.page_tokens, group.parts, group.order, group.window


def _number(config: Config, name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None:
        value = default
    if type(value) is not int or value < 1:
        raise ConfigError(f"config.json: {name}={value!r} must be a positive integer")
    return value


def _layer_types(config: Config, num_layers: int, every: int, usual: str) -> list[str]:
    """``layer_types``, or every n-th layer with full attention."""
    types = config.get("layer_types")
    if types is None:
        return ["full_attention" if (layer + 1) % every == 0 else usual for layer in range(num_layers)]
    if not isinstance(types, list | tuple) or len(types) != num_layers:
        raise ConfigError(f"config.json: layer_types must list all {num_layers} layers")
    odd = set(types) - {"full_attention", usual}
    if odd:
        raise ConfigError(
            f"config.json: layer_types holds {sorted(map(str, odd))[:4]}, which this family does not have"
        )
    return [str(kind) for kind in types]


def _kv_parts(config: Config, wanted: _Wanted) -> tuple[Part, ...]:
    query_heads = _number(config, "num_attention_heads")
    heads = _number(config, "num_key_value_heads", query_heads)
    head_dim = config.get("head_dim") or _number(config, "hidden_size") // query_heads
    if wanted.dtype not in DTYPE_BYTES:
        raise ConfigError(f"dtype={wanted.dtype[:64]!r} is none for K and V; known are {sorted(DTYPE_BYTES)}")
    return Part("K", heads, head_dim, wanted.dtype), Part("V", heads, head_dim, wanted.dtype)


def _group(
    name: str, kind: GroupKind, layers: list[int], parts: tuple[Part, ...], wanted: _Wanted, window: int = 0
) -> list[Group]:
    size = 0 if kind == "state" else wanted.page_tokens
    return [Group(name, kind, tuple(layers), size, parts, wanted.order, window)] if layers else []


def _dense(config: Config, num_layers: int, wanted: _Wanted) -> list[Group]:
    """GQA in every layer; a window in all of them (Mistral 7B) or, with ``layer_types``, in some (Qwen)."""
    if not config.get("sliding_window") or not config.get("use_sliding_window", True):
        return _mixed(config, num_layers, wanted, 1, "full_attention")
    if not config.get("layer_types") and config.get("model_type") != "mistral":
        raise ConfigError("config.json: sliding_window without layer_types does not say which layers have the window")
    return _mixed(config, num_layers, wanted, num_layers + 1, "sliding_attention")


def _mixed(config: Config, num_layers: int, wanted: _Wanted, every: int, usual: str) -> list[Group]:
    types = _layer_types(config, num_layers, every, usual)
    parts = _kv_parts(config, wanted)
    full = [layer for layer, kind in enumerate(types) if kind == "full_attention"]
    sliding = [layer for layer, kind in enumerate(types) if kind == "sliding_attention"]
    groups = _group("attention", "attention", full, parts, wanted)
    if sliding:
        groups += _group("sliding", "sliding", sliding, parts, wanted, _number(config, "sliding_window"))
    return groups


def _gpt_oss(config: Config, num_layers: int, wanted: _Wanted) -> list[Group]:
    return _mixed(config, num_layers, wanted, 2, "sliding_attention")


def _gemma3(config: Config, num_layers: int, wanted: _Wanted) -> list[Group]:
    # Published files leave out what equals the defaults of Transformers' Gemma3TextConfig.
    defaults = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096}
    every = _number(config, "sliding_window_pattern", 6)
    return _mixed({**defaults, **config}, num_layers, wanted, every, "sliding_attention")


def _mla(config: Config, num_layers: int, wanted: _Wanted) -> list[Group]:
    dim = _number(config, "kv_lora_rank") + _number(config, "qk_rope_head_dim")
    part = Part("latent", 1, dim, wanted.dtype) if wanted.dtype != "fp8_ds_mla" else None
    parts = (part or Part("latent", 1, FP8_DS_MLA_BYTES, "uint8"),)
    return _group("latent", "mla", list(range(num_layers)), parts, wanted)


def _mla_indexer(config: Config, num_layers: int, wanted: _Wanted) -> list[Group]:
    dim = _number(config, "index_head_dim")
    scales = -(-dim // INDEX_QUANT_BLOCK)
    # vLLM stores a page's scales behind its keys: two parts, each with strides of its own, whatever the page size.
    parts = Part("keys", 1, dim, "float8_e4m3fn"), Part("scales", 1, scales, "float32")
    indexer = _group("indexer", "indexer", list(range(num_layers)), parts, wanted)
    return _mla(config, num_layers, wanted) + indexer


def _qwen3_next(config: Config, num_layers: int, wanted: _Wanted) -> list[Group]:
    every = _number(config, "full_attention_interval", 4)
    types = _layer_types(config, num_layers, every, "linear_attention")
    keys, values = _number(config, "linear_num_key_heads"), _number(config, "linear_num_value_heads")
    key_dim, value_dim = _number(config, "linear_key_head_dim"), _number(config, "linear_value_head_dim")
    rows = _number(config, "linear_conv_kernel_dim") - 1
    conv = wanted.dtype if wanted.dtype in ("float16", "bfloat16", "float32") else "bfloat16"
    # The convolution runs over Q, K and V channels in turn, and tensor parallelism cuts each of the three.
    state = (
        Part("conv_q", keys, key_dim, conv, rows),
        Part("conv_k", keys, key_dim, conv, rows),
        Part("conv_v", values, value_dim, conv, rows),
        Part("recurrent", values, key_dim, wanted.state_dtype, value_dim),
    )
    full = [layer for layer, kind in enumerate(types) if kind == "full_attention"]
    linear = [layer for layer, kind in enumerate(types) if kind == "linear_attention"]
    attention = _group("attention", "attention", full, _kv_parts(config, wanted), wanted)
    return attention + _group("state", "state", linear, state, wanted)


_FAMILIES: dict[str, Callable[[Config, int, _Wanted], list[Group]]] = {
    "llama": _dense,
    "mistral": _dense,
    "qwen2": _dense,
    "qwen3": _dense,
    "qwen3_moe": _dense,
    "deepseek_v2": _mla,
    "deepseek_v3": _mla,
    "kimi_k2": _mla,
    "deepseek_v32": _mla_indexer,
    "gpt_oss": _gpt_oss,
    "gemma3": _gemma3,
    "gemma3_text": _gemma3,
    "qwen3_next": _qwen3_next,
}


def _facts(family: str, layers: int, heads: int, kv_heads: int, head_dim: int, **more: Any) -> Config:
    return {
        "model_type": family,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        **more,
    }


_DEEPSEEK = {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "torch_dtype": "bfloat16"}

PRESETS: dict[str, Config] = {
    "smollm2-135m": _facts("llama", 30, 9, 3, 64),
    "llama-3.1-8b": _facts("llama", 32, 32, 8, 128),
    "llama-3.1-70b": _facts("llama", 80, 64, 8, 128),
    "qwen3-8b": _facts("qwen3", 36, 32, 8, 128),
    "qwen3-32b": _facts("qwen3", 64, 64, 8, 128),
    "qwen3-235b": _facts("qwen3_moe", 94, 64, 4, 128),
    "qwen3-coder-480b": _facts("qwen3_moe", 62, 96, 8, 128),
    "deepseek-r1": {"model_type": "deepseek_v3", **_DEEPSEEK},
    "deepseek-v3.2": {"model_type": "deepseek_v32", **_DEEPSEEK, "index_head_dim": 128},
    "gpt-oss-20b": _facts("gpt_oss", 24, 64, 8, 64, sliding_window=128),
    "gpt-oss-120b": _facts("gpt_oss", 36, 64, 8, 64, sliding_window=128),
    "gemma-3-27b": _facts("gemma3", 62, 32, 16, 128, sliding_window=1024),
    "qwen3-next-80b": _facts(
        "qwen3_next",
        48,
        16,
        2,
        256,
        full_attention_interval=4,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
    ),
}
