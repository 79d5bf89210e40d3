"""Which NICs are left out, and how the others are divided among the GPUs.

>>> usable, left_out = sort_out(machine, NicFilter.parse("^mlx5_bond_0"))
>>> shares = divide(machine.gpus, usable)
>>> shares[0].distance, [nic.label for nic in shares[0].nics], shares[0].reason
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .distances import Distance, nearest
from .filters import NicFilter
from .model import Gpu, Machine, Nic

__all__ = ["Share", "divide", "sort_out"]


class Share(NamedTuple):
    """The NICs of one GPU, how far they are, and why these."""

    distance: Distance | None
    nics: tuple[Nic, ...]
    reason: str


def sort_out(
    machine: Machine, chosen: NicFilter, provider: str | None = None
) -> tuple[list[Nic], list[tuple[Nic, str]]]:
    """NICs that may be used, and those left out, each with the reason."""
    reasons = [(nic, _left_out(nic, machine, chosen, provider)) for nic in machine.nics]
    return (
        [nic for nic, reason in reasons if reason is None],
        [(nic, reason) for nic, reason in reasons if reason is not None],
    )


def _left_out(nic: Nic, machine: Machine, chosen: NicFilter, provider: str | None) -> str | None:
    """Why a NIC cannot or should not carry data; None if it may. What the user names outweighs rules, not facts."""
    if not chosen.keeps(nic):
        return f"left out by the filter {chosen}"
    if nic.port == "down":
        return "its port is not active"
    if nic.kind == "network" and nic.provider is None:
        return "it is no RDMA NIC"
    if machine.libfabric is not None and nic.provider is None:
        return f"{machine.libfabric} offers nothing for it{f' with provider {provider}' if provider else ''}"
    return None if chosen.names(nic) else _rule(nic, machine)


def _rule(nic: Nic, machine: Machine) -> str | None:
    """What most machines want, by the kinds of NICs there are."""
    kinds = {other.kind for other in machine.nics}
    if nic.kind == "other-rdma":
        return "neither EFA nor ConnectX; name it in FABRIC_KV_NICS to use it"
    if nic.kind == "connectx" and "efa" in kinds:
        return "a ConnectX on a machine with EFA manages the NVLink switch; name it in FABRIC_KV_NICS to use it"
    if nic.kind == "soft-rdma" and kinds & {"efa", "connectx"}:
        return "software RDMA on a machine with RDMA NICs; name it in FABRIC_KV_NICS to use it"
    if nic.kind == "network":
        others = [other for other in machine.nics if other.kind == "network" and other is not nic]
        if nic.name == "lo" and others:
            return "the loopback device reaches no other machine; name it in FABRIC_KV_NICS to use it"
        if nic.pci is None and nic.netdev and any(other.pci for other in others):
            return "a virtual network device on a machine with real ones; name it in FABRIC_KV_NICS to use it"
    return None


def divide(gpus: Sequence[Gpu], nics: Sequence[Nic]) -> list[Share]:
    """Give each GPU its share of the NICs nearest to it.

    GPUs with the same nearest NICs divide them in PCI order; when that does not come out even, the first ones get one
    more, and no NIC stays idle. If there are fewer NICs than GPUs, all of these GPUs share all of these NICs.

    Parameters
    ----------
    gpus, nics
        All of the machine's, in PCI order, also GPUs that this process does not see: processes with a GPU each must
        come to the same division.
    """
    near = [nearest(gpu.place, nics) for gpu in gpus]
    by_nics: dict[tuple[int, ...], list[int]] = {}
    for index, (_, found) in enumerate(near):
        by_nics.setdefault(tuple(map(id, found)), []).append(index)
    shares: list[Share] = [Share(None, (), "no usable NIC")] * len(gpus)
    for sharing in by_nics.values():
        found = near[sharing[0]][1]
        each, more = divmod(len(found), len(sharing))
        first = 0
        for rank, index in enumerate(sharing):
            away = near[index][0]
            if away is None:
                continue
            count = each + (rank < more)
            own = found[first : first + count] if each else found
            first += count if each else 0
            shares[index] = Share(away, own, _reason(away, len(own), len(found), len(sharing)))
    return shares


def _reason(away: Distance, own: int, found: int, sharing: int) -> str:
    nics = f"{found} NIC{'s' if found > 1 else ''}"
    if sharing == 1:
        return f"nearest: {nics} at {away}"
    if own == found:
        return f"nearest: {nics} at {away}, shared by {sharing} GPUs"
    # Without a switch between them nothing tells which NIC belongs to which GPU.
    guess = "" if away.relation in ("PIX", "PXB") else ", a guess: they are equally near"
    return f"nearest: {own} of {nics} at {away}, divided among {sharing} GPUs in PCI order{guess}"
