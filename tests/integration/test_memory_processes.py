"""Two ranks own the buffers, a third process the engine that moves pages between them; each is killed in turn."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from .child import ChildProcess
from .fabrics import with_rdma
from .memory_node import PAGES


class World(NamedTuple):
    source: Any
    target: Any
    engine: Any
    alone: dict[str, list[int]]  # what each rank had open before anybody imported
    pids: dict[str, int]

    def move(self, order: list[int]) -> dict[str, Any]:
        result: dict[str, Any] = self.engine.do(do="move", order=order)
        return result

    def same(self, order: list[int]) -> bool:
        source, target = (rank.do(do="digests")["value"] for rank in (self.source, self.target))
        return [[layer[page] for page in order] for layer in source] == list(target)


@pytest.fixture(params=with_rdma("tcp", "shm"))
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    paths = [str(tmp_path / name) for name in ("source", "target")]
    ranks = [ChildProcess("memory_node", "rank", path, str(seed)) for seed, path in enumerate(paths)]
    started = list(ranks)
    try:
        up = [rank.wait_for("up") for rank in ranks]
        # Not before: what the ranks have open is counted without anybody who comes.
        engine = ChildProcess("memory_node", "engine", request.param, *paths)
        started.insert(0, engine)
        pids = {"source": up[0]["pid"], "target": up[1]["pid"], "engine": engine.wait_for("up")["pid"]}
        yield World(*ranks, engine, {"source": up[0]["left"], "target": up[1]["left"]}, pids)
    finally:
        for process in started:
            process.close()
        for left in Path("/dev/shm").glob(f"{started[0].process.pid}-*"):  # libfabric's; who is killed cannot tidy up
            left.unlink(missing_ok=True)


def shuffled(seed: int) -> list[int]:
    order = list(range(PAGES))
    random.Random(seed).shuffle(order)
    return order


def test_pages_move_between_ranks_and_everything_is_given_back(world: World, seed: int) -> None:
    for turn in range(3):
        order = shuffled(seed + turn)
        assert world.move(order) == {"event": "did", "value": None}
        assert world.same(order)
    before, after = world.engine.do(do="close")["value"]
    assert after == before
    for name, rank in (("source", world.source), ("target", world.target)):
        assert rank.wait_for("importer_gone")["pid"] == world.pids["engine"]
        assert rank.do(do="left")["value"] == world.alone[name]


@pytest.mark.parametrize("victim", ["source", "target"])
def test_a_rank_that_is_killed(world: World, victim: str, seed: int) -> None:
    order = shuffled(seed)
    world.move(order)
    getattr(world, victim).signal(signal.SIGKILL)
    lost = world.engine.wait_for("lost")
    assert (lost["who"], lost["reason"]) == (victim, "gone")
    assert str(world.pids[victim]) in lost["text"]
    for refused in (world.move(order), world.engine.do(do="again", who=victim)):
        assert (refused["error"], refused["reason"]) == ("SharingError", "gone")
        assert str(world.pids[victim]) in refused["text"]
    before, after = world.engine.do(do="close")["value"]
    assert after == before
    other = "target" if victim == "source" else "source"
    survivor = getattr(world, other)
    assert survivor.wait_for("importer_gone")["pid"] == world.pids["engine"]
    assert survivor.do(do="left")["value"] == world.alone[other]
    assert len(survivor.do(do="digests")["value"][0]) == PAGES


def test_the_engine_is_killed(world: World, seed: int) -> None:
    order = shuffled(seed)
    world.move(order)
    world.engine.signal(signal.SIGKILL)
    for name, rank in (("source", world.source), ("target", world.target)):
        assert rank.wait_for("importer_gone")["pid"] == world.pids["engine"]
        assert rank.do(do="left")["value"] == world.alone[name]
    assert world.same(order)
