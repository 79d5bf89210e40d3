"""How costs grow: with rails, peers, what is in flight, and regions; each point as a multiple of the first.

>>> results = measure(repetitions=3)
>>> print_tables(tables(results), describe_run(3)); draw(results, "which machine", Path("scaling.svg"))

A part of ``scripts/bench``. *Instructions* are those of the engine's core over a NIC that completes everything at once
and moves nothing, counted by callgrind: they repeat exactly, whatever else the machine does. *Microseconds* are of
engines in this process over a real provider, where sender, receivers and kernel share the cores; points are measured in
turn, and the ratio is taken within a turn.
"""

from __future__ import annotations

import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from bench_tables import Table, summary
from idle_scheduler import IdleScheduler

from fabric_kv import CacheSpec, Engine, EngineOptions, KVLayout, PageList, PagePiece, Placement
from fabric_kv.config import Bounds
from fabric_kv.messenger import Chunk, DecodeMessenger, PrefillMessenger, Request

__all__ = ["AXES", "draw", "measure", "tables"]

COST = Path(__file__).parent / "cost"
LONG = 60.0
AXES = {
    "rails": (1, 2, 3, 4),
    "peers": (1, 4, 16, 64),
    "in flight": (1, 10, 100, 1_000, 10_000),
    "regions": (1, 10, 100, 1_000, 5_000),
}
TITLES = {
    "rails": "Rails of an engine",
    "peers": "Peers that a sender writes to in turn",
    "in flight": "Transfers, or requests of a messenger, in flight",
    "regions": "Regions that are open",
}

Points = dict[int, float]


def measure(
    *,
    repetitions: int,
    axes: dict[str, Sequence[int]] | None = None,
    providers: Sequence[str] = ("tcp", "shm"),
    count_instructions: bool = True,
) -> Iterator[dict[str, Any]]:
    """All results, as they come; what is under way goes to stderr.

    Parameters
    ----------
    axes : dict, optional
        What grows, and at which numbers it is measured; all of :data:`AXES` by default.
    providers : sequence of str
        For times; the first is used where one will do.
    count_instructions : bool
        Needs valgrind and a C++ compiler.
    """
    axes = dict(AXES if axes is None else axes)
    if count_instructions and shutil.which("valgrind") is None:
        print("scaling: instructions are not counted: valgrind is missing", file=sys.stderr)
        count_instructions = False
    if count_instructions:
        subprocess.run([COST / "build"], check=True)
    for axis, numbers in axes.items():
        print(f"scaling: {axis}", file=sys.stderr)
        for what, unit, count in _INSTRUCTIONS[axis] if count_instructions else ():
            yield _result(axis, what, unit, "core alone", [{n: count(n) for n in numbers}])
        for what, times, with_shm in _TIMES[axis]:
            for provider in providers if with_shm else providers[:1]:
                with ExitStack() as stack:
                    turn = times(stack, provider, numbers)
                    turn(numbers[:1])  # connects, and warms up
                    yield _result(axis, what, "µs", provider, [turn(numbers) for _ in range(repetitions)])


def _result(axis: str, what: str, unit: str, provider: str, turns: Sequence[Points]) -> dict[str, Any]:
    first = next(iter(turns[0]))
    return {
        "what": "scaling",
        "axis": axis,
        "measured": what,
        "unit": unit,
        "provider": provider,
        "points": [
            {
                "n": n,
                "value": summary([turn[n] for turn in turns]),
                "ratio": summary([turn[n] / turn[first] for turn in turns]),
            }
            for n in turns[0]
        ],
    }


# -- instructions ------------------------------------------------------------------------------------------------------

POST, SENT, REGISTER = "fkv::Sender::post(long)", "fkv::Sender::on_sent*", "fkv::Engine::register_region*"
_PAGES_OF_A_TRANSFER = 16


def instructions(function: str, mode: str, *numbers: int) -> int:
    """Of a function and all that it calls, in one run of ``engine_cost``.

    SystemExit if callgrind sees none.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = ["valgrind", "--tool=callgrind", f"--toggle-collect={function}"]
        command += [f"--callgrind-out-file={folder}/out", str(COST / "engine_cost"), mode, *map(str, numbers)]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"Collected : (\d+)", run.stderr)
    if found is None or int(found[1]) == 0:
        raise SystemExit(f"callgrind saw nothing of {function}: was it inlined?")
    return int(found[1])


def _a_page(rails: int, peers: int, transfers: int) -> float:
    """Of one page more, posted and completed: what happens once is not in it."""
    few, many = (
        sum(instructions(function, "post", pages, rails, peers, transfers) for function in (POST, SENT))
        for pages in (19_200, 38_400)
    )
    return (many - few) / 19_200


def _a_transfer(in_flight: int) -> float:
    pages = _PAGES_OF_A_TRANSFER * in_flight
    return sum(instructions(function, "post", pages, 1, 1, in_flight) for function in (POST, SENT)) / in_flight


def _a_registration(open_regions: int) -> float:
    few, many = (instructions(REGISTER, "register", open_regions + more) for more in (0, 500))
    return (many - few) / 500


_INSTRUCTIONS: dict[str, tuple[tuple[str, str, Callable[[int], float]], ...]] = {
    "rails": (("a page of 4 KiB", "instructions", lambda n: _a_page(n, 1, 1)),),
    "peers": (("a page of 4 KiB", "instructions", lambda n: _a_page(1, n, 64)),),
    "in flight": ((f"a transfer of {_PAGES_OF_A_TRANSFER} pages", "instructions", _a_transfer),),
    "regions": (("a registration", "instructions", _a_registration),),
}


# -- times -------------------------------------------------------------------------------------------------------------

Turn = Callable[[Sequence[int]], Points]  # at these numbers, of those that it was made for


def _engine(stack: ExitStack, provider: str, rails: int = 1, **options: Any) -> Engine:
    nics = [] if provider == "shm" else [f"127.0.0.{1 + rail}" for rail in range(rails)]
    return stack.enter_context(Engine(provider, nics=nics, options=EngineOptions(**options)))


def _spent_us(work: Callable[[], None]) -> float:
    begun = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - begun) / 1e3


def _over_rails(stack: ExitStack, provider: str, numbers: Sequence[int]) -> Turn:
    """Four transfers of 128 pages of 16 KiB each, until all is counted over there."""
    page_bytes, num_pages, num_transfers = 16 << 10, 128, 4
    random = np.random.default_rng(1)
    src, dst = (PageList(random.permutation(2 * num_pages)[:num_pages]) for _ in "ab")

    def pair(rails: int) -> Callable[[], None]:
        ours, theirs = (_engine(stack, provider, rails) for _ in "ab")
        memory = [np.ones((2 * num_pages, page_bytes), np.uint8) for _ in "ab"]
        source, sink = ours.register(memory[0]), theirs.register(memory[1])
        peer = ours.add_peer(theirs.address)

        def move() -> None:
            with theirs.counter(unit_bytes=page_bytes, expected_units=num_pages * num_transfers) as counter:
                for _ in range(num_transfers):
                    ours.write_pages(peer, source, sink.remote, src, dst, page_bytes=page_bytes, token=counter.token)
                counter.result(LONG)

        return move

    moves = {rails: pair(rails) for rails in numbers}
    return lambda now: {
        n: statistics.median(_spent_us(moves[n]) for _ in range(9)) / num_pages / num_transfers for n in now
    }


def _to_peers(stack: ExitStack, provider: str, numbers: Sequence[int]) -> Turn:
    """1024 pages of 4 KiB, shared out among the peers in one submission, until all have counted theirs."""
    page_bytes, num_pages = 4 << 10, 1024
    ours = _engine(stack, provider)
    source = ours.register(np.ones((num_pages, page_bytes), np.uint8))
    ends = []
    for _ in range(max(numbers)):
        theirs = _engine(stack, provider)
        ends.append(
            (theirs, ours.add_peer(theirs.address), theirs.register(np.zeros((num_pages, page_bytes), np.uint8)))
        )
    everything = np.random.default_rng(1).permutation(num_pages)
    lists = {n: [PageList(part) for part in np.split(everything, n)] for n in numbers}

    def move(n: int) -> None:
        with ExitStack() as counters:
            parts, waiting = [], []
            for (theirs, peer, sink), pages in zip(ends, lists[n], strict=False):
                counter = theirs.counter(unit_bytes=page_bytes, expected_units=num_pages // n)
                waiting.append(counters.enter_context(counter))
                size = page_bytes
                parts.append(
                    (peer, [PagePiece(source, 0, size, sink.remote, 0, size, size, pages, pages)], counter.token)
                )
            ours.scatter(parts)
            for counter in waiting:
                counter.result(LONG)

    return lambda now: {n: statistics.median(_spent_us(lambda n=n: move(n)) for _ in range(9)) / num_pages for n in now}


def _transfers_in_flight(stack: ExitStack, provider: str, numbers: Sequence[int]) -> Turn:
    """So many writes of a page of 4 KiB, submitted one by one, until the last has been counted over there."""
    page_bytes = 4 << 10
    ours, theirs = (_engine(stack, provider) for _ in "ab")
    source, sink = (engine.register(np.ones((256, page_bytes), np.uint8)) for engine in (ours, theirs))
    peer = ours.add_peer(theirs.address)

    def move(n: int) -> None:
        remote = sink.remote  # the region must be held: it ends with its last reference
        with theirs.counter(unit_bytes=page_bytes, expected_units=n) as counter:
            for i in range(n):
                place = i % 256 * page_bytes
                ours.write(peer, source, place, remote, place, page_bytes, token=counter.token)
            counter.result(LONG)

    def rounds(n: int) -> int:
        return max(3, min(200, 2000 // n))

    return lambda now: {n: statistics.median(_spent_us(lambda n=n: move(n)) for _ in range(rounds(n))) / n for n in now}


def _requests_in_flight(stack: ExitStack, provider: str, numbers: Sequence[int]) -> Turn:
    """So many requests of a page, all submitted before the first is served, until the last is ready."""
    most, tokens = max(numbers), 16
    layout = KVLayout.attention(num_layers=1, kv_heads=1, head_dim=16, page_tokens=tokens, dtype="float16")
    spec = CacheSpec.dense(layout, Placement(), most)
    ours, theirs = (_engine(stack, provider) for _ in "ab")
    memory = [np.zeros(spec.memory[0].region_bytes[0], np.uint8) for _ in "ab"]
    scheduler, bounds = IdleScheduler(), Bounds(accept_s=LONG, request_s=LONG)
    prefill = stack.enter_context(PrefillMessenger(ours, spec, [[ours.register(memory[0])]], scheduler, bounds))
    decode = stack.enter_context(DecodeMessenger(theirs, spec, [[theirs.register(memory[1])]], bounds=bounds))
    peer = decode.connect(ours.address)
    prompt = np.zeros(tokens, np.int64)

    def serve(n: int) -> None:
        handles = [
            decode.submit(peer, Request(request_id=str(i), tokens=prompt, pages=[np.array([i])])) for i in range(n)
        ]
        taken = [scheduler.requests.get(timeout=LONG) for _ in range(n)]
        for begin in range(0, n, 64):
            batch = taken[begin : begin + 64]
            step = prefill.begin_step(
                [Chunk(each.key, 0, tokens, [np.array([begin + i])], final=True) for i, each in enumerate(batch)]
            )
            prefill.layer_done(step, 0)
            for each in batch:
                prefill.finish(each.key)
        for handle in handles:
            handle.result(LONG)

    def rounds(n: int) -> int:
        return max(1, min(30, 300 // n))

    return lambda now: {
        n: statistics.median(_spent_us(lambda n=n: serve(n)) for _ in range(rounds(n))) / n for n in now
    }


def _registrations(stack: ExitStack, provider: str, numbers: Sequence[int]) -> Turn:
    """``Engine.register`` of 64 KiB with so many open."""
    engine = _engine(stack, provider)
    memory = np.zeros((max(numbers) + _SAMPLES, 64 << 10), np.uint8)

    def turn(now: Sequence[int]) -> Points:
        found, regions = {}, []
        for n in sorted(now):
            regions += [engine.register(memory[i]) for i in range(len(regions), n)]
            samples = []
            for row in memory[-_SAMPLES:]:
                begun = time.perf_counter_ns()
                region = engine.register(row)
                samples.append((time.perf_counter_ns() - begun) / 1e3)
                region.close()
            found[n] = statistics.median(samples)
        for region in regions:
            region.close()
        return found

    return turn


_SAMPLES = 101


def _writes_among_regions(stack: ExitStack, provider: str, numbers: Sequence[int]) -> Turn:
    """Until ``Engine.write`` returns, from and to one at random of so many regions at both ends."""
    page_bytes, most = 4 << 10, max(numbers)
    ours, theirs = (_engine(stack, provider) for _ in "ab")
    memory = [np.ones((most, page_bytes), np.uint8) for _ in "ab"]
    sources = [ours.register(row) for row in memory[0]]
    sinks = [theirs.register(row) for row in memory[1]]  # held: they end with their last reference
    remotes = [sink.remote for sink in sinks]
    peer, random = ours.add_peer(theirs.address), np.random.default_rng(1)

    def turn(now: Sequence[int]) -> Points:
        found = {}
        for n in now:
            samples = []
            for i, j in random.integers(0, n, (201, 2)).tolist():
                begun = time.perf_counter_ns()
                transfer = ours.write(peer, sources[i], 0, remotes[j], 0, page_bytes)
                samples.append((time.perf_counter_ns() - begun) / 1e3)
                transfer.result(LONG)
            found[n] = statistics.median(samples)
        return found

    stack.callback(sinks.clear)
    return turn


# What is measured, how, and whether over each provider.
_TIMES: dict[str, tuple[tuple[str, Callable[[ExitStack, str, Sequence[int]], Turn], bool], ...]] = {
    "rails": (("a page of 16 KiB", _over_rails, False),),
    "peers": (("a page of 4 KiB", _to_peers, True),),
    "in flight": (
        ("a transfer of a page", _transfers_in_flight, True),
        ("a request of a page", _requests_in_flight, False),
    ),
    "regions": (
        ("Engine.register", _registrations, True),
        ("Engine.write returns", _writes_among_regions, False),
    ),
}


# -- what is shown -----------------------------------------------------------------------------------------------------


def tables(results: Sequence[dict[str, Any]]) -> Iterator[Table]:
    """One for each thing that grows: value, and as a multiple of the first; of times with the range of that."""
    for axis, title in TITLES.items():
        of_axis = [result for result in results if result["axis"] == axis]
        if of_axis:
            numbers = sorted({point["n"] for result in of_axis for point in result["points"]})
            yield Table(
                title,
                ["what", "over", "unit", *(f"{n:,}" for n in numbers)],
                [_row(found, numbers) for found in of_axis],
            )


def _row(result: dict[str, Any], numbers: Sequence[int]) -> list[str]:
    points = {point["n"]: point for point in result["points"]}
    cells = [_cell(result["unit"], points[n]["value"], points[n]["ratio"]) if n in points else "–" for n in numbers]
    return [result["measured"], result["provider"], result["unit"], *cells]


def _cell(unit: str, value: dict[str, float], ratio: dict[str, float]) -> str:
    if unit == "instructions":
        return f"{value['median']:.0f} ({ratio['median']:.2f})"
    return f"{value['median']:.1f} ({ratio['median']:.2f}: {ratio['min']:.2f}–{ratio['max']:.2f})"


def draw(results: Sequence[dict[str, Any]], machine: str, path: Path) -> None:
    """All ratios against what grows; the suffix says the format. Needs matplotlib."""
    import matplotlib as mpl

    # The same figures give the same file, with text as text.
    fonts = {"font.sans-serif": ["DejaVu Sans", "Arial"], "svg.fonttype": "none"}
    with mpl.rc_context({**fonts, "svg.hashsalt": "fabric_kv"}):
        _draw(results, machine).savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _draw(results: Sequence[dict[str, Any]], machine: str) -> Any:
    from matplotlib.figure import Figure

    axes_drawn = [axis for axis in TITLES if any(result["axis"] == axis for result in results)]
    figure = Figure(figsize=(11, 3.6 * -(-len(axes_drawn) // 2)), layout="constrained")
    for index, axis in enumerate(axes_drawn):
        plot = figure.add_subplot(-(-len(axes_drawn) // 2), 2, index + 1)
        for result in results:
            if result["axis"] != axis:
                continue
            numbers = [point["n"] for point in result["points"]]
            ratios = [point["ratio"] for point in result["points"]]
            exact = result["unit"] == "instructions"
            plot.errorbar(
                numbers,
                [ratio["median"] for ratio in ratios],
                [
                    [ratio["median"] - ratio["min"] for ratio in ratios],
                    [ratio["max"] - ratio["median"] for ratio in ratios],
                ],
                marker="o",
                markersize=4,
                linewidth=2 if exact else 1,
                linestyle="-" if exact else "--",
                capsize=2,
                label=f"{result['measured']}, {result['provider']} ({result['unit']})",
            )
        plot.set_xscale("log")
        numbers = sorted({point["n"] for result in results if result["axis"] == axis for point in result["points"]})
        plot.set_xticks(numbers, [f"{n:,}" for n in numbers])
        plot.minorticks_off()
        plot.set_title(TITLES[axis], fontsize=10)
        plot.set_ylabel("times the first")
        plot.set_ylim(bottom=0)
        plot.grid(alpha=0.3)
        plot.legend(fontsize=7)
    figure.suptitle(f"What one costs as their number grows. {machine}", fontsize=8)
    return figure
