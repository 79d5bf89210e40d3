"""What discovery answers: device groups, each with NICs, cpus and the reason; and its JSON.

>>> topology = discover()
>>> topology.groups[0].gpu, [nic.name for nic in topology.groups[0].nics], topology.groups[0].reason
('0000:53:00.0', ['rdmap79s0', ...], 'nearest: 4 NICs at PIX, 1 switch')
>>> Engine(**topology.engine_arguments())
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..errors import TopologyError
from .cpus import parse_cpus
from .distances import Distance
from .model import Nic, Port

__all__ = ["Group", "LeftOut", "Rail", "Topology"]

VERSION = 1


class Rail(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A NIC of a group.

    Attributes
    ----------
    name : str, optional
        The kernel's name; None in static NCCL files, where the PCI address alone is known.
    pci : str, optional
        PCI address; of Soft-RoCE and software providers that of the network device beneath, if it has one.
    provider, fabric, domain : str, optional
        As libfabric offers it; None on recorded machines.
    link_gbps : float, optional
        Line rate in Gbit/s.
    port : {"up", "down", "unknown"}
    numa : int, optional
        NUMA node; None if unknown or several.
    """

    name: str | None = None
    pci: str | None = None
    provider: str | None = None
    fabric: str | None = None
    domain: str | None = None
    link_gbps: float | None = None
    port: Port = "unknown"
    numa: int | None = None

    @classmethod
    def of(cls, nic: Nic) -> Rail:
        """The NIC, as the result shows it."""
        return cls(
            name=nic.name,
            pci=nic.pci,
            provider=nic.provider,
            fabric=nic.fabric,
            domain=nic.domain,
            link_gbps=nic.link_gbps,
            port=nic.port,
            numa=nic.place.numa,
        )

    @property
    def label(self) -> str:
        """How messages and tables call it."""
        return self.name or self.pci or "?"


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """A device group: a GPU or the host, its NICs, and the core of its progress thread.

    Attributes
    ----------
    gpu : str, optional
        PCI address; None: the host.
    gpu_index : int, optional
        Its index among the GPUs that this process sees.
    nics : tuple of Rail
        Empty if no NIC is usable.
    distance : Distance, optional
        From the GPU to each of these NICs.
    numa : int, optional
        NUMA node of the GPU; None if unknown or several.
    cpus : str
        Allowed cpus near the GPU, as ``0-47,96-143``.
    worker_cpus : str
        Of these the cpus of one physical core, for the progress thread; empty if no cpus are known.
    reason : str
        Why these NICs and this core.
    """

    gpu: str | None = None
    gpu_index: int | None = None
    model: str | None = None
    nics: tuple[Rail, ...] = ()
    distance: Distance | None = None
    numa: int | None = None
    cpus: str = ""
    worker_cpus: str = ""
    reason: str = ""

    @property
    def label(self) -> str:
        """``GPU0 0000:53:00.0`` or ``host``."""
        return "host" if self.gpu is None else f"GPU{'' if self.gpu_index is None else self.gpu_index} {self.gpu}"


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """A NIC that is not used, and why."""

    nic: Rail
    reason: str


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """Groups in the order of the GPUs that this process sees, so that group i serves device i.

    Attributes
    ----------
    source : str
        What it was found out from.
    provider : str, optional
        The libfabric provider that was asked for.
    groups : tuple of Group
    left_out : tuple of LeftOut
        Every NIC that no group has.
    warnings : tuple of str
        What should be looked at.
    """

    version: int = VERSION
    source: str = ""
    provider: str | None = None
    groups: tuple[Group, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    warnings: tuple[str, ...] = ()

    def to_json(self) -> str:
        """The form that a JSON override file has."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()

    def engine_arguments(self) -> dict[str, Any]:
        """Arguments ``provider``, ``groups`` and ``cpus`` of :class:`fabric_kv.Engine`.

        Raises
        ------
        TopologyError
            If there is no group, or one has no NIC; says which NICs were left out and why.
        """
        without = [group for group in self.groups if not group.nics]
        if without or not self.groups:
            found = "".join(f"\n  {left.nic.label}: {left.reason}" for left in self.left_out) or "\n  nothing"
            who = ", ".join(group.label for group in without) or "any group"
            raise TopologyError(
                f"no usable NIC for {who} in {self.source}; NICs that were left out:{found}\nHint: software providers "
                'are used only when named: provider="tcp" or "shm"; fabric-kv-doctor says more',
                device=without[0].gpu if without else None,
            )
        rails = [rail for group in self.groups for rail in group.nics]
        providers = {rail.provider for rail in rails} - {None}
        arguments: dict[str, Any] = {
            "provider": self.provider or (providers.pop() if len(providers) == 1 else None),
            "groups": [[rail.domain or rail.label for rail in group.nics] for group in self.groups],
        }
        if all(group.worker_cpus for group in self.groups):
            arguments["cpus"] = [sorted(parse_cpus(group.worker_cpus)) for group in self.groups]
        return arguments
