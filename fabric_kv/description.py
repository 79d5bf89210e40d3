"""What an engine says of itself: a dict for programs, a table for people.

>>> print(engine.describe())
libfabric 1.17.0, adaptive progress, 3 transfers open
  group  nic  provider     mode                                       ops  ...

Every rail has a ``mode`` and, in ``mode_why``, what of the provider's grants led to it.
"""

from __future__ import annotations

from typing import Any

from .tables import text_table

__all__ = ["Description", "explain_mode"]


class Description(dict[str, Any]):
    """A dict whose ``str()`` is a table."""

    def __str__(self) -> str:
        lines = [
            f"libfabric {self['libfabric']['version']}, {self['progress']} progress, "
            f"{self['transfers_open']} transfers and {self['counters_open']} counters open"
            + (", closed" if self["closed"] else "")
        ]
        rows = [
            [
                f"{index}.{number}",
                rail["domain"],
                rail["provider"],
                str(rail["ops"]),
                _size(rail["bytes"]),
                _size(rail["bytes"] // rail["ops"]) if rail["ops"] else "-",
                str(rail["ops_in_flight"]),
                str(rail["again"]),
                str(rail["errors"]),
                _quantile(rail["post_latency_ns_log2"], 1e-3),
                _quantile(rail["write_latency_us_log2"], 1.0),
                rail["mode"],
            ]
            for index, group in enumerate(self["groups"])
            for number, rail in enumerate(group["rails"])
        ]
        if rows:
            header = ["rail", "nic", "provider", "ops", "bytes", "per op", "in flight", "again", "errors"]
            lines.append(text_table([*header, "post p50", "done p50", "mode"], rows))
        lines += [
            f"  rail {index}.{number}: {rail['mode']}, since {rail['mode_why']}"
            for index, group in enumerate(self["groups"])
            for number, rail in enumerate(group["rails"])
        ]
        for index, group in enumerate(self["groups"]):
            counts = ("counters_in_use", "counters_poisoned", "stale_imms", "violations", "malformed_frames")
            lines.append(f"  group {index}: " + ", ".join(f"{name} {group[name]}" for name in counts))
        lines += [f"  left out: {why}" for why in self["left_out"]]
        return "\n".join(lines)


def explain_mode(rail: dict[str, Any]) -> tuple[str, str]:
    """How a rail writes, and why, from what its provider granted."""
    places = min(rail["iov_limit"], rail["rma_iov_limit"], 8)
    gather = f"{places} places an operation" if places > 1 else "one place an operation"
    rest, queue = (
        ("sleeps on a descriptor", "has a descriptor")
        if rail["wait_fd"]
        else ("sleeps by the clock and a bell", "has no descriptor, and peers ring when they post")
        if rail["wait_is_hint"]
        else ("sleeps by the clock", "has none")
    )
    batch = "an immediate for up to 16 operations" if rail["fail_stop"] else "an immediate each"
    order = (
        "writes may overtake each other, since shm is slower in order"
        if rail["shared_memory"]
        else "writes may overtake each other"
        if not rail["ordered_writes"]
        else "writes keep their order, and a failed one stops the next"
        if rail["fail_stop"]
        else "writes keep their order, but no failed one is known to stop the next"
    )
    limits = f"iov_limit {rail['iov_limit']} and rma_iov_limit {rail['rma_iov_limit']}"
    return f"{gather}, {batch}, {rest}", f"{order}; {limits}; the completion queue {queue}"


def _size(nbytes: int) -> str:
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


def _quantile(log2_histogram: list[int], unit_us: float) -> str:
    """The bound that half of what was counted stays below; bucket i counts what is below 2^i units."""
    total, seen = sum(log2_histogram), 0
    for bucket, count in enumerate(log2_histogram):
        seen += count
        if total and 2 * seen >= total:
            return f"< {2**bucket * unit_us:.3g} us"
    return "-"
