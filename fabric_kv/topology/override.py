"""The user's own choice: a JSON file of the form that ``fabric-kv-topo --json`` writes.

::

    {"groups": [{"gpu": "0000:0f:00.0", "nics": ["mlx5_0", "mlx5_1"]},
                {"gpu": "0000:2d:00.0", "nics": [{"pci": "0000:2a:00.0"}], "numa": 0, "worker_cpus": "12"}]}

What it says wins over every rule. What it names must exist: a typo is an error, not another choice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from ..errors import ConfigError, TopologyError
from .assign import Pick
from .cpus import format_cpus, parse_cpus
from .distances import Distance, distance
from .model import MAX_NICS, Gpu, Machine, Nic, Place, pci_address
from .result import VERSION, Group, LeftOut, Rail, Topology
from .rules import Share

__all__ = ["Override", "OverrideGroup", "as_given", "read_override", "resolve"]


class OverrideGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One group. What it leaves out is chosen; index, model, distance and reason are for readers only."""

    gpu: str | None = None
    nics: tuple[str | Rail, ...]
    numa: int | msgspec.UnsetType | None = msgspec.UNSET
    cpus: str | msgspec.UnsetType = msgspec.UNSET
    worker_cpus: str | msgspec.UnsetType = msgspec.UNSET
    gpu_index: int | None = None
    model: str | None = None
    distance: Distance | None = None
    reason: str = ""


class Override(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file. ``left_out`` and ``warnings`` are for readers only."""

    version: int = VERSION
    source: str = ""
    provider: str | None = None
    groups: tuple[OverrideGroup, ...]
    left_out: tuple[LeftOut, ...] = ()
    warnings: tuple[str, ...] = ()


def read_override(data: bytes, source: str) -> Override:
    """Read and check the file as far as that needs no machine.

    Raises
    ------
    TopologyError
        If it is no such JSON; names the key, the address or the list that is wrong.
    """
    try:
        override = msgspec.json.decode(data, type=Override)
        if override.version != VERSION:
            raise ConfigError(f"version {override.version} is not {VERSION}")
        for group in override.groups:
            if group.gpu is not None and pci_address(group.gpu) is None:
                raise ConfigError(f"gpu {group.gpu!r} is no PCI address such as 0000:0f:00.0")
            if len(group.nics) > MAX_NICS:
                raise ConfigError(f"a group has {len(group.nics)} NICs")
            for text in (group.cpus, group.worker_cpus):
                parse_cpus(text or "")
        counts = Counter(pci_address(group.gpu) if group.gpu else None for group in override.groups)
        repeated = [gpu for gpu, count in counts.items() if count > 1]
        if repeated:
            raise ConfigError(f"{repeated[0] or 'the host'} has {counts[repeated[0]]} groups")
    except (msgspec.MsgspecError, ConfigError, RecursionError) as error:
        raise TopologyError(f"{source}: cannot be read as a topology: {error}", device=source) from error
    return override


def as_given(override: Override, source: str, provider: str | None) -> Topology:
    """The topology of a file alone, with no machine to check it against."""
    groups = []
    for index, group in enumerate(override.groups):
        numa = None if isinstance(group.numa, msgspec.UnsetType) else group.numa
        groups.append(
            Group(
                gpu=pci_address(group.gpu) if group.gpu else None,
                gpu_index=group.gpu_index if group.gpu_index is not None or group.gpu is None else index,
                model=group.model,
                nics=tuple(Rail(name=nic) if isinstance(nic, str) else nic for nic in group.nics),
                distance=group.distance,
                numa=numa,
                cpus=group.cpus or "",
                worker_cpus=group.worker_cpus or "",
                reason=group.reason or f"given by {source}",
            )
        )
    return Topology(
        source=override.source or source,
        provider=provider or override.provider,
        groups=tuple(groups),
        left_out=override.left_out,
        warnings=override.warnings,
    )


def resolve(
    override: Override, source: str, machine: Machine, visible: Sequence[Gpu], allowed: frozenset[int]
) -> tuple[list[Pick], list[str]]:
    """Find what the file names on a machine; also returns warnings.

    Groups of GPUs that this process does not see are skipped, so that one file serves all processes of a machine.

    Raises
    ------
    TopologyError
        If a GPU, a NIC, a NUMA node or an allowed cpu that it names does not exist.
    """
    picks: dict[str | None, Pick] = {}
    warnings = []
    for group in override.groups:
        gpu = machine.gpu(group.gpu) if group.gpu is not None else None
        nics = tuple(_find(item, machine, source) for item in group.nics)
        twice = next((nic.label for index, nic in enumerate(nics) if nic in nics[:index]), None)
        if twice:
            raise TopologyError(
                f"{source} names NIC {twice} twice in the group of {group.gpu or 'the host'}", device=twice
            )
        for nic in nics:
            if nic.port == "down" or (machine.libfabric is not None and nic.provider is None):
                why = "its port is not active" if nic.port == "down" else f"{machine.libfabric} does not offer it"
                warnings.append(f"{source} names {nic.label}, but {why}")
        away = (
            max((distance(gpu.place, nic.place) for nic in nics), key=lambda d: d.order, default=None) if gpu else None
        )
        worker = _worker(group, source, allowed)
        picks[gpu.pci if gpu else None] = Pick(
            gpu, Share(away, nics, f"given by {source}"), _place(group, gpu, machine, source), worker
        )
    chosen = [picks[gpu.pci] for gpu in visible if gpu.pci in picks]
    warnings += [f"{source} has no group for GPU {gpu.pci}" for gpu in visible if gpu.pci not in picks]
    return chosen + ([picks[None]] if None in picks else []), warnings


def _find(item: str | Rail, machine: Machine, source: str) -> Nic:
    """The NIC that has the name and the address, as far as they are given."""
    if isinstance(item, str):
        item = Rail(pci=item) if pci_address(item) else Rail(name=item)
    address = pci_address(item.pci) if item.pci else None
    for nic in machine.nics:
        by_name = item.name is None or item.name in (nic.name, nic.domain)
        by_address = item.pci is None or address == nic.pci
        if by_name and by_address and (item.name or item.pci):
            return nic
    known = ", ".join(f"{nic.name or 'unnamed'} {nic.pci or ''}".strip() for nic in machine.nics) or "none"
    named = " ".join(text for text in (item.name, item.pci) if text) or "(without name and address)"
    raise TopologyError(f"{source} names NIC {named}, which {machine.source} lacks; its NICs: {known}", device=named)


def _place(group: OverrideGroup, gpu: Gpu | None, machine: Machine, source: str) -> Place | None:
    """Where the file says the group is; None: where its GPU or its NICs are."""
    if isinstance(group.numa, msgspec.UnsetType) and isinstance(group.cpus, msgspec.UnsetType):
        return None
    place = gpu.place if gpu else machine.place_of(None)
    if not isinstance(group.numa, msgspec.UnsetType) and group.numa != place.numa:
        if group.numa is not None and group.numa not in machine.nodes:
            known = ", ".join(map(str, machine.nodes)) or "none"
            raise TopologyError(f"{source} names NUMA node {group.numa}; {machine.source} has: {known}", device=source)
        cpus = machine.cpus if group.numa is None else machine.nodes[group.numa]
        place = msgspec.structs.replace(place, numa=group.numa, cpus=cpus)
    if group.cpus:
        place = msgspec.structs.replace(place, cpus=group.cpus)
    return place


def _worker(group: OverrideGroup, source: str, allowed: frozenset[int]) -> frozenset[int] | None:
    cpus = parse_cpus(group.worker_cpus or "")
    if cpus - allowed:
        raise TopologyError(
            f"{source} gives the progress thread cpus {format_cpus(cpus)}, but only {format_cpus(allowed) or 'none'} "
            "are allowed here. Hint: without worker_cpus a core is chosen",
            device=source,
        )
    return cpus or None
