"""What libfabric offers for each NIC of this machine, matched by PCI address.

>>> version, offers = ask_libfabric(provider=None)
>>> machine = match_offers(machine, offers, provider=None, root=Path("/sys"))
>>> machine.nics[0].provider, machine.nics[0].domain
('efa', 'rdmap79s0-rdm')
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from ..errors import FabricKVError
from .model import Machine, Nic, Port, pci_address
from .sysfs import netdev_gbps, netdev_pci, netdev_port

__all__ = ["Offer", "ask_libfabric", "match_offers"]


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """One endpoint that libfabric offers and that has what fabric_kv needs.

    Attributes
    ----------
    rdma : bool
        Whether the kernel's RDMA subsystem knows the device.
    device : str
        The device's name; empty where libfabric tells none.
    pci : str
        Its PCI address; empty where libfabric tells none, as for Soft-RoCE and tcp.
    link_bps : int
        Line rate in bit/s; 0 if unknown.
    port : {"up", "down", "unknown"}
    """

    provider: str
    domain: str
    fabric: str = ""
    rdma: bool = False
    device: str = ""
    pci: str = ""
    link_bps: int = 0
    port: Port = "unknown"


def ask_libfabric(provider: str | None) -> tuple[str, list[Offer] | None, list[str]]:
    """Libfabric's version and path, what it offers, and warnings; the offers are None if it cannot be asked."""
    try:
        from .. import _native
    except ImportError as error:
        return "", None, [f"libfabric was not asked: the C++ core cannot be imported: {error}"]
    try:
        path, version = _native.library()
        offers = msgspec.convert(_native.list_offers(provider or ""), list[Offer])
    except FabricKVError as error:
        return "", None, [f"libfabric was not asked: {error}"]
    return f"libfabric {version} ({path})", offers, []


def match_offers(machine: Machine, offers: Sequence[Offer], *, provider: str | None, root: Path) -> Machine:
    """Give each NIC its offer; with a software provider, the NICs are the network devices that it offers.

    Parameters
    ----------
    offers : sequence of Offer
        In libfabric's order: its first choice for a NIC is taken.
    provider : str, optional
        The provider that was asked for. Without it only RDMA counts, as in :class:`fabric_kv.Engine`.
    root : Path
        The folder that stands for ``/sys``.
    """
    rdma = [offer for offer in offers if offer.rdma]
    if provider and offers and not rdma:
        nics = [_network_nic(machine, offer, root) for offer in {o.domain: o for o in reversed(offers)}.values()]
    else:
        nics = [_with_offer(nic, machine, rdma) for nic in machine.nics]
    return msgspec.structs.replace(machine, nics=tuple(sorted(nics, key=lambda nic: nic.order)))


def _with_offer(nic: Nic, machine: Machine, offers: Sequence[Offer]) -> Nic:
    same_place = [other for other in machine.nics if nic.pci and other.pci == nic.pci]
    for offer in offers:
        named = nic.name is not None and (
            nic.name in (offer.device, offer.domain) or offer.domain.startswith(f"{nic.name}-")
        )
        address = pci_address(offer.pci)
        # The address decides where libfabric tells it; the name, where two devices are at one address.
        if address is not None and nic.kind != "soft-rdma":
            fits = address == nic.pci and (named or len(same_place) == 1)
        else:
            fits = named
        if fits:
            return msgspec.structs.replace(
                nic,
                provider=offer.provider,
                fabric=offer.fabric,
                domain=offer.domain,
                link_gbps=nic.link_gbps or offer.link_bps / 1e9 or None,
                port=nic.port if nic.port != "unknown" else offer.port,
            )
    return nic


def _network_nic(machine: Machine, offer: Offer, root: Path) -> Nic:
    pci = netdev_pci(root, offer.domain) or pci_address(offer.pci)
    return Nic(
        name=offer.domain,
        pci=pci,
        kind="network",
        place=machine.place_of(pci),
        provider=offer.provider,
        fabric=offer.fabric,
        domain=offer.domain,
        link_gbps=netdev_gbps(root, offer.domain) or offer.link_bps / 1e9 or None,
        port=netdev_port(root, offer.domain),
        netdev=offer.domain,
    )
