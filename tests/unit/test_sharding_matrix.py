"""Every TP x heads x PP pair of a grid, against the byte oracle."""

from __future__ import annotations

import functools
import itertools

import pytest

from fabric_kv.sharding import CacheSpec, KVLayout, Placement, even_stages, plan_transfer

from .cache_oracle import Request, Simulation

TP = (1, 2, 4, 8, 16)
HEADS = (1, 2, 3, 4, 6, 8, 32)
PP = (1, 2, 4)
NUM_LAYERS = 5  # no PP but 1 divides it


@functools.cache
def spec(heads: int, tp: int, pp: int) -> CacheSpec:
    layout = KVLayout.attention(num_layers=NUM_LAYERS, kv_heads=heads, head_dim=1, page_tokens=2, dtype="uint8")
    return CacheSpec.dense(layout, Placement(tp_size=tp, pp_layers=even_stages(NUM_LAYERS, pp)), num_pages=3)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("src_tp", TP)
def test_all_pairs(heads, src_tp):
    for number, (src_pp, dst_tp, dst_pp) in enumerate(itertools.product(PP, TP, PP)):
        plan = plan_transfer(spec(heads, src_tp, src_pp), spec(heads, dst_tp, dst_pp))
        Simulation(plan, [Request(3, source_set=number % plan.num_source_sets, extra_pages=0)]).run()
