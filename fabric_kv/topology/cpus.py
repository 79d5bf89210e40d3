"""Lists of cpus as Linux writes them, and which core each progress thread gets.

>>> sorted(parse_cpus("0-3,8")), format_cpus({0, 1, 2, 3, 8})
([0, 1, 2, 3, 8], '0-3,8')
>>> spread([Want((node0,), rank=0, of=2), Want((node0,), rank=1, of=2)], cores=[(0, 2), (1, 3)], allowed=node0)
[Worker(cpus=(0, 2), shared=False, remote=False), Worker(cpus=(1, 3), shared=False, remote=False)]
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..errors import ConfigError

__all__ = ["Want", "Worker", "format_cpus", "guess_cores", "parse_cpus", "spread"]

# Linux is built for at most 8192 cpus (NR_CPUS); a file that says more is wrong, and must not cost memory.
MAX_CPUS = 1 << 14
CORES_UNKNOWN = "which cpus share a core is not told, but guessed"
_ITEM = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")


def parse_cpus(text: str) -> frozenset[int]:
    """Cpus of ``0-47,96-143``; the empty text is the empty set.

    Raises
    ------
    ConfigError
        If it is no such list, or names a cpu of 16384 or more.
    """
    cpus: set[int] = set()
    for item in text.split(",") if text.strip() else []:
        match = _ITEM.fullmatch(item.strip())
        if not match:
            raise ConfigError(f"{text[:80]!r} is no list of cpus such as 0-47,96-143")
        first = int(match[1])
        last = int(match[2] or first)
        if not first <= last < MAX_CPUS:
            raise ConfigError(f"{item.strip()!r} in a list of cpus must ascend and stay below {MAX_CPUS}")
        cpus.update(range(first, last + 1))
    return frozenset(cpus)


def format_cpus(cpus: Iterable[int]) -> str:
    """The shortest such list."""
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)


def guess_cores(nodes: Iterable[str]) -> list[tuple[int, ...]]:
    """Cores of NUMA nodes that only list cpus: where a node has equal runs, ``0-47,96-143``, cpus 0 and 96 are one.

    So Linux numbers them on x86. If it is wrong, threads only keep more distance than they must.
    """
    cores: list[tuple[int, ...]] = []
    for text in nodes:
        runs = [sorted(parse_cpus(run)) for run in text.split(",") if run]
        if len(runs) > 1 and len({len(run) for run in runs}) == 1:
            cores.extend(zip(*runs, strict=True))
    return cores


class Want(NamedTuple):
    """What one progress thread asks for.

    ``local``: lists of cpus, the nearest first (a cache's, its NUMA node's). ``rank`` of ``of``: which of the GPUs with
    the same cpus it serves, seen or not by this process, so that processes with a GPU each choose different cores.
    """

    local: tuple[frozenset[int], ...]
    rank: int = 0
    of: int = 1


class Worker(NamedTuple):
    """The cpus of one core; whether another thread has it too; whether it lies outside of all that was asked for."""

    cpus: tuple[int, ...]
    shared: bool
    remote: bool


def spread(wants: Sequence[Want], cores: Iterable[Iterable[int]], allowed: frozenset[int]) -> list[Worker]:
    """Give each thread one physical core among the allowed cpus.

    No two threads share a core if that can be had within what they ask for; otherwise the least used near core is
    shared rather than one of another NUMA node taken. Threads are spread over their cpus, since neighbours share a
    cache. The result depends on nothing but the arguments.

    Parameters
    ----------
    cores : iterable of cpus
        Cpus of each core; those that no core names count as cores of their own.
    allowed : set of int
        Never left; empty if unknown, which gives no cpus.
    """
    usable = [kept for core in cores if (kept := tuple(sorted(allowed & frozenset(core))))]
    named = {cpu for core in usable for cpu in core}
    usable = sorted(usable + [(cpu,) for cpu in allowed - named])
    if not usable:
        return [Worker((), False, False) for _ in wants]
    asked = [_preferences(want, usable) for want in wants]
    owner: dict[int, int] = {}
    for thread in range(len(wants)):
        _claim(thread, asked, owner, set())
    taken = {thread: core for core, thread in owner.items()}
    load = dict.fromkeys(range(len(usable)), 0)
    for core in taken.values():
        load[core] += 1
    for thread, preferences in enumerate(asked):
        if thread not in taken:
            core = min(preferences or range(len(usable)), key=lambda core: load[core])
            load[core] += 1
            taken[thread] = core
    return [Worker(usable[taken[i]], load[taken[i]] > 1, not asked[i]) for i in range(len(wants))]


def _preferences(want: Want, cores: list[tuple[int, ...]]) -> list[int]:
    """Indices of cores, best first: those of the nearest list from this thread's share onwards, then of the next."""
    order: dict[int, None] = {}
    for cpus in want.local:
        near = [index for index, core in enumerate(cores) if not cpus.isdisjoint(core)]
        # The middle of its share: the first core of a machine is where most interrupts go.
        start = (2 * want.rank + 1) * len(near) // (2 * max(want.of, 1))
        order.update(dict.fromkeys(near[start:] + near[:start]))
    return list(order)


def _claim(thread: int, asked: list[list[int]], owner: dict[int, int], seen: set[int]) -> bool:
    """Take a free core, or one whose owner can move to another (Kuhn's matching)."""
    for core in asked[thread]:
        if core not in owner:
            owner[core] = thread
            return True
    for core in asked[thread]:
        if core not in seen:
            seen.add(core)
            if _claim(owner[core], asked, owner, seen):
                owner[core] = thread
                return True
    return False
