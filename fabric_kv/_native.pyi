"""The C++ core, as native/bindings/module.cc exports it; scripts/check compares the two (mypy's stubtest)."""

from collections.abc import Sequence
from typing import Any, Final, TypeAlias, final

from numpy import integer
from numpy.typing import NDArray

NUM_USER_BITS: Final[int]
MAX_SLOT: Final[int]

# (slot, generation, unit_bytes); unit_bytes 0: no counter
_Token: TypeAlias = tuple[int, int, int]
# (src, src_offset, src_stride, dst, dst_offset, dst_stride, nbytes, rows, src_row_stride, dst_row_stride, layer, index
# into the submission's page lists)
_Piece: TypeAlias = tuple[Region, int, int, RemoteRegion, int, int, int, int, int, int, int, int]
# (source, destination): an array is copied, a PageList shared
_PageLists: TypeAlias = list[tuple[PageList | NDArray[integer[Any]], PageList | NDArray[integer[Any]]]]

# (host, pid, start_ticks)
_Process: TypeAlias = tuple[bytes, int, int]
# (epoch, group, nbytes, segment_ends, rails of (base, rkey))
_Keys: TypeAlias = tuple[bytes, int, int, list[int], list[list[tuple[int, int]]]]

@final
class Region:
    @property
    def nbytes(self) -> int: ...

@final
class RemoteRegion:
    def __init__(
        self, epoch: bytes, group: int, nbytes: int, segment_ends: list[int], rails: list[list[tuple[int, int]]]
    ) -> None: ...

@final
class Peer:
    @property
    def epoch(self) -> bytes: ...
    def describe(self) -> dict[str, Any]: ...

@final
class PageList:
    def __init__(self, array: NDArray[integer[Any]]) -> None: ...
    def __len__(self) -> int: ...

@final
class Watch:
    def __init__(self, address: int, is_polled: bool) -> None: ...
    @property
    def word(self) -> int: ...
    def set(self, step: int, layers: int) -> None: ...

@final
class Prepared:
    def __init__(self, peer: Peer, pieces: list[_Piece]) -> None: ...

@final
class Transfer:
    @property
    def id(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

@final
class Engine:
    def address(self) -> tuple[bytes, list[list[bytes]], _Process | None]: ...
    def register_region(self, base: int, nbytes: int, group: int) -> Region: ...
    # parts of (nbytes, dmabuf_fd or -1, dmabuf_offset), one after the other from `base` on
    def register_device(self, base: int, device: int, parts: list[tuple[int, int, int]], group: int) -> Region: ...
    def register_again(self, region: Region) -> Region: ...
    def deregister(self, region: Region) -> None: ...
    def describe_region(self, region: Region) -> _Keys: ...
    def share_region(self, region: Region, peer: Peer, device: int, parts: list[tuple[int, int, int]]) -> _Keys: ...
    def add_peer(self, epoch: bytes, groups: list[list[bytes]], process: _Process | None, monitor: bool) -> Peer: ...
    def remove_peer(self, peer: Peer) -> None: ...
    # (proven, means, why)
    def fence(self, peer: Peer, timeout_s: float) -> tuple[bool, str, str]: ...
    def fence_means(self) -> str: ...
    # deadline_s 0: none
    def submit_pages(
        self,
        read: bool,
        submissions: Sequence[tuple[Peer, list[_Piece], _PageLists, _Token, Watch | None, int]],
        deadline_s: float,
    ) -> list[Transfer]: ...
    def submit_write(
        self,
        peer: Peer,
        pieces: list[_Piece],
        lists: _PageLists,
        token: _Token,
        deadline_s: float,
        watch: Watch | None,
        step: int,
    ) -> Transfer: ...
    def submit_prepared(
        self,
        prepared: Prepared,
        lists: _PageLists,
        token: _Token,
        deadline_s: float,
        watch: Watch | None,
        step: int,
    ) -> Transfer: ...
    def set_watch(self, watch: Watch, step: int, layers: int) -> None: ...
    # (peer, any region of it, token, units, user value); without a token the user value is what arrives
    def submit_signals(
        self, signals: list[tuple[Peer, RemoteRegion, _Token, int, int]], group: int
    ) -> list[Transfer]: ...
    def submit_flush(self, peer: Peer, dst: RemoteRegion, group: int) -> Transfer: ...
    def submit_connect(self, peer: Peer, dst: RemoteRegion, group: int) -> Transfer: ...
    def submit_message(self, peer: Peer, payload: bytes) -> Transfer: ...
    def cancel(self, transfer: Transfer) -> None: ...
    def allocate_counter(self, group: int, unit_bytes: int) -> tuple[int, int]: ...
    def arm_counter(self, group: int, token: _Token, units: int) -> None: ...
    def counter_received(self, group: int, token: _Token) -> int: ...
    def release_counter(self, group: int, token: _Token, quiescent: bool) -> None: ...
    # Events as in native/engine/event.h: the kind first, then what that kind has.
    def poll(self, timeout_s: float) -> list[tuple[Any, ...]]: ...
    def ring(self) -> None: ...
    def fileno(self) -> int: ...
    def describe(self) -> list[dict[str, Any]]: ...
    def close(self, drain_s: float) -> None: ...

def open_engine(
    *,
    provider: str,
    groups: list[tuple[list[str], list[int]]],
    spin: bool,
    nic_threads: bool,
    strict: bool,
    max_transfers: int,
    max_inbox_bytes: int,
    num_counters: int,
    heartbeat_interval_s: float,
    heartbeat_misses: int,
    connect_s: float,
    stall_s: float,
    close_s: float,
    max_registration_bytes: int,
    max_peer_registrations: int,
    device_memory: bool,
) -> tuple[Engine, list[str]]: ...

# (path, version)
def library() -> tuple[str, str]: ...

# What libfabric offers, in its order: provider, domain, fabric, source (address), rdma (whether it is an RDMA NIC), and
# of the device beneath, as far as the provider tells: device (name), pci, link_bps, port ("up", "down", "unknown").
def list_offers(provider: str) -> list[dict[str, Any]]: ...
