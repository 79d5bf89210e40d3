"""Plans of deployments that people run, by name, and what goes wrong in systems like this one."""

from __future__ import annotations

import collections
import math

import numpy as np
import pytest

from fabric_kv.errors import ConfigError, PlanError
from fabric_kv.sharding import (
    CacheSpec,
    Group,
    KVLayout,
    Part,
    Placed,
    Placement,
    RankMemory,
    SourcePicker,
    even_stages,
    plan_transfer,
)

from .cache_oracle import Request, Simulation


def small(layout: KVLayout, num_layers: int, page_tokens: int = 4) -> KVLayout:
    """A few layers of a model with narrow heads: the mapping does not depend on their width."""
    groups = []
    for group in layout.groups:
        layers = tuple(layer for layer in group.layers if layer < num_layers)
        parts = tuple(Part(part.name, part.heads, 2, "uint8", part.rows) for part in group.parts)
        size = page_tokens if group.page_tokens else 0
        groups.append(Group(group.name, group.kind, layers, size, parts, group.order, min(group.window, 7)))
    return KVLayout(num_layers, tuple(groups))


def gqa(heads: int, order: str = "HND") -> KVLayout:
    layout = KVLayout.attention(num_layers=3, kv_heads=heads, head_dim=2, page_tokens=4, dtype="uint8")
    return layout.with_order(order)


MLA = KVLayout(3, (Group("latent", "mla", (0, 1, 2), 4, (Part("latent", 1, 9, "uint8"),)),))


def plan_of(layout, src, dst, *, dst_page=None, packing="adjacent"):
    other = layout if dst_page is None else layout.with_page_tokens(dst_page)
    return plan_transfer(CacheSpec.dense(layout, src, 64, packing), CacheSpec.dense(other, dst, 64, packing))


@pytest.mark.parametrize(("src", "dst"), [(8, 8), (8, 4), (4, 8)])
@pytest.mark.parametrize("order", ["HND", "NHD"])
def test_qwen3_coder_480b(src, dst, order):
    """8 KV heads: one head a rank for TP8, two for TP4."""
    plan = plan_of(gqa(8, order), Placement(tp_size=src), Placement(tp_size=dst))
    Simulation(plan, [Request(30, 8, cuts=(5, 19)), Request(9)]).run()


def test_deepseek_r1_tp8_to_tp8():
    """MLA: each decode rank gets one copy, every source rank sends one of them."""
    plan = plan_of(MLA, Placement(tp_size=8), Placement(tp_size=8))
    assert plan.num_source_sets == 8
    for source_set in range(8):
        pairs = plan.pairs(source_set)
        assert sorted(src for src, _ in pairs) == sorted(dst for _, dst in pairs) == list(range(8))
        Simulation(plan, [Request(30, 8, cuts=(5, 19), source_set=source_set)]).run()


def test_deepseek_r1_tp8_to_8_dp1():
    """DP-attention on decode: a request lives on one rank, and its source is picked anew for each request."""
    plan = plan_of(MLA, Placement(tp_size=8), Placement.dp_attention(tp_size=8, dp_size=8))
    picker = SourcePicker(plan.num_source_sets, seed=3)
    sources = collections.Counter()
    sent = []
    for number in range(20):
        request = Request(11, source_set=picker.pick(), dst_dp=number % 8, extra_pages=0)
        ((src, dst),) = plan.pairs(request.source_set, dst_dp=request.dst_dp)
        assert dst == request.dst_dp
        sources[src] += 1
        sent.append(request)
    assert max(sources.values()) - min(sources.values()) <= 1
    Simulation(plan, sent).run()


@pytest.mark.parametrize("src", [1, 2, 4, 8])
@pytest.mark.parametrize("dst", [1, 2, 4, 8])
def test_replicated_latent_is_sent_once_by_evenly_used_ranks(src, dst):
    plan = plan_of(MLA, Placement(tp_size=src), Placement(tp_size=dst))
    used = collections.Counter(src_rank for s in range(plan.num_source_sets) for src_rank, _ in plan.pairs(s))
    assert len(used) == src
    assert max(used.values()) == min(used.values())
    for source_set in range(plan.num_source_sets):
        now = collections.Counter(src_rank for src_rank, _ in plan.pairs(source_set))
        assert max(now.values()) - min(now[rank] for rank in range(src)) <= 1
        # Silent source ranks are no reason to wait: the totals come from the ranks that do send.
        assert all(plan.expected_units(rank, source_set, 9) > 0 for rank in range(dst))
        Simulation(plan, [Request(9, source_set=source_set)]).run()


@pytest.mark.parametrize(("src", "dst"), [(3, 1), (1, 3), (4, 2), (2, 4)])
def test_tp_pairs(src, dst):
    Simulation(plan_of(gqa(12), Placement(tp_size=src), Placement(tp_size=dst)), [Request(30, 8, (11,))]).run()


@pytest.mark.parametrize(("src", "dst"), [(16, 64), (64, 16), (16, 24), (4, 4), (1, 5)])
@pytest.mark.parametrize("order", ["HND", "NHD"])
def test_page_sizes(src, dst, order):
    layout = gqa(2, order).with_page_tokens(src)
    plan = plan_of(layout, Placement(tp_size=2), Placement(), dst_page=dst)
    requests = [Request(150, dst, cuts=(33, 64, 65, 128)), Request(1), Request(0)]
    plan = plan_transfer(
        CacheSpec.dense(layout, Placement(tp_size=2), 256), CacheSpec.dense(plan.dst.layout, Placement(), 256)
    )
    Simulation(plan, requests).run()


DRAFT = KVLayout.attention(num_layers=2, kv_heads=4, head_dim=1, page_tokens=6, dtype="uint8", model="drafter")


@pytest.mark.parametrize(("src", "dst"), [(2, 2), (4, 1), (1, 4)])
def test_a_draft_model_has_page_lists_of_its_own(src, dst):
    target = gqa(8)
    layout = target.with_draft(DRAFT)
    assert [(group.name, group.layers) for group in layout.groups] == [
        ("attention", (0, 1, 2)),
        ("draft.attention", (3, 4)),
    ]
    plan = plan_of(layout, Placement(tp_size=src), Placement(tp_size=dst))
    Simulation(plan, [Request(30, 12, cuts=(13, 19)), Request(9)]).run()


def test_the_draft_counts_for_the_name_of_the_weights():
    target = KVLayout(3, gqa(8).groups, "big")
    assert target.with_draft(DRAFT).model == "big+drafter"
    assert gqa(8).with_draft(DRAFT).model == ""
    with pytest.raises(ConfigError, match="two groups have the same name"):
        target.with_draft(DRAFT).with_draft(DRAFT)
    with pytest.raises(PlanError, match=r"number of groups|draft"):
        plan_transfer(CacheSpec.dense(target.with_draft(DRAFT), num_pages=4), CacheSpec.dense(target, num_pages=4))


def test_pipeline_stages_that_do_not_match():
    layout = KVLayout.attention(num_layers=7, kv_heads=2, head_dim=1, page_tokens=4, dtype="uint8")
    src, dst = Placement(pp_layers=(3, 4), tp_size=2), Placement(pp_layers=(1, 0, 6))
    plan = plan_of(layout, src, dst)
    assert plan.pairs(0) == ((0, 0), (0, 2), (1, 0), (1, 2), (2, 2), (3, 2))
    assert plan.expected_units(1, 0, 100) == 0
    assert plan.dst.memory[1].region_bytes == ()  # nothing to register: no engine takes an empty region
    Simulation(plan, [Request(9)]).run()


def test_head_ranges_of_ones_own():
    uneven = Placement(tp_size=3, head_ranges=((0, 1), (1, 6), (1, 6)))
    plan = plan_of(gqa(6), uneven, Placement(tp_size=4))
    assert plan.num_source_sets == 2
    for source_set in range(2):
        Simulation(plan, [Request(9, source_set=source_set)]).run()


@pytest.mark.parametrize("packing", ["adjacent", "separate", "cross_layer"])
def test_layers_of_three_sizes(packing):
    """80 layers of 3 different page bytes: no stride may be taken from another layer."""
    groups = tuple(
        Group(
            f"dim{dim}",
            "attention",
            tuple(range(first, 80, 3)),
            2,
            (Part("K", 2, dim, "uint8"), Part("V", 2, 1, "uint8")),
        )
        for first, dim in enumerate((1, 3, 5))
    )
    layout = KVLayout(80, groups)
    plan = plan_transfer(
        CacheSpec.dense(layout, Placement(tp_size=2), 8, packing),
        CacheSpec.dense(layout, Placement(pp_layers=even_stages(80, 3)), 8, packing),
    )
    Simulation(plan, [Request(5)]).run()


def test_groups_with_different_replicas_need_the_source_set():
    """Attention with 2 heads has 2 replicas under TP4, a state with 4 heads has one."""
    layout = KVLayout(
        2,
        (
            Group("attention", "attention", (1,), 4, (Part("K", 2, 2, "uint8"), Part("V", 2, 2, "uint8"))),
            Group("state", "state", (0,), 0, (Part("ssm", 4, 6, "uint8", 3),)),
        ),
    )
    plan = plan_of(layout, Placement(tp_size=4), Placement(tp_size=2))
    assert plan.num_source_sets == 2
    with pytest.raises(ConfigError, match="source_set"):
        plan.writes(0, 0, 1, plan.page_map(0, 0, 4), np.arange(1), np.arange(1))
    for source_set in range(2):
        Simulation(plan, [Request(9, 4, (5,), source_set), Request(0)]).run()


def test_contiguous_pages_are_whole_fragments():
    """K and V of all heads next to each other on both sides: one fragment a page, not one per head and part."""
    plan = plan_of(gqa(8), Placement(tp_size=2), Placement(tp_size=2))
    (fragment,) = plan.fragments(0, 0, 0, 0)
    assert (fragment.rows, fragment.nbytes) == (1, 4 * 4 * 2 * 2)
    assert plan.unit_bytes == fragment.nbytes
    one_head = plan_of(gqa(8), Placement(tp_size=8), Placement(tp_size=4)).fragments(0, 0, 0, 0)
    assert [(f.rows, f.nbytes) for f in one_head] == [(1, 8), (1, 8)]
    rows = plan_of(gqa(8, "NHD"), Placement(tp_size=8), Placement(tp_size=4)).fragments(0, 0, 0, 0)
    assert [(f.rows, f.nbytes) for f in rows] == [(4, 2), (4, 2)]


def test_weights_stay_small():
    """Fragments of very different sizes: the largest takes a few units, so that many merge into one write."""
    layout = KVLayout(1, (Group("g", "attention", (0,), 64, (Part("K", 8, 128, "float16"), Part("s", 8, 1, "uint8"))),))
    plan = plan_of(layout, Placement(tp_size=8), Placement(tp_size=4), packing="separate")
    sizes = {f.nbytes for f in plan.fragments(0, 0, 0, 0)}
    assert sizes == {64 * 256, 64}
    assert math.ceil(max(sizes) / plan.unit_bytes) <= 16


@pytest.mark.parametrize("bad", [-1, 64, 1 << 40])
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_page_index_out_of_range(bad, side):
    plan = plan_of(gqa(2), Placement(), Placement())
    good, wrong = np.arange(4), np.array([0, 1, bad, 3])
    lists = (wrong, good) if side == "prefill" else (good, wrong)
    with pytest.raises(ConfigError, match=rf"page index {bad} is out of range.*{side} rank 0 has 64 pages"):
        plan.writes(0, 0, 0, plan.page_map(0, 0, 16), *lists)
    # Pages that this chunk does not send may be anything: engines keep placeholders for pages outside a window.
    assert plan.writes(0, 0, 0, plan.page_map(0, 0, 8), *lists)


def test_bad_arguments_are_named():
    plan = plan_of(gqa(2), Placement(), Placement())
    pages = np.arange(4)
    for call, match in (
        (lambda: plan.writes(0, 0, 0, plan.page_map(0, 0, 20), pages, pages), "has 4 entries"),
        (lambda: plan.writes(0, 0, 0, plan.page_map(0, 0, 8), pages * 1.0, pages), "integer array"),
        (lambda: plan.writes(0, 0, 9, plan.page_map(0, 0, 8), pages, pages), "layer=9"),
        (lambda: plan.writes(1, 0, 0, plan.page_map(0, 0, 8), pages, pages), "rank=1"),
        (lambda: plan.page_map(0, 0, 8, cached=3), "cached=3 tokens is no multiple"),
        (lambda: plan.page_map(0, 8, 4), "end=4"),
        (lambda: plan.page_map(1, 0, 4), "group=1"),
        (lambda: plan.pairs(1), "source_set=1"),
        (lambda: plan.expected_units(0, 0, -1), "num_tokens=-1"),
        (lambda: plan.expected_units(0, 7, 8), "source_set=7"),
    ):
        with pytest.raises(ConfigError, match=match):
            call()


def test_sliding_window_needs_the_length():
    layout = KVLayout(1, (Group("w", "sliding", (0,), 4, (Part("K", 1, 1, "uint8"),), window=8),))
    plan = plan_of(layout, Placement(), Placement())
    with pytest.raises(ConfigError, match="num_tokens"):
        plan.page_map(0, 0, 16)
    assert plan.page_map(0, 0, 100, num_tokens=1000).num_pieces == 0
    assert plan.page_map(0, 0, 1000, final=True).num_pieces == 2  # tokens 993..999
    assert plan.expected_units(0, 0, 1000) == 2


def test_context_parallel_is_refused_by_name():
    layout = gqa(2)
    src = CacheSpec(layout, Placement(cp_size=2), CacheSpec.dense(layout, Placement(dp_size=2), 8).memory)
    with pytest.raises(PlanError, match=r"context parallelism \(cp_size=2, prefill\)"):
        plan_transfer(src, CacheSpec.dense(layout))


def test_hnd_to_nhd_is_refused_by_name():
    with pytest.raises(PlanError, match="HND to NHD would permute") as info:
        plan_transfer(CacheSpec.dense(gqa(8)), CacheSpec.dense(gqa(8, "NHD")))
    assert "attention.order" in str(info.value)
    # One head a rank: the same bytes.
    eight = Placement(tp_size=8)
    plan = plan_transfer(CacheSpec.dense(gqa(8), eight), CacheSpec.dense(gqa(8, "NHD"), eight))
    Simulation(plan, [Request(9)]).run()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"dtype": "float16"}, "attention.K.dtype"),
        ({"kv_heads": 4}, "attention.K.heads"),
        ({"head_dim": 3}, "attention.V.dim"),
        ({"num_layers": 4}, "num_layers"),
        ({"model": "other"}, "model"),
    ],
)
def test_a_refusal_shows_both_sides(change, field):
    facts = {"num_layers": 3, "kv_heads": 2, "head_dim": 2, "page_tokens": 4, "dtype": "uint8", "model": "m"}
    src, dst = KVLayout.attention(**facts), KVLayout.attention(**{**facts, **change})
    with pytest.raises(PlanError) as info:
        plan_transfer(CacheSpec.dense(src), CacheSpec.dense(dst))
    (line,) = [line for line in str(info.value).splitlines() if line.strip().startswith(field + " ")]
    name, value = next(iter(change.items()))
    assert line.split() == [field, str(facts[name]), str(value), "<-", "differs"]


def test_scale_per_page_needs_equal_page_sizes():
    parts = (Part("K", 2, 2, "uint8"), Part("scale", 2, 1, "float32", rows=1))
    layout = KVLayout(1, (Group("fp8", "attention", (0,), 4, parts),))
    Simulation(plan_of(layout, Placement(tp_size=2), Placement()), [Request(9, 4)]).run()
    with pytest.raises(PlanError, match="part scale has no token axis"):
        plan_of(layout, Placement(), Placement(), dst_page=8)


@pytest.mark.parametrize("scale_rows", [0, 1])
def test_fp8_with_scales_in_regions_of_their_own(scale_rows):
    layout = KVLayout.attention(
        num_layers=2,
        kv_heads=4,
        head_dim=6,
        page_tokens=4,
        dtype="float8_e4m3fn",
        scale_dtype="float32",
        scale_rows=scale_rows,
    )
    specs = []
    for tp in (4, 2):
        memory = []
        for rank in range(tp):
            heads = 4 // tp
            values = np.zeros((2, 2, 16, heads, 4, 6), np.uint8)
            scales = np.zeros((2, 2, 16, heads, scale_rows or 4, 1), np.float32)
            placed = [
                Placed(values, "LKPHND", parts=["K", "V"]),
                Placed(scales, "LKPHND", parts=["K_scale", "V_scale"], region=1),
            ]
            placement = Placement(tp_size=tp)
            memory.append(RankMemory.build(placed, layout=layout, placement=placement, rank=rank))
        specs.append(CacheSpec(layout, placement, tuple(memory)))
    Simulation(plan_transfer(*specs), [Request(13, 4, (6,)), Request(3)]).run()
    Simulation(plan_transfer(*reversed(specs)), [Request(13, 4, (6,))]).run()


def test_data_parallel_replicas_must_have_one_shape():
    layout = gqa(2)
    one, other = CacheSpec.dense(layout, num_pages=8), CacheSpec.dense(layout, num_pages=8, packing="separate")
    src = CacheSpec(layout, Placement(dp_size=2), one.memory + other.memory)
    with pytest.raises(PlanError, match="data-parallel replica"):
        plan_transfer(src, one)


def test_source_picker_is_even():
    for seed in range(5):
        picker = SourcePicker(3, seed)
        picks = [picker.pick() for _ in range(20)]
        for begin in range(20):
            for end in range(begin + 1, 21):
                used = [picks[begin:end].count(source_set) for source_set in range(3)]
                assert max(used) - min(used) <= 1
    assert len({SourcePicker(8, seed).pick() for seed in range(40)}) > 1


def test_the_oracle_notices_a_wrong_head(monkeypatch):
    plan = plan_of(gqa(4), Placement(tp_size=2), Placement())
    right = plan.writes

    def shifted(*args, **kwargs):
        return [write._replace(src_offset=write.src_offset ^ 8) for write in right(*args, **kwargs)]

    monkeypatch.setattr(plan, "writes", shifted)
    with pytest.raises(AssertionError, match="Mismatched elements"):
        Simulation(plan, [Request(4)]).run()
