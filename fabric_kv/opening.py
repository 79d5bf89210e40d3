"""Opens the NICs that a caller names, and knows from then on what was opened and what peers are told of it.

>>> opened = open_nics("tcp", nics=["127.0.0.1"], groups=None, cpus=(), options=EngineOptions())
>>> opened.native, opened.address
>>> opened.describe()                              # each group's rails: addresses, mode and why, figures

Nothing is left open where it raises.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .config import EngineOptions, check_integer
from .core import load_native
from .description import explain_mode
from .errors import ConfigError
from .regions import EngineAddress, ProcessIdentity
from .sockaddr import names_of, replaced, text_of

if TYPE_CHECKING:
    from . import _native
    from .topology import Topology

__all__ = ["Opened", "open_nics", "topology_arguments"]

_log = logging.getLogger("fabric_kv")


class Opened(NamedTuple):
    """What was opened."""

    native: _native.Engine
    #: What peers are told.
    address: EngineAddress
    #: libfabric's address of each rail of each group.
    bound: list[list[bytes]]
    #: Why NICs that were asked for are not among them.
    left_out: list[str]

    def describe(self) -> list[dict[str, Any]]:
        """The groups, each with its rails."""
        groups = self.native.describe()
        for group, bound, told in zip(groups, self.bound, self.address.groups, strict=False):
            for rail, ours, theirs in zip(group["rails"], bound, told, strict=True):
                rail["mode"], rail["mode_why"] = explain_mode(rail)
                rail["address"], rail["advertised"] = text_of(ours), text_of(theirs)
        return groups


def open_nics(
    provider: str | None,
    *,
    nics: Sequence[str],
    groups: Sequence[Sequence[str]] | None,
    cpus: Sequence[Sequence[int]],
    options: EngineOptions,
) -> Opened:
    """See :class:`fabric_kv.Engine`, whose arguments and errors these are."""
    if groups is not None and nics:
        raise ConfigError("give nics (one group) or groups, not both")
    if not isinstance(options, EngineOptions):
        raise ConfigError(f"options={options!r} must be EngineOptions(...)")
    if not isinstance(provider, str | None):
        raise ConfigError(f"provider={provider!r} must be the name of a libfabric provider, or None")
    if not isinstance(groups, Iterable | None):
        raise ConfigError(f"groups={groups!r} must be a list of lists of names")
    if not isinstance(cpus, Iterable) or not all(isinstance(of_group, Iterable) for of_group in cpus):
        raise ConfigError(f"cpus={cpus!r} must be a list of lists of cpus, one for each group")
    rails = [_names(group) for group in ((nics,) if groups is None else groups)]
    pinned = [[check_integer("cpus", cpu, -(2**31), 2**31 - 1) for cpu in of_group] for of_group in cpus]
    if not rails or (pinned and len(pinned) != len(rails)):
        raise ConfigError(f"{len(rails)} groups, but cpus for {len(pinned)}")
    native: _native.Engine
    native, left_out = load_native().open_engine(
        provider=provider or "",
        groups=[(group, pinned[i] if pinned else []) for i, group in enumerate(rails)],
        spin=options.progress == "spin",
        nic_threads=options.progress_threads == "nic",
        strict=options.strict,
        max_transfers=options.max_transfers,
        max_inbox_bytes=options.max_inbox_bytes,
        num_counters=options.num_counters,
        heartbeat_interval_s=options.heartbeat_interval_s,
        heartbeat_misses=options.heartbeat_misses,
        connect_s=options.connect_s,
        stall_s=options.stall_s,
        close_s=options.close_s,
        max_registration_bytes=options.max_registration_bytes,
        max_peer_registrations=options.max_peer_registrations,
        device_memory=options.device_memory,
    )
    for why in left_out:
        _log.warning("started without a NIC: %s", why)
    epoch, bound, process = native.address()
    try:
        address = EngineAddress(epoch, _advertised(bound, options), process and ProcessIdentity(*process))
    except BaseException:
        native.close(0.0)
        raise
    return Opened(native, address, bound, left_out)


def topology_arguments(topology: Topology | None, provider: str | None) -> dict[str, Any]:
    """What to open of a topology, or of what discovery finds; see ``Engine.from_topology``."""
    if topology is None:
        from .topology import discover

        topology = discover(provider=provider)
    elif provider is not None:
        raise ConfigError("give a topology or a provider, not both: a topology has its provider")
    arguments = topology.engine_arguments()
    for group in topology.groups:
        _log.info("%s: %s: %s", group.label, ", ".join(nic.label for nic in group.nics), group.reason)
    for warning in topology.warnings:
        _log.warning("topology: %s", warning)
    return arguments


def _names(nics: Sequence[str]) -> list[str]:
    """One group's NICs."""
    if isinstance(nics, str):
        raise ConfigError("nics must be a list of names, not one string")
    if not isinstance(nics, Iterable):
        raise ConfigError(f"nics={nics!r} must be a list of names")
    names = list(nics)
    for name in names:
        if not isinstance(name, str):
            raise ConfigError(f"nics={names!r} must be names or addresses: {name!r} is of type {type(name).__name__}")
    return names


def _advertised(bound: list[list[bytes]], options: EngineOptions) -> tuple[tuple[bytes, ...], ...]:
    """What peers are told, for each rail of each group."""
    unused = dict(options.advertise)

    def told(ours: bytes) -> bytes:
        for name in names_of(ours):
            if name in options.advertise:
                unused.pop(name, None)
                return replaced(ours, options.advertise[name])
        return ours

    addresses = tuple(tuple(told(ours) for ours in group) for group in bound)
    if unused:
        there = [text_of(ours) or "no IP address" for group in bound for ours in group]
        wrong = f"advertise names {sorted(unused)}, but the NICs have {there}"
        if options.strict:
            raise ConfigError(wrong)
        _log.warning("%s", wrong)  # perhaps a NIC that was left out
    return addresses
