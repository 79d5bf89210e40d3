"""Where the bench's pages lie, what they hold, and that whatever is not right is counted; and its histogram."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric_kv.bench.latency import Latencies
from fabric_kv.bench.places import Places, lanes_for
from fabric_kv.bench.stamps import POISON, count_touched, count_wrong, stamp
from fabric_kv.bench.workload import Case

cases = st.builds(Case, st.integers(1, 4096), st.integers(1, 200))


@given(case=cases, contiguity=st.integers(0, 100), lanes=st.integers(1, 5), seed=st.integers(0, 2**32 - 1))
def test_pages_lie_apart_and_neighbours_are_as_many_as_asked(
    case: Case, contiguity: int, lanes: int, seed: int
) -> None:
    places = Places(case, contiguity, lanes, seed)
    expected = case.num_pages - 1 - round((case.num_pages - 1) * (100 - contiguity) / 100)
    for pages in places.src, places.dst:
        assert pages.shape == (lanes, case.num_pages)
        assert len(np.unique(pages)) == pages.size
        assert pages.min() >= 0
        assert pages.max() < places.num_pages
        assert (np.diff(np.sort(pages, axis=1), axis=1) == 1).sum(axis=1).tolist() == [expected] * lanes
    # A run is a run at both ends, or it would not become one write.
    both = (np.diff(places.src, axis=1) == 1) & (np.diff(places.dst, axis=1) == 1)
    assert both.sum(axis=1).tolist() == [expected] * lanes
    assert len(places.gaps) + places.dst.size == places.num_pages
    again = Places(case, contiguity, lanes, seed)
    assert np.array_equal(places.src, again.src)
    assert np.array_equal(places.dst, again.dst)


def test_lanes_are_bounded_by_depth_and_memory() -> None:
    case = Case(1 << 20, 64)
    assert lanes_for(case, 100, depth=16, memory_bytes=1 << 40) == 16
    assert lanes_for(case, 100, depth=16, memory_bytes=256 << 20) == 3
    assert lanes_for(case, 100, depth=16, memory_bytes=1 << 16) == 1
    assert lanes_for(Case(0, 1), 0, depth=16, memory_bytes=1 << 16) == 16


@pytest.mark.parametrize("page_bytes", [1, 7, 8, 100, 4096])
def test_right_pages_are_right(page_bytes: int) -> None:
    memory, pages = np.full(40 * page_bytes, POISON, np.uint8), np.array([3, 0, 39, 17])
    stamp(memory, pages, page_bytes=page_bytes, seed=1, iteration=5)
    assert count_wrong(memory, pages, page_bytes=page_bytes, seed=1, iteration=5) == 0
    assert count_touched(memory, np.setdiff1d(np.arange(40), pages), page_bytes) == 0


def test_stale_misplaced_foreign_and_damaged_pages_are_counted(seed: int) -> None:
    page_bytes, pages = 256, np.array([3, 0, 39, 17])
    clean = np.full(40 * page_bytes, POISON, np.uint8)
    stamp(clean, pages, page_bytes=page_bytes, seed=1, iteration=5)

    def wrong(memory: np.ndarray) -> int:
        return count_wrong(memory, pages, page_bytes=page_bytes, seed=1, iteration=5)

    stale = clean.copy()
    stamp(stale, pages, page_bytes=page_bytes, seed=1, iteration=4)
    assert wrong(stale) == 4
    foreign = clean.copy()
    stamp(foreign, pages, page_bytes=page_bytes, seed=2, iteration=5)
    assert wrong(foreign) == 4
    swapped = clean.copy().reshape(40, page_bytes)
    swapped[[3, 0]] = swapped[[0, 3]]
    assert wrong(swapped.reshape(-1)) == 2
    damaged = clean.copy()
    place = 17 * page_bytes + random.Random(seed).randrange(page_bytes)
    damaged[place] ^= 1 << random.Random(seed).randrange(8)
    assert wrong(damaged) == 1
    spilled = clean.copy()
    spilled[5 * page_bytes] = 0
    assert count_touched(spilled, np.array([4, 5, 6]), page_bytes) == 1


@given(st.lists(st.integers(1, 10**10), min_size=1, max_size=300), st.integers(0, 300))
def test_histograms_add_up_and_are_within_a_percent(values: list[int], cut: int) -> None:
    first, second = Latencies(), Latencies()
    for value in values[:cut]:
        first.add(value)
    for value in values[cut:]:
        second.add(value)
    first.merge(second.counts())
    summary = first.summary()
    assert len(first) == len(values)
    assert summary.max_us == max(values) / 1e3
    assert summary.avg_us == pytest.approx(sum(values) / len(values) / 1e3)
    for q, found in (0.5, summary.p50_us), (0.99, summary.p99_us):
        exact = sorted(values)[max(int(np.ceil(q * len(values))) - 1, 0)] / 1e3
        assert found == pytest.approx(exact, rel=0.0101)


def test_an_empty_histogram_says_nothing() -> None:
    assert Latencies().summary() == (0.0, 0.0, 0.0, 0.0, 0.0)
    merged = Latencies()
    merged.merge(Latencies().counts())
    assert len(merged) == 0


def test_many_durations_take_no_more_memory_than_few() -> None:
    latencies = Latencies()
    for value in range(1, 200_000):
        latencies.add(value)
    assert len(latencies) == 199_999
    assert latencies.summary().p50_us == pytest.approx(100.0, rel=0.01)
