"""Speed of planning: ``pytest benchmarks/bench_planning.py``; a part of ``scripts/bench``. Targets, not assertions.

A million pages of one layer into index arrays: under 20 ms. A request of 128K tokens and 94 layers, page lists shared
between layers: under 5 ms.
"""

from __future__ import annotations

import numpy as np
import pytest

from fabric_kv.sharding import PRESETS, CacheSpec, KVLayout, Placement, layout_from_config, plan_transfer

pytest.importorskip("pytest_benchmark")


def shuffled(num_pages: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(num_pages)


def test_million_pages_of_one_layer(benchmark):
    num_pages = 1_000_000
    layout = KVLayout.attention(num_layers=1, kv_heads=8, head_dim=128, page_tokens=16)
    spec = CacheSpec.dense(layout, Placement(tp_size=8), num_pages)
    plan = plan_transfer(spec, CacheSpec.dense(layout, Placement(tp_size=4), num_pages))
    src, dst = shuffled(num_pages, 1), shuffled(num_pages, 2)

    def one_layer():
        page_map = plan.page_map(0, 0, num_pages * 16, final=True)
        return plan.writes(0, 0, 0, page_map, src, dst)

    assert len(benchmark(one_layer)[0].src_pages) == num_pages
    benchmark.extra_info |= {"target_us": 20_000, "bare": "test_two_lists_of_a_million_are_copied"}


def test_two_lists_of_a_million_are_copied(benchmark):
    """What index arrays of one's own cost at least, whatever is planned."""
    src, dst = shuffled(1_000_000, 1), shuffled(1_000_000, 2)
    benchmark(lambda: (src.copy(), dst.copy()))


@pytest.mark.parametrize("ranks", ["one", "all"])
@pytest.mark.parametrize(("src_tp", "dst_tp"), [(8, 4), (4, 8), (8, 8)])
def test_long_request(benchmark, src_tp, dst_tp, ranks):
    """What one source rank, or all of them, send for 128K tokens of Qwen3-235B (94 layers), pages of 16 tokens."""
    num_tokens = 128 * 1024
    num_pages = num_tokens // 16
    layout = layout_from_config(PRESETS["qwen3-235b"], page_tokens=16)
    spec = CacheSpec.dense(layout, Placement(tp_size=src_tp), num_pages)
    plan = plan_transfer(spec, CacheSpec.dense(layout, Placement(tp_size=dst_tp), num_pages))
    src, dst = shuffled(num_pages, 1), shuffled(num_pages, 2)
    pairs = [pair for pair in plan.pairs(0) if ranks == "all" or pair[0] == 0]

    def request():
        page_map = plan.page_map(0, 0, num_tokens, final=True)
        for layer in range(94):
            for pair in pairs:
                plan.writes(*pair, layer, page_map, src, dst, source_set=0)

    benchmark(request)
    benchmark.extra_info["target_us"] = 5_000


def test_expected_units(benchmark):
    layout = layout_from_config(PRESETS["qwen3-235b"], page_tokens=16)
    plan = plan_transfer(CacheSpec.dense(layout, Placement(tp_size=8)), CacheSpec.dense(layout, Placement(tp_size=4)))
    assert benchmark(plan.expected_units, 0, 0, 128 * 1024) > 0


@pytest.mark.parametrize("model", ["qwen3-coder-480b", "deepseek-r1", "qwen3-next-80b"])
def test_handshake(benchmark, model):
    """Both specs known: what a pair computes once."""
    layout = layout_from_config(PRESETS[model], page_tokens=64)
    specs = [CacheSpec.dense(layout, Placement(tp_size=tp)) for tp in (8, 4)]
    benchmark(plan_transfer, *specs)


def test_read_spec(benchmark):
    layout = layout_from_config(PRESETS["qwen3-235b"], page_tokens=16)
    data = CacheSpec.dense(layout, Placement(tp_size=8)).to_bytes()
    benchmark(CacheSpec.from_bytes, data)
