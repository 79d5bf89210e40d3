"""Every option and every bound of fabric_kv in one table.

>>> bounds = Bounds(request_s=30.0)
>>> print(bounds.table())
>>> Engine(provider="tcp", options=EngineOptions(progress="spin"))

No wait in this package is without one of these bounds.
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Mapping
from typing import Any, SupportsIndex

import msgspec

from .errors import ConfigError

__all__ = ["Admission", "Bounds", "EngineOptions", "as_integer", "check_integer", "check_seconds"]

PROGRESS_MODES = ("adaptive", "spin")
PROGRESS_THREADS = ("group", "nic")
DISPATCH_MODES = ("thread", "manual")


def as_integer(name: str, value: SupportsIndex) -> int:
    """Any integer, NumPy's too, as an int; ConfigError if it is none."""
    try:
        return operator.index(value)
    except TypeError:
        raise ConfigError(f"{name}={value!r} is of type {type(value).__name__}: it must be an integer") from None


def check_integer(name: str, value: SupportsIndex, low: int, high: int) -> int:
    """As :func:`as_integer`, of one in [low, high]."""
    integer = as_integer(name, value)
    if not low <= integer <= high:
        raise ConfigError(f"{name}={integer} is out of range: it must lie in [{low}, {high}]")
    return integer


def _is_real(value: Any) -> bool:
    return isinstance(value, numbers.Real)  # NumPy's, too


def check_seconds(name: str, value: Any, low: float, high: float) -> None:
    """Refuse what is no number in [low, high]."""
    if not _is_real(value):
        raise ConfigError(f"{name}={value!r} is of type {type(value).__name__}: it must be a number of seconds")
    if not low <= value <= high:
        raise ConfigError(f"{name}={value!r} is out of range: it must lie in [{low}, {high}]")


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of one engine.

    Attributes
    ----------
    progress : {"adaptive", "spin"}
        ``adaptive`` spins while work is in flight, then yields, then sleeps; ``spin`` keeps a core busy for latency.
    progress_threads : {"group", "nic"}
        ``group``: one thread drives all NICs of a device group. ``nic``: in a group with several, each NIC's queue is
        polled by a thread of its own beside that one, on the same ``cpus``. It pays where the provider moves the data
        in software and there are idle cores for these threads.
    dispatch : {"thread", "manual"}
        Who turns events into callbacks and ended futures: a thread of the engine, or the user by ``Engine.poll()``, for
        example when ``Engine.fileno()`` is readable.
    strict : bool
        True: a NIC that cannot be opened is an error; False: go on with the others and say so in ``describe()``.
    max_transfers : int
        Transfers in flight per device group; one more raises WouldBlockError.
    max_message_bytes : int
        Largest control message accepted by ``send`` and put together on arrival.
    max_inbox_bytes : int
        Bytes of received messages waiting for the dispatcher; beyond it receives are not reposted (back-pressure).
    heartbeat_interval_s, heartbeat_misses : float, int
        A monitored peer that is silent for interval x misses is reported lost.
    connect_s : float
        How long a monitored peer may stay silent before its first sign of life.
    stall_s : float
        A NIC with operations in flight that completes nothing for so long is reported to ``Engine.on_stalled``, and one
        that completes nothing to one peer, or takes nothing for it, to ``Engine.on_held_up``: requests of a messenger
        that wait for it are stalled.
    close_s : float
        How long ``Engine.close()`` waits for the NICs to be closed, after what is in flight had its time. It is reached
        only where the provider does not return from a call. Peers have at most a quarter of it for their goodbyes.
    max_registration_bytes : int
        Larger regions consist of several registrations; for NICs with a limit on one. Where a NIC refuses a size the
        limit is found by trying.
    device_memory : bool
        Open NICs that reach a GPU's memory, so that it can be registered; an error where the provider has none.
    max_peer_registrations : int
        Pairs of a region and a peer for which ``MemoryRegion.remote_for`` registers memory once more; one more raises
        WouldBlockError. Each costs a registration on every NIC of the region's group.
    num_counters : int
        Completion-counter slots per device group; at most 131071 (17 bits, one reserved).
    advertise : dict of str to str
        By what address peers reach a NIC, where that is not its own: behind a NAT, or in a container whose ports are
        mapped. From the NIC's own ``host`` or ``host:port`` to another; IPv6 with a port as ``[host]:port``. Only for
        NICs with IP addresses.
    """

    progress: str = "adaptive"
    progress_threads: str = "group"
    dispatch: str = "thread"
    strict: bool = True
    max_transfers: int = 16384
    max_message_bytes: int = 16 << 20
    max_inbox_bytes: int = 64 << 20
    heartbeat_interval_s: float = 0.2
    heartbeat_misses: int = 5
    connect_s: float = 5.0
    stall_s: float = 5.0
    close_s: float = 10.0
    max_registration_bytes: int = 2**63 - 1
    max_peer_registrations: int = 4096
    device_memory: bool = False
    num_counters: int = 65536
    advertise: Mapping[str, str] = {}

    def __hash__(self) -> int:
        values = (getattr(self, name) for name in self.__struct_fields__ if name != "advertise")
        return hash((*values, *sorted(self.advertise.items())))

    def __post_init__(self) -> None:
        if not isinstance(self.advertise, Mapping):
            raise ConfigError(f"advertise={self.advertise!r} must map strings to strings")
        for name in (*self.advertise, *self.advertise.values()):
            if not isinstance(name, str):
                raise ConfigError(f"advertise={dict(self.advertise)!r} must map strings to strings")
        if self.progress not in PROGRESS_MODES:
            raise ConfigError(f"progress={self.progress!r} is not one of {PROGRESS_MODES}")
        if self.progress_threads not in PROGRESS_THREADS:
            raise ConfigError(f"progress_threads={self.progress_threads!r} is not one of {PROGRESS_THREADS}")
        if self.dispatch not in DISPATCH_MODES:
            raise ConfigError(f"dispatch={self.dispatch!r} is not one of {DISPATCH_MODES}")
        for name in ("strict", "device_memory"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r} must be True or False")
        for name, least, most in (
            ("max_transfers", 1, 1 << 20),
            ("max_message_bytes", 1, 1 << 30),
            ("max_inbox_bytes", 1 << 16, 1 << 34),
            ("heartbeat_misses", 2, 1000),
            ("max_registration_bytes", 4096, 2**63 - 1),
            ("max_peer_registrations", 0, 1 << 20),
            ("num_counters", 1, (1 << 17) - 1),
        ):
            check_integer(name, getattr(self, name), least, most)
        for name, low in (("heartbeat_interval_s", 0.001), ("connect_s", 0.001), ("stall_s", 0.01), ("close_s", 0.01)):
            check_seconds(name, getattr(self, name), low, 3600.0)
        if self.max_message_bytes > self.max_inbox_bytes:
            raise ConfigError(
                f"max_message_bytes={self.max_message_bytes} is above max_inbox_bytes={self.max_inbox_bytes}: a "
                "message of that size would never be whole"
            )


class Admission(msgspec.Struct, frozen=True, kw_only=True):
    """What a prefill messenger takes on; a request beyond it is rejected with the number, before the scheduler sees it.

    Attributes
    ----------
    max_requests, max_requests_per_peer : int
        Open requests: accepted, and neither released nor failed.
    max_bytes : int
        Bytes of cache that the open requests bring to their decode engines in all, written or not, in whole units of
        the plans. A request that is larger by itself is always rejected.
    max_peers : int
        Decode engines that are connected; one more is refused at its handshake.
    """

    max_requests: int = 65536
    max_requests_per_peer: int = 65536
    max_bytes: int = 2**63 - 1
    max_peers: int = 4096

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            # Whatever peers do, what they make us hold stays bounded.
            limit = 2**63 - 1 if name == "max_bytes" else 2**20
            check_integer(name, getattr(self, name), 1, limit)


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """Every time limit of the messenger, in seconds.

    Attributes
    ----------
    handshake_s : float
        From ``connect`` to the peer's answer.
    connect_rails_s : float
        How long the prefill side's answer to a handshake waits for the connections of all its NICs, and at most half of
        ``handshake_s``; beyond it the first requests have to wait for those that are missing.
    accept_s : float
        From ``submit`` to accept or reject.
    request_s : float
        From ``submit`` to the last byte, where the request names no deadline of its own.
    cancel_s : float
        From ``cancel`` to the peer's confirmation that nothing more can land; beyond it the pages are poisoned.
    fence_s : float
        How long a lost peer's requests wait for proof that it can write no more; beyond it the pages are poisoned.
    count_s : float
        Once the prefill side says that all writes of a request have completed: how long decode waits for the next of
        its units; beyond it they are lost, and the pages are poisoned.
    drain_s : float
        How long ``close`` waits for requests in flight.
    """

    handshake_s: float = 5.0
    connect_rails_s: float = 0.5
    accept_s: float = 10.0
    request_s: float = 120.0
    cancel_s: float = 5.0
    fence_s: float = 0.5
    count_s: float = 5.0
    drain_s: float = 5.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not _is_real(value) or not 0 < value <= 86400:
                raise ConfigError(f"{name}={getattr(self, name)!r} s is out of range: it must lie in (0, 86400]")

    def table(self, options: EngineOptions | None = None) -> str:
        """All bounds, one a line, as a messenger logs them when it starts; with those of its engine, if given."""
        bounds = {name: getattr(self, name) for name in self.__struct_fields__}
        if options is not None:
            bounds["heartbeats"] = options.heartbeat_interval_s * options.heartbeat_misses
            bounds |= {name: getattr(options, name) for name in ("connect_s", "stall_s", "close_s")}
        return "\n".join(f"{name:15s} {value:8.2f} s" for name, value in bounds.items())
