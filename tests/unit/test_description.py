"""What an engine says of itself, as a dict and as a table."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fabric_kv.description import Description, explain_mode


def rail(**changes: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "domain": "eth0",
        "provider": "tcp;ofi_rxm",
        "ops": 300,
        "bytes": 300 * 4096,
        "ops_in_flight": 7,
        "again": 2,
        "errors": 1,
        "iov_limit": 4,
        "rma_iov_limit": 4,
        "ordered_writes": True,
        "fail_stop": False,
        "shared_memory": False,
        "wait_fd": True,
        "wait_is_hint": False,
        "write_latency_us_log2": [0, 0, 0, 5, 1, 0],
        "post_latency_ns_log2": [0] * 6,
    }
    facts |= changes
    facts["mode"], facts["mode_why"] = explain_mode(facts)
    return facts


def description(*rails: dict[str, Any], **changes: Any) -> Description:
    group = dict.fromkeys(
        ("counters_in_use", "counters_poisoned", "stale_imms", "violations", "malformed_frames"), 0
    ) | {"rails": list(rails)}
    about: dict[str, Any] = {
        "libfabric": {"version": "1.17", "path": "/lib/libfabric.so.1"},
        "progress": "adaptive",
        "closed": False,
        "transfers_open": 3,
        "counters_open": 4,
        "groups": [group],
        "left_out": [],
    }
    return Description(about | changes)


def test_the_table_has_a_line_for_each_rail_with_its_mode_and_why() -> None:
    text = str(description(rail(), rail(domain="eth1", ops=0, bytes=0), left_out=["mlx5_1: it is down"]))
    lines = text.splitlines()
    assert lines[0] == "libfabric 1.17, adaptive progress, 3 transfers and 4 counters open"
    first = next(line for line in lines if line.startswith("  0.0 "))
    for part in ("eth0", "tcp;ofi_rxm", "300", "1.17 MiB", "4 KiB", "7", "< 8 us", "4 places an operation"):
        assert part in first
    assert any(line.startswith("  0.1 ") and "eth1" in line for line in lines)
    assert "  rail 0.0: 4 places an operation" in text
    assert "iov_limit 4 and rma_iov_limit 4" in text
    assert "  left out: mlx5_1: it is down" in lines


def test_a_closed_engine_has_no_rails() -> None:
    assert str(description(groups=[], closed=True)).endswith(", closed")


@pytest.mark.parametrize(
    ("changes", "mode", "why"),
    [
        ({"rma_iov_limit": 1}, "one place an operation", "rma_iov_limit 1"),
        ({"iov_limit": 30, "rma_iov_limit": 30}, "8 places an operation", "iov_limit 30"),
        ({"shared_memory": True, "ordered_writes": False}, "an immediate each", "shm is slower in order"),
        ({"ordered_writes": False}, "an immediate each", "may overtake each other"),
        ({"fail_stop": True}, "an immediate for up to 16 operations", "a failed one stops the next"),
        ({"wait_fd": False}, "sleeps by the clock", "completion queue has none"),
        ({"wait_fd": False, "wait_is_hint": True}, "sleeps by the clock and a bell", "peers ring when they post"),
    ],
)
def test_the_mode_follows_from_what_was_granted(changes: dict[str, Any], mode: str, why: str) -> None:
    facts = rail(**changes)
    assert mode in facts["mode"]
    assert why in facts["mode_why"]


def test_it_is_a_dict_for_programs() -> None:
    about = description(rail())
    assert json.loads(json.dumps(about)) == about
