"""Geometry, placements, and addresses taken from arrays."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fabric_kv.errors import ConfigError
from fabric_kv.sharding import (
    CacheSpec,
    Group,
    KVLayout,
    Part,
    Placed,
    Placement,
    RankMemory,
    Strided,
    even_stages,
    offset_in,
    plan_transfer,
)

from .cache_oracle import Request, Simulation

LAYERS, PAGES, HEADS, TOKENS, DIM = 3, 4, 2, 5, 6


def layout_of(order="HND", **change):
    facts = {"num_layers": LAYERS, "kv_heads": HEADS, "head_dim": DIM, "page_tokens": TOKENS, "dtype": "float16"}
    return KVLayout.attention(**{**facts, **change}, order=order)


def element(memory, regions, layer, part, page, head, row, column=0):
    """What a rank's memory holds at an address computed from its spec."""
    place = next(found for found in memory.layers if found.layer == layer).parts[part]
    address = place.offset + page * place.page_stride + head * place.head_stride + row * place.row_stride
    return regions[place.region].reshape(-1).view(np.uint8)[address + 2 * column :][:2].view(np.uint16)[0]


def numbered(shape):
    return np.arange(np.prod(shape), dtype=np.uint16).reshape(shape)


SIZES = {"L": LAYERS, "K": 2, "P": PAGES, "H": HEADS, "N": TOKENS, "D": DIM}


@pytest.mark.parametrize("axes", ["LKPHND", "LPKHND", "PLKHND", "KLPHND", "LKPNHD", "LPKNHD", "PLKNHD", "LKHPND"])
def test_one_array(axes):
    array = numbered([SIZES[axis] for axis in axes])
    memory = RankMemory.from_array(array, axes, layout=layout_of("HND" if "HN" in axes.replace("P", "") else "NHD"))
    by_name = array.transpose([axes.index(axis) for axis in "LKPHND"])
    for layer, part, page, head, row in itertools.product(*(range(SIZES[axis]) for axis in "LKPHN")):
        assert element(memory, [array], layer, part, page, head, row, 3) == by_name[layer, part, page, head, row, 3]
    assert memory.region_bytes == (array.nbytes,)


@pytest.mark.parametrize(
    "axes", ["KPNHD", "PKNHD", "PKHND", "vllm", "vllm_flashinfer", "flashinfer_nhd", "flashinfer_hnd"]
)
def test_one_array_per_layer(axes):
    from fabric_kv.sharding import AXES

    letters = AXES.get(axes, axes)
    arrays = [numbered([SIZES[axis] for axis in letters]) + 7 * layer for layer in range(LAYERS)]
    memory = RankMemory.from_layer_arrays(arrays, axes, layout=layout_of("HND" if "HN" in letters else "NHD"))
    for layer, part, page, head, row in itertools.product(*(range(SIZES[axis]) for axis in "LKPHN")):
        by_name = arrays[layer].transpose([letters.index(axis) for axis in "KPHND"])
        assert element(memory, arrays, layer, part, page, head, row) == by_name[part, page, head, row, 0]


def test_strides_decide_not_shapes():
    """vLLM stores HND under a view that reads [blocks, tokens, heads]: the strides tell, the shape would lie."""
    stored = numbered((2, PAGES, HEADS, TOKENS, DIM))
    view = stored.transpose(0, 1, 3, 2, 4)
    layout = layout_of(num_layers=1)
    memory = RankMemory.from_array(view, "KPNHD", layout=layout)
    assert element(memory, [stored], 0, 1, 2, 1, 4) == stored[1, 2, 1, 4, 0]
    CacheSpec(layout, Placement(), (memory,))
    with pytest.raises(ConfigError, match="strides say HND: group attention says NHD"):
        CacheSpec(layout.with_order("NHD"), Placement(), (memory,))


def test_keys_and_values_in_tensors_of_their_own():
    keys, values = numbered((PAGES, TOKENS, HEADS, DIM)), numbered((PAGES, TOKENS, HEADS, DIM)) + 900
    placed = [Placed(keys, "PNHD", parts=["K"]), Placed(values, "PNHD", parts=["V"], region=1)]
    memory = RankMemory.build(placed, layout=layout_of("NHD", num_layers=1))
    assert element(memory, [keys, values], 0, 0, 3, 1, 2) == keys[3, 2, 1, 0]
    assert element(memory, [keys, values], 0, 1, 3, 1, 2) == values[3, 2, 1, 0]


def test_groups_that_share_one_pool_name_it_once_each():
    """vLLM's hybrid allocator: a full and a sliding layer take blocks from the same tensor."""
    parts = (Part("K", 2, 8, "float16"), Part("V", 2, 8, "float16"))
    groups = (
        Group("full", "attention", (0,), 4, parts, "NHD"),
        Group("sliding", "sliding", (1,), 4, parts, "NHD", window=8),
    )
    layout, tensor = KVLayout(2, groups), np.zeros((2, 10, 4, 2, 8), np.float16)
    placed = [Placed(tensor, "vllm", group=group, layers=(group,), region=group) for group in (0, 1)]
    memory = RankMemory.build(placed, layout=layout)
    assert memory.region_bytes == (tensor.nbytes, tensor.nbytes)
    with pytest.raises(ConfigError, match="starts where another does"):
        CacheSpec(layout, Placement(), (RankMemory.build([p._replace(region=0) for p in placed], layout=layout),))
    spec = CacheSpec(layout, Placement(), (memory,))
    plan = plan_transfer(spec, spec)
    write = plan.writes(0, 0, 1, plan.page_map(1, 0, 4, num_tokens=4), np.array([3]), np.array([5]))[0]
    assert (write.src_region, write.src_offset, write.dst_region) == (1, 0, 1)


def test_keys_and_values_fused_in_the_last_axis():
    """[pages, heads, tokens, 2 * dim]: one fragment a page against the same, strided ones against separate K and V."""
    fused = numbered((PAGES, HEADS, TOKENS, 2 * DIM))
    layout = layout_of(num_layers=1)
    halves = [fused[..., :DIM], fused[..., DIM:]]
    memory = RankMemory.build(
        [
            Placed(half, "PHND", parts=[name], offset=offset_in(half, fused))
            for half, name in zip(halves, "KV", strict=True)
        ],
        layout=layout,
        region_bytes=[fused.nbytes],
    )
    assert element(memory, [fused], 0, 1, 2, 1, 3, 4) == fused[2, 1, 3, DIM + 4]
    spec, apart = CacheSpec(layout, Placement(), (memory,)), CacheSpec.dense(layout, num_pages=PAGES)
    same = plan_transfer(spec, spec)
    assert [(f.rows, f.nbytes) for f in same.fragments(0, 0, 0, 0)] == [(1, HEADS * TOKENS * 2 * DIM * 2)]
    for src, dst in ((spec, spec), (spec, apart), (apart, spec)):
        Simulation(plan_transfer(src, dst), [Request(7, extra_pages=0)]).run()


def test_latent_tensor():
    latent = numbered((PAGES, TOKENS, 9))
    layout = KVLayout(1, (Group("latent", "mla", (0,), TOKENS, (Part("latent", 1, 9, "bfloat16"),)),))
    memory = RankMemory.from_array(latent, "vllm_mla", layout=layout)
    assert element(memory, [latent], 0, 0, 3, 0, 2, 5) == latent[3, 2, 5]


def test_scales_behind_the_keys_of_their_page():
    """DeepSeek-V3.2's indexer cache in vLLM: 128 fp8 a token, then the page's fp32 scales; 16 onto 64 tokens a page."""
    parts = Part("keys", 1, 128, "float8_e4m3fn"), Part("scales", 1, 1, "float32")
    specs = []
    for tokens in (16, 64):
        layout = KVLayout(1, (Group("indexer", "indexer", (0,), tokens, parts),))
        blocks = np.zeros((8, tokens * 132), np.uint8)
        keys = blocks[:, : tokens * 128].reshape(8, tokens, 128)
        scales = blocks[:, tokens * 128 :].view(np.float32).reshape(8, tokens, 1)
        placed = [
            Placed(keys, "PND", parts=["keys"], offset=offset_in(keys, blocks)),
            Placed(scales, "PND", parts=["scales"], offset=offset_in(scales, blocks)),
        ]
        memory = RankMemory.build(placed, layout=layout, region_bytes=[blocks.nbytes])
        specs.append(CacheSpec(layout, Placement(), (memory,)))
    Simulation(plan_transfer(specs[0], specs[1]), [Request(90)]).run()
    assert [f.nbytes for f in plan_transfer(specs[0], specs[0]).fragments(0, 0, 0, 0)] == [16 * 132]


def test_opaque_chunks():
    """Whatever is inside a (page, head) chunk, such as K stored transposed: moved as it is."""
    chunk = Part("K", 4, 60, "uint8", rows=1), Part("V", 4, 60, "uint8", rows=1)
    layout = KVLayout(2, (Group("cpu", "attention", (0, 1), 16, chunk),))
    src, dst = (CacheSpec.dense(layout, Placement(tp_size=tp), 8, "separate") for tp in (2, 4))
    plan = plan_transfer(src, dst)
    Simulation(plan, [Request(40, 16, (17,))]).run()
    assert {(f.rows, f.nbytes) for f in plan.fragments(0, 0, 0, 0)} == {(1, 60)}


def test_state_slots_from_convolution_tensors():
    """Qwen3-Next: the convolution's Q, K and V channels lie one behind the other, and TP cuts each of them."""
    parts = tuple(Part(name, heads, 2, "float16", 3) for name, heads in (("conv_q", 2), ("conv_k", 2), ("conv_v", 4)))
    layout = KVLayout(1, (Group("state", "state", (0,), 0, parts, "NHD"),))
    specs = []
    for tp in (1, 2):
        memory = []
        for rank in range(tp):
            conv = np.zeros((6, 3, 16 // tp), np.float16)
            placed, first = [], 0
            for part in parts:
                heads = part.heads // tp
                view = conv[:, :, first : first + 2 * heads].reshape(6, 3, heads, 2)
                assert view.base is not None
                placed.append(Placed(view, "PNHD", parts=[part.name], offset=offset_in(view, conv)))
                first += 2 * heads
            placement = Placement(tp_size=tp)
            memory.append(
                RankMemory.build(placed, layout=layout, placement=placement, rank=rank, region_bytes=[conv.nbytes])
            )
        specs.append(CacheSpec(layout, placement, tuple(memory)))
    Simulation(plan_transfer(specs[0], specs[1]), [Request(9), Request(0), Request(4)]).run()
    Simulation(plan_transfer(specs[1], specs[0]), [Request(9), Request(5, 5)]).run()
    # The three lie together on both sides when nothing is cut.
    assert [(f.rows, f.nbytes) for f in plan_transfer(specs[0], specs[0]).fragments(0, 0, 0, 0)] == [(1, 96)]


def test_tensors_with_strides_in_elements():
    class Tensor:
        shape = (PAGES, TOKENS, HEADS, DIM)

        def stride(self):
            return (1000, HEADS * DIM, DIM, 1)

        def element_size(self):
            return 2

    memory = RankMemory.build(
        [Placed(Tensor(), "PNHD", parts=["K"]), Placed(Tensor(), "PNHD", parts=["V"], region=1)],
        layout=layout_of("NHD", num_layers=1),
    )
    assert memory.layers[0].parts[0].page_stride == 2000
    assert memory.region_bytes[0] == 3 * 2000 + TOKENS * HEADS * DIM * 2


@pytest.mark.parametrize(
    ("shape", "axes", "match"),
    [
        ((3, 2, 4, 2, 5, 7), "LKPHND", "axis D of shape"),
        ((3, 2, 4, 3, 5, 6), "LKPHND", "axis H of shape"),
        ((3, 2, 4, 2, 4, 6), "LKPHND", "axis N of shape"),
        ((4, 2, 4, 2, 5, 6), "LKPHND", "axis L of shape"),
        ((3, 3, 4, 2, 5, 6), "LKPHND", "axis K of shape"),
        ((3, 2, 4, 2, 5), "LKPHND", "does not name the 5 axes"),
        ((3, 2, 4, 2, 5, 6), "LKPHNN", "does not name"),
        ((3, 2, 4, 2, 5, 6), "LKQHND", "does not name"),
    ],
)
def test_arrays_that_do_not_fit(shape, axes, match):
    with pytest.raises(ConfigError, match=match):
        RankMemory.from_array(np.zeros(shape, np.float16), axes, layout=layout_of())


def test_element_size_and_contiguity():
    array = np.zeros((3, 2, 4, 2, 5, 6), np.float32)
    with pytest.raises(ConfigError, match="elements of 4 bytes"):
        RankMemory.from_array(array, layout=layout_of())
    with pytest.raises(ConfigError, match="axis D must be contiguous"):
        RankMemory.from_array(array.astype(np.float16)[..., ::2], layout=layout_of(head_dim=3))
    with pytest.raises(ConfigError, match="cannot read shape and strides of list"):
        RankMemory.from_array([], layout=layout_of())
    flipped = np.zeros((3, 2, 4, 2, 5, 6), np.float16)[:, :, ::-1]
    with pytest.raises(ConfigError, match="page_stride"):
        CacheSpec(
            layout_of(),
            Placement(),
            (RankMemory.build([Placed(flipped, "LKPHND")], layout=layout_of(), region_bytes=[flipped.nbytes]),),
        )


def test_memory_must_stay_in_its_region_and_not_overlap():
    layout = layout_of(num_layers=1)

    def spec(strides, region_bytes, **place):
        shape = (2, PAGES, HEADS, TOKENS, DIM)
        placed = [Placed(Strided(shape, (*strides, 2), 2), "KPHND", **place)]
        return CacheSpec(layout, Placement(), (RankMemory.build(placed, layout=layout, region_bytes=[region_bytes]),))

    row, head = DIM * 2, TOKENS * DIM * 2
    page, part = HEADS * head, PAGES * HEADS * head
    spec((part, page, head, row), 2 * part)
    for strides, size, match in (
        ((part, page, head, row), 2 * part - 1, f"ends at byte {2 * part}: region 0 has {2 * part - 1} bytes"),
        ((part, page - 2, head, row), 2 * part, "rows share bytes"),
        ((part, page, head, row - 1), 2 * part, "rows share bytes"),
        ((part, 0, head, row), 2 * part, "rows share bytes"),
        ((0, page, head, row), 2 * part, "starts where another does"),
    ):
        with pytest.raises(ConfigError, match=match):
            spec(strides, size)


def test_every_layer_must_be_placed_once():
    array = np.zeros((2, PAGES, HEADS, TOKENS, DIM), np.float16)
    some = [Placed(array, "KPHND", layers=[layer], region=layer) for layer in (0, 1)]
    with pytest.raises(ConfigError, match=r"lists 2 \(group, layer\) pairs: the rank holds 3"):
        CacheSpec(layout_of(), Placement(), (RankMemory.build(some, layout=layout_of()),))
    with pytest.raises(ConfigError, match="layer 0, part K was given twice"):
        RankMemory.build([some[0], some[0]], layout=layout_of())
    with pytest.raises(ConfigError, match=r"no array holds \['V'\]"):
        RankMemory.build([Placed(array[0], "PHND", layers=[0], parts=["K"])], layout=layout_of())
    with pytest.raises(ConfigError, match="3 layers of group 0: 1 arrays"):
        RankMemory.from_layer_arrays([array], "KPHND", layout=layout_of())


@pytest.mark.parametrize(
    ("heads", "tp", "ranges"),
    [
        (8, 4, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (3, 2, [(0, 2), (2, 3)]),
        (2, 4, [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (3, 4, [(0, 1), (0, 1), (1, 2), (2, 3)]),
        (1, 3, [(0, 1)] * 3),
    ],
)
def test_heads_of_a_rank(heads, tp, ranges):
    placement = Placement(tp_size=tp)
    assert [placement.heads_of(rank, heads) for rank in range(tp)] == ranges


def test_ranks_and_coords():
    placement = Placement(tp_size=2, pp_layers=(1, 2, 0), dp_size=2)
    assert placement.num_ranks == 12
    assert [placement.rank_of(placement.coords(rank)) for rank in range(12)] == list(range(12))
    assert placement.coords(11) == (1, 2, 1)
    assert even_stages(10, 4) == (2, 3, 3, 2)
    assert even_stages(3, 1) == (3,)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Placement(tp_size=0), "tp_size=0"),
        (lambda: Placement(tp_size=64, dp_size=64), "number of ranks=4096"),
        (lambda: Placement(tp_size=2, head_ranges=((0, 2),)), "1 entries"),
        (lambda: Placement(tp_size=2, head_ranges=((0, 2), (1, 3))), "overlap"),
        (lambda: Placement(tp_size=2, head_ranges=((0, 2), (3, 4))), "gap"),
        (lambda: Placement(tp_size=1, head_ranges=((1, 2),)), "nobody holds head 0"),
        (lambda: CacheSpec.dense(layout_of(kv_heads=4), Placement(head_ranges=((0, 2),))), "covers 2 heads"),
        (lambda: Placement(pp_layers=(1, 2)).stages(4), "sums to 3"),
        (lambda: Placement().coords(1), "rank=1"),
        (lambda: Placement.dp_attention(tp_size=8, dp_size=3), "cannot be shared evenly"),
        (lambda: Part("K", 1, 1, "float12"), "float12"),
        (lambda: Part("", 1, 1, "int8"), "part name"),
        (lambda: Part("K", True, 1, "int8"), "heads=True"),
        (lambda: layout_of(page_tokens=0), "page_tokens=0"),
        (lambda: layout_of(kv_heads=0), "heads=0"),
        (lambda: Group("g", "state", (0,), 0, (Part("s", 1, 1, "int8"),)), "must say its rows"),
        (lambda: Group("g", "sliding", (0,), 4, (Part("s", 1, 1, "int8"),)), "window=0"),
        (lambda: Group("g", "mla", (1, 0), 4, (Part("s", 1, 1, "int8"),)), "ascending"),
        (lambda: Group("g", "mla", (0,), 4, (Part("s", 1, 1, "int8"),) * 2), "same name"),
        (lambda: KVLayout(1, (Group("g", "mla", (1,), 4, (Part("s", 1, 1, "int8"),)),)), "layer=1"),
        (lambda: KVLayout(1, (Group("g", "mla", (0,), 4, (Part("s", 1, 1, "int8"),)),) * 2), "same name"),
    ],
)
def test_bad_facts_are_named(make, match):
    with pytest.raises(ConfigError, match=match):
        make()


@pytest.mark.parametrize("packing", ["adjacent", "separate", "cross_layer"])
def test_dense_memory_has_no_gaps(packing):
    layout = layout_of(kv_heads=3)
    spec = CacheSpec.dense(layout, Placement(tp_size=2), PAGES, packing)
    for rank, heads in enumerate((2, 1)):
        memory = spec.memory[rank]
        size = LAYERS * 2 * PAGES * heads * TOKENS * DIM * 2
        assert memory.region_bytes == (size,)
        rows = [
            place.offset + page * place.page_stride + head * place.head_stride + row * place.row_stride
            for layer in memory.layers
            for place in layer.parts
            for page, head, row in itertools.product(range(PAGES), range(heads), range(TOKENS))
        ]
        assert sorted(rows) == list(range(0, size, DIM * 2))


def test_parts_that_touch_in_some_layers_only():
    """A cut is shared by layers of one shape; the same strides at other distances are another shape."""
    layout = layout_of(num_layers=4)
    half = HEADS * TOKENS * DIM * 2
    shape, steps = (PAGES, HEADS, TOKENS, DIM), (3 * half, TOKENS * DIM * 2, DIM * 2, 2)
    places = [(0, half), (0, 2 * half), (half, 0), (2 * half, half)]  # of K and V inside a page
    placed = [
        Placed(Strided(shape, steps, 2), "PHND", layers=[layer], parts=[name], region=layer, offset=offset)
        for layer, offsets in enumerate(places)
        for name, offset in zip("KV", offsets, strict=True)
    ]
    memory = RankMemory.build(placed, layout=layout, region_bytes=[3 * half * PAGES] * 4)
    spec = CacheSpec(layout, Placement(), (memory,))
    plan = plan_transfer(spec, spec)
    assert [[f.nbytes for f in plan.fragments(0, 0, 0, layer)] for layer in range(4)] == [
        [2 * half],
        [half, half],
        [2 * half],
        [2 * half],
    ]
    Simulation(plan, [Request(7, extra_pages=0)]).run()
