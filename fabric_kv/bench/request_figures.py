"""What requests have waited for: from the times that both ends have seen to the figures that are printed.

>>> request_figures(work, bare_bytes, served, offsets_ns, times, bare_ns)["efficiency"]
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .model import ModelWork
from .wire import Served

__all__ = ["PrefillTimes", "hidden_share", "poisson_arrivals", "request_figures"]


class PrefillTimes(NamedTuple):
    """Of a request, on our clock, in ns; and how long its writes kept NICs busy."""

    started: int
    first_layer: int  # before layer_done of the first layer of the first chunk
    last_layer: int  # before layer_done of the last layer of the last chunk
    busy_before: int
    busy_at_end: int  # when compute ended


def request_figures(
    work: ModelWork,
    bare_bytes: int,
    served: Sequence[Served],
    offsets_ns: Sequence[int],
    times: Mapping[str, PrefillTimes],
    bare_ns: Sequence[int],
) -> dict[str, Any]:
    """Put both ends' times together.

    Parameters
    ----------
    work : ModelWork
    bare_bytes : int
        Of what was timed without the messenger; see ``bare_moves``.
    served : sequence of Served
        Of each decode side.
    offsets_ns : sequence of int
        Its clock less ours.
    times : mapping of request id to PrefillTimes
    bare_ns : sequence of int
        What that takes.

    Returns
    -------
    dict
        See docs/bench.md; times in ms, but for those that end in ``_us``.
    """
    tails, wholes, latencies, waits, ttfts = [], [], [], [], []
    for offset_ns, answer in zip(offsets_ns, served, strict=True):
        for theirs in answer.requests:
            ours = times[theirs.request_id]
            ready = theirs.ready_ns - offset_ns
            tails.append((ready - ours.last_layer) / 1e3)
            wholes.append((ready - ours.first_layer) / 1e3)
            latencies.append((theirs.ready_ns - theirs.arrived_ns) / 1e6)
            waits.append((theirs.submitted_ns - theirs.arrived_ns) / 1e6)
            ttfts.append((ready - ours.started) / 1e6)
    compute_ms = work.compute_ms * work.layout.num_layers * len(work.chunks())
    bare_us, tail_us = statistics.median(bare_ns) / 1e3, statistics.median(tails)
    waited_us = tail_us if work.compute_ms > 0 else statistics.median(wholes)
    return {
        "compute_ms": compute_ms,
        "prefill_to_ready_ms": _spread(ttfts),
        "ttft_penalty_ms": _spread([tail / 1e3 for tail in tails]),
        "latency_ms": _spread(latencies),
        "queued_ms": _spread(waits),
        "bare_bytes": bare_bytes,
        "bare_us": bare_us,
        "bare_gb_per_s": bare_bytes / bare_us / 1e3,
        "tail_us": tail_us,
        "efficiency": bare_us / waited_us if work.layerwise else None,
        "transfer_bound": work.layerwise and 0 < work.compute_ms * 1e3 < bare_us,
    }


def hidden_share(times: Sequence[PrefillTimes], busy_after: int) -> float | None:
    """Share of the time with writes in flight that fell into the computing of this or another request.

    Parameters
    ----------
    times : sequence of PrefillTimes
        In the order in which they were prefilled, one after the other.
    busy_after : int
        As ``busy_before``, when all was delivered.
    """
    ends = [*(each.busy_before for each in times[1:]), busy_after]
    total = sum(end - each.busy_before for each, end in zip(times, ends, strict=True))
    hidden = sum(each.busy_at_end - each.busy_before for each in times)
    return hidden / total if total else None


def poisson_arrivals(qps: float, count: int, num_decoders: int, seed: int) -> list[list[float]]:
    """When requests arrive at each decode side, in seconds: together a Poisson process of ``qps`` a second."""
    random = np.random.default_rng(seed)
    times = np.cumsum(random.exponential(1.0 / qps, count * num_decoders))
    return [times[index::num_decoders].tolist() for index in range(num_decoders)]


def _spread(values: Sequence[float]) -> dict[str, float]:
    array = np.asarray(values)
    p50, p99 = np.quantile(array, [0.5, 0.99])
    return {"avg": float(array.mean()), "p50": float(p50), "p99": float(p99), "max": float(array.max())}
