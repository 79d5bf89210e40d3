"""Plans end to end, two processes over libfabric's tcp: every cell right when ``ready`` is said, and nothing else."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest

from fabric_kv import Engine
from fabric_kv.messenger import DecodeMessenger
from fabric_kv.messenger import Request as Fetch

from ..unit.cache_oracle import CANARY
from .child import LONG, ChildProcess
from .sharding_node import BOUNDS, CASES, simulate

GUARD = 512  # cells before and after every region


@pytest.fixture(scope="module")
def child():
    child = ChildProcess("sharding_node")
    yield child
    child.close()


class DecodeSide:
    """The case's requests, and what their pages hold at the moment when they are ready."""

    def __init__(self, simulation, engine):
        self.simulation, self.plan = simulation, simulation.plan
        self.guarded = [
            [np.full(region.size + 2 * GUARD, CANARY) for region in rank]
            for rank in simulation.arenas(self.plan.dst, CANARY)
        ]
        self.arenas = [[region[GUARD:-GUARD] for region in rank] for rank in self.guarded]
        regions = [[engine.register(region) for region in rank] for rank in self.arenas]
        self.messenger = DecodeMessenger(engine, self.plan.dst, regions, None, BOUNDS)
        self.ready = [threading.Event() for _ in simulation.requests]
        self.wrong = ["not checked"] * len(self.ready)

    def submit(self, peer, number):
        request = self.simulation.requests[number]
        wanted = self.simulation.expected(only=number)
        handle = self.messenger.submit(
            peer,
            Fetch(
                request_id=str(number),
                tokens=np.arange(request.num_tokens),
                pages=request.dst_pages,
                cached_tokens=request.cached,
            ),
        )
        handle.add_done_callback(lambda handle: self.on_done(handle, number, wanted))
        return handle

    def on_done(self, handle, number, wanted):
        if handle.exception(0) is None:
            self.wrong[number] = self.difference(wanted, ignore=CANARY)
        self.ready[number].set()

    def difference(self, wanted, ignore=None):
        """The first region that is not as wanted, in words; None if all are."""
        for rank, regions in enumerate(wanted):
            for region, (cells, found) in enumerate(zip(regions, self.arenas[rank], strict=True)):
                bad = np.flatnonzero((found != cells) & (cells != ignore))
                if bad.size:
                    first = f"cell {bad[0]} is {found[bad[0]]}, not {cells[bad[0]]}"
                    return f"rank {rank}, region {region}: {bad.size} cells, {first}"
        return None

    def finish(self, handle, number):
        """Its result, once its pages have been compared."""
        result, request = handle.result(LONG), self.simulation.requests[number]
        assert self.ready[number].wait(LONG)
        assert self.wrong[number] is None, f"request {number}: {self.wrong[number]}"
        total = sum(
            self.plan.expected_units(rank, result.source_set, request.num_tokens, cached=request.cached)
            for rank in range(len(self.arenas))
        )
        assert handle.progress() == (total, total)
        return result


@pytest.mark.parametrize("name", CASES)
def test_every_cell_is_right_when_ready_and_nothing_else_is_touched(child, name):
    simulation = simulate(name)
    address = bytes.fromhex(child.do(do="open", case=name)["address"])
    with Engine("tcp", nics=["127.0.0.1"]) as engine:
        decode = DecodeSide(simulation, engine)
        with decode.messenger as messenger:
            peer = messenger.connect(address)
            last = len(simulation.requests) - 1
            handles = [decode.submit(peer, number) for number in range(last)]
            results = [decode.finish(handle, number) for number, handle in enumerate(handles)]
            # Alone, behind all others on one connection: what they sent too much has been counted by its end.
            results.append(decode.finish(decode.submit(peer, last), last))
            prefill = child.do(do="close")
        (group,) = engine.describe()["groups"]
    faults = {key: group[key] for key in ("violations", "stale_imms", "malformed_frames", "counters_in_use")}
    assert not any(faults.values()), faults
    assert (prefill["violations"], prefill["stale"]) == (0, 0)
    assert prefill["counts"]["released"] == messenger.state()["counts"]["ready"] == len(results)
    # Replica sets take turns, and the ranks of the others held nothing worth sending.
    assert len({result.source_set for result in results}) == min(len(results), decode.plan.num_source_sets)
    assert decode.difference(simulation.expected()) is None
    for region in itertools.chain.from_iterable(decode.guarded):
        assert (region[:GUARD] == CANARY).all()
        assert (region[-GUARD:] == CANARY).all()
