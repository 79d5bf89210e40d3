"""Which NICs an end opens, whether that is what was asked for, and what is said about it.

>>> engine = open_engine(Fabric(provider="tcp"), local_host="10.0.0.5")
>>> describe_rails(engine)[0]["provider"]
'tcp;ofi_rxm'
"""

from __future__ import annotations

import ipaddress
import re
import time
from pathlib import Path
from typing import Any

from ..config import EngineOptions
from ..engine import Engine
from ..errors import ConfigError, FabricError
from .memory import check_memory
from .workload import Fabric

__all__ = [
    "choose_nics",
    "describe_rails",
    "is_ip",
    "link_gbps",
    "open_engine",
    "remove_shm_names",
    "same_provider",
    "shm_names",
]

_SHM = "fi_shm://"
_END_S = 2.0
# A peer that dies is noticed by the control connection. Silence is borne as long as there, 5 s,
# since on a machine that measures many processes at once an engine may well wait a second for a core.
_HEARTBEAT_MISSES = 25


def same_provider(asked: str, opened: str) -> bool:
    """Whether what was opened is what was asked for: ``tcp`` may be opened as ``tcp;ofi_rxm``."""
    return opened == asked or opened.split(";")[0] == asked


def choose_nics(fabric: Fabric, local_host: str) -> tuple[str, ...]:
    """The rails to open.

    Those named; else, for providers over sockets, the address that the control connection uses (so that what
    can be reached by its name is measured over that very network) or on one host the loopback, 127.0.0.1 onwards; else
    what topology finds nearest; and if ``fabric.rails`` is given, the first so many of them.

    Raises
    ------
    ConfigError
        If there are fewer than ``fabric.rails``.
    TopologyError
        If no RDMA NIC is found where no provider was named.
    """
    from .. import _native

    rails = fabric.rails
    if fabric.nics:
        nics = list(fabric.nics)
    elif fabric.provider == "shm":
        nics = ["shm"]
    elif fabric.provider is not None and any(
        is_ip(offer["source"]) and not offer["rdma"] for offer in _native.list_offers(fabric.provider)
    ):
        # A control connection over a pipe: both ends are here.
        nics = [local_host] if local_host else [f"127.0.0.{1 + index}" for index in range(rails or 1)]
    else:
        from ..topology import discover

        # A group for each GPU, in the order of their numbers, or one for the host.
        groups = discover(provider=fabric.provider).groups
        index = fabric.gpu if fabric.on_gpu and fabric.gpu < len(groups) else 0
        nics = [nic.domain or nic.label for nic in groups[index].nics] if groups else []
    if rails is not None and len(nics) < rails:
        raise ConfigError(
            f"--rails {rails}, but there {'is' if len(nics) == 1 else 'are'} only {len(nics)}: "
            f"{', '.join(nics) or 'none'}. Hint: name them with --nics"
        )
    return tuple(nics[:rails])


def open_engine(fabric: Fabric, local_host: str, *, max_transfers: int, dispatch: str = "manual") -> Engine:
    """Open an engine and make sure that it is over the provider that was asked for.

    Raises
    ------
    FabricError
        If it cannot be opened, or another provider was; or it is to reach a GPU's memory, and does not.
    ConfigError, DeviceError
        If pages are to be on a GPU, and there is none.
    """
    check_memory(fabric)
    nics = choose_nics(fabric, local_host)
    engine = Engine(
        fabric.provider,
        nics=() if nics == ("shm",) else nics,
        cpus=[fabric.cpus] if fabric.cpus else (),
        options=EngineOptions(
            progress=fabric.progress,
            dispatch=dispatch,
            max_transfers=max_transfers,
            device_memory=fabric.on_gpu,
            heartbeat_misses=_HEARTBEAT_MISSES,
        ),
    )
    for rail in engine.describe()["groups"][0]["rails"]:
        if fabric.provider is not None and not same_provider(fabric.provider, rail["provider"]):
            engine.close()
            raise FabricError(
                f"provider {fabric.provider} was asked for, and {rail['provider']} was opened on {rail['domain']}: "
                "figures of it would mislead",
                op="open",
                provider=rail["provider"],
                nic=rail["domain"],
            )
    return engine


def describe_rails(engine: Engine) -> list[dict[str, Any]]:
    """Of each rail: provider, fabric, domain, source, Gbit/s (None if unknown), mode and why."""
    return [
        {
            **{name: rail[name] for name in ("provider", "fabric", "domain", "source", "mode", "mode_why")},
            "link_gbps": link_gbps(rail),
        }
        for rail in engine.describe()["groups"][0]["rails"]
    ]


def link_gbps(rail: dict[str, Any]) -> float | None:
    """Line rate of a rail: what the provider tells, else what the kernel tells of the network device."""
    if rail["link_bps"]:
        return float(rail["link_bps"]) / 1e9
    device = rail["domain"]
    if not re.fullmatch(r"[\w.@-]{1,15}", device):
        return None
    try:
        mbps = int(Path(f"/sys/class/net/{device}/speed").read_text())
    except (OSError, ValueError):  # devices without a speed (lo, a bridge) answer EINVAL
        return None
    return mbps / 1e3 if mbps > 0 else None


def shm_names(engine: Engine) -> list[str]:
    """Names by which libfabric's shm makes files in /dev/shm for this engine; each begins with one of them."""
    sources = [str(rail["source"]) for rail in engine.describe()["groups"][0]["rails"]]
    return [source.removeprefix(_SHM) for source in sources if source.startswith(_SHM)]


def remove_shm_names(names: list[str]) -> list[str]:
    """Remove what a killed process of this host could not; returns what was there.

    Only files that libfabric has named after a process that has ended, or does so within two seconds.
    """
    removed = []
    deadline = time.monotonic() + _END_S
    for name in names:
        match = re.fullmatch(r"(\d{1,10})-[0-9a-f]{1,32}", name)
        if not match:
            continue
        while _alive(match[1]) and time.monotonic() < deadline:
            time.sleep(0.02)
        if _alive(match[1]):
            continue
        for path in Path("/dev/shm").glob(f"{name}:*"):
            path.unlink(missing_ok=True)
            removed.append(path.name)
    return removed


def _alive(pid: str) -> bool:
    try:
        # The name, in brackets, may hold anything; the state follows it: proc_pid_stat(5).
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def is_ip(source: str) -> bool:
    """Whether it is an address; of IPv6 also in brackets."""
    try:
        ipaddress.ip_address(source.strip("[]"))
    except ValueError:
        return False
    return True
