"""How far two PCI devices are apart, in nvidia-smi's words, and which NICs are nearest.

>>> distance(gpu.place, nic.place)
Distance(relation='PIX', switches=1, bridges=3)
>>> nearest(gpu.place, machine.nics)
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile
from typing import Literal

import msgspec

from .model import Nic, Place

__all__ = ["RELATIONS", "Distance", "distance", "nearest"]

Relation = Literal["PIX", "PXB", "PHB", "NODE", "SOCKET", "SYS"]
RELATIONS: tuple[Relation, ...] = ("PIX", "PXB", "PHB", "NODE", "SOCKET", "SYS")


class Distance(msgspec.Struct, frozen=True):
    """How far two devices are apart.

    Attributes
    ----------
    relation : str
        ``PIX`` one switch, ``PXB`` several, ``PHB`` one host bridge, ``NODE`` one NUMA node, ``SOCKET`` one package
        (nvidia-smi prints SYS for it), ``SYS`` farther.
    switches, bridges : int
        PCI switches and bridges passed; comparable within one machine only.
    """

    relation: Relation
    switches: int
    bridges: int

    @property
    def order(self) -> tuple[int, int]:
        """Sorts by distance. Bridges do not count: a switch is one hop, however many ports it shows."""
        return RELATIONS.index(self.relation), self.switches

    def __str__(self) -> str:
        return f"{self.relation}, {self.switches} switch{'es' if self.switches != 1 else ''}"


def distance(a: Place, b: Place) -> Distance:
    """Distance of two places on one machine."""
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a.bridges, b.bridges, strict=False)))
    if shared and a.host_bridge == b.host_bridge:
        # Below the last common bridge each further switch adds two bridges to one side.
        switches = 1 + (len(a.bridges) - shared) // 2 + (len(b.bridges) - shared) // 2
        bridges = len(a.bridges) + len(b.bridges) - 2 * shared + 1
        return Distance("PIX" if switches == 1 else "PXB", switches, bridges)
    relation: Relation = "SYS"
    if a.host_bridge is not None and a.host_bridge == b.host_bridge:
        relation = "PHB"
    elif a.numa is not None and a.numa == b.numa:
        relation = "NODE"
    elif a.package is not None and a.package == b.package:
        relation = "SOCKET"
    return Distance(relation, len(a.bridges) // 2 + len(b.bridges) // 2, len(a.bridges) + len(b.bridges))


def nearest(place: Place, nics: Iterable[Nic]) -> tuple[Distance | None, tuple[Nic, ...]]:
    """All NICs at the smallest distance, in the order given; ``(None, ())`` without NICs."""
    found = [(distance(place, nic.place), nic) for nic in nics]
    if not found:
        return None, ()
    best = min(found, key=lambda item: item[0].order)[0]
    return best, tuple(nic for away, nic in found if away.order == best.order)
