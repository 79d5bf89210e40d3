"""What the user says by environment: which NICs, and which GPUs this process sees.

>>> NicFilter.parse("=mlx5_0,mlx5_1").keeps(nic)
>>> NicFilter.parse("^mlx5_bond_0, mlx5_vf*").keeps(nic)
>>> visible_gpus(machine, "3,GPU-8932f937")
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..errors import ConfigError, TopologyError
from .model import Gpu, Machine, Nic, pci_address

__all__ = ["NicFilter", "visible_gpus"]


class NicFilter(NamedTuple):
    """``=a,b`` (or ``a,b``): only these NICs. ``^a,b``: all but these.

    An item is the name of a NIC, its libfabric domain or its PCI address, and matches exactly; a ``*`` in it stands for
    any characters. (NCCL matches by prefix, which makes ``mlx5_1`` mean ``mlx5_10`` too.)
    """

    items: tuple[str, ...] = ()
    exclude: bool = False

    @classmethod
    def parse(cls, text: str | None) -> NicFilter:
        """Read the user's text; None or an empty one keeps every NIC. ConfigError if an item is empty."""
        if text is None or not text.strip():
            return cls()
        text = text.strip()
        items = tuple(item.strip() for item in text.lstrip("=^").split(","))
        if text[:2] in ("==", "^^", "=^", "^=") or not all(items):
            raise ConfigError(f"NIC filter {text!r} must be a list such as =mlx5_0,mlx5_1 or ^mlx5_bond_0")
        return cls(items, text[0] == "^")

    def check(self, nics: Iterable[Nic], source: str) -> None:
        """Raise TopologyError if an item matches no NIC: a typo must not decide which NICs are used."""
        nics = list(nics)
        for item in self.items:
            if not any(_matches(item, nic) for nic in nics):
                known = ", ".join(nic.label for nic in nics) or "none"
                raise TopologyError(
                    f"NIC filter item {item!r} matches no NIC of {source}; its NICs: {known}. "
                    "Hint: names match exactly, unless they hold a *",
                    device=item,
                )

    def keeps(self, nic: Nic) -> bool:
        """Whether the user lets it be used."""
        return not self.items or any(_matches(item, nic) for item in self.items) != self.exclude

    def names(self, nic: Nic) -> bool:
        """Whether the user asks for exactly this one, which outweighs rules of ours that leave it out."""
        return not self.exclude and any("*" not in item and _matches(item, nic) for item in self.items)

    def __str__(self) -> str:
        return ("^" if self.exclude else "=") + ",".join(self.items)


def _matches(item: str, nic: Nic) -> bool:
    names = [name for name in (nic.name, nic.domain, nic.pci) if name]
    if "*" not in item:
        return (pci_address(item) or item) in names
    pattern = re.compile(".*".join(re.escape(part) for part in re.split(r"\*+", item)), re.DOTALL)
    return any(pattern.fullmatch(name) for name in names)


def visible_gpus(machine: Machine, text: str | None, *, by_bus: bool = False) -> tuple[list[Gpu], list[str]]:
    """GPUs of ``CUDA_VISIBLE_DEVICES``, in its order, and warnings.

    Parameters
    ----------
    text : str, optional
        Its value: indices in PCI order, or UUIDs (a unique beginning is enough); None: all GPUs. As in CUDA, the first
        item that is no GPU ends the list, so that ``-1`` and the empty text hide all.
    by_bus : bool
        Whether ``CUDA_DEVICE_ORDER=PCI_BUS_ID`` is set. Otherwise CUDA may number unlike GPUs in another order, which
        is warned of.

    Raises
    ------
    TopologyError
        If an item is a UUID that cannot be looked up here.
    """
    gpus = [gpu for gpu in machine.devices if gpu.usable]
    if text is None:
        return gpus, []
    found: list[Gpu] = []
    warnings: list[str] = []
    for item in (part.strip() for part in text.split(",")):
        gpu = _visible(item, gpus, machine.source)
        if gpu is None or gpu in found:
            if item not in ("", "-1", "NoDevFiles"):
                what = "repeats a GPU" if gpu else f"is none of the {len(gpus)} GPUs"
                warnings.append(f"CUDA_VISIBLE_DEVICES={text!r}: {item!r} {what}; CUDA ignores it and what follows")
            break
        found.append(gpu)
    if found and not by_bus and len({gpu.vendor_device for gpu in gpus}) > 1 and re.search(r"(^|,)\s*\d", text):
        warnings.append(
            "GPUs of several models: CUDA numbers them by speed. Hint: set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name UUIDs"
        )
    return found, warnings


def _visible(item: str, gpus: Sequence[Gpu], source: str) -> Gpu | None:
    if item.isdecimal():
        return gpus[int(item)] if len(item) < 6 and int(item) < len(gpus) else None
    uuid = re.fullmatch(r"(?:MIG-)?(GPU-[0-9a-fA-F-]*)(?:/\d+/\d+)?", item)
    if uuid:
        matching = [gpu for gpu in gpus if gpu.uuid and gpu.uuid.lower().startswith(uuid[1].lower())]
        if len(matching) == 1:
            return matching[0]
    elif not item.startswith("MIG-"):
        return None
    known = ", ".join(f"{gpu.pci} {gpu.uuid or 'without UUID'}" for gpu in gpus) or "none"
    raise TopologyError(
        f"CUDA_VISIBLE_DEVICES names {item!r}, which is not one GPU of {source}; its GPUs: {known}. "
        "Hint: use indices, or give groups by hand: Engine(groups=[[...]])",
        device=item,
    )
