"""Specs come from peers: whatever the bytes, the answer is a ConfigError or a plan, soon and in little memory."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric_kv.errors import ConfigError
from fabric_kv.sharding import CacheSpec, Group, KVLayout, Part, Placement, plan_transfer
from fabric_kv.sharding.cache import MAX_SPEC_BYTES

LAYOUT = KVLayout(
    4,
    (
        Group("full", "attention", (0, 2), 4, (Part("K", 4, 8, "float16"), Part("V", 4, 8, "float16"))),
        Group("window", "sliding", (1,), 4, (Part("K", 2, 8, "int8"),), window=8),
        Group("state", "state", (3,), 0, (Part("s", 4, 8, "float32", 3),)),
    ),
    "model",
)
GOOD = CacheSpec.dense(LAYOUT, Placement(tp_size=2, pp_layers=(2, 2)), 8)
HOSTILE = (
    -1,
    0,
    1,
    2,
    1 << 16,
    1 << 31,
    (1 << 48) + 1,
    (1 << 63) - 1,
    (1 << 64) - 1,
    None,
    "",
    "x" * 300,
    [],
    [[]],
    {},
    1.5,
    True,
)


def paths(tree, path=()):
    yield path
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield from paths(value, (*path, key))


def replaced(tree, path, value):
    if not path:
        return value
    copy = dict(tree) if isinstance(tree, dict) else list(tree)
    copy[path[0]] = replaced(copy[path[0]], path[1:], value)
    return copy


def survives(data: bytes) -> None:
    try:
        spec = CacheSpec.from_bytes(data)
    except ConfigError:
        return
    for src, dst in ((spec, GOOD), (GOOD, spec)):
        try:
            plan = plan_transfer(src, dst)
        except ConfigError:  # PlanError is one
            continue
        assert plan.unit_bytes > 0
        plan.expected_units(0, 0, 100)
        plan.explain()


def test_round_trip():
    assert CacheSpec.from_bytes(GOOD.to_bytes()) == GOOD
    assert hash(CacheSpec.from_bytes(GOOD.to_bytes()).layout) == hash(GOOD.layout)


@pytest.mark.parametrize("value", HOSTILE, ids=repr)
def test_every_field_replaced(value):
    tree = msgspec.to_builtins(GOOD)
    tree = msgspec.msgpack.decode(msgspec.msgpack.encode(tree))
    for path in paths(tree):
        try:
            data = msgspec.msgpack.encode(replaced(tree, path, value))
        except OverflowError:
            continue
        survives(GOOD.to_bytes()[:5] + data)


@settings(deadline=None, max_examples=300)
@given(st.integers(0, 10_000), st.integers(0, 255), st.integers(0, 10_000))
def test_flipped_and_cut_bytes(at, value, cut):
    data = bytearray(GOOD.to_bytes())
    data[at % len(data)] = value
    survives(bytes(data))
    survives(bytes(data[: cut % len(data)]))


@pytest.mark.parametrize("data", [b"", b"FKVC", b"FKVC\x02" + GOOD.to_bytes()[5:], b"\x80\x04pickle", bytes(100)])
def test_other_bytes(data):
    with pytest.raises(ConfigError):
        CacheSpec.from_bytes(data)


def test_size_limits():
    with pytest.raises(ConfigError, match="over the limit"):
        CacheSpec.from_bytes(bytes(MAX_SPEC_BYTES + 1))
    with pytest.raises(ConfigError, match="malformed"):
        CacheSpec.from_bytes(GOOD.to_bytes() + b"\x00")
    deep = b"FKVC\x01" + b"\x91" * 100_000
    with pytest.raises(ConfigError, match="malformed"):
        CacheSpec.from_bytes(deep)


def test_page_sizes_without_common_boundaries_are_refused():
    """65535 onto 65536 tokens would make 131070 kinds of pieces."""
    layout = KVLayout.attention(num_layers=1, kv_heads=1, head_dim=1, page_tokens=65535, dtype="int8")
    with pytest.raises(ConfigError, match="share too few boundaries"):
        plan_transfer(
            CacheSpec.dense(layout, num_pages=1), CacheSpec.dense(layout.with_page_tokens(65536), num_pages=1)
        )


def test_the_largest_counts_stay_exact():
    layout = KVLayout.attention(num_layers=4096, kv_heads=1, head_dim=1 << 16, page_tokens=1, dtype="float32")
    spec = CacheSpec.dense(layout, num_pages=1)
    plan = plan_transfer(spec, spec)
    assert plan.expected_units(0, 0, 1 << 40) == plan.expected_units(0, 0, 1) << 40
    with pytest.raises(ConfigError, match="num_tokens"):
        plan.expected_units(0, 0, (1 << 40) + 1)
