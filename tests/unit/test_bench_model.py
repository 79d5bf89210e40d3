"""The bench's requests: what their pages hold under any sharding, how much there is of it, and when they arrive."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import numpy as np
import pytest

from fabric_kv import Engine
from fabric_kv.bench.args import parse
from fabric_kv.bench.main import main
from fabric_kv.bench.model import NO_PAGE, Cache, ModelWork, bare_moves, page_sets
from fabric_kv.bench.request_figures import PrefillTimes, hidden_share, poisson_arrivals, request_figures
from fabric_kv.bench.wire import RequestTimes, Served
from fabric_kv.bench.workload import Fabric
from fabric_kv.sharding import PRESETS, KVLayout, layout_from_config, plan_transfer
from fabric_kv.sharding.layout import Group, Part

DENSE = KVLayout.attention(num_layers=3, kv_heads=4, head_dim=4, page_tokens=4, dtype="float16")
SCALED = KVLayout.attention(
    num_layers=2, kv_heads=2, head_dim=4, page_tokens=4, dtype="float8_e4m3fn", order="NHD", scale_dtype="float32"
)
HYBRID = KVLayout(
    4,
    (
        Group("attention", "attention", (0, 3), 4, (Part("K", 4, 8, "uint8"),)),
        Group("sliding", "sliding", (1,), 4, (Part("K", 4, 8, "uint8"),), window=4),
        Group("state", "state", (2,), 0, (Part("conv", 4, 8, "uint8", 3), Part("recurrent", 8, 4, "float32", 5))),
    ),
)


class NoEngine:
    """Registers nothing."""

    def register(self, buffer: Any) -> Any:
        return buffer


def make_cache(work: ModelWork, *, prefills: bool) -> Cache:
    engine: Any = NoEngine()
    assert hasattr(Engine, "register")
    return Cache(engine, work, Fabric(), prefills=prefills)


def copy_rows(src: np.ndarray, dst: np.ndarray, write: Any) -> None:
    for page, to in zip(write.src_pages, write.dst_pages, strict=True):
        for row in range(write.rows):
            begin = write.src_offset + page * write.src_stride + row * write.src_row_stride
            end = write.dst_offset + to * write.dst_stride + row * write.dst_row_stride
            dst[end : end + write.nbytes] = src[begin : begin + write.nbytes]


def send(work: ModelWork, source: Cache, sink: Cache) -> None:
    """What the messenger does, in NumPy: every page set, by the plan."""
    plan = plan_transfer(source.spec, sink.spec)
    for slot, layer in itertools.product(range(work.slots), range(work.layout.num_layers)):
        for group in plan.groups_of_layer(layer):
            pages = plan.page_map(group, 0, work.isl, final=True, num_tokens=work.isl)
            src, dst = source.pages[slot][group], sink.pages[slot][group]
            for src_rank, dst_rank in itertools.product(range(work.prefill_tp), range(work.decode_tp)):
                for write in plan.writes(src_rank, dst_rank, layer, pages, src, dst, source_set=0):
                    copy_rows(
                        source.regions[src_rank][write.src_region], sink.regions[dst_rank][write.dst_region], write
                    )


@pytest.mark.parametrize("layout", [DENSE, SCALED, HYBRID], ids=["dense", "scaled", "hybrid"])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (2, 1), (1, 2), (4, 2), (2, 8)])
def test_right_pages_are_right_and_others_wrong(layout: KVLayout, prefill_tp: int, decode_tp: int) -> None:
    work = ModelWork(layout=layout, prefill_tp=prefill_tp, decode_tp=decode_tp, isl=10, chunk=10)
    source, sink = make_cache(work, prefills=True), make_cache(work, prefills=False)
    source.stamp(1)
    assert source.count_wrong(1, work.slots) == 0
    send(work, source, sink)
    assert sink.count_wrong(1, work.slots) == 0
    stale = sink.count_wrong(2, work.slots)
    assert stale == sink.count_wrong(0, work.slots) > 0
    first_page = sink.pages[0][0][0]
    layer = next(layer for layer in sink.spec.memory[-1].layers if layer.group == 0).parts[0]
    sink.regions[-1][0][layer.offset + first_page * layer.page_stride] ^= 1
    assert sink.count_wrong(1, work.slots) == 1
    assert sink.count_wrong(1, 0) == 0


def test_page_sets_are_known_to_both_ends_and_share_no_page() -> None:
    work = ModelWork(layout=DENSE, isl=10, chunk=4, slots=3)
    for prefills in True, False:
        sets = page_sets(work, prefills=prefills)
        again = page_sets(work, prefills=prefills)
        assert all(
            np.array_equal(a, b) for one, two in zip(sets, again, strict=True) for a, b in zip(one, two, strict=True)
        )
        assert sorted(np.concatenate([pages[0] for pages in sets]).tolist()) == list(range(9))
    assert work.chunks() == [(0, 4), (4, 8), (8, 10)]


def test_only_what_decode_looks_at_exists() -> None:
    work = ModelWork(layout=HYBRID, isl=10, chunk=4, slots=2)
    attention, sliding, state = HYBRID.groups
    # The next query, at position 10, sees positions 7 to 10: the page of tokens 4 to 7 and what follows.
    assert [work.sent(group) for group in (attention, sliding, state)] == [range(3), range(1, 3), range(1)]
    (first, second) = page_sets(work, prefills=True)
    assert first[1][0] == second[1][0] == NO_PAGE
    assert sorted([*first[1][1:], *second[1][1:]]) == [0, 1, 2, 3]
    assert sorted([*first[2], *second[2]]) == [0, 1]
    assert [rank.num_pages for rank in work.spec(1).memory] == [(6, 4, 2)]


def test_the_size_of_a_cache_is_that_of_its_regions() -> None:
    for layout, tp_size in itertools.product((DENSE, SCALED, HYBRID), (1, 2, 4)):
        work = ModelWork(layout=layout, isl=10, chunk=10)
        regions = [nbytes for rank in work.spec(tp_size).memory for nbytes in rank.region_bytes]
        assert work.cache_bytes(tp_size) == sum(regions)


@pytest.mark.parametrize(("compute_ms", "pages"), [(1.0, 1), (0.0, 3 * 3)], ids=["the last layer", "all of it"])
def test_the_messenger_is_held_against_what_remains_when_compute_ends(compute_ms: float, pages: int) -> None:
    work = ModelWork(layout=DENSE, prefill_tp=2, decode_tp=4, isl=10, chunk=4, compute_ms=compute_ms)
    moves = bare_moves(work, plan_transfer(work.spec(2), work.spec(4)))
    assert [move.dst_rank for move in moves] == [0, 1, 2, 3]
    # Tokens 8 and 9 are in the third page, which is sent whole: K and V of a head each, 4 tokens of 4 half floats.
    assert [move.nbytes for move in moves] == [pages * 2 * 4 * 4 * 2] * 4


def test_arrivals_are_a_poisson_process_dealt_out_in_turn() -> None:
    arrivals = poisson_arrivals(100.0, 1000, 3, seed=1)
    assert [len(times) for times in arrivals] == [1000] * 3
    merged = sorted(time for times in arrivals for time in times)
    assert [merged[index::3] for index in range(3)] == arrivals
    gaps = np.diff(merged)
    assert gaps.mean() == pytest.approx(0.01, rel=0.1)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)  # as of an exponential distribution
    assert arrivals == poisson_arrivals(100.0, 1000, 3, seed=1)


@pytest.mark.parametrize("name", list(PRESETS))
def test_every_model_that_is_known_can_be_served(name: str) -> None:
    model = parse(["--loopback", "--model", name, "--prefill-tp", "2", "--isl", "300", "--chunk", "128"]).model
    assert model
    assert all(model.sent(group) for group in model.layout.groups)
    assert sum(move.nbytes for move in bare_moves(model, plan_transfer(model.spec(2), model.spec(1)))) > 0


def test_the_command_line_of_the_issue() -> None:
    words = ["--model", "qwen3-235b", "--prefill-tp", "4", "--decode-tp", "4", "--isl", "16384", "--chunk", "4096"]
    run = parse(["--loopback", *words, "--layerwise", "--compute-ms-per-layer", "1.5", "--qps", "2", "--decoders", "3"])
    assert run.model is not None
    assert (run.workload.op, run.num_peers, run.qps, run.model.compute_ms) == ("messenger", 3, 2.0, 1.5)
    assert run.model.layout == layout_from_config(PRESETS["qwen3-235b"], page_tokens=16, model="qwen3-235b")
    assert len(run.model.chunks()) == 4


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--op", "write", "--isl", "64"], "--isl is for --op messenger"),
        (["--op", "paged", "--layerwise"], "--layerwise is for"),
        (["--model", "nosuch"], "neither a file nor"),
        (["--model", "qwen3-8b", "-b", "4K"], "--begin does not apply"),
        (["--model", "qwen3-8b", "--bidir"], "--bidir does not apply"),
        (["--model", "qwen3-8b", "--floor"], "--floor does not apply"),
        (["--model", "qwen3-8b", "--qps", "0"], "--qps 0"),
        (["--model", "qwen3-8b", "--isl", "0"], "isl"),
        (["--model", "qwen3-8b", "--prefill-tp", "65"], "prefill_tp"),
        (["--model", "qwen3-235b", "--isl", "10000000"], "1 TiB"),
        (["--model", "qwen3-8b", "--decoders", "2", "--peers", "3"], "they are the same"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_requests_that_cannot_be_are_refused(options: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--loopback", *options]) == 2
    assert why in capsys.readouterr().err


def test_times_of_both_ends_are_put_together() -> None:
    work = ModelWork(layout=DENSE, isl=8, chunk=4, layerwise=True, compute_ms=2.0)
    times = {
        "timed-0.0": PrefillTimes(
            started=1_000_000, first_layer=3_000_000, last_layer=9_000_000, busy_before=0, busy_at_end=0
        )
    }
    served = [Served([RequestTimes("timed-0.0", 500_000, 700_000, 10_000_000)], 0)]
    figures = request_figures(work, 4096, served, [-500_000], times, [300_000, 750_000, 900_000])
    assert figures["tail_us"] == 1500.0  # their clock is half a millisecond behind
    assert figures["ttft_penalty_ms"]["p50"] == 1.5
    assert figures["prefill_to_ready_ms"]["max"] == 9.5
    assert figures["latency_ms"]["avg"] == 9.5
    assert figures["queued_ms"]["p99"] == pytest.approx(0.2)
    assert figures["efficiency"] == 0.5
    assert figures["compute_ms"] == 12.0
    idle = msgspec.structs.replace(work, compute_ms=0.0)
    figures = request_figures(idle, 4096, served, [-500_000], times, [3_000_000, 3_750_000, 9_000_000])
    assert figures["efficiency"] == 0.5  # from the first layer on, since all are sent at once
    assert not figures["transfer_bound"]


def test_the_hidden_share_is_what_was_written_while_something_computed() -> None:
    times = [PrefillTimes(0, 0, 0, busy_before=100, busy_at_end=130), PrefillTimes(0, 0, 0, 140, 190)]
    assert hidden_share(times, 200) == pytest.approx((30 + 50) / 100)
    assert hidden_share(times[:1], 100) is None
