"""When an end gives up: nothing at all has happened for a while, which is not the same as no iteration having ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from fabric_kv.bench.phases import PhaseRun


def test_an_operation_that_ends_is_a_sign_of_life() -> None:
    completions = iter([5, 5, 6])

    def describe() -> dict[str, Any]:
        return {"groups": [{"rails": [{"completions": next(completions)}, {"completions": 1}]}]}

    run: Any = PhaseRun.__new__(PhaseRun)
    run._side = SimpleNamespace(engine=SimpleNamespace(describe=describe))
    run._flow = SimpleNamespace(posted=20, retired_iterations=0)
    run._sinks, run._signalled = [], []
    first, second, third = (run._happened() for _ in range(3))
    assert first == second
    assert third > second
