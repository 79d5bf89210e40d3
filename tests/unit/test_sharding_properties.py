"""Random caches onto random caches: every byte where the oracle wants it, written once, units agreed."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fabric_kv.sharding import CacheSpec, Group, KVLayout, Part, Placed, Placement, RankMemory, Strided, plan_transfer
from fabric_kv.sharding.layout import DTYPE_BYTES
from fabric_kv.sharding.places import local_layers

from .cache_oracle import Request, Simulation

NUM_PAGES = 48


@st.composite
def layouts(draw):
    num_layers = draw(st.integers(1, 4))
    groups = []
    page_tokens = draw(st.sampled_from([1, 2, 4, 6]))
    for number in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["attention", "attention", "sliding", "mla", "indexer", "state"]))
        layers = draw(st.lists(st.integers(0, num_layers - 1), min_size=1, unique=True).map(sorted))
        heads = 1 if kind in ("mla", "indexer") else draw(st.sampled_from([1, 2, 3, 4, 6]))
        parts = []
        for name in ("K", "V", "scale")[: draw(st.integers(1, 3))]:
            rows = draw(st.integers(1, 3)) if kind == "state" else draw(st.sampled_from([0, 0, 0, 1]))
            dtype = draw(st.sampled_from(["uint8", "float16"]))
            more = draw(st.sampled_from([1, 1, 2])) if kind == "state" else 1  # value heads of a linear attention
            parts.append(Part(name, heads * more, draw(st.integers(1, 3)), dtype, rows))
        groups.append(
            Group(
                f"group{number}",
                kind,
                tuple(layers),
                0 if kind == "state" else page_tokens,
                tuple(parts),
                draw(st.sampled_from(["HND", "NHD"])),
                draw(st.integers(1, 12)) if kind == "sliding" else 0,
            )
        )
    return KVLayout(num_layers, tuple(groups))


@st.composite
def placements(draw, num_layers):
    cuts = sorted(draw(st.lists(st.integers(0, num_layers), max_size=2)))
    pp_layers = tuple(b - a for a, b in itertools.pairwise((0, *cuts, num_layers)))
    return Placement(tp_size=draw(st.integers(1, 5)), pp_layers=pp_layers, dp_size=draw(st.sampled_from([1, 1, 2])))


@st.composite
def specs(draw, layout):
    """Any axis order and padding that keeps HND or NHD; layers and parts in one region or in many."""
    placement = draw(placements(layout.num_layers))
    orders = []
    for group in layout.groups:
        outer = draw(
            st.permutations(
                "LKPHN"
                if len({(p.heads, group.rows_of(p), p.row_bytes) for p in group.parts}) == 1
                and len({p.dtype for p in group.parts}) == 1
                else "LPHN"
            )
        )
        h, n = sorted((outer.index("H"), outer.index("N")))
        outer[h], outer[n] = ("H", "N") if group.order == "HND" else ("N", "H")
        # Or: all parts of a page together, with gaps that differ from layer to layer.
        gaps = draw(st.none() | st.lists(st.integers(0, 1), min_size=12, max_size=12))
        orders.append(("".join(outer), draw(st.integers(0, 2)), draw(st.booleans()), gaps))
    memory = [_memory(layout, placement, rank, orders) for rank in range(placement.num_ranks)]
    return CacheSpec(layout, placement, tuple(memory))


def _memory(layout, placement, rank, orders):
    placed, sizes = [], [0]
    tp = placement.coords(rank).tp
    for index, (outer, padding, own_region, gaps) in enumerate(orders):
        group = layout.groups[index]
        layers = local_layers(layout, placement, rank, index)
        if not layers:
            continue
        if gaps is not None:
            for layer in layers:
                sizes[-1] = _page_of_parts(placed, placement, tp, index, group, layer, gaps, len(sizes) - 1, sizes[-1])
            continue
        shared = "K" in outer
        for parts in [group.parts] if shared else [(part,) for part in group.parts]:
            part = parts[0]
            begin, end = placement.heads_of(tp, part.heads)
            size = {"L": len(layers), "K": len(parts), "P": NUM_PAGES, "H": end - begin, "N": group.rows_of(part)}
            itemsize = DTYPE_BYTES[part.dtype]
            stride = part.row_bytes
            strides = {}
            for letter in reversed(outer):
                strides[letter] = stride
                stride = stride * size[letter] + padding * itemsize * (letter in "PHN")
            axes = outer + "D"
            shape = (*(size[letter] for letter in outer), part.dim)
            array = Strided(shape, (*(strides[letter] for letter in outer), itemsize), itemsize)
            if own_region:
                sizes.append(0)
            region = len(sizes) - 1
            names = [p.name for p in parts]
            placed.append(Placed(array, axes, index, layers, names, region, sizes[region]))
            sizes[region] += stride
    return RankMemory.build(placed, layout=layout, placement=placement, rank=rank, region_bytes=sizes)


def _page_of_parts(placed, placement, tp, index, group, layer, gaps, region, start):
    """One layer: pages that hold all parts, each behind a gap; returns where the layer ends."""
    inside, views = 0, []
    for number, part in enumerate(group.parts):
        begin, end = placement.heads_of(tp, part.heads)
        heads, rows, itemsize = end - begin, group.rows_of(part), DTYPE_BYTES[part.dtype]
        inside += gaps[(layer * 3 + number) % len(gaps)]
        hnd = (rows * part.row_bytes, part.row_bytes)
        steps = hnd if group.order == "HND" else (part.row_bytes, heads * part.row_bytes)
        views.append((part, (NUM_PAGES, heads, rows, part.dim), (*steps, itemsize), itemsize, start + inside))
        inside += heads * rows * part.row_bytes
    for part, shape, steps, itemsize, offset in views:
        array = Strided(shape, (inside, *steps), itemsize)
        placed.append(Placed(array, "PHND", index, [layer], [part.name], region, offset))
    return start + NUM_PAGES * inside


@st.composite
def plans(draw):
    layout = draw(layouts())
    other = layout
    if not any(part.rows for group in layout.groups for part in group.parts if group.kind != "state"):
        other = layout.with_page_tokens(draw(st.sampled_from([1, 2, 3, 4, 6])))
    return plan_transfer(draw(specs(layout)), draw(specs(other)))


@st.composite
def requests(draw, plan):
    sizes = [group.page_tokens for group in plan.dst.layout.groups if group.page_tokens]
    tokens = draw(st.integers(0, 14))
    page = math.lcm(*sizes)
    cached = draw(st.sampled_from(range(0, tokens + 1, page)))
    cuts = sorted(draw(st.lists(st.integers(0, tokens), max_size=3)))
    return Request(
        tokens,
        cached,
        tuple(cuts),
        draw(st.integers(0, plan.num_source_sets - 1)),
        draw(st.integers(0, plan.src.placement.dp_size - 1)),
        draw(st.integers(0, plan.dst.placement.dp_size - 1)),
        draw(st.integers(0, 1)),
    )


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_every_byte_arrives_once(data):
    plan = data.draw(plans())
    sent = [data.draw(requests(plan)) for _ in range(2)]
    Simulation(plan, sent, seed=data.draw(st.integers(0, 1000))).run()


@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=20),
    st.integers(1, 3000),
    st.randoms(use_true_random=False),
)
def test_merging_splitting_and_rails_keep_the_total(sizes, unit, random):
    """A write may carry several fragments, or a part of one that ends at a unit: the units add up all the same."""
    total = sum(-(-size // unit) for size in sizes)
    rails = [0] * random.randint(1, 4)
    while sizes:
        taken = sizes[: random.randint(1, 4)]  # merged into one write
        sizes = sizes[len(taken) :]
        last = taken[-1]
        keep = random.randint(0, last // unit) * unit  # split the last one at a unit boundary
        if 0 < keep < last:
            taken[-1] = keep
            sizes.insert(0, last - keep)
        rails[random.randrange(len(rails))] += sum(-(-size // unit) for size in taken)
    assert sum(rails) == total


def test_select_copies_once():
    layout = KVLayout.attention(num_layers=2, kv_heads=1, head_dim=2, page_tokens=4)
    plan = plan_transfer(CacheSpec.dense(layout), CacheSpec.dense(layout))
    pages = np.arange(8)
    page_map = plan.page_map(0, 0, 32)
    first, second = (plan.writes(0, 0, layer, page_map, pages, pages)[0] for layer in (0, 1))
    assert first.src_pages is second.src_pages
