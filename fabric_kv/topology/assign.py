"""Makes groups of what was picked: NUMA node, cpus, and one physical core for each progress thread.

>>> groups, warnings = assign(machine, [Pick(gpu, share)], visible=[gpu], allowed=frozenset(range(96)))
>>> groups[0].cpus, groups[0].worker_cpus
('0-47', '12')
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..errors import ConfigError
from .cpus import Want, Worker, format_cpus, guess_cores, parse_cpus, spread
from .model import Gpu, Machine, Nic, Place
from .result import Group, Rail
from .rules import Share

__all__ = ["Pick", "allowed_cpus", "assign", "host_share"]


class Pick(NamedTuple):
    """NICs of a GPU, or of the host (None), and what an override says about its cpus; None: to be chosen."""

    gpu: Gpu | None
    share: Share
    place: Place | None = None
    worker_cpus: frozenset[int] | None = None


def host_share(nics: Sequence[Nic], has_gpus: bool) -> Share:
    """All NICs, for the memory of a host whose GPUs, if any, this process does not see."""
    why = "no GPU is visible to this process" if has_gpus else "no GPU"
    return Share(None, tuple(nics), f"{why}: the host uses all NICs" if nics else f"{why}, and no usable NIC")


def assign(
    machine: Machine, picks: Sequence[Pick], visible: Sequence[Gpu], allowed: frozenset[int]
) -> tuple[list[Group], list[str]]:
    """Complete picks to groups; also returns warnings.

    Cores that an override gives are taken first; the others avoid them if they can.
    """
    places = [pick.place or (pick.gpu.place if pick.gpu else _host_place(machine, pick.share.nics)) for pick in picks]
    wants = [_want(machine, pick, place, allowed) for pick, place in zip(picks, places, strict=True)]
    given = frozenset(cpu for pick in picks for cpu in pick.worker_cpus or ())
    free = allowed - given if allowed - given else allowed
    cores = [tuple(parse_cpus(core)) for core in machine.cores] or guess_cores(machine.nodes.values())
    open_picks = [index for index, pick in enumerate(picks) if pick.worker_cpus is None]
    workers = dict(zip(open_picks, spread([wants[index] for index in open_picks], cores, free), strict=True))
    groups, warnings = [], []
    for index, (pick, place) in enumerate(zip(picks, places, strict=True)):
        near = next((cpus for cpus in wants[index].local if cpus), allowed)
        worker = workers.get(index)
        group = Group(
            gpu=pick.gpu.pci if pick.gpu else None,
            gpu_index=visible.index(pick.gpu) if pick.gpu else None,
            model=pick.gpu.model if pick.gpu else None,
            nics=tuple(Rail.of(nic) for nic in pick.share.nics),
            distance=pick.share.distance,
            numa=place.numa,
            cpus=format_cpus(near),
            worker_cpus=format_cpus(worker.cpus if worker else pick.worker_cpus or ()),
            reason=pick.share.reason + _core_reason(worker, place),
        )
        groups.append(group)
        if worker and worker.shared:
            warnings.append(f"{group.label}: its progress thread shares core {group.worker_cpus} with another group's")
        if worker and worker.remote and place.cpus:
            warnings.append(
                f"{group.label}: none of its near cpus {place.cpus} is allowed; it gets one that is farther"
            )
    without = [group.label for group in groups if not group.nics]
    if without:
        warnings.insert(0, f"no NIC for {', '.join(without)}")
    return groups, warnings


def _core_reason(worker: Worker | None, place: Place) -> str:
    if worker is None or not worker.cpus:
        return ""
    where = "any" if not place.cpus else "none near it is allowed" if worker.remote else "near it"
    return f"; core {format_cpus(worker.cpus)}: {where}{', shared' if worker.shared else ''}"


def _want(machine: Machine, pick: Pick, place: Place, allowed: frozenset[int]) -> Want:
    near = parse_cpus(place.cpus) & allowed
    node = parse_cpus(machine.nodes.get(place.numa, "") if place.numa is not None else "") & allowed
    same = [gpu.pci for gpu in machine.devices if gpu.place.cpus == place.cpus]
    rank = same.index(pick.gpu.pci) if pick.gpu and pick.gpu.pci in same else 0
    return Want(tuple(cpus for cpus in (near, node) if cpus), rank, max(len(same), 1))


def _host_place(machine: Machine, nics: Sequence[Nic]) -> Place:
    """The NUMA node of all NICs, if it is one; else the machine."""
    nodes = {nic.place.numa for nic in nics}
    numa = nodes.pop() if len(nodes) == 1 else None
    return Place(numa=numa, cpus=machine.nodes.get(numa, machine.cpus) if numa is not None else machine.cpus)


def allowed_cpus(machine: Machine, asked: frozenset[int] | None, affinity: frozenset[int] | None) -> frozenset[int]:
    """Cpus that may be used: the machine's, of these what our thread may use, of these what the user says."""
    cpus = parse_cpus(machine.cpus)
    if affinity is not None:
        cpus = cpus & affinity if cpus & affinity else affinity
    if asked is not None:
        if not asked & cpus:
            raise ConfigError(
                f"cpus {format_cpus(asked)}: none is among the allowed ones, {format_cpus(cpus) or 'none'}"
            )
        cpus &= asked
    return cpus
