"""Layouts read from config.json."""

from __future__ import annotations

import pytest

from fabric_kv.errors import ConfigError
from fabric_kv.sharding import PRESETS, CacheSpec, Placement, layout_from_config, plan_transfer

from .cache_oracle import Request, Simulation
from .test_sharding_deployments import small


def groups(name, **options):
    layout = layout_from_config(PRESETS[name], **{"page_tokens": 16, **options})
    return {group.name: group for group in layout.groups}


@pytest.mark.parametrize(
    ("name", "layers", "bytes_per_token_and_layer"),
    [
        ("smollm2-135m", 30, 2 * 3 * 64 * 2),
        ("llama-3.1-8b", 32, 2 * 8 * 128 * 2),
        ("qwen3-8b", 36, 2 * 8 * 128 * 2),
        ("qwen3-235b", 94, 2 * 4 * 128 * 2),
        ("qwen3-coder-480b", 62, 2 * 8 * 128 * 2),
        ("deepseek-r1", 61, 576 * 2),
    ],
)
def test_one_group(name, layers, bytes_per_token_and_layer):
    (group,) = groups(name).values()
    assert len(group.layers) == layers
    assert group.page_bytes == 16 * bytes_per_token_and_layer


def test_deepseek_v32_keeps_indexer_keys_beside_the_latent():
    found = groups("deepseek-v3.2", page_tokens=64, dtype="fp8_ds_mla")
    assert found["latent"].layers == found["indexer"].layers == tuple(range(61))
    assert found["latent"].page_bytes == 64 * 656
    assert found["indexer"].page_bytes == 64 * 132
    layout = layout_from_config(PRESETS["deepseek-v3.2"], page_tokens=64)
    plan = plan_transfer(*(CacheSpec.dense(layout, Placement(tp_size=8), 8) for _ in range(2)))
    assert plan.groups_of_layer(5) == (0, 1)
    with pytest.raises(ConfigError, match="layer 5 is in 2 groups"):
        plan.group_of_layer(5)


def test_windows():
    found = groups("gpt-oss-120b")
    assert found["sliding"].layers == tuple(range(0, 36, 2))
    assert found["attention"].layers == tuple(range(1, 36, 2))
    assert found["sliding"].window == 128
    found = groups("gemma-3-27b")
    assert found["attention"].layers == tuple(range(5, 62, 6))
    assert found["sliding"].window == 1024
    everywhere = layout_from_config(
        {**PRESETS["llama-3.1-8b"], "model_type": "mistral", "sliding_window": 4096}, page_tokens=16
    )
    assert [(group.kind, len(group.layers)) for group in everywhere.groups] == [("sliding", 32)]
    some = {**PRESETS["qwen3-8b"], "sliding_window": 512, "use_sliding_window": True}
    with pytest.raises(ConfigError, match="without layer_types"):
        layout_from_config(some, page_tokens=16)
    some["layer_types"] = ["full_attention"] * 30 + ["sliding_attention"] * 6
    assert [len(group.layers) for group in layout_from_config(some, page_tokens=16).groups] == [30, 6]
    off = {**some, "use_sliding_window": False, "layer_types": None}
    assert [len(group.layers) for group in layout_from_config(off, page_tokens=16).groups] == [36]


def test_gemma3_leaves_out_its_defaults():
    config = {"model_type": "gemma3", "torch_dtype": "bfloat16"}
    config["text_config"] = {"model_type": "gemma3_text", "num_hidden_layers": 34, "sliding_window": 1024}
    layout = layout_from_config(config, page_tokens=16)
    assert [part.dim for part in layout.groups[0].parts] == [256, 256]
    assert [len(group.layers) for group in layout.groups] == [5, 29]


def test_qwen3_next_is_hybrid():
    found = groups("qwen3-next-80b")
    assert found["attention"].layers == tuple(range(3, 48, 4))
    assert len(found["state"].layers) == 36
    assert found["state"].page_tokens == 0
    # vLLM: a convolution state of (8192, 3) and a recurrent state of (32, 128, 128).
    assert found["state"].page_bytes == 2 * (8192 * 3 + 32 * 128 * 128)
    wide = layout_from_config({**PRESETS["qwen3-next-80b"], "mamba_ssm_dtype": "float32"}, page_tokens=16)
    assert wide.groups[1].page_bytes == 2 * 8192 * 3 + 4 * 32 * 128 * 128


def test_options():
    assert groups("llama-3.1-8b", dtype="fp8")["attention"].parts[0].dtype == "float8_e4m3fn"
    assert groups("llama-3.1-8b", order="NHD")["attention"].order == "NHD"
    assert groups("deepseek-r1", mtp_layers=1)["latent"].layers == tuple(range(62))
    plain = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    (group,) = layout_from_config(plain, page_tokens=8).groups
    assert [(part.heads, part.dim) for part in group.parts] == [(4, 16)] * 2


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"model_type": "rwkv"}, "model_type='rwkv' is unknown"),
        ({"num_hidden_layers": None}, "num_hidden_layers=None"),
        ({"num_hidden_layers": 10**9}, "more than 4096"),
        ({"num_attention_heads": "8"}, "num_attention_heads='8'"),
        ({"layer_types": ["full_attention"]}, "must list all 32 layers"),
        ({"layer_types": ["chunked_attention"] * 32}, "chunked_attention"),
        ({"torch_dtype": "float12"}, "dtype='float12'"),
    ],
)
def test_facts_that_are_missing_or_odd(change, match):
    with pytest.raises(ConfigError, match=match):
        layout_from_config({**PRESETS["llama-3.1-8b"], **change}, page_tokens=16)


@pytest.mark.parametrize("name", sorted(PRESETS))
@pytest.mark.parametrize(("src_tp", "dst_tp"), [(8, 4), (2, 3)])
def test_every_family_maps(name, src_tp, dst_tp):
    """A few narrow layers of each family, byte by byte."""
    layout = small(layout_from_config(PRESETS[name], page_tokens=16), num_layers=8)
    plan = plan_transfer(*(CacheSpec.dense(layout, Placement(tp_size=tp), 12) for tp in (src_tp, dst_tp)))
    last = plan.num_source_sets - 1
    Simulation(plan, [Request(13, 4, (6,), last), Request(9)]).run()
